"""How the process of a device starts, and that it can never outlive its host.

``forkserver`` forks it from a process that has NumPy loaded (`vcluster.processes.forkserver`): about a millisecond.  ``spawn``
starts an interpreter for each: a tenth of a second.  ``fork`` copies the host as it is, threads' locks included: fast,
and up to the caller.  None of them runs the caller's ``__main__`` again, so no ``if __name__ == "__main__"`` is needed.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import connection, context, process, reduction
from typing import Any

from vcluster.code import Pickler, apply_environment
from vcluster.code.pickling import environment
from vcluster.processes.forkserver import (
    NUMBER,
    SERVER,
    device_environment,
    ignore_interrupt,
    read_number,
    start_python,
)

if sys.platform != "win32":
    import fcntl

START_METHODS = ("forkserver", "spawn", "fork")


def default_start_method() -> str:
    """``"forkserver"`` on Linux, ``"spawn"`` on macOS.

    On macOS NumPy may rest on Accelerate, which is not safe to use in a forked process once it is loaded, and it is
    loaded with our own package.  Raises ``RuntimeError`` on Windows, where no descriptor can be handed over this way.
    """
    if sys.platform == "win32":
        raise RuntimeError('vcluster starts no processes on Windows: run it under WSL, or use backend="thread"')
    return "spawn" if sys.platform == "darwin" else "forkserver"


def start_process(
    target: Callable[..., object], args: Iterable[Any] = (), *, name: str, start_method: str | None = None,
    close: Iterable[int] = (),
) -> Process:  # fmt: skip
    """Start a process that runs ``target(*args)``: a daemon that ignores Ctrl-C, reads nothing, and ends with its host.

    ``target`` may be defined in ``__main__``.  ``args`` may hold a `Descriptor`, a
    ``multiprocessing.connection.Connection`` or a socket; the caller's own stay open and are the caller's to close.
    ``close`` lists descriptors that a forked child shall not keep (the other methods hand over nothing by themselves).

    Raises ``ValueError`` for an unknown start method, ``RuntimeError`` where a process cannot be started.
    """
    if start_method is None:
        start_method = default_start_method()
    if start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {', '.join(map(repr, START_METHODS))}, got {start_method!r}")
    default_start_method()
    if process.current_process().daemon:
        raise RuntimeError('a device or a pool worker cannot start processes of its own; use backend="thread" there')
    started = Process(target=target, args=tuple(args), name=name, daemon=True)
    started.start_method = start_method
    started.close_in_child = tuple(close)
    started.start()
    return started


def start_fork_server(*, preload: Sequence[str] = ()) -> None:
    """Begin to start the fork server, where devices come from one, and return at once.

    It is then ready when the first cluster is made.  A device finds the modules ``preload`` loaded; a server that runs
    already does without.
    """
    if sys.platform != "win32" and default_start_method() == "forkserver":
        SERVER.start(preload=preload)


def running_processes() -> dict[int, str]:
    """The processes that were started here and have not ended: their names by process id."""
    return {popen.pid: started.name for started, popen in list(_started.items()) if popen.poll() is None}


def stop_fork_server() -> None:
    """End the fork server, and all that it started; it comes back when a process is next started."""
    SERVER.stop()


class Descriptor:
    """A file descriptor to hand to a process as it starts: ``take`` gives its number over there.

    Only an argument of `start_process` may hold one.  The number is the taker's, who closes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self) -> int:
        """The descriptor's number in this process."""
        return self._fd

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise TypeError("a Descriptor can only be handed over while a process starts")
        return _descriptor, (reduction.DupFd(self._fd),)


def _descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class Process(process.BaseProcess):
    """A started process, as multiprocessing knows them: pid, sentinel, exitcode, is_alive, join, kill."""

    _start_method = None
    start_method: str
    close_in_child: tuple[int, ...]

    @staticmethod
    def _Popen(started: Process) -> _Popen:  # noqa: N802  (the name that BaseProcess calls)
        return _POPEN[started.start_method](started)


class _Popen:
    """How one process was started, and how to learn its end."""

    pid: int
    sentinel: int

    def __init__(self, started: Process) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # none, closed, or broken
                stream.flush()
        self.returncode: int | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._fds: list[int] = []
        held = self._launch(started)
        self.close = weakref.finalize(self, _close_all, held)
        self.close.atexit = False  # multiprocessing still waits for it then
        _started[started] = self

    def _launch(self, started: Process) -> list[int]:
        """Start it; the result is what the host must keep open meanwhile."""
        raise NotImplementedError

    def _end(self) -> int | None:
        """Its exit code, once it has ended; called when ``sentinel`` is readable, at most until it has one."""
        raise NotImplementedError

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and connection.wait([self.sentinel], timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._end()
        return self.returncode

    def kill(self) -> None:
        if os.getpid() == self._owner and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    terminate = kill  # at the host's exit: a device that does not heed SIGTERM must not hold it up

    # What multiprocessing.reduction.DupFd asks for while arguments are pickled.

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    class DupFd:
        def __init__(self, index: int) -> None:
            self.index = index

        def detach(self) -> int:
            return _handed_over[self.index]

    def _program(self, started: Process, outputs: tuple[int, ...] = ()) -> bytes:
        """What the child reads: its length, how to find modules, what to run.

        ``outputs``: the numbers that the first descriptors handed over shall have.
        """
        config = process.current_process()._config  # type: ignore[attr-defined]
        first = outputs, environment(), device_environment(), sys.argv, bytes(config["authkey"])
        stream = io.BytesIO(NUMBER.pack(0))
        stream.seek(0, os.SEEK_END)
        pickle.dump(first, stream)
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # it is like one
        try:
            _StartPickler(stream).dump(started)
        finally:
            context.set_spawning_popen(None)
        NUMBER.pack_into(program := stream.getbuffer(), 0, len(program) - NUMBER.size)
        return bytes(program)


class _StartPickler(Pickler):
    """Knows also what multiprocessing hands over: connections, sockets, its locks and queues."""

    def __init__(self, file: Any) -> None:
        more = reduction.ForkingPickler(io.BytesIO()).dispatch_table
        self.dispatch_table = ChainMap(Pickler.dispatch_table, more)  # looked up once, by __init__
        super().__init__(file)


class _Forked(_Popen):
    """Forked from the fork server, which tells its end."""

    def _launch(self, started: Process) -> list[int]:
        for fd in (1, 2):  # the host's of now; the server has those of when it started
            with suppress(OSError):
                os.fstat(fd)
                self._fds.append(fd)
        program = self._program(started, tuple(self._fds))
        self.pid, data, self.sentinel = SERVER.start_process(self._fds)
        _write(data, program)
        return [self.sentinel]

    def _end(self) -> int:
        code = read_number(self.sentinel)
        return -signal.SIGKILL if code is None else code  # the server fell, and the process with it


class _Spawned(_Popen):
    """A new interpreter."""

    def _launch(self, started: Process) -> list[int]:
        program = self._program(started)
        data_r, data_w = os.pipe()
        life_r, life_w = os.pipe()
        self.sentinel, status_w = os.pipe()
        handed = list(self._fds)
        call = f"from vcluster.processes.device_process import run_spawned; run_spawned({data_r}, {life_r}, {handed})"
        try:
            self._child = start_python(call, [data_r, life_r, status_w, *handed])
        except BaseException:
            _close_all([data_w, life_w, self.sentinel])
            raise
        finally:
            _close_all([data_r, life_r, status_w])
        self.pid = self._child.pid
        _write(data_w, program)
        return [self.sentinel, life_w]

    def _end(self) -> int:
        return self._child.wait()


class _Copied(_Popen):
    """A copy of the host."""

    def _launch(self, started: Process) -> list[int]:
        life_r, life_w = os.pipe()
        self.sentinel, status_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _close_all({life_w, self.sentinel, *started.close_in_child})
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.close(nothing)
                ignore_interrupt()
                os.environ.update(device_environment())
                _limit_threads()
                code = _run(started, life_r)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _close_all([life_r, status_w])
        return [self.sentinel, life_w]

    def _end(self) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return 255  # somebody else has waited for it


_POPEN: dict[str, type[_Popen]] = {"forkserver": _Forked, "spawn": _Spawned, "fork": _Copied}


def _write(fd: int, program: bytes) -> None:
    with open(fd, "wb", buffering=0) as pipe, suppress(BrokenPipeError):  # it has died: its exit code tells
        rest = memoryview(program)
        while rest:
            rest = rest[pipe.write(rest) :]


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


# -- in the new process ------------------------------------------------------------------------------------------------

_handed_over: list[int] = []
"""In a process that has just been started: the descriptors that came along, as its arguments number them."""


def run_spawned(data: int, life: int, fds: list[int]) -> None:
    """The whole life of a spawned process."""
    ignore_interrupt()
    handed = [os.dup(fd) if fd in fds[:i] else fd for i, fd in enumerate(fds)]
    for fd in (data, life, *handed):
        os.set_inheritable(fd, False)
    os._exit(run_received(data, life, handed))


def run_received(data: int, life: int, handed: list[int]) -> int:
    """Run the program that arrives on ``data``, with the descriptors ``handed`` over; returns the exit code."""
    try:
        size = read_number(data)
        with open(data, "rb") as pipe:
            program = io.BytesIO(pipe.read() if size is None else pipe.read(size))
        if size is None or len(program.getbuffer()) < size:
            return 1  # the host gave up, and knows why
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
    _end_with(life)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # a fork has copied the state of the global generator
    code: int = started._bootstrap(parent_sentinel=life)  # type: ignore[attr-defined]
    return code


def _end_with(life: int) -> None:
    """From now on this process is killed, whatever it is doing, when the pipe's other end has closed."""
    if hasattr(fcntl, "F_SETSIG"):  # the kernel does it
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([life], [], [], 0)[0]:  # it had closed before
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(life,), daemon=True, name="end-with-host").start()


def _watch(life: int) -> None:
    select.select([life], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_threads() -> None:
    """One BLAS thread in a copy of the host, where the variables come too late."""
    with suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(1)


# -- in the host -------------------------------------------------------------------------------------------------------

_started: weakref.WeakKeyDictionary[Process, _Popen] = weakref.WeakKeyDictionary()


def _leave_to_parent() -> None:
    """In every child forked from the host: its processes and pipes are not this one's."""
    SERVER.forget()
    for started, popen in list(_started.items()):
        process._children.discard(started)  # type: ignore[attr-defined]
        popen.close()
    _started.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(stop_fork_server)
