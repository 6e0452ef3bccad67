"""Which layouts a permutation of whole blocks turns into each other.

They are the layouts with the same pieces of every dim, each on as many ranks, and with as many terms: a *class*.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from parallelism.resharding.blocks import Axes, Blocks, Dims
from parallelism.resharding.moves import State

Class = tuple[int, ...]

MOST_AXES_ALIKE = 4
"""On meshes of more axes, layouts that give every rank the same block are not looked for: they can be very many."""


MOST_AXES = 6
"""On meshes of more axes a dim can be split in too many ways to list them."""


class NoWay(Exception):
    """No moves lead to the goal within the bound; or the search would have to look at more layouts than it may."""


class Permutations:
    """The classes of the layouts of one tensor on one mesh; with ``partial``, of partial ones, too."""

    def __init__(self, blocks: Blocks, *, partial: bool) -> None:
        self._blocks = blocks
        self._axes = len(blocks.extents)
        if self._axes > MOST_AXES:
            raise NoWay
        self._partial = partial
        self._classes: dict[State, Class] = {}
        self._members: dict[Class, list[State]] = {}
        self._alike: dict[State, list[State]] = {}
        self._splits: dict[int, dict[int, list[tuple[Axes, int]]]] = {}

    def class_of(self, state: State) -> Class:
        """The same for all layouts of a class, and for no other."""
        found = self._classes.get(state)
        if found is None:
            terms = self._blocks.count(state.partial)
            found = self._classes[state] = (*self._blocks.class_of(state.dims), terms)
        return found

    def members(self, kind: Class) -> list[State]:
        """All layouts of a class."""
        found = self._members.get(kind)
        if found is None:
            found = self._members[kind] = list(self._of_class(kind))
            self._classes.update(dict.fromkeys(found, kind))
        return found

    def alike(self, state: State) -> list[State]:
        """The layouts that give every rank the same block: where somebody has nothing, there may be several."""
        found = self._alike.get(state)
        if found is not None:
            return found
        blocks = self._blocks
        if self._axes > MOST_AXES_ALIKE or not any(map(blocks.has_empty, blocks.shape, state.dims)):
            found = self._alike[state] = []
        else:
            groups: dict[tuple[bytes, Axes], list[State]] = {}
            for member in self.members(self.class_of(state)):
                groups.setdefault((blocks.signature(member.dims), member.partial), []).append(member)
            for group in groups.values():
                self._alike.update(dict.fromkeys(group, group))
            found = self._alike[state]
        return found

    def _of_class(self, kind: Class) -> Iterator[State]:
        *pieces, copies, terms = kind
        blocks = self._blocks
        found: list[tuple[Dims, int]] = [((), 0)]
        for extent, wanted in zip(blocks.shape, pieces, strict=True):
            fitting = self._by_pieces(extent)[wanted]
            found = [
                ((*dims, axes), used | bits) for dims, used in found for axes, bits in fitting if not used & bits
            ]
        for used in {used for _, used in found}:
            free = tuple(axis for axis in range(self._axes) if not used >> axis & 1)
            if blocks.count(free) == copies:
                partial = self._choices(free, terms)
                yield from (State(dims, chosen) for dims, bits in found if bits == used for chosen in partial)

    def _choices(self, free: Axes, terms: int) -> list[Axes]:
        """The axes that may be partial, for so many terms."""
        if not self._partial:
            return [()]
        sizes = range(len(free) + 1)
        return [chosen for n in sizes for chosen in combinations(free, n) if self._blocks.count(chosen) == terms]

    def _by_pieces(self, extent: int) -> dict[int, list[tuple[Axes, int]]]:
        """All that a dim of ``extent`` can be split over, as axes and as bits, by the pieces that makes."""
        found = self._splits.get(extent)
        if found is None:
            found = self._splits[extent] = {}
            for axes in _arrangements(tuple(range(self._axes))):
                bits = sum(1 << axis for axis in axes)
                found.setdefault(self._blocks.pieces(extent, axes), []).append((axes, bits))
        return found


def _arrangements(axes: Axes) -> Iterator[Axes]:
    """All ordered choices of some of the axes."""
    yield ()
    for i, axis in enumerate(axes):
        for rest in _arrangements(axes[:i] + axes[i + 1:]):
            yield (axis, *rest)
