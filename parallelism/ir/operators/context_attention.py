"""Attention whose rows, with the keys and values of the same tokens, may be split over devices: context parallelism.

``context_attention`` computes what ``attention`` does of queries, keys and values of one sequence.  Its rows and its columns
are one dim, so a layout may split both.  When a program is laid out on devices
(`parallelism.layouts.localization.sequences`), blocks of keys and values travel round a ring (Liu et al., *Ring Attention*,
2023, arXiv:2310.01889).

``deal`` returns its input; in a program that is laid out the axes that split one dim split another one behind it.  So an
all_to_all each of queries, keys, values and result deals tokens to devices before and after attention, and heads within
(Jacobs et al., *DeepSpeed Ulysses*, 2023, arXiv:2309.14509, section 3).

``ring_shift`` passes the blocks of a dim on, each to the next device.  ``attention_block`` is the attention of rows to the
keys and values that come from ``number`` devices before, of ``blocks``; it joins the result to that of earlier blocks, if
they are given.  A block counts as many scores as it has where rows are dealt so that all devices have the same work: under
a causal mask each device has rows from both ends, the first block half of its scores and every other one half of them, too
(Dubey et al., *The Llama 3 Herd of Models*, 2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Operator, Rule, Shape, TensorType
from parallelism.ir.core.extents import divided, largest, rounded_up
from parallelism.ir.core.rules import elementwise
from parallelism.ir.core.table import first_dtype, register
from parallelism.ir.operators.attention import (
    ATTENTION,
    PRODUCTS_OF,
    BlockOfScores,
    apart,
    attention_gradient_kernel,
    attention_gradient_rule,
    attention_kernel,
    attention_rule,
    derivative_by,
    of_scores,
    sums_dtype,
)
from parallelism.ir.operators.masked_scores import allowed_scores, scores_of_part
from parallelism.ir.operators.token_order import ORDER
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import Scores
from parallelism.kernels.attention import Attended, merge

KINDS = ("context_attention", "context_attention_gradient")
"""The attention of one sequence, and its gradient."""


_rule, _gradient_rule = (partial(each, columns="q") for each in (attention_rule, attention_gradient_rule))
"""The columns are the rows: one dim."""


def _dtypes(q: TensorType, *_: TensorType, **__: Any) -> tuple[np.dtype[Any], ...]:
    return q.dtype, sums_dtype(q.dtype)


def _gradient_dtypes(
    grad: TensorType, out: TensorType, lse: TensorType, q: TensorType, *_: TensorType, **__: Any
) -> Any:
    return q.dtype, q.dtype, q.dtype


def _whole(kind: str) -> Callable[..., Extent]:
    """The operations of attention to all columns."""

    def flops(of: Rule, *, mask: str, whole: Shape, **_: Any) -> Extent:
        known = Scores.parse(mask).mask
        scores = scores_of_part(known, of.extents["q"], whole[1], whole[1])
        return rounded_up(of_scores(of, *PRODUCTS_OF[kind]) * scores)

    return flops


register(
    Operator(
        "context_attention",
        _rule,
        _dtypes,
        attention_kernel,
        derivative_by("context_attention_gradient"),
        _whole("attention"),
        ATTENTION,
        ORDER,
    )
)
register(
    Operator(
        "context_attention_gradient",
        _gradient_rule,
        _gradient_dtypes,
        attention_gradient_kernel,
        flops=_whole("attention_gradient"),
        attributes=ATTENTION,
        optional=ORDER,
    )
)


def _deal_rule(x: TensorType, axes: Any, before: int, after: int) -> Rule:
    if before == after or not (0 <= before < x.ndim and 0 <= after < x.ndim):
        raise ValueError(f"before and after must be two of the {x.ndim} dims, got {before} and {after}")
    return elementwise([x.shape])


register(
    Operator(
        "deal",
        _deal_rule,
        first_dtype,
        lambda x, axes, before, after: x.copy(),
        lambda g, y, x, axes, before, after: [apply("deal", g, axes=axes, before=after, after=before)],
        attributes={"axes": "a list of strings", "before": "an integer", "after": "an integer"},
        linear="together",
    )
)


# -- block by block ----------------------------------------------------------------------------------------------------


def _shift_rule(x: TensorType, axes: Any, group: Extent, dim: int) -> Rule:
    if not 0 <= dim < x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} dims, got {dim}")
    return elementwise([x.shape])


register(
    Operator(
        "ring_shift",
        _shift_rule,
        first_dtype,
        lambda x, axes, group, dim: np.roll(x, x.shape[dim] // group, dim),
        attributes={"axes": "a list of strings", "group": "an extent", "dim": "an integer"},
        linear="together",
        received=lambda x, axes, group, dim: x.nbytes if group != 1 else 0,
    )
)


def _block_rule(*types: TensorType, blocks: int, number: int, **attributes: Any) -> Rule:
    before, own = (types[:2], types[2:]) if number else ((), types)
    return _rule(*own, before=before, **attributes)


def _block_gradient_rule(*types: TensorType, blocks: int, number: int, **attributes: Any) -> Rule:
    return _gradient_rule(*types, **attributes)


def _block_dtypes(*types: TensorType, number: int, **_: Any) -> tuple[np.dtype[Any], ...]:
    dtype = types[2 if number else 0].dtype
    return dtype, sums_dtype(dtype)


def _of_block(kind: str) -> Callable[..., Extent]:
    def flops(of: Rule, *, mask: str, whole: Shape, blocks: int, number: int, **_: Any) -> Extent:
        known, rows, part = Scores.parse(mask).mask, whole[1], divided(whole[1], blocks)
        own, of_all = allowed_scores(known, part, part), scores_of_part(known, part, rows, rows)
        if known.documents:  # the documents of the first block may have more than the mean
            own = own + of_all - largest(own, of_all)
        scores = divided(of_all - own, blocks - 1) if number else own
        return rounded_up(divided(of_scores(of, *PRODUCTS_OF[kind]) * scores * of.extents["q"], part))

    return flops


def _blocks(starts: Sequence[int], rows: int, whole: Sequence[int], blocks: int, number: int) -> Any:
    """The slices of the rows that are blocks, the attributes of each, and the first of its columns."""
    extent = whole[1] // blocks
    for first in range(0, rows, extent):
        row = starts[1] + first
        begin = starts[0], row, *starts[2:]
        yield slice(first, first + extent), begin, (row - number * extent) % whole[1]


def _block(*arrays: Any, blocks: int, number: int, starts: Any, whole: Any, **options: Any) -> Any:
    before = arrays[:2] if number else None
    q, k, v, *step = arrays[2:] if number else arrays
    outs, lses = [], []
    for rows, begin, column in _blocks(starts, q.shape[1], whole, blocks, number):
        where = {"starts": begin, "whole": whole, "block": BlockOfScores(column, whole[1])}
        out, lse = attention_kernel(q[:, rows], k[:, rows], v[:, rows], *step, **where, **options)
        if before is not None:
            earlier_out, earlier_lse = before[0][:, rows], before[1][:, :, rows]
            earlier = Attended(earlier_out.astype(lse.dtype, copy=False), earlier_lse)
            out, lse = merge(earlier, Attended(out.astype(lse.dtype, copy=False), lse))
        outs.append(out.astype(q.dtype, copy=False))
        lses.append(lse)
    return np.concatenate(outs, 1), np.concatenate(lses, 2)


def _block_gradient(*arrays: Any, blocks: int, number: int, starts: Any, whole: Any, **options: Any) -> Any:
    grad, out, lse, q, k, v, *more = arrays
    step, of_lse = apart(more)
    found = []
    for rows, begin, column in _blocks(starts, q.shape[1], whole, blocks, number):
        found.append(
            attention_gradient_kernel(
                grad[:, rows],
                out[:, rows],
                lse[:, :, rows],
                q[:, rows],
                k[:, rows],
                v[:, rows],
                *step,
                *(x[:, :, rows] for x in of_lse),
                starts=begin,
                whole=whole,
                block=BlockOfScores(column, whole[1]),
                **options,
            )
        )
    return tuple(np.concatenate(each, 1) for each in zip(*found, strict=True))


_BLOCK = {**ATTENTION, "blocks": "an integer", "number": "an integer"}

register(
    Operator(
        "attention_block",
        _block_rule,
        _block_dtypes,
        _block,
        flops=_of_block("attention"),
        attributes=_BLOCK,
        optional=ORDER,
    )
)
register(
    Operator(
        "attention_block_gradient",
        _block_gradient_rule,
        _gradient_dtypes,
        _block_gradient,
        flops=_of_block("attention_gradient"),
        attributes=_BLOCK,
        optional=ORDER,
    )
)
