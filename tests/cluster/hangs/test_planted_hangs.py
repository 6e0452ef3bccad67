"""Runs with planted mistakes, dumped and explained without the program: as the error of the live run says it."""

import json
import os
import signal

import numpy as np
import pytest
from planted_hangs import KINDS, MISMATCHES, SHAPES, planted

from vcluster import (
    ClusterError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    Mesh,
    UndeliveredMessageError,
    VirtualCluster,
)
from vcluster.__main__ import main
from vcluster.hangs import explain
from vcluster.runs import run_loop


def explained(cluster, kind, error, program, *args, tmp_path):
    """The error of the run and what its dump tells."""
    with pytest.raises(error) as caught:
        cluster.run(program, *args)
    path = tmp_path / "failed.json"
    caught.value.trace.save(path)
    found = explain(path)
    assert found.kind == kind
    assert found.cause == str(caught.value).splitlines()[0]
    assert found.ranks == caught.value.ranks
    return caught.value, found


@pytest.mark.sampled(90)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_dump_of_a_planted_mistake_is_explained_as_its_error(cluster_of, shape, kind, tmp_path):
    mesh, axes = SHAPES[shape]
    what = "mismatch" if kind in MISMATCHES else "deadlock"
    error, found = explained(
        cluster_of(mesh), what, (DeadlockError, CollectiveMismatchError), planted, kind, axes, tmp_path=tmp_path)
    assert found.locations == error.locations
    assert all(place.startswith(planted.__code__.co_filename) for place in found.locations)
    if isinstance(error, DeadlockError):  # of a mismatch the dump knows more lines than those that raised
        assert str(found).startswith(str(error))


@pytest.mark.sampled(50)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_worse_dumps_are_explained_right_or_it_is_said_that_they_cannot_be(cluster_of, shape, kind, tmp_path):
    """A rank without a dump, ring buffers that hold the last calls only, clocks that differ by seconds."""
    mesh, axes = SHAPES[shape]
    with pytest.raises(ClusterError) as caught:
        cluster_of(mesh).run(planted, kind, axes)
    right, dumps = str(caught.value).splitlines()[0], caught.value.trace.dumps

    def told(dumps):
        path = tmp_path / "worse.json"
        path.write_text(json.dumps({"version": "2.10", "dumps": dumps}))
        return explain(path)

    for lost in range(mesh.size):
        found = told([dump for dump in dumps if dump["rank"] != lost])
        assert found.records.missing == (lost,)
        assert f"no dump of rank {lost} is among these" in str(found)
        same_difference = found.kind == "mismatch" and found.cause.endswith(right[right.index(" differ "):])
        assert (found.cause == right or f"rank {lost} left no dump" in found.cause or same_difference
                or f"what rank {lost} did cannot be told" in found.cause or found.kind == "deadlock")
    for last in (1, 2, 4):
        found = told([dump | {"entries": dump["entries"][-last:]} for dump in dumps])
        assert found.cause == right or " cannot be told, because the ring buffer of " in found.cause
    skewed = []
    for dump in dumps:
        times = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
        entries = [entry | {name: entry[name] + 3_000_000_000 * dump["rank"] for name in times if name in entry}
                   for entry in dump["entries"]]
        skewed.append(dump | {"entries": entries})
    assert told(skewed).cause == right


def test_the_decision_is_told(cluster_of, tmp_path):
    def kernel(device):
        device.all_reduce(np.ones(3))
        if device.rank == 1:
            device.barrier()
            device.recv(0)
        device.barrier()

    line = kernel.__code__.co_firstlineno
    _, found = explained(cluster_of(Mesh(d=3)), "deadlock", DeadlockError, kernel, tmp_path=tmp_path)
    assert found.decision.last_alike == (
        f"all_reduce(float64, 24 bytes) at {__file__}:{line + 1}, number 1 of group all ranks")
    assert found.decision.calls == {
        0: f"called barrier() at {__file__}:{line + 5}", 1: f"called barrier() at {__file__}:{line + 3}"}


def test_an_asynchronous_call_that_differs_is_listed_once(cluster_of, tmp_path):
    def kernel(device):
        if device.rank == 1:
            device.all_reduce(np.ones(4), async_op=True).wait()
        device.all_reduce(np.ones(3))

    error, found = explained(
        cluster_of(Mesh(d=3), "thread"), "mismatch", CollectiveMismatchError, kernel, tmp_path=tmp_path)
    assert found.locations == error.locations
    assert str(found).startswith(str(error))
    assert [len(dump["entries"]) for dump in error.trace.dumps] == [1, 1, 1]


def test_a_message_that_nobody_received(cluster_of, tmp_path):
    def kernel(device):
        if device.rank == 0:
            device.send(np.ones(3), 1, tag=5)
            device.send(np.ones(3), 1, tag=5)

    error, found = explained(
        cluster_of(Mesh(d=2)), "undelivered", UndeliveredMessageError, kernel, tmp_path=tmp_path)
    assert found.locations == error.locations


def test_a_rank_that_raises(cluster_of, tmp_path):
    def kernel(device):
        if device.rank == 2:
            raise ValueError("planted")
        device.barrier()

    error, _ = explained(cluster_of(Mesh(d=3)), "failure", DeviceFailedError, kernel, tmp_path=tmp_path)
    assert error.trace.dumps[2]["raised"] == "ValueError"


def test_a_rank_that_dies_leaves_no_dump(tmp_path):
    def kernel(device):
        device.barrier()
        if device.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        device.all_reduce(np.ones(3))

    with VirtualCluster(3) as cluster:
        with pytest.raises(DeviceFailedError) as caught:
            cluster.run(kernel)
        caught.value.trace.save(tmp_path / "failed.json")
    found = explain(tmp_path / "failed.json")
    assert found.records.missing == (1,)
    assert "no dump of rank 1 is among these" in str(found)


def test_a_rank_that_waits_for_the_host(cluster_of, tmp_path, monkeypatch):
    monkeypatch.setattr(run_loop, "others_run", lambda: False)  # a worker of pytest-xdist has a thread of its own

    def kernel(device):
        return device.channel(-1).recv() if device.rank == 0 else None

    error, found = explained(cluster_of(Mesh(d=2)), "deadlock", DeadlockError, kernel, tmp_path=tmp_path)
    assert str(found).startswith(str(error))


def test_a_thread_of_a_cluster_leaves_the_same_record(cluster_of, tmp_path):
    with VirtualCluster(Mesh(d=3), backend="thread") as cluster:
        error, found = explained(cluster, "deadlock", DeadlockError, planted, "skips", None, tmp_path=tmp_path)
    assert str(found).startswith(str(error))
    assert [event.name for event in error.trace.events if event.rank == 0 and event.kind == "collective"][:3] == [
        "all_reduce"] * 3


def test_the_dump_has_the_fields_of_pytorch_and_the_command_reads_it(cluster_of, tmp_path, capsys):
    error, _ = explained(cluster_of(Mesh(d=3)), "deadlock", DeadlockError, planted, "receives_first", None, tmp_path=tmp_path)
    path = tmp_path / "failed.json"
    assert main(["hang", str(path)]) == 0
    assert capsys.readouterr().out.startswith(str(error))
    dump = json.loads(path.read_text())["dumps"][0]
    assert {"version", "rank", "pg_config", "entries"} <= dump.keys()
    assert {"record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "state", "is_p2p",
            "frames"} <= dump["entries"][0].keys()
    assert [entry["profiling_name"] for entry in dump["entries"]] == [
        *["vcluster:all_reduce"] * 3, "vcluster:send 0->1", "vcluster:recv 0<-2", "vcluster:recv 0<-1"]


def test_an_error_of_no_run_has_no_record():
    assert ClusterError("of no run").trace is None
