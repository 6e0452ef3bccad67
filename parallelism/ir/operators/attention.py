"""Attention, and the operators around it: rotary positions, and the weights of attention that keeps its scores.

``attention`` is one operator that never writes the scores: its gradient computes them again from the log-sum-exp of
each row (Dao, *FlashAttention-2*, 2023, arXiv:2307.08691).  Without it the scores are a product, ``attention_weights``
makes their softmax, and ``dropout`` and a second product follow; then the weights, the mask of one byte per element and
the weights after dropout are kept for the gradient.

Queries are ``(batch, rows, heads, width)``, keys and values ``(batch, columns, groups, width)``; values may have another
width than keys, as in latent attention, which is then that of the result.  Each group of keys and values serves
``heads / groups`` adjacent heads (Ainslie et al., *GQA*, 2023, arXiv:2305.13245).  ``mask`` is the text of a
`parallelism.kernels.Scores`: under ``causal`` a row attends to the columns up to its own position, under ``causal:128``
to the last 128 of them; behind ``;`` may stand a cap of scores and biases by distance.  Batch, heads and rows may be
split: ``starts`` is the position of the part in an output of shape ``whole``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.ir.core import Extent, Op, Operator, Rule, Shape, TensorType
from parallelism.ir.core.extents import divided, product, quotient, rounded_up
from parallelism.ir.core.rules import letters, rule
from parallelism.ir.core.table import register
from parallelism.ir.operators.activations import floating
from parallelism.ir.operators.masked_scores import equal_keys, scores_of_part
from parallelism.ir.operators.token_order import ORDER
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import (
    Mask,
    RotaryScaling,
    Scores,
    attend,
    attend_backward,
    dropout_mask,
    gather_heads,
    rotate,
    rotate_backward,
    row_products,
    spread_heads,
)
from parallelism.kernels.attention import finite
from parallelism.kernels.token_order import TokenOrder, part_of, positions_of

# -- one operator ------------------------------------------------------------------------------------------------------


def attention_rule(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    *step: TensorType,
    before: Sequence[TensorType] = (),
    columns: str = "k!",
    **attributes: Any,
) -> Rule:
    """The dims of attention; ``before`` has the result and the log-sum-exp of earlier keys, if it is joined to them.

    ``columns`` is the dim of the keys: a dim of their own, or that of the rows, ``q``.
    """
    check_attention(q, k, step, **attributes)
    keys, values, result = _dims(k, v, columns)
    given = f"{result},{LSE}," if before else ""
    return rule(
        f"{given}{Q},{keys},{values}{',' * len(step)}->{result},{LSE}",
        [x.shape for x in (*before, q, k, v, *step)],
        served_heads(q, k),
    )


def attention_gradient_rule(
    grad: TensorType,
    out: TensorType,
    lse: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    *more: TensorType,
    columns: str = "k!",
    **attributes: Any,
) -> Rule:
    """The dims of the gradient of attention; ``columns`` is that of `attention_rule`."""
    step, of_lse = apart(more)
    check_attention(q, k, step, **attributes)
    if not grad.shape == out.shape == (*q.shape[:3], *v.shape[3:]) or lse.shape != (
        q.shape[0],
        q.shape[2],
        q.shape[1],
    ):
        raise ValueError(
            f"the result, its gradient and the log-sum-exp must belong to queries {q}, got {out}, {grad} "
            f"and {lse}"
        )
    types = (grad, out, lse, q, k, v, *more)
    keys, values, result = _dims(k, v, columns)
    return rule(
        f"{result},{result},{LSE},{Q},{keys},{values}{',' * len(step)}{f',{LSE}' * len(of_lse)}->{Q},{keys},{values}",
        [x.shape for x in types],
        served_heads(q, k),
    )


def apart(more: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The step, and the gradient of the log-sum-exp, if they are among the inputs of a gradient."""
    return [x for x in more if not x.ndim], [x for x in more if x.ndim]


Q, LSE = "bq(gr)d!", "b(gr)q"
"""The dims of queries and of the log-sum-exp: r heads are served by each of g groups."""


def _dims(k: TensorType, v: TensorType, columns: str) -> tuple[str, str, str]:
    """The dims of keys, of values and of the result: the width of values may be another one than that of keys."""
    width = "d" if v.shape[3:] == k.shape[3:] else "w"
    return f"b{columns}gd!", f"b{columns}g{width}!", f"bq(gr){width}!"


def _products(keys: int, values: int) -> Callable[..., Extent]:
    """The operations of so many products of queries and keys, and so many with values: two for each term of a sum.

    The scores that the mask hides are not computed (`parallelism.ir.operators.masked_scores`).
    """

    def flops(of: Rule, *, mask: str, whole: Shape, **_: Any) -> Extent:
        known, rows, columns = Scores.parse(mask).mask, whole[1], of.extents["k"]
        count = of_scores(of, keys, values) * scores_of_part(known, of.extents["q"], rows, columns)
        is_whole = rows == columns and known.window is None and not known.documents
        return count if is_whole else rounded_up(count)

    return flops


def of_scores(of: Rule, keys: int, values: int) -> Extent:
    """The operations of one score of every head."""
    heads, width = product(of.extents[letter] for letter in "bgr"), of.extents["d"]
    return 2 * heads * (keys * width + values * of.extents.get("w", width))


def hidden_flops(op: Op) -> Extent:
    """The operations that attention does not do because its mask hides scores; 0 for other ops."""
    if op.kind not in PRODUCTS_OF:
        return 0
    of = op.rule
    return of_scores(of, *PRODUCTS_OF[op.kind]) * of.extents["q"] * of.extents["k"] - op.flops


def served_heads(q: TensorType, k: TensorType) -> dict[str, Extent]:
    """The number of heads that each group of keys and values serves."""
    return served_heads_of(q.shape[2], k.shape[2])


def served_heads_of(heads: Extent, groups: Extent, what: str = "queries") -> dict[str, Extent]:
    """The number of heads of queries, or of ``what`` else, that each head of keys serves."""
    served: Extent | None = 1
    if heads != groups:
        served = quotient((heads,), (groups,)) if groups != 0 else None
    if served is None or served * groups != heads:
        raise ValueError(f"the {heads} heads of the {what} must be a multiple of the {groups} of the keys")
    return {"r": served}


def check_attention(
    q: TensorType,
    k: TensorType,
    step: Sequence[TensorType],
    scale: float,
    mask: str,
    rate: float,
    seed: int,
    whole: Shape,
    starts: Shape,
    order: str = "",
) -> None:
    if order:
        TokenOrder.parse(order)
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"queries, keys and values must have 4 dims, got {q} and {k}")
    Scores.parse(mask)
    if not 0 <= seed < 2**64 or not 0 <= rate < 1:
        raise ValueError(
            f"the seed must be in [0, 2**64) and the rate in [0, 1), got seed={seed} and rate={rate}"
        )
    if not len(whole) == len(starts) == 4:
        raise ValueError(f"whole and starts must have 4 entries, got {len(whole)} and {len(starts)}")
    if len(step) != bool(rate):
        raise ValueError(
            f"it takes the step after the values if the rate is not 0, and only then; the rate is {rate}"
        )
    for type in step:
        if type.shape or type.dtype.kind not in "iu":
            raise TypeError(f"the step must be a single integer, got {type}")


_FIRST_OF: dict[str, int] = {
    "attention": 0,
    "attention_gradient": 3,
    "context_attention": 0,
    "context_attention_gradient": 3,
    "attention_block": 0,
    "attention_block_gradient": 3,
}
"""By kind of op, the place of the queries among its inputs; keys follow them."""


def attention_shape(op: Op) -> tuple[Extent, Extent, Extent, Extent, int] | None:
    """The (count, rows, keys, width, causal) of attention: so many heads, and 1 where a mask hides later keys.

    Under a window the keys are so many as have as many scores without it.  None for other ops.
    """
    first = _FIRST_OF.get(op.kind)
    if first is None:
        return None
    number = dict(op.attributes).get("number", 0)
    if number and first == 0:
        first = 2  # behind the results of earlier blocks
    batch, rows, heads, width = op.inputs[first].type.shape
    mask = Scores.parse(op["mask"]).mask
    columns = op.inputs[first + 1].type.shape[1]
    if number:  # half of them in the mean
        return batch * heads, rows, rounded_up(divided(columns, 2)) if mask.causal else columns, width, 0
    keys = equal_keys(mask, rows if op.kind.startswith("attention_block") else op["whole"][1], columns)
    return batch * heads, rows, keys, width, int(mask.causal)


def sums_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which the sums of a row are kept: at least float32."""
    return np.result_type(dtype, np.float32)


def _dtypes(
    q: TensorType, k: TensorType, v: TensorType, *step: TensorType, **_: Any
) -> tuple[np.dtype[Any], ...]:
    dtype = floating(q, k, v)
    return dtype, sums_dtype(dtype)


def _gradient_dtypes(
    grad: TensorType,
    out: TensorType,
    lse: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    *more: TensorType,
    **_: Any,
) -> tuple[np.dtype[Any], ...]:
    floating(q, k, v, grad, out)
    if lse.dtype != sums_dtype(q.dtype):
        raise TypeError(f"the log-sum-exp must be of {sums_dtype(q.dtype)}, got {lse.dtype}")
    return q.dtype, q.dtype, q.dtype


class BlockOfScores(NamedTuple):
    """The columns of a block of keys: the position of the first one, and how many there are in all."""

    first: int
    all_columns: int


class _Part:
    """What all kernels of attention need: the arrays in the dtype of the sums, the mask, and the factors of dropout."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        step: Sequence[Any],
        mask: str,
        rate: float,
        seed: int,
        whole: Sequence[int],
        starts: Sequence[int],
        block: BlockOfScores | None = None,
        order: str = "",
    ) -> None:
        self.served = [head for head in range(k.shape[2]) for _ in range(q.shape[2] // k.shape[2])]
        self.dtype = sums_dtype(q.dtype)
        self.q = q.astype(self.dtype, copy=False)
        self.k, self.v = (spread_heads(x.astype(self.dtype, copy=False), self.served) for x in (k, v))
        first, all_columns = (0, k.shape[1]) if block is None else block
        own = part_of(order, starts, q.shape)
        rows = positions_of(order, 1, starts[1], q.shape[1])
        columns = positions_of(order, 1, first, k.shape[1])
        scores = Scores.parse(mask)
        bias = scores.bias(range(starts[2], starts[2] + q.shape[2]), rows, columns)
        self.changes: dict[str, Any] = {
            "cap": scores.cap,
            "bias": None if bias is None else bias.astype(self.dtype),
        }
        self.mask = scores.mask.allowed(rows, columns)
        self.factors = None
        if rate:
            kept = dropout_mask(
                rate,
                seed,
                int(step[0]),
                (whole[0], whole[2], whole[1], all_columns),
                [*(own[d] for d in (0, 2, 1)), columns],
            )
            self.factors = kept.astype(self.dtype) / (1 - rate)


def attention_kernel(q: Any, k: Any, v: Any, *step: Any, scale: float, **options: Any) -> Any:
    part = _Part(q, k, v, step, **options)
    out, lse = attend(part.q, part.k, part.v, part.mask, factors=part.factors, scale=scale, **part.changes)
    return out.astype(q.dtype, copy=False), lse


def attention_gradient_kernel(
    grad: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *more: Any, scale: float, **options: Any
) -> Any:
    step, of_lse = apart(more)
    part = _Part(q, k, v, step, **options)
    grad, out = grad.astype(part.dtype, copy=False), out.astype(part.dtype, copy=False)
    delta = row_products(out, grad)
    if of_lse:
        delta = delta - of_lse[0].astype(part.dtype, copy=False)
    q_grad, *others = attend_backward(
        part.q,
        part.k,
        part.v,
        lse,
        delta,
        grad,
        part.mask,
        factors=part.factors,
        scale=scale,
        **part.changes,
    )
    grads = (q_grad, *(gather_heads(x, part.served, k.shape[2]) for x in others))
    return tuple(x.astype(q.dtype, copy=False) for x in grads)


def derivative_by(
    gradient: str, of_keys: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Callable[..., Any]:
    """The derivative of attention whose gradient is the operator ``gradient``.

    Where the log-sum-exp alone has a gradient, plain attention gives it, with the attributes ``of_keys``.
    """

    def derivative(g: Any, y: Any, q: Any, k: Any, v: Any, *step: Any, **attributes: Any) -> list[Any]:
        grad, of_lse = g
        out, lse = y
        if grad is not None:
            more = step if of_lse is None else (*step, of_lse)
            grads = apply(gradient, grad, out, lse, q, k, v, *more, **attributes)
            return [*grads, *(None for _ in step)]
        if of_lse is None:
            return [None] * (3 + len(step))
        return _slope_of_lse(of_lse, y, q, k, v, step, attributes)

    return derivative


def _slope_of_lse(
    of_lse: Any, y: Any, q: Any, k: Any, v: Any, step: Sequence[Any], attributes: dict[str, Any]
) -> list[Any]:
    """The gradients where that of the log-sum-exp is given alone."""
    out, lse = y
    # The slope of the log-sum-exp by the scores is the softmax: that of attention to keys without dropout.
    attributes = attributes | {"rate": 0, "seed": 0}
    weight = of_lse.transpose(0, 2, 1).reshape((*q.shape[:3], 1)).astype(q.dtype)
    if "cap" not in attributes["mask"]:
        mixed, _ = apply("attention", q, k, k, **attributes)
        of_q = weight * mixed * attributes["scale"]
        of_k = apply("attention_gradient", weight * q, mixed, lse, q, k, k, **attributes)[2]
        return [of_q, of_k * attributes["scale"], None, *(None for _ in step)]
    nothing = out * 0
    of_q, of_k, _ = apply("attention_gradient", nothing, nothing, lse, q, k, v, of_lse, **attributes)
    return [of_q, of_k, None, *(None for _ in step)]


ATTENTION = {
    "scale": "a number",
    "mask": "a string",
    "rate": "a number",
    "seed": "an integer",
    "whole": "a shape",
    "starts": "a shape",
}

PRODUCTS_OF = {"attention": (1, 1), "attention_gradient": (3, 2)}
"""By kind of op, its products of queries and keys, and its products with values.  Those of a gradient are five, of which
one is computed again."""

register(
    Operator(
        "attention",
        attention_rule,
        _dtypes,
        attention_kernel,
        derivative_by("attention_gradient"),
        _products(*PRODUCTS_OF["attention"]),
        ATTENTION,
        ORDER,
    )
)
register(
    Operator(
        "attention_gradient",
        attention_gradient_rule,
        _gradient_dtypes,
        attention_gradient_kernel,
        flops=_products(*PRODUCTS_OF["attention_gradient"]),
        attributes=ATTENTION,
        optional=ORDER,
    )
)


# -- weights of attention whose scores are kept ------------------------------------------------------------------------


def _weights_rule(scores: TensorType, scale: float, mask: str, starts: Shape) -> Rule:
    Mask.parse(mask)
    if scores.ndim < 2 or len(starts) != scores.ndim:
        raise ValueError(
            f"scores have at least 2 dims, rows and columns, and starts has an entry for each: {scores}, "
            f"{len(starts)} entries"
        )
    names = letters(scores.ndim - 1, "z")
    return rule(f"{names}z!->{names}z!", [scores.shape])


def _weights(scores: Any, scale: float, mask: str, starts: Sequence[int]) -> Any:
    """The softmax of each row over the columns that it attends to; 0 where it attends to none."""
    weights = scores.astype(sums_dtype(scores.dtype))
    weights *= scale
    rows = np.arange(starts[-2], starts[-2] + scores.shape[-2])
    allowed = Mask.parse(mask).allowed(rows, np.arange(scores.shape[-1]))
    if allowed is not None:
        np.copyto(weights, -np.inf, where=~allowed)
    weights -= finite(weights.max(axis=-1, keepdims=True, initial=-np.inf))
    np.exp(weights, out=weights)
    totals = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(totals == 0, 1, totals)
    return weights.astype(scores.dtype, copy=False)


register(
    Operator(
        "attention_weights",
        _weights_rule,
        floating,
        _weights,
        lambda g, y, scores, scale, mask, starts: [
            apply("softmax_gradient", g, y, axis=y.ndim - 1, scale=float(scale))
        ],
        5,
        {"scale": "a number", "mask": "a string", "starts": "a shape"},
    )
)


# -- rotary positions --------------------------------------------------------------------------------------------------


def _rotary_rule(x: TensorType, starts: Shape, scaling: str = "", order: str = "", **_: Any) -> Rule:
    width = x.shape[-1] if x.ndim >= 3 else None
    if width is None or (isinstance(width, int) and width % 2) or len(starts) != x.ndim:
        raise ValueError(
            f"the input must have dims (..., sequence, heads, an even width), with an entry of starts for "
            f"each, got {x} and {len(starts)} entries"
        )
    if scaling:
        RotaryScaling.parse(scaling)
    if order:
        TokenOrder.parse(order)
    names = letters(x.ndim - 1, "z")
    return rule(f"{names}z!->{names}z!", [x.shape])


def _rotary(
    x: Any, base: float, inverse: bool, starts: Sequence[int], scaling: str = "", order: str = ""
) -> Any:
    positions = positions_of(order, x.ndim - 3, starts[-3], x.shape[-3])
    return (rotate_backward if inverse else rotate)(
        x, positions, base, RotaryScaling.parse(scaling) if scaling else None
    )


def _register_rotary(kind: str, more: dict[str, str]) -> None:
    """Register rotary positions; ``scaled_rotary`` says by a text how frequencies are stretched."""
    register(
        Operator(
            kind,
            _rotary_rule,
            floating,
            _rotary,
            lambda g, y, x, inverse, **how: [apply(kind, g, inverse=not inverse, **how)],
            6,
            {"base": "a number", "inverse": "a bool", "starts": "a shape", **more},
            ORDER,
            linear="together",
        )
    )


_register_rotary("rotary", {})
_register_rotary("scaled_rotary", {"scaling": "a string"})
