"""Chains of elementwise ops run as one: which ops are in a chain, what it costs, and that it changes no bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformed import model_step

from parallelism import Hardware, Mesh, ir
from parallelism.ir.passes import chained
from parallelism.simulation import simulate
from parallelism.transforms import Adam, Fused, Overlap, Recompute, Strategy

ONE = Mesh(one=1)
X, W = ir.TensorType("float64", (5, 3)), ir.TensorType("float64", (3, 4))
NEXT_TO = ir.TensorType("float64", (3,))
FLOAT = 8


def recorded(body, *types):
    return ir.record(body, *types, name="f")


def computes(function, hardware="dgx-a100"):
    """The compute events of a program on one device, without that of the library: name, flops and bytes."""
    return [(event.name, event.flops, event.nbytes) for event in simulate(function, hardware, mesh=ONE)
            if event.kind == "compute" and event.seconds is None]


def chains_of(function):
    ordered, lengths = chained(function)
    assert sum(lengths) == len(ordered.ops) and {*ordered.ops} == {*function.ops}
    start, found = 0, []
    for length in lengths:
        found.append([op.kind for op in ordered.ops[start:start + length]])
        start += length
    return [chain for chain in found if len(chain) > 1]


@pytest.mark.takes_seconds
def test_a_chain_costs_what_it_reads_and_writes_and_has_one_launch():
    function = recorded(lambda x, b: np.exp(x + b) * x, X, NEXT_TO)
    alone, (fused,) = computes(function), computes(Fused()(function))
    assert [name for name, _, _ in alone] == ["add", "exp", "multiply"]
    assert fused == ("add+exp+multiply", sum(flops for _, flops, _ in alone), (15 + 3 + 15) * FLOAT)
    assert sum(nbytes for _, _, nbytes in alone) == ((15 + 3 + 15) + (15 + 15) + (15 + 15 + 15)) * FLOAT
    assert chains_of(function) == [["add", "exp", "multiply"]]


@pytest.mark.takes_seconds
def test_a_row_reduction_is_in_a_chain_and_another_reduction_is_not():
    rows = recorded(lambda x: np.sum(np.exp(x), axis=1), X)
    assert computes(Fused()(rows)) == [("exp+sum", 2 * 15, (15 + 5) * FLOAT)]
    columns = recorded(lambda x: np.sum(np.exp(x), axis=0), X)
    assert [name for name, _, _ in computes(Fused()(columns))] == ["exp", "sum"]
    softmax = recorded(lambda x: np.exp(x - np.max(x, axis=1, keepdims=True)), X)
    assert chains_of(softmax) == [["max", "subtract", "exp"]]


@pytest.mark.takes_seconds
def test_a_value_with_two_users_is_written_and_ends_the_chain():
    def body(x):
        y = np.exp(x)
        return y * 2.0 + np.sin(y)

    names = [name for name, _, _ in computes(Fused()(recorded(body, X)))]
    assert names == ["exp", "constant+multiply+sin+add"]
    assert not any("exp" in chain for chain in chains_of(recorded(body, X)))


@pytest.mark.takes_seconds
def test_a_value_that_is_returned_is_written_once_and_not_read_again():
    def body(x):
        y = np.exp(x)
        return y, np.sin(y)

    assert computes(Fused()(recorded(body, X))) == [("exp+sin", 2 * 15, 3 * 15 * FLOAT)]


@pytest.mark.parametrize("body", [
    lambda x, w: np.exp(x) @ w, lambda x, w: np.exp((x @ w).transpose(1, 0)), lambda x, w: np.exp(x)[1:3],
    lambda x, w: np.exp(x).reshape((15,)),
])
def test_products_and_moved_elements_are_in_no_chain(body):
    assert chains_of(recorded(body, X, W)) == []


def test_a_chain_waits_for_its_last_op_and_for_what_that_needs():
    def body(x, w):
        early = np.exp(x @ w)
        late = (x @ w) + 1.0
        return early * late, x

    function = recorded(body, X, W)
    ordered, lengths = chained(function)
    assert max(lengths) >= 3 and ordered.ops[-1].kind == "multiply"
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=type.shape) for type in (X, W)]
    found, wanted = (ir.interpret(each, inputs).outputs for each in (ordered, function))
    np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.takes_seconds
def test_the_values_inside_take_no_memory():
    large = ir.TensorType("float64", (64, 32))
    function = recorded(lambda x: np.sum(np.exp(np.sin(np.exp(x))), axis=1), large)
    peaks = [simulate(each, "dgx-a100", mesh=ONE).peak_bytes(0) for each in (function, Fused()(function))]
    assert peaks == [64 * 32 * FLOAT * 3, (64 * 32 + 64) * FLOAT]


@pytest.mark.takes_seconds
def test_a_product_takes_up_the_sum_in_a_buffer():
    text = """func @f(%x: tensor<5x3xf16>, %w: tensor<3x4xf16>, %sum: tensor<5x4xf32>) -> (tensor<5x4xf32>) {
  %0 = "matmul"(%x, %w) : (tensor<5x3xf16>, tensor<3x4xf16>) -> tensor<5x4xf16>
  %1 = "accumulate"(%sum, %0) : (tensor<5x4xf32>, tensor<5x4xf16>) -> tensor<5x4xf32>
  return %1
}
"""
    function = ir.parse(text)
    (alone, added), (fused,) = computes(function), computes(Fused()(function))
    assert (alone[0], added[0]) == ("matmul", "accumulate")
    assert fused == ("matmul", alone[1] + added[1], (15 + 12) * 2 + 2 * 20 * 4)
    event, = (each for each in simulate(Fused()(function), "dgx-a100", mesh=ONE) if each.name == "matmul")
    assert (event.shape, event.dtype) == ((1, 5, 4, 3), "float16")
    twice = ir.parse(text.replace("return %1", "return %1, %0").replace(
        "(tensor<5x4xf32>) {", "(tensor<5x4xf32>, tensor<5x4xf16>) {"))
    assert [name for name, _, _ in computes(Fused()(twice))] == ["matmul", "accumulate"]


def test_adam_is_one_kernel_for_each_parameter():
    step = model_step("mlp", 4, Adam(0.01))
    ordered, lengths = chained(step)
    parameters = sum(value.name.startswith("next.p.") for value in step.outputs)
    kernels = [length for length, end in zip(lengths, np.cumsum(lengths) - 1, strict=True)
               if ordered.ops[end].outputs[0].name.startswith("next.p.")]
    assert len(kernels) == parameters and min(kernels) > 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["gpt", "llama", "dropout", "mixture", "residual", "recurrent"])
def test_the_order_of_chains_changes_no_bit(model):
    step = model_step(model, 3, Adam(0.01))
    ordered, lengths = chained(step)
    assert {*ordered.ops} == {*step.ops} and max(lengths) > 3
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=v.type.shape) ** 2 if v.type.dtype.kind == "f" else rng.integers(0, 2, v.type.shape)
              for v in step.inputs]
    for found, wanted in zip(ir.interpret(ordered, inputs).outputs, ir.interpret(step, inputs).outputs, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_fused_is_a_word_of_the_program_and_of_the_strategy():
    step = model_step("dropout", 4, Adam(0.01))
    strategy = Strategy.parse("dp tp sp recompute=block.*.attention zero=1 fused")
    assert Strategy.parse(str(strategy)) == strategy and "fused" in str(strategy).split()
    program = strategy(step)
    assert Fused.of(program) == Fused() and program == ir.parse(str(program)) and Fused.of(step) is None
    assert replace(program, attributes=()) == Strategy.parse("dp tp sp recompute=block.*.attention zero=1")(step)
    for transform in (Strategy.parse("tp"), Recompute("block.*"), Overlap()):
        assert Fused.of(transform(Fused()(step))) == Fused()
    with pytest.raises(ValueError, match=r"fused: @.* is fused already"):
        Fused()(program)
    with pytest.raises(TypeError, match="only a Function can be transformed, got int"):
        Fused()(3)


@pytest.mark.slow
def test_a_hardware_runs_programs_fused_whose_software_does_so():
    step = model_step("gpt", 4, Adam(0.01))
    strategy, mesh = Strategy.parse_on_mesh("tp=2 sp")
    a100 = Hardware.preset("dgx-a100")
    there = simulate(strategy(step), replace(a100, fused=True), mesh=mesh)
    told = simulate(Fused()(strategy(step)), a100, mesh=mesh)
    plain = simulate(strategy(step), a100, mesh=mesh)
    assert there.makespan_seconds == told.makespan_seconds < plain.makespan_seconds
    assert there.flops() == plain.flops() and there.peaks() == told.peaks()
    assert there.peak_bytes(0) <= plain.peak_bytes(0)


@pytest.mark.takes_seconds
def test_a_product_adds_its_bias_where_a_software_has_such_kernels():
    def body(x, w, bias):
        first = x @ w + bias
        return np.exp(first), first @ w.T + x

    wide = ir.TensorType("float32", (5, 3)), ir.TensorType("float32", (3, 4)), ir.TensorType("float32", (4,))
    function = recorded(body, *wide)
    plain, told = (replace(Hardware.preset("dgx-a100"), fused=fused) for fused in ("elementwise", "epilogues"))
    names = [[event.name for event in simulate(function, hardware, mesh=ONE) if event.kind == "compute"]
             for hardware in (plain, told)]
    assert names == [["@f", "matmul", "add", "exp", "transpose", "matmul", "add"],
                     ["@f", "matmul", "exp", "transpose", "matmul", "add"]]
    product = next(event for event in simulate(function, told, mesh=ONE) if event.name == "matmul")
    assert product.nbytes == 4 * (15 + 12 + 4 + 20) and product.shape == (1, 5, 4, 3)
    ordered, _ = chained(function, rows=False, biases=True)
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=type.shape).astype(np.float32) for type in wide]
    found, wanted = (ir.interpret(each, inputs).outputs for each in (ordered, function))
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, expected)
