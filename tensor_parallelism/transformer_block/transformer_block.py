"""`TransformerBlock`: attention and a feed-forward block, each after a norm and with a residual addition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.kernels import splitmix64
from parallelism.mesh import Mesh
from parallelism.operation import Device
from tensor_parallelism.attention import Attention, AttentionShardingPolicy, dtype_of, zigzag_order
from tensor_parallelism.feed_forward import FeedForward, check_biases
from tensor_parallelism.layers import Dropout, LayerNorm, RMSNorm
from tensor_parallelism.layers.dropout import counted
from tensor_parallelism.products import PlannedOperation, Shape, check_gradient
from tensor_parallelism.transformer_block.plan import TransformerBlockPlan
from tensor_parallelism.transformer_block.policies import TransformerBlockPolicy, TransformerBlockSharding

NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class Saved(NamedTuple):
    """The values that the parts saved for their backward; None for a dropout that drops nothing."""

    norm1: Any
    attention: Any
    dropout1: Any
    norm2: Any
    feed_forward: Any
    dropout2: Any
    shape: Shape
    """The shape of the whole x."""
    dtype: np.dtype[Any]


class TransformerBlock(PlannedOperation[TransformerBlockPlan]):
    """``cluster.run(TransformerBlock(sharding), x, *weights).result`` is the output y of a pre-norm block:

        a = x + dropout(attention(norm(x)))
        y = a + dropout(feed_forward(norm(a)))

    The weights are, in the order of `NAMES`: ``norm1`` and ``norm1_bias``; ``wq``, ``wk``, ``wv`` and ``wo`` of
    `Attention`; ``norm2`` and ``norm2_bias``; ``w1``, ``b1``, ``w2`` and ``b2`` of `FeedForward`.  With
    ``norm="rms_norm"`` the norms have no biases.  `shapes` returns the shapes of all of them.  An integer, the step,
    may follow the weights.  Dropout is a function of ``seed`` and step; the same elements are dropped on every mesh.
    ``causal``, ``zigzag`` and ``rotary_base`` are those of `Attention`.  Without ``policy`` the block runs the first
    policy that the layouts allow; that is RING if ULYSSES is possible, too.
    ``print(operation.plan(shapes.values(), mesh))`` shows the communications.

    **Communication**: see `TransformerBlockPolicy`.  ``plan(...).bytes_received`` and
    ``plan(...).backward_bytes_received`` are indexed by rank.

    **Memory**, by `Device.hold`.  From the forward to the end of the backward ``activations`` and ``keys and values``
    hold 34 s b h bytes for elements of two bytes, a hidden dim of 4 h and dropout.  These are the bytes of Korthikanti
    et al., 2022, arXiv:2205.05198, section 4 and table 2; their 5 a s^2 b bytes of scores are recomputed in the
    backward (their selective recomputation).  MEGATRON holds (10 + 24/t) s b h bytes and SEQUENCE 34/t s b h, as there.
    RING holds 34/c s b h, and ULYSSES 36/c s b h, because it keeps the attention output twice.  ``statistics`` and
    ``softmax statistics``, which they neglect, are two numbers for each token and one for each of its heads.
    Temporary memory is that of `Attention`.

    ``ValueError`` at construction for a policy that the layouts do not have, and for the errors of its parts.  The host
    raises it before anything is sent for arrays whose shapes do not fit each other, their layouts or the mesh, and for
    heads that cannot be split.
    """

    sharding: TransformerBlockSharding

    def __init__(
        self, sharding: TransformerBlockSharding, policy: TransformerBlockPolicy | None = None, *,
        causal: bool = False, zigzag: bool = False, rotary_base: float | None = None, norm: str = "layer_norm",
        activation: str = "gelu", dropout: float = 0.0, seed: int = 0, epsilon: float = 1e-5,
    ) -> None:
        super().__init__(sharding, TransformerBlockSharding)
        self.policy = self._allowed(policy, TransformerBlockPolicy, sharding.policies)
        if norm not in NORMS:
            raise ValueError(f"norm is one of {', '.join(NORMS)}, got {norm!r}")
        self.norm1, self.norm2 = (NORMS[norm](sharding.x, epsilon=epsilon) for _ in range(2))
        self.attention = Attention(
            sharding.attention, AttentionShardingPolicy(self.policy.value), causal=causal, zigzag=zigzag,
            rotary_base=rotary_base,
        )
        self.feed_forward = FeedForward(sharding.feed_forward, activation=activation)
        Dropout(sharding.out, dropout, seed)                    # checks rate and seed, without dropout, too
        self.dropout1, self.dropout2 = (
            Dropout(sharding.out, dropout, int(one)) if dropout else None for one in splitmix64(seed, [0, 1])
        )
        bias = norm == "layer_norm"
        self.NAMES = (
            "x", "norm1", *["norm1_bias"] * bias, "wq", "wk", "wv", "wo", "norm2", *["norm2_bias"] * bias,
            "w1", "b1", "w2", "b2",
        )

    def __repr__(self) -> str:
        return (f"TransformerBlock({self.sharding!r}, {self.policy}, {self.norm1!r}, {self.attention!r}, "
                f"{self.dropout1!r}, {self.feed_forward!r})")

    def shapes(
        self, x: Sequence[int], heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        hidden: int | None = None,
    ) -> dict[str, Shape]:
        """The shapes of the inputs by name, for x of shape (batch, sequence, model) and this number of ``heads``.

        By default there are as many key-value heads as heads, all heads together are as wide as the model, and the
        hidden dim is four times as wide.  ``ValueError`` if no ``head_dim`` is given and the model's width is not a
        multiple of the heads.
        """
        model = x[-1]
        if head_dim is None and (heads < 1 or model % heads):
            raise ValueError(f"a head_dim must be given where the model is no multiple of the heads, got x of shape "
                             f"{tuple(x)} and {heads} heads")
        width = model // heads if head_dim is None else head_dim
        keys, hidden = (model, heads if kv_heads is None else kv_heads, width), 4 * model if hidden is None else hidden
        shapes = {
            "wq": (model, heads, width), "wk": keys, "wv": keys, "wo": (heads, width, model), "w1": (model, hidden),
            "b1": (hidden,), "w2": (hidden, model), "x": tuple(x),
        }
        return {name: shapes.get(name, (model,)) for name in self.NAMES}

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of x and the weights, and the step, by rank."""
        arrays, step = self._arrays_and_step(*args)
        self.plan([array.shape for array in arrays], mesh, dtype_of(arrays))
        if self.attention.zigzag:
            arrays[0] = arrays[0][:, self._order(arrays[0].shape[1], mesh)]
        return [(*mine, step) for mine in self._shards(mesh, arrays)]

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of y, from its shards of x and the weights, and the step, if there is one."""
        arrays, step = self._arrays_and_step(*shards)
        dtype = dtype_of(arrays)
        plan = self.plan(self._whole(device, arrays), device.mesh, dtype)
        for name, array, held in zip(self.NAMES, arrays, plan.held[device.rank], strict=True):
            if array.shape != held:
                raise ValueError(f"{name} is of the shape of its shard, {held} on rank {device.rank}, got "
                                 f"{array.shape}")
        x, *weights = (array.astype(dtype, copy=False) for array in arrays)
        norm1, attention, norm2, feed_forward = self._parts(weights)
        shape, *shapes = plan.shapes
        of_norms, of_weights, _, (w1, _, w2, _) = self._parts(shapes)
        rows = plan.attention.rows(device.rank) if self.attention.zigzag else None

        y, of_norm1 = self.norm1.forward(device, x, *norm1, shapes=[shape, *of_norms])
        y, of_attention = self.attention.forward(device, y, *attention, shapes=[shape, *of_weights])
        a, of_dropout1 = _added(device, self.dropout1, y, x, step, shape, rows)
        y, of_norm2 = self.norm2.forward(device, a, *norm2, shapes=[shape, *of_norms])
        y, of_feed_forward = self.feed_forward.forward(device, y, *feed_forward, shapes=(shape, w1, w2))
        y, of_dropout2 = _added(device, self.dropout2, y, a, step, shape, rows)
        return y, Saved(of_norm1, of_attention, of_dropout1, of_norm2, of_feed_forward, of_dropout2, shape, dtype)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, ...]:
        """The gradients of x and the weights in their layouts, from the gradient of y in its layout.

        With a ring, call it only once for each forward.
        """
        grad = check_gradient(device, grad, self.sharding.out, saved.shape).astype(saved.dtype, copy=False)

        inner = grad if self.dropout2 is None else self.dropout2.backward(device, saved.dropout2, grad)[0]
        inner, *feed_forward = self.feed_forward.backward(device, saved.feed_forward, inner)
        grad_a, *norm2 = self.norm2.backward(device, saved.norm2, inner)
        grad_a += grad
        inner = grad_a if self.dropout1 is None else self.dropout1.backward(device, saved.dropout1, grad_a)[0]
        inner, *attention = self.attention.backward(device, saved.attention, inner)
        x_grad, *norm1 = self.norm1.backward(device, saved.norm1, inner)
        x_grad += grad_a
        return x_grad, *norm1, *attention, *norm2, *feed_forward

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The whole y, with its rows in the original order."""
        return self.attention.result(mesh, outputs)

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: np.dtype[Any]) -> TransformerBlockPlan:
        if len(shapes) != len(self.NAMES):
            raise ValueError(f"a plan is for the shapes of {', '.join(self.NAMES)}, got {len(shapes)} shapes")
        x = shapes[0]
        named = dict(zip(self.NAMES, shapes, strict=True))
        norm1, attention, norm2, feed_forward = self._parts(shapes[1:])
        w1, b1, w2, b2 = feed_forward
        of_attention = self.attention.plan([x, *attention], mesh, dtype)
        of_feed_forward = self.feed_forward.plan((x, w1, w2), mesh, dtype)
        check_biases(w1, b1, w2, b2)
        for name in ("wo", "w2"):
            if named[name][-1] != x[-1]:
                raise ValueError(f"the last extent of {name} is that of x, because both are added, got x "
                                 f"of shape {x} and {name} of {named[name]}")
        for name in (name for name in self.NAMES if name.startswith("norm")):
            if named[name] != x[-1:]:
                raise ValueError(f"{name} is of the shape of the last dim of x, {x[-1:]}, got {named[name]}")
        return TransformerBlockPlan(
            shapes, tuple(getattr(self.sharding, name) for name in self.NAMES),
            self.norm1.plan([x, *norm1], mesh, dtype), of_attention,
            self.norm2.plan([x, *norm2], mesh, dtype), of_feed_forward,
        )

    def _parts(self, weights: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """The entries of the first norm, of attention, of the second norm and of the feed-forward block."""
        of_norm = len(self.norm1.NAMES) - 1
        cuts = np.cumsum([0, of_norm, 4, of_norm, 4]).tolist()
        return tuple(weights[start:stop] for start, stop in pairwise(cuts))

    def _arrays_and_step(self, *args: Any) -> tuple[list[Array], int]:
        """The arguments as arrays, and the step; 0 if it is not given."""
        wanted = len(self.NAMES)
        if len(args) not in (wanted, wanted + 1):
            raise TypeError(f"TransformerBlock takes {', '.join(self.NAMES)} and, if it likes, a step, got {len(args)} "
                            f"arguments")
        return [np.asarray(value) for value in args[:wanted]], counted("step", args[wanted] if args[wanted:] else 0)

    def _whole(self, device: Device, arrays: list[Array]) -> list[Shape]:
        """The shapes of the whole inputs; the devices exchange only those that do not follow from others."""
        held, needed = dict(zip(self.NAMES, arrays, strict=True)), ("x", "wq", "wk", "w1")
        x, wq, wk, w1 = device.global_shapes(
            [held[name] for name in needed], [getattr(self.sharding, name) for name in needed])
        whole = {"x": x, "wq": wq, "wk": wk, "wv": wk, "wo": (*wq[1:], *x[2:]), "w1": w1, "b1": w1[1:],
                 "w2": (*w1[1:], *x[2:])}
        return [whole.get(name, x[2:]) for name in self.NAMES]

    def _order(self, sequence: int, mesh: Mesh) -> npt.NDArray[np.intp]:
        return zigzag_order(sequence, [mesh.shape[axis] for axis in self.sharding.x.dims[1].axes])


def _added(
    device: Device, dropout: Dropout | None, y: Array, x: Array, step: int, shape: Shape,
    rows: npt.NDArray[np.intp] | None,
) -> tuple[Array, Any]:
    """The residual addition: ``x`` plus ``y`` after dropout, and the mask; ``y`` may be overwritten."""
    saved = None
    if dropout is not None:
        y, saved = dropout.forward(device, y, step, shape=shape, rows=rows)
    y += x
    return y, saved

