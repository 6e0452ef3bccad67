"""The mistakes that cost people days: each ends at once, with the ranks, the operation and the line."""

import os
import re
import signal
import threading

import numpy as np
import psutil
import pytest

from vcluster import (
    HOST,
    ClusterError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    Mesh,
    UnusedResultWarning,
    VirtualCluster,
)
from vcluster.runs import run_loop

LINE = f"{__file__}:"


SIZES = [(2, "process"), (4, "process"), (8, "process"), (4, "thread")]
BY_DAY = [SIZES[0], SIZES[-1]]


@pytest.fixture(scope="module", params=[
    pytest.param(one, id=f"{one[0]}-{one[1]}", marks=[pytest.mark.slow] * (one not in BY_DAY)) for one in SIZES])
def cluster(request):
    size, backend = request.param
    with VirtualCluster(size, backend=backend) as cluster:
        yield cluster
        assert cluster.run(lambda device: device.all_reduce(1)).outputs == [size] * size  # it has survived all of them


def fails(cluster, error, kernel, *args, match):
    """The run ends in ``error``, and the next one works."""
    with pytest.raises(error, match=match) as caught:
        cluster.run(kernel, *args)
    assert cluster.run(lambda device: device.rank).outputs == list(range(cluster.size))
    return caught.value


MISMATCHES = {
    "shape": (lambda d, odd: d.all_reduce(np.ones(3 if odd else 4)), r"float64\[3\].*", "all_reduce", "shape"),
    "dtype": (lambda d, odd: d.all_reduce(np.ones(4, "i4" if odd else "f4")), r"int32\[4\]", "all_reduce", "dtype"),
    "op": (lambda d, odd: d.all_reduce(np.ones(4), op="max" if odd else "sum"), "op='max'", "all_reduce", "op"),
    "kind": (lambda d, odd: d.broadcast(np.ones(4)) if odd else d.all_reduce(np.ones(4)), "broadcast", None, "what"),
    "barrier": (lambda d, odd: d.barrier() if odd else d.all_reduce(np.ones(4)), "barrier", None, "what"),
    "root": (lambda d, odd: d.reduce(np.ones(4), root=int(odd)), "root=1", "reduce", "root"),
    "dim": (lambda d, odd: d.all_gather(np.ones((4, 4)), dim=int(odd)), "dim=1", "all_gather", "dim"),
    "ndim": (lambda d, odd: d.all_gather(np.ones((4, 4) if odd else 4)), r"\[4, 4\]", "all_gather", "the number"),
    "algorithm": (
        lambda d, odd: d.all_reduce(np.ones(4), algorithm="ring" if odd else None), "'ring'", "all_reduce", "algorithm"
    ),
    "pairs": (lambda d, odd: d.permute(np.ones(4), [(0, 1)] if odd else [(1, 0)]), r"\(0, 1\)", "permute", "pairs"),
}


@pytest.mark.sampled(9)
@pytest.mark.slow_for(*(f"process-{what}" for what in MISMATCHES if what not in ("shape", "kind", "pairs")))
@pytest.mark.parametrize("what", MISMATCHES)
def test_members_that_call_different_things_are_told_what_each_called(cluster, what):
    call, odd_text, operation, differs_in = MISMATCHES[what]
    odd = cluster.size - 1
    error = fails(cluster, CollectiveMismatchError, lambda d: call(d, d.rank == odd), match=f"differ in {differs_in}")
    assert re.search(odd_text, str(error))
    assert odd in error.ranks
    assert cluster.size == 2 or error.ranks == (odd,)
    assert operation is None or error.operation == operation
    assert f"rank {odd} called" in str(error).replace("ranks", "rank") or f"and {odd} called" in str(error)
    assert LINE in str(error)
    assert len(str(error).splitlines()) == 3  # what differs, those who agree, the odd one
    assert set(error.calls) == set(range(cluster.size))


def test_a_rank_that_never_calls(cluster):
    def kernel(device):
        if device.rank != 1:
            device.all_reduce(device.rank)

    error = fails(cluster, DeadlockError, kernel, match="rank 1 returned without calling all_reduce")
    assert error.ranks  # where the cores are crowded, one may not have come to it yet
    assert set(error.ranks) <= set(range(cluster.size)) - {1}
    assert error.operation == "all_reduce"
    assert all(place.startswith(LINE) for place in error.locations)


def test_a_rank_that_waits_elsewhere(cluster):
    def kernel(device):
        if device.rank == 0:
            device.recv(1)
        else:
            device.barrier()

    error = fails(cluster, DeadlockError, kernel, match="rank 0 waits for rank 1; rank 1 waits for rank 0")
    assert "recv(from rank 1, tag 0)" in str(error)
    assert "barrier()" in str(error)


def test_everybody_receives_first(cluster):
    def kernel(device):
        device.recv((device.rank + 1) % device.size)

    error = fails(cluster, DeadlockError, kernel, match="rank 0 waits for rank 1")
    assert set(error.ranks) == set(range(cluster.size))
    assert error.operation == "recv"


def test_a_rank_that_receives_from_itself_first(cluster):
    error = fails(cluster, DeadlockError, lambda device: device.recv(0), match="^deadlock: rank 0 waits for itself\n")
    assert set(error.ranks) == set(range(cluster.size))


def test_everybody_sends_into_full_channels(cluster):
    def kernel(device):
        for _ in range(100):
            device.send(np.ones(2), (device.rank + 1) % device.size)

    error = fails(cluster, DeadlockError, kernel, match="send")
    assert error.operation == "send"
    told = "a send waits while 16 messages of its tag lie in the channel (channel_capacity=16)"
    assert str(error).endswith(f"\n  {told}")


def test_a_send_waits_for_its_receiver_where_the_channel_holds_nothing():
    def kernel(device):
        device.send(1, (device.rank + 1) % device.size)
        device.recv((device.rank - 1) % device.size)

    with VirtualCluster(2, backend="thread", channel_capacity=0) as cluster:
        error = fails(cluster, DeadlockError, kernel, match="rank 0 waits for rank 1")
    assert str(error).endswith("\n  a send waits for its receiver (channel_capacity=0)")


def test_the_message_before_rank_0_goes_to_the_host(cluster):
    def kernel(device):
        device.send(2, device.rank - 1, tag=1)
        device.channel(HOST).send(3)                    # is meant so, and has another tag
        device.recv((device.rank + 1) % device.size, tag=1)

    error = fails(cluster, DeadlockError, kernel, match="rank 0 returned without sending what rank . waits for")
    line = kernel.__code__.co_firstlineno + 1
    told = f"rank 0 sent a message with that tag to -1, the host, at {LINE}{line}; "
    assert str(error).endswith(f"\n  {told}the device before rank 0 is (device.rank - 1) % device.size")


def test_messages_of_a_tag_that_nobody_sends(cluster):
    def kernel(device):
        if device.rank == 0:
            device.send(1, 1, tag=3)
        elif device.rank == 1:
            device.recv(0, tag=4)

    error = fails(cluster, DeadlockError, kernel, match="rank 0 returned without sending what rank 1 waits for")
    assert "(tag 4)" in str(error)
    told = rf"\n  a message of rank 0 to rank 1 with tag 3, sent at {re.escape(LINE)}\d+, has not been received$"
    assert re.search(told, str(error))


def test_works_that_wait_for_each_other(cluster):
    def kernel(device):
        device.irecv((device.rank + 1) % device.size).wait()

    fails(cluster, DeadlockError, kernel, match="rank 0 waits for rank 1")


def test_a_work_that_nobody_waits_for_and_nobody_joins(cluster):
    def kernel(device):
        if device.rank == 0:
            device.all_reduce(1, async_op=True)

    error = fails(cluster, DeadlockError, kernel, match="returned without calling all_reduce")
    assert "never waited for" in str(error)
    assert error.locations == (f"{__file__}:{kernel.__code__.co_firstlineno + 2}",)  # where it was issued


@pytest.mark.slow_for("process")
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_groups_entered_in_different_orders(backend):
    def kernel(device):
        first, second = ("a", "b") if device.rank in (0, 3) else ("b", "a")
        device.barrier(first)
        device.barrier(second)

    with VirtualCluster(Mesh(a=2, b=2), backend=backend) as cluster:
        error = fails(cluster, DeadlockError, kernel, match="deadlock")
        assert set(error.ranks) == {0, 1, 2, 3}


@pytest.mark.takes_seconds
def test_a_circle_is_found_while_a_third_device_computes_for_ever(cluster_of):
    def kernel(device):
        if device.rank < 2:
            device.recv(1 - device.rank)
        while True:
            pass

    error = fails(cluster_of(Mesh(devices=3)), DeadlockError, kernel,
                  match="rank 0 waits for rank 1; rank 1 waits for rank 0")
    assert error.ranks == (0, 1)


def test_a_circle_on_the_queue_transport():
    with VirtualCluster(2, transport="queue") as cluster:
        fails(cluster, DeadlockError, lambda device: device.recv(1 - device.rank), match="rank 0 waits for rank 1")


def test_a_failure_outranks_the_deadlock_it_makes(cluster):
    def kernel(device):
        if device.rank == 0:
            raise ValueError("planted")
        device.all_reduce(1)

    with pytest.raises(Exception, match="planted"):
        cluster.run(kernel)


def test_a_stopped_and_continued_process_is_no_error(cluster_of):
    """Stopped while its peers wait for it, and long enough for the host to look several times."""
    def kernel(device, polls):
        if device.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return device.all_reduce(1)

    cluster = cluster_of(Mesh(devices=3))
    pid = cluster.pids()[1]

    def wake():
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_STOPPED:
            pass
        for _ in range(1000):
            process.status()
        os.kill(pid, signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    assert cluster.run(kernel, 0).outputs == [3, 3, 3]
    waker.join()


@pytest.mark.slow_for("thread")
def test_polling_done_counts_as_running(cluster):
    def kernel(device):
        if device.rank > 1:
            return None
        if device.rank == 0:
            work = device.irecv(1)
            polls = 0
            while not work.done():
                polls += 1
            return work.wait()
        total = 0
        for i in range(500_000):
            total += i
        device.send(total, 0)
        return total

    run = cluster.run(kernel)
    assert run[0] == run[1]


def test_a_result_that_is_thrown_away_is_warned_of_once_with_its_line():
    def kernel(device):
        x = np.ones(3)
        for _ in range(2):
            device.all_reduce(x)
        device.all_reduce(x, out=x)
        device.barrier()
        return device.all_reduce(x)

    with VirtualCluster(2, backend="thread") as cluster:
        with pytest.warns(UnusedResultWarning, match="the result of all_reduce is not used") as caught:
            cluster.run(kernel)
        assert len(caught) == 1
        assert (caught[0].filename, caught[0].lineno) == (__file__, kernel.__code__.co_firstlineno + 3)
        cluster.run(kernel)  # the suite makes an error of every warning


def test_a_device_that_receives_from_a_host_that_sent_nothing(cluster, monkeypatch):
    monkeypatch.setattr(run_loop, "others_run", lambda: False)  # a worker of pytest-xdist has a thread of its own
    def kernel(device):
        return device.channel(-1).recv() if device.rank == 0 else None

    fails(cluster, DeadlockError, kernel, match="rank 0 waits for the host")


@pytest.mark.slow_for("4-thread")
@pytest.mark.sampled(3)
def test_any_number_of_messages_to_the_host_lie_there_after_the_run(cluster):
    def kernel(device):
        for number in range(20 if device.rank else 1000):
            device.channel(-1).send(number)

    cluster.run(kernel)
    for rank in range(cluster.size):
        count = 20 if rank else 1000
        assert [cluster.channel(rank).recv() for _ in range(count)] == list(range(count))


@pytest.mark.sampled(2)
def test_the_host_does_not_wait_for_room_but_says_so(cluster):
    for number in range(100):
        cluster.channel(1).send(number)


    def receive_all(device):
        channel = device.channel(-1)
        return [channel.recv() for _ in range(channel.statistics().messages_waiting)]

    assert cluster.run(receive_all)[1] == list(range(100))

    def send_too_many():
        for number in range(1000):
            cluster.channel(0).send(number)

    with pytest.raises(ClusterError, match="run a program that receives them"):
        send_too_many()
    received = cluster.run(receive_all)[0]
    assert received == list(range(len(received)))
    assert len(received) > 400


@pytest.mark.parametrize("call", ["send", "isend"])
def test_an_array_in_the_place_of_a_rank_is_told_by_its_type_and_the_order(cluster_of, call):
    words = r"dst is an integer, got float64\[3, 2\]; the array comes first: send\(x, dst\)"
    with pytest.raises(DeviceFailedError, match=words):
        cluster_of(2, "thread").run(lambda device: getattr(device, call)(1, np.ones((3, 2))))
    with pytest.raises(DeviceFailedError, match=r"src is an integer, got int64\[2\]; the message is the result: x = recv"):
        cluster_of(2, "thread").run(lambda device: device.irecv(np.arange(2)))
