"""`FeedForward`: the block y = act(x W1 + b1) W2 + b2 of a Transformer, on sharded tensors, and its plan."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any

from parallelism.arrays import Array
from parallelism.kernels import ACTIVATIONS, sum_of_rows
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.feed_forward.policies import FeedForwardSharding, FeedForwardShardingPolicy
from tensor_parallelism.products import (
    Axes,
    Contraction,
    DType,
    Move,
    Moves,
    Plan,
    PlannedOperation,
    ProductPlan,
    Shape,
    Task,
    all_different,
    cheapest_product,
    check_shard,
    moved,
    moves_of,
    product_plan,
    run_product,
)

NAMES = ("x", "w1", "b1", "w2", "b2")
OF_X, OF_H, OF_Y = "gradient of x", "gradient of h", "gradient of y"
FORWARD = {"hidden": ("x", "w1", "h"), "b1": ("b1",), "out": ("h", "w2", "y"), "b2": ("b2",)}
"""The parts of the forward in order; for each, the names of the values that move."""
BACKWARD = {
    "grad": (OF_Y,),
    "w2_grad": ("h", OF_Y, "gradient of w2"),
    "b2_grad": ("gradient of b2",),
    "hidden_grad": (OF_Y, "w2", OF_H),
    "x_grad": (OF_H, "w1", OF_X),
    "w1_grad": ("x", OF_H, "gradient of w1"),
    "b1_grad": ("gradient of b1",),
}
TITLES = {
    "hidden": "forward: x W1",
    "out": "forward: h W2",
    "hidden_grad": f"backward: {OF_H}",
    "w2_grad": "backward: gradient of W2",
    "x_grad": f"backward: {OF_X}",
    "w1_grad": "backward: gradient of W1",
}


@dataclass(frozen=True)
class FeedForwardPlan(Plan):
    """The products and moves of a feed-forward block; ``print`` it.

    >>> from parallelism import Mesh
    >>> from tensor_parallelism import FeedForward, FeedForwardSharding
    >>> plan = FeedForward(FeedForwardSharding.megatron("tp")).plan([(1, 2, 3), (3, 4), (4, 3)], Mesh(tp=2))
    >>> plan.bytes_received, plan.backward_bytes_received
    ((48, 48), (48, 48))

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.
    """

    why: str
    """The policy, or why these ways were chosen."""
    mesh: Mesh
    products: dict[str, ProductPlan]
    """``hidden``: x W1, in the layout of the hidden activations; ``out``: their product with W2; four for gradients."""
    resharded: dict[str, ReshardingPlan]
    """The reshardings of biases and gradients.  ``grad``: the gradient of y, to its layout in the backward's products.
    """

    @cached_property
    def forward_moves(self) -> Moves:
        return self._moves(FORWARD)

    @cached_property
    def backward_moves(self) -> Moves:
        return self._moves(BACKWARD)

    def _moves(self, parts: dict[str, tuple[str, ...]]) -> Moves:
        moves: list[Move] = []
        for part, names in parts.items():
            plans = self.products[part].moves if part in self.products else [self.resharded[part]]
            moves += moves_of(zip(names, plans, strict=True))
        return tuple(moves)

    def __str__(self) -> str:
        products = (f"{title}\n{self.products[name]}" for name, title in TITLES.items())
        return "\n".join(
            [
                f"y = act(x W1 + b1) W2 + b2 on {self.mesh!r}: {self.why}",
                *products,
                f"{self.totals()}, biases included",
            ]
        )


Saved = tuple[Array, Array, Array, Array, Array, FeedForwardPlan]
"""What the backward needs: the shards of x, W1 and W2, the hidden activations before and after the activation
function, and the plan."""


class FeedForward(PlannedOperation[FeedForwardSharding, FeedForwardPlan]):
    """``cluster.run(FeedForward(sharding), x, w1, b1, w2, b2).result`` is ``act(x @ w1 + b1) @ w2 + b2``.

    >>> import numpy as np
    >>> from tensor_parallelism import FeedForward, FeedForwardSharding
    >>> from vcluster import VirtualCluster
    >>> x, w1, b1, w2, b2 = np.ones((1, 2, 3)), np.ones((3, 4)), np.zeros(4), np.ones((4, 3)), np.zeros(3)
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     operation = FeedForward(FeedForwardSharding.megatron("tp"), activation="relu")
    ...     cluster.run(operation, x, w1, b1, w2, b2).result.tolist()
    [[[12.0, 12.0, 12.0], [12.0, 12.0, 12.0]]]

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

    KIND = FeedForwardSharding
    NAMES = NAMES

    def __init__(
        self,
        sharding: FeedForwardSharding,
        policy: FeedForwardShardingPolicy | None = None,
        *,
        activation: str = "gelu",
    ) -> None:
        super().__init__(sharding)
        allowed = sharding.policy, FeedForwardShardingPolicy.GENERAL
        self.policy = self._allowed(policy, FeedForwardShardingPolicy, allowed)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def __repr__(self) -> str:
        return f"FeedForward({self.sharding!r}, {self.policy}, activation={self.activation!r})"

    def forward(self, device: Device, *shards: Any, shapes: list[Shape] | None = None) -> tuple[Array, Saved]:
        """This device's shard of y, from those of x, W1, b1, W2 and b2.

        ``shapes`` are those of the whole inputs, agreed on if not given.
        """
        (x, w1, b1, w2, b2), plan = self._arrived(device, *shards, shapes=shapes)
        before = run_product(device, plan.products["hidden"], x, w1)
        before += moved(device, plan.resharded["b1"], b1)
        hidden = ACTIVATIONS[self.activation].forward(before)
        device.hold("activations", x.nbytes + before.nbytes + hidden.nbytes)
        out = run_product(device, plan.products["out"], hidden, w2)
        out += moved(device, plan.resharded["b2"], b2)
        return out, (x, w1, w2, before, hidden, plan)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, Array, Array, Array, Array]:
        """The gradients of x, W1, b1, W2 and b2 in their layouts, from that of y in its layout."""
        x, w1, w2, before, hidden, plan = saved
        products, resharded = plan.products, plan.resharded
        grad = check_shard(device, grad, self.sharding.out, products["out"].task.out_shape)
        grad = moved(device, resharded["grad"], grad)
        w2_grad = run_product(device, products["w2_grad"], hidden, grad)
        b2_grad = moved(device, resharded["b2_grad"], sum_of_rows(grad))
        hidden_grad = run_product(device, products["hidden_grad"], grad, w2)
        before_grad = ACTIVATIONS[self.activation].backward(before, hidden_grad)
        x_grad = run_product(device, products["x_grad"], before_grad, w1)
        w1_grad = run_product(device, products["w1_grad"], x, before_grad)
        b1_grad = moved(device, resharded["b1_grad"], sum_of_rows(before_grad))
        device.hold("activations", -x.nbytes - before.nbytes - hidden.nbytes)
        return x_grad, w1_grad, b1_grad, w2_grad, b2_grad

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> FeedForwardPlan:
        """For the shapes of x, W1 and W2, or of all inputs."""
        x, w1, *b1, w2 = shapes if len(shapes) == 3 else shapes[:4]
        if len(x) < 2 or len(w1) != 2 or len(w2) != 2:
            raise ValueError(
                f"x is of at least 2 dims and weights of 2, got shapes x {x}, w1 {w1} and w2 {w2}"
            )
        if x[-1] != w1[0]:
            raise ValueError(f"the last extent of x is the first of w1, got x of shape {x} and w1 of {w1}")
        if w1[1] != w2[0]:
            raise ValueError(f"the last extent of w1 is the first of w2, got w1 of shape {w1} and w2 of {w2}")
        for name, bias, weights in zip(("b1", "b2"), (*b1, *shapes[4:]), (w1, w2), strict=False):
            if bias != weights[1:]:
                raise ValueError(
                    f"{name} is of shape {weights[1:]} beside weights of shape {weights}, got {bias}"
                )
        whole = {"x": x, "w1": w1, "b1": w1[1:], "w2": w2, "b2": w2[1:], "out": (*x[:-1], w2[1])}
        self._check_shapes(whole, mesh)
        return _plan(self.sharding, self.policy, whole, dtype, mesh)


def _plan(
    sharding: FeedForwardSharding,
    policy: FeedForwardShardingPolicy,
    shapes: dict[str, Shape],
    dtype: DType,
    mesh: Mesh,
) -> FeedForwardPlan:
    """The plan of ``policy`` for tensors of these shapes, which fit each other."""
    lead = "abcdeghijkl"[: len(shapes["x"]) - 1]
    first = Contraction(f"{lead}m", "mf", f"{lead}f")
    second = Contraction(f"{lead}f", "fn", f"{lead}n")
    given = {name: getattr(sharding, name).over(len(shape)) for name, shape in shapes.items()}
    chosen = None
    why = "the cheapest ways"
    grad = given["out"]
    hiddens = _hidden_layouts(given)
    if policy is not FeedForwardShardingPolicy.GENERAL:
        split = sharding.split()
        chosen = {lead[1:][-1:]: split["sequence"], lead[:1]: split["batch"], "f": split["hidden"]}
        why = policy.value
        rows = [chosen.get(letter) for letter in lead]
        grad, hiddens = TensorSharding(*rows, None), [TensorSharding(*rows, chosen["f"])]

    def tasks(hidden: TensorSharding, out: TensorSharding) -> tuple[Task, Task]:
        into = Task(first, given["x"], given["w1"], hidden, shapes["x"], shapes["w1"], dtype, mesh)
        return into, Task(second, hidden, given["w2"], out, into.out_shape, shapes["w2"], dtype, mesh)

    def planned(task: Task) -> ProductPlan:
        return cheapest_product(task) if chosen is None else product_plan(task, chosen)

    def summed(layout: TensorSharding) -> TensorSharding:
        """The layout of a pending sum over all dims except the last."""
        *over, last = layout.dims
        return TensorSharding(last, partial=(*TensorSharding(*over).axes, *layout.partial))

    ways = [tuple(map(planned, tasks(hidden, given["out"]))) for hidden in hiddens]
    into, out = min(ways, key=lambda way: tuple(map(sum, zip(*(plan.cost for plan in way), strict=True))))
    hidden = into.task.out
    of_first, of_second = tasks(hidden, grad)
    changes = {
        "b1": (given["b1"], TensorSharding(hidden.dims[-1]), "b1"),
        "b2": (given["b2"], TensorSharding(given["out"].dims[-1], partial=given["out"].partial), "b2"),
        "grad": (given["out"], grad, "out"),
        "b2_grad": (summed(grad), given["b2"], "b2"),
        "b1_grad": (summed(hidden), given["b1"], "b1"),
    }
    return FeedForwardPlan(
        why,
        mesh,
        {
            "hidden": into,
            "out": out,
            "hidden_grad": planned(of_second.lhs_gradient),
            "w2_grad": planned(of_second.rhs_gradient),
            "x_grad": planned(of_first.lhs_gradient),
            "w1_grad": planned(of_first.rhs_gradient),
        },
        {
            name: plan_resharding(source, target, shapes[tensor], dtype, mesh)
            for name, (source, target, tensor) in changes.items()
        },
    )


def _hidden_layouts(given: dict[str, TensorSharding]) -> list[TensorSharding]:
    """The layouts to try for the hidden activations.

    Each leading dim lies as in x, as in y, or is whole; the hidden dim lies as in a weight or is whole.
    """
    leading_dims = zip(given["x"].dims[:-1], given["out"].dims[:-1], strict=True)
    options: list[list[Axes]] = [[of_x.axes, of_y.axes, ()] for of_x, of_y in leading_dims]
    of_weights = given["w1"].dims[1], given["w2"].dims[0], given["b1"].dims[0]
    options.append([*(dim.axes for dim in of_weights), ()])
    choices = product(*map(dict.fromkeys, options))
    return [TensorSharding(*dims) for dims in choices if all_different(chain(*dims))]
