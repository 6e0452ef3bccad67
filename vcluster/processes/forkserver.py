"""Devices are forked from a server process, which loads NumPy once, with one thread and one BLAS thread.

multiprocessing has a fork server, too, which all its users share. This one belongs to vcluster alone: it never runs the
caller's ``__main__``, has an environment of its own, leaves no socket in the file system, and its children cannot
outlive it.

    host                                 server                                      child
    ----                                 ------                                      -----
    opens data pipe, status pipe
    send_fds(data, status, others) ----> fork ------------------------------------->  reads its program from data
    reads the pid from status <--------- writes the pid to status
    names the modules it has loaded ---> loads them when it is idle, if devices are started again and again
    sees that status is readable <------ writes the exit code, closes status <------  ends
    ends in any way -----(end of file)-> kills its children, ends -----------------> (is killed if the server ends)
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from parallelism.operation import PACKAGES
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.processes.blas_threads import device_environment
from vcluster.processes.descriptors import is_readable, pipes
from vcluster.processes.exit_watch import is_stopped

PRELOAD = (
    "numpy",
    "cloudpickle",
    "fcntl",
    "multiprocessing.util",
    "vcluster.processes.device_process",
    "vcluster.processes.worker",
)
"""Modules that are already loaded in a new device, which loads no other as it starts. A missing module is skipped."""

LOAD_WHEN_IDLE = ("numpy.random",)
"""Modules that the server loads after the first devices have started."""

OF_DEVICES = ("numpy", "ml_dtypes", *PACKAGES)
"""Packages of which devices probably use what their host has loaded. The server loads it when a first device has ended:
where one cluster starts after another, their devices need not load it each."""

NOT_OF_DEVICES = (
    "vcluster.mpi",
    "vcluster.cli",
    "vcluster.report",
    "vcluster.__main__",
    "vcluster.pytest_plugin",
)
"""Modules of these that only a host uses, or that do something when they are loaded."""

IDLE_MILLISECONDS = 50

MOST_DESCRIPTORS = 253 - 2
"""Maximal number of descriptors in one message under Linux, less the two pipes."""

STOP_SECONDS = 5.0
"""Seconds after which a server that should end is killed."""

ANSWER_SECONDS = 1.0
"""Seconds between two looks at a server that does not answer: it loads modules, or a signal has stopped it."""

NUMBER = struct.Struct("q")

START, NAMES = b"+", b"m"
"""What the host wants: a process, for which two pipes come along, or to name modules, whose names come next."""


def search_path() -> list[str]:
    """The host's ``sys.path``, with the current directory by its name; without it if it was removed."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    return [entry or here for entry in sys.path if entry or here]


def start_python(call: str, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start an interpreter with the host's flags and ``sys.path`` that runs ``call`` and keeps ``fds`` open.

    Ctrl-C never reaches it: the signal is blocked until the new process ignores it.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    program = f"import sys; sys.path[:] = {search_path()!r}; {call}"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", program],
            env=device_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupt() -> None:
    """In the new process: ignore Ctrl-C, which is meant for the host."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class ForkServer:
    """The host's end. It starts the server when it is needed, restarts a dead one, and requests processes from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._preload: tuple[str, ...] = ()
        self._left: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        """The servers that were found stopped. Their children end with their sockets."""
        self._named: frozenset[str] = frozenset()
        """The modules that the server knows of."""
        self._modules_seen = 0
        """The number of modules that the host had loaded when it named them last."""

    def start(self, *, preload: Sequence[str] = ()) -> None:
        """Start the server if there is none, and return at once. Its children have ``preload`` loaded, too."""
        with DeferredInterrupt(), self._lock:
            self._preload = tuple(dict.fromkeys((*self._preload, *preload)))
            self._running()

    @property
    def pid(self) -> int | None:
        """The server's process id. None while there is no server."""
        return None if self._process is None else self._process.pid

    def start_process(self, fds: Sequence[int]) -> tuple[int, int, int]:
        """Fork a process that gets ``fds``. Returns its pid, the pipe for its program, and the pipe for its exit code."""
        if len(fds) > MOST_DESCRIPTORS:
            raise ValueError(f"a new process can get at most {MOST_DESCRIPTORS} descriptors, got {len(fds)}")
        with DeferredInterrupt(), self._lock:
            for last_attempt in (False, True):
                server = self._running()
                data_r, data_w, status_r, status_w = pipes(2)
                try:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        socket.send_fds(server, [START], [data_r, status_w, *fds])
                finally:
                    os.close(data_r)
                    os.close(status_w)
                answers = self._answers(status_r)
                pid = read_number(status_r) if answers else None
                if pid is not None:
                    self._name_modules(server)
                    return pid, data_w, status_r
                os.close(data_w)
                os.close(status_r)
                if last_attempt:
                    break
                if answers:
                    self._discard()
                else:
                    self._leave()
        raise RuntimeError("the fork server ended before it started a process; see what it wrote to stderr")

    def stop(self) -> None:
        """End the server and every process that it started. The next `start_process` starts a new server."""
        with DeferredInterrupt(), self._lock:
            self._discard()
            while self._left:
                self._process, self._socket = self._left.pop()
                self._discard()

    def forget(self) -> None:
        """In a child of the host: drop the server, which belongs to the parent and must not wait for this process."""
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # this process cannot wait for it
        for process, connection in self._left:
            connection.close()
            process.returncode = 0
        self._left.clear()
        self._process = self._socket = None

    def _answers(self, status: int) -> bool:
        """Wait until the server has written to a pipe, or has ended. False if a signal has stopped it."""
        while not is_readable(status, ANSWER_SECONDS):
            if is_stopped(self.pid):
                return False
        return True

    def _name_modules(self, server: socket.socket) -> None:
        """Tell the server of the modules that the host has loaded since the last time."""
        if len(sys.modules) == self._modules_seen:
            return
        self._modules_seen = len(sys.modules)
        new = [name for name in modules_of_devices() if name not in self._named]
        self._named = self._named.union(new)
        text = "\n".join(new).encode()
        if text:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                server.sendall(NAMES + NUMBER.pack(len(text)) + text)

    def _leave(self) -> None:
        """Leave a server that was stopped by a signal, and its children, which run on, alone."""
        if self._process is not None and self._socket is not None:
            self._left.append((self._process, self._socket))
        self._process = self._socket = None

    def _running(self) -> socket.socket:
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self._discard()
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = start_python(
                f"from vcluster.processes.forkserver import serve; serve({number}, {self._preload!r})",
                [number],
            )
        self._socket = ours
        self._named, self._modules_seen = frozenset(), 0
        return ours

    def _discard(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has already ended
                self._socket.shutdown(socket.SHUT_RDWR)  # works even if a stray fork keeps a copy of our end
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # a signal stopped it, or its imports hang
                self._process.kill()
                self._process.wait()
        self._process = self._socket = None


SERVER = ForkServer()
"""The fork server of all devices."""


def start_early() -> None:
    """Start the server early, when a cluster is about to need it, so that it loads NumPy while the host does."""
    process = sys.modules.get("multiprocessing.process")
    if sys.platform == "linux" and not (process is not None and process.current_process().daemon):
        SERVER.start()


def modules_of_devices() -> list[str]:
    """The modules of this process that its devices probably use, too, in the order in which they were loaded."""
    return [
        name
        for name in list(sys.modules)
        if name.partition(".")[0] in OF_DEVICES and not name.startswith(NOT_OF_DEVICES)
    ]


def read_number(fd: int) -> int | None:
    """A number from a pipe. None at the end of the pipe."""
    data = b""
    while len(data) < NUMBER.size:
        piece = os.read(fd, NUMBER.size - len(data))
        if not piece:
            return None
        data += piece
    return int(NUMBER.unpack(data)[0])


# -- in the server -----------------------------------------------------------------------------------------------------


class _Child(NamedTuple):
    """The server's side of a process that it forked."""

    status: int
    life: int
    """The write end of a pipe to which nothing is written. It closes when the server ends."""

    def tell(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the host is gone or has stopped listening
            os.write(self.status, NUMBER.pack(number))

    def close(self) -> None:
        os.close(self.status)
        os.close(self.life)


class _Server:
    """Forks processes for the host, and loads modules while the host wants none."""

    def __init__(self, host: socket.socket, run: Callable[[int, int, list[int]], int]) -> None:
        """``run(data, life, handed)``: what a new process does with its descriptors; it returns the exit code."""
        self._host = host
        self._run = run
        self._later = list(LOAD_WHEN_IDLE)
        """Modules that are loaded one at a time, since a new process comes first."""
        self._of_devices: list[str] = []
        """Modules that the host has named, which are loaded once a process has ended."""
        self._is_loading = self._has_started = False
        self._children: dict[int, _Child] = {}
        self._wake_r, self._wake_w = os.pipe()
        """A pipe to which the system writes when a process has ended."""
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)

    @property
    def _wait_milliseconds(self) -> int | None:
        """How long to wait for the host before a module is loaded; None: nothing is to be loaded."""
        if self._is_loading:
            return 0
        return IDLE_MILLISECONDS if self._later and self._has_started else None

    def serve(self) -> None:
        """Do what the host wants until it ends."""
        poll = select.poll()
        poll.register(self._host, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._wait_milliseconds)}
            self._is_loading = not ready
            if self._is_loading:
                self._load_one()
            if self._wake_r in ready:
                self._reap()
            if self._host.fileno() in ready and not self._answer():
                return

    def kill_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _load_one(self) -> None:
        _preload([self._later.pop(0)])
        if not self._later:
            self._is_loading = False
            _watch_modules()
            gc.collect()
            gc.freeze()

    def _reap(self) -> None:
        """Tell the host of the processes that have ended."""
        os.read(self._wake_r, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            child = self._children.pop(pid)
            child.tell(os.waitstatus_to_exitcode(status))
            child.close()
            self._later += self._of_devices
            self._of_devices.clear()

    def _answer(self) -> bool:
        """Do the next thing that the host wants. False if it has ended."""
        message, fds, _, _ = socket.recv_fds(self._host, 1, 256)
        if message == NAMES:
            size = read_number(self._host.fileno()) or 0
            self._of_devices += self._host.recv(size, socket.MSG_WAITALL).decode().split()
        elif message:
            self._fork(fds)
        return bool(message)

    def _fork(self, fds: list[int]) -> None:
        for fd in fds:  # a flag of recv_fds would do this at once, but Python 3.11 ignores it
            os.set_inheritable(fd, False)
        data, status, *handed = fds
        life_r, life_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._let_go()
                os.close(life_w)
                os.close(status)
                os._exit(self._run(data, life_r, handed))
            finally:
                os._exit(1)
        child = self._children[pid] = _Child(status, life_w)
        child.tell(pid)
        self._has_started = True
        for fd in (data, life_r, *handed):
            os.close(fd)

    def _let_go(self) -> None:
        """In a new process: close what belongs to the server."""
        self._host.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in self._children.values():
            child.close()
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)


def serve(number: int, preload: Sequence[str] = ()) -> NoReturn:
    """Run the server on the socket with this descriptor. It ends with the host and kills its children then.

    ``preload`` are modules to load besides `PRELOAD`.
    """
    ignore_interrupt()
    gc.disable()  # nothing that is loaded now is garbage
    _preload((*PRELOAD, *preload))
    device_process = importlib.import_module("vcluster.processes.device_process")
    _watch_modules()  # a device that looks at all modules itself would copy the pages that they share
    gc.freeze()  # otherwise a child's collector would write to the shared pages and so copy them
    gc.enable()
    server = _Server(socket.socket(fileno=number), device_process.run_received)
    try:
        server.serve()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        server.kill_all()
        os._exit(0)


def _watch_modules() -> None:
    importlib.import_module("vcluster.code.environment").refresh_modules()


def _preload(names: Sequence[str]) -> None:
    with warnings.catch_warnings():  # the host has seen them
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
