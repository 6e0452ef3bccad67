"""Weights that are stacked layer behind layer become an input for each layer, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from parallelism import ir
from parallelism.ir.passes import rows_of_stacks, unstacked
from parallelism.transforms import SGD, first_state, train_step

X = ir.TensorType("f8", (3, 4))


def arrays_of(function: ir.Function) -> dict[str, Any]:
    return {value.name: np.random.default_rng(i).normal(size=value.type.shape)
            for i, value in enumerate(function.inputs)}


def product(x: Any, w: Any) -> Any:
    for i in range(2):
        x = x @ w[i]
    return x


@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=8), keeps_dim=st.booleans(), biases=st.booleans())
@settings(max_examples=50, deadline=None)
def test_each_row_is_an_input_if_each_is_read(rows: list[int], keeps_dim: bool, biases: bool) -> None:
    count = max(2, 1 + max(rows))

    def function(x: Any, w: Any, b: Any) -> Any:
        for row in rows:
            x = x @ (np.sum(w[row:row + 1], axis=0) if keeps_dim else w[row])
            x = x + b[row] if biases else x * b
        return x

    types = ir.TensorType("f8", (count, 4, 4)), ir.TensorType("f8", (count,) if biases else ())
    program = ir.record(function, X, *types)
    made = unstacked(program)
    if {*rows} != {*range(count)}:
        assert made is program
        return
    names = ["x", *[f"w.{row}" for row in range(count)], *([f"b.{row}" for row in range(count)] if biases else ["b"])]
    assert [value.name for value in made.inputs] == names
    assert {value.type.shape for value in made.inputs} == {(3, 4), (4, 4), ()}
    assert {op.kind for op in made.ops}.isdisjoint({"slice"} if keeps_dim else {"slice", "reshape"})
    arrays = arrays_of(program)
    np.testing.assert_array_equal(ir.interpret(made, arrays).outputs, ir.interpret(program, arrays).outputs)


@pytest.mark.parametrize("function", [
    lambda x, w: product(x, w) + np.sum(w),                                   # read as a whole, too
    lambda x, w: x @ w[0] @ w[0],                                             # a row that nothing reads
    lambda x, w: x @ np.sum(w[:2], axis=0) + product(x, w),                   # two rows at once
    lambda x, w: x * np.sum(w[:, 0]) + product(x, w),                                 # a slice along another dim
    lambda x, w: (product(x, w), w),                                          # returned
])
def test_other_inputs_stay(function: Any) -> None:
    program = ir.record(function, X, ir.TensorType("f8", (2, 4, 4)))
    assert unstacked(program) is program


def test_no_input_has_the_name_of_another_one() -> None:
    program = ir.record(lambda x, w: product(x, w["q"]), X, {"q": ir.TensorType("f8", (2, 4, 4))})
    named = {"w.q": "p.q", "x": "p.q.1"}
    inputs = {value: replace(value, name=named[value.name]) for value in program.inputs}
    ops = tuple(replace(op, inputs=tuple(inputs.get(value, value) for value in op.inputs)) for op in program.ops)
    taken = replace(program, inputs=tuple(inputs.values()), ops=ops)
    assert unstacked(taken) is taken and unstacked(program) is not program


def test_one_layer_and_arrays_with_symbols_are_no_stack() -> None:
    """Of data over time a recurrent net reads one step after another."""
    for shape in ((1, 4, 4), ir.symbols("L") + (4, 4)):
        program = ir.record(lambda x, w: x @ w[0], X, ir.TensorType("f8", shape))
        assert unstacked(program) is program
    over_time = ir.TensorType("f8", (3, *ir.symbols("B"), 4))
    program = ir.record(lambda w, x: x[0] @ w + x[1] @ w + x[2], ir.TensorType("f8", (4, 4)), over_time)
    assert unstacked(program) is program


def test_flags_of_layers_are_rows_too_and_a_row_may_be_returned() -> None:
    program = ir.record(lambda x, n: (x * n[1], n[0]), X, ir.TensorType("int64", (2, 3, 1)))
    made = unstacked(program)
    assert [(value.name, value.type.dtype) for value in made.inputs[1:]] == [("n.0", "int64"), ("n.1", "int64")]
    assert made.outputs[1] == made.inputs[1]
    numbers = np.arange(6).reshape(2, 3, 1)
    found = ir.interpret(made, {"x": np.ones((3, 4)), "n": numbers}).outputs
    np.testing.assert_array_equal(found[0], np.ones((3, 4)) * numbers[1])
    np.testing.assert_array_equal(found[1], numbers[0])


def test_arrays_of_stacks_are_given_as_they_are() -> None:
    program = ir.record(lambda p, x: np.mean(product(x, p["w"])), {"w": ir.TensorType("f8", (2, 4, 4))}, X)
    arrays = arrays_of(program)
    step = train_step(unstacked(program), SGD(0.5))
    whole = train_step(program, SGD(0.5))
    first = first_state(step, {"p.w": arrays["p.w"]})
    assert [*first] == ["p.w.0", "p.w.1"]
    made = ir.interpret(step, {**first, "x": arrays["x"]}).outputs
    by_stack = ir.interpret(step, arrays).outputs
    loss, stack = ir.interpret(whole, arrays).outputs
    np.testing.assert_array_equal(np.stack(made[1:]), stack)
    np.testing.assert_array_equal(np.stack(by_stack[1:]), stack)
    assert made[0] == by_stack[0] == loss


def test_only_arrays_whose_rows_are_wanted_are_parted() -> None:
    arrays = {"a": np.arange(2), "b": np.arange(3), "c": np.arange(2), "d": np.float64(1)}
    found = rows_of_stacks(["a.0", "a.1", "b.0", "b.1", "c", "c.0", "c.1", "d"], arrays)
    assert [*found] == ["a.0", "a.1", "b", "c", "d"]
    program = unstacked(ir.record(lambda w, x: product(x, w), ir.TensorType("f8", (2, 4, 4)), X))
    with pytest.raises(ValueError, match=r"takes the inputs w\.0, w\.1, x; got w, x"):
        ir.interpret(program, {"w": np.ones((3, 4, 4)), "x": np.ones((3, 4))})
