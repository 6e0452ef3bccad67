"""What layers of ``com.microsoft`` mean: attention, embeddings, and recurrent layers of numbers in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.interop.folding import recorded, whole
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.microsoft import centred, dynamic_product, meaning, standard
from parallelism.interop.onnx_models.reading import Reader
from parallelism.interop.onnx_models.recurrent import Products, recurrent
from parallelism.ir.tracing import apply

# -- embeddings --------------------------------------------------------------------------------------------------------


@meaning("EmbedLayerNormalization")
def _embedded(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The norm of the sum of the rows of words, places and segments."""
    x = [*x, *[None] * (9 - len(x))]
    ids, segments, words, places, kinds, gamma, beta, mask, positions = x[:9]
    total = recorded(np.take(recorded(whole(words)), recorded(whole(ids)), axis=0))
    if positions is None:
        total = total + np.take(recorded(whole(places)), np.arange(ids.shape[1]), axis=0)
    else:
        total = total + np.take(recorded(whole(places)), recorded(whole(positions)), axis=0)
    if segments is not None and kinds is not None:
        total = total + np.take(recorded(whole(kinds)), recorded(whole(segments)), axis=0)
    one = replace(node, outputs=node.outputs[:1])
    epsilon = node.get("epsilon", 1e-12)
    result = standard(reader, one, [total, gamma, beta], "LayerNormalization", axis=-1, epsilon=epsilon)
    lengths = None if mask is None else np.sum(recorded(whole(mask)), axis=1).astype(np.int32)
    if lengths is None:
        lengths = np.zeros((ids.shape[0],), np.int32)
    return [result[0] if isinstance(result, list) else result, lengths, total]


@meaning("RotaryEmbedding")
def _rotated(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Pairs of features turned by the angles of their places; the tables have the cosines and sines by place."""
    a, places = recorded(whole(x[0])), recorded(whole(x[1]))
    cos, sin = (np.take(recorded(whole(each)), _rows_of(places, a), axis=0) for each in x[2:4])
    width = 2 * cos.shape[-1]
    if node.get("rotary_embedding_dim", 0) or node.get("scale", 1.0) != 1:
        raise node.unsupported("rotary_embedding_dim and scale are not supported")
    if a.ndim == 4:
        return _turned(a, cos[:, None], sin[:, None], node.get("interleaved", 0))
    heads = node.get("num_heads", 0) or a.shape[-1] // width
    split = a.reshape((*a.shape[:2], heads, a.shape[-1] // heads))
    turned = _turned(split, cos[:, :, None], sin[:, :, None], node.get("interleaved", 0))
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


# -- attention ---------------------------------------------------------------------------------------------------------


@meaning("Attention")
def _attention(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Attention whose queries, keys and values are one product."""
    x = [*x, *[None] * (7 - len(x))]
    source, weights, bias, mask, past, added = x[:6]
    if past is not None or len(node.outputs) > 1 or node.get("do_rotary", 0):
        raise node.unsupported("keys of the past and rotary positions are not supported")
    product = recorded(whole(source)) @ recorded(whole(weights))
    product = product if bias is None else product + recorded(whole(bias))
    widths = list(node.get("qkv_hidden_sizes", ())) or [product.shape[-1] // 3] * 3
    parts = np.split(product, list(np.cumsum(widths)[:2]), axis=-1)
    return _attended(node, parts, mask, added, node.get("unidirectional", 0))


@meaning("MultiHeadAttention")
def _multi_head(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    x = [*x, *[None] * (8 - len(x))]
    if any(each is not None for each in x[6:]) or any(node.outputs[1:]) or x[1] is None or x[2] is None:
        raise node.unsupported("packed keys, and keys of the past, are not supported")
    parts = [recorded(whole(each)) for each in x[:3]]
    if any(part.ndim != 3 for part in parts):
        raise node.unsupported("only queries, keys and values of three dims are supported")
    if x[3] is not None:
        each: Any = np.split(recorded(whole(x[3])), list(np.cumsum([part.shape[-1] for part in parts])[:2]))
        parts = [part + own for part, own in zip(parts, each, strict=True)]
    return _attended(node, parts, x[4], x[5], node.get("unidirectional", 0))


def _attended(node: GraphNode, parts: list[Any], mask: Any, added: Any, causal: int) -> Any:
    """Scaled products of queries and keys, their softmax, and the sum of values by it; heads lie in the last dim."""
    heads = node.get("num_heads")
    batch, rows = parts[0].shape[:2]
    q, k, v = (part.reshape((*part.shape[:2], heads, part.shape[-1] // heads)) for part in parts)
    scale = node.get("scale", 0.0) or float(1 / np.sqrt(q.shape[-1]))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if added is not None:
        scores = scores + recorded(whole(added))
    columns = k.shape[1]
    off = node.get("mask_filter_value", -10000.0)
    if mask is not None:
        scores = scores + np.where(_seen(node, recorded(whole(mask)), rows, columns), 0, off).astype(
            scores.dtype
        )
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


# -- recurrent layers in 8 bits ----------------------------------------------------------------------------------------


@meaning("DynamicQuantizeLSTM")
def _dynamic_lstm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """As LSTM, with products in 8 bits: the inputs are quantized together, and the state in each step, by their range."""
    x = [*x, *[None] * (12 - len(x))]
    scales = [recorded(whole(each)) for each in (x[8], x[10])]
    zeros: list[Any] = [None if each is None else recorded(whole(each)) for each in (x[9], x[11])]

    def products(d: int, which: int) -> Any:
        weights = recorded(whole(x[1 + which]))[d]  # (inputs, 4 hidden)
        zero = None if zeros[which] is None else zeros[which][d]
        steps, scale = centred(weights, zero), scales[which][d]
        return lambda a: dynamic_product(a, steps, scale)

    plain = replace(node, kind="LSTM", domain="")
    return recurrent(plain, x[:8], Products(products, x[2].shape[1]))
