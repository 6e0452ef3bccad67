"""Pipelines: a training step is cut into stages, which work on microbatches in the order of a schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.passes.gradients import GRADIENT
from parallelism.ir.text.parsing import parse
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.stages import Stages
from parallelism.layouts.stages.partition import partition
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline as Scheduled
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import dims_of, layout
from parallelism.transforms.parts import NEXT, Parts
from parallelism.transforms.recomputation import Recompute, RunAgain
from parallelism.transforms.words import ScheduleWord, checked_axis, word
from parallelism.transforms.zero import summed_first

REPLICAS = "dp"
"""The axis over which the rows are dealt to replicas of a pipeline."""


@dataclass(frozen=True)
class Pipeline:
    """The step is cut into stages on ``axis``, which work on ``microbatches`` parts of the batch by a ``schedule``.

    The program must have a symbol ``batch`` for the rows, because the parts need not be equal.  Each rank of the axis
    has ``chunks`` stages, cut for equal flops; ``begin`` names the regions or values at which stages begin instead.
    With ``recompute`` a stage keeps only its inputs; regions run again by a `Recompute` in the same `Strategy`.  The
    result is a `Step`, so a pipeline is the last transform.

    Gradients are summed over replicas (axis ``dp``) after the last backward, by the update of each stage: Zero(1) and
    Zero(2) then reduce-scatter them once, whatever the number of microbatches.

    ``ValueError`` for a program without an update, for rows that are split over another axis than ``dp``, for
    parameters that are split over ``dp`` (Zero(3)), for values that are computed again by `Recompute`, and for an
    update that needs the gradients of other stages, as clipping does.
    """

    axis: str = "pp"
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    begin: tuple[str, ...] = ()
    batch: str = "B"
    recompute: bool = False
    phase: ClassVar[int] = 90

    def __post_init__(self) -> None:
        checked_axis(self)
        object.__setattr__(self, "begin", tuple(self.begin))
        ranks = (len(self.begin) + 1) // self.chunks if self.begin else 2
        scheduled = Scheduled(self.chunks * ranks, self.microbatches, self.schedule, self.chunks, self.axis)
        object.__setattr__(self, "schedule", scheduled.schedule.name)

    def __call__(self, function: Function) -> Step:
        if isinstance(function, Step):
            raise ValueError(f"{self}: the step is cut into a pipeline already, {function.pipeline}")
        return Step(function, self)

    def on(self, mesh: Mesh) -> Scheduled:
        """The stages and their schedule on a mesh.  ``ValueError`` if it lacks the axis."""
        if self.axis not in mesh.shape:
            raise ValueError(f"{self} needs an axis {self.axis!r}; the axes of {mesh!r} are "
                             f"{', '.join(map(repr, mesh.axes))}")
        stages = mesh.shape[self.axis] * self.chunks
        if self.begin and len(self.begin) + 1 != stages:
            raise ValueError(f"{self}: {len(self.begin) + 1} stages begin at the start and at "
                             f"{', '.join(self.begin)}; {mesh!r} has place for {stages}")
        return Scheduled(stages, self.microbatches, self.schedule, self.chunks, self.axis)

    def __str__(self) -> str:
        schedule = ScheduleWord(self.schedule, self.microbatches, self.chunks, self.recompute, self.batch)
        return f"{word('pp', self.axis, self.begin)} {schedule}"


@dataclass(frozen=True)
class Step:
    """A training step and the pipeline that it is to be cut into; `parallelism.execution.TrainedPipeline` runs it.

    ``str`` and `parse` are inverse.  The function is the whole step: `parallelism.ir.interpret` runs it.
    """

    function: Function
    pipeline: Pipeline
    recompute: tuple[Recompute, ...] = ()
    """What runs again in the backward of each stage."""

    def __post_init__(self) -> None:
        parts, subject = self.parts, f"{self.pipeline}"
        if parts.update is None:
            raise ValueError(f"{subject}: @{self.function.name} has no optimizer; train_step(loss, optimizer) makes a "
                             "training step of it")
        if parts.again:
            raise ValueError(f"{subject}: @{self.function.name} computes regions again already; Recompute and Pipeline "
                             "must be in one Strategy")
        if self.recompute and self.pipeline.recompute:
            raise ValueError(f"{subject}: whole stages run again, so {self.recompute[0]} has nothing to do")
        _ = self._again
        if self.pipeline.batch not in parts.forward.symbols:
            raise ValueError(f"{subject}: @{self.function.name} has no symbol {self.pipeline.batch} for the rows of "
                             f"the batch: its symbols are {', '.join(sorted(parts.forward.symbols)) or 'none'}")
        for value in parts.parameters:
            if any(REPLICAS in axes for axes in dims_of(value)):
                raise ValueError(f"{subject}: %{value.name} is split over {REPLICAS!r}; in a pipeline Zero can split "
                                 "gradients and state, but not parameters")
        self._check_apart()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Step) and (self.pipeline, self.recompute, self.parts) == (
            other.pipeline, other.recompute, other.parts))

    def __hash__(self) -> int:
        return hash((self.function.name, self.pipeline, self.recompute))

    @classmethod
    def parse(cls, text: str) -> Step:
        """The step whose ``str`` this is."""
        from parallelism.transforms.strategy import Strategy

        first, _, rest = text.partition("\n")
        *others, pipeline = Strategy.parse(first).transforms or (None,)
        recompute = tuple(each for each in others if isinstance(each, Recompute))
        if not isinstance(pipeline, Pipeline) or len(recompute) < len(others):
            raise ValueError("the text of a step begins with its pipeline and what runs again, such as pp 1f1b:8 "
                             f"recompute=block.*, got {first!r}")
        return cls(parse(f"\n{rest}"), pipeline, recompute)        # so that errors name the line of the whole text

    def __str__(self) -> str:
        return f"{' '.join(map(str, (self.pipeline, *self.recompute)))}\n{self.function}"

    @cached_property
    def parts(self) -> Parts:
        """The forward and the update."""
        return Parts.of(self.function)

    def stages(self, count: int) -> Stages:
        """The forward and backward of each of so many stages.  The rows are split over no axis but those inside."""
        forward = self.parts.forward
        bare = {
            value.name: layout([tuple(axis for axis in dim if axis != REPLICAS) for dim in dims_of(value)])
            for value in forward.values if value.layout}
        pipeline = self.pipeline
        return partition(
            laid_out(forward, bare), [*pipeline.begin] or count, batch=pipeline.batch, recompute=pipeline.recompute,
            trained=[value.name for value in self.parts.parameters], rewritten=self._again)

    @cached_property
    def _again(self) -> RunAgain | None:
        each = [recompute.of(self.parts.forward) for recompute in self.recompute]
        if not each:
            return None
        return RunAgain(*(tuple(path for one in each for path in getattr(one, side)) for side in ("paths", "kept")))

    def update(
        self, names: Collection[str], layouts: Mapping[str, TensorSharding] | None = None, *, summed: bool = False
    ) -> Function:
        """The update of the parameters of these ``names``, from their gradients and their state.

        ``layouts`` are those of the parameters inside a stage, where they are known.  With ``summed`` the gradients are
        given as terms of a sum over replicas, and the update begins with the sums.
        """
        parts, own = self.parts, self._owners
        assert parts.update is not None
        outputs = [value for value in parts.update.outputs
                   if own[value.name.removeprefix(NEXT)] in names or own[value.name.removeprefix(NEXT)] is None]
        ops = self._needed(outputs)
        kept = {value.name.removeprefix(NEXT) for value in outputs}
        read = {value for op in ops for value in op.inputs}
        inputs = [value for value in parts.update.inputs if value in read or value.name in kept]
        function = Function(f"{self.function.name}.update", tuple(inputs), tuple(ops), tuple(outputs))
        given = {name: kept for name, kept in self._layouts.items() if kept is not None} | {
            name: kept for name, kept in (layouts or {}).items() if name in names}
        for value in inputs:
            of = own[value.name] or value.name
            given.setdefault(value.name, given.get(of) or TensorSharding.replicated(value.type.ndim))
        given |= {f"{NEXT}{name}": given[name] for name in kept}
        if summed:
            gradients = {*parts.gradients}
            terms = {value.name: value for value in inputs if value in gradients}
            early = {value.name for op in ops if op.kind == "reshard" for value in op.inputs}
            function = summed_first(function, {name: given[name] for name in terms if name not in early})
            given |= {name: _pending(given[own[name] or name]) for name in terms}
        known = {value.name for value in function.values}
        return laid_out(function, {name: kept for name, kept in given.items() if name in known})

    def _needed(self, outputs: Sequence[Value]) -> list[Op]:
        """The ops of the update that compute these values, in order."""
        assert self.parts.update is not None
        ops, open_values, places = self.parts.update.ops, [*outputs], set[int]()
        while open_values:
            place = self._makers.get(open_values.pop())
            if place is not None and place not in places:
                places.add(place)
                open_values += ops[place].inputs
        return [ops[place] for place in sorted(places)]

    @cached_property
    def _makers(self) -> dict[Value, int]:
        """The place of the op of the update that makes each value."""
        assert self.parts.update is not None
        return {value: place for place, op in enumerate(self.parts.update.ops) for value in op.outputs}

    @cached_property
    def _layouts(self) -> dict[str, TensorSharding | None]:
        return self.parts.layouts()

    @cached_property
    def _owners(self) -> dict[str, str | None]:
        """The parameter that each input of the update belongs to, by name; None: all."""
        parts = self.parts
        return {value.name: value.name for value in parts.parameters} | {
            value.name: value.name.removeprefix(GRADIENT) for value in parts.gradients} | {
            value.name: parts.owner(value) for value in parts.state}

    def _check_apart(self) -> None:
        """``ValueError`` if what is next of one parameter depends on inputs that belong to another."""
        update = self.parts.update
        assert update is not None
        behind: dict[Value, frozenset[str]] = {
            value: frozenset(filter(None, [self._owners[value.name]])) for value in update.inputs}
        for op in update.ops:
            joined = frozenset[str]().union(*(behind[value] for value in op.inputs))
            behind.update(dict.fromkeys(op.outputs, joined))
        for value in update.outputs:
            mine = self._owners[value.name.removeprefix(NEXT)]
            if others := behind[value] - {mine}:
                raise ValueError(f"{self.pipeline}: %{value.name} of @{self.function.name} depends on %{min(others)}, "
                                 "which another stage may have; in a pipeline gradients cannot be clipped together")


def _pending(kept: TensorSharding) -> TensorSharding:
    """The layout with a sum over replicas pending."""
    return TensorSharding(*kept.dims, partial=REPLICAS)
