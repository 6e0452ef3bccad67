"""NumPy's functions of nan, of quantiles, and linear algebra: what is recorded gives NumPy's numbers and dtype."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from parallelism import ir
from parallelism.ir import RecordError

RNG = np.random.default_rng(2)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
HOLES = X.copy()
HOLES[0, 1, :3] = np.nan
HOLES[1, :, 2] = np.nan
EDGES = np.array([[0, -np.inf, 2], [np.inf, np.nan, -1]])
M, R = RNG.normal(size=(4, 4)), RNG.normal(size=(4, 3))
SWAPPED = np.array([[0.0, 2, 1], [3, 0, 1], [1, 1, 0]])
I = np.arange(12).reshape(3, 4)
CALLS = {
    "isinf": (np.isinf, EDGES),
    "isinf of integers": (np.isinf, I),
    "isposinf": (np.isposinf, EDGES),
    "isneginf": (np.isneginf, EDGES),
    "nansum": (np.nansum, HOLES),
    "nansum along": (lambda x: np.nansum(x, axis=(0, 2)), HOLES),
    "nanprod": (lambda x: np.nanprod(x, axis=1, keepdims=True), HOLES),
    "nanmax": (lambda x: np.nanmax(x, axis=1), HOLES),
    "nanmin of nothing": (lambda x: np.nanmin(x, axis=0), HOLES[1:2]),
    "nanmax of integers": (np.nanmax, I),
    "nanmean": (lambda x: np.nanmean(x, axis=2), HOLES),
    "nanmean of integers": (np.nanmean, I),
    "nanvar": (lambda x: np.nanvar(x, axis=0, ddof=1), HOLES),
    "nanstd": (np.nanstd, HOLES),
    "cumprod": (lambda x: np.cumprod(x, axis=1), X),
    "cumprod of all": (np.cumprod, X[:, :2, :2]),
    "cumprod of small integers": (lambda x: np.cumprod(x, axis=0), I.astype(np.int16)),
    "cumprod of one": (np.cumprod, X[0, 0, :1]),
    "median": (lambda x: np.median(x, axis=1), X),
    "median of an odd number": (lambda x: np.median(x, axis=2, keepdims=True), X),
    "median of two dims": (lambda x: np.median(x, axis=(0, 2)), X),
    "median of all": (np.median, X),
    "median with nan": (lambda x: np.median(x, axis=0), HOLES),
    "median of integers": (lambda x: np.median(x, axis=0), I),
    "quantile": (lambda x: np.quantile(x, 0.3, axis=1), X),
    "quantile 1": (lambda x: np.quantile(x, 1, axis=1), X),
    "percentile": (lambda x: np.percentile(x, 62.5, axis=2), X),
    "any of nothing": (lambda x: np.any(x, axis=0), np.zeros((0, 3))),
    "all of nothing": (lambda x: np.all(x, keepdims=True), np.zeros((2, 0), np.int32)),
    "largest of nothing": (lambda x: np.max(x, axis=0, initial=2), np.zeros((0, 3))),
    "smallest of nothing": (lambda x: np.min(x, axis=(0, 2), initial=2, keepdims=True), np.zeros((0, 3, 2), np.float32)),
    "roll of nothing": (lambda x: np.roll(x, -2, axis=1), np.zeros((3, 0))),
    "roll of nothing in all": (lambda x: np.roll(x, 5), np.zeros((0, 2))),
    "heaviside": (lambda x: np.heaviside(x, 0.5), EDGES),
    "trapezoid": (lambda x: np.trapezoid(x, dx=0.5, axis=1), X),
    "solve": (np.linalg.solve, M, R),
    "solve of a vector": (np.linalg.solve, M, R[:, 0]),
    "inv": (np.linalg.inv, M),
    "inv with zeros on the diagonal": (np.linalg.inv, SWAPPED),
    "det": (np.linalg.det, M),
    "det of swaps": (np.linalg.det, SWAPPED),
    "det of one": (np.linalg.det, M[:1, :1]),
    "inv of float32": (np.linalg.inv, M.astype(np.float32)),
    "cholesky": (np.linalg.cholesky, M @ M.T + np.eye(4)),
    "matrix_power": (lambda x: np.linalg.matrix_power(x, 5), M),
    "matrix_power 0": (lambda x: np.linalg.matrix_power(x, 0), M),
    "matrix_power -2": (lambda x: np.linalg.matrix_power(x, -2), M),
    "kron": (np.kron, R, M[:2]),
    "kron of a vector": (np.kron, R, M[0]),
    "cross": (np.cross, R, R[::-1].copy()),
}


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_recorded_and_gives_the_numbers_of_numpy(name):
    function, *arrays = CALLS[name]
    program = ir.record(lambda *x: function(*x), *(ir.TensorType(x.dtype, x.shape) for x in arrays))
    found, = ir.interpret(program, arrays).outputs
    expected = np.asarray(function(*arrays))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert_allclose(found, expected, rtol=2e-4 if expected.dtype == np.float32 else 1e-9, atol=1e-12)


def test_the_slope_of_a_determinant_is_its_inverse():
    program = ir.gradient(ir.record(np.linalg.det, ir.TensorType("f8", (4, 4))))
    slope, = ir.interpret(program, [M]).outputs
    assert_allclose(slope, np.linalg.det(M) * np.linalg.inv(M).T, rtol=1e-9)


@pytest.mark.parametrize(("function", "message"), [
    (lambda x: np.quantile(x, 0.1, method="hazen"), "numpy.quantile by the method 'hazen'.*the methods are linear, lower"),
    (lambda x: np.quantile(x, x[0, 0]), "numpy.quantile of recorded quantiles"),
    (lambda x: np.linalg.inv(x), r"numpy.linalg.inv of shape \[3, 4\].*square matrices of at most 64 rows"),
    (lambda x: np.gradient(x, edge_order=2), "numpy.gradient with edge_order=2"),
    (lambda x: np.cross(x, x), "numpy.cross of other vectors than those of three numbers"),
])
def test_what_is_not_recorded_is_refused_with_what_works(function, message):
    with pytest.raises(RecordError, match=message):
        ir.record(function, ir.TensorType("f8", (3, 4)))
