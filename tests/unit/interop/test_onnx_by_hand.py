"""Models as people write them: dims of two names, norms of groups in old opsets, numbers of 8 bits, recurrent layers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
import ml_dtypes
from numpy.testing import assert_allclose, assert_array_equal
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from parallelism import ir
from parallelism.interop import UnsupportedError, from_onnx
from parallelism.planning import find_plan

RNG = np.random.default_rng(3)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def model(nodes, given, outputs, held=(), opset=17, domains=()):
    """``given`` has arrays, or dtypes and shapes with names; ``held`` has the arrays in the model."""
    types = []
    for name, x in given.items():
        dtype, shape = (x.dtype, x.shape) if isinstance(x, np.ndarray) else x
        types.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in dict(held).items()]
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in domains)]
    return helper.make_model(helper.make_graph(nodes, "g", types, results, tensors), opset_imports=opsets, ir_version=9)


def numbers_of(made, given, **options):
    program, weights = from_onnx(made, **options)
    return ir.interpret(program, {**weights, **given}).outputs


# -- dims with different names -------------------------------------------------------------------------------------------

def added(left, right):
    node = helper.make_node("Add", ["a", "b"], ["y"])
    return from_onnx(model([node], {"a": ("f4", left), "b": ("f4", right)}, {"y": TensorProto.FLOAT})).program


def test_dims_of_two_names_that_are_added_are_one_symbol_of_the_first_name():
    program = added(("rows", "time", 6), ("batch", "length", 6))
    assert program.symbols == {"rows", "time"}
    a, b = floats(2, 3, 6), floats(2, 3, 6)
    assert_array_equal(ir.interpret(program, {"a": a, "b": b}).outputs[0], a + b)


def test_dims_without_names_are_equal_where_they_have_to_be():
    assert added((None, None, 6), (None, 1, 6)).symbols == {"a_0", "a_1"}


def test_a_dim_that_is_added_to_a_number_is_this_number():
    assert not added(("rows", 6), (4, 6)).symbols


def test_names_stay_where_a_dim_is_broadcast():
    assert added(("rows", 6), (1, 6)).symbols == {"rows"}


def test_three_names_become_one():
    nodes = [helper.make_node("Add", ["b", "c"], ["h"]), helper.make_node("MatMul", ["h", "a"], ["y"])]
    given = {"a": ("f4", ("k", 5)), "b": ("f4", ("m", "n")), "c": ("f4", ("o", "p"))}
    program = from_onnx(model(nodes, given, {"y": TensorProto.FLOAT})).program
    assert program.symbols == {"k", "m"}
    assert [str(n) for n in program.inputs[2].type.shape] == ["m", "k"]


def test_extents_that_differ_are_refused_as_before():
    nodes = [helper.make_node("Concat", ["a", "a"], ["h"], axis=0), helper.make_node("Add", ["h", "b"], ["y"])]
    made = model(nodes, {"a": ("f4", ("m", 2)), "b": ("f4", (5, 2))}, {"y": TensorProto.FLOAT})
    with pytest.raises(UnsupportedError, match="do not fit together"):
        from_onnx(made)


def test_a_loss_of_data_and_targets_whose_rows_have_two_names_is_planned():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Sub", ["h", "t"], ["d"]),
             helper.make_node("Mul", ["d", "d"], ["s"]), helper.make_node("ReduceMean", ["s"], ["y"], keepdims=0)]
    given = {"x": ("f4", ("rows", 64)), "t": ("f4", ("others", 32))}
    program = from_onnx(model(nodes, given, {"y": TensorProto.FLOAT}, {"w": floats(64, 32)})).program
    assert program.symbols == {"rows"}
    plans = find_plan(program, hardware="dgx-h100", devices=2, batch=16, recompute="none", zero=0)
    (rows,) = ir.symbols("B")
    other = find_plan(program.specialize(rows=rows), hardware="dgx-h100", devices=2, batch=16, recompute="none", zero=0)
    assert [plan.seconds for plan in plans] == [plan.seconds for plan in other] and len(plans) > 1


# -- norms of groups -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [2, "rows"])
def test_before_opset_21_a_norm_of_groups_has_a_scale_for_each_group(rows):
    x, scale, bias = floats(2, 6, 3, 5), floats(2), floats(2)
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2, epsilon=1e-3, name="norm")
    made = model([node], {"x": ("f4", (rows, 6, 3, 5))}, {"y": TensorProto.FLOAT}, {"s": scale, "b": bias}, opset=18)
    groups = x.reshape(2, 2, -1).astype(np.float64)
    normal = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-3)
    expected = (normal * scale[:, None] + bias[:, None]).reshape(x.shape)
    assert_allclose(numbers_of(made, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)
    assert made.graph.node[0].op_type == "GroupNormalization"


# -- numbers of 8 bits -----------------------------------------------------------------------------------------------------

FLOATS8 = {"e4m3fn": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2", "e4m3fnuz": "FLOAT8E4M3FNUZ", "e5m2fnuz": "FLOAT8E5M2FNUZ"}
EDGES = np.array([0.0, -0.3, 447.0, 460.0, 1e6, -1e6, np.inf, -np.inf, np.nan, 1e-9], np.float32)


@pytest.mark.parametrize("name", FLOATS8)
def test_a_cast_to_8_bits_keeps_large_numbers_finite(name):
    kind = getattr(TensorProto, FLOATS8[name])
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=kind), helper.make_node("Cast", ["c"], ["y"], to=1)]
    dtype = np.dtype(getattr(ml_dtypes, f"float8_{name}"))
    most = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(EDGES, -most, most).astype(dtype).astype(np.float32)
    assert_array_equal(numbers_of(model(nodes, {"x": EDGES}, {"y": TensorProto.FLOAT}, opset=19), {"x": EDGES})[0], expected)


def test_a_cast_to_8_bits_that_does_not_saturate_gives_no_number():
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT8E4M3FN, saturate=0),
             helper.make_node("Cast", ["c"], ["y"], to=1)]
    found = numbers_of(model(nodes, {"x": EDGES}, {"y": TensorProto.FLOAT}, opset=19), {"x": EDGES})[0]
    assert_array_equal(found, EDGES.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_numbers_are_quantized_to_floats_of_8_bits():
    x = floats(3, 4) * 300
    zero = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0])
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s"], ["y"])]
    made = model(nodes, {"x": x}, {"y": TensorProto.FLOAT}, {"s": np.float32(0.5)}, opset=19)
    made.graph.initializer.append(zero)
    expected = np.clip(x / np.float32(0.5), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 0.5
    assert_array_equal(numbers_of(made, {"x": x})[0], expected)


def test_a_node_may_name_the_dtype_of_quantized_numbers():
    x = np.array([-900.0, -3.4, 0.5, 2.5, 900.0], np.float32)
    node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"], output_dtype=TensorProto.INT8)
    made = model([node], {"x": x}, {"y": TensorProto.INT8}, {"s": np.float32(1)}, opset=21)
    found = numbers_of(made, {"x": x})[0]
    assert found.dtype == np.int8
    assert_array_equal(found, [-128, -3, 0, 2, 127])


@pytest.mark.parametrize("columns", [4, 5])
def test_zeros_of_the_columns_of_a_transposed_matrix_are_those_of_its_rows(columns):
    """Of a square matrix they were taken along the wrong dim."""
    a, b = RNG.integers(0, 9, (3, 4)).astype(np.uint8), RNG.integers(-9, 9, (columns, 4)).astype(np.int8)
    zeros, bias = np.arange(columns, dtype=np.int8), np.arange(columns, dtype=np.int32)
    node = helper.make_node("QGemm", ["a", "one", "za", "b", "one", "zb", "c"], ["y"], domain="com.microsoft", transB=1)
    held = {"one": np.float32(1), "za": np.uint8(2), "b": b, "zb": zeros, "c": bias}
    made = model([node], {"a": a}, {"y": TensorProto.FLOAT}, held, domains=["com.microsoft"])
    expected = (a.astype(int) - 2) @ (b.astype(int) - zeros[:, None]).T + bias
    assert_array_equal(numbers_of(made, {"a": a})[0], expected)


# -- recurrent layers ------------------------------------------------------------------------------------------------------

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent(kind, *, layout=0, peepholes=False, **attributes):
    """A model with a layer of two directions, 3 steps of 2 rows with 4 features, and 5 features of a state."""
    states = (2, 2, 5)
    held = {"w": floats(2, GATES[kind] * 5, 4), "r": floats(2, GATES[kind] * 5, 5), "b": floats(2, GATES[kind] * 10),
            "h": floats(*states), "c": floats(*states), "p": floats(2, 15)}
    inputs = ["x", "w", "r", "b", "", "h", *(["c"] if kind == "LSTM" else []), *(["p"] if peepholes else [])]
    outputs = ["y", "last", "cell"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(kind, inputs, outputs, hidden_size=5, direction="bidirectional", layout=layout, **attributes)
    x = floats(2, 3, 4) if layout else floats(3, 2, 4)
    held = {name: array for name, array in held.items() if name in inputs}
    return model([node], {"x": x}, dict.fromkeys(outputs, TensorProto.FLOAT), held, opset=14), x, held


@pytest.mark.parametrize("kind", GATES)
def test_a_layer_with_rows_first_is_the_other_one_with_dims_swapped(kind):
    made, x, _ = recurrent(kind, layout=1)
    found = numbers_of(made, {"x": x})
    other = type(made)()
    other.CopyFrom(made)
    next(each for each in other.graph.node[0].attribute if each.name == "layout").i = 0
    for dim, extent in zip(other.graph.input[0].type.tensor_type.shape.dim, (3, 2), strict=False):
        dim.dim_value = extent
    for tensor in other.graph.initializer:
        if tensor.name in ("h", "c"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).swapaxes(0, 1).copy(), tensor.name))
    every, *lasts = numbers_of(other, {"x": x.swapaxes(0, 1)})
    assert found[0].shape == (2, 3, 2, 5)
    assert_allclose(found[0], every.transpose(2, 0, 1, 3), rtol=1e-6)
    for one, last in zip(found[1:], lasts, strict=True):
        assert_allclose(one, last.swapaxes(0, 1), rtol=1e-6)


def test_gates_of_an_lstm_see_the_cell_through_peepholes():
    made, x, held = recurrent("LSTM", peepholes=True)
    found = numbers_of(made, {"x": x})
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    for d in (0, 1):
        h, c = held["h"][d], held["c"][d]
        of_in, of_out, of_forget = held["p"][d].reshape(3, 5)
        for row in x[:: -1 if d else 1]:
            sums = row @ held["w"][d].T + h @ held["r"][d].T + held["b"][d].reshape(2, -1).sum(0)
            i, o, f, new = sums.reshape(2, 4, 5).swapaxes(0, 1)
            c_next = sigmoid(f + of_forget * c) * c + sigmoid(i + of_in * c) * np.tanh(new)
            h, c = sigmoid(o + of_out * c_next) * np.tanh(c_next), c_next
        assert_allclose(found[1][d], h, rtol=1e-4)
        assert_allclose(found[2][d], c, rtol=1e-4)


def test_hard_sigmoids_take_their_numbers_in_order():
    names = ["HardSigmoid", "Tanh"] * 2
    made, x, held = recurrent("GRU", activations=names, activation_alpha=[0.3, 0.1], activation_beta=[0.4])
    found = numbers_of(made, {"x": x})
    for d, (slope, offset) in enumerate([(0.3, 0.4), (0.1, 0.5)]):
        h = held["h"][d]
        before, after = held["b"][d].reshape(2, 3, 5)
        for row in x[:: -1 if d else 1]:
            left = (row @ held["w"][d].T).reshape(2, 3, 5) + before
            gates = [np.clip(slope * (left[:, k] + h @ held["r"][d][5 * k : 5 * k + 5].T + after[k]) + offset, 0, 1)
                     for k in (0, 1)]
            new = np.tanh(left[:, 2] + (gates[1] * h) @ held["r"][d][10:].T + after[2])
            h = (1 - gates[0]) * new + gates[0] * h
        assert_allclose(found[1][d], h, rtol=1e-4)


def test_what_draws_numbers_is_told_what_to_do():
    node = helper.make_node("RandomNormalLike", ["x"], ["y"])
    with pytest.raises(UnsupportedError, match=r"draws random numbers.*draw them outside"):
        from_onnx(model([node], {"x": floats(2, 3)}, {"y": TensorProto.FLOAT}))


def test_places_of_a_known_mask_are_known():
    mask = np.array([[True, False, True], [False, False, True]])
    nodes = [helper.make_node("NonZero", ["m"], ["places"]), helper.make_node("Transpose", ["places"], ["rows"], perm=[1, 0]),
             helper.make_node("GatherND", ["x", "rows"], ["y"])]
    x = floats(2, 3)
    made = model(nodes, {"x": x}, {"y": TensorProto.FLOAT}, {"m": mask})
    assert_array_equal(numbers_of(made, {"x": x})[0], x[mask])


def test_the_reference_agrees_about_dims_of_two_names():
    dims = {"a": ("f4", ("m", 2)), "b": ("f4", ("n", 2))}
    made = model([helper.make_node("Mul", ["a", "b"], ["y"])], dims, {"y": TensorProto.FLOAT})
    given = {"a": floats(3, 2), "b": floats(3, 2)}
    assert_array_equal(numbers_of(made, given)[0], ReferenceEvaluator(made).run(None, given)[0])
