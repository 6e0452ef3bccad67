"""Normalisation over the last dim, forward and backward, in the pieces that a sharded last dim needs.

Ba et al., *Layer Normalization*, 2016, arXiv:1607.06450, equation 4; Zhang and Sennrich, *Root Mean Square Layer
Normalization*, 2019, arXiv:1910.07467, equation 4.  With n features, the sums over them all of them,

    centred = x - sum(x) / n                      (of RMSNorm: x itself)
    hat     = centred / sqrt(sum(centred^2) / n + epsilon)
    y       = hat * weight + bias                 (of RMSNorm: no bias)

and, with g = grad * weight, the gradient of x is  (g - sum(g) / n - hat * sum(g * hat) / n) * scale,  the middle term
of LayerNorm only, scale being what ``centred`` was multiplied by.  Whoever holds some of the features adds the sums up
with those who hold the others; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CACHED_BYTES = 1 << 17
"""Of a few rows of each array, that are worked on together."""


def feature_sums(x: Array) -> Array:
    """``x`` summed over its last dim, which stays with extent 1; dtype kept, zero where there are no features."""
    sums: Array = x.sum(axis=-1, keepdims=True, dtype=x.dtype)
    return sums


def feature_products(x: Array, y: Array) -> Array:
    """``x * y`` summed over its last dim, which stays with extent 1."""
    sums: Array = np.einsum("...i,...i->...", x, y)[..., None]
    return sums


def normalization_scale(square_sums: Array, features: int, epsilon: float) -> Array:
    """What centred values are multiplied by, ``1 / sqrt(square_sums / features + epsilon)``."""
    scale: Array = 1 / np.sqrt(square_sums / features + epsilon)
    return scale.astype(square_sums.dtype, copy=False)


def normalization_backward_sums(grad: Array, products: Array, weight: Array) -> Array:
    """The sums over features that the gradient of x needs, of ``g`` and of ``g * hat``: shape (2, ..., 1).

    ``products`` are ``grad * hat``, whose sum over all rows is the gradient of the weight.
    """
    return np.stack([grad @ weight, products @ weight])[..., None]


def normalization_backward(
    grad: Array, hat: Array, weight: Array, scale: Array, sums: Array, features: int, *, centred: bool,
    out: Array | None = None, scratch: Array | None = None,
) -> Array:
    """The gradient of x, from that of y and `normalization_backward_sums` over all features.

    Without ``centred`` the last of the sums will do.  ``scratch``, of the shape of x, is overwritten.
    """
    found: Array = np.multiply(grad, weight, out=out)
    found -= np.multiply(hat, sums[-1] / features, out=scratch)
    if centred:
        found -= sums[0] / features
    found *= scale
    return found


def normalize(
    x: Array, weight: Array, bias: Array | None, epsilon: float, *, centred: bool
) -> tuple[Array, Array, Array]:
    """All of the forward, where the features are whole: y, hat and the scale; with ``centred`` that of LayerNorm.

    Some rows after the others, so that what is made of them stays in cache until it is used.
    """
    y, hat, scale = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype), np.empty((*x.shape[:-1], 1), x.dtype)
    features = x.shape[-1]
    for x_here, y_here, hat_here, scale_here in _by_rows(x, y, hat, scale):
        centre = np.subtract(x_here, feature_sums(x_here) / features, out=hat_here) if centred else x_here
        scale_here[...] = normalization_scale(feature_products(centre, centre), features, epsilon)
        np.multiply(centre, scale_here, out=hat_here)
        np.multiply(hat_here, weight, out=y_here)
        if bias is not None:
            y_here += bias
    return y, hat, scale


def normalize_backward(
    grad: Array, hat: Array, weight: Array, scale: Array, *, centred: bool
) -> tuple[Array, Array, Array]:
    """All of the backward, where the features are whole: the gradients of x, of the weight and of a bias."""
    x_grad = np.empty(hat.shape, hat.dtype)
    weight_grad, bias_grad = np.zeros((2, hat.shape[-1]), hat.dtype)
    for x_here, grad_here, hat_here, scale_here in _by_rows(x_grad, grad, hat, scale):
        products = grad_here * hat_here
        sums = normalization_backward_sums(grad_here, products, weight)
        weight_grad += products.sum(axis=0)
        bias_grad += grad_here.sum(axis=0)
        normalization_backward(
            grad_here, hat_here, weight, scale_here, sums, hat.shape[-1], centred=centred, out=x_here, scratch=products)
    return x_grad, weight_grad, bias_grad


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float = 1e-5) -> Array:
    """Each row of the last dim with mean 0 and variance 1, times ``weight``, plus ``bias``; of the shape of x."""
    return normalize(x, weight, bias, epsilon, centred=True)[0]


def rms_norm(x: Array, weight: Array, epsilon: float = 1e-5) -> Array:
    """Each row of the last dim with mean square 1, times ``weight``; of the shape of x."""
    return normalize(x, weight, None, epsilon, centred=False)[0]


def _by_rows(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Views of some rows of each; those that are written are contiguous."""
    rows = prod(arrays[0].shape[:-1])
    flat = [array.reshape(rows, array.shape[-1]) for array in arrays]
    step = max(1, CACHED_BYTES // max(1, flat[0][:1].nbytes))
    for start in range(0, rows, step):
        yield tuple(array[start : start + step] for array in flat)
