"""A `Schedule` is the order of actions on every rank of a pipeline, as a value to print, check, time and run.

A model is cut into stages, a batch into microbatches.  An action may run after the actions that it needs:

    F  needs the F of the previous stage      B, I  need their own F, and the B or I of the next stage
    W  needs its own I                        B     is I and W in one

A schedule may also list messages (``SEND_F`` and so on).  Then it lists all of them, and their order is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain

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
    """The actions of every rank, in order.  Each rank has ``chunks`` stages, so ``ranks * chunks == stages``.

    >>> schedule = Schedule("mine", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], 2, 2)
    >>> schedule.validate()
    >>> print(schedule)
    mine: 2 stages on 2 ranks, 2 microbatches; 6 cycles, 33% idle
    cycle   0  1  2  3  4  5
    rank 0  F0 F1 .  B0 .  B1
    rank 1  .  F0 B0 F1 B1 .

    Actions may be given as text.  Without ``training`` there are only forwards.  ``weights`` says which version of the
    weights the actions use: ``"one"`` version, updated at the flush; ``"stashed"`` versions, updated after every
    microbatch, where a backward uses the version of its forward; ``"double_buffered"``, updated at the flush and used
    one step later.  With ``local`` every stage has its own loss, and no backward waits for another stage's.  A schedule
    is frozen and hashable.  ``ValueError`` for an invalid action and for sizes that do not fit each other.  `validate`
    checks whether the order can run.
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
        self,
        name: str,
        actions: Iterable[Iterable[Written]],
        stages: int,
        microbatches: int,
        chunks: int = 1,
        *,
        training: bool = True,
        weights: str = "one",
        local: bool = False,
    ) -> None:
        rows = tuple(tuple(map(as_step, row)) for row in actions)
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(map(repr, WEIGHTS))}; got {weights!r}")
        sizes = counts(stages=stages, microbatches=microbatches, chunks=chunks)
        values = {
            "name": name,
            "actions": rows,
            **sizes,
            "training": training,
            "weights": weights,
            "local": local,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        if len(rows) * chunks != stages:
            raise ValueError(
                f"schedule {name!r} has {len(rows)} ranks of {chunks} stages; that is not {stages} stages"
            )

    @classmethod
    def from_actions(
        cls,
        name: str,
        actions: Iterable[Iterable[Written]],
        *,
        training: bool = True,
        weights: str = "one",
        local: bool = False,
    ) -> Schedule:
        """The schedule with the stages and microbatches that the actions name.

        ``ValueError`` if the number of stages is not a multiple of the number of ranks.
        """
        rows = [[as_step(given) for given in row] for row in actions]
        works = [work for row in rows for step in row for work in step.works]
        stages, microbatches = len({work.stage for work in works}), len({work.microbatch for work in works})
        if not rows or stages % len(rows):
            raise ValueError(
                f"schedule {name!r} has {stages} stages, which {len(rows)} ranks cannot hold equally"
            )
        return cls(
            name,
            rows,
            stages,
            microbatches,
            stages // len(rows),
            training=training,
            weights=weights,
            local=local,
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage; -1 for a stage that no rank has, in an invalid schedule."""
        where = {work.stage: rank for rank, row in enumerate(self.works) for work in row}
        return tuple(where.get(stage, -1) for stage in range(self.stages))

    @cached_property
    def works(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank; the two of an overlapped pair follow each other."""
        rows = []
        for row in self.actions:
            rows.append(tuple(chain.from_iterable(step.works for step in row)))
        return tuple(rows)

    @cached_property
    def lists_messages(self) -> bool:
        """Whether the schedule lists messages."""
        return any(work.kind in MESSAGES for row in self.works for work in row)

    def passes_on(self, kind: str) -> bool:
        """Whether an action of this kind receives from one neighbouring stage and sends to the other."""
        return kind == "F" or (kind in ("B", "I") and not self.local)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must come before.  If messages are listed, the RECV replaces a need on another rank."""
        needs = [need for need in action.needs if need.stage < self.stages]
        if self.local and action.kind in ("B", "I"):
            return needs[:1]
        if self.lists_messages and action.kind in KINDS:
            received = action._replace(kind="RECV_F" if action.kind == "F" else "RECV_B")
            for i, need in enumerate(needs):
                if self.placement[need.stage] != self.placement[action.stage]:
                    needs[i] = received
        return needs

    def with_messages(self) -> Schedule:
        """The schedule with messages listed.

        A message is sent directly after the action that computes it, and received directly before the action that
        needs it.  The results of an overlapped pair are sent after both actions.
        """
        if self.lists_messages:
            return self
        rows = []
        for rank, row in enumerate(self.actions):
            entries: list[Step] = []
            for step in row:
                entries += *self._messages("RECV", step, rank), step, *self._messages("SEND", step, rank)
            rows.append(tuple(entries))
        return replace(self, actions=tuple(rows))

    def _messages(self, verb: str, step: Step, rank: int) -> Iterator[Action]:
        """The messages that an entry of a rank receives (``RECV``) or sends (``SEND``)."""
        for stage, kind, k in step.works:
            other = stage + 1 if (kind == "F") == (verb == "SEND") else stage - 1
            if self.passes_on(kind) and 0 <= other < self.stages and self.placement[other] != rank:
                yield Action(stage, f"{verb}_F" if kind == "F" else f"{verb}_B", k)

    def validate(self) -> None:
        """Raise ``ValueError`` unless every microbatch runs once forward and once backward through every stage.

        The error names the rank, the step and the action that is missing, doubled or too early.  If ranks wait for each
        other in a cycle, it names what each of them waits for.
        """
        schedule_validation.validate(self)

    # ---------------------------------------------------------------------------------------------- times

    def timeline(self, costs: Costs = UNIT_COSTS) -> ScheduleTimeline:
        """The start and end of every action, if each rank keeps its order and starts each action as early as possible.

        ``costs`` gives the seconds (or any unit) of ``F``, ``B``, ``I``, ``W`` and ``message``: five numbers, or a
        mapping to a number or to one number for each stage; of ``message`` to one for each stage but the last, for
        what passes between it and the next.  The defaults are ``I + W`` for ``B`` and 0 for ``message``; ``I`` and
        ``W`` may be left out if the schedule has none.  A message delays its receiver but does not occupy ranks; stages
        of one rank need no message.  ``ValueError`` for other costs, and if ranks wait for each other in a cycle.
        """
        return timeline(self, costs)

    def starts(self, lengths: Mapping[str, int] = SLOTS) -> tuple[tuple[int, ...], ...]:
        """The start of every action, by rank and step, if each kind takes its length and messages take no time."""
        return self.timeline(lengths).starts  # type: ignore[return-value]

    def makespan(self, lengths: Mapping[str, int] = SLOTS) -> int:
        """The time from the first start to the last end, as in `starts`."""
        return self.timeline(lengths).makespan  # type: ignore[return-value]

    def idle_fraction(self, lengths: Mapping[str, int] = SLOTS) -> float:
        """The bubble: the fraction of ranks x makespan in which nothing runs."""
        return self.timeline(lengths).bubble_fraction

    def peak_live(self) -> tuple[int, ...]:
        """For each rank, the largest number of forwards whose activations are kept at once, from F to B or W."""
        if not self.training:
            return (0,) * self.ranks
        changes = {"F": 1, "B": -1, "W": -1}
        peaks = []
        for row in self.works:
            live = accumulate((changes.get(work.kind, 0) for work in row), initial=0)
            peaks.append(max(live))
        return tuple(peaks)

    # ---------------------------------------------------------------------------------------------- as text

    def to_csv(self) -> str:
        """The schedule as csv, one line of actions for each rank: the format of ``torch.distributed.pipelining``."""
        return schedule_csv.write(self)

    @classmethod
    def from_csv(
        cls, text: str, name: str = "csv", *, training: bool = True, weights: str = "one", local: bool = False
    ) -> Schedule:
        """The schedule in a text of `to_csv` or of torch.  An empty cell is an idle slot and is ignored.

        The numbers of stages and microbatches are those that the text names.  ``ValueError`` names line and cell.
        """
        return cls.from_actions(
            name, schedule_csv.read(text, name), training=training, weights=weights, local=local
        )

    def to_svg(self, costs: Costs = UNIT_COSTS) -> str:
        """An SVG picture of the timeline under ``costs``."""
        from parallelism.pipelining import svg as schedule_svg

        return schedule_svg.svg([self.timeline(costs)])

    def __str__(self) -> str:
        return staircase.text(self)

    def _repr_html_(self) -> str:
        return self.timeline(UNIT_COSTS)._repr_html_()


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
