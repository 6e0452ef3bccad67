"""Packed sequences: the lengths of the documents that stand one behind another in a sequence, from their mean."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.arrays import Floats

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

MOST = 1024
"""So many documents of different lengths are listed at most."""
_STEPS = 60
"""Halvings of the interval in which the spread of lengths is looked for."""


@lru_cache(maxsize=64)
def document_lengths(sequence: int, mean: int, variation: float) -> tuple[int, ...]:
    """The lengths of documents that fill a ``sequence``, as many as come nearest to the ``mean`` length.

    ``variation`` is their coefficient of variation, the standard deviation by the mean.  Lengths are quantiles of a
    log-normal distribution, the longest first, which is spread until they have it; of n documents it is below
    sqrt(n - 1).  They are whole numbers, so it is met as near as these allow.

    >>> document_lengths(4096, 1000, 0.0), document_lengths(4096, 1000, 0.5)
    ((1024, 1024, 1024, 1024), (1817, 1093, 741, 445))
    """
    count = max(1, round(sequence / mean))
    if count > MOST:
        raise ValueError(
            f"a sequence of {sequence} tokens has {count} documents of {mean} in the mean; at most {MOST} are listed"
        )
    quantiles = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in reversed(range(count))])
    if variation and not _variation(_shares(quantiles, _MOST_SPREAD)) > variation:
        raise ValueError(
            f"{count} documents of {mean} tokens in the mean cannot have a coefficient of variation of {variation:g}: "
            f"it is below {np.sqrt(count - 1):.3g}"
        )
    low, high = 0.0, _MOST_SPREAD if variation else 0.0
    for _ in range(_STEPS):
        spread = (low + high) / 2
        low, high = (spread, high) if _variation(_shares(quantiles, spread)) < variation else (low, spread)
    return _rounded(sequence, _shares(quantiles, (low + high) / 2))


_MOST_SPREAD = 20.0


def _shares(quantiles: Floats, spread: float) -> Floats:
    """The share of each document in the sequence."""
    terms = np.exp(spread * (quantiles - quantiles.max()))
    shares: Floats = terms / terms.sum()
    return shares


def _variation(shares: Floats) -> float:
    return float(shares.std() / shares.mean())


def _rounded(sequence: int, shares: Floats) -> tuple[int, ...]:
    """Whole numbers of at least 1 that add up to the sequence, in the order of the shares."""
    for least in (0, 1):  # if one were 0, each gets 1 first
        ends = np.round(np.cumsum(shares) * (sequence - least * len(shares))).astype(int)
        lengths = np.diff(ends, prepend=0) + least
        if lengths.min() >= 1:
            break
    return tuple(lengths.tolist())


def check_documents(spec: TransformerSpec) -> None:
    """``ValueError`` for lengths of documents that cannot be."""
    given: Any = spec.documents
    if given is not None and type(given) is not int:
        object.__setattr__(spec, "documents", tuple(given))
    lengths: Any = [given] if type(given) is int else spec.documents or ()
    if given is not None and (not lengths or any(type(each) is not int or each < 1 for each in lengths)):
        raise ValueError(
            f"documents must be a length of at least 1 token, or several, or None, got {given!r}"
        )
    variation = spec.document_variation
    if isinstance(variation, bool) or not isinstance(variation, int | float) or not 0 <= variation < inf:
        raise ValueError(f"document_variation must be a number of at least 0, got {variation!r}")
    if variation and type(given) is not int:
        raise ValueError(
            f"document_variation={variation:g} needs the mean length of documents, got {given!r}"
        )
    _ = spec.document_lengths  # refuses what a sequence has no place for
