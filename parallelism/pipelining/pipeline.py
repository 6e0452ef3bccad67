"""A `Pipeline` is a number of stages, a number of microbatches and a schedule; a `PipelineStage` is one of its stages.

`parallelism.pipelining.actions` defines actions, `parallelism.pipelining.schedule` their order.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from operator import index
from typing import SupportsIndex

from parallelism.display import shortened
from parallelism.pipelining.actions import Action, Overlapped, Written
from parallelism.pipelining.generators import SCHEDULES, ScheduleKind
from parallelism.pipelining.generators.kinds import spelt
from parallelism.pipelining.schedule import Schedule, counts
from parallelism.pipelining.timing import SLOTS
from parallelism.spelling import closest, explains_keywords

__all__ = ["Action", "Overlapped", "Pipeline", "PipelineStage", "Schedule", "Status"]

Given = str | Schedule | Callable[..., Iterable[Written]] | Iterable[Iterable[Written]]
"""The forms in which `Pipeline` accepts a schedule."""


class Status(Enum):
    """The work of a stage in a cycle.  The backwards for input and for weights are both BACKWARD.

    >>> from parallelism import Pipeline, PipelineStage
    >>> PipelineStage(Pipeline(stages=2, microbatches=3), 1).status(0)
    (<Status.IDLE: 'idle'>, None)
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"


@dataclass(frozen=True, init=False)
class Pipeline:
    """A model in ``stages``, a batch in ``microbatches``, and the order of actions along mesh axis ``axis``.

    >>> pipeline = Pipeline(stages=2, microbatches=3, schedule="gpipe")
    >>> " ".join(map(str, pipeline.actions(1)))
    '1F0 1F1 1F2 1B0 1B1 1B2'

    ``schedule`` is a name (case, ``_`` and ``-`` do not matter; torch's class names work, too) or a custom schedule: a
    `Schedule`, its csv, a list of actions for each rank, or a function ``(rank, ranks, microbatches)`` (and ``chunks``,
    if there are several) that yields a rank's actions.  A custom schedule is validated.  Each rank has ``chunks``
    stages; the default is the number that the schedule needs.  ``ValueError`` if the numbers do not fit.
    """

    stages: int
    microbatches: int
    schedule: Schedule
    chunks: int
    axis: str

    @explains_keywords("Pipeline")
    def __init__(
        self,
        stages: int,
        microbatches: int,
        schedule: Given = "1f1b",
        chunks: int | None = None,
        axis: str = "pp",
    ) -> None:
        sizes = counts(
            stages=stages, microbatches=microbatches, **({} if chunks is None else {"chunks": chunks})
        )
        if chunks is not None and stages % chunks:
            below = stages // chunks * chunks
            would = f"{below} or {below + chunks} can" if below else f"{chunks} can"
            raise ValueError(f"{stages} stages cannot be split over ranks in chunks of {chunks}; {would}")
        built = _built(schedule, sizes["stages"], sizes["microbatches"], sizes.get("chunks"))
        for name, size in sizes.items():
            if (own := getattr(built, name)) != size:
                raise ValueError(f"schedule {built.name!r} has {name}={own}, the pipeline {name}={size}")
        is_tested = isinstance(schedule, str) and built.name in SCHEDULES.own
        if not is_tested:
            built.validate()
        for key, value in {**sizes, "schedule": built, "chunks": built.chunks, "axis": axis}.items():
            object.__setattr__(self, key, value)

    @property
    def ranks(self) -> int:
        """The number of ranks along the axis of the pipeline: ``stages / chunks``."""
        return self.schedule.ranks

    @property
    def adds_up(self) -> bool:
        """Whether gradients are added up: of several microbatches, or of a backward that leaves some to its other half."""
        return self.microbatches > 1 or any(
            action.kind == "W" for works in self.schedule.works for action in works
        )

    def with_microbatches(self, count: int) -> "Pipeline | None":
        """The pipeline with so many microbatches; None if its schedule is not one that is known by its name."""
        if self.schedule.name not in SCHEDULES:
            return None
        return Pipeline(self.stages, count, self.schedule.name, self.chunks, self.axis)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of the rank at this position of the axis, in order.

        The two actions of an overlapped pair follow each other, forward first; ``schedule.actions`` has the pairs.
        ``ValueError`` for a position that the axis does not have.
        """
        if not isinstance(rank, SupportsIndex):
            raise TypeError(
                f"a rank of the pipeline is an integer, its position on axis {self.axis!r}; got {rank!r}"
            )
        position = index(rank)
        if not 0 <= position < self.ranks:
            raise ValueError(
                f"the pipeline has ranks 0 to {self.ranks - 1}, got {position}; a rank is a position on axis "
                f"{self.axis!r}, as device.position({self.axis!r}) gives"
            )
        return self.schedule.works[position]

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
    """One stage of a pipeline, and its work in each cycle.

    >>> from parallelism import Pipeline, PipelineStage
    >>> stage = PipelineStage(Pipeline(stages=2, microbatches=3), 1)
    >>> stage.rank, [stage.status(cycle) for cycle in (0, 1, 2)]
    (1, [(<Status.IDLE: 'idle'>, None), (<Status.FORWARD: 'forward'>, 0), (<Status.BACKWARD: 'backward'>, 0)])
    """

    pipeline: Pipeline
    stage: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.pipeline.stages:
            raise ValueError(f"the pipeline has stages 0 to {self.pipeline.stages - 1}, got {self.stage}")

    @property
    def rank(self) -> int:
        """The rank that has the stage."""
        return self.pipeline.schedule.placement[self.stage]

    def status(self, cycle: int) -> tuple[Status, int | None]:
        """The work of the stage in a cycle, and its microbatch.  Every action takes one cycle, messages none."""
        return self._work.get(cycle, (Status.IDLE, None))

    @cached_property
    def _work(self) -> dict[int, tuple[Status, int | None]]:
        work: dict[int, tuple[Status, int | None]] = {}
        for (stage, kind, microbatch), start, _ in self.pipeline.schedule.timeline(SLOTS).spans[self.rank]:
            if stage == self.stage:
                work[int(start)] = Status.FORWARD if kind == "F" else Status.BACKWARD, microbatch
        return work


def _built(given: Given, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    """The schedule of these sizes, from any of the accepted forms."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, str):
        is_csv = {",", "\n"} & set(given)
        return Schedule.from_csv(given) if is_csv else _named(given, stages, microbatches, chunks)
    if callable(given):
        chunks = 1 if chunks is None else chunks
        rows = _generated(given, stages // chunks, microbatches, chunks)
        return Schedule(getattr(given, "__name__", "own"), rows, stages, microbatches, chunks)
    if not isinstance(given, Iterable):
        raise TypeError(
            f"a schedule must be a name, a Schedule, csv, lists of actions or a function, got {shortened(given)}"
        )
    rows = list(given)
    return Schedule("own", rows, stages, microbatches, chunks or max(1, stages // max(1, len(rows))))


def _named(given: str, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    """The schedule of this name, in any accepted spelling."""
    kind = SCHEDULES.find(given)
    if kind is None:
        raise ValueError(
            f"unknown schedule {shortened(given)}{_hint(given)} (known: {', '.join(map(repr, SCHEDULES))})"
        )
    chunks = kind.fewest_chunks if chunks is None else chunks
    kind.check_stages(stages, chunks)
    return _of_kind(kind, stages, microbatches, chunks)


def _hint(given: str) -> str:
    """A suggestion for a name that no schedule has; empty if none is near."""
    by_spelling = SCHEDULES.by_spelling()
    near = closest(spelt(given), by_spelling, cutoff=0.5)
    return "" if near is None else f"; did you mean {by_spelling[near].name!r}?"


@lru_cache(maxsize=4)  # a plan makes the same schedule several times; one may have a million actions
def _of_kind(kind: ScheduleKind, stages: int, microbatches: int, chunks: int) -> Schedule:
    actions = _generated(kind.generator, stages // chunks, microbatches, chunks)
    return Schedule(
        kind.name,
        actions,
        stages,
        microbatches,
        chunks,
        training=kind.training,
        weights=kind.weights,
        local=kind.local,
    )


def _generated(
    generator: Callable[..., Iterable[Written]], ranks: int, microbatches: int, chunks: int
) -> list[Iterable[Written]]:
    """The actions of each rank; the generator is told the number of ``chunks`` if there are several."""
    more = [chunks] if chunks > 1 else []
    return [generator(rank, ranks, microbatches, *more) for rank in range(ranks)]
