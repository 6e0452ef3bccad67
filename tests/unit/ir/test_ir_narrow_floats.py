"""bfloat16 and float8 in programs: float16's rules, float32's arithmetic, one rounding."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import TensorSharding, ir, models
from parallelism.dtypes import NARROW_FLOATS, as_dtype, code_of, is_floating, is_numeric, of_code
from parallelism.layouts import annotate

NAMES = tuple(NARROW_FLOATS)
BF16 = np.dtype(ml_dtypes.bfloat16)


def typed(name, *shape):
    return ir.TensorType(name, shape)


def whole(rng, shape, dtype):
    """Small whole numbers, which all of these dtypes have."""
    return rng.integers(-2, 3, shape).astype(dtype)


# -- dtypes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_has_a_name_in_text_a_code_and_a_size(name):
    type = typed(name, 2, 3)
    assert type.dtype == np.dtype(getattr(ml_dtypes, NARROW_FLOATS[name])) == as_dtype(NARROW_FLOATS[name])
    assert str(type) == f"tensor<2x3x{name}>"
    assert type.nbytes == 6 * (2 if name == "bf16" else 1)
    assert of_code(code_of(type.dtype)) == type.dtype
    assert is_floating(type.dtype) and is_numeric(type.dtype)
    assert ir.TensorType(NARROW_FLOATS[name], (2, 3)) == type


def test_what_is_no_number_is_none_of_them():
    for dtype in (np.dtype("V2"), np.dtype(ml_dtypes.float6_e2m3fn), np.dtype("U3"), np.dtype(object)):
        assert not is_floating(dtype) and not is_numeric(dtype)
    assert not is_floating(np.dtype(int)) and is_numeric(np.dtype(int)) and not is_floating(np.dtype(complex))
    with pytest.raises(TypeError, match=r"a dtype must be one of i1, f16, .*, bf16, .*, got float4_e2m1fn"):
        typed(ml_dtypes.float4_e2m1fn, 2)


@pytest.mark.slow
def test_the_package_is_not_loaded_without_need():
    code = ("import sys; from parallelism import ir, models; import vcluster.runs;"
            "ir.parse(str(models.mlp((2, 3), 4, 'f16'))); print('ml_dtypes' in sys.modules);"
            "ir.parse('func @f(%x: tensor<2xbf16>) -> () {\\n return\\n}'); print('ml_dtypes' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.split() == ["False", "True"]


# -- rules -------------------------------------------------------------------------------------------------------------

RULES = {
    "a float of Python": lambda x: x * 1.5, "an integer of Python": lambda x: 2 - x, "a product": lambda x: x @ x.T,
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x), "where": lambda x: np.where(x > 0, x, -1.5), "mean": np.mean,
    "a power": lambda x: x**2 + x**0.5, "exp": np.exp, "a sum": lambda x: np.sum(x, axis=0),
    "softmax": lambda x: ir.apply("softmax", x, axis=1), "integers": lambda x: x * np.arange(3),
    "bytes": lambda x: x * np.ones(3, np.int8), "bools": lambda x: (x > 0) * x, "std": np.std,
    "float32": lambda x: x * np.ones(3, np.float32), "sort": np.sort, "full_like": lambda x: np.full_like(x, 2),
    "joined": lambda x: np.concatenate([x, np.ones((1, 3), bool)]), "compared": lambda x: x < 1, "tanh": np.tanh,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", RULES)
def test_the_dtype_is_that_which_numpy_gives_for_float16(what):
    half = RULES[what](np.ones((2, 3), np.float16)).dtype
    for name in NAMES:
        recorded = ir.record(RULES[what], typed(name, 2, 3)).outputs[0].type.dtype
        assert recorded == (typed(name).dtype if half == np.float16 else half)


def test_two_small_floats_have_no_common_dtype():
    for names in (("bf16", "f16"), ("bf16", "f8e5m2")):
        with pytest.raises(ir.RecordError, match="have no common dtype: convert one of them with astype"):
            ir.record(lambda x, y: x + y, *(typed(name, 3) for name in names))
        with pytest.raises(ir.RecordError, match="have no common dtype: convert one of them with astype"):
            ir.record(lambda x, y: x @ y, *(typed(name, 3, 3) for name in names))


def test_an_op_computes_in_float32_and_rounds_once():
    x = np.full((1, 300), 0.1, BF16)        # added one by one in bfloat16 these stop at 16
    column = x.T.copy()
    total, product = ir.interpret(ir.record(
        lambda x, y: (np.sum(x), x @ y), typed("bf16", 1, 300), typed("bf16", 300, 1)), [x, column]).outputs
    wide = x.astype(np.float32)
    assert_array_equal(total, np.sum(wide).astype(BF16))
    assert_array_equal(product, (wide @ wide.T).astype(BF16))
    assert float(total) == 30


def test_apply_on_numbers_rounds_as_a_program_does():
    x = np.linspace(-2, 2, 7).astype(BF16)
    assert_array_equal(ir.apply("gelu", x), ir.interpret(
        ir.record(lambda x: ir.apply("gelu", x), typed("bf16", 7)), [x]).outputs[0])
    assert ir.apply("gelu", x).dtype == BF16


def test_a_view_shares_memory():
    x = np.ones((2, 3), BF16)
    flat, = ir.interpret(ir.record(lambda x: x.reshape(6), typed("bf16", 2, 3)), [x]).outputs
    assert np.may_share_memory(x, flat) and flat.dtype == BF16


def test_a_number_that_a_dtype_lacks_is_refused():
    masked = ir.record(lambda x: np.where(x > 0, x, -np.inf), typed("bf16", 3))
    assert masked.outputs[0].type == typed("bf16", 3)
    told = "-inf as a constant of float8_e4m3fn cannot be recorded: the largest number is 448"
    with pytest.raises(ir.RecordError, match=told):
        ir.record(lambda x: np.where(x > 0, x, -np.inf), typed("f8e4m3fn", 3))


# -- gradients ---------------------------------------------------------------------------------------------------------

def test_the_gradient_of_whole_numbers_is_exact():
    rng = np.random.default_rng(0)

    def loss(x, w, v):
        return np.sum(np.maximum(x @ w, 0) @ v)

    shapes = (2, 3), (3, 2), (2, 1)
    arrays = [whole(rng, shape, np.float64) for shape in shapes]
    wanted = ir.interpret(ir.gradient(ir.record(loss, *(typed("f64", *s) for s in shapes))), arrays).outputs
    for name in ("bf16", "f8e4m3fn", "f8e3m4"):
        grad = ir.gradient(ir.record(loss, *(typed(name, *s) for s in shapes)))
        found = ir.interpret(grad, [x.astype(typed(name).dtype) for x in arrays]).outputs
        for x, y in zip(found, wanted, strict=True):
            assert x.dtype == typed(name).dtype
            assert_array_equal(x.astype(float), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [
    lambda dtype: models.mlp((5, 7, 3), 4, dtype), lambda dtype: models.gpt(11, 8, 2, 1, 5, 2, dtype),
    lambda dtype: models.convolutional((6, 5, 2), (3, 4), 7, 2, dtype),
    lambda dtype: models.mixture(4, 6, 3, 2, 4, 2, 5, dtype=ir.TensorType(dtype, ()).dtype),
], ids=["mlp", "gpt", "convolutional", "mixture"])
def test_a_model_stays_in_its_dtype(make):
    half, narrow = (ir.gradient(make(name), keep_outputs=True) for name in ("f16", "bf16"))
    assert [str(v.type).replace("bf16", "f16") for v in narrow.values] == [str(v.type) for v in half.values]
    assert [op.kind for op in narrow.ops] == [op.kind for op in half.ops]
    assert ir.parse(str(narrow)) == narrow
    assert ir.peak_bytes(narrow) == ir.peak_bytes(half)
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=v.type.shape) / 2 if is_floating(v.type.dtype) else rng.integers(0, 3, v.type.shape)
              for v in half.inputs]
    of_half, of_narrow = (
        ir.interpret(f, [x.astype(v.type.dtype) for x, v in zip(arrays, f.inputs, strict=True)]).outputs[0]
        for f in (half, narrow))
    assert abs(float(of_half) - float(of_narrow)) <= 0.03 * abs(float(of_half))     # eight bits, several roundings


def test_the_reshards_of_gradients_carry_the_region_of_their_op():
    def loss(w, x):
        with ir.region("block.0"):
            x = x @ w
        with ir.region("block.1"):
            x = np.maximum(x @ w, 0)
        with ir.region("loss"):
            return np.sum(x)

    program = annotate(ir.record(loss, typed("f64", 4, 4), typed("f64", 6, 4)), {"w": TensorSharding(None, "tp")})
    values = {op.outputs[0].name: TensorSharding("dp", None) for op in program.ops if op.kind == "matmul"}
    reshards = [op for op in ir.gradient(annotate(program, values)).ops if op.kind == "reshard"]
    assert [op.region for op in reshards] == ["gradient.block.1", "gradient.block.0", "gradient.block.0"]


# -- promotion ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["f16", "bf16", "f8e4m3fn"])
def test_a_numpy_number_that_promotes_is_told_with_its_line(name):
    def scaled(x):
        return x / np.sqrt(64)

    with pytest.warns(ir.PromotionWarning, match="numpy.divide makes float64 of an array of .*, because a NumPy number "
                      "of float64 promotes it: make it a Python number, as in x / float") as told:
        program = ir.record(scaled, typed(name, 3))
    warning, = told
    assert (warning.filename, warning.lineno) == (__file__, scaled.__code__.co_firstlineno + 1)
    assert program.outputs[0].type == typed("f64", 3)
    with pytest.warns(ir.PromotionWarning, match="numpy.where makes float32"):
        ir.record(lambda x: np.where(x > 0, x, np.float32(2)), typed(name, 3))


def test_what_does_not_promote_gives_no_warning():
    ir.record(lambda x: x / float(np.sqrt(64)) + np.float16(2), typed("f16", 3))
    ir.record(lambda x: x / np.sqrt(64), typed("f32", 3))                   # asked for or not: not 16 bits
    ir.record(lambda x: x > np.float64(0), typed("bf16", 3))
    ir.record(lambda x: x * np.ones(3, np.float32), typed("bf16", 3))       # an array: meant


@pytest.mark.parametrize("name", ["bf16", "f32"])
def test_a_symbolic_width_promotes_nothing(name):
    dtype, width = typed(name).dtype, ir.symbol("D")
    symbolic, numbered = (ir.gradient(models.gpt(12, each, 2, 1, 4, 3, dtype=dtype)) for each in (width, 8))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.type.shape).astype(dtype) if is_floating(v.type.dtype)
              else rng.integers(0, 12, v.type.shape) for v in numbered.inputs]
    found, wanted = (ir.interpret(function, arrays).outputs for function in (symbolic, numbered))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == dtype
        assert_array_equal(one.astype(float), other.astype(float))
