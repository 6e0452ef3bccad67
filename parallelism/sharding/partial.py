"""What a partial tensor waits for: the operations that can be pending, what they start from, how terms combine.

A partial tensor is a list of terms, one on each member of a group; its value is ``(t0 op t1) op t2 ...`` in group
order.  The dtype is kept: bools are summed by *or* and multiplied by *and*, as NumPy's ``+`` and ``*`` of bools do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = tuple(_UFUNCS)


def check_op(op: str) -> str:
    """``op``, if a reduction by it can be pending."""
    if op not in _UFUNCS:
        raise ValueError(f"a partial tensor waits for one of {', '.join(OPS)}, got op={op!r}")
    return op


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """What changes nothing when it is combined with: the term of those who hold none of the value.

    ``ValueError`` for dtypes that are no numbers, and for max and min of complex numbers, which have no order.

    >>> identity("sum", np.dtype(int)), identity("max", np.dtype(np.uint8)), identity("min", np.dtype(float))
    (0, 0, inf)
    """
    kind = dtype.kind
    if kind not in "biufc" or (kind == "c" and op in ("max", "min")):
        raise ValueError(f"no {op} of {dtype} can be pending")
    if op in ("sum", "prod"):
        return int(op == "prod")
    lowest = op == "max"
    if kind == "b":
        return not lowest
    if kind == "f":
        return -np.inf if lowest else np.inf
    limits = np.iinfo(dtype)
    return int(limits.min if lowest else limits.max)


def combine(op: str, terms: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The value of the terms, in their order; a new array of their dtype."""
    total = np.array(terms[0])
    for term in terms[1:]:
        _UFUNCS[op](total, term, out=total)
    return total


def device_op(op: str, dtype: np.dtype[Any]) -> str:
    """The reduction of a collective that keeps the dtype: a device counts bools into integers."""
    if dtype.kind == "b":
        return {"sum": "or", "prod": "and"}.get(op, op)
    return op
