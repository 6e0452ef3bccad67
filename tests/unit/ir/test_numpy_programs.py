"""Random NumPy programs: recorded and run they make what NumPy makes, in value, dtype and aliasing, or are refused."""

from __future__ import annotations

import os

import numpy as np
import numpy_programs
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir

MANY = int(os.environ.get("VCLUSTER_NUMPY_PROGRAMS", "5000"))
DAILY = 60
PART = 500
T = ir.TensorType


def check(first, last):
    programs = [numpy_programs.draw(seed) for seed in range(first, last)]
    refused = sum(len(numpy_programs.refusals(program)) for program in programs)
    lines = sum(len(program.lines) for program in programs)
    assert refused < 0.15 * lines, f"{refused} of {lines} lines were refused: the programs check too little"


@pytest.mark.slow
def test_random_programs_make_what_numpy_makes():
    check(0, DAILY)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-MANY // PART)))
def test_many_random_programs_make_what_numpy_makes(part):
    check(DAILY + part * PART, DAILY + min((part + 1) * PART, MANY))


# -- found by them, and named ------------------------------------------------------------------------------------------


def transposed_and_reshaped(x):
    y = x.copy()
    flat, turned, part, rows = y.T.reshape(-1), y[::-1].reshape(-1), y[:, :2].reshape(-1), y.reshape(-1)
    y += 1
    return flat, turned, part, rows


def in_columns(x):
    y = x.T * 2
    flat, raveled, row = y.reshape(-1), y.ravel(), y[0].ravel()
    y += 1
    flat[0] = 50
    return y, flat, raveled, row


def contiguous(x):
    y = x.T * 2                                 # does not lie by rows
    turned, columns, rows = np.ascontiguousarray(y), np.ascontiguousarray(x[:, :2]), np.ascontiguousarray(x[:1])
    turned += 3
    columns *= 2
    rows -= 1                                   # the only one that is a view
    y += 1
    return x, y, turned, columns, rows


def rows_at_once(x):
    return np.maximum.accumulate(x, axis=(1,)), x.mean(axis=0, dtype=np.int64, where=x > 0)


def by_steps(x):
    y = np.arange(6.0) + x[0, 0]
    z = y[::2]
    view, copy = z.reshape(1, 3), z.ravel()
    y *= 3
    return view, copy


def in_the_order_of(x):
    columns = [np.copy(x.T), np.zeros_like(x.T), x.T.astype("f4"), np.where(x.T > 1, x.T, 0), np.concatenate([x.T] * 2),
               np.ones_like(x.T, shape=(4, 2)), np.zeros_like(x.T, shape=(2, 1, 3))]
    flat = [y.reshape(-1) for y in columns]
    for y in columns:
        y += 1
    return tuple(flat)


def of_nobody_else(x):
    y = (x * 2).T
    y[0] += 1
    a, b = y[1], y[0]
    a += 5
    return y, a, b


def of_a_product(x):
    y = np.matmul(np.ones(2), x)
    y[::2] %= 2
    return y


def without_dims(x):
    y = x[0, 0].copy() + np.zeros_like(x, shape=())
    s, array = x.sum(), np.zeros_like(x, shape=())
    also_s, also_array, view = s, array, array.reshape(1)
    s += 1
    array += 2
    return y, s, also_s, array, also_array, view


def at_a_number(x):
    row = x[np.argmax(x[:, 0])]         # a number selects a view, an array a copy
    copy = x[np.array(1)]
    x += 1
    return row, copy


def on_the_diagonal(x):
    y = np.diagonal(x[:, :2])
    z = np.einsum("ij->ji", x)
    x *= 2
    return y, z


def dtypes(x):
    n = x.astype("i8")
    return (n * 2, x.astype("i1"), np.zeros_like(x, dtype="i4"), np.full_like(n, 2.5, dtype="f2"),
            np.sum(x, dtype="i8"),
            np.add(n, n, dtype="f4"), np.less(n, 2, dtype=bool), x.astype(np.result_type(n, "f4")))


def sums(x):
    n = (x * 50).astype("i8")
    return tuple(function(n, dtype=dtype) for function in (np.sum, np.prod, np.cumsum, np.mean, np.var)
                 for dtype in ("i1", "u1", "i4", "f4", "f8"))


def of_16_bits(x):
    h = np.full_like(x, 60000, dtype="f2")
    return h.mean(), h.mean(axis=0), np.mean(x.astype("f2"), dtype="f2")


def of_bools(x):
    b = x > 1
    return (b.sum(dtype=bool), b.cumsum(dtype="i1"), np.round(b), np.fabs(b), np.tril(b), b ** 2,
            np.clip(x.astype("i1"), 0.5, np.float16(1.5)), np.select([b], [x.astype("f4")], 1.5))


def into(x):
    n, s = (x * 50).astype("i1"), np.zeros_like(x, dtype="i1")
    np.sum(n, axis=0, out=s[0])
    y = x.copy()
    np.add(x, 1, out=y, where=x > 1)
    return s, y


NAMED = [transposed_and_reshaped, in_columns, contiguous, rows_at_once, by_steps, in_the_order_of, of_nobody_else,
         of_a_product, without_dims, at_a_number, on_the_diagonal, dtypes, sums, of_16_bits, of_bools, into]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", NAMED, ids=lambda program: program.__name__)
def test_numpy_copies_sees_and_converts(program):
    x = np.array([[1.5, 0.5, 3], [2, 0, 1]])
    expected = program(x.copy())
    found = ir.interpret(ir.record(program, T("f64", x.shape)), [x]).outputs
    for a, b in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert a.dtype == b.dtype
        assert_array_equal(a, b)


REFUSED = {
    "a turned einsum": (lambda y: np.einsum("ij->ji", y).__iadd__(1), "changing a view of an array in place"),
    "read only": (lambda y: np.diagonal(y).__iadd__(1), "changing what numpy.diagonal returned in place"),
    "a number": (lambda y: y.sum().__setitem__(..., 1), "changing a number of NumPy's in place"),
    "f16": (lambda y: y.astype("f16"), "the dtype 'f16', which is float128 in NumPy, cannot be recorded"),
    "byte order": (lambda y: y.astype(">f8"), "the dtype '>f8', .* programs have the byte order of the machine"),
    "complex": (lambda y: np.sum(y, dtype=complex), "the dtype complex128 cannot be recorded"),
    "unsafe": (lambda y: np.add(y, 1, dtype=int), "numpy.add cannot be recorded: .*same_kind"),
    "another dtype": (lambda y: np.mean(y, out=np.zeros_like(y, "f4", shape=())), "numpy.mean into an array of anoth"),
    "a shape": (lambda y: setattr(y, "shape", (-1,)), r"setting the shape of an array cannot be .*: write x = x.resh"),
    "a new dtype": (lambda y: setattr(y, "dtype", int), r"setting the dtype of an array cannot be .*: write x = x.ast"),
    "columns": (lambda y: y.copy("F"), "the array's copy in order 'F' cannot be recorded: it is by rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_differ_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ir.RecordError, match=message):
        ir.record(lambda x: call(x.copy()) is None or x, T("f64", (2, 3)))


def open_in_a_program(x):
    y = x[:, :2]
    flat = y.reshape(-1)            # a view for one row, else a copy
    x += 1
    return flat


def test_what_is_open_with_symbols_is_refused_at_the_change():
    B = ir.symbol("B")
    with pytest.raises(ir.RecordError, match=r"whether NumPy copies it is open here: write \.copy\(\)") as caught:
        ir.record(open_in_a_program, T("f64", (B, 3)))
    assert str(caught.value).endswith(": x += 1")
    with pytest.raises(ir.RecordError, match="an extent with symbols may be 1; give axis="):
        ir.record(np.squeeze, T("f64", (B, 1)))


def test_what_is_certain_with_symbols_is_recorded():
    B, D, H = ir.symbols("B D H")

    def program(x):
        y = x * 2
        flat, heads = y.reshape(-1), y.reshape(B, H, D // H).transpose(1, 0, 2)
        y += 1
        return flat, heads

    x = np.arange(24.0).reshape(4, 6)
    recorded = ir.record(program, T("f64", (B, D))).specialize(H=2)
    y = x * 2 + 1
    for found, expected in zip(ir.interpret(recorded, [x]).outputs, (y.ravel(), y.reshape(4, 2, 3).transpose(1, 0, 2)),
                               strict=True):
        assert_array_equal(found, expected)


def test_the_names_of_programs_stay_in_types_and_texts():
    assert T("i8", ()).dtype == np.int8 and T("i1", ()).dtype == bool and T("f16", ()).dtype == np.float16
    program = ir.record(lambda x: x.astype("i8"), T("f64", (2,)))
    assert program.outputs[0].type.dtype == np.int64
    assert "dtype = i64" in str(program) and ir.parse(str(program)) == program
    assert ir.record(lambda x: x.astype("f32"), T("f64", (2,))).outputs[0].type.dtype == np.float32    # not in NumPy
