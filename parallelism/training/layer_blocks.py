"""`LayerBlocks`: the layers of each block of a search, all of which are alike but the first ones."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

MOST_BLOCKS = 10**4
"""A model may have at most so many blocks in a search: layers beyond are not looked at."""
MOST_OTHERS = 8
"""So many layers at the beginning, which are like no others, may be laid out in each piece that has them."""
MOST_TOGETHER = 16
"""A block has at most so many layers."""


class LayerBlocks(NamedTuple):
    """Of ``first`` blocks, which are like no others, and of further blocks, which are alike.

    A block is a layer, unless layers of several kinds come again and again, as five with a window and one without: then
    it is all of them, and the layers before them are one block.
    """

    first: int = 0
    """The number of blocks at the beginning that are like no others."""
    before: int = 0
    """The layers in these."""
    each: int = 1
    """The layers in every further block."""
    region: str = "block"
    """The region whose numbered parts are the layers."""

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> LayerBlocks:
        """The blocks of layers of these kinds."""
        alone = _before_repeated(kinds, 1)
        if alone <= MOST_OTHERS and (alone < len(kinds) - 1 or not alone):
            return cls(alone, alone)
        for each in range(2, MOST_TOGETHER + 1):
            before = _before_repeated(kinds, each)
            before += (len(kinds) - before) % each
            if before > MOST_OTHERS or len(kinds) - before < 2 * each:
                continue
            if 2 * before >= each or not before:
                return cls(int(before > 0), before, each)
            return cls(1, before + each, each)  # so few layers are no block: the first one has them, too
        return cls(alone, alone)

    def count(self, layers: int) -> int:
        """The number of blocks of so many layers."""
        return self.first + (layers - self.before) // self.each

    def layer_of(self, block: int) -> int:
        """The first layer of a block; of the number of all blocks that of all layers."""
        if block <= self.first:
            return self.before * block // max(self.first, 1)
        return self.before + (block - self.first) * self.each

    def layers_of(self, counts: Iterable[int]) -> tuple[int, ...]:
        """The layers of stages that have so many blocks."""
        firsts = map(self.layer_of, accumulate(counts, initial=0))
        return tuple(end - first for first, end in pairwise(firsts))

    def block_of(self, layer: int) -> int:
        """The block that a layer is in."""
        if layer < self.before:
            return layer * self.first // self.before
        return self.first + (layer - self.before) // self.each

    def block_in(self, region: str | None) -> int | None:
        """The block that a region is in; None for one that is in no layer."""
        layer = _part_of(self.region, region or "")
        return None if layer is None else self.block_of(layer)


EACH_LAYER = LayerBlocks()
"""Every layer is a block."""
WHOLE = LayerBlocks(each=10**18, region="the whole program")
"""All layers are one block, and no region is a layer: of a program that is laid out as a whole."""


@lru_cache(maxsize=4096)
def _part_of(numbered: str, region: str) -> int | None:
    """The number of the part of a ``numbered`` region that a region is in: 3 of ``layers`` for ``gradient.layers.3.core``."""
    found = re.search(rf"(?:^|\.){re.escape(numbered)}\.(\d+)(?:\.|$)", region)
    return int(found[1]) if found else None


def _before_repeated(kinds: Sequence[Hashable], each: int) -> int:
    """The layers at the beginning behind which every layer is of the kind of the one that comes ``each`` later."""
    differing = [layer for layer in range(len(kinds) - each) if kinds[layer] != kinds[layer + each]]
    return differing[-1] + 1 if differing else 0
