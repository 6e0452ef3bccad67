"""The layouts of a mixture of experts, and the moves that do not depend on the router."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, LayerPlan, Shape, check_layouts


@dataclass(frozen=True)
class MixtureOfExpertsSharding:
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

    def __post_init__(self) -> None:
        least = dict(zip((field.name for field in fields(self)), (2, 2, 3, 2, 3, 2, 2), strict=True))
        check_layouts(self, least, waits=("out",))

    @classmethod
    def expert_parallel(cls, axes: str | Axes, batch: str | Axes = ()) -> MixtureOfExpertsSharding:
        """Experts and sequence over ``axes``, the batch over ``batch``, for x of [batch, sequence, model]."""
        x = TensorSharding(batch, axes, None)
        w, b = TensorSharding(axes, None, None), TensorSharding(axes, None)
        return cls(x, TensorSharding(None, None), w, b, w, b, x)

    @property
    def experts(self) -> Axes:
        """The axes over which the experts lie."""
        return self.w1.over(3).dims[0].axes

    def tokens(self, ndim: int) -> tuple[Axes, ...]:
        """The axes of each dim of x except the last while the experts compute; ``ndim`` is the number of dims of x."""
        *lead, _ = (dim.axes for dim in self.x.over(ndim).dims)
        missing = tuple(axis for axis in self.experts if not any(axis in axes for axes in lead))
        return *lead[:-1], (*lead[-1], *missing)


@dataclass(frozen=True)
class Runs:
    """The runs by which tokens are counted: a *run* is a sequence of consecutive tokens of the whole on one device.

    Each index of the dims before the last split dim has its own runs, one for each part of that dim.  The dims after it
    lie inside a run.
    """

    tokens: tuple[Axes, ...]
    shape: Shape
    """The shape of the tokens: that of x without the model dim."""
    mesh: Mesh

    @property
    def _last(self) -> int:
        return max((dim for dim, axes in enumerate(self.tokens) if axes), default=0)

    def layout(self) -> TensorSharding:
        """The layout of the counts, [one or more dims of runs, choices, experts]."""
        return TensorSharding(*self.tokens[: self._last + 1], None, None)

    def counts_shape(self, k: int, experts: int) -> Shape:
        """The shape of the counts of all runs."""
        parts = prod(self.mesh.shape[axis] for axis in self.tokens[self._last])
        return *self.shape[: self._last], parts, k, experts

    def here(self, rank: int) -> int:
        """The number of runs on a device."""
        local = TensorSharding(*self.tokens).local_shape(self.shape, self.mesh, rank)
        return prod(local[: self._last])


def expert_plan(
    sharding: MixtureOfExpertsSharding, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any], k: int
) -> LayerPlan:
    """The plan for inputs of these shapes, which must fit, without the moves of tokens to experts and back."""
    x, router, w1 = shapes["x"], shapes["router"], shapes["w1"]
    experts, lead = sharding.experts, sharding.tokens(len(x))
    tokens, over = TensorSharding(*lead, None), tuple(axis for axes in lead for axis in axes)
    others = tuple(axis for axis in over if axis not in experts)
    runs = Runs(lead, x[:-1], mesh)
    counts, all_counts = runs.layout(), runs.counts_shape(k, router[1])
    whole = TensorSharding.replicated

    def move(source: TensorSharding, target: TensorSharding, shape: Shape, kind: Any = dtype) -> Any:
        return plan_resharding(source, target, shape, kind, mesh)

    def own(name: str, pending: Axes = ()) -> TensorSharding:
        return TensorSharding(experts, *[None] * (len(shapes[name]) - 1), partial=pending)

    weights = ("w1", "b1", "w2", "b2")
    forward = [
        ("x", move(sharding.x, tokens, x)), ("router", move(sharding.router, whole(2), router)),
        ("counts", move(counts, whole(len(all_counts)), all_counts, np.int64)),
        ("probabilities", move(TensorSharding(None, partial=over), whole(1), router[1:])),
        *((name, move(getattr(sharding, name), own(name), shapes[name])) for name in weights),
        ("out", move(tokens, sharding.out, x)),
    ]
    backward = [
        ("grad", move(sharding.out, tokens, x)),
        *((f"{name}_grad", move(own(name, others), getattr(sharding, name), shapes[name])) for name in weights),
        ("router_grad", move(TensorSharding(None, None, partial=over), sharding.router, router)),
        ("x_grad", move(tokens, sharding.x, x)),
    ]
    title = f"a mixture of {w1[0]} experts, {k} for each token, x {x}; besides tokens to experts and back"
    return LayerPlan(title, mesh, tuple(forward), tuple(backward))
