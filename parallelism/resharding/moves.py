"""Moves between layouts as rewriting rules: the layouts that one communication reaches from another.

A *state* is a layout on a mesh whose axes are numbers: ``(dims, partial)``.  ``dims`` has the axes of each dim,
outermost first; ``partial`` has the axes over which a reduction is pending, in order.  An axis in neither is free: the
tensor is replicated over it.  Axes of extent 1 are left out.

    slice            append free axes to dims                     local
    all_gather       remove innermost axes from any dims          each rank receives the rest of its new block
    all_to_all       move the innermost axes of one dim to the end of another
    reduce_scatter   append partial axes to dims
    all_reduce       make partial axes free
    mask             make free axes partial: all ranks but the first drop the value      local

`parallelism.resharding.search` adds memory, extents and the order of ranks: which layouts fit, and what a permutation
of whole blocks can do.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from parallelism.resharding.blocks import Axes, Dims


class State(NamedTuple):
    """A layout with numbered axes."""

    dims: Dims
    """The axes that split each dim, outermost first."""
    partial: Axes = ()
    """The axes over which a reduction is pending, in order."""

    @property
    def used(self) -> int:
        """The axes that split a dim or are partial, as bits."""
        return sum(1 << axis for axes in (*self.dims, self.partial) for axis in axes)


def slices(state: State, axes: int) -> tuple[State, ...]:
    """The states after a slice by one free axis, on a mesh of ``axes`` axes.  A slice by several is a sequence."""
    used = state.used
    return tuple(
        State(_with(state.dims, d, (*state.dims[d], axis)), state.partial)
        for axis in range(axes)
        if not used >> axis & 1
        for d in range(len(state.dims))
    )


def unslices(state: State) -> tuple[State, ...]:
    """The states from which one slice leads to ``state``: an innermost axis is removed."""
    return tuple(
        State(_with(state.dims, d, axes[:-1]), state.partial) for d, axes in enumerate(state.dims) if axes
    )


def masks(state: State, axes: Axes) -> tuple[State, ...]:
    """The states in which one free axis of ``axes`` becomes partial."""
    used = state.used
    return tuple(State(state.dims, _joined(state.partial, (axis,))) for axis in axes if not used >> axis & 1)


def unmasks(state: State, axes: Axes) -> tuple[State, ...]:
    """The states from which one mask leads to ``state``: a partial axis of ``axes`` becomes free."""
    return tuple(
        State(state.dims, _without(state.partial, (less,))) for less in state.partial if less in axes
    )


def gathers(state: State) -> tuple[State, ...]:
    """The states after one all_gather: innermost axes are removed from one or several dims."""
    shorter = [_prefixes(axes) for axes in state.dims]
    return tuple(State(dims, state.partial) for dims in product(*shorter) if dims != state.dims)


def exchanges(state: State) -> tuple[State, ...]:
    """The states after one all_to_all; they are also the states from which one leads to ``state``."""
    return tuple(
        State(_with(_with(state.dims, i, axes[:n]), j, (*state.dims[j], *axes[n:])), state.partial)
        for i, axes in enumerate(state.dims)
        for n in range(len(axes))
        for j in range(len(state.dims))
        if j != i
    )


def reductions(state: State) -> Iterator[tuple[str, State]]:
    """The states after one all_reduce or reduce_scatter, with its kind."""
    for chosen in _subsets(state.partial):
        rest = _without(state.partial, chosen)
        yield "all_reduce", State(state.dims, rest)
        yield from (("reduce_scatter", State(dims, rest)) for dims in _appended(state.dims, chosen))


def unreductions(state: State, axes: int) -> tuple[State, ...]:
    """The states from which one all_reduce or reduce_scatter leads to ``state``."""
    free = [axis for axis in range(axes) if not state.used >> axis & 1]
    states = [State(state.dims, _joined(state.partial, chosen)) for chosen in _subsets(free)]
    for shorter in gathers(state):
        moved = [
            axis for full, kept in zip(state.dims, shorter.dims, strict=True) for axis in full[len(kept) :]
        ]
        states.append(State(shorter.dims, _joined(state.partial, moved)))
    return tuple(states)


def _prefixes(axes: Axes) -> list[Axes]:
    return [axes[:n] for n in range(len(axes) + 1)]


def _with(dims: Dims, d: int, axes: Axes) -> Dims:
    return (*dims[:d], axes, *dims[d + 1 :])


def _without(partial: Axes, less: Axes) -> Axes:
    return tuple([axis for axis in partial if axis not in less])


def _joined(partial: Axes, more: list[int] | Axes) -> Axes:
    return tuple(sorted((*partial, *more)))


def _subsets(axes: list[int] | Axes) -> list[Axes]:
    """All subsets except the empty one."""
    return [chosen for n in range(1, len(axes) + 1) for chosen in combinations(axes, n)]


def _appended(dims: Dims, axes: Axes) -> set[Dims]:
    """The results of all ways to append all of ``axes`` to the dims."""
    if not axes:
        return {dims}
    return {
        _with(shorter, d, (*shorter[d], axis))
        for i, axis in enumerate(axes)
        for shorter in _appended(dims, axes[:i] + axes[i + 1 :])
        for d in range(len(dims))
    }
