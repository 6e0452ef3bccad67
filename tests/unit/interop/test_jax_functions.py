"""Functions of JAX become programs that give what JAX gives."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax_examples import EXAMPLES  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_jax, from_stablehlo  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_function_of_jax_gives_what_jax_gives(name):
    function, arguments = EXAMPLES[name]
    check(function, arguments)


def check(function, arguments):
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]
    program = from_jax(function, *arguments)
    inputs = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    with np.errstate(all="ignore"):
        found = ir.interpret(program, inputs).outputs
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.dtype.kind == "f":
            tolerance = 1e-5 if theirs.dtype.itemsize > 2 else 2e-3
            assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=tolerance, atol=tolerance)
        else:
            assert_array_equal(ours, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_floats_outside_the_range_of_integers_become_the_nearest_integer(source):
    numbers = [300, -300, np.nan, np.inf, -np.inf, -1.5, 3e10, 2**31, -2**31, 127.9, -128.9, 256, 1e20]
    x = jax.numpy.array(numbers, "float32").astype(source)
    check(lambda x: [x.astype(dtype) for dtype in ("int8", "uint8", "int32", "uint32")], (np.asarray(x),))


def test_a_power_of_a_half_is_that_of_jax_for_minus_infinity_and_minus_zero():
    x, half = np.array([-np.inf, -0.0, np.inf, 4, -1], np.float32), np.float32(0.5)
    check(lambda x, half: [1 / jax.numpy.power(x, 0.5), 1 / x**half, x[0]**half, x**0.25], (x, half))


def test_a_place_of_the_largest_that_is_found_by_another_comparison_is_still_that_place():
    x = np.random.default_rng(0).integers(0, 3, (4, 5)).astype(np.float32)
    text = jax.jit(lambda x: jax.numpy.argmax(x, 1)).lower(x).as_text()
    program = from_stablehlo(text.replace(" GT,", " GE,"))
    assert " GE," not in text and not {"argmax", "argmin"} & {op.kind for op in program.ops}
    assert_array_equal(ir.interpret(program, [x]).outputs[0], x.argmax(1))


def test_arguments_are_named_after_parameters_and_keys_used_or_not():
    params = {"a": np.ones(3, np.float32), "b": [np.ones(2, np.float32)]}
    program = from_jax(lambda params, x: params["b"][0] * 2, params, jax.ShapeDtypeStruct((4, 1), "int32"))
    assert [str(value) for value in program.inputs] == [
        "%params.a: tensor<3xf32>", "%params.b.0: tensor<2xf32>", "%x: tensor<4x1xi32>"]
    assert program.name == "lambda"


def test_a_loop_that_the_inputs_end_is_refused_with_its_place():
    def halved(x):
        return jax.lax.while_loop(lambda y: y > 1, lambda y: y / 2, x)

    with pytest.raises(UnsupportedError, match=r"stablehlo.while at .*while.*line \d+.*turns depends on the inputs"):
        from_jax(halved, np.float32(8))


def test_a_loop_is_unrolled_up_to_a_number_of_ops():
    def long(x):
        return jax.lax.fori_loop(0, 500, lambda i, y: jax.numpy.sin(y), x)

    assert len(from_jax(long, np.float32(8)).ops) == 500
    with pytest.raises(UnsupportedError, match=r"more than 100 ops.*most_ops= sets"):
        from_jax(long, np.float32(8), most_ops=100)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("function", "message"), [
    (lambda x: jax.numpy.sqrt(x + 1j).real, r"stablehlo\.sqrt at .*: it is not supported for complex numbers"),
    (lambda x: x * 1j, "a result is no tensor of numbers"),
    (lambda x: jax.pure_callback(lambda y: y, x, x), "stablehlo.custom_call at .*: the custom call 'xla_ffi_python"),
    (lambda x: jax.numpy.linalg.eigh(x)[0], "the custom call 'lapack_ssyev"),
    (lambda x: x.astype("float4_e2m1fn") * 2, r"the type tensor<3x3xf4E2M1FN> is not supported"),
], ids=["complex root", "complex result", "callback", "eigh", "float4"])
def test_what_programs_do_not_have_is_refused_by_name(function, message):
    with pytest.raises(UnsupportedError, match=message):
        from_jax(function, jax.ShapeDtypeStruct((3, 3), "float32"))


def test_what_only_prints_is_left_out(capfd):
    def printed(x):
        jax.debug.print("{}", x.sum())
        jax.debug.callback(lambda y: None, x)
        return x * 2

    program = from_jax(printed, np.ones((2, 3), np.float32))
    assert [op.kind for op in program.ops] == [op.kind for op in from_jax(lambda x: x * 2, np.ones((2, 3), np.float32)).ops]
    assert capfd.readouterr().out == ""


def test_a_callback_that_returns_numbers_is_told():
    with pytest.raises(UnsupportedError, match=r"it calls Python, as jax\.pure_callback does; write it in JAX"):
        from_jax(lambda x: jax.pure_callback(np.sin, x, x), np.ones(3, np.float32))
