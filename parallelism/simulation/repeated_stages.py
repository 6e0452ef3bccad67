"""`RepeatingStage`: a stage that runs once for each kind of action and size of microbatch, and then repeats its events.

The first action of a kind runs op by op on the `TypedDevice`.  If its events have one price, they are replaced by one
*piece*: one compute event, with memory events before and after it.  If they have none, each run of compute between two
collectives is such a piece, which may contain collectives that have a price by themselves.  Later actions of the kind
repeat the pieces, or the events if there is no price at all.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from parallelism.collectives import MemberCall
from parallelism.execution import ACTIVATIONS, ProgramStage, TypedArray
from parallelism.layouts.stages import Part
from parallelism.memoized import memoized
from parallelism.simulation.device_events import Call, DeviceEvents, EventRow, PieceRow
from parallelism.simulation.typed_device import Closing, TypedDevice

MESSAGES = ("send", "recv")
"""The kinds of events that an action, to be repeated, must not have."""
RUN = "ops"
"""The name of an event that stands for a run of computes."""


@dataclass(frozen=True)
class RepeatedAction:
    """What an action of a stage for one microbatch leaves."""

    kept: Mapping[str, Any] | None
    """The values that the stage keeps for the microbatch after the action; None if it keeps none any more."""
    kept_more: int
    """Bytes that the stage keeps after the action, minus the bytes that it kept before."""
    freed: int
    """Bytes of what it kept before that the events of the action free."""
    result: Any
    """What the action returns: a message to a neighbouring stage, an output of the last stage, or None."""
    outputs: Any
    """Of a forward of the last stage the loss and other sums; else None."""


@dataclass(frozen=True)
class RepeatedEvents(RepeatedAction):
    """An action of a stage for one microbatch, op by op, or with runs of compute as pieces."""

    events: DeviceEvents

    @cached_property
    def alone(self) -> list[DeviceEvents | None]:
        """Each collective of the action by itself, in order, as if it were waited for at once; equal ones are one object.

        None for one that is beside another one, or in two phases.
        """
        known: dict[Any, DeviceEvents] = {}
        found: list[DeviceEvents | None] = []
        for each in self.events.collectives:
            if each.event not in self._ends_alone:
                found.append(None)
                continue
            row = self.events.rows[each.event]._replace(work=None)
            events = DeviceEvents([row], [each._replace(event=0, number=0)])
            found.append(known.setdefault((_equal(each.call), each.axes), events))
        return found

    @cached_property
    def _ends_alone(self) -> dict[int, int]:
        """By place of a collective beside which no other is under way: the place of the wait for it, or its own if it is
        waited for at once.  All compute up to there is of the phase of its begin."""
        calls, found = {each.event for each in self.events.collectives}, dict[int, int]()
        under_way: dict[int, int] = {}
        """By number of an operation that goes on: the place where it began."""
        beside, phases = set[int](), list(self._phases_of_rows)
        for place, row in enumerate(self.events.rows):
            if row.kind == "wait" and row.work in under_way:
                begin = under_way.pop(row.work)
                if begin in calls and begin not in beside and len({*phases[begin : place + 1]}) == 1:
                    found[begin] = place
            elif place in calls or row.work is not None:
                if under_way:
                    beside |= {place, *under_way.values()}
                if row.work is not None:
                    under_way[row.work] = place
                elif not under_way:
                    found[place] = place
        return found

    @memoized
    def runs(self, inside: tuple[bool, ...]) -> list[tuple[int, DeviceEvents]]:
        """The runs of one phase between which nothing else happens than some compute, the changes of memory among it,
        and the collectives that are ``inside``: where each begins, and its events; equal ones are one object."""
        found, start = [], 0
        known: dict[Any, DeviceEvents] = {}
        for (is_own, _), group in groupby(
            zip(self._phases(inside), self.events.rows, strict=True), key=itemgetter(0)
        ):
            rows = [row for _, row in group]
            kinds = [row.kind for row in rows]
            if is_own and "compute" in kinds and len(kinds) - kinds.count("memory") > 1:
                run = self._cut_out(start, rows)
                calls = [(_equal(each.call), *each[:2]) for each in run.collectives]
                found.append((start, known.setdefault((*_without_numbers(rows), *calls), run)))
            start += len(rows)
        return found

    @memoized
    def with_pieces(self, inside: tuple[bool, ...], seconds: tuple[float | None, ...]) -> "RepeatedEvents":
        """The action with its runs as pieces that take so many seconds; None: the run stays as it is.

        Equal stages, and devices on which prices are equal, have the same pieces; `DeviceEvents.repeat` gives them
        their stage.
        """
        events, start = DeviceEvents(), 0
        place_of: dict[int, int] = {}
        behind = len(self.events.rows), DeviceEvents()
        for (place, run), took in zip([*self.runs(inside), behind], [*seconds, None], strict=True):
            place_of |= {each: each - start + len(events.rows) for each in range(start, place)}
            events.rows += self.events.rows[start:place]
            start = place + len(run.rows)
            if took is None:
                events.rows += run.rows
            else:
                _add_run(events, run, took)
        events.collectives = [
            each._replace(event=place_of[each.event])
            for each in self.events.collectives
            if each.event in place_of
        ]
        return replace(self, events=events)

    def _cut_out(self, start: int, rows: list[EventRow]) -> DeviceEvents:
        """Events that follow each other from a place on, whose ``rows`` these are."""
        first = bisect_left(self.events.collectives, start, key=attrgetter("event"))
        own = [
            each._replace(event=each.event - start)
            for each in takewhile(
                lambda each: each.event < start + len(rows), self.events.collectives[first:]
            )
        ]
        return DeviceEvents(rows, own, part_of=(self.events, start))

    def _phases(self, inside: tuple[bool, ...]) -> Iterator[tuple[bool, str | None]]:
        """Of each event, whether it may be in a run, and the phase of the last compute."""
        own = set[int]()
        for each, is_inside in zip(self.events.collectives, inside, strict=True):
            if is_inside:
                own |= {each.event, self._ends_alone[each.event]}
        for place, (row, phase) in enumerate(zip(self.events.rows, self._phases_of_rows, strict=True)):
            yield row.kind in ("compute", "memory") or place in own, phase

    @property
    def _phases_of_rows(self) -> Iterator[str | None]:
        """Of each event, the phase of the last compute."""
        phase = None
        for row in self.events.rows:
            phase = row.phase if row.kind == "compute" else phase
            yield phase


def _without_numbers(rows: Sequence[EventRow]) -> list[EventRow]:
    """Events without their numbers among those of a group, and with their operations numbered from 1 on."""
    works: dict[int, int] = {}
    found = []
    for row in rows:
        if row.sequence is not None or row.work is not None:
            work = None if row.work is None else works.setdefault(row.work, len(works) + 1)
            row = row._replace(sequence=None, work=work)
        found.append(row)
    return found


def _equal(call: Call) -> Any:
    """A key: equal for equal calls.  A step of a resharding plan is equal to itself alone."""
    return call if isinstance(call, MemberCall) else id(call)


@dataclass(frozen=True)
class Piece(RepeatedAction):
    """An action of a stage for one microbatch, as one event."""

    events: DeviceEvents
    """The events that it stands for."""
    seconds: float
    flops: float
    nbytes: float
    peak: Mapping[str, int]
    """Bytes by category at the moment when most are held, minus the bytes before the action."""
    change: Mapping[str, int]
    """Bytes by category after the action, minus the bytes at the peak."""


class RepeatingStage(ProgramStage):
    """A `ProgramStage` on a `TypedDevice`, with the same arguments.

    ``known`` has the events of actions that stages of the same programs have run; their kept values have the names of
    the first of these stages.  ``price(events)`` returns the seconds of the events of an action, or None if they cannot
    be one piece.  Without a ``price`` there are no pieces.
    """

    def __init__(
        self,
        *arguments: Any,
        known: dict[Any, RepeatedEvents],
        price: Callable[[DeviceEvents], float | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.price, self.known = price, known
        self._actions: dict[tuple[str, Part, bool], Piece | RepeatedEvents] = {}
        self._held: dict[tuple[str | None, Part], int] = {}
        self._counted: dict[int, int] = {}
        """Kept bytes by microbatch that are in the memory events of pieces."""
        self._last_is_piece = False

    @property
    def events(self) -> DeviceEvents:
        """The events of the device."""
        return self.typed_device.events

    @property
    def typed_device(self) -> TypedDevice:
        """The device."""
        device: Any = self.device
        assert isinstance(device, TypedDevice)
        return device

    def held(self, microbatch: int) -> int:
        """Kept bytes that are not in the memory events of pieces yet; may be negative."""
        key = self._last.get(microbatch), self.programs.alike(self.parts[microbatch])
        if key not in self._held:
            self._held[key] = super().held(microbatch)
        return self._held[key] - self._counted.get(microbatch, 0)

    def freed(self, microbatch: int) -> int:
        """As `ProgramStage.freed`; 0 after a piece, whose memory events have the change of what is kept."""
        return 0 if self._last_is_piece else super().freed(microbatch)

    def act(self, kind: str, microbatch: int, message: Any = None) -> Any:
        """As `ProgramStage.act`; what was run before is repeated."""
        self._last_is_piece = False
        if self.closes(kind, microbatch):
            return self.close(kind, microbatch, message)
        part = self.programs.alike(self.parts[microbatch])
        # What is under way delays the collectives of later actions: these are no pieces.
        busy = bool(self.typed_device.under_way)
        action = self._actions.get((kind, part, busy))
        if action is None:
            key = self.programs.first, kind, part, self.last
            known = self.known.get(key)
            start = len(self.events.rows)
            if known is None:
                before = super().held(microbatch)
                result = super().act(kind, microbatch, message)
                events = self.events.since(start)
                if any(row.kind in MESSAGES for row in events.rows):
                    return result
                kept = dict(self._kept[microbatch]) if microbatch in self._kept else None
                known = self.known[key] = RepeatedEvents(
                    None if kept is None else self._named(kept, own=False),
                    super().held(microbatch) - before,
                    super().freed(microbatch),
                    result,
                    self.outputs.get(microbatch),
                    events,
                )
                self.events.cut(start)
            seconds = None if busy or self.price is None else self.price(known.events)
            own = known
            if seconds is None and self.price is not None:
                own = in_runs(known, self.price, beside_others=busy)
            own = replace(own, kept=None if own.kept is None else self._named(own.kept, own=True))
            action = self._actions[kind, part, busy] = own if seconds is None else _as_piece(own, seconds)
        self._last[microbatch] = kind
        if action.kept is None:
            self._kept.pop(microbatch, None)
        else:
            self._kept[microbatch] = dict(action.kept)
        if kind in ("B", "W") and not self.programs.adds_up:
            self.gradients.arrays = [TypedArray.of(type) for type in self.programs.sum_types]
        if kind == "F" and self.last:
            self.outputs[microbatch] = action.outputs
        if isinstance(action, Piece):
            self._write(action, microbatch)
        else:
            self.events.repeat(action.events, self.number, microbatch)
        return action.result

    def close(self, kind: str, microbatch: int, message: Any) -> Any:
        """The last backward, which is run once, and leaves collectives under way."""
        device, start = self.typed_device, len(self.events.rows)
        before = set(device.under_way)
        result = super().act(kind, microbatch, message)
        left = {number: work for number, work in device.under_way.items() if number not in before}
        device.closings.append(Closing(self.number, self.events.since(start), left, result))
        return result

    def _named(self, kept: Mapping[str, Any], *, own: bool) -> Mapping[str, Any]:
        """Kept values by this stage's ``own`` names, or by those of the first stage of the same programs."""
        if self.programs.like is None:
            return kept
        names = self.programs.names if own else {mine: first for first, mine in self.programs.names.items()}
        return {names[name]: array for name, array in kept.items()}

    def _write(self, piece: Piece, microbatch: int) -> None:
        """Gives the last event, the compute event of the action, the cost of the piece, and adds memory events."""
        events = self.events
        begun = events.rows.pop()
        for category, nbytes in piece.peak.items():
            events.add_memory(category, nbytes, self.number, microbatch)
        events.pieces.append(PieceRow((len(events.rows),), piece.events, self.number))
        events.rows.append(
            begun._replace(nbytes=piece.nbytes, flops=piece.flops, dtype=None, seconds=piece.seconds)
        )
        for category, nbytes in piece.change.items():
            events.add_memory(category, nbytes, self.number, microbatch)
        events.piece_end = len(events.rows)
        self._last_is_piece = True
        self._counted[microbatch] = self._counted.get(microbatch, 0) + piece.kept_more


def _as_piece(action: RepeatedEvents, seconds: float) -> Piece:
    work = _Work.of(action.events)
    more = action.kept_more + action.freed
    change = {**work.change, ACTIVATIONS: work.change.get(ACTIVATIONS, 0) + more}
    peak, change = map(_freed_first, (work.peak, change))
    return Piece(
        action.kept,
        action.kept_more,
        action.freed,
        action.result,
        action.outputs,
        action.events,
        seconds,
        work.flops,
        work.nbytes,
        peak,
        change,
    )


def in_runs(
    action: RepeatedEvents,
    price: Callable[[DeviceEvents], float | None],
    *,
    beside_others: bool = False,
) -> RepeatedEvents:
    """The action with its runs as pieces, as far as they have a price.

    A collective is in a run if nothing else is under way from its begin to the wait for it; ``beside_others`` none is.
    """
    inside = tuple(
        not beside_others and each is not None and price(each) is not None for each in action.alone
    )
    if any(inside) and any(price(run) is None for _, run in action.runs(inside)):
        inside = (False,) * len(inside)
    return action.with_pieces(inside, tuple([price(run) for _, run in action.runs(inside)]))


def _add_run(events: DeviceEvents, run: DeviceEvents, seconds: float) -> None:
    """Adds a run as one piece, of no stage yet."""
    work, compute = _Work.of(run), next(row for row in run.rows if row.kind == "compute")
    sample = next((row for row in run.rows if row.kind == "memory"), EventRow("memory", ""))

    def memory(changes: Mapping[str, int]) -> Iterator[EventRow]:
        for category, nbytes in _freed_first(changes).items():
            yield sample._replace(name=category, nbytes=float(nbytes))

    events.rows += memory(work.peak)
    events.pieces.append(PieceRow((len(events.rows),), run, 0))
    events.rows.append(
        compute._replace(
            name=RUN,
            nbytes=work.nbytes,
            flops=work.flops,
            dtype=None,
            seconds=seconds,
            other_bytes=(),
            shape=None,
        )
    )
    events.rows += memory(work.change)


class _Work(NamedTuple):
    """The work and the memory of some events."""

    flops: float
    nbytes: float
    peak: dict[str, int]
    """Bytes by category at the moment when most are held, minus the bytes before."""
    change: dict[str, int]
    """Bytes by category after the events, minus the bytes at the peak."""

    @classmethod
    def of(cls, events: DeviceEvents) -> "_Work":
        """That of all compute events, and all changes of memory."""
        held: dict[str, int] = {}
        peak: dict[str, int] = {}
        flops = nbytes = 0.0
        for kind, name, size, each, *_ in events.rows:
            if kind == "memory":
                held[name] = held.get(name, 0) + int(size)
                if sum(held.values()) > sum(peak.values()):
                    peak = dict(held)
            elif kind == "compute":
                flops, nbytes = flops + each, nbytes + size
        return cls(flops, nbytes, peak, {name: held.get(name, 0) - peak.get(name, 0) for name in held})


def _freed_first(change: Mapping[str, int]) -> dict[str, int]:
    """The changes that are any, by category: what is freed comes first, so that no moment between has more than both."""
    return dict(sorted(((name, size) for name, size in change.items() if size), key=lambda each: each[1] > 0))
