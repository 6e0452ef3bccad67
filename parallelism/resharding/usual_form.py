"""One form for all searches that differ only in the order of the dims, or in which of equally long axes is which.

A route is searched once for each form (`parallelism.resharding.search`).  So the plan for a transposed tensor is the
transposed plan, and on a mesh of 2 x 2 devices the plan is the same if its two axes are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.moves import State

MOST_AXES = 3
"""On meshes with more axes, only the order of the dims is looked at: axes have too many orders."""


class UsualForm(NamedTuple):
    """A search, and how its dims and axes are numbered in the search that stands for it."""

    source: State
    target: State
    shape: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    """For each dim of the form, the dim of the tensor."""
    axes: Axes
    """For each axis of the form, the axis of the mesh."""

    def restored(self, state: State) -> State:
        """A layout of the form, as one of the tensor."""
        dims: list[Axes] = [()] * len(self.dims)
        for dim, axes in zip(self.dims, state.dims, strict=True):
            dims[dim] = _renamed(axes, self.axes)
        return State(tuple(dims), tuple(sorted(_renamed(state.partial, self.axes))))


def usual_form(blocks: Blocks, source: State, target: State) -> UsualForm:
    """The form of a search: of all orders of dims and of equally long axes, the least."""
    count = len(blocks.factors)
    orders: Sequence[Axes] = [tuple(range(count))] if count > MOST_AXES else [
        order for order in permutations(range(count))
        if all(blocks.factors[axis] == factors for axis, factors in zip(order, blocks.factors, strict=True))]
    return min(_ordered(blocks, source, target, order) for order in orders)


def _ordered(blocks: Blocks, source: State, target: State, order: Axes) -> UsualForm:
    """The form with the axes in an order: its dims are sorted, by their axes first.  So dims that are whole before and
    after come first, whatever their extents are."""
    number = [0] * len(order)
    for new, axis in enumerate(order):
        number[axis] = new
    rows = sorted(
        (_renamed(before, number), _renamed(after, number), extent, dim)
        for dim, (extent, before, after) in enumerate(zip(blocks.shape, source.dims, target.dims, strict=True)))
    partial, after_partial = (tuple(sorted(_renamed(state.partial, number))) for state in (source, target))
    return UsualForm(
        State(tuple([row[0] for row in rows]), partial), State(tuple([row[1] for row in rows]), after_partial),
        tuple([row[2] for row in rows]), blocks.factors, tuple([row[3] for row in rows]), order)


def _renamed(axes: Axes, names: Sequence[int]) -> Axes:
    return tuple([names[axis] for axis in axes])
