"""Finds the devices that can never continue.

A device that runs can do anything.  A blocked device can continue if the operation that its kernel waits for can: if
everything that the operation needs has happened since, or can still be done by a peer that can continue, or by a
pending operation of that peer that can itself continue.  Starting from the running devices we add such operations until
none is left to add.  The other devices never will continue.

No timeout decides: a slow kernel runs, and a starved device that has not yet noticed its message finds that the word
has changed.
"""

from collections.abc import Callable, Sequence

from parallelism.operation import Stuck
from vcluster.memory import BLOCKED, FINISHED, RUNNING, Need, State, Status


def find_stuck(
    states: Sequence[State], has_changed: Callable[[Need], bool], *, host_may_act: bool = True
) -> list[Stuck]:
    """The devices that can never continue, by rank; ``states`` by rank, all of one moment.

    ``host_may_act``: whether the host may send or receive while the run goes on, from another thread.
    """
    search = _Search(states, has_changed, host_may_act)
    search.free_all()
    return search.stuck()


class _Search:
    """Frees operations of blocked devices, one after the other, until no other can go on."""

    def __init__(self, states: Sequence[State], has_changed: Callable[[Need], bool], host_may_act: bool) -> None:
        self._states = states
        self._host_may_act = host_may_act
        self._awake = [state.state == RUNNING or _was_served(state, has_changed) for state in states]
        self._blocked = [rank for rank, state in enumerate(states) if state.state == BLOCKED and not self._awake[rank]]
        self._free: set[tuple[int, int]] = set()
        """A rank and the number of its operation; the first are what its kernel waits for."""

    def free_all(self) -> None:
        pending = [(rank, number) for rank in self._blocked for number in range(len(self._states[rank].operations))]
        before = -1
        while before < len(self._free):
            before = len(self._free)
            for rank, number in pending:
                needs = self._states[rank].operations[number].needs
                if (rank, number) not in self._free and (needs is None or all(map(self._may_be_met, needs))):
                    self._free.add((rank, number))

    def stuck(self) -> list[Stuck]:
        found = []
        for rank in self._blocked:
            state = self._states[rank]
            if state.operations and not self._can_act(rank):
                lane, text, needs = state.operations[0]
                peers = dict.fromkeys(need.peer for need in needs or () if not self._may_be_met(need))
                found.append(Stuck(rank, text, state.location, lane, tuple(peers)))
        return found

    def _can_act(self, rank: int) -> bool:
        """Whether the kernel of a device goes on."""
        return self._awake[rank] or any((rank, number) in self._free for number in range(self._states[rank].waits))

    def _may_be_met(self, need: Need) -> bool:
        if need.peer < 0:
            return self._host_may_act or need.lane is None  # the host takes messages in while it waits for the run
        if self._can_act(need.peer):
            return True
        peer = self._states[need.peer]
        if need.lane is None:
            return peer.state != FINISHED
        lanes = enumerate(operation.lane for operation in peer.operations)
        return any(lane == need.lane and (need.peer, number) in self._free for number, lane in lanes)


def _was_served(state: State, has_changed: Callable[[Need], bool]) -> bool:
    """Whether something that a blocked device needs has happened since it slept."""
    return any(has_changed(need) for operation in state.operations for need in operation.needs or ())


def look(
    status: Status, size: int, *, host_may_act: bool = True, wake: Callable[[list[int]], object] | None = None
) -> list[Stuck]:
    """The devices that can never continue, from what they publish.

    ``wake(ranks)`` wakes devices: those that wait for several others are woken by the last of these, so that what they
    publish may be out of date, and they would not be found.

    A stuck device only needs what other stuck or finished devices would have to do.  If none of these has changed by
    the time all states are read, all had these states at one moment, and what the other devices do does not matter.
    """
    states = [status.read(rank) for rank in range(size)]
    if all(state.state != BLOCKED for state in states):
        return []
    if wake is not None:
        blocked = [rank for rank, state in enumerate(states) if state.state == BLOCKED]
        wake([rank for rank in blocked if _was_served(states[rank], status.has_changed)])
    stuck = find_stuck(states, status.has_changed, host_may_act=host_may_act)
    still = {stick.rank for stick in stuck} | {rank for rank, state in enumerate(states) if state.state == FINISHED}
    return stuck if all(status.version(rank) == states[rank].version for rank in still) else []
