"""Recording of NumPy's linear algebra of small matrices, whose steps are unrolled, and of its outer products."""

from typing import Any, NamedTuple

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.recording.numpy_shapes import stands_for
from parallelism.ir.tracing import lift, refuse

MOST_ROWS = 64
"""The most rows of a matrix whose elimination is unrolled."""


def _square(a: Any, name: str) -> Any:
    """Matrices of floats, of so few rows that their steps can be unrolled."""
    x = lift(a)
    x = x if is_floating(x.dtype) else x.astype(np.float64)
    rows = x.shape[-1] if x.ndim >= 2 else 0
    if not isinstance(rows, int) or x.shape[-2] != rows or not 1 <= rows <= MOST_ROWS:
        refuse(
            f"numpy.linalg.{name} of shape {list(x.shape)}",
            f"it is unrolled for square matrices of at most {MOST_ROWS} rows",
        )
    return x


def _exchanged(a: Any, b: Any, k: int, pivot: Any) -> tuple[Any, Any]:
    """Both with row ``k`` and the row of the pivot exchanged, in each matrix."""
    rows = np.arange(int(a.shape[-2]))
    there = pivot[..., None]
    order = np.where(rows == k, there, np.where(rows == there, k, rows))
    if a.ndim == 2 and b.ndim == 2:
        return np.take(a, order, axis=0), np.take(b, order, axis=0)
    order = order[..., None]
    places = [np.broadcast_to(order, x.shape) for x in (a, b)]
    return np.take_along_axis(a, places[0], axis=-2), np.take_along_axis(b, places[1], axis=-2)


def _eliminated(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """What Gauss-Jordan elimination with the largest pivots makes of ``a`` and of the right sides ``b``.

    The third is the sign of the exchanges of rows.
    """
    n = a.shape[-1]
    rows = np.arange(n)
    sign: Any = lift(1, dtype=a.dtype)
    for k in range(n):
        pivot = np.argmax(np.abs(a[..., k:, k]), axis=-1) + k
        a, b = _exchanged(a, b, k, pivot)
        sign = np.where(pivot == k, sign, -sign)
        ratios = a[..., :, k] / a[..., k, k][..., None]
        factors = np.where(rows == k, lift(0, dtype=a.dtype), ratios)[..., None]
        a = a - factors * a[..., k, :][..., None, :]
        b = b - factors * b[..., k, :][..., None, :]
    return a, b, sign


@stands_for(np.linalg.solve)
def _solve(a: Any, b: Any) -> Any:
    x, right = _square(a, "solve"), lift(b)
    right = right.astype(x.dtype) if not is_floating(right.dtype) else right
    vector = right.ndim == 1
    right = right[:, None] if vector else right
    left, found, _ = _eliminated(x, _with_dims_of(x, right))
    found = found / np.linalg.diagonal(left)[..., None]
    return found[..., 0] if vector else found


def _with_dims_of(x: Any, right: Any) -> Any:
    """The right sides of each matrix."""
    return np.broadcast_to(right, (*x.shape[:-2], *right.shape[-2:])) if right.ndim < x.ndim else right


@stands_for(np.linalg.inv)
def _inv(a: Any) -> Any:
    x = _square(a, "inv")
    return _solve(x, lift(np.eye(x.shape[-1], dtype=x.dtype)))


@stands_for(np.linalg.det)
def _det(a: Any) -> Any:
    x = _square(a, "det")
    left, _, sign = _eliminated(x, x)
    return sign * np.prod(np.linalg.diagonal(left), axis=-1)


@stands_for(np.linalg.slogdet)
def _slogdet(a: Any) -> Any:
    x = _square(a, "slogdet")
    left, _, sign = _eliminated(x, x)
    pivots = np.linalg.diagonal(left)
    signs = sign * np.prod(np.sign(pivots), axis=-1)
    sizes = np.sum(np.log(np.abs(pivots)), axis=-1)
    return _SlogdetResult(signs, sizes)


class _SlogdetResult(NamedTuple):
    """As NumPy's."""

    sign: Any
    logabsdet: Any


@stands_for(np.linalg.cholesky)
def _cholesky(a: Any, *, upper: bool = False) -> Any:
    """Column by column, each from what the ones before leave of the matrix."""
    x = _square(a, "cholesky")
    n = x.shape[-1]
    rest, columns = x, []
    for k in range(n):
        below = rest[..., :, k] / np.sqrt(rest[..., k, k])[..., None]
        column = np.where(np.arange(n) < k, lift(0, dtype=x.dtype), below)
        columns.append(column)
        rest = rest - column[..., :, None] * column[..., None, :]
    return np.stack(columns, axis=-2 if upper else -1)


@stands_for(np.linalg.matrix_power)
def _matrix_power(a: Any, n: int) -> Any:
    x = lift(a)
    if n < 0:
        return _matrix_power(_inv(x), -n)
    if n == 0:
        return lift(np.eye(int(x.shape[0]), dtype=x.dtype))
    if n == 1:
        return x
    half = _matrix_power(x, n // 2)
    return half @ half @ x if n % 2 else half @ half


@stands_for(np.kron)
def _kron(a: Any, b: Any) -> Any:
    x, y = lift(a), lift(b)
    ndim = max(x.ndim, y.ndim)
    x, y = (each.reshape((*[1] * (ndim - each.ndim), *each.shape)) for each in (x, y))
    # Each dim of the result has, for each place along x, all those along y.
    wide, fine, shape = [], [], []
    for m, n in zip(x.shape, y.shape, strict=True):
        wide += [m, 1]
        fine += [1, n]
        shape.append(m * n)
    return (x.reshape(wide) * y.reshape(fine)).reshape(shape)


@stands_for(np.cross)
def _cross(a: Any, b: Any) -> Any:
    x, y = lift(a), lift(b)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        refuse("numpy.cross of other vectors than those of three numbers in the last dim")
    turned = [(1, 2), (2, 0), (0, 1)]
    return np.stack([x[..., i] * y[..., j] - x[..., j] * y[..., i] for i, j in turned], axis=-1)
