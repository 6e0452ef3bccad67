"""``accumulate(buffer, x)``: the sum of both, in the memory of the buffer.  No later op may read the buffer.

The dtype is that of the buffer, so float32 can take up terms of 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.ir.core import Operator, TensorType
from parallelism.ir.core.table import register
from parallelism.ir.operators.activations import one_shape


def _dtype(buffer: TensorType, x: TensorType) -> np.dtype[Any]:
    if not np.can_cast(x.dtype, buffer.dtype, "same_kind"):
        raise TypeError(f"a buffer of {buffer.dtype} cannot take up terms of {x.dtype}")
    return buffer.dtype


def _accumulate(buffer: Any, x: Any, out: Any = None) -> Any:
    return np.add(buffer, x, out=out, dtype=buffer.dtype, casting="same_kind")


register(
    Operator(
        "accumulate",
        lambda buffer, x: one_shape(buffer, x),
        _dtype,
        _accumulate,
        lambda g, y, buffer, x: (g, g),
        1,
        linear="together",
        reuses=True,
    )
)
