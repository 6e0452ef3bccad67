"""The loss of a language model in plain NumPy leaves its head split: one number for each row is moved, and no logits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, ir
from parallelism.layouts import localize
from parallelism.transforms import SGD, Strategy, train_step

ROWS, VOCABULARY, WIDTH = 3, 10, 6
T = ir.TensorType


def log_softmax(logits):
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def along(logits, targets):
    return np.mean(-np.take_along_axis(log_softmax(logits), targets[:, None], axis=-1)[:, 0])


def by_index(logits, targets):
    return np.mean(-log_softmax(logits)[np.arange(ROWS), targets])


def ignoring(logits, targets):
    counts = targets != 0
    picked = np.take_along_axis(log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    return np.sum(np.where(counts, -picked, 0)) / np.maximum(np.sum(counts), 1)


def smoothed(logits, targets):
    logarithms = log_softmax(logits)
    return 0.9 * along(logits, targets) - 0.1 * np.mean(np.sum(logarithms, axis=-1)) / VOCABULARY


def step_of(loss, rows=ROWS):
    def function(p, x, targets):
        return loss(x @ p["head"].T, targets)

    return train_step(ir.record(function, {"head": T("f64", (VOCABULARY, WIDTH))}, T("f64", (rows, WIDTH)), T("i64", (rows,)),
                                name=loss.__name__), SGD(0.1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss", [along, by_index, ignoring, smoothed])
@pytest.mark.parametrize("tp", [2, 3])
def test_the_head_is_split_and_no_logits_move(loss, tp):
    step = Strategy.parse("tp")(step_of(loss))
    assert next(value for value in step.inputs if value.name == "p.head").layout.short() == "[tp, None]"
    for rank in range(tp):
        moved = [op for op in localize(step, Mesh(tp=tp)).program(rank).ops if op.bytes_received]
        assert {op.kind for op in moved} == {"all_reduce"}
        assert {op.inputs[0].type.shape for op in moved} <= {(ROWS, 1), (ROWS,), ()}
    kinds = [op.kind for op in localize(step, Mesh(tp=tp)).program(0).ops]
    assert "take_along_part" in kinds and "take_along_gradient_part" in kinds


@pytest.mark.parametrize(("shape", "axis", "picked"), [((4, 7), 1, 2), ((5, 3), 0, 4), ((1, 3, 2), 1, 1), ((6,), 0, 3)])
def test_parts_of_a_pick_add_up_to_it(shape, axis, picked):
    rng = np.random.default_rng(0)
    x, whole = rng.integers(-9, 9, shape).astype("f8"), shape[axis]
    indices = rng.integers(-whole, whole, (*shape[:axis], picked, *shape[axis + 1:]))
    grad = rng.integers(-9, 9, indices.shape).astype("f8")
    total, tables, first = np.zeros(indices.shape), [], 0
    for part in np.array_split(x, 3, axis):
        extent = part.shape[axis]
        given = {"axis": axis, "first": first, "whole": whole}
        picks = ir.record(lambda x, i, given=given: ir.apply("take_along_part", x, i, **given),
                          T("f8", part.shape), T("i64", indices.shape))
        back = ir.record(lambda g, i, given=given, extent=extent: ir.apply(
            "take_along_gradient_part", g, i, extent=extent, **given), T("f8", grad.shape), T("i64", indices.shape))
        total += ir.interpret(picks, [part, indices]).outputs[0]
        tables.append(ir.interpret(back, [grad, indices]).outputs[0])
        first += extent
    assert_array_equal(total, np.take_along_axis(x, indices, axis))
    expected = np.zeros(shape)
    places = [*np.indices(indices.shape)]
    places[axis] = indices % whole
    np.add.at(expected, tuple(places), grad)
    assert_array_equal(np.concatenate(tables, axis), expected)


@pytest.mark.parametrize("index", [7, -8])
def test_an_index_out_of_range_is_told_in_each_part(index):
    part = ir.record(lambda x, i: ir.apply("take_along_part", x, i, axis=1, first=2, whole=7), T("f8", (2, 3)),
                     T("i64", (2, 1)))
    with pytest.raises(IndexError, match=f"index {index} is out of bounds for a dim of 7"):
        ir.interpret(part, [np.zeros((2, 3)), np.array([[3], [index]])])
