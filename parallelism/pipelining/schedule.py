"""`Schedule`: what every rank of a pipeline does, in which order, as a value to look at, to check, to time and to run.

A model is cut into stages, a batch into microbatches.  An action may run when what it needs is there:

    F  the F of the stage before              B, I  its own F, and the B or I of the stage after
    W  its own I                              B     is I and W in one

What passes between ranks may be listed too (``SEND_F`` and so on); then it is all there, and the order is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from parallelism.pipelining import (
    csv_text as schedule_csv,
    text_picture as staircase,
    validation as schedule_validation,
)
from parallelism.pipelining.actions import KINDS, MESSAGES, Action, Step, Written, as_step
from parallelism.pipelining.timing import SLOTS, UNIT_COSTS, Costs, ScheduleTimeline, timeline

WEIGHTS = ("one", "stashed", "double_buffered")


@dataclass(frozen=True, init=False)
class Schedule:
    """The actions of every rank, in order.  Each rank holds ``chunks`` stages, so ``ranks * chunks == stages``.

    >>> schedule = Schedule("mine", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], 2, 2)
    >>> schedule.validate()
    >>> print(schedule)
    mine: 2 stages on 2 ranks, 2 microbatches; 6 cycles, 33% idle
    cycle   0  1  2  3  4  5
    rank 0  F0 F1 .  B0 .  B1
    rank 1  .  F0 B0 F1 B1 .

    Actions may be given as text.  Without ``training`` there are forwards only.  ``weights`` says which the work is
    done with: ``"one"`` version, changed at the flush; ``"stashed"`` ones, changed after every microbatch, whose
    backward has those that its forward had; ``"double_buffered"``, changed at the flush and used a step later.  With
    ``local`` every stage has a loss of its own, and no backward waits for another stage's.  Frozen and hashable.
    ``ValueError`` for an action that is none and for sizes that do not fit each other; whether the order can be run
    is asked of `validate`.
    """

    name: str
    actions: tuple[tuple[Step, ...], ...] = field(repr=False)
    stages: int
    microbatches: int
    chunks: int = 1
    training: bool = True
    weights: str = "one"
    local: bool = False

    def __init__(
        self, name: str, actions: Iterable[Iterable[Written]], stages: int, microbatches: int, chunks: int = 1, *,
        training: bool = True, weights: str = "one", local: bool = False,
    ) -> None:
        rows = tuple(tuple(map(as_step, row)) for row in actions)
        if weights not in WEIGHTS:
            raise ValueError(f"weights of a schedule are {', '.join(map(repr, WEIGHTS))}; got {weights!r}")
        sizes = counts(stages=stages, microbatches=microbatches, chunks=chunks)
        rest = {"training": training, "weights": weights, "local": local}
        for key, value in {"name": name, "actions": rows, **sizes, **rest}.items():
            object.__setattr__(self, key, value)
        if len(rows) * chunks != stages:
            raise ValueError(f"schedule {name!r} has {len(rows)} ranks of {chunks} stages; that is not {stages} stages")

    @classmethod
    def from_actions(
        cls, name: str, actions: Iterable[Iterable[Written]], *, training: bool = True, weights: str = "one",
        local: bool = False,
    ) -> Schedule:
        """With as many stages and microbatches as the actions speak of.  ``ValueError`` if ranks cannot share them."""
        rows = [[as_step(given) for given in row] for row in actions]
        works = [work for row in rows for step in row for work in step.works]
        stages, microbatches = (len({work[i] for work in works}) for i in (0, 2))
        if not rows or stages % len(rows):
            raise ValueError(f"schedule {name!r} has {stages} stages, which {len(rows)} ranks cannot hold equally")
        return cls(
            name, rows, stages, microbatches, stages // len(rows), training=training, weights=weights, local=local)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank on which each stage lies; -1 for one that a broken schedule has nowhere."""
        where = {work.stage: rank for rank, row in enumerate(self.works) for work in row}
        return tuple(where.get(stage, -1) for stage in range(self.stages))

    @cached_property
    def works(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank, those of an overlapped pair one after the other."""
        return tuple(tuple(chain.from_iterable(step.works for step in row)) for row in self.actions)

    @cached_property
    def lists_messages(self) -> bool:
        """Whether what passes between ranks stands among the actions."""
        return any(work.kind in MESSAGES for row in self.works for work in row)

    def passes_on(self, kind: str) -> bool:
        """Whether an action of this kind takes something from one neighbouring stage, and gives to the other."""
        return kind == "F" or (kind in ("B", "I") and not self.local)

    def needs(self, action: Action) -> list[Action]:
        """What must be done before; where messages are listed, what comes from another rank comes by one."""
        found = [need for need in action.needs if need.stage < self.stages]
        if self.local and action.kind in ("B", "I"):
            return found[:1]
        if self.lists_messages and action.kind in KINDS:
            here, received = self.placement[action.stage], "RECV_F" if action.kind == "F" else "RECV_B"
            return [
                need if self.placement[need.stage] == here else action._replace(kind=received) for need in found
            ]
        return found

    def with_messages(self) -> Schedule:
        """The same with its messages listed: sent as soon as they are made, received just before they are needed.

        What an overlapped pair makes is sent after both.
        """
        if self.lists_messages:
            return self
        rows: list[list[Step]] = []
        for rank, row in enumerate(self.actions):
            rows.append([])
            for step in row:
                for stage, kind, k in step.works:
                    before = stage - 1 if kind == "F" else stage + 1
                    if self.passes_on(kind) and 0 <= before < self.stages and self.placement[before] != rank:
                        rows[-1].append(Action(stage, "RECV_F" if kind == "F" else "RECV_B", k))
                rows[-1].append(step)
                for stage, kind, k in step.works:
                    after = stage + 1 if kind == "F" else stage - 1
                    if self.passes_on(kind) and 0 <= after < self.stages and self.placement[after] != rank:
                        rows[-1].append(Action(stage, "SEND_F" if kind == "F" else "SEND_B", k))
        return Schedule(
            self.name, rows, self.stages, self.microbatches, self.chunks, training=self.training, weights=self.weights,
            local=self.local)

    def validate(self) -> None:
        """Raises ``ValueError`` unless every microbatch goes once forward and once backward through every stage.

        The error names the rank, the step and the action that is missing, doubled or too early, or, where
        ranks wait for each other in a circle, what each of them waits for.
        """
        schedule_validation.validate(self)

    # ---------------------------------------------------------------------------------------------- the clock

    def timeline(self, costs: Costs = UNIT_COSTS) -> ScheduleTimeline:
        """When every action starts and ends if each rank keeps its order and starts as soon as it can.

        ``costs`` has the seconds (or any unit) of ``F``, ``B``, ``I``, ``W`` and ``message``: a mapping, in which each
        is a number or a number for each stage, or five numbers.  ``B`` may be left out if it is ``I + W``, ``I`` and
        ``W`` if there are none, ``message`` if it is 0.  A message takes no time of its ranks'; between stages of one
        rank there is none.  ``ValueError`` for other costs, and if the schedule cannot go on.
        """
        return timeline(self, costs)

    def starts(self, lengths: Mapping[str, int] = SLOTS) -> tuple[tuple[int, ...], ...]:
        """When every action starts, by rank and step, if each kind takes its length and a message no time."""
        return self.timeline(lengths).starts  # type: ignore[return-value]

    def makespan(self, lengths: Mapping[str, int] = SLOTS) -> int:
        """The time from the first start to the last end, as in `starts`."""
        return self.timeline(lengths).makespan  # type: ignore[return-value]

    def idle_fraction(self, lengths: Mapping[str, int] = SLOTS) -> float:
        """The bubble: the part of ranks x makespan in which nothing runs."""
        return self.timeline(lengths).bubble_fraction

    def peak_live(self) -> tuple[int, ...]:
        """By rank, the most forwards whose activations are kept at once: from their F to their B or W."""
        if not self.training:
            return (0,) * self.ranks
        peaks = []
        for row in self.works:
            live = peak = 0
            for work in row:
                live += {"F": 1, "B": -1, "W": -1}.get(work.kind, 0)
                peak = max(peak, live)
            peaks.append(peak)
        return tuple(peaks)

    # ---------------------------------------------------------------------------------------------- as text

    def to_csv(self) -> str:
        """A line for each rank, the actions with commas between: the format of ``torch.distributed.pipelining``."""
        return schedule_csv.write(self)

    @classmethod
    def from_csv(
        cls, text: str, name: str = "csv", *, training: bool = True, weights: str = "one", local: bool = False
    ) -> Schedule:
        """The schedule written by `to_csv` or by torch; an empty cell is an idle slot and is passed over.

        Stages and microbatches are as many as there are different ones.  ``ValueError`` names line and cell.
        """
        rows = schedule_csv.read(text, name)
        return cls.from_actions(name, rows, training=training, weights=weights, local=local)

    def to_svg(self, costs: Costs = UNIT_COSTS) -> str:
        """A picture for a page, to the scale of ``costs``."""
        from parallelism.pipelining import svg as schedule_svg

        return schedule_svg.svg(self.timeline(costs))

    def __str__(self) -> str:
        return staircase.text(self)

    def _repr_html_(self) -> str:
        return staircase.html(self)


def counts(**sizes: int) -> dict[str, int]:
    """The sizes as checked integers, by name."""
    checked = {}
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        checked[name] = size.__index__()
    return checked
