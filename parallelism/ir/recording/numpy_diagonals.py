"""Recording of NumPy's functions of diagonals."""

from typing import Any

import numpy as np

from parallelism.ir.recording.numpy_shapes import axis_of, part, reshaped, stands_for, transposed
from parallelism.ir.tracing import CALLS, VIEWS, apply, diagonal as order_of_diagonal, lift, place_of, refuse


@stands_for(np.diagonal, view=True)
def diagonal_of(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """The elements whose place along ``axis2`` is that along ``axis1`` and ``offset`` more, as the last dim."""
    first, second = axis_of(axis1, x.ndim), axis_of(axis2, x.ndim)
    rows, columns = x.shape[first], x.shape[second]
    if not isinstance(rows, int) or not isinstance(columns, int):
        refuse(f"numpy.diagonal of an array of shape {x.shape}", "it takes two dims of known extents")
    n = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    rest = [d for d in range(x.ndim) if d not in (first, second)]
    turned = transposed(x, (*rest, first, second))
    kept = turned.shape[:-2]
    begin = max(0, -offset)
    at = len(rest)
    square = part(part(turned, at, begin, begin + n), at + 1, max(0, offset), max(0, offset) + n)
    found = part(reshaped(square, (*kept, n * n)), at, 0, n * n, n + 1)
    if x.ndim == 2 and not offset and not first:
        found._order = order_of_diagonal(place_of(x), found.shape)
    return found


@stands_for(np.linalg.diagonal, view=True)
def _matrix_diagonal(x: Any, *, offset: int = 0) -> Any:
    return diagonal_of(x, offset, -2, -1)


@stands_for(np.trace)
def _trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    return np.sum(diagonal_of(x, offset, axis1, axis2), axis=-1, dtype=dtype)


@stands_for(np.linalg.trace)
def _matrix_trace(x: Any, *, offset: int = 0, dtype: Any = None) -> Any:
    return _trace(x, offset, -2, -1, dtype)


@stands_for(np.diag)
def _diag(x: Any, k: int = 0) -> Any:
    if x.ndim == 2:
        return diagonal_of(x, k)
    square = x[:, None] * np.eye(x.shape[0], dtype=x.dtype)
    return np.pad(square, ((max(0, -k), max(0, k)), (max(0, k), max(0, -k)))) if k else square


VIEWS[np.diag] = lambda x, k=0: 0 if x.ndim == 2 else None


@stands_for(np.fill_diagonal)
def _fill_diagonal(x: Any, value: Any, wrap: bool = False) -> None:
    if x.ndim != 2 or wrap or not all(isinstance(n, int) for n in x.shape):
        refuse("numpy.fill_diagonal with wrap=, or of another array than a matrix of known extents")
    places = np.arange(min(x.shape))
    x[places, places] = value


@stands_for(np.vander)
def _vander(x: Any, N: Any = None, increasing: bool = False) -> Any:
    count = x.shape[0] if N is None else N
    powers = [np.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return np.stack(powers if increasing else powers[::-1], axis=1)


def without_repeats(term: str, x: Any) -> tuple[str, Any]:
    """A term of an einsum and its array, with the diagonal in place of two dims of one letter."""
    while len({*term}) < len(term):
        letter = next(each for each in term if term.count(each) > 1)
        first = term.index(letter)
        second = term.index(letter, first + 1)
        if x.shape[first] != x.shape[second]:
            raise ValueError(f"the dims of letter {letter} differ: {x.shape[first]} and {x.shape[second]}")
        x = diagonal_of(x, 0, first, second)
        term = "".join(each for d, each in enumerate(term) if d not in (first, second)) + letter
    return term, x


CALLS[np.diagflat] = lambda v, k=0: _diag(lift(v).reshape(-1), k)
PLACES = np.dtype(np.int64)


def places_along(extent: Any) -> Any:
    """0, 1, 2, ... below an extent."""
    return apply("iota", dim=0, shape=(extent,), starts=(0,), dtype=PLACES)
