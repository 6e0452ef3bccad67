"""`Tail`: what a device does in its last backwards and behind them, as events that can be repeated for further layers.

The last backward of a stage may leave sums of gradients under way, for which the device waits behind the last action.
So the events of both are one list, in which each of these backwards, and the end, begins with a mark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from parallelism.pipelining import Pipeline, free_tag
from parallelism.simulation.device_events import CollectiveRow, DeviceEvents, EventRow, PeerRow
from parallelism.simulation.equal_layers import MARK, UnequalLayers
from parallelism.simulation.typed_device import TypedDevice, TypedWork

_LAST = -1
"""The last position of a pipeline, of whatever length."""


def head_of(device: TypedDevice) -> DeviceEvents:
    """The events of a device that has run a step before its first action."""
    events = device.events
    if events.bulk is None:
        raise UnequalLayers("actions with messages of their own are not repeated")
    own = [each for each in events.collectives if each.event < events.bulk_start]
    return DeviceEvents(events.rows[: events.bulk_start], own)


def tail_of(device: TypedDevice, pipeline: Pipeline) -> DeviceEvents:
    """The events of the last backwards of a device that has run a step, and of what it did after its last action."""
    events = device.events
    assert events.bulk is not None
    tail, number = DeviceEvents(), _Numbers()
    left: dict[int, Any] = {}
    """By the numbers that they have at the end: what the last backwards left under way."""
    for place, closing in enumerate(device.closings):
        left |= {work.number or 0: (place, first) for first, work in closing.left.items()}
        rows = []
        for row in closing.events.rows:
            work = row.work and number((place, row.work))
            stage = row.stage if row.microbatch is None else 0
            rows.append(row._replace(work=work, stage=stage, microbatch=row.microbatch and 0))
        _append(tail, rows, closing.events.collectives)
    behind = events.bulk_start + len(events.bulk.columns)
    first = len(tail.rows) + 1
    own = [each._replace(event=each.event - behind) for each in events.collectives if each.event >= behind]
    rows = [
        _outside(row._replace(work=row.work and number(left.get(row.work, row.work))), pipeline)
        for row in events.rows[events.bulk_start :]
    ]
    _append(tail, rows, own)
    tail.along += [
        PeerRow(first + each.event - behind, each.axis, _from_end(each.position, pipeline))
        for each in events.along
        if each.event >= behind
    ]
    return tail


class _Numbers:
    """Numbers operations in the order in which they are first met."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, work: Any) -> int:
        """The number of an operation."""
        return self.known.setdefault(work, len(self.known) + 1)


def _append(tail: DeviceEvents, rows: Sequence[EventRow], collectives: Sequence[CollectiveRow]) -> None:
    """Adds a mark and these events, in which the collectives have places from 0."""
    first = len(tail.rows) + 1
    tail.rows += [MARK, *rows]
    tail.collectives += [each._replace(event=first + each.event) for each in collectives]


def _from_end(position: int, pipeline: Pipeline) -> int:
    """A position of a pipeline of any length, the last one as `_LAST`."""
    if position == pipeline.ranks - 1:
        return _LAST
    if position:
        raise UnequalLayers("a stage in the middle gets a message of an end")
    return position


def _outside(row: EventRow, pipeline: Pipeline) -> EventRow:
    """A message at the end of a step, as it is in a pipeline of any length."""
    if row.peer is None:
        return row
    assert row.tag is not None
    return row._replace(peer=_from_end(row.peer, pipeline), tag=row.tag - free_tag(pipeline))


class Tail:
    """The events of the last backwards of a device, and of its end, as they are replayed one after the other."""

    def __init__(self, events: DeviceEvents, device: TypedDevice, pipeline: Pipeline) -> None:
        self.events, self.device, self.pipeline = events, device, pipeline
        marks = [place for place, row in enumerate(events.rows) if row.kind == MARK.kind]
        self._parts = list(zip(marks, [*marks[1:], len(events.rows)], strict=True))
        self.closings = len(marks) - 1
        """The number of last backwards."""
        self._works: dict[int, TypedWork] = {}
        """By the numbers among the events: what goes on."""

    def close(self, stage: int, microbatch: int) -> None:
        """Adds the events of the next last backward, that of a stage for a microbatch."""
        self._add(stage, microbatch)

    def end(self) -> None:
        """Adds the events behind the last action."""
        self._add(None, None)

    def _add(self, stage: int | None, microbatch: int | None) -> None:
        start, end = self._parts.pop(0)
        events, device = self.events, self.device
        place = attrgetter("event")
        first = bisect_left(events.collectives, start, key=place)
        calls = {
            each.event: each
            for each in events.collectives[first : bisect_left(events.collectives, end, key=place)]
        }
        along = {each.event: each for each in events.along if start <= each.event < end}
        for at in range(start + 1, end):
            row = events.rows[at]
            if row.microbatch is not None:
                row = row._replace(stage=stage, microbatch=microbatch)
            work = self._work_of(row)
            if at in calls:
                axes, call = calls[at].axes, calls[at].call
                device.events.add_collective(row.axes, axes, call, row.name, row.dtype, work)
            elif row.peer is not None:
                assert row.tag is not None
                peer = self.pipeline.ranks - 1 if row.peer == _LAST else row.peer
                nbytes = row.bytes_sent or row.bytes_received
                axis = along[at].axis if at in along else None
                device.events.add_message(
                    row.kind, peer, row.tag + free_tag(self.pipeline), nbytes, row.dtype, axis, work
                )
            else:
                device.events.rows.append(row if row.work is None else row._replace(work=work))

    def _work_of(self, row: EventRow) -> int | None:
        """The number that the operation of an event has on the device, where it starts or is waited for."""
        if row.work is None:
            return None
        device = self.device
        if row.kind == "wait":
            work = self._works.pop(row.work)
            assert work.number is not None
            device.under_way.pop(work.number, None)
            return work.number
        device.events.works += 1
        work = self._works[row.work] = TypedWork(device.events, row.name, device.events.works)
        if row.kind == "collective":
            device.under_way[device.events.works] = work
        return work.number
