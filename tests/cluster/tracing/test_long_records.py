"""Long records: they come through shared memory, and hold what short ones do."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism.mesh import Mesh
from vcluster.code import DeviceFailedError, UndeliveredMessageError
from vcluster.memory.layout import TOP
from vcluster.runs import VirtualCluster
from vcluster.tracing import columns as records
from vcluster.tracing.recorder import ENTRIES

TIMES = records.LONG // ENTRIES // 10
"""With more than ten events each time."""


def long(device, times):
    """Collectives, asynchronous ones, messages, compute and memory, ``times`` of each."""
    for time in range(times):
        assert device.all_reduce(float(time)) == 2 * time
        device.all_reduce(float(time), async_op=True).wait()
        device.sendrecv(np.full(3, time), 1 - device.rank, 1 - device.rank)
        with device.compute("work", flops=10, seconds=0.5):
            pass
        device.hold("activations", 8)
    return times


@pytest.mark.slow
@pytest.mark.slow_for("thread")
@pytest.mark.parametrize(("backend", "transport"), [("process", "shared_memory"), ("thread", "shared_memory"),
                                                    pytest.param("process", "queue", marks=pytest.mark.slow)])
def test_a_long_record_tells_what_a_short_one_does(cluster_of, backend, transport):
    cluster = cluster_of(Mesh(devices=2), backend, transport)
    for times in (3, TIMES):
        trace = cluster.run(long, times).trace
        assert trace.count("all_reduce") == 2 * times and trace.count("work") == 2 * times
        assert trace.flops() == 20 * times and trace.peak_bytes(1) == 8 * times
        assert trace.bytes_received() == 2 * times * (8 + 8 + 24) and trace.count("send", rank=0) == times
        for rank in range(2):
            mine = trace.filter(rank=rank)
            assert [event.serial for event in mine] == list(range(len(mine)))
            sent = mine.filter(kind="send", name="send")
            assert [event.sequence for event in sent] == list(range(times))
            assert all("test_long_records.py:" in event.location for event in sent)
        assert trace.makespan_seconds >= times * 0.5


def test_a_long_record_stays_when_the_cluster_is_closed():
    with VirtualCluster(2) as cluster:
        run = cluster.run(long, TIMES)
    assert run.trace.count("all_reduce") == 2 * TIMES
    assert run.trace.bytes_received() == 2 * TIMES * (8 + 8 + 24)
    assert run.trace.makespan_seconds >= TIMES * 0.5


def local(device, times):
    for _ in range(times):
        device.hold("activations", 8)


def test_the_memory_of_long_records_is_used_again(cluster_of):
    cluster = cluster_of(Mesh(devices=2), "process", "shared_memory")

    def top():
        layout = cluster._body.layout
        return sum(cluster._body.arena.words(layout.word(rank, TOP))[0] for rank in range(2))

    events, rounds = records.LONG // ENTRIES, 8
    cluster.run(local, events)
    before = top()
    for _ in range(rounds):
        cluster.run(local, events)
    # A record takes at least four columns of eight bytes.  Whether the last ones are still held depends on the moment.
    assert top() - before < rounds * 2 * events * 4 * 8 // 2


def leaves_a_message(device, times):
    long(device, times)
    if device.rank == 0:
        device.send(np.zeros(2), 1, tag=9)


def fails(device, times):
    long(device, times)
    if device.rank == 0:
        raise ValueError("on purpose")


@pytest.mark.slow
def test_errors_after_a_long_record_are_told_as_ever(cluster_of):
    cluster = cluster_of(Mesh(devices=2), "process", "shared_memory")
    with pytest.raises(UndeliveredMessageError, match=r"rank 0 sent a message to rank 1 \(tag 9\) at .*test_long_rec"):
        cluster.run(leaves_a_message, TIMES)
    with pytest.raises(DeviceFailedError, match="on purpose"):
        cluster.run(fails, TIMES)
    assert cluster.run(long, 2).trace.count("all_reduce") == 4
