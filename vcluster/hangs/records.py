"""What all ranks recorded, as columns: two million calls in a few hundred megabytes.

Each different call, place and group is kept once, and an array has its number for every entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from parallelism.arrays import Bools, Ints
from parallelism.operation import ranks_in_words
from vcluster.hangs.calls import CallForm, Site
from vcluster.hangs.files import DumpError, FileDump, FileEntry, OnePath, dumps_in

UNKNOWN_TIME = int(np.iinfo(np.int64).min)

_RANKS = re.compile(r"\[?\s*(\d{1,9}(\s*,\s*\d{1,9})*)?\s*\]?")


class Group(NamedTuple):
    """A group of ranks, as it is the same on each of them."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Global ranks in group order; empty if the dumps do not say."""

    def __str__(self) -> str:
        return self.name if self.description in ("", "undefined") else self.description


@dataclass(frozen=True, eq=False)
class RankRecord:
    """The calls of one rank, oldest first; each array has an element for a call."""

    rank: int
    file: str
    outcome: str
    raised: str
    is_cut: bool
    """Whether its ring buffer has lost the first calls."""
    group: Ints
    """Number of the group, in `Records.groups`."""
    call: Ints
    site: Ints
    sequence: Ints
    """Of a collective: its number in the group; of a message -1, and of all that are coalesced the same."""
    tag: Ints
    is_open: Bools
    """Whether it was not complete."""
    is_waited: Bools
    is_message: Bools
    created: Ints
    """In nanoseconds of the rank's own clock; `UNKNOWN_TIME` if not known."""
    started: Ints
    """When it was found to have started."""
    completed: Ints
    """When it was found to have completed."""
    enqueued: dict[int, int] = field(default_factory=dict)
    """By number of the group: the last collective that was enqueued, as far as the dump says."""

    def __len__(self) -> int:
        return len(self.call)


@dataclass(eq=False)
class Records:
    """All dumps of a job."""

    ranks: dict[int, RankRecord] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    calls: list[CallForm] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    @classmethod
    def read(cls, paths: OnePath | Iterable[OnePath]) -> Records:
        """The dumps in files and folders.  `DumpError` for what is none, ``OSError`` for what cannot be read."""
        reader = _Reader()
        for file, rank, dump in dumps_in(paths):
            reader.add(file, rank, dump)
        return reader.records()

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """The ranks that belong to a group and have left no dump.

        The dumps may not say which ranks the group of all ranks has.  Then every rank below the highest one that left a
        dump belongs to it.
        """
        named = {rank for group in self.groups for rank in group.ranks}
        if any(group.description == "default_pg" and not group.ranks for group in self.groups):
            named.update(range(max(self.ranks)))
        return tuple(sorted(named - self.ranks.keys()))

    @cached_property
    def is_own(self) -> bool:
        """Whether these are dumps of a run of this project, which say how each rank ended."""
        return all(record.outcome for record in self.ranks.values())

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group: as the dumps say, or else those that have called something in it."""
        if self.groups[group].ranks:
            return self.groups[group].ranks
        return self._callers[group]

    def peer(self, rank: int, group: int, place: int) -> int:
        """The rank at a place in a group; -1 if the dumps do not say."""
        ranks = self.members(group)
        return ranks[place] if place < len(ranks) else -1

    def form(self, rank: int, at: int) -> CallForm:
        """A call without its place."""
        return self.calls[int(self.ranks[rank].call[at])]

    def text(self, rank: int, at: int) -> str:
        """A call as errors show it."""
        record = self.ranks[rank]
        form = self.form(rank, at)
        if not form.is_message:
            return form.text
        return form.text.replace("{peer}", str(self.peer(rank, int(record.group[at]), form.peer)))

    def text_with_group(self, rank: int, at: int) -> str:
        """A call as errors show it, with its group if that is not of all ranks."""
        text = self.text(rank, at)
        members = self.members(int(self.ranks[rank].group[at]))
        if self.is_own or self.form(rank, at).is_message or len(members) >= len(self.ranks):
            return text
        return f"{text} of {ranks_in_words(sorted(members))}"

    def site(self, rank: int, at: int) -> Site:
        """Where a call was made."""
        return self.sites[int(self.ranks[rank].site[at])]

    @cached_property
    def _callers(self) -> dict[int, tuple[int, ...]]:
        """By number of a group: the ranks that have called something in it; of PyTorch's first group all ranks."""
        found: dict[int, list[int]] = {}
        for rank, record in self.ranks.items():
            for group in np.unique(record.group).tolist():
                found.setdefault(group, []).append(rank)
        for number, group in enumerate(self.groups):
            if group.description == "default_pg":
                found[number] = sorted({*self.ranks, *self.missing})
        return {number: tuple(found.get(number, ())) for number in range(len(self.groups))}


class _Reader:
    """Puts dumps into columns, one after the other."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankRecord] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._descriptions: list[str] = []
        self._calls: dict[tuple[str, bytes, bytes, str, int], int] = {}
        self._forms: list[CallForm] = []
        self._sites: dict[bytes, int] = {}
        self._places: list[Site] = []

    def records(self) -> Records:
        """What was read. The calls of a group whose ranks one dump does not say are those of the one that another says."""
        with_ranks = {name: number for (name, ranks), number in self._groups.items() if ranks}
        now = np.arange(len(self._groups))
        for (name, ranks), number in self._groups.items():
            if not ranks:
                now[number] = with_ranks.get(name, number)
        if not np.array_equal(now, np.arange(len(now))):
            self._ranks = {rank: _regrouped(record, now) for rank, record in self._ranks.items()}
        groups = [
            Group(name, description, ranks)
            for (name, ranks), description in zip(self._groups, self._descriptions, strict=True)
        ]
        return Records(dict(sorted(self._ranks.items())), groups, self._forms, self._places)

    def add(self, file: str, rank: int, dump: FileDump) -> None:
        entries = sorted(dump.entries or (), key=lambda entry: entry.record_id)
        try:
            calls = [self._call(entry) for entry in entries]
            sites = [self._site(entry.frames) for entry in entries]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DumpError(f"{file} is no flight-recorder dump as JSON: {error}") from None
        groups = self._groups_of(file, dump, entries)
        pairs = zip(entries, calls, strict=True)
        is_message = [entry.is_p2p or self._forms[call].is_message for entry, call in pairs]
        numbers = _sequence(file, entries, is_message)
        self._ranks[rank] = RankRecord(
            rank,
            file,
            dump.outcome,
            dump.raised,
            bool(entries) and entries[0].record_id > 0,
            group=np.array(groups, np.int64),
            call=np.array(calls, np.int64),
            site=np.array(sites, np.int64),
            sequence=np.array(numbers, np.int64),
            tag=np.array([entry.tag for entry in entries], np.int64),
            is_open=_open(entries, calls, self._forms),
            is_waited=np.array([entry.waited for entry in entries], bool),
            is_message=np.array(is_message, bool),
            created=_times([entry.time_created_ns for entry in entries]),
            started=_times([entry.time_discovered_started_ns for entry in entries]),
            completed=_times([entry.time_discovered_completed_ns for entry in entries]),
            enqueued=self._enqueued(dump, entries, groups),
        )

    def _call(self, entry: FileEntry) -> int:
        key = entry.profiling_name, bytes(entry.input_sizes), bytes(entry.input_dtypes), entry.call, entry.tag
        number = self._calls.get(key)
        if number is None:
            self._forms.append(CallForm.of(*key))
            number = self._calls[key] = len(self._calls)
        return number

    def _site(self, frames: msgspec.Raw) -> int:
        key = bytes(frames)
        number = self._sites.get(key)
        if number is None:
            self._places.append(Site.of(key))
            number = self._sites[key] = len(self._sites)
        return number

    def _groups_of(self, file: str, dump: FileDump, entries: list[FileEntry]) -> list[int]:
        """The number of the group of each entry."""
        known: dict[tuple[int, tuple[str, str] | None], int] = {}
        numbers = []
        for entry in entries:
            key = entry.pg_id, entry.process_group
            if key not in known:
                known[key] = self._number(_group(file, dump, entry))
            numbers.append(known[key])
        for config in dump.pg_config.values():
            if ranks := _ranks(file, config.ranks):
                self._number(Group(config.name, config.desc, ranks))
        return numbers

    def _number(self, group: Group) -> int:
        key = group.name, group.ranks
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            self._descriptions.append(group.description)
        return self._groups[key]

    def _enqueued(self, dump: FileDump, entries: list[FileEntry], groups: list[int]) -> dict[int, int]:
        numbers = {}
        for entry, group in zip(entries, groups, strict=True):
            status = dump.pg_status.get(str(entry.pg_id))
            if status is not None and group not in numbers:
                numbers[group] = status.last_enqueued_collective
        return numbers


def _sequence(file: str, entries: list[FileEntry], is_message: list[bool]) -> list[int]:
    """The number of each collective in its group, and -1 of a message."""
    numbers = []
    for entry, message in zip(entries, is_message, strict=True):
        if not message and entry.collective_seq_id is None:
            raise DumpError(
                f"{file}: the collective {entry.profiling_name[:60]!r} with record_id {entry.record_id} has no "
                f"collective_seq_id, the number in its group by which calls are matched; PyTorch writes it since 2.4"
            )
        numbers.append(-1 if message else entry.collective_seq_id or 0)
    return numbers


def _regrouped(record: RankRecord, now: Ints) -> RankRecord:
    enqueued = {int(now[number]): count for number, count in record.enqueued.items()}
    return replace(record, group=now[record.group], enqueued=enqueued)


def _open(entries: list[FileEntry], calls: list[int], forms: list[CallForm]) -> Bools:
    """Which calls had not completed.  Those of a coalesced call stay as they were enqueued, and end with it."""
    is_open = np.array([entry.state != "completed" and not entry.retired for entry in entries], bool)
    last_place: dict[tuple[int, bool, int | None], int] = {}
    for at in reversed(range(len(entries))):
        entry = entries[at]
        key = entry.pg_id, entry.is_p2p, entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
        if forms[calls[at]].name == "coalesced":
            last_place[key] = at
        elif is_open[at] and key in last_place:
            is_open[at] = is_open[last_place[key]]
    return is_open


def _group(file: str, dump: FileDump, entry: FileEntry) -> Group:
    """The group of an entry, with its ranks if the dump says them."""
    name, description = entry.process_group or (str(entry.pg_id), "")
    config = dump.pg_config.get(str(entry.pg_id))
    if config is None or (entry.process_group is not None and config.name != name):
        config = next((each for each in dump.pg_config.values() if each.name == name), None)
    if config is None:
        return Group(name, description, ())
    return Group(name, description or config.desc, _ranks(file, config.ranks))


def _ranks(file: str, ranks: str | list[int]) -> tuple[int, ...]:
    found = tuple(ranks) if isinstance(ranks, list) else _ranks_in(ranks)
    if found is None or len(set(found)) < len(found):
        raise DumpError(
            f'{file}: the ranks of a group are a list as "[0, 1, 2]", each once, got {str(ranks)[:60]}'
        )
    return found


@lru_cache(maxsize=1024)
def _ranks_in(text: str) -> tuple[int, ...] | None:
    if _RANKS.fullmatch(text) is None:
        return None
    return tuple(map(int, re.findall(r"\d+", text)))


def _times(values: list[int | None]) -> Ints:
    return np.array([UNKNOWN_TIME if value is None else value for value in values], np.int64)
