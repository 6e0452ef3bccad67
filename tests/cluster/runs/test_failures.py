"""What goes wrong in a kernel, in a process or at the keyboard: told in full, nobody waits, nothing is left behind."""

from __future__ import annotations

import dis
import errno
import faulthandler
import gc
import inspect
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import synchronize
from pathlib import Path

import numpy as np
import psutil
import pytest
from eventually import eventually
from numpy.testing import assert_array_equal
from paths import ROOT
from runtimes import KINDS, RUNTIMES

import vcluster.processes.crew
import vcluster.processes.worker
import vcluster.runs.cluster
import vcluster.runs.run_loop
from parallelism.mesh import Mesh
from vcluster import (
    HOST,
    ClusterError,
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    OperationCancelled,
    UndeliveredMessageError,
    VirtualCluster,
)
from vcluster.processes import Died, device_process
from vcluster.runs.engine import Body

PROCESSES = RUNTIMES[:2]

HERE = Path(__file__).name


@pytest.fixture(params=KINDS)
def cluster(request, cluster_of):
    return marked(cluster_of(Mesh(devices=3), *request.param))


@pytest.fixture(params=PROCESSES, ids="-".join)
def processes(request, cluster_of):
    return marked(cluster_of(Mesh(devices=3), *request.param))


@pytest.fixture
def impatient(monkeypatch):
    """A device that heeds nothing is killed sooner than usual."""
    monkeypatch.setattr(vcluster.runs.run_loop, "KILL_AFTER_SECONDS", 0.3)


def marked(cluster):
    """The cluster, with something in every device's state."""
    cluster.run(lambda device: device.state.update(mark=device.rank))
    return cluster


def check_works(cluster, marks=(0, 1, 2)):
    """The next run is as if nothing had happened, with this left of what `marked` put there."""

    def kernel(device):
        device.send(np.array([device.rank]), (device.rank + 1) % device.size)
        total = device.all_reduce(np.arange(5000.0) + device.rank)
        return device.state.get("mark"), int(device.recv((device.rank - 1) % device.size)[0]), total[:2].tolist()

    assert cluster.run(kernel).outputs == [(mark, (rank - 1) % 3, [3.0, 6.0]) for rank, mark in enumerate(marks)]


def line_of(function, text):
    """``file:line`` of the line of a function that holds this text."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{function.__code__.co_filename}:{first + offset}"


# -- a kernel raises ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, 1)
def test_the_error_names_rank_line_and_original_traceback(cluster):
    def kernel(device, divisor):
        if device.rank == 1:
            return deeper(divisor)
        return device.barrier()

    def deeper(divisor):
        return 100 / divisor  # the line to blame

    with pytest.raises(DeviceFailedError) as caught:
        cluster.run(kernel, 0)
    error = caught.value
    assert error.ranks == (1,)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.exceptions.keys() == {1}
    assert error.exceptions[1] is error.__cause__
    assert error.locations == (line_of(deeper, "to blame"),)
    assert error.exitcode is None
    assert error.signal is None
    text = str(error)
    assert text.startswith("rank 1 raised ZeroDivisionError")
    assert "return 100 / divisor  # the line to blame" in text
    assert "return deeper(divisor)" in text
    assert "worker.py" not in text
    check_works(cluster)


def test_the_same_error_everywhere_is_told_once(cluster):
    def kernel(device):
        device.barrier()
        raise LookupError("the same words")

    # all of them are past the barrier; a device that the cancellation finds inside it does not get to raise
    with pytest.raises(DeviceFailedError) as caught:
        cluster.run(kernel)
    error = caught.value
    assert str(error).count("the same words") - str(error).count('raise LookupError("the same words")') == 1
    assert set(error.exceptions) == set(error.ranks)
    check_works(cluster)


def test_several_errors_are_all_told_the_lowest_rank_first(cluster):
    def kernel(device):
        raise [KeyError, ValueError, KeyError][device.rank](f"of rank {device.rank}")

    with pytest.raises(DeviceFailedError) as caught:
        cluster.run(kernel)
    error = caught.value
    first = min(error.ranks)
    assert str(error).startswith(("rank", "ranks"))
    assert str(error.__cause__) == str(error.exceptions[first])
    for rank in error.ranks:
        assert f"of rank {rank}" in str(error)
    check_works(cluster)


def test_what_a_peer_makes_of_its_cancellation_is_not_the_cause(cluster):
    def kernel(device):
        if device.rank == 2:
            device.recv(0)
            raise ValueError("the first failure")
        if device.rank == 0:
            device.send(1, 2)
        try:
            device.recv(2)
        except BaseException:
            raise KeyError("clean-up failed") from None

    with pytest.raises(DeviceFailedError, match="the first failure") as caught:
        cluster.run(kernel)
    assert caught.value.ranks == (2,)
    assert "clean-up" not in str(caught.value)
    check_works(cluster)


class CustomError(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}, {hint}")
        self.code = code
        self.hint = hint


class LockedError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def test_a_custom_exception_arrives_with_its_attributes(cluster):
    def kernel(device):
        if device.rank == 0:
            raise CustomError(7, hint="look here")
        device.barrier()

    with pytest.raises(DeviceFailedError, match="code 7, look here") as caught:
        cluster.run(kernel)
    cause = caught.value.__cause__
    assert isinstance(cause, CustomError)
    assert (cause.code, cause.hint) == (7, "look here")


def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(cluster):
    def kernel(device):
        if device.rank == 0:
            raise LockedError("holds a lock")
        device.barrier()

    with pytest.raises(DeviceFailedError, match="holds a lock") as caught:
        cluster.run(kernel)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "LockedError: holds a lock" in str(caught.value.__cause__)
    check_works(cluster)


def test_causes_notes_and_groups_come_along(cluster):
    def kernel(device):
        if device.rank:
            return device.barrier()
        try:
            int("x")
        except ValueError as error:
            outer = RuntimeError("outer")
            outer.add_note("a note for the reader")
            raise outer from error

    with pytest.raises(DeviceFailedError, match="direct cause") as caught:
        cluster.run(kernel)
    assert "a note for the reader" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value.__cause__.__cause__, ValueError)

    def many(device):
        if device.rank:
            return device.barrier()
        raise ExceptionGroup("several", [ValueError("one of them"), TypeError("another")])

    with pytest.raises(DeviceFailedError, match="one of them"):
        cluster.run(many)
    check_works(cluster)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, OperationCancelled, ClusterError])
def test_any_exception_is_a_failure_of_the_device(cluster, kind):
    def kernel(device):
        if device.rank == 1:
            raise kind("leaving")
        device.barrier()

    with pytest.raises(DeviceFailedError, match="leaving") as caught:
        cluster.run(kernel)
    assert caught.value.ranks == (1,)
    assert type(caught.value.__cause__) is kind
    check_works(cluster)


def test_wrong_arguments_of_a_call_are_raised_in_the_device(cluster):
    def kernel(device):
        with pytest.raises(ValueError, match="7"):
            device.send(1, 7)
        with pytest.raises(TypeError):
            device.all_reduce("text")
        return device.all_reduce(1)

    assert cluster.run(kernel).outputs == [3, 3, 3]


def test_exceptions_that_a_kernel_handles_are_its_own_affair(cluster):
    def kernel(device):
        try:
            raise ValueError
        except ValueError:
            return device.all_reduce(1)

    assert cluster.run(kernel).outputs == [3, 3, 3]


# -- while the others ... ----------------------------------------------------------------------------------------------


def in_a_collective(device):
    return device.all_reduce(np.ones(100))


def in_an_async_collective(device):
    return device.all_reduce(np.ones(100), async_op=True).wait()


def in_a_ring(device):
    return device.all_reduce(np.ones(100), algorithm="ring")


def in_a_barrier(device):
    device.barrier()


def in_recv(device):
    device.recv(0)


def in_send(device):
    while True:
        device.send(np.ones(100), 0)


def in_pure_python(device):
    while True:
        sum(range(100))


def in_numpy(device):
    while True:
        np.ones((30, 30)) @ np.ones((30, 30))


def in_sleep(device):
    while True:
        time.sleep(0.01)


def in_print(device):
    while True:
        print("x" * 1_000_000)


def in_except_exception(device):
    while True:
        with suppress(Exception):
            device.barrier()


def computing_in_except_exception(device):
    while True:
        with suppress(Exception):
            sum(range(1000))


def finished(device):
    pass


PEERS = [
    in_a_collective, in_an_async_collective, in_a_ring, in_a_barrier, in_recv, in_send, in_pure_python, in_numpy,
    in_sleep, in_print, in_except_exception, computing_in_except_exception, finished,
]  # fmt: skip


@pytest.mark.sampled(10, 1)
@pytest.mark.parametrize("peer", PEERS, ids=lambda function: function.__name__)
def test_a_failure_releases_the_others(cluster, peer, capsys):
    def kernel(device):
        device.barrier()
        if device.rank:
            peer(device)
        else:
            raise ValueError("broken")

    with pytest.raises(DeviceFailedError, match="rank 0 raised ValueError") as caught:
        cluster.run(kernel)
    assert caught.value.ranks == (0,)
    check_works(cluster)
    assert "Exception ignored" not in capsys.readouterr().err


@pytest.mark.sampled(4)
@pytest.mark.parametrize("exitcode", [None, 3])
def test_a_device_that_heeds_nothing_is_replaced_and_not_the_cause(processes, impatient, exitcode):
    def kernel(device):
        if device.rank == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as good as a bare except around everything
            device.send("here", 1)
            while True:
                sum(range(1000))
        device.recv(0)
        if exitcode is not None:
            os._exit(exitcode)
        raise ValueError("broken")

    with pytest.raises(DeviceFailedError, match="rank 1") as caught:
        processes.run(kernel)
    assert caught.value.ranks == (1,)
    assert caught.value.signal is None
    assert caught.value.exitcode == exitcode
    survivor = None if exitcode else 1
    check_works(processes, (None, survivor, 2) if "shared" in repr(processes) else (None, None, None))


def test_a_thread_that_heeds_nothing_closes_its_cluster(monkeypatch):
    monkeypatch.setattr(vcluster.runs.run_loop, "KILL_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(vcluster.processes.crew, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(sys, "released_by_a_test", threading.Event(), raising=False)

    def kernel(device):
        if device.rank == 0:
            device.send("here", 1)
            sys.released_by_a_test.wait()  # in a lock, where no exception reaches a thread
        device.recv(0)
        raise ValueError("broken")

    try:
        with VirtualCluster(2, backend="thread") as cluster:
            with pytest.raises(DeviceFailedError, match="rank 1 raised ValueError") as caught:
                cluster.run(kernel)
            assert cluster.closed
            assert "the cluster is closed" in caught.value.__notes__[0]
            with pytest.raises(ClusterError, match="closed"):
                cluster.run(kernel)
    finally:
        sys.released_by_a_test.set()


def test_a_bare_except_around_a_call_does_not_keep_a_device(cluster):
    def kernel(device):
        device.barrier()
        if device.rank == 0:
            raise ValueError("broken")
        for _ in range(10):
            try:
                arrived = True
                device.barrier()
            except:  # noqa: E722
                arrived = False
        return arrived or "as if nothing had happened"

    with pytest.raises(DeviceFailedError, match="rank 0 raised ValueError"):
        cluster.run(kernel)
    check_works(cluster)


class SlowToTellError(Exception):
    def __str__(self):
        end = time.monotonic() + 0.07
        while time.monotonic() < end:  # so that the interrupts for late devices arrive while it is described
            pass
        return "slow to tell"


@pytest.mark.sampled(2)
def test_an_interrupt_that_comes_as_a_device_describes_its_own_failure_does_no_harm(cluster):
    def kernel(device):
        device.barrier()
        if device.rank == 0:
            raise ValueError("quick")
        raise SlowToTellError

    with pytest.raises(DeviceFailedError, match="rank"):
        cluster.run(kernel)
    check_works(cluster)


def test_stale_messages_of_a_failed_run_are_not_received_later(cluster):
    def kernel(device):
        for peer in range(device.size):
            device.isend(np.full(5000, 99.0), peer)
        device.state["work"] = device.all_reduce(np.ones(10), async_op=True) if device.rank else None
        raise ValueError("broken")

    for _ in range(3):
        with pytest.raises(DeviceFailedError):
            cluster.run(kernel)
        check_works(cluster)


@pytest.mark.slow_for("queue")
def test_failures_in_a_row_leave_a_working_cluster(cluster):
    def kernel(device, failing, length):
        for step in range(length):
            assert device.all_reduce(np.ones(50))[0] == 3
            if step == length - 1 and device.rank == failing:
                raise ValueError(f"step {step}")
            device.sendrecv(np.ones(3), (device.rank + 1) % 3, (device.rank - 1) % 3)

    for attempt in range(12):
        with pytest.raises(DeviceFailedError, match=f"step {attempt % 5}") as caught:
            cluster.run(kernel, attempt % 3, attempt % 5 + 1)
        assert caught.value.ranks == (attempt % 3,)
    check_works(cluster)


# -- a process dies ----------------------------------------------------------------------------------------------------


def _quietly():
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def by_sigkill():
    os.kill(os.getpid(), signal.SIGKILL)


def by_exit():
    os._exit(3)


def by_exit_0():
    os._exit(0)


def by_sigsegv():
    _quietly()
    os.kill(os.getpid(), signal.SIGSEGV)


def by_abort():
    _quietly()
    os.abort()


DEATHS = {by_sigkill: "SIGKILL", by_exit: 3, by_exit_0: 0, by_sigsegv: "SIGSEGV", by_abort: "SIGABRT"}


DYING = [
    pytest.param(kind, death, peer, id=f"{'-'.join(kind)}-{death.__name__}-{peer.__name__}", marks=slow)
    for kind in PROCESSES for death in DEATHS for peer in (in_a_collective, in_recv, in_send, in_pure_python)
    for slow in [[pytest.mark.slow] * (kind[1] == "queue" and death is not by_sigkill and peer is not in_a_collective)]
]
"""Every death beside every peer; where all processes are started anew, by default every death and every peer."""


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("processes", "death", "peer"), DYING, indirect=["processes"])
def test_the_death_of_a_process_is_told_and_it_is_replaced(processes, death, peer):
    def kernel(device):
        device.barrier()
        if device.rank == 0:
            death()
        peer(device)

    pids = processes.pids()
    with pytest.raises(DeviceFailedError, match=r"the process of rank 0 \(pid \d+\)") as caught:
        processes.run(kernel)
    error, how = caught.value, DEATHS[death]
    assert error.ranks == (0,)
    assert error.__cause__ is None
    assert error.signal == (how if isinstance(how, str) else None)
    assert error.exitcode == (how if isinstance(how, int) else None)
    assert str(how) in str(error)
    assert f"pid {pids[0]}" in str(error)
    assert eventually(lambda: not psutil.pid_exists(pids[0]))
    if "shared" in repr(processes):
        check_works(processes, (None, 1, 2))
        assert processes.pids()[1:] == pids[1:]
    else:  # the lock of a queue may have died with its holder: all of them are replaced
        check_works(processes, (None, None, None))


def test_if_the_dead_cannot_be_replaced_the_error_says_that_the_cluster_is_closed(monkeypatch):
    def refuse(body, ranks):
        raise OSError(errno.EAGAIN, "no more processes")

    with VirtualCluster(2) as cluster:
        monkeypatch.setattr(Body, "_start_devices", refuse)
        with pytest.raises(DeviceFailedError) as caught:
            cluster.run(lambda device: os.kill(os.getpid(), signal.SIGKILL) if device.rank else None)
        assert caught.value.__notes__ == [
            "the cluster is closed: the devices that died could not be replaced (BlockingIOError: [Errno 11] no more "
            "processes)"]
        assert cluster.closed
        monkeypatch.undo()
        cluster.restart()
        assert cluster.run(lambda device: device.rank).outputs == [0, 1]


@pytest.mark.slow_for("queue")
def test_several_deaths_at_once_are_told_together(processes):
    def kernel(device):
        device.barrier()
        if device.rank != 1:
            os._exit(4)
        device.barrier()

    with pytest.raises(DeviceFailedError, match="exit code 4") as caught:
        processes.run(kernel)
    assert set(caught.value.ranks) <= {0, 2}
    check_works(processes, tuple(processes.run(lambda device: device.state.get("mark"))))


def test_a_device_that_dies_while_another_is_replaced_is_told_by_the_next_run(monkeypatch):
    usual = vcluster.processes.crew.await_ready
    with VirtualCluster(3, backend="process") as cluster:
        pids = cluster.pids()

        def await_ready(crew, ranks, check):
            os.kill(pids[2], signal.SIGKILL)
            found = []
            while not any(isinstance(message, Died) for _, message in found):
                found += crew._listen(None)
            replies, receive = [sorted(found, key=lambda each: not isinstance(each[1], Died))], crew.receive
            monkeypatch.undo()
            monkeypatch.setattr(crew, "receive", lambda seconds: replies.pop() if replies else receive(seconds))
            return usual(crew, ranks, check)

        monkeypatch.setattr(vcluster.processes.crew, "await_ready", await_ready)
        os.kill(pids[0], signal.SIGKILL)
        for rank in (0, 2):
            with pytest.raises(DeviceFailedError) as caught:
                cluster.run(lambda device: device.barrier())
            assert caught.value.ranks == (rank,) and not cluster.closed
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [3, 3, 3]


@pytest.mark.slow_for("queue")
def test_a_device_that_dies_between_runs_is_told_by_the_next_and_replaced(processes):
    os.kill(processes.pids()[2], signal.SIGKILL)
    with pytest.raises(DeviceFailedError, match=r"rank 2 .* SIGKILL") as caught:
        processes.run(lambda device: device.barrier())
    assert caught.value.ranks == (2,)
    assert check_works(processes, (0, 1, None) if "shared" in repr(processes) else (None,) * 3) is None


@pytest.mark.sampled(3)
def test_outputs_of_a_device_outlive_its_death(processes):
    large = 1 << 17
    before = processes.run(lambda device: np.full(large, device.rank + 1.0)).outputs
    for _ in range(2):
        with pytest.raises(DeviceFailedError):
            processes.run(lambda device: os._exit(1) if device.rank == 1 else device.barrier())
        after = processes.run(lambda device: np.full(large, -1.0)).outputs
        assert_array_equal(after, np.full((3, large), -1.0))
        assert_array_equal(before, [np.full(large, rank + 1.0) for rank in range(3)])


def test_a_device_that_is_only_stopped_is_waited_for():
    with VirtualCluster(2) as cluster:

        def kernel(device):
            if device.rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return device.all_reduce(1)

        first = psutil.Process(cluster.pids()[0])
        found = []
        run = threading.Thread(target=lambda: found.extend(cluster.run(kernel)))
        run.start()
        assert eventually(lambda: first.status() == psutil.STATUS_STOPPED)
        run.join(0.15)  # far longer than the look for deadlocks takes
        assert run.is_alive()
        first.resume()
        run.join()
        assert found == [2, 2]


# -- errors of the cluster's own ---------------------------------------------------------------------------------------


def test_calls_that_do_not_match_leave_as_themselves(cluster):
    def kernel(device):
        if device.rank == 1:
            return device.all_reduce(np.ones(4))  # the odd one
        return device.all_reduce(np.ones(3))

    with pytest.raises(CollectiveMismatchError) as caught:
        cluster.run(kernel)
    error = caught.value
    assert 1 in error.ranks
    assert error.operation is not None
    assert "all_reduce" in error.operation
    assert "float64[3]" in str(error)
    assert "float64[4]" in str(error)
    assert line_of(kernel, "the odd one") in str(error)
    assert line_of(kernel, "the odd one") in error.locations
    check_works(cluster)


def test_messages_nobody_received_are_an_error_that_names_the_line(cluster):
    def kernel(device):
        if device.rank == 0:
            for _ in range(3):
                device.send(np.ones(3), 2, tag=5)  # sent in vain
        elif device.rank == 2:
            device.recv(0, tag=5)

    with pytest.raises(UndeliveredMessageError, match=r"rank 0 sent 2 messages to rank 2 \(tag 5\)") as caught:
        cluster.run(kernel)
    error = caught.value
    assert error.ranks == (0, 2)
    assert error.operation == "send"
    assert error.locations == (line_of(kernel, "in vain"),)
    assert line_of(kernel, "in vain") in str(error)
    check_works(cluster)


@pytest.mark.takes_seconds
def test_a_device_that_packs_a_long_record_when_its_run_has_failed_is_left_to_it(monkeypatch):
    monkeypatch.setattr(vcluster.runs.run_loop, "KILL_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(vcluster.processes.worker, "LONG", 0)
    pack, hurry, late = vcluster.processes.worker.pack, vcluster.runs.run_loop.Conduct._hurry, threading.Event()

    def pack_late(record):
        assert threading.current_thread().name != "vcluster-1" or late.wait(30)
        return pack(record)

    def hurried(self, seconds):
        goes_on = hurry(self, seconds)
        if seconds > 1:
            late.set()
        return goes_on

    monkeypatch.setattr(vcluster.processes.worker, "pack", pack_late)
    monkeypatch.setattr(vcluster.runs.run_loop.Conduct, "_hurry", hurried)

    def fails(device):
        device.state["kept"] = device.rank
        if device.rank == 0:
            raise ValueError
        device.barrier()

    with VirtualCluster(2, backend="thread") as cluster:
        with pytest.raises(DeviceFailedError, match="rank 0 raised ValueError") as caught:
            cluster.run(fails)
        assert [dump["rank"] for dump in caught.value.trace.dumps] == [0, 1]
        assert cluster.run(lambda device: device.state["kept"]).outputs == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("peer", [in_pure_python, in_sleep], ids=lambda peer: peer.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_takes_longer_than_the_deadline_is_broken_off(kind, peer):
    def kernel(device):
        if device.rank == 1:
            peer(device)
        return device.rank if device.rank == 0 else device.recv(1)

    with VirtualCluster(3, backend=kind[0], transport=kind[1], deadline_seconds=0.2) as cluster:
        def in_time(check):
            with suppress(ClusterTimeoutError):  # on a crowded machine any run may take as long
                check(cluster)
                return True

        assert eventually(lambda: in_time(marked))
        with pytest.raises(ClusterTimeoutError, match=r"deadline_seconds=0\.2") as caught:
            cluster.run(kernel)
        assert "rank 1" in str(caught.value)
        assert "rank 2" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.ranks == (1, 2)
        assert eventually(lambda: in_time(check_works))


@pytest.mark.sampled(3)
def test_an_exception_from_a_signal_handler_ends_the_run(processes):
    class TooLongError(Exception):
        pass

    def raise_too_long(*_):
        raise TooLongError

    def kernel(device):
        while device.rank == 0:
            pass

    before = signal.signal(signal.SIGUSR2, raise_too_long)
    main = threading.main_thread().ident
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR2))
    try:
        timer.start()
        with pytest.raises(TooLongError):
            processes.run(kernel)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    check_works(processes)


# -- Ctrl-C and kill -9 ------------------------------------------------------------------------------------------------

BUSY = """
import os, sys
from vcluster import VirtualCluster
cluster = VirtualCluster(3, backend={backend!r}, transport={transport!r})
print("pids", *cluster.pids(), flush=True)

def busy(device):
    device.barrier()
    if device.rank == 0:
        print("running")
    while device.rank < 2:
        sum(range(100))
    device.recv(0)

"""
HANDLED = BUSY + """
try:
    cluster.run(busy)
except KeyboardInterrupt:
    print("stopped", cluster.run(lambda device: device.all_reduce(1)).outputs == [3, 3, 3])
"""
UNHANDLED = BUSY + "cluster.run(busy)"


@contextmanager
def script(text, **values):
    """A script in a process group of its own, once it has said that it is running; and its devices' pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", text.format(**values)], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )
    try:
        pids = []
        for line in process.stdout:
            if line.startswith("pids"):
                pids = [int(word) for word in line.split()[1:]]
            if "running" in line:
                break
        yield process, [child.pid for child in psutil.Process(process.pid).children(recursive=True)] or pids
    finally:
        process.kill()
        process.communicate()


def ends_by_ctrl_c(process, pids):
    """The script does not handle it: it ends with its own traceback alone, and no device is left."""
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == ""
    assert err.startswith("Traceback")
    assert err.count("Traceback") == 1
    assert re.search(r"\nKeyboardInterrupt(\nWhen the run was interrupted:(\n  ranks? .+)+)?$", err.rstrip()), err
    assert process.returncode == -signal.SIGINT
    assert eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNTIMES, ids="-".join)
def test_ctrl_c_stops_the_run_and_the_script_ends_well(kind):
    with script(HANDLED, backend=kind[0], transport=kind[1]) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (out, err, process.returncode) == ("stopped True\n", "", 0)
        assert eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_ctrl_c_ends_a_script_with_its_own_traceback_only():
    with script(UNHANDLED, backend="process", transport="shared_memory") as (process, pids):
        ends_by_ctrl_c(process, pids)


OFTEN = """
import os, signal, sys, threading
import numpy as np
from vcluster import VirtualCluster

def kernel(device, x):
    print("a line", file=device and sys.stderr if False else sys.stdout)
    return device.all_reduce(x)

x = np.arange(20_000.0)
silent = open(os.devnull, "w")
with VirtualCluster(2, backend={backend!r}) as cluster:
    for attempt in range(0, 25, {every}):
        timer = threading.Timer(attempt * 0.0007, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                sys.stdout = silent
                run = cluster.run(kernel, x)
                assert (run[0] == 2 * x).all() and (run[1] == 2 * x).all()
        except KeyboardInterrupt:
            pass
        sys.stdout = sys.__stdout__
        timer.join()
        assert cluster.run(lambda device: device.all_reduce(1)).outputs == [2, 2]
"""
ALL = OFTEN + HANDLED + "cluster.run(busy)"


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_a_working_cluster_and_one_that_nobody_handles_ends_the_script():
    with script(ALL, backend="process", transport="shared_memory", every=6) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "stopped True\n"
        assert "running" in process.stdout.readline()
        ends_by_ctrl_c(process, pids)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_ctrl_c_at_any_moment_leaves_a_working_cluster(backend):
    with script(OFTEN + 'print("running")', backend=backend, every=1) as (process, _):
        _, err = process.communicate(timeout=30)
        assert (err, process.returncode) == ("", 0)


@pytest.mark.parametrize("method", ["run", "close", "forget"])
def test_ctrl_c_at_any_step_leaves_a_cluster_that_runs_and_closes(method, interrupted_at):
    code = getattr(VirtualCluster, method).__code__
    with VirtualCluster(2, backend="thread") as cluster:
        call = {"run": lambda: cluster.run(lambda device: 1), "close": cluster.close, "forget": cluster.forget}[method]
        step = 0
        while interrupted_at(code, step, call):
            step += 1
            assert not cluster._running.locked(), step
            if not cluster.closed:
                assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]
        assert step > 3


@pytest.fixture
def interrupted_at():
    """Makes a call that is interrupted at the given step of a function. False if it has fewer steps.

    A step is an instruction after which Python looks for signals.
    """
    before = sys.gettrace()
    looks = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}

    def interrupted(code, step, call):
        steps, last = iter(range(step + 1)), ""

        def trace(frame, event, _):
            nonlocal last
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                now, last = last, dis.opname[code.co_code[frame.f_lasti]]
                if now in looks and next(steps, None) == step:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    yield interrupted
    sys.settrace(before)


@pytest.mark.slow_for("spawn")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ctrl_c_while_processes_start_leaves_neither_one_nor_a_descriptor(start_method, monkeypatch):
    with VirtualCluster(1, start_method=start_method):
        pass
    write_all = device_process.write_all

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        write_all(*args)

    gc.collect()
    before = belongings()
    monkeypatch.setattr(device_process, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        VirtualCluster(2, start_method=start_method)
    gc.collect()
    assert eventually(lambda: belongings() == before), (belongings(), before)


@pytest.mark.parametrize(("backend", "number", "raised"), [
    ("process", signal.SIGINT, KeyboardInterrupt),
    ("thread", signal.SIGINT, KeyboardInterrupt),
    ("process", signal.SIGALRM, TimeoutError),              # as pytest-timeout does
])
def test_ctrl_c_tells_what_the_devices_were_doing(cluster_of, backend, number, raised):
    def in_time(*_):
        raise TimeoutError

    def kernel(device):
        if device.rank:
            return device.recv(0)
        device.channel(HOST).send(1)
        while True:
            time.sleep(0.001)

    cluster = cluster_of(3, backend)

    def interrupts():
        cluster.channel(0).recv()
        signal.raise_signal(number)

    if raised is TimeoutError:
        before = signal.signal(number, in_time)
    threading.Thread(target=interrupts).start()
    with pytest.raises(raised) as caught:
        cluster.run(kernel)
    if raised is TimeoutError:
        signal.signal(number, before)
    told, = caught.value.__notes__
    first, *lines = told.splitlines()
    assert first == "When the run was interrupted:"
    assert re.fullmatch(rf"  rank 0 computing at {__file__}:\d+", lines[0])
    waits = r"(in recv(\(from rank 0, tag 0\))?|computing)"     # what it waits for is known when it sleeps
    assert len(lines) > 1
    assert all(re.fullmatch(rf"  ranks? (1|2|1 and 2) {waits} at {__file__}:\d+", line) for line in lines[1:])
    assert cluster.run(lambda device: device.rank).outputs == [0, 1, 2]


def test_ctrl_c_while_threads_start_leaves_none(monkeypatch):
    start = threading.Thread.start
    waiting = [True]

    def interrupted(thread):
        if waiting and thread.name == "vcluster-1":
            waiting.clear()
            signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        VirtualCluster(2, backend="thread")
    assert threading.enumerate() == before


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_no_process_outlives_a_killed_host(start_method):
    text = UNHANDLED.replace("transport={transport!r}", f"start_method={start_method!r}")
    with script(text, backend="process") as (process, pids):
        assert len(pids) >= 3
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(is_alive, pids)), 5.0)


def is_alive(pid):
    """Does it run, or has it ended and was not waited for yet (by the system, when its parent is gone)?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- nothing is left ---------------------------------------------------------------------------------------------------


def belongings():
    """Processes below this one, its threads and descriptors."""
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": me.num_fds(),
    }


@pytest.fixture
def semaphores(monkeypatch):
    """The names of the semaphores that this process has made meanwhile and that are still there."""
    names = []
    make_name = synchronize.SemLock._make_name

    def noted():
        names.append(make_name())
        return names[-1]

    monkeypatch.setattr(synchronize.SemLock, "_make_name", staticmethod(noted))
    return lambda: [name for name in names if Path("/dev/shm", f"sem.{name.lstrip('/')}").exists()]


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_leave_nothing_behind(kind, semaphores):
    def once(i):
        with VirtualCluster(2, backend=kind[0], transport=kind[1]) as cluster:
            cluster.run(lambda device, x: device.all_reduce(x), np.ones(1 << 15))
            cluster.channel(0).send(1)
            cluster.run(lambda device: device.rank or device.channel(-1).recv())
            if i == 1:
                with pytest.raises(DeviceFailedError):
                    cluster.run(lambda device: 1 / device.rank)
            if i == 2 and kind[0] == "process":
                with pytest.raises(DeviceFailedError):
                    cluster.run(lambda device: device.rank or os._exit(1))

    once(2)
    gc.collect()  # of the tests before
    before = belongings()
    for i in (1, 2):
        once(i)
    eventually(lambda: belongings() == before, 3.0)
    assert belongings() == before
    assert semaphores() == []


def test_no_name_is_ever_given_to_shared_memory():
    def names(device):
        links = [Path(f"/proc/self/fd/{fd}") for fd in range(100)]
        return [str(link.readlink()) for link in links if link.is_symlink()]

    with VirtualCluster(2) as cluster:
        for found in cluster.run(names):
            shared = [name for name in found if "vcluster" in name]
            assert all("(deleted)" in name for name in shared)


def shared_nbytes():
    """What the clusters of this process take of shared memory."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "vcluster" in str(link.readlink()):
                total += link.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def held_nbytes(cluster):
    own = [psutil.Process(pid).memory_full_info().uss for pid in {*cluster.pids(), os.getpid()}]
    return shared_nbytes() + sum(own)


@pytest.mark.slow
@pytest.mark.slow_for("queue")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", RUNTIMES[:3], ids="-".join)
def test_memory_is_flat_over_many_runs_with_large_arguments_and_results(kind):
    x = np.ones(1 << 17)  # 1 MiB

    def kernel(device, x):
        device.send(x, 1 - device.rank)
        return x + device.recv(1 - device.rank), device.all_reduce(x)

    with VirtualCluster(2, backend=kind[0], transport=kind[1]) as cluster:
        for _ in range(4):
            cluster.run(kernel, x)
        before = held_nbytes(cluster)
        for _ in range(12):
            cluster.run(kernel, x)
        assert held_nbytes(cluster) - before < 9 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_descriptors_are_flat_over_failures_and_kills():
    x = np.ones(1 << 17)

    def kernel(device, x, attempt):
        device.state["kept"] = device.all_reduce(x)
        device.isend(x, 1 - device.rank)
        if device.rank == attempt % 2:
            if attempt % 3:
                os._exit(1)
            raise ValueError
        device.barrier()

    def fail(attempt):
        with pytest.raises(DeviceFailedError):
            cluster.run(kernel, x, attempt)
        run = cluster.run(lambda device, x: device.all_reduce(x), x)
        assert_array_equal(run[1], 2 * x)

    with VirtualCluster(2) as cluster:
        for attempt in range(2):
            fail(attempt)
        before, descriptors = shared_nbytes(), belongings()["descriptors"]
        for attempt in range(1, 5):     # each leaves more than a MiB, if it leaves anything
            fail(attempt)
        assert shared_nbytes() - before < 3 << 20
        assert belongings()["descriptors"] == descriptors


def meet_one_after_the_other(device):
    for rank in range(device.rank):
        device.recv(rank, tag=1)    # each comes when those before it have been asleep for long
    for rank in range(device.rank + 1, device.size):
        device.send(1.0, rank, tag=1)
    if device.rank < device.size - 1:
        device.barrier()


def test_members_that_came_after_one_fell_asleep_hide_no_deadlock(cluster_of):
    with pytest.raises(DeadlockError) as caught:
        cluster_of(Mesh(devices=4)).run(meet_one_after_the_other)
    assert "rank 3" in str(caught.value) and "barrier" in str(caught.value)
