"""Why a job hangs, as a value that prints: from the dumps alone, in the sentences of this project's own errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os import PathLike

from parallelism.operation import Stuck, ranks_in_words
from parallelism.operation.deadlock import describe, of_other_tags
from parallelism.operation.errors import Undelivered, keys_by_value, undelivered_error
from vcluster.hangs.decision import Decision, decision_of
from vcluster.hangs.files import OnePath
from vcluster.hangs.matching import Matching, Place
from vcluster.hangs.mismatches import Mismatch, error_of, first_mismatch, place_of
from vcluster.hangs.records import Records
from vcluster.hangs.stragglers import Straggler, straggler_of
from vcluster.hangs.waits import Wait, behind_one_another, stuck_waits, waits_of

MOST_ROWS = 12
"""More rows of the table of ranks are only counted."""
FOUND_BY_RUNS = ("CollectiveMismatchError", "DeadlockError")
"""Errors that a rank raises because of what the others do."""


@dataclass(frozen=True)
class Explanation:
    """Why a job hangs.

    ``print`` it: the cause, what each rank is in and where, the decision behind it, how far each rank is.
    """

    kind: str
    """``deadlock``, ``mismatch``, ``failure``, ``undelivered``, ``under way``, ``unknown`` or ``nothing``."""
    cause: str
    """One sentence."""
    ranks: tuple[int, ...] = ()
    """The ranks that it is about: those that wait; of a mismatch, those that differ from the majority."""
    locations: tuple[str, ...] = ()
    """Their lines, as ``file:line``, in the order of the ranks."""
    details: str = ""
    """Lines below the cause, one for each thing that ranks are in."""
    decision: Decision | None = None
    group: int = -1
    """The number of the group that it is about, in ``records``; -1 if it is about none."""
    table: tuple[str, ...] = ()
    """How far the ranks of the group are."""
    straggler: Straggler | None = None
    records: Records = field(default_factory=Records, repr=False)

    def __str__(self) -> str:
        parts = [self.cause, self.details, str(self.decision or ""), "\n".join(self.table)]
        if self.records.missing:
            parts.append(f"no dump of {ranks_in_words(self.records.missing)} is among these")
        parts.append(str(self.straggler or ""))
        return "\n".join(filter(None, parts))

    def html(self, path: str | PathLike[str]) -> None:
        """Write a page with a lane for each rank, which has its last 50 calls.  ``OSError`` if it cannot be written."""
        from vcluster.hangs.page import write

        write(self, path)


def explain(paths: OnePath | Iterable[OnePath]) -> Explanation:
    """Why a job hangs, from the flight-recorder dumps of its ranks.

    ``paths``: files, one a rank, or folders of such files; or the file that ``error.trace.save`` has written.  They are
    JSON; a pickle is refused, with the lines that turn it into JSON.  One file at a time is in memory, and of each
    call about 100 bytes are kept.

    `DumpError` for what is no dump, ``OSError`` for what cannot be read.  What the dumps do not tell is said to be so.
    """
    return explanation_of(Records.read(paths))


def explanation_of(records: Records) -> Explanation:
    """Why a job hangs, from its records."""
    matching = Matching(records)
    for find in (_failure, _mismatch, _stuck, _absent, _completed_mismatch, _under_way, _unseen):
        if (found := find(matching)) is not None:
            return found
    return Explanation(
        "nothing", "no call was open when the dumps were written: nothing hangs in them", records=records
    )


def _failure(matching: Matching) -> Explanation | None:
    """A rank of this project's own run has raised."""
    ranks = matching.records.ranks
    raised = {
        rank: each
        for rank, each in ranks.items()
        if each.outcome == "raised" and each.raised.rpartition(".")[2] not in FOUND_BY_RUNS
    }
    if not raised:
        return None
    kinds = {record.raised for record in raised.values()}
    who = [*raised] if len(kinds) == 1 else [min(raised)]
    cause = f"{ranks_in_words(who)} raised {raised[who[0]].raised}"
    return Explanation("failure", cause, tuple(raised), details="", records=matching.records)


def _mismatch(matching: Matching) -> Explanation | None:
    different = first_mismatch(matching, is_open=True)
    return None if different is None else _differing(matching, different)


def _completed_mismatch(matching: Matching) -> Explanation | None:
    """A call in which members differed, and which all of them completed: what explains a hang if nobody is missing."""
    different = first_mismatch(matching, is_open=False)
    return None if different is None else _differing(matching, different)


def _differing(matching: Matching, different: Mismatch) -> Explanation:
    text, error = error_of(matching, different)
    cause, _, details = text.partition("\n")
    place = place_of(matching, different)
    decision = decision_of(matching, place, matching.records.members(different.group))
    return _with_table(
        matching,
        different.group,
        Explanation(
            "mismatch", cause, error.ranks, error.locations, details, decision, records=matching.records
        ),
    )


def _stuck(matching: Matching) -> Explanation | None:
    waits = waits_of(matching)
    stuck = stuck_waits(matching, waits)
    if not stuck and any(wait.unknown for found in waits.values() for wait in found):
        return None
    return _deadlock(matching, stuck or behind_one_another(matching, waits))


def _deadlock(matching: Matching, waits: dict[int, Wait]) -> Explanation | None:
    if not waits:
        return None
    records = matching.records
    stuck = [_described(matching, wait) for wait in waits.values()]
    finished = [
        rank for rank in records.ranks if rank not in waits and records.ranks[rank].outcome != "stopped"
    ]
    lost = [each for each in stuck if not {*records.missing}.isdisjoint(each.waits_for)]
    stacks = {rank: records.site(rank, wait.place.at).callers for rank, wait in waits.items()}
    absent = "returned without" if records.is_own else "did not come to"
    text = describe(stuck, finished, stacks, absent=absent)
    remarks = of_other_tags(stuck, _not_received(matching)) if records.is_own else []
    cause, _, details = "\n".join([text, *(f"  {remark}" for remark in remarks)]).partition("\n")
    if lost and "; " not in cause:
        cause = (
            f"{ranks_in_words([rank for rank in lost[0].waits_for if rank in records.missing])} left no dump, and rank "
            f"{lost[0].rank} waits for it in {lost[0].text}: it has died, or its dump is not among these"
        )
    idle = {*finished, *records.missing}
    told = next(
        (wait for wait in waits.values() if not idle.isdisjoint(wait.missing)), next(iter(waits.values()))
    )
    group = int(records.ranks[told.place.rank].group[told.place.at])
    ranks = records.members(group)
    if records.ranks[told.place.rank].is_message[told.place.at]:
        ranks = (told.place.rank, *told.missing)
    explanation = Explanation(
        "deadlock",
        cause,
        tuple(waits),
        tuple(each.location for each in stuck),
        details,
        decision_of(matching, told.place, ranks),
        records=records,
    )
    return _with_table(matching, group, explanation)


def _described(matching: Matching, wait: Wait) -> Stuck:
    """A wait as the errors of runs describe it."""
    records, (rank, at) = matching.records, wait.place
    record = records.ranks[rank]
    form = records.form(rank, at)
    lane: tuple[object, ...] = ("group", int(record.group[at]))
    if form.is_message:
        lane = (form.name, wait.missing[0], int(record.tag[at]))
    return Stuck(
        rank,
        records.text_with_group(rank, at),
        records.site(rank, at).location or "an unknown line",
        lane,
        wait.missing,
    )


def _absent(matching: Matching) -> Explanation | None:
    """What cannot be told: whether ranks have made a call that others wait in."""
    for found in waits_of(matching).values():
        for wait in found:
            if wait.unknown:
                text = matching.records.text(*wait.place)
                cause = (
                    f"why rank {wait.place.rank} waits in {text} cannot be told, because the ring buffer of "
                    f"{ranks_in_words(wait.unknown)} was too short: it holds no call of that group"
                )
                site = matching.records.site(*wait.place).location
                return Explanation("unknown", cause, (wait.place.rank,), (site,), records=matching.records)
    return None


def _under_way(matching: Matching) -> Explanation | None:
    """Every member has called, and nobody has ended; or a run of this project has ended with messages left."""
    records = matching.records
    if records.is_own and all(record.outcome == "returned" for record in records.ranks.values()):
        return _undelivered(matching)
    waits = {}
    for rank, found in waits_of(matching).items():
        if not any(wait.missing or wait.unknown for wait in found):
            waits[rank] = found
    if not waits:
        return None
    first = next(iter(waits.values()))[0]
    record = records.ranks[first.place.rank]
    text = records.text(*first.place)
    inside = {rank: str(records.site(*found[0].place)) for rank, found in waits.items()}
    lines = [f"  {ranks_in_words(ranks)} in it{site}" for site, ranks in keys_by_value(inside).items()]
    cause = (
        f"no call is missing: all that {text} needs have called it, and it has not ended. It is still under way, or a "
        f"link or a device has failed"
    )
    group = int(record.group[first.place.at])
    if not records.groups[group].ranks:
        cause += "; or a rank is missing that left no dump, as these do not say which ranks there are"
    explanation = Explanation(
        "under way",
        cause,
        tuple(waits),
        tuple(records.site(*found[0].place).location for found in waits.values()),
        "\n".join(lines),
        records=records,
    )
    return _with_table(matching, group, explanation)


def _unseen(matching: Matching) -> Explanation | None:
    """What cannot be told without the dumps that are not there."""
    records = matching.records
    if not records.missing:
        return None
    who = ranks_in_words(records.missing)
    odd = tuple(rank for rank, record in records.ranks.items() if record.outcome == "raised")
    if odd:
        cause = (
            f"{ranks_in_words(odd)} found that the members of a group differ; in what cannot be told, because {who} "
            f"left no dump"
        )
    else:
        cause = (
            f"nothing hangs in these dumps, and what {who} did cannot be told, because there is no dump of it"
        )
    return Explanation("unknown", cause, odd, records=records)


def _undelivered(matching: Matching) -> Explanation | None:
    """Messages that nobody received, of a run that has ended."""
    messages = _not_received(matching)
    if not messages:
        return None
    error = undelivered_error(messages)
    return Explanation("undelivered", str(error), error.ranks, error.locations, records=matching.records)


def _not_received(matching: Matching) -> list[Undelivered]:
    """The messages that were sent and not received, by channel and tag."""
    records = matching.records
    left: dict[tuple[int, ...], list[Place]] = {}
    for rank, record in records.ranks.items():
        for at in record.is_message.nonzero()[0].tolist():
            place = Place(rank, at)
            if records.form(rank, at).name != "send" or matching.channel(place).target not in records.ranks:
                continue
            if not matching.is_matched(place):
                left.setdefault(tuple(matching.channel(place)), []).append(place)
    return [
        Undelivered(source, target, tag, len(places), records.site(*places[0]).location)
        for (source, target, _, tag), places in left.items()
    ]


def _with_table(matching: Matching, group: int, explanation: Explanation) -> Explanation:
    """An explanation with how far the ranks of its group are."""
    return replace(
        explanation, group=group, table=_table(matching, group), straggler=straggler_of(matching, group)
    )


def _table(matching: Matching, group: int) -> tuple[str, ...]:
    records = matching.records
    rows: dict[int, str] = {}
    lasts: dict[int, int] = {}
    for rank in records.members(group):
        if rank in records.ranks:
            numbers, _ = matching.collectives(rank, group)
            lasts[rank] = int(numbers[-1]) if len(numbers) else records.ranks[rank].enqueued.get(group, -1)
    most = max(lasts.values(), default=-1)
    for rank, last in sorted(lasts.items(), key=lambda item: (item[1], item[0])):
        behind = f", {most - last} behind" if 0 <= last < most else ""
        rows[rank] = (
            f"{f'at its collective number {last}' if last >= 0 else 'at none of its collectives'}{behind}"
        )
    if not rows or most < 0:
        return ()
    folded = [f"  {ranks_in_words(sorted(ranks))} {text}" for text, ranks in keys_by_value(rows).items()]
    more = [f"  {len(folded) - MOST_ROWS} more"] * (len(folded) > MOST_ROWS)
    return (f"how far the ranks of group {records.groups[group]} are:", *folded[:MOST_ROWS], *more)
