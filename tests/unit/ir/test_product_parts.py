"""Products whose result is cut into parts become one product for each part, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism import ir
from parallelism.ir.passes.product_parts import fused_product, in_parts

X, W = ir.TensorType("f8", (5, 4)), ir.TensorType("f8", (4, 10))


def parted(loss, *types):
    """The function, and it in parts; None if it is none of nothing but parts."""
    function = ir.record(loss, X, W, *types)
    product = next(op for op in function.ops if op.kind in ("matmul", "einsum"))
    users = {value.name: [op for op in function.ops if value in op.inputs] for value in function.values}
    fused = fused_product(product, function.inputs[1], "n", users, function.outputs, function.inputs)
    return function, None if fused is None else in_parts(function, [fused])


@pytest.mark.parametrize(("loss", "types", "products"), [
    (lambda x, w: sum(np.sum(y * y) for y in np.split(x @ w, [3, 7], axis=1)), (), 3),
    (lambda x, w: np.sum((x @ w)[:, 2:5]), (), 1),
    (lambda x, w, b: sum(np.sum(y * y) for y in np.split(2 * (x @ w + b), 5, axis=1)), (ir.TensorType("f8", (10,)),), 5),
    (lambda x, w, b: np.sum((x @ w - b)[:, 8:] * (x @ w - b)[:, :2]), (ir.TensorType("f8", (5, 10)),), 2),
    (lambda x, w, b: next(np.sum(y[:, 8:] * y[:, :2]) for y in [x @ w - b]), (ir.TensorType("f8", (5, 1)),), 2),
])
def test_each_part_is_a_product_of_a_slice(loss, types, products):
    function, found = parted(loss, *types)
    arrays = [np.random.default_rng(0).normal(size=type.shape) for type in (X, W, *types)]
    assert sum(op.kind == "matmul" for op in found.ops) == products
    assert found.inputs == function.inputs and found.name == function.name
    np.testing.assert_allclose(ir.interpret(found, arrays).outputs, ir.interpret(function, arrays).outputs, rtol=1e-12)
    np.testing.assert_allclose(ir.interpret(found, arrays).outputs[0], loss(*arrays), rtol=1e-12)


@pytest.mark.parametrize("loss", [
    lambda x, w: np.sum((x @ w)[:, ::2]),                                       # every other element
    lambda x, w: next(y[:, :8] + y[:, 2:] for y in [x @ w]),                    # more than there is
    lambda x, w: next(np.sum(y[:, :8]) + np.sum(y) for y in [x @ w]),           # and the whole
    lambda x, w: next(np.sum(y[1:3]) + np.sum(y[:, :2]) for y in [x @ w]),      # rows
    lambda x, w: np.sum(np.tanh(x @ w)[:, :2]),                                 # what is no sum or product in between
    lambda x, w: np.sum((x @ w).reshape(5, 2, 5)[:, 0]),
    lambda x, w: x @ w,
])
def test_what_is_used_otherwise_stays_one_product(loss):
    _, found = parted(loss)
    assert found is None


def test_regions_names_and_results_stay():
    def loss(x, w):
        with ir.region("product"):
            y = x @ w
        with ir.region("parts"):
            return np.split(y, 2, axis=1)[1] * 2, np.sum(x)

    function, found = parted(loss)
    assert [op.region for op in found.ops if op.kind == "matmul"] == ["product"] * 2
    assert [value.name for value in found.outputs] == [value.name for value in function.outputs]
