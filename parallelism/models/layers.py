"""Layers of Transformers, from operators of the table.  They are recorded, or computed at once on NumPy's arrays."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import Mask, Scores


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | None = None,
    causal: bool = True,
    scale: float | None = None,
    cap: float | None = None,
    alibi: float | None = None,
    sinks: Any = None,
    step: Any = None,
    rate: float = 0.0,
    seed: int = 0,
    fused: bool = True,
) -> Any:
    """Attention, softmax(scale * q k^T) v.

    ``q`` is ``(batch, rows, heads, width)``; ``k`` and ``v`` are ``(batch, columns, groups, width)``, and each of their
    groups serves ``heads / groups`` adjacent heads.  The result has the shape of ``q``, with the width of ``v`` where that
    is another one.  ``scale`` is 1 / sqrt(width) if it is None.  ``mask`` says to which columns a row attends.  If none is
    given, these are the columns up to its own position, or all of them if it is not ``causal``.  ``rate`` is that of
    dropout of the weights; ``step`` and ``seed`` select what is dropped, as for `dropout`.

    Scores x become ``cap * tanh(x / cap)``; ``alibi`` multiplies the slopes of biases by distance
    (`parallelism.kernels.Scores`).  ``sinks``, of shape ``(heads,)``, are one more score for each row, to which no value
    belongs.

    ``fused``: one operator, whose scores are never written.  Without it scores, weights, mask and dropped weights are
    arrays; the numbers are the same.  ``alibi`` and ``sinks`` need it.
    """
    mask = Mask(causal=causal) if mask is None else mask
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    scale = 1 / sqrt(width) if scale is None else scale
    if fused:
        scores = Scores(mask, cap) if alibi is None else Scores(mask, cap, heads, alibi)
        random = {"rate": rate, "seed": seed if rate else 0, "whole": q.shape, "starts": (0, 0, 0, 0)}
        mixed, lse = apply(
            "attention", q, k, v, *([step] if rate else []), scale=scale, mask=str(scores), **random
        )
        return mixed if sinks is None else mixed * share_without_sinks(lse, sinks).astype(mixed.dtype)
    if alibi is not None or sinks is not None:
        raise ValueError("alibi and sinks need fused attention")
    grouped = q.reshape((batch, rows, groups, heads // groups, width))
    scores = np.einsum("bqgrd,bkgd->bgrqk", grouped, k)
    if cap is not None:
        scores, scale = capped(scores * scale, cap), 1.0
    weights = apply("attention_weights", scores, scale=scale, mask=str(mask), starts=(0,) * 5)
    weights = dropout(weights, step, rate, seed)
    return np.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape((batch, rows, heads, v.shape[3]))


def share_without_sinks(lse: Any, sinks: Any) -> Any:
    """The share of a row's sum that sinks leave to its columns, ``(batch, rows, heads, 1)``."""
    batch, heads, rows = lse.shape
    left = apply("sigmoid", lse - sinks.astype(lse.dtype)[:, None])
    return left.transpose(0, 2, 1).reshape((batch, rows, heads, 1))


def capped(x: Any, cap: float) -> Any:
    """``cap * tanh(x / cap)``."""
    return np.tanh(x * (1 / cap)) * cap


def dropout(x: Any, step: Any, rate: float, seed: int = 0) -> Any:
    """``x`` with each element zero with probability ``rate``, the others divided by 1 - ``rate``.

    The mask depends on ``seed``, on ``step`` (a single integer) and on the position of an element, so it is the same on
    any mesh.  The gradient reads a mask of one byte per element.
    """
    if not rate:
        return x
    dropped, _ = apply("dropout", x, step, rate=rate, seed=seed, whole=x.shape, starts=(0,) * x.ndim)
    return dropped


def rotary(
    x: Any,
    base: float = 10000.0,
    *,
    scaling: str | None = None,
    width: int | None = None,
    positions: Any = None,
) -> Any:
    """Rotary positions (`parallelism.kernels.rotate`) of ``x``, of shape ``(batch, sequence, heads, width)``.

    ``scaling`` is the text of a `parallelism.kernels.RotaryScaling`.  ``width``: so many features, the first, are
    rotated; None: all.  ``positions``, of shape ``(batch, sequence)``, are those of the tokens; None: 0, 1, ...
    """
    if width is not None and width != x.shape[3]:
        turned, kept = np.split(x, [width], axis=3)
        return np.concatenate([rotary(turned, base, scaling=scaling, positions=positions), kept], axis=3)
    scaled = "" if scaling is None else "scaled_"
    scalings = {} if scaling is None else {"scaling": scaling}
    if positions is not None:
        return apply(f"{scaled}rotary_at", x, positions, base=base, **scalings)
    return apply(f"{scaled}rotary", x, base=base, inverse=False, starts=(0,) * x.ndim, **scalings)


def cross_entropy(logits: Any, classes: Any, *, fused: bool = False) -> Any:
    """The mean over all rows of the cross-entropy of ``classes``, integers, with logits of shape ``(..., classes)``.

    It is computed in float32 at least.  The classes may be split over devices: then one maximum and one sum are reduced
    for each row, and the loss.  If it is ``fused``, no logits and no gradient of them is written in float32: kernels
    read them as they are, and widen each number.
    """
    wide = np.result_type(logits.dtype, np.float32)
    if not fused:
        logits = logits.astype(wide)
    largest = np.max(logits, axis=-1).astype(wide)
    sums = apply("exponential_sums", logits, largest)
    return apply(
        "cross_entropy", logits, classes, largest, sums, rows=classes.size, first=0, whole=logits.shape[-1]
    )
