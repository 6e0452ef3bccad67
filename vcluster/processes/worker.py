"""The main loop of a device's process or thread: wait for a command, run a kernel, reply, repeat."""

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, Protocol

import numpy as np

from parallelism.events import HOST
from parallelism.operation.thread_frames import frames_by_thread
from vcluster.code import (
    OperationCancelled,
    apply_environment,
    apply_settings,
    code_of,
    describe_exception,
    refresh_modules,
    where_cancelled,
)
from vcluster.code.arguments import fill
from vcluster.collectives import AS_MESSAGES, Ways
from vcluster.device import VirtualDevice, explain_call
from vcluster.memory import FINISHED, LEFT, SPINS, SPINS_OF_A_THREAD, Arena, HomeCore, forks
from vcluster.memory.interrupts import defer
from vcluster.memory.threads import is_in_library, is_starting_thread
from vcluster.messages import COPIED_BYTES, Endpoint, hand_over
from vcluster.messages.encoding import decode, encode
from vcluster.processes.command_link import POLLS, Wire, WireLink
from vcluster.processes.commands import INTERRUPT, Cancelled, DeviceSpec, Done, Failed, RunCommand
from vcluster.processes.kept_programs import KeptPrograms
from vcluster.processes.kernel_forks import end_fork, explain_pickling
from vcluster.processes.kernel_threads import cancel_helpers, quiet_after_cancellation
from vcluster.processes.left_handlers import LeftHandlers
from vcluster.processes.line_coverage import measure
from vcluster.processes.output import RankedOutput, explain_no_terminal, refuse_debugger, show_warning
from vcluster.processes.variables import apply_changes
from vcluster.tracing import LONG, Packed, Record
from vcluster.tracing.columns import pack

SMALL_RESULT_BYTES = 1024
"""A result whose block is no larger than this many bytes travels inside the reply and needs no shared memory."""


class Link(Protocol):
    """The connection between a device and its host for short messages."""

    def send(self, message: Any) -> None:
        """Send a message."""

    def receive(self) -> Any:
        """Block until there is a message, and return it."""

    def settle(self) -> None:
        """Wait until a pending interrupt has been raised."""


class Worker:
    """Serves one device."""

    def __init__(
        self,
        spec: DeviceSpec,
        arena: Arena,
        link: Link,
        *,
        own_process: bool,
        endpoint: Endpoint | None = None,
        ways: Ways | None = None,
    ) -> None:
        """``endpoint`` and ``ways``: of a backend that shares no memory."""
        self.spec = spec
        self._own_process = own_process
        self._pid = os.getpid()
        self.link = link
        spins = SPINS if own_process else SPINS_OF_A_THREAD
        self.endpoint = endpoint or Endpoint(
            arena, spec.layout, spec.rank, capacity=spec.capacity, spins=spins, queues=spec.queues
        )
        if spec.queues is not None:
            ways = AS_MESSAGES
        self.device = VirtualDevice(spec.mesh, spec.rank, self.endpoint, ways)
        self.device.recorder.note = partial(self.endpoint.status.note, spec.rank)
        self.output = {name: RankedOutput(link, name) for name in ("stdout", "stderr")}
        self._generation = spec.generation
        self._groups = self.endpoint.groups_forgotten = spec.groups
        self._in_kernel = False
        self._gate = threading.Lock()
        self._kept = KeptPrograms()
        self._code: CodeType | None = None
        """The code of the program that runs."""
        self._handlers: LeftHandlers | None = None
        """Those of this process. A thread has none of its own."""

    def take_over(self, link: WireLink) -> None:
        """Make what is printed and raised in this process that of the device, whose run an `INTERRUPT` may end."""
        sys.stdout, sys.stderr = self.output["stdout"], self.output["stderr"]
        warnings.showwarning = show_warning
        refuse_debugger()
        if INTERRUPT is not None:
            signal.signal(INTERRUPT, lambda _, frame: self.interrupt(link.interrupt, frame))
        threading.excepthook = partial(quiet_after_cancellation, threading.excepthook)
        self._handlers = LeftHandlers()

    def serve(self) -> None:
        """Say that the device is ready, and execute the host's commands until it sends None."""
        self.link.send("ready")
        if self._own_process and self.endpoint.shares_memory:  # otherwise nobody wakes it
            self.endpoint.signals.home = HomeCore(self.spec.rank)
        while True:
            command = self.link.receive()
            if command is None:
                return
            try:
                reply = self._run(command)
            except OperationCancelled:  # an interrupt came just after the kernel's end
                self._leave_kernel()
                reply = Cancelled(self._record())
            except (SystemExit, KeyboardInterrupt):
                raise
            except (
                BaseException
            ) as error:  # of a handler of the kernel's, while the kernel's own failure was described
                self._leave_kernel()
                self.endpoint.signals.cancel()
                reply = Failed(describe_exception(error, self._code), self._record())
            for stream in self.output.values():
                stream.finish_line()
            if os.getpid() != self._pid:
                end_fork(self.spec.rank)
            self.link.send(reply._replace(run=command.number))

    def interrupt(self, raise_there: Callable[[], object], frame: FrameType | None = None) -> None:
        """Call ``raise_there`` if the kernel computes. A call of the library checks for a cancelled run by itself.

        ``frame`` is where the device's thread is. In code of ours, such as the callback of a block that is freed, an
        error would be lost, or a state half done. The host tries again soon.

        The host cancels a run before it interrupts a kernel. What comes otherwise is a signal from elsewhere, of which
        the process dies, as of any other that nothing handles: the host says so.
        """
        if self._in_kernel and self._own_process and not self.endpoint.signals.cancelled:
            _die_of_interrupt()
        first = self.endpoint.threads.first
        frame = frame or frames_by_thread().get(first)
        if is_in_library(frame) or is_starting_thread(frame):
            return
        if self._in_kernel and not self.device.recorder.busy and self._gate.acquire(False):
            try:
                if self._in_kernel:
                    self.endpoint.signals.saw_cancellation = True
                    if not defer(first, OperationCancelled("another device failed")):
                        raise_there()
            finally:
                self._gate.release()

    def _leave_kernel(self) -> None:
        """Leave the kernel. Afterwards no interrupt arrives, none is pending, and no handler of the kernel's raises."""
        while True:
            try:
                if self._handlers is not None:
                    self._handlers.set_aside()
                with self._gate:
                    self._in_kernel = False
                self.link.settle()
                return
            except OperationCancelled:  # one was pending
                continue

    def _run(self, command: RunCommand) -> Done | Failed | Cancelled:
        device, signals = self.device, self.endpoint.signals
        self._begin(command)
        try:
            output = self._call(command)
            self.endpoint.status.set(device.rank, FINISHED)
            place, boxes = self._hand_back(output), self.endpoint.mailboxes
            counts = {
                peer: (box.sent, box.received) for peer, box in boxes.items() if box.sent or box.received
            }
            return Done(place, self._lent_record(), counts, device.collectives.dropped)
        except BaseException as error:
            self._leave_kernel()
            if command.kept is not None:  # it may have been interrupted while it derived something
                self._kept.drop(command.kept.digest)
            if signals.saw_cancellation:  # the kernel may have made another exception of it
                cancel_helpers(signals, own_process=self._own_process)
                return Cancelled(self._record(), where_cancelled(error))
            signals.cancel()
            cancel_helpers(signals, own_process=self._own_process)
            explain_call(error, VirtualDevice)
            explain_pickling(error)
            if self._own_process:
                explain_no_terminal(error)
            return Failed(describe_exception(error, self._code), self._record())

    def _begin(self, command: RunCommand) -> None:
        """Start from the state that a run begins with."""
        device, signals = self.device, self.endpoint.signals
        if command.generation != self._generation:
            self._generation = command.generation
            self.endpoint.forget_traffic(command.gone)
            device.forget_traffic()
        if command.groups != self._groups:
            self._groups = self.endpoint.groups_forgotten = command.groups
            device.collectives.forget_groups()
        if command.number == 1:
            device.state.clear()
        device.seed_with((self.spec.seed, self.spec.rank, command.number))
        signals.saw_cancellation = signals.has_waited = signals.passed_cancellation = False
        device.collectives.begin_run()
        self.endpoint.threads.begin(own_process=self._own_process)
        device.recorder.start()
        device.recorder.enter()

    def _hand_back(self, output: Any) -> int | bytearray:
        """The place of the output in shared memory, or its block if that is small."""
        with self.device.recorder:  # what packs and unpacks is no work of the kernel's
            encoded = encode(output, "the result")
            small = encoded.block_nbytes <= SMALL_RESULT_BYTES
            place = encoded.alone() if small else hand_over(self.endpoint, encoded, self.spec.layout.host)
            self.device.recorder.add_untimed(
                "d2h", "result", {"peer": HOST, "bytes_sent": encoded.nbytes, "messages": 1}
            )
        return place

    def _call(self, command: RunCommand) -> Any:
        self._code = None
        if self._own_process:  # a thread shares the host's modules, and must leave them alone
            sys.stdout, sys.stderr = (
                self.output["stdout"],
                self.output["stderr"],
            )  # a kernel may have replaced them
            if command.environment is not None:
                apply_environment(command.environment)
            apply_changes(command.variables)
            if refresh_modules() or command.environment is not None:
                self._kept.clear()  # their classes may be others now
        nbytes = command.common_nbytes
        own: list[Any] = []
        try:
            program, args, kwargs = self._copy_in(command.common, command.common_block_nbytes)
            if command.kept is not None:
                program = self._kept.load(self.endpoint.arena, command.kept)
            if command.own is not None:
                mailbox = self.endpoint.mailbox(self.spec.layout.host)
                nbytes += mailbox.nbytes_at(command.own)
                own = mailbox.adopt(command.own)
        except Exception as error:
            error.add_note("raised in the device while it unpacked the program and its arguments")
            raise
        if command.environment is not None:
            apply_settings(command.environment)  # now that the modules of the program are imported
        self._code = code_of(program)
        args = [fill(value, own) for value in args]
        kwargs = {name: fill(value, own) for name, value in kwargs.items()}
        self.device.recorder.add_untimed("h2d", "arguments", {"peer": HOST, "bytes_received": nbytes})
        self.device.recorder.leave()
        self._enter_kernel()
        try:
            output = program(self.device, *args, **kwargs)
        finally:
            if os.getpid() != self._pid:
                end_fork(self.spec.rank)
        self._leave_kernel()
        self.device.collectives.wait_for_all()
        return output

    def _enter_kernel(self) -> None:
        if self._handlers is not None:
            for line in self._handlers.take_lost():
                print(line, file=sys.stderr)
            self._handlers.put_back()
        self._in_kernel = True

    def _copy_in(self, offset: int, nbytes: int) -> Any:
        """The common part of a command, as this device's own copy."""
        source = np.frombuffer(self.endpoint.arena.view, np.uint8, nbytes, offset)
        if nbytes <= COPIED_BYTES:
            return decode(np.frombuffer(bytearray(source), np.uint8))
        block = self.endpoint.heap.block(nbytes)[1]
        np.copyto(block, source)
        return decode(block)

    def _packed_record(self) -> Record | Packed:
        """The record of the run, by columns if it is long."""
        record = self.device.recorder.stop()
        return record if len(record[1]) < LONG else pack(record)

    def _record(self) -> bytes:
        """The record of a run that failed; the host may never read what lies elsewhere, so it is in the reply."""
        self.endpoint.status.set(self.device.rank, LEFT)
        return pickle.dumps(self._packed_record(), 5)

    def _lent_record(self) -> bytes | int:
        """The record of a run; a long one lies in shared memory."""
        record = self._packed_record()
        if isinstance(record, Packed):
            with suppress(MemoryError):  # what the program holds may leave no room
                return hand_over(self.endpoint, encode(record, "the record"), self.spec.layout.host)
        return pickle.dumps(record, 5)


def _die_of_interrupt() -> None:
    assert INTERRUPT is not None
    signal.signal(INTERRUPT, signal.SIG_DFL)
    os.kill(os.getpid(), INTERRUPT)


def keep_freed_memory() -> None:
    """Let the C library keep the freed memory of temporary arrays, so that the next arrays cause no page faults.

    By default, glibc returns the end of its heap to the system as soon as 256 KiB of it are free, and maps arrays from
    128 KiB on anew until one of that size has been freed. Settings in the user's environment take precedence. On other
    platforms nothing is set.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20


def serve_in_process(spec: DeviceSpec, memory: int, wire: int) -> None:
    """Serve the device of this process until its host needs it no more, and end the process.

    ``memory`` and ``wire`` are descriptors: of the shared memory, and of the connection to the host.
    """
    gc.freeze()  # keep objects from before the fork in pages shared with other devices
    keep_freed_memory()
    arena = Arena(spec.layout.nbytes, memory)
    place = spec.layout.wire(spec.rank)
    polls = POLLS // spec.layout.size
    link = WireLink(Wire(arena, place, wire, host=False, polls=polls), spec.rank)
    forks.members.add(link)
    worker = Worker(spec, arena, link, own_process=True)
    worker.take_over(link)
    save_coverage = measure()
    with suppress(EOFError, OSError):  # the host is gone
        worker.serve()
    save_coverage()
    os._exit(0)
