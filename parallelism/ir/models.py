"""Recorded models in plain NumPy: a perceptron, a convolutional net, a GPT, a mixture of experts.

Each function returns the program of a loss.  Its inputs are the parameters and the batch.  Extents may be symbols.  The
parts of a model are regions.
"""

from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Function, TensorType
from parallelism.ir.recording import record
from parallelism.ir.tracing import apply, region

Parameters = dict[str, Any]


def mlp(sizes: tuple[Extent, ...], batch: Extent, dtype: Any = np.float64) -> Function:
    """A multilayer perceptron with relu and the mean squared error.

    Inputs: ``w0`` of shape ``(sizes[0], sizes[1])``, ``b0`` ``(sizes[1],)``, ...; ``x`` ``(batch, sizes[0])`` and
    ``targets`` ``(batch, sizes[-1])``.
    """
    types: dict[str, TensorType] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        types |= {f"w{i}": TensorType(dtype, (inputs, outputs)), f"b{i}": TensorType(dtype, (outputs,))}
    layers = len(sizes) - 1

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        for i in range(layers):
            with region(f"layer.{i}"):
                x = x @ p[f"w{i}"] + p[f"b{i}"]
                if i < layers - 1:
                    x = np.maximum(x, 0)
        with region("loss"):
            return np.mean((x - targets) ** 2)

    return record(loss, types, TensorType(dtype, (batch, sizes[0])), TensorType(dtype, (batch, sizes[-1])), name="mlp")


def convolution(x: Any, weight: Any) -> Any:
    """A convolution without padding.

    ``x`` is ``(batch, rows, columns, channels)``; ``weight`` is ``(kernel rows, kernel columns, channels, features)``.
    """
    patches = np.lib.stride_tricks.sliding_window_view(x, weight.shape[:2], axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", patches, weight)


def convolutional(
    image: tuple[Extent, Extent, Extent], channels: tuple[int, ...], classes: int, batch: Extent,
    dtype: Any = np.float64,
) -> Function:
    """3x3 convolutions with relu, the mean over the image, and a linear classifier with cross-entropy.

    Batch inputs: ``x`` of shape ``(batch, *image)``, where ``image`` is (rows, columns, channels), and integer
    ``targets`` ``(batch,)``.
    """
    types = {
        f"w{i}": TensorType(dtype, (3, 3, before, after))
        for i, (before, after) in enumerate(zip((image[2], *channels), channels, strict=False))
    }
    types["head"] = TensorType(dtype, (channels[-1], classes))

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        for i in range(len(channels)):
            with region(f"layer.{i}"):
                x = np.maximum(convolution(x, p[f"w{i}"]), 0)
        with region("head"):
            logits = np.mean(x, axis=(1, 2)) @ p["head"]
        with region("loss"):
            return apply("softmax_cross_entropy", logits, targets, rows=logits.shape[0])

    return record(loss, types, TensorType(dtype, (batch, *image)), TensorType(np.int64, (batch,)), name="convolutional")


def gpt(
    vocabulary: Extent, width: Extent, heads: int, layers: int, sequence: Extent, batch: Extent,
    dtype: Any = np.float64,
) -> Function:
    """A decoder-only Transformer with causal attention and tied embeddings.

    Batch inputs: ``tokens`` and ``targets``, the following tokens, both integers of shape ``(batch, sequence)``.
    Norms stand before each block and at the end, as in Radford et al., *Language Models are Unsupervised Multitask
    Learners*, 2019, section 2.3.  The causal mask compares positions from ``iota``, so ``sequence`` may be a symbol.
    """
    types = {
        "tokens": TensorType(dtype, (vocabulary, width)), "positions": TensorType(dtype, (sequence, width)),
        "norm": TensorType(dtype, (width,)), "norm_bias": TensorType(dtype, (width,)),
    }
    for i in range(layers):
        types |= {
            f"{i}.norm1": TensorType(dtype, (width,)), f"{i}.norm1_bias": TensorType(dtype, (width,)),
            f"{i}.qkv": TensorType(dtype, (width, 3 * width)), f"{i}.out": TensorType(dtype, (width, width)),
            f"{i}.norm2": TensorType(dtype, (width,)), f"{i}.norm2_bias": TensorType(dtype, (width,)),
            f"{i}.up": TensorType(dtype, (width, 4 * width)), f"{i}.down": TensorType(dtype, (4 * width, width)),
        }

    def attention(x: Any, qkv: Any, out: Any) -> Any:
        rows, length, features = x.shape
        each = features // heads
        # Query, key and value of one head are adjacent, so the columns of the product can be split by heads.
        q, k, v = np.split((x @ qkv).reshape(rows, length, heads, 3 * each), 3, axis=-1)
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / root(each)
        places = [apply("iota", dim=d, shape=(length, length), starts=(0, 0), dtype=np.dtype(np.int64)) for d in (0, 1)]
        weights = apply("softmax", np.where(places[1] <= places[0], scores, -np.inf), axis=3)
        return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, features) @ out

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return apply("layer_norm", x, weight, bias, epsilon=1e-5)

    def loss(p: Parameters, tokens: Any, targets: Any) -> Any:
        with region("embedding"):
            x = p["tokens"][tokens] + p["positions"]
        for i in range(layers):
            with region(f"block.{i}.attention"):
                x = x + attention(norm(x, p[f"{i}.norm1"], p[f"{i}.norm1_bias"]), p[f"{i}.qkv"], p[f"{i}.out"])
            with region(f"block.{i}.feed_forward"):
                hidden = norm(x, p[f"{i}.norm2"], p[f"{i}.norm2_bias"]) @ p[f"{i}.up"]
                x = x + apply("gelu", hidden) @ p[f"{i}.down"]
        with region("head"):
            logits = np.einsum("bsd,vd->bsv", norm(x, p["norm"], p["norm_bias"]), p["tokens"])
        with region("loss"):
            rows = targets.size
            flat = logits.reshape(rows, logits.shape[2])
            return apply("softmax_cross_entropy", flat, targets.reshape(rows), rows=rows)

    places = TensorType(np.int64, (batch, sequence))
    return record(loss, types, places, places, name="gpt")


def mixture(
    width: Extent, hidden: Extent, experts: Extent, chosen: int, capacity: Extent, groups: Extent, tokens: Extent,
    balance: float = 0.01, dtype: Any = np.float64,
) -> Function:
    """A layer of experts with a residual connection and the mean squared error.

    Batch inputs: ``x`` and ``targets`` of shape ``(groups, tokens, width)``.  Each token goes to the ``chosen`` experts
    of largest probability, with the gates and the order of `parallelism.kernels.choose_experts`.  An expert accepts
    ``capacity`` choices of each group; a choice beyond that adds nothing.  The loss includes ``balance`` times the
    load-balancing loss of Switch Transformer (arXiv:2101.03961, equation 4), averaged over groups.  Dispatch and
    combination are einsums with masks, as in GShard (arXiv:2006.16668, algorithm 2).  If groups and experts are split
    over one axis, rows move from groups to experts and back by all_to_all.
    """
    types = {
        "router": TensorType(dtype, (width, experts)), "up": TensorType(dtype, (experts, width, hidden)),
        "down": TensorType(dtype, (experts, hidden, width)),
    }

    def added(terms: list[Any]) -> Any:
        return sum(terms[1:], terms[0])

    def one_hot(places: Any, extent: Extent) -> Any:
        return apply("one_hot", places, extent=extent, dtype=np.dtype(dtype))

    def route(probabilities: Any) -> tuple[Any, Any, Any]:
        """Two arrays of shape (groups, tokens, experts, capacity), and the one-hot first choices.

        The first is 1 where a token has a slot of an expert, the second is the token's gate there.
        """
        choices: list[Any] = []
        slots, gates = [], []
        for rank in range(chosen):
            left = np.where(added(choices) > 0, -1, probabilities) if rank else probabilities
            choice = one_hot(np.argmax(left, axis=2), experts)
            places = np.cumsum(choice, axis=1) - choice
            if rank:
                places = places + np.sum(added(choices), axis=1, keepdims=True)
            choices.append(choice)
            slots.append(one_hot(places.astype(np.int64), capacity) * choice[..., None])
            gates.append(np.sum(probabilities * choice, axis=2)[..., None, None])
        if chosen > 1:
            gates = [gate / added(gates) for gate in gates]
        return added(slots), added([slot * gate for slot, gate in zip(slots, gates, strict=True)]), choices[0]

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        with region("router"):
            probabilities = apply("softmax", x @ p["router"], axis=2)
            slots, weights, first = route(probabilities)
            shares = np.sum(np.mean(first, axis=1) * np.mean(probabilities, axis=1), axis=1)
        with region("dispatch"):
            rows = np.einsum("gtec,gtd->egcd", slots, x)
        with region("experts"):
            rows = np.einsum("egch,ehd->egcd", np.maximum(np.einsum("egcd,edh->egch", rows, p["up"]), 0), p["down"])
        with region("combine"):
            x = x + np.einsum("gtec,egcd->gtd", weights, rows)
        with region("loss"):
            return np.mean((x - targets) ** 2) + np.mean(shares) * experts * balance

    batch = TensorType(dtype, (groups, tokens, width))
    return record(loss, types, batch, batch, name="mixture")


def root(extent: Extent) -> Any:
    """The square root of an extent: a number, or a value of the program if the extent is symbolic."""
    return sqrt(extent) if isinstance(extent, int) else np.sqrt(
        apply("constant", value=extent, shape=(), dtype=np.dtype(np.float64)))
