"""The decision behind a hang: the last call that ranks made alike, and the first in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from parallelism.arrays import Ints
from parallelism.operation import ranks_in_words
from parallelism.operation.errors import keys_by_value
from vcluster.hangs.matching import Matching, Place
from vcluster.hangs.records import Records

MOST_BACK = 50
"""How many collectives are looked at for one that all have called at the same line."""
MOST_LINES = 8
"""More different calls are only counted."""

Alike = tuple[str, str, str] | None
"""What is the same when ranks do alike: the call, the role of its group, its line.  None: no further call."""


@dataclass(frozen=True)
class Decision:
    """The place in the program where ranks took different branches."""

    last_alike: str
    """The last call that all of them made alike, with its place; "" if there is none."""
    calls: Mapping[int, str]
    """By rank, the first call in which they differ, with its place."""
    places: Mapping[int, int] = field(default_factory=dict)
    """By rank, which of its calls is that last one."""
    unknown: str = ""
    """Why the dumps do not tell it; "" if they do."""

    def __str__(self) -> str:
        if self.unknown:
            return f"where they went different ways cannot be told, because {self.unknown}"
        if not self.calls:
            return ""
        before = (
            f"the last call that all of them made alike: {self.last_alike}"
            if self.last_alike
            else ("they made no call alike")
        )
        by_text = sorted(keys_by_value(self.calls).items(), key=lambda item: -len(item[1]))
        lines = [f"  {ranks_in_words(ranks)} {text}" for text, ranks in by_text[:MOST_LINES]]
        more = [f"  {len(by_text) - MOST_LINES} other ways"] * (len(by_text) > MOST_LINES)
        return "\n".join([before, "the first call in which they differ:", *lines, *more])


def decision_of(matching: Matching, place: Place, ranks: Sequence[int]) -> Decision:
    """Where ``ranks`` went different ways, looked for from the last collective before ``place`` that all have made."""
    records = matching.records
    present = [rank for rank in ranks if rank in records.ranks]
    starts = _common(matching, place, present)
    if starts is None:
        lost = [rank for rank in present if records.ranks[rank].is_cut]
        if lost:
            why = (
                f"the ring buffer of {ranks_in_words(lost)} begins after the last collective that they share"
            )
            return Decision("", {}, unknown=why)
        starts = dict.fromkeys(present, -1)
    at = dict(starts)
    while True:
        following = {rank: _alike(records, rank, at[rank] + 1, present) for rank in present}
        if len(set(following.values())) != 1 or None in following.values():
            break
        at = {rank: place + 1 for rank, place in at.items()}
    last = _told(records, at)
    calls = {rank: _next_call(records, rank, at[rank] + 1, records.text) for rank in present}
    if len(set(calls.values())) == 1:  # the same in different groups
        calls = {rank: _next_call(records, rank, at[rank] + 1, records.text_with_group) for rank in present}
    return Decision(last, calls if len(set(calls.values())) > 1 else {}, at)


def _common(matching: Matching, place: Place, ranks: Sequence[int]) -> dict[int, int] | None:
    """Of each rank, which of its calls is the last collective before ``place`` that all of them have made alike.

    It is looked for in the group of ``place``, or of a message, in every group that has all of them.
    """
    records = matching.records
    record = records.ranks[place.rank]
    groups = [int(record.group[place.at])]
    below = int(record.sequence[place.at])
    if record.is_message[place.at]:
        below = 1 << 62
        groups = [n for n in range(len(records.groups)) if {*records.members(n)}.issuperset(ranks)]
    best: dict[int, int] | None = None
    for group in groups:
        numbers = [matching.collectives(rank, group)[0] for rank in ranks]
        shared = numbers[0][numbers[0] < below]
        for others in numbers[1:]:
            shared = np.intersect1d(shared, others)
        if len(shared) == 0:
            continue
        found = _at_one_line(matching, group, shared[-MOST_BACK:], ranks)
        if best is None or found[ranks[0]] > best[ranks[0]]:
            best = found
    return best


def _at_one_line(matching: Matching, group: int, numbers: Ints, ranks: Sequence[int]) -> dict[int, int]:
    """Of each rank, which of its calls is the last of these collectives that all made at one line; if none was, the last.

    Members may meet in a call that they made at different lines. Then the decision lies before it.
    """
    last: dict[int, int] | None = None
    for number in reversed(numbers.tolist()):
        places = [matching.find(rank, group, number) for rank in ranks]
        found = {rank: at for rank, at in zip(ranks, places, strict=True) if at is not None}
        if len({matching.records.site(rank, at).location for rank, at in found.items()}) == 1:
            return found
        last = last or found
    return last or {}


def _alike(records: Records, rank: int, at: int, ranks: Sequence[int]) -> Alike:
    """What is the same of a call that ``ranks`` make alike: its group, or if that has not all of them, the group's role."""
    record = records.ranks[rank]
    if at >= len(record):
        return None
    group = int(record.group[at])
    shared = {*records.members(group)}.issuperset(ranks)
    role = f"group {group}" if shared else records.groups[group].description
    return records.form(rank, at).text, role, records.site(rank, at).location


def _told(records: Records, places: Mapping[int, int]) -> str:
    """A call that ranks made alike, with the lines at which they made it."""
    if not places or min(places.values()) < 0:
        return ""
    texts = {}
    for rank, at in places.items():
        texts[rank] = str(records.site(rank, at))
    first = min(places)
    record = records.ranks[first]
    number = int(record.sequence[places[first]])
    group = records.groups[record.group[places[first]]]
    which = f", number {number} of group {group}" if number >= 0 else ""
    by_site = keys_by_value(texts)
    sites = (
        next(iter(by_site))
        if len(by_site) == 1
        else ", ".join(
            f"{site.strip()} ({ranks_in_words(ranks)})" for site, ranks in list(by_site.items())[:MOST_LINES]
        )
    )
    return f"{records.text(first, places[first])}{' ' * (len(by_site) > 1)}{sites}{which}"


def _next_call(records: Records, rank: int, at: int, text: Callable[[int, int], str]) -> str:
    record = records.ranks[rank]
    if at >= len(record):
        return {
            "returned": "called nothing more, and returned",
            "raised": f"called nothing more, and raised {record.raised}",
        }.get(record.outcome, "called nothing more")
    return f"called {text(rank, at)}{records.site(rank, at)}"
