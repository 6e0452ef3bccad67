"""Attention over a cache of keys and values, the writes into it, and rotary positions of tokens at any place.

A cache lies in pages (Kwon et al., *PagedAttention*, 2023, arXiv:2309.06180, section 4).  With x replicas of a cache, t
tokens and p pages of s places in each, a token has a row of a ``table``, (x, t, K): the pages of its sequence, in order.
They are a ring: position n lies in place ``n % (K s)`` of the sequence.  ``positions`` (x, t) are those of the tokens, -1 of
what is no token, and ``ends`` (x, t) say how many tokens of a token's sequence the cache has after the write of this step.

    write_cache(cache, new, positions, ends, table)    (x, p, s, g, d), (x, t, g, d), ... -> the cache, in its memory
    cached_attention(q, keys, values, positions, ends, table)          -> (x, t, heads, width), (x, heads, t)
    cached_latent_attention(q, cache, positions, ends, table)          values are the first ``width`` features of a key

Tokens are written first, and then each attends to what is before it, itself among that.  Of two tokens for one place the
later one stays, so a ring of a window needs no more places than the window if a step has one token of a sequence.

``read`` is the number of places whose keys and values a kernel reads, of all sequences of a replica, and ``scored`` that of
the scores of a head; if the tokens are split, of a device's share.  They are extents, so a step of any contexts is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.ir.core import Extent, Op, Operator, Rule, TensorType, first_dtype, rule
from parallelism.ir.core.extents import product
from parallelism.ir.core.table import register
from parallelism.ir.operators.activations import floating
from parallelism.ir.operators.attention import served_heads_of, sums_dtype
from parallelism.kernels import RotaryScaling, Scores, rotate, spread_heads
from parallelism.kernels.attention import attend

PLACES, READERS = "bt!,bt!,bt!k!", "bt,bt,btk!"
"""The dims of positions, of ends and of the table: where tokens are written, all of them, and where each reads."""


def _checked(cache: TensorType, places: Sequence[TensorType]) -> None:
    if len(places) != 3:
        raise ValueError(f"it takes positions, ends and a table, got {len(places)} inputs for them")
    positions, ends, table = places
    for name, type, ndim in (("positions", positions, 2), ("ends", ends, 2), ("a table", table, 3)):
        if type.dtype.kind not in "iu" or type.ndim != ndim:
            raise TypeError(f"{name} must be integers of {ndim} dims, got {type}")
    if cache.ndim != 5:
        raise ValueError(f"a cache must have 5 dims, (replicas, pages, places, heads, features), got {cache}")


# -- writes ------------------------------------------------------------------------------------------------------------


def _write_rule(
    cache: TensorType, new: TensorType, positions: TensorType, ends: TensorType, table: TensorType
) -> Rule:
    _checked(cache, (positions, ends, table))
    shapes = [x.shape for x in (cache, new, positions, ends, table)]
    return rule(f"bp!s!gd,bt!gd,{PLACES}->bp!s!gd", shapes)


def _write_dtype(cache: TensorType, new: TensorType, *_: TensorType) -> np.dtype[Any]:
    if not np.can_cast(new.dtype, cache.dtype, "same_kind"):
        raise TypeError(f"a cache of {cache.dtype} cannot take {new.dtype}")
    return cache.dtype


def _write(cache: Array, new: Array, positions: Array, ends: Array, table: Array, out: Any = None) -> Array:
    kept: Array = cache.copy() if out is None else out
    slots = cache.shape[2]
    places = table.shape[2] * slots
    if not (new.size and places):
        return kept
    at = np.nonzero((positions >= 0) & (positions >= ends - places))
    place = positions[at] % places
    kept[at[0], table[(*at, place // slots)], place % slots] = new[at]
    return kept


def _written_bytes(types: Sequence[TensorType], outputs: Sequence[TensorType]) -> Extent:
    """What is written is read once and written once; the rest of the cache stays."""
    new = types[1]
    return new.nbytes + product(new.shape) * outputs[0].dtype.itemsize


register(Operator("write_cache", _write_rule, _write_dtype, _write, nbytes=_written_bytes, reuses=True))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention_rule(
    q: TensorType, keys: TensorType, values: TensorType, *places: TensorType, mask: str, **_: Any
) -> Rule:
    _checked(keys, places)
    _checked(values, places)
    if q.ndim != 4:
        raise ValueError(f"queries must have 4 dims, got {q}")
    Scores.parse(mask)
    shapes = [x.shape for x in (q, keys, values, *places)]
    width = "d!" if values.shape[4:] == keys.shape[4:] else "w!"
    text = f"bt(gr)d!,bp!s!gd!,bp!s!g{width},{READERS}->bt(gr){width},b(gr)t"
    return rule(text, shapes, served_heads_of(q.shape[2], keys.shape[3]))


def _latent_rule(
    q: TensorType, cache: TensorType, *places: TensorType, mask: str, width: Extent, **_: Any
) -> Rule:
    _checked(cache, places)
    Scores.parse(mask)
    if q.ndim != 4 or cache.shape[3] != 1:
        raise ValueError(f"a latent cache has one head, and queries 4 dims, got {q} and {cache}")
    shapes = [x.shape for x in (q, cache, *places)]
    return rule(f"bthd!,bp!s!1d!,{READERS}->bthw!,bht", shapes, {"w": width})


def _attention_dtypes(q: TensorType, *others: TensorType, **_: Any) -> tuple[np.dtype[Any], ...]:
    dtype = floating(q)
    return dtype, sums_dtype(dtype)


def _attention_flops(of: Rule, *, scored: Extent, **_: Any) -> Extent:
    """Two products for each score of each head: with the key, and with the value."""
    extents = of.extents
    heads = product(extents[letter] for letter in "bgrh" if letter in extents)
    return 2 * heads * scored * (extents["d"] + extents.get("w", extents["d"]))


def _read_bytes(op: Op) -> Extent:
    """Queries, result and table once, and of each cache the places that are read."""
    caches = [value.type for value in op.inputs[1:-3]]
    others = [value.type for value in (op.inputs[0], *op.inputs[-3:], op.outputs[0])]
    of_places = sum((product((x.shape[0], *x.shape[3:])) * op["read"] * x.dtype.itemsize for x in caches), 0)
    found: Extent = of_places + sum((x.nbytes for x in others), 0)
    return found


def _columns(cache: Array, table: Array) -> Array:
    """The places of each token's sequence, ``(tokens, columns, heads, features)``, of one replica."""
    tokens, pages = table.shape
    return cache[table].reshape(tokens, pages * cache.shape[1], *cache.shape[2:])


def _attend(
    q: Array, keys: Array, values: Array, places: Sequence[Array], scale: float, scores: Scores, first: int
) -> tuple[Array, Array]:
    """Attention of the tokens of one replica: each is a sequence of one row."""
    positions, ends, table = places
    columns = np.arange(table.shape[1] * keys.shape[1])
    dtype = sums_dtype(q.dtype)
    k, v = (_columns(x, table).astype(dtype, copy=False) for x in (keys, values))
    served = [head for head in range(k.shape[2]) for _ in range(q.shape[1] // max(k.shape[2], 1))]
    k, v = (spread_heads(x, served) for x in (k, v))
    last = ends[:, None] - 1
    held = last - (last - columns) % max(len(columns), 1)  # the position that each place holds
    allowed = (held >= 0) & (held <= positions[:, None])
    if scores.mask.window is not None:
        allowed &= held > positions[:, None] - scores.mask.window
    v = np.where(
        allowed[:, :, None, None], v, dtype.type(0)
    )  # a place that was never written may hold anything
    bias = None
    if scores.alibi:
        slopes = scores.slopes(range(first, first + q.shape[1]))
        bias = (slopes[:, None] * (held - positions[:, None])[:, None])[:, :, None].astype(dtype)
    out, lse = attend(
        q[:, None].astype(dtype, copy=False),
        k,
        v,
        allowed[:, None, None],
        scale=scale,
        cap=scores.cap,
        bias=bias,
    )
    return out[:, 0], lse[:, :, 0]


def _attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    ends: Array,
    table: Array,
    *,
    scale: float,
    mask: str,
    starts: Sequence[int],
    **_: Any,
) -> tuple[Array, Array]:
    scores = Scores.parse(mask)
    out = np.zeros((*q.shape[:3], values.shape[4]), q.dtype)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), sums_dtype(q.dtype))
    if not out.size:
        return out, lse
    for x in range(len(q)):
        places = positions[x], ends[x], table[x]
        made, sums = _attend(q[x], keys[x], values[x], places, scale, scores, starts[2])
        out[x], lse[x] = made, sums.T
    return out, lse


def _latent(q: Array, cache: Array, *places: Array, width: int, **options: Any) -> tuple[Array, Array]:
    return _attention(q, cache, cache[..., :width], *places, **options)


ATTENTION = {
    "scale": "a number",
    "mask": "a string",
    "starts": "a shape",
    "read": "an extent",
    "scored": "an extent",
}


def _register(name: str, rule: Callable[..., Rule], kernel: Callable[..., Any], more: dict[str, str]) -> None:
    register(
        Operator(
            name,
            rule,
            _attention_dtypes,
            kernel,
            flops=_attention_flops,
            attributes=ATTENTION | more,
            op_nbytes=_read_bytes,
        )
    )


_register("cached_attention", _attention_rule, _attention, {})
_register("cached_latent_attention", _latent_rule, _latent, {"width": "an extent"})


# -- rotary positions --------------------------------------------------------------------------------------------------


def _rotary_rule(x: TensorType, positions: TensorType, scaling: str = "", **_: Any) -> Rule:
    if x.ndim != 4 or (isinstance(x.shape[3], int) and x.shape[3] % 2):
        raise ValueError(f"the input must have dims (replicas, tokens, heads, an even width), got {x}")
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    if scaling:
        RotaryScaling.parse(scaling)
    return rule("bthz!,bt->bthz!", [x.shape, positions.shape])


def _rotary(x: Array, positions: Array, base: float, scaling: str = "") -> Array:
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    stretched = RotaryScaling.parse(scaling) if scaling else None
    return rotate(flat, positions.reshape(-1), base, stretched).reshape(x.shape)


for _kind, _more in (("rotary_at", {}), ("scaled_rotary_at", {"scaling": "a string"})):
    register(Operator(_kind, _rotary_rule, first_dtype, _rotary, None, 6, {"base": "a number", **_more}))
