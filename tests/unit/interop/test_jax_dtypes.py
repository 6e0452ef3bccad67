"""Functions of JAX over all dtypes: integers, places and bits equal JAX's, and floats to one rounding."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import ml_dtypes
from drawn import counted
from jax_numbers import FLOATS, INTEGERS, drawn, functions, wanted
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.dtypes import is_floating, limits_of
from parallelism.interop import from_jax

CASES = [(dtype, name) for dtype in (*FLOATS, *INTEGERS) for name in functions(dtype)]


@pytest.mark.sampled(320, 5)
@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_a_function_gives_in_every_dtype_what_jax_gives(dtype, name):
    rng, function = np.random.default_rng(CASES.index((dtype, name))), functions(dtype)[name]
    for _ in range(counted(8)):
        array = drawn(rng, dtype, (3, 5))
        with np.errstate(all="ignore"):
            found = np.asarray(ir.interpret(from_jax(function, array), [array]).outputs[0])
            expected = wanted(function, array)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if not is_floating(expected.dtype):
            assert_array_equal(found, expected)
        else:
            check_floats(found, expected)


def check_floats(found, expected):
    limits = limits_of(expected.dtype)
    near = {"rtol": 2 * float(limits.eps), "atol": float(limits.smallest_normal)}
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), **near)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_table_of_narrow_floats_is_a_constant(dtype):
    table = np.arange(300).reshape(3, 100).astype(getattr(ml_dtypes, dtype))
    program = from_jax(lambda x: x + table, table)
    zero = np.zeros((3, 100), table.dtype)
    found = ir.interpret(program, [zero]).outputs[0]
    assert_array_equal(found.view(f"u{table.itemsize}"), table.view(f"u{table.itemsize}"))
