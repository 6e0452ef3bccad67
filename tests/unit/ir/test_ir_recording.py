"""NumPy functions as programs: run, they make what NumPy makes of the same function; or they are refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir

T = ir.TensorType
RNG = np.random.default_rng(7)
X = RNG.uniform(0.5, 2, (4, 6))
Y = RNG.uniform(0.5, 2, (4, 1))
V = RNG.uniform(0.5, 2, 6)
N = RNG.integers(0, 4, (2, 3))
Z = RNG.uniform(-1, 1, (2, 5, 4, 3))
# whole numbers, so that sums of products are exact in whatever order
I, J = RNG.integers(-9, 9, (4, 6)) * 1.0, RNG.integers(-9, 9, 6) * 1.0

CALLS = {
    # operators and ufuncs
    "arithmetic": (lambda x, y: (x + y) * 2 - x / 3 + -x, X, Y),
    "scalars on the left": (lambda x: 1 - 2 / x + 3 * x, X),
    "powers": (lambda x: (x ** 2, x ** 0.5, x ** -1, x ** 3, x ** 1.5, 2 ** x), X),
    "integers": (lambda n: (n // 2, n % 3, n + 1.5, n * True, -n, n / 2, n ** 2), N),
    "comparisons": (lambda x, y: (x < y, x >= y, x == y, (x > 1) & (y > 1), ~(x > 1)), X, Y),
    "float32": (lambda x: x * 2.5 + 1 + np.float32(3), X.astype("f4")),
    "float32 with float64": (lambda x: (x * np.float64(2.5), np.float64(2.5) * x, np.float32(2.5) - x), X.astype("f4")),
    "uint8": (lambda n: n + 200, N.astype("u1")),
    "functions": (lambda x: (np.exp(x), np.log(x), np.sqrt(x), np.tanh(x), np.abs(x), np.sin(x), np.log1p(x)), X),
    "two at a time": (lambda x, y: (np.maximum(x, y), np.minimum(x, 1), np.logaddexp(x, y), np.arctan2(x, y)), X, Y),
    "an array beside": (lambda x: x + np.arange(6.0), X),
    "an array in front": (lambda x: np.arange(6.0) * x, X),
    "reduce": (lambda x: (np.add.reduce(x), np.maximum.reduce(x, axis=1)), X),
    "more functions": (lambda x: (np.exp2(x), np.log2(x), np.log10(x), np.cbrt(x), np.tan(x), np.arctan(x), np.sinh(x),
                                  np.cosh(x), np.arcsin(x / 2), np.arccos(x / 2), np.hypot(x, 2), np.trunc(x)), X),
    "rounded": (lambda x: (np.round(x), x.round(2), np.around(x * 100, -1), np.rint(x), np.fabs(-x)), X),
    "quotient and rest": (lambda x, n: (*divmod(x, 0.7), *np.divmod(n, 2), *divmod(7, n + 1)), X, N),
    "all with all": (lambda x, v: (np.multiply.outer(x, v), np.subtract.outer(v, v), np.less.outer(v, x)), X, V),
    "not a number": (lambda x: (np.nan_to_num(np.where(x > 1, x, -np.inf)), np.isfinite(np.where(x > 1, x, np.inf))),
                     X),
    "dtype": (lambda n: (np.add(n, n, dtype=np.float64), n.astype(np.float32), n.astype(np.int64)), N),
    # reductions
    "sums": (lambda x: (x.sum(), x.sum(0), x.sum(axis=-1, keepdims=True), np.sum(x, (0, 1)), x.sum(dtype="f4")), X),
    "others": (lambda x: (x.max(), x.min(1), np.prod(x, axis=0), np.amax(x, 0, keepdims=True)), X),
    "of integers": (lambda n: (n.sum(), n.astype(np.int32).sum(), (n > 1).sum(), np.mean(n)), N),
    "means": (lambda x: (x.mean(), np.mean(x, axis=0), x.mean(axis=(0, 1), keepdims=True)), X),
    "spread": (lambda x: (np.var(x, axis=1), x.std(axis=0)), X),
    "which": (lambda x: (x.argmax(), np.argmax(x, axis=1), np.argmin(x, 0)), X),
    "where=": (lambda x: (np.sum(x, where=x > 1), np.prod(x, axis=0, where=x > 1), np.max(x, where=x > 1, initial=0),
                          np.any(x > 1, where=x < 1.5), np.all(x > 0, axis=1, where=x > 1)), I),
    "initial=": (lambda x: (np.max(x, axis=1, initial=1.5), np.sum(x, initial=3), x.min(initial=0.7)), I),
    "which, with dims": (lambda x: (np.argmax(x, axis=1, keepdims=True), x.argmin(keepdims=True)), X),
    "weighted": (lambda x: (np.average(x), np.average(x, axis=0), np.average(x, axis=1, weights=x)), I),
    "how many": (lambda x: (np.count_nonzero(x > 1), np.count_nonzero(x, axis=0), np.ptp(x, axis=1)), I),
    "in order": (lambda x: (np.sort(x), np.sort(x, axis=0), np.sort(x, None), np.argsort(x, axis=1), x.argsort(0),
                            np.argsort(-x, axis=None)), X),
    "the best": (lambda x: np.take_along_axis(x, np.argsort(-x, axis=1, kind="stable")[:, :2], axis=1), X),
    "equal ones in order": (lambda x: np.argsort(np.floor(x), axis=1, kind="stable"), X),
    "truth": (lambda x: (np.any(x > 1), (x > 1).all(axis=0)), X),
    "running": (lambda x: (np.cumsum(x), x.cumsum(axis=1), np.add.accumulate(x), np.add.accumulate(x, axis=1)), X),
    "differences": (lambda x: (np.diff(x), np.diff(x, axis=0), np.diff(x, n=2), np.diff(x > 1)), X),
    # products
    "matmul": (lambda x, v: (x @ x.T, x @ v, v @ x.T, v @ v, np.matmul(x[None], x.T)), I, J),
    "dot": (lambda x, v: (np.dot(x, v), np.dot(v, 2.0), x.dot(x.T), np.outer(v, v)), I, J),
    "more products": (lambda x, v: (np.tensordot(x, x, axes=([0], [0])), np.tensordot(x, v, 1), np.tensordot(x, x),
                                    np.inner(x, x), np.inner(x, v), np.vdot(x, x), np.vecdot(x, v)), I, J),
    "batches": (lambda z: (z @ np.swapaxes(z, -1, -2), np.matmul(z, np.ones(3)), np.ones((2, 1, 7, 4)) @ z), Z.round()),
    "linalg": (lambda x: (np.linalg.norm(x), np.linalg.norm(x, axis=1, keepdims=True), np.linalg.norm(x[0], 2),
                          np.linalg.matmul(x, x.T), np.linalg.multi_dot([x, x.T, x])), np.full((4, 4), 2.0)),
    "einsum": (lambda x, v: (np.einsum("ij,j->i", x, v), np.einsum("ij,kj", x, x), np.einsum("...i,...i->...", x, x)),
               I, J),
    # shapes
    "reshape": (lambda x: (x.reshape(2, 12), x.reshape((-1, 3)), x.reshape(-1, order="C"), x.flatten("C"),
                           np.reshape(x, -1), x.ravel(), x[0].reshape(())
                           if x.shape == (1,) else x), X),
    "transpose": (lambda z: (z.T, z.transpose(1, 0, 3, 2), np.swapaxes(z, 0, 2), np.moveaxis(z, 0, -1),
                             np.moveaxis(z, (0, 1), (2, 0)), np.matrix_transpose(z)), Z),
    "ones": (lambda x: (np.expand_dims(x, 1), np.expand_dims(x, (0, -1)), np.squeeze(x[:, None]), x[..., None]), X),
    "broadcast": (lambda y: np.broadcast_to(y, (3, 4, 6)), Y),
    "stacked": (lambda x, y: (np.vstack([x, x[0]]), np.hstack([x, y]), np.hstack([x[0], x[1]]), np.append(x, y, axis=1),
                              np.append(x, 1.5), np.column_stack([x[:, 0], x, y]), np.concatenate([x, np.eye(2, 6)])),
                X, Y),
    "joined": (lambda x, y: (np.concatenate([x, y], axis=1), np.stack([x, x * 2], 1), np.concatenate([x, x], None)),
               X, Y),
    "cut": (lambda x: (*np.split(x, 2), *np.split(x, [1, 4], axis=1)), X),
    "cut unevenly": (lambda x: (*np.array_split(x, 3), *np.array_split(x, [1, 2], 1), *np.hsplit(x, 3),
                                *np.vsplit(x, [1]), *np.hsplit(x[0], 2)), X),
    "repeated": (lambda x: (np.repeat(x, 2), x.repeat(3, axis=1), np.tile(x, 2), np.tile(x, (2, 1, 3)), np.tile(x, 0)),
                 X),
    "turned over": (lambda x: (np.fliplr(x), np.flipud(x), np.rot90(x), np.rot90(x, 3), np.roll(x, 3),
                               np.roll(x, (1, -2), axis=(0, 1)), np.roll(x, 1, axis=(0, 1)), np.rollaxis(x, 1),
                               x.mT), X),
    "at least": (lambda x: (np.atleast_2d(x[0]), np.atleast_1d(x.sum()), np.atleast_2d(x)), X),
    "broadcast together": (lambda x, y: tuple(np.broadcast_arrays(x, y, 1.0)), X, Y),
    "turned": (lambda x: (np.flip(x, 0), np.flip(x), x[::-1], np.roll(x, 2, axis=1), np.roll(x, -1, 0)), X),
    "padded": (lambda x: (np.pad(x, 1), np.pad(x, ((0, 2), (3, 0)))), X),
    "padded otherwise": (lambda x: (np.pad(x, 1, constant_values=7), np.pad(x, ((0, 2), (3, 0)), mode="edge"),
                                    np.pad(x, 2, mode="wrap"), np.pad(x, (0, 3), mode="reflect")), X),
    "windows": (lambda z: np.lib.stride_tricks.sliding_window_view(z, (3, 2), axis=(1, 2)), Z),
    "triangles": (lambda x: (np.tril(x), np.tril(x, -1), np.triu(x, 1)), X),
    "sizes": (lambda x: x * len(x) + x.shape[1] + x.ndim + x.size + np.size(x) + np.shape(x)[0], X),
    # elements
    "diagonals": (lambda x: (np.diagonal(x), x.trace(), np.diag(x), np.diag(x[0]), x.diagonal()), X),
    "backwards": (lambda x: (x[:, ::-2], x[-1:0:-1], x[2:2:-1], x[::-1, 4:1:-1], x[3::-3]), X),
    "several arrays": (lambda z, n: (z[n % 2, n], z[np.arange(2), [1, 4]], z[:, [0, -1], [[1], [2]]], z[n % 2, :, n],
                                     z[0, :, [1, 2]], z[0, [1, 2]], z[[0, 1], 1:3, 2], z[n % 2, :, None, n]), Z, N),
    "one of each row": (lambda x: (x[np.arange(4), x.argmax(axis=1)], x[np.arange(4), [5, 0, -1, 2]]), X),
    "one of each row of rows": (lambda x: (
        x.reshape(2, 2, 6)[np.arange(2)[:, None], np.arange(2), [[5, 0], [-1, 2]]],
        x.reshape(2, 2, 6)[[[0], [1]], [[0, 1]], x.reshape(2, 2, 6).argmax(axis=2)],
        x.reshape(2, 2, 6)[np.arange(2)[::-1, None], np.arange(2), [[5, 0], [-1, 2]]],
        x.reshape(2, 2, 6)[np.arange(2), np.arange(2)[:, None], [[5, 0], [-1, 2]]]), X),
    "a grid": (lambda x: x[np.ix_([0, 3], [5, 1, 1])], X),
    "bools that are known": (lambda x: (x[np.array([True, False, True, True])], x[:, np.arange(6) % 2 == 0],
                                        x[[True, False, False, True]], x[np.eye(4, 6) > 0], x[[False] * 4],
                                        x[..., np.arange(6) > 3], np.stack([x, x])[..., np.eye(4, 6) > 0]), X),
    "indexing": (lambda z: (z[0], z[-1, 2], z[:, 1:3], z[..., ::2], z[1, :, None, -2:], z[:, 4:1]), Z),
    "by integers": (lambda x, n: (x[n], x[:, n], np.take(x, n, axis=1), np.take(x, n), x[[0, 2]]), X, N),
    "along": (lambda x: np.take_along_axis(x, np.argmax(x, axis=1)[:, None], 1), X),
    "where": (lambda x: (np.where(x > 1, x, 0), np.where(x > 1, 1.5, x), np.clip(x, 0.8, 1.2), np.clip(x, None, 1)), X),
    "from below": (lambda x: np.clip(x, a_min=1, a_max=None), X),
    "like": (lambda x: (np.zeros_like(x), np.ones_like(x, dtype=np.int64), +x, np.full_like(x, 3),
                        np.full_like(x, x.max()), np.zeros_like(x, shape=(2,)), np.empty_like(x).shape[0] * x), X),
    "copies": (lambda x: (x.copy(), np.copy(x), x.flatten(), x.astype(np.float64)), X),
    "chosen": (lambda x: np.select([x > 1.5, x > 1], [x, -x], 7.0), X),
    "asked": (lambda x: x.astype(np.result_type(x, np.int64)) + x.itemsize + x.nbytes + np.iscomplexobj(x), X),
    "masked": (lambda x: np.where(np.tri(4, 6) > 0, x, -np.inf), X),
    "noise of its own": (lambda x: x + np.random.default_rng(0).normal(size=(4, 6)), X),
    "softmax by hand": (lambda x: np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(
        -1, keepdims=True), X),
    "a loop": (lambda x: sum(row * i for i, row in enumerate(x)), X),
    "nothing of the input": (lambda x: np.arange(3.0), X),
}


@pytest.mark.sampled(21)
@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_function_makes_what_numpy_makes(name):
    call, *arrays = CALLS[name]
    function = ir.record(call, *(T(x.dtype, x.shape) for x in arrays), name="call")
    assert ir.parse(str(function)) == function
    expected = call(*arrays)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = ir.interpret(function, arrays).outputs
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == np.asarray(b).dtype
        assert_array_equal(a, b)


def test_arguments_and_results_may_be_nested():
    layer = {"w": T("f64", (3, 2)), "b": T("f64", (2,))}

    def model(params, x, *rest, scale=2):
        first, (second,) = params
        return {"out": (x @ first["w"] + first["b"]) * scale, "more": [second, rest[0]]}

    function = ir.record(model, [layer, (T("f64", (4,)),)], T("f64", (5, 3)), 7.0)
    assert [v.name for v in function.inputs] == ["params.0.w", "params.0.b", "params.1.0", "x"]
    assert [v.type.shape for v in function.outputs] == [(5, 2), (4,), ()]
    assert function.name == "model"


def test_symbols_go_through_numpy():
    B, D, H = ir.symbols("B D H")

    def heads(x, w):
        batch, features = x.shape
        split = (x @ w).reshape(batch, H, features // H)
        return split.transpose(1, 0, 2), split.mean(), x[1:], x[:, -1], np.split(x, 2, axis=1)[1], x.reshape(-1)

    function = ir.record(heads, T("f64", (B, D)), T("f64", (D, D)))
    assert [str(v.type) for v in function.outputs] == [
        "tensor<HxBx(D/H)xf64>", "tensor<f64>", "tensor<(B-1)xDxf64>", "tensor<Bxf64>", "tensor<Bx(D/2)xf64>",
        "tensor<(B*D)xf64>",
    ]
    x, w = RNG.random((5, 6)), RNG.random((6, 6))
    numbers = function.specialize(H=3)
    found = ir.interpret(numbers, [x, w]).outputs
    split = (x @ w).reshape(5, 3, 2)
    for a, b in zip(found, (split.transpose(1, 0, 2), split.mean(), x[1:], x[:, -1], x[:, 3:], x.ravel()), strict=True):
        assert_array_equal(a, b)


def test_constants_are_kept_once_and_large_arrays_are_inputs():
    function = ir.record(lambda x: (x + 1) * (x + 1) + True + np.ones(10_000)[0], T("f64", (3,)))
    constants = [op.attributes for op in function.ops if op.kind == "constant"]
    assert sorted(str(dict(c)["dtype"]) for c in constants) == ["float64"]
    assert ir.record(lambda x: x + np.ones(10_000), T("f64", ())).ops[0]["value"] == 1.0
    with pytest.raises(ir.RecordError, match="pass it as an input; a constant has at most 4096 elements"):
        ir.record(lambda x: x + np.arange(5000.0), T("f64", ()))


def test_operators_run_at_once_outside_of_a_recording():
    assert_array_equal(ir.apply("softmax", np.zeros((2, 4)), axis=1), np.full((2, 4), 0.25))
    assert_array_equal(ir.apply("iota", dim=0, shape=[3], starts=[2], dtype=np.dtype(int)), [2, 3, 4])


@pytest.mark.parametrize(("name", "write"), [
    ("erf", ": write ir.apply('erf', x)"), ("expit", ": write ir.apply('sigmoid', x)"), ("j0", ""),
])
def test_a_function_of_scipy_is_not_called_one_of_numpy(name, write):
    special = pytest.importorskip("scipy.special")
    with pytest.raises(ir.RecordError) as error:
        ir.record(getattr(special, name), ir.TensorType("f64", (3,)))
    told = f"{name}, which is no function of NumPy's, cannot be recorded{write}"
    assert str(error.value).splitlines()[0] == told


# -- what cannot be recorded -------------------------------------------------------------------------------------------


def decides(x):
    return x if x.sum() > 0 else -x


REFUSED = {
    "svd": (lambda x: np.linalg.svd(x), "numpy.linalg.svd cannot be recorded"),
    "method": (lambda x: x.partition(2), "the array's partition cannot be recorded"),
    "ufunc": (lambda x: np.spacing(x), "numpy.spacing cannot be recorded"),
    "accumulate": (lambda x: np.divide.accumulate(x), "numpy.divide.accumulate cannot be recorded"),
    "reduceat": (lambda x: np.add.reduceat(x, [0, 2]), "numpy.add.reduceat cannot be recorded"),
    "out": (lambda x: np.exp(x, out=np.zeros((4, 6))), r"numpy.exp into an array of numbers \(out=.*write x = x \+ y"),
    "out of sum": (lambda x: np.sum(x, axis=0, out=np.zeros(6)), r"numpy.sum into an array of numbers \(out="),
    "third": (lambda x: np.sum(x, 0, None, x[0]), "numpy.sum into an existing array .*: pass it by keyword"),
    "inverse": (lambda x: np.linalg.svd(x[:, :4]), "numpy.linalg.svd cannot be recorded"),
    "spectral": (lambda x: np.linalg.norm(x, 2), "numpy.linalg.norm of order 2 of a matrix cannot .*: its orders"),
    "nonzero": (lambda x: np.nonzero(x), "numpy.nonzero cannot be recorded: the shape of its result depends on "),
    "unique": (lambda x: np.unique(x), "numpy.unique cannot be recorded: the shape of its result depends on "),
    "allclose": (lambda x: np.allclose(x, 1), "numpy.allclose cannot be recorded: a decision by the values of an arr"),
    "fft": (lambda x: np.fft.fft(x), "numpy.fft.fft cannot be recorded"),
    "round": (lambda x: round(x.sum()), r"round\(\) of an array cannot be recorded: numpy.round can be"),
    "complex()": (lambda x: complex(x.sum()), r"complex\(\) of an array"),
    "as text": (lambda x: f"{x.sum():.3f}", r"the values of an array as text \(.3f\) cannot be recorded"),
    "tolist": (lambda x: x.tolist(), "the array's tolist cannot be recorded"),
    "view": (lambda x: x.view(np.int64), "the array's view cannot be recorded"),
    "vectorize": (lambda x: np.vectorize(math.exp)(x), "the conversion of a recorded array"),
    "apply_along_axis": (lambda x: np.apply_along_axis(sum, 1, x), "numpy.apply_along_axis cannot be recorded"),
    "a table of numbers": (lambda x: np.eye(6)[x.argmax(axis=1)], r"the conversion of a recorded array .* "
                                                                  r"ir.apply\('take', numbers"),
    "float32": (lambda x: np.float32(x), "the conversion of a recorded array .* change a dtype with astype"),
    "strides": (lambda x: np.lib.stride_tricks.as_strided(x, (2, 2), (8, 8)), "the conversion of a recorded array"),
    "repeats": (lambda x: np.repeat(x, x.astype(int)[0], axis=1), "numpy.repeat by recorded counts cannot .*: the shape"),
    "max": (lambda x: max(x[0, 0], 1), "a decision by the values of an array"),
    "in": (lambda x: 1.0 in x, "a decision by the values of an array"),
    "a slice by numbers": (lambda x: x[:x.argmax()], "an array as an index or a count"),
    "outside": (lambda x: x[np.array([True, False])], r"indexing an array of shape \(4, 6\) by bools of shape \(2,\)"),
    "by floats": (lambda x: x[np.array([0.5])], "indexing by an array of float64"),
    "by text": (lambda x: x["a"], "indexing by 'a'"),
    "where=": (lambda x: np.exp(x, where=x > 0), "numpy.exp with where= cannot"),
    "where of max": (lambda x: np.max(x, where=x > 1), "numpy.max with where= and without initial= cannot"),
    "writing": (lambda x: np.zeros((4, 6)).__setitem__(0, x[0]), r"the conversion of a recorded array .*write into "
                                                                 r"numpy.zeros_like\(x\)"),
    "if": (decides, r"a decision by the values of an array \(if, while, and, or, not\)"),
    "float": (lambda x: float(x.sum()), r"float\(\) of an array"),
    "math": (lambda x: math.exp(x.sum()), r"float\(\) of an array .*: functions of math take one number; those of"),
    "int": (lambda x: int(x.sum()), r"int\(\) of an array"),
    "range": (lambda x: list(range(x.astype(int)[0, 0])), "an array as an index or a count"),
    "item": (lambda x: x.sum().item(), r"item\(\) of an array"),
    "an index of a plain array": (lambda x: np.arange(3.0)[x.argmax()], "the conversion of a recorded array"),
    "mask": (lambda x: x[x > 1], "indexing by bools cannot be recorded: the shape of the result depends"),
    "a mask of its own": (lambda x: x[x > x.mean()] + 1, "indexing by bools .* use numpy.where"),
    "where of one": (lambda x: np.where(x > 1), "numpy.where with a condition only"),
    "shapes": (lambda x: x @ x, r"the operator matmul cannot be recorded: matmul: dim k of mk,kn->mn is 6 in input 0, "
               r"of shape \(4, 6\), and 4 in input 1"),
    "axis": (lambda x: x.sum(axis=2), "numpy.sum cannot be recorded: axis 2 is out of bounds for 2 dims"),
    "reshape": (lambda x: x.reshape(5, 5), r"shape \(4, 6\) has 24 elements, \(5, 5\) has 25"),
    "complex": (lambda x: x * 1j, "numpy.multiply cannot be recorded|an array of complex128 as a constant"),
    "objects": (lambda x: x + "a", "cannot be recorded"),
    "nothing": (lambda x: None, "a recorded function must return arrays, .*, got None"),
    "overflow": (lambda x: x.astype(np.uint8) + 300, "300 out of bounds for uint8"),
    "columns": (lambda x: x.reshape((-1,), order="F"), "numpy.reshape in order 'F' cannot .*: it is by rows"),
    "dtype": (lambda x: ~x, "numpy.invert cannot be recorded: .*not supported for the input types"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ir.RecordError) as caught:
        ir.record(call, T("f64", (4, 6)))
    assert re.search(message, str(caught.value).splitlines()[0])    # the last line is that of this table


def test_the_error_names_the_line():
    with pytest.raises(ir.RecordError) as caught:
        ir.record(decides, T("f64", (4, 6)))
    place, code = str(caught.value).splitlines()[-1].rsplit(": ", 1)
    assert place.strip() == f"{__file__}:{decides.__code__.co_firstlineno + 1}"
    assert code == "return x if x.sum() > 0 else -x"


def test_a_symbol_where_a_number_is_needed_says_so():
    B = ir.symbol("B")
    with pytest.raises(ir.RecordError, match=r"len\(\) of an array of shape \(B,\)"):
        ir.record(lambda x: len(x), T("f64", (B,)))


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: np.zeros(x.shape), r"B has symbols and is not a number: .*; or write numpy.zeros_like\(x, dtype"),
    (lambda x: x + np.full((x.shape[0], 6), 2.0), r"or write numpy.full_like\(x, value, dtype=..., shape=...\)"),
    (lambda x: x * np.arange(x.shape[0]), r"or write ir.apply\('iota', dim=0, shape=\(n,\), starts=\(0,\), dtype="),
    (lambda x: x / np.sqrt(x.shape[0]), r"numpy.sqrt\(B\) needs a number, and B has symbols: give .* specialize\(B="),
    (lambda x: x if x.shape[0] - 1 > 2 else -x, r"\(B-1\) > 2 needs a number, and B-1 has symbols"),
    (lambda x: x * max(x.shape[0], 3), "B < 3 needs a number"),
    (lambda x: x[:min(x.shape[0], 2)], "B > 2 needs a number"),
    (lambda x: x * x.shape[0] ** 0.5, r"B\*\*0.5 needs a number"),
    (lambda x: x * 2 ** x.shape[0], r"2\*\*B needs a number"),
    (lambda x: x * (1.0 / x.shape[0]), "1.0 / B needs a number"),
    (lambda x: x * (x.shape[0] * np.float64(0.5)), r"B \* 0.5 needs a number"),
    (lambda x: x if x.shape[0] % 2 else -x, "B % 2 needs a number"),
])
def test_code_that_needs_the_number_of_a_symbol_is_refused_at_its_line(call, message):
    with pytest.raises(ir.RecordError) as caught:
        ir.record(call, T("f64", (ir.symbol("B"),)))
    text, line = str(caught.value).splitlines()
    assert re.search(message, text)
    assert line.startswith(f"  {__file__}:{call.__code__.co_firstlineno}: ")


@pytest.mark.parametrize(("call", "rows", "message"), [
    (lambda x: x.max(axis=0), 0, "@call cannot have B=0: max: an empty array has no largest or smallest element"),
    (lambda x: np.lib.stride_tricks.sliding_window_view(x, 3), 2, "@call cannot have B=2: windows: windows of 3"),
    (lambda x: x[:x.shape[0] - 2], 1, "@call cannot have B=1: an extent must be at least 0"),
    (lambda x: x[::2], 3, "B/2 must be whole; with B=3 it is 3/2"),
])
def test_numbers_that_a_program_cannot_have_are_refused_without_its_own_names(call, rows, message):
    function = ir.record(call, T("f64", (ir.symbol("B"),)), name="call")
    with pytest.raises(ValueError, match=message):
        ir.interpret(function, [np.zeros(rows)])
    with pytest.raises(ValueError, match=message):
        function.specialize(B=rows)


def test_an_array_may_be_made_in_a_shape_of_symbols():
    B = ir.symbol("B")
    function = ir.record(lambda x: np.zeros_like(x, dtype=np.float64, shape=(x.shape[0], 2)) + 1, T("f32", (B, 6)))
    assert str(function.outputs[0].type) == "tensor<Bx2xf64>"


def test_symbols_are_numbers_beside_arrays():
    x = np.arange(1.0, 5.0)

    def each(x):
        n = x.shape[0]
        return x < n, n <= x, n % x, n ** x, x ** n ** 2

    program = ir.record(each, T("f64", (ir.symbol("B"),)))
    for found, expected in zip(ir.interpret(program, [x]).outputs, each(x), strict=True):
        assert_array_equal(found, expected)


def test_arrays_of_two_recordings_do_not_mix():
    kept = []
    ir.record(lambda x: kept.append(x) or x, T("f64", ()))
    with pytest.raises(ir.RecordError, match="an array that belongs to another recording"):
        ir.record(lambda x: x + kept[0], T("f64", ()))


def test_one_of_each_of_a_symbolic_number_of_rows_is_picked_row_by_row():
    rows, = ir.symbols("B")

    def count(n):
        return ir.apply("iota", dim=0, shape=(n,), starts=(0,), dtype=np.dtype("int64"))

    def picked(x, y, i, j):
        return x[count(x.shape[0]), i], y[count(x.shape[0])[:, None], np.arange(2), j]

    types = T("f64", (rows, 5)), T("f64", (rows, 2, 5)), T("i64", (rows,)), T("i64", (rows, 2))
    function = ir.record(picked, *types)
    assert [op.kind for op in function.ops].count("take_along") == 2 and "take" not in {op.kind for op in function.ops}
    rng = np.random.default_rng(0)
    x, y, i, j = rng.random((3, 5)), rng.random((3, 2, 5)), rng.integers(-5, 5, 3), rng.integers(-5, 5, (3, 2))
    first, second = ir.interpret(function, [x, y, i, j]).outputs
    np.testing.assert_array_equal(first, x[np.arange(3), i])
    np.testing.assert_array_equal(second, y[np.arange(3)[:, None], np.arange(2), j])
