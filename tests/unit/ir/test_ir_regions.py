"""Layouts on the values of a program, and named regions of it: kept by every transform, taken out and put back."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.testing import assert_array_equal

from parallelism import TensorSharding, ir
from parallelism.ir.core import Builder

T, V = ir.TensorType, ir.Value
B = ir.symbol("B")

# -- layouts -----------------------------------------------------------------------------------------------------------

X = V("x", T("f64", (B, 3)), TensorSharding("dp", ...))


def test_a_layout_is_part_of_a_value_each_dim_spelt_out():
    assert X == V("x", X.type, TensorSharding("dp", None)) != V("x", X.type)
    assert hash(X) == hash(V("x", X.type, TensorSharding("dp", None)))
    assert str(X) == "%x: tensor<Bx3xf64> [dp, None]"
    assert pickle.loads(pickle.dumps(X)) == X  # noqa: S301


def test_what_is_no_layout_of_a_value_is_refused():
    with pytest.raises(ir.VerifyError, match=r"%x: TensorSharding\('dp'\) has 1 dim, the tensor has 2: tensor<Bx3xf"):
        V("x", X.type, TensorSharding("dp"))
    with pytest.raises(TypeError, match=r"%x: its layout must be a TensorSharding or None, got \['dp', None\]"):
        V("x", X.type, ["dp", None])


def test_a_value_lies_as_it_was_made():
    wrong = replace(X, layout=None)
    with pytest.raises(ir.VerifyError, match=r"%x is defined as %x: tensor<Bx3xf64> \[dp, None\] and used as %x: "
                                             r"tensor<Bx3xf64>$"):
        ir.Function("f", [X], [ir.Op("exp", (wrong,), {}, (V("y", X.type),))], [])


def test_transforms_keep_layouts():
    y = V("y", X.type, TensorSharding(None, "tp"))
    function = ir.Function("f", [X], [ir.Op("exp", (X,), {}, (y,), "block.0")], [y])
    numbers = function.specialize(B=5)
    assert [v.layout for v in numbers.values] == [X.layout, y.layout]
    assert [op.region for op in numbers.ops] == ["block.0"]
    grad = ir.gradient(function, keep_outputs=True)
    assert [v.layout for v in grad.inputs] == [X.layout, None]
    assert grad.outputs[0] == y and grad.ops[0] == function.ops[0]
    assert_array_equal(ir.interpret(function, [np.zeros((2, 3))]).outputs[0], np.ones((2, 3)))


# -- regions -----------------------------------------------------------------------------------------------------------


def model(x, w):
    x = x + 1
    for i in range(2):
        with ir.region(f"block.{i}"):
            with ir.region("product"):
                hidden = np.maximum(x @ w, 0)
            x = x + hidden
    return np.sum(x)


MODEL = ir.record(model, T("f64", (B, 3)), T("f64", (3, 3)))
x23, w33 = np.arange(6.0).reshape(2, 3), np.arange(9.0).reshape(3, 3) - 4


def kinds(function):
    return [op.kind for op in function.ops]


def run(function, *arrays):
    return ir.interpret(function, arrays).outputs


def test_what_is_recorded_in_a_region_is_marked_with_its_path():
    assert [op.region for op in MODEL.ops] == [
        None, None, *(f"block.{i}{inner}" for i in range(2) for inner in (*[".product"] * 3, "")), None,
    ]
    assert MODEL.regions == ("block", "block.0", "block.0.product", "block.1", "block.1.product")
    assert ir.parse(str(MODEL)) == MODEL
    assert_array_equal(run(MODEL, x23, w33)[0], model(x23, w33))          # in NumPy regions mean nothing


def test_a_constant_belongs_to_the_region_that_uses_it():
    assert [op.region for op in MODEL.ops if op.kind == "constant"] == [None, "block.0.product", "block.1.product"]


def test_a_region_is_a_function_of_its_own():
    block = MODEL.region("block.1")
    assert kinds(block) == ["matmul", "constant", "maximum", "add"]
    assert [v.name for v in block.inputs] == ["5", "w"] and block.name == "block.1"
    assert block.outputs == MODEL.ops[-1].inputs
    x = run(MODEL.region("block.0"), x23, w33)[0]
    assert_array_equal(run(block, x, w33)[0], x + np.maximum(x @ w33, 0))
    assert kinds(MODEL.region("block")) == [*kinds(block), *kinds(block)]
    assert kinds(MODEL.region("block.0.product")) == ["matmul", "constant", "maximum"]


def test_a_region_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"@model has no op in region 'block.2'; did you mean 'block.1'"):
        MODEL.region("block.2")
    with pytest.raises(ValueError, match=r"@model has no op in region 'bloc'; did you mean 'block"):
        MODEL.region("bloc")
    for path in ("", "a..b", ".a", "a b", 3):
        with pytest.raises(ValueError, match=r"a region is a path of names separated by ., such as block.0, got "):
            MODEL.region(path)
        with pytest.raises(ValueError, match="a region is a path of names"):
            ir.region(path).__enter__()
        with pytest.raises(ValueError, match="a region is a path of names"):
            replace(MODEL.ops[0], region=path)


def test_the_way_back_through_a_region_is_a_region():
    grad = ir.gradient(MODEL, keep_outputs=True)
    assert grad.region("block.0") == replace(MODEL.region("block.0"), outputs=grad.region("block.0").outputs)
    back = grad.region("gradient.block.0")
    assert "matmul" not in kinds(back) and "einsum" in kinds(back)
    assert grad.regions[:5] == MODEL.regions
    assert set(grad.regions[5:]) == {"gradient", *(f"gradient.{path}" for path in MODEL.regions)}
    twice = ir.gradient(ir.gradient(MODEL, "x"))
    assert "gradient.gradient.block.1.product" in twice.regions


# -- another part in its place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["block", "block.0", "block.1", "block.0.product"])
def test_a_region_put_back_changes_nothing(path):
    assert MODEL.replaced(path, MODEL.region(path)) == MODEL
    assert MODEL.replaced(path, ir.parse(str(MODEL.region(path)))) == MODEL


def test_another_function_in_place_of_a_region():
    other = ir.record(lambda x, w: (np.tanh(x) * 2) @ w, *(v.type for v in MODEL.region("block.0").inputs))
    new = MODEL.replaced("block.0", other)
    assert kinds(new.region("block.0")) == ["tanh", "constant", "multiply", "matmul"]
    assert new.region("block.1") == MODEL.region("block.1")
    x = (np.tanh(x23 + 1) * 2) @ w33
    assert_array_equal(run(new, x23, w33)[0], (x + np.maximum(x @ w33, 0)).sum())
    ir.verify(new)
    assert ir.parse(str(new)) == new


def test_layouts_of_another_part_are_kept():
    part = MODEL.region("block.0")
    made = part.outputs[0]
    laid = {made: replace(made, layout=TensorSharding("dp", None))}
    ops = [replace(op, outputs=[laid.get(v, v) for v in op.outputs]) for op in part.ops]
    new = MODEL.replaced("block.0", ir.Function("part", part.inputs, ops, [laid[made]]))
    assert [v.name for v in new.values if v.layout] == [made.name]
    assert ir.parse(str(new)) == new


def test_a_part_may_return_what_it_is_given_or_one_value_twice():
    two = ir.record(lambda x: marked(x), T("f64", (3,)))
    for part, expected in ((lambda x: (x, x), [2.0, 4, 6]), (lambda x: [np.square(x)] * 2, [2.0, 8, 18])):
        new = two.replaced("a", ir.record(part, T("f64", (3,))))
        assert_array_equal(run(new, np.array([1.0, 2, 3]))[0], expected)


def marked(x):
    with ir.region("a"):
        y, z = np.exp(x), np.tanh(x)
    return y + z


def test_a_part_of_other_types_is_refused():
    x, w = (v.type for v in MODEL.region("block.0").inputs)
    with pytest.raises(ValueError, match=r"region 'block.0' of @model takes tensor<Bx3xf64>, tensor<3x3xf64>, but "
                                         r"@one takes tensor<Bx3xf64>"):
        MODEL.replaced("block.0", ir.record(lambda x: x, x, name="one"))
    with pytest.raises(ValueError, match=r"region 'block.0' of @model returns tensor<Bx3xf64>, but @two returns "
                                         r"nothing"):
        MODEL.replaced("block.0", ir.record(lambda x, w: (), x, w, name="two"))


def test_what_lies_between_runs_before_or_after():
    def scattered(x):
        with ir.region("a"):
            y = np.exp(x)
        z = np.sin(y)
        before = np.cos(x)
        with ir.region("a"):
            w = before * y
        return z + w

    function = ir.record(scattered, T("f64", (3,)))
    new = function.replaced("a", function.region("a"))
    assert kinds(new) == ["cos", "exp", "multiply", "sin", "add"]
    assert_array_equal(run(new, np.ones(3))[0], run(function, np.ones(3))[0])


def test_a_region_that_is_needed_for_its_own_input_is_refused():
    def around(x):
        with ir.region("a"):
            y = np.exp(x)
        z = np.sin(y)
        with ir.region("a"):
            return z * y

    function = ir.record(around, T("f64", (3,)))
    assert [v.name for v in function.region("a").inputs] == ["x", "1"]
    with pytest.raises(ValueError, match="region 'a' of @around is not in one piece: its input %1 is computed outside "
                                         "of it from one of its outputs"):
        function.replaced("a", function.region("a"))


@st.composite
def programs(draw):
    """Sums of what there is, in regions by chance."""
    builder = Builder()
    values = [builder.input(name, T("f64", (2,))) for name in "xy"]
    for _ in range(draw(st.integers(1, 8))):
        with builder.region(draw(st.sampled_from([None, "a", "a.b", "c"]))):
            pair = draw(st.tuples(st.sampled_from(values), st.sampled_from(values)))
            values += builder.emit(draw(st.sampled_from(["add", "subtract", "multiply"])), pair, {})
    return builder.function("f", draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))


def is_one_piece(function, part):
    """Whether nothing outside stands between what a region makes and what it takes."""
    outside = {value for op in part.ops for value in op.outputs}
    for op in function.ops:
        if op not in part.ops and not outside.isdisjoint(op.inputs):
            outside.update(op.outputs)
    return outside.isdisjoint(part.inputs)


@given(programs())
def test_a_part_computes_what_it_computed_inside(function):
    arrays = [np.array([1.0, 2]), np.array([3.0, -1])]
    expected = run(function, *arrays)
    for path in function.regions:
        part = function.region(path)
        assert [op for op in function.ops if op in part.ops] == list(part.ops)
        if not is_one_piece(function, part):
            with pytest.raises(ValueError, match="is not in one piece"):
                function.replaced(path, part)
            continue
        new = function.replaced(path, part)
        assert new.region(path) == part
        for a, b in zip(run(new, *arrays), expected, strict=True):
            assert_array_equal(a, b)
