"""Tokens are dealt to experts and back: which slot each has, what is dropped, and room for all in what runs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.ir.passes import with_room


def dealt(x, experts, slots, each, first=0, count=3, drops=True):
    return ir.apply("dispatch", x, experts, shape=(count, len(x), slots, x.shape[2]), each=each, first=first, drops=drops)


def test_first_choices_come_before_second_ones_and_earlier_tokens_before_later_ones():
    x = np.array([[[1.0], [2], [3], [4]]])
    experts = np.array([[[0, 1], [1, 0], [0, 2], [1, 0]]])
    rows = dealt(x, experts, 3, 3)[:, 0, :, 0]
    assert_array_equal(rows, [[1, 3, 2], [2, 4, 1], [3, 0, 0]])      # the second choice of token 4 is dropped
    back = ir.apply("combine", dealt(x, experts, 3, 3), experts, each=3, first=0, drops=True)
    assert_array_equal(back[0, :, 0], [2, 4, 6, 4])


def test_each_chunk_of_a_sequence_has_slots_of_its_own():
    x = np.array([[[1.0], [2], [3], [4]]])
    experts = np.zeros((1, 4, 1), np.int64)
    assert_array_equal(dealt(x, experts, 2, 1, count=1)[0, 0, :, 0], [1, 3])
    assert_array_equal(dealt(x, experts, 2, 2, count=1)[0, 0, :, 0], [1, 2])


def test_gates_lie_in_the_slots_of_their_rows():
    experts = np.array([[[2, 1], [1, 0]]])
    gates = np.array([[[0.5, 0.25], [2, 4]]])
    how = {"each": 2, "first": 1, "drops": True}
    found = ir.apply("dispatch_gates", gates, experts, shape=(2, 1, 2), **how)
    assert_array_equal(found[:, 0], [[2, 0.25], [0.5, 0]])           # experts 1 and 2; expert 0 is elsewhere
    assert_array_equal(ir.apply("collect_gates", found, experts, **how), [[[0.5, 0.25], [2, 0]]])


@pytest.mark.parametrize("shape", [(2, 1, 3, 2), (3, 2, 1, 5), (1, 1, 1, 1)])
def test_the_bias_of_an_expert_is_added_to_each_row_times_its_gate(shape):
    rng = np.random.default_rng(shape)
    rows, grad = (rng.integers(-9, 9, shape) * 0.5 for _ in range(2))
    gates, bias = rng.integers(-9, 9, shape[:3]) * 0.25, rng.integers(-9, 9, (shape[0], shape[3])) * 1.0
    made, of_gates, of_bias = rows.copy(), np.zeros_like(gates), np.zeros_like(bias)
    for at in np.ndindex(shape):
        gate, one = gates[at[:3]], bias[at[0], at[3]]
        made[at] += gate * one
        of_gates[at[:3]] += grad[at] * one
        of_bias[at[0], at[3]] += grad[at] * gate
    assert_array_equal(ir.apply("gated_bias", rows, gates, bias), made)
    for found, told in zip(ir.apply("gated_bias_gradient", grad, gates, bias), (of_gates, of_bias), strict=True):
        assert_array_equal(found, told)


def loss(drops):
    def record(p, x, experts):
        rows = dealt(x, experts, 2, 1, drops=drops)
        made = np.einsum("ebch,ehf->ebcf", rows, p["w"])
        return np.sum(ir.apply("combine", made, experts, each=1, first=0, drops=drops) ** 2)

    types = {"w": ir.TensorType("f64", (3, 5, 4))}
    return ir.record(record, types, ir.TensorType("f64", (2, 6, 5)), ir.TensorType("i64", (2, 6, 2)))


def test_what_must_not_drop_runs_with_room_for_all_and_is_simulated_without():
    function = loss(drops=False)
    assert with_room(loss(drops=True)) == loss(drops=True)
    roomy = with_room(function)
    assert {value.type.shape for value in roomy.values if value.type.ndim == 4} == {(3, 2, 6, 5), (3, 2, 6, 4)}
    assert {value.type.shape for value in function.values if value.type.ndim == 4} == {(3, 2, 2, 5), (3, 2, 2, 4)}
    assert with_room(roomy) == roomy
    rng = np.random.default_rng(0)
    w, x = rng.integers(-3, 4, (3, 5, 4)) * 1.0, rng.integers(-3, 4, (2, 6, 5)) * 1.0
    experts = np.zeros((2, 6, 2), np.int64) + [0, 2]                 # the fullest has all tokens
    wanted = np.sum((x @ w[0] + x @ w[2]) ** 2)
    assert ir.interpret(function, [w, x, experts]).outputs[0] == wanted
    assert ir.interpret(loss(drops=True), [w, x, experts]).outputs[0] < wanted
    gradient = ir.interpret(ir.gradient(function), [w, x, experts]).outputs[0]
    assert_array_equal(gradient[1], 0)
    assert_array_equal(gradient[0], 2 * np.einsum("bsh,bsf->hf", x, x @ w[0] + x @ w[2]))


@pytest.mark.parametrize(("sequence", "experts"), [(3, 4), (4, 2)])       # a slot of a mean load is one, or two
def test_the_gradient_of_a_bias_is_the_sum_of_its_rows_however_many_slots_there_are(sequence, experts):
    def loss(x, chosen, bias):
        rows = ir.apply("dispatch", x, chosen, drops=False, each=slots, first=0, shape=(experts, 2, slots, 5))
        made = rows * rows + bias[:, None, None, :]
        return np.sum(ir.apply("combine", np.sin(made), chosen, drops=False, each=slots, first=0))

    slots = -(-sequence // experts)
    program = ir.record(loss, ir.TensorType("f64", (2, sequence, 5)), ir.TensorType("i64", (2, sequence, 1)),
                        ir.TensorType("f64", (experts, 5)))
    rng = np.random.default_rng(0)
    x, bias = rng.normal(size=(2, sequence, 5)), rng.normal(size=(experts, 5))
    chosen = np.zeros((2, sequence, 1), np.int64)       # all choose the first expert
    value, of_x, of_bias = ir.interpret(ir.gradient(program, ["x", "bias"], keep_outputs=True), [x, chosen, bias]).outputs
    slope = np.cos(x * x + bias[0])
    np.testing.assert_allclose(value, np.sin(x * x + bias[0]).sum())
    np.testing.assert_allclose(of_x, slope * 2 * x)
    np.testing.assert_allclose(of_bias, np.concatenate([slope.sum(axis=(0, 1))[None], np.zeros((experts - 1, 5))]))


def test_a_token_that_chooses_an_expert_twice_is_refused_where_none_is_dropped():
    experts = np.zeros((2, 6, 2), np.int64) + [0, 2]
    experts[1, 4] = 2
    given = [np.ones((3, 5, 4)), np.ones((2, 6, 5)), experts]
    assert ir.interpret(loss(drops=True), given).outputs[0] > 0
    with pytest.raises(ValueError, match="1 choices find no slot, and none may be dropped: an expert has 1 for 1 tokens"):
        ir.interpret(loss(drops=False), given)


@pytest.mark.parametrize(("shape", "each", "message"), [
    ((3, 2, 4, 5), 1, "slots come in as many times each as there are chunks of the tokens, got 4 slots, each=1 and 6"),
    ((3, 2, 3, 4), 1, r"shape must be \(3, 2, 3, 5\), got \(3, 2, 3, 4\)"),
])
def test_slots_that_do_not_fit_are_refused(shape, each, message):
    types = ir.TensorType("f64", (2, 6, 5)), ir.TensorType("i64", (2, 6, 2))
    with pytest.raises(ValueError, match=message):
        ir.record(lambda x, experts: ir.apply("dispatch", x, experts, shape=shape, each=each, first=0, drops=True), *types)
