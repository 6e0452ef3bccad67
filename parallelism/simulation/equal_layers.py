"""`with_layers`: the events of a program with many equal layers, from those of two programs with few.

Of two programs that differ by one layer, the events of the larger one are those of the smaller one with some runs of
events more: one for each part of the program that goes through the layers.  Where such a run follows an equal one, the
program does the same for each further layer, and it is repeated.  Memory that is freed for all layers at once grows by
as many bytes with each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parallelism.collectives import MemberCall
from parallelism.simulation.device_events import CollectiveRow, DeviceEvents, EventRow, PeerRow
from parallelism.simulation.event_classes import Ints

MARK = EventRow("mark", "")
"""Begins a part of the events."""


class UnequalLayers(ValueError):
    """The events of more layers do not follow from those of few."""


class _Event(NamedTuple):
    """An event without the numbers that depend on the events before it."""

    row: EventRow
    waits: Any
    """Of a wait: for what, as `_UnderWay` says it."""
    collective: tuple[Any, Any] | None
    """Its axes and its call."""
    along: tuple[str, int] | None
    """Of a message: the axis and the position of its peer."""


class _Copied(NamedTuple):
    """Events of the smaller program that the larger one has, too."""

    start: int
    end: int


class _Grows(NamedTuple):
    """A change of memory, or a call, that the layers have in common."""

    at: int
    there: int
    """Its place among the events of the larger program."""


class _Added(NamedTuple):
    """Events that the larger program has besides, for the layer that it has more."""

    start: int
    end: int


_Part = _Copied | _Grows | _Added


MayGrow = Callable[[Any, MemberCall, MemberCall], bool]
"""Whether the layers may have a call over these axes in common: that of few layers, and that of all."""


def with_layers(
    few: DeviceEvents, more: DeviceEvents, layers: int, may_grow: MayGrow = lambda axes, few, all: False
) -> DeviceEvents:
    """The events of a program with so many ``layers`` more than that of ``few``; that of ``more`` has one more.

    There are no pieces among them, and no many events as columns.  `UnequalLayers` where these events do not follow.
    """
    for order in _ORDERS[:-1]:
        with suppress(UnequalLayers):
            return _with_layers(few, more, layers, may_grow, order)
    return _with_layers(few, more, layers, may_grow, _ORDERS[-1])


class _Order(NamedTuple):
    """The order in which a program waits for what is under way."""

    oldest: Collection[str]
    """The names of operations of which it waits for the oldest first; else for the newest."""
    in_steps: bool
    """Whether it goes through what a backward started in equal steps; else each backward started as much."""
    from_end: bool = False
    """Whether the steps begin at the last that the backward started."""


_SUMS = ("all_gather", "all_reduce", "reduce_scatter")
_ORDERS = tuple(
    _Order(oldest, *steps) for steps in ((False,), (True,), (True, True)) for oldest in (_SUMS[:1], (), _SUMS)
)
"""Most wait for the gathered parameters of the first layer first, and for the sums of gradients of the last one."""


class _UnderWay:
    """The operations that are under way while events follow each other, and how waits say which of them they are for.

    One of the same part is said by its place among those of its name, from the oldest or the newest on.  One of an earlier
    part, such as a last backward (`parallelism.simulation.step_tails`), is said by where the part is, and by its number
    among those of the part.
    """

    def __init__(self, order: _Order) -> None:
        self.order = order
        self.parts: list[dict[str, list[int]]] = [defaultdict(list)]
        """The operations that each part has started, by name."""
        self._own: dict[str, list[int]] = defaultdict(list)
        """Those of the last part that are under way."""
        self._last: tuple[int, int] | None = None
        """The part and the number of the last that was waited for in another part."""
        self._waited = set[int]()

    def begin(self) -> None:
        """Begins another part."""
        self.parts.append(defaultdict(list))
        self._own.clear()

    def start(self, name: str, work: int) -> None:
        """Something starts."""
        self.parts[-1][name].append(work)
        self._own[name].append(work)

    def said(self, name: str, work: int) -> Any:
        """How the wait for an operation says it."""
        own = self._own[name]
        if work in own:
            place = own.index(work) - (0 if name in self.order.oldest else len(own))
            own.remove(work)
            return place
        for number, part in enumerate(self.parts[:-1]):
            if work in part[name]:
                return self._said_of(number, part[name].index(work), len(part[name]))
        raise UnequalLayers(f"a wait for {name} is for what did not start here")

    def _said_of(self, part: int, number: int, count: int) -> tuple[bool, int, bool, int]:
        before, self._last = self._last, (part, number)
        back = len(self.parts) if before is None else before[0] - part
        near = back in (0, 1)
        where = back if near else len(self.parts) - part
        if self.order.in_steps and before is not None and before[0] == part:
            return near, where, True, number - before[1]
        return near, where, False, number - count if self.order.from_end else number

    def found(self, name: str, said: Any) -> int:
        """The operation that a wait says."""
        try:
            return self._own[name].pop(said) if isinstance(said, int) else self._found_of(name, *said)
        except IndexError:
            raise UnequalLayers(f"a wait for {name} is for what did not start") from None

    def _found_of(self, name: str, near: bool, where: int, in_step: bool, number: int) -> int:
        last = self._last or (0, 0)
        part = last[0] - where if near else len(self.parts) - where
        works = self.parts[part][name]
        number += last[1] if in_step else len(works) if number < 0 else 0
        if part < 0 or number < 0 or works[number] in self._waited:
            raise IndexError(number)
        self._last = part, number
        self._waited.add(works[number])
        return works[number]


def _with_layers(
    few: DeviceEvents, more: DeviceEvents, layers: int, may_grow: MayGrow, order: _Order
) -> DeviceEvents:
    """`with_layers`, where waits have this order."""
    smaller, larger = (list(_events(each, order)) for each in (few, more))
    parts = _Alignment(smaller, larger).parts()
    sources, places = [*smaller, *larger], list[Ints]()
    for part in parts:
        if isinstance(part, _Added):
            own = np.tile(np.arange(part.start, part.end) + len(smaller), layers)
        elif isinstance(part, _Grows):
            own = np.array([len(sources)])
            sources.append(_grown(smaller[part.at], larger[part.there], layers, may_grow))
        else:
            own = np.arange(part.start, part.end)
        places.append(own)
    return _numbered(sources, np.concatenate([np.zeros(0, np.int64), *places]), order)


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


def _events(events: DeviceEvents, order: _Order) -> Iterator[_Event]:
    """The events, each without the numbers that depend on those before it."""
    if events.pieces or events.bulk is not None:
        raise UnequalLayers("pieces are not repeated")
    collectives = {each.event: (each.axes, each.call) for each in events.collectives}
    along = {each.event: each[1:] for each in events.along}
    under_way = _UnderWay(order)
    for place, row in enumerate(events.rows):
        waits = None
        if row.kind == MARK.kind:
            under_way.begin()
        elif row.work is not None:
            if row.kind == "wait":
                waits = under_way.said(row.name, row.work)
            else:
                under_way.start(row.name, row.work)
            row = row._replace(work=0)
        if row.sequence is not None:
            row = row._replace(sequence=0)
        yield _Event(row, waits, collectives.get(place), along.get(place))


def _numbered(sources: Sequence[_Event], places: Ints, order: _Order) -> DeviceEvents:
    """The events at these places of the ``sources``, with numbers."""
    rows = [sources[place].row for place in places.tolist()]
    result, under_way = DeviceEvents(rows), _UnderWay(order)
    has_number = np.array([_has_number(each.row) for each in sources], bool)
    for at in np.flatnonzero(has_number[places]).tolist() if len(sources) else ():
        row, waits, collective, along = sources[places[at]]
        work = None
        if row.kind == MARK.kind:
            under_way.begin()
        elif waits is not None:
            work = under_way.found(row.name, waits)
        elif row.work is not None:
            result.works += 1
            work = result.works
            under_way.start(row.name, work)
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


def _has_number(row: EventRow) -> bool:
    return row.sequence is not None or row.work is not None or row.kind == MARK.kind


class _Alignment:
    """What the larger one of two programs has besides the events of the smaller one."""

    def __init__(self, smaller: Sequence[_Event], larger: Sequence[_Event]) -> None:
        numbers: dict[Any, int] = {}
        self.exact = [_numbers_of(map(_exact, each), numbers) for each in (smaller, larger)]
        """Equal numbers of equal events."""
        self.loose = [_numbers_of(map(_loose, each), numbers) for each in (smaller, larger)]
        """The same where changes of memory, and calls, are equal that differ in bytes alone."""
        self.unsaid = _numbers_of((each._replace(waits=None) for each in larger), numbers)
        """Of the larger program, where waits are equal that are for other operations of their name."""

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
                yield _Grows(here, there)
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
            first = int(here < len(smaller))  # which may differ in bytes
            same = first + _same(smaller[here + first :], larger[there + added + first :])
            at_end = here + same == len(smaller) and there + added + same == len(larger)
            if (at_end, same) > best or found is None:
                best, found = (at_end, same), added
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
        """Whether what the larger program has besides is beside an equal run of events, but for how a wait is said."""
        larger = self.unsaid
        own, length = larger[start:end], end - start
        before, behind = larger[max(0, start - length) : start], larger[end : end + length]
        return np.array_equal(own, before) or np.array_equal(own, behind)


def _numbers_of(events: Iterator[Any], numbers: dict[Any, int]) -> Ints:
    return np.array([numbers.setdefault(each, len(numbers)) for each in events], np.int64)


def _exact(event: _Event) -> Any:
    return event


def _loose(event: _Event) -> Any:
    row = event.row
    if row.kind == "memory":
        return row._replace(nbytes=0.0), "of any bytes"
    if event.collective is not None and isinstance(event.collective[1], MemberCall):
        axes, call = event.collective
        if len(call.shape or ()) == 1 and not call.sizes:
            return row, event.waits, axes, replace(call, shape=None), "of any bytes"
    return event


def _same(first: Ints, second: Ints) -> int:
    """How many events are equal from the beginning on."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(np.argmax(different)) if different.any() else length
