"""`MixtureOfExperts`: a router sends each token to some of many feed-forward blocks on the devices of a mesh."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import (
    ACTIVATIONS,
    Choice,
    balance_loss,
    choose_experts,
    choose_experts_backward,
    expert_capacity,
)
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from tensor_parallelism.experts.dispatch import Dispatch, Runs, plan_dispatch
from tensor_parallelism.products import (
    Axes,
    AxisOrAxes,
    Layer,
    LayerPlan,
    Moving,
    Shape,
    Sharding,
    check_shard,
    moved,
)
from tensor_parallelism.products.product import without


@dataclass(frozen=True)
class MixtureOfExpertsSharding(Sharding, ndims=(2, 2, 3, 2, 3, 2, 2), waits=("out",)):
    """The layouts of x [..., model], router [model, experts], W1 [experts, model, hidden], b1 [experts, hidden],
    W2 [experts, hidden, model], b2 [experts, model] and ``out`` [..., model].

    The experts lie over the axes of the first dim of W1.  While the experts compute, the tokens lie over these axes and
    over those that split x, and everything else is whole.  The layouts of `expert_parallel` are already so.

    >>> MixtureOfExpertsSharding.expert_parallel("ep", batch="dp").w1
    TensorSharding('ep', None, None)

    ``TypeError`` if one is not a layout.  ``ValueError`` for a layout with too few dims, and for a partial one, except
    that of ``out``.
    """

    x: TensorSharding
    router: TensorSharding
    w1: TensorSharding
    b1: TensorSharding
    w2: TensorSharding
    b2: TensorSharding
    out: TensorSharding

    @classmethod
    def expert_parallel(cls, axes: AxisOrAxes, batch: AxisOrAxes = ()) -> Self:
        """Experts and sequence over ``axes``, the batch over ``batch``, for x of [batch, sequence, model]."""
        x = TensorSharding(batch, axes, None)
        w = TensorSharding(axes, None, None)
        b = TensorSharding(axes, None)
        return cls(x, TensorSharding(None, None), w, b, w, b, x)

    @property
    def experts(self) -> Axes:
        """The axes over which the experts lie."""
        return self.w1.over(3).dims[0].axes

    def tokens(self, ndim: int) -> tuple[Axes, ...]:
        """The axes of each dim of x except the last while the experts compute; ``ndim`` is the number of dims of x."""
        *lead, _ = (dim.axes for dim in self.x.over(ndim).dims)
        used = {axis for axes in lead for axis in axes}
        missing = without(self.experts, used)
        return *lead[:-1], (*lead[-1], *missing)


class Saved(NamedTuple):
    """What the backward needs of this device, and what the router did."""

    x: Array
    """(tokens, model): the tokens of this device."""
    router: Array
    weights: list[Array]
    choice: Choice
    """The probabilities, the experts and the gates of the tokens of this device."""
    dispatch: Dispatch
    """Which choices were kept, and who went where."""
    arrived: list[Array]
    """The rows of each expert on this device; ``before`` has what its activation function is given."""
    before: list[Array]
    made: Array
    """What came back from the experts, a row for each kept choice, in the order of ``dispatch``."""
    balance_loss: float
    """The loss over all tokens of all devices, not multiplied by anything."""
    probabilities_grad: Array
    """Its gradient with respect to the probabilities of a token."""
    plan: LayerPlan

    def hold(self, device: Device, sign: int) -> None:
        """Hold the memory of these values; with ``sign`` -1, give it back."""
        arrays = (self.x, self.made, *self.arrived, *self.before)
        device.hold("activations", sign * sum(array.nbytes for array in arrays))


class MixtureOfExperts(Layer[MixtureOfExpertsSharding]):
    """``cluster.run(MixtureOfExperts(sharding, top_k=2), x, router, w1, b1, w2, b2).result``.

    >>> import numpy as np
    >>> from tensor_parallelism import MixtureOfExperts, MixtureOfExpertsSharding
    >>> from vcluster import VirtualCluster
    >>> rng = np.random.default_rng(0)
    >>> shapes = (1, 4, 6), (6, 2), (2, 6, 8), (2, 8), (2, 8, 6), (2, 6)
    >>> with VirtualCluster(ep=2, backend="thread") as cluster:
    ...     operation = MixtureOfExperts(MixtureOfExpertsSharding.expert_parallel("ep"), top_k=1)
    ...     run = cluster.run(operation, *(rng.normal(size=shape) for shape in shapes))
    >>> run.result.shape, run.trace.count("all_to_all")
    ((1, 4, 6), 2)

    Of token t with experts e and gates g: ``sum(g * (act(x[t] W1[e] + b1[e]) W2[e] + b2[e]))`` over its ``top_k``
    experts, those of largest ``softmax(x router)``; see `parallelism.kernels.routing` for gates and ties.  x is (batch,
    sequence, model), or has fewer or more leading dims.

    **Capacity.**  An expert accepts at most ``ceil(capacity_factor * top_k * tokens / experts)`` choices of all tokens
    on all devices: first choices before second ones, earlier tokens (of the whole x, row by row) before later ones.
    Further choices are dropped: they add nothing, and this is not an error.  The rule does not depend on devices, so
    the same choices are dropped on every mesh, unless router logits differ by rounding.  With
    ``capacity_factor=None`` none is dropped.

    ``forward(...)`` returns ``(out, saved)``.  ``saved.balance_loss`` is the load-balancing loss of Switch Transformer
    (arXiv:2101.03961, equation 4) without its factor alpha; pass that factor to `backward` as ``balance_grad``.
    ``saved.dispatch.kept`` is a mask of the accepted choices of this device's tokens.

    **Communication**, forward: an all_gather of how many tokens choose which expert, and an all_reduce of the
    probabilities' sums (a number for each expert); then an all_to_all of the kept rows to their experts over the axes
    of these, with the ``split_sizes`` that the router makes, and one back.  Backward one to the experts and one back,
    and all_reduces of the gradients of the router over the axes that split the tokens, of the experts over those of
    them that do not split the experts.  ``plan(...)`` has everything but the all_to_alls, whose bytes the data decide:
    `tensor_parallelism.experts.dispatch.rows_received` counts them.  For g devices and an even router each is (g-1)/g
    of ``top_k`` times the bytes of a device's tokens.  Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, section 3.2.

    **Memory**: ``activations`` hold the rows of the experts here, what their activation functions are given, what came
    back, and x, until the backward.

    It needs a device that moves values: on a recorder, which only counts, it raises ``RuntimeError`` on more than one
    device.

    The host raises ``ValueError`` before anything is sent for more choices than experts, for a capacity factor that is
    not above 0, for no experts, and for arrays whose shapes do not fit each other, their layouts or the mesh.
    """

    KIND = MixtureOfExpertsSharding
    NAMES = ("x", "router", "w1", "b1", "w2", "b2")

    def __init__(
        self,
        sharding: MixtureOfExpertsSharding,
        *,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        activation: str = "gelu",
    ) -> None:
        super().__init__(sharding)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k is a whole number of at least 1, got {top_k!r}")
        if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
            raise ValueError(f"capacity_factor is above 0 and finite, or None, got {capacity_factor!r}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.activation = activation

    def __repr__(self) -> str:
        return (
            f"MixtureOfExperts({self.sharding!r}, top_k={self.top_k}, capacity_factor={self.capacity_factor}, "
            f"activation={self.activation!r})"
        )

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of the output, from those of x, router, W1, b1, W2 and b2."""
        arrays, plan = self._arrived(device, *shards)
        x, router, *weights = (
            moved(device, plan[name], array) for name, array in zip(self.NAMES, arrays, strict=True)
        )
        (*lead, model), (_, count), *_ = plan.shapes
        local, tokens = x.shape, prod(lead)
        x = x.reshape(-1, model)
        choice = choose_experts(device.matmul(x, router), self.top_k)
        runs = Runs(self.sharding.tokens(len(local)), tuple(lead), device.mesh)
        room = expert_capacity(tokens, count, self.top_k, self.capacity_factor)
        dispatch = plan_dispatch(
            device, choice.experts, runs, plan["counts"], TensorSharding(self.sharding.experts), room
        )
        sums = moved(device, plan["probabilities"], choice.probabilities.sum(axis=0))
        balance, probabilities_grad = balance_loss(dispatch.first_choices, sums, tokens)

        arrived = dispatch.to_experts(device, x[dispatch.tokens])
        act, (w1, b1, w2, b2) = ACTIVATIONS[self.activation], weights
        before = [device.matmul(rows, w1[e]) + b1[e] for e, rows in enumerate(arrived)]
        results = [device.matmul(act.forward(z), w2[e]) + b2[e] for e, z in enumerate(before)]
        made = dispatch.from_experts(device, results, x)
        out = dispatch.summed(made * choice.gates[dispatch.tokens, dispatch.ranks, None])
        saved = Saved(
            x,
            router,
            weights,
            choice,
            dispatch,
            arrived,
            before,
            made,
            balance,
            probabilities_grad.astype(x.dtype),
            plan,
        )
        saved.hold(device, 1)
        return moved(device, plan["out"], out.reshape(local)), saved

    def backward(
        self, device: Device, saved: Saved, grad: Any, balance_grad: float = 0.0
    ) -> tuple[Array, ...]:
        """The gradients of x, router, W1, b1, W2 and b2 in their layouts, from that of the output in its layout.

        ``balance_grad`` is the gradient of `Saved.balance_loss`: what it is multiplied by in the loss.
        """
        x, router, (w1, b1, w2, b2), choice, dispatch, *_, plan = saved
        grad = check_shard(device, grad, self.sharding.out, plan.shapes[0])
        grad = moved(device, plan["grad"], grad)
        local = grad.shape
        rows = grad.reshape(x.shape)[dispatch.tokens]
        gates_grad = np.zeros_like(choice.gates)
        gates_grad[dispatch.tokens, dispatch.ranks] = (rows * saved.made).sum(axis=-1)
        sent = dispatch.to_experts(device, rows * choice.gates[dispatch.tokens, dispatch.ranks, None])
        act = ACTIVATIONS[self.activation]
        w1_grad, b1_grad, w2_grad, b2_grad = map(np.zeros_like, (w1, b1, w2, b2))
        back = []
        for e, (z, made_grad) in enumerate(zip(saved.before, sent, strict=True)):
            w2_grad[e] = device.matmul(act.forward(z).T, made_grad)
            b2_grad[e] = made_grad.sum(axis=0)
            z_grad = act.backward(z, device.matmul(made_grad, w2[e].T))
            w1_grad[e] = device.matmul(saved.arrived[e].T, z_grad)
            b1_grad[e] = z_grad.sum(axis=0)
            back.append(device.matmul(z_grad, w1[e].T))
        logits_grad = choose_experts_backward(choice, gates_grad, balance_grad * saved.probabilities_grad)
        x_grad = device.matmul(logits_grad, router.T) + dispatch.summed(
            dispatch.from_experts(device, back, x)
        )
        router_grad = device.matmul(x.T, logits_grad)
        saved.hold(device, -1)
        found = {
            "w1": w1_grad,
            "b1": b1_grad,
            "w2": w2_grad,
            "b2": b2_grad,
            "router": router_grad,
            "x": x_grad.reshape(local),
        }
        grads = {name: moved(device, plan[f"{name}_grad"], made) for name, made in found.items()}
        return tuple(grads[name] for name in self.NAMES)

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        x, router, w1 = shapes["x"], shapes["router"], shapes["w1"]
        if len(x) < 2 or len(router) != 2 or len(w1) != 3:
            raise ValueError(
                f"x is of at least 2 dims, the router of 2 and w1 of 3, got shapes x {x}, router {router} "
                f"and w1 {w1}"
            )
        model, experts = router
        if not prod(w1):
            raise ValueError(
                f"a mixture of experts has an expert, a model and a hidden dim, got w1 of shape {w1}"
            )
        if x[-1] != model:
            raise ValueError(
                f"the last extent of x must be the first extent of the router, got x of shape {x} and router of {router}"
            )
        hidden = w1[2]
        for name, wanted in (
            ("w1", (experts, model, hidden)),
            ("b1", (experts, hidden)),
            ("w2", (experts, hidden, model)),
            ("b2", (experts, model)),
        ):
            if shapes[name] != wanted:
                raise ValueError(
                    f"{name} is of shape {wanted} beside a router of {router} and w1 of {w1}, got "
                    f"{shapes[name]}"
                )
        if self.top_k > experts:
            raise ValueError(
                f"a token goes to top_k={self.top_k} experts, the router of shape {router} has {experts}"
            )
        return {**shapes, "out": x}

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        """The changes of layout, except the ways of tokens to their experts and back."""
        x = shapes["x"]
        router = shapes["router"]
        layouts = self.sharding
        experts, lead = layouts.experts, layouts.tokens(len(x))
        tokens = TensorSharding(*lead, None)
        others = without(tokens.axes, experts)
        runs = Runs(lead, x[:-1], mesh)
        counts = runs.counts_shape(self.top_k, router[1])
        whole = TensorSharding.replicated
        weights = {
            name: TensorSharding(experts, *[None] * (len(shapes[name]) - 1)) for name in self.NAMES[2:]
        }
        forward = {
            "x": (layouts.x, tokens, x),
            "router": (layouts.router, whole(2), router),
            "counts": (runs.layout(), whole(len(counts)), counts, np.int64),
            "probabilities": (TensorSharding(None, partial=tokens.axes), whole(1), router[1:]),
            **{name: (getattr(layouts, name), own, shapes[name]) for name, own in weights.items()},
            "out": (tokens, layouts.out, x),
        }
        backward = {
            "grad": (layouts.out, tokens, x),
            **{
                f"{name}_grad": (
                    TensorSharding(*own.dims, partial=others),
                    getattr(layouts, name),
                    shapes[name],
                )
                for name, own in weights.items()
            },
            "router_grad": (TensorSharding(None, None, partial=tokens.axes), layouts.router, router),
            "x_grad": (tokens, layouts.x, x),
        }
        title = (
            f"a mixture of {shapes['w1'][0]} experts, {self.top_k} for each token, x {x}; besides tokens to "
            f"experts and back"
        )
        return title, forward, backward
