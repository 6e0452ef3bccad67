"""Programs of devices: their shapes, who does the same, what they receive, and all of it with symbols."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from localized_runs import run_everywhere
from numpy.testing import assert_array_equal

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.layouts import Devices, annotate, localize, redistribute, step_of

T = ir.TensorType
MEGATRON = {"p.0.qkv": "[None, tp]", "p.0.out": "[tp, None]", "p.0.up": "[None, tp]", "p.0.down": "[tp, None]",
            "tokens": "[dp, None]"}
B, S, dp = ir.symbols("B S dp")


def gpt(batch=12, sequence=6):
    return annotate(ir.gradient(models.gpt(8, 12, 4, 1, sequence, batch), keep_outputs=True), MEGATRON)


def test_a_program_has_the_parts_of_its_device_and_says_what_it_says_to_others():
    function = annotate(ir.record(lambda x, w: x @ w, T("f8", (5, 6)), T("f8", (6, 4)), name="product"),
                        {"x": "[dp, tp]"})
    localized = localize(function, Mesh(dp=2, tp=2))
    assert str(localized.function) == """\
func @product(%x: tensor<5x6xf64> [dp, tp], %w: tensor<6x4xf64> [tp, None]) -> (tensor<5x4xf64> [dp, None]) {
  %0.1 = "matmul"(%x, %w) : (tensor<5x6xf64>, tensor<6x4xf64>) -> tensor<5x4xf64> [dp, None] partial=tp
  %0 = "reshard"(%0.1) {layout = "[dp, None]"} : (tensor<5x4xf64>) -> tensor<5x4xf64> [dp, None]
  return %0
}
"""
    assert str(localized.program(2)) == """\
func @product(%x: tensor<2x3xf64>, %w: tensor<3x4xf64>) -> (tensor<2x4xf64>) {
  %0.1 = "matmul"(%x, %w) : (tensor<2x3xf64>, tensor<3x4xf64>) -> tensor<2x4xf64>
  %0 = "all_reduce"(%0.1) {axes = ["tp"], group = 2, op = "sum"} : (tensor<2x4xf64>) -> tensor<2x4xf64>
  return %0
}
"""
    assert localized.classes == ((0, 2), (2, 2))
    assert [localized.class_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert localized.program(3) is localized.program(2)
    assert [localized.received(rank) for rank in range(4)] == [(0, 96), (0, 96), (0, 64), (0, 64)]
    assert localized.part(function.inputs[0], 3) == (slice(3, 5), slice(3, 6))
    assert ir.parse(str(localized.function)) == localized.function


def test_what_a_device_receives_is_exact_where_an_array_does_not_divide():
    function = annotate(ir.record(np.sum, T("f8", (7, 3)), name="total"), {"a": "[x, None]"})
    localized = localize(function, Mesh(x=3))
    assert [localized.received(rank) for rank in range(3)] == [(0, 16), (0, 8), (0, 8)]
    # in the program each op counts for the first of its group
    assert [localized.program(rank).ops[1].bytes_received for rank in range(3)] == [16, 16, 16]
    assert localized.classes == ((0, 1), (1, 2))
    assert {localized.class_in_time(rank) for rank in range(3)} == {0, 1}       # of 7 rows they have 3, 2 and 2


def test_an_all_reduce_of_pieces_that_differ_by_an_element_takes_all_equally_long():
    function = annotate(ir.record(lambda a: a.sum(axis=0), T("f8", (6, 4)), name="sums"), {"a": "[x, None]"})
    localized = localize(function, Mesh(x=3))
    assert [localized.class_of(rank) for rank in range(3)] == [0, 1, 1]     # of 4 elements they sum 2, 1 and 1
    assert [localized.class_in_time(rank) for rank in range(3)] == [0, 0, 0]


def test_a_step_of_several_dims_is_a_relayout_with_the_bytes_of_its_device():
    function = annotate(ir.record(lambda x: redistribute(np.exp(x), "[y, x]"), T("f8", (4, 6))), {"x": "[x, y]"})
    mesh = Mesh(x=2, y=2)
    localized = localize(function, mesh)
    op = localized.program(1).ops[1]
    assert (op.kind, op["step"], op["axes"], op["group"]) == ("relayout", "permute", ("x", "y"), 4)
    assert [localized.program(rank).ops[1].bytes_received for rank in range(4)] == [0, 48, 48, 0]
    assert [localized.received(rank) for rank in range(4)] == [(0, 0), (0, 48), (0, 48), (0, 0)]
    assert localized.classes == ((0, 2), (1, 2))
    step = step_of(op, mesh)
    assert step.bytes_received == (0, 48, 48, 0)
    assert (step.before, step.after) == (TensorSharding("x", "y"), TensorSharding("y", "x"))
    uneven = localize(annotate(function, {"x": "[(x, y), None]"}), Mesh(x=2, y=3))
    x = np.arange(24.0).reshape(4, 6)
    assert_array_equal(run_everywhere(uneven, [x])[0], np.exp(x))


def test_every_op_counts_what_the_plan_counts():
    localized = localize(gpt(batch=5, sequence=4), Mesh(dp=3, tp=2))
    first = 0
    assert len(localized.classes) > 1
    for ops, received in zip(localized.program(first).ops, localized.received(first), strict=True):
        assert ops.bytes_received == received


def test_random_numbers_and_places_are_those_of_the_whole():
    def fn(x, step):
        drawn = ir.apply("uniform", step, seed=3, whole=(5, 4), starts=(0, 0), shape=(5, 4), dtype=np.dtype("f8"))
        places = ir.apply("iota", dim=0, shape=(5, 4), starts=(7, 0), dtype=np.dtype("i8"))
        kept = ir.apply("dropout_mask", step, rate=0.5, seed=1, whole=(5, 4), starts=(0, 0), shape=(5, 4))
        return np.where(kept, x + drawn, places)

    function = annotate(ir.record(fn, T("f8", (5, 4)), T("i64", ())), {"x": "[x, y]"})
    localized = localize(function, Mesh(x=3, y=2))
    arrays = [np.ones((5, 4)), np.array(2)]
    assert_array_equal(run_everywhere(localized, arrays)[0], ir.interpret(function, arrays).outputs[0])
    # those of a class differ in where they begin
    first, second = localized.program(0), localized.program(1)
    assert localized.class_of(0) == localized.class_of(1)
    assert [op["starts"] for op in first.ops if "starts" in dict(op.attributes)] == [(0, 0), (7, 0), (0, 0)]
    assert [op["starts"] for op in second.ops if "starts" in dict(op.attributes)] == [(0, 2), (7, 2), (0, 2)]
    assert [op.outputs for op in first.ops] == [op.outputs for op in second.ops]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("layout", ["[x, y, None, None]", "[None, x, y, None]", "[None, (x, y), None, None]"])
def test_ops_of_several_outputs_begin_where_the_first_of_them_does(layout, rate):
    # Of 5 queries each attends to the columns up to its own: a part that begins elsewhere has another mask.
    def loss(q, k, v, weights, step):
        steps, whole = (step,) if rate else (), {"whole": q.shape, "starts": (0, 0, 0, 0)}
        out, _ = ir.apply("attention", q, k, v, *steps, scale=0.5, mask="causal", rate=rate, seed=3, **whole)
        out, _ = ir.apply("dropout", out, step, rate=0.3, seed=4, **whole)
        return np.sum(out * weights)

    types = [T("f8", (3, 5, 4, 2)), *[T("f8", (3, 7, 2, 2))] * 2, T("f8", (3, 5, 4, 2)), T("i64", ())]
    function = annotate(ir.gradient(ir.record(loss, *types), ["q", "k", "v"], keep_outputs=True), {"q": layout})
    localized = localize(function, Mesh(x=2, y=2))
    split = TensorSharding.parse(layout)
    attends = {op.kind: [value.layout for value in op.outputs] for op in localized.function.ops if "starts" in dict(
        op.attributes)}
    assert [layouts[0] for layouts in attends.values()] == [split] * 3
    assert len(attends["attention"][1].dims) == 3 and attends["attention_gradient"][2] != split
    rng = np.random.default_rng(0)
    arrays = [*(rng.normal(size=type.shape) for type in types[:4]), np.array(2)]
    for found, expected in zip(run_everywhere(localized, arrays), ir.interpret(function, arrays).outputs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_hundred_thousand_devices_are_a_few_classes():
    function = annotate(models.mlp((64, 128, 32), 25_000), {"x": "[dp, None]", "p.w0": "[None, tp]"})
    localized = localize(ir.gradient(function), Mesh(dp=12_500, tp=8))
    # gradients have fewer elements than there are devices to sum them, so the first of these receive a little more
    assert localized.classes == ((0, 128), (128, 128), (256, 3840), (4096, 4096), (8192, 91_808))
    assert localized.program(8192) is localized.program(99_999)
    assert localized.program(0) == localized.program(99_999)
    assert localized.program(0).inputs[4].type.shape == (2, 64)
    assert localize(annotate(function, {"x": "[None, None]"}), Mesh(dp=12_500, tp=8)).classes == ((0, 100_000),)


def test_parts_may_be_empty_and_axes_of_one():
    function = annotate(models.mlp((3, 2, 1), 2), {"x": "[dp, None]", "p.w0": "[None, (tp, one)]"})
    localized = localize(ir.gradient(function), Mesh(dp=3, tp=4, one=1))
    assert localized.program(11).inputs[4].type.shape == (0, 3)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=value.type.shape) for value in function.inputs]
    for found, expected in zip(run_everywhere(localized, arrays), ir.interpret(ir.gradient(function), arrays).outputs,
                               strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_what_is_laid_out_is_laid_out():
    mesh = Mesh(dp=3, tp=2)
    localized = localize(gpt(batch=5), mesh)
    assert localize(localized.function, mesh) == localized
    assert ir.parse(str(localized.function)) == localized.function
    assert ir.parse(str(localized.program(1))) == localized.program(1)
    assert pickle.loads(pickle.dumps(localized)) == localized  # noqa: S301


def test_axes_may_have_any_names():
    mesh = Mesh(**{"I_x": 2, "None": 2, 'a "b"': 2})
    layout = TensorSharding("I_x", ("None", 'a "b"'))
    function = ir.record(lambda x: np.sin(redistribute(x, layout)).T, T("f8", (5, 6)))
    localized = localize(annotate(function, {"x": TensorSharding('a "b"', "I_x")}), mesh)
    x = np.arange(30.0).reshape(5, 6)
    assert localized.outputs == (TensorSharding(("None", 'a "b"'), "I_x"),)
    assert_array_equal(run_everywhere(localized, [x])[0], np.sin(x).T)
    assert ir.parse(str(localized.function)) == localized.function
    assert "relayout" in [op.kind for op in localized.program(0).ops]


# -- what is kept, and what is gathered again --------------------------------------------------------------------------


def gathers(fn, *types, **layouts):
    localized = localize(annotate(ir.record(fn, *types), layouts), Mesh(x=2))
    return [op.kind for op in localized.program(0).ops].count("all_gather")


def test_what_was_gathered_is_used_again_at_once_but_not_kept_for_long():
    def twice(between):
        def fn(x, w):
            y = x @ w
            for _ in range(between):
                y = np.sin(y)
            return y @ w

        return fn

    types = T("f8", (4, 6)), T("f8", (6, 6))
    layouts = {"x": "[x, None]", "w": "[None, x]"}
    assert gathers(twice(3), *types, **layouts) == 1
    assert gathers(twice(30), *types, **layouts) == 2


def test_backwards_what_was_gathered_forwards_is_gathered_again():
    grad = ir.gradient(annotate(models.mlp((6, 6), 4), {"p.w0": "[None, x]", "x": "[x, None]"}), "x")
    regions = [op.region for op in localize(grad, Mesh(x=2)).program(0).ops if op.kind == "all_gather"]
    assert regions == ["layer.0", "gradient.layer.0"]


# -- symbols -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(("batch", "count"), [(12, 2), (12, 3), (8, 4)])
def test_with_numbers_for_its_symbols_a_program_is_the_one_that_was_laid_out_with_them(batch, count):
    symbolic = localize(gpt(B, S), {"dp": dp, "tp": 2}).program()
    assert symbolic.symbols == {"B", "S", "dp"}
    numbered = localize(gpt(batch, 6), Mesh(dp=count, tp=2)).program(0)
    assert symbolic.specialize(B=batch, S=6, dp=count) == numbered
    assert ir.peak_bytes(symbolic).specialize(B=batch, S=6, dp=count) == ir.peak_bytes(numbered)
    assert symbolic.flops.specialize(B=batch, S=6, dp=count) == numbered.flops
    assert localize(gpt(B, 6), Mesh(dp=count, tp=2)).program(0).specialize(B=batch) == numbered


def test_memory_and_bytes_are_expressions_of_the_number_of_devices():
    function = annotate(ir.record(lambda x, w: x @ w, T("f4", (64, 32)), T("f4", (32, 16))), {"w": "[dp, None]"})
    program = localize(function, {"dp": dp}).program()
    assert str(ir.peak_bytes(program)) == "8192+10240/dp"
    assert str(sum(op.bytes_received for op in program.ops)) == "4*ceil(1024/dp)*dp-8*ceil(1024/dp)+4096"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: localize(gpt(B), {"dp": dp, "tp": 2}).classes, ValueError,
     "axis 'dp' has dp devices: a mesh needs a number instead of the symbol"),
    (lambda: localize(gpt(B), Mesh(dp=2, tp=2)).received(), ValueError,
     "the bytes that a device receives are known only with numbers for B; Op.bytes_received is an expression"),
    (lambda: localize(annotate(ir.record(lambda x: redistribute(x, "[tp, dp]"), T("f8", (B, 4))), {"x": "[dp, tp]"}),
                      {"dp": dp, "tp": 2}).program(), ValueError,
     r"\[dp, tp\] -> \[tp, dp\] of tensor<Bx4xf64> on Mesh\(dp=dp, tp=2\): the step permute .* needs numbers in place"),
    (lambda: localize(gpt(), 8), TypeError, "mesh must be a Mesh, or a mapping of axes to extents, got 8"),
    (lambda: localize(gpt(), {"dp": 0}), ValueError, "the size of axis 'dp' must be at least 1, got 0"),
    (lambda: localize(gpt(), Mesh(dp=2)), ValueError, r"%p.0.qkv: .* names axis 'tp', but the axes of Mesh\(dp=2\)"),
])
def test_what_cannot_be_told(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_devices_are_a_value():
    assert Devices.of(Mesh(dp=2, tp=3)) == Devices.of({"dp": 2, "tp": 3}) == Devices.of(Devices.of(Mesh(dp=2, tp=3)))
    assert Devices.of({"dp": 2}).mesh == Mesh(dp=2)
    assert str(Devices.of({"dp": dp, "tp": 2})) == "Mesh(dp=dp, tp=2)"
