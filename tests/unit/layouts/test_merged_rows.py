"""Rows that are merged with other dims, and dealt again in another way: each row is still computed alone."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose

from parallelism import Mesh, ir
from parallelism.ir.core import rules
from parallelism.layouts import localize, microbatched
from parallelism.transforms import SGD, DataParallel, Strategy, train_step

B, = ir.symbols("B")
T = ir.TensorType


@pytest.mark.parametrize(("before", "after", "expected"), [
    ((2 * B, 4), (B, 8), "(ab)c->a(bc)"), ((B, 6), (3 * B, 2), "a(bc)->(ab)c"), ((B, 2, 3), (2 * B, 3), "abc->(ab)c"),
    ((4 * B, 3), (B, 6, 2), "(abc!)d!->a(be!)f!"), ((B, 1, 5), (5 * B,), "a1b->(ab)"),
    ((2, 2 * B), (2 * B, 2), "a(bc)->(ab)c"),
    ((B, 4), (4, B), "a!b!->c!d!"), ((2 * B, 4), (8, B), "a!b!->c!d!"), ((2 * B, 9), (3 * B, 6), "(ab!)c!->(ad!)e!"),
])
def test_what_dims_share_is_split_and_what_they_do_not_is_whole(before, after, expected):
    assert str(rules.reshape(before, after)) == expected


@st.composite
def shapes(draw):
    """Two shapes of rows of one size, in which the outermost dim has B times something."""
    def shape():
        dims = []
        for factor in draw(st.permutations(factors)):
            if dims and draw(st.booleans()):
                dims[-1] *= factor
            else:
                dims.append(factor)
        return (B * dims[0], *dims[1:]) if draw(st.booleans()) else (B, *dims)

    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4))
    return shape(), shape()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(1, 4), st.integers(1, 3))
def test_microbatches_of_merged_rows_add_up_and_data_is_dealt_without_communication(given, first, second):
    before, after = given
    function = ir.record(
        lambda x, y: np.sum(np.sin(x.reshape(after) * 2) * y), T("f8", before), T("f8", after), name="merged")
    rng, rows = np.random.default_rng(0), first + second
    arrays = [rng.normal(size=value.type.specialize({"B": rows}).shape) for value in function.inputs]
    parts = []
    for start, count in ((0, first), (first, second)):
        part = microbatched(function).specialize(**{
            name: number for name, number in (("B", count), ("B_whole", rows), ("B_first", start))
            if name in microbatched(function).symbols})
        each = [prod(map(int, value.type.shape[:1])) // count for value in part.inputs]
        own = [array[start * n:(start + count) * n] for array, n in zip(arrays, each, strict=True)]
        parts.append(ir.interpret(part, own).outputs[0])
    whole = ir.interpret(function.specialize(B=rows), arrays).outputs[0]
    assert_allclose(sum(parts), whole, rtol=1e-12)
    dealt = DataParallel()(function.specialize(B=6))
    kinds = [op.kind for op in localize(dealt, Mesh(dp=3)).program(0).ops]
    assert "all_gather" not in kinds and "all_to_all" not in kinds


def test_tokens_that_are_flattened_and_joined_train_in_a_pipeline():
    def loss(p, x, y):
        with ir.region("one"):
            h = np.tanh(x.reshape(-1, 3) @ p["a"])
        with ir.region("two"):
            return np.mean((h.reshape(x.shape[0], 8) @ p["b"] - y) ** 2)

    step = train_step(ir.record(loss, {"a": T("f8", (3, 4)), "b": T("f8", (8, 2))}, T("f8", (B, 2, 3)), T("f8", (B, 2))),
                      SGD(0.1))
    stages = Strategy.parse("pp@two 1f1b:2")(step).stages(2)
    assert [str(value.type) for value in stages.functions[0].forward.outputs[:1]] == ["tensor<(2*B)x4xf64>"]
