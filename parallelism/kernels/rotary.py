"""Rotary position embedding: pairs of features are rotated by an angle that is proportional to the position.

Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021, arXiv:2104.09864, section 3.2.2 and
equation 34: features 2i and 2i + 1 are rotated by ``position * base ** (-2i / head_dim)`` radians.
"""

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.kernels.rotary_scaling import RotaryScaling


def rotate(
    x: Array, positions: npt.ArrayLike, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> Array:
    """Rotate ``x``, of shape ``(..., sequence, heads, head_dim)``; ``scaling`` stretches the frequencies.

    ``positions``, of shape ``(sequence,)``, are positions in the whole sequence.  ``ValueError`` for an odd head_dim,
    and for ``positions`` of another shape.
    """
    return _rotated(x, positions, base, 1, scaling)


def rotate_backward(
    grad: Array, positions: npt.ArrayLike, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> Array:
    """The gradient of x, given the gradient of ``rotate(x, positions, base)``: the inverse rotation."""
    return _rotated(grad, positions, base, -1, scaling)


def _rotated(
    x: Array, positions: npt.ArrayLike, base: float, sign: int, scaling: RotaryScaling | None
) -> Array:
    places = np.asarray(positions)
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(
            f"x must have shape (..., sequence, heads, head_dim) with an even head_dim, got shape {x.shape}"
        )
    if places.shape != x.shape[-3:-2]:
        raise ValueError(
            f"positions must have the shape of the sequence, {x.shape[-3:-2]}, got {places.shape}"
        )
    features = x.shape[-1]
    plain = base ** (-np.arange(0, features, 2) / features)
    frequencies = plain if scaling is None else scaling.frequencies(base, features)
    angles = places[:, None, None] * (sign * frequencies)
    real = np.ascontiguousarray(x, np.result_type(x.dtype, np.float32))
    kind = np.result_type(real.dtype, np.complex64)
    result: Array = real.view(kind) * np.exp(1j * angles).astype(
        kind
    )  # a pair of features is a complex number
    return result.view(real.dtype).astype(x.dtype, copy=False)
