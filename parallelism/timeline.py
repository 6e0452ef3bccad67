"""THE clock: replays what devices did, and so tells when each thing would have happened.

Eight processes on two cores cannot show a cluster's timeline by the wall clock.  So a device records what it
did, and this module goes through the records afterwards, with a clock for each rank that starts at 0.  In its
simplest form compute takes the CPU seconds of the device's thread and messages are free; what remains is who
waits for whom:

    compute      advances the clock by ``cpu_seconds``
    send         takes no time; its message is there from the sender's clock on
    recv         lasts until the send of that message
    collective   lasts until the last member of the group has come to it; it ends for all at once
    wait         lasts until the asynchronous operation of the same ``work`` is over
    the rest     takes no time: host traffic, memory

An asynchronous recv or collective lasts just as long but does not hold the clock of its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from parallelism.trace import HOST, Event

_NAMES = [field.name for field in fields(Event)]
_START, _DURATION = _NAMES.index("start_seconds"), _NAMES.index("duration_seconds")
_VALUES = attrgetter(*_NAMES)

_Key = tuple[Any, ...]


def replay(events_by_rank: Sequence[Sequence[Event]]) -> tuple[Event, ...]:
    """The same events with ``start_seconds`` and ``duration_seconds`` filled in, rank after rank.

    ``events_by_rank`` holds each rank's events in the order of its record (`Trace.by_rank`).  A send and a recv
    belong together by source, destination, tag and sequence, the events of a collective by group and
    sequence.  What happens inside a collective (``parent``) is placed at the collective's start and takes no time.

    The result does not depend on the order in which ranks are looked at, and the time taken grows with the number of
    events only.  The record of a failed run has events without partners, or even a circle of waits: such an
    event ends where it starts, and its rank goes on.
    """
    return tuple(_Replay(events_by_rank).events())


class _Replay:
    """Runs each rank until something holds it, and again when what it waits for has come.

    Nothing a rank waits for depends on when others are looked at, only on their records: so every order of
    looking gives the same times, as in a network of Kahn's processes.
    """

    def __init__(self, lanes: Sequence[Sequence[Event]]) -> None:
        self.lanes = lanes
        self.starts = [[0.0] * len(events) for events in lanes]
        self.durations = [[0.0] * len(events) for events in lanes]
        self.clock = [0.0] * len(lanes)
        self.next = [0] * len(lanes)                        # by lane: the event to go on with
        self.ready = list(range(len(lanes)))
        self.blocked: dict[int, int] = {}                   # lane -> the event of its own that has to be over
        self.issued: dict[tuple[int, int], int] = {}        # lane, work -> the event that started it
        self.over: dict[tuple[int, int], float] = {}        # lane, event of an asynchronous operation -> its end
        self.sent: dict[_Key, float] = {}                   # message -> when
        self.arrived: dict[_Key, list[tuple[int, int]]] = {}        # message or collective -> who waits: lane, event
        self.expected = Counter(_key(event) for events in lanes for event in events
                                if event.kind in ("send", "collective") and event.parent is None)

    def events(self) -> Iterator[Event]:
        while self.ready or self.blocked:
            if not self.ready:      # only a broken record comes here: those that are left wait for each other
                for lane in list(self.blocked):
                    self.resume(lane, self.clock[lane])
            self.advance(self.ready.pop())
        for lane, events in enumerate(self.lanes):
            self.place_children(lane)
            for event, start, duration in zip(events, self.starts[lane], self.durations[lane], strict=True):
                values = list(_VALUES(event))
                values[_START], values[_DURATION] = start, duration
                yield Event(*values)        # half the time of dataclasses.replace

    def advance(self, lane: int) -> None:
        """Goes on with the lane, up to the next event that holds it."""
        events, starts, durations = self.lanes[lane], self.starts[lane], self.durations[lane]
        clock = self.clock[lane]
        for i in range(self.next[lane], len(events)):
            event = events[i]
            kind = event.kind
            starts[i] = clock
            if event.parent is not None or kind == "memory":
                continue
            if kind == "compute":
                durations[i] = event.cpu_seconds
                clock += event.cpu_seconds
                continue
            waited = i
            if kind == "wait":
                waited = -1 if event.work is None else self.issued.get((lane, event.work), -1)
                end = clock if waited < 0 else self.over.get((lane, waited))
            else:
                end = self.meet(lane, i, event)
                if event.work is not None:
                    self.issued[lane, event.work] = i
                    if end is not None:
                        self.finish(lane, i, end)
                    continue
            if end is None:
                self.clock[lane], self.next[lane], self.blocked[lane] = clock, i, waited
                return
            if end > clock:
                durations[i] = end - clock
                clock = end
        self.clock[lane], self.next[lane] = clock, len(events)

    def meet(self, lane: int, i: int, event: Event) -> float | None:
        """When the operation that starts here is over; None if that is up to others who have not come yet."""
        start = self.starts[lane][i]
        if event.kind == "collective":
            key = _key(event)
            if event.group is None or self.expected[key] != len(event.group):
                return start
            members = self.arrived.setdefault(key, [])
            members.append((lane, i))
            if len(members) < len(event.group):
                return None
            end = max(self.starts[member][j] for member, j in members)
            for member, j in members[:-1]:
                self.finish(member, j, end)
            return end
        if event.peer is None or event.peer == HOST:
            return start
        key = _key(event)
        if event.kind == "send":
            if self.sent.setdefault(key, start) == start:
                for receiver, j in self.arrived.pop(key, ()):
                    self.finish(receiver, j, start)
        elif event.kind == "recv":
            if key in self.sent:
                return max(start, self.sent[key])
            if key in self.expected:
                self.arrived.setdefault(key, []).append((lane, i))
                return None
        return start

    def finish(self, lane: int, i: int, end: float) -> None:
        """The operation that event ``i`` of the lane started is over; a lane that it held goes on."""
        end = max(end, self.starts[lane][i])
        if self.lanes[lane][i].work is not None:
            self.over[lane, i] = end
            self.durations[lane][i] = end - self.starts[lane][i]
        if self.blocked.get(lane) == i:
            self.resume(lane, max(end, self.clock[lane]))

    def resume(self, lane: int, end: float) -> None:
        """Ends the event that holds the lane."""
        self.durations[lane][self.next[lane]] = end - self.clock[lane]
        self.clock[lane] = end
        self.next[lane] += 1
        del self.blocked[lane]
        self.ready.append(lane)

    def place_children(self, lane: int) -> None:
        """Puts what happened inside an operation at its start, whichever of the two was recorded first."""
        events, starts = self.lanes[lane], self.starts[lane]
        inner = [i for i, event in enumerate(events) if event.parent is not None]
        if not inner:
            return
        place = {event.serial: i for i, event in enumerate(events)}
        placed: set[int] = set()
        for i in inner:
            path = []
            at: int | None = i
            while at is not None and at not in placed and events[at].parent is not None:
                placed.add(at)
                path.append(at)
                at = place.get(events[at].parent or 0)
            for child in path:
                starts[child] = starts[path[-1] if at is None else at]


def _key(event: Event) -> _Key:
    """What the events that belong together have in common: the message, or the collective."""
    if event.kind == "collective":
        return event.group, event.sequence
    if event.kind == "send":
        return event.rank, event.peer, event.tag, event.sequence
    return event.peer, event.rank, event.tag, event.sequence
