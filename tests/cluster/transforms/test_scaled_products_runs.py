"""Steps whose products are in float8, on devices: the numbers of the whole, and the events of their simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trained_runs import ON, B, assert_model_trains, assert_simulated, in_turn, simulated, trained_on
from transformed import VOCABULARY, arrays, interpreted, model_step, trained

from parallelism import Mesh, ir, models
from parallelism.execution import operation_on
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, MixedPrecision, Parts, Strategy, first_state, train_step

FLOAT8 = "precision=bf16,products:f8"
RECIPES = ("tensor", "delayed", "block", "mx", "nvfp4")
WORDS = {recipe: f"precision=bf16,products:{'f4' if recipe == 'nvfp4' else 'f8'},recipe:{recipe}" for recipe in RECIPES}
WORDS["delayed"] = "precision=bf16,products:f8,recipe:tensor,history:3"
WIDER = models.TransformerSpec(
    layers=2, width=64, heads=4, key_value_heads=2, feed_forward=96, vocabulary=VOCABULARY, sequence=8, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False)
"""Its tensors are split where scales are, over 2 devices and over 4."""


def in_float8(text, recipe="tensor", more=""):
    return f"{text} {WORDS[recipe]}{more}"


def wider_step(rows, rule):
    return train_step(WIDER.function(rows), rule)


CASES = [
    ("gpt", 4, in_float8("dp=2")), ("llama", 4, in_float8("dp=2 tp=2 zero=1", "block")),
    ("gpt", 3, in_float8("tp=2 sp", "mx")), ("llama", 4, in_float8("dp=2 tp=2 sp zero=1", "block", ",gathers:f8")),
    ("gpt", 4, in_float8("dp=2 zero=3", "block")), ("llama", 4, in_float8("dp=2 zero=3", "mx", ",gathers:f8")),
    ("llama", 6, in_float8("pp=2 1f1b:3 tp=2 sp")), ("gpt", 7, in_float8("pp=2 zb_h1:3 dp=2 zero=1", "block")),
    ("gpt", 4, in_float8("dp=2 recompute=block.*", "mx")), ("gpt", 4, in_float8("dp=2 zero=2 overlap=1KB")),
    ("mixtral", 4, in_float8("dp=2 ep=2", "block")), ("deepseek", 3, in_float8("tp=2", "mx")), ("gpt", 3, in_float8("cp=2")),
    ("llama", 4, in_float8("pp=2 interleaved_1f1b:2x2", "block")), ("mlp", 6, in_float8("dp=3")),
    ("llama", 4, in_float8("dp=2 tp=2 sp zero=1", "nvfp4")), ("gpt", 4, in_float8("dp=2 zero=3", "nvfp4")),
    ("gpt", 7, in_float8("pp=2 zb_h1:3 dp=2 zero=1", "nvfp4")), ("gpt", 4, in_float8("cp=2 recompute=block.*", "nvfp4")),
    ("mixtral", 4, in_float8("dp=2 ep=2", "nvfp4")),
    ("llama", 4, in_float8("dp=2 tp=2 sp zero=1", "delayed")), ("gpt", 4, in_float8("dp=2 zero=3", "delayed", ",gathers:f8")),
    ("gpt", 7, in_float8("pp=2 zb_h1:3 dp=2 zero=1", "delayed", ",amax:most_recent")),
    ("mlp", 6, in_float8("dp=3", "delayed")), ("gpt", 4, in_float8("fsdp=2 overlap pp=1 1f1b:2", "delayed")),
    ("llama", 6, in_float8("pp=2 1f1b:3 tp=2 sp", "delayed")), ("gpt", 4, in_float8("cp=2 recompute=block.*", "delayed")),
    ("gpt", 4, in_float8("dp=2 zero=2 overlap=1KB", "delayed")), ("mixtral", 4, in_float8("dp=2 ep=2", "delayed")),
    ("llama", 4, in_float8("pp=2 interleaved_1f1b:2x2", "delayed")),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(30)
@pytest.mark.parametrize(("model", "rows", "text", "backend"), in_turn(CASES), ids=[f"{m}-{t}" for m, _, t in CASES])
def test_a_step_in_float8_runs_as_it_is_simulated_and_near_the_step_alone(cluster_of, model, rows, text, backend):
    strategy, mesh = Strategy.parse_on_mesh(text.replace("interleaved_1f1b:2x2", "interleaved_1f1b:2x1"))
    assert Strategy.parse(str(strategy)) == strategy
    alone = model_step(model, rows, SGD(0.1))
    step = strategy(model_step(model, B, SGD(0.1)) if strategy.pipeline else alone)
    steps = 1 if model in ("mixtral", "deepseek") else 2        # rounding may choose other experts
    (losses, state), trace = trained_on(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, steps)
    assert_simulated(simulated(step, mesh, rows), trace)
    precision = next(each for each in strategy.transforms if isinstance(each, MixedPrecision))
    wanted, expected = interpreted(precision(alone), like=alone, steps=steps)
    np.testing.assert_allclose(losses, wanted, rtol=6e-2 if "nvfp4" in text else 2e-2)
    for value in Parts.of(alone).parameters if model != "deepseek" else ():
        found, near = (each[f"main.{value.name}"].astype(float) for each in (state, expected))
        np.testing.assert_allclose(found, near, atol=0.05 if "nvfp4" in text else 0.02, err_msg=value.name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("text", "backend"), [("pp=2 1f1b:1", "process"), ("pp=2 gpipe:1 recompute=block.*", "thread")])
def test_where_no_block_is_cut_every_bit_is_that_of_the_step_alone(cluster_of, text, backend, recipe):
    strategy, mesh = Strategy.parse_on_mesh(in_float8(text, recipe))
    alone = Strategy.parse(WORDS[recipe])(wider_step(3, Adam(0.01)))
    step = strategy(wider_step(B, Adam(0.01)))
    (losses, state), _ = trained_on(cluster_of(mesh, backend, compute="modelled", **ON), step, wider_step(3, Adam(0.01)))
    wanted, expected = trained(alone, lambda given: ir.interpret(alone, given).outputs, like=wider_step(3, Adam(0.01)))
    np.testing.assert_array_equal(losses, wanted)
    few = {"float4.p.0.up", "tensor_scales.p.0.up"} if recipe == "nvfp4" else {"float8.p.0.up"}
    assert {*few, "scales.p.0.up", "main.p.0.up"} <= state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rows_of_devices_have_scales_of_their_own_so_their_losses_are_those_of_the_whole(cluster_of, recipe):
    strategy, mesh = Strategy.parse_on_mesh(in_float8("dp=3", recipe))
    plain = wider_step(6, SGD(0.1))
    step = strategy(plain)
    (losses, _), _ = trained_on(cluster_of(mesh, "thread", compute="modelled", **ON), step, plain, steps=1)
    wanted, _ = interpreted(Strategy.parse(WORDS[recipe])(plain), like=plain, steps=1)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)


MAXIMA_OF = ("dp=4", "tp=2", "tp=2 sp", "dp=2 zero=3", "dp=2 zero=2 overlap=1KB", "cp=2", "pp=2 1f1b:2",
             "pp=2 1f1b:2 tp=2 sp", "dp=2 pp=2 zb_h1:2 zero=1", "fsdp=2 overlap pp=1 1f1b:2")


@pytest.mark.slow
@pytest.mark.parametrize("text", MAXIMA_OF)
def test_maxima_are_the_largest_of_all_microbatches_and_devices_and_make_the_next_scales(cluster_of, text):
    strategy, mesh = Strategy.parse_on_mesh(in_float8(text, "delayed"))
    plain = wider_step(4, SGD(0.1))
    step = strategy(wider_step(B, SGD(0.1)) if strategy.pipeline else plain)
    (_, state), trace = trained_on(cluster_of(mesh, "thread", compute="modelled", **ON), step, plain, steps=2)
    assert_simulated(simulated(step, mesh, 4), trace)
    _, expected = interpreted(Strategy.parse(WORDS["delayed"])(plain), like=plain, steps=2)
    histories = [name for name in expected if name.startswith("history.")]
    assert len(histories) == 2 * (5 + 5 + 4)               # of five weights, their five results and four inputs in a block
    assert state.keys() == expected.keys()
    for name in histories:
        own, most = name.removeprefix("history."), 57344 if ".gradient." in name else 448
        np.testing.assert_allclose(state[name][:2], expected[name][:2], rtol=0.25, err_msg=name)      # not twice as large
        # Of weights there is one more: that of the first copy.
        assert expected[name][1] > 0 and (expected[name][2] > 0) == own.startswith("scales.")
        # Of a weight the newest maximum, that of the copy for the next step, does not count yet.
        of = state[name][1:] if own.startswith("scales.") else state[name]
        np.testing.assert_array_equal(state[own], np.float32(of.max() / np.float32(most)))


@pytest.mark.parametrize(("words", "largest"), [("history:3", 4.0), ("history:3,amax:most_recent", 1.0), ("history:1", 1.0)])
def test_a_scale_is_from_the_largest_of_the_steps_before_or_from_the_last(words, largest):
    step = Strategy.parse(f"{FLOAT8},{words}")(wider_step(2, SGD(0.1)))
    name = "delayed.input.p.0.up"
    made = {value.name: op for op in step.ops for value in op.outputs}
    history = made[f"next.history.{name}"].operator.run(
        [np.array([4, 2, 8][:step_history(step, name)], np.float32), np.float32(1)], ())
    for newest, scale in ((history, largest / 448), (np.zeros_like(history), 7.0), (np.full_like(history, np.inf), 7.0)):
        op = made[f"next.{name}"]
        assert op.operator.run([newest, np.float32(7)], op.attributes) == np.float32(scale)


def step_history(step, name):
    return next(value.type.shape[0] for value in step.inputs if value.name == f"history.{name}")


@pytest.mark.slow
def test_a_step_in_float8_is_within_the_rounding_of_that_in_16_bits():
    plain = wider_step(4, SGD(0.1))
    losses16, state16 = interpreted(Strategy.parse("precision=bf16")(plain), like=plain, steps=3)
    for recipe in RECIPES:
        losses, state = interpreted(Strategy.parse(WORDS[recipe])(plain), like=plain, steps=3)
        near, share = (2.0**-2, 1.25) if recipe == "nvfp4" else (2.0**-4, 0.75)
        np.testing.assert_allclose(losses, losses16, rtol=near)
        first = arrays(Parts.of(plain).parameters, np.random.default_rng(0))
        for name in ("p.0.up", "p.1.down", "p.tokens"):
            moved = np.linalg.norm(state16[f"main.{name}"] - first[name])
            assert np.linalg.norm(state[f"main.{name}"] - state16[f"main.{name}"]) < share * moved, name


def test_what_is_in_8_bits_and_what_stays(cluster_of):
    step = Strategy.parse(f"{FLOAT8},recipe:block")(wider_step(4, Adam(0.01)))
    scaled = [op.region for op in step.ops if op.kind == "scaled_einsum" and not op.region.startswith("gradient")]
    assert scaled[:len(scaled) // 2] == [f"block.0.{place}" for place in (
        "attention.qkv", "attention.out", "feed_forward.up", "feed_forward.up", "feed_forward.down")]
    plain = [op for op in step.ops if op.kind in ("einsum", "matmul")]
    assert {op.region for op in plain} == {"head", "gradient.head"}
    routed = Strategy.parse(FLOAT8)(model_step("mixtral", 4, Adam(0.01)))
    assert {op.region for op in routed.ops if op.kind in ("einsum", "matmul")} >= {"head", "block.0.feed_forward.router"}
    names = {value.name for value in Parts.of(routed).copies}
    assert {"float8.p.0.expert_up", "scales.p.0.expert_down"} <= names
    assert not any("router" in name for name in names)


def test_the_first_and_the_last_blocks_may_stay_in_16_bits():
    plain = train_step(replace(WIDER, layers=4).function(2), SGD(0.1))
    step = Strategy.parse(f"{FLOAT8},first:1,last:2")(plain)
    scaled = {op.region for op in step.ops if op.kind == "scaled_einsum" and op.region.startswith("block")}
    assert {region.split(".")[1] for region in scaled} == {"1"}
    with pytest.raises(ValueError, match="no product of a weight inside of a block"):
        Strategy.parse(f"{FLOAT8},first:3,last:2")(plain)


LARGE = replace(WIDER, width=1024, heads=8, key_value_heads=8, feed_forward=2048, sequence=512)
OF_BLOCKS = 2 * (4 * 1024 * 1024 + 3 * 1024 * 2048)
"""The weights of products in the blocks."""


def bytes_of_weights(words):
    parts = Parts.of(Strategy.parse(words)(train_step(LARGE.function(2), SGD(0.1))))
    return sum(value.type.nbytes for value in (*parts.parameters, *parts.copies))


def test_bytes_of_weights_in_4_bits():
    scales = OF_BLOCKS // 256 + 2 * 5 * 4 * 16 * 16            # for 16 x 16 elements, and for each of five weights in a block
    assert bytes_of_weights(WORDS["nvfp4"]) - bytes_of_weights("precision=bf16") == OF_BLOCKS // 2 + scales


@pytest.mark.parametrize(("recipe", "scales"), [("block", 4 / (128 * 128)), ("mx", 1 / 32)])
def test_bytes_of_weights(recipe, scales):
    plain = bytes_of_weights("precision=bf16")
    assert bytes_of_weights(f"{FLOAT8},recipe:{recipe}") - plain == OF_BLOCKS * (1 + scales)
    assert bytes_of_weights(f"{FLOAT8},recipe:{recipe},gathers:f8") - plain == OF_BLOCKS * (1 + scales - 2)


@pytest.mark.slow
def test_bytes_that_zero_gathers():
    def gathered(words):
        trace = simulate(Strategy.parse(words)(train_step(LARGE.function(2), SGD(0.1))), "b200-node", mesh=Mesh(dp=2))
        return sum(event.bytes_received for event in trace if event.name == "all_gather" and event.rank == 0)

    for zero, passes in ((1, 1), (3, 2)):       # by the update; in the forward and in the backward
        narrow, wide = (gathered(f"dp zero={zero} precision=bf16{more}") for more in (
            ",products:f8,recipe:block,gathers:f8", ""))
        assert wide - narrow == passes * OF_BLOCKS * (2 - 1 - 4 / (128 * 128)) / 2
        # Without gathers:f8 the update gathers 16 bits; ZeRO 3 gathers the copies in 8 bits all the same.
        assert gathered(f"dp zero={zero} {FLOAT8},recipe:block") == (wide if zero == 1 else narrow)
        if zero == 3:       # half a byte, scales of 1 byte for 16 x 16, and for each of ten weights one for all
            four = gathered(f"dp zero=3 {WORDS['nvfp4']}")
            assert wide - four == 2 * (OF_BLOCKS * (2 - 1 / 2 - 1 / 256) - 2 * 5 * 4 * 16 * 16) / 2


@pytest.mark.parametrize(("words", "message"), [
    ("precision=bf16,products:f16", "products of MixedPrecision is one of"),
    ("precision=bf16,recipe:block", "needs products"), (f"{FLOAT8},gathers:f32", "gathers of MixedPrecision"),
    (f"{FLOAT8},recipe:rows", "recipe of MixedPrecision is one of tensor, block, mx"),
    (f"{FLOAT8},first:x", "first_blocks"), (f"{FLOAT8},products:f8", "twice"),
    ("precision=bf16,scales:f8", "behind the dtypes of precision stand"),
    ("precision=bf16,products:f4", "'nvfp4' need each other, got 'float4' and 'tensor'"),
    (f"{FLOAT8},recipe:nvfp4", "need each other, got 'float8' and 'nvfp4'"),
    (f"{WORDS['nvfp4']},gathers:f8", "needs products in float8"),
    (f"{FLOAT8},history:x", "history of MixedPrecision must be a number of at least 0"),
    (f"{FLOAT8},recipe:mx,history:2", "history=2 of MixedPrecision needs recipe='tensor', got 'mx'"),
    (f"{FLOAT8},amax:most_recent", "needs a history"), (f"{FLOAT8},history:2,amax:mean", "amax of MixedPrecision is one of"),
    ("precision=bf16,history:2", "needs products='float8'"),
])
def test_wrong_words_are_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        Strategy.parse(words)
    assert "\n" not in str(caught.value)


def test_the_operation_of_a_step_in_float8_takes_the_state_of_its_first_step():
    step = Strategy.parse(in_float8("dp"))(wider_step(4, Adam(0.01)))
    parameters = {value.name: np.full(value.type.shape, 0.25) for value in Parts.of(step).parameters}
    first = first_state(step, parameters)
    np.testing.assert_array_equal(first["float8.p.0.up"].astype(float), np.full((64, 96), 448.0))
    np.testing.assert_array_equal(first["scales.p.0.up"], np.full((16, 16), np.float32(0.25 / 448)))
    assert operation_on(step, Mesh(dp=2)) is not None


@pytest.mark.takes_seconds
@pytest.mark.parametrize("text", ["pp=2 1f1b:3 dp=2", "pp=1 1f1b:2 dp=2 zero=1"])
def test_weights_that_are_only_named_like_scales_of_earlier_steps_have_sums_for_gradients(cluster_of, text):
    assert_model_trains(cluster_of, "named_like_scales", 12, text, SGD(0.1))
