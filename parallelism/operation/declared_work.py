"""What a block of compute declares, and what devices count for a matrix product: numbers that have a price."""

from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.dtypes import common_dtype


def declared_work(
    name: str, flops: float, nbytes: float, seconds: float | None
) -> tuple[float, float, float | None]:
    """The flops, bytes and seconds of ``device.compute(name, ...)``; ``ValueError`` if one is below 0 or not finite."""
    flops = float(flops)
    nbytes = float(nbytes)
    seconds = None if seconds is None else float(seconds)
    if 0 <= flops < inf and 0 <= nbytes < inf and (seconds is None or 0 <= seconds < inf):
        return flops, nbytes, seconds
    what, number = next(
        (what, number)
        for what, number in (("flops", flops), ("nbytes", nbytes), ("seconds", seconds))
        if number is not None and not 0 <= number < inf
    )
    raise ValueError(f"compute({name!r}) takes {what} that are finite and at least 0, got {number}")


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
