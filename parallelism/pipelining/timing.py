"""The times of a schedule's actions under given costs, and from them makespan, bubbles and live activations.

Each rank keeps its order and starts an action as soon as all that it needs is there.  A message leaves after the action
that produces it (or at its ``SEND``) and blocks neither of its ranks while it is on its way.  The actions are timed as
the events of a record are, by `parallelism.timeline.engine`, so times are exact sums of the costs as given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.display import Drawing
from parallelism.pipelining.actions import KINDS, MESSAGES, Action, parts
from parallelism.pipelining.validation import as_in
from parallelism.timeline import COMPUTE, RECV, SEND, Program, Replay

if TYPE_CHECKING:
    from parallelism.pipelining.schedule import Schedule

Costs = Mapping[str, float | Sequence[float]] | Sequence[float]
"""Of ``F``, ``B``, ``I``, ``W`` and ``message``, by name or in this order; several of ``message`` are those between
each stage and the next."""

UNIT_COSTS: Mapping[str, float] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1, "message": 0})
"""The unit of the papers: a forward and both halves of a backward take equally long, messages no time."""

SLOTS: Mapping[str, int] = MappingProxyType({**dict.fromkeys(KINDS, 1), "message": 0})
"""Every action takes one slot: the time in which schedules are drawn."""

_NAMES = (*KINDS, "message")
_NONE = -1


class Span(NamedTuple):
    """An action, and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """A schedule's actions in time; what passes between ranks is not listed.

    >>> from parallelism import Pipeline
    >>> timeline = Pipeline(2, 3, "1f1b").schedule.timeline({"F": 1, "B": 2, "message": 0.5})
    >>> timeline.makespan, timeline.busy, [str(span.action) for span in timeline.spans[1]][:3]
    (14.0, (9.0, 9.0), ['1F0', '1B0', '1F1'])
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...] = field(repr=False)
    """By rank, in its order; an overlapped pair is a span for each of the two."""
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    """Of every step, by rank, messages included."""

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        spans = [span for row in self.spans for span in row]
        return max(span.end for span in spans) - min(span.start for span in spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """By rank, the time in which it works."""
        return tuple(map(_work, self.spans))

    @property
    def rank_spans(self) -> tuple[float, ...]:
        """By rank, the time from its first start to its last end."""
        return tuple(map(_duration, self.spans))

    @property
    def bubble_fraction(self) -> float:
        """The bubble by the makespan: the part of ranks x makespan in which nothing runs."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble by the ranks' own spans: (longest span - its work) / longest span.

        So the papers on zero-bubble schedules count (Qi et al., *Zero Bubble Pipeline Parallelism*, section 5): a rank
        that begins late and ends late, and could take up the next step meanwhile, is not charged for it.
        """
        span, work = max(zip(self.rank_spans, (-busy for busy in self.busy), strict=True))
        return (span + work) / span if span else 0.0

    def live(self, rank: int) -> tuple[tuple[float, int], ...]:
        """Times at which the number of kept forwards changes on the rank, and the number from then on.

        A forward is kept from its start to the end of its B or W.
        """
        if not self.schedule.training:
            return ()
        changes: Counter[float] = Counter()
        for action, start, end in self.spans[rank]:
            changes[start] += action.kind == "F"
            changes[end] -= action.kind in "BW"
        times = [time for time in sorted(changes) if changes[time]]
        return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))

    def peak_live(self) -> tuple[int, ...]:
        """By rank, the most forwards that are kept at once."""
        peaks = []
        for rank in range(len(self.spans)):
            peaks.append(max((count for _, count in self.live(rank)), default=0))
        return tuple(peaks)

    def beside(self, *others: ScheduleTimeline) -> Drawing:
        """A picture of this timeline and others on one time axis: ``print`` it, or display it in a notebook.

        >>> from parallelism import Pipeline
        >>> one, other = (Pipeline(2, 4, name).schedule.timeline() for name in ("gpipe", "1f1b"))
        >>> print(one.beside(other))
        gpipe: 2 stages on 2 ranks, 4 microbatches; makespan 15, bubble 20.0% of it
        1f1b: 2 stages on 2 ranks, 4 microbatches; makespan 15, bubble 20.0% of it
        """
        from parallelism.pipelining import svg

        timelines = (self, *others)
        return Drawing("\n".join(map(svg.title, timelines)), svg.html(timelines))

    def __str__(self) -> str:
        from parallelism.pipelining import text_picture

        return text_picture.bars(self)

    def _repr_html_(self) -> str:
        from parallelism.pipelining import svg

        return svg.html([self])


def _work(row: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in row)


def _duration(row: Sequence[Span]) -> float:
    return row[-1].end - row[0].start if row else 0


def checked_costs(costs: Costs, stages: int) -> dict[str, list[float]]:
    """Each cost by stage; that of a message by the lower of its two stages.

    ``ValueError``, ``TypeError`` for costs that are none.
    """
    if not isinstance(costs, Mapping):
        if not isinstance(costs, list | tuple) or len(costs) != len(_NAMES):
            raise ValueError(
                f"costs are five numbers ({', '.join(_NAMES)}), or a mapping from these; got {costs!r}"
            )
        costs = dict(zip(_NAMES, costs, strict=True))
    checked: dict[str, list[float]] = {}
    for name, value in costs.items():
        if name not in _NAMES:
            raise ValueError(f"costs are of {', '.join(_NAMES)}; got one of {name!r}")
        several = isinstance(value, list | tuple)
        count = stages - 1 if name == "message" and several else stages
        numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * stages
        if len(numbers) != count:
            wanted = f"{count} pairs of neighbouring" if name == "message" else f"{stages}"
            raise ValueError(
                f"the cost of {name} should be a number, or one for each of {wanted} stages; got {value!r}"
            )
        for number in numbers:
            if isinstance(number, bool) or not hasattr(number, "__float__"):
                raise TypeError(f"the cost of {name} should be a number; got {number!r}")
            if not 0 <= number < float("inf"):
                raise ValueError(f"the cost of {name} should be 0 or more and finite; got {number!r}")
        checked[name] = numbers + [0] * (stages - count)
    if "B" not in checked and "I" in checked and "W" in checked:
        checked["B"] = [i + w for i, w in zip(checked["I"], checked["W"], strict=True)]
    return {"message": [0] * stages, **checked}


def timeline(schedule: Schedule, given_costs: Costs) -> ScheduleTimeline:
    """See `Schedule.timeline`.  ``ValueError``, with what each rank waits for, if the schedule cannot go on."""
    costs = checked_costs(given_costs, schedule.stages)
    strange = next(
        (work for row in schedule.works for work in row if not 0 <= work.stage < schedule.stages), None
    )
    if strange:
        raise ValueError(
            f"schedule {schedule.name!r}: {strange} is of stage {strange.stage}; it has {schedule.stages}"
        )
    if absent := {work.kind for row in schedule.works for work in row} - {*costs, *MESSAGES}:
        raise ValueError(f"costs should have one of {', '.join(sorted(absent))}; got {', '.join(costs)}")
    lanes = _Lanes(schedule, costs)
    replay = Replay(lanes.program())
    if blocked := replay.run():
        waits = "; ".join(lanes.wait(rank, replay.next[rank]) for rank in blocked)
        raise ValueError(f"schedule {schedule.name!r} cannot go on: {waits}")
    spans, steps = [], []
    for row, works, places in zip(schedule.actions, schedule.works, lanes.places, strict=True):
        start_of = dict(zip(works, map(replay.starts.__getitem__, places), strict=True))
        steps.append(tuple(start_of[step.works[0]] for step in row))
        spans.append(
            tuple(
                Span(work, start, start + costs[work.kind][work.stage])
                for work, start in start_of.items()
                if work.kind in KINDS
            )
        )
    return ScheduleTimeline(schedule, tuple(spans), tuple(steps))


class _Pattern(NamedTuple):
    """What all actions of one stage and kind on one rank have in common."""

    cost: float
    waits: tuple[tuple[int, int], ...]
    """For each need of an action, the slot that has to be done, and that of the message if a listed RECV is needed."""
    slots: tuple[int, ...]
    """The slots that are done after the action."""
    sends: tuple[tuple[int, float], ...]
    """The slots of the messages that leave after the action, and how long they are on their way."""


class _Lanes:
    """The actions of a schedule as events for the replay: computes, and the messages between them.

    If a schedule lists no messages, an action is preceded by a recv of each need from another rank, and followed by a
    send of what others need.  A listed RECV is asynchronous: the action that needs its message waits for it.  A need of
    its own rank that is not done before becomes a recv, too: it blocks the rank until another rank sends it, which only
    happens in a broken schedule that has one stage on several ranks.

    A *slot* is a number for a stage, a part of an action, and whether a message brings it.  With the number of the
    microbatch it gives the key of a message.
    """

    def __init__(self, schedule: Schedule, costs: dict[str, list[float]]) -> None:
        self.schedule, self.costs = schedule, costs
        self.slots: dict[tuple[int, str, bool], int] = {}
        self.microbatches = list(dict.fromkeys(work.microbatch for row in schedule.works for work in row))
        self.places: list[list[int]] = []
        """By rank, the place of the event of each action."""
        self.messages: Sequence[int] = ()
        """The message of each step; of a COMPUTE 0."""
        waits: list[
            dict[tuple[int, str], tuple[tuple[int, int], ...]]
        ] = []  # by rank, then by stage and kind
        received: set[int] = set()
        ranks_of = Counter[int]()
        for rank, row in enumerate(schedule.works):
            kinds = dict.fromkeys((work.stage, work.kind) for work in row)
            ranks_of.update({stage for stage, _ in kinds})
            waits.append({each: self._waits(*each, rank) for each in kinds})
            received.update(*chain(*waits[-1].values()))
        self.patterns: list[dict[tuple[int, str], _Pattern]] = []
        for by_kind in waits:
            patterns = {}
            for (stage, kind), each in by_kind.items():
                patterns[stage, kind] = self._pattern(stage, kind, each, received, ranks_of[stage] > 1)
            self.patterns.append(patterns)

    def program(self) -> Program:
        """The steps of all ranks, rank after rank."""
        number = {k: i for i, k in enumerate(self.microbatches)}
        count = len(number)
        lengths: list[int] = []
        rows: list[tuple[int, int, float]] = []  # role, message, cost
        sent = set[int]()
        for works, patterns in zip(self.schedule.works, self.patterns, strict=True):
            first, places, done = len(rows), list[int](), set[int]()
            for stage, kind, microbatch in works:
                cost, waits, slots, sends = patterns[stage, kind]
                k = number[microbatch]
                for slot, message in waits:
                    if slot * count + k not in done:
                        rows.append((RECV, slot * count + k, 0))
                    elif message != _NONE:
                        rows.append((RECV, message * count + k, 0))
                places.append(len(rows))
                rows.append((COMPUTE, 0, cost))
                for slot, seconds in sends:
                    if slot * count + k not in sent:
                        sent.add(slot * count + k)
                        rows.append((SEND, slot * count + k, seconds))
                done.update([slot * count + k for slot in slots])
            self.places.append(places)
            lengths.append(len(rows) - first)
        roles, self.messages, costs = zip(*rows, strict=True) if rows else ((), (), ())
        zeros = [0] * len(rows)
        return Program(
            lengths, roles, self.messages, (), costs, zeros, zeros, (), (), len(self.slots) * count
        )

    def wait(self, rank: int, event: int) -> str:
        """What a blocked rank waits for, in words; ``event`` is the place of the event that blocks it."""
        work = self.schedule.works[rank][bisect_left(self.places[rank], event)]
        slot, k = divmod(self.messages[event], len(self.microbatches))
        stage, kind, _ = list(self.slots)[slot]
        need = as_in(Action(stage, kind, self.microbatches[k]), work)
        step, entry = next((i, e) for i, e in enumerate(self.schedule.actions[rank]) if work in e.works)
        return f"rank {rank} waits at step {step} ({entry}) for {need}"

    def _waits(self, stage: int, kind: str, rank: int) -> tuple[tuple[int, int], ...]:
        if kind[0] == "R":
            return ()
        waits = []
        for need in self.schedule.needs(Action(stage, kind, 0)):
            if need.kind[0] == "R":
                waits.append((self._slot(need, by_message=False), self._slot(need.needs[0], by_message=True)))
            else:
                waits.append(
                    (self._slot(need, by_message=self.schedule.placement[need.stage] != rank), _NONE)
                )
        return tuple(waits)

    def _pattern(
        self, stage: int, kind: str, waits: tuple[tuple[int, int], ...], received: set[int], is_stray: bool
    ) -> _Pattern:
        """``received``: the slots that any rank waits for; ``is_stray``: whether the stage is on several ranks."""
        made = [Action(stage, part, 0) for part in parts(kind)]
        slots = tuple(self._slot(action, by_message=False) for action in made)
        if kind[0] == "R":
            return _Pattern(0, waits, slots, ())
        message, back = self.costs["message"], kind.removeprefix("SEND_") != "F"
        sent = [(self._slot(action, by_message=True), message[max(stage - back, 0)]) for action in made]
        sent += [(slot, 0) for slot in slots if is_stray]
        sends = tuple((slot, seconds) for slot, seconds in sent if slot in received)
        return _Pattern(self.costs[kind][stage] if kind in KINDS else 0, waits, slots, sends)

    def _slot(self, action: Action, *, by_message: bool) -> int:
        return self.slots.setdefault((action.stage, action.kind, by_message), len(self.slots))
