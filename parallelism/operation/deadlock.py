"""A deadlock described: the circle of ranks that wait for each other, and the line at which each of them waits."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from parallelism.operation.errors import DeadlockError, Undelivered, folded, ranks_in_words

MOST_CALLERS = 6
"""Functions that are named of a deep recursion."""

MOST_STEPS = 16
"""Ranks that are named of a long circle."""

Lane = tuple[object, ...]
"""Operations that take effect in order: ("group", key), ("send", peer, tag) or ("recv", peer, tag), peers by rank."""


class Frame(Protocol):
    """A line of the user's code that is being executed."""

    @property
    def function(self) -> str: ...
    @property
    def place(self) -> str:
        """``file:line``."""


class Stuck(NamedTuple):
    """A rank that can never continue."""

    rank: int
    text: str
    """The operation in which it waits."""
    location: str
    """The line at which it waits."""
    lane: Lane
    """The kind of the operation, and with which ranks."""
    waits_for: tuple[int, ...]
    """The ranks that will never do what it needs."""


def deadlock_error(
    stuck: Sequence[Stuck],
    finished: Collection[int],
    stacks: Mapping[int, Sequence[Frame]],
    remarks: Sequence[str] = (),
) -> DeadlockError:
    """The error of a run in which these ranks are stuck; ``finished`` are the ranks that have returned.

    ``remarks`` are lines below those of the ranks.
    """
    return DeadlockError(
        "\n".join([describe(stuck, finished, stacks), *(f"  {remark}" for remark in remarks)]),
        ranks=[each.rank for each in stuck],
        operation=stuck[0].text.split("(")[0],
        locations=[each.location for each in stuck],
    )


def describe(
    stuck: Sequence[Stuck],
    finished: Collection[int],
    stacks: Mapping[int, Sequence[Frame]] | None = None,
    *,
    absent: str = "returned without",
) -> str:
    """A deadlock as text: the circle of waits if there is one, then a line for each rank.

    ``stacks`` are the user's lines by rank, outermost first; ``absent`` is what the finished ranks did.
    """
    if circle := _circle({each.rank: each for each in stuck}):
        steps = [
            f"rank {rank} waits for rank {after}"
            for rank, after in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        if len(circle) == 1:
            steps = [f"rank {circle[0]} waits for itself"]
        if len(steps) > MOST_STEPS:
            steps[MOST_STEPS - 1 : -1] = ["..."]
        head = f"deadlock: {'; '.join(steps)}"
    else:
        first = next((each for each in stuck if not {*finished}.isdisjoint(each.waits_for)), stuck[0])
        head = f"deadlock: rank {first.rank} waits for {ranks_in_words(first.waits_for)}"
        if gone := [peer for peer in first.waits_for if peer in finished]:
            head = f"deadlock: {ranks_in_words(gone)} {absent} {_omission(first)}"
    texts = {
        each.rank: f"in {each.text} at {each.location}, waiting for {ranks_in_words(each.waits_for)}"
        + callers((stacks or {}).get(each.rank, ()), each.location)
        for each in stuck
    }
    before = "  -1 is the host; the device before rank 0 is (device.rank - 1) % device.size"
    return "\n".join(
        [head, *folded(texts), *[before] * any(peer < 0 for each in stuck for peer in each.waits_for)]
    )


def callers(stack: Sequence[Frame], location: str) -> str:
    """The functions that called the line at ``location``, innermost first, as a line of text; "" if there are none."""
    frames = list(reversed(stack))
    if frames and frames[0].place == location:
        del frames[0]
    texts = [f"{frame.function} at {frame.place}" for frame in frames[:MOST_CALLERS]]
    if len(frames) > MOST_CALLERS:
        texts.append(f"{len(frames) - MOST_CALLERS} more")
    return f"\n    called from {', '.join(texts)}" if texts else ""


def _omission(stuck: Stuck) -> str:
    """What another rank did not do, so that this one waits in vain."""
    kind, *rest = stuck.lane
    if kind == "recv":
        return f"sending what rank {stuck.rank} waits for (tag {rest[1]})"
    if kind == "send":
        return f"receiving what rank {stuck.rank} sends (tag {rest[1]})"
    _, of, group = stuck.text.partition(" of group ")
    return f"calling {stuck.text.split('(')[0]}{of}{group}, for which rank {stuck.rank} waits"


def _circle(stuck: Mapping[int, Stuck]) -> list[int]:
    """The first circle of ranks in which each waits for the next, from its lowest rank on; empty if there is none."""
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


def of_other_tags(stuck: Sequence[Stuck], messages: Iterable[Undelivered]) -> list[str]:
    """Which of the ``messages`` were sent to ranks that wait in vain for a message of another tag of the same sender, in
    words."""
    wanted: dict[tuple[Any, Any], Any] = {
        (each.lane[1], each.rank): each.lane[2] for each in stuck if each.lane[0] == "recv"
    }
    texts = []
    for each in sorted(messages, key=lambda each: each[:3]):
        ends = each.source, each.target
        if ends in wanted and each.tag != wanted[ends]:
            what, has = ("a message", "has") if each.how_many == 1 else (f"{each.how_many} messages", "have")
            texts.append(
                f"{what} of rank {each.source} to rank {each.target} with tag {each.tag}, sent at {each.location}, "
                f"{has} not been received"
            )
    return texts
