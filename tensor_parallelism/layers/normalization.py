"""`LayerNorm` and `RMSNorm` over the last dim of a tensor in any layout; the last dim may be split, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Layer, LayerPlan, Shape, check_gradient, check_layouts
from tensor_parallelism.products.product import moved

WHOLE = TensorSharding(None)


@dataclass(frozen=True)
class NormalizationSharding:
    """The layouts of ``x`` [..., model] and of ``weight`` and bias [model].  The output has the layout of x.

    ``TypeError`` if one is not a layout; ``ValueError`` for a layout with too few dims or a partial one.
    """

    x: TensorSharding
    weight: TensorSharding = WHOLE

    def __post_init__(self) -> None:
        check_layouts(self, {"x": 1, "weight": 1}, waits=())

    @property
    def bias(self) -> TensorSharding:
        return self.weight

    @property
    def out(self) -> TensorSharding:
        return self.x


class Saved(NamedTuple):
    """The values that the backward needs."""

    hat: Array
    """This device's x, centred and scaled."""
    weight: Array
    """The weight in the layout of the last dim of x."""
    scale: Array
    shapes: list[Shape]
    dtype: np.dtype[Any]


class _Normalization(Layer):
    CENTRED: ClassVar[bool]
    sharding: NormalizationSharding

    def __init__(self, sharding: NormalizationSharding | TensorSharding, *, epsilon: float = 1e-5) -> None:
        if isinstance(sharding, TensorSharding):
            sharding = NormalizationSharding(sharding)
        if not epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {epsilon!r}")
        super().__init__(sharding, NormalizationSharding)
        self.epsilon = epsilon

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sharding!r}, epsilon={self.epsilon})"

    def forward(
        self, device: Device, *shards: Any, shapes: list[Shape] | None = None
    ) -> tuple[Array, Saved]:
        """This device's shard of y, from its shards of the inputs.

        ``shapes`` are the shapes of the whole inputs; if they are not given, the devices exchange them.
        """
        arrays, shapes, plan = self._arrived(device, *shards, shapes=shapes)
        dtype, features = plan["squares"].dtype, shapes[0][-1]
        x = arrays[0].astype(dtype, copy=False)
        weight = moved(device, plan["weight"], arrays[1])
        bias = moved(device, plan["bias"], arrays[2]) if self.CENTRED else None
        mean = moved(device, plan["mean"], feature_sums(x)) / dtype.type(features) if self.CENTRED else None
        with device.compute("normalization", flops=7 * x.size, nbytes=2 * x.nbytes, dtype=x.dtype):
            centred = x if mean is None else x - mean
            squares = feature_products(centred, centred)
        scale = normalization_scale(moved(device, plan["squares"], squares), features, self.epsilon)
        hat = np.multiply(centred, scale, out=None if mean is None else centred)
        y: Array = hat * weight
        if bias is not None:
            y += bias
        saved = Saved(hat, weight, scale, shapes, dtype)
        self._hold(device, saved, 1)
        return y, saved

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, ...]:
        """The gradients of the inputs in their layouts, from the gradient of y in its layout."""
        hat, weight, scale, shapes, dtype = saved
        plan = self.plan(shapes, device.mesh, dtype)
        grad = check_gradient(device, grad, self.sharding.out, shapes[0]).astype(dtype, copy=False)
        with device.compute("normalization backward", flops=12 * hat.size, nbytes=3 * hat.nbytes, dtype=dtype):
            products = grad * hat
            sums = normalization_backward_sums(grad, products, weight)
        sums = moved(device, plan["grad_sums"], sums if self.CENTRED else sums[1:])
        terms = [sum_of_rows(term) for term in (products, grad)[: 1 + self.CENTRED]]
        x_grad = normalization_backward(
            grad, hat, weight, scale, sums, shapes[0][-1], centred=self.CENTRED, scratch=products)
        grads = [moved(device, plan[f"{name}_grad"], term) for name, term in zip(self.NAMES[1:], terms, strict=True)]
        self._hold(device, saved, -1)
        return x_grad, *grads

    def _hold(self, device: Device, saved: Saved, sign: int) -> None:
        device.hold("activations", sign * saved.hat.nbytes)
        device.hold("statistics", sign * saved.scale.nbytes)

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        x, *parameters = shapes.values()
        if not x or not x[-1]:
            raise ValueError(f"x is normalised over its last dim, which has an element at least; got shape {x}")
        for name, shape in zip(self.NAMES[1:], parameters, strict=True):
            if shape != x[-1:]:
                raise ValueError(f"{name} is of the shape of the last dim of x, {x[-1:]}, got {shape}")
        return {**shapes, "out": x}

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        x, model = shapes["x"], shapes["weight"]
        *lead, last = self.sharding.x.over(len(x)).dims
        over = tuple(axis for dim in lead for axis in dim.axes)
        weight, here = self.sharding.weight.over(1), TensorSharding(last)
        statistics = *x[:-1], 1
        sums, whole = (TensorSharding(*lead, None, partial=axes) for axes in (last.axes, ()))
        backward_sums = TensorSharding(None, *lead, None, partial=last.axes)
        forward = [(name, plan_resharding(weight, here, model, dtype, mesh)) for name in self.NAMES[1:]]
        forward += [(name, plan_resharding(sums, whole, statistics, dtype, mesh))
                    for name in ("mean", "squares")[1 - self.CENTRED :]]
        terms = TensorSharding(last, partial=over)
        return LayerPlan(
            f"{type(self).__name__} of x {x}", mesh, tuple(forward),
            (("grad_sums", plan_resharding(backward_sums, TensorSharding(None, *lead, None),
                                           (1 + self.CENTRED, *statistics), dtype, mesh)),
             *((f"{name}_grad", plan_resharding(terms, weight, model, dtype, mesh)) for name in self.NAMES[1:])),
        )


class LayerNorm(_Normalization):
    """``LayerNorm(sharding)`` of x, weight and bias: rows with mean 0 and variance 1, times the weight, plus the bias.

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

    It is a `LayerNorm` without mean and bias, with half the all_reduces forward and half the bytes backward.
    """

    NAMES = ("x", "weight")
    CENTRED = False
