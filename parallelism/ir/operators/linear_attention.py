"""Linear attention with decay, which keeps a state in place of keys and values, and the short convolution before it.

`parallelism.kernels.linear_attention` says what they compute.  Queries and keys are ``(batch, tokens, groups, width)``,
values ``(batch, tokens, heads, width)``, log-decays and rates ``(batch, tokens, heads)``, and decays may have a number for
each feature of a key; each group of queries and keys serves ``heads / groups`` adjacent heads.  ``delta`` is the delta
rule, ``unit`` makes queries and keys vectors of length 1 first, and ``scale`` multiplies the queries.  Batch, groups and
heads may be split; the tokens of a sequence stay together.

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


def _inputs(g: TensorType) -> str:
    """The dims of the inputs: decays are those of heads, or of each feature of a key."""
    decays = f"{_NUMBERS}n!" if g.ndim == 4 else _NUMBERS
    return ",".join((_KEYS, _KEYS, _VALUES, decays, _NUMBERS))


class _Passes(NamedTuple):
    """How often kernels read or write an array of each kind, and the products that they compute."""

    keys: int
    """Arrays of the shape of queries, or of keys."""
    values: int
    """Arrays of the shape of values."""
    keys_of_heads: int
    """Arrays that have a key for each head."""
    numbers: int
    """Arrays that have a number for each head, in the dtype of sums."""
    wide_keys_of_heads: int
    """The same in the dtype of sums."""
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


PLAIN, DELTA, CHANNELS = "plain", "delta", "channels"
PASSES = {
    ("linear_attention", PLAIN): _Passes(4, 3, 0, 7, 0, 2, 2, 2, 0, 1, 1, 2),
    ("linear_attention_gradient", PLAIN): _Passes(27, 11, 0, 42, 0, 6, 5, 8, 0, 3, 3, 5),
    ("linear_attention", DELTA): _Passes(9, 6, 2, 8, 0, 0, 2, 0, 3, 3, 2, 3),
    ("linear_attention_gradient", DELTA): _Passes(21, 15, 13, 20, 0, 0, 4, 0, 2, 9, 5, 8),
    ("linear_attention", CHANNELS): _Passes(10, 6, 4, 3, 6, 0, 2, 1, 5, 3, 2, 3),
    ("linear_attention_gradient", CHANNELS): _Passes(12, 15, 8, 8, 14, 0, 4, 4, 3, 7, 5, 8),
}
"""By kind of op and by its rule, plain, the delta rule, or that with decays of each feature; counted in the kernels'
sources: each array that a kernel loads or stores counts once for the kernel, however many of its blocks load it.  Nothing
was measured.

Without the delta rule they are those of mamba_ssm 2.3.2, ``ops/triton/ssd_combined.py``: ``_mamba_chunk_scan_combined_fwd``
and ``_bwd`` without ``z``.  Scores ``C B^T`` are those of a group.  The gradients of keys and queries, and of scores, are in
float32, counted as two, and are copied by a sum over splits of the heads, of which there is one where blocks fill the GPU.

With it they are those of fla-core 0.6.0, ``fla/ops/gated_delta_rule/chunk.py``: ``chunk_gated_delta_rule_fwd`` and ``_bwd``
with chunks of 64 tokens, in which the triangle and its inverse are one kernel, and ``l2norm`` of queries and keys.  The
backward reads the inverse that the forward keeps, 64 numbers of a token and head, which no memory is counted for.  The
operations of that inverse, a third of the square of a chunk for each token, are left out.  With decays of each feature they
are ``fla/ops/kda/chunk_fwd.py`` and ``chunk_bwd.py``, ``chunk_kda_fwd`` and ``_bwd``, which keep two triangles."""


def _rule_of(delta: bool, decays: Any) -> str:
    """Which kernels go through these decays, of so many dims."""
    if len(decays) == 4:
        return CHANNELS
    return DELTA if delta else PLAIN


def _rule(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, **attributes: Any
) -> Rule:
    types = q, k, v, g, beta
    return rule(f"{_inputs(g)}->{_VALUES}", [x.shape for x in types], _served(q, k, v, **attributes))


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
    return rule(
        f"{_VALUES},{_inputs(g)}->{_inputs(g)}", [x.shape for x in types], _served(q, k, v, **attributes)
    )


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
        passes, extents = PASSES[kind, _rule_of(delta, of.inputs[-2])], of.extents
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
    delta, chunk, extents = op["delta"], op["chunk"], op.rule.extents
    tokens, chunks = extents["b"] * extents["t"], extents["b"] * ceil_div(extents["t"], chunk)
    scores = tokens * _tokens_of_chunk(chunk, extents["t"])
    passes = PASSES[op.kind, _rule_of(delta, op.rule.inputs[-2])]
    return _moved(passes, op.inputs[-3].type, extents, (tokens, chunks, scores), delta=delta)


def _moved(
    passes: _Passes, v: TensorType, extents: Any, counts: tuple[Extent, Extent, Extent], *, delta: bool
) -> Extent:
    """The bytes of kernels on so many tokens, chunks and scores of a head."""
    tokens, chunks, scores = counts
    narrow, wide = v.dtype.itemsize, sums_dtype(v.dtype).itemsize
    groups, heads = extents["g"], product(extents[letter] for letter in "gr")
    keys, values = extents["n"], extents["p"]
    of_token = (passes.keys * groups + passes.keys_of_heads * heads) * keys + passes.values * heads * values
    of_chunk = (passes.wide_states * wide + passes.states * narrow) * heads * keys * values
    of_score = (passes.wide_scores * wide + passes.scores * narrow) * (heads if delta else groups)
    wide_of_token = passes.numbers * heads + passes.wide_keys_of_heads * heads * keys
    found: Extent = tokens * (of_token * narrow + wide_of_token * wide)
    found += chunks * of_chunk + scores * of_score
    return found


def _prepared(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, unit: bool
) -> tuple[list[Any], list[int], list[tuple[Any, Any]]]:
    """The inputs in the dtype of sums with queries and keys of each head, the group of each head, and what made vectors of
    length 1 of them."""
    groups, heads = k.shape[2], v.shape[2]
    served = [group for group in range(groups) for _ in range(heads // groups)]
    dtype = sums_dtype(v.dtype)
    q, k, v, g, beta = (x.astype(dtype, copy=False) for x in (q, k, v, g, beta))
    units = []
    if unit:
        units = [unit_vectors(q), unit_vectors(k)]
        q, k = (vectors for vectors, _ in units)
    return [spread_heads(q, served), spread_heads(k, served), v, g, beta], served, units


def _kernel(*inputs: Any, chunk: int, delta: bool, unit: bool, scale: float) -> Any:
    arrays, _, _ = _prepared(*inputs, unit=unit)
    found, _ = linear_attend(*arrays, chunk=chunk, delta=delta)
    return (found * found.dtype.type(scale)).astype(inputs[2].dtype, copy=False)


def _gradient(grad: Any, *inputs: Any, chunk: int, delta: bool, unit: bool, scale: float) -> Any:
    arrays, served, units = _prepared(*inputs, unit=unit)
    dtype, groups = arrays[2].dtype, inputs[1].shape[2]
    of_read = grad.astype(dtype, copy=False) * dtype.type(scale)
    of_q, of_k, *others = linear_attend_backward(of_read, *arrays, chunk=chunk, delta=delta)
    of_q, of_k = (gather_heads(x, served, groups) for x in (of_q, of_k))
    if units:
        (unit_q, scale_q), (unit_k, scale_k) = units
        of_q = unit_vectors_backward(of_q, unit_q, scale_q)
        of_k = unit_vectors_backward(of_k, unit_k, scale_k)
    grads = of_q, of_k, *others
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
    text = f"{kept},{_inputs(g)},{_PLACES}->{kept},{_VALUES}"
    return rule(text, [x.shape for x in types], _served(q, k, v, **attributes))


def _cached_dtypes(
    states: TensorType, q: TensorType, k: TensorType, v: TensorType, *others: TensorType, **_: Any
) -> tuple[np.dtype[Any], ...]:
    floating(states)
    return states.dtype, floating(q, k, v)


def _cached_flops(of: Rule, *, chunk: int, delta: bool, read: Extent, scored: Extent, **_: Any) -> Extent:
    """Each token has the products with its states, and chunks have those between their tokens, whole ones."""
    extents, passes = of.extents, PASSES["linear_attention", _rule_of(delta, of.inputs[4])]
    groups, heads = extents["g"], product(extents[letter] for letter in "gr")
    inside = passes.products_of_keys * extents["n"] * (heads if delta else groups)
    inside += passes.products_of_values * extents["p"] * heads
    through = passes.products_of_states * extents["n"] * extents["p"] * heads
    of_tokens = extents["t"] * 2 * through
    of_chunks = scored * chunk * (chunk + 1) * inside  # two flops for each of chunk (chunk + 1) / 2 pairs
    return extents["b"] * (of_tokens + of_chunks)


def _cached_nbytes(op: Op) -> Extent:
    """States and inputs once and results once; and what chunks read and write more: see `PASSES`."""
    delta, chunk, extents = op["delta"], op["chunk"], op.rule.extents
    states, v = op.inputs[0].type, op.inputs[3].type
    rule = _rule_of(delta, op.rule.inputs[4])
    whole = PASSES["linear_attention", rule]
    more = whole._replace(keys=whole.keys - 2, values=whole.values - 2, numbers=whole.numbers - 2)
    if rule == CHANNELS:
        more = more._replace(numbers=whole.numbers - 1, wide_keys_of_heads=whole.wide_keys_of_heads - 1)
    of_chunk = _moved(more, v, extents, (chunk, 1, chunk * chunk), delta=delta)
    of_state = 2 * product((states.shape[0], *states.shape[2:])) * states.dtype.itemsize
    once = sum((value.type.nbytes for value in (*op.inputs[1:], op.outputs[1])), 0)
    found: Extent = once + op["read"] * of_state + extents["b"] * op["scored"] * of_chunk
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

_PLAIN = {"plain": "a bool"}
"""Whether sums stay as they are; else silu makes the result of them."""


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


def _taps(of: Rule, each: int, more: int, plain: bool) -> Extent:
    return (2 * each * of.extents["k"] + (0 if plain else more)) * product(
        extent for letter, extent in of.extents.items() if letter != "k"
    )


register(
    Operator(
        "short_convolution",
        lambda *types, **_: _convolution_rule(*types, given=0),
        floating,
        short_convolution,
        lambda grad, y, *inputs, **how: [*apply("short_convolution_gradient", grad, *inputs, **how)],
        lambda of, plain=False: _taps(of, 1, 5, plain),
        optional=_PLAIN,
    )
)
register(
    Operator(
        "short_convolution_gradient",
        lambda *types, **_: _convolution_rule(*types, given=1),
        floating,
        short_convolution_backward,
        flops=lambda of, plain=False: _taps(of, 3, 9, plain),
        optional=_PLAIN,
    )
)


def _cached_convolution_rule(last: TensorType, *types: TensorType, **_: Any) -> Rule:
    """``last, x, weight[, bias], positions, table``, to what is kept of the last tokens and the result."""
    x, weight = types[:2]
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
    last: Array,
    x: Array,
    weight: Array,
    *others: Array,
    plain: bool = False,
    out: Array | None = None,
    **_: Any,
) -> tuple[Array, Array]:
    *bias, positions, table = others
    kept, before = last.copy() if out is None else out, last.shape[2]
    made = np.zeros(x.shape, x.dtype)
    for replica, slot, tokens, begins in _in_slots(positions, table):
        history = np.zeros(last.shape[2:], x.dtype) if begins else kept[replica, slot]
        joined = np.concatenate([history, x[replica, tokens]])
        made[replica, tokens] = short_convolution(joined[None], weight, *bias, plain=plain)[0, before:]
        kept[replica, slot] = joined[len(joined) - before :]
    return kept, made


register(
    Operator(
        "cached_short_convolution",
        _cached_convolution_rule,
        _cached_convolution_dtypes,
        _cached_convolution,
        flops=lambda of, plain=False, **_: (
            (2 * of.extents["k"] + (0 if plain else 5))
            * product(of.extents[letter] for dim in of.inputs[1] for letter in dim)
        ),
        attributes={"read": "an extent"},
        optional=_PLAIN,
        op_nbytes=_cached_convolution_nbytes,
        reuses=True,
    )
)
