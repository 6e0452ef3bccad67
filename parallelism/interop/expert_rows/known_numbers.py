"""What is known of the integers of a program, whatever its inputs are: between which numbers they lie, and where they differ.

A search for the best ones has places as its result: they lie between 0 and the extent of the dim, and no place is found
twice.  Numbers of experts must be such, or a row may have no expert, or a token one expert twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import NamedTuple

import numpy as np

from parallelism.ir.core import Function, Op, TensorType, Value


class Known(NamedTuple):
    """Numbers lie from ``least`` to ``most``; along the dim ``different`` no two are equal, if there is such a dim."""

    least: float
    most: float
    different: int | None = None


def known_numbers(function: Function) -> dict[Value, Known]:
    """What is known of the integers that a function computes."""
    known: dict[Value, Known] = {value: _any(value.type) for value in function.inputs}
    for op in function.ops:
        for value in op.outputs:
            known[value] = _any(value.type)
        if op.kind not in _KNOWN or op.outputs[0].type.dtype.kind not in "iu":
            continue
        found, limits = (
            _KNOWN[op.kind](op, [known[value] for value in op.inputs]),
            known[op.outputs[0]],
        )
        if limits.least <= found.least and found.most <= limits.most:  # else they may have run over
            known[op.outputs[0]] = found
    return known


def _any(type: TensorType) -> Known:
    """What is known of any numbers of a type."""
    if type.dtype.kind not in "iu":
        return Known(-inf, inf)
    limits = np.iinfo(type.dtype)
    return Known(limits.min, limits.max)


def _places(op: Op, given: Sequence[Known]) -> Known:
    """Of a search along a dim."""
    extent, axis = op.inputs[0].type.shape[op["axis"]], op["axis"]
    if not isinstance(extent, int):
        return Known(0, inf)
    return Known(0, extent - 1, axis if op.kind == "argsort" else None)


def _constant(op: Op, given: Sequence[Known]) -> Known:
    numbers = np.asarray(op["value"])
    if numbers.dtype.kind not in "iu" or not numbers.size:
        return Known(-inf, inf)
    shape = op.outputs[0].type.shape
    long = [d for d, n in enumerate(shape) if n == numbers.size > 1]
    is_different = len(long) == 1 and len(np.unique(numbers)) == numbers.size
    return Known(int(numbers.min()), int(numbers.max()), long[0] if is_different else None)


def _iota(op: Op, given: Sequence[Known]) -> Known:
    dim = op["dim"]
    first, extent = op["starts"][dim], op["shape"][dim]
    is_known = isinstance(first, int) and isinstance(extent, int)
    return Known(first, first + extent - 1, dim) if is_known else Known(-inf, inf)


def _one_of(op: Op, given: Sequence[Known]) -> Known:
    """Of these numbers or of those."""
    numbers = given[1:] if op.kind == "where" else given
    return Known(min(each.least for each in numbers), max(each.most for each in numbers))


def _taken(op: Op, given: Sequence[Known]) -> Known:
    """Different places of different numbers have different ones."""
    x, places = given
    is_different = op.kind == "take_along" and x.different == places.different == op["axis"]
    return x._replace(different=x.different if is_different else None)


def _sum(op: Op, given: Sequence[Known]) -> Known:
    """If the same is added to all numbers, different ones stay different."""
    a, b = given
    if op.kind == "subtract":
        b = Known(-b.most, -b.least, b.different)
    shape = op.outputs[0].type.shape
    different = None
    if b.least == b.most and op.inputs[0].type.shape == shape:
        different = a.different
    elif a.least == a.most and op.inputs[1].type.shape == shape:
        different = b.different
    return Known(a.least + b.least, a.most + b.most, different)


def _bounded(op: Op, given: Sequence[Known]) -> Known:
    a, b = given
    best = max if op.kind == "maximum" else min
    return Known(best(a.least, b.least), best(a.most, b.most))


def _remainder(op: Op, given: Sequence[Known]) -> Known:
    """Of a division by one positive number, rounded down."""
    by = given[1]
    return Known(0, by.most - 1) if 0 < by.least == by.most else Known(-inf, inf)


def _moved(op: Op, given: Sequence[Known]) -> Known:
    """Some of the numbers, in another order or shape."""
    (found,) = given
    at, before, after = found.different, op.inputs[0].type.shape, op.outputs[0].type.shape
    if at is None or op.kind in ("slice", "flip", "convert"):
        return found
    if op.kind == "transpose":
        return found._replace(different=list(op["permutation"]).index(at))
    if op.kind == "broadcast_to":
        now = at + len(after) - len(before)
        return found._replace(different=now if after[now] == before[at] else None)
    same = [d for d, n in enumerate(after) if n == before[at] and prod(after[:d]) == prod(before[:at])]
    return found._replace(different=same[-1] if same else None)


_KNOWN: dict[str, Callable[[Op, Sequence[Known]], Known]] = {
    **dict.fromkeys(("argsort", "argmax", "argmin"), _places),
    "constant": _constant,
    "iota": _iota,
    **dict.fromkeys(("where", "concatenate"), _one_of),
    **dict.fromkeys(("take", "take_along"), _taken),
    **dict.fromkeys(("add", "subtract"), _sum),
    **dict.fromkeys(("maximum", "minimum"), _bounded),
    "remainder": _remainder,
    **dict.fromkeys(("reshape", "transpose", "slice", "flip", "convert", "broadcast_to"), _moved),
}
"""What is known of the output of an op, by its kind."""
