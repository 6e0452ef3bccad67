"""Gradients are added into buffers tensor by tensor: the same sums, and one gradient in memory at a time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, Pipeline, PipelinedProgram, ir, models, simulate
from parallelism.execution.stage_code import StagePrograms
from parallelism.layouts import annotate, partition
from parallelism.layouts.stages.sums import (
    added_into_buffers,
    converted_results,
    owns_results,
    summed_in,
    widened,
)

B = ir.symbol("B")
T = ir.TensorType


def test_a_narrow_result_is_widened_before_it_is_resharded():
    function = ir.parse("""
func @f(%x: tensor<2x3xf32>, %y: tensor<3xf32>) -> (tensor<2x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) {
  %a = "negative"(%y) : (tensor<3xf32>) -> tensor<3xf32> region="r"
  %b = "reshard"(%a) {layout = "[dp]"} : (tensor<3xf32>) -> tensor<3xf32> region="r"
  return %x, %b, %a, %y
}""")
    wide = summed_in(function, 1, [np.dtype("f8"), np.dtype("f4"), np.dtype("f8")])
    assert [(op.kind, op.inputs[0].name, op.region) for op in wide.ops] == [
        ("negative", "y", "r"), ("widen", "a", "r"), ("reshard", "a.wide", "r")]
    assert [value.type.dtype.itemsize for value in wide.outputs] == [4, 8, 4, 4]
    maker = {value.name: op for op in wide.ops for value in op.outputs}
    assert [(widened(maker, value)[0].name, widened(maker, value)[1] is None) for value in wide.outputs] == [
        ("x", True), ("a", False), ("a", True), ("y", True)]
    assert summed_in(function, 1, [None] * 3) == function


def two_products(x, w, v):
    return x, np.transpose(x) @ w, x @ v, x


def test_each_result_is_added_right_after_its_op_and_inputs_at_once():
    function = ir.record(two_products, T("f64", (3, 3)), T("f64", (3, 4)), T("f64", (3, 5)))
    added = added_into_buffers(function, 1, ["a", "x", "b"], [np.dtype("f8")] * 3)
    assert [value.name for value in added.inputs] == ["x", "w", "v", "a", "x.1", "b"]
    assert [op.kind for op in added.ops] == [
        "accumulate", "transpose", "matmul", "accumulate", "matmul", "accumulate"]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=value.type.shape) for value in added.inputs]
    x, *sums = ir.interpret(added, arrays).outputs
    terms = ir.interpret(function, arrays[:3]).outputs
    assert_array_equal(x, arrays[0])
    for total, buffer, term in zip(sums, arrays[3:], terms[1:], strict=True):
        assert_array_equal(total, buffer + term)
    assert added_into_buffers(function, 3, ["a"], [np.dtype("f4")]).inputs[-1].type == T("f32", (3, 3))
    assert ir.peak_bytes(added) == 8 * ((9 + 12 + 15) + (12 + 15 + 9) + (9 + 12))   # of the results one, and its input


@pytest.mark.parametrize(("returned", "own"), [
    ("%a", True), ("%a, %c", True), ("%b", True), ("%a, %a", False), ("%a, %b", False), ("%y", False), ("%d", False),
    ("%d, %a", False),
])
def test_a_result_of_its_own_shares_memory_with_no_input_and_no_other_result(returned, own):
    kinds = {"%a": "3xf32", "%b": "3x1xf32", "%c": "3xf32", "%d": "3xf32", "%y": "3xf32"}
    types = ", ".join(f"tensor<{kinds[name]}>" for name in returned.split(", "))
    function = ir.parse(f"""
func @f(%y: tensor<3xf32>) -> (tensor<3xf32>, {types}) {{
  %a = "negative"(%y) : (tensor<3xf32>) -> tensor<3xf32>
  %b = "reshape"(%a) {{shape = [3, 1]}} : (tensor<3xf32>) -> tensor<3x1xf32>
  %c = "negative"(%a) : (tensor<3xf32>) -> tensor<3xf32>
  %d = "reshard"(%y) {{layout = "[dp]"}} : (tensor<3xf32>) -> tensor<3xf32>
  return %y, {returned}
}}""")
    assert owns_results(function, 1) == own


def test_results_are_converted_where_they_have_another_dtype():
    function = ir.record(two_products, T("f32", (3, 3)), T("f32", (3, 4)), T("f32", (3, 5)))
    found = converted_results(function, 1, [np.dtype("f8"), np.dtype("f4"), np.dtype("f4")])
    assert [op.kind for op in found.ops] == ["transpose", "matmul", "convert", "matmul"]
    assert [value.type.dtype.name for value in found.outputs] == ["float32", "float64", "float32", "float32"]


def test_of_values_in_one_memory_the_one_that_is_read_last_is_freed():
    function = ir.parse("""
func @f(%p: tensor<3xf32>, %q: tensor<3xf32>, %r: tensor<3xf32>) -> (tensor<3xf32>) {
  %a = "add"(%p, %r) : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  %b = "add"(%a, %q) : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  return %b
}""")

    class Given(StagePrograms):
        """A stage that gives up three values, two of which are one array."""

        def __init__(self):
            pass

        def given_up(self, kind, part):
            return {"one": ("p", ("F", "x")), "other": ("q", ("F", "x")), "third": ("r", ("F", "y"))}

    assert Given().freed_inputs("B", (0, 3), function) == {"q", "r"}


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "inside", "layouts"), [
    ("1f1b", None, {}), ("zero_bubble_h1", None, {}),
    ("1f1b", Mesh(tp=2), {"p.w1": "[None, tp]", "p.w2": "[tp, None]"}),
    ("zero_bubble_h1", Mesh(zero=2), {"x": "[zero, None]", "targets": "[zero, None]", "p.w1": "[zero, None]"}),
])
def test_a_stage_holds_its_sums_and_one_gradient(schedule, inside, layouts):
    """Of a microbatch of one row: the largest of many equal weights is there twice, the others once."""
    widths = (4, 6, 6, 6, 4)
    loss = annotate(models.mlp(widths, B), layouts)
    program = PipelinedProgram(partition(loss, 2), Pipeline(2, 3, schedule), inside)
    mesh = Mesh(pp=2, **(inside.shape if inside else {}))
    trace = simulate(program, "dgx-h100", mesh=mesh, batch=6)
    folded = simulate(program, "dgx-h100", mesh=mesh, batch=6, fold=True)
    assert {rank: trace.peaks()[rank] for rank in folded.ranks} == folded.peaks()
    for rank in range(mesh.size):
        stage = program.stages.functions[mesh.index(rank)["pp"]]
        trained = program.programs(mesh.index(rank)["pp"], {}, 6, mesh, rank).types(
            stage.forward.inputs, stage.trained)
        sizes = [int(type.nbytes) for type in trained]
        assert trace.peak_bytes(rank, "gradients") == sum(sizes) + max(sizes)


def test_the_gradient_of_a_weight_is_brought_into_its_layout_as_soon_as_it_is_complete():
    names = [f"p.w{i}" for i in range(4)]
    loss = annotate(models.mlp((4, 6, 6, 6, 4), 8), dict.fromkeys(names, "[zero, None]"))
    function = ir.gradient(loss, names)
    for gradient in function.outputs:
        at, = (number for number, op in enumerate(function.ops) if gradient in op.outputs)
        product, reshard = function.ops[at - 1:at + 1]
        assert (product.kind, reshard.kind) == ("einsum", "reshard") and reshard.inputs == product.outputs
        assert reshard.region == product.region
