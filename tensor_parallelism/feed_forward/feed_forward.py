"""`FeedForward`: the block y = act(x W1 + b1) W2 + b2 of a Transformer, on sharded tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import ACTIVATIONS, sum_of_rows
from parallelism.mesh import Mesh
from parallelism.operation import Device
from tensor_parallelism.feed_forward.plan import FeedForwardPlan, feed_forward_plan
from tensor_parallelism.feed_forward.policies import FeedForwardSharding, FeedForwardShardingPolicy
from tensor_parallelism.products import PlannedOperation, Shape, check_gradient, check_shape, run_product
from tensor_parallelism.products.product import moved

NAMES = ("x", "w1", "b1", "w2", "b2")


class Saved(NamedTuple):
    """The values of the forward that the backward needs: shards, and the whole shapes of x, W1 and W2."""

    x: Array
    w1: Array
    w2: Array
    before: Array
    """The hidden activations before the activation function."""
    hidden: Array
    """The hidden activations after the activation function."""
    shapes: tuple[Shape, Shape, Shape]
    dtype: np.dtype[Any]


class FeedForward(PlannedOperation[FeedForwardPlan]):
    """``cluster.run(FeedForward(sharding), x, w1, b1, w2, b2).result`` is ``act(x @ w1 + b1) @ w2 + b2``.

    x is (batch, sequence, model), or has fewer or more leading dims; W1 is (model, hidden), W2 (hidden, model).
    ``activation`` is ``gelu``, ``relu`` or another of `parallelism.kernels.ACTIVATIONS`.  The default ``policy`` is
    that of the layouts; ``GENERAL``, which any layouts allow, chooses the cheapest way.
    ``print(operation.plan((x.shape, w1.shape, w2.shape), mesh))`` shows what will run.

    **Communication**: see `FeedForwardShardingPolicy`; ``plan(...).bytes_received`` and
    ``plan(...).backward_bytes_received``, by rank.

    **Memory**: from the forward to the end of the backward ``activations`` hold, by `Device.hold`, this device's x and
    its hidden activations before and after the activation function: the 2 s b h + 16 s b h bytes that Korthikanti et
    al., 2022, arXiv:2205.05198, section 4.1, count for elements of two bytes and a hidden dim of four times the model's
    (their 19 s b h have a dropout mask, too).

    ``ValueError`` at construction for a named policy that the layouts do not have.  The host raises it before anything
    is sent for arrays whose shapes do not fit each other, their layouts or the mesh.
    """

    NAMES = NAMES
    sharding: FeedForwardSharding

    def __init__(
        self, sharding: FeedForwardSharding, policy: FeedForwardShardingPolicy | None = None, *,
        activation: str = "gelu",
    ) -> None:
        super().__init__(sharding, FeedForwardSharding)
        allowed = sharding.policy, FeedForwardShardingPolicy.GENERAL
        self.policy = self._allowed(policy, FeedForwardShardingPolicy, allowed)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def __repr__(self) -> str:
        return f"FeedForward({self.sharding!r}, {self.policy}, activation={self.activation!r})"

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of x, W1, b1, W2 and b2, by rank."""
        arrays = self._named(*args)
        x, w1, b1, w2, b2 = (array.shape for array in arrays)
        self.plan((x, w1, w2), mesh, np.result_type(*arrays))
        check_biases(w1, b1, w2, b2)
        return self._shards(mesh, arrays)

    def forward(
        self, device: Device, *shards: Any, shapes: tuple[Shape, Shape, Shape] | None = None
    ) -> tuple[Array, Saved]:
        """This device's shard of y, from those of x, W1, b1, W2 and b2.

        ``shapes`` are those of the whole x, W1 and W2, agreed on if not given.
        """
        x, w1, b1, w2, b2 = map(np.asarray, shards)
        sharding = self.sharding
        if shapes is None:
            whole = device.global_shapes([x, w1, w2], [sharding.x, sharding.w1, sharding.w2])
            shapes = whole[0], whole[1], whole[2]
        dtype = np.result_type(x, w1, b1, w2, b2)
        plan = self.plan(shapes, device.mesh, dtype)
        before = run_product(device, plan.hidden, x, w1)
        before += moved(device, plan.b1, b1)
        hidden = ACTIVATIONS[self.activation].forward(before)
        device.hold("activations", x.nbytes + before.nbytes + hidden.nbytes)
        out = run_product(device, plan.out, hidden, w2)
        out += moved(device, plan.b2, b2)
        return out, Saved(x, w1, w2, before, hidden, shapes, dtype)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, Array, Array, Array, Array]:
        """The gradients of x, W1, b1, W2 and b2 in their layouts, from that of y in its layout."""
        x, w1, w2, before, hidden, shapes, dtype = saved
        plan = self.plan(shapes, device.mesh, dtype)
        activation = ACTIVATIONS[self.activation]
        grad = check_gradient(device, grad, self.sharding.out, (*shapes[0][:-1], shapes[2][1]))
        grad = moved(device, plan.grad, grad)
        w2_grad = run_product(device, plan.w2_grad, hidden, grad)
        b2_grad = moved(device, plan.b2_grad, sum_of_rows(grad))
        before_grad = activation.backward(before, run_product(device, plan.hidden_grad, grad, w2))
        x_grad = run_product(device, plan.x_grad, before_grad, w1)
        w1_grad = run_product(device, plan.w1_grad, x, before_grad)
        b1_grad = moved(device, plan.b1_grad, sum_of_rows(before_grad))
        device.hold("activations", -x.nbytes - before.nbytes - hidden.nbytes)
        return x_grad, w1_grad, b1_grad, w2_grad, b2_grad

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: np.dtype[Any]) -> FeedForwardPlan:
        """For the shapes of x, W1 and W2."""
        x, w1, w2 = shapes
        if len(x) < 2 or len(w1) != 2 or len(w2) != 2:
            raise ValueError(f"x is of at least 2 dims and weights of 2, got shapes x {x}, w1 {w1} and w2 {w2}")
        if x[-1] != w1[0]:
            raise ValueError(f"the last extent of x is the first of w1, got x of shape {x} and w1 of {w1}")
        if w1[1] != w2[0]:
            raise ValueError(f"the last extent of w1 is the first of w2, got w1 of shape {w1} and w2 of {w2}")
        named = {"x": x, "w1": w1, "b1": w1[1:], "w2": w2, "b2": w2[1:], "out": (*x[:-1], w2[1])}
        for name, shape in named.items():
            check_shape(name, shape, name, getattr(self.sharding, name), mesh)
        return feed_forward_plan(self.sharding, self.policy, x, w1, w2, dtype, mesh)


def check_biases(w1: Shape, b1: Shape, w2: Shape, b2: Shape) -> None:
    """``ValueError`` for the shape of a bias that does not go with its weights'."""
    for name, bias, weights in (("b1", b1, w1), ("b2", b2, w2)):
        if bias != weights[1:]:
            raise ValueError(f"{name} is of shape {weights[1:]} beside weights of shape {weights}, got {bias}")
