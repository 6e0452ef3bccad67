"""Embedding lookup and softmax cross-entropy on a slice of a vocabulary.

Each function computes the part of the entries ``first, first + 1, ...``; the parts of all slices are combined by max
or by sum (Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3: embedding and cross-entropy).  Let m be
the largest logit of a token, s the sum of exp(logit - m) and t the logit of its target.  Then

    loss of the token = log(s) + m - t,     gradient of a logit = exp(logit - m) / s - [it is the target's],

where [...] is 1 if true and 0 if not.
"""

import numpy as np

from parallelism.arrays import Array


def lookup(table: Array, tokens: Array, first: int = 0) -> Array:
    """The row of each token, ``(*tokens.shape, features)``; zeros for tokens outside of this slice."""
    here, place = _in_slice(tokens, first, table.shape[0])
    rows = np.zeros((*tokens.shape, table.shape[1]), table.dtype)
    rows[here] = table[place]
    return rows


def lookup_backward(grad: Array, tokens: Array, rows: int, first: int = 0) -> Array:
    """The gradient of a slice of ``rows`` rows of the table: each row is the sum of ``grad`` over its tokens."""
    here, place = _in_slice(tokens, first, rows)
    table_grad = np.zeros((rows, grad.shape[-1]), grad.dtype)
    if place.size:
        order = np.argsort(place, kind="stable")
        present, begins = np.unique(place[order], return_index=True)
        table_grad[present] = np.add.reduceat(grad[here][order], begins, axis=0)
    return table_grad


def largest_logits(logits: Array) -> Array:
    """Each token's largest logit in this slice; minus infinity if the slice is empty."""
    largest: Array = np.max(logits, axis=-1, initial=-np.inf)
    return largest.astype(logits.dtype, copy=False)


def exponentials(logits: Array, largest: Array) -> Array:
    """``exp(logit - m)``, where ``largest`` is m of the whole vocabulary.  The sum over the last dim is a part of s."""
    powers: Array = logits - largest[..., None]
    np.exp(powers, out=powers)
    return powers


def target_logits(logits: Array, targets: Array, first: int = 0) -> Array:
    """Each token's logit of its target; zero if the target is in another slice."""
    here, place = _in_slice(targets, first, logits.shape[-1])
    result = np.zeros(targets.shape, logits.dtype)
    result[here] = logits[here][np.arange(place.size), place]
    return result


def cross_entropy_backward(
    exponentials: Array, sums: Array, targets: Array, scale: float, first: int = 0
) -> Array:
    """The gradient of this slice of the logits: ``scale * (exponentials / sums - [is the target])``."""
    grad: Array = exponentials * (scale / sums[..., None])
    here, place = _in_slice(targets, first, exponentials.shape[-1])
    grad[(*np.nonzero(here), place)] -= scale
    return grad.astype(exponentials.dtype, copy=False)


def _in_slice(tokens: Array, first: int, rows: int) -> tuple[Array, Array]:
    """A mask of the tokens inside the slice, and the rows of those tokens in the slice."""
    place = tokens - first
    here = (place >= 0) & (place < rows)
    return here, place[here]
