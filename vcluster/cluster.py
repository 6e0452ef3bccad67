"""`VirtualCluster`: devices that are started once, run many programs, and are gone when it is."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster.arguments import PerDevice, deal
from vcluster.channel import VirtualChannel
from vcluster.control import Layout
from vcluster.crew import Crew, Died, ProcessCrew, ThreadCrew
from vcluster.endpoint import Endpoint
from vcluster.errors import ClusterError, ClusterTimeoutError, DeadlockError, UnusedResultWarning
from vcluster.interrupts import DeferredInterrupt
from vcluster.mailbox import hand_over, release
from vcluster.memory import Arena
from vcluster.outcome import Reply, error_of
from vcluster.payload import encode
from vcluster.pending import Pending
from vcluster.processes import default_start_method
from vcluster.programs import Environment, environment
from vcluster.run import Run
from vcluster.status import RUNNING, Status
from vcluster.supervision import Stuck, look, tell
from vcluster.tracing import Recorder
from vcluster.worker import DeviceSpec, Done, Printed, RunCommand

QUEUE_DEVICES = 16
"""The ``queue`` transport has a queue for each ordered pair of devices, so it is for few."""

LOOK_EVERY_SECONDS = 0.05
"""When no device has said anything for so long, look whether any of them can still go on."""

INTERRUPT_AFTER_SECONDS = 0.03
KILL_AFTER_SECONDS = 5.0
"""When a run has failed, a device that still computes is interrupted, and in the end killed and replaced."""

_USUAL_ELSEWHERE = {
    "timeout": "deadline_seconds", "world_size": "the number of devices: VirtualCluster(4)",
    "nprocs": "the number of devices: VirtualCluster(4)", "num_devices": "the number of devices: VirtualCluster(4)",
    "n": "the number of devices: VirtualCluster(4)", "size": "the number of devices: VirtualCluster(4)",
    "context": "start_method", "capacity": "channel_capacity", "rank": "device.rank inside the kernel",
}
_OPTIONS = (
    "backend", "transport", "start_method", "hardware", "compute", "priced_dtype", "channel_capacity", "seed",
    "deadline_seconds",
)


ShowOutput = Callable[[int, str, str], object]


class VirtualCluster:
    """A cluster of virtual devices, each a process of its own.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(dp=2, tp=2, backend="thread") as cluster:
    ...     cluster.run(lambda device: device.all_reduce(device.rank, "tp")).outputs
    [np.int64(1), np.int64(1), np.int64(5), np.int64(5)]

    ``mesh`` is a `Mesh`, or the number of devices; or the axes are given by name, outermost first.

    ``backend``
        ``"process"``, or ``"thread"`` for debugging: the same results, no isolation of globals.
    ``transport``
        ``"shared_memory"``, or ``"queue"``: everything as messages through ``multiprocessing.Queue``, for teaching and
        as a reference; up to 16 devices.
    ``start_method``
        ``"forkserver"`` (Linux), ``"spawn"`` (macOS) or ``"fork"``.
    ``channel_capacity``
        messages of one tag that may lie in a channel before a sender waits; 0: until each is taken.
    ``seed``
        ``device.rng`` draws from (seed, rank, number of the run).
    ``deadline_seconds``
        a run that takes longer is broken off with `ClusterTimeoutError`; off by default.

    The devices start here and live until the cluster is closed: at the end of ``with``, by `close`, when nobody refers
    to it any more, or when the process ends, however it ends.
    """

    def __init__(
        self, mesh: Mesh | int | None = None, *, backend: str = "process", transport: str = "shared_memory",
        start_method: str | None = None, hardware: str = "host", compute: str = "measured", priced_dtype: str | None =
        None, channel_capacity: int = 16, seed: int = 0, deadline_seconds: float | None = None, **axes: int,
    ) -> None:
        self.mesh = _mesh(mesh, axes)
        _one_of("backend", backend, ("process", "thread"))
        _one_of("transport", transport, ("shared_memory", "queue"))
        _one_of("hardware", hardware, ("host",))
        _one_of("compute", compute, ("measured",))
        if priced_dtype is not None:
            raise ValueError(f"priced_dtype is for described hardware; hardware='host' has None, not {priced_dtype!r}")
        if isinstance(channel_capacity, bool) or not isinstance(channel_capacity, int) or channel_capacity < 0:
            raise ValueError(f"channel_capacity is a number of messages, 0 or more, got {channel_capacity!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is an integer, 0 or more, got {seed!r}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds is more than 0, or None, got {deadline_seconds!r}")
        if transport == "queue" and self.mesh.size > QUEUE_DEVICES:
            raise ValueError(
                f"transport='queue' has a queue for each pair of devices and goes up to {QUEUE_DEVICES} of them, "
                f"got {self.mesh.size}; transport='shared_memory' has no such limit"
            )
        self._backend = backend
        self._transport = transport
        self._start_method = start_method
        self._capacity = channel_capacity
        self._seed = seed
        self._deadline_seconds = deadline_seconds
        self._running = threading.Lock()
        self._runner: int | None = None
        self._body: _Body | None = None
        self.around_run: Callable[[Endpoint, Any], AbstractContextManager[Any]] | None = None
        """A context around each run that gives what is to run in the program's place; see `vcluster.faults`."""
        self.show_output: ShowOutput = show_with_rank
        """What is done with the lines that devices print: called with the rank, ``stdout`` or ``stderr``, the lines."""
        self._start()

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def backend(self) -> str:
        """``"process"`` or ``"thread"``."""
        return self._backend

    @property
    def closed(self) -> bool:
        """Whether its devices are gone."""
        return self._body is None or self._body.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._backend} backend, {self._transport}"
        return f"<VirtualCluster of {self.mesh!r}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster stays with its host: run() inside a kernel is not possible")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Any, /, *args: Any, **kwargs: Any) -> Run:
        """Run a program on every device and return when all have finished.

        ``program`` is a function of a device, called with a `VirtualDevice` and the arguments; or an `Operation`, which
        deals the arguments out itself.  A `PerDevice` argument gives each device its own; anything else reaches every
        device whole.  Each device has its own copy of everything: it may write into it.

        Raises `DeviceFailedError` if a kernel raises or a process dies (`OperationCancelled` releases the others), and
        the other errors of `vcluster.errors`.  Unless it then says that it is closed, the cluster can be used again.
        """
        body = self._open()
        if not self._running.acquire(blocking=False):
            raise ClusterError("a run is under way on this cluster; it runs one program at a time")
        self._runner = threading.get_ident()
        body.show_output = self.show_output
        try:
            if self.around_run is None:
                return body.run(program, args, kwargs)
            with self.around_run(body.endpoint, program) as shipped:
                return body.run(program, args, kwargs, shipped)
        finally:
            self._runner = None
            self._running.release()
            del self  # a traceback that a notebook keeps must not keep the devices

    def channel(self, rank: int) -> VirtualChannel:
        """The host's end of its channel to a device, whose end is ``device.channel(HOST)``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.mesh!r} has ranks 0 to {self.size - 1}, got {rank}")
        return self._open().channel(rank)

    def pids(self) -> list[int]:
        """The process of each device, by rank."""
        return self._open().crew.pids()

    def close(self) -> None:
        """End the devices.  Outputs of earlier runs stay valid; closing twice is fine."""
        body = self._body
        if body is None or body.closed:
            return
        if self._runner == threading.get_ident():  # by a signal's handler: the run notices
            body.finalizer()
            return
        if not self._running.acquire(blocking=False):
            body.break_off(ClusterError("the cluster was closed while the run was under way"))
            self._running.acquire()
        try:
            body.finalizer()
        finally:
            self._running.release()

    def forget(self) -> None:
        """Let the next run find what it would in a new cluster, at no cost: empty ``device.state``, empty channels, and
        the seeds of a first run.  (What a kernel changed in its process stays: modules, the current directory.)
        """
        body = self._open()
        if not self._running.acquire(blocking=False):
            raise ClusterError("a run is under way on this cluster; it forgets between runs")
        try:
            body.forget()
        finally:
            self._running.release()

    def restart(self) -> None:
        """Fresh devices in place of the present ones, with empty state; also opens a closed cluster again."""
        self.close()
        self._start()

    def _start(self) -> None:
        self._body = _Body(
            self.mesh, self._backend, self._transport, self._start_method, self._capacity, self._seed,
            self._deadline_seconds
        )
        self._body.finalizer = weakref.finalize(
            self, _close, self._body.crew, self._body.arena, self._body.layout, self._body.endpoints, os.getpid()
        )

    def _open(self) -> _Body:
        if self._body is None or self._body.closed:
            raise ClusterError(f"this cluster of {self.mesh!r} is closed; cluster.restart() opens it again")
        return self._body


class _Body:
    """The running part of a cluster, from start to close."""

    finalizer: Any

    def __init__(
        self, mesh: Mesh, backend: str, transport: str, start_method: str | None, capacity: int, seed: int,
        deadline_seconds: float | None,
    ) -> None:
        self._mesh = mesh
        self._capacity = capacity
        self._seed = seed
        self._deadline_seconds = deadline_seconds
        self._processes = backend == "process"
        if self._processes:
            default_start_method()  # refuses where there are no processes
        self.layout = Layout.for_devices(mesh.size, sparse=sys.platform != "win32")
        self.arena = Arena(self.layout.nbytes)
        self.crew: Crew = ProcessCrew(self.arena, start_method) if self._processes else ThreadCrew(self.arena)
        self._queued = transport == "queue"
        self.endpoints: list[Endpoint] = []
        """The host's: one, and under the ``queue`` transport a new one when devices have died."""
        self._number = 0
        self._generation = 0
        self._gone: tuple[int, ...] = ()
        self._status = Status(self.arena, self.layout)
        self._environments: dict[int, Environment] = {}
        self._asked: BaseException | None = None
        self._channels: dict[int, VirtualChannel] = {}
        self._told_generation = 0
        self.show_output: ShowOutput = show_with_rank
        self._warned: set[str] = set()
        try:
            self._start_devices(range(mesh.size))
        except BaseException:
            _close(self.crew, self.arena, self.layout, self.endpoints, os.getpid())
            raise

    def _start_devices(self, ranks: Iterable[int]) -> None:
        if self._queued:
            queues = _queues(self.layout, self._processes)
        self.crew.start([
            DeviceSpec(rank, self._mesh, self.layout, self._capacity, self._seed,
                       queues[rank] if self._queued else None, self._generation)
            for rank in ranks
        ])
        if self._queued or not hasattr(self, "endpoint"):
            mine = queues[self.layout.host] if self._queued else None
            self.endpoint = Endpoint(self.arena, self.layout, self.layout.host, capacity=self._capacity, queues=mine)
            self._owner = _HostOwner(self.endpoint)
            for replaced in self.endpoints:
                replaced.let_go()
                self.layout.forget_traffic(self.arena)  # it has closed its channels
            self.endpoints[:] = [self.endpoint]

    @property
    def closed(self) -> bool:
        return not self.finalizer.alive

    def channel(self, rank: int) -> VirtualChannel:
        found = self._channels.get(rank)
        if found is None:
            found = self._channels[rank] = VirtualChannel(self._owner, rank)
        return found

    def run(self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shipped: Any = None) -> Run:
        """``shipped`` is what the devices run in the place of ``program``, if that is something else."""
        size = self._mesh.size
        if isinstance(program, Operation):
            args = _by_rank(program.inputs(self._mesh, *args), size, program)
        elif not callable(program):
            raise TypeError(f"run() takes a function of a device, or an Operation, got {type(program).__name__}")
        common_args, common_kwargs, own = deal(args, kwargs, size)

        encoded = encode((shipped or program, common_args, common_kwargs), "the program and its arguments")
        mine = [
            encode([argument.values[rank] for argument in own], f"the arguments of rank {rank}")
            for rank in range(size if own else 0)
        ]
        with DeferredInterrupt(self.crew.wake) as interrupt:
            common = hand_over(self.endpoint, encoded, self.layout.host)
            self._number += 1
            now = environment()

            def command(rank: int) -> RunCommand:
                changed, self._environments[rank] = self._environments.get(rank) != now, now
                return RunCommand(
                    self._number, self._generation, self._gone, common, encoded.block_nbytes, encoded.nbytes,
                    hand_over(self.endpoint, mine[rank], rank) if own else None, now if changed else None,
                )

            try:
                replies, broken_off = self._collect(command, interrupt)
            finally:
                release(self.arena, common)
            self._told_generation = self._generation
            error = broken_off or error_of(replies)
            if error is not None:
                if isinstance(error, ClusterError) and not self.closed:
                    error.outputs = {
                        rank: self.endpoint.mailbox(rank).adopt(reply.place)
                        for rank, reply in sorted(replies.items()) if isinstance(reply, Done)
                    }
                if self.closed:
                    error.add_note("the cluster is closed: a thread computes on, and cannot be killed")
                self._heal(replies)
                if isinstance(error.__cause__, TypeError):
                    _note_wrong_arguments(error, program, args, kwargs)
                try:
                    raise error
                finally:
                    del error, broken_off  # no cycle with its own traceback, which would keep the caller's variables
            done = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Done)]
            outputs = [self.endpoint.mailbox(rank).adopt(reply.place) for rank, reply in enumerate(done)]
            self._warn({line: name for reply in done for line, name in reply.dropped.items()})
            return Run(self._mesh, program, outputs, [reply.record for reply in done])

    def _warn(self, dropped: dict[str, str]) -> None:
        """Once for each line: who comes from a library that writes in place forgets that results are returned."""
        for line, name in dropped.items():
            if line not in self._warned:
                self._warned.add(line)
                filename, _, number = line.rpartition(":")
                warnings.warn_explicit(
                    f"the result of {name} is not used; it is returned, not written into the argument "
                    f"(with out=x it is)", UnusedResultWarning, filename, int(number),
                )

    def break_off(self, error: BaseException) -> None:
        """From another thread: end the run under way with this error."""
        self._asked = error
        self.crew.wake()

    def _collect(
        self, command: Callable[[int], RunCommand], interrupt: DeferredInterrupt
    ) -> tuple[dict[int, Reply], BaseException | None]:
        """Command every device and wait for its reply; on a failure, see to it that all come back."""
        replies: dict[int, Reply] = {}
        pending: set[int] = set()
        broken_off: BaseException | None = None
        failed_at: float | None = None
        started = time.monotonic()
        with self.crew.printing():
            for rank in range(self._mesh.size):
                self._status.set(rank, RUNNING)
            try:
                for rank in range(self._mesh.size):
                    self.crew.send(rank, command(rank))
                    pending.add(rank)
            except BaseException as error:  # Ctrl-C, or no memory for the arguments
                broken_off = error
            while True:
                try:
                    interrupt.deliver()
                    if self.closed:
                        raise ClusterError("the cluster was closed while the run was under way")
                    broken_off = broken_off or self._asked
                    if broken_off is not None and failed_at is None:
                        failed_at = time.monotonic()
                        self.endpoint.signals.cancel()
                    if not pending:
                        return replies, broken_off
                    messages = self.crew.receive(self._timeout(started, failed_at))
                    if not messages:
                        self.endpoint.take_in()  # lest a device wait for room in a ring to the host
                    if not messages and failed_at is None and (stuck := self._look()):
                        messages = self.crew.receive(0.0)  # a failure that was on its way outranks
                        if not messages:
                            broken_off = self._deadlock(stuck, replies)
                    for rank, message in messages:
                        if isinstance(message, Printed):
                            if broken_off is None:
                                self.show_output(rank, message.stream, message.text)
                            continue
                        pending.discard(rank)
                        replies[rank] = message
                        if not isinstance(message, Done) and failed_at is None:
                            failed_at = time.monotonic()
                            self.endpoint.signals.cancel()
                    now = time.monotonic()
                    if failed_at is not None:
                        if not self._hurry(pending, now - failed_at):
                            return replies, broken_off
                    elif self._deadline_seconds is not None and now - started > self._deadline_seconds:
                        broken_off = self._too_late(pending)
                except BaseException as error:  # Ctrl-C, a time limit's signal, an output that cannot be written to
                    if self.closed or (broken_off is not None and isinstance(error, Exception)):
                        self.finalizer()
                        raise
                    broken_off = error

    def _timeout(self, started: float, failed_at: float | None) -> float:
        if failed_at is not None:
            return INTERRUPT_AFTER_SECONDS
        if self._deadline_seconds is not None:
            left = max(0.0, started + self._deadline_seconds - time.monotonic()) + 1e-3
            return min(LOOK_EVERY_SECONDS, left)
        return LOOK_EVERY_SECONDS

    def _look(self) -> list[Stuck]:
        others = [t for t in threading.enumerate() if not t.name.startswith(("vcluster-", "Queue"))]
        return look(self._status, self._mesh.size, host_may_act=len(others) > 1)

    def _deadlock(self, stuck: list[Stuck], replies: dict[int, Reply]) -> DeadlockError:
        finished = {rank for rank, reply in replies.items() if isinstance(reply, Done)}
        return DeadlockError(
            tell(stuck, finished), ranks=[s.rank for s in stuck], operation=stuck[0].text.split("(")[0],
            locations=[s.location for s in stuck],
        )

    def _hurry(self, pending: set[int], seconds: float) -> bool:
        """Interrupt or kill who still computes; False if that cannot be done, and the cluster is closed."""
        if seconds < INTERRUPT_AFTER_SECONDS:
            return True
        for rank in sorted(pending):
            if seconds < KILL_AFTER_SECONDS:
                self.crew.interrupt(rank)
            elif not self.crew.kill(rank):
                self.finalizer()  # a thread
                return False
        return True

    def _too_late(self, pending: set[int]) -> ClusterTimeoutError:
        states = {rank: self._status.read(rank) for rank in sorted(pending)}
        lines = [
            f"  rank {rank} waits in {state.operations[0].text} at {state.location}"
            if state.operations else f"  rank {rank} computes"
            for rank, state in states.items()
        ]
        return ClusterTimeoutError(
            "\n".join([f"the run took longer than deadline_seconds={self._deadline_seconds}", *lines]),
            ranks=list(states), locations=[state.location for state in states.values() if state.location],
        )

    def _heal(self, replies: dict[int, Reply]) -> None:
        """Make the cluster usable again after a failure: all devices are idle or dead."""
        if self.closed:
            return
        dead = sorted(rank for rank, reply in replies.items() if isinstance(reply, Died))
        self._empty_channels(tuple(dead))
        self.endpoint.signals.resume()
        if not dead:
            return
        try:
            if self._queued:  # the lock of a queue may have died with its holder: all devices start anew
                for rank in range(self._mesh.size):
                    self.crew.kill(rank)
                while self.crew.pids():
                    self.crew.receive(None)
                dead = list(range(self._mesh.size))
            for rank in dead:
                self._bury_heap(rank)
                self._environments.pop(rank, None)
            self._start_devices(dead)
        except Exception:
            self.finalizer()

    def forget(self) -> None:
        """Between runs: start from empty channels, and count runs from the first, which starts from empty state."""
        self._number = 0
        self._warned.clear()
        self._empty_channels(() if self._told_generation == self._generation else self._gone)

    def _empty_channels(self, gone: tuple[int, ...]) -> None:
        self._gone = gone
        self._generation += 1
        self._channels.clear()
        self.endpoint.forget_traffic(gone)
        self.layout.forget_traffic(self.arena)

    def _bury_heap(self, rank: int) -> None:
        """Use the region of a dead device again, from its start if nobody holds anything of it."""
        layout, words = self.layout, self.arena.words
        for owner in range(layout.endpoints):
            words(layout.held_word(rank, owner))[0] = 0
        if not any(words(layout.held_word(holder, rank))[0] for holder in range(layout.endpoints)):
            words(layout.top_word(rank))[0] = 0
            self.arena.clear(layout.region(rank), layout.region_nbytes)


class _HostOwner:
    """The host's side of its channels; nothing of it is recorded."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.recorder = Recorder()
        self.unwaited: dict[int, Pending] = {}


def _close(crew: Crew, arena: Arena, layout: Layout, endpoints: list[Endpoint], pid: int) -> None:
    """End the devices, and give back all memory but what results still lie in."""
    if os.getpid() != pid:  # a forked copy of the host has none of this
        return
    with DeferredInterrupt():
        crew.close()
        for endpoint in endpoints:
            endpoint.let_go()
        for owner in range(layout.endpoints):
            if not arena.words(layout.held_word(layout.host, owner))[0]:
                arena.clear(layout.region(owner), layout.region_nbytes)
        arena.close_descriptor()


def _mesh(mesh: Mesh | int | None, axes: dict[str, Any]) -> Mesh:
    for name in axes:
        meant = _USUAL_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, _OPTIONS, 1, 0.75)), None)
        if meant is not None:
            raise TypeError(f"VirtualCluster has no option {name!r}; did you mean {meant}?")
    if mesh is None:
        if not axes:
            raise TypeError("VirtualCluster needs a mesh: VirtualCluster(4), VirtualCluster(dp=2, tp=2) or Mesh(...)")
        return Mesh(**axes)
    if axes:
        raise TypeError(
            f"VirtualCluster takes a mesh or axes by name, not both: got {mesh!r} and {', '.join(map(repr, axes))}; "
            f"the options are {', '.join(_OPTIONS)}"
        )
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, bool) or not hasattr(mesh, "__index__"):
        raise TypeError(f"a mesh is a Mesh or a number of devices, got {mesh!r}")
    return Mesh(devices=mesh)


def _note_wrong_arguments(error: BaseException, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say so if the program could not even be called."""
    if isinstance(program, Operation):
        return
    try:
        inspect.signature(program).bind(None, *args, **kwargs)
    except (TypeError, ValueError) as wrong:
        code = getattr(program, "__code__", None)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        name = getattr(program, "__qualname__", type(program).__name__)
        error.add_note(f"{name}{where} is called with the device first, then what run() was given: {wrong}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")


def _by_rank(inputs: list[tuple[Any, ...]], size: int, program: Operation) -> tuple[Any, ...]:
    """The inputs of an operation as arguments: whole where every rank gets the same object."""
    if len(inputs) != size:
        raise ValueError(f"{type(program).__name__}.inputs gave {len(inputs)} tuples for {size} devices")
    if len({len(mine) for mine in inputs}) > 1:
        lengths = [len(mine) for mine in inputs]
        raise ValueError(f"{type(program).__name__}.inputs gave tuples of different lengths: {lengths}")
    columns = zip(*inputs, strict=True)
    return tuple(column[0] if all(v is column[0] for v in column) else PerDevice(column) for column in columns)


def _queues(layout: Layout, processes: bool) -> list[dict[int, tuple[Any, Any]]]:
    """For each endpoint, for each peer: the queue to it and the queue from it."""
    context = multiprocessing.get_context("spawn")
    make: Callable[[], Any] = context.Queue if processes else queue.SimpleQueue
    all_queues = {(a, b): make() for a in range(layout.endpoints) for b in range(layout.endpoints)}
    return [
        {peer: (all_queues[here, peer], all_queues[peer, here]) for peer in range(layout.endpoints)}
        for here in range(layout.endpoints)
    ]


def show_with_rank(rank: int, stream: str, text: str) -> None:
    """Print lines that a device printed, to the host's ``stdout`` or ``stderr``, with the rank in front."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    print("".join(f"[rank {rank}] {line}\n" for line in text[:-1].split("\n")), end="", file=file, flush=True)
