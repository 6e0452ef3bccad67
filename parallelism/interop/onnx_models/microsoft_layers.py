"""What layers of ``com.microsoft`` mean: attention, embeddings, and recurrent layers of numbers in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.interop.folding import recorded, traced, whole
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.microsoft import centred, dynamic_product, meaning, standard
from parallelism.interop.onnx_models.reading import Reader, with_optional
from parallelism.interop.onnx_models.recurrent import Products, recurrent
from parallelism.ir.tracing import Traced, apply
from parallelism.kernels import Mask
from parallelism.models.layers import attention

# -- embeddings --------------------------------------------------------------------------------------------------------


@meaning("EmbedLayerNormalization")
def _embedded(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The norm of the sum of the rows of words, places and segments."""
    x = with_optional(x, 9)
    ids, segments, words, places, kinds, gamma, beta, mask, positions = x[:9]
    total = recorded(np.take(traced(words), traced(ids), axis=0))
    if positions is None:
        total = total + np.take(traced(places), np.arange(ids.shape[1]), axis=0)
    else:
        total = total + np.take(traced(places), traced(positions), axis=0)
    if segments is not None and kinds is not None:
        total = total + np.take(traced(kinds), traced(segments), axis=0)
    one = replace(node, outputs=node.outputs[:1])
    epsilon = node.get("epsilon", 1e-12)
    result = standard(reader, one, [total, gamma, beta], "LayerNormalization", axis=-1, epsilon=epsilon)
    lengths = None if mask is None else np.sum(traced(mask), axis=1).astype(np.int32)
    if lengths is None:
        lengths = np.zeros((ids.shape[0],), np.int32)
    return [result[0] if isinstance(result, list) else result, lengths, total]


@meaning("RotaryEmbedding")
def _rotated(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Pairs of features turned by the angles of their places; the tables have the cosines and sines by place."""
    a, places = traced(x[0]), traced(x[1])
    cos, sin = (np.take(traced(each), _rows_of(places, a), axis=0) for each in x[2:4])
    if node.get("scale", 1.0) != 1:
        raise node.unsupported("a scale is not supported")
    if a.ndim == 4:
        return _turned_first(a, cos[:, None], sin[:, None], node.get("interleaved", 0))
    heads = node.get("num_heads", 0) or a.shape[-1] // (2 * cos.shape[-1])
    turned = _turned_first(_heads(a, heads), cos[:, :, None], sin[:, :, None], node.get("interleaved", 0))
    return turned.reshape(a.shape)


def _rows_of(places: Any, a: Any) -> Any:
    """The place of each row: one number is that of the first row of each sequence."""
    if places.ndim == 2:
        return places
    rows = a.shape[2] if a.ndim == 4 else a.shape[1]
    return np.broadcast_to(places.reshape((1, 1)) + np.arange(rows), (a.shape[0], rows))


def _turned(a: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    half = a.shape[-1] // 2
    left, right = (a[..., 0::2], a[..., 1::2]) if interleaved else (a[..., :half], a[..., half:])
    parts = [left * cos - right * sin, right * cos + left * sin]
    if not interleaved:
        return np.concatenate(parts, axis=-1)
    return np.stack(parts, axis=-1).reshape(a.shape)


def _turned_first(a: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    """``a`` with its first features turned, as many as the tables have pairs of."""
    width = 2 * cos.shape[-1]
    if width == a.shape[-1]:
        return _turned(a, cos, sin, interleaved)
    turned, plain = np.split(a, [width], axis=-1)
    return np.concatenate([_turned(turned, cos, sin, interleaved), plain], axis=-1)


# -- attention ---------------------------------------------------------------------------------------------------------


@meaning("Attention")
def _attention(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Attention whose queries, keys and values are one product.  Keys and values of the past lie in one array."""
    x = with_optional(x, 7)
    source, weights, bias, mask, past, added, length = x[:7]
    if length is not None or node.get("do_rotary", 0):
        raise node.unsupported("keys of the past in a buffer, and rotary positions, are not supported")
    product = traced(source) @ traced(weights)
    product = product if bias is None else product + traced(bias)
    widths = list(node.get("qkv_hidden_sizes", ())) or [product.shape[-1] // 3] * 3
    heads = node.get("num_heads")
    q, k, v = (_heads(part, heads) for part in np.split(product, list(np.cumsum(widths)[:2]), axis=-1))
    if past is not None:
        both = traced(past)
        k, v = (_behind(both[i], each) for i, each in enumerate((k, v)))
    result = _attended(node, q, k, v, mask, added, node.get("unidirectional", 0))
    if not any(node.outputs[1:]):
        return result
    return [result, np.stack([_by_heads(k), _by_heads(v)])]


@meaning("MultiHeadAttention")
def _multi_head(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Attention to keys and values that are given: apart, by heads, or packed beside each other for each head."""
    x = with_optional(x, 10)
    query, key, value, bias, mask, added, past_key, past_value, length = x[:9]
    if length is not None or any(node.outputs[3:]):
        raise node.unsupported("keys of the past in a buffer, and scores as a result, are not supported")
    heads = node.get("num_heads")
    q, k, v = _queries_keys_values(node, query, key, value, heads)
    if bias is not None:
        first = q.shape[2] * q.shape[3]
        second = k.shape[2] * k.shape[3]
        terms: Any = np.split(traced(bias), [first, first + second])
        q, k, v = (part + term.reshape(part.shape[2:]) for part, term in zip((q, k, v), terms, strict=True))
    if past_key is not None:
        k, v = _behind(traced(past_key), k), _behind(traced(past_value), v)
    result = _attended(node, q, k, v, mask, added, node.get("unidirectional", 0))
    if not any(node.outputs[1:]):
        return result
    return [result, _by_heads(k), _by_heads(v)]


def _queries_keys_values(node: GraphNode, query: Any, key: Any, value: Any, heads: int) -> list[Any]:
    """The three as ``(batch, tokens, heads, width)``."""
    first = traced(query)
    if first.ndim == 5:  # (batch, tokens, heads, 3, width)
        return [first[:, :, :, i] for i in range(3)]
    q = _heads(first, heads)
    if key is None:
        raise node.unsupported("queries without keys are not supported")
    second = traced(key)
    if second.ndim == 5:  # (batch, tokens, heads, 2, width)
        return [q, second[:, :, :, 0], second[:, :, :, 1]]
    third = traced(value)
    if second.ndim == 4:  # (batch, heads, tokens, width)
        return [q, _by_heads(second), _by_heads(third)]
    return [q, _heads(second, heads), _heads(third, heads)]


def _heads(a: Any, heads: int) -> Any:
    """``(batch, tokens, heads * width)`` as ``(batch, tokens, heads, width)``."""
    return a.reshape((*a.shape[:2], heads, a.shape[-1] // heads))


def _by_heads(a: Any) -> Any:
    """``(batch, tokens, heads, width)`` as ``(batch, heads, tokens, width)``, or back."""
    return np.transpose(a, (0, 2, 1, 3))


def _behind(past: Any, new: Any) -> Any:
    """New keys or values, ``(batch, tokens, heads, width)``, behind those of the past, ``(batch, heads, tokens, width)``."""
    return np.concatenate([_by_heads(past), new], axis=1)


def _attended(node: GraphNode, q: Any, k: Any, v: Any, mask: Any, added: Any, causal: int) -> Any:
    """Scaled products of queries and keys, their softmax, and the sum of values by it.

    ``q``, ``k`` and ``v`` are ``(batch, tokens, heads, width)``; the result is ``(batch, tokens, heads * width)``.
    """
    batch, rows, heads = q.shape[:3]
    scale = node.get("scale", 0.0) or float(1 / np.sqrt(q.shape[-1]))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if added is not None:
        scores = scores + traced(added)
    columns = k.shape[1]
    off = node.get("mask_filter_value", -10000.0)
    if mask is not None:
        scores = scores + np.where(_seen(node, traced(mask), rows, columns), 0, off).astype(scores.dtype)
    if causal:
        later = np.arange(columns) > np.arange(rows)[:, None] + (columns - rows)
        scores = np.where(later, float(np.finfo(np.float32).min), scores)
    shares = apply("softmax", scores, axis=3)
    return np.einsum("bhqk,bkhd->bqhd", shares, v).reshape((batch, rows, heads * v.shape[-1]))


def _seen(node: GraphNode, mask: Any, rows: int, columns: int) -> Any:
    """Which columns each row attends to, in four dims: the mask has 1 for them, or how many there are."""
    if mask.ndim == 1:
        if mask.shape[0] == 1 or mask.dtype.kind not in "iu":
            raise node.unsupported("a mask of one dim must have the length of each sequence")
        return (np.arange(columns) < mask[:, None])[:, None, None]
    seen = mask if mask.dtype == bool else mask != 0
    if mask.ndim == 2:
        return seen[:, None, None]
    if mask.ndim == 3:
        return seen[:, None]
    raise node.unsupported(f"a mask of {mask.ndim} dims is not supported")


@meaning("GroupQueryAttention")
def _group_query(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Attention of the language models that ONNX Runtime generates with: heads of keys serve several of queries.

    Without keys of the past it is causal attention, one operator; rows of padding at the end, which ``seqlens_k`` leaves
    out, give numbers that nobody reads.  Else the new keys stand behind those that ``seqlens_k`` counts in each sequence.
    """
    x = with_optional(x, 12)
    query, key, value, past_key, past_value, counts, total, cos, sin, places, added, sinks = x[:12]
    if any(node.outputs[3:]) or node.get("k_quant_type", "NONE") not in ("NONE", b"NONE"):
        raise node.unsupported("keys in 8 bits, and scores as a result, are not supported")
    if node.get("sliding_window_cache", 0):
        raise node.unsupported("a buffer of the window alone (sliding_window_cache) is not supported")
    q, k, v = _grouped(query, key, value, node.get("num_heads"), node.get("kv_num_heads"))
    rows = q.shape[1]
    past = 0 if past_key is None else past_key.shape[2]
    first = None if past == 0 else traced(counts).reshape((-1,)).astype(np.int64) + 1 - rows
    if node.get("do_rotary", 0):
        positions = _positions(rows, first) if places is None else traced(places)
        q, k = (_turned_at(each, positions, cos, sin, node.get("rotary_interleaved", 0)) for each in (q, k))
    if first is None:
        result = _attended_by_groups(node, q, k, v, None, added, sinks)
    else:
        columns = _columns(node, past, rows, total)
        k = _placed(_by_heads(traced(past_key)), k, first, columns)
        v = _placed(_by_heads(traced(past_value)), v, first, columns)
        result = _attended_by_groups(node, q, k, v, _positions(rows, first), added, sinks)
    results = [result.reshape((*result.shape[:2], -1)), _by_heads(k), _by_heads(v)]
    return results[: len(node.outputs)]


def _positions(rows: Any, first: Any) -> Any:
    """The positions of the rows, ``(batch or 1, rows)``, of which the ``first`` ones are given; None: 0."""
    positions: Any = np.arange(rows)[None]
    return positions if first is None else positions + first[:, None]


def _turned_at(a: Any, positions: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    """``a``, ``(batch, tokens, heads, width)``, turned by the angles of these positions, which two tables have."""
    cosines, sines = (np.take(traced(table), positions, axis=0) for table in (cos, sin))
    return _turned_first(a, cosines[:, :, None], sines[:, :, None], interleaved)


def _grouped(query: Any, key: Any, value: Any, heads: int, groups: int) -> list[Any]:
    """Queries, keys and values as ``(batch, tokens, heads, width)``; the three may be one array."""
    joined: Any = traced(query)
    if key is not None:
        return [_heads(joined, heads), *(_heads(traced(each), groups) for each in (key, value))]
    width = joined.shape[-1] // (heads + 2 * groups)
    parts: Any = np.split(joined, [heads * width, (heads + groups) * width], axis=-1)
    return [_heads(part, count) for part, count in zip(parts, (heads, groups, groups), strict=True)]


def _columns(node: GraphNode, past: Any, rows: Any, total: Any) -> Any:
    """The tokens of the present: ``total_sequence_length``, or as many as the past has room for if these are more.

    It is the sum of past and new tokens where the program does not fix the total.
    """
    known = None if isinstance(total, Traced) else np.asarray(whole(total)).reshape(-1)[0]
    if known is None or not all(isinstance(each, int | np.integer) for each in (known, past, rows)):
        return past + rows
    if int(known) == rows:
        raise node.unsupported("the first tokens of a sequence beside a buffer of the past are not supported")
    return max(int(known), past)


def _placed(past: Any, new: Any, first: Any, columns: Any) -> Any:
    """The present: of each sequence its ``first`` tokens of the past, then the new ones, then zeros.

    All arrays are ``(batch, tokens, heads, width)``.
    """
    rows, room = new.shape[1], past.shape[1]
    place = np.arange(columns)[None]
    behind = place - first[:, None]
    is_new = (behind >= 0) & (behind < rows)
    old = np.take(past, np.minimum(np.arange(columns), room - 1), axis=1)
    index = np.where(is_new, behind, 0)[:, :, None, None]
    index = np.broadcast_to(index, (new.shape[0], columns, *new.shape[2:]))
    fresh = np.take_along_axis(new, index, axis=1)
    kept = np.where((behind < 0)[:, :, None, None], old, 0)
    return np.where(is_new[:, :, None, None], fresh, kept).astype(new.dtype)


def _shares(scores: Any, of_sinks: Any) -> Any:
    """The softmax of scores, ``(batch, heads, rows, columns)``, with a further score of each head that no column has."""
    if of_sinks is None:
        return apply("softmax", scores, axis=3)
    sink = np.broadcast_to(of_sinks.astype(scores.dtype)[:, None, None], (*scores.shape[:3], 1))
    return apply("softmax", np.concatenate([scores, sink], axis=3), axis=3)[..., :-1]


def _attended_by_groups(node: GraphNode, q: Any, k: Any, v: Any, seen: Any, added: Any, sinks: Any) -> Any:
    """Causal attention, ``(batch, rows, heads, width)``.

    ``seen``, ``(batch, rows)``, are the positions of the rows; None: rows and columns are the same tokens.
    """
    window = node.get("local_window_size", -1)
    cap, scale = node.get("softcap", 0.0) or None, node.get("scale", 0.0) or None
    heads, groups = q.shape[2], k.shape[2]
    scores_of_sinks = traced(sinks) if sinks is not None else None
    if scores_of_sinks is None and node.get("smooth_softmax", 0) == 1:
        scores_of_sinks = recorded(np.zeros(heads, np.float32))
    if seen is None and added is None:
        mask = Mask(causal=True, window=None if window < 0 else window)
        return attention(q, k, v, mask=mask, scale=scale, cap=cap, sinks=scores_of_sinks)
    batch, rows, _, width = q.shape
    wide = np.result_type(q.dtype, np.float32)
    grouped = q.reshape((batch, rows, groups, heads // groups, width)).astype(wide)
    scores = np.einsum("bqgrd,bkgd->bgrqk", grouped, k.astype(wide))
    scores = scores * (scale or float(1 / np.sqrt(width)))
    scores = scores.reshape((batch, heads, rows, k.shape[1]))
    if cap is not None:
        scores = np.tanh(scores * (1 / cap)) * cap
    if added is not None:
        scores = scores + traced(added).astype(wide)
    distance = _distance(seen, rows, k.shape[1])
    hidden = distance < 0
    if window >= 0:
        hidden = hidden | (distance >= window)
    scores = np.where(hidden, float(np.finfo(np.float32).min), scores)
    shares = _shares(scores, scores_of_sinks).reshape((batch, groups, heads // groups, rows, k.shape[1]))
    mixed = np.einsum("bgrqk,bkgd->bqgrd", shares, v.astype(wide)).astype(q.dtype)
    return mixed.reshape((batch, rows, heads, v.shape[3]))


def _distance(seen: Any, rows: Any, columns: Any) -> Any:
    """How many tokens a column lies before a row, ``(batch or 1, 1, rows, columns)``."""
    if seen is None:
        return (np.arange(rows)[:, None] - np.arange(columns))[None, None]
    return seen[:, None, :, None] - np.arange(columns)


# -- recurrent layers in 8 bits ----------------------------------------------------------------------------------------


@meaning("DynamicQuantizeLSTM")
def _dynamic_lstm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """As LSTM, with products in 8 bits: the inputs are quantized together, and the state in each step, by their range."""
    x = with_optional(x, 12)
    scales = [traced(each) for each in (x[8], x[10])]
    zeros: list[Any] = [None if each is None else traced(each) for each in (x[9], x[11])]

    def products(d: int, which: int) -> Any:
        weights = traced(x[1 + which])[d]  # (inputs, 4 hidden)
        zero = None if zeros[which] is None else zeros[which][d]
        steps, scale = centred(weights, zero), scales[which][d]
        return lambda a: dynamic_product(a, steps, scale)

    plain = replace(node, kind="LSTM", domain="")
    return recurrent(plain, x[:8], Products(products, x[2].shape[1]))
