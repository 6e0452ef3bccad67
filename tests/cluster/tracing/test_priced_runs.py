"""Runs on described hardware: the same to the last bit everywhere, and what `trace.on` says of a record."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from runtimes import KINDS, RUNTIMES

from parallelism.cost import Costs
from parallelism.hardware import Hardware, HostLink, Link
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.sharding import TensorSharding
from parallelism.trace import UndeclaredComputeWarning
from pipeline_parallelism import MLP
from vcluster import VirtualCluster

ON = {"hardware": "dgx-h100", "compute": "modelled"}


def virtual(trace):
    """What must not depend on the machine."""
    return [(e.rank, e.kind, e.name, e.start_seconds, e.duration_seconds, e.bytes_received, e.flops, e.part,
             e.priced_algorithm)
            for e in trace if e.parent is None]


def quietly(run):
    """The trace of a run, whatever of it is undeclared: that is more on a machine that is busy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeclaredComputeWarning)
        return run.trace


def kernel(device):
    x = np.ones((6, 4))
    work = device.all_reduce(np.ones(1000), "dp", async_op=True)
    for i in range(3):
        y = device.matmul(x, x.T)
        device.send(y, (device.rank + 1) % device.size, tag=i)
        with device.compute("block", flops=1e6, nbytes=1e5, stage=i):
            z = device.all_gather(y, "tp")
            device.recv((device.rank - 1) % device.size, tag=i)
            z.sum()
    x = device.permute(x, [(0, 1), (1, 0)], "tp")
    x = device.reshard(x, TensorSharding("dp", None), TensorSharding(None, "dp"))
    with device.compute("given", seconds=1.0):
        device.barrier()
    return work.wait(), x


@pytest.fixture(scope="module")
def modelled():
    with VirtualCluster(dp=2, tp=2, backend="thread", **ON) as cluster:
        return quietly(cluster.run(kernel))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_modelled_runs_are_the_same_to_the_last_bit(cluster_of, modelled, kind):
    cluster = cluster_of(Mesh(dp=2, tp=2), *kind, **ON)
    assert virtual(modelled) == virtual(quietly(cluster.run(kernel))) == virtual(quietly(cluster.run(kernel)))
    assert modelled.makespan_seconds > 1 and modelled.hardware == "dgx-h100" and modelled.compute == "modelled"


def crowd(device):
    """Messages between all, each of another size, and collectives over both axes beside them."""
    works = [device.all_reduce(np.ones(3000 + 500 * i), axis, async_op=True) for i, axis in enumerate(("dp", "tp"))]
    for step in range(3):
        others = [rank for rank in range(device.size) if rank != device.rank]
        for i, rank in enumerate(others):
            with device.compute("a little", seconds=1e-6 * ((7 * i + 3 * device.rank) % 5)):
                pass
            device.isend(np.ones(100 * (1 + (31 * device.rank + 17 * rank + step) % 23)), rank, tag=step)
        works.append(device.all_gather(np.ones((5, 100 + step)), "tp", async_op=True))
        for rank in others:
            device.recv(rank, tag=step)
    return [work.wait() for work in works]


def joined_by_one_port():
    """Nodes of three devices, each with one port."""
    links = [Link("inside", 3, 1e-6, 50e9), Link("between", 2, 3e-6, 10e9, ports=1)]
    return Hardware("nodes", {"float64": 1e12}, 1e9, 1e12, links, HostLink(1e-6, 1e9))


@pytest.mark.slow
def test_collectives_and_messages_share_links_in_a_run_as_in_its_record_priced_again(cluster_of):
    cluster = cluster_of(Mesh(dp=2, tp=3), "thread", hardware=joined_by_one_port(), compute="modelled")
    shared = quietly(cluster.run(crowd))
    alone = shared.on(joined_by_one_port(), link_sharing=False)
    assert alone.makespan_seconds < shared.makespan_seconds
    assert virtual(alone.on(joined_by_one_port(), link_sharing=True)) == virtual(shared)
    assert {e.algorithm for e in shared.filter(kind="collective")} == {"direct"}
    costs = Costs(joined_by_one_port())
    cheapest = {axis: costs.collective("all_reduce", nbytes, shared.filter(axes=axis)[0].group).algorithm
                for axis, nbytes in (("dp", 24000), ("tp", 28000))}
    for axis, name in cheapest.items():
        assert {e.priced_algorithm for e in shared.filter(name="all_reduce", axes=axis)} == {name}
        assert f"all_reduce  {name}" in shared.summary()
    assert "direct" not in shared.summary() and "direct" in shared.on("host").summary()
    there = cluster_of(Mesh(dp=2, tp=3), hardware=joined_by_one_port(), compute="modelled")
    assert virtual(quietly(there.run(crowd))) == virtual(shared)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modelled_runs_on_crowded_cores_are_the_same_to_the_last_bit(cluster_of, hogs):
    found = []
    for kind in RUNTIMES:
        cluster = cluster_of(
            Mesh(dp=2, tp=3), *kind, hardware=joined_by_one_port(), compute="modelled", deadline_seconds=300)
        for program in (crowd, crowd, crowd, crowd, crowd, mixed):
            found.append((program.__name__, virtual(quietly(cluster.run(program)))))
    for name in ("crowd", "mixed"):
        first, *others = [events for program, events in found if program == name]
        assert len(first) > 30 and all(other == first for other in others)


def mixed(device):
    x = device.reshard(np.ones((2, 6)), TensorSharding("dp", None), TensorSharding(None, "dp"))
    device.send(device.matmul(x, x.T), (device.rank + 1) % device.size)
    for algorithm in ("ring", "tree", None):
        x = device.all_reduce(np.ones(700), algorithm=algorithm)
    device.recv((device.rank - 1) % device.size)
    device.barrier()
    return x


@pytest.mark.slow_for("queue")
@pytest.mark.parametrize("kind", RUNTIMES[:2], ids="-".join)
def test_a_run_recorded_on_the_host_is_priced_as_one_made_there(cluster_of, modelled, kind):
    trace = cluster_of(Mesh(dp=2, tp=2), *kind).run(kernel).trace
    assert (trace.hardware, trace.compute) == (None, "measured")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeclaredComputeWarning)
        assert virtual(trace.on("dgx-h100", compute="modelled")) == virtual(modelled)
        there = trace.on("pcie-v100", compute="modelled")
    assert virtual(modelled.on("pcie-v100")) == virtual(there) != virtual(modelled)


def test_a_block_has_its_price_once_where_it_begins(modelled):
    blocks = modelled.filter(name="block", rank=0)
    assert len(blocks) == 3
    price = Costs(Hardware.preset("dgx-h100")).compute_seconds(1e6, 1e5)
    assert [e.duration_seconds for e in blocks] == pytest.approx([price] * 3)
    assert [e.duration_seconds for e in modelled.filter(name="given")] == [pytest.approx(1.0)] * 4


def test_measured_compute_takes_as_long_as_here_and_messages_what_they_take_there(cluster_of):
    cluster = cluster_of(Mesh(devices=2), "thread", hardware="ethernet-cpu")

    def program(device):
        device.send(np.ones(1000), 1 - device.rank)
        device.recv(1 - device.rank)

    trace = cluster.run(program).trace
    assert all(e.duration_seconds == e.cpu_seconds for e in trace.filter(kind="compute"))
    assert trace.makespan_seconds >= Costs(Hardware.preset("ethernet-cpu")).message_seconds(8000, 0, 1)


def test_what_was_not_declared_is_told(cluster_of):
    def program(device):
        x = np.ones((200, 200))
        for _ in range(20):
            x = x @ x.T / 200

    run = cluster_of(Mesh(devices=2), "thread", **ON).run(program)
    with pytest.warns(UndeclaredComputeWarning, match=r"s of compute have no price in this modelled trace"):
        trace = run.trace
    assert trace.undeclared_seconds > 1e-3 and trace.makespan_seconds == 0


def test_a_priced_dtype_makes_a_pipeline_quicker(cluster_of):
    mlp = MLP((64, 128, 96, 10), pipeline=Pipeline(stages=2, microbatches=4), seed=0)
    x, targets = np.ones((48, 64)), np.eye(10)[np.arange(48) % 10]
    whole = quietly(cluster_of(Mesh(pp=2), "thread", **ON).run(mlp.train_step(), x, targets))
    half = whole.on("dgx-h100", priced_dtype="bfloat16")
    assert half.makespan_seconds < whole.makespan_seconds and half.priced_dtype == "bfloat16"
    assert half.flops() == whole.flops() > 0


def test_a_pipeline_is_priced_in_the_dtype_that_it_computes_in(cluster_of):
    def step(dtype):
        mlp = MLP((64, 128, 96, 10), pipeline=Pipeline(stages=2, microbatches=3), seed=0, dtype=dtype)
        x, targets = np.ones((48, 64), dtype), np.eye(10, dtype=dtype)[np.arange(48) % 10]
        return quietly(cluster_of(Mesh(pp=2), "thread").run(mlp.train_step(), x, targets))

    quick = Hardware(
        "quick", {"float64": 1e9, "float32": 4e9}, 1e9, 1e30, [Link("link", 2, 0.0, 1e30)], HostLink(0.0, 1e30))
    whole, half = step("float64"), step("float32")
    assert {e.dtype for e in half.filter(kind="compute") if e.stage is not None} == {"float32"}
    assert half.flops() == whole.flops() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeclaredComputeWarning)
        seconds = [trace.on(quick, compute="modelled").makespan_seconds for trace in (whole, half)]
    assert seconds[0] == pytest.approx(4 * seconds[1], rel=1e-6)


def test_the_options_are_checked_before_anything_starts(tmp_path):
    path = tmp_path / "ours.toml"
    Hardware.preset("laptop").save(tmp_path / "ours.json")
    path.write_text("name = 3")
    for options, words in (
        ({"hardware": "dgx-h10"}, "no hardware 'dgx-h10'; did you mean 'dgx-h100'"),
        ({"hardware": str(path)}, "name"),
        ({"hardware": "laptop"}, "laptop has places for 4 devices, not for 5"),
        ({"compute": "guessed"}, "compute must be 'measured' or 'modelled', got 'guessed'"),
        ({"hardware": "tpu-v4", "priced_dtype": "float64"}, "no rate for float64"),
        ({"priced_dtype": "float32"}, "hardware='host' has None, not 'float32'"),
    ):
        with pytest.raises(ValueError, match=words):
            VirtualCluster(5, backend="thread", **options)
    with VirtualCluster(4, backend="thread", hardware=tmp_path / "ours.json") as cluster:
        assert cluster.run(lambda device: device.barrier()).trace.hardware == "laptop"
