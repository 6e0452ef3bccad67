"""Real processes: how they start with each method, what reaches them, and that none outlives its host."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from multiprocessing import Pipe, process
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest
from gone import gone
from paths import ROOT

from vcluster import DeviceFailedError, VirtualCluster
from vcluster.processes import crew, default_start_method, device_process as processes, forkserver
from vcluster.processes.blas_threads import THREAD_VARIABLES
from vcluster.processes.device_process import START_METHODS, Descriptor, start_process, stop_fork_server
from vcluster.processes.forkserver import MOST_DESCRIPTORS, ForkServer


@pytest.fixture(scope="module", autouse=True)
def fork_servers_load_nothing_for_kernels():
    """Many are started here. The one of the other modules has loaded what kernels need, and goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "SERVER", ForkServer())
        patch.setattr(forkserver, "OF_DEVICES", ())
        yield
        stop_fork_server()


@pytest.fixture(params=START_METHODS)
def start_method(request):
    return request.param


def ask(function, *args, start_method, close=()):
    """What ``function(*args)`` gives in a process of its own."""
    ours, theirs = Pipe()
    with ours, theirs:
        started = start_process(_answer, (theirs, function, args), name="asked", start_method=start_method, close=close)
        theirs.close()
        answer = ours.recv()
        started.join()
        assert started.exitcode == 0
        return answer


def _answer(connection, function, args):
    connection.send(function(*args))


def block(connection=None):
    if connection is not None:
        connection.send(os.getpid())
    signal.pause()


@contextlib.contextmanager
def blocked(start_method, n=1):
    """Processes that run until they are killed."""
    started = []
    try:
        for i in range(n):
            ours, theirs = Pipe()
            with ours, theirs:
                started.append(start_process(block, (theirs,), name=f"blocked {i}", start_method=start_method))
                assert ours.recv() == started[-1].pid
        yield started
    finally:
        for each in started:
            each.kill()
            each.join()


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name == "spawn")) for name in START_METHODS])
def seen(request, tmp_path_factory):
    """What one process, asked once for several tests, sees of itself and of a host that has changed since its start."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    scale, folder = np.arange(6.0).reshape(2, 3), tmp_path_factory.mktemp("now")

    def look(x, y):
        import threadpoolctl

        me = process.current_process()
        np.ones((64, 64)) @ np.ones((64, 64))
        try:
            start = start_process(int, name="inner")
        except RuntimeError as error:
            start = str(error)
        return {
            "computed": float((scale * x).sum()) + y,
            "process": (me.name, me.daemon, signal.getsignal(signal.SIGINT) is signal.SIG_IGN, os.read(0, 1),
                        os.fstat(0).st_rdev),
            "thread variables": [os.environ[name] for name in THREAD_VARIABLES],
            "pools": [pool["num_threads"] for pool in threadpoolctl.threadpool_info()],
            "now": (sys.path[0], str(Path.cwd()), os.environ.get("SET_AFTER_THE_SERVER_STARTED")),
            "a start": start,
        }

    with pytest.MonkeyPatch.context() as patch, threadpoolctl.threadpool_limits(3):
        if request.param == "forkserver":
            ask(int, start_method=request.param)
        for name in THREAD_VARIABLES:
            patch.setenv(name, "3")
        patch.chdir(folder)
        patch.syspath_prepend("/somewhere/else")
        patch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
        before = dict(os.environ)
        found = ask(look, 2, 1, start_method=request.param)
        pools = {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
        return {**found, "folder": str(folder), "environment kept": dict(os.environ) == before, "pools here": pools}


@pytest.mark.sampled(2, 1)
def test_a_function_of_this_module_runs_with_its_arguments(seen):
    assert seen["computed"] == 31.0


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
def test_the_process_is_a_named_daemon_without_standard_input_that_ignores_interrupts(seen):
    assert seen["process"] == ("asked", True, True, b"", Path(os.devnull).stat().st_rdev)


def test_blas_has_one_thread_and_the_host_keeps_its_environment(seen):
    assert seen["pools here"] <= {3}
    assert seen["thread variables"] == ["1"] * len(THREAD_VARIABLES)
    assert set(seen["pools"]) <= {1}
    assert seen["environment kept"]


def test_the_hosts_directory_path_and_variables_of_now_reach_the_process(seen):
    assert seen["now"] == ("/somewhere/else", seen["folder"], "yes")


def test_a_process_cannot_start_processes_of_its_own(seen):
    assert "cannot start processes of its own" in seen["a start"]


@pytest.mark.sampled(2)
@pytest.mark.slow_for("spawn")
def test_descriptors_connections_and_sockets_are_handed_over(start_method):
    read, write = os.pipe()
    left, right = socket.socketpair()
    ours, theirs = Pipe()
    with left, right, ours, theirs:

        def use(first, second, sock, connection):
            os.write(first.take(), b"a")
            os.close(first.take())
            os.write(second.take(), b"b") if second.take() != first.take() else None
            sock.send(b"c")
            connection.send("d")

        other = os.dup(write)
        started = start_process(
            use, (Descriptor(write), Descriptor(other), right, theirs), name="writer", start_method=start_method
        )
        started.join()
        os.close(write)
        os.close(other)
        assert started.exitcode == 0
        assert os.read(read, 9) + os.read(read, 9) == b"ab"
        assert (left.recv(9), ours.recv()) == (b"c", "d")
        os.close(read)


def test_a_descriptor_is_handed_over_only_as_a_process_starts():
    import pickle

    with pytest.raises(TypeError, match="only be passed to a process that is starting"):
        pickle.dumps(Descriptor(0))


def test_a_forked_process_closes_what_it_is_told_to():
    read, write = os.pipe()

    inode = os.fstat(write).st_ino

    def has_pipe(fd):
        with contextlib.suppress(OSError):
            return os.fstat(fd).st_ino == inode
        return False

    assert ask(has_pipe, write, start_method="fork")
    assert not ask(has_pipe, write, start_method="fork", close=[write])
    os.close(read)
    os.close(write)


@pytest.mark.sampled(3)
@pytest.mark.slow_for("spawn")
@pytest.mark.parametrize(("code", "expected"), [("7", 7), ("None", 0), ("'words'", 1)])
def test_the_exit_code_is_what_the_process_ended_with(start_method, code, expected):
    def end():
        sys.exit(eval(code))

    started = start_process(end, name="ends", start_method=start_method)
    started.join()
    assert started.exitcode == expected
    assert not started.is_alive()


@pytest.mark.sampled(3)
def test_a_killed_process_is_seen_at_its_sentinel_and_no_descriptor_stays_open(start_method):
    if start_method == "forkserver":
        ask(int, start_method=start_method)
    process.active_children()
    before = psutil.Process().num_fds()
    with blocked(start_method) as [started]:
        assert started.is_alive() and started.exitcode is None
        assert wait([started.sentinel], 0) == []
        os.kill(started.pid, signal.SIGUSR1)
        assert wait([started.sentinel], 30) == [started.sentinel]
        started.join()
        assert started.exitcode == -signal.SIGUSR1
        started.kill()  # nothing is there: nothing happens
    del started
    process.active_children()
    assert psutil.Process().num_fds() == before


@pytest.mark.sampled(4)
@pytest.mark.slow_for("spawn")
def test_a_start_looks_at_no_other_process(start_method, monkeypatch):
    """Otherwise the starts of many devices take a time that grows with the square of their number."""
    looked = []
    with blocked(start_method, 3) as started:
        wait_for = processes._Popen.wait
        with monkeypatch.context() as patch:
            patch.setattr(processes._Popen, "wait", lambda popen, timeout=None: (
                looked.append(popen.pid), wait_for(popen, timeout))[1])
            assert ask(abs, -3, start_method=start_method) == 3
    assert looked and not {each.pid for each in started} & {*looked}


@pytest.mark.sampled(4)
@pytest.mark.slow_for("spawn")
def test_no_descriptor_stays_open(start_method):
    ask(int, start_method=start_method)
    before = psutil.Process().num_fds()
    ask(int, start_method=start_method)
    with blocked(start_method):
        pass
    process.active_children()
    assert psutil.Process().num_fds() == before


@pytest.mark.sampled(4)
@pytest.mark.slow_for("spawn")
def test_global_random_numbers_differ_between_processes(start_method):
    np.random.seed(5)  # noqa: NPY002
    draw = lambda: np.random.randint(2**62)  # noqa: NPY002
    assert len({ask(draw, start_method=start_method) for _ in range(2)}) == 2


@pytest.mark.slow
def test_the_fork_server_is_started_again_if_it_was_killed():
    with blocked("forkserver", 2) as started:
        server = processes.SERVER.pid
        os.kill(server, signal.SIGKILL)
        for each in started:  # it takes its children along
            assert wait([each.sentinel], 30)
            each.join()
            assert each.exitcode == -signal.SIGKILL
            assert gone(each.pid)
        assert ask(os.getppid, start_method="forkserver") == processes.SERVER.pid != server


@pytest.mark.slow
def test_once_a_process_has_ended_the_next_has_loaded_what_the_host_has(tmp_path, monkeypatch):
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "of_the_host.py").write_text(f"open({str(told)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "of_the_host", ModuleType("of_the_host"))
    monkeypatch.setattr(forkserver, "OF_DEVICES", ("of_the_host",))
    stop_fork_server()

    def is_loaded():
        return "of_the_host" in sys.modules

    assert not ask(is_loaded, start_method="forkserver")
    told.open().close()     # the server opens the other end as it loads the module
    assert ask(is_loaded, start_method="forkserver")


@pytest.mark.slow
def test_a_device_that_dies_while_the_fork_server_stays_stopped_is_replaced(monkeypatch):
    monkeypatch.setattr(forkserver, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(crew, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(processes, "CHECK_SECONDS", 0.05)
    with VirtualCluster(2) as cluster:
        cluster.run(lambda device: device.state.update(mark=device.rank))
        server = processes.SERVER.pid
        os.kill(server, signal.SIGSTOP)
        try:
            os.kill(cluster.pids()[1], signal.SIGABRT)
            with pytest.raises(DeviceFailedError, match=r"rank 1 .* was ended by SIGABRT"):
                cluster.run(lambda device: device.barrier())
            assert processes.SERVER.pid != server
            kernel = lambda device: (int(device.all_reduce(1)), device.state.get("mark"))
            assert cluster.run(kernel).outputs == [(2, 0), (2, None)]
            cluster.close()  # one device is a child of the server that cannot tell of its end
        finally:
            os.kill(server, signal.SIGCONT)


@pytest.mark.slow
def test_stopping_the_fork_server_ends_what_it_started():
    with blocked("forkserver", 3) as started:
        server = processes.SERVER.pid
        stop_fork_server()
        assert gone(server)
        for each in started:
            each.join()
            assert each.exitcode == -signal.SIGKILL
    assert ask(int, start_method="forkserver") == 0


def test_the_fork_server_ignores_interrupts():
    ask(int, start_method="forkserver")
    server = processes.SERVER.pid
    os.kill(server, signal.SIGINT)
    assert ask(os.getppid, start_method="forkserver") == server == processes.SERVER.pid


@contextlib.contextmanager
def many_open_files(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count:
        pytest.skip("too few descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.sampled(3)
@pytest.mark.slow_for("spawn")
@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_host_with_more_than_a_thousand_open_files_starts_processes_and_forks(start_method):
    with many_open_files(1100), VirtualCluster(2, start_method=start_method) as cluster:
        outputs = cluster.run(lambda device: np.full(1 << 16, device.rank)).outputs
        child = os.fork()
        if child == 0:
            os._exit(int(outputs[1][-1]) + 6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert cluster.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2]


def test_too_many_descriptors_are_refused():
    with pytest.raises(ValueError, match=f"{MOST_DESCRIPTORS} descriptors, got {MOST_DESCRIPTORS + 1}"):
        ForkServer().start_process([0] * (MOST_DESCRIPTORS + 1))


@pytest.mark.takes_seconds
def test_an_unknown_start_method_is_refused():
    with pytest.raises(ValueError, match=r"one of 'forkserver', 'spawn', 'fork', got 'thread'"):
        start_process(int, name="x", start_method="thread")


@pytest.mark.takes_seconds
def test_the_start_method_follows_the_platform(monkeypatch):
    for platform, expected in (("linux", "forkserver"), ("darwin", "spawn")):
        monkeypatch.setattr(sys, "platform", platform)
        assert default_start_method() == expected
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match=r"WSL.*backend="):
        default_start_method()


@pytest.mark.slow
@pytest.mark.slow_for("spawn")
def test_a_child_forked_by_the_user_leaves_the_hosts_processes_alone(start_method):
    with blocked(start_method, 2) as started:
        child = os.fork()
        if child == 0:
            try:
                started[0].kill()
                ours = ask(int, start_method=start_method) == 0
                stop_fork_server()
                os._exit(0 if ours else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(each.is_alive() for each in started)


# -- whole scripts -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
from multiprocessing import Pipe
from vcluster.processes.device_process import start_process

print("the script runs")
factor = 7

def work(connection, x):
    connection.send(x * factor)

for method in {methods}:
    ours, theirs = Pipe()
    processes = [start_process(work, (theirs, i), name=str(i), start_method=method) for i in {numbers}]
    print(method, sorted(ours.recv() for _ in processes))
"""


def run_python(*arguments, stdin=None, **options):
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "stdin", "-c"])
def test_a_script_needs_no_main_guard(way, tmp_path):
    script = SCRIPT.format(methods=START_METHODS, numbers="range(2 - (method == 'spawn'))")
    (tmp_path / "script.py").write_text(script)
    done = {
        "file": lambda: run_python(str(tmp_path / "script.py")),
        "stdin": lambda: run_python("-", stdin=script),
        "-c": lambda: run_python("-c", script),
    }[way]()
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "the script runs", *(f"{method} {[0] if method == 'spawn' else [0, 7]}" for method in START_METHODS)]


HOST = """
import os, signal, sys, time
from multiprocessing import Pipe
from vcluster.processes.device_process import start_process

def block(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send(os.getpid())
    while True:
        {work}

pids = []
for method in {methods}:
    ours, theirs = Pipe()
    start_process(block, (theirs,), name=method, start_method=method)
    pids.append(ours.recv())
import psutil
everybody = {{*pids, *(child.pid for child in psutil.Process().children(recursive=True))}}
try:
    print(*everybody, flush=True)
    {end}
except KeyboardInterrupt:
    print(*(psutil.pid_exists(pid) for pid in pids))
"""
EACH_AND_AGAIN = (*START_METHODS, "forkserver", "fork")
"""The last is a copy of a host that holds the pipes of all the others."""


MULTIPROCESSING = """
import multiprocessing
from vcluster.processes.device_process import start_process
start_process(int, name="x").join()
multiprocessing.set_start_method("spawn")   # refused once anybody has asked for the default
print(multiprocessing.get_start_method(), multiprocessing.active_children(), flush=True)
"""


@pytest.mark.slow
def test_processes_ignore_the_interrupt_of_the_whole_group_and_end_with_their_host_that_is_killed(tmp_path):
    """And nothing is left in the file system, and the start method of the user's own processes is left alone."""
    # The last ones are busy, so that they take no time from those that start before.
    work = "signal.pause() if multiprocessing.current_process().name != 'fork' else None"
    script = MULTIPROCESSING + HOST.format(methods=EACH_AND_AGAIN, work=work, end="signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}    sys.stdout.flush()\n    signal.pause()"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    ) as host:
        assert host.stdout.readline() == "spawn []\n"
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == len(EACH_AND_AGAIN) + 1  # the fork server
        os.killpg(host.pid, signal.SIGINT)
        assert host.stdout.readline().split() == ["True"] * len(EACH_AND_AGAIN)
        host.kill()
        assert host.communicate() == ("", "")
    assert all(gone(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("work", ["signal.pause()", "pass"])
def test_kill_9_of_the_host_leaves_no_process_and_nothing_in_the_file_system(work, tmp_path):
    script = HOST.format(methods=EACH_AND_AGAIN, work=work, end="signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    ) as host:
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == len(EACH_AND_AGAIN) + 1  # the fork server
        host.kill()
    assert all(gone(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise SystemExit", "os._exit(0)"])
def test_the_end_of_the_host_leaves_no_process(end):
    done = run_python("-c", HOST.format(methods=EACH_AND_AGAIN, work="signal.pause()", end=end))
    assert (done.stderr, done.returncode) == ("", 0)
    pids = done.stdout.split()
    assert len(pids) == len(EACH_AND_AGAIN) + 1  # the fork server
    assert all(gone(int(pid)) for pid in pids)


@pytest.mark.slow
def test_interrupting_the_whole_group_ends_the_host_alone_and_its_end_leaves_no_process():
    script = HOST.format(methods=EACH_AND_AGAIN, work="signal.pause()", end="signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    ) as host:  # fmt: skip
        pids = host.stdout.readline().split()
        assert len(pids) == len(EACH_AND_AGAIN) + 1  # the fork server
        os.killpg(host.pid, signal.SIGINT)
        out, err = host.communicate(timeout=50)
    assert (out.split(), err, host.returncode) == (["True"] * len(EACH_AND_AGAIN), "", 0)
    assert all(gone(int(pid)) for pid in pids)
