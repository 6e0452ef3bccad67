"""The canonical form of a search: one for all searches that differ in the order of the dims alone.

A route is searched once for each form (`parallelism.resharding.search`), so the plan for a transposed tensor is the
transposed plan.
"""

from __future__ import annotations

from typing import NamedTuple

from parallelism.resharding.blocks import Axes, Blocks
from parallelism.resharding.moves import State


class CanonicalForm(NamedTuple):
    """A search, and how its dims are numbered in the search that stands for it."""

    shape: tuple[int, ...]
    source: State
    target: State
    dims: tuple[int, ...]
    """For each dim of the form, the dim of the tensor."""

    def restored(self, state: State) -> State:
        """A layout of the form, as one of the tensor."""
        dims: list[Axes] = [()] * len(self.dims)
        for dim, axes in zip(self.dims, state.dims, strict=True):
            dims[dim] = axes
        return State(tuple(dims), state.partial)


def canonical_form(blocks: Blocks, source: State, target: State) -> CanonicalForm:
    """The canonical form of a search: its dims are sorted, by their axes first.

    So dims that are whole before and after come first, whatever their extents are.  An extent that all devices divide
    becomes their number: then every part of every route has as many times fewer elements.
    """
    rows = sorted(zip(source.dims, target.dims, blocks.shape, range(len(blocks.shape)), strict=True))
    shape = [extent for _, _, extent, _ in rows]
    for dim, extent in enumerate(shape):
        if extent and extent % blocks.size == 0:
            shape[dim] = blocks.size
    return CanonicalForm(
        tuple(shape),
        State(tuple([before for before, *_ in rows]), source.partial),
        State(tuple([after for _, after, *_ in rows]), target.partial),
        tuple([dim for *_, dim in rows]),
    )
