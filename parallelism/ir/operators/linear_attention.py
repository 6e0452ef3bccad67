"""Linear attention with decay, which keeps a state in place of keys and values, and the short convolution before it.

`parallelism.kernels.linear_attention` says what they compute.  Queries and keys are ``(batch, tokens, groups, width)``,
values ``(batch, tokens, heads, width)``, log-decays and rates ``(batch, tokens, heads)``; each group of queries and keys
serves ``heads / groups`` adjacent heads.  ``delta`` is the delta rule, ``unit`` makes queries and keys vectors of length 1
first, and ``scale`` multiplies the queries.  Batch, groups and heads may be split; the tokens of a sequence stay together.

Both are priced as the kernels that software runs, chunk by chunk, whose states and scores go through memory: `PASSES` has
the bytes.  The gradient reads the inputs alone: it computes the states again, and so keeps none of them.

In inference the states of sequences, and the last tokens before the convolution, lie in slots, one for each sequence.  With
x replicas, s slots and t tokens, ``positions`` (x, t) are those of the tokens, -1 of what is no token, and the first column
of a ``table`` (x, t, 1) has the slot of each.  Tokens of one slot follow each other in time; at position 0 it begins anew.

    cached_linear_attention(states, q, k, v, g, beta, positions, table)    states (x, s, heads, width of keys, of values)
    cached_short_convolution(last, x, weight[, bias], positions, table)    last (x, s, taps - 1, ...)

Both return what they keep, in its memory, and what the tokens get.  ``read`` is the number of slots of a replica that are
read and written, and ``scored`` that of the chunks of sequences with several tokens: they go through the kernels of whole
sequences, and single tokens through one that reads each state once, and writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.ir.core import Extent, Op, Operator, Rule, TensorType
from parallelism.ir.core.extents import ceil_div, largest, product
from parallelism.ir.core.rules import letters, rule
from parallelism.ir.core.table import register
from parallelism.ir.operators.activations import floating
from parallelism.ir.operators.attention import served_heads_of, sums_dtype
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import gather_heads, spread_heads
from parallelism.kernels.linear_attention import (
    linear_attend,
    linear_attend_backward,
    short_convolution,
    short_convolution_backward,
    unit_vectors,
    unit_vectors_backward,
)

WHOLE_SEQUENCES = frozenset(
    ("linear_attention", "linear_attention_gradient", "short_convolution", "short_convolution_gradient")
)
"""The operators that go through a sequence token by token: it cannot be split."""

# -- the recurrence ----------------------------------------------------------------------------------------------------

_KEYS, _VALUES, _NUMBERS = "bt!gn!", "bt(gr)p!", "bt(gr)"
_INPUTS = ",".join((_KEYS, _KEYS, _VALUES, _NUMBERS, _NUMBERS))


class _Passes(NamedTuple):
    """How often kernels read or write an array of each kind, and the products that they compute."""

    keys: int
    """Arrays of the shape of queries, or of keys."""
    values: int
    """Arrays of the shape of values."""
    keys_of_heads: int
    """Arrays that have a key for each head."""
    wide_states: int
    """States at the begin of all chunks, in the dtype of sums."""
    states: int
    """The same in the dtype of values."""
    wide_scores: int
    """Scores inside chunks, in the dtype of sums."""
    scores: int
    products_of_keys: int
    """Products inside chunks whose terms are as many as a key is wide, or a value."""
    products_of_values: int
    products_of_states: int


PASSES = {
    ("linear_attention", False): _Passes(4, 3, 0, 2, 2, 2, 0, 1, 1, 2),
    ("linear_attention_gradient", False): _Passes(14, 11, 0, 12, 0, 6, 0, 3, 2, 5),
    ("linear_attention", True): _Passes(5, 6, 2, 0, 2, 2, 2, 3, 2, 3),
    ("linear_attention_gradient", True): _Passes(11, 15, 12, 0, 4, 2, 3, 9, 5, 8),
}
"""By kind of op and by ``delta``: an estimate, written from memory of these kernels.  Without the delta rule they follow
``mamba_ssm/ops/triton/ssd_combined.py`` of
github.com/state-spaces/mamba, ``_mamba_chunk_scan_combined_fwd`` and ``_bwd``: the states of chunks and the scores ``C
B^T``, of each group, are kernels of their own.  With it they are ``chunk_gated_delta_rule_fwd`` and ``_bwd`` of
github.com/fla-org/flash-linear-attention, ``fla/ops/gated_delta_rule/chunk.py``: of each head the triangle is written, its
inverse, and what that makes of keys and values.  Its backward reads the inverse that the forward has kept; here it is
computed again.  The operations of that inverse, a third of the square of a chunk for each token, are left out."""


def _rule(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, **attributes: Any
) -> Rule:
    types = q, k, v, g, beta
    return rule(f"{_INPUTS}->{_VALUES}", [x.shape for x in types], _served(q, k, v, **attributes))


def _gradient_rule(
    grad: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    g: TensorType,
    beta: TensorType,
    **attributes: Any,
) -> Rule:
    types = grad, q, k, v, g, beta
    return rule(f"{_VALUES},{_INPUTS}->{_INPUTS}", [x.shape for x in types], _served(q, k, v, **attributes))


def _served(
    q: TensorType, k: TensorType, v: TensorType, chunk: int, delta: bool, unit: bool, scale: float
) -> dict[str, Extent]:
    """The number of heads that each group serves; ``ValueError`` for inputs that cannot be."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"queries, keys and values must have 4 dims, got {q}, {k} and {v}")
    if chunk < 1:
        raise ValueError(f"a chunk must have at least 1 token, got {chunk}")
    return served_heads_of(v.shape[2], k.shape[2], "values")


def _dtypes(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, **_: Any
) -> np.dtype[Any]:
    for numbers in (g, beta):
        floating(numbers)
    return floating(q, k, v)


def _gradient_dtypes(
    grad: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    g: TensorType,
    beta: TensorType,
    **_: Any,
) -> tuple[np.dtype[Any], ...]:
    floating(grad, q, k, v)
    return q.dtype, k.dtype, v.dtype, floating(g), floating(beta)


def _flops(kind: str) -> Any:
    """The operations of the products, two for each term; a token has scores with those of its chunk up to itself."""

    def flops(of: Rule, *, chunk: int, delta: bool, **_: Any) -> Extent:
        passes, extents = PASSES[kind, delta], of.extents
        groups, heads = extents["g"], product(extents[letter] for letter in "gr")
        inside = passes.products_of_keys * extents["n"] * (heads if delta else groups)
        inside += passes.products_of_values * extents["p"] * heads
        through = passes.products_of_states * extents["n"] * extents["p"] * heads
        tokens = extents["b"] * extents["t"]
        return tokens * ((_tokens_of_chunk(chunk, extents["t"]) + 1) * inside + 2 * through)

    return flops


def _tokens_of_chunk(chunk: int, tokens: Extent) -> Extent:
    return chunk + tokens - largest(chunk, tokens)


def _nbytes(op: Op) -> Extent:
    """What the kernels read and write: see `PASSES`."""
    delta, chunk = op["delta"], op["chunk"]
    passes, extents = PASSES[op.kind, delta], op.rule.extents
    q, v, *numbers = op.inputs[-5].type, op.inputs[-3].type, op.inputs[-2].type, op.inputs[-1].type
    narrow, wide = v.dtype.itemsize, sums_dtype(v.dtype).itemsize
    tokens, chunks = extents["b"] * extents["t"], extents["b"] * ceil_div(extents["t"], chunk)
    heads = product(extents[letter] for letter in "gr")
    states = chunks * heads * extents["n"] * extents["p"]
    scores = tokens * _tokens_of_chunk(chunk, extents["t"]) * (heads if delta else extents["g"])
    return (
        passes.keys * q.nbytes
        + passes.values * v.nbytes
        + passes.keys_of_heads * tokens * heads * extents["n"] * narrow
        + (passes.wide_states * wide + passes.states * narrow) * states
        + (passes.wide_scores * wide + passes.scores * narrow) * scores
        + (1 if len(op.outputs) == 1 else 2) * sum(x.nbytes for x in numbers)
    )


def _prepared(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, unit: bool
) -> tuple[list[Any], list[int], list[tuple[Any, Any]]]:
    """The inputs in the dtype of sums with queries and keys of each head, the group of each head, and what made vectors of
    length 1 of them."""
    served = [group for group in range(k.shape[2]) for _ in range(v.shape[2] // k.shape[2])]
    dtype = sums_dtype(v.dtype)
    arrays = [x.astype(dtype, copy=False) for x in (q, k, v, g, beta)]
    units = [unit_vectors(x) for x in arrays[:2]] if unit else []
    arrays[:2] = [spread_heads(x, served) for x in ([y for y, _ in units] or arrays[:2])]
    return arrays, served, units


def _kernel(*inputs: Any, chunk: int, delta: bool, unit: bool, scale: float) -> Any:
    arrays, _, _ = _prepared(*inputs, unit=unit)
    found, _ = linear_attend(*arrays, chunk=chunk, delta=delta)
    return (found * found.dtype.type(scale)).astype(inputs[2].dtype, copy=False)


def _gradient(grad: Any, *inputs: Any, chunk: int, delta: bool, unit: bool, scale: float) -> Any:
    arrays, served, units = _prepared(*inputs, unit=unit)
    grad = grad.astype(arrays[2].dtype, copy=False) * arrays[2].dtype.type(scale)
    grads = [*linear_attend_backward(grad, *arrays, chunk=chunk, delta=delta)]
    grads[:2] = [gather_heads(x, served, inputs[1].shape[2]) for x in grads[:2]]
    grads[: len(units)] = [unit_vectors_backward(x, *made) for x, made in zip(grads, units, strict=False)]
    return tuple(x.astype(given.dtype, copy=False) for x, given in zip(grads, inputs, strict=True))


_ATTRIBUTES = {"chunk": "an integer", "delta": "a bool", "unit": "a bool", "scale": "a number"}

register(
    Operator(
        "linear_attention",
        _rule,
        _dtypes,
        _kernel,
        lambda grad, y, *inputs, **attributes: [
            *apply("linear_attention_gradient", grad, *inputs, **attributes)
        ],
        _flops("linear_attention"),
        _ATTRIBUTES,
        op_nbytes=_nbytes,
    )
)
register(
    Operator(
        "linear_attention_gradient",
        _gradient_rule,
        _gradient_dtypes,
        _gradient,
        flops=_flops("linear_attention_gradient"),
        attributes=_ATTRIBUTES,
        op_nbytes=_nbytes,
    )
)

# -- states in slots ---------------------------------------------------------------------------------------------------

_PLACES = "bt!,bt!y!"
"""The dims of positions and of the table."""


def _check_places(kept: TensorType, positions: TensorType, table: TensorType) -> None:
    for name, type, ndim in (("positions", positions, 2), ("a table", table, 3)):
        if type.dtype.kind not in "iu" or type.ndim != ndim:
            raise TypeError(f"{name} must be integers of {ndim} dims, got {type}")
    if kept.ndim < 4:
        raise ValueError(f"what is kept must have dims (replicas, slots, ...), got {kept}")


def _cached_rule(
    states: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    g: TensorType,
    beta: TensorType,
    positions: TensorType,
    table: TensorType,
    *,
    read: Extent,
    scored: Extent,
    **attributes: Any,
) -> Rule:
    _check_places(states, positions, table)
    types = states, q, k, v, g, beta, positions, table
    kept = "bs!(gr)n!p!"
    text = f"{kept},{_INPUTS},{_PLACES}->{kept},{_VALUES}"
    return rule(text, [x.shape for x in types], _served(q, k, v, **attributes))


def _cached_dtypes(
    states: TensorType, q: TensorType, k: TensorType, v: TensorType, *others: TensorType, **_: Any
) -> tuple[np.dtype[Any], ...]:
    floating(states)
    return states.dtype, floating(q, k, v)


def _cached_flops(of: Rule, *, chunk: int, delta: bool, read: Extent, scored: Extent, **_: Any) -> Extent:
    """Each token has the products with its states, and chunks have those between their tokens, whole ones."""
    extents, passes = of.extents, PASSES["linear_attention", delta]
    groups, heads = extents["g"], product(extents[letter] for letter in "gr")
    inside = passes.products_of_keys * extents["n"] * (heads if delta else groups)
    inside += passes.products_of_values * extents["p"] * heads
    through = passes.products_of_states * extents["n"] * extents["p"] * heads
    return extents["b"] * (extents["t"] * 2 * through + scored * chunk * (chunk + 1) * inside)


def _cached_nbytes(op: Op) -> Extent:
    """States and inputs once and results once; and what chunks read and write more: see `PASSES`."""
    delta, chunk = op["delta"], op["chunk"]
    passes, extents = PASSES["linear_attention", delta], op.rule.extents
    states, _, _, v = (value.type for value in op.inputs[:4])
    narrow, wide = v.dtype.itemsize, sums_dtype(v.dtype).itemsize
    groups, heads = extents["g"], product(extents[letter] for letter in "gr")
    keys, values, state = extents["n"], heads * extents["p"], heads * extents["n"] * extents["p"]
    numbers = (
        (passes.keys - 2) * groups * keys + (passes.values - 2) * values + passes.keys_of_heads * heads * keys
    )
    of_chunk = (passes.wide_states * wide + passes.states * narrow) * state + chunk * narrow * numbers
    of_chunk += (
        chunk * chunk * (passes.wide_scores * wide + passes.scores * narrow) * (heads if delta else groups)
    )
    once = sum((value.type.nbytes for value in (*op.inputs[1:], op.outputs[1])), 0)
    found: Extent = once + extents["b"] * (
        2 * op["read"] * state * states.dtype.itemsize + op["scored"] * of_chunk
    )
    return found


def _in_slots(positions: Array, table: Array) -> Iterator[tuple[int, int, Array, bool]]:
    """The replica and the slot of each sequence, its tokens, and whether it begins with them."""
    for replica, (own, slots) in enumerate(zip(positions, table[..., 0], strict=True)):
        for slot in np.unique(slots[own >= 0]):
            tokens = np.flatnonzero((own >= 0) & (slots == slot))
            yield replica, slot, tokens, not own[tokens[0]]


def _cached(
    states: Array,
    *inputs: Array,
    chunk: int,
    delta: bool,
    unit: bool,
    scale: float,
    out: Array | None = None,
    **_: Any,
) -> tuple[Array, Array]:
    *given, positions, table = inputs
    arrays, _served, _units = _prepared(*given, unit=unit)
    kept = states.copy() if out is None else out
    made = np.zeros(given[2].shape, given[2].dtype)
    for replica, slot, tokens, begins in _in_slots(positions, table):
        before = None if begins else kept[replica, slot][None].astype(arrays[2].dtype, copy=False)
        q, k, v, g, beta = (x[replica, tokens][None] for x in arrays)
        found, behind = linear_attend(q, k, v, g, beta, before, chunk=chunk, delta=delta)
        made[replica, tokens] = found[0] * found.dtype.type(scale)
        kept[replica, slot] = behind[0]
    return kept, made


_COUNTED = {"read": "an extent", "scored": "an extent"}

register(
    Operator(
        "cached_linear_attention",
        _cached_rule,
        _cached_dtypes,
        _cached,
        flops=_cached_flops,
        attributes=_ATTRIBUTES | _COUNTED,
        op_nbytes=_cached_nbytes,
        reuses=True,
    )
)

# -- the short convolution ---------------------------------------------------------------------------------------------


def _convolution_rule(*types: TensorType, given: int) -> Rule:
    """``[grad,] x, weight[, bias]``, to the result, or to the gradients of all but the first."""
    x, weight = types[given : given + 2]
    if x.ndim < 3 or weight.ndim != x.ndim - 1:
        raise ValueError(
            f"tokens have a dim of channels, and the weight has taps for each, got {x} and {weight}"
        )
    channels = letters(x.ndim - 2, "btk")
    rows, weights = f"bt!{channels}", [f"{channels}k!", channels][: len(types) - 1 - given]
    inputs = ",".join((*([rows] * (given + 1)), *weights))
    return rule(f"{inputs}->{','.join((rows, *weights)) if given else rows}", [type.shape for type in types])


def _taps(of: Rule, each: int, more: int) -> Extent:
    return (2 * each * of.extents["k"] + more) * product(
        extent for letter, extent in of.extents.items() if letter != "k"
    )


register(
    Operator(
        "short_convolution",
        lambda *types: _convolution_rule(*types, given=0),
        floating,
        short_convolution,
        lambda grad, y, *inputs: [*apply("short_convolution_gradient", grad, *inputs)],
        lambda of: _taps(of, 1, 5),
    )
)
register(
    Operator(
        "short_convolution_gradient",
        lambda *types: _convolution_rule(*types, given=1),
        floating,
        short_convolution_backward,
        flops=lambda of: _taps(of, 3, 9),
    )
)


def _cached_convolution_rule(last: TensorType, *types: TensorType, read: Extent) -> Rule:
    """``last, x, weight[, bias], positions, table``, to what is kept of the last tokens and the result."""
    x, weight, *_ = types
    _check_places(last, *types[-2:])
    plain = _convolution_rule(*types[:-2], given=0)
    if last.shape[2] != weight.shape[-1] - 1:
        raise ValueError(f"{weight.shape[-1]} taps need {weight.shape[-1] - 1} last tokens, got {last}")
    channels = letters(x.ndim - 2, "btksmy")
    given = f"bt!{channels}", f"{channels}k!", channels
    kept = f"bs!m!{channels}"
    text = f"{kept},{','.join(given[: len(plain.inputs)])},{_PLACES}->{kept},bt!{channels}"
    return rule(text, [type.shape for type in (last, *types)])


def _cached_convolution_dtypes(last: TensorType, *types: TensorType, **_: Any) -> tuple[np.dtype[Any], ...]:
    return floating(last), floating(*types[:-2])


def _cached_convolution_nbytes(op: Op) -> Extent:
    last = op.inputs[0].type
    once = sum((value.type.nbytes for value in (*op.inputs[1:], op.outputs[1])), 0)
    kept: Extent = once + 2 * op["read"] * product((last.shape[0], *last.shape[2:])) * last.dtype.itemsize
    return kept


def _cached_convolution(
    last: Array, x: Array, weight: Array, *others: Array, out: Array | None = None, **_: Any
) -> tuple[Array, Array]:
    *bias, positions, table = others
    kept, before = last.copy() if out is None else out, last.shape[2]
    made = np.zeros(x.shape, x.dtype)
    for replica, slot, tokens, begins in _in_slots(positions, table):
        history = np.zeros(last.shape[2:], x.dtype) if begins else kept[replica, slot]
        joined = np.concatenate([history, x[replica, tokens]])
        made[replica, tokens] = short_convolution(joined[None], weight, *bias)[0, before:]
        kept[replica, slot] = joined[len(joined) - before :]
    return kept, made


register(
    Operator(
        "cached_short_convolution",
        _cached_convolution_rule,
        _cached_convolution_dtypes,
        _cached_convolution,
        flops=lambda of, **_: (
            (2 * of.extents["k"] + 5)
            * product(extent for letter, extent in of.extents.items() if letter not in "ksmy")
        ),
        attributes={"read": "an extent"},
        op_nbytes=_cached_convolution_nbytes,
        reuses=True,
    )
)
