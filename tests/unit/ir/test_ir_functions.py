"""Functions as values: checked when built, specialised late, run by the reference executor, their memory known."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.ir.passes.given_arrays import numbers_in

T, V, Op = ir.TensorType, ir.Value, ir.Op
B, D, S = ir.symbols("B D S")
X, W, Y = V("x", T("f64", (5, 3))), V("w", T("f64", (3, 2))), V("y", T("f64", (5, 2)))
MATMUL = Op("matmul", (X, W), {}, (Y,))


# -- types and values --------------------------------------------------------------------------------------------------


def test_a_type_is_a_value():
    a, b = T(np.float32, [8, B]), T("f32", (8, B))
    assert a == b and hash(a) == hash(b) and str(a) == "tensor<8xBxf32>"
    assert a.nbytes == 32 * B and a.symbols == {"B"} and a.ndim == 2
    assert T(">f8", 3) == T(np.dtype(">f8"), (3,)) == T("f64", (np.int64(3),))
    assert pickle.loads(pickle.dumps(a)) == a  # noqa: S301


@pytest.mark.parametrize(("dtype", "shape", "message"), [
    ("c16", (), "a dtype must be one of i1, f16, .*, got complex128"), ("nothing", (), "a dtype must be one of"),
    (object, (), "a dtype must be one of"), ("f8", (-1,), "an extent must be at least 0"),
    ("f8", (1.5,), "an extent must be an integer"), ("f8", (True,), "an extent must be an integer"),
    ("f8", (2**63,), "at most 2.*62"), ("f8", (1,) * 27, "at most 26 dims"),
])
def test_what_is_no_type_is_refused(dtype, shape, message):
    with pytest.raises((TypeError, ValueError), match=message):
        T(dtype, shape)


def test_an_op_keeps_its_attributes_in_order_and_hashable():
    op = Op("sum", (X,), {"keepdims": np.bool_(True), "axes": [np.int64(1)]}, ())
    assert op.attributes == (("axes", (1,)), ("keepdims", True))
    assert op["axes"] == (1,) and hash(op) == hash(Op("sum", [X], op.attributes, []))
    with pytest.raises(ValueError, match="attribute value cannot be nan"):
        Op("constant", (), {"value": float("nan")}, ())
    with pytest.raises(TypeError, match=r"attribute value must be a number, a string, a dtype or a list of them, got "
                                        r"\{\}"):
        Op("constant", (), {"value": {}}, ())


# -- verify ------------------------------------------------------------------------------------------------------------


def test_a_function_is_a_frozen_value():
    function = ir.Function("f", [X, W], [MATMUL], [Y])
    assert function == ir.Function("f", (X, W), (MATMUL,), (Y,)) and hash(function)
    assert pickle.loads(pickle.dumps(function)) == function  # noqa: S301
    with pytest.raises(AttributeError):
        function.name = "g"
    assert [value.name for value in function.values] == ["x", "w", "y"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("inputs", "ops", "outputs", "message"), [
    ([X], [MATMUL], [Y], r'@f, op 0, %y = "matmul"\(%x, %w\): %w is not defined yet'),
    ([X, W], [], [Y], "@f, return: %y is not defined yet"),
    ([X, X], [], [], "@f: two inputs are named %x"),
    ([X, W], [MATMUL, MATMUL], [Y], "op 1, .*: %y is defined already; every value is defined once"),
    ([X, W], [Op("matmul", (X, W), {}, (X,))], [], "its output must be tensor<5x2xf64>, got tensor<5x3xf64>"),
    ([X, W], [Op("matmul", (X, W), {}, (V("x", Y.type),))], [], "%x is defined already"),
    ([X, W], [Op("matmul", (X, W), {}, ())], [], "its output must be tensor<5x2xf64>, got nothing"),
    ([X, W], [Op("matmul", (W, X), {}, (Y,))], [], r"matmul: dim k of mk,kn->mn is 2 in input 0, of shape \(3, 2\), "
     r"and 5 in input 1, of shape \(5, 3\)"),
    ([X, W], [Op("matmul", (X,), {}, (Y,))], [], "matmul: it does not take 1 inputs"),
    ([X, W], [Op("matmul", (X, W), {"axis": 1}, (Y,))], [], "matmul: its attributes are none; got axis"),
    ([X, W], [Op("matmol", (X, W), {}, (Y,))], [], "there is no operator 'matmol'; did you mean 'matmul'?"),
    ([X], [Op("add", (X, V("x", T("f32", (5, 3)))), {}, (Y,))], [], "%x is defined as tensor<5x3xf64> and used as "
                                                                    "tensor<5x3xf32>"),
    ([X], [Op("sum", (X,), {"axes": 1, "keepdims": False}, (Y,))], [], "attribute axes must be a list of integers, "
                                                                       "got 1"),
    ([X, W], [Op("add", (X, W), {}, (Y,))], [], r"shapes \(5, 3\) and \(3, 2\) do not fit together: 5 is not 3"),
    ([X], [Op("softmax", (V("x", T("i64", (2,))),), {"axis": 0}, (Y,))], [], "%x is defined as"),
])
def test_what_is_no_function_is_refused(inputs, ops, outputs, message):
    with pytest.raises(ir.VerifyError, match=message):
        ir.Function("f", inputs, ops, outputs)


@pytest.mark.parametrize("name", ["", "a b", "%x", "é", None, 3])
def test_names_are_plain(name):
    with pytest.raises(ir.VerifyError, match="the name of a value must consist of letters"):
        V(name, X.type)
    with pytest.raises(ir.VerifyError, match="the name of a function must consist of letters"):
        ir.Function(name, [], [], [])


def test_symbols_that_differ_do_not_fit():
    x, y = V("x", T("f64", (B, 3))), V("y", T("f64", (D, 3)))
    with pytest.raises(ir.VerifyError, match=r"shapes \(B, 3\) and \(D, 3\) do not fit together: B is not D"):
        ir.Function("f", [x, y], [Op("add", (x, y), {}, (V("z", x.type),))], [])


# -- specialize --------------------------------------------------------------------------------------------------------


def rows(x, w):
    return np.mean((x @ w).reshape(-1), keepdims=True)


SYMBOLIC = ir.record(rows, T("f64", (B, D)), T("f64", (D, 2)))


def test_numbers_for_symbols_some_or_all():
    assert SYMBOLIC.symbols == {"B", "D"}
    half = SYMBOLIC.specialize(B=5)
    assert half.symbols == {"D"} and half.inputs[0].type.shape == (5, D)
    assert half.specialize(D=3) == SYMBOLIC.specialize(D=3, B=5)
    assert SYMBOLIC.specialize(B=5, D=3) == ir.record(rows, T("f64", (5, 3)), T("f64", (3, 2)))
    assert SYMBOLIC.specialize(D=2 * B).inputs[1].type.shape == (2 * B, 2)


def test_flops_bytes_and_memory_are_expressions_first():
    assert SYMBOLIC.flops == 4 * B * D + 2 * B + 1
    assert SYMBOLIC.nbytes.specialize(B=5, D=3) == SYMBOLIC.specialize(B=5, D=3).nbytes
    assert ir.peak_bytes(SYMBOLIC).specialize(B=5, D=3) == ir.peak_bytes(SYMBOLIC.specialize(B=5, D=3))


@pytest.mark.parametrize(("numbers", "error", "message"), [
    ({"C": 1}, ValueError, "@rows has no symbol C: its symbols are B, D"),
    ({"B": -1}, ValueError, "symbol B must be at least 0, because it is an extent, got -1"),
    ({"B": 1.5}, TypeError, "symbol B must be an integer or an expression, got 1.5"),
    ({"B": True}, TypeError, "symbol B must be an integer"),
])
def test_numbers_that_cannot_be_put_in_are_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        SYMBOLIC.specialize(**numbers)


def test_an_extent_that_would_not_be_whole_is_refused():
    function = ir.record(lambda x: x.reshape(-1, 4), T("f64", (B, 2)))
    assert function.specialize(B=6).outputs[0].type.shape == (3, 4)
    with pytest.raises(ValueError, match="B/2 must be whole; with B=5 it is 5/2"):
        function.specialize(B=5)


# -- interpret ---------------------------------------------------------------------------------------------------------

x5, w3 = np.arange(15.0).reshape(5, 3), np.arange(6.0).reshape(3, 2)


def test_inputs_by_order_or_name_symbols_by_shape():
    for inputs in ([x5, w3], {"w": w3, "x": x5}):
        found, = ir.interpret(SYMBOLIC, inputs).outputs
        assert_array_equal(found, [(x5 @ w3).mean()])


def test_inputs_are_left_as_they_are_whatever_their_strides():
    function = ir.record(lambda x: np.cumsum(x, axis=0) * 2, T("f64", (3, 5)))
    x = x5.copy()
    x.flags.writeable = False
    found, = ir.interpret(function, [x.T]).outputs
    assert_array_equal(found, np.cumsum(x5.T, axis=0) * 2)
    assert_array_equal(x, x5)


@pytest.mark.parametrize(("inputs", "error", "message"), [
    ([x5], ValueError, r"@rows takes 2 inputs \(x, w\), got 1"),
    ({"x": x5}, ValueError, "@rows takes the inputs x, w; got x$"),
    ([x5, w3.T], ValueError, r"D is 3 elsewhere and 2 in input %w: tensor<Dx2xf64>"),
    ([x5, w3.astype("f4")], TypeError, "input %w: .* was given an array of float32"),
    ([x5, np.ones((3, 4))], ValueError, r"input %w: tensor<3x2xf64> was given an array of shape \(3, 4\)"),
    ([x5[0], w3], ValueError, r"input %x: tensor<BxDxf64> was given an array of shape \(3,\)"),
])
def test_arrays_of_other_types_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        ir.interpret(SYMBOLIC, inputs)


def test_one_array_in_place_of_a_list_of_inputs_is_told():
    square = ir.record(lambda x: x * x, T("f64", (5,)))
    with pytest.raises(ValueError, match=r"takes 1 input \(x\), got 5, as rows of one array; write \[x\]$"):
        ir.interpret(square, np.ones(5))


def test_of_many_inputs_those_that_differ_are_told():
    many = ir.record(lambda p: sum(p.values()), {f"weight_{i}": T("f64", (2,)) for i in range(99)})
    given = {value.name: np.ones(2) for value in many.inputs[1:]} | {"bias": np.ones(2)}
    with pytest.raises(ValueError, match=r"; missing: p.weight_0; unknown: bias$") as error:
        ir.interpret(many, given)
    assert "more characters" in str(error.value) and len(str(error.value)) < 1000


def test_a_symbol_that_no_input_tells_is_asked_for():
    function = ir.record(lambda x: np.zeros_like(x, shape=(B,)), T("f64", (3,)), name="free")
    with pytest.raises(ValueError, match=re.escape(
            "@free: nothing says what B is; in a run the shapes of the arrays say it, simulate takes numbers={'B': 64}, and "
            "the program's specialize(B=64) fixes it")):
        ir.interpret(function, [np.ones(3)])
    assert_array_equal(ir.interpret(function.specialize(B=2), [np.ones(3)]).outputs[0], [0, 0])


@pytest.mark.parametrize(("shapes", "arrays", "numbers"), [
    ([(2 * B,)], [(6,)], {"B": 3}),
    ([(S * B + 1,), (S,)], [(13,), (4,)], {"S": 4, "B": 3}),          # S is found first, wherever it stands
    ([(B * D,), (B * S,), (S,)], [(6,), (4,), (2,)], {"S": 2, "B": 2, "D": 3}),
    ([(2 * B,), (B // 2,)], [(8,), (2,)], {"B": 4}),
    ([(B * B,)], [(9,)], {}), ([(B + S,)], [(5,)], {}), ([(2 * B,)], [(5,)], {}), ([(B + 3,)], [(2,)], {}),
    ([(0 * B + 4,)], [(4,)], {}), ([(B,)], [(0,)], {"B": 0}),
])
def test_symbols_are_found_in_extents_that_are_linear_in_them(shapes, arrays, numbers):
    function = ir.record(lambda *x: x, *[T("f64", shape) for shape in shapes])
    given = {value.name: np.zeros(shape) for value, shape in zip(function.inputs, arrays, strict=True)}
    assert numbers_in(function, given) == numbers


# -- memory ------------------------------------------------------------------------------------------------------------


def chain(x):
    y = np.exp(x)              # 40 bytes each
    z = np.outer(y, y)         # 200
    w = z * 2                  # y is free; 200 more
    return np.sum(w, axis=0)   # z is free; 40 more, w is free after it


def test_values_are_freed_after_their_last_use_and_views_take_nothing():
    function = ir.record(chain, T("f64", (5,)))
    freed = [[op.kind, *(v.name for v in values)]
             for op, values in zip(function.ops, ir.freed_after(function), strict=True)]
    assert freed == [["exp"], ["einsum", "0"], ["constant"], ["multiply", "1", "2"], ["sum", "3"]]
    assert ir.peak_bytes(function) == 40 + 200 + 8 + 200
    found = ir.interpret(function, [np.zeros(5)])
    assert found.peak_bytes == 448
    assert_array_equal(found.outputs[0], np.full(5, 10.0))


def test_a_view_keeps_the_memory_that_it_lies_in():
    def function(x):
        y = (x * x).reshape(15)
        return np.sum(np.exp(y) * y)

    recorded = ir.record(function, T("f64", (5, 3)))
    assert ir.interpret(recorded, [x5 / 10]).peak_bytes == ir.peak_bytes(recorded) == 4 * 120


def test_inputs_and_outputs_stay():
    function = ir.record(lambda x: (x, x + x, x), T("f64", (5, 3)))
    assert ir.freed_after(function) == ((),)
    assert ir.live_bytes(function) == (240,)
    assert ir.peak_bytes(ir.record(lambda x: x, T("f64", (B,)))) == 8 * B


def test_what_no_output_needs_runs_and_is_freed_at_once():
    def function(x):
        np.exp(x)
        return x + 1

    recorded = ir.record(function, T("f64", (5,)))
    assert [op.kind for op in recorded.ops] == ["exp", "constant", "add"]
    assert ir.live_bytes(recorded) == (80, 48, 88)


def test_a_kernel_that_breaks_its_word_is_found_out(monkeypatch):
    from dataclasses import replace

    from parallelism.ir.core import OPERATORS

    monkeypatch.setitem(OPERATORS, "exp", replace(OPERATORS["exp"], kernel=lambda x: x[:1]))
    with pytest.raises(RuntimeError, match=r"the kernel of exp returned float64\[1\] for %0: tensor<5xf64>"):
        ir.interpret(ir.record(lambda x: np.exp(x), T("f64", (5,))), [np.zeros(5)])
