"""When the actions of a schedule start and end under given costs; from that makespan, bubbles, live activations.

Each rank keeps its order and starts an action as soon as what it needs is there.  A message leaves when it is made
(or where its ``SEND`` stands), takes its time on the way, and holds up neither of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.pipelining.actions import KINDS, MESSAGES, Action, parts
from parallelism.pipelining.validation import as_in

if TYPE_CHECKING:
    from parallelism.pipelining.schedule import Schedule

Costs = Mapping[str, float | Sequence[float]] | Sequence[float]
"""Of ``F``, ``B``, ``I``, ``W`` and ``message``, by name or in this order."""

UNIT_COSTS: Mapping[str, float] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1, "message": 0})
"""The unit of the papers: a forward and both halves of a backward take equally long, messages no time."""

SLOTS: Mapping[str, int] = MappingProxyType({**dict.fromkeys(KINDS, 1), "message": 0})
"""Every action takes one slot: the time in which schedules are drawn."""

_NAMES = (*KINDS, "message")


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
    (13.0, (9, 9), ['1F0', '1B0', '1F1'])
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
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def rank_spans(self) -> tuple[float, ...]:
        """By rank, the time from its first start to its last end."""
        return tuple(row[-1].end - row[0].start if row else 0 for row in self.spans)

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
        changes: dict[float, int] = {}
        for action, start, end in self.spans[rank]:
            for time, change in ((start, action.kind == "F"), (end, -(action.kind in "BW"))):
                changes[time] = changes.get(time, 0) + change
        total, course = 0, []
        for time in sorted(changes):
            if changes[time]:
                total += changes[time]
                course.append((time, total))
        return tuple(course)

    def peak_live(self) -> tuple[int, ...]:
        """By rank, the most forwards that are kept at once."""
        return tuple(max((count for _, count in self.live(rank)), default=0) for rank in range(len(self.spans)))


def checked_costs(costs: Costs, stages: int) -> dict[str, list[float]]:
    """Each cost by stage, and the message's once.  ``ValueError``, ``TypeError`` for costs that are none."""
    if not isinstance(costs, Mapping):
        if not isinstance(costs, list | tuple) or len(costs) != len(_NAMES):
            raise ValueError(f"costs are five numbers ({', '.join(_NAMES)}), or a mapping from these; got {costs!r}")
        costs = dict(zip(_NAMES, costs, strict=True))
    checked: dict[str, list[float]] = {}
    for name, value in costs.items():
        if name not in _NAMES:
            raise ValueError(f"costs are of {', '.join(_NAMES)}; got one of {name!r}")
        several = isinstance(value, list | tuple)
        numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * stages
        if len(numbers) != stages or (several and name == "message"):
            wanted = "one number" if name == "message" else f"a number, or one for each of {stages} stages"
            raise ValueError(f"the cost of {name} should be {wanted}; got {value!r}")
        for number in numbers:
            if isinstance(number, bool) or not hasattr(number, "__float__"):
                raise TypeError(f"the cost of {name} should be a number; got {number!r}")
            if not 0 <= number < float("inf"):
                raise ValueError(f"the cost of {name} should be 0 or more and finite; got {number!r}")
        checked[name] = numbers
    if "B" not in checked and "I" in checked and "W" in checked:
        checked["B"] = [i + w for i, w in zip(checked["I"], checked["W"], strict=True)]
    return {"message": [0], **checked}


def timeline(schedule: Schedule, costs: Costs) -> ScheduleTimeline:
    """See `Schedule.timeline`."""
    by_kind = checked_costs(costs, schedule.stages)
    strange = next((work for row in schedule.works for work in row if not 0 <= work.stage < schedule.stages), None)
    if strange:
        raise ValueError(f"schedule {schedule.name!r}: {strange} is of stage {strange.stage}; it has {schedule.stages}")
    absent = {work.kind for row in schedule.works for work in row} - {*by_kind, *MESSAGES}
    if absent:
        raise ValueError(f"costs should have one of {', '.join(sorted(absent))}; got {', '.join(by_kind)}")
    return _Clock(schedule, by_kind).run()


class _Clock:
    """Goes through the ranks' orders; a rank that has to wait is taken up again when what it waits for is done."""

    def __init__(self, schedule: Schedule, costs: dict[str, list[float]]) -> None:
        self.schedule, self.costs, self.message = schedule, costs, costs["message"][0]
        self.done: dict[tuple[int, str, int], float] = {}
        self.free: list[float] = [0] * schedule.ranks
        self.starts: list[list[float]] = [[] for _ in schedule.works]
        self.waiting: dict[Action, list[int]] = {}

    def run(self) -> ScheduleTimeline:
        ready = list(range(self.schedule.ranks))
        while ready:
            self.advance(ready.pop(), ready)
        self.check_finished()
        spans, steps = [], []
        for row, works, starts in zip(self.schedule.actions, self.schedule.works, self.starts, strict=True):
            time_of = dict(zip(works, starts, strict=True))
            steps.append(tuple(time_of[step.works[0]] for step in row))
            spans.append(tuple(
                Span(work, start, start + self.costs[work.kind][work.stage])
                for work, start in time_of.items() if work.kind in KINDS
            ))
        return ScheduleTimeline(self.schedule, tuple(spans), tuple(steps))

    def advance(self, rank: int, ready: list[int]) -> None:
        """Goes on with the rank until something is not there."""
        works, starts = self.schedule.works[rank], self.starts[rank]
        while len(starts) < len(works):
            work = works[len(starts)]
            stage, kind, k = work
            start = self.free[rank]
            for need in self.needs(work):
                time = self.when(need, rank)
                if time is None:
                    self.waiting.setdefault(self.awaited(need), []).append(rank)
                    return
                if time > start:
                    start = time
            starts.append(start)
            self.free[rank] = end = start + self.costs[kind][stage] if kind in KINDS else start
            for part in parts(kind):
                self.done[stage, part, k] = end
                if self.waiting:
                    ready += self.waiting.pop(Action(stage, part, k), ())

    def needs(self, work: Action) -> list[Action]:
        """What holds the rank up before it: a message is not waited for where it is received, but where it is used."""
        return [] if work.kind[0] == "R" else self.schedule.needs(work)

    def when(self, need: Action, rank: int) -> float | None:
        """The time from which the rank has what it needs; None if that is not known yet."""
        source = self.awaited(need)
        if source not in self.done:
            return None
        if source is not need:
            return max(self.done[source] + self.message, self.done[need])
        by_message = need.kind in KINDS and self.schedule.placement[need.stage] != rank
        return self.done[need] + self.message if by_message else self.done[need]

    def awaited(self, need: Action) -> Action:
        """What has to happen for a need: for a receive that has been reached, the send."""
        return need.needs[0] if need.kind[0] == "R" and need in self.done else need

    def check_finished(self) -> None:
        """``ValueError`` if there are ranks that could not go on, with what each waits for."""
        waiting = []
        for rank, works in enumerate(self.schedule.works):
            if len(self.starts[rank]) < len(works):
                work = works[len(self.starts[rank])]
                step, entry = next((i, e) for i, e in enumerate(self.schedule.actions[rank]) if work in e.works)
                need = next(need for need in self.needs(work) if self.when(need, rank) is None)
                waiting.append(f"rank {rank} waits at step {step} ({entry}) for {as_in(self.awaited(need), work)}")
        if waiting:
            raise ValueError(f"schedule {self.schedule.name!r} cannot go on: {'; '.join(waiting)}")
