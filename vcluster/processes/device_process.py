"""The process of a device starts by one of three methods and cannot outlive its host.

``forkserver`` forks it from a process that has NumPy loaded (`vcluster.processes.forkserver`), in about a millisecond.
``spawn`` starts a new interpreter, in about a tenth of a second. ``fork`` copies the host as it is, including the locks
of its threads: it is fast, and the caller is responsible for its safety. None of them runs the caller's ``__main__``
again, so no ``if __name__ == "__main__"`` guard is needed.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from multiprocessing import context, process, reduction
from typing import Any, NoReturn

from vcluster.code import Pickler, apply_environment
from vcluster.code.environment import environment
from vcluster.memory import forks
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.processes.blas_threads import device_environment, limit_threads
from vcluster.processes.descriptors import close_all, is_readable, pipes, write_all
from vcluster.processes.end_with_host import end_with
from vcluster.processes.exit_watch import unclaimed_exit_code, watch
from vcluster.processes.forkserver import NUMBER, SERVER, ignore_interrupt, read_number, start_python
from vcluster.processes.kernel_forks import keep_from_programs, refuse_children

CHECK_SECONDS = 0.2
"""Seconds between two looks whether a process has ended of which the fork server tells nothing."""

START_METHODS = ("forkserver", "spawn", "fork")


def default_start_method() -> str:
    """``"forkserver"`` on Linux, ``"spawn"`` on macOS.

    On macOS, NumPy may use Accelerate. Once it is loaded it is not safe in a forked process, and our package loads it.
    Raises ``RuntimeError`` on Windows, where descriptors cannot be passed to a new process this way.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            'vcluster cannot start processes on Windows: run it under WSL, or use backend="thread"'
        )
    return "spawn" if sys.platform == "darwin" else "forkserver"


def start_process(
    target: Callable[..., object], args: Iterable[Any] = (), *, name: str, start_method: str | None = None,
    close: Iterable[int] = (),
) -> Process:  # fmt: skip
    """Start a process that runs ``target(*args)``: a daemon that ignores Ctrl-C, has no stdin, and ends with its host.

    ``target`` may be defined in ``__main__``. ``args`` may contain a `Descriptor`, a socket or a
    ``multiprocessing.connection.Connection``. The caller keeps its own copies of these and must close them.
    ``close`` lists descriptors that a forked child must close (the other methods pass on no descriptors by themselves).

    Raises ``ValueError`` for an unknown start method, ``RuntimeError`` where a process cannot be started.
    """
    if start_method is None:
        start_method = default_start_method()
    if start_method not in START_METHODS:
        raise ValueError(
            f"start_method must be one of {', '.join(map(repr, START_METHODS))}, got {start_method!r}"
        )
    default_start_method()
    if process.current_process().daemon:
        raise RuntimeError(
            'a device or a pool worker cannot start processes of its own; use backend="thread" there'
        )
    started = Process(target=target, args=tuple(args), name=name, daemon=True)
    started.start_method = start_method
    started.close_in_child = tuple(close)
    started.start()
    return started


def start_fork_server(*, preload: Sequence[str] = ()) -> None:
    """Start the fork server, on platforms that use one, and return at once.

    It is then ready when the first cluster is created. Devices have the modules ``preload`` loaded, unless the server
    was already running.
    """
    if sys.platform != "win32" and default_start_method() == "forkserver":
        SERVER.start(preload=preload)


def running_processes() -> dict[int, str]:
    """The processes that this process started and that have not ended: their names by process id."""
    return {popen.pid: started.name for started, popen in list(_started.items()) if popen.poll() is None}


def stop_fork_server() -> None:
    """End the fork server and every process that it started. It starts again when the next process is needed."""
    SERVER.stop()


class Descriptor:
    """A file descriptor to pass to a new process. There, ``take`` returns its number.

    Only an argument of `start_process` may contain one. The receiver owns the descriptor and closes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self) -> int:
        """The number of the descriptor in this process."""
        return self._fd

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise TypeError("a Descriptor can only be passed to a process that is starting, as an argument")
        return _descriptor, (reduction.DupFd(self._fd),)


def _descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class Process(process.BaseProcess):
    """A started process with the interface of multiprocessing: pid, sentinel, exitcode, is_alive, join, kill."""

    _start_method = None
    start_method: str
    close_in_child: tuple[int, ...]

    def start(self) -> None:
        """As in multiprocessing, but without a look at every other child, which makes many starts quadratic."""
        self._check_closed()  # type: ignore[attr-defined]
        self._popen = self._Popen(self)
        self._sentinel = self._popen.sentinel
        del self._target, self._args, self._kwargs  # type: ignore[attr-defined]  # they may refer to this process
        process._children.add(self)  # type: ignore[attr-defined]

    @staticmethod
    def _Popen(started: Process) -> _Popen:  # noqa: N802  (the name that BaseProcess calls)
        return _POPEN[started.start_method](started)


class _Popen:
    """The way in which one process was started, and its exit code."""

    pid: int
    sentinel: int

    def __init__(self, started: Process) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # the stream is missing, closed or broken
                stream.flush()
        self.returncode: int | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._fds: list[int] = []
        held = self._launch(started)
        self.close = weakref.finalize(self, close_all, held)
        self.close.atexit = False  # multiprocessing still waits for the process then
        _started[started] = self

    def _launch(self, started: Process) -> list[int]:
        """Start the process. Returns the descriptors that the host must keep open until it ends."""
        raise NotImplementedError

    def _end(self) -> int | None:
        """The exit code. Called when ``sentinel`` is readable, until it returns a code."""
        raise NotImplementedError

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and is_readable(self.sentinel, timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._end()
        return self.returncode

    def kill(self) -> None:
        if os.getpid() == self._owner and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    terminate = kill  # a device may ignore SIGTERM, and must not delay the host's exit

    # multiprocessing.reduction.DupFd calls these while arguments are pickled.

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    class DupFd:
        def __init__(self, index: int) -> None:
            self.index = index

        def detach(self) -> int:
            return _handed_over[self.index]

    def _program(self, started: Process, outputs: tuple[int, ...] = ()) -> bytes:
        """The bytes that the child reads: their length, where to find modules, and what to run.

        ``outputs`` are the numbers that the first descriptors must have in the child.
        """
        config = process.current_process()._config  # type: ignore[attr-defined]
        first = outputs, environment(), device_environment(), sys.argv, bytes(config["authkey"])
        stream = io.BytesIO(NUMBER.pack(0))
        stream.seek(0, os.SEEK_END)
        pickle.dump(first, stream)
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # it has the needed interface
        try:
            _StartPickler(stream).dump(started)
        finally:
            context.set_spawning_popen(None)
        NUMBER.pack_into(program := stream.getbuffer(), 0, len(program) - NUMBER.size)
        return bytes(program)


class _StartPickler(Pickler):
    """A pickler that also knows what multiprocessing can pass on: connections, sockets, its locks and queues."""

    def __init__(self, file: Any) -> None:
        more = reduction.ForkingPickler(io.BytesIO()).dispatch_table
        self.dispatch_table = ChainMap(Pickler.dispatch_table, more)  # looked up once, by __init__
        super().__init__(file)


class _Forked(_Popen):
    """Forked from the fork server, which reports the exit code, unless a signal has stopped it."""

    def _launch(self, started: Process) -> list[int]:
        for fd in (1, 2):  # the host's present ones; the server has those of its own start
            with suppress(OSError):
                os.fstat(fd)
                self._fds.append(fd)
        program = self._program(started, tuple(self._fds))
        self.pid, data, self.sentinel = SERVER.start_process(self._fds)
        write_all(data, program)
        return [self.sentinel]

    def wait(self, timeout: float | None = None) -> int | None:
        end = inf if timeout is None else time.monotonic() + timeout
        while super().wait(max(0.0, min(CHECK_SECONDS, end - time.monotonic()))) is None:
            with self._lock:
                if self.returncode is None:
                    self.returncode = unclaimed_exit_code(self.pid)
            if time.monotonic() >= end:
                break
        return self.returncode

    def _end(self) -> int:
        code = read_number(self.sentinel)
        return -signal.SIGKILL if code is None else code  # the server was killed, and the process with it


class _Spawned(_Popen):
    """A new interpreter."""

    def _launch(self, started: Process) -> list[int]:
        program = self._program(started)
        data_r, data_w, life_r, life_w = pipes(2)
        handed = list(self._fds)
        call = f"from vcluster.processes.device_process import run_spawned; run_spawned({data_r}, {life_r}, {handed})"
        try:
            self._child = start_python(call, [data_r, life_r, *handed])
            self.pid = self._child.pid
            self.sentinel = watch(self.pid)
        except BaseException:
            close_all([data_w, life_w])  # a child that has started ends with that
            raise
        finally:
            close_all([data_r, life_r])
        write_all(data_w, program)
        return [self.sentinel, life_w]

    def _end(self) -> int:
        return self._child.wait()


class _Copied(_Popen):
    """A fork of the host."""

    def _launch(self, started: Process) -> list[int]:
        life_r, life_w = os.pipe()
        held, self.pid = [life_w], 0
        try:
            with DeferredInterrupt():  # Python drops an interrupt in a callback of a fork
                with forks.start_of_a_device():
                    self.pid = os.fork()
                if self.pid == 0:
                    self._live(started, life_r, life_w)
                os.close(life_r)
                self.sentinel = watch(self.pid)
                held.append(self.sentinel)
        except BaseException:
            close_all(held)
            if self.pid:  # it is killed as the pipe closes
                self._end()
            raise
        return held

    @staticmethod
    def _live(started: Process, life_r: int, life_w: int) -> NoReturn:
        """The life of the child."""
        code = 1
        try:
            ignore_interrupt()
            close_all({life_w, *started.close_in_child})
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            keep_from_programs()
            os.environ.update(device_environment())
            limit_threads()
            end_with(life_r)
            code = _run(started, life_r)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return 255  # another part of the program has already waited for it


_POPEN: dict[str, type[_Popen]] = {"forkserver": _Forked, "spawn": _Spawned, "fork": _Copied}


# -- in the new process ------------------------------------------------------------------------------------------------

_handed_over: list[int] = []
"""In a process that is starting: the descriptors passed to it, in the order in which its arguments number them."""


def run_spawned(data: int, life: int, fds: list[int]) -> None:
    """The main function of a spawned process."""
    ignore_interrupt()
    handed: list[int] = []
    for fd in fds:
        handed.append(os.dup(fd) if fd in handed else fd)
    for fd in (data, life, *handed):
        os.set_inheritable(fd, False)
    os._exit(run_received(data, life, handed))


def run_received(data: int, life: int, handed: list[int]) -> int:
    """Run the program that arrives on ``data``, with the descriptors ``handed``. Returns the exit code."""
    try:
        end_with(life)
        size = read_number(data)
        with open(data, "rb") as pipe:
            program = io.BytesIO(pipe.read() if size is None else pipe.read(size))
        if size is None or len(program.getbuffer()) < size:
            return 1  # the host stopped sending, and reports the reason
        outputs, where, variables, arguments, authkey = pickle.load(program)  # noqa: S301  (from our own host)
        for number, fd in zip(outputs, handed, strict=False):
            os.dup2(fd, number)
            os.close(fd)
        sys.argv[:] = arguments
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        apply_environment(where)
        process.current_process().authkey = authkey
        _handed_over[:] = handed
        started = pickle.load(program)  # noqa: S301
        _handed_over.clear()
        return _run(started, life)
    except BaseException:
        traceback.print_exc()
        return 1


def _run(started: Process, life: int) -> int:
    refuse_children()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # a fork has a copy of the global generator's state
    return int(started._bootstrap(parent_sentinel=life))  # type: ignore[attr-defined]


# -- in the host -------------------------------------------------------------------------------------------------------

_started: weakref.WeakKeyDictionary[Process, _Popen] = weakref.WeakKeyDictionary()


def _leave_to_parent() -> None:
    """In every child forked from the host: drop the processes and pipes, which belong to the parent."""
    SERVER.forget()
    for started, popen in list(_started.items()):
        process._children.discard(started)  # type: ignore[attr-defined]
        popen.close()
    _started.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(stop_fork_server)
