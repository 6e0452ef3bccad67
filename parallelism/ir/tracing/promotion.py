"""The dtypes of recorded calls: what NumPy's code means by a dtype, and what a ufunc makes of its operands."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Expression, checked_dtype, dtype_text, resolved
from parallelism.ir.tracing.in_place import Writable
from parallelism.ir.tracing.refusing import refuse, warn_of_promotion


def meant_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype that NumPy's code means: ``"i8"`` has 8 bytes there, and None is float64.

    Names that NumPy does not know are those of programs, as ``"bf16"``.
    """
    try:
        meant: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        try:
            return checked_dtype(dtype)
        except TypeError as error:
            refuse(f"the dtype {str(dtype)[:80]!r}", str(error))
    if dtype_text(meant) is None:
        given = f"{dtype!r}, which is {meant} in NumPy," if isinstance(dtype, str) else f"{meant}"
        order = (
            "programs have the byte order of the machine"
            if not meant.isnative
            else "programs have bools, integers of 8 to 64 bits and floats of 8 to 64 bits, as numpy.float16"
        )
        refuse(f"the dtype {given}", order)
    return meant


def operand_dtypes(ufunc: np.ufunc, inputs: Sequence[Any], dtype: Any = None) -> list[np.dtype[Any] | None]:
    """The dtypes to which the operands of a ufunc are converted; None for those that stay as they are.

    Python's scalars get the dtype that NumPy gives them.  With ``dtype=`` every operand is converted.
    """
    weak = [_weak_type(x) for x in inputs]
    given: list[Any] = []
    try:
        for x, kind in zip(inputs, weak, strict=True):
            if isinstance(x, Writable):
                given.append(x.type.dtype)
            elif kind is None:
                given.append(np.asarray(x).dtype)
            else:
                given.append(np.dtype(bool) if kind is bool else kind)
        if dtype is not None:
            asked = (*[None] * ufunc.nin, meant_dtype(dtype))
            return list(ufunc.resolve_dtypes((*given, None), signature=asked)[:-1])
        used = resolved(ufunc, *given)
    except (TypeError, ValueError) as error:
        refuse(f"numpy.{ufunc.__name__}", str(error))
    check_promotion(f"numpy.{ufunc.__name__}", inputs, used[-1])
    converted: list[np.dtype[Any] | None] = []
    for own, kind in zip(used, weak, strict=False):
        converted.append(own if kind else None)
    return converted


def _weak_type(x: Any) -> type | None:
    """The type of a Python scalar; None for all else."""
    if type(x) is bool:
        return bool
    if isinstance(x, int | Expression):
        return int
    return float if type(x) is float else None


def check_promotion(function: str, inputs: Sequence[Any], result: np.dtype[Any]) -> None:
    """Warn if a NumPy number makes a ``result`` of more than 16 bits of recorded arrays that all have at most 16."""
    if result.itemsize <= 2:
        return
    arrays = [x.type.dtype for x in inputs if isinstance(x, Writable)]
    if arrays and all(is_floating(dtype) and dtype.itemsize <= 2 for dtype in arrays):
        for x in inputs:
            if isinstance(x, np.generic | np.ndarray) and not x.ndim:
                warn_of_promotion(function, arrays[0], x.dtype, result)
