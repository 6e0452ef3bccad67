"""The ways to run calls, by backend: how the members of a group meet, and what runs a call, or one that is repeated."""

from collections.abc import Callable
from typing import NamedTuple

from parallelism.algorithms import MPI, runs_directly
from parallelism.collectives import Reduction
from vcluster.collectives.by_messages import ByMessages
from vcluster.collectives.general import General
from vcluster.collectives.group import Call, Calls, Group, Ranks
from vcluster.collectives.prepared import PreparedCall
from vcluster.messages import Endpoint


def never(calls: Calls) -> None:
    """A repeated call is run as the first one was."""


def no_library(call: Call, reduction: Reduction | None) -> None:
    """Refuses a call with ``algorithm="mpi"`` on devices that are no ranks of an MPI job, with a ``ValueError``."""
    raise ValueError(
        f"{call.kind}: algorithm='mpi' asks for the collective of an MPI library, and the devices of this cluster are "
        f"no ranks of an MPI job; leave it out, or type: mpiexec -n RANKS python -m vcluster.mpi script.py"
    )


class Ways(NamedTuple):
    """How the members of a group meet, and how they run a call."""

    group: Callable[[Endpoint, Ranks], Group] = Group
    direct: type[General | ByMessages] = General
    prepared: Callable[[Calls], type[PreparedCall] | None] | None = None
    """Chooses the way of a direct call that is repeated, from the calls of all members.  None: in shared memory."""
    library: type[ByMessages] = ByMessages
    """The way of a call with ``algorithm="mpi"``."""
    check_library: Callable[[Call, Reduction | None], None] = no_library
    """Refuses such a call if it cannot be run."""
    on_one_node: "Ways | None" = None
    """The ways of groups whose members map one memory; None: the same."""

    def meet(self, endpoint: Endpoint, ranks: Ranks) -> Group:
        """The group of these ranks, which knows its ways."""
        ways = self if self.on_one_node is None or not endpoint.maps(ranks) else self.on_one_node
        group = ways.group(endpoint, ranks)
        group.ways = ways
        return group

    def of(self, kind: str, algorithm: str | None) -> type[General | ByMessages]:
        """How a call of this kind with this algorithm is run."""
        if runs_directly(kind, algorithm):
            return self.direct
        return self.library if algorithm == MPI else ByMessages


IN_SHARED_MEMORY = Ways()
AS_MESSAGES = Ways(direct=ByMessages, prepared=never)
"""The ways of the ``queue`` transport: every call is run by messages."""
