"""Recording of NumPy's linear algebra of small matrices, whose steps are unrolled, and of its outer products."""

from typing import Any, NoReturn

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.recording.numpy_statistics import stands_for
from parallelism.ir.tracing import lift, refuse

MOST_ROWS = 64
"""Of a matrix whose elimination is unrolled."""


def _square(a: Any, name: str) -> Any:
    """A matrix of floats, of so few rows that its steps can be unrolled."""
    x = lift(a)
    x = x if is_floating(x.dtype) else x.astype(np.float64)
    if x.ndim != 2:
        _refuse_shape(name, x)
    if not isinstance(x.shape[0], int) or x.shape[0] != x.shape[1] or not 1 <= x.shape[0] <= MOST_ROWS:
        _refuse_shape(name, x)
    return x


def _refuse_shape(name: str, x: Any) -> NoReturn:
    refuse(
        f"numpy.linalg.{name} of shape {list(x.shape)}",
        f"it is unrolled for one square matrix of at most {MOST_ROWS} rows",
    )


def _eliminated(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """What Gauss-Jordan elimination with the largest pivots makes of ``a`` and of the right sides ``b``, and det(a)."""
    n = a.shape[0]
    rows = np.arange(n)
    det = lift(1, dtype=a.dtype)
    for k in range(n):
        pivot = np.argmax(np.abs(a[k:, k])) + k
        order = np.where(rows == k, pivot, np.where(rows == pivot, k, rows))
        a, b = np.take(a, order, axis=0), np.take(b, order, axis=0)
        det = det * np.where(pivot == k, a[k, k], -a[k, k])
        factors = np.where(rows == k, lift(0, dtype=a.dtype), a[:, k] / a[k, k])[:, None]
        a, b = a - factors * a[k], b - factors * b[k]
    return a, b, det


@stands_for(np.linalg.solve)
def _solve(a: Any, b: Any) -> Any:
    x, right = _square(a, "solve"), lift(b)
    right = right.astype(x.dtype) if not is_floating(right.dtype) else right
    vector = right.ndim == 1
    left, found, _ = _eliminated(x, right[:, None] if vector else right)
    found = found / np.diagonal(left)[:, None]
    return found[:, 0] if vector else found


@stands_for(np.linalg.inv)
def _inv(a: Any) -> Any:
    x = _square(a, "inv")
    return _solve(x, lift(np.eye(x.shape[0], dtype=x.dtype)))


@stands_for(np.linalg.det)
def _det(a: Any) -> Any:
    x = _square(a, "det")
    return _eliminated(x, x)[2]


@stands_for(np.linalg.cholesky)
def _cholesky(a: Any, *, upper: bool = False) -> Any:
    """Column by column, each from what the ones before leave of the matrix."""
    x = _square(a, "cholesky")
    n = x.shape[0]
    rest, columns = x, []
    for k in range(n):
        column = np.where(np.arange(n) < k, lift(0, dtype=x.dtype), rest[:, k] / np.sqrt(rest[k, k]))
        columns.append(column)
        rest = rest - column[:, None] * column
    return np.stack(columns, axis=0 if upper else 1)


@stands_for(np.linalg.matrix_power)
def _matrix_power(a: Any, n: int) -> Any:
    x = lift(a)
    if n < 0:
        return _matrix_power(_inv(x), -n)
    if n == 0:
        return lift(np.eye(int(x.shape[0]), dtype=x.dtype))
    half = _matrix_power(x, n // 2) if n > 1 else None
    return x if half is None else half @ half @ x if n % 2 else half @ half


@stands_for(np.kron)
def _kron(a: Any, b: Any) -> Any:
    x, y = lift(a), lift(b)
    ndim = max(x.ndim, y.ndim)
    x, y = (each.reshape((*[1] * (ndim - each.ndim), *each.shape)) for each in (x, y))
    wide = [each for n in x.shape for each in (n, 1)]
    fine = [each for n in y.shape for each in (1, n)]
    return (x.reshape(wide) * y.reshape(fine)).reshape([m * n for m, n in zip(x.shape, y.shape, strict=True)])


@stands_for(np.cross)
def _cross(a: Any, b: Any) -> Any:
    x, y = lift(a), lift(b)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        refuse("numpy.cross of other vectors than those of three numbers in the last dim")
    turned = [(1, 2), (2, 0), (0, 1)]
    return np.stack([x[..., i] * y[..., j] - x[..., j] * y[..., i] for i, j in turned], axis=-1)
