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

import numpy as np

from parallelism.arrays import Array


def feature_sums(x: Array) -> Array:
    """``x`` summed over its last dim, which stays with extent 1; dtype kept, zero where there are no features."""
    sums: Array = (x @ np.ones(x.shape[-1], x.dtype))[..., None]
    return sums


def feature_products(x: Array, y: Array) -> Array:
    """``x * y`` summed over its last dim, which stays with extent 1."""
    sums: Array = np.vecdot(x, y)[..., None]
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
    scratch: Array | None = None,
) -> Array:
    """The gradient of x, from that of y and `normalization_backward_sums` over all features.

    Without ``centred`` the last of the sums will do.  ``scratch``, of the shape of x, is overwritten.
    """
    found: Array = grad * weight
    found -= np.multiply(hat, sums[-1] / features, out=scratch)
    if centred:
        found -= sums[0] / features
    found *= scale
    return found


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float = 1e-5) -> Array:
    """Each row of the last dim with mean 0 and variance 1, times ``weight``, plus ``bias``; of the shape of x."""
    centred = x - feature_sums(x) / x.shape[-1]
    scale = normalization_scale(feature_products(centred, centred), x.shape[-1], epsilon)
    y: Array = centred * scale * weight + bias
    return y


def rms_norm(x: Array, weight: Array, epsilon: float = 1e-5) -> Array:
    """Each row of the last dim with mean square 1, times ``weight``; of the shape of x."""
    y: Array = x * normalization_scale(feature_products(x, x), x.shape[-1], epsilon) * weight
    return y
