"""The devices of a cluster as the host handles them: it starts, commands, interrupts and ends them.

A `ProcessCrew` has one process for each device, a `ThreadCrew` one thread.
"""

import ctypes
import io
import os
import pickle
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.display.progress_line import Told, progress
from parallelism.events import HOST
from vcluster.code import OperationCancelled
from vcluster.memory import WIRE_BYTES, Arena, give_way
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.memory.threads import own
from vcluster.processes.command_link import POLLS, Wire
from vcluster.processes.commands import INTERRUPT, DeviceSpec, run_in_process
from vcluster.processes.descriptors import is_readable
from vcluster.processes.device_process import Descriptor, Process, start_process
from vcluster.processes.exit_watch import is_ending
from vcluster.processes.memory_left import refuse_without_memory

if TYPE_CHECKING:
    from vcluster.processes.worker import Worker

STOP_SECONDS = 2.0
"""Seconds after which a device that should end is killed."""
GRACE_SECONDS = 0.25
"""Seconds in which a device that has closed its connection ends, if it ends."""
MANY = 200
"""The start of so many devices takes seconds, and its progress is told."""


Messages = list[tuple[int, Any]]
"""Messages of devices, each with the rank."""


class Died(NamedTuple):
    """The process of a device ended on its own. A negative ``exitcode`` is the number of a signal."""

    exitcode: int
    pid: int
    by_host: bool = False
    """Whether the host killed it, because it did not respond to the cancellation of its run."""
    lost: bool = False
    """Whether the host ended it, because it lives and has closed its connection."""


class ProcessCrew:
    """The devices by rank, a process each."""

    def __init__(self, arena: Arena, start_method: str | None) -> None:
        self._arena = arena
        self._start_method = start_method
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, Process] = {}
        self._wires: dict[int, Wire] = {}
        self._killed: set[int] = set()
        self._later: Messages = []
        """Deaths of devices while others were started: the next run is told of them."""
        self._last_sent: tuple[Any, bytes] = None, b""
        """The last message and its bytes. A message for all devices is pickled once."""
        self._waker = os.pipe()
        os.set_blocking(self._waker[1], False)
        self._is_closed = False
        """Whether this crew is closed."""
        self._waking: list[None] = []
        """One entry for each `wake` that is under way; the handler of a signal may `close` in the middle of it."""
        self._selector.register(self._waker[0], selectors.EVENT_READ, (HOST, "wake"))

    def start(self, specs: Iterable[DeviceSpec], check: Callable[[], object] = tuple) -> None:
        """Start a device for each spec, and return when all are ready. ``check()`` is called meanwhile, and may raise."""
        specs = list(specs)
        with _told(len(specs)) as tell:
            for number, spec in enumerate(specs):
                tell("devices started:", number, len(specs))
                if number and number % MANY == 0:
                    refuse_without_memory(self._processes[specs[0].rank].pid or 0, number, len(specs))
                with DeferredInterrupt():  # a process that starts is registered, and no descriptor is lost
                    self._start_one(spec)
                check()
            self._later += await_ready(self, [spec.rank for spec in specs], check)

    def _start_one(self, spec: DeviceSpec) -> None:
        place = spec.layout.wire(spec.rank)
        self._arena.clear(place, WIRE_BYTES)
        ours, theirs = socket.socketpair()
        wire = Wire(self._arena, place, ours.detach(), host=True)
        try:
            process = start_process(
                run_in_process,
                (spec, Descriptor(self._arena.fd), Descriptor(theirs.fileno())),
                name=f"vcluster-{spec.rank}",
                start_method=self._start_method,
                close=[wire.fd, *(other.fd for other in self._wires.values())],
            )
        except BaseException:
            wire.close()
            raise
        finally:
            theirs.close()
        self._processes[spec.rank] = process
        self._wires[spec.rank] = wire
        self._selector.register(wire.fd, selectors.EVENT_READ, (spec.rank, "connection"))
        self._selector.register(process.sentinel, selectors.EVENT_READ, (spec.rank, "sentinel"))

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a device. A dead device is ignored."""
        if message is None or message is not self._last_sent[0]:
            self._last_sent = message, pickle.dumps(message, 5)
        if rank in self._wires:
            with suppress(OSError):  # `receive` will report its death
                self._wires[rank].send(self._last_sent[1])

    def receive(self, timeout_seconds: float | None) -> Messages:
        """Messages of devices, as (rank, message). Waits until there is one. A death is reported once, as `Died`."""
        if self._later:
            messages, self._later = self._later, []
            return messages
        for _ in range(1 + POLLS // (1 + len(self._wires))):
            messages = self._take_notes()
            if messages or timeout_seconds == 0:
                break
            give_way()
        else:
            for wire in self._wires.values():
                wire.fall_asleep()
            try:
                messages = self._take_notes() or self._listen(timeout_seconds)
            finally:
                for wire in self._wires.values():
                    wire.awake()
        return messages or self._listen(0.0) if timeout_seconds == 0 else messages

    def _take_notes(self) -> Messages:
        """The messages that are there as notes."""
        notes = [(rank, wire.take_note()) for rank, wire in self._wires.items()]
        return [(rank, pickle.loads(data)) for rank, data in notes if data is not None]

    def _listen(self, timeout_seconds: float | None) -> Messages:
        """The messages from the pipes. A wake-up announces a note; an end of file means that the device died."""
        messages: Messages = []
        for key, _ in self._selector.select(timeout_seconds):
            rank, what = key.data
            if what == "wake":
                os.read(self._waker[0], 4096)
            if rank not in self._processes:
                continue
            if what == "connection":
                wire = self._wires[rank]
                try:
                    received = [*wire.read(), wire.take_note()]
                except (EOFError, OSError):
                    self._bury(rank, messages)
                else:
                    messages += _unpickled(rank, received)
            else:
                self._bury(rank, messages)
        return messages

    def wake(self) -> None:
        """Make `receive` return. A signal handler or another thread may call this."""
        self._waking.append(None)
        try:
            if self._waker[1] >= 0:
                with suppress(BlockingIOError):  # the pipe is full, so a wake-up is already there
                    os.write(self._waker[1], b"!")
        finally:
            self._waking.pop()
            if self._is_closed:
                self._close_waker()

    def interrupt(self, rank: int) -> None:
        """Raise `OperationCancelled` in a kernel that computes."""
        pid = self._processes[rank].pid if rank in self._processes else None
        if pid is not None and INTERRUPT is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, INTERRUPT)

    def kill(self, rank: int) -> bool:
        """End a device at once. False if that is impossible."""
        if rank in self._processes:
            self._killed.add(rank)
            self._processes[rank].kill()
        return True

    def printing(self) -> AbstractContextManager[object]:
        """A context for the duration of a run, which redirects the devices' prints."""
        return nullcontext()

    def close(self) -> None:
        """End all devices. Returns when they are gone."""
        for rank in list(self._processes):
            self.send(rank, None)
        deadline = time.monotonic() + STOP_SECONDS
        for process in list(self._processes.values()):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for wire in list(self._wires.values()):
            wire.close()
        self._processes.clear()
        self._wires.clear()
        self._selector.close()
        self._is_closed = True
        self._close_waker()

    def _close_waker(self) -> None:
        """Close the pipe of wake-ups, unless one is under way: that closes it at its end."""
        if self._waking or self._waker[1] < 0:
            return
        ends, self._waker = self._waker, (-1, -1)
        for fd in ends:
            os.close(fd)

    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [process.pid or 0 for _, process in sorted(self._processes.items())]

    def _bury(self, rank: int, messages: Messages) -> None:
        """Report a death, after the last messages of the device."""
        process, wire = self._processes.pop(rank), self._wires.pop(rank)
        received: list[bytes] = []
        with suppress(EOFError, OSError):
            while is_readable(wire.fd, 0):
                received += wire.read()
        messages += _unpickled(rank, [*received, wire.take_note()])
        process.join(GRACE_SECONDS)
        if process.exitcode is None and is_ending(process.pid or 0):
            process.join(STOP_SECONDS)
        lost = process.exitcode is None and not is_ending(process.pid or 0)
        if process.exitcode is None:  # it closed its connection but lives, so it is of no use any more
            process.kill()
            process.join()
        self._selector.unregister(wire.fd)
        self._selector.unregister(process.sentinel)
        wire.close()
        messages.append((rank, Died(process.exitcode or 0, process.pid or 0, rank in self._killed, lost)))
        self._killed.discard(rank)
        process.close()


def _unpickled(rank: int, received: Iterable[bytes | None]) -> Messages:
    return [(rank, pickle.loads(data)) for data in received if data is not None]


class ThreadCrew:
    """A thread for each device, for debugging, doctests, and platforms without processes: see `ProcessCrew`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._devices: dict[int, _Threaded] = {}
        self._replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def start(self, specs: Iterable[DeviceSpec], check: Callable[[], object] = tuple) -> None:
        from vcluster.processes.worker import Worker

        ranks = []
        with DeferredInterrupt():  # all of them are started, or none
            for spec in specs:
                commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
                link = _QueueLink(spec.rank, commands, self._replies)
                worker = Worker(spec, self._arena, link, own_process=False)
                thread = threading.Thread(
                    target=self._live, args=(spec.rank, worker), name=f"vcluster-{spec.rank}", daemon=True
                )
                own.add(thread)
                thread.start()
                self._devices[spec.rank] = _Threaded(thread, worker, link, commands)
                ranks.append(spec.rank)
        await_ready(self, ranks, check)

    def _live(self, rank: int, worker: "Worker") -> None:
        """The life of a thread. What ends it before it was told so is reported."""
        try:
            worker.serve()
        except BaseException:
            self._replies.put((rank, Died(1, os.getpid())))
            raise

    def send(self, rank: int, message: Any) -> None:
        self._devices[rank].commands.put(message)

    def receive(self, timeout_seconds: float | None) -> Messages:
        try:
            rank, message = self._replies.get(timeout=timeout_seconds)
        except queue.Empty:
            return []
        return [] if rank == HOST else [(rank, message)]

    def wake(self) -> None:
        self._replies.put((HOST, None))

    def interrupt(self, rank: int) -> None:
        device = self._devices[rank]
        device.worker.interrupt(lambda: device.link.interrupt(device.thread.ident))

    def kill(self, rank: int) -> bool:
        return False

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Send what a device's thread prints through its link, like that of a process. Other threads print normally."""
        devices = self._devices.values()

        def by_thread(name: str) -> Any:
            return _ByThread(
                getattr(sys, name), {each.thread.ident: each.worker.output[name] for each in devices}
            )

        with redirect_stdout(by_thread("stdout")), redirect_stderr(by_thread("stderr")):
            yield

    def close(self) -> None:
        for device in self._devices.values():
            device.commands.put(None)
        deadline = time.monotonic() + STOP_SECONDS
        for device in self._devices.values():
            if device.thread is not threading.current_thread():
                device.thread.join(max(0.0, deadline - time.monotonic()))
        for device in self._devices.values():
            if not device.thread.is_alive():
                device.worker.endpoint.let_go()
        self._devices.clear()

    def pids(self) -> list[int]:
        return [os.getpid()] * len(self._devices)


Crew = ProcessCrew | ThreadCrew
"""The devices of a cluster."""


def _told(count: int) -> AbstractContextManager[Told]:
    """What to call as so many devices start: it says nothing of few, which start at once."""
    return progress() if count >= MANY else nullcontext(lambda *_: None)


def await_ready(crew: Any, ranks: Iterable[int], check: Callable[[], object]) -> Messages:
    """Return when each of these devices of a crew has said that it is ready. ``check()`` may raise meanwhile.

    The deaths of other devices meanwhile are returned.
    """
    missing = started = set(ranks)
    others: Messages = []
    while missing:
        check()
        for rank, message in crew.receive(None):
            if message == "ready":
                missing = missing - {rank}
            elif isinstance(message, Died) and rank not in started:
                others.append((rank, message))
            elif isinstance(message, Died):
                raise RuntimeError(
                    f"the process of rank {rank} ended with exit code {message.exitcode} while it started; "
                    f"see what it printed above"
                )
    return others


class _QueueLink:
    def __init__(
        self, rank: int, commands: queue.SimpleQueue[Any], replies: queue.SimpleQueue[tuple[int, Any]]
    ) -> None:
        self._rank = rank
        self._replies = replies
        self._interrupted = False
        self.receive: Callable[[], Any] = commands.get

    def send(self, message: Any) -> None:
        self._replies.put((self._rank, message))

    def interrupt(self, ident: int | None) -> None:
        """Raise `OperationCancelled` in the device's running thread."""
        self._interrupted = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(ident or 0), ctypes.py_object(OperationCancelled)
        )

    def settle(self) -> None:
        """Wait until a pending interrupt has been raised. Nothing tells whether it was, so this sends another one.

        Withdrawing it (with a null pointer) would leave a flag of the interpreter set for good. Every thread would then
        check for exceptions at every step, and in Python 3.11 a traced thread (debugger, coverage) would do so for
        ever.
        """
        if not self._interrupted:
            return
        try:
            self.interrupt(threading.get_ident())
            while True:
                pass
        except OperationCancelled:
            self._interrupted = False


class _Threaded(NamedTuple):
    """A device in a thread."""

    thread: threading.Thread
    worker: "Worker"
    link: _QueueLink
    commands: queue.SimpleQueue[Any]


class _ByThread:
    """A stream that forwards to a different stream for some threads."""

    def __init__(self, usual: Any, by_thread: dict[int | None, Any]) -> None:
        self.usual = usual if usual is not None else io.StringIO()  # a program without a console has none
        self._by_thread = by_thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._by_thread.get(threading.get_ident(), self.usual), name)
