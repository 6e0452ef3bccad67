"""Products in float8 with scales: what is rounded to what, which scales are kept, and whose gradients these are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import ir
from parallelism.dtypes import as_dtype
from parallelism.execution.chains import declared_cost
from parallelism.ir.core import frozen_attributes
from parallelism.ir.operators.contractions import product_shape
from parallelism.ir.operators.scaled_products import scaling_of
from parallelism.ir.passes.interpreter import run
from parallelism.kernels.scaled_numbers import PAIRS, RECIPES, grain_of, restored
from parallelism.layouts.propagation.devices import Devices
from parallelism.layouts.propagation.placement import placement
from parallelism.sharding import TensorSharding

E4M3, E5M2, BF16 = map(as_dtype, ("float8_e4m3fn", "float8_e5m2", "bfloat16"))


def quantized(x, recipe, grains, blocks, dtype=E4M3, **more):
    how = {"grains": grains, "blocks": blocks, "dtype": dtype, "recipe": recipe, **more}
    return ir.interpret(ir.record(lambda x: ir.apply("quantize", x, **how), ir.TensorType(x.dtype, x.shape)), [x]).outputs


def test_one_scale_for_all_takes_the_largest_number_to_the_largest_of_the_format():
    x = np.array([[1.0, -7.0], [0.0, 3.5]], np.float32)
    q, scales = quantized(x, "tensor", (1, 1), (0, 0))
    assert_array_equal(scales, np.full((2, 2), np.float32(7 / 448)))       # one scale, kept four times
    assert_array_equal(q.astype(float), [[64, -448], [0, 224]])
    assert (q.dtype, scales.dtype) == (E4M3, np.float32)
    zeros, ones = quantized(np.zeros((2, 2), np.float32), "tensor", (2, 2), (0, 0))
    assert not zeros.astype(float).any()
    assert_array_equal(ones, [[1]])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_of_blocks_are_the_least_powers_of_2_with_which_no_number_is_cut(dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    x = np.array([[most, 1.0, most * 1.01, -2.0, most / 1024, 0.0]], np.float32)
    q, scales = quantized(x, "block", (1, 2), (1, 2), dtype)
    assert_array_equal(scales, [[1, 2, 2.0**-10]])
    assert_allclose(restored(q, scales), x, rtol=2.0**-3)
    _, exponents = quantized(x, "mx", (1, 2), (1, 2), dtype)
    assert_array_equal(exponents, [[127, 128, 117]])
    assert exponents.dtype == np.uint8


def test_a_block_longer_than_a_grain_has_its_scale_several_times_and_begins_where_the_array_begins():
    x = np.arange(1.0, 13, dtype=np.float32)
    _, scales = quantized(x, "tensor", (2,), (0,))
    assert_array_equal(scales, np.full(6, np.float32(12 / 448)))
    _, scales = quantized(x[:10], "block", (2,), (4,))
    assert_array_equal(scales, 2.0 ** np.array([-6, -6, -5, -5, -5]))


@pytest.mark.parametrize(("extent", "block", "grain"), [
    (4096, 128, 128), (1024, 128, 128), (512, 128, 64), (1408, 128, 16), (11008, 128, 32), (96, 32, 4), (7, 128, 1),
    (1, 32, 1), (4096, 32, 32), (4096, 0, 256), (40, 0, 5), (7, 0, 7), (0, 0, 1),
])
def test_grains_let_a_dim_be_split_over_8_devices(extent, block, grain):
    assert grain_of(extent, block) == grain


@given(st.integers(1, 3000), st.sampled_from([0, 32, 128]))
def test_a_grain_divides_its_dim_and_its_block(extent, block):
    grain = grain_of(extent, block)
    assert extent % grain == 0
    assert block == 0 or block % grain == 0


def test_scaling_by_the_roles_of_letters():
    shape = (3, 64, 256)
    assert scaling_of("bsd", shape, "d", "tensor", "b") == ((1, 4, 16), (1, 0, 0), None, None)
    assert scaling_of("bsd", shape, "d", "block", "b")[:2] == ((1, 1, 32), (1, 1, 128))
    assert scaling_of("dn", (1024, 2048), "d", "block", "b", weight=True)[:2] == ((128, 128), (128, 128))
    assert scaling_of("dn", (1024, 2048), "d", "mx", "b", weight=True)[:2] == ((32, 1), (32, 1))
    assert scaling_of("edn", (4, 1024, 2048), "d", "block", "be", weight=True)[:2] == ((1, 128, 128), (1, 128, 128))
    assert scaling_of("bsd", (3, 1024, 256), "bs", "mx", "b")[:2] == ((1, 32, 1), (1, 32, 1))


def test_two_numbers_of_4_bits_lie_along_the_dim_of_the_blocks_if_that_is_even():
    assert scaling_of("bsd", (3, 64, 256), "d", "nvfp4", "b") == ((1, 1, 16), (1, 1, 16), 2, (0, 4, 16))
    assert scaling_of("bsd", (3, 64, 256), "bs", "nvfp4", "b") == ((1, 8, 1), (1, 16, 1), 1, (0, 4, 16))
    assert scaling_of("dn", (48, 7), "d", "nvfp4", "b", weight=True) == ((2, 1), (16, 16), 0, (3, 7))
    assert scaling_of("dn", (7, 48), "d", "nvfp4", "b", weight=True) == ((1, 2), (16, 16), 1, (7, 3))
    assert scaling_of("bsd", (ir.symbol("B"), 8, 6), "bs", "nvfp4", "b") == ((1, 2, 1), (1, 16, 1), 1, (0, 1, 3))
    assert scaling_of("bn", (ir.symbol("B"), 6), "b", "nvfp4", "") == ((1, 1), (16, 1), 1, (1, 3))
    with pytest.raises(ValueError, match=r"a dim of an operand must be even; got \(2, 7\)"):
        scaling_of("bd", (2, 7), "d", "nvfp4", "b")


def test_numbers_of_4_bits_have_a_scale_in_8_bits_for_16_of_them_and_one_for_all():
    x = np.zeros((1, 48), np.float32)
    x[0, :3], x[0, 16:20], x[0, 47] = (6 * 448, 448, -3 * 448), (12, -1, 0, 7), 2.0**-20
    q, scales, whole = quantized(x, "nvfp4", (1, 16), (1, 16), PAIRS, packed=1, tensor_grains=(0, 3))
    assert (q.dtype, scales.dtype, whole.dtype) == (PAIRS, E4M3, np.float32)
    assert (q.shape, scales.shape, whole.shape) == ((1, 24), (1, 3), (1, 16))
    assert_array_equal(whole, np.ones((1, 16)))                     # the largest is 6 times 448
    assert_array_equal(scales.astype(float), [[448, 2, 0]])         # 2 ** -20 / 6 is below the least scale
    assert [f"{each:02x}" for each in q[0, :2]] == ["27", "0d"]     # 6 and 1, -3 and 0: the first in the lower bits
    assert [f"{each:02x}" for each in q[0, 8:10]] == ["97", "60"]   # 6 and -0.5, 0 and 3.5, which is rounded to 4
    expected = np.where(np.arange(48) == 19, 8, x)
    expected[0, 47] = 0
    assert_array_equal(restored(q, scales, whole, packed=1), expected)
    for pairs in (quantized(np.zeros((2, 4), np.float32), "nvfp4", (1, 4), (1, 4), PAIRS, packed=0, tensor_grains=(1, 2)),
                  quantized(np.zeros((2, 0), np.float32), "nvfp4", (1, 1), (1, 1), PAIRS, packed=0, tensor_grains=(1, 1))):
        assert not pairs[0].any() and (pairs[2] == 1).all()


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_each_of_all_numbers_of_4_bits_comes_back_from_its_half_of_a_byte(rows, pairs, seed):
    rng = np.random.default_rng(seed)
    x = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (rows, 2 * pairs)) * rng.choice([-1, 1], (rows, 2 * pairs))
    x[:, 0] = 6
    how = {"packed": 1, "tensor_grains": (1, 2 * pairs)}
    given_x = x.astype(np.float32)
    q, scales, whole = quantized(given_x, "nvfp4", (1, 2 * pairs), (1, 2 * pairs), PAIRS, **how)
    assert q.nbytes == x.size // 2
    assert_array_equal(scales.astype(float), np.full((rows, 1), 448))
    assert_allclose(restored(q, scales, whole, packed=1), x, rtol=1e-6)


# -- products ----------------------------------------------------------------------------------------------------------


def product(recipe, equation="bsd,dn->bsn", apart="b", dtype=np.float32):
    left, right = equation.split("->")[0].split(",")
    summed = "".join(letter for letter in left if letter in right and letter not in equation.split("->")[1])

    def loss(x, w):
        kept, packed = [], []
        for term, each, weight in ((left, x, False), (right, w, True)):
            scaling = scaling_of(term, each.shape, summed, recipe, apart, weight=weight)
            kept += ir.apply("quantize", each, dtype=as_dtype(RECIPES[recipe].forward), recipe=recipe, **scaling.attributes)
            packed.append(scaling.packed)
        more = {"packed": tuple(packed)} if None not in packed else {}
        return ir.apply("scaled_einsum", *kept, equation=equation, dtype=np.dtype(dtype), recipe=recipe, apart=apart,
                        backward=as_dtype(RECIPES[recipe].backward), **more)

    return loss


def recorded(recipe, x, w, **how):
    return ir.record(product(recipe, **how), ir.TensorType(x.dtype, x.shape), ir.TensorType(w.dtype, w.shape))


ROUNDING = {recipe: 2.0**-2 if recipe == "nvfp4" else 2.0**-3 for recipe in RECIPES}
"""Of two factors with 3 bits behind the point, and with 1, in sums of many."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("equation", "shapes", "apart"), [
    ("bsd,dn->bsn", [(3, 8, 256), (256, 96)], "b"), ("bd,dn->bn", [(5, 7), (7, 1)], "b"),
    ("bsd,dn->bsn", [(3, 7, 96), (96, 26)], "b"),
    ("bshd,hdn->bsn", [(2, 5, 4, 32), (4, 32, 24)], "b"), ("ebd,edn->ebn", [(3, 4, 64), (3, 64, 32)], "eb"),
])
def test_a_product_and_its_gradients_are_those_of_the_operands_within_the_rounding(recipe, equation, shapes, apart):
    rng = np.random.default_rng(3)
    x, w = (rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes)
    if recipe == "nvfp4" and x.shape[-1] % 2:
        with pytest.raises(ValueError, match="a dim of an operand must be even"):
            recorded(recipe, x, w, equation=equation, apart=apart)
        return
    function = recorded(recipe, x, w, equation=equation, apart=apart)
    # Gradients of operands in 8 bits are wider themselves: 4096 is above all numbers of e4m3.
    seed = 4096 * rng.uniform(0.5, 1.5, function.outputs[0].type.shape).astype(np.float32)
    back = ir.gradient(function, keep_outputs=True)
    found = ir.interpret(back, [x, w, seed]).outputs
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    wanted = [np.einsum(equation, x, w), np.einsum(f"{out},{right}->{left}", seed, w),
              np.einsum(f"{out},{left}->{right}", seed, x)]
    for number, (own, expected) in enumerate(zip(found, wanted, strict=True)):
        assert own.dtype == np.float32
        assert_allclose(own, expected, rtol=ROUNDING[recipe] * (2 if number else 1))
        assert number == 0 or np.abs(own - expected).max() > 0     # it is rounded


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_that_the_format_has_are_exact(recipe):
    rng = np.random.default_rng(4)
    x, w = rng.integers(-1, 2, (2, 3, 64)) * 1.0, rng.integers(-1, 2, (64, 32)) * 1.0
    x, w = x.astype(BF16), w.astype(BF16)
    function = recorded(recipe, x, w, dtype=BF16)
    seed = (rng.integers(0, 2, (2, 3, 32)) * 2.0 - 1).astype(BF16)
    y, of_x, of_w = ir.interpret(ir.gradient(function, keep_outputs=True), [x, w, seed]).outputs
    wide = [array.astype(np.float64) for array in (x, w, seed)]
    assert_allclose(y.astype(float), wide[0] @ wide[1], rtol=1e-6 if recipe != "tensor" else 1e-2, atol=0.25)
    for own, expected in ((of_x, wide[2] @ wide[1].T), (of_w, np.einsum("bsd,bsn->dn", wide[0], wide[2]))):
        assert own.dtype == BF16
        assert_allclose(own.astype(float), expected, rtol=2.0**-7, atol=0.25)


def test_the_backward_keeps_operands_in_8_bits_and_quantizes_the_gradient_once_with_one_scale():
    x, w = np.zeros((2, 16, 64), BF16), np.zeros((64, 32), BF16)
    kinds = {}
    for recipe in RECIPES:
        function = ir.gradient(recorded(recipe, x, w, dtype=BF16))
        kinds[recipe] = [op.kind for op in function.ops]
        products = [op for op in function.ops if op.kind == "scaled_einsum"]
        assert len(products) == 2          # that of the forward is pruned: no gradient needs it
        assert {op.inputs[0].type.dtype for op in products} == {as_dtype(RECIPES[recipe].backward)}
        assert {op.inputs[len(op.inputs) // 2].type.dtype for op in products} == {as_dtype(RECIPES[recipe].forward)}
        read = {value for op in function.ops if op.kind in ("scaled_einsum", "requantize") for value in op.inputs}
        assert not read & {*function.inputs}
    assert [kinds[recipe].count("quantize") for recipe in RECIPES] == [3, 4, 4, 4]
    assert [kinds[recipe].count("requantize") for recipe in RECIPES] == [0, 1, 2, 1]


def test_bytes_and_flops():
    x, w = np.zeros((2, 512, 1024), BF16), np.zeros((1024, 2048), BF16)
    ops = {recipe: recorded(recipe, x, w, dtype=BF16).ops for recipe in RECIPES}
    elements = 2 * 512 * 1024
    scales = {"tensor": 4 * 2 * 16 * 16, "block": 4 * elements // 128, "mx": elements // 32,
              "nvfp4": elements // 16 + 4 * 2 * 16 * 16}
    for recipe, (of_x, _, of_product) in ops.items():
        again = 2 * elements if recipe in ("tensor", "nvfp4") else 0           # read once more before, for the largest number
        assert of_x.nbytes == 2 * elements + again + elements // (2 if recipe == "nvfp4" else 1) + scales[recipe]
        assert of_product.flops == 2 * 2 * 512 * 1024 * 2048
        assert product_shape(of_product) == (1, 2 * 512, 2048, 1024)
        assert declared_cost(of_product).dtype == ("float4_e2m1fn" if recipe == "nvfp4" else E4M3.name)
        back = [op for op in ir.gradient(recorded(recipe, x, w, dtype=BF16)).ops if op.kind == "scaled_einsum"]
        assert [op.flops for op in back] == [of_product.flops] * 2
        assert {product_shape(op) for op in back} == {(1, 1024, 1024, 2048), (1, 2048, 1024, 1024)}
    kept = {"tensor": 4 * 16 * 16, "block": 4 * 8 * 16, "mx": 32 * 2048, "nvfp4": 1024 * 2048 // 256 + 4 * 16 * 16}
    for recipe, (_, of_w, _) in ops.items():
        elements = 1024 * 2048 // (2 if recipe == "nvfp4" else 1)
        assert sum(value.type.nbytes for value in of_w.outputs) == elements + kept[recipe]


def test_scales_of_earlier_steps_have_the_largest_sizes_for_gradients():
    def loss(x, w, scale_x, scale_w, scale_g):
        q, p = (ir.apply("quantize_by", each, scale, dtype=E4M3)[0] for each, scale in ((x, scale_x), (w, scale_w)))
        return ir.apply("scaled_einsum", q, scale_x, p, scale_w, scale_g, equation="bsd,dn->bsn", dtype=BF16, recipe="tensor",
                        apart="b", backward=E5M2)

    scalar = ir.TensorType("f32", ())
    function = ir.record(loss, ir.TensorType("bf16", (2, 3, 8)), ir.TensorType("bf16", (8, 6)), *[scalar] * 3)
    assert ir.parse(str(ir.gradient(function))) == ir.gradient(function)
    assert product_shape(function.ops[-1]) == (1, 6, 6, 8) and function.ops[-1].flops == 2 * 6 * 6 * 8
    rng = np.random.default_rng(5)
    x, w, seed = (rng.integers(-4, 5, shape).astype(BF16) for shape in ((2, 3, 8), (8, 6), (2, 3, 6)))
    x[1, 2, 3], w[0, 5], seed[0, 1, 2] = -7, 5, -6
    y, of_x, of_w, *maxima = ir.interpret(
        ir.gradient(function, keep_outputs=True), [x, w, *map(np.float32, (0.5, 0.25, 1)), seed]).outputs
    assert maxima == [7, 5, 6] and {each.dtype for each in maxima} == {np.dtype("f4")}
    wide = [array.astype(float) for array in (x, w, seed)]
    assert_array_equal(y.astype(float), wide[0] @ wide[1])                 # e4m3 has these numbers
    assert_array_equal(of_x.astype(float), wide[2] @ wide[1].T)
    assert_array_equal(of_w.astype(float), np.einsum("bsd,bsn->dn", wide[0], wide[2]))
    clipped, = ir.interpret(function, [x, w, np.float32(2.0**-7), np.float32(0.25), np.float32(1)]).outputs
    assert_array_equal(clipped.astype(float), np.clip(wide[0], -3.5, 3.5) @ wide[1])     # 448 of such steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_have_no_vote_so_products_are_laid_out_as_those_in_16_bits(recipe):
    """A gradient that is split along its sequences stays so, whatever its numbers and scales were asked for."""
    scaling = scaling_of("bsn", (ir.symbol("B"), 32, 128), "n", recipe, "b")
    how = frozen_attributes({**scaling.attributes, "dtype": as_dtype(RECIPES[recipe].backward), "recipe": recipe})
    types = (ir.TensorType(BF16, (ir.symbol("B"), 32, 128)),)
    count = 3 if recipe == "nvfp4" else 2
    lies, wished = TensorSharding(None, "cp", None), TensorSharding(None, None, "cp")
    devices = Devices.of({"cp": 2})
    placed = placement("quantize", types, how, (lies,), (wished,) * count, devices, carries=False)
    assert placed == ((lies,), (lies,) * count)


def test_an_operand_with_other_scales_is_refused():
    x, w = ir.TensorType("f32", (4, 8)), ir.TensorType("f32", (8, 4))

    def loss(x, w):
        a = ir.apply("quantize", x, grains=(1, 4), blocks=(1, 4), dtype=E4M3, recipe="block")
        b = ir.apply("quantize", w, grains=(2, 1), blocks=(2, 1), dtype=E4M3, recipe="block")
        return ir.apply("scaled_einsum", *a, *b, equation="ij,jk->ik", dtype=np.dtype("f4"), recipe="block", apart="",
                        backward=E4M3)

    with pytest.raises(ValueError, match="both operands have scales for the same parts of dim j"):
        ir.record(loss, x, w)
    for wrong, message in (({"recipe": "rows"}, "a recipe is one of tensor, block, mx, nvfp4"),
                           ({"grains": (3, 1)}, "grains divide"), ({"blocks": (1,)}, "a number for each of 2 dims"),
                           ({"recipe": "nvfp4"}, "nvfp4 needs packed and tensor_grains"),
                           ({"packed": 1}, "mx takes no packed"),
                           ({"recipe": "nvfp4", "packed": 2, "tensor_grains": (1, 1)}, "packed is a dim of even extent"),
                           ({"recipe": "nvfp4", "packed": 1, "tensor_grains": (1,)}, "tensor_grains have a number for each"),
                           ({"recipe": "nvfp4", "packed": 1, "tensor_grains": (3, 1)}, "grains divide")):
        how = {"grains": (1, 1), "blocks": (1, 1), "dtype": E4M3, "recipe": "mx"} | wrong
        with pytest.raises(ValueError, match=message):
            ir.record(lambda x, how=how: ir.apply("quantize", x, **how)[0], x)


def test_a_program_with_scales_reads_back():
    for recipe in RECIPES:
        x, w = np.zeros((2, 32), BF16), np.zeros((32, 4), BF16)
        function = ir.gradient(recorded(recipe, x, w, dtype=BF16, equation="bd,dn->bn"))
        assert ir.parse(str(function)) == function
    function = ir.gradient(recorded("mx", x, w, dtype=BF16, equation="bd,dn->bn"))
    assert run(function.ops[0], [np.ones((2, 32), BF16)])[0].dtype == E4M3
