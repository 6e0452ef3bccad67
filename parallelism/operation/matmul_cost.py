"""The flops and the memory traffic of a matrix product, as devices count them."""

from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.dtypes import common_dtype


class MatmulCost(NamedTuple):
    """The flops and bytes of one product, or of a batch of them."""

    flops: float
    """2 m n k for each product."""
    nbytes: float
    """Bytes of both factors and of the product, each read or written once."""
    dtype: np.dtype[Any]
    shape: tuple[int, int, int, int]
    """The number of products, m, n and k."""


def matmul_cost(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> MatmulCost:
    """The cost of ``a @ b``; ``ValueError`` if their batches do not broadcast."""
    count = 1
    if a.ndim > 2 or b.ndim > 2:
        count = prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    k = a.shape[-1] if a.ndim else 0
    m = a.shape[-2] if a.ndim > 1 else 1
    n = b.shape[-1] if b.ndim > 1 else 1
    dtype = common_dtype(np.asarray(a).dtype, np.asarray(b).dtype)
    elements = count * (m * k + k * n + m * n)
    nbytes = float(dtype.itemsize * elements)
    return MatmulCost(2.0 * count * m * n * k, nbytes, dtype, (count, m, n, k))
