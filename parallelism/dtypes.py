"""Dtypes, with those that NumPy lacks: bfloat16, the float8 formats, and integers of 4 and 2 bits.

The package ml_dtypes defines these *narrow floats* and *narrow integers* for NumPy.  It is imported when one is first
used.  NumPy does not know them as numbers: `is_floating`, `is_integer` and `is_numeric` do.  `code_of` and `of_code`
carry dtypes between processes.

Programs treat a narrow float as NumPy treats float16 (`like_half`): Python's numbers follow the arrays, and a product
of two arrays keeps their dtype.  ml_dtypes alone makes float32 of ``x * 1.5`` and of ``x @ x``.  A program computes an
op on narrow floats in float32 and rounds its result once (`in_wider_dtype`).  Collectives do as for float16: they round
after each addition, in group order.

An array holds each narrow integer in a byte.  A program computes an op on them in 8 bits, and its result wraps around:
in 4 bits, -(-8) is -8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

NARROW_FLOATS = {
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e4m3": "float8_e4m3",
    "f8e3m4": "float8_e3m4",
    "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz",
    "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
}
"""The narrow floats: their names in programs, and those that ml_dtypes gives them."""
NARROW_INTEGERS = {"i2": "int2", "i4": "int4", "ui2": "uint2", "ui4": "uint4"}
"""The narrow integers: their names in programs, and those that ml_dtypes gives them."""
NUMERIC_KINDS = "biufc"
"""The kinds of NumPy's own numbers and bools."""
FLOAT4 = "float4_e2m1fn"
"""The name of numbers of 4 bits in ml_dtypes.  No array of a program has them: two of them lie in a byte."""
_NAMES = frozenset((*NARROW_FLOATS.values(), FLOAT4))
_INTEGER_NAMES = frozenset(NARROW_INTEGERS.values())
_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)
_BYTE, _UNSIGNED_BYTE = np.dtype(np.int8), np.dtype(np.uint8)


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """``numpy.dtype(dtype)``, where ``dtype`` may also be a name of ml_dtypes, as ``"bfloat16"`` or ``"int4"``."""
    if isinstance(dtype, str) and (dtype in _NAMES or dtype in _INTEGER_NAMES):
        import ml_dtypes  # Imported here, because most programs have no narrow floats and every device would wait.

        kind: type[Any] = getattr(ml_dtypes, dtype)
        return np.dtype(kind)
    return np.dtype(dtype)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a narrow float."""
    return dtype.isbuiltin == 2 and dtype.name in _NAMES


def is_narrow_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is an integer of fewer than 8 bits."""
    return dtype.isbuiltin == 2 and dtype.name in _INTEGER_NAMES


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of integers, signed or not; bools are none."""
    return dtype.kind in "iu" or is_narrow_integer(dtype)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of real floating-point numbers."""
    return dtype.kind == "f" or is_narrow(dtype)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of numbers or bools."""
    return dtype.kind in NUMERIC_KINDS or is_narrow(dtype) or is_narrow_integer(dtype)


def limits_of(dtype: np.dtype[Any]) -> Any:
    """``numpy.finfo`` of any floating-point dtype."""
    if is_narrow(dtype):
        import ml_dtypes

        return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return np.finfo(dtype)


def bits_of(dtype: np.dtype[Any]) -> int:
    """The number of bits that the numbers of a dtype have; it counts for shifts and for counts of bits."""
    return int(dtype.name[-1]) if is_narrow_integer(dtype) else 8 * dtype.itemsize


def integer_of(bits: int, *, signed: bool) -> np.dtype[Any]:
    """The dtype of integers of so many bits: 2, 4, 8, 16, 32 or 64."""
    return as_dtype(f"{'' if signed else 'u'}int{bits}")


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the largest number of a dtype of integers."""
    if is_narrow_integer(dtype):
        bits = bits_of(dtype)
        return (0, 2**bits - 1) if dtype.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def code_of(dtype: np.dtype[Any]) -> str:
    """The text from which `of_code` makes the dtype again in another process; it has the order of the bytes."""
    return dtype.name if is_narrow(dtype) or is_narrow_integer(dtype) else dtype.str


def of_code(code: str) -> np.dtype[Any]:
    """The dtype of a `code_of`."""
    return as_dtype(code)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def like_half(rule: Callable[..., Any], *given: Any) -> Any:
    """What ``rule(*given)`` is if float16 stands for the narrow float among ``given``.

    ``rule`` gives a dtype or a tuple of them.  ``TypeError`` for two different floats of 16 bits or fewer.  Likewise
    int8 stands for a narrow integer, uint8 for one without sign.
    """
    integers = {x for x in given if isinstance(x, np.dtype) and is_narrow_integer(x)}
    if integers:
        return _like_bytes(rule, integers, given)
    narrow = {x for x in given if isinstance(x, np.dtype) and is_narrow(x)}
    if not narrow:
        return rule(*given)
    small = sorted({x.name for x in given if isinstance(x, np.dtype) and (x == _HALF or x in narrow)})
    if len(small) > 1:
        raise TypeError(f"{' and '.join(small)} have no common dtype: convert one of them with astype")
    (own,) = narrow

    def as_half(x: Any) -> Any:
        return _HALF if isinstance(x, np.dtype) and x == own else x

    return _exchanged(_HALF, own, rule(*map(as_half, given)))


def _exchanged(old: np.dtype[Any], new: np.dtype[Any], result: Any) -> Any:
    """A dtype or a tuple of them, with one dtype in place of another."""
    if isinstance(result, tuple):
        return tuple([_exchanged(old, new, dtype) for dtype in result])
    return new if result == old else result


def _like_bytes(rule: Callable[..., Any], integers: set[np.dtype[Any]], given: Sequence[Any]) -> Any:
    """What ``rule(*given)`` is if integers of 8 bits stand for narrow ones.

    A result of 8 bits is narrow again if all integers among ``given`` are of one narrow dtype.
    """

    def as_bytes(x: Any) -> Any:
        return _wider(x) if x in integers else x

    result = like_half(rule, *map(as_bytes, given))
    own, *others = {x for x in given if isinstance(x, np.dtype) and is_integer(x)}
    return result if others else _exchanged(_wider(own), own, result)


def _wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which a program computes: float32 for a narrow float, 8 bits for a narrow integer, or its own."""
    if is_narrow_integer(dtype):
        return _UNSIGNED_BYTE if dtype.name.startswith("u") else _BYTE
    return _SINGLE if is_narrow(dtype) else dtype


@lru_cache(maxsize=4096, typed=True)  # 1 and 1.0 are equal
def common_dtype(*given: Any) -> np.dtype[Any]:
    """``numpy.result_type`` of dtypes and Python's numbers; a narrow float counts as a float16."""
    dtype: np.dtype[Any] = like_half(np.result_type, *given)
    return dtype


def in_wider_dtype(
    kernel: Callable[..., Any],
    arrays: Sequence[npt.NDArray[Any]],
    dtypes: Callable[[], Sequence[np.dtype[Any]]],
) -> Any:
    """``kernel(*arrays)``, in float32 where the arrays are of a narrow float, with results rounded once.

    Narrow integers are computed in 8 bits, and results wrap around.  ``dtypes()`` are those of the results; they are
    asked for only if an array is of a narrow dtype.
    """
    wider = [_wider(array.dtype) for array in arrays]
    if all(dtype is array.dtype for dtype, array in zip(wider, arrays, strict=True)):
        return kernel(*arrays)
    result = kernel(*(array.astype(dtype, copy=False) for dtype, array in zip(wider, arrays, strict=True)))
    outputs = result if isinstance(result, tuple) else (result,)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = tuple(
            np.asarray(output).astype(dtype, copy=False)
            for output, dtype in zip(outputs, dtypes(), strict=True)
        )
    return rounded if isinstance(result, tuple) else rounded[0]
