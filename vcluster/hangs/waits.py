"""Who waits for whom: the open calls of each rank, and the ranks that have not made theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from parallelism.events import HOST
from vcluster.hangs.matching import Matching, Place
from vcluster.hangs.records import RankRecord


class Wait(NamedTuple):
    """An open call, and the ranks that have not called what it needs."""

    place: Place
    missing: tuple[int, ...]
    unknown: tuple[int, ...] = ()
    """Ranks of which the dumps do not tell whether they have."""


def waits_of(matching: Matching) -> dict[int, list[Wait]]:
    """The open calls that count, by rank, in the order of its record.

    Of the collectives of a group the first counts, as the others queue behind it.  A run of this project says in which
    calls its kernel waited: then only these count.
    """
    waits: dict[int, list[Wait]] = {}
    for rank, record in matching.records.ranks.items():
        if found := [_wait(matching, Place(rank, at)) for at in _that_count(record)]:
            waits[rank] = found
    return waits


def stuck_waits(matching: Matching, waits: dict[int, list[Wait]]) -> dict[int, Wait]:
    """For each rank that can never go on, the call in which it waits.

    A rank of which is known that it still computed may have come to anything, and so may those that wait only for it.
    A kernel of this project goes on with any call that it waits for; of a dump of PyTorch nobody knows which one that is.
    """
    ranks = matching.records.ranks
    enough = any if matching.records.is_own else all
    free = {rank for rank, record in ranks.items() if record.outcome == "stopped" and rank not in waits}

    def may_go_on(found: Iterable[Wait]) -> bool:
        return enough(free.issuperset(wait.missing) for wait in found)

    before = -1
    while before < len(free):
        before = len(free)
        free.update([rank for rank, found in waits.items() if may_go_on(found)])
    idle = ranks.keys() - waits.keys()
    return {rank: _that_tells(found, idle, free) for rank, found in sorted(waits.items()) if rank not in free}


def behind_one_another(matching: Matching, waits: dict[int, list[Wait]]) -> dict[int, Wait]:
    """For each rank that waits in its first open call for one whose first open call is another: groups entered in
    different orders, where every rank has enqueued everything."""
    first = {rank: found[0] for rank, found in waits.items()}
    stuck = {}
    for rank, wait in first.items():
        record = matching.records.ranks[rank]
        if record.is_message[wait.place.at]:
            continue
        here = matching.members(int(record.group[wait.place.at]), int(record.sequence[wait.place.at])).here
        later = tuple(other for other, at in here.items() if other in first and first[other].place.at < at)
        if later:
            stuck[rank] = Wait(wait.place, later)
    return stuck


def _that_tells(waits: Iterable[Wait], idle: Iterable[int], free: set[int]) -> Wait:
    """Of the calls in which a rank waits, the one that lacks a rank which waits for nothing; otherwise the first."""
    lacking = [wait for wait in waits if not free.issuperset(wait.missing)]
    telling = [wait for wait in lacking if not set(idle).isdisjoint(wait.missing)]
    return (telling or lacking)[0]


def _that_count(record: RankRecord) -> list[int]:
    if record.outcome:
        return np.flatnonzero(record.is_waited).tolist()
    groups = set()
    found = []
    for at in np.flatnonzero(record.is_open).tolist():
        if record.is_message[at]:
            found.append(at)
        elif record.group[at] not in groups:
            groups.add(record.group[at])
            found.append(at)
    return found


def _wait(matching: Matching, place: Place) -> Wait:
    record = matching.records.ranks[place.rank]
    if not record.is_message[place.at]:
        members = matching.members(int(record.group[place.at]), int(record.sequence[place.at]))
        return Wait(place, members.not_yet, members.unknown)
    form = matching.records.form(*place)
    channel = matching.channel(place) if form.is_message else None
    if channel is None or min(channel.source, channel.target) < 0:
        return Wait(place, (HOST,) if record.outcome and channel is not None else ())
    matched = matching.is_matched(place)
    other = channel.target if channel.source == place.rank else channel.source
    return Wait(place, () if matched else (other,))
