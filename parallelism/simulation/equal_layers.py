"""`with_layers`: the events of a program with many equal layers, from those of two programs with few.

Of two programs that differ by one layer, the events of the larger one are those of the smaller one with some runs of
events more: one for each part of the program that goes through the layers.  Where such a run follows an equal one, the
program does the same for each further layer, and it is repeated.  Memory that is freed for all layers at once grows by
as many bytes with each.  What a wait is for is said by its number among all that start under its name, which grows by
as much with each layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.collectives import MemberCall
from parallelism.simulation.device_events import CollectiveRow, DeviceEvents, EventRow, PeerRow

MARK = EventRow("mark", "")
"""Begins a part of the events."""
_NO_WAIT = -1


class UnequalLayers(ValueError):
    """The events of more layers do not follow from those of few."""


class _Event(NamedTuple):
    """An event without the numbers that depend on the events before it, and, of a wait, without what it waits for."""

    row: EventRow
    collective: tuple[Any, Any] | None
    """Its axes and its call."""
    along: tuple[str, int] | None
    """Of a message: the axis and the position of its peer."""


class _Copied(NamedTuple):
    """Events of the smaller program that the larger one has, too."""

    start: int
    end: int
    there: int
    """Where they begin in the larger program."""


class _Grows(NamedTuple):
    """A change of memory, or a call, that the layers have in common."""

    at: int
    there: int
    """Its place among the events of the larger program."""


class _Added(NamedTuple):
    """Events that the larger program has besides, for the layer that it has more."""

    start: int
    end: int
    beside: int
    """Where an equal run of events begins, just before or just behind."""


_Part = _Copied | _Grows | _Added


MayGrow = Callable[[Any, MemberCall, MemberCall], bool]
"""Whether the layers may have a call over these axes in common: that of few layers, and that of all."""


def with_layers(
    few: DeviceEvents, more: DeviceEvents, layers: int, may_grow: MayGrow = lambda axes, few, all: False
) -> DeviceEvents:
    """The events of a program with so many ``layers`` more than that of ``few``; that of ``more`` has one more.

    The smaller one has a layer between the first and the last, since these may do something else.  There are no pieces among
    them, and no many events as columns.  `UnequalLayers` where these events do not follow.
    """
    smaller, larger = _Program(few), _Program(more)
    alignment = _Alignment(smaller.events, larger.events)
    with suppress(UnequalLayers):
        return _with_layers(smaller, larger, layers, may_grow, alignment, earliest=True)
    return _with_layers(smaller, larger, layers, may_grow, alignment, earliest=False)


def _with_layers(
    smaller: _Program,
    larger: _Program,
    layers: int,
    may_grow: MayGrow,
    alignment: _Alignment,
    *,
    earliest: bool,
) -> DeviceEvents:
    """`with_layers`, where what a layer has besides begins at the ``earliest`` place that it may have, or the last."""
    parts, alike = [*alignment.parts(earliest=earliest)], np.concatenate(alignment.loose).tolist()
    further = _Further(smaller, larger, layers, parts)
    sources = [*smaller.events, *larger.events]
    places, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in parts:
        if isinstance(part, _Added):
            places.append(np.tile(np.arange(part.start, part.end) + len(smaller.events), layers))
            targets.append(further.targets_of_added(part))
        elif isinstance(part, _Grows):
            places.append(np.array([len(sources)]))
            sources.append(_grown(smaller.events[part.at], larger.events[part.there], layers, may_grow))
            alike.append(alike[part.at])
            targets.append(further.targets(part.at, part.there, 1))
        else:
            places.append(np.arange(part.start, part.end))
            targets.append(further.targets(part.start, part.there, part.end - part.start))
    awaited = [
        None if place < 0 else of[place]
        for program, of in zip((smaller, larger), alignment.loose, strict=True)
        for place in program.awaited
    ]
    return _numbered(
        _Sources(sources, alike, awaited), np.concatenate(places), np.concatenate(targets).tolist()
    )


class _Sources(NamedTuple):
    """The different events of a program."""

    events: Sequence[_Event]
    alike: Sequence[int]
    """Equal numbers of those that are alike."""
    awaited: Sequence[int | None]
    """Of a wait, the number of what it is for."""


class _Program:
    """The events of a program, and what its waits are for."""

    def __init__(self, events: DeviceEvents) -> None:
        self.events = list(_events(events))
        started: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.targets, self.awaited = (np.full(len(self.events), _NO_WAIT) for _ in range(2))
        """Of each wait, the number of what it is for among all that start under its name; and its place."""
        for place, row in enumerate(events.rows):
            if row.work is None:
                continue
            of_name = started[row.name]
            if row.kind != "wait":
                of_name[row.work] = len(of_name), place
            elif row.work in of_name:
                self.targets[place], self.awaited[place] = of_name[row.work]
            else:
                raise UnequalLayers(f"a wait for {row.name} is for what did not start here")


class _Further:
    """What the waits of a program with further layers are for.

    The number of what a wait is for grows by as much with each layer that the program has more, and from one layer of a
    run to the next.
    """

    def __init__(self, smaller: _Program, larger: _Program, layers: int, parts: Sequence[_Part]) -> None:
        self.few, self.more, self.layers = smaller.targets, larger.targets, layers
        self.place_in_few = np.full(len(self.more), -1)
        """By event of the larger program, its place in the smaller one; -1 for what it has besides."""
        for part in parts:
            if isinstance(part, _Copied):
                own = np.arange(part.start, part.end)
                self.place_in_few[part.there : part.there + len(own)] = own
            elif isinstance(part, _Grows):
                self.place_in_few[part.there] = part.at

    def targets(self, here: int, there: int, count: int) -> Ints:
        """Those of so many events that both programs have."""
        few, more = self.few[here : here + count], self.more[there : there + count]
        found: Ints = few + self.layers * (more - few)
        return found

    def targets_of_added(self, part: _Added) -> Ints:
        """Those of the events that each layer has besides."""
        length, is_behind = part.end - part.start, part.beside > part.start
        own, beside = (self.more[start : start + length] for start in (part.start, part.beside))
        distance = np.arange(self.layers)[:, None]
        distance = self.layers - distance if is_behind else 1 + distance
        places = self.place_in_few[part.beside : part.beside + length]
        if (places[own != _NO_WAIT] < 0).any():
            raise UnequalLayers("what a layer waits for does not follow from an equal layer")
        few = np.where(own == _NO_WAIT, _NO_WAIT, self.few[places])
        found = few + (own - beside) * distance + (beside - few) * self.layers
        return np.ravel(found)


def _grown(few: _Event, more: _Event, layers: int, may_grow: MayGrow) -> _Event:
    """An event of all layers, from those of few."""
    if few.collective is None or more.collective is None:
        nbytes = few.row.nbytes + layers * (more.row.nbytes - few.row.nbytes)
        return few._replace(row=few.row._replace(nbytes=nbytes))
    axes, before = few.collective
    size = before.shape[0] + layers * (more.collective[1].shape[0] - before.shape[0])
    call = replace(before, shape=(size,))
    if not may_grow(axes, before, call):
        raise UnequalLayers(f"a {call.kind} of all layers would be several")
    return few._replace(collective=(axes, call))


def _events(events: DeviceEvents) -> Iterator[_Event]:
    """The events, each without the numbers that depend on those before it."""
    if events.pieces or events.bulk is not None:
        raise UnequalLayers("pieces are not repeated")
    collectives = {each.event: (each.axes, each.call) for each in events.collectives}
    along = {each.event: each[1:] for each in events.along}
    for place, row in enumerate(events.rows):
        if row.work is not None:
            row = row._replace(work=0)
        if row.sequence is not None:
            row = row._replace(sequence=0)
        yield _Event(row, collectives.get(place), along.get(place))


def _numbered(sources: _Sources, places: Ints, targets: Sequence[int]) -> DeviceEvents:
    """The events at these places of the ``sources``, with numbers; the waits are for what the ``targets`` say."""
    events = sources.events
    rows = [events[place].row for place in places.tolist()]
    result = DeviceEvents(rows)
    under_way: dict[str, list[tuple[int, int] | None]] = defaultdict(list)
    """By name, what has started, with the number of those alike; None of what was waited for."""
    has_number = np.array([_has_number(each.row) for each in events], bool)
    for at in np.flatnonzero(has_number[places]).tolist() if len(events) else ():
        source = int(places[at])
        row, collective, along = events[source]
        work = None
        if row.kind == "wait":
            work = _taken(row.name, under_way[row.name], targets[at], sources.awaited[source])
        elif row.work is not None:
            result.works += 1
            work = result.works
            under_way[row.name].append((work, sources.alike[source]))
        if row.sequence is not None:
            key: Any = (
                (row.kind, along and along[0], row.peer, row.tag) if collective is None else collective[0]
            )
            row = row._replace(sequence=result.counts[key])
            result.counts[key] += 1
        if collective is not None:
            axes, call = collective
            result.collectives.append(CollectiveRow(at, axes, row.sequence or 0, call))
        if along is not None:
            result.along.append(PeerRow(at, *along))
        rows[at] = row._replace(work=work)
    return result


def _taken(name: str, under_way: list[tuple[int, int] | None], target: int, alike: int | None) -> int:
    """The number of the operation that a wait is for: it is under way, and like that of few layers."""
    found = under_way[target] if 0 <= target < len(under_way) else None
    if found is None or found[1] != alike:
        raise UnequalLayers(f"with all layers a device waits for another {name} than with few layers")
    under_way[target] = None
    return found[0]


def _has_number(row: EventRow) -> bool:
    return row.sequence is not None or row.work is not None


class _Alignment:
    """What the larger one of two programs has besides the events of the smaller one."""

    def __init__(self, smaller: Sequence[_Event], larger: Sequence[_Event]) -> None:
        numbers: dict[Any, int] = {}
        self.exact = [_numbers_of(iter(each), numbers) for each in (smaller, larger)]
        """Equal numbers of equal events."""
        self.loose = [_numbers_of(map(_loose, each), numbers) for each in (smaller, larger)]
        """The same where changes of memory, and calls, are equal that differ in bytes alone."""

    def parts(self, *, earliest: bool) -> Iterator[_Part]:
        """The events of the smaller program in order, and between them what the larger one has besides."""
        smaller, larger = self.exact
        here = there = 0
        while here < len(smaller) or there < len(larger):
            same = _same(smaller[here:], larger[there:])
            added = self._added(here + same, there + same, same if earliest else 0)
            if added is not None:
                same -= added.back
            if same:
                yield _Copied(here, here + same, there)
                here, there = here + same, there + same
            if added is not None:
                yield _Added(there, there + added.length, there + added.to_beside)
                there += added.length
            elif here < len(smaller) and there < len(larger):
                yield _Grows(here, there)
                here, there = here + 1, there + 1

    def _added(self, here: int, there: int, before: int) -> _Run | None:
        """The events that the larger program has besides at this place, or up to ``before`` events earlier, which are beside
        an equal run, and behind which most follows that is equal; None if only bytes of memory differ."""
        smaller, larger = self.exact
        candidates, found = self._candidates(here, there), dict[tuple[bool, int], _Run]()
        for length in candidates:
            first = int(here < len(smaller))  # which may differ in bytes
            same = first + _same(smaller[here + first :], larger[there + length + first :])
            at_end = here + same == len(smaller) and there + length + same == len(larger)
            is_first_same = not first or smaller[here] == larger[there + length]
            run = self._beside(there, length, before) if length else _Run(0, 0, 0)
            if run is not None:
                found.setdefault((at_end, same - (not is_first_same)), run)
        if candidates and not found:
            raise UnequalLayers("what a layer adds does not follow an equal layer")
        if not candidates and here < len(smaller):
            raise UnequalLayers("the events of the smaller program are not among those of the larger one")
        best = found[max(found)] if found else _Run(0, 0, 0)
        return best if best.length else None

    def _candidates(self, here: int, there: int) -> list[int]:
        """The numbers of events that the larger program may have besides at this place."""
        smaller, larger = self.loose
        most = len(larger) - there
        if here == len(smaller):
            return [most] if most else []
        return np.flatnonzero(larger[there:] == smaller[here]).tolist()

    def _beside(self, there: int, length: int, before: int) -> _Run | None:
        """A run of so many events beside an equal one: that which begins there, or the earliest one that may take its
        place, since the events before it are those at its end."""
        larger, found = self.exact[1], None
        for back in range(1 + min(before, length)):
            start = there - back
            if back and larger[start] != larger[start + length]:
                break
            own = larger[start : start + length]
            for to_beside in (-length, length):
                if np.array_equal(
                    own, larger[max(0, start + to_beside) : max(0, start + to_beside + length)]
                ):
                    found = _Run(back, length, to_beside)
                    break
        return found


class _Run(NamedTuple):
    """A run of events that the larger program has besides."""

    back: int
    """So many events before the place that was asked for it begins."""
    length: int
    to_beside: int
    """From its begin to that of an equal run."""


def _numbers_of(events: Iterator[Any], numbers: dict[Any, int]) -> Ints:
    return np.array([numbers.setdefault(each, len(numbers)) for each in events], np.int64)


def _loose(event: _Event) -> Any:
    row = event.row
    if row.kind == "memory":
        return row._replace(nbytes=0.0), "of any bytes"
    if event.collective is not None and isinstance(event.collective[1], MemberCall):
        axes, call = event.collective
        if len(call.shape or ()) == 1 and not call.sizes:
            return row, axes, replace(call, shape=None), "of any bytes"
    return event


def _same(first: Ints, second: Ints) -> int:
    """How many events are equal from the beginning on."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(np.argmax(different)) if different.any() else length
