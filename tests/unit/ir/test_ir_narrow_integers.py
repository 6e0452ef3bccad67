"""Integers of 4 and 2 bits in programs: 8 bits of arithmetic, and results that wrap around."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.dtypes import (
    NARROW_INTEGERS,
    as_dtype,
    bits_of,
    code_of,
    common_dtype,
    integer_limits,
    integer_of,
    is_floating,
    is_integer,
    is_numeric,
    of_code,
)
from vcluster import VirtualCluster


@pytest.mark.parametrize("name", NARROW_INTEGERS)
def test_a_dtype_has_a_name_in_text_a_code_and_limits(name):
    type = ir.TensorType(name, (2, 3))
    assert type.dtype == as_dtype(NARROW_INTEGERS[name]) == of_code(code_of(type.dtype))
    assert str(type) == f"tensor<2x3x{name}>" and type.nbytes == 6
    assert is_integer(type.dtype) and is_numeric(type.dtype) and not is_floating(type.dtype)
    assert integer_of(bits_of(type.dtype), signed=name[0] == "i") == type.dtype
    limits = ml_dtypes.iinfo(type.dtype)
    assert integer_limits(type.dtype) == (limits.min, limits.max)


def test_a_program_has_them_in_its_text():
    x = ir.TensorType("i4", (3,))
    program = ir.record(lambda x: np.sort(-x - np.array([1, -8, 3], ml_dtypes.int4)), x)
    assert ir.parse(str(program)) == program
    found = ir.interpret(program, [np.array([-8, 0, 7], ml_dtypes.int4)]).outputs[0]
    assert found.astype(int).tolist() == [-8, 6, 7]     # of -8-1, 0+8 and -7-3


@pytest.mark.parametrize(("given", "expected"), [
    (("int4", "int4"), "int4"), (("int4", 1), "int4"), (("int4", "int8"), "int8"), (("uint4", "uint4"), "uint4"),
    (("int4", "uint4"), "int16"), (("int2", "float32"), "float32"), (("int4", bool), "int4"),
])
def test_dtypes_are_promoted_as_those_of_8_bits(given, expected):
    given = [as_dtype(x) if isinstance(x, str) else np.dtype(bool) if x is bool else x for x in given]
    assert common_dtype(*given) == as_dtype(expected)


def test_a_sum_over_devices_wraps_around():
    rows = [np.array([7, -8, 3], ml_dtypes.int4), np.array([7, -1, 3], ml_dtypes.int4)]
    with VirtualCluster(2, backend="thread") as cluster:
        run = cluster.run(lambda device: device.all_reduce(rows[device.rank]))
    for output in run.outputs:
        assert_array_equal(output.astype(int) % 16, np.array([14, -9, 6]) % 16)


def test_a_mean_over_devices_is_a_float_and_bits_are_combined():
    rows = [np.array([7, -8, 3], ml_dtypes.int4), np.array([6, -1, 3], ml_dtypes.int4)]
    with VirtualCluster(2, backend="thread") as cluster:
        run = cluster.run(lambda device: (device.all_reduce(rows[device.rank], op="mean"),
                                          device.all_reduce(rows[device.rank], op="xor")))
    mean, xor = run.outputs[1]
    assert mean.dtype == np.float64 and mean.tolist() == [6.5, -4.5, 3.0]
    assert xor.dtype == ml_dtypes.int4 and xor.astype(int).tolist() == [1, 7, 0]
