"""Kernels whose objects misbehave: exceptions, results and finalizers that do anything; calls at the wrong moment."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
from runtimes import KINDS

from parallelism.mesh import Mesh
from vcluster import ClusterError, DeviceFailedError, PerDevice


@pytest.fixture(params=KINDS)
def cluster(request, cluster_of):
    return cluster_of(Mesh(devices=2), *request.param)


@pytest.fixture
def threads(cluster_of):
    return cluster_of(Mesh(devices=2), "thread")


def check_works(cluster):
    assert cluster.run(lambda device: int(device.all_reduce(device.rank + 1))).outputs == [3, 3]


# -- exceptions and results that raise when the host looks at them -----------------------------------------------------


class Evil(Exception):
    """What goes wrong is chosen by name: its attributes cannot be read back, set or named."""

    def __init__(self, how):
        super().__init__(how)
        self.how = how

    def __setstate__(self, state):
        raise SystemExit(3)


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise KeyboardInterrupt


class Subtext(str):
    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise RuntimeError("no pickle")


class Worded(Exception):
    def __str__(self):
        return Subtext("its text is a subclass of str")


class Nameless(type):
    def __getattribute__(cls, name):
        if name in ("__name__", "__module__", "__qualname__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


def nameless():
    class WithoutAName(Exception, metaclass=Nameless):
        pass

    raise WithoutAName


def frozen():
    try:
        raise ValueError("the cause")
    except ValueError as error:
        raise Frozen("frozen") from error


def raises(how):
    if how in ("frozen", "name"):
        (frozen if how == "frozen" else nameless)()
    raise (Evil if how == "state" else Worded)(how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["state", "frozen", "text", "name"])
def test_an_exception_that_raises_when_it_is_read_is_a_failure_and_the_next_run_is_whole(cluster, how):
    def kernel(device):
        if device.rank == 0:
            raises(how)
        device.barrier()

    with pytest.raises(DeviceFailedError, match="rank 0 raised"):
        cluster.run(kernel)
    check_works(cluster)


def test_a_result_that_raises_when_it_is_read_leaves_no_block_behind(cluster):
    class Result:
        def __init__(self):
            self.x = np.arange(40000.0)

        def __setstate__(self, state):
            raise SystemExit(3)

    before = used(cluster)
    for _ in range(3):
        with pytest.raises(SystemExit):
            cluster.run(lambda device: Result())
        check_works(cluster)
    assert used(cluster) == before


def used(cluster):
    """The bytes of the blocks in use, once the group of all has its slots."""
    check_works(cluster)
    return cluster.run(lambda device: (gc.collect() and None) or device.endpoint.heap.used_bytes()).outputs


# -- Python's stack ends inside a call ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
def test_a_call_that_ended_at_the_limit_of_the_stack_is_not_made_a_second_time(cluster):
    def deep(device):
        def down():
            try:
                return down()
            except RecursionError:  # each level tries again, until there is room for the call
                if device.rank == 0:
                    device.send(np.arange(3.0), 1)
                    return True
                return device.recv(0).tolist() == [0, 1, 2]

        return down()

    for _ in range(2):
        try:
            said = cluster.run(deep).outputs == [True, True]    # it did not get far enough to be seen
        except DeviceFailedError as error:
            said = "broken off by" in str(error) or "raised ctypes.ArgumentError" in str(error)     # see `BREAKING`
        assert said
        check_works(cluster)


def test_a_call_that_is_broken_off_is_the_last_of_its_run(cluster):
    def kernel(device):
        def term(a, b):
            return term(a, b) if device.rank == 0 else np.maximum(a, b)

        with suppress(RecursionError):
            device.all_reduce(np.arange(3.0), op=term)
        return 5

    with pytest.raises(DeviceFailedError, match="broken off by RecursionError at the limit of Python's stack"):
        cluster.run(kernel)
    check_works(cluster)


KEPT = []  # what a kernel on a thread shares with the host


# -- calls when there is no run, or of another device ------------------------------------------------------------------


def test_a_thread_that_outlives_its_run_cannot_call(threads):
    go, said = threading.Event(), []
    KEPT[:] = [go, said]
    threads.run(leaves_a_thread)
    late = [thread for thread in threading.enumerate() if thread.name == "late"]
    go.set()
    for thread in late:
        thread.join()
    assert len(said) == 2
    assert all("no run is in progress on this device" in text for text in said)
    check_works(threads)


def leaves_a_thread(device):
    from test_odd_kernels import KEPT

    go, said = KEPT

    def late():
        go.wait()
        try:
            device.all_reduce(1e6)
        except ClusterError as error:
            said.append(str(error))

    threading.Thread(target=late, daemon=True, name="late").start()


def test_a_device_is_refused_in_the_thread_of_the_host_and_of_another_device(threads):
    devices, said = {}, {}
    KEPT[:] = [devices, said]
    threads.run(keeps)
    with pytest.raises(ClusterError, match="no run is in progress on this device"):
        devices[0].all_reduce(1.0)
    threads.run(uses_the_other)
    assert all("in the thread of another device" in said[rank] for rank in (0, 1))
    check_works(threads)


def keeps(device):
    from test_odd_kernels import KEPT

    KEPT[0][device.rank] = device


def uses_the_other(device):
    from test_odd_kernels import KEPT

    devices, said = KEPT
    device.barrier()
    try:
        devices[1 - device.rank].all_reduce(1.0)
    except ClusterError as error:
        said[device.rank] = str(error)
    device.barrier()


# -- the host has no console -------------------------------------------------------------------------------------------


def test_a_kernel_may_print_where_the_host_has_no_stdout(cluster, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cluster.run(lambda device: print("heard by nobody") or device.rank).outputs == [0, 1]


# -- an interrupt comes while a block is freed -------------------------------------------------------------------------


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.slow_for("process-queue")
def test_an_interrupt_is_not_lost_in_the_callback_of_a_block(cluster, capfd):
    def kernel(device):
        if device.rank == 0:
            raise ValueError("on purpose")
        while True:
            device.empty(1)

    before = used(cluster)
    with pytest.raises(DeviceFailedError, match="on purpose"):
        cluster.run(kernel)
    check_works(cluster)
    assert used(cluster) == before
    out, err = capfd.readouterr()
    assert "Exception ignored" not in out + err


# -- attributes of the device ------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mesh", "rank", "size", "index"])
def test_the_place_of_a_device_cannot_be_set(cluster, name):
    with pytest.raises(DeviceFailedError, match=rf"device\.{name} is fixed: a kernel reads it, and cannot set it to 5"):
        cluster.run(lambda device: setattr(device, name, 5))
    check_works(cluster)


def test_the_state_of_a_device_may_be_another_dict_and_nothing_else(cluster):
    with pytest.raises(DeviceFailedError, match=r"cannot be 'weights'; write device\.state\['name'\] = value"):
        cluster.run(lambda device: setattr(device, "state", "weights"))
    cluster.run(lambda device: setattr(device, "state", {"weights": device.rank}))
    assert cluster.run(lambda device: device.state["weights"]).outputs == [0, 1]


# -- handlers of signals that a kernel leaves behind -------------------------------------------------------------------


class Limit(BaseException):
    """A time limit that no ``except Exception`` swallows."""


def limit(device, error, seconds=0.0, fail=False):
    """A kernel that sets a time limit, and does not take it back."""

    def too_late(number, frame):
        raise error("too late")

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if fail:
        raise KeyError("failed")
    return os.getpid()


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, Limit], ids=lambda error: error.__name__)
def test_a_time_limit_that_a_kernel_leaves_behind_is_told_and_harms_no_later_run(cluster_of, error, capfd):
    cluster = cluster_of(Mesh(devices=2), "process")
    left = cluster.run(limit, error).outputs
    os.kill(left[0], signal.SIGALRM)
    assert cluster.run(lambda device: (os.getpid(), int(device.all_reduce(1)))).outputs == [(pid, 2) for pid in left]
    told = [line for line in capfd.readouterr().err.splitlines() if "SIGALRM" in line]
    assert len(told) == 1
    assert told[0].startswith(f"[rank 0] the handler of SIGALRM, which an earlier kernel set, raised {error.__name__}")
    assert "between two runs, at " in told[0]
    assert "test_odd_kernels.py" in told[0]
    assert "takes it back when it ends" in told[0]


def test_a_handler_that_a_kernel_set_raises_in_its_next_kernel(cluster_of):
    cluster = cluster_of(Mesh(devices=2), "process")
    cluster.run(limit, Limit)
    with pytest.raises(DeviceFailedError, match=r"rank 1 raised [\w.]*Limit"):
        cluster.run(lambda device: signal.raise_signal(signal.SIGALRM) if device.rank == 1 else device.barrier())
    check_works(cluster)


@pytest.mark.timeout(900)     # a crowded machine is slow, not wrong: the deadline of a run finds one that hangs
@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_time_limits_that_end_at_drawn_moments_leave_the_devices_alive(cluster_of, count):
    cluster = cluster_of(Mesh(devices=3), "process")
    rng = np.random.default_rng(5)
    pids = cluster.run(lambda device: os.getpid()).outputs
    for _ in range(count):
        seconds, fail = rng.uniform(1e-5, 4e-3), bool(rng.integers(2))
        with suppress(DeviceFailedError):
            cluster.run(limit, TimeoutError, seconds, PerDevice([fail, False, False]))
        with suppress(DeviceFailedError):       # the alarm may come in this kernel
            cluster.run(lambda device: signal.setitimer(signal.ITIMER_REAL, 0))
        assert cluster.run(lambda device: os.getpid() * int(device.all_reduce(1)) // 3).outputs == pids
