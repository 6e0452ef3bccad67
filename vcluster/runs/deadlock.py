"""Who can never go on.

A device that runs can do anything.  A blocked one can go on if the operation its kernel waits for can: if each thing
that the operation needs has happened since, or may still be done by a peer that can go on, or by an operation that the
peer has under way and that can itself go on.  What this gives as a least fixed point is everybody who may still move;
the others never will.

No timeout decides: a slow kernel runs, a starved device that has only not yet noticed its message finds the word
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from vcluster.code import Frame, ranks_in_words
from vcluster.memory import BLOCKED, FINISHED, RUNNING, Lane, Need, Operation, State, Status

CALLERS_TOLD = 6
"""Of a deep recursion not everybody who called is named."""

STEPS_TOLD = 16
"""Of a circle of very many devices not every step."""


class Stuck(NamedTuple):
    """A device that can never go on."""

    rank: int
    text: str
    """What it waits in."""
    location: str
    lane: Lane
    """Of what kind it is, and with whom."""
    waits_for: tuple[int, ...]
    """Peers that will never do what it needs."""


def find_stuck(
    states: Sequence[State], has_changed: Callable[[Need], bool], *, host_may_act: bool = True
) -> list[Stuck]:
    """The devices that can never go on, by rank; ``states`` by rank, all of one moment.

    ``host_may_act``: whether the host may send or receive while the run goes on, from another thread.
    """
    awake = [
        state.state == RUNNING
        or any(has_changed(need) for operation in state.operations for need in operation.needs or ())
        for state in states
    ]
    free: set[tuple[int, int]] = set()  # (rank, number of an operation); 0 is what the kernel waits for

    def may_act(need: Need) -> bool:
        if need.peer < 0:
            return host_may_act or need.lane is None  # the host takes messages in while it waits for the run
        if awake[need.peer] or (need.peer, 0) in free:
            return True
        peer = states[need.peer]
        if need.lane is None:
            return peer.state != FINISHED
        return any(
            operation.lane == need.lane and (need.peer, number) in free
            for number, operation in enumerate(peer.operations)
        )

    def can_go_on(operation: Operation) -> bool:
        return operation.needs is None or all(map(may_act, operation.needs))

    blocked = [
        (rank, number, operation)
        for rank, state in enumerate(states) if state.state == BLOCKED and not awake[rank]
        for number, operation in enumerate(state.operations)
    ]
    grown = True
    while grown:
        grown = False
        for rank, number, operation in blocked:
            if (rank, number) not in free and can_go_on(operation):
                free.add((rank, number))
                grown = True
    return [
        Stuck(rank, operation.text, states[rank].location, operation.lane,
              tuple(dict.fromkeys(need.peer for need in operation.needs or () if not may_act(need))))
        for rank, number, operation in blocked if number == 0 and (rank, 0) not in free
    ]


def look(status: Status, size: int, *, host_may_act: bool = True) -> list[Stuck]:
    """The devices that can never go on, from what they publish.

    Everything that a stuck device needs is up to others that are stuck, or have finished.  If none of those has moved
    by the time all has been read, they all stood so at one moment, and what the others do does not matter.
    """
    states = [status.read(rank) for rank in range(size)]
    if all(state.state != BLOCKED for state in states):
        return []
    stuck = find_stuck(states, status.has_changed, host_may_act=host_may_act)
    still = {stick.rank for stick in stuck} | {rank for rank, state in enumerate(states) if state.state == FINISHED}
    return stuck if all(status.version(rank) == states[rank].version for rank in still) else []


def tell(stuck: Sequence[Stuck], finished: Collection[int], stacks: Mapping[int, Sequence[Frame]] | None = None) -> str:
    """A deadlock in words: the circle of waits if there is one, then everybody's line.

    ``stacks``, by rank: the user's lines, outermost first.
    """
    by_rank = {stick.rank: stick for stick in stuck}
    circle = _circle(by_rank)
    if circle:
        steps = [
            f"rank {rank} waits for rank {after}" for rank, after in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        if len(steps) > STEPS_TOLD:
            steps[STEPS_TOLD - 1 : -1] = ["..."]
        head = f"deadlock: {'; '.join(steps)}"
    else:
        stick = next((s for s in stuck if any(peer in finished for peer in s.waits_for)), stuck[0])
        gone = [peer for peer in stick.waits_for if peer in finished]
        if gone:
            head = f"deadlock: {ranks_in_words(gone)} returned without {_missed(stick)}"
        else:
            head = f"deadlock: rank {stick.rank} waits for {ranks_in_words(stick.waits_for)}"
    said = {
        s.rank: f"in {s.text} at {s.location}, waiting for {ranks_in_words(s.waits_for)}"
        + callers((stacks or {}).get(s.rank, ()), s.location)
        for s in stuck
    }
    return "\n".join([head, *folded(said)])


def folded(said: Mapping[int, str]) -> list[str]:
    """A line for each thing said, behind the ranks that say it."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    return [f"  {ranks_in_words(ranks)} {text}" for text, ranks in by_text.items()]


def callers(stack: Sequence[Frame], location: str) -> str:
    """Who called the line at ``location``, the nearest first, as a line of its own; nothing if nobody did."""
    frames = list(reversed(stack))
    if frames and frames[0].place == location:
        frames = frames[1:]
    if not frames:
        return ""
    told = [f"{frame.function} at {frame.place}" for frame in frames[:CALLERS_TOLD]]
    more = [f"{len(frames) - CALLERS_TOLD} more"] if len(frames) > CALLERS_TOLD else []
    return f"\n    called from {', '.join(told + more)}"


def _missed(stick: Stuck) -> str:
    """What a stuck device waits for in vain, as what the other did not do."""
    kind, *rest = stick.lane
    if kind == "recv":
        return f"sending what rank {stick.rank} waits for (tag {rest[1]})"
    if kind == "send":
        return f"receiving what rank {stick.rank} sends (tag {rest[1]})"
    return f"calling {stick.text.split('(')[0]}, for which rank {stick.rank} waits"


def _circle(stuck: Mapping[int, Stuck]) -> list[int]:
    for start in stuck:
        path: list[int] = []
        rank = start
        while rank in stuck and rank not in path:
            path.append(rank)
            rank = next((peer for peer in stuck[rank].waits_for if peer in stuck), -1)
        if rank in path:
            circle = path[path.index(rank) :]
            first = circle.index(min(circle))
            return circle[first:] + circle[:first]
    return []
