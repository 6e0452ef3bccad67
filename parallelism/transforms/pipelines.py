"""Pipelines: a training step is cut into stages, which work on microbatches in the order of a schedule."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from parallelism.display.quantities import short_errors
from parallelism.ir.core import Function, Value, names_in
from parallelism.ir.passes.gradients import DELAYED, GRADIENT
from parallelism.ir.text.parsing import parse
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.stages import Stages
from parallelism.layouts.stages.joint_sums import JointSums
from parallelism.layouts.stages.partition import partition
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline as Scheduled
from parallelism.pipelining.generators import SCHEDULES
from parallelism.sharding import TensorSharding
from parallelism.shared_results import shared
from parallelism.transforms.dims import axes_of, dims_of, layout, without
from parallelism.transforms.parts import NEXT, Parts, needed
from parallelism.transforms.recomputation import Recompute, RunAgain
from parallelism.transforms.words import ScheduleWord, checked_axis, word
from parallelism.transforms.zero import summed_first

REPLICAS = "dp"
"""The axis over which the rows are dealt to replicas of a pipeline if no transform splits them."""


NAMED = 3
"""The most unused parameters that are named."""


class UnusedParameters(UserWarning):
    """A pipeline trains parameters that the loss does not depend on."""


def warn_of_unused(parts: Parts, stacklevel: int) -> None:
    """Gives `UnusedParameters` if the loss of a step depends on some of its parameters in no way."""
    forward = parts.forward
    read = {value for op in needed(forward.ops, forward.outputs[:1]) for value in op.inputs}
    unused = [value.name for value in parts.parameters if value not in read]
    if unused:
        more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
        warnings.warn(
            f"the loss of @{parts.name} does not depend on %{', %'.join(unused[:NAMED])}{more}: a pipeline updates "
            "unused parameters with gradients of zero, as one device does",
            UnusedParameters,
            stacklevel=stacklevel,
        )


@dataclass(frozen=True)
class Pipeline:
    """The step is cut into stages on ``axis``, which work on ``microbatches`` parts of the batch by a ``schedule``.

    The program must have a symbol ``batch`` for the rows, because the parts need not be equal.  Each rank of the axis
    has ``chunks`` stages, cut for equal flops; ``begin`` names the regions or values at which stages begin instead.
    With ``recompute`` a stage keeps only its inputs; regions run again by a `Recompute` in the same `Strategy`.  The
    result is a `Step`, so a pipeline is the last transform.

    ``meshes`` are those inside the stages, one for each rank of the axis, if they differ: ``[Mesh(dp=2, tp=2),
    Mesh(dp=3)]`` has stages on 4 and on 3 devices.  The step then runs on a mesh of 7 devices, whatever its axes; an
    axis that a mesh lacks has one device there.  Values that go from stage to stage are sent by the overlaps of their
    blocks.  All axes are inside: the gradients of each microbatch are summed in its backward.

    Gradients are summed over replicas after the last backward, by the update of each stage: Zero(1) and Zero(2) then
    reduce-scatter them once, whatever the number of microbatches.  With Zero(3) the axis is inside the stages: for
    each microbatch the parameters are gathered in the forward and again in the backward, and the gradients are
    reduce-scattered.  The norm for clipping is a sum over the stages, an all_reduce of one number; a parameter that
    several stages have is counted once.

    Parameters that the loss does not depend on are updated with a gradient of zero, as without a pipeline; a warning,
    `UnusedParameters`, names them.

    ``shares`` say in what relation the replicas have rows, if not equally many: ``(1, 3)`` gives the second replica three
    times those of the first.  Each has as many microbatches, whose sizes then differ.

    ``ValueError`` for a program without an update, for values that are computed again by `Recompute`, and for an
    update that combines parameters in any other way than by a sum of one number of each.
    """

    axis: str = "pp"
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    begin: tuple[str, ...] = ()
    batch: str = "B"
    recompute: bool = False
    meshes: tuple[Mesh, ...] = ()
    shares: tuple[int, ...] = ()
    phase: ClassVar[int] = 90

    def __post_init__(self) -> None:
        checked_axis(self)
        object.__setattr__(self, "begin", tuple(self.begin))
        object.__setattr__(self, "meshes", tuple(self.meshes))
        object.__setattr__(self, "shares", self._checked_shares())
        for mesh in self.meshes:
            if not isinstance(mesh, Mesh) or self.axis in mesh.axes:
                raise ValueError(
                    f"meshes= must have the mesh inside each stage, without the axis {self.axis!r} of the pipeline; got "
                    f"{mesh!r}"
                )
        ranks = (len(self.begin) + 1) // self.chunks if self.begin else 2
        object.__setattr__(self, "schedule", self._scheduled(self.chunks * ranks).schedule.name)

    def _scheduled(self, stages: int) -> Scheduled:
        """The pipeline that is checked; ``ValueError`` for numbers that do not fit.

        One of our own schedules that fits one microbatch fits as many as anybody likes.
        """
        kind = SCHEDULES.find(self.schedule) if isinstance(self.schedule, str) else None
        is_ours = kind is not None and kind.name in SCHEDULES.own
        if is_ours and type(self.microbatches) is int and self.microbatches > 1:
            with suppress(ValueError):
                return Scheduled(stages, 1, self.schedule, self.chunks, self.axis)
        return Scheduled(stages, self.microbatches, self.schedule, self.chunks, self.axis)

    def __call__(self, function: Function) -> Step:
        if isinstance(function, Step):
            raise ValueError(f"{self}: the step is cut into a pipeline already, {function.pipeline}")
        return Step(function, self).warned()

    def _checked_shares(self) -> tuple[int, ...]:
        shares = tuple(self.shares)
        if any(isinstance(share, bool) or not isinstance(share, int) or share < 1 for share in shares):
            raise ValueError(f"the shares of replicas are whole numbers of at least 1; got {shares!r}")
        if shares and self.meshes:
            raise ValueError("stages with meshes of their own have no replicas, which shares are for")
        return shares

    def rows_of_replicas(self, rows: int, replicas: int) -> tuple[int, ...] | None:
        """The rows of each replica, of a batch of so many; None: they are dealt evenly.

        ``ValueError`` if the ``shares`` are not one for each replica, or do not divide the rows.
        """
        if not self.shares:
            return None
        whole = sum(self.shares)
        if len(self.shares) != replicas or rows % whole:
            raise ValueError(
                f"{self}: {len(self.shares)} shares, {whole} together, do not deal {rows} rows to {replicas} replicas"
            )
        return tuple(rows // whole * share for share in self.shares)

    def on(self, mesh: Mesh) -> Scheduled:
        """The stages and their schedule on a mesh.  ``ValueError`` if it lacks the axis."""
        if self.meshes:
            return self._on_own(mesh)
        if self.axis not in mesh.shape:
            raise ValueError(
                f"{self} needs an axis {self.axis!r}; the axes of {mesh!r} are "
                f"{', '.join(map(repr, mesh.axes))}"
            )
        stages = mesh.shape[self.axis] * self.chunks
        if self.begin and len(self.begin) + 1 != stages:
            raise ValueError(
                f"{self}: {len(self.begin) + 1} stages begin at the start and at "
                f"{', '.join(self.begin)}; {mesh!r} has place for {stages}"
            )
        return Scheduled(stages, self.microbatches, self.schedule, self.chunks, self.axis)

    @property
    def of_all(self) -> Mesh | None:
        """A mesh of all devices, if the stages have meshes of their own."""
        return Mesh(devices=sum(each.size for each in self.meshes)) if self.meshes else None

    def position(self, mesh: Mesh, rank: int) -> int:
        """The position in the pipeline of a rank of ``mesh``, on which the step runs."""
        if not self.meshes:
            return mesh.index(rank)[self.axis]
        return bisect_right([*accumulate(each.size for each in self.meshes)], rank)

    def _on_own(self, mesh: Mesh) -> Scheduled:
        """`on` if the stages have meshes of their own, which together have as many devices as ``mesh``."""
        stages = len(self.meshes) * self.chunks
        size = sum(each.size for each in self.meshes)
        if mesh.size != size:
            raise ValueError(
                f"{self} needs {size} devices, {' + '.join(str(each.size) for each in self.meshes)}; "
                f"{mesh!r} has {mesh.size}"
            )
        if self.begin and len(self.begin) + 1 != stages:
            raise ValueError(
                f"{self}: {len(self.begin) + 1} stages begin at the start and at "
                f"{', '.join(self.begin)}; its meshes have place for {stages}"
            )
        return Scheduled(stages, self.microbatches, self.schedule, self.chunks, self.axis)

    def __str__(self) -> str:
        meshes = []
        for mesh in self.meshes:
            meshes.append(".".join(f"{axis}={n}" for axis, n in mesh.shape.items()))
        schedule = ScheduleWord(
            self.schedule,
            self.microbatches,
            self.chunks,
            self.recompute,
            self.batch,
            "|".join(meshes),
            "|".join(map(str, self.shares)),
        )
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
            raise ValueError(
                f"{subject}: @{self.function.name} has no optimizer; train_step(loss, optimizer) makes a "
                "training step of it"
            )
        if parts.again:
            raise ValueError(
                f"{subject}: @{self.function.name} computes regions again already; Recompute and Pipeline "
                "must be in one Strategy"
            )
        if self.pipeline.axis in self.split:
            raise ValueError(
                f"{subject}: %{self.split[self.pipeline.axis]} of @{self.function.name} is split over "
                f"{self.pipeline.axis!r}, too; the axis of the stages has no other role"
            )
        if self.recompute and self.pipeline.recompute:
            raise ValueError(f"{subject}: whole stages run again, so {self.recompute[0]} has nothing to do")
        _ = self.again
        if self.pipeline.batch not in parts.forward.symbols:
            raise ValueError(
                f"{subject}: @{self.function.name} has no symbol {self.pipeline.batch} for the rows of "
                f"the batch: its symbols are {', '.join(sorted(parts.forward.symbols)) or 'none'}"
            )
        _ = self._sums

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Step)
            and (self.pipeline, self.recompute, self.parts) == (other.pipeline, other.recompute, other.parts)
        )

    def __hash__(self) -> int:
        return hash((self.function.name, self.pipeline, self.recompute))

    def with_recompute(self, recompute: tuple[Recompute, ...]) -> Step:
        """The step of which this runs again, in place of what does now; all else that is known of it stays known."""
        made = object.__new__(Step)
        made.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name != "again"}, recompute=recompute
        )
        made.__post_init__()
        return made

    @classmethod
    @short_errors
    def parse(cls, text: str) -> Step:
        """The step whose ``str`` this is."""
        from parallelism.transforms.strategy import Strategy

        first, _, rest = text.partition("\n")
        *others, pipeline = Strategy.parse(first).transforms or (None,)
        recompute = tuple(each for each in others if isinstance(each, Recompute))
        if not isinstance(pipeline, Pipeline) or len(recompute) < len(others):
            raise ValueError(
                "the text of a step begins with its pipeline and what runs again, such as pp 1f1b:8 "
                f"recompute=block.*, got {first!r}"
            )
        return cls(parse(f"\n{rest}"), pipeline, recompute)  # so that errors name the line of the whole text

    def __str__(self) -> str:
        return f"{' '.join(map(str, (self.pipeline, *self.recompute)))}\n{self.function}"

    @cached_property
    def parts(self) -> Parts:
        """The forward and the update."""
        return Parts.of(self.function)

    def warned(self) -> Step:
        """The step itself.  Gives `UnusedParameters` at the line that has a transform called."""
        warn_of_unused(self.parts, stacklevel=4)
        return self

    @property
    def sum_dtypes(self) -> dict[str, np.dtype[Any]]:
        """The dtypes in which gradients are added up, by the names of their parameters."""
        return {value.name.removeprefix(GRADIENT): value.type.dtype for value in self.parts.gradients}

    @cached_property
    def split(self) -> dict[str, str]:
        """The axes of its layouts, each with the name of a value that is split over it."""
        parts = self.parts
        values = [*parts.forward.values, *parts.gradients, *parts.state]
        return {axis: value.name for value in reversed(values) if value.layout for axis in value.layout.axes}

    @cached_property
    def replicas(self) -> tuple[str, ...]:
        """The axes over which the rows are dealt to replicas of the pipeline, outermost first.

        They are those that split rows and no parameter.  (An axis that splits parameters, as with Zero(3), is inside a
        stage.)  If no axis splits rows, it is ``dp``.  Stages with meshes of their own have none.
        """
        if self.pipeline.meshes:
            return ()
        parts = self.parts
        weights = {*parts.weights}
        rows = dict.fromkeys(
            axis
            for value in parts.forward.inputs
            if value not in weights
            for extent, axes in zip(value.type.shape, dims_of(value), strict=True)
            if self.pipeline.batch in names_in(extent)
            for axis in axes
        )
        inside = axes_of(*weights)
        return tuple(axis for axis in rows if axis not in inside) if rows else (REPLICAS,)

    def stages(self, count: int) -> Stages:
        """The forward and backward of each of so many stages, for one of the `replicas`."""
        pipeline, function = self.pipeline, self.of_one_replica
        cut = pipeline.begin or count
        trained = tuple([value.name for value in self.parts.parameters])
        return shared(
            "stages",
            lambda: partition(
                function,
                cut,
                batch=pipeline.batch,
                recompute=pipeline.recompute,
                trained=trained,
                rewritten=self.again,
            ),
            by=(function, cut, pipeline.batch, pipeline.recompute, trained, self.again),
        )

    @cached_property
    def of_one_replica(self) -> Function:
        """The forward, whose layouts lie on the axes inside a stage alone; without layouts if there are none of these."""
        forward = self.parts.forward
        given = [value for value in forward.values if value.layout]
        dims = {value.name: without(dims_of(value), self.replicas) for value in given}
        if not any(chain.from_iterable(dims.values())) and not any(
            op.kind == "reshard" for op in forward.ops
        ):
            return laid_out(forward, dict.fromkeys(dims))
        return laid_out(forward, {name: layout(own) for name, own in dims.items()})

    @cached_property
    def again(self) -> RunAgain | None:
        """The parts of the forward that backwards run again; None without recomputation."""
        paths, kept = list[str](), list[str]()
        for recompute in self.recompute:
            again = recompute.of(self.parts.forward)
            paths += again.paths
            kept += again.kept
        return RunAgain(tuple(paths), tuple(kept)) if self.recompute else None

    def update(
        self,
        names: Collection[str],
        layouts: Mapping[str, TensorSharding] | None = None,
        *,
        replicas: Sequence[str] = (),
        pending: Mapping[str, Sequence[str]] | None = None,
        counted: Collection[str] | None = None,
        stages: int = 1,
    ) -> Function:
        """The update of the parameters of these ``names``, from their gradients and their state.

        ``layouts`` are those of the parameters inside a stage, where they are known.  With ``replicas`` the gradients
        are given as terms of a sum over these axes, and the update begins with the sums; ``pending`` has more axes of
        such a sum, those inside a stage, by the names of parameters.  A number that depends on all gradients is a sum
        over so many ``stages`` on the axis of the pipeline, to which this one adds the terms of the parameters that are
        ``counted`` here (None: all ``names``).
        """
        outputs = self._outputs_of_update(names)
        function = self._sums.of_one_stage(
            outputs, names if counted is None else counted, self.pipeline.axis, stages
        )
        kept = {value.name.removeprefix(NEXT) for value in outputs}
        inputs = self._inputs_of_update(kept.union(value.name for value in function.inputs))
        function = replace(function, name=f"{self.function.name}.update", inputs=tuple(inputs))
        owners = {value.name: self.owners[value.name] or value.name for value in inputs}

        near = {value.name for value in function.values}.union(kept, owners.values())
        given = {name: laid for name in near if (laid := self._layouts.get(name)) is not None}
        if layouts:
            given |= {name: layouts[name] for name in names if name in layouts}
        for value in inputs:
            usual = given.get(owners[value.name]) or TensorSharding.replicated(value.type.ndim)
            given.setdefault(value.name, usual)
        given |= {f"{NEXT}{name}": given[name] for name in kept}

        terms: dict[str, TensorSharding] = {}
        """The layouts of gradients that are given as terms of a sum, or in another layout than they are used in."""
        for value in inputs:
            if value not in self._gradients:
                continue
            # What a stage adds up has the layout of its parameter, although the update may have it split.
            owner = owners[value.name]
            over = (*replicas, *(pending or {}).get(owner, ()))
            if over or given[value.name].dims != given[owner].dims:
                op = "max" if owner.startswith(DELAYED) else "sum"
                terms[value.name] = TensorSharding(*given[owner].dims, partial=over, op=op)
        if terms:
            early = {value.name for op in function.ops if op.kind == "reshard" for value in op.inputs}
            function = summed_first(function, {name: given[name] for name in terms if name not in early})
            given |= terms
        known = {value.name for value in function.values}
        return laid_out(function, {name: kept for name, kept in given.items() if name in known})

    def _inputs_of_update(self, names: Collection[str]) -> list[Value]:
        """The inputs of the whole update that have these names, in its order."""
        assert self.parts.update is not None
        places = sorted(place for name, place in self._given_to_update.items() if name in names)
        return [self.parts.update.inputs[place] for place in places]

    def _outputs_of_update(self, names: Collection[str]) -> list[Value]:
        """What the update makes of these parameters, and of no parameter, in the order of the program."""
        found: list[tuple[int, Value]] = []
        for owner in {None, *names}:
            found += self._updated.get(owner, ())
        return [value for _, value in sorted(found, key=itemgetter(0))]

    @property
    def sums_over_stages(self) -> bool:
        """Whether the update needs numbers of all stages."""
        return bool(self._sums.terms)

    @cached_property
    def _sums(self) -> JointSums:
        update = self.parts.update
        assert update is not None
        try:
            return JointSums.of(update, self.owners)
        except ValueError as error:
            raise ValueError(f"{self.pipeline}: {error}") from None

    @cached_property
    def _updated(self) -> dict[str | None, list[tuple[int, Value]]]:
        """The outputs of the update by their owners, each with its place."""
        found: dict[str | None, list[tuple[int, Value]]] = {}
        for place, value in enumerate(self.parts.update.outputs if self.parts.update else ()):
            found.setdefault(self.owners[value.name], []).append((place, value))
        return found

    @cached_property
    def _given_to_update(self) -> dict[str, int]:
        """The places of the inputs of the update, by name."""
        inputs = self.parts.update.inputs if self.parts.update else ()
        return {value.name: place for place, value in enumerate(inputs)}

    @cached_property
    def _gradients(self) -> frozenset[Value]:
        return frozenset(self.parts.gradients)

    @cached_property
    def _layouts(self) -> dict[str, TensorSharding | None]:
        return self.parts.layouts()

    @cached_property
    def owners(self) -> dict[str, str | None]:
        """The parameter that each input and output of the update belongs to, by name; None: all."""
        parts = self.parts
        own: dict[str, str | None] = {value.name: value.name for value in parts.parameters}
        own |= {value.name: parts.owner(value) for value in (*parts.copies, *parts.state)}
        own |= {f"{NEXT}{name}": owner for name, owner in own.items()}
        return own | {value.name: value.name.removeprefix(GRADIENT) for value in parts.gradients}
