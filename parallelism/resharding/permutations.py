"""Classes of layouts that a permutation of whole blocks turns into each other.

The layouts of a *class* have the same pieces of every dim, on equally many ranks, and equally many terms.
"""

from itertools import chain, combinations, permutations

from parallelism.memoized import memoized
from parallelism.resharding.blocks import Axes, Blocks, Dims
from parallelism.resharding.moves import State

Class = tuple[int, ...]

MOST_AXES_ALIKE = 4
"""On meshes with more axes, layouts that give every rank the same block are not searched: there may be too many."""

MOST_AXES = 6
"""On meshes with more axes, a dim can be split in too many ways to list them."""


class NoRoute(Exception):
    """No moves lead to the goal within the bound, or the search would examine more layouts than allowed."""


class Permutations:
    """The classes of the layouts of one tensor on one mesh; with ``partial``, including partial layouts."""

    def __init__(self, blocks: Blocks, *, partial: bool) -> None:
        self._blocks = blocks
        self._axes = len(blocks.extents)
        if self._axes > MOST_AXES:
            raise NoRoute
        self._partial = partial

    @memoized
    def class_of(self, state: State) -> Class:
        """The key of the class of a layout."""
        return *self._blocks.class_of(state.dims), self._blocks.count(state.partial)

    @memoized
    def alike(self, state: State) -> list[State]:
        """The layouts that give every rank the same block.  There may be several if some block is empty."""
        blocks = self._blocks
        if self._axes > MOST_AXES_ALIKE or not any(map(blocks.has_empty, blocks.shape, state.dims)):
            return []
        return self._with_equal_blocks(self.class_of(state))[blocks.signature(state.dims), state.partial]

    @memoized
    def _with_equal_blocks(self, kind: Class) -> dict[tuple[bytes, Axes], list[State]]:
        """The layouts of a class, by the blocks and the terms that they give the ranks."""
        groups: dict[tuple[bytes, Axes], list[State]] = {}
        for member in self.members(kind):
            groups.setdefault((self._blocks.signature(member.dims), member.partial), []).append(member)
        return groups

    @memoized
    def members(self, kind: Class) -> list[State]:
        """All layouts of a class."""
        *pieces, copies, terms = kind
        blocks = self._blocks
        states: list[State] = []
        choices: list[tuple[Dims, int]] = [((), 0)]
        for extent, wanted in zip(blocks.shape, pieces, strict=True):
            fitting = self._by_pieces(extent)[wanted]
            choices = [
                ((*dims, axes), used | bits)
                for dims, used in choices
                for axes, bits in fitting
                if not used & bits
            ]
        for used in {used for _, used in choices}:
            free = tuple(axis for axis in range(self._axes) if not used >> axis & 1)
            if blocks.count(free) == copies:
                partial = self._choices(free, terms)
                states += (
                    State(dims, chosen) for dims, bits in choices if bits == used for chosen in partial
                )
        return states

    def _choices(self, free: Axes, terms: int) -> list[Axes]:
        """The choices of partial axes that give this number of terms."""
        if not self._partial:
            return [()]
        chosen = chain.from_iterable(combinations(free, n) for n in range(len(free) + 1))
        return [axes for axes in chosen if self._blocks.count(axes) == terms]

    @memoized
    def _by_pieces(self, extent: int) -> dict[int, list[tuple[Axes, int]]]:
        """All splits of a dim of ``extent``, as axes and as bits, by the number of the pieces that they give."""
        splits: dict[int, list[tuple[Axes, int]]] = {}
        for axes in chain.from_iterable(permutations(range(self._axes), n) for n in range(self._axes + 1)):
            bits = sum(1 << axis for axis in axes)
            splits.setdefault(self._blocks.pieces(extent, axes), []).append((axes, bits))
        return splits
