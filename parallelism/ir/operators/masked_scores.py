"""How many scores of attention a mask leaves: a fused kernel computes these, and no others.

A kernel that works on tiles of scores, and never writes them, skips the tiles that a mask hides whole (Dao,
*FlashAttention-2*, 2023, arXiv:2307.08691, section 3.1).  Counted are the scores that the mask allows, exactly: what a
kernel computes in the tiles at the mask's edges beyond them is in the efficiency that it reaches.

Rows at one end of a sequence attend to few columns and those at the other to many.  Where rows are split over devices,
each part counts the mean of all rows: the share of a device where rows are dealt so that all have the same work, as
context parallelism does, document by document where sequences are packed (Dubey et al., *The Llama 3 Herd of Models*,
2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any

from parallelism.ir.core import Extent
from parallelism.ir.core.extents import divided, largest, rounded_up
from parallelism.kernels import Mask


def allowed_scores(mask: Mask, rows: Extent, columns: Extent) -> Extent:
    """The number of scores that a mask allows, of rows and columns whose positions both begin at 0.

    >>> allowed_scores(Mask(), 4, 6), allowed_scores(Mask(causal=True), 4, 4), allowed_scores(Mask(True, 2), 4, 4)
    (24, 10, 7)
    >>> allowed_scores(Mask(True, documents=(2, 3)), 7, 7), allowed_scores(Mask(documents=(2, 3)), 5, 5)
    (12, 13)
    """
    if mask.documents:
        return _in_documents(mask, _known(rows), _known(columns))
    if not mask.causal:
        return rows * columns
    seen = _before(rows, columns)
    if mask.window is None:
        return seen
    return seen - _before(largest(rows, mask.window) - mask.window, columns)


def scores_of_part(mask: Mask, part: Extent, rows: Extent, columns: Extent) -> Extent:
    """Those of ``part`` of the rows: so many times the mean of a row.  It may be a fraction."""
    if part == rows or not (mask.causal or mask.documents):
        return allowed_scores(mask, part, columns)
    if rows == columns and mask.window is None and not mask.documents:
        return divided(part * (rows + 1), 2)
    return _in_a_row(part * allowed_scores(mask, rows, columns), rows) if rows != 0 else 0


def equal_keys(mask: Mask, rows: Extent, columns: Extent) -> Extent:
    """So many keys without a window and documents have as many scores in a row, in the mean, as these with them.

    >>> equal_keys(Mask(True, 4), 4, 4), equal_keys(Mask(True, 1), 9, 9), equal_keys(Mask(True, 2), 4, 4)
    (4, 1, 3)
    """
    if (mask.window is None and not mask.documents) or rows == 0:
        return columns
    allowed = allowed_scores(mask, rows, columns)
    if mask.causal:
        return rounded_up(_in_a_row(2 * allowed, rows)) - 1
    return rounded_up(_in_a_row(allowed, rows))


def _in_a_row(total: Extent, rows: Extent) -> Extent:
    """The mean over the rows.  Nothing is divided by a sum, as ``S - 3``; by ``max(1, S - 3)``, which is the same, it is."""
    try:
        return divided(total, rows)
    except ValueError:
        return divided(total, largest(rows, 1))


def _known(extent: Extent) -> int:
    """An extent that is a number.  ``ValueError`` for another one."""
    if isinstance(extent, int):
        return extent
    raise ValueError(f"documents are counted in a sequence whose length is a number, got {extent}")


@lru_cache(maxsize=256)
def _in_documents(mask: Mask, rows: int, columns: int) -> int:
    """The number of scores inside of documents: of each those of its rows and its columns, which begin together."""
    inside, found, first = replace(mask, documents=()), 0, 0
    for length in cycle(mask.documents):
        end = first + length
        if first >= min(rows, columns):
            return found
        scores: Any = allowed_scores(inside, min(end, rows) - first, min(end, columns) - first)
        found, first = found + int(scores), end
    return found


def _before(rows: Extent, columns: Extent) -> Extent:
    """The sum over the rows of the columns that are not after each: of 1, 2, ..., at most all."""
    rising = rows + columns - largest(rows, columns)
    return divided(rising * (rising + 1), 2) + (rows - rising) * columns
