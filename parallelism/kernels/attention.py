"""Scaled dot-product attention, whole or block by block: softmax(q k^T / sqrt(d)) v, forward and backward.

Queries are ``(batch, rows, heads, head_dim)``, keys and values ``(batch, columns, heads, head_dim)``, results like the
queries, and what belongs to a row of the scores ``(batch, heads, rows)``.  ``mask`` is ``(rows, columns)``, true where
a row may attend to a column; None is everywhere.

A softmax over some of the columns, with the logarithm of its denominator (the log-sum-exp ``lse``), is enough to join
it to that over others: `merge`.  So keys may come block by block and no row is ever seen whole (Milakov and Gimelshein,
*Online normalizer calculation for softmax*, 2018, arXiv:1805.02867, section 3).  The backward of a block needs the
``lse`` of the whole row, and makes the block's weights anew (Dao, *FlashAttention-2*, 2023, arXiv:2307.08691,
algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array


class Attended(NamedTuple):
    """The result of attention to some columns, and the log-sum-exp of their scores.

    A row that attends to none of them has zeros, and -inf.
    """

    out: Array
    lse: Array


def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Attended:
    """Attention of all rows to all columns that ``mask`` allows."""
    weights = _scores(q * _scale(q), k, mask)
    highest = _finite(weights.max(axis=-1, keepdims=True, initial=-np.inf))
    weights -= highest
    np.exp(weights, out=weights)
    totals = weights.sum(axis=-1)
    out = np.empty(q.shape, q.dtype)
    np.matmul(weights, _by_head(v), out=_by_head(out))
    out /= np.where(totals == 0, 1, totals).swapaxes(1, 2)[..., None].astype(q.dtype, copy=False)
    with np.errstate(divide="ignore"):
        return Attended(out, highest[..., 0] + np.log(totals))


def merge(a: Attended, b: Attended) -> Attended:
    """Attention to the columns of both, which have none in common."""
    lse = np.logaddexp(a.lse, b.lse)
    base = _finite(lse)
    of_a, of_b = (np.exp(part.lse - base).swapaxes(1, 2)[..., None] for part in (a, b))
    return Attended(a.out * of_a + b.out * of_b, lse)


def attend_backward(
    q: Array, k: Array, v: Array, lse: Array, delta: Array, grad: Array, mask: Array | None = None, *,
    out: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v by these columns, from that of the result of the whole rows; in ``out`` if given.

    ``lse`` and ``delta`` (`row_products`) are of the whole rows.  The gradient of q is the sum of those by all columns.
    """
    q_grad, k_grad, v_grad = out or (np.empty(x.shape, x.dtype) for x in (q, k, v))
    scaled = q * _scale(q)
    weights = _scores(scaled, k, mask)
    weights -= _finite(lse)[..., None]
    np.exp(weights, out=weights)
    np.matmul(weights.swapaxes(2, 3), _by_head(grad), out=_by_head(v_grad))
    scores_grad = _by_head(grad) @ _by_head(v).swapaxes(2, 3)
    scores_grad -= delta[..., None]
    scores_grad *= weights
    np.matmul(scores_grad, _by_head(k), out=_by_head(q_grad))
    q_grad *= _scale(q)
    np.matmul(scores_grad.swapaxes(2, 3), _by_head(scaled), out=_by_head(k_grad))
    return q_grad, k_grad, v_grad


def row_products(out: Array, grad: Array) -> Array:
    """The ``delta`` of `attend_backward`: the products of each row of the result with its gradient."""
    # by the dot product that makes the one score of a row that sees itself only: its gradient is zero exactly
    return np.ascontiguousarray(np.vecdot(out, grad).swapaxes(1, 2))


def causal_mask(rows: Sequence[int] | Array, columns: Sequence[int] | Array) -> Array:
    """True where a column does not come after a row, their places in the sequence given.

    >>> causal_mask([2, 3], [1, 2, 3]).astype(int).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    mask: Array = np.asarray(columns)[None, :] <= np.asarray(rows)[:, None]
    return mask


def spread_heads(x: Array, serves: Sequence[int]) -> Array:
    """Keys or values for each query head, head h being served by the key-value head ``serves[h]`` (grouped queries).

    Ainslie et al., *GQA*, 2023, arXiv:2305.13245.  ``x`` itself where every query head has its own.
    """
    return x if list(serves) == list(range(x.shape[2])) else x[:, :, list(serves)]


def gather_heads(grad: Array, serves: Sequence[int], kv_heads: int) -> Array:
    """The gradient of ``x`` from that of ``spread_heads(x, serves)``."""
    if list(serves) == list(range(kv_heads)):
        return grad
    found = np.zeros((*grad.shape[:2], kv_heads, grad.shape[3]), grad.dtype)
    for head, served_by in enumerate(serves):
        found[:, :, served_by] += grad[:, :, head]
    return found


def attend_flops(batch: int, heads: int, rows: int, columns: int, head_dim: int) -> int:
    """Of the two products of `attend`: two for each multiply-add; masked scores are computed, too."""
    return 4 * batch * heads * rows * columns * head_dim


def attend_backward_flops(batch: int, heads: int, rows: int, columns: int, head_dim: int) -> int:
    """Of the five products of `attend_backward`, the scores once more among them."""
    return 10 * batch * heads * rows * columns * head_dim


def _scores(scaled: Array, k: Array, mask: Array | None) -> Array:
    """Of queries that are scaled."""
    scores: Array = _by_head(scaled) @ _by_head(k).swapaxes(2, 3)
    if mask is not None:
        np.copyto(scores, -np.inf, where=~mask)
    return scores


def _scale(q: Array) -> Any:
    return q.dtype.type(1 / math.sqrt(max(q.shape[3], 1)))


def _by_head(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _finite(lse: Array) -> Array:
    """Something to subtract, where a row attends to nothing."""
    return np.where(np.isneginf(lse), 0, lse).astype(lse.dtype, copy=False)
