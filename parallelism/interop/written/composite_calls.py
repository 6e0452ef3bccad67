"""Operators that are several ops of StableHLO, in JAX: attention, normalizations, losses.  Most gradients are JAX's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np

from parallelism.interop.errors import UnsupportedError
from parallelism.ir.core import Op
from parallelism.kernels import Mask, Scores
from parallelism.kernels.token_order import positions_of

Call = Callable[[Any, Op, list[Any]], Any]


def _gradient(jax: Any, function: Callable[..., Any], inputs: Sequence[Any], grad: Any) -> Any:
    """The gradients of the inputs, given that of the result."""
    found = jax.vjp(function, *inputs)[1](grad)
    return found if len(found) > 1 else found[0]


def _layer_norm(jax: Any, op: Op) -> Callable[..., Any]:
    def normalized(x: Any, weight: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + op["epsilon"]) * weight
            + bias
        )

    return normalized


def _layer_norm_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    grad, values, weight = x
    return _gradient(jax, _layer_norm(jax, op), (values, weight, jax.numpy.zeros_like(weight)), grad)


def _rms_norm(jax: Any, op: Op) -> Callable[..., Any]:
    return lambda x, weight: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + op["epsilon"]) * weight


def _attended(jax: Any, op: Op, q: Any, k: Any, v: Any) -> Any:
    """Queries times the scale, keys and values of each head, the masked scores, and the slope of their cap."""
    if op["rate"]:
        what = "dropout inside attention has no counterpart in StableHLO here"
        raise UnsupportedError(what, op.kind, op.region or "")
    served = q.shape[2] // k.shape[2]
    wide = np.result_type(q.dtype, np.float32)
    q, k, v = (
        each.astype(wide) for each in (q, jax.numpy.repeat(k, served, 2), jax.numpy.repeat(v, served, 2))
    )
    q = q * (1 / sqrt(max(q.shape[3], 1)) if op["scale"] is None else op["scale"])
    scores = jax.numpy.einsum("bqhd,bkhd->bhqk", q, k)
    how, slope = Scores.parse(op["mask"]), 1.0
    if how.cap is not None:
        share = jax.numpy.tanh(scores / how.cap)
        scores, slope = how.cap * share, 1 - share * share
    _, first_row, first_head, _ = op["starts"]
    rows = positions_of(_order(op), 1, first_row, scores.shape[-2])
    columns = positions_of(_order(op), 1, 0, scores.shape[-1])
    bias = how.bias(range(first_head, first_head + q.shape[2]), rows, columns)
    scores = scores if bias is None else scores + bias.astype(wide)
    return q, k, v, _masked(jax, how.mask, scores, rows, columns), slope


def _order(op: Op) -> str:
    """The order of the tokens; empty for the plain one."""
    return str(dict(op.attributes).get("order", ""))


def _finite(jax: Any, lse: Any) -> Any:
    return jax.numpy.where(jax.numpy.isneginf(lse), 0, lse)[..., None]


def _attention(jax: Any, op: Op, x: list[Any]) -> Any:
    """The result and the log-sum-exp of each row; a row without columns has the result 0."""
    _, _, v, scores, _ = _attended(jax, op, *x[:3])
    lse = jax.nn.logsumexp(scores, -1)
    return jax.numpy.einsum("bhqk,bkhd->bqhd", jax.numpy.exp(scores - _finite(jax, lse)), v), lse


def _attention_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    """From the log-sum-exp and the result of the forward, which are inputs of the op."""
    grad, out, lse, q_own, k_own, v_own, *_ = x
    q, k, v, scores, slope = _attended(jax, op, q_own, k_own, v_own)
    weights = jax.numpy.exp(scores - _finite(jax, lse))
    inner = jax.numpy.einsum("bqhd,bqhd->bhq", out.astype(q.dtype), grad.astype(q.dtype))[..., None]
    of_scores = weights * (jax.numpy.einsum("bqhd,bkhd->bhqk", grad.astype(q.dtype), v) - inner) * slope
    scale = 1 / sqrt(max(q.shape[3], 1)) if op["scale"] is None else op["scale"]

    def of_groups(each: Any) -> Any:
        batch, columns, heads, width = each.shape
        groups = k_own.shape[2]
        return each.reshape(batch, columns, groups, heads // groups, width).sum(3)

    return (
        jax.numpy.einsum("bhqk,bkhd->bqhd", of_scores, k) * scale,
        of_groups(jax.numpy.einsum("bhqk,bqhd->bkhd", of_scores, q)),
        of_groups(jax.numpy.einsum("bhqk,bqhd->bkhd", weights, grad.astype(q.dtype))),
    )


def _attention_weights(jax: Any, op: Op, x: list[Any]) -> Any:
    jnp = jax.numpy
    scores = x[0].astype(np.result_type(x[0].dtype, np.float32)) * op["scale"]
    rows, columns = scores.shape[-2:]
    first = op["starts"][-2]
    scores = _masked(jax, Mask.parse(op["mask"]), scores, range(first, first + rows), range(columns))
    largest = scores.max(-1, keepdims=True)
    # A row without columns has minus infinity as its largest score, and weights of 0.
    terms = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))
    sums = terms.sum(-1, keepdims=True)
    return terms / jnp.where(sums == 0, 1, sums)


def _masked(jax: Any, mask: Mask, scores: Any, rows: Any, columns: Any) -> Any:
    """The scores of rows and columns at these positions, minus infinity where a row does not attend to a column."""
    allowed = mask.allowed(rows, columns)
    return scores if allowed is None else jax.numpy.where(allowed, scores, -np.inf)


def _rotary(jax: Any, op: Op, x: list[Any]) -> Any:
    width = x[0].shape[-1]
    wide = x[0].astype(np.result_type(x[0].dtype, np.float32))
    positions = positions_of(_order(op), x[0].ndim - 3, op["starts"][-3], x[0].shape[-3])
    angles = (
        positions[:, None, None]
        * op["base"] ** (-np.arange(0, width, 2) / width)
        * (-1 if op["inverse"] else 1)
    )
    even = wide[..., ::2]
    odd = wide[..., 1::2]
    cos = np.cos(angles)
    sin = np.sin(angles)
    return jax.numpy.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x[0].shape)


def _softmax_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    product = x[0] * x[1]
    return (product - x[1] * product.sum(op["axis"], keepdims=True)) * op["scale"]


def _places(jax: Any, classes: Any, whole: int, first: int, count: int) -> tuple[Any, Any]:
    """Whether each class is in this part, and its place there; negative classes count from the end."""
    place = jax.numpy.where(classes < 0, classes + whole, classes) - first
    return (place >= 0) & (place < count), place


def _chosen(jax: Any, op: Op, classes: Any, logits: Any) -> tuple[Any, Any]:
    """Whether each row's class is among these columns, and a 1 in that column, 0 in the others."""
    count = logits.shape[-1]
    here, place = _places(jax, classes, op["whole"], op["first"], count)
    return here, jax.nn.one_hot(place, count, dtype=logits.dtype)


def _cross_entropy(jax: Any, op: Op, x: list[Any]) -> Any:
    logits, classes, largest, sums = x
    logits = logits.astype(largest.dtype)
    here, chosen = _chosen(jax, op, classes, logits)
    target = (logits * chosen).sum(-1)
    each = jax.numpy.log(jax.numpy.maximum(sums, 1)) + largest - target
    return jax.numpy.where(here, each, 0).sum() / op["rows"]


def _cross_entropy_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    grad, given, classes, largest, sums = x
    logits = given.astype(largest.dtype)
    terms = jax.numpy.exp(logits - largest[..., None])
    shares = terms / jax.numpy.maximum(sums, 1)[..., None]
    _, chosen = _chosen(jax, op, classes, logits)
    found = grad / op["rows"] * (shares - chosen)
    return found.astype(given.dtype)


def _softmax_cross_entropy(jax: Any, op: Op, x: list[Any]) -> Any:
    logits, targets = x
    targets = jax.nn.one_hot(targets, logits.shape[1], dtype=logits.dtype) if targets.ndim == 1 else targets
    return -(targets * jax.nn.log_softmax(logits, 1)).sum() / op["rows"]


def _take_part(jax: Any, op: Op, x: list[Any]) -> Any:
    table, indices = x
    here, place = _places(jax, indices, op["whole"], op["first"], table.shape[op["axis"]])
    taken = jax.numpy.take(table, place, op["axis"], mode="clip")
    shape = [1] * op["axis"] + [*indices.shape] + [1] * (taken.ndim - op["axis"] - indices.ndim)
    return jax.numpy.where(here.reshape(shape), taken, 0)


def _take_part_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    grad, indices = x
    table = jax.numpy.zeros(op.outputs[0].type.shape, grad.dtype)
    return _gradient(jax, lambda table: _take_part(jax, op, [table, indices]), [table], grad)


def _take_along_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    grad, indices = x
    table = jax.numpy.zeros(op.outputs[0].type.shape, grad.dtype)
    return _gradient(jax, lambda table: jax.numpy.take_along_axis(table, indices, op["axis"]), [table], grad)


def _take_along_part(jax: Any, op: Op, x: list[Any]) -> Any:
    table, indices = x
    here, place = _places(jax, indices, op["whole"], op["first"], table.shape[op["axis"]])
    return jax.numpy.where(here, jax.numpy.take_along_axis(table, place, op["axis"], mode="clip"), 0)


def _take_along_part_gradient(jax: Any, op: Op, x: list[Any]) -> Any:
    grad, indices = x
    table = jax.numpy.zeros(op.outputs[0].type.shape, grad.dtype)
    return _gradient(jax, lambda table: _take_along_part(jax, op, [table, indices]), [table], grad)


COMPOSITES: dict[str, Call] = {
    "layer_norm": lambda jax, op, x: _layer_norm(jax, op)(*x),
    "layer_norm_gradient": _layer_norm_gradient,
    "rms_norm": lambda jax, op, x: _rms_norm(jax, op)(*x),
    "rms_norm_gradient": lambda jax, op, x: _gradient(jax, _rms_norm(jax, op), x[1:], x[0]),
    "attention": _attention,
    "attention_gradient": _attention_gradient,
    "attention_weights": _attention_weights,
    "rotary": _rotary,
    "softmax_gradient": _softmax_gradient,
    "exponential_sums": lambda jax, op, x: jax.numpy.exp(x[0] - x[1][..., None]).sum(-1),
    "cross_entropy": _cross_entropy,
    "cross_entropy_gradient": _cross_entropy_gradient,
    "mean_squared_error": lambda jax, op, x: ((x[0] - x[1]) ** 2).sum() / (op["rows"] * x[0].shape[1]),
    "softmax_cross_entropy": _softmax_cross_entropy,
    "swiglu_gradient": lambda jax, op, x: _gradient(jax, lambda gate, z: jax.nn.silu(gate) * z, x[1:], x[0]),
    "weighted_swiglu_gradient": lambda jax, op, x: _gradient(
        jax, lambda gate, z, weights: jax.nn.silu(gate) * z * weights[..., None], x[1:], x[0]
    ),
    "stop_gradient": lambda jax, op, x: x[0],
    "local_loss": lambda jax, op, x: x[0],
    **dict.fromkeys(("widen", "saturate"), lambda jax, op, x: x[0].astype(op["dtype"])),
    "token_order": lambda jax, op, x: jax.numpy.asarray(
        positions_of(op["order"], 0, op["starts"][0], op["shape"][0])
    ),
    "arranged": lambda jax, op, x: jax.numpy.take(x[0], x[1], op["axis"]),
    "arranged_gradient": lambda jax, op, x: _gradient(
        jax,
        lambda table: jax.numpy.take(table, x[1], op["axis"]),
        [jax.numpy.zeros(op.outputs[0].type.shape, x[0].dtype)],
        x[0],
    ),
    "take_part": _take_part,
    "take_gradient_part": _take_part_gradient,
    "take_along_gradient": _take_along_gradient,
    "take_along_part": _take_along_part,
    "take_along_gradient_part": _take_along_part_gradient,
}
"""What these operators are in JAX: ``(jax, op, arrays)`` gives the output, or a tuple of them."""
