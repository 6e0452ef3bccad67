"""`with_layers`: the events of a program with many equal layers, from those of two programs with few.

Of two programs that differ by one layer, the events of the larger one are those of the smaller one with some runs of
events more: one for each part of the program that goes through the layers.  Where such a run follows an equal one, the
program does the same for each further layer, and it is repeated.  Memory that is freed for all layers at once grows by
as many bytes with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.simulation.device_events import CollectiveRow, DeviceEvents, EventRow
from parallelism.simulation.event_classes import Ints


class UnequalLayers(ValueError):
    """The events of more layers do not follow from those of few."""


class _Event(NamedTuple):
    """An event without the numbers that depend on the events before it."""

    row: EventRow
    later: int
    """Of a wait: how many asynchronous operations started since the one that it waits for, itself included; else 0."""
    collective: tuple[Any, Any] | None
    """Its axes and its call."""


class _Copied(NamedTuple):
    """Events of the smaller program that the larger one has, too."""

    start: int
    end: int


class _Grows(NamedTuple):
    """A change of memory that the layers have in common."""

    at: int
    more: float
    """The bytes of a layer."""


class _Added(NamedTuple):
    """Events that the larger program has besides, for the layer that it has more."""

    start: int
    end: int


_Part = _Copied | _Grows | _Added


def with_layers(few: DeviceEvents, more: DeviceEvents, layers: int) -> DeviceEvents:
    """The events of a program with so many ``layers`` more than that of ``few``; that of ``more`` has one more.

    There are neither messages nor pieces among them.  `UnequalLayers` where these events do not follow.
    """
    smaller, larger = list(_events(few)), list(_events(more))
    parts = _Alignment(smaller, larger).parts()
    sources, places, grown = [*smaller, *larger], list[Ints](), dict[int, float]()
    total = 0
    for part in parts:
        if isinstance(part, _Added):
            own = np.tile(np.arange(part.start, part.end) + len(smaller), layers)
        elif isinstance(part, _Grows):
            own = np.array([part.at])
            grown[total] = sources[part.at].row.nbytes + layers * part.more
        else:
            own = np.arange(part.start, part.end)
        places.append(own)
        total += len(own)
    return _numbered(sources, np.concatenate(places) if places else np.zeros(0, np.int64), grown)


def _events(events: DeviceEvents) -> Iterator[_Event]:
    """The events, each without the numbers that depend on those before it."""
    if events.pieces or events.along or events.bulk is not None:
        raise UnequalLayers("messages and pieces are not repeated")
    collectives = {each.event: (each.axes, each.call) for each in events.collectives}
    started: dict[int, int] = {}
    for place, row in enumerate(events.rows):
        later = 0
        if row.work is not None:
            if row.kind != "wait":
                started[row.work] = len(started)
            elif row.work not in started:
                raise UnequalLayers(f"a {row.name} is waited for that did not start here")
            else:
                later = len(started) - started[row.work]
            row = row._replace(work=0)
        collective = collectives.get(place)
        yield _Event(row if collective is None else row._replace(sequence=0), later, collective)


def _numbered(sources: Sequence[_Event], places: Ints, grown: dict[int, float]) -> DeviceEvents:
    """The events at these places of the ``sources``, with numbers; ``grown`` has other bytes of some of them."""
    rows = [sources[place].row for place in places.tolist()]
    for at, nbytes in grown.items():
        rows[at] = rows[at]._replace(nbytes=nbytes)
    result, started = DeviceEvents(rows), 0
    has_number = np.array(
        [each.collective is not None or each.row.work is not None for each in sources], bool
    )
    for at in np.flatnonzero(has_number[places]).tolist():
        row, later, collective = sources[places[at]]
        work = None
        if row.work is not None:
            started += not later
            work = started if not later else started + 1 - later
        if collective is not None:
            axes, call = collective
            number = result.counts[axes]
            result.counts[axes] = number + 1
            result.collectives.append(CollectiveRow(at, axes, number, call))
            row = row._replace(sequence=number)
        rows[at] = row._replace(work=work)
    result.works = started
    return result


class _Alignment:
    """What the larger one of two programs has besides the events of the smaller one."""

    def __init__(self, smaller: Sequence[_Event], larger: Sequence[_Event]) -> None:
        numbers: dict[Any, int] = {}
        self.rows = [each.row for each in smaller], [each.row for each in larger]
        self.exact = [_numbers_of(map(_exact, each), numbers) for each in (smaller, larger)]
        """Equal numbers of equal events."""
        self.loose = [_numbers_of(map(_loose, each), numbers) for each in (smaller, larger)]
        """The same where changes of memory are equal that differ in bytes alone."""

    def parts(self) -> Iterator[_Part]:
        """The events of the smaller program in order, and between them what the larger one has besides."""
        smaller, larger = self.exact
        here = there = 0
        while here < len(smaller) or there < len(larger):
            same = _same(smaller[here:], larger[there:])
            if same:
                yield _Copied(here, here + same)
                here, there = here + same, there + same
                continue
            added = self._added(here, there)
            if not added:
                own, other = self.rows
                yield _Grows(here, other[there].nbytes - own[here].nbytes)
                here, there = here + 1, there + 1
                continue
            if not self._repeats(there, there + added):
                raise UnequalLayers("what a layer adds does not follow an equal layer")
            yield _Added(there, there + added)
            there += added

    def _added(self, here: int, there: int) -> int:
        """The number of events that the larger program has besides at this place, behind which most follows that is equal; 0
        if only bytes of memory differ."""
        smaller, larger = self.exact
        best: tuple[bool, int] = False, 0
        found = None
        for added in self._candidates(here, there):
            start = here + 1 if added == 0 else here
            same = _same(smaller[start:], larger[there + added + start - here :])
            at_end = start + same == len(smaller) and there + added + start - here + same == len(larger)
            if (at_end, same + start - here) > best or (at_end and found is None):
                best, found = (at_end, same + start - here), added
        if found is None:
            raise UnequalLayers("the events of the smaller program are not among those of the larger one")
        return found

    def _candidates(self, here: int, there: int) -> list[int]:
        """The numbers of events that the larger program may have besides at this place."""
        smaller, larger = self.loose
        most = len(larger) - there
        if here == len(smaller):
            return [most]
        return np.flatnonzero(larger[there:] == smaller[here]).tolist()

    def _repeats(self, start: int, end: int) -> bool:
        """Whether what the larger program has besides is beside an equal run of events."""
        _, larger = self.exact
        own, length = larger[start:end], end - start
        before, behind = larger[max(0, start - length) : start], larger[end : end + length]
        return np.array_equal(own, before) or np.array_equal(own, behind)


def _numbers_of(events: Iterator[Any], numbers: dict[Any, int]) -> Ints:
    return np.array([numbers.setdefault(each, len(numbers)) for each in events], np.int64)


def _exact(event: _Event) -> Any:
    return event


def _loose(event: _Event) -> Any:
    row = event.row
    return (row._replace(nbytes=0.0), "of any bytes") if row.kind == "memory" else event


def _same(first: Ints, second: Ints) -> int:
    """How many events are equal from the beginning on."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(np.argmax(different)) if different.any() else length
