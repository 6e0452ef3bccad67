"""Numbers for mesh axes: the search for a resharding plan works on numbered axes.

Numbered are the axes along which data may move, without those of extent 1.  On a mesh with many axes, axes that are
adjacent in both layouts get one number together (a *bundle*), and axes that neither layout names get none.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from parallelism.mesh import Mesh
from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.distance import Leg
from parallelism.resharding.moves import State
from parallelism.sharding import TensorSharding

Bundles = tuple[tuple[str, ...], ...]
"""For each number, the axes that it stands for; the first varies slowest."""

MANY_AXES = 5
"""On a mesh with more axes than this, axes are bundled."""


@lru_cache(256)
def singles(mesh: Mesh) -> Bundles:
    """One bundle for each axis of extent above 1."""
    return tuple((axis,) for axis, extent in mesh.shape.items() if extent > 1)


def bundles(source: TensorSharding, target: TensorSharding, mesh: Mesh, allowed: Sequence[str]) -> Bundles:
    """The ``allowed`` axes, in the bundles with which the search between two layouts numbers them."""
    axes = [axis for (axis,) in singles(mesh) if axis in allowed]
    if len(axes) <= MANY_AXES:
        return tuple((axis,) for axis in axes)
    before, after = _positions(source), _positions(target)
    groups: list[list[str]] = []
    used = [axis for axis in axes if axis in before or axis in after]
    # Adjacent are axes that are adjacent in the first layout, else in the second.
    for axis in sorted(used, key=lambda axis: (before.get(axis) or (-2, -2), after.get(axis) or (-2, -2))):
        if groups and all(
            _follows(positions.get(axis), positions.get(groups[-1][-1])) for positions in (before, after)
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return tuple(map(tuple, groups))


Position = tuple[int, int] | None
"""The dim that an axis splits, and the number of axes before it there; (-1, -1) if partial, None if free."""


def _positions(layout: TensorSharding) -> dict[str, Position]:
    partial: dict[str, Position] = dict.fromkeys(layout.partial, (-1, -1))
    return partial | {axis: (d, i) for d, dim in enumerate(layout.dims) for i, axis in enumerate(dim.axes)}


def _follows(position: Position, other: Position) -> bool:
    """Whether an axis directly follows the other one, or both have no order."""
    if position is None or other is None or position[0] < 0 or other[0] < 0:
        return position == other
    return position == (other[0], other[1] + 1)


@lru_cache(256)
def blocks_of(shape: tuple[int, ...], mesh: Mesh, axes: Bundles) -> Blocks:
    """The blocks of a tensor on one group of a mesh along the axes.  The ranks have the order of the axes."""
    return Blocks(shape, [[mesh.shape[axis] for axis in bundle] for bundle in axes])


def state_of(layout: TensorSharding, axes: Bundles) -> State:
    """A layout without ``...`` as a state."""
    number = {bundle[0]: i for i, bundle in enumerate(axes)}

    def numbers(names: Sequence[str]) -> Axes:
        return tuple([number[name] for name in names if name in number])

    return State(tuple([numbers(dim.axes) for dim in layout.dims]), tuple(sorted(numbers(layout.partial))))


def layout_of(state: State, op: str, axes: Bundles) -> TensorSharding:
    """A state as a layout; ``op`` is its pending reduction, if there is one."""
    return TensorSharding(
        *(names_of(numbers, axes) for numbers in state.dims), partial=names_of(state.partial, axes), op=op
    )


def names_of(numbers: Axes, axes: Bundles) -> tuple[str, ...]:
    """The names of numbered axes."""
    return tuple(axis for number in numbers for axis in axes[number])


def leg_axes(leg: Leg, blocks: Blocks) -> Axes:
    """The axes along which a leg communicates, or by which it slices; the first varies slowest.

    Blocks of several dims travel in a flat array, in the order of the group.  That is then the order of the mesh, in
    which neighbours mostly lie in one node.
    """
    kind, (before, pending), (after, still_pending) = leg
    grown = [new[len(old) :] for old, new in zip(before, after, strict=True)]
    match kind:
        case "slice":
            return (*chain(*grown), *(axis for axis in still_pending if axis not in pending))
        case "reduce_scatter":
            return _in_order(grown)
        case "all_reduce":
            return tuple(axis for axis in pending if axis not in still_pending)
        case "all_gather" | "all_to_all":
            return _in_order([old[len(new) :] for old, new in zip(before, after, strict=True)])
        case "exchange":
            return tuple(sorted(axis for axes in before for axis in axes))
    return blocks.permuted_along(leg.before, leg.after)


def _in_order(by_dim: Sequence[Axes]) -> Axes:
    """The axes of one dim as they are, of several in the order of the mesh."""
    some = [axes for axes in by_dim if axes]
    return some[0] if len(some) == 1 else tuple(sorted(chain(*some)))
