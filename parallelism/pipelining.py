"""What every rank of a pipeline does, in which order: `Schedule`, a value to look at, to check and to run.

A model is cut into stages, a batch into microbatches.  A `Schedule` lists, for each rank, its `Action`s:
``2F0`` is the forward of microbatch 0 on stage 2.  An action may run when what it needs is there:

    F  the F of the stage before              B, I  its own F, and the B or I of the stage after
    W  its own I                              B     is I and W in one

`Pipeline` names a schedule for so many stages and microbatches; `PipelineStage` tells what one stage does when.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from parallelism import staircase
from parallelism.schedules import SCHEDULES

KINDS = ("F", "B", "I", "W")
"""Forward; whole backward; backward for the input; backward for the weights."""

SLOTS: Mapping[str, int] = MappingProxyType(dict.fromkeys(KINDS, 1))
"""Every action takes one slot: the time in which schedules are drawn."""


class Action(NamedTuple):
    """One piece of work: ``str(Action(2, "F", 0)) == "2F0"``, and `parse` is the way back."""

    stage: int
    kind: str
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as stage, kind and microbatch; ``ValueError`` if it is none."""
        match = re.fullmatch(r"\s*([0-9]+)([A-Z])([0-9]+)\s*", text)
        if not match or match[2] not in KINDS:
            kinds = ", ".join(KINDS)
            raise ValueError(f"an action is a stage, a kind ({kinds}) and a microbatch, as in '2F0'; got {text!r}")
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def needs(self) -> tuple[Action, ...]:
        """What must be done before, the stage after the last one aside; an ``I`` may be done as part of a ``B``."""
        stage, kind, k = self
        if kind == "F":
            return (Action(stage - 1, "F", k),) if stage else ()
        if kind == "W":
            return (Action(stage, "I", k),)
        return Action(stage, "F", k), Action(stage + 1, "I", k)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


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

    Actions may be given as text.  Frozen and hashable.  ``ValueError`` for an action that is none and for sizes
    that do not fit each other; whether the order can be run is asked of `validate`.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    stages: int
    microbatches: int
    chunks: int = 1

    def __init__(
        self, name: str, actions: Sequence[Sequence[Action | str]], stages: int, microbatches: int, chunks: int = 1
    ) -> None:
        rows = tuple(tuple(Action.parse(a) if isinstance(a, str) else Action(*a) for a in row) for row in actions)
        sizes = _counts(stages=stages, microbatches=microbatches, chunks=chunks)
        for key, value in {"name": name, "actions": rows, **sizes}.items():
            object.__setattr__(self, key, value)
        if len(rows) * chunks != stages:
            raise ValueError(f"schedule {name!r} has {len(rows)} ranks of {chunks} stages; that is not {stages} stages")

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank on which each stage lies."""
        where = {action.stage: rank for rank, row in enumerate(self.actions) for action in row}
        return tuple(where[stage] for stage in range(self.stages))

    # ------------------------------------------------------------------------------------------------ checks

    def validate(self) -> None:
        """Raises ``ValueError`` unless every microbatch goes once forward and once backward through every stage.

        The error names the rank, the step and the action that is missing, doubled or too early, or, where
        ranks wait for each other in a circle, what each of them waits for.
        """
        place = self._places()
        for rank, row in enumerate(self.actions):
            for step, action in enumerate(row):
                for need in self._needs(action):
                    at, word = self._at(rank, step), _as_in(need, action)
                    if need not in place:
                        holder = self.placement[need.stage]
                        raise ValueError(f"{at}: {action} needs {word}, which is missing on rank {holder}")
                    owner, when = place[need]
                    if owner == rank and when > step:
                        raise ValueError(f"{at}: {action} is too early; {word} comes at step {when}")
        for stage, rank in enumerate(self.placement):
            for k in range(self.microbatches):
                lacking = [kind for kind in "FIW" if (stage, kind, k) not in place]
                if lacking:
                    kind = "B" if lacking == ["I", "W"] else lacking[0]
                    end = self._at(rank, len(self.actions[rank]))
                    raise ValueError(f"{end}, the end: {Action(stage, kind, k)} is missing")
        self.starts()

    def _places(self) -> dict[tuple[int, str, int], tuple[int, int]]:
        """Rank and step of every action, a B under I and W; what is wrong with an action by itself is raised here."""
        place: dict[tuple[int, str, int], tuple[int, int]] = {}
        owner: dict[int, int] = {}
        for rank, row in enumerate(self.actions):
            for step, action in enumerate(row):
                stage, kind, k = action
                at = f"{self._at(rank, step)}: {action}"
                if kind not in KINDS:
                    raise ValueError(f"{at} is of kind {kind!r}; the kinds are {', '.join(KINDS)}")
                for noun, number, count in (("stage", stage, self.stages), ("microbatch", k, self.microbatches)):
                    if not 0 <= number < count:
                        raise ValueError(f"{at} is of {noun} {number}; the schedule has {count}, counted from 0")
                if owner.setdefault(stage, rank) != rank:
                    raise ValueError(f"{at} runs stage {stage}, which lies on rank {owner[stage]}")
                for part in _parts(kind):
                    if (first := place.setdefault((stage, part, k), (rank, step))) != (rank, step):
                        raise ValueError(f"{at} is doubled; {self.actions[rank][first[1]]} was at step {first[1]}")
        for rank in range(self.ranks):
            held = sorted(stage for stage, holder in owner.items() if holder == rank)
            if len(held) != self.chunks:
                raise ValueError(f"schedule {self.name!r}, rank {rank} runs stages {held}, where chunks={self.chunks}")
        return place

    def _needs(self, action: Action) -> Iterator[Action]:
        return (need for need in action.needs if need.stage < self.stages)

    def _at(self, rank: int, step: int) -> str:
        return f"schedule {self.name!r}, rank {rank}, step {step}"

    # ---------------------------------------------------------------------------------------------- the clock

    def starts(self, lengths: Mapping[str, int] = SLOTS) -> tuple[tuple[int, ...], ...]:
        """When every action starts, by rank and step, if each kind takes its length and a message no time.

        A rank keeps its order and starts the next action as soon as what it needs is done.
        ``ValueError`` if the schedule cannot go on, with what each rank waits for.
        """
        done: dict[tuple[int, str, int], int] = {}
        starts: list[list[int]] = [[] for _ in self.actions]
        free = [0] * self.ranks
        moving = True
        while moving:
            moving = False
            for rank, row in enumerate(self.actions):
                while len(starts[rank]) < len(row):
                    action = row[len(starts[rank])]
                    needs = list(self._needs(action))
                    if any(need not in done for need in needs):
                        break
                    start = max([free[rank], *(done[need] for need in needs)])
                    free[rank] = start + lengths[action.kind]
                    done.update(((action.stage, part, action.microbatch), free[rank]) for part in _parts(action.kind))
                    starts[rank].append(start)
                    moving = True
        waiting = []
        for rank, row in enumerate(self.actions):
            if (step := len(starts[rank])) < len(row):
                need = next(need for need in self._needs(row[step]) if need not in done)
                waiting.append(f"rank {rank} waits at step {step} ({row[step]}) for {_as_in(need, row[step])}")
        if waiting:
            raise ValueError(f"schedule {self.name!r} cannot go on: {'; '.join(waiting)}")
        return tuple(map(tuple, starts))

    def makespan(self, lengths: Mapping[str, int] = SLOTS) -> int:
        """The time from the first start to the last end, as in `starts`."""
        # A rank's last action is the last to end there, for each starts after the one before.
        last = zip(self.actions, self.starts(lengths), strict=True)
        return max(times[-1] + lengths[row[-1].kind] for row, times in last if row)

    def idle_fraction(self, lengths: Mapping[str, int] = SLOTS) -> float:
        """The bubble: the part of ranks x makespan in which nothing runs."""
        busy = sum(lengths[action.kind] for row in self.actions for action in row)
        return 1 - busy / (self.ranks * self.makespan(lengths))

    def peak_live(self) -> tuple[int, ...]:
        """By rank, the most forwards whose activations are kept at once: from their F to their B or W."""
        peaks = []
        for row in self.actions:
            live = peak = 0
            for action in row:
                live += {"F": 1, "I": 0}.get(action.kind, -1)
                peak = max(peak, live)
            peaks.append(peak)
        return tuple(peaks)

    # ---------------------------------------------------------------------------------------------- as text

    def to_csv(self) -> str:
        """A line for each rank, the actions with commas between: the format of ``torch.distributed.pipelining``."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.actions)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """The schedule written by `to_csv` or by torch; an empty cell is an idle slot and is passed over.

        Stages and microbatches are as many as there are different ones.  ``ValueError`` names line and cell.
        """
        rows: list[list[Action]] = []
        for line, cells in enumerate(csv.reader(text.rstrip().splitlines()), start=1):
            try:
                rows.append([Action.parse(cell) for cell in cells if cell.strip()])
            except ValueError as error:
                raise ValueError(f"line {line} of schedule {name!r}: {error}") from None
            if not rows[-1]:
                raise ValueError(f"line {line} of schedule {name!r} has no action; it is the order of rank {line - 1}")
        if not rows:
            raise ValueError(f"schedule {name!r} is blank; a line of actions for each rank was expected")
        stages, microbatches = (len({action[i] for row in rows for action in row}) for i in (0, 2))
        if stages % len(rows):
            raise ValueError(f"schedule {name!r} has {stages} stages, which {len(rows)} ranks cannot hold equally")
        return cls(name, rows, stages, microbatches, stages // len(rows))

    def __str__(self) -> str:
        return staircase.text(self)

    def _repr_html_(self) -> str:
        return staircase.html(self)


class Status(Enum):
    """What a stage does in a cycle; the backwards for input and for weights are both BACKWARD."""

    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"


@dataclass(frozen=True, init=False)
class Pipeline:
    """A model in ``stages`` stages, a batch in ``microbatches``, and the order of the work on mesh axis ``axis``.

    >>> pipeline = Pipeline(stages=2, microbatches=3, schedule="gpipe")
    >>> " ".join(map(str, pipeline.actions(1)))
    '1F0 1F1 1F2 1B0 1B1 1B2'

    ``schedule`` is a name (case, ``_`` and ``-`` do not matter; torch's class names are known) or a `Schedule`,
    which is then validated; ``chunks`` stages lie on each rank.  ``ValueError`` where the numbers do not fit.
    """

    stages: int
    microbatches: int
    schedule: Schedule
    chunks: int
    axis: str

    def __init__(
        self, stages: int, microbatches: int, schedule: str | Schedule = "1f1b", chunks: int = 1, axis: str = "pp"
    ) -> None:
        sizes = _counts(stages=stages, microbatches=microbatches, chunks=chunks)
        if stages % chunks:
            raise ValueError(f"{stages} stages cannot be dealt to ranks in chunks of {chunks}")
        if isinstance(schedule, Schedule):
            for name, size in sizes.items():
                if getattr(schedule, name) != size:
                    own = getattr(schedule, name)
                    raise ValueError(f"schedule {schedule.name!r} has {name}={own}, the pipeline {name}={size}")
            schedule.validate()
        else:
            schedule = _named(schedule, **sizes)
        for key, value in {**sizes, "schedule": schedule, "axis": axis}.items():
            object.__setattr__(self, key, value)

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline takes on its axis: ``stages / chunks``."""
        return self.schedule.ranks

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What the rank at this position of the axis does, in order."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"the pipeline has ranks 0 to {self.ranks - 1}, got {rank}")
        return self.schedule.actions[rank]

    def __str__(self) -> str:
        return str(self.schedule)

    def __repr__(self) -> str:
        return (
            f"Pipeline(stages={self.stages}, microbatches={self.microbatches}, schedule={self.schedule.name!r}, "
            f"chunks={self.chunks}, axis={self.axis!r})"
        )

    def _repr_html_(self) -> str:
        return self.schedule._repr_html_()


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline, and what it does in which cycle."""

    pipeline: Pipeline
    stage: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.pipeline.stages:
            raise ValueError(f"the pipeline has stages 0 to {self.pipeline.stages - 1}, got {self.stage}")

    @property
    def rank(self) -> int:
        """The rank on which the stage lies."""
        return self.pipeline.schedule.placement[self.stage]

    def status(self, cycle: int) -> tuple[Status, int | None]:
        """What the stage does in a cycle, and for which microbatch; every action takes one cycle, messages none."""
        kind, microbatch = self._work.get(cycle, (None, None))
        if kind is None:
            return Status.IDLE, None
        return (Status.FORWARD if kind == "F" else Status.BACKWARD), microbatch

    @cached_property
    def _work(self) -> dict[int, tuple[str, int]]:
        schedule = self.pipeline.schedule
        timed = zip(schedule.starts()[self.rank], schedule.actions[self.rank], strict=True)
        return {cycle: (a.kind, a.microbatch) for cycle, a in timed if a.stage == self.stage}


def _named(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule of this name, however it is spelt."""
    if not isinstance(name, str):
        raise TypeError(f"a schedule is a name or a Schedule, got {name!r}")
    spelt = re.sub(r"[\s_-]", "", name).lower().removeprefix("schedule")
    known = {re.sub("_", "", key): key for key in SCHEDULES}
    if spelt not in known:
        close = [known[key] for key in difflib.get_close_matches(spelt, known, n=1, cutoff=0.5)]
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown schedule {name!r}{hint} (known: {', '.join(map(repr, SCHEDULES))})")
    if chunks != 1:
        raise ValueError(f"schedule {known[spelt]!r} puts one stage on each rank, got chunks={chunks}")
    order = SCHEDULES[known[spelt]]
    rows = [[Action(*step) for step in order(rank, stages, microbatches)] for rank in range(stages)]
    return Schedule(known[spelt], rows, stages, microbatches)


def _parts(kind: str) -> str:
    return "IW" if kind == "B" else kind


def _as_in(need: Action, action: Action) -> Action:
    """The need by the name that its reader expects: a B waits for a B, an I for an I."""
    return need._replace(kind=action.kind) if need.kind == "I" and action.kind == "B" else need


def _counts(**sizes: int) -> dict[str, int]:
    """The sizes as checked integers, by name."""
    checked = {}
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        checked[name] = size.__index__()
    return checked


