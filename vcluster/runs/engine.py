"""The running part of a cluster: its devices, its memory and the host's endpoint, from start to close."""

from __future__ import annotations

import errno
import inspect
import multiprocessing
import os
import queue
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster.code import ClusterError, Environment, UnusedResultWarning, code_of
from vcluster.code.environment import environment
from vcluster.memory import Arena, Layout, Status
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.memory.layout import KEPT_GROUPS
from vcluster.messages import Encoded, Endpoint, Pending, VirtualChannel, decode_alone, hand_over
from vcluster.messages.blocks import release
from vcluster.processes import (
    Crew,
    DeviceSpec,
    Died,
    Done,
    ProcessCrew,
    RunCommand,
    ThreadCrew,
    default_start_method,
)
from vcluster.processes.kept_programs import SentProgram
from vcluster.processes.variables import Variables, changes, host_variables
from vcluster.runs.checked_program import by_rank, check_program
from vcluster.runs.host_waits import WaitsOfTheHost
from vcluster.runs.log import log
from vcluster.runs.outcome import Reply, memory_kills
from vcluster.runs.run import Run
from vcluster.runs.run_loop import Conduct, ShowOutput, ShowWarning, print_with_rank
from vcluster.runs.run_payload import KeptEncodings, Shipment, pack
from vcluster.tracing import Recorder

if TYPE_CHECKING:
    from parallelism.timeline import Pricing
    from vcluster.mpi import MpiCrew


Queues = dict[int, tuple[Any, Any]] | None
"""Of an endpoint, by peer: the queue to it and the queue from it. None if it has none."""


class Body:
    """Owns the devices, the shared memory and the host's endpoint of one cluster, and runs programs on them."""

    def __init__(
        self,
        mesh: Mesh,
        backend: str,
        transport: str,
        start_method: str | None,
        capacity: int,
        seed: int,
        deadline_seconds: float | None,
        pricing: Pricing | None = None,
        *,
        owner: object,
        interrupt: DeferredInterrupt,
    ) -> None:
        """The devices end with ``owner``, if not sooner; and as soon as what ``interrupt`` delivers raises."""
        self.pid = os.getpid()
        """The process that the devices belong to."""
        self.mesh = mesh
        self._pricing = pricing
        self.capacity = capacity
        self._seed = seed
        self.size = mesh.size
        self.deadline_seconds = deadline_seconds
        self._processes = backend != "thread"
        if backend == "process":
            default_start_method()  # this raises on platforms without support for processes
        self.layout = Layout.for_devices(mesh.size, sparse=sys.platform != "win32")
        self.arena = Arena(self.layout.nbytes)
        self.crew = self._new_crew(backend, start_method)
        self._queued = transport == "queue"
        self.endpoint: Endpoint
        """The host's. Under the ``queue`` transport there is another one after each death."""
        self.endpoints: list[Endpoint] = []
        """The endpoint, once there is one, for the finalizer."""
        self._number = self._generation = self._sent_generation = 0
        self._groups = 0
        """The number of times that the directories of groups were emptied because one was filling up."""
        self._gone: tuple[int, ...] = ()
        self.status = Status(self.arena, self.layout) if self._over_mpi is None else self._over_mpi.status
        self._environments: dict[int, Environment] = {}
        self._variables: dict[int, Variables] = {}
        """The host's environment variables when it told each device of them."""
        self._in_progress = False
        self._encodings = KeptEncodings()
        self.asked: BaseException | None = None
        """The error with which another thread has asked to end the run."""
        self._channels: dict[int, VirtualChannel] = {}
        self.show_output: ShowOutput = print_with_rank
        self.show_warning: ShowWarning | None = None
        self._warned: set[str] = set()
        self._memory_kills = memory_kills()
        self.finalizer = weakref.finalize(
            owner, close, self.crew, self.arena, self.layout, self.endpoints, os.getpid()
        )
        interrupt.wake = self.crew.wake
        try:
            self._start_devices(range(mesh.size), interrupt.deliver)
        except BaseException:
            self.finalizer()
            raise

    def _new_crew(self, backend: str, start_method: str | None) -> Crew | MpiCrew:
        self._over_mpi: MpiCrew | None = None
        if backend == "mpi":
            from vcluster.mpi import MpiCrew

            try:
                self._over_mpi = MpiCrew(self.arena, self.layout, self.capacity)
            except BaseException:  # there is no job, or too few of its ranks are free
                self.arena.close_descriptor()
                raise
            return self._over_mpi
        return ProcessCrew(self.arena, start_method) if backend == "process" else ThreadCrew(self.arena)

    def _start_devices(self, ranks: Iterable[int], check: Callable[[], object] = tuple) -> None:
        """Start devices. ``check()`` is called now and then, and may raise to give up."""
        queues: list[Queues] = [None] * self.layout.endpoints
        if self._queued:
            queues = _queues(self.layout, self._processes)
        ranks = tuple(ranks)
        self._variables.update(dict.fromkeys(ranks, host_variables()))
        self.crew.start(
            [
                DeviceSpec(
                    rank,
                    self.mesh,
                    self.layout,
                    self.capacity,
                    self._seed,
                    queues[rank],
                    self._generation,
                    self._groups,
                )
                for rank in ranks
            ],
            check,
        )
        if self._queued or not self.endpoints:
            self._connect(queues[self.layout.host])

    def _connect(self, queues: Queues) -> None:
        """Make the endpoint of the host, in place of the one before."""
        if self._over_mpi is None:
            self.endpoint = Endpoint(
                self.arena, self.layout, self.layout.host, capacity=self.capacity, queues=queues
            )
        else:
            self.endpoint = self._over_mpi.endpoint
        if self._over_mpi is None and not queues:  # otherwise a message may still be under way after its run
            WaitsOfTheHost(self.endpoint, lambda: self._in_progress)
        self._owner = _HostOwner(self.endpoint)
        for replaced in self.endpoints:
            replaced.let_go()
            self.layout.forget_traffic(self.arena)  # the replaced endpoint has closed its channels
        self.endpoints[:] = [self.endpoint]

    @property
    def closed(self) -> bool:
        return not self.finalizer.alive

    def channel(self, rank: int) -> VirtualChannel:
        channel = self._channels.get(rank)
        if channel is None:
            channel = self._channels[rank] = VirtualChannel(self._owner, rank)
        return channel

    def run(
        self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shipped: Any = None
    ) -> Run[Any]:
        """Run ``program`` and return its `Run`. The devices execute ``shipped`` in its place if that is given."""
        __tracebackhide__ = True  # for pytest and IPython
        check_program(program)
        if isinstance(program, Operation):
            args = by_rank(program.inputs(self.mesh, *args), self.size, program)
        shipment = pack(program, shipped, args, kwargs, self.mesh, self._encodings)
        with DeferredInterrupt(self.crew.wake) as interrupt:
            if not self.finalizer.alive:  # the handler of a signal has closed the cluster just now
                raise ClusterError("the cluster was closed while a run was in progress")
            conduct = self._conduct(shipment, interrupt)
            replies = conduct.replies
            error = conduct.error(self._killed_for_memory)
            if error is not None:
                if isinstance(error, ClusterError):
                    error.trace = conduct.failed_run(error)
                self._recover(error, replies)
                if isinstance(error.__cause__, TypeError):
                    _note_wrong_arguments(error, program, args, kwargs)
                try:
                    raise error
                finally:
                    del (
                        error,
                        conduct,
                    )  # no cycle through its traceback, which would keep the caller's variables
            outputs, refused = self._outputs(replies)
            if refused is not None:
                try:
                    raise refused
                finally:
                    del refused, outputs  # no cycle, as above
            done = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Done)]
            self._warn({line: name for reply in done for line, name in reply.dropped.items()})
            records = [reply.record for reply in done if not isinstance(reply.record, int)]
            return Run(self.mesh, program, list(outputs.values()), records, self._pricing)

    def _conduct(self, shipment: Shipment, interrupt: DeferredInterrupt) -> Conduct:
        """Run a packed program on the devices until each has replied."""
        __tracebackhide__ = True
        encoded, mine, kept = shipment
        common = hand_over(self.endpoint, encoded, self.layout.host)
        sent: SentProgram | None = None
        conduct = Conduct(self)
        self._in_progress = True
        try:
            nbytes = encoded.nbytes
            if kept is not None:
                place = hand_over(self.endpoint, kept.encoded, self.layout.host)
                sent = SentProgram(place, kept.encoded.block_nbytes, kept.digest)
                nbytes += kept.encoded.nbytes
            self._number += 1
            if self.layout.most_groups(self.arena) > KEPT_GROUPS:
                self.layout.forget_groups(self.arena)
                self._groups += 1
            usual = RunCommand(
                self._number,
                self._generation,
                self._gone,
                common,
                encoded.block_nbytes,
                nbytes,
                None,
                None,
                {},
                self._groups,
                sent,
            )
            now = self._environment_now()
            conduct.collect(partial(self._command, usual, now, self._variables_now(), mine), interrupt)
        finally:
            self._in_progress = False
            release(self.arena, common)
            if sent is not None:
                release(self.arena, sent.place)
        for rank, reply in conduct.replies.items():
            if isinstance(reply, Done) and isinstance(reply.record, int) and not self.closed:
                conduct.replies[rank] = reply._replace(record=self.endpoint.mailbox(rank).adopt(reply.record))
        self._sent_generation = self._generation
        return conduct

    def _recover(self, error: BaseException, replies: dict[int, Reply]) -> None:
        """Make the cluster usable again after a run that failed with ``error``, to which the outputs are added."""
        if self.closed:
            error.add_note("the cluster is closed: a thread computes on, and cannot be killed")
        elif isinstance(error, ClusterError):
            error.outputs, _ = self._outputs(replies)
        failure = self._heal(replies)
        if failure is not None:
            error.add_note(
                "the cluster is closed: the devices that died could not be replaced "
                f"({type(failure).__name__}: {failure})"
            )

    def _environment_now(self) -> Environment:
        """The host's environment: the same object as the last one while it is the same, which is soon compared."""
        now, last = environment(processes=self._processes), self._environments.get(0)
        return last if last is not None and now == last else now

    def _variables_now(self) -> Variables:
        """The host's environment variables: the same object as the last one while they are the same."""
        now, last = host_variables(), self._variables[0]
        return last if now == last else now

    def _command(
        self, usual: RunCommand, now: Environment, variables: Variables, mine: Sequence[Encoded], rank: int
    ) -> RunCommand:
        """The usual command, with what this rank gets alone, and what has changed there of the environment."""
        changed = self._environments.get(rank) != now
        told = self._variables[rank] is variables
        if not mine and not changed and told:
            return usual
        own = hand_over(self.endpoint, mine[rank], rank) if mine else None
        set_or_removed = {} if told or not self._processes else changes(self._variables[rank], variables)
        self._environments[rank], self._variables[rank] = now, variables
        return usual._replace(own=own, environment=now if changed else None, variables=set_or_removed)

    def _outputs(self, replies: dict[int, Reply]) -> tuple[dict[int, Any], BaseException | None]:
        """The outputs of the devices that finished, by rank, and the first exception raised while unpickling one."""
        outputs: dict[int, Any] = {}
        refused: BaseException | None = None
        for rank, reply in sorted(replies.items()):
            if isinstance(reply, Done):
                try:
                    outputs[rank] = (
                        decode_alone(reply.place)
                        if isinstance(reply.place, bytearray)
                        else self.endpoint.mailbox(rank).adopt(reply.place)
                    )
                except BaseException as error:  # SystemExit, too; the blocks of all others must be taken over
                    error.add_note(f"raised on the host while it unpacked the result of rank {rank}")
                    refused = refused or error
        try:
            return outputs, refused
        finally:
            del refused  # its traceback has this frame

    def _warn(self, dropped: dict[str, str]) -> None:
        """Warn once for each line that discards a result. Users of libraries that write in place make this mistake."""
        for line, name in dropped.items():
            if line not in self._warned:
                self._warned.add(line)
                filename, _, number = line.rpartition(":")
                warnings.warn_explicit(
                    f"the result of {name} is not used; {name} returns its result and does not write into its "
                    f"argument, unless you pass out=x",
                    UnusedResultWarning,
                    filename,
                    int(number),
                )

    def end(self) -> None:
        """End the devices, whatever the handler of a signal raises meanwhile."""
        with DeferredInterrupt():
            self.finalizer()

    def break_off(self, error: BaseException) -> None:
        """End the run in progress with this error. Another thread may call this."""
        self.asked = error
        self.crew.wake()

    def _killed_for_memory(self) -> bool | None:
        """Whether the system has killed a process for lack of memory since the last call; None if not known."""
        before, self._memory_kills = self._memory_kills, memory_kills()
        return None if before is None or self._memory_kills is None else self._memory_kills > before

    def _heal(self, replies: dict[int, Reply]) -> Exception | None:
        """Make the cluster usable again after a failure. All devices are idle or dead.

        Where this fails, the cluster is closed, and the error is returned.
        """
        if self.closed:
            return None
        dead = sorted(rank for rank, reply in replies.items() if isinstance(reply, Died))
        self._empty_channels(tuple(dead))
        self.endpoint.signals.resume()
        if not dead:
            return None
        try:
            if self._queued:  # a dead process may hold the lock of a queue, so all devices are started again
                dead = list(range(self.size))
                for rank in dead:
                    self.crew.kill(rank)
                while self.crew.pids():
                    self.crew.receive(None)
            for rank in dead:
                self._bury_heap(rank)
                self._environments.pop(rank, None)
            self._start_devices(dead)
            log(
                "ranks %s died in run %d; new devices with empty state take their places; pids by rank: %s",
                dead,
                self._number,
                self.crew.pids(),
            )
        except Exception as failure:
            self.finalizer()
            return failure
        return None

    def forget(self) -> None:
        """Empty the channels and count the runs from the first again. The first run starts from empty state."""
        with DeferredInterrupt():
            self._number = 0
            self._warned.clear()
            self._empty_channels(() if self._sent_generation == self._generation else self._gone)

    def _empty_channels(self, gone: tuple[int, ...]) -> None:
        self._gone = gone
        self._generation += 1
        self._channels.clear()
        self.endpoint.forget_traffic(gone)
        self.layout.forget_traffic(self.arena)

    def _bury_heap(self, rank: int) -> None:
        """Reclaim the region of a dead device, and reuse it from its start if no endpoint holds a block of it."""
        layout, words = self.layout, self.arena.words
        for owner in range(layout.endpoints):
            words(layout.held_word(rank, owner))[0] = 0
        if not any(words(layout.held_word(holder, rank))[0] for holder in range(layout.endpoints)):
            words(layout.top_word(rank))[0] = 0
            self.arena.clear(layout.region(rank), layout.region_nbytes)


class _HostOwner:
    """The owner of the host's channels. It records nothing that is read."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.recorder = Recorder(endpoint.threads)
        self.unwaited: dict[int, Pending] = {}


def close(crew: Crew | MpiCrew, arena: Arena, layout: Layout, endpoints: list[Endpoint], pid: int) -> None:
    """End the devices, and give back all memory except the blocks in which results still lie."""
    if os.getpid() != pid:  # this is a forked copy of the host, which owns none of it
        return
    with DeferredInterrupt():
        crew.close()
        for endpoint in endpoints:
            endpoint.let_go()
        for owner in range(layout.endpoints):
            if not arena.words(layout.held_word(layout.host, owner))[0]:
                arena.clear(layout.region(owner), layout.region_nbytes)
        arena.close_descriptor()


def _note_wrong_arguments(
    error: BaseException, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add a note to the error if the program's signature does not accept the arguments of run()."""
    if isinstance(program, Operation):
        return
    try:
        inspect.signature(program).bind(None, *args, **kwargs)
    except (TypeError, ValueError) as wrong:
        code = code_of(program)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        name = getattr(program, "__qualname__", type(program).__name__)
        error.add_note(
            f"run() calls {name}{where} with the device first, then with its own arguments: {wrong}"
        )


def _queues(layout: Layout, processes: bool) -> list[Queues]:
    """For each endpoint and each peer: the queue to the peer and the queue from it."""
    make: Callable[[], Any] = multiprocessing.get_context("spawn").Queue if processes else queue.SimpleQueue
    ends = range(layout.endpoints)
    try:
        all_queues = {(a, b): make() for a in ends for b in ends}
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ClusterError(
            f"transport='queue' needs semaphores, which Linux keeps in /dev/shm, and there are none: {error.strerror}; "
            f"transport='shared_memory' needs none"
        ) from error
    by_endpoint: list[Queues] = []
    for here in ends:
        by_endpoint.append({peer: (all_queues[here, peer], all_queues[peer, here]) for peer in ends})
    return by_endpoint
