"""What a kernel and its surroundings do to a device: names of files, signals, streams; crowded cores."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from paths import ROOT
from runtimes import KINDS, RUNTIMES

from parallelism.mesh import Mesh
from vcluster import ClusterError, CollectiveMismatchError, DeviceFailedError, VirtualCluster
from vcluster.memory import Signals


@pytest.fixture(params=KINDS)
def cluster(request, cluster_of):
    return cluster_of(Mesh(devices=3), *request.param)


@pytest.fixture(params=RUNTIMES[:2], ids="-".join)
def processes(request, cluster_of):
    return cluster_of(Mesh(devices=3), *request.param)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# -- names -------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
from vcluster import ClusterError, VirtualCluster

def dies(device):
    device.barrier()
    if device.rank:
        os._exit(3)
    device.barrier()

with VirtualCluster(2) as cluster:
    assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]
    cluster.run(lambda device: print("caf\\u00e9"))
    try:
        cluster.run(dies)
    except ClusterError as error:
        assert error.locations == (f"{__file__}:6",), error.locations
        sys.exit(5)
"""


@pytest.mark.slow
@pytest.mark.slow_for("locale")
@pytest.mark.parametrize(("name", "variables"), [
    (b"caf\xe9.py", {}), ("café.py".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0"}),
], ids=["not-utf8", "not-of-the-locale"])
def test_a_script_may_have_any_name_that_the_system_takes(tmp_path, name, variables):
    path = os.path.join(os.fsencode(tmp_path), name)  # noqa: PTH118  (of bytes)
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(SCRIPT)
    except OSError:
        pytest.skip("this file system takes no such name")
    said = subprocess.run(
        [sys.executable, path], env={**os.environ, **variables, "PYTHONPATH": str(ROOT)}, capture_output=True,
        check=False)
    assert said.returncode == 5, said.stderr.decode(errors="backslashreplace")


# -- environment variables ---------------------------------------------------------------------------------------------


def test_variables_that_the_host_sets_and_removes_hold_in_devices(cluster, monkeypatch):
    def read(device):
        return os.environ.get("A_VARIABLE"), os.getenvb(b"ANOTHER")

    monkeypatch.setenv("A_VARIABLE", "first")
    assert cluster.run(read).outputs == [("first", None)] * 3
    monkeypatch.setenv("A_VARIABLE", "sécond")
    os.environb[b"ANOTHER"] = b"caf\xe9"
    assert cluster.run(read).outputs == [("sécond", b"caf\xe9")] * 3
    monkeypatch.delenv("A_VARIABLE")
    del os.environb[b"ANOTHER"]
    assert cluster.run(read).outputs == [(None, None)] * 3


def test_variables_that_a_kernel_sets_stay_in_its_device(processes, monkeypatch):
    def write(device):
        os.environ["OF_A_KERNEL"] = str(device.rank)

    def read(device):
        return os.environ.pop("OF_A_KERNEL", None), os.environ["OMP_NUM_THREADS"]

    processes.run(write)
    monkeypatch.setenv("A_VARIABLE", "told")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert processes.run(read).outputs == [(str(rank), "1") for rank in range(3)]
    assert "OF_A_KERNEL" not in os.environ


@pytest.mark.slow_for("fork", "spawn")
@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_a_variable_set_between_the_start_and_the_first_run_holds_and_in_a_replaced_device(start_method, monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "before")
    with VirtualCluster(2, start_method=start_method) as cluster:
        monkeypatch.setenv("A_VARIABLE", "after")
        assert cluster.run(lambda device: os.environ["A_VARIABLE"]).outputs == ["after"] * 2
        with pytest.raises(DeviceFailedError):
            cluster.run(lambda device: os._exit(3) if device.rank else device.barrier())
        assert cluster.run(lambda device: os.environ["A_VARIABLE"]).outputs == ["after"] * 2
        monkeypatch.delenv("A_VARIABLE")
        assert cluster.run(lambda device: os.environ.get("A_VARIABLE")).outputs == [None] * 2


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])
def test_a_signal_that_a_device_gets_is_named(processes, number):
    def kernel(device):
        if device.rank == 1:
            os.kill(os.getpid(), number)
            time.sleep(20)
        device.barrier()

    with pytest.raises(DeviceFailedError, match=rf"rank 1 \(pid \d+\) was ended by {number.name} \(") as caught:
        processes.run(kernel)
    assert caught.value.signal == number.name
    assert processes.run(lambda device: int(device.all_reduce(1))).outputs == [3] * 3


class LateError(Exception):
    """What the handlers of kernels raise."""


def with_alarm(call):
    """Call with a limit of time, as programs make one of SIGALRM. Whether it was in time.

    On a crowded machine a device may not have come to its wait when the time is over: then the alarm is set again.
    """
    def late(_, frame):
        while frame is not None and frame.f_code is not Signals.wait.__code__:
            frame = frame.f_back
        if frame is not None:
            raise LateError
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        call()
    except LateError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return True


def compute_until_there_is(file):
    """A device that computes is no part of a deadlock, however long another one waits."""
    while not file.exists():
        pass


def test_a_kernel_that_waits_for_a_message_with_a_limit_of_time_can_wait_again(processes, tmp_path):
    ready = tmp_path / "ready"

    def kernel(device):
        if device.rank == 0:
            coming = device.irecv(1, tag=9)
            late = [with_alarm(lambda: device.recv(1)), with_alarm(coming.wait)]
            ready.touch()
            return late, device.recv(1), coming.wait()
        if device.rank == 1:
            compute_until_there_is(ready)
            device.send(7, 0)
            device.send(8, 0, tag=9)
        return None

    assert processes.run(kernel).outputs == [([False, False], 7, 8), None, None]


def test_a_collective_that_a_handler_breaks_off_is_the_last_of_its_run(processes, tmp_path):
    ready = tmp_path / "ready"

    def kernel(device):
        if device.rank == 0:
            with_alarm(device.barrier)
            ready.touch()
        else:
            compute_until_there_is(ready)

    with pytest.raises(DeviceFailedError, match="broken off by LateError, which the handler of a signal raised"):
        processes.run(kernel)
    assert processes.run(lambda device: int(device.all_reduce(1))).outputs == [3] * 3


# -- streams -----------------------------------------------------------------------------------------------------------


def without(how):
    """Lose the streams of this process."""
    if how == "none":
        sys.stdout = sys.stderr = None
    elif how == "closed":
        sys.stdout.close()
        sys.stderr.close()
    else:
        sys.stdout = sys.stderr = io.StringIO()
        sys.stdout.close()


def says(device):
    print("out", device.rank, flush=True)
    print("err", device.rank, file=sys.stderr, flush=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["none", "closed", "replaced"])
def test_a_kernel_that_loses_its_streams_does_not_silence_later_runs(cluster, capsys, how):
    before = sys.stdout, sys.stderr
    cluster.run(lambda device: without(how))
    cluster.run(says)
    assert (sys.stdout, sys.stderr) == before
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(said.err.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]


# -- lines of asynchronous calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_mismatch_names_the_line_of_the_asynchronous_call(cluster, waits):
    def kernel(device):
        if device.rank == 1:
            work = device.all_reduce(np.ones(4), async_op=True)  # the odd one
        else:
            work = device.all_reduce(np.ones(3), async_op=True)  # the others
        if waits:
            work.wait()

    with pytest.raises(CollectiveMismatchError) as caught:
        cluster.run(kernel)
    assert set(caught.value.locations) == {line_of(kernel, "the odd one"), line_of(kernel, "the others")}
    assert str(caught.value).count(f"{__file__}:") == 2


@pytest.mark.parametrize("does", ["waits", "computes"])
def test_a_mismatch_names_the_line_of_a_member_that_did_something_else_when_it_was_stopped(cluster, does):
    def kernel(device):
        if device.rank != 1:
            device.all_reduce(np.ones(3))  # the others
        work = device.all_reduce(np.ones(4), async_op=True)  # the odd one
        while does == "computes":
            pass
        device.recv(0)
        work.wait()

    with pytest.raises(CollectiveMismatchError) as caught:
        cluster.run(kernel)
    others, odd = line_of(kernel, "the others"), line_of(kernel, "the odd one")
    assert caught.value.locations == (others, odd, others)
    assert f"rank 1 called all_reduce(float64[4], op='sum') at {odd}" in str(caught.value)


def test_a_message_of_another_shape_names_the_line_that_declared_it(cluster):
    def kernel(device):
        if device.rank == 1:
            device.send(np.ones(4), 0)  # sends
        elif device.rank == 0:
            work = device.irecv(1, shape=(3,))  # declares
            work.wait()

    with pytest.raises(CollectiveMismatchError) as caught:
        cluster.run(kernel)
    assert caught.value.locations == (line_of(kernel, "# declares"), line_of(kernel, "# sends"))


def test_who_waits_for_an_operation_that_was_given_up_is_told():
    with VirtualCluster(2, backend="thread") as cluster:
        forgotten = cluster.channel(0).irecv()
        cluster.forget()
        closed = cluster.channel(1).irecv()
        left = cluster.channel(1)
        cluster.run(lambda device: device.channel(-1).send(5) if device.rank == 0 else None)
    for work in (forgotten, closed):
        with pytest.raises(ClusterError, match=r"recv\(from rank \d, tag 0\), called at .*, was given up"):
            work.wait()
    with pytest.raises(ClusterError, match="was closed by the host"):
        left.recv()


# -- crowded cores -----------------------------------------------------------------------------------------------------


def work(device, cores):
    """The same work five times, on these cores alone, while all devices do so."""
    os.sched_setaffinity(0, cores)
    device.barrier()
    for _ in range(5):
        with device.compute("work"):
            sum(i * i for i in range(100_000))
        device.barrier()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be held on two cores")
def test_measured_compute_stays_what_it_is_on_crowded_cores():
    """Eight processes on two cores take four times as long on the wall, and not by the clocks of their threads."""
    cores = sorted(os.sched_getaffinity(0))[:2]

    def least(size):
        with VirtualCluster(size) as cluster:
            trace = cluster.run(work, cores).trace
        return [min(event.duration_seconds for event in trace.events if (event.rank, event.name) == (rank, "work"))
                for rank in range(size)]

    (alone,), crowded = least(1), least(8)
    assert np.median(crowded) < 2 * alone
    assert alone < 2 * np.median(crowded)


# -- warnings ----------------------------------------------------------------------------------------------------------


def divides(device):
    return float(np.float64(device.rank) / np.zeros(1)[0])


@pytest.mark.parametrize(("action", "raised"), [("error", RuntimeWarning), ("ignore", None)])
def test_devices_warn_as_the_host_does(cluster, capsys, action, raised):
    with warnings.catch_warnings(action=action):
        if raised is None:
            assert cluster.run(divides)[1] == np.inf
            assert "divide by zero" not in capsys.readouterr().err
            return
        with pytest.raises(DeviceFailedError, match="divide by zero") as caught:
            cluster.run(divides)
    assert type(caught.value.exceptions[1]) is raised
    assert caught.value.locations[0] == line_of(divides, "return")


def test_a_filter_of_a_class_that_only_the_host_has_is_no_obstacle(cluster):
    class Careful(UserWarning):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error", Careful)
        assert cluster.run(lambda device: device.rank).outputs == [0, 1, 2]


def test_numpy_raises_on_devices_where_it_does_on_the_host(cluster):
    with np.errstate(divide="raise", invalid="ignore"), pytest.raises(DeviceFailedError, match="divide by zero") as caught:
        cluster.run(divides)
    assert set(caught.value.exceptions) == {1, 2}                       # rank 0 has 0 / 0, which is ignored
    assert isinstance(caught.value.exceptions[1], FloatingPointError)
    with np.errstate(all="ignore"):
        assert cluster.run(divides)[2] == np.inf


def overflows(device, times):
    x = np.full(99_000, 60000, np.float16)      # so many that each device adds a part
    for _ in range(times):
        device.all_reduce(x, out=np.empty_like(x))      # over and over
    return device.reduce_scatter(x)                     # of another line


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("action", "said"), [
    ("default", {"over and over": 1, "of another line": 1}), ("once", {"over and over": 1, "of another line": 0}),
])
def test_an_overflow_in_a_collective_is_a_warning_of_the_kernels_line(processes, monkeypatch, action, said):
    heard = []
    monkeypatch.setattr(processes, "show_warning", heard.append)
    with warnings.catch_warnings():
        warnings.simplefilter(action, RuntimeWarning)
        processes.run(overflows, 4)
    assert {warned.message for warned in heard} == {"overflow encountered in add"}
    lines = [f"{warned.filename}:{warned.lineno}" for warned in heard]
    assert {text: lines.count(line_of(overflows, text)) for text in said} == {text: 3 * times for text, times in said.items()}
    assert len(lines) == 3 * sum(said.values())


# -- how arrays are printed --------------------------------------------------------------------------------------------


def test_devices_print_arrays_as_the_host_does(cluster):
    def kernel(device):
        return str(np.array([1 / 3, 1e-9]) * device.all_reduce(1.0))

    usual = cluster.run(kernel).outputs
    with np.printoptions(precision=2, suppress=True, formatter={"bool": lambda value: "yes"}):
        assert cluster.run(kernel).outputs == ["[1. 0.]"] * 3
        assert cluster.run(kernel).outputs == ["[1. 0.]"] * 3
    assert cluster.run(kernel).outputs == usual == ["[1.e+00 3.e-09]"] * 3


# -- the terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ask", "told"), [
    (lambda device: input(), "input()"), (lambda device: importlib.import_module("pdb").set_trace(), "a debugger"),
], ids=["input", "set_trace"])
def test_what_asks_at_the_terminal_is_told_that_there_is_none(processes, ask, told):
    with pytest.raises(DeviceFailedError) as caught:
        processes.run(ask)
    assert f"\n{told} in a device's process has no terminal; run again with backend='thread'" in str(caught.value)
    assert processes.run(lambda device: int(device.all_reduce(1))).outputs == [3] * 3
