"""Layouts by name and by number: the search for a plan has the axes that count as numbers.

Those are the axes of a mesh along which something may move, without those of extent 1.  On a mesh of many axes those
that stay side by side in both layouts count as one, a *bundle*, and those that neither layout names do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from parallelism.mesh import Mesh
from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.distance import Leg
from parallelism.resharding.moves import State
from parallelism.sharding import TensorSharding

Bundles = tuple[tuple[str, ...], ...]
"""For each number the axes that it stands for, the first the slowest."""

MANY_AXES = 5
"""On a mesh of more, axes are bundled."""


@lru_cache(256)
def singles(mesh: Mesh) -> Bundles:
    """Every axis by itself."""
    return tuple((axis,) for axis, extent in mesh.shape.items() if extent > 1)


def bundles(source: TensorSharding, target: TensorSharding, mesh: Mesh, allowed: Sequence[str]) -> Bundles:
    """The bundles of ``allowed`` axes with which to look for a way between two layouts."""
    axes = [axis for (axis,) in singles(mesh) if axis in allowed]
    if len(axes) <= MANY_AXES:
        return tuple((axis,) for axis in axes)
    places = [_places(layout) for layout in (source, target)]
    found: list[list[str]] = []
    for axis in sorted((axis for axis in axes if any(axis in place for place in places)), key=_order(places)):
        if found and all(_follows(place.get(axis), place.get(found[-1][-1])) for place in places):
            found[-1].append(axis)
        else:
            found.append([axis])
    return tuple(map(tuple, found))


Place = tuple[int, int] | None
"""The dim that an axis splits and how many do so before it; (-1, -1) if it is partial; None if it is free."""


def _places(layout: TensorSharding) -> dict[str, Place]:
    partial: dict[str, Place] = dict.fromkeys(layout.partial, (-1, -1))
    return partial | {axis: (d, i) for d, dim in enumerate(layout.dims) for i, axis in enumerate(dim.axes)}


def _order(places: Sequence[dict[str, Place]]) -> Callable[[str], list[tuple[int, int]]]:
    """Side by side what has a place in one of the layouts side by side, the rest by the other."""
    return lambda axis: [place.get(axis) or (-2, -2) for place in places]


def _follows(place: Place, other: Place) -> bool:
    """Whether an axis stands right behind the other, or neither has an order."""
    if place is None or other is None or place[0] < 0 or other[0] < 0:
        return place == other
    return place == (other[0], other[1] + 1)


@lru_cache(256)
def blocks_of(shape: tuple[int, ...], mesh: Mesh, axes: Bundles) -> Blocks:
    """The blocks of a tensor on one group of a mesh along the axes; its ranks are in the order of these."""
    return Blocks(shape, [[mesh.shape[axis] for axis in bundle] for bundle in axes])


def state_of(layout: TensorSharding, axes: Bundles) -> State:
    """A layout, spelt out, as a state."""
    number = {bundle[0]: i for i, bundle in enumerate(axes)}
    dims = tuple(tuple(number[axis] for axis in dim.axes if axis in number) for dim in layout.dims)
    return State(dims, tuple(sorted(number[axis] for axis in layout.partial if axis in number)))


def layout_of(state: State, op: str, axes: Bundles) -> TensorSharding:
    """A state as a layout; ``op`` is by what it is partial, if it is."""
    dims = (names_of(numbers, axes) for numbers in state.dims)
    return TensorSharding(*dims, partial=names_of(state.partial, axes), op=op)


def names_of(numbers: Axes, axes: Bundles) -> tuple[str, ...]:
    """The names of axes."""
    return tuple(axis for number in numbers for axis in axes[number])


def leg_axes(leg: Leg, blocks: Blocks) -> Axes:
    """The axes along which a leg communicates, or by which it slices, the first the slowest."""
    kind, (before, pending), (after, still_pending) = leg
    grown = [axis for old, new in zip(before, after, strict=True) for axis in new[len(old):]]
    match kind:
        case "slice":
            return (*grown, *(axis for axis in still_pending if axis not in pending))
        case "reduce_scatter":
            return tuple(grown)
        case "all_reduce":
            return tuple(axis for axis in pending if axis not in still_pending)
        case "all_gather" | "all_to_all":
            return tuple(axis for old, new in zip(before, after, strict=True) for axis in old[len(new):])
        case "exchange":
            return tuple(sorted(axis for axes in before for axis in axes))
    return blocks.permuted_along(leg.before, leg.after)
