"""The products that are timed, as plain values: read by the peers' interpreters too, which have nothing of vcluster.

C[m, n] = A[m, k] B[k, n] in float32, on a mesh x by y; of each tensor the axis that each of its two dims lies over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Dims = tuple[str | None, str | None]
WHOLE: Dims = (None, None)
FULL_EXTENTS = (4096, 2048, 4096)
"""m, k and n."""
QUICK_EXTENTS = (512, 256, 512)


@dataclass(frozen=True)
class Product:
    """One of them: how A, B and C lie, on a mesh of so many devices along x and y."""

    mesh: tuple[int, int]
    a: Dims
    b: Dims
    c: Dims

    @property
    def devices(self) -> int:
        return self.mesh[0] * self.mesh[1]


PRODUCTS = {
    "unsharded": Product((1, 1), WHOLE, WHOLE, WHOLE),
    "1x4 matched": Product((1, 4), (None, "y"), ("y", None), WHOLE),
    "2x1 matched": Product((2, 1), (None, "x"), ("x", None), WHOLE),
    "2x4 matched": Product((2, 4), (None, "y"), ("y", None), WHOLE),
    "2x4 unmatched": Product((2, 4), (None, "x"), ("y", None), WHOLE),
    "2x4 outer": Product((2, 4), ("x", "y"), ("x", None), ("x", None)),
    "2x4 full": Product((2, 4), ("x", "y"), ("x", "y"), ("x", "y")),
}


def operands(extents: tuple[int, int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A and B, of small integers: the sums are exact."""
    m, k, n = extents
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    return a, b
