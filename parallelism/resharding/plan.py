"""How a tensor gets from one layout to another: a short list of moves, bounded in memory, as a value.

    print(plan_resharding(TensorSharding("x", None), TensorSharding(None, "x"), (8, 6), "f8", Mesh(x=2)))

    [x, None] -> [None, x] of float64 8x6 on Mesh(x=2): 192 bytes in 1 communication
      all_to_all  over x  dim 0 -> dim 1  4x6 -> 8x3  192 bytes

What a plan is chosen from is in `parallelism.resharding.moves`, how it is chosen in `parallelism.resharding.search`;
`parallelism.resharding.execute` runs it on devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Axes as MeshAxes, Mesh
from parallelism.resharding.axis_numbers import blocks_of, bundles, layout_of, leg_axes, names_of, singles, state_of
from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.distance import Leg
from parallelism.resharding.moves import State
from parallelism.resharding.search import cheapest_route
from parallelism.sharding import TensorSharding
from parallelism.sharding.partial import identity

if TYPE_CHECKING:
    from parallelism.hardware import Hardware

Shape = tuple[int, ...]
Names = tuple[str, ...]

KINDS = ("slice", "all_gather", "all_to_all", "permute", "reduce_scatter", "all_reduce", "exchange")
MOST_LAYOUTS = 16000
"""So many layouts are looked at; on meshes of six axes and more there may be others."""


@dataclass(frozen=True)
class ReshardingStep:
    """One move of a plan.

    ``slice``
        local: each rank keeps a part of its block; or, of a layout that becomes partial, its block or nothing
    ``all_gather, all_to_all, reduce_scatter, all_reduce``
        the collectives of these names over the groups along `axes`
    ``permute``
        whole blocks change hands
    ``exchange``
        each rank gets from each peer in its group along `axes` what it lacks of its new block
    """

    kind: str
    axes: tuple[str, ...]
    """The mesh axes over which it communicates, or by which it slices, the first the slowest."""
    before: TensorSharding
    after: TensorSharding
    shape: Shape
    """Of the whole tensor."""
    itemsize: int
    """Bytes of an element."""
    mesh: Mesh

    @cached_property
    def bytes_received(self) -> tuple[int, ...]:
        """What each rank receives from others, by the closed forms of the collectives, by rank."""
        blocks, before, after, axes = self._numbered
        group = prod(self.mesh.shape[axis] for axis in self.axes)
        match self.kind:
            case "slice":
                received = np.zeros(self.mesh.size, np.int64)
            case "reduce_scatter":
                received = (group - 1) * blocks.sizes(after.dims)
            case "all_reduce":
                elements = blocks.sizes(before.dims)
                least, more = np.divmod(elements, group)
                pieces = least + (blocks.index(axes) < more)
                received = (group - 2) * pieces + elements
            case "permute":
                received = blocks.moved(before, after)
            case _:
                received = blocks.sizes(after.dims) - blocks.overlap(before.dims, [after.dims])[0]
        return tuple((received * self.itemsize).tolist())

    @cached_property
    def donors(self) -> tuple[int, ...]:
        """Of a permute, by rank, the rank that its block comes from; itself where it has it, or gets nothing."""
        blocks, before, after, axes = self._numbered
        donors = blocks.donors(before, after, axes)
        assert donors is not None, "layouts with different pieces are no permutation of each other"
        return tuple(donors.tolist())

    @cached_property
    def local_bytes(self) -> tuple[int, ...]:
        """What each rank holds when it is done, by rank."""
        return _local_bytes(self.after, self.shape, self.itemsize, self.mesh)

    @property
    def shrunk(self) -> tuple[int, ...]:
        """The dims that are split over fewer axes than before."""
        return self._changed(1)

    @property
    def grown(self) -> tuple[int, ...]:
        """The dims that are split over more axes than before."""
        return self._changed(-1)

    def _changed(self, sign: int) -> tuple[int, ...]:
        _, before, after, _ = self._numbered
        pairs = enumerate(zip(before.dims, after.dims, strict=True))
        return tuple(d for d, (old, new) in pairs if sign * (len(old) - len(new)) > 0)

    @cached_property
    def _numbered(self) -> tuple[Blocks, State, State, Axes]:
        names = singles(self.mesh)
        axes = tuple(names.index((axis,)) for axis in self.axes)
        return blocks_of(self.shape, self.mesh, names), state_of(self.before, names), state_of(self.after, names), axes

    @property
    def moved(self) -> str:
        """What changes, in words: ``dim 0 -> dim 1``."""
        left, right = (", ".join(f"dim {d}" for d in dims) for dims in (self.shrunk, self.grown))
        match self.kind:
            case "slice" | "reduce_scatter" if right:
                return right
            case "all_gather":
                return left
            case "all_to_all":
                return f"{left} -> {right}"
            case "all_reduce":
                return self.before.op
        return f"{self.before.short()} -> {self.after.short()}"


Cost = Callable[[ReshardingStep], float]
"""What a step that communicates costs; the costs of a plan's steps are added up."""


@dataclass(frozen=True)
class ReshardingPlan:
    """The moves that bring a tensor of ``shape`` and ``dtype`` from ``source`` to ``target``; ``print`` it."""

    source: TensorSharding
    target: TensorSharding
    shape: Shape
    dtype: np.dtype[Any]
    mesh: Mesh
    steps: tuple[ReshardingStep, ...]

    @cached_property
    def bytes_received(self) -> tuple[int, ...]:
        """What each rank receives from others, by rank; a device's trace counts the same."""
        return tuple(map(sum, zip(*(step.bytes_received for step in self.steps), strict=True))) or (0,) * self.mesh.size

    @cached_property
    def held(self) -> tuple[Shape, ...]:
        """The local shapes that it starts from, by rank."""
        return tuple(self.source.local_shape(self.shape, self.mesh, rank) for rank in range(self.mesh.size))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The largest local array on the way, by rank, the first and the last included."""
        first = _local_bytes(self.source, self.shape, self.dtype.itemsize, self.mesh)
        return tuple(map(max, zip(first, *(step.local_bytes for step in self.steps), strict=True)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which anything moves, in the order of the mesh; ranks that differ elsewhere do not meet."""
        moving = {axis for step in self.steps if step.kind != "slice" for axis in step.axes}
        return tuple(axis for axis in self.mesh.axes if axis in moving)

    @property
    def communications(self) -> int:
        """How many steps communicate: all but slices."""
        return sum(step.kind != "slice" for step in self.steps)

    def __str__(self) -> str:
        count = self.communications
        head = (
            f"{self.source.short()} -> {self.target.short()} of {self.dtype}{_by(self.shape)} on {self.mesh!r}: "
            f"{sum(self.bytes_received)} bytes in {count} communication{'s' * (count != 1)}"
        )
        rows = [self._row(step) for step in self.steps] or [("nothing moves", "", "", "", "")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([head, *(f"  {line}".rstrip() for line in lines)])

    def _row(self, step: ReshardingStep) -> tuple[str, ...]:
        local = (layout.local_shape(self.shape, self.mesh, 0) for layout in (step.before, step.after))
        shapes = " -> ".join(_by(shape).strip() or "scalar" for shape in local)
        received = f"{sum(step.bytes_received)} bytes" if step.kind != "slice" else "local"
        return step.kind, f"over {', '.join(step.axes)}" if step.axes else "", step.moved, shapes, received

    def _repr_html_(self) -> str:
        head, *_ = str(self).splitlines()
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in self._row(step)) for step in self.steps)
        rows = "".join(f"<tr>{row}</tr>" for row in cells) or "<tr><td>nothing moves</td></tr>"
        return f"<table><caption>{escape(head)}</caption>{rows}</table>"


def plan_resharding(
    source: TensorSharding, target: TensorSharding, shape: Sequence[int], dtype: npt.DTypeLike, mesh: Mesh, *,
    axes: MeshAxes = None, cost: Cost | None = None, hardware: Hardware | str | None = None,
) -> ReshardingPlan:
    """The cheapest plan from ``source`` to ``target``, for a tensor of ``shape`` and ``dtype`` on ``mesh``.

    No rank's local array is ever larger than the larger of the largest ones of source and target.  Within that, the
    plan has the fewest communications, and of those with as few the fewest bytes received by all ranks together; with
    ``cost``, the least sum of what it says of the steps that communicate; with ``hardware``, a preset's name too, the
    fewest seconds there (`move_seconds`).  An ``exchange`` is in it only where no other moves fit.  Every pair of
    layouts has a plan; that of a layout to itself moves nothing.

    So plans are compared by exchanges, then communications, then bytes, and counted so it never costs less to go by way
    of a third layout that fits the same bound (on meshes of up to three axes, where nothing is guessed).  By
    communications and bytes alone it may: the two legs have less room each, and one may have to exchange where the
    straight way has room for other moves, dearer ones.

    ``axes`` are those along which anything may move (None: all of the mesh); the layouts name no others.  Ranks that
    differ along other axes may then hold different tensors, as the stages of a pipeline do.

    A partial source is reduced, bools by *or* and *and*.  For a partial target the first rank of each of its groups
    gets the value, the others the identity of its operation; over axes that both wait for with the same operation
    the terms stay as they are.

    ``ValueError`` for layouts that do not fit the shape or the mesh, and for what cannot be pending in this dtype.

    >>> plan = plan_resharding(TensorSharding("x", None), TensorSharding(None, "x"), (8, 6), "f8", Mesh(x=2))
    >>> [step.kind for step in plan.steps], plan.bytes_received, plan.peak_bytes
    (['all_to_all'], (96, 96), (192, 192))
    """
    extents, kind = tuple(int(n) for n in shape), np.dtype(dtype)
    names = mesh.axes if axes is None else tuple(axis for axis in mesh.axes if axis in mesh.axes_of(axes))
    source = _checked("source", source, extents, kind, mesh, names)
    target = _checked("target", target, extents, kind, mesh, names)
    if hardware is not None:
        if cost is not None:
            raise ValueError("a resharding is planned by cost= and hardware= only one at a time, got both")
        cost = _seconds_on(hardware)
    if cost is None:
        return _plan(source, target, extents, kind, mesh, names)
    return _planned(source, target, extents, kind, mesh, names, cost)


def _seconds_on(hardware: Hardware | str) -> Cost:
    from parallelism.cost import Costs  # every device imports this module, and few need that one
    from parallelism.hardware import Hardware
    from parallelism.resharding.prices import move_seconds

    return partial(move_seconds, Costs(Hardware.of(hardware)))


def _checked(
    name: str, layout: TensorSharding, shape: Shape, dtype: np.dtype[Any], mesh: Mesh, names: Names
) -> TensorSharding:
    """The layout, its ``...`` spelt out."""
    if not isinstance(layout, TensorSharding):
        raise TypeError(f"the {name} of a resharding is a TensorSharding, got {layout!r}")
    try:
        layout.slices(shape, mesh, 0)
        if layout.partial:
            identity(layout.op, dtype)
    except ValueError as error:
        raise ValueError(f"the {name} of a resharding: {error}") from None
    for axis in (*layout.axes, *layout.partial):
        if axis not in names:
            raise ValueError(f"the {name} of a resharding along {names}: {layout!r} names axis {axis!r}")
    return layout.over(len(shape))


@lru_cache(4096)
def _plan(
    source: TensorSharding, target: TensorSharding, shape: Shape, dtype: np.dtype[Any], mesh: Mesh, names: Names
) -> ReshardingPlan:
    return _planned(source, target, shape, dtype, mesh, names, None)


def _planned(
    source: TensorSharding, target: TensorSharding, shape: Shape, dtype: np.dtype[Any], mesh: Mesh, names: Names,
    cost: Cost | None,
) -> ReshardingPlan:
    drawn = _Drawn(source, target, shape, dtype.itemsize, mesh, names)
    return ReshardingPlan(source, target, shape, dtype, mesh, drawn.steps(cost))


class _Drawn:
    """The steps of one plan, from layouts to states and back."""

    def __init__(
        self, source: TensorSharding, target: TensorSharding, shape: Shape, itemsize: int, mesh: Mesh, allowed: Names
    ) -> None:
        self.source, self.target = source, target
        self.shape, self.itemsize, self.mesh = shape, itemsize, mesh
        self.axes = bundles(source, target, mesh, allowed)
        self.blocks = blocks_of(shape, mesh, self.axes)

    def steps(self, cost: Cost | None) -> tuple[ReshardingStep, ...]:
        first, last = state_of(self.source, self.axes), state_of(self.target, self.axes)
        same_op = self.source.op == self.target.op
        if not self.blocks.elements:
            legs = [] if first == last else [Leg("slice", first, last)]
        else:
            # a mask to another operation, or of what nothing waits for, comes last
            goal = last if same_op and first.partial else State(last.dims)
            price = None if cost is None else lambda leg: cost(self._step(leg))
            legs = cheapest_route(self.blocks, first, goal, limit=MOST_LAYOUTS, price=price)
            if goal != last:
                legs.append(Leg("slice", goal, last))
            legs = _merged(self.blocks, legs)
        steps = [self._step(leg) for leg in legs]
        for i, (leg, step) in enumerate(zip(legs, steps, strict=True)):
            before = self.source if leg is legs[0] else step.before
            after = self.target if leg is legs[-1] else step.after
            steps[i] = replace(step, before=before, after=after)
        return tuple(steps)

    def _step(self, leg: Leg) -> ReshardingStep:
        axes = names_of(leg_axes(leg, self.blocks), self.axes)
        before, after = (layout_of(state, self.source.op, self.axes) for state in (leg.before, leg.after))
        return ReshardingStep(leg.kind, axes, before, after, self.shape, self.itemsize, self.mesh)


_MERGED = ("slice", "all_gather", "all_reduce", "reduce_scatter")


def _merged(blocks: Blocks, legs: Sequence[Leg]) -> list[Leg]:
    """Consecutive moves of one kind as one; a permutation that moves nothing is a slice."""
    merged: list[Leg] = []
    for leg in legs:
        if leg.kind == "permute" and not blocks.moved(leg.before, leg.after).any():
            leg = Leg("slice", leg.before, leg.after)
        if merged and merged[-1].kind == leg.kind and leg.kind in _MERGED:
            leg = Leg(leg.kind, merged.pop().before, leg.after)
        merged.append(leg)
    return merged


def _local_bytes(layout: TensorSharding, shape: Shape, itemsize: int, mesh: Mesh) -> tuple[int, ...]:
    names = singles(mesh)
    sizes = blocks_of(shape, mesh, names).sizes(state_of(layout, names).dims) * itemsize
    return tuple(sizes.tolist())


def _by(shape: Shape) -> str:
    return f" {'x'.join(map(str, shape))}" if shape else ""
