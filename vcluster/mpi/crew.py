"""The devices of a cluster, as the host handles them, on the ranks of an MPI job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vcluster.memory import Arena, Layout
from vcluster.messages.blocks import release
from vcluster.messages.encoding import decode
from vcluster.mpi.communicators import Askers
from vcluster.mpi.endpoint import MpiEndpoint
from vcluster.mpi.job import current
from vcluster.mpi.link import Waiting, pack_command, unpack_reply
from vcluster.mpi.nodes import NodeMemory, sharing
from vcluster.mpi.statuses import HostStatus
from vcluster.mpi.transport import COMMAND, COMMUNICATOR, MEMORY, STATUS
from vcluster.processes import DeviceSpec
from vcluster.processes.crew import STOP_SECONDS, Messages, await_ready

INTERRUPT_EVERY_SECONDS = 0.05


class MpiCrew:
    """The devices of one cluster, each on a rank of the job.

    It has the methods of `vcluster.processes.ProcessCrew`.
    """

    def __init__(self, arena: Arena, layout: Layout, capacity: int) -> None:
        self._arena = arena
        self._job = current(layout.size)
        self._cluster, self._ranks = self._job.take(layout.size)
        self.endpoint = MpiEndpoint(
            arena,
            layout,
            layout.host,
            capacity=capacity,
            transport=self._job.transport,
            cluster=self._cluster,
            ranks=[*self._ranks, 0],
        )
        """The endpoint of the host."""
        self.status = HostStatus(self.endpoint)
        self._askers = Askers(self.endpoint)
        self._woken = False
        self._last_sent: tuple[Any, Any] = None, None
        """The last command and its bytes. A command for all devices is pickled once."""
        self._busy: set[int] = set()
        self._files: dict[int, int] = {}
        """By the first device on each node, its descriptor of the memory that the devices of the node share."""

    def start(self, specs: Iterable[DeviceSpec], check: Callable[[], object] = tuple) -> None:
        """Start a device for each spec, and return when all are ready. ``check()`` is called meanwhile, and may raise."""
        spec_of = {spec.rank: spec for spec in specs}
        memories = sharing(self._job.places, self._ranks)
        self._start([(spec_of[each.devices[0]], each) for each in memories], check)
        others = []
        for each in memories:
            first, *rest = each.devices
            file = self._job.places[self._ranks[first]].pid, self._files[first]
            others += [(spec_of[device], each._replace(file=file)) for device in rest]
        self._start(others, check)

    def _start(self, started: Sequence[tuple[DeviceSpec, NodeMemory]], check: Callable[[], object]) -> None:
        for spec, memory in started:
            self._job.start(self._ranks[spec.rank], self._cluster, (spec, [*self._ranks, 0], memory))
        await_ready(self, [spec.rank for spec, _ in started], check)

    def send(self, rank: int, message: Any) -> None:
        """Send a command to a device."""
        if message is None or message is not self._last_sent[0]:
            self._last_sent = message, pack_command(self._arena, message)
        if message is not None:
            self._busy.add(rank)
        self.endpoint.send(rank, COMMAND, self._last_sent[1])
        if message is not None and message.own is not None:
            release(self._arena, message.own)

    def receive(self, timeout_seconds: float | None) -> Messages:
        """Messages of devices, as (rank, message). Waits until there is one."""
        waiting, control = Waiting(), self.endpoint.control
        end = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self.endpoint.take_in()
            messages, control[:] = list(control), []
            found = [reply for rank, message in messages for reply in self._understood(rank, message)]
            left = end - time.monotonic()
            if found or self._woken or left <= 0:
                self._woken = False
                return found
            waiting.rest(left)

    def _understood(self, rank: int, message: Any) -> Messages:
        if message.kind == STATUS:
            self.status.take(rank, message)
            return []
        if message.kind == COMMUNICATOR:
            self._askers.take(message)
            return []
        if message.kind == MEMORY:
            self._files[rank] = decode(message.block)
            return []
        reply, counts = unpack_reply(self.endpoint, message.block)
        if counts is not None:
            self._busy.discard(rank)
            self.status.finish(rank, counts)
        return [(rank, reply)]

    def wake(self) -> None:
        """Make `receive` return. A signal handler or another thread may call this."""
        self._woken = True

    def interrupt(self, rank: int) -> None:
        """Raise `OperationCancelled` in a kernel that computes."""
        self._job.transport.interrupt(self._ranks[rank], self.endpoint.address)

    def kill(self, rank: int) -> bool:
        """A rank cannot be replaced, so it is not ended."""
        return False

    def printing(self) -> AbstractContextManager[object]:
        """A context for the duration of a run."""
        return nullcontext()

    def close(self) -> None:
        """Tell all devices to end. Their ranks are free for the next cluster."""
        if self._busy:
            self.endpoint.signals.cancel()
        deadline = time.monotonic() + STOP_SECONDS
        while self._busy and time.monotonic() < deadline:
            for rank in self._busy:
                self.interrupt(rank)
            self.receive(INTERRUPT_EVERY_SECONDS)
        for rank in range(len(self._ranks)):
            self.send(rank, None)
        self._job.give_back(self._ranks, [self._ranks[rank] for rank in self._busy])
        self._ranks = []

    def pids(self) -> list[int]:
        """The process id of each rank, on its node."""
        return [self._job.places[rank].pid for rank in self._ranks]
