"""Normalization over the last dim, forward and backward, in pieces that also work on a sharded last dim.

Ba et al., *Layer Normalization*, 2016, arXiv:1607.06450, equation 4; Zhang and Sennrich, *Root Mean Square Layer
Normalization*, 2019, arXiv:1910.07467, equation 4.  With n features and sums over all features,

    centred = x - sum(x) / n                      (RMSNorm: x itself)
    hat     = centred / sqrt(sum(centred^2) / n + epsilon)
    y       = hat * weight + bias                 (RMSNorm: no bias)

With g = grad * weight and scale = 1 / sqrt(...), the gradient of x is

    (g - sum(g) / n - hat * sum(g * hat) / n) * scale         (RMSNorm: without the middle term)

If the features are sharded, the sums must be reduced over the shards; nothing else changes.
"""

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels.activations import swiglu, swiglu_backward
from parallelism.kernels.dense import sum_of_rows


def feature_sums(x: Array) -> Array:
    """``x`` summed over its last dim, which is kept with extent 1.  The dtype is kept; no features give zero."""
    sums: Array = (x @ np.ones(x.shape[-1], x.dtype))[..., None]
    return sums


def feature_products(x: Array, y: Array) -> Array:
    """``x * y`` summed over the last dim, which is kept with extent 1."""
    sums: Array = np.vecdot(x, y)[..., None]
    return sums


def normalization_scale(square_sums: Array, features: int, epsilon: float) -> Array:
    """The factor of the centred values: ``1 / sqrt(square_sums / features + epsilon)``."""
    scale: Array = 1 / np.sqrt(square_sums / features + epsilon)
    return scale.astype(square_sums.dtype, copy=False)


def normalization_backward_sums(grad: Array, products: Array, weight: Array) -> Array:
    """The sums of ``g`` and of ``g * hat`` over the features, which the gradient of x needs: shape ``(2, ..., 1)``.

    ``products`` is ``grad * hat``; its sum over all rows is the gradient of the weight.
    """
    return np.stack([grad @ weight, products @ weight])[..., None]


def normalization_backward(
    grad: Array,
    hat: Array,
    weight: Array,
    scale: Array,
    sums: Array,
    features: int,
    *,
    centred: bool,
    scratch: Array | None = None,
) -> Array:
    """The gradient of x, given ``grad``, that of y, and the `normalization_backward_sums` over all features.

    Without ``centred`` (RMSNorm) only the last of the sums is read.  ``scratch``, of the shape of x, is overwritten.
    """
    result: Array = grad * weight
    result -= np.multiply(hat, sums[-1] / features, out=scratch)
    if centred:
        result -= sums[0] / features
    result *= scale
    return result


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float = 1e-5) -> Array:
    """``x`` normalized to mean 0 and variance 1 along the last dim, times ``weight``, plus ``bias``."""
    centred = x - feature_sums(x) / x.shape[-1]
    scale = normalization_scale(feature_products(centred, centred), x.shape[-1], epsilon)
    y: Array = centred * scale * weight + bias
    return y


def rms_norm(x: Array, weight: Array, epsilon: float = 1e-5) -> Array:
    """``x`` normalized to mean square 1 along the last dim, times ``weight``."""
    y: Array = x * normalization_scale(feature_products(x, x), x.shape[-1], epsilon) * weight
    return y


def layer_norm_backward(
    grad: Array, x: Array, weight: Array, epsilon: float = 1e-5
) -> tuple[Array, Array, Array]:
    """The gradients of x, weight and bias, given that of `layer_norm`.  Those of weight and bias are sums over rows."""
    centred = x - feature_sums(x) / x.shape[-1]
    x_grad, weight_grad = _backward(grad, centred, weight, epsilon, centred=True)
    return x_grad, weight_grad, sum_of_rows(grad)


def rms_norm_backward(grad: Array, x: Array, weight: Array, epsilon: float = 1e-5) -> tuple[Array, Array]:
    """The gradients of x and weight, given that of `rms_norm`.  That of the weight is a sum over rows."""
    return _backward(grad, x, weight, epsilon, centred=False)


def _backward(
    grad: Array, values: Array, weight: Array, epsilon: float, *, centred: bool
) -> tuple[Array, Array]:
    features = values.shape[-1]
    scale = normalization_scale(feature_products(values, values), features, epsilon)
    hat = values * scale
    products = grad * hat
    sums = normalization_backward_sums(grad, products, weight)
    return (
        normalization_backward(grad, hat, weight, scale, sums, features, centred=centred),
        sum_of_rows(products),
    )


def gated_rms_norm(x: Array, gate: Array, weight: Array, epsilon: float = 1e-5, *, gate_first: bool) -> Array:
    """``rms_norm(x) * silu(gate)``, or the norm of ``x * silu(gate)`` if the gate comes first.

    The weight has the last dim of x, or its last dims.  The first is the norm of Gated DeltaNet (arXiv:2412.06464, section
    3.4), the second that of Mamba-2 (arXiv:2405.21060, section 7.1).
    """
    if gate_first:
        return rms_norm(swiglu(gate, x), weight, epsilon)
    return swiglu(gate, rms_norm(x, weight, epsilon))


def gated_rms_norm_backward(
    grad: Array, x: Array, gate: Array, weight: Array, epsilon: float = 1e-5, *, gate_first: bool
) -> tuple[Array, Array, Array]:
    """The gradients of x, gate and weight, given that of `gated_rms_norm`."""
    values = swiglu(gate, x) if gate_first else x
    hat = values * normalization_scale(feature_products(values, values), x.shape[-1], epsilon)
    gate_grad, of_normed = (grad, grad) if gate_first else swiglu_backward(gate, hat * weight, grad)
    one = np.ones(x.shape[-1], x.dtype)
    x_grad, _ = rms_norm_backward(of_normed * weight, values, one, epsilon)
    if gate_first:
        gate_grad, x_grad = swiglu_backward(gate, x, x_grad)
    rows = tuple(range(x.ndim - weight.ndim))
    return x_grad, gate_grad, (of_normed * hat).sum(axis=rows)
