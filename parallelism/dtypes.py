"""Dtypes, with the floats of 16 and 8 bits that NumPy lacks: bfloat16 and the float8 formats.

The package ml_dtypes defines these *narrow floats* for NumPy.  It is imported when a narrow float is first used.
NumPy does not know them as floats: `is_floating` and `is_numeric` do.  `code_of` and `of_code` carry dtypes between
processes.

Programs treat a narrow float as NumPy treats float16 (`like_half`): Python's numbers follow the arrays, and a product
of two arrays keeps their dtype.  ml_dtypes alone makes float32 of ``x * 1.5`` and of ``x @ x``.  A program computes an
op on narrow floats in float32 and rounds its result once (`in_float32`).  Collectives do as for float16: they round
after each addition, in group order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

NARROW_FLOATS = {
    "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3",
    "f8e3m4": "float8_e3m4", "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2fnuz": "float8_e5m2fnuz",
    "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
}
"""The narrow floats: their names in programs, and those that ml_dtypes gives them."""
NUMERIC_KINDS = "biufc"
"""The kinds of NumPy's own numbers and bools."""
_NAMES = frozenset(NARROW_FLOATS.values())
_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """``numpy.dtype(dtype)``, where ``dtype`` may also be the name of a narrow float, as ``"bfloat16"``."""
    if isinstance(dtype, str) and dtype in _NAMES:
        import ml_dtypes  # Imported here, because most programs have no narrow floats and every device would wait.

        kind: type[Any] = getattr(ml_dtypes, dtype)
        return np.dtype(kind)
    return np.dtype(dtype)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a narrow float."""
    return dtype.isbuiltin == 2 and dtype.name in _NAMES


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of real floating-point numbers."""
    return dtype.kind == "f" or is_narrow(dtype)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of numbers or bools."""
    return dtype.kind in NUMERIC_KINDS or is_narrow(dtype)


def limits_of(dtype: np.dtype[Any]) -> Any:
    """``numpy.finfo`` of any floating-point dtype."""
    if is_narrow(dtype):
        import ml_dtypes

        return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return np.finfo(dtype)


def code_of(dtype: np.dtype[Any]) -> str:
    """The text from which `of_code` makes the dtype again in another process; it has the order of the bytes."""
    return dtype.name if is_narrow(dtype) else dtype.str


def of_code(code: str) -> np.dtype[Any]:
    """The dtype of a `code_of`."""
    return as_dtype(code)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def like_half(rule: Callable[..., Any], *given: Any) -> Any:
    """What ``rule(*given)`` is if float16 stands for the narrow float among ``given``.

    ``rule`` gives a dtype or a tuple of them.  ``TypeError`` for two different floats of 16 bits or fewer.
    """
    narrow = {x for x in given if isinstance(x, np.dtype) and is_narrow(x)}
    if not narrow:
        return rule(*given)
    small = sorted({x.name for x in given if isinstance(x, np.dtype) and (x == _HALF or x in narrow)})
    if len(small) > 1:
        raise TypeError(f"{' and '.join(small)} have no common dtype: convert one of them with astype")
    own, = narrow
    result = rule(*(_HALF if isinstance(x, np.dtype) and x == own else x for x in given))
    if isinstance(result, tuple):
        return tuple(own if x == _HALF else x for x in result)
    return own if result == _HALF else result


@lru_cache(maxsize=4096, typed=True)     # 1 and 1.0 are equal
def common_dtype(*given: Any) -> np.dtype[Any]:
    """``numpy.result_type`` of dtypes and Python's numbers; a narrow float counts as a float16."""
    dtype: np.dtype[Any] = like_half(np.result_type, *given)
    return dtype


def in_float32(
    kernel: Callable[..., Any], arrays: Sequence[npt.NDArray[Any]], dtypes: Callable[[], Sequence[np.dtype[Any]]]
) -> Any:
    """``kernel(*arrays)``, in float32 where the arrays are of a narrow float, with results rounded once.

    ``dtypes()`` are those of the results; they are asked for only if an array is of a narrow float.
    """
    if not any(is_narrow(array.dtype) for array in arrays):
        return kernel(*arrays)
    result = kernel(*(array.astype(_SINGLE) if is_narrow(array.dtype) else array for array in arrays))
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = tuple(
            np.asarray(output).astype(dtype, copy=False)
            for output, dtype in zip(result if isinstance(result, tuple) else (result,), dtypes(), strict=True))
    return rounded if isinstance(result, tuple) else rounded[0]
