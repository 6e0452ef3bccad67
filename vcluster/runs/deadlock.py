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
from vcluster.memory import BLOCKED, FINISHED, LEFT, RUNNING, Need, Operation, State, Status


def find_stuck(
    states: Sequence[State], has_changed: Callable[[Need], bool], *, host_may_act: bool = True
) -> list[Stuck]:
    """The devices that can never continue, by rank; ``states`` by rank, all of one moment.

    ``host_may_act``: whether the host may send or receive while the run goes on, from another thread.
    """
    awake = [state.state in (RUNNING, LEFT) or _was_served(state, has_changed) for state in states]
    free: set[tuple[int, int]] = (
        set()
    )  # (rank, number of an operation); the first are what the kernel waits for

    def can_act(rank: int) -> bool:
        return awake[rank] or any((rank, number) in free for number in range(states[rank].waits))

    def may_be_met(need: Need) -> bool:
        if need.peer < 0:
            return host_may_act or need.lane is None  # the host takes messages in while it waits for the run
        if can_act(need.peer):
            return True
        peer = states[need.peer]
        if need.lane is None:
            return peer.state != FINISHED
        lanes = enumerate(operation.lane for operation in peer.operations)
        return any(lane == need.lane and (need.peer, number) in free for number, lane in lanes)

    def peers(operation: Operation) -> tuple[int, ...]:
        return tuple(dict.fromkeys(need.peer for need in operation.needs or () if not may_be_met(need)))

    blocked = [
        (rank, number, operation)
        for rank, state in enumerate(states)
        if state.state == BLOCKED and not awake[rank]
        for number, operation in enumerate(state.operations)
    ]
    before = -1
    while before < len(free):
        before = len(free)
        for rank, number, operation in blocked:
            if (rank, number) not in free and (
                operation.needs is None or all(map(may_be_met, operation.needs))
            ):
                free.add((rank, number))
    return [
        Stuck(rank, operation.text, states[rank].location, operation.lane, peers(operation))
        for rank, number, operation in blocked
        if number == 0 and not can_act(rank)
    ]


def _was_served(state: State, has_changed: Callable[[Need], bool]) -> bool:
    """Whether something that a blocked device needs has happened since it slept."""
    return any(has_changed(need) for operation in state.operations for need in operation.needs or ())


def find_deadlock(
    status: Status, size: int, *, host_may_act: bool = True, wake: Callable[[list[int]], object] | None = None
) -> list[Stuck]:
    """The devices that can never continue, from what they publish.

    A device that waits for several others is woken by the last of them, and publishes nothing before.  So what it
    publishes may be out of date, and its deadlock would not be found; ``wake(ranks)`` wakes such devices.

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
    still = {stick.rank for stick in stuck} | {
        rank for rank, state in enumerate(states) if state.state == FINISHED
    }
    return stuck if all(status.version(rank) == states[rank].version for rank in still) else []
