"""The operations that a reduction can combine its terms by.

Terms are combined in group order, two at a time: ``((x0 op x1) op x2) op ...``; so every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.operation import ReduceOp

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}
_OTHER_NAMES = {"avg": "mean", "product": "prod"}
OPS = (*_UFUNCS, *_OTHER_NAMES)


class Reduction:
    """One operation on one dtype."""

    def __init__(
        self, name: str, dtype: np.dtype[Any], ufunc: np.ufunc | None, function: Callable[[Any, Any], Any] | None
    ) -> None:
        self.name = name
        self.dtype = dtype
        """The terms are converted to it before they are combined; the result has it."""
        self._ufunc = ufunc
        self._function = function
        self._is_mean = name == "mean"

    def combine(self, a: NDArray[Any], b: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """``a op b``, elementwise."""
        if self._ufunc is not None:
            result: NDArray[Any] = self._ufunc(a, b, out=out)
            return np.asarray(result)
        assert self._function is not None
        value = np.asarray(self._function(_read_only(a), _read_only(b)))
        if value.shape != a.shape or value.dtype.newbyteorder("=") != a.dtype.newbyteorder("="):
            raise ValueError(
                f"op {self.name} must be elementwise and keep the dtype: of two arrays {a.dtype}{list(a.shape)} "
                f"it made {value.dtype}{list(value.shape)}"
            )
        if out is None:
            return value
        out[...] = value
        return out

    def finish(self, total: NDArray[Any], terms: int) -> None:
        """What is left to do when all terms are in: the division of a mean.  In place."""
        if self._is_mean:
            np.divide(total, terms, out=total)

    def reduce(self, terms: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """All terms into ``out``, which may be one of them only if there are at most two or it is the first."""
        combine: Any = self._ufunc or self.combine
        if len(terms) == 1:
            np.copyto(out, terms[0])
        else:
            combine(terms[0], terms[1], out=out)
            for term in terms[2:]:
                combine(out, term, out=out)
        if self._is_mean:
            self.finish(out, len(terms))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A term as a user's function sees it: it may be somebody's input."""
    view = array.view()
    view.flags.writeable = False
    return view


def reduction(op: ReduceOp, dtype: np.dtype[Any]) -> Reduction:
    """The reduction that ``op`` means for arrays of ``dtype``; ``ValueError`` or ``TypeError`` if there is none."""
    if callable(op):
        name = getattr(op, "__qualname__", None) or getattr(op, "__name__", None) or type(op).__qualname__
        return Reduction(name, dtype, None, op)
    return _named(op, dtype)


@lru_cache(maxsize=256)
def _named(op: str, dtype: np.dtype[Any]) -> Reduction:
    name = _OTHER_NAMES.get(op, op) if isinstance(op, str) else op
    if name not in _UFUNCS:
        raise ValueError(f"op must be one of {', '.join(OPS)} or a function of two arrays, got {op!r}")
    kind = dtype.kind
    if name in ("and", "or", "xor") and kind not in "bui":
        raise TypeError(f"op {name!r} is for integers and bools, got {dtype}")
    if name in ("max", "min") and kind == "c":
        raise TypeError(f"op {name!r} needs an order, and {dtype} has none")
    if name in ("sum", "prod") and kind == "b":
        dtype = np.dtype(np.int64)
    if name == "mean" and kind in "bui":
        dtype = np.dtype(np.float64)
    return Reduction(name, dtype, _UFUNCS[name], None)
