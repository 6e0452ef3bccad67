"""The first collective of a group in which its members called different things."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parallelism.collectives import mismatch
from parallelism.operation import CollectiveMismatchError, ranks_in_words
from vcluster.hangs.matching import Matching, Place

MOST_LISTED = 16
"""The members of a larger group are told as spans of ranks."""


class Mismatch(NamedTuple):
    """A collective whose members differ."""

    group: int
    sequence: int
    what: str
    """In what they differ."""


def first_mismatch(matching: Matching, *, is_open: bool) -> Mismatch | None:
    """The first collective whose members differ in what must agree, of the group in which that happened first.

    ``is_open``: of those that some member has not completed, or else of all; where all went on, others may be waited for.
    """
    records = matching.records
    found: list[tuple[int, Mismatch]] = []
    for group in range(len(records.groups)):
        if (different := _in_group(matching, group, is_open=is_open)) is not None:
            here = matching.members(group, different.sequence).here
            found.append((min(here.values()), different))
    return min(found)[1] if found else None


def error_of(matching: Matching, different: Mismatch) -> tuple[str, CollectiveMismatchError]:
    """The sentence, and the error as a run of this project would raise it."""
    records = matching.records
    members = matching.members(different.group, different.sequence)
    texts = {rank: records.text(rank, at) for rank, at in members.here.items()}
    first = next(iter(members.here))
    kind = records.form(first, members.here[first]).name
    error = mismatch(kind, texts, different.what)
    head = str(error)
    everybody = records.members(different.group)
    if len(texts) > MOST_LISTED or len(texts) < len(everybody):
        head = f"the members of the group of {ranks_in_words(sorted(everybody))} differ in {different.what}"
    sites = {rank: records.site(rank, members.here[rank]).location for rank in sorted(texts)}
    located = error.at({rank: site for rank, site in sites.items() if site})
    lines = str(located).splitlines()[1:]
    absent = [rank for rank in members.not_yet if rank in records.ranks]
    lines += [f"  {ranks_in_words(absent)} called nothing there yet"] * bool(absent)
    return "\n".join([head, *lines]), located


def place_of(matching: Matching, different: Mismatch) -> Place:
    """One of its calls."""
    return Place(*next(iter(matching.members(different.group, different.sequence).here.items())))


def _in_group(matching: Matching, group: int, *, is_open: bool) -> Mismatch | None:
    records = matching.records
    members = records.members(group)
    present = [rank for rank in members if rank in records.ranks]
    if len(present) < 2:
        return None
    numbers, places = matching.collectives(present[0], group)
    usual = records.ranks[present[0]].call[places]
    best: Mismatch | None = None
    for rank in present[1:]:
        its_numbers, its_places = matching.collectives(rank, group)
        its = records.ranks[rank].call[its_places]
        if np.array_equal(numbers, its_numbers) and np.array_equal(usual, its):
            continue
        shared, mine, yours = np.intersect1d(numbers, its_numbers, return_indices=True)
        for at in np.flatnonzero(usual[mine] != its[yours]).tolist():
            what = records.calls[usual[mine[at]]].difference(records.calls[its[yours[at]]])
            if what is None or (best is not None and shared[at] >= best.sequence):
                continue
            call = matching.members(group, int(shared[at]))
            if records.is_own and not {*call.not_yet}.issubset(records.missing):
                break  # a run looks once all have called
            open_ranks = [one for one, place in call.here.items() if records.ranks[one].is_open[place]]
            if open_ranks or not is_open:
                best = Mismatch(group, int(shared[at]), what)
                break
    return best
