"""Stages on meshes of their own, on real devices: they train as the step alone, and a simulation says what they do."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from overlapped import bits
from trained_runs import ON, B, assert_trains, in_turn, trained_on
from transformed import MODELS, model_step

from parallelism import Mesh
from parallelism.operation.part import DevicePart, part_of
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, AdamW, Overlap, Pipeline, Step, Strategy

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "60"))
CASES = [
    ("mlp", 8, "dp", Pipeline(microbatches=2, meshes=[Mesh(dp=2), Mesh(dp=3)]), SGD(0.1), None),
    ("gpt", 7, "dp tp sp zero=1", Pipeline(microbatches=2, meshes=[Mesh(dp=2, tp=2), Mesh(dp=3)]), Adam(0.01), 0.3),
    ("gpt", 7, "dp tp sp zero=1 overlap=100B", Pipeline(microbatches=2, meshes=[Mesh(dp=2, tp=2), Mesh(dp=3)]),
     Adam(0.01), 0.3),
    ("recurrent", 6, "dp tp zero=2", Pipeline(microbatches=2, meshes=[Mesh(tp=2), Mesh(dp=3, tp=2)]), SGD(0.1), None),
    ("mlp", 8, "dp tp", Pipeline(microbatches=2, meshes=[Mesh(dp=2, tp=2), Mesh(tp=3)]), SGD(0.1, 0.5), 0.3),
    ("mlp", 9, "dp tp zero=3 overlap", Pipeline(microbatches=2, meshes=[Mesh(dp=3, tp=2), Mesh(dp=2)]), SGD(0.1), None),
    ("gpt", 7, "dp zero=3 tp", Pipeline(microbatches=2, meshes=[Mesh(dp=2, tp=2), Mesh(dp=2)]), AdamW(0.01), None),
    ("llama", 6, "dp tp recompute=block.*",
     Pipeline(microbatches=3, schedule="gpipe", meshes=[Mesh(dp=2, tp=2), Mesh(dp=2), Mesh(one=1)]), Adam(0.01), 0.2),
    ("residual", 9, "dp",
     Pipeline(microbatches=2, schedule="zero_bubble_h1", meshes=[Mesh(dp=3), Mesh(dp=1), Mesh(dp=2)]), SGD(0.1), None),
    ("recurrent", 6, "tp dp",
     Pipeline(microbatches=2, schedule="interleaved_1f1b", chunks=2, meshes=[Mesh(tp=2), Mesh(dp=3)]), SGD(0.1), 0.3),
    ("dropout", 5, "dp:left tp", Pipeline(microbatches=1, meshes=[Mesh(left=2, tp=2), Mesh(tp=2)]), SGD(0.1), None),
]


def check(cluster_of, model, rows, text, pipeline, rule, clip, backend="thread", steps=2):
    """The steps and the trace of a run; they are those of the step alone, and of a simulation."""
    alone = model_step(model, rows, rule, clip=clip)
    strategy = Strategy(Strategy.parse(text), pipeline)
    step = strategy(model_step(model, B, rule, clip=clip))
    mesh = Mesh(devices=sum(each.size for each in pipeline.meshes))
    assert Strategy.parse(str(strategy)) == strategy and Step.parse(str(step)) == step
    assert Strategy.parse_on_mesh(strategy.text_on(mesh)) == (strategy, mesh)
    return step, assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows, steps)


@pytest.mark.slow_for("zero=3", "dropout", "mlp-dp")     # of "mlp-dp" there is another below
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "rows", "text", "pipeline", "rule", "clip", "backend"), in_turn(CASES),
    ids=[f"{m}-{t}" for m, _, t, *_ in CASES])
def test_stages_on_other_meshes_train_and_are_simulated_as_they_run(
        cluster_of, model, rows, text, pipeline, rule, clip, backend):
    check(cluster_of, model, rows, text, pipeline, rule, clip, backend)


@st.composite
def pipelines(draw):
    """A pipeline on at most 8 devices."""
    sizes, left = [], 8
    for _ in range(draw(st.integers(2, 3))):
        dp, tp = draw(st.sampled_from([(dp, tp) for dp in (1, 2, 3) for tp in (1, 2) if dp * tp <= max(1, left - 2)]))
        sizes.append((dp, tp))
        left -= dp * tp
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble_h1"]))
    return Pipeline("pp", draw(st.integers(1, 3)), schedule, meshes=[Mesh(dp=dp, tp=tp) for dp, tp in sizes])


TEXTS = ["dp tp", "dp tp zero=1", "dp tp zero=2", "tp dp zero=3", "dp tp zero=1 overlap=100B", "dp tp zero=3 overlap",
         "dp fused"]
RANDOM = (st.sampled_from([*MODELS]), st.integers(3, 8), st.sampled_from(TEXTS),
          pipelines(), st.sampled_from([SGD(0.1, 0.5), Adam(0.01)]), st.sampled_from([None, 0.3]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*RANDOM)
def test_many_meshes_of_stages_train_as_the_step_alone(cluster_of, model, rows, text, pipeline, rule, clip):
    check(cluster_of, model, rows, text, pipeline, rule, clip)


@pytest.mark.slow
def test_overlap_on_other_meshes_changes_no_bit_and_no_byte(cluster_of):
    meshes, found = [Mesh(dp=2), Mesh(dp=1)], []
    step = Strategy(Strategy.parse("dp zero=1"), Pipeline(microbatches=2, meshes=meshes))(
        model_step("mlp", B, SGD(0.1, 0.5), clip=0.3))
    for overlap in (Strategy(), Overlap(100)):
        same = replace(step, function=overlap(step.function))
        cluster = cluster_of(Mesh(devices=3), "thread", compute="modelled", **ON)
        found.append(trained_on(cluster, same, model_step("mlp", 5, SGD(0.1, 0.5), clip=0.3), steps=1))
    (plain, before), (overlapped, after) = found
    assert bits(plain) == bits(overlapped)
    received = [Counter() for _ in found]
    for trace, counts in zip((before, after), received, strict=True):
        for event in trace:
            if event.kind == "collective":
                counts[event.name, event.group] += event.bytes_received
    assert received[0] == received[1]
    assert {event.name for event in after if event.kind == "wait"} >= {"all_reduce", "all_gather"}


@pytest.mark.slow
def test_every_device_gets_its_block_of_what_is_sent_once(cluster_of):
    # 6 rows of 8 numbers in 2 microbatches go from 2 devices to 3, split by rows: each number crosses once each way.
    pipeline = Pipeline(microbatches=2, begin=["layer.1"], meshes=[Mesh(dp=2), Mesh(dp=3)])
    step, trace = check(cluster_of, "mlp", 6, "dp", pipeline, SGD(0.1), None, steps=1)
    sent = Counter()
    for event in trace:
        if event.kind == "send":
            sent[event.rank < 2] += event.bytes_sent
            assert event.peer < 2 or event.rank < 2
    assert sent == {True: 6 * 8 * 8, False: 6 * 8 * 8}
    assert step.pipeline.meshes == (Mesh(dp=2), Mesh(dp=3)) and step.replicas == ()
    # To a mesh whose devices all need the rows, each row goes to every one, and its gradient comes from one.
    pipeline = Pipeline(microbatches=1, begin=["layer.2"], meshes=[Mesh(dp=2), Mesh(tp=2)])
    _, trace = check(cluster_of, "mlp", 4, "dp tp", pipeline, SGD(0.1), None, steps=1)
    assert Counter(event.rank for event in trace if event.kind == "send") == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_device_on_a_mesh_of_its_own(cluster_of):
    mesh = Mesh(x=2, y=2)

    def kernel(device):
        if device.rank == 0:
            return None
        part = part_of(device, mesh, [4, 1, 2, 3])
        assert isinstance(part, DevicePart) and part.mesh == mesh and part.size == 4
        assert part_of(device, Mesh(z=1), [device.rank]).position() == 0
        x = np.arange(4.0) + 10 * device.rank
        return (part.rank, dict(part.index), part.group("y"), part.position("x"),
                part.all_reduce(x, "y").tolist(), part.all_gather(x[:1], ("y", "x")).tolist(),
                part.reduce_scatter(x, ("x", "y")).tolist(), part.all_to_all(x, "x").tolist(),
                part.permute(x[:1], [(0, 1)], "x").tolist(), device.rank)

    found = cluster_of(Mesh(devices=5), "thread").run(kernel)
    assert found.outputs[0] is None
    assert found.outputs[4] == (
        0, {"x": 0, "y": 0}, (0, 1), 0, [50, 52, 54, 56], [40, 20, 10, 30], [100], [40, 41, 20, 21], [0], 4)
    assert found.outputs[2][:4] == (2, {"x": 1, "y": 0}, (2, 3), 1) and found.outputs[2][8] == [40]

    def uneven(device):
        return part_of(device, mesh, range(4)).reduce_scatter(np.ones(6), ("x", "y"))

    with pytest.raises(Exception, match=r"over x and y of Mesh.x=2, y=2., which is a part of the cluster, needs a dim"):
        cluster_of(Mesh(devices=4), "thread").run(uneven)


STEP = model_step("mlp", B, SGD(0.1))


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Pipeline(meshes=[Mesh(pp=2)]), r"each stage, without the axis 'pp' of the pipeline; got Mesh\(pp=2\)"),
    (lambda: Pipeline(meshes=[4, 4]), "the mesh inside each stage, without the axis 'pp' of the pipeline; got 4"),
    (lambda: simulate(Pipeline(meshes=[Mesh(dp=2), Mesh(dp=3)])(STEP), mesh=Mesh(dp=4), batch=8, **ON),
     r"pp 1f1b:1,meshes=dp=2\|dp=3 needs 5 devices, 2 \+ 3; Mesh\(dp=4\) has 4"),
    (lambda: simulate(Pipeline(begin=["layer.1", "layer.2"], meshes=[Mesh(dp=2), Mesh(dp=3)])(STEP),
                      mesh=Mesh(dp=5), batch=8, **ON),
     "3 stages begin at the start and at layer.1, layer.2; its meshes have place for 2"),
    (lambda: Strategy.parse("pp 1f1b:2,meshes=dp|tp=2"), "such as dp=2.tp=3; got 'dp'"),
])
def test_meshes_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
