"""Collectives over tp in chunks: the programs of devices, what they compute, and what stays whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from localized_runs import run_everywhere
from numpy.testing import assert_array_equal

from parallelism import Mesh, ir
from parallelism.execution import Executable
from parallelism.execution.device_program import DeviceProgram
from parallelism.ir.passes.chunked_collectives import CHUNKED, SPLITS, chunked_over
from parallelism.layouts import annotate, localize
from parallelism.recorder import record
from parallelism.simulation import simulate
from parallelism.transforms import Strategy, TensorOverlap

T = ir.TensorType


def block(x, up, bias, down):
    """A product by columns and one by rows, of what is split along the sequence before and after."""
    return np.maximum(2 * x @ up + bias, 0) @ down * 3


def laid_out(sequence=8, hidden=12, width=4, axis="tp"):
    types = T("f8", (3, sequence, width)), T("f8", (width, hidden)), T("f8", (hidden,)), T("f8", (hidden, width))
    function = ir.record(block, *types, name="block")
    split = f"[None, {axis}, None]"
    by_columns, by_rows = (op for op in function.ops if op.kind == "matmul")
    return annotate(function, {
        "x": split, "up": f"[None, {axis}]", "bias": f"[{axis}]", "down": f"[{axis}, None]", by_columns.inputs[0].name: split,
        by_columns.outputs[0].name: f"[None, None, {axis}]", by_rows.inputs[0].name: f"[None, None, {axis}]",
        by_rows.outputs[0].name: split})


def both(function, mesh):
    """The program whole and in chunks."""
    return localize(function, mesh), localize(TensorOverlap()(function), mesh)


def numbers(function, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, value.type.shape).astype(np.float64) for value in function.inputs]


def moved(program):
    found = Counter()
    for op in program.ops:
        if op.operator.received is not None:
            found[op.kind] += int(op.bytes_received)
    return found


def test_a_product_of_what_is_gathered_and_one_that_is_scattered_are_cut():
    function = laid_out()
    program = both(function, Mesh(tp=2))[1].program()
    found = [(op.kind, op.outputs[0].type.shape) for op in program.ops if op.kind not in ("constant", "multiply")]
    assert found == [
        ("chunk", (3, 2, 4)), ("chunk", (3, 2, 4)),
        ("all_gather", (3, 4, 4)), ("matmul", (3, 4, 6)), ("add", (3, 4, 6)),
        ("all_gather", (3, 4, 4)), ("matmul", (3, 4, 6)), ("add", (3, 4, 6)),
        ("joined_chunks", (3, 8, 6)), ("maximum", (3, 8, 6)),
        *[("chunk", (6, 1))] * 4,
        *[("matmul", (3, 8, 1)), ("reduce_scatter", (3, 4, 1))] * 4,
        ("joined_chunks", (3, 4, 4))]
    assert [op.nbytes for op in program.ops if op.kind in ("chunk", "joined_chunks")] == [0] * 8
    named = [op["algorithm"] for op in program.ops if op.operator.received is not None]
    assert named == ["chunk of 2"] * 2 + ["chunk of 4"] * 4
    assert ir.parse(str(program)) == program


@pytest.mark.parametrize(("sizes", "sequence", "hidden", "width", "beside"), [
    ({"tp": 2}, 8, 12, 4, 2), ({"tp": 3}, 18, 9, 12, 3), ({"tp": 4, "dp": 2}, 16, 8, 4, 3), ({"tp": 5}, 25, 10, 20, 3)])
def test_the_tiles_of_a_chunk_are_counted_with_those_of_the_chunks_that_are_computed_at_once(
        sizes, sequence, hidden, width, beside):
    tp = sizes["tp"]
    whole, cut = (DeviceProgram(each.program(), {}) for each in both(laid_out(sequence, hidden, width), Mesh(**sizes)))
    shapes = [[step.cost.shape for step in each.steps if step.name == "matmul"] for each in (whole, cut)]
    rows, columns = 3 * sequence, hidden // tp
    assert shapes[0] == [(1, rows, columns, width), (1, rows, width, columns)]
    gathered, scattered = (1, beside * rows // tp, columns, width), (1, rows, 3 * width // SPLITS, columns)
    assert shapes[1] == [gathered] * tp + [scattered] * SPLITS
    flops = [sum(step.cost.flops for step in each.steps if step.name == "matmul") for each in (whole, cut)]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(("sizes", "sequence", "hidden", "width"), [
    ({"tp": 2}, 8, 6, 4), ({"tp": 3}, 18, 9, 12), ({"tp": 4, "dp": 2}, 16, 8, 4), ({"tp": 2}, 4, 2, 8)])
def test_values_and_bytes_are_those_of_the_whole_collectives(sizes, sequence, hidden, width):
    function = laid_out(sequence, hidden, width)
    whole, cut = both(function, Mesh(**sizes))
    given = numbers(function)
    assert_array_equal(run_everywhere(cut, given)[0], block(*given))
    assert_array_equal(run_everywhere(cut, given)[0], run_everywhere(whole, given)[0])
    assert moved(cut.program()) == moved(whole.program()) and moved(cut.program())
    calls = [sum(op.kind in ("all_gather", "reduce_scatter") for op in each.program().ops) for each in (whole, cut)]
    assert calls == [2, sizes["tp"] + SPLITS]
    assert cut.received() == whole.received()


@pytest.mark.parametrize(("sequence", "width", "whole"), [
    (6, 4, {"all_gather"}), (8, 6, {"reduce_scatter"}), (7, 4, {"all_gather", "reduce_scatter"}), (8, 4, set())])
def test_what_does_not_divide_into_chunks_stays_whole(sequence, width, whole):
    program = both(laid_out(sequence, 6, width), Mesh(tp=2))[1].program()
    found = Counter(op.kind for op in program.ops)
    assert {kind for kind in ("all_gather", "reduce_scatter") if found[kind] == 1} == whole


@pytest.mark.parametrize("mesh", [Mesh(tp=1), Mesh(other=2)])
def test_nothing_is_cut_over_one_device_or_another_axis(mesh):
    function = laid_out(axis=mesh.axes[0])
    whole, cut = both(function, mesh)
    assert cut.program().ops == whole.program().ops


def test_other_readers_of_what_is_gathered_read_all_of_it():
    def both_products(x, w, v):
        y = x + 1
        return y @ w, np.einsum("bsh,bsn->hn", y, v)

    types = T("f8", (2, 18, 5)), T("f8", (5, 3)), T("f8", (2, 18, 6))
    function = ir.record(both_products, *types)
    y = next(op for op in function.ops if op.kind == "add").outputs[0].name
    first, second = (value.name for value in function.outputs)
    function = annotate(function, {"x": "[None, tp, None]", y: "[None, tp, None]", "w": "[None, tp]", "v": "[None, None, tp]",
                                   first: "[None, None, tp]", second: "[None, tp]"})
    whole, cut = both(function, Mesh(tp=3))
    given = numbers(function)
    kinds = [Counter(op.kind for op in each.program().ops) for each in (whole, cut)]
    assert [each["all_gather"] for each in kinds] == [1, 3] and kinds[1]["joined_chunks"] == 2
    for one, other in zip(run_everywhere(cut, given), both_products(*given), strict=True):
        assert_array_equal(one, other)


def test_a_gather_of_a_weight_stays_whole():
    function = annotate(ir.record(lambda w, x: w @ x, T("f8", (8, 4)), T("f8", (4, 3)), name="product"), {"w": "[tp, None]"})
    whole, cut = both(replace(function, outputs=function.outputs), Mesh(tp=2))
    assert cut.program().ops == whole.program().ops


@pytest.mark.parametrize("width", [3, 0])
def test_chunks_are_joined_by_the_members_of_a_group_also_where_they_are_empty(width):
    a, b = f"tensor<1x4x{width}xf64>", f"tensor<1x8x{width}xf64>"
    function = ir.parse(f'''func @joined(%x: {a}, %y: {a}) -> ({b}) {{
      %z = "joined_chunks"(%x, %y) {{axis = 1, group = 2}} : ({a}, {a}) -> {b}
      return %z
    }}''')
    x, y = (np.arange(first, first + 4 * width, dtype=float).reshape(1, 4, width) for first in (0, 100))
    found, = ir.interpret(function, [x, y]).outputs
    assert_array_equal(found, np.concatenate([x[:, :2], y[:, :2], x[:, 2:], y[:, 2:]], axis=1), strict=True)


def test_the_transform_has_a_word_and_is_applied_once():
    assert str(TensorOverlap()) == "tp_overlap" and str(TensorOverlap("model")) == "tp_overlap:model"
    strategy, mesh = Strategy.parse_on_mesh("tp=2 sp tp_overlap")
    assert strategy.text_on(mesh) == "tp=2 sp tp_overlap"
    cut = TensorOverlap()(laid_out())
    assert dict(cut.attributes) == {CHUNKED: "tp"} and chunked_over(cut) == "tp" and chunked_over(laid_out()) is None
    with pytest.raises(ValueError, match="tp_overlap: @block has chunks over 'tp' already; a transform is applied once"):
        TensorOverlap()(cut)
    with pytest.raises(TypeError, match="only a Function can be transformed, got int"):
        TensorOverlap()(3)
    with pytest.raises(ValueError, match="the axis of TensorOverlap must be the name of a mesh axis, got ''"):
        TensorOverlap("")

def chunks_of(trace, rank=0):
    return [(e.name, e.algorithm) for e in trace if e.kind == "collective" and e.rank == rank]


@pytest.mark.parametrize("tp", [2, 3])
def test_devices_record_each_part_as_the_chunk_that_the_program_names(tp):
    """The price of a part is that of one step of a ring, so a device that lost the name would pay for whole calls."""
    function = laid_out(sequence=6 * tp, hidden=2 * tp, width=12)
    executable = Executable(both(function, Mesh(tp=tp))[1])
    named = [("all_gather", f"chunk of {tp}")] * tp + [("reduce_scatter", f"chunk of {SPLITS}")] * SPLITS
    assert chunks_of(simulate(executable, "dgx-h100")) == named
    assert chunks_of(record(executable, Mesh(tp=tp), numbers(function)).trace) == named
