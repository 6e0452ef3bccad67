"""Sums in a buffer: its memory is used again, the caller's arrays are not written, and no value is read too late."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, TensorSharding, ir
from parallelism.execution import Executable
from parallelism.ir.passes.interpreter import run
from parallelism.layouts import annotate
from parallelism.simulation import simulate

T = ir.TensorType
N = 96


def add_twice(buffer, x):
    buffer = ir.apply("accumulate", buffer, x)
    return ir.apply("accumulate", buffer.reshape(N // 2, 2), (x * 2).reshape(N // 2, 2))


PROGRAM = ir.record(add_twice, T("f32", (N,)), T("f32", (N,)))


def test_the_memory_of_the_buffer_holds_the_sum():
    buffer, x = np.arange(N, dtype="f4"), np.full(N, 3, "f4")
    found = ir.interpret(PROGRAM, [buffer, x])
    assert_array_equal(found.outputs[0].ravel(), np.arange(N) + 9)
    assert_array_equal(buffer, np.arange(N))                    # the caller's
    assert found.peak_bytes == ir.peak_bytes(PROGRAM) == (2 * N + N + 1) * 4        # both inputs, 2 x, and 2


def test_terms_of_16_bits_are_added_in_the_dtype_of_the_buffer():
    function = ir.record(lambda b, x: ir.apply("accumulate", b, x), T("f32", (2,)), T("f16", (2,)))
    found, = ir.interpret(function, [np.array([1, 2048], "f4"), np.array([2**-20, 1], "f2")]).outputs
    assert found.dtype == np.float32
    assert_array_equal(found, np.array([1 + 2**-20, 2049], "f4"))
    with pytest.raises(ir.RecordError, match="a buffer of int64 cannot take up terms of float64"):
        ir.record(lambda b, x: ir.apply("accumulate", b, x), T("i64", (2,)), T("f64", (2,)))


@pytest.mark.parametrize(("buffer", "terms"), [("bf16", "bf16"), ("f32", "bf16"), ("f32", "f32")])
def test_a_buffer_takes_up_terms_of_narrow_floats_in_its_own_memory(buffer, terms):
    function = ir.record(lambda b, x: ir.apply("accumulate", b, x), T(buffer, (3,)), T(terms, (3,)))
    op, = function.ops
    b, x = (np.array(values, type.dtype) for values, type in zip(([1, 2, 256], [0.5, 3, 1]), op.types, strict=True))
    whole = 257 if buffer == "f32" else 256                     # bfloat16 has eight bits: 257 rounds to even
    assert_array_equal(ir.interpret(function, [b, x]).outputs[0].astype(float), [1.5, 5, whole])
    assert_array_equal(b.astype(float), [1, 2, 256])
    out, = run(op, [b, x], in_place=True)
    assert out is b
    assert_array_equal(b.astype(float), [1.5, 5, whole])


@pytest.mark.parametrize("late", [
    lambda b, x: (ir.apply("accumulate", b, x), b + 1), lambda b, x: (ir.apply("accumulate", b, x), b),
    lambda b, x: (ir.apply("accumulate", b.reshape(2, 1), x.reshape(2, 1)), b * 2),
    lambda b, x: ir.apply("accumulate", ir.apply("accumulate", b, x), b),
])
def test_a_value_whose_memory_was_written_into_cannot_be_read(late):
    with pytest.raises(ir.VerifyError, match=r'%b is read after its memory was written into: %.* = "accumulate"'):
        ir.record(late, T("f64", (2,)), T("f64", (2,)))


def test_a_simulated_device_holds_the_buffer_once():
    program = Executable(annotate(PROGRAM, {"buffer": TensorSharding("dp")}), Mesh(dp=2))
    trace = simulate(program, "dgx-h100")
    assert trace.peaks() == {0: (3 * N // 2 + 1) * 4, 1: (3 * N // 2 + 1) * 4}
