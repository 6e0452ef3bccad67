"""`LayerNorm` and `RMSNorm` over the last dim of a tensor in any layout; the last dim may be split, too."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import (
    feature_products,
    feature_sums,
    normalization_backward,
    normalization_backward_sums,
    normalization_scale,
    sum_of_rows,
)
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Layer, LayerPlan, Moving, Shape, Sharding, check_shard, moved

WHOLE = TensorSharding(None)


@dataclass(frozen=True)
class NormalizationSharding(Sharding, ndims=(1, 1), waits=()):
    """The layouts of ``x`` [..., model] and of ``weight`` and bias [model].  The output has the layout of x.

    >>> from parallelism import TensorSharding
    >>> from tensor_parallelism import NormalizationSharding
    >>> NormalizationSharding(TensorSharding("dp", "tp"), TensorSharding("tp")).weight
    TensorSharding('tp')

    ``TypeError`` if one is not a layout; ``ValueError`` for a layout with too few dims or a partial one.
    """

    x: TensorSharding
    weight: TensorSharding = WHOLE

    @property
    def bias(self) -> TensorSharding:
        return self.weight

    @property
    def out(self) -> TensorSharding:
        return self.x


Saved = tuple[Array, Array, Array, LayerPlan]
"""What the backward needs: this device's x, centred and scaled, the weight in the layout of the last dim of x, the
scale, and the plan."""


class _Normalization(Layer[NormalizationSharding]):
    KIND = NormalizationSharding
    CENTRED: ClassVar[bool]

    def __init__(self, sharding: NormalizationSharding | TensorSharding, *, epsilon: float = 1e-5) -> None:
        if isinstance(sharding, TensorSharding):
            sharding = NormalizationSharding(sharding)
        if not epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {epsilon!r}")
        super().__init__(sharding)
        self.epsilon = epsilon

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sharding!r}, epsilon={self.epsilon})"

    def forward(
        self, device: Device, *shards: Any, shapes: Iterable[Shape] | None = None
    ) -> tuple[Array, Saved]:
        """This device's shard of y, from its shards of the inputs.

        ``shapes`` are the shapes of the whole inputs; if they are not given, the devices exchange them.
        """
        (x, *arrays), plan = self._arrived(device, *shards, shapes=shapes)
        x = x.astype(plan.dtype, copy=False)
        features = plan.shapes[0][-1]
        weight, *bias = (
            moved(device, plan[name], one) for name, one in zip(self.NAMES[1:], arrays, strict=True)
        )
        mean = (
            moved(device, plan["mean"], feature_sums(x)) / plan.dtype.type(features) if self.CENTRED else None
        )
        with device.compute("normalization", flops=7 * x.size, nbytes=2 * x.nbytes, dtype=x.dtype):
            centred = x if mean is None else x - mean
            squares = feature_products(centred, centred)
        scale = normalization_scale(moved(device, plan["squares"], squares), features, self.epsilon)
        hat = np.multiply(centred, scale, out=None if mean is None else centred)
        y: Array = hat * weight
        for one in bias:
            y += one
        device.hold("activations", hat.nbytes)
        device.hold("statistics", scale.nbytes)
        return y, (hat, weight, scale, plan)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, ...]:
        """The gradients of the inputs in their layouts, from the gradient of y in its layout."""
        hat, weight, scale, plan = saved
        dtype, x_shape = plan.dtype, plan.shapes[0]
        grad = check_shard(device, grad, self.sharding.out, x_shape).astype(dtype, copy=False)
        with device.compute(
            "normalization backward", flops=12 * hat.size, nbytes=3 * hat.nbytes, dtype=dtype
        ):
            products = grad * hat
            sums = normalization_backward_sums(grad, products, weight)
        sums = moved(device, plan["grad_sums"], sums if self.CENTRED else sums[1:])
        terms = [sum_of_rows(term) for term in (products, grad)[: 1 + self.CENTRED]]
        x_grad = normalization_backward(
            grad, hat, weight, scale, sums, x_shape[-1], centred=self.CENTRED, scratch=products
        )
        grads = [
            moved(device, plan[f"{name}_grad"], term)
            for name, term in zip(self.NAMES[1:], terms, strict=True)
        ]
        device.hold("activations", -hat.nbytes)
        device.hold("statistics", -scale.nbytes)
        return x_grad, *grads

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        x, *parameters = shapes.values()
        if not x or not x[-1]:
            raise ValueError(
                f"x is normalised over its last dim, which has an element at least; got shape {x}"
            )
        for name, shape in zip(self.NAMES[1:], parameters, strict=True):
            if shape != x[-1:]:
                raise ValueError(f"{name} must have the shape of the last dim of x, {x[-1:]}, got {shape}")
        return {**shapes, "out": x}

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        x = shapes["x"]
        model = shapes["weight"]
        weight = self.sharding.weight.over(1)
        *lead, last = self.sharding.x.over(len(x)).dims
        statistics = (*x[:-1], 1)
        both = (1 + self.CENTRED, *x[:-1], 1)
        sums, whole = (TensorSharding(*lead, None, partial=axes) for axes in (last.axes, ()))
        backward_sums, backward_whole = (
            TensorSharding(None, *lead, None, partial=axes) for axes in (last.axes, ())
        )
        forward = {name: (weight, TensorSharding(last), model) for name in self.NAMES[1:]}
        forward |= dict.fromkeys(("mean", "squares")[1 - self.CENTRED :], (sums, whole, statistics))
        backward = {"grad_sums": (backward_sums, backward_whole, both)}
        terms = TensorSharding(last, partial=TensorSharding(*lead).axes)
        backward |= {f"{name}_grad": (terms, weight, model) for name in self.NAMES[1:]}
        return f"{type(self).__name__} of x {x}", forward, backward


class LayerNorm(_Normalization):
    """``LayerNorm(sharding)`` of x, weight and bias: rows with mean 0 and variance 1, times the weight, plus the bias.

    >>> import numpy as np
    >>> from parallelism import TensorSharding
    >>> from tensor_parallelism import LayerNorm
    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     y = cluster.run(LayerNorm(TensorSharding(None, "tp")), [[1.0, 3.0]], np.ones(2), np.zeros(2)).result
    >>> y.round(3).tolist()
    [[-1.0, 1.0]]

    ``sharding`` is a `NormalizationSharding`, or the layout of x; then the parameters are replicated.

    **Communication** over axes M that split the model dim: forward two all_reduces of one number for each of the n
    tokens, 2 x 2 (M-1) n itemsize bytes summed over the devices; backward one all_reduce of two numbers, as many bytes.
    If the model dim is whole, these are not needed.  Backward also an all_reduce of each parameter's gradient over the
    axes that split the tokens.  If the layout of the parameters is not that of the model dim of x, they are resharded.
    ``print(operation.plan([x.shape, weight.shape, bias.shape], mesh))``.

    **Memory** until the backward: ``activations`` hold x, centred and scaled, in place of the x that Korthikanti et
    al., 2022, arXiv:2205.05198, section 4.1, count.  ``statistics`` hold one number for each token, which they neglect.

    The host raises ``ValueError`` for arrays whose shapes do not fit each other, their layouts or the mesh.
    """

    NAMES = ("x", "weight", "bias")
    CENTRED = True


class RMSNorm(_Normalization):
    """``RMSNorm(sharding)`` of x and weight: rows with mean square 1, times the weight.

    >>> import numpy as np
    >>> from parallelism import TensorSharding
    >>> from tensor_parallelism import RMSNorm
    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     cluster.run(RMSNorm(TensorSharding(None, "tp")), np.full((1, 4), 3.0), np.ones(4)).result.round(5).tolist()
    [[1.0, 1.0, 1.0, 1.0]]

    It is a `LayerNorm` without mean and bias, with half the all_reduces forward and half the bytes backward.
    """

    NAMES = ("x", "weight")
    CENTRED = False
