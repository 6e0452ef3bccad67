"""Scaled dot-product attention, softmax(q k^T / sqrt(d)) v, whole or block by block, forward and backward.

Queries are ``(batch, rows, heads, head_dim)``; keys and values are ``(batch, columns, heads, head_dim)``; results have
the shape of the queries, with the width of the values where that is another one.  Quantities per row of the scores are
``(batch, heads, rows)``.  ``mask`` is ``(rows, columns)``, true where a row may attend to a column (`Mask.allowed`);
None allows every column.  ``factors``, of the shape of the scores, multiply the weights after the softmax, as dropout
does.  ``scale`` is 1 / sqrt(d) if it is None.  ``cap`` and ``bias`` change scores before the mask: they become ``cap *
tanh(score / cap)``, and ``bias``, ``(heads, rows, columns)``, is added.

`merge` joins the results over two sets of columns; it needs only the logarithm of each softmax's denominator (the
log-sum-exp ``lse``).  So keys may arrive block by block, and no row of scores is ever held whole (Milakov and
Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv:1805.02867, section 3).  The backward of a block
needs the ``lse`` of the whole row and recomputes the block's weights (Dao, *FlashAttention-2*, 2023, arXiv:2307.08691,
algorithm 2).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array


class Attended(NamedTuple):
    """The result of attention to some columns.  A row that attends to no column has the result 0 and lse -inf."""

    out: Array
    """The weighted values, ``(batch, rows, heads, head_dim)``."""
    lse: Array
    """The log-sum-exp of each row's scores, ``(batch, heads, rows)``."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    factors: Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
    bias: Array | None = None,
) -> Attended:
    """Attention of all rows to all columns that ``mask`` allows."""
    weights, _ = _scores(q * _scale(q, scale), k, mask, cap, bias)
    highest = finite(weights.max(axis=-1, keepdims=True, initial=-np.inf))
    weights -= highest
    np.exp(weights, out=weights)
    totals = weights.sum(axis=-1)
    if factors is not None:
        weights *= factors
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    np.matmul(weights, _by_head(v), out=_by_head(out))
    out /= np.where(totals == 0, 1, totals).swapaxes(1, 2)[..., None].astype(q.dtype, copy=False)
    with np.errstate(divide="ignore"):
        return Attended(out, highest[..., 0] + np.log(totals))


def merge(a: Attended, b: Attended) -> Attended:
    """Attention to the columns of both results, which must have no column in common."""
    lse = np.logaddexp(a.lse, b.lse)
    base = finite(lse)
    of_a, of_b = (np.exp(part.lse - base).swapaxes(1, 2)[..., None] for part in (a, b))
    return Attended(a.out * of_a + b.out * of_b, lse)


def attend_backward(
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    delta: Array,
    grad: Array,
    mask: Array | None = None,
    *,
    out: tuple[Array, Array, Array] | None = None,
    factors: Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v through these columns, given ``grad``, that of the result.  ``out`` receives them.

    ``lse`` and ``delta`` (`row_products`) belong to whole rows, over all columns.  The gradient of q is the sum of the
    returned ones over all blocks of columns.
    """
    q_grad, k_grad, v_grad = out or (np.empty(x.shape, x.dtype) for x in (q, k, v))
    scaled = q * _scale(q, scale)
    weights, slopes = _scores(scaled, k, mask, cap, bias)
    weights -= finite(lse)[..., None]
    np.exp(weights, out=weights)
    used = weights if factors is None else weights * factors
    np.matmul(used.swapaxes(2, 3), _by_head(grad), out=_by_head(v_grad))
    scores_grad = _by_head(grad) @ _by_head(v).swapaxes(2, 3)
    if factors is not None:
        scores_grad *= factors
    scores_grad -= delta[..., None]
    scores_grad *= weights
    if slopes is not None:
        scores_grad *= slopes
    np.matmul(scores_grad, _by_head(k), out=_by_head(q_grad))
    q_grad *= _scale(q, scale)
    np.matmul(scores_grad.swapaxes(2, 3), _by_head(scaled), out=_by_head(k_grad))
    return q_grad, k_grad, v_grad


def row_products(out: Array, grad: Array) -> Array:
    """The ``delta`` of `attend_backward`: the dot product of each row of the result with its gradient."""
    # The same dot product computes the scores, so the gradient of a row that attends to one column is exactly zero.
    return np.ascontiguousarray(np.vecdot(out, grad).swapaxes(1, 2))


def spread_heads(x: Array, serves: Sequence[int]) -> Array:
    """The keys or values of each query head: query head h uses key-value head ``serves[h]`` (grouped queries).

    It returns ``x`` itself if every query head has its own.  Ainslie et al., *GQA*, 2023, arXiv:2305.13245.
    """
    return x if list(serves) == list(range(x.shape[2])) else x[:, :, list(serves)]


def gather_heads(grad: Array, serves: Sequence[int], kv_heads: int) -> Array:
    """The gradient of ``x``, given the gradient of ``spread_heads(x, serves)``."""
    if list(serves) == list(range(kv_heads)):
        return grad
    total = np.zeros((*grad.shape[:2], kv_heads, grad.shape[3]), grad.dtype)
    for head, served_by in enumerate(serves):
        total[:, :, served_by] += grad[:, :, head]
    return total


def attend_flops(batch: int, heads: int, rows: int, columns: int, head_dim: int) -> int:
    """Floating-point operations of the two products of `attend`.  Masked scores are computed, too."""
    return 4 * batch * heads * rows * columns * head_dim


def attend_backward_flops(batch: int, heads: int, rows: int, columns: int, head_dim: int) -> int:
    """Floating-point operations of the five products of `attend_backward`; one of them recomputes the scores."""
    return 10 * batch * heads * rows * columns * head_dim


def _scores(
    scaled: Array, k: Array, mask: Array | None, cap: float | None, bias: Array | None
) -> tuple[Array, Array | None]:
    """The masked scores of scaled queries, ``(batch, heads, rows, columns)``, and the slope of ``cap`` at each."""
    scores: Array = _by_head(scaled) @ _by_head(k).swapaxes(2, 3)
    slopes = None
    if cap is not None:
        share = np.tanh(scores / scores.dtype.type(cap))
        scores = share * scores.dtype.type(cap)
        slopes = 1 - share * share
    if bias is not None:
        scores += bias
    if mask is not None:
        np.copyto(scores, -np.inf, where=~mask)
    return scores, slopes


def _scale(q: Array, scale: float | None) -> Any:
    return q.dtype.type(1 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale)


def _by_head(x: Array) -> Array:
    return x.swapaxes(1, 2)


def finite(lse: Array) -> Array:
    """``lse`` with 0 in place of -inf, so that it can be subtracted."""
    return np.where(np.isneginf(lse), 0, lse).astype(lse.dtype, copy=False)
