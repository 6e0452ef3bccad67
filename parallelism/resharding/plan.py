"""Resharding plans: the moves that bring a tensor from one layout to another within a memory bound, as a value.

    print(plan_resharding(TensorSharding("x", None), TensorSharding(None, "x"), (8, 6), "f8", Mesh(x=2)))

    [x, None] -> [None, x] of float64 8x6 on Mesh(x=2): 192 bytes in 1 communication
      all_to_all  over x  dim 0 -> dim 1  4x6 -> 8x3  192 bytes

`parallelism.resharding.moves` defines the possible moves, `parallelism.resharding.search` searches for the cheapest
sequence, and `parallelism.resharding.execute` runs a plan on devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.display.quantities import in_columns, plural
from parallelism.dtypes import as_dtype
from parallelism.mesh import Axes as MeshAxes, Mesh
from parallelism.resharding.axis_numbers import (
    blocks_of,
    bundles,
    layout_of,
    leg_axes,
    names_of,
    singles,
    state_of,
)
from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.distance import Leg
from parallelism.resharding.moves import State
from parallelism.resharding.search import cheapest_route
from parallelism.sharding import TensorSharding
from parallelism.sharding.partial import identity

if TYPE_CHECKING:
    from parallelism.cost import Costs
    from parallelism.hardware import Hardware

Shape = tuple[int, ...]
Names = tuple[str, ...]

KINDS = ("slice", "all_gather", "all_to_all", "permute", "reduce_scatter", "all_reduce", "exchange")
MOST_LAYOUTS = 16000
"""The largest number of layouts that a search examines; meshes with six axes and more may have more."""


@dataclass(frozen=True)
class ReshardingStep:
    """One move of a plan.

    >>> import numpy as np
    >>> from parallelism import Mesh, TensorSharding, plan_resharding
    >>> plan = plan_resharding(TensorSharding("x", None), TensorSharding(None, None), (8, 6), np.float32, Mesh(x=2))
    >>> [(step.kind, step.axes, step.bytes_received) for step in plan.steps]
    [('all_gather', ('x',), (96, 96))]

    ``slice``
        local: each rank keeps a part of its block; if the layout becomes partial, its block or the identity
    ``all_gather, all_to_all, reduce_scatter, all_reduce``
        the collectives of these names over the groups along `axes`
    ``permute``
        each rank sends its whole block to one other rank
    ``exchange``
        each rank receives the missing parts of its new block from the peers in its group along `axes`
    """

    kind: str
    axes: tuple[str, ...]
    """The mesh axes over which the step communicates, or by which it slices; the first varies slowest."""
    before: TensorSharding
    """The layout before the step."""
    after: TensorSharding
    """The layout after the step."""
    shape: Shape
    """The shape of the whole tensor."""
    itemsize: int
    """The number of bytes of an element."""
    mesh: Mesh

    @cached_property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives from others, by the closed forms of the collectives, indexed by rank."""
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
                received = (group - 2) * (least + (blocks.index(axes) < more)) + elements
            case "permute":
                received = blocks.moved(before, after)
            case _:
                received = blocks.sizes(after.dims) - blocks.overlap(before.dims, [after.dims])[0]
        return tuple((received * self.itemsize).tolist())

    @cached_property
    def donors(self) -> tuple[int, ...]:
        """For a permute, the rank from which each rank gets its block; itself if it has the block or gets none."""
        blocks, before, after, axes = self._numbered
        donors = blocks.donors(before, after, axes)
        assert donors is not None, "layouts with different pieces are not permutations of each other"
        return tuple(donors.tolist())

    @cached_property
    def local_bytes(self) -> tuple[int, ...]:
        """The bytes that each rank holds after the step, indexed by rank."""
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
        return (
            blocks_of(self.shape, self.mesh, names),
            state_of(self.before, names),
            state_of(self.after, names),
            axes,
        )

    @property
    def moved(self) -> str:
        """The change in words, such as ``dim 0 -> dim 1``."""
        left = ", ".join(map("dim {}".format, self.shrunk))
        right = ", ".join(map("dim {}".format, self.grown))
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
"""The cost of a step that communicates.  The cost of a plan is the sum over its steps."""


@dataclass(frozen=True)
class ReshardingPlan:
    """The steps that bring a tensor of ``shape`` and ``dtype`` from ``source`` to ``target``; ``print`` it.

    >>> import numpy as np
    >>> from parallelism import Mesh, TensorSharding, plan_resharding
    >>> print(plan_resharding(TensorSharding("x", None), TensorSharding(None, "x"), (8, 6), np.float32, Mesh(x=2)))
    [x, None] -> [None, x] of float32 8x6 on Mesh(x=2): 96 bytes in 1 communication
      all_to_all  over x  dim 0 -> dim 1  4x6 -> 8x3  96 bytes
    """

    source: TensorSharding
    target: TensorSharding
    shape: Shape
    dtype: np.dtype[Any]
    mesh: Mesh
    steps: tuple[ReshardingStep, ...]

    @cached_property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives, indexed by rank.  A device's trace counts the same bytes."""
        return (
            tuple(map(sum, zip(*(step.bytes_received for step in self.steps), strict=True)))
            or (0,) * self.mesh.size
        )

    @cached_property
    def held(self) -> tuple[Shape, ...]:
        """The local shapes before the first step, indexed by rank."""
        return tuple(self.source.local_shape(self.shape, self.mesh, rank) for rank in range(self.mesh.size))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The bytes of the largest local array during the plan, indexed by rank, including the first and the last."""
        first = _local_bytes(self.source, self.shape, self.dtype.itemsize, self.mesh)
        return tuple(map(max, zip(first, *(step.local_bytes for step in self.steps), strict=True)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which data moves, in the order of the mesh.  Ranks along others do not interact."""
        moving = {axis for step in self.steps if step.kind != "slice" for axis in step.axes}
        return tuple(axis for axis in self.mesh.axes if axis in moving)

    @property
    def communications(self) -> int:
        """The number of steps that communicate: all steps except slices."""
        return sum(step.kind != "slice" for step in self.steps)

    def __str__(self) -> str:
        head = (
            f"{self.source.short()} -> {self.target.short()} of {self.dtype}{_by(self.shape)} on {self.mesh!r}: "
            f"{sum(self.bytes_received)} bytes in {plural(self.communications, 'communication')}"
        )
        rows = [self._row(step) for step in self.steps] or [("nothing moves",)]
        return "\n".join([head, *(f"  {line}" for line in in_columns(rows, len(rows[0])))])

    def _row(self, step: ReshardingStep) -> tuple[str, ...]:
        local = (layout.local_shape(self.shape, self.mesh, 0) for layout in (step.before, step.after))
        shapes = " -> ".join(_by(shape).strip() or "scalar" for shape in local)
        received = f"{sum(step.bytes_received)} bytes" if step.kind != "slice" else "local"
        return step.kind, f"over {', '.join(step.axes)}" if step.axes else "", step.moved, shapes, received

    def _repr_html_(self) -> str:
        from parallelism.display.markup import beside, figure, inside, note, table

        heads = ("step", "over", "what", "local shape", "received by all")
        steps = table(map(self._row, self.steps), heads, left=4) if self.steps else note("nothing moves")
        before, after = (
            inside(layout.draw(self.shape, self.mesh).html) for layout in (self.source, self.target)
        )
        return figure(steps, beside(before, after), title=str(self).splitlines()[0])


def plan_resharding(
    source: TensorSharding | str,
    target: TensorSharding | str,
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    mesh: Mesh,
    *,
    axes: MeshAxes = None,
    cost: Cost | None = None,
    hardware: Hardware | str | None = None,
) -> ReshardingPlan:
    """The cheapest plan from ``source`` to ``target``, for a tensor of ``shape`` and ``dtype`` on ``mesh``.

    A layout is a `TensorSharding` or its text, ``"[x, None]"``.
    No local array is ever larger than the largest local array of source or target.  Among the plans within this bound,
    the result has the fewest communications, and among these the fewest bytes received by all ranks together.  With
    ``cost`` it has the smallest sum of costs of the steps that communicate.  With ``hardware``, a `Hardware` or the
    name of a preset, it takes the fewest seconds there (`move_seconds`).  A plan has an ``exchange`` only if no
    other moves fit the bound.  Every pair of layouts has a plan; the plan from a layout to itself is empty.

    So plans are compared by exchanges, then communications, then bytes.  In this order, a detour over a third layout
    that fits the same bound is never cheaper (on meshes of up to three axes, where the search is exact).  By
    communications and bytes alone it can be cheaper: each half of the detour has a smaller bound, so it may need an
    exchange where the direct route has room for other, more expensive moves.

    ``axes`` are the axes along which data may move (None: all axes of the mesh); the layouts must not name others.
    Ranks that differ along other axes may hold different tensors, as the stages of a pipeline do.

    A partial source is reduced; bools by *or* and *and*.  For a partial target, the first rank of each group gets the
    value and the others get the identity of the operation.  Over axes that are partial in both with the same
    operation, the terms stay as they are.

    ``ValueError`` for layouts that do not fit the shape or the mesh, and for a reduction that the dtype does not have.

    >>> plan = plan_resharding(TensorSharding("x", None), TensorSharding(None, "x"), (8, 6), "f8", Mesh(x=2))
    >>> [step.kind for step in plan.steps], plan.bytes_received, plan.peak_bytes
    (['all_to_all'], (96, 96), (192, 192))
    """
    extents, kind = tuple(int(n) for n in shape), as_dtype(dtype)
    names = mesh.axes if axes is None else tuple(axis for axis in mesh.axes if axis in mesh.axes_of(axes))
    source = _checked("source", source, extents, kind, mesh, names)
    target = _checked("target", target, extents, kind, mesh, names)
    if hardware is not None:
        if cost is not None:
            raise ValueError("give either cost= or hardware= to plan a resharding, got both")
        cost = _seconds_on(hardware)
    if cost is None:
        return _remembered(source, target, extents, kind, mesh, names)
    return _planned(source, target, extents, kind, mesh, names, cost)


def _seconds_on(hardware: Hardware | str) -> Cost:
    # Imported here, because every device imports this module and few need costs.
    from parallelism.cost import Costs
    from parallelism.hardware import Hardware

    return partial(move_seconds, Costs(Hardware.of(hardware)))


def move_seconds(costs: Costs, step: ReshardingStep) -> float:
    """Seconds of a step: those of its slowest group.  ``partial(move_seconds, costs)`` is a ``cost`` of a plan."""
    if step.kind == "slice":
        return 0.0
    received = step.bytes_received
    if step.kind == "permute":
        moved = [(donor, rank) for rank, donor in enumerate(step.donors) if donor != rank]
        return max((costs.message_seconds(received[rank], donor, rank) for donor, rank in moved), default=0.0)
    longest = 0.0
    for group in step.mesh.groups(step.axes):
        most = max(received[rank] for rank in group)
        size = len(group)
        if size > 1:
            share = (2 if step.kind == "all_reduce" else 1) * ((size - 1) / size)
            collective = "all_to_all" if step.kind == "exchange" else step.kind
            longest = max(longest, costs.collective(collective, most / share, group).seconds)
    return longest


def _checked(
    name: str, layout: TensorSharding | str, shape: Shape, dtype: np.dtype[Any], mesh: Mesh, names: Names
) -> TensorSharding:
    """The checked layout, with ``...`` expanded."""
    layout = TensorSharding.of(layout, mesh, f"the {name} of a resharding")
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


def _planned(
    source: TensorSharding,
    target: TensorSharding,
    shape: Shape,
    dtype: np.dtype[Any],
    mesh: Mesh,
    names: Names,
    cost: Cost | None = None,
) -> ReshardingPlan:
    """Convert the layouts to states, search, and convert the legs to steps."""
    axes = bundles(source, target, mesh, names)
    blocks = blocks_of(shape, mesh, axes)

    def step_of(leg: Leg) -> ReshardingStep:
        before, after = (layout_of(state, source.op, axes) for state in (leg.before, leg.after))
        return ReshardingStep(
            leg.kind, names_of(leg_axes(leg, blocks), axes), before, after, shape, dtype.itemsize, mesh
        )

    first, last = state_of(source, axes), state_of(target, axes)
    if not blocks.elements:
        legs = [] if first == last else [Leg("slice", first, last)]
    else:
        # A mask for another operation, or for a source that is not partial, comes last.
        goal = last if source.op == target.op and first.partial else State(last.dims)
        price = None if cost is None else lambda leg: cost(step_of(leg))
        legs = cheapest_route(blocks, first, goal, limit=MOST_LAYOUTS, price=price)
        if goal != last:
            legs.append(Leg("slice", goal, last))
        legs = _merged(blocks, legs)
    steps = list(map(step_of, legs))
    if steps:
        steps[0] = replace(steps[0], before=source)
        steps[-1] = replace(steps[-1], after=target)
    return ReshardingPlan(source, target, shape, dtype, mesh, tuple(steps))


_remembered = lru_cache(1 << 15)(_planned)


_MERGED = ("slice", "all_gather", "all_reduce", "reduce_scatter")


def _merged(blocks: Blocks, legs: Sequence[Leg]) -> list[Leg]:
    """The legs with consecutive moves of one kind merged.  A permutation that moves nothing becomes a slice."""
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
    return tuple((blocks_of(shape, mesh, names).sizes(state_of(layout, names).dims) * itemsize).tolist())


def _by(shape: Shape) -> str:
    return f" {'x'.join(map(str, shape))}" if shape else ""
