"""What stands beside a vocabulary: rows of a table by token, and the softmax cross-entropy, each on a slice of it.

Whoever holds the entries ``first, first + 1, ...`` of the vocabulary computes its part; the parts are combined by max
or by sum (Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3: embedding and cross-entropy).  With m the
largest logit of a token, s the sum of exp(logit - m) and t its target's logit,

    loss of the token = log(s) + m - t,     gradient of a logit = exp(logit - m) / s - [it is the target's]
"""

from __future__ import annotations

import numpy as np

from parallelism.arrays import Array


def lookup(table: Array, tokens: Array, first: int = 0) -> Array:
    """The row of each token, ``(*tokens.shape, features)``, zeros for tokens not in this slice of the vocabulary."""
    here, place = _in_slice(tokens, first, table.shape[0])
    found = np.zeros((*tokens.shape, table.shape[1]), table.dtype)
    found[here] = table[place]
    return found


def lookup_backward(grad: Array, tokens: Array, rows: int, first: int = 0) -> Array:
    """The gradient of a slice of ``rows`` rows of the table: for each, the sum of ``grad`` over its tokens."""
    here, place = _in_slice(tokens, first, rows)
    found = np.zeros((rows, grad.shape[-1]), grad.dtype)
    if place.size:
        order = np.argsort(place, kind="stable")
        present, begins = np.unique(place[order], return_index=True)
        found[present] = np.add.reduceat(grad[here][order], begins, axis=0)
    return found


def largest_logits(logits: Array) -> Array:
    """Each token's largest logit of this slice; minus infinity where the slice is empty."""
    largest: Array = np.max(logits, axis=-1, initial=-np.inf)
    return largest.astype(logits.dtype, copy=False)


def exponentials(logits: Array, largest: Array) -> Array:
    """``exp(logit - m)``, m the largest of the whole vocabulary; summed over the last dim, this slice's part of s."""
    found: Array = logits - largest[..., None]
    np.exp(found, out=found)
    return found


def target_logits(logits: Array, targets: Array, first: int = 0) -> Array:
    """Each token's logit at its target; zero where that is in another slice."""
    here, place = _in_slice(targets, first, logits.shape[-1])
    found = np.zeros(targets.shape, logits.dtype)
    found[here] = logits[here][np.arange(place.size), place]
    return found


def cross_entropy_backward(exponentials: Array, sums: Array, targets: Array, scale: float, first: int = 0) -> Array:
    """The gradient of this slice of the logits, ``scale`` times ``exponentials / sums - [is the target]``."""
    found: Array = exponentials * (scale / sums[..., None])
    here, place = _in_slice(targets, first, exponentials.shape[-1])
    found[(*np.nonzero(here), place)] -= scale
    return found.astype(exponentials.dtype, copy=False)


def _in_slice(tokens: Array, first: int, rows: int) -> tuple[Array, Array]:
    """Which tokens lie in the slice, and the places there of those that do."""
    place = tokens - first
    here = (place >= 0) & (place < rows)
    return here, place[here]
