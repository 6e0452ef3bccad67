"""The plan of a feed-forward block: its six products, and the moves of biases and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import product

import numpy as np

from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.feed_forward.policies import FeedForwardSharding, FeedForwardShardingPolicy
from tensor_parallelism.products import (
    Axes,
    Contraction,
    Moves,
    ProductPlan,
    Shape,
    Task,
    cheapest_product,
    product_plan,
)
from tensor_parallelism.products.layer_plan import bytes_by_rank


@dataclass(frozen=True)
class FeedForwardPlan:
    """The products and moves of a feed-forward block; ``print`` it.

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.
    """

    why: str
    """The policy, or why these ways were chosen."""
    hidden: ProductPlan
    """The product x W1, in the layout of the hidden activations."""
    b1: ReshardingPlan
    out: ProductPlan
    """The product of the hidden activations and W2."""
    b2: ReshardingPlan
    grad: ReshardingPlan
    """The resharding of the gradient of y to its layout in the products of the backward."""
    hidden_grad: ProductPlan
    w2_grad: ProductPlan
    b2_grad: ReshardingPlan
    x_grad: ProductPlan
    w1_grad: ProductPlan
    b1_grad: ReshardingPlan

    @property
    def bytes_received(self) -> tuple[int, ...]:
        return bytes_by_rank((move for _, move in self.forward), self.hidden.mesh)

    @property
    def backward_bytes_received(self) -> tuple[int, ...]:
        return bytes_by_rank((move for _, move in self.backward), self.hidden.mesh)

    @cached_property
    def forward(self) -> Moves:
        """The moves of the forward in their order, each with a name."""
        return (*_parts("x", "w1", "h", self.hidden), ("b1", self.b1), *_parts("h", "w2", "y", self.out),
                ("b2", self.b2))

    @cached_property
    def backward(self) -> Moves:
        """The moves of the backward in their order."""
        of = "gradient of {}".format
        return (
            (of("y"), self.grad), *_parts("h", of("y"), of("w2"), self.w2_grad), (of("b2"), self.b2_grad),
            *_parts(of("y"), "w2", of("h"), self.hidden_grad), *_parts(of("h"), "w1", of("x"), self.x_grad),
            *_parts("x", of("h"), of("w1"), self.w1_grad), (of("b1"), self.b1_grad),
        )

    def __str__(self) -> str:
        named = [
            ("forward: x W1", self.hidden), ("forward: h W2", self.out), ("backward: gradient of h", self.hidden_grad),
            ("backward: gradient of W2", self.w2_grad), ("backward: gradient of x", self.x_grad),
            ("backward: gradient of W1", self.w1_grad),
        ]
        lines = [f"y = act(x W1 + b1) W2 + b2 on {self.hidden.mesh!r}: {self.why}"]
        lines += [f"{name}\n{plan}" for name, plan in named]
        forward, backward = sum(self.bytes_received), sum(self.backward_bytes_received)
        return "\n".join([*lines, f"{forward} bytes forward, {backward} backward, biases included"])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _parts(lhs: str, rhs: str, out: str, plan: ProductPlan) -> Moves:
    return (lhs, plan.lhs), (rhs, plan.rhs), (out, plan.out)


def feed_forward_plan(
    sharding: FeedForwardSharding, policy: FeedForwardShardingPolicy, x: Shape, w1: Shape, w2: Shape,
    dtype: np.dtype[np.generic], mesh: Mesh,
) -> FeedForwardPlan:
    """The plan of ``policy`` for tensors of these shapes, which must fit each other."""
    lead = "abcdeghijkl"[: len(x) - 1]
    first, second = Contraction(f"{lead}m", "mf", f"{lead}f"), Contraction(f"{lead}f", "fn", f"{lead}n")
    hidden_shape, out_shape = (*x[:-1], w1[1]), (*x[:-1], w2[1])
    given = {name: getattr(sharding, name).over(len(shape)) for name, shape in
             (("x", x), ("w1", w1), ("w2", w2), ("out", out_shape), ("b1", (1,)), ("b2", (1,)))}
    chosen = None
    if policy is not FeedForwardShardingPolicy.GENERAL:
        split = sharding.split()
        chosen = {lead[1:][-1:]: split["sequence"], lead[:1]: split["batch"], "f": split["hidden"]}

    def planned(task: Task) -> ProductPlan:
        return cheapest_product(task) if chosen is None else product_plan(task, chosen)

    def forward(hidden: TensorSharding) -> tuple[ProductPlan, ProductPlan]:
        return (planned(Task(first, given["x"], given["w1"], hidden, x, w1, dtype, mesh)),
                planned(Task(second, hidden, given["w2"], given["out"], hidden_shape, w2, dtype, mesh)))

    if chosen is not None:
        rows = [chosen.get(letter) for letter in lead]
        ways = [forward(TensorSharding(*rows, chosen["f"]))]
        grad = TensorSharding(*rows, None)
    else:
        ways = [forward(layout) for layout in _hidden_layouts(given)]
        grad = given["out"]
    into, out = min(ways, key=lambda way: tuple(map(sum, zip(*(plan.cost for plan in way), strict=True))))
    hidden = into.task.out

    def move(source: TensorSharding, target: TensorSharding, shape: Shape) -> ReshardingPlan:
        return plan_resharding(source, target, shape, dtype, mesh)

    def summed(layout: TensorSharding) -> TensorSharding:
        """The layout of a pending sum over all dims except the last."""
        *over, last = layout.over(len(x)).dims
        return TensorSharding(last, partial=(*(axis for dim in over for axis in dim.axes), *layout.partial))

    back = Task(second, hidden, given["w2"], grad, hidden_shape, w2, dtype, mesh)
    first_back = Task(first, given["x"], given["w1"], hidden, x, w1, dtype, mesh)
    last, features, outputs = given["out"].dims[-1], (w1[1],), (w2[1],)
    why = "the cheapest ways" if chosen is None else policy.value
    return FeedForwardPlan(
        why, into, move(given["b1"], TensorSharding(hidden.dims[-1]), features), out,
        move(given["b2"], TensorSharding(last, partial=given["out"].partial), outputs),
        move(given["out"], grad, out_shape), planned(back.lhs_gradient), planned(back.rhs_gradient),
        move(summed(grad), given["b2"], outputs), planned(first_back.lhs_gradient), planned(first_back.rhs_gradient),
        move(summed(hidden), given["b1"], features),
    )


def _hidden_layouts(given: dict[str, TensorSharding]) -> list[TensorSharding]:
    """The layouts to try for the hidden activations.

    Each leading dim lies as in x, as in y, or is whole; the hidden dim lies as in a weight or is whole.
    """
    options: list[list[Axes]] = [
        list(dict.fromkeys([a.axes, b.axes, ()]))
        for a, b in zip(given["x"].dims[:-1], given["out"].dims[:-1], strict=True)
    ]
    hidden = (given["w1"].dims[1].axes, given["w2"].dims[0].axes, given["b1"].dims[0].axes, ())
    layouts = []
    for dims in product(*options, dict.fromkeys(hidden)):
        used = [axis for axes in dims for axis in axes]
        if len(set(used)) == len(used):
            layouts.append(TensorSharding(*dims))
    return layouts
