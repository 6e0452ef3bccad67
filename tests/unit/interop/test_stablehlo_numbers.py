"""StableHLO at its edges: narrow dtypes, integers by zero, functions of 16 bits, tensors on one device alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("jax")

import ml_dtypes
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.interop import InteropError, UnsupportedError, from_stablehlo, mesh_of
from parallelism.interop.partitioned import Partitioned
from parallelism.mesh import Mesh
from vcluster import VirtualCluster

MLIR = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"}


def given(body, *arrays, arguments, result):
    text = f"func.func public @main({arguments}) -> {result} {{\n{body}\n  return %0 : {result}\n}}"
    with np.errstate(all="ignore"):
        return np.asarray(ir.interpret(from_stablehlo(text), list(arrays)).outputs[0])


# -- narrow dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "type", "numbers"), [
    ("[1.5, -2.0, 0x7F80, -0.0]", "4xbf16", [1.5, -2, np.inf, -0.0]),
    ("[1.5, -2.0]", "2xf8E5M2", [1.5, -2]),
    ('"0xC03FC0C0"', "2xbf16", [1.5, -6]),
    ("[[1, -8], [7, -1]]", "2x2xi4", [[1, -8], [7, -1]]),
    ("[0, 15]", "2xui4", [0, 15]),
    ('"0x0F08"', "2xi4", [-1, -8]),
    ("[1, -2]", "2xi2", [1, -2]),
    ("[]", "0xbf16", []),
])
def test_a_constant_of_a_narrow_dtype_need_not_be_one_number(text, type, numbers):
    found = given(f"  %0 = stablehlo.constant dense<{text}> : tensor<{type}>", arguments="", result=f"tensor<{type}>")
    expected = np.array(numbers, np.float64)
    assert_array_equal(found.astype(np.float64), expected)
    assert_array_equal(np.signbit(found.astype(np.float64)), np.signbit(expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("type", "dtype", "least", "most"), [
    ("i4", ml_dtypes.int4, -8, 7), ("ui4", ml_dtypes.uint4, 0, 15), ("i2", ml_dtypes.int2, -2, 1),
    ("ui2", ml_dtypes.uint2, 0, 3)])
@pytest.mark.parametrize(("op", "function"), [
    ("add", np.add), ("subtract", np.subtract), ("multiply", np.multiply), ("maximum", np.maximum),
    ("shift_left", lambda a, b: np.where((b < 0) | (b > 7), 0, a << np.clip(b, 0, 7))),
    ("power", lambda a, b: np.where(b < 0, np.where(abs(a) == 1, a ** (b & 1), 0), a ** np.maximum(b, 0)))])
def test_integers_of_a_few_bits_wrap_around(type, dtype, least, most, op, function):
    a, b = (x.ravel() for x in np.meshgrid(np.arange(least, most + 1), np.arange(least, most + 1)))
    n = len(a)
    found = given(f"  %0 = stablehlo.{op} %a, %b : tensor<{n}x{type}>", a.astype(dtype), b.astype(dtype),
                  arguments=f"%a: tensor<{n}x{type}>, %b: tensor<{n}x{type}>", result=f"tensor<{n}x{type}>")
    assert found.dtype == dtype
    assert_array_equal(found.astype(int), (function(a, b) - least) % (most - least + 1) + least)


def test_minus_8_in_four_bits_is_its_own_negative_and_reductions_know_the_limits():
    x = np.array([-8, -8, 7], ml_dtypes.int4)
    negative = given("  %0 = stablehlo.negate %x : tensor<3xi4>", x, arguments="%x: tensor<3xi4>",
                     result="tensor<3xi4>")
    assert negative.astype(int).tolist() == [-8, -8, -7]
    largest = given(
        "  %c = stablehlo.constant dense<-8> : tensor<i4>\n"
        "  %0 = stablehlo.reduce(%x init: %c) applies stablehlo.maximum across dimensions = [0] : "
        "(tensor<3xi4>, tensor<i4>) -> tensor<i4>", x, arguments="%x: tensor<3xi4>", result="tensor<i4>")
    assert int(largest) == 7


def test_a_float_outside_of_four_bits_becomes_the_nearest_integer():
    x = np.array([-300, -8.9, 2.9, 7.5, np.inf, np.nan], np.float32)
    found = given("  %0 = stablehlo.convert %x : (tensor<6xf32>) -> tensor<6xi4>", x, arguments="%x: tensor<6xf32>",
                  result="tensor<6xi4>")
    assert found.astype(int).tolist() == [-8, -8, 2, 7, 7, 0]


# -- integers ----------------------------------------------------------------------------------------------------------


def test_a_negative_power_of_an_integer_is_rounded_to_0():
    a, b = np.array([2, -1, -1, 1, 0, 3, -2]), np.array([-1, -3, -2, -2, -1, 4, 3])
    found = given("  %0 = stablehlo.power %a, %b : tensor<7xi64>", a, b,
                  arguments="%a: tensor<7xi64>, %b: tensor<7xi64>", result="tensor<7xi64>")
    assert found.tolist() == [0, -1, 1, 1, 0, 81, -8]


@pytest.mark.parametrize(("dtype", "type", "quotients"), [
    ("int8", "i8", [-1, -1, -3, -128]), ("uint8", "ui8", [255, 255, 3, 0])])
def test_a_quotient_by_zero_is_minus_one_and_the_remainder_the_dividend(dtype, type, quotients):
    a = np.array([7, 0, 7, 0], dtype)
    b = np.array([0, 0, 2, 1], dtype)
    if dtype == "int8":
        a[3], b[2:] = -128, (-2, -1)
    both = {"arguments": f"%a: tensor<4x{type}>, %b: tensor<4x{type}>", "result": f"tensor<4x{type}>"}
    assert given(f"  %0 = stablehlo.divide %a, %b : tensor<4x{type}>", a, b, **both).tolist() == quotients
    rests = given(f"  %0 = stablehlo.remainder %a, %b : tensor<4x{type}>", a, b, **both)
    assert rests.tolist() == [7, 0, 1, 0]


# -- functions ---------------------------------------------------------------------------------------------------------


def digamma(x):
    if x < 0.5:
        return digamma(1 - x) - math.pi / math.tan(math.pi * (x - round(x)))
    total = 0.0
    while x < 12:
        total, x = total - 1 / x, x + 1
    square = 1 / (x * x)
    return total + math.log(x) - 0.5 / x - square * (1 / 12 - square * (1 / 120 - square / 252))


FUNCTIONS = {
    "chlo.lgamma": math.lgamma, "chlo.digamma": digamma, "chlo.erfc": math.erfc, "chlo.erf": math.erf,
    "stablehlo.logistic": lambda x: 1 / (1 + math.exp(-x)), "stablehlo.exponential_minus_one": math.expm1,
    "stablehlo.rsqrt": lambda x: 1 / math.sqrt(abs(x)), "stablehlo.tanh": math.tanh, "stablehlo.cbrt": np.cbrt,
    "stablehlo.tan": math.tan, "chlo.asinh": math.asinh, "chlo.atan": math.atan, "chlo.sinh": math.sinh,
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", MLIR)
def test_a_function_of_few_bits_is_computed_in_float32_and_rounded_once(name, dtype):
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=300) * scale for scale in (0.3, 1, 4)] + [[0.5, 1.5, -2.5, 3.0, -4.6, 2.2]])
    x = x.astype(getattr(ml_dtypes, dtype, dtype))
    x = x[x.astype(float) != np.floor(x.astype(float))]
    x = abs(x) if name == "stablehlo.rsqrt" else x
    type = f"tensor<{len(x)}x{MLIR[dtype]}>"
    found = given(f"  %0 = {name} %x : {f'{type} -> {type}' if 'chlo' in name else type}", x, arguments=f"%x: {type}",
                  result=type)
    exact = np.array([FUNCTIONS[name](float(each)) for each in x])
    with np.errstate(over="ignore"):
        expected = exact.astype(x.dtype)
    # To the nearest, or the other neighbour where float32 is about half-way; near the zeros of gamma functions
    # float32 has fewer digits.
    apart = abs(_places(found) - _places(expected))
    assert (apart <= 1).all() or (abs(found.astype(float) - exact)[apart > 1] < 2e-6).all()
    assert (apart > 0).mean() < 0.03


def _places(x):
    """The number of each float among all floats, in order."""
    words = x.view(f"i{x.itemsize}").astype(int)
    return np.where(words < 0, -(words & (2**(8 * x.itemsize - 1) - 1)), words)


def test_gamma_functions_have_their_poles_and_limits():
    x = np.array([np.inf, -np.inf, np.nan, 0, -1, -2], np.float32)
    both = {"arguments": "%x: tensor<6xf32>", "result": "tensor<6xf32>"}
    gamma = given("  %0 = chlo.lgamma %x : tensor<6xf32> -> tensor<6xf32>", x, **both)
    assert_array_equal(gamma, [np.inf, np.inf, np.nan, np.inf, np.inf, np.inf])
    slope = given("  %0 = chlo.digamma %x : tensor<6xf32> -> tensor<6xf32>", x, **both)
    assert_array_equal(slope, [np.inf, np.nan, np.nan, np.nan, np.nan, np.nan])


def test_erfc_keeps_its_digits_far_out():
    x = np.array([-3, 0.5, 1, 3.9, 7.9, 8.1, 9, 28, np.inf, -np.inf])
    both = {"arguments": "%x: tensor<10xf64>", "result": "tensor<10xf64>"}
    found = given("  %0 = chlo.erfc %x : tensor<10xf64> -> tensor<10xf64>", x, **both)
    np.testing.assert_allclose(found, [math.erfc(each) for each in x], rtol=1e-13, atol=0)


def test_the_next_number_after_the_largest_but_one_is_the_largest():
    x, y = (np.array(each, ml_dtypes.float8_e4m3fn) for each in ([416, 1, -448], [448, 448, 448]))
    type = "tensor<3xf8E4M3FN>"
    found = given(f"  %0 = chlo.next_after %x, %y : {type}, {type} -> {type}", x, y,
                  arguments=f"%x: {type}, %y: {type}", result=type)
    assert found.astype(float).tolist() == [448, 1.125, -416]


# -- meshes ------------------------------------------------------------------------------------------------------------


MANUAL = """
  %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{"a", "b"}]>] out_shardings=[<@m, [{"a", "b"}]>]
      manual_axes={"a"} (%y: tensor<4xf32>) {
    %1 = stablehlo.add %y, %y : tensor<4xf32>
    sdy.return %1 : tensor<4xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
"""


def module(meshes, body, sharding):
    argument = f"%x: tensor<8xf32> {{sdy.sharding = #sdy.sharding<{sharding}>}}"
    return (f"module {{\n{meshes}\nfunc.func public @main({argument}) -> tensor<8xf32> {{\n{body}\n"
            " return %0 : tensor<8xf32>\n} }")


@pytest.mark.slow
def test_a_module_lies_in_the_mesh_that_its_shardings_name():
    program = from_stablehlo(module('sdy.mesh @other = <["a"=4]>\nsdy.mesh @m = <["a"=2, "b"=2]>', MANUAL,
                                    '@m, [{"a", "b"}]'))
    assert isinstance(program, Partitioned) and program.mesh == Mesh(a=2, b=2)
    x = np.arange(8, dtype=np.float32)
    with VirtualCluster(program.mesh, backend="thread") as cluster:
        assert_array_equal(cluster.run(program, [x]).result[0], x + x)


@pytest.mark.parametrize(("meshes", "sharding", "mesh"), [
    ('sdy.mesh @m = <["a"=2]>\nsdy.mesh @other = <["a"=4]>', '@other, [{"a"}]', Mesh(a=4)),
    ('sdy.mesh @m = <["a"=2]>', 'mesh<["b"=4]>, [{"b"}]', Mesh(b=4)),
    ('sdy.mesh @m = <["a"=2]>\nsdy.mesh @other = <["a"=4]>', '@none, []', Mesh(a=2)),
])
def test_the_mesh_of_a_module_is_the_one_that_is_used(meshes, sharding, mesh):
    none = "sdy.mesh @none = <[], device_ids=[0]>\n" if "@none" in sharding else ""
    text = module(none + meshes, "  %0 = stablehlo.add %x, %x : tensor<8xf32>", sharding)
    assert mesh_of(text) == mesh


def test_shardings_in_two_meshes_are_refused():
    body = '  %0 = sdy.sharding_constraint %x <@other, [{"c"}]> : tensor<8xf32>'
    with pytest.raises(UnsupportedError, match="its shardings lie in two meshes, @m and @other; programs have one"):
        from_stablehlo(module('sdy.mesh @m = <["a"=2]>\nsdy.mesh @other = <["c"=4]>', body, '@m, [{"a"}]'))


@pytest.mark.parametrize("text", [
    module("sdy.mesh @one = <[], device_ids=[0]>\nsdy.mesh @m = <[\"a\"=2]>",
           "  %0 = sdy.sharding_constraint %x <@one, []> : tensor<8xf32>", '@m, [{"a"}]'),
    module("sdy.mesh @one = <[], device_ids=[0]>", "  %0 = stablehlo.add %x, %x : tensor<8xf32>", "@one, []"),
    "module attributes {mhlo.num_partitions = 2 : i32} { func.func @main(%x: tensor<8xf32> "
    '{mhlo.sharding = "{maximal device=1}"}) -> tensor<8xf32> { return %x : tensor<8xf32> } }',
])
def test_a_tensor_on_one_device_alone_is_read_as_any_other(text):
    x = np.arange(8, dtype=np.float32)
    program = from_stablehlo(text)
    assert isinstance(program, ir.Function)
    found = ir.interpret(program, [x]).outputs[0]
    assert_array_equal(found, x + x if "stablehlo.add" in text else x)


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4, 1)
@pytest.mark.slow_for("an op")      # of a dialect that is not known, so that a child process reads it first
@pytest.mark.parametrize("text", [
    "module { " + "a" * 50_000 + " }", "a" * 50_000,
    f'module {{ func.func @main() {{ "{"a" * 50_000}.b"() : () -> () return }} }}',
    "module { " + " ".join(f"func.func @f{i}() {{ return }}" for i in range(5000)) + " }",
    "module @m { func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { "
    f'%0 = stablehlo.custom_call @{"f" * 50_000}(%x) : (tensor<8xf32>) -> tensor<8xf32> '
    "return %0 : tensor<8xf32> } }",
], ids=["a word", "only a word", "an op", "functions", "a call"])
def test_an_error_is_never_as_long_as_its_input(text):
    with pytest.raises(InteropError) as caught:
        from_stablehlo(text)
    assert len(str(caught.value)) < 1000
