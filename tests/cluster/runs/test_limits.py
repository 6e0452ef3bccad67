"""What an error tells: the stacks of those that wait, what the dead called last, what cannot be sent and where."""

import inspect
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from gone import gone

import vcluster.runs.run_loop
from vcluster import (
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    Operation,
    PerDevice,
    Sharded,
    VirtualCluster,
)
from vcluster.memory import BLOCKED

BACKENDS = ["process", "thread"]


@pytest.fixture(params=BACKENDS, scope="module")
def cluster(request):
    with VirtualCluster(3, backend=request.param) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def processes():
    with VirtualCluster(3) as cluster:
        yield cluster


def line_of(function, text):
    """``file:line`` of the line of a function that holds this text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def until_it_waits(device, rank):
    while device.endpoint.status.read(rank).state != BLOCKED:
        pass


def works(cluster):
    return cluster.run(lambda device: device.all_reduce(1)).outputs == [cluster.size] * cluster.size


# -- who waits ---------------------------------------------------------------------------------------------------------


def exchange(device, peer):
    return device.recv(peer)  # waits


def test_a_deadlock_is_told_with_who_called_the_line_that_waits(cluster):
    def kernel(device):
        if device.rank < 2:
            exchange(device, 1 - device.rank)  # calls

    with pytest.raises(DeadlockError) as caught:
        cluster.run(kernel)
    head, *lines = str(caught.value).splitlines()
    assert head == "deadlock: rank 0 waits for rank 1; rank 1 waits for rank 0"
    called = f"    called from kernel at {line_of(kernel, '# calls')}"
    assert lines[1] == lines[3] == called
    assert caught.value.locations == (line_of(exchange, "# waits"),) * 2
    assert works(cluster)


def test_devices_that_wait_at_the_same_line_for_the_same_are_told_together(cluster):
    def kernel(device):
        if device.rank == 0:
            until_it_waits(device, 2)
        if device.rank != 1:
            device.barrier()  # waits

    with pytest.raises(DeadlockError) as caught:
        cluster.run(kernel)
    assert str(caught.value).splitlines() == [
        "deadlock: rank 1 returned without calling barrier, for which rank 0 waits",
        f"  ranks 0 and 2 in barrier() at {line_of(kernel, '# waits')}, waiting for rank 1",
    ]


@pytest.mark.sampled(2)
def test_a_third_device_that_talks_all_the_time_does_not_hide_a_deadlock(cluster):
    def kernel(device):
        if device.rank < 2:
            device.recv(1 - device.rank)
        while True:
            print("here I am")

    cluster.show_output = lambda *_: None
    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1; rank 1 waits for rank 0") as caught:
        cluster.run(kernel)
    assert caught.value.ranks == (0, 1)
    assert works(cluster)


def spin(device):
    while True:
        sum(range(100))  # computes


@pytest.fixture
def clock(monkeypatch):
    """The host's clock, which can be put forward."""
    clock = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + clock.ahead)
    monkeypatch.setattr(vcluster.runs.run_loop, "time", clock)
    return clock


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deadline_is_told_with_the_line_of_everybody_also_of_those_that_compute(backend, clock):
    def kernel(device):
        if device.rank == 1:
            until_it_waits(device, 0)
            until_it_waits(device, 2)
            print("all are there")
            spin(device)  # calls
        exchange(device, 1)  # calls, too

    def put_forward(*_):
        clock.ahead = 1000.0

    with VirtualCluster(3, backend=backend, deadline_seconds=600) as cluster:
        cluster.show_output = put_forward
        with pytest.raises(ClusterTimeoutError) as caught:
            cluster.run(kernel)
        lines = str(caught.value).splitlines()
        assert lines[0] == "the run took longer than deadline_seconds=600"
        assert lines[1] == f"  ranks 0 and 2 in recv(from rank 1, tag 0) at {line_of(exchange, '# waits')}"
        assert lines[2] == f"    called from kernel at {line_of(kernel, '# calls, too')}"
        computing, _, line = lines[3].rpartition(":")
        assert computing == f"  rank 1 computing at {__file__}"
        assert int(line) - spin.__code__.co_firstlineno in (0, 1, 2)
        assert lines[4] == f"    called from kernel at {line_of(kernel, '# calls')}"
        assert len(lines) == 5
        assert len(caught.value.locations) == len(caught.value.ranks) == 3
        clock.ahead = 0.0
        assert works(cluster)


def test_a_message_other_than_declared_is_told_with_the_line_that_sent_it(cluster):
    def kernel(device):
        if device.rank == 0:
            device.send(np.ones(2), 1, tag=3)
            device.send(np.ones(4), 1, tag=3)  # sends
        elif device.rank == 1:
            device.recv(0, tag=3)
            device.irecv(0, tag=3, shape=(2,), dtype=np.float64).wait()  # receives

    with pytest.raises(CollectiveMismatchError) as caught:
        cluster.run(kernel)
    here, there = line_of(kernel, "# receives"), line_of(kernel, "# sends")
    assert str(caught.value) == (
        f"irecv of rank 1 from rank 0: shape [2] was declared, [4] came (rank 1 at {here}; sent at {there})"
    )
    assert (caught.value.ranks, caught.value.operation) == ((1, 0), "irecv")
    assert caught.value.locations == (here, there)
    assert works(cluster)


# -- who died ----------------------------------------------------------------------------------------------------------


def test_a_death_is_told_with_the_operation_it_waited_in(processes):
    pids = processes.pids()

    def kernel(device):
        if device.rank == 1:
            device.recv(0)  # waits
        elif device.rank == 0:
            until_it_waits(device, 1)
            os.kill(pids[1], signal.SIGKILL)
            assert gone(pids[1])        # else both wait for each other, which may be told first
        device.barrier()

    with pytest.raises(DeviceFailedError) as caught:
        processes.run(kernel)
    place = line_of(kernel, "# waits")
    assert str(caught.value).endswith(f" while it waited in recv(from rank 0, tag 0) at {place}")
    assert (caught.value.operation, caught.value.locations) == ("recv", (place,))
    assert works(processes)


def test_a_death_between_two_runs_is_told_without_an_operation(processes):
    processes.run(lambda device: device.barrier())
    os.kill(processes.pids()[2], signal.SIGKILL)
    with pytest.raises(DeviceFailedError, match=r"the process of rank 2 .* SIGKILL \([^)]*\)$") as caught:
        processes.run(lambda device: device.barrier())
    assert caught.value.operation is None
    assert works(processes)


# -- what cannot be sent -----------------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Loads(Operation):
    def inputs(self, mesh, x):
        return [(x, rank) for rank in range(mesh.size)]

    def __call__(self, device, x, rank):
        return rank


def test_arguments_that_cannot_be_sent_are_named_as_the_program_knows_them(cluster):
    def kernel(device, x, *rest, option=None):
        pass

    for call, words in [
        (lambda: cluster.run(kernel, {"k": [LOCK]}), "item 0 of the value at 'k' of argument 'x' cannot"),
        (lambda: cluster.run(kernel, 1, LOCK), "argument 2 cannot"),
        (lambda: cluster.run(kernel, 1, option=LOCK), "argument 'option' cannot"),
        (lambda: cluster.run(kernel, PerDevice([1, 2, LOCK])), "argument 'x' of rank 2 cannot"),
        (lambda: cluster.run(Loads(), LOCK), "input 1 of Loads cannot"),
        (lambda: cluster.run(print, LOCK), "argument 1 cannot"),
    ]:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(f"{words} be sent to another process: _thread.lock cannot be pickled")
        assert type(caught.value.__cause__) is TypeError


class Weights:
    """An object in which run() does not look for what it deals out."""

    def __init__(self, w):
        self.w = w


@pytest.mark.parametrize("part", [Sharded(np.ones(4), "[devices]"), PerDevice([1, 2, 3])])
def test_what_is_dealt_out_does_not_hide_in_an_object(cluster, part):
    name = type(part).__name__
    words = f"^attribute 'w' of argument 'weights' cannot be sent .*; a {name} inside of anything else would arrive as it is"
    with pytest.raises(TypeError, match=words):
        cluster.run(lambda device, weights: weights.w, Weights(part))


def test_a_program_that_cannot_be_sent_is_named_with_its_line(cluster):
    lock = LOCK

    def kernel(device):
        return lock

    place = f"{__file__}:{kernel.__code__.co_firstlineno}"
    with pytest.raises(TypeError, match=r"closure variable 'lock' of .*kernel of the program at ") as caught:
        cluster.run(kernel)
    assert f"of the program at {place} cannot be sent to another process: _thread.lock" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_told_at_the_program_and_in_no_line_of_ours(cluster):
    def kernel(device):
        return [threading.Lock()] if device.rank == 1 else None

    with pytest.raises(DeviceFailedError) as caught:
        cluster.run(kernel)
    assert caught.value.locations == (f"{__file__}:{kernel.__code__.co_firstlineno}",)
    text = str(caught.value)
    assert "TypeError: item 0 of the result cannot be sent to another process: _thread.lock cannot be pickled" in text
    assert text.count("Traceback") == 1
    assert "vcluster/" not in text
    assert works(cluster)


class Refuses:
    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        raise ValueError("refused")


def test_what_cannot_be_unpacked_is_told_with_where_that_was(cluster):
    large = np.zeros(1 << 16)
    with pytest.raises(DeviceFailedError, match="ValueError: refused\nraised in the device while it unpacked"):
        cluster.run(lambda device, x: None, Refuses(1))
    for _ in range(3):
        with pytest.raises(ValueError, match="refused") as caught:
            cluster.run(lambda device: Refuses(large) if device.rank else large)
        assert caught.value.__notes__ == ["raised on the host while it unpacked the result of rank 1"]
    assert works(cluster)


def test_a_result_that_cannot_be_unpacked_does_not_hide_the_failure_of_another_rank(cluster):
    def kernel(device):
        if device.rank == 1:
            device.recv(0)
            raise LookupError("the cause")
        if device.rank == 0:
            device.send(1, 1)
        return Refuses(1)

    with pytest.raises(DeviceFailedError, match="LookupError: the cause"):
        cluster.run(kernel)
    assert works(cluster)


def dies_computing(device, rank, times):
    x = np.ones(3)
    for _ in range(times):
        x = device.all_reduce(x)  # the last call
    if device.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    device.barrier()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("times", [1, 5])
def test_of_a_process_that_dies_while_it_computes_the_last_call_is_told(processes, times):
    with pytest.raises(DeviceFailedError) as caught:
        processes.run(dies_computing, 1, times)
    assert caught.value.ranks == (1,)
    assert caught.value.operation == "all_reduce"
    assert line_of(dies_computing, "# the last call") in caught.value.locations
    assert works(processes)


def test_a_deadlock_over_different_groups_names_them(cluster):
    def kernel(device):
        if device.rank < 2:
            device.barrier(groups=[[0, 1]])
        else:
            device.barrier(groups=[[1, 2]])

    with pytest.raises(DeadlockError, match=r"barrier\(\) of group \[1, 2\]"):
        cluster.run(kernel)
    assert works(cluster)
