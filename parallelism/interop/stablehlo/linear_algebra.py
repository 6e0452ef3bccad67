"""What factors and triangular systems of matrices mean: their steps are unrolled, for matrices of a few rows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from parallelism.interop.folding import traced
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
