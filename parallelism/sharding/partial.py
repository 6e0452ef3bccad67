"""Pending reductions of partial tensors: the operations, their identities, and the combination of terms.

A partial tensor is a list of terms, one on each member of a group.  Its value is ``(t0 op t1) op t2 ...`` in group
order.  The dtype is kept: bools are summed by *or* and multiplied by *and*, as by NumPy's ``+`` and ``*``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import integer_limits, is_floating, is_narrow, is_numeric, limits_of

_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = tuple(_UFUNCS)


def check_op(op: str) -> str:
    """``op``; ``ValueError`` unless it is a reduction that can be pending."""
    if op not in _UFUNCS:
        raise ValueError(f"the pending reduction must be one of {', '.join(OPS)}, got op={op!r}")
    return op


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """The identity of a reduction: the term that does not change the value.

    ``ValueError`` for dtypes that are not numbers, and for max and min of complex numbers, which have no order.

    >>> identity("sum", np.dtype(int)), identity("max", np.dtype(np.uint8)), identity("min", np.dtype(float))
    (0, 0, inf)
    """
    kind = "f" if is_floating(dtype) else dtype.kind
    if not is_numeric(dtype) or (kind == "c" and op in ("max", "min")):
        raise ValueError(f"a {op} of {dtype} cannot be pending")
    if op in ("sum", "prod"):
        return int(op == "prod")
    limits: dict[str, tuple[Any, Any]] = {"b": (False, True), "f": (-np.inf, np.inf)}
    if is_narrow(dtype) and not np.isinf(np.array(np.inf, dtype)):  # some have no infinity
        limits["f"] = float(limits_of(dtype).min), float(limits_of(dtype).max)
    lowest, highest = limits[kind] if kind in limits else integer_limits(dtype)
    return lowest if op == "max" else highest


def combine(op: str, terms: Sequence[Array]) -> Array:
    """The reduction of the terms in their order, as a new array of their shape and dtype."""
    total = np.array(terms[0])
    for term in terms[1:]:
        _UFUNCS[op](total, term, out=total)
    return total


def device_op(op: str, dtype: np.dtype[Any]) -> str:
    """The ``op=`` of a collective that keeps the dtype.  A collective's sum of bools would be an integer."""
    return {"sum": "or", "prod": "and"}.get(op, op) if dtype.kind == "b" else op
