"""The moves between layouts, as rewriting: which layouts are one communication away from which.

A *state* is a layout on a mesh with the axes as numbers: ``(dims, partial)``, for each dim its axes, outermost first,
and the axes over which a reduction is still pending, in order.  An axis in neither is free: the tensor is replicated
over it.  Axes of extent 1 have no part in it.

    slice            append free axes to dims                     local
    all_gather       take the innermost axes off any dims         each receives what it lacks of its new block
    all_to_all       move the innermost axes of one dim to the end of another
    reduce_scatter   append partial axes to dims
    all_reduce       make partial axes free
    mask             make free axes partial: all but the first forget the value      local

How memory, extents and the order of ranks come in (what fits, and what a permutation of whole blocks can do) is up to
`parallelism.resharding.search`.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import NamedTuple

from parallelism.resharding.blocks import Axes, Dims


class State(NamedTuple):
    """A layout: see above."""

    dims: Dims
    partial: Axes = ()

    @property
    def used(self) -> int:
        """The axes that split something or are partial, as bits."""
        bits = 0
        for axes in (*self.dims, self.partial):
            for axis in axes:
                bits |= 1 << axis
        return bits


def slices(state: State, axes: int) -> tuple[State, ...]:
    """One free axis more, of a mesh of so many; a slice of several is several of these."""
    used = state.used
    return tuple(
        State(_with(state.dims, d, (*state.dims[d], axis)), state.partial)
        for axis in range(axes) if not used >> axis & 1 for d in range(len(state.dims))
    )


def unslices(state: State) -> tuple[State, ...]:
    """One innermost axis less: of what this may be a slice."""
    return tuple(
        State(_with(state.dims, d, axes[:-1]), state.partial) for d, axes in enumerate(state.dims) if axes
    )


def masks(state: State, axes: Axes) -> tuple[State, ...]:
    """One free axis of ``axes`` made partial."""
    used = state.used
    return tuple(State(state.dims, _joined(state.partial, (axis,))) for axis in axes if not used >> axis & 1)


def unmasks(state: State, axes: Axes) -> tuple[State, ...]:
    """One partial axis of ``axes`` made free: of what this may be a mask."""
    return tuple(
        State(state.dims, tuple(axis for axis in state.partial if axis != less))
        for less in state.partial if less in axes
    )


def gathers(state: State) -> tuple[State, ...]:
    """What one all_gather makes: fewer innermost axes, of one dim or of several."""
    shorter = [[axes[:n] for n in range(len(axes) + 1)] for axes in state.dims]
    return tuple(State(dims, state.partial) for dims in product(*shorter) if dims != state.dims)


def exchanges(state: State) -> tuple[State, ...]:
    """What one all_to_all makes, and of what it makes this."""
    found = []
    for i, axes in enumerate(state.dims):
        for n in range(len(axes)):
            fewer = _with(state.dims, i, axes[:n])
            found += [
                State(_with(fewer, j, (*fewer[j], *axes[n:])), state.partial)
                for j in range(len(state.dims)) if j != i
            ]
    return tuple(found)


def reductions(state: State) -> tuple[tuple[str, State], ...]:
    """What one all_reduce or reduce_scatter makes."""
    found = []
    for chosen in _subsets(state.partial):
        rest = tuple(axis for axis in state.partial if axis not in chosen)
        found.append(("all_reduce", State(state.dims, rest)))
        found += [("reduce_scatter", State(dims, rest)) for dims in _appended(state.dims, chosen)]
    return tuple(found)


def unreductions(state: State, axes: int) -> tuple[State, ...]:
    """What one all_reduce or reduce_scatter makes this of."""
    free = [axis for axis in range(axes) if not state.used >> axis & 1]
    found = [State(state.dims, _joined(state.partial, chosen)) for chosen in _subsets(free)]
    for shorter in gathers(state):
        moved = [axis for full, kept in zip(state.dims, shorter.dims, strict=True) for axis in full[len(kept):]]
        found.append(State(shorter.dims, _joined(state.partial, moved)))
    return tuple(found)


def _with(dims: Dims, d: int, axes: Axes) -> Dims:
    return (*dims[:d], axes, *dims[d + 1:])


def _joined(partial: Axes, more: list[int] | Axes) -> Axes:
    return tuple(sorted((*partial, *more)))


def _subsets(axes: list[int] | Axes) -> list[Axes]:
    """All but the empty one."""
    return [chosen for n in range(1, len(axes) + 1) for chosen in combinations(axes, n)]


def _appended(dims: Dims, axes: Axes) -> set[Dims]:
    """All ways to append all of ``axes`` to the dims."""
    if not axes:
        return {dims}
    return {
        _with(shorter, d, (*shorter[d], axis))
        for i, axis in enumerate(axes) for shorter in _appended(dims, axes[:i] + axes[i + 1:])
        for d in range(len(dims))
    }
