"""Mixed precision: narrow weights and activations, wide state; bytes of each parameter, and steps of training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from localized_runs import run_everywhere
from numpy.testing import assert_array_equal
from transformed import MODELS, assert_trained, interpreted, model_step, trained

from parallelism import Mesh, ir, models
from parallelism.execution import TrainedPipeline
from parallelism.layouts import localize
from parallelism.simulation import simulate
from parallelism.transforms import (
    SGD,
    Adam,
    AdamW,
    MixedPrecision,
    Parts,
    Strategy,
    categories,
    first_state,
    following,
    train_step,
)

BF16 = ir.TensorType("bf16", ()).dtype


def bytes_by_category(step, mesh):
    """What a device holds at the end of the backward."""
    program, category = localize(step, mesh).program(), categories(step)
    held = Counter()
    for value in program.values:
        if value.name in category:
            held[category[value.name]] += value.type.nbytes
    return held


def one_product(parameters, rows=1024):
    """A model of so many parameters, a multiple of 1024, in float32."""
    return ir.record(
        lambda p, x: np.sum((x @ p["w"]) ** 2), {"w": ir.TensorType("f32", (1024, parameters // 1024))},
        ir.TensorType("f32", (rows, 1024)))


# Rajbhandari et al. 2020, table 1, in GB: by devices, the stages 1, 2 and 3.  Without a stage: 16 bytes a parameter.
ZERO_TABLE = {
    7.5e9: {4: (52.5, 41.25, 30), 16: (35.62, 21.56, 7.5), 64: (31.41, 16.64, 1.88),
            256: (30.35, 15.41, 0.47), 1024: (30.09, 15.1, 0.12)},
    128e9: {4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
            1024: (513.5, 257.75, 2)},
    1e12: {4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187.5, 2218.75, 250),
           256: (4046.88, 2054.69, 62.5), 1024: (4011.72, 2013.67, 15.62)},
}


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ZERO_TABLE)
def test_memory_is_that_of_the_table_of_zero(parameters):
    step = train_step(one_product(int(parameters)), Adam())
    precision = MixedPrecision("bfloat16", gradients="bfloat16")
    for devices, row in ZERO_TABLE[parameters].items():
        stages, expected_of = ("zero=1", "zero=2", "zero=3"), row
        if devices == 4:        # without a stage the number of devices says nothing
            stages, expected_of = ("", *stages), (16 * parameters / 1e9, *row)
        for stage, expected in zip(stages, expected_of, strict=True):
            strategy, mesh = Strategy.parse_on_mesh(f"dp={devices} {stage}")
            held = bytes_by_category(Strategy(strategy, precision)(step), mesh)
            assert (sum(held.values()) - held["inputs"]) / 1e9 == pytest.approx(expected, abs=0.0051), (devices, stage)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("gradients", "expected"), [("float32", 4), ("bfloat16", 2)])
def test_a_parameter_takes_18_or_16_bytes(gradients, expected):
    # Narayanan et al. 2021 and Megatron-LM: 2 + 4 + 12; ZeRO, section 3.1: 2 + 2 + 12.
    spec = models.TransformerSpec(layers=1, width=16, heads=4, vocabulary=10, sequence=6)
    step = MixedPrecision("bfloat16", gradients)(train_step(spec.function(4), Adam()))
    held = bytes_by_category(step, Mesh(one=1))
    assert held["weights"] == 2 * spec.parameters and held["gradients"] == expected * spec.parameters
    assert held["optimizer"] == 12 * spec.parameters + 8        # and the number of updates
    activations = {value.type.dtype for op in Parts.of(step).forward.ops for value in op.outputs
                   if (op.region or "").startswith("block") and value.type.ndim == 3}
    assert activations == {BF16, np.dtype(np.float32)}          # float32: the log-sum-exp of attention
    assert Parts.of(step).forward.outputs[0].type.dtype == np.float32


@pytest.mark.parametrize("words", ["mean:bf16,square:bf16", "main:f16", "square:f16", "f32,mean:f16", "bf16,main:bf16"])
def test_dtypes_of_the_state_read_back_as_they_are_written(words):
    strategy = Strategy.parse(f"precision=bf16,{words}")
    assert Strategy.parse(str(strategy)) == strategy != Strategy.parse("precision=bf16")
    assert str(strategy) == f"precision=bf16,{words.removeprefix('f32,')}" and eval(repr(strategy)) == strategy


@pytest.mark.parametrize(("words", "message"), [
    ("bf16,bf16,bf16", "precision is followed by one dtype, or by two with a comma, got 3"), ("mean:bf16", ".* got 0"),
    ("bf16,velocity:bf16", "behind the dtypes of precision stand main, mean, square, products, .*; got 'velocity'"),
    ("bf16,mean:bf16,mean:f16", "precision names a part of it twice"),
    ("bf16,mean:i32", "the mean of MixedPrecision must be floating-point"),
])
def test_dtypes_of_the_state_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        Strategy.parse(f"precision={words}")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "expected"), [
    ("mean:bf16,square:bf16", 4 + 2 + 2), ("main:f16", 2 + 4 + 4), ("square:f16", 4 + 4 + 2),
    ("main:f16,mean:bf16,square:bf16", 2 + 2 + 2),
])
def test_state_in_16_bits_takes_2_bytes_of_a_parameter(words, expected):
    # DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.3, is the first: means and squares in bfloat16, 2 + 4 + 8 bytes.
    spec = models.TransformerSpec(layers=1, width=16, heads=4, vocabulary=10, sequence=6)
    for text, shares in ((f"precision=bf16,{words}", 1), (f"dp=2 zero=1 precision=bf16,{words}", 2)):
        strategy, mesh = (Strategy.parse(text), Mesh(one=1)) if shares == 1 else Strategy.parse_on_mesh(text)
        held = bytes_by_category(strategy(train_step(spec.function(4), Adam())), mesh)
        assert held["weights"] == 2 * spec.parameters and held["gradients"] == 4 * spec.parameters
        assert held["optimizer"] == expected * spec.parameters // shares + 8


def test_a_step_goes_on_with_what_it_keeps():
    """AdamW by hand, with means, squares and main copies rounded to 16 bits after each step."""
    loss = ir.record(lambda p, x: np.sum(x @ p["w"]), {"w": ir.TensorType("f32", (3, 2))}, ir.TensorType("f32", (4, 3)))
    optimizer = AdamW(0.1)
    step = Strategy.parse("precision=bf16,main:f16,mean:bf16,square:bf16")(train_step(loss, optimizer))
    rng, f16 = np.random.default_rng(3), np.dtype(np.float16)
    first, x = rng.normal(size=(3, 2)), rng.integers(-3, 4, (4, 3)).astype("f4")
    inputs = first_state(step, {"p.w": first}) | {"x": x}
    types = {value.name: value.type.dtype for value in step.inputs}
    assert types == {"p.w": BF16, "x": np.dtype("f4"), "main.p.w": f16, "mean.p.w": BF16, "square.p.w": BF16,
                     "updates": np.dtype("i8")}
    main, mean, square = first.astype("f2"), np.zeros((3, 2), BF16), np.zeros((3, 2), BF16)
    gradient = np.repeat(x.sum(0), 2).reshape(3, 2)
    for count in (1, 2, 3):
        found = following(step, ir.interpret(step, [inputs[value.name] for value in step.inputs]).outputs)
        inputs = found | {"x": x}
        mean = (np.float32(0.9) * mean.astype("f4") + np.float32(0.1) * gradient).astype(BF16)
        square = (np.float32(0.999) * square.astype("f4") + np.float32(0.001) * gradient**2).astype(BF16)
        root = np.sqrt(square.astype("f4") / (1 - 0.999**count))
        change = mean.astype("f4") / (1 - 0.9**count) / (root + optimizer.epsilon)
        wide = main.astype("f4")
        main = (wide - 0.1 * (change + optimizer.weight_decay * wide)).astype("f2")
        for name, wanted in (("mean.p.w", mean), ("square.p.w", square), ("main.p.w", main), ("p.w", main.astype(BF16))):
            assert found[name].dtype == wanted.dtype
            np.testing.assert_allclose(found[name].astype("f4"), wanted.astype("f4"), rtol=2**-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2 zero=1", "dp=2 tp=2 sp zero=3", "dp=3 zero=2"])
def test_state_in_16_bits_is_split_as_any_other(text):
    alone = Strategy.parse("precision=bf16,mean:bf16,square:bf16")(model_step("llama", 6, Adam(0.01), clip=1.0))
    strategy, mesh = Strategy.parse_on_mesh(f"{text} precision=bf16,mean:bf16,square:bf16")
    localized = localize(strategy(model_step("llama", 6, Adam(0.01), clip=1.0)), mesh)
    found = trained(alone, lambda inputs: run_everywhere(localized, inputs))
    assert_trained(found, interpreted(alone), tolerance=0.1)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("text", ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 tp=2 sp zero=3", "dp:node=2 dp=2 zero=3"])
@pytest.mark.parametrize(("gradients", "dtype"), [("bf16", BF16), ("f32", np.dtype(np.float32))])
def test_gradients_are_summed_over_devices_in_the_dtype_in_which_they_are_kept(text, gradients, dtype):
    spec = models.TransformerSpec(layers=1, width=16, heads=4, vocabulary=12, sequence=6)
    strategy, mesh = Strategy.parse_on_mesh(f"{text} precision=bf16,{gradients}")
    step = strategy(train_step(spec.function(4), Adam()))
    program = localize(step, mesh).program()
    made = {value.name: op for op in program.ops for value in op.outputs}
    summed = Counter()
    for value in Parts.of(step).gradients:
        op = made[value.name]
        if "zero=1" in text:        # the update sums it
            op = next(op for op in program.ops if value.name in [each.name for each in op.inputs])
        while op.kind in ("all_reduce", "reduce_scatter", "all_gather"):
            summed[op.inputs[0].type.dtype, op["axes"]] += op.kind != "all_gather"
            op = made[op.inputs[0].name]
    assert {each for each, _ in summed} == {dtype}
    assert sum(count for (_, axes), count in summed.items() if "dp" in axes) >= len(Parts.of(step).gradients)


@pytest.mark.slow
@pytest.mark.parametrize(("gradients", "size"), [("f32", 4), ("bf16", 2)])
@pytest.mark.parametrize("text", ["pp=2 1f1b:4", "pp=2 zero_bubble_h1:4 tp=2 sp", "pp=2 1f1b:4 dp=2 zero=3"])
def test_a_stage_keeps_gradients_in_their_own_dtype(text, gradients, size):
    # Narayanan et al. 2021: 2 + 4 + 12 bytes a parameter; ZeRO, section 3.1: 2 + 2 + 12.
    spec = models.TransformerSpec(layers=2, width=16, heads=4, vocabulary=12, sequence=6, tied=False)
    strategy, mesh = Strategy.parse_on_mesh(f"{text} precision=bf16,{gradients}")
    step = strategy(train_step(spec.function(ir.symbol("B")), Adam()))
    program = TrainedPipeline(step, mesh)
    trace = simulate(program, "dgx-h100", mesh=mesh, batch=8)
    for rank, (position, _) in enumerate(program.places(mesh)):
        stage = program.stages.functions[position]
        laid = {value.name: value for value in program.stages.function.inputs}
        place = program.place(mesh, rank)
        counts = [int(np.prod(value.layout.local_shape(value.type.shape, program.mesh_inside, place)))
                  if value.layout and program.mesh_inside else int(value.type.size)
                  for value in map(laid.get, stage.trained)]
        held = sum(counts)
        assert trace.peak_bytes(rank, "weights") == 2 * held
        assert trace.peak_bytes(rank, "optimizer") == 12 * held + 8
        # One gradient of a microbatch lives beside the sums: narrow, or wide where it was summed inside the stage.
        more = trace.peak_bytes(rank, "gradients") - size * held
        assert 2 * max(counts) <= more <= size * max(counts)
    sums = {event.dtype for event in trace if event.kind == "collective" and event.name == "reduce_scatter"}
    if "zero=3" in text:
        assert sums == {"float32" if gradients == "f32" else "bfloat16"}


def test_the_main_copy_keeps_what_the_weights_round_off():
    types = {"w": ir.TensorType("f32", (2, 1))}, ir.TensorType("f32", (2, 2))
    step = MixedPrecision("bfloat16")(train_step(
        ir.record(lambda p, x: np.sum((x @ p["w"]) ** 2) / 2, *types), SGD(2.0**-10)))
    main = np.array([[1.0], [2.0]], "f4")
    narrow, inputs = main.astype(BF16), first_state(step, {"p.w": main})
    for _ in range(3):
        loss, *_ = outputs = ir.interpret(step, inputs | {"x": np.eye(2, dtype="f4")}).outputs
        assert loss == np.sum(narrow.astype("f4") ** 2) / 2
        main = main - np.float32(2.0**-10) * narrow.astype("f4")
        narrow = main.astype(BF16)
        inputs = following(step, outputs)
        assert_array_equal(inputs["main.p.w"], main)
        assert_array_equal(inputs["p.w"], narrow)
        assert inputs["p.w"].dtype == BF16
    assert (main != narrow.astype("f4")).any()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_step_in_two_dtypes_trains_nearly_as_in_one_and_the_same_on_many_devices(model):
    rows = 4
    alone = model_step(model, rows, SGD(0.1, 0.5))
    for text, tolerance in (("precision=f32,f64", 2e-5), ("precision=bf16", 0.1)):
        step = Strategy.parse(text)(alone)
        assert ir.parse(str(step)) == step == Parts.of(step).joined()
        single = interpreted(step)
        for found, expected in zip(single[0], interpreted(alone)[0], strict=True):
            assert found == pytest.approx(expected, rel=tolerance)
        strategy, mesh = Strategy.parse_on_mesh(f"dp=2 tp=2 zero=1 {text}")
        localized = localize(strategy(alone), mesh)
        found = trained(step, lambda inputs, run=localized: run_everywhere(run, inputs))
        for side in (found[1], single[1]):
            side.update((name, np.asarray(array, np.float64)) for name, array in side.items())
        assert_trained(found, single, tolerance)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [("dp", "precision=bf16"), ("tp", "precision=bf16", "sp"), ("dp", "zero=2")])
def test_precision_before_or_after_is_the_same_program(order):
    alone = model_step("llama", 4, Adam())
    step = alone
    for text in order:
        step = Strategy.parse(text)(step)
    assert step == Strategy.parse(" ".join(order))(alone)


STEP = model_step("mlp", 4, SGD(0.1))


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: MixedPrecision()(MixedPrecision()(STEP)), ValueError,
     "precision=bf16: @mlp.step has main copies of its weights already; a transform is applied once"),
    (lambda: MixedPrecision("float64")(STEP), ValueError, "wider than float64, got float64"),
    (lambda: MixedPrecision()(MODELS["mlp"](4)), ValueError, "precision=bf16: @mlp has no optimizer"),
    (lambda: MixedPrecision()(Strategy.parse("dp zero=1")(STEP)), ValueError, "comes before SequenceParallel and Zero"),
    (lambda: MixedPrecision("int8"), ValueError, "the dtype of MixedPrecision must be floating-point, got int8"),
    (lambda: MixedPrecision("bf17"), TypeError, "a dtype must be one of"),
    (lambda: Strategy.parse("precision=a,b,c"), ValueError,
     "precision is followed by one dtype, or by two with a comma, got 3"),
])
def test_a_precision_that_does_not_fit_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_the_text_of_a_precision():
    assert str(MixedPrecision()) == "precision=bf16" and Strategy.parse("precision=bf16") == Strategy(MixedPrecision())
    assert str(MixedPrecision("f16", "f16")) == "precision=f16,f16"
    assert Strategy.parse("precision=f8e5m2,bf16") == Strategy(MixedPrecision("float8_e5m2", "bfloat16"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["precision=bf16", "tp=2 sp precision=bf16", "dp=2 tp=3 precision=bf16"])
def test_a_fused_loss_reads_narrow_logits_and_gives_the_same_bits(text):
    """No array of the logits' shape is in float32, and each number is widened as before, so nothing else changes."""
    found = []
    for fused in (False, True):
        spec = models.TransformerSpec(
            layers=1, width=12, heads=3, vocabulary=18, sequence=6, dtype="float32", fused_cross_entropy=fused)
        strategy, mesh = Strategy.parse_on_mesh(text if "=2" in text else f"dp=1 {text}")
        step = strategy(train_step(spec.function(4), SGD(0.1)))
        logits = [value for value in step.values if value.type.shape == (4, 6, 18)]
        assert {str(value.type.dtype) for value in logits} == ({"bfloat16"} if fused else {"bfloat16", "float32"})
        rng = np.random.default_rng(7)
        given = first_state(step, {f"p.{name}": 0.3 * rng.standard_normal(shape).astype("f4")
                                   for name, shape in spec.weights.items()})
        given |= {name: rng.integers(18, size=(4, 6)) for name in ("tokens", "targets")}
        localized = localize(step, mesh)
        found.append(run_everywhere(localized, [np.asarray(given[value.name]) for value in step.inputs]))
    for plain, fused in zip(*found, strict=True):
        assert plain.dtype == fused.dtype
        assert_array_equal(plain, fused)
