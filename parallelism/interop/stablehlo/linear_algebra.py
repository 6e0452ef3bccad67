"""What factors and triangular systems of matrices mean: their steps are unrolled, for matrices of a few rows.

And what products of groups of rows mean, ``jax.lax.ragged_dot``: see `parallelism.interop.expert_rows.groups`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.expert_rows.groups import Groups
from parallelism.interop.folding import convert, emit, traced, whole
from parallelism.interop.moving_elements import transposed
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning

MOST_ROWS = 64
CUSTOM_CALLS = re.compile(r"lapack_[sd](potrf|trsm)_ffi")
"""The calls by which JAX has LAPACK factor a matrix and solve a triangular system."""


def lapack(node: Node, x: list[Any]) -> Any:
    """What a custom call of LAPACK returns.  Its options are letters, as U for the upper triangle."""
    given = node.attributes.get("mhlo.backend_config")
    if not isinstance(given, dict) or not all(
        type(code) is int and 0 < code < 128 for code in given.values()
    ):
        raise node.unsupported("a custom call of LAPACK without its options is not supported")
    options = {name: chr(code) for name, code in given.items()}
    target = str(node.attributes["call_target_name"])
    a = _matrix(node, x[0])
    if "potrf" in target:
        return [_cholesky(a, lower=options.get("uplo") == "L"), np.zeros(a.shape[:-2], np.int32)]
    return _solved(
        a,
        traced(x[1]),
        left=options.get("side") == "L",
        lower=options.get("uplo") == "L",
        turned=options.get("trans_x") != "N",
        unit=options.get("diag") == "U",
    )


def _matrix(node: Node, x: Any) -> Any:
    a: Any = traced(x)
    rows = a.shape[-1]
    if not isinstance(rows, int) or rows > MOST_ROWS:
        raise node.unsupported(f"it is unrolled, for matrices of at most {MOST_ROWS} rows, got {rows}")
    return a


@meaning("stablehlo.cholesky")
def _factor(reader: Reader, node: Node, x: list[Any]) -> Any:
    return _cholesky(_matrix(node, x[0]), lower=bool(node.attributes.get("lower", False)))


def _cholesky(a: Any, *, lower: bool) -> Any:
    """The factor in one triangle, from the same triangle of the matrix; zeros in the other."""
    turned = a if lower else np.matrix_transpose(a)
    found = np.linalg.cholesky(turned)
    return found if lower else np.matrix_transpose(found)


@meaning("stablehlo.triangular_solve")
def _triangular(reader: Reader, node: Node, x: list[Any]) -> Any:
    given = node.attributes
    return _solved(
        _matrix(node, x[0]),
        traced(x[1]),
        left=bool(given.get("left_side", False)),
        lower=bool(given.get("lower", False)),
        turned="NO_TRANSPOSE" not in str(given.get("transpose_a", "NO_TRANSPOSE")),
        unit=bool(given.get("unit_diagonal", False)),
    )


def _solved(a: Any, b: Any, *, left: bool, lower: bool, turned: bool, unit: bool) -> Any:
    """x of op(a) x = b, or of x op(a) = b; op transposes if it is ``turned``.

    One row of x after the other is known, and taken from the rows that are left.
    """
    if turned == left:
        a, lower = np.matrix_transpose(a), not lower
    rest = b if left else np.matrix_transpose(b)
    n = a.shape[-1]
    places = np.arange(n)
    rows: list[Any] = [None] * n
    for k in range(n) if lower else reversed(range(n)):
        row = rest[..., k, :] if unit else rest[..., k, :] / a[..., k, k][..., None]
        rows[k] = row
        later = places > k if lower else places < k
        column = np.where(later, a[..., :, k], np.zeros((), a.dtype))
        rest = rest - column[..., :, None] * row[..., None, :]
    found = np.stack(rows, axis=-2)
    return found if left else np.matrix_transpose(found)


# -- products of groups of rows ----------------------------------------------------------------------------------------

GROUPED = "vcluster.ragged_dot"
"""The custom call as which a ``jax.lax.ragged_dot`` is lowered here; JAX's own lowering for CPUs multiplies all rows with
all matrices."""
DIMS = "vcluster.dims"
"""Its attribute with the lists of dims of `Grouped.of`."""


class Grouped(NamedTuple):
    """The dims of a product of groups of rows: those that are summed, that of the rows, and that of the groups."""

    left: int
    right: int
    rows: int
    groups: int | None
    """None: the rows are summed, and the groups are those of the result."""

    @classmethod
    def of(cls, dims: Sequence[Sequence[int]]) -> Grouped | None:
        """Of the six lists of dims of ``chlo.ragged_dot``; None for a product with batches, or of several dims."""
        if len(dims) != 6:
            return None
        left_batch, right_batch, left, right, rows, groups = [[int(d) for d in each] for each in dims]
        if left_batch or right_batch or not len(left) == len(right) == len(rows) == 1 or len(groups) > 1:
            return None
        if groups:
            return cls(left[0], right[0], rows[0], groups[0]) if rows != left else None
        return cls(left[0], right[0], rows[0], None) if rows == left else None


def grouped_product(node: Node, x: list[Any], dims: Grouped) -> Any:
    """The product of each row ``(n, k)`` with the matrix of its group, ``(e, k, f)``; or for each group the product of its
    rows with those of another array, ``(n, f)``.  Rows behind the last group give zeros, and add nothing."""
    wanted = node.type().dtype
    left, right, sizes = whole(convert(x[0], wanted)), whole(convert(x[1], wanted)), whole(x[2])
    groups = Groups(emit("cumsum", sizes, axis=0), left.shape[dims.rows])
    own = whole(transposed(left, (dims.rows, 1 - dims.rows)))
    if dims.groups is None:
        return groups.products(own, whole(transposed(right, (dims.right, 1 - dims.right))))
    (free,) = {0, 1, 2} - {dims.right, dims.groups}
    return groups.multiplied(own, whole(transposed(right, (dims.groups, dims.right, free))))
