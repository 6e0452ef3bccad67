"""What each event is to the clock, and which belong together: the columns of a record, made ready for its replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.events import HOST, Columns, Table
from parallelism.events.columns import codes, combined

POINT, COMPUTE, WAIT, COLLECTIVE, SEND, RECV, OUTSIDE = range(7)
"""A point takes no time; what lies outside of it (children, memory) is only placed."""


class Roles(NamedTuple):
    """By event."""

    roles: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.int64]
    """The same for a send and its recv, and for the members of a collective."""
    sizes: npt.NDArray[np.int64]
    """The members of a collective."""


def roles_of(events: Columns) -> Roles:
    """What each event is to the clock, what those that belong together have in common, and how many they are.

    An operation that cannot meet its partners, because there are none in the records, is a point.
    """
    outermost = ~events.present("parent")
    roles = np.full(len(events), OUTSIDE, np.uint8)
    roles[outermost & ~events.isin("kind", {"memory"})] = POINT
    for kind, role in (("compute", COMPUTE), ("wait", WAIT)):
        roles[outermost & events.isin("kind", {kind})] = role
    keys, sizes = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)

    at = np.flatnonzero(outermost & events.isin("kind", {"collective"}))
    collectives = events.only("group", "sequence").take(at)
    keys[at] = key = collectives.key("group", "sequence")
    sizes[at] = size = group_sizes(collectives)
    _, place, came = np.unique(key, return_inverse=True, return_counts=True)
    roles[at[(came[place] == size) & (size > 1)]] = COLLECTIVE

    between = events.present("peer") & ~events.isin("peer", {HOST})
    at = np.flatnonzero(outermost & between & events.isin("kind", {"send", "recv"}))
    messages = events.only("kind", "rank", "peer", "tag", "sequence").take(at)
    sends = messages.isin("kind", {"send"})
    rank, peer = messages.numbers("rank"), messages.numbers("peer")
    keys[at] = key = combined(
        codes(np.where(sends, rank, peer)), codes(np.where(sends, peer, rank)), messages.key("tag"),
        messages.key("sequence"))
    roles[at[sends]] = SEND
    roles[at[~sends & np.isin(key, key[sends])]] = RECV
    return Roles(roles, keys, sizes)


def group_sizes(collectives: Columns) -> npt.NDArray[np.int64]:
    """The number of ranks in each event's group; -1 where there is none."""
    group = collectives["group"]
    assert isinstance(group, Table)
    return np.array([-1 if ranks is None else len(ranks) for ranks in group.values], np.int64)[group.index]


def with_children_placed(events: Columns, ends: Sequence[int], starts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Puts what happened inside an operation at its start, whichever of the two was recorded first.

    ``ends[lane]`` is where the events of a lane end.
    """
    serials, parents = events.values("serial"), events.values("parent")
    begin = 0
    for end in ends:
        place = {serials[i]: i for i in range(begin, end)}
        placed: set[int] = set()
        for i in range(begin, end):
            path = []
            at: int | None = i
            while at is not None and at not in placed and parents[at] is not None:
                placed.add(at)
                path.append(at)
                at = place.get(parents[at])
            for child in path:
                starts[child] = starts[path[-1] if at is None else at]
        begin = end
    return starts
