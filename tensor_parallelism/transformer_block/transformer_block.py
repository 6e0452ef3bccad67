"""`TransformerBlock`: attention and a feed-forward block, each after a norm and with a residual addition.

Its plan is the plans of its parts, with all their communications in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallelism.arrays import Array, plain_array
from parallelism.kernels import splitmix64
from parallelism.mesh import Mesh
from parallelism.operation import Device
from tensor_parallelism.attention import Attention, AttentionPlan, AttentionShardingPolicy
from tensor_parallelism.feed_forward import FeedForward, FeedForwardPlan
from tensor_parallelism.layers import Dropout, LayerNorm, RMSNorm, counted
from tensor_parallelism.products import DType, LayerPlan, Moves, Plan, PlannedOperation, Shape, check_shard
from tensor_parallelism.transformer_block.policies import TransformerBlockPolicy, TransformerBlockSharding

NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
Saved = tuple[list[tuple[Any, Any, Any]], "TransformerBlockPlan"]
"""What the backward needs: of each half what its norm, what follows it, and its dropout saved; and the plan."""


@dataclass(frozen=True)
class TransformerBlockPlan(Plan):
    """The plans of a block's parts; ``print`` it.

    >>> from parallelism import Mesh
    >>> from tensor_parallelism import TransformerBlock, TransformerBlockSharding
    >>> operation = TransformerBlock(TransformerBlockSharding.megatron("tp"))
    >>> plan = operation.plan(operation.shapes((1, 5, 8), heads=2).values(), Mesh(tp=2))
    >>> plan.bytes_received, plan.attention.bytes_received
    ((640, 640), (320, 320))

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.
    """

    mesh: Mesh
    shapes: tuple[Shape, ...]
    """The shapes of the whole x and weights."""
    norm1: LayerPlan
    attention: AttentionPlan
    norm2: LayerPlan
    feed_forward: FeedForwardPlan

    @property
    def _parts(self) -> dict[str, Plan]:
        return {
            "norm 1": self.norm1,
            "attention": self.attention,
            "norm 2": self.norm2,
            "feed-forward": self.feed_forward,
        }

    @cached_property
    def forward_moves(self) -> Moves:
        return tuple(
            move._replace(what=f"{part}: {move.what}")
            for part, plan in self._parts.items()
            for move in plan.forward_moves
        )

    @cached_property
    def backward_moves(self) -> Moves:
        return tuple(
            move._replace(what=f"{part}: {move.what}")
            for part, plan in reversed(self._parts.items())
            for move in plan.backward_moves
        )

    def __str__(self) -> str:
        shapes = self.attention.shapes
        return "\n".join(
            [
                f"a block of x{list(shapes.x)}, {shapes.heads} heads on {self.mesh!r}: {self.attention.policy.value}",
                *self.table(),
                f"  in all {self.totals()}",
            ]
        )


class TransformerBlock(PlannedOperation[TransformerBlockSharding, TransformerBlockPlan]):
    """``cluster.run(TransformerBlock(sharding), x, *weights).result`` is the output y of a pre-norm block:

        a = x + dropout(attention(norm(x)))
        y = a + dropout(feed_forward(norm(a)))

    The weights are, in the order of `NAMES`: ``norm1`` and ``norm1_bias``; ``wq``, ``wk``, ``wv`` and ``wo`` of
    `Attention`; ``norm2`` and ``norm2_bias``; ``w1``, ``b1``, ``w2`` and ``b2`` of `FeedForward`.  With
    ``norm="rms_norm"`` the norms have no biases.  `shapes` returns the shapes of all of them.  An integer, the step,
    may follow the weights.  Dropout is a function of ``seed`` and step; the same elements are dropped on every mesh.
    ``causal``, ``window``, ``zigzag`` and ``rotary_base`` are those of `Attention`.  Without ``policy`` the block runs
    the first policy that the layouts allow; that is RING if ULYSSES is possible, too.
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

    >>> import numpy as np
    >>> from tensor_parallelism import TransformerBlock, TransformerBlockSharding
    >>> from vcluster import VirtualCluster
    >>> operation = TransformerBlock(TransformerBlockSharding.megatron("tp"), causal=True)
    >>> inputs = [np.ones(shape) for shape in operation.shapes((1, 5, 8), heads=2).values()]
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     run = cluster.run(operation, *inputs)
    >>> run.result.shape, run.trace.count("all_reduce")
    ((1, 5, 8), 2)
    """

    KIND = TransformerBlockSharding

    def __init__(
        self,
        sharding: TransformerBlockSharding,
        policy: TransformerBlockPolicy | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
        zigzag: bool = False,
        rotary_base: float | None = None,
        norm: str = "layer_norm",
        activation: str = "gelu",
        dropout: float = 0.0,
        seed: int = 0,
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__(sharding)
        self.policy = self._allowed(policy, TransformerBlockPolicy, sharding.policies)
        if norm not in NORMS:
            raise ValueError(f"norm is one of {', '.join(NORMS)}, got {norm!r}")
        self.norm1, self.norm2 = (NORMS[norm](sharding.x, epsilon=epsilon) for _ in range(2))
        self.attention = Attention(
            sharding.attention,
            AttentionShardingPolicy(self.policy.value),
            causal=causal,
            window=window,
            zigzag=zigzag,
            rotary_base=rotary_base,
        )
        self.feed_forward = FeedForward(sharding.feed_forward, activation=activation)
        Dropout(sharding.out, dropout, seed)  # checks rate and seed, without dropout, too
        self.dropout1 = self.dropout2 = None
        if dropout:
            self.dropout1, self.dropout2 = (
                Dropout(sharding.out, dropout, int(one)) for one in splitmix64(seed, [0, 1])
            )
        bias = norm == "layer_norm"
        self.NAMES = (
            "x",
            "norm1",
            *["norm1_bias"] * bias,
            "wq",
            "wk",
            "wv",
            "wo",
            "norm2",
            *["norm2_bias"] * bias,
            "w1",
            "b1",
            "w2",
            "b2",
        )

    def __repr__(self) -> str:
        return (
            f"TransformerBlock({self.sharding!r}, {self.policy}, {self.norm1!r}, {self.attention!r}, "
            f"{self.dropout1!r}, {self.feed_forward!r})"
        )

    def shapes(
        self,
        x: Sequence[int],
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden: int | None = None,
    ) -> dict[str, Shape]:
        """The shapes of the inputs by name, for x of shape (batch, sequence, model) and this number of ``heads``.

        By default there are as many key-value heads as heads, all heads together are as wide as the model, and the
        hidden dim is four times as wide.  ``ValueError`` if no ``head_dim`` is given and the model's width is not a
        multiple of the heads.
        """
        model = x[-1]
        if head_dim is None and (heads < 1 or model % heads):
            raise ValueError(
                f"a head_dim must be given where the model is no multiple of the heads, got x of shape "
                f"{tuple(x)} and {heads} heads"
            )
        width = model // heads if head_dim is None else head_dim
        keys = (model, heads if kv_heads is None else kv_heads, width)
        hidden = 4 * model if hidden is None else hidden
        shapes = {
            "wq": (model, heads, width),
            "wk": keys,
            "wv": keys,
            "wo": (heads, width, model),
            "w1": (model, hidden),
            "b1": (hidden,),
            "w2": (hidden, model),
            "x": tuple(x),
        }
        return {name: shapes.get(name, (model,)) for name in self.NAMES}

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of x and the weights, and the step, by rank."""
        arrays, step = self._arrays_and_step(*args)
        return [(*mine, step) for mine in super().inputs(mesh, *arrays)]

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of y, from its shards of x and the weights, and the step, if there is one."""
        arrays, step = self._arrays_and_step(*shards)
        dtype = self._dtype(arrays)
        plan = self.plan(self._whole(device, arrays), device.mesh, dtype)
        for name, array, shape in zip(self.NAMES, arrays, plan.shapes, strict=True):
            check_shard(device, array, getattr(self.sharding, name), shape, name)
        x, *weights = (array.astype(dtype, copy=False) for array in arrays)
        shape, *shapes = plan.shapes
        rows = plan.attention.rows(device.rank) if self.attention.zigzag else None
        saved = []
        for (norm, inner, dropout), here, whole in zip(
            self._halves, self._by_half(weights), self._by_half(shapes), strict=True
        ):
            y, of_norm = norm.forward(device, x, *here[0], shapes=[shape, *whole[0]])
            y, of_inner = inner.forward(device, y, *here[1], shapes=[shape, *whole[1]])
            y, mask = (
                (y, None) if dropout is None else dropout.forward(device, y, step, shape=shape, rows=rows)
            )
            y += x
            x = y
            saved.append((of_norm, of_inner, mask))
        return x, (saved, plan)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, ...]:
        """The gradients of x and the weights in their layouts, from the gradient of y in its layout.

        With a ring, call it only once for each forward.
        """
        halves, plan = saved
        grad = check_shard(device, grad, self.sharding.out, plan.shapes[0]).astype(
            plan.attention.dtype, copy=False
        )
        weight_grads: list[Array] = []
        for (norm, inner, dropout), (of_norm, of_inner, mask) in zip(
            self._halves[::-1], halves[::-1], strict=True
        ):
            dropped = grad if dropout is None else dropout.backward(device, mask, grad)[0]
            inner_grad, *of_weights = inner.backward(device, of_inner, dropped)
            x_grad, *of_parameters = norm.backward(device, of_norm, inner_grad)
            x_grad += grad
            grad = x_grad
            weight_grads = [*of_parameters, *of_weights, *weight_grads]
        return grad, *weight_grads

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The whole y, with its rows in the original order."""
        return self.attention.result(mesh, outputs)

    def _dtype(self, arrays: Sequence[Array]) -> DType:
        return self.attention._dtype(arrays)

    def _shards(self, mesh: Mesh, arrays: Sequence[Array]) -> list[tuple[Any, ...]]:
        x, *weights = arrays
        return super()._shards(mesh, [self.attention.ordered(x, mesh), *weights])

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> TransformerBlockPlan:
        if len(shapes) != len(self.NAMES):
            raise ValueError(f"a plan is for the shapes of {', '.join(self.NAMES)}, got {len(shapes)} shapes")
        x, *weights = shapes
        (norm1, attention), (norm2, feed_forward) = self._by_half(weights)
        of_attention = self.attention.plan([x, *attention], mesh, dtype)
        of_feed_forward = self.feed_forward.plan([x, *feed_forward], mesh, dtype)
        for name, shape in zip(self.NAMES, shapes, strict=True):
            if name in ("wo", "w2") and shape[-1] != x[-1]:
                raise ValueError(
                    f"the last extent of {name} is that of x, because both are added, got x "
                    f"of shape {x} and {name} of {shape}"
                )
            if name.startswith("norm") and shape != x[-1:]:
                raise ValueError(f"{name} must have the shape of the last dim of x, {x[-1:]}, got {shape}")
        return TransformerBlockPlan(
            mesh,
            shapes,
            self.norm1.plan([x, *norm1], mesh, dtype),
            of_attention,
            self.norm2.plan([x, *norm2], mesh, dtype),
            of_feed_forward,
        )

    @property
    def _halves(self) -> list[tuple[Any, Any, Dropout | None]]:
        """The norm, what follows it, and the dropout before the residual addition."""
        return [(self.norm1, self.attention, self.dropout1), (self.norm2, self.feed_forward, self.dropout2)]

    def _by_half(self, weights: Sequence[Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
        """For each half the entries of its norm, and of what follows it."""
        of_norm = len(self.norm1.NAMES) - 1
        halves = weights[: of_norm + 4], weights[of_norm + 4 :]
        return [(half[:of_norm], half[of_norm:]) for half in halves]

    def _arrays_and_step(self, *args: Any) -> tuple[list[Array], int]:
        """The arguments as arrays, and the step; 0 if it is not given."""
        wanted = len(self.NAMES)
        if len(args) not in (wanted, wanted + 1):
            raise TypeError(
                f"TransformerBlock takes {', '.join(self.NAMES)} and, if it likes, a step, got {len(args)} "
                f"arguments"
            )
        arrays = [plain_array(name, value) for name, value in zip(self.NAMES, args, strict=False)]
        return arrays, counted("step", args[wanted] if args[wanted:] else 0)

    def _whole(self, device: Device, arrays: list[Array]) -> list[Shape]:
        """The shapes of the whole inputs; the devices exchange only those that do not follow from others."""
        held = dict(zip(self.NAMES, arrays, strict=True))
        needed = ("x", "wq", "wk", "w1")
        x, wq, wk, w1 = device.global_shapes(
            [held[name] for name in needed], [getattr(self.sharding, name) for name in needed]
        )
        whole = {
            "x": x,
            "wq": wq,
            "wk": wk,
            "wv": wk,
            "wo": (*wq[1:], *x[2:]),
            "w1": w1,
            "b1": w1[1:],
            "w2": (*w1[1:], *x[2:]),
        }
        return [whole.get(name, x[2:]) for name in self.NAMES]
