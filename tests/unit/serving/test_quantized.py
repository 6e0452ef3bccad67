"""Weights in few bits: what is rounded, and that a program dequantizes it where it is read."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from served_models import SERVED, parameters_of

from parallelism import Mesh, ir, models, simulate
from parallelism.dtypes import as_dtype
from parallelism.models.inference import Part
from parallelism.serving import EngineSettings, ServedModel
from parallelism.serving.placement import Placement, usual_strategy
from parallelism.serving.quantized import QuantizedWeights

SPEC = SERVED["mixtral"]
EXPERTS = ("expert_gate", "expert_up", "expert_down")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int4", 7), ("float8_e4m3fn", 448)])
@pytest.mark.parametrize(("shape", "group"), [((7, 3), 3), ((6, 4), 2), ((5, 2), None), ((1, 1), 4), ((2, 5, 3), 4)])
def test_the_largest_of_each_group_is_kept_and_no_number_is_off_by_more_than_half_a_step(dtype, largest, shape, group):
    weight = np.random.default_rng(0).normal(size=shape)
    weight[..., :1, 0] = 0.0
    chosen = QuantizedWeights(dtype, group)
    narrow, scales = chosen.rounded(weight)
    assert (narrow.dtype, scales.dtype) == (as_dtype(dtype), np.float64)
    assert scales.shape == chosen.scale_shape(shape)
    rows = shape[-2] if group is None else group
    for start in range(0, shape[-2], rows):
        part = weight[..., start:start + rows, :]
        scale = scales[..., start // rows, :]
        assert_allclose(scale * largest, np.where((part == 0).all(axis=-2), largest, np.abs(part).max(axis=-2)))
        back = narrow[..., start:start + rows, :].astype("f8") * scale[..., None, :]
        step = scale[..., None, :] if dtype != "float8_e4m3fn" else np.maximum(np.abs(part) / 8, scale[..., None, :] / 256)
        assert (np.abs(back - part) <= step / 2 + 1e-12).all()
    whole = chosen.dequantized({"0.up": weight})["0.up"]
    assert_array_equal(chosen.dequantized({"norm": weight, "0.router": weight})["norm"], weight)
    assert_allclose(whole, weight, rtol=0, atol=np.abs(weight).max() / min(largest, 16))


def test_products_of_blocks_are_narrow_and_nothing_else_is():
    settings = EngineSettings(batch=2, chunk=4, page_tokens=4, pages={"full": 3})
    placement = Placement(SPEC, Mesh(tp=2), usual_strategy(Mesh(tp=2)))
    quantized = QuantizedWeights("int4", 5)
    function = quantized.program(placement.function(Part(0, 3, 3), settings))
    types = {value.name: value.type for value in function.inputs if value.name.startswith("p.")}
    narrow = {name for name, type in types.items() if type.dtype == np.uint8}           # two numbers in a byte
    assert narrow == {f"p.{layer}.{name}" for layer in range(3) for name in ("qkv", "out", *EXPERTS)}
    assert types["p.0.router"].dtype == types["p.tokens"].dtype == np.float64
    assert types["p.0.expert_up"].shape == (4, 6, 10)
    assert types["p.0.expert_up.scale"].shape == (4, 3, 10)
    layouts = {value.name: value.layout for value in function.inputs}
    assert layouts["p.0.out"].short() == "[tp, None]"
    assert layouts["p.0.out.scale"].short() == "[None, None]"
    assert layouts["p.0.qkv"].short() == layouts["p.0.qkv.scale"].short() == "[None, tp]"


@pytest.mark.parametrize("name", ["gpt2", "deepseek-v3"])
def test_any_program_of_inference_can_have_narrow_weights(name):
    spec, rng = SERVED[name], np.random.default_rng(2)
    parameters, chosen, decode = parameters_of(spec), QuantizedWeights("int4", 5), SERVED[name].decode(2, 6)
    cache = [rng.normal(size=value.type.shape) for value in decode.inputs if value.name.startswith("cache.")]
    narrow, others = chosen.arrays(parameters), [*cache, np.array([[3], [4]]), np.array([2, 5])]
    program = chosen.program(decode)
    weights = [narrow[value.name.removeprefix("p.")] for value in program.inputs if value.name.startswith("p.")]
    found = ir.interpret(program, [*weights, *others]).outputs
    usual = ir.interpret(decode, [*chosen.dequantized(parameters).values(), *others]).outputs
    for mine, whole in zip(found, usual, strict=True):
        assert_array_equal(mine, whole)


def test_two_integers_of_4_bits_of_a_column_lie_in_a_byte():
    weight = np.array([[7.0, -7], [-1, 0], [3, 2], [-6, 1]], np.float32)
    for rows, kept in ((4, [[0xF7, 0x09], [0xA3, 0x12]]), (3, [[7, -7], [-1, 0], [3, 2]])):
        narrow = QuantizedWeights("int4").arrays({"0.w": weight[:rows]})
        assert_array_equal(narrow["0.w"].astype(int), kept)         # an odd number of rows takes a byte each
        assert_array_equal(narrow["0.w.scale"], np.ones((1, 2)))
        assert_array_equal(QuantizedWeights("int4").dequantized({"0.w": weight[:rows]})["0.w"], weight[:rows])


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("dtype", "share"), [pytest.param("int8", 1.0, marks=pytest.mark.slow), ("int4", 0.5)])
def test_a_device_holds_the_bytes_of_narrow_weights_and_scales(dtype, share):
    settings = EngineSettings(batch=2, chunk=4, page_tokens=4, pages={"full": 3})
    mesh = Mesh(tp=2)
    placement = Placement(SERVED["gpt2"], mesh, usual_strategy(mesh))
    served = ServedModel(placement, settings, quantized=QuantizedWeights(dtype, 4))
    step = [{"t": 2, "r": 2, "pages": 1, "read_full": 8, "scored_full": 2}]
    trace = simulate(served.simulated(step), "dgx-h100")
    local = served.stages[0].program(1)
    assert trace.peak_bytes(1, "weights") == sum(
        int(value.type.nbytes) for value in local.inputs if value.name.startswith("p."))
    wide = ServedModel(placement, settings).stages[0].program(1)
    sizes = {value.name: value.type.size for value in wide.inputs}
    narrow = [value for value in local.inputs if f"{value.name}.scale" in {each.name for each in local.inputs}]
    assert len(narrow) > 5 and all(value.type.nbytes == share * sizes[value.name] for value in narrow)
    usual = simulate(ServedModel(placement, settings).simulated(step), "dgx-h100")
    assert trace.peak_bytes(1, "weights") < 0.6 * usual.peak_bytes(1, "weights")


@pytest.mark.slow
def test_one_process_generates_as_with_the_weights_that_were_rounded():
    spec, prompts = SERVED["deepseek-v3"], [[1, 2, 3], [4]]
    parameters = parameters_of(spec)
    rounded = QuantizedWeights("int4", 3).dequantized(parameters)
    found = models.generate(spec, parameters, prompts, 4, weights_dtype="int4", group=3)
    assert_array_equal(found, models.generate(spec, rounded, prompts, 4))
    changed = {name for name, array in parameters.items() if (array != rounded[name]).any()}
    assert {"0.query_down", "2.expert_up"} <= changed and not {"tokens", "norm", "2.router"} & changed


@pytest.mark.parametrize(("given", "message"), [
    ({"weights_dtype": "float32"}, "weights_dtype must be one of signed numbers in 8 or fewer bits, .*, got 'float32'"),
    ({"weights_dtype": "uint8"}, "weights_dtype must be one of signed numbers in 8 or fewer bits, .*, got 'uint8'"),
    ({"weights_dtype": "int5"}, "weights_dtype must be one of 8 or fewer bits, as int8, got 'int5'"),
    ({"weights_dtype": "int4", "group": 0}, "group must be an integer of at least 1, or None, got 0"),
    ({"cache_dtype": "int8"}, "cache_dtype must be floating-point, as float8_e4m3fn, .*; got 'int8'"),
    ({"group": 4}, "group=4 is for weights_dtype=, which is not given"),
])
def test_what_is_wrong_is_told(given, message):
    spec = SERVED["gpt2"]
    with pytest.raises(ValueError, match=message):
        models.generate(spec, parameters_of(spec), [[1]], 1, **given)
