"""Recording of NumPy's products: they become ``matmul`` and ``einsum``."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import islice
from string import ascii_letters
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import letters
from parallelism.ir.recording.numpy_diagonals import without_repeats
from parallelism.ir.recording.numpy_shapes import axes_of, axis_of, stands_for, transposed
from parallelism.ir.tracing import CALLS, VIEWS, apply, lift, refuse


@stands_for(np.matmul, np.linalg.matmul)
def _matmul(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if a.ndim >= 2 and b.ndim >= 2:
        return apply("matmul", a, b)
    if not a.ndim or not b.ndim:
        refuse("numpy.matmul of a scalar")
    if b.ndim == 1:
        return _matmul(a, b.reshape(-1, 1)).reshape(a.shape[:-1])
    return apply("matmul", a.reshape(1, -1), b).reshape((*b.shape[:-2], b.shape[-1]))


@stands_for(np.dot)
def _dot(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if not a.ndim or not b.ndim:
        return a * b
    if b.ndim > 2:
        return _tensordot(a, b, (-1, -2))
    return _matmul(a, b)


@stands_for(np.einsum)
def _einsum(equation: Any, *operands: Any, optimize: Any = False) -> Any:
    if not isinstance(equation, str):
        return _einsum(*_in_letters([equation, *operands]))
    arrays = [lift(x) for x in operands]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(arrays):
        raise ValueError(f"{equation} takes {len(terms)} operands, got {len(arrays)}")
    spare = iter(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation)
    hidden = []  # by operand, the number of dims that ... stands for
    for term, array in zip(terms, arrays, strict=True):
        hidden.append(array.ndim - len(term.replace("...", "")) if "..." in term else 0)
    dots = list(islice(spare, max(hidden)))
    terms = [
        term.replace("...", "".join(dots[len(dots) - n :])) for n, term in zip(hidden, terms, strict=True)
    ]
    if arrow:
        right = right.replace("...", "".join(dots))
    else:
        joined = "".join(terms)
        right = "".join(dots) + "".join(sorted({c for c in joined if joined.count(c) == 1} - set(dots)))
    pairs = [without_repeats(term, array) for term, array in zip(terms, arrays, strict=True)]
    terms, arrays = [term for term, _ in pairs], [array for _, array in pairs]
    if len(arrays) == 1 and sorted(terms[0]) == sorted(right) and len({*right}) == len(right):
        return transposed(arrays[0], [terms[0].index(letter) for letter in right])
    return apply("einsum", *arrays, equation=f"{','.join(terms)}->{right}")


def _in_letters(given: list[Any]) -> list[Any]:
    """An equation and its operands, of operands that have a list of numbers behind each."""
    arrays = given[0 : len(given) // 2 * 2 : 2]
    numbers = given[1::2]
    terms = [*map(_term, numbers)]
    if len(given) % 2 == 0:
        return [",".join(terms), *arrays]
    return [f"{','.join(terms)}->{_term(given[-1])}", *arrays]


def _term(numbers: Sequence[Any]) -> str:
    return "".join("..." if n is Ellipsis else ascii_letters[n] for n in numbers)


def _place_seen(equation: Any, *operands: Any, optimize: Any = False) -> int | None:
    """1 for the sum of one array along no dim: NumPy returns a view of the array, with its dims in another order."""
    if len(operands) != 1 or not isinstance(equation, str) or not np.ndim(operands[0]):
        return None
    given, arrow, right = equation.replace(" ", "").replace("...", "").partition("->")
    repeated = len({*given}) < len(given)
    return None if repeated or (arrow and not {*given} <= {*right}) else 1


VIEWS[np.einsum] = _place_seen


@stands_for(np.tensordot)
def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    a, b = lift(a), lift(b)
    if isinstance(axes, int):
        left = list(range(a.ndim - axes, a.ndim))
        right = list(range(axes))
    else:
        left, right = (np.atleast_1d(side).tolist() for side in axes)
    names = letters(a.ndim + b.ndim)
    first, second = list(names[: a.ndim]), list(names[a.ndim :])
    for i, j in zip(left, right, strict=True):
        second[axis_of(j, b.ndim)] = first[axis_of(i, a.ndim)]
    out = "".join(letter for letter in (*first, *second) if (letter in first) != (letter in second))
    return apply("einsum", a, b, equation=f"{''.join(first)},{''.join(second)}->{out}")


@stands_for(np.inner)
def _inner(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    return a * b if not a.ndim or not b.ndim else _tensordot(a, b, (-1, -1))


@stands_for(np.linalg.multi_dot)
def _multi_dot(arrays: Any) -> Any:
    """The products are computed from left to right; NumPy chooses the cheapest order."""
    return reduce(_dot, map(lift, arrays))


_VECTOR_NORMS: dict[Any, Callable[..., Any]] = {
    1: lambda x, **along: np.sum(np.abs(x), **along),
    0: lambda x, **along: np.sum((x != 0).astype(x.dtype), **along),
    np.inf: lambda x, **along: np.max(np.abs(x), **along),
    -np.inf: lambda x, **along: np.min(np.abs(x), **along),
}


@stands_for(np.linalg.norm)
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = x if is_floating(x.dtype) else x.astype(np.float64)
    axes = axes_of(axis, x.ndim)
    if ord in (None, "fro") or (ord == 2 and len(axes) == 1):
        return np.sqrt(np.sum(x * x, axis=axes, keepdims=keepdims))
    if len(axes) == 2 and ord in (1, -1, np.inf, -np.inf):
        return _matrix_norm(x, ord, axes if axis is None else axis, keepdims)
    if len(axes) != 1 or isinstance(ord, str):
        refuse(f"numpy.linalg.norm of order {ord!r} of a matrix", "its orders are 'fro', 1, -1 and inf")
    if ord in _VECTOR_NORMS:
        return _VECTOR_NORMS[ord](x, axis=axes, keepdims=keepdims)
    return np.power(np.sum(np.power(np.abs(x), ord), axis=axes, keepdims=keepdims), 1 / ord)


def _matrix_norm(x: Any, ord: Any, axes: Any, keepdims: bool) -> Any:
    """The largest or the smallest sum of sizes of a column (1) or of a row (inf)."""
    rows, columns = (axis_of(a, x.ndim) for a in axes)
    summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = np.sum(np.abs(x), axis=summed, keepdims=True)
    found = (np.max if ord > 0 else np.min)(sums, axis=other, keepdims=True)
    return found if keepdims else np.squeeze(found, (rows, columns))


CALLS.update(
    {
        np.outer: lambda a, b: apply("einsum", lift(a).reshape(-1), lift(b).reshape(-1), equation="i,j->ij"),
        np.vdot: lambda a, b: _matmul(lift(a).reshape(-1), lift(b).reshape(-1)),
        np.matvec: lambda a, b: _einsum("...ij,...j->...i", a, b),
        np.vecmat: lambda a, b: _einsum("...i,...ij->...j", a, b),
        np.vecdot: lambda a, b: _einsum("...i,...i->...", a, b),
    }
)
