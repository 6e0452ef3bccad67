"""Communicators of groups: the host says when one is made.

To make one, all of its members call MPI, which blocks: a member whose peers were cancelled could not be freed. So each
member asks the host, and when all have asked the host tells all. Its word comes to each member before any
cancellation that it sends later, and a member makes the communicator when it takes the word in, whatever it does
otherwise. The host sends one word after the other, so that groups with common members do not wait for each other.

They last until the cluster ends or a run fails: then some members may have begun a collective that others never will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vcluster.messages import Steps, Wait
from vcluster.messages.encoding import decode, encode
from vcluster.mpi.transport import COMMUNICATOR, Address, Message

if TYPE_CHECKING:
    from vcluster.collectives.group import Ranks
    from vcluster.mpi.endpoint import MpiEndpoint


class Communicators:
    """The communicators of the groups that a device is in."""

    def __init__(self, endpoint: MpiEndpoint, ranks: Sequence[int]) -> None:
        """``ranks`` are the ranks of the job by endpoint."""
        self._endpoint = endpoint
        self._ranks = ranks
        self._made: dict[Ranks, Any] = {}
        self._left: list[Any] = []
        """Communicators with a collective that this device has left."""

    def of(self, group: Ranks) -> Steps:
        """The communicator of a group, all of whose members ask for it now."""
        if group not in self._made:
            self._endpoint.send(self._endpoint.layout.host, COMMUNICATOR, encode(group, "a group"))
            yield Wait(lambda: self._has(group), list)
        return self._made[group]

    def _has(self, group: Ranks) -> bool:
        self._endpoint.take_in()
        return group in self._made

    def make(self, message: Message) -> None:
        """Make the communicator of which the host says so."""
        group = decode(message.block)
        self._made[group] = self._endpoint.transport.communicator([self._ranks[rank] for rank in group])

    def leave(self, communicator: Any) -> None:
        """Note that a collective was left before its end."""
        self._left.append(communicator)

    def forget(self) -> None:
        """Free all, but those in which something may still arrive."""
        for communicator in self._made.values():
            if communicator not in self._left:
                communicator.Free()
        self._made.clear()
        self._left.clear()


class Askers:
    """Counts, on the host, which members have asked for a communicator."""

    def __init__(self, endpoint: MpiEndpoint) -> None:
        self._endpoint = endpoint
        self._asked: dict[tuple[Address, Ranks], int] = {}

    def take(self, message: Message) -> None:
        """Note that a member asks, and tell all members if it is the last. Members of a run that failed get no word."""
        if message.address != self._endpoint.address:
            return
        group = decode(message.block)
        key = message.address, group
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] == len(group):
            del self._asked[key]
            for rank in group:
                self._endpoint.send(rank, COMMUNICATOR, encode(group, "a group"))
