"""A small GPT in plain NumPy, recorded: attention and its mask are NumPy's own operations.

`TransformerSpec` describes the models that people train.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Function, TensorType
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.layers import cross_entropy

Parameters = dict[str, Any]


def gpt(
    vocabulary: Extent,
    width: Extent,
    heads: int,
    layers: int,
    sequence: Extent,
    batch: Extent,
    dtype: Any = np.float64,
) -> Function:
    """A decoder-only Transformer with causal attention and tied embeddings.

    Batch inputs: ``tokens`` and ``targets``, the following tokens, both integers of shape ``(batch, sequence)``.
    Norms stand before each block and at the end, as in Radford et al., *Language Models are Unsupervised Multitask
    Learners*, 2019, section 2.3.  The causal mask compares positions from ``iota``, so ``sequence`` may be a symbol.
    """
    types = {
        "tokens": TensorType(dtype, (vocabulary, width)),
        "positions": TensorType(dtype, (sequence, width)),
        "norm": TensorType(dtype, (width,)),
        "norm_bias": TensorType(dtype, (width,)),
    }
    for i in range(layers):
        types |= {
            f"{i}.norm1": TensorType(dtype, (width,)),
            f"{i}.norm1_bias": TensorType(dtype, (width,)),
            f"{i}.qkv": TensorType(dtype, (width, 3 * width)),
            f"{i}.out": TensorType(dtype, (width, width)),
            f"{i}.norm2": TensorType(dtype, (width,)),
            f"{i}.norm2_bias": TensorType(dtype, (width,)),
            f"{i}.up": TensorType(dtype, (width, 4 * width)),
            f"{i}.down": TensorType(dtype, (4 * width, width)),
        }

    def attention(x: Any, qkv: Any, out: Any) -> Any:
        rows, length, features = x.shape
        each = features // heads
        # Query, key and value of one head are adjacent, so the columns of the product can be split by heads.
        q, k, v = np.split((x @ qkv).reshape(rows, length, heads, 3 * each), 3, axis=-1)
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / root(each, q.dtype)
        places = [
            apply("iota", dim=d, shape=(length, length), starts=(0, 0), dtype=np.dtype(np.int64))
            for d in (0, 1)
        ]
        weights = apply("softmax", np.where(places[1] <= places[0], scores, -np.inf), axis=3)
        return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, features) @ out

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return apply("layer_norm", x, weight, bias, epsilon=1e-5)

    def loss(p: Parameters, tokens: Any, targets: Any) -> Any:
        with region("embedding"):
            x = p["tokens"][tokens] + p["positions"]
        for i in range(layers):
            with region(f"block.{i}.attention"):
                x = x + attention(
                    norm(x, p[f"{i}.norm1"], p[f"{i}.norm1_bias"]), p[f"{i}.qkv"], p[f"{i}.out"]
                )
            with region(f"block.{i}.feed_forward"):
                hidden = norm(x, p[f"{i}.norm2"], p[f"{i}.norm2_bias"]) @ p[f"{i}.up"]
                x = x + apply("gelu", hidden) @ p[f"{i}.down"]
        with region("head"):
            logits = np.einsum("bsd,vd->bsv", norm(x, p["norm"], p["norm_bias"]), p["tokens"])
        with region("loss"):
            return cross_entropy(logits, targets)

    places = TensorType(np.int64, (batch, sequence))
    return record(loss, types, places, places, name="gpt")


def root(extent: Extent, dtype: Any) -> Any:
    """The square root of an extent: a number, or if the extent is symbolic a value of the program of this dtype."""
    if isinstance(extent, int):
        return sqrt(extent)
    return np.sqrt(apply("constant", value=extent, shape=(), dtype=np.dtype(np.float64))).astype(dtype)
