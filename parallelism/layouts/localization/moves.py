"""Moves: the steps of a resharding plan as ops in the program of one device.

A step that moves one dim becomes the collective of that name, or a local ``all_slice``.  A step that moves several
dims, or permutes blocks, becomes a ``relayout`` op, whose attributes hold both layouts.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from parallelism.ir.core import Expression, Extent, Op, TensorType
from parallelism.ir.operators import layout_text
from parallelism.layouts.propagation import Axes, Devices
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep, plan_resharding
from parallelism.sharding import TensorSharding


@dataclass(frozen=True)
class Move:
    """One op of a resharding, in the form that is common to all devices."""

    kind: str
    axes: Axes
    after: TensorSharding
    """The layout after the op."""
    dim: int
    """The dim that is split or joined; for an all_to_all, the one that is split."""
    other: int
    """For an all_to_all, the dim that is joined."""
    step: ReshardingStep
    """The step that the op is a part of, on a mesh with only the axes of both layouts."""

    def attributes(
        self, whole: TensorType, devices: Devices, shape: tuple[Extent, ...], received: Extent
    ) -> dict[str, Any]:
        """The attributes of the op on a device whose shard has this ``shape`` afterwards."""
        common: dict[str, Any] = {"axes": self.axes, "group": devices.along(self.axes)}
        match self.kind:
            case "all_slice" | "all_gather":
                return {**common, "dim": self.dim, "extent": shape[self.dim]}
            case "reduce_scatter":
                return {**common, "dim": self.dim, "extent": shape[self.dim], "op": self.step.before.op}
            case "all_reduce":
                return {**common, "op": self.step.before.op}
            case "all_to_all":
                return {
                    **common,
                    "split_dim": self.dim,
                    "split_extent": shape[self.dim],
                    "concat_dim": self.other,
                    "concat_extent": shape[self.other],
                }
        return {
            **common,
            "step": self.step.kind,
            "before": layout_text(self.step.before),
            "after": layout_text(self.step.after),
            "whole": whole.shape,
            "shape": shape,
            "received": received,
        }


@lru_cache(maxsize=1 << 15)
def moves(
    source: TensorSharding, target: TensorSharding, type: TensorType, devices: Devices
) -> tuple[Move, ...]:
    """The ops that bring a value from one layout to another; empty if every device has its shard already.

    They are the steps of `plan_resharding` on the axes of both layouts.  But a sum over more axes than those that the
    target is then split over is a reduce_scatter over these and an all_reduce of the parts over the others: one
    communication more, and fewer bytes (Zhao et al., *PyTorch FSDP*, 2023, arXiv:2304.11277, section 3.2.2).

    If extents or numbers of devices are symbols, the plan is made for a few devices and extents that divide evenly;
    ``ValueError`` if the plan then has a step that symbols cannot describe.
    """
    middle = _scattered(source, target)
    if middle is not None:
        return moves(source, middle, type, devices) + moves(middle, target, type, devices)
    axes = {*source.axes, *source.partial, *target.axes, *target.partial}
    mesh = Mesh(**{axis: n for axis, n in devices.stand_in.shape.items() if axis in axes} or {"": 1})
    shape = []
    for extent, before, after in zip(type.shape, source.dims, target.dims, strict=True):
        if isinstance(extent, Expression) or _symbolic(before.axes + after.axes, devices):
            extent = 4 * mesh.size
        shape.append(extent)
    plan = plan_resharding(source, target, shape, type.dtype, mesh)
    ops = [move for step in plan.steps for move in _of_step(step)]
    if tuple(shape) != type.shape or _symbolic(tuple(axes), devices):
        for move in ops:
            if move.kind == "relayout":
                raise ValueError(
                    f"{source.short()} -> {target.short()} of {type} on {devices}: the step "
                    f"{move.step.kind} ({move.step.moved}) needs numbers in place of symbols"
                )
    return tuple(ops)


def step_of(op: Op, mesh: Mesh) -> ReshardingStep:
    """The resharding step that a ``relayout`` op runs, on the mesh of its device."""
    before, after = (TensorSharding.parse(op[name]).over(len(op["whole"])) for name in ("before", "after"))
    return ReshardingStep(
        op["step"],
        tuple(op["axes"]),
        before,
        after,
        tuple(op["whole"]),
        op.inputs[0].type.dtype.itemsize,
        mesh,
    )


def _scattered(source: TensorSharding, target: TensorSharding) -> TensorSharding | None:
    """The layout between the two halves of a sum over more axes than the target is split over; else None."""
    split = [axis for axis in source.partial if axis in target.axes]
    left = tuple(axis for axis in source.partial if axis not in split)
    if not split or {*left} == {*target.partial}:
        return None
    for before, after in zip(source.dims, target.dims, strict=True):
        if before.axes != tuple(axis for axis in after.axes if axis not in split):
            return None
    return TensorSharding(*target.dims, partial=left, op=source.op)


def _symbolic(axes: Axes, devices: Devices) -> bool:
    return any(isinstance(devices.shape[axis], Expression) for axis in axes)


def _of_step(step: ReshardingStep) -> list[Move]:
    grown, shrunk = step.grown, step.shrunk
    match step.kind:
        case "all_reduce":
            return [Move("all_reduce", step.axes, step.after, 0, 0, step)]
        case "all_gather" if len(shrunk) == 1:
            return [Move("all_gather", step.axes, step.after, shrunk[0], 0, step)]
        case "reduce_scatter" if len(grown) == 1:
            return [Move("reduce_scatter", step.axes, step.after, grown[0], 0, step)]
        case "all_to_all":
            return [Move("all_to_all", step.axes, step.after, grown[0], shrunk[0], step)]
        case "slice":
            return _slices(step)
    return [Move("relayout", step.axes, step.after, 0, 0, step)]


def _slices(step: ReshardingStep) -> list[Move]:
    """One ``all_slice`` for each dim that is split; empty if every device has its shard already."""
    before, after = step.before, step.after
    pairs = list(zip(before.dims, after.dims, strict=True))
    kept = before.partial == after.partial and all(
        new.axes[: len(old.axes)] == old.axes for old, new in pairs
    )
    if not kept:
        same = before.partial == after.partial and all(
            before.slices(step.shape, step.mesh, rank) == after.slices(step.shape, step.mesh, rank)
            for rank in range(step.mesh.size)
        )
        return [] if same else [Move("relayout", step.axes, after, 0, 0, step)]
    slices, dims = [], list(before.dims)
    for d, (old, new) in enumerate(pairs):
        if new != old:
            dims[d] = new
            layout = TensorSharding(*dims, partial=before.partial, op=before.op)
            slices.append(Move("all_slice", new.axes[len(old.axes) :], layout, d, 0, step))
    return slices
