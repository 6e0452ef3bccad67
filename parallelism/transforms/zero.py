"""ZeRO: what data parallelism holds several times is split over its axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from parallelism.ir.core import Expression, Function, Op, Value
from parallelism.ir.core.derived import with_values
from parallelism.ir.operators import layout_text
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import Dims, axes_of, dims_of, layout
from parallelism.transforms.parts import UPDATE, Parts
from parallelism.transforms.words import checked_axis, word

STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Zero:
    """State, gradients and parameters are split over the ``axis`` of data parallelism, as far as ``stage`` says.

    Stage 1 splits the state of the optimizer: the gradients stay whole, and unsummed, until the update.  Stage 2 splits
    the gradients, too: each is reduce-scattered where the backward has made it.  Stage 3 splits the parameters, too:
    each is gathered before an op that reads it, in the forward and again in the backward.  Of the dims of a parameter
    that no axis splits it is the largest one that is split; if there is none, the outermost dim is split further.  A
    parameter that is split over the axis already, such as a device's own experts, is not split over it again.

    Where experts are split over another axis that splits the rows, too, that axis holds the other parameters several
    times as well: these are split over both axes, and experts over ``axis``, that of their own replicas.  An axis that
    splits the sequences (`ContextParallel`) holds all parameters several times: all are split over it, too.

    **Communication** and memory: Rajbhandari et al., *ZeRO*, 2020, arXiv:1910.02054, sections 5 and 7.  With P bytes of
    parameters and as many of gradients on n devices, a device receives 2 P (n - 1) / n in stages 1 and 2, and
    3 P (n - 1) / n in stage 3.  Of the state, of the gradients from stage 2 on and of the parameters in stage 3 it
    holds one n-th.

    ``ValueError`` for a program without an update, if no input is split over ``axis``, and if the state is split over
    it already.
    """

    stage: int
    axis: str = "dp"
    phase: ClassVar[int] = 50

    def __post_init__(self) -> None:
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise ValueError(f"the stage of Zero must be 1, 2 or 3, got {self.stage!r}")
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.update is None:
            raise ValueError(
                f"{self}: @{function.name} has no optimizer; train_step(loss, optimizer) makes a training "
                "step of it"
            )
        again = [value for value in (*parts.state, *parts.gradients) if self.axis in axes_of(value)]
        again += [value for op in parts.update.ops if op.kind == "reshard" for value in op.inputs]
        if all(self.axis in axes_of(value) for value in parts.parameters):
            again += parts.parameters
        if again:
            raise ValueError(
                f"{self}: %{again[0].name} of @{function.name} is split over {self.axis!r} already"
            )
        if self.axis not in axes_of(*parts.dealt):
            raise ValueError(
                f"{self}: no input of @{function.name} is split over {self.axis!r}, so no gradient is "
                f"summed over it; DataParallel comes before {self}, or both in one Strategy"
            )
        whole = {value.name: layout(dims_of(value)) for value in parts.weights}
        more = [*_axes_of_experts(parts), *self._axes_of_sequences(parts)]
        split = {value.name: layout(self._split(value, more)) for value in parts.weights}
        forward = split if self.stage == 3 else whole
        state = {value.name: split[owner] for value in parts.state if (owner := parts.owner(value))}
        gradients = {f"grad.{value.name}": split[value.name] for value in parts.parameters}
        if self.stage > 1:
            return parts.laid(forward, forward | state | gradients).joined()
        update = parts.laid(forward, forward | state)
        assert update.update is not None
        return replace(update, update=summed_first(update.update, gradients)).joined()

    def _split(self, value: Value, more: Sequence[str]) -> Dims:
        """The axes of the dims of a parameter that is split over those of this axis and of ``more`` that it lacks."""
        dims = dims_of(value)
        if not dims:
            return dims

        def extent(dim: int) -> int:
            n = value.type.shape[dim]
            if dims[dim]:
                return 0
            return 1 if isinstance(n, Expression) else n + 1

        chosen = max(range(len(dims)), key=lambda dim: (extent(dim), -dim))
        used = {*chain(*dims)}
        lacking = dict.fromkeys(axis for axis in (self.axis, *more) if axis not in used)
        dims[chosen] = (*dims[chosen], *lacking)
        return dims

    def _axes_of_sequences(self, parts: Parts) -> list[str]:
        """The axes, other than this one, that split the sequences of the batch."""
        found = dict.fromkeys(
            axis
            for value in parts.dealt
            for dim, axes in enumerate(dims_of(value))
            if parts.sequence is not None and parts.classes.of(value, dim) == parts.sequence
            for axis in axes
        )
        return [axis for axis in found if axis != self.axis]

    def __str__(self) -> str:
        return word("zero", self.axis, value=self.stage)


def _axes_of_experts(parts: Parts) -> list[str]:
    """The axes that split parameters and the rows of the batch: the devices along them have experts of their own."""
    rows = dict.fromkeys(
        axis
        for value in parts.dealt
        for dim, axes in enumerate(dims_of(value))
        if parts.classes.of(value, dim) == parts.rows
        for axis in axes
    )
    of_parameters = axes_of(*parts.weights)
    return [axis for axis in rows if axis in of_parameters]


def summed_first(update: Function, layouts: Mapping[str, TensorSharding]) -> Function:
    """The update with each gradient brought into its layout first: then its sum is pending until here."""
    summed = {
        value.name: Value(f"summed.{value.name}", value.type)
        for value in update.inputs
        if value.name in layouts
    }
    ops = [
        Op(
            "reshard",
            (value,),
            (("layout", layout_text(layouts[value.name])),),
            (summed[value.name],),
            UPDATE,
        )
        for value in update.inputs
        if value.name in summed
    ]
    rest = with_values(update, {value.name: summed.get(value.name, value) for value in update.values})
    return replace(update, ops=(*ops, *rest.ops), outputs=rest.outputs)
