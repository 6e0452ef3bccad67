"""Nodes of ONNX at their edges: the reference evaluator of onnx is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

from numpy.testing import assert_allclose, assert_array_equal
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from parallelism import ir
from parallelism.interop import from_onnx


def model(node, given, outputs, opset):
    types = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
             for name, x in given.items()]
    results = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
               for name, x in outputs.items()]
    return helper.make_model(helper.make_graph([node], "g", types, results),
                             opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def outputs_of(node, given, opset, like=None):
    """What a program gives, and what the reference evaluator does; ``like`` stands in for a result it cannot give."""
    names = [name for name in node.output if name]
    untyped = [helper.make_tensor_value_info(name, 1, None) for name in names]
    types = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
             for name, x in given.items()]
    graph = helper.make_graph([node], "g", types, untyped)
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    expected = [like] if like is not None else ReferenceEvaluator(plain).run(None, given)
    program, weights = from_onnx(model(node, given, dict(zip(names, expected, strict=True)), opset))
    return ir.interpret(program, {**weights, **given}).outputs, expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("outputs", [("y", "", ""), ("y", "", "", "w"), ("y", "k2", "v2", "w"), ("y", "k2", "", ""),
                                     ("y",)])
@pytest.mark.parametrize("causal", [0, 1])
def test_an_attention_may_leave_outputs_out(outputs, causal):
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 4, 3, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 6)}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    node = helper.make_node("Attention", ["q", "k", "v"], outputs, is_causal=causal)
    for found, expected in zip(*outputs_of(node, given, 23), strict=True):
        assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32", "float16", "float32", "float64"])
@pytest.mark.parametrize("fmod", [0, 1])
def test_a_remainder_has_the_sign_of_the_divisor_or_of_the_dividend(dtype, fmod):
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 10, (4, 6)), rng.choice([-7, -3, -2, -1, 1, 2, 5], 6)
    a, b = (abs(a), abs(b)) if dtype.startswith("u") else (a, b)
    given = {"a": a.astype(dtype), "b": b.astype(dtype)}
    if dtype.startswith("float"):
        given = {name: x + rng.normal(size=x.shape).astype(dtype) for name, x in given.items()}
        given["a"][0, :3] = 0, -0.0, np.inf
        given["b"][5] = np.inf
    node = helper.make_node("Mod", ["a", "b"], ["y"], fmod=fmod)
    with np.errstate(all="ignore"):
        (found,), (expected,) = outputs_of(node, given, 28)
    assert found.dtype == expected.dtype
    assert_array_equal(found, expected)
    assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize(("base", "exponent"), [("int32", "int32"), ("int64", "int64"), ("int64", "int32"),
                                                ("int32", "uint8")])
def test_a_power_of_integers_is_exact_and_may_be_negative(base, exponent):
    a, b = np.array([3, 2, -1, -1, 1, 7, -2]), np.array([39, -1, -3, -2, -2, 3, 5])
    a, b = (a[[0, 5, 6]], b[[0, 5, 6]]) if exponent.startswith("u") else (a, b)
    a[0], b[0] = (3, 19) if base == "int32" else (3, 39)
    expected = np.array([int(x) ** int(y) if y >= 0 else int(float(x) ** int(y)) for x, y in zip(a, b, strict=True)])
    node = helper.make_node("Pow", ["a", "b"], ["y"])
    (found,), _ = outputs_of(node, {"a": a.astype(base), "b": b.astype(exponent)}, 21, expected.astype(base))
    assert found.dtype == base
    assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["Sigmoid", "Elu", "Selu", "HardSigmoid", "Softsign", "Gelu", "HardSwish"])
def test_a_function_of_float16_is_rounded_once(kind):
    x = np.random.default_rng(3).normal(size=4000).astype(np.float32)
    node = helper.make_node(kind, ["x"], ["y"])
    half = x.astype(np.float16)
    (found,), _ = outputs_of(node, {"x": half}, 21, half)
    (single,), _ = outputs_of(node, {"x": half.astype(np.float32)}, 21, x)
    assert_array_equal(found, single.astype(np.float16))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_sequence_of_fewer_steps_is_as_alone_and_zero_behind_its_end(kind, direction):
    rng = np.random.default_rng(3)
    ways, gates = 1 + (direction == "bidirectional"), {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    steps, rows, width, hidden = 5, 3, 2, 4
    shapes = {"x": (steps, rows, width), "w": (ways, gates * hidden, width), "r": (ways, gates * hidden, hidden),
              "b": (ways, 2 * gates * hidden), "h": (ways, rows, hidden), "c": (ways, rows, hidden)}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given = given if kind == "LSTM" else {name: array for name, array in given.items() if name != "c"}
    results = ["y", "h1", "c1"][: 3 if kind == "LSTM" else 2]
    lengths = np.array([5, 1, 3], np.int32)

    def run(given, lengths):
        names = ["x", "w", "r", "b", "lengths" if lengths is not None else "", "h", *(["c"] if kind == "LSTM" else [])]
        node = helper.make_node(kind, names, results, hidden_size=hidden, direction=direction)
        given = given if lengths is None else {**given, "lengths": lengths}
        n, batch, _ = given["x"].shape
        end = np.zeros((ways, batch, hidden), np.float32)
        outputs = dict.fromkeys(results, end) | {"y": np.zeros((n, *end.shape), np.float32)}
        program, weights = from_onnx(model(node, given, outputs, 22))
        return ir.interpret(program, {**weights, **given}).outputs

    every, *ends = run(given, lengths)
    for row, n in enumerate(lengths.tolist()):
        own = {**given, "x": given["x"][:n, row : row + 1]}
        own |= {name: given[name][:, row : row + 1] for name in ("h", "c") if name in given}
        alone, *last = run(own, None)
        assert_allclose(every[:n, :, row], alone[:, :, 0], rtol=1e-5, atol=1e-6)
        assert not every[n:, :, row].any()
        for found, expected in zip(ends, last, strict=True):
            assert_allclose(found[:, row], expected[:, 0], rtol=1e-5, atol=1e-6)



@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("axis", "kept"), [(1, (1, 4)), (0, (3, 1)), (1, (1, 1)), (1, (3, 4))])
def test_what_is_broadcast_is_joined_summed_and_read_by_places_as_if_it_were_whole(batch, axis, kept):
    """Positions along a batch, as models find documents in them: a batch row must not depend on another."""
    rng = np.random.default_rng(batch)
    a, b = rng.integers(-9, 10, (2, *kept)).astype(np.int64)
    places = np.stack([rng.integers(0, 3, (batch, 2)), rng.integers(0, 4, (batch, 2))], -1)
    nodes = [
        helper.make_node("Expand", ["a", "shape"], ["wide_a"]), helper.make_node("Expand", ["b", "shape"], ["wide_b"]),
        helper.make_node("Concat", ["wide_a", "wide_b"], ["both"], axis=axis),
        helper.make_node("CumSum", ["both", "axis"], ["sums"]), helper.make_node("GatherND", ["sums", "places"], ["y"])]
    constants = {"a": a, "b": b, "shape": np.array([3, 4]), "axis": np.array(axis)}
    tensors = [numpy_helper.from_array(x, name) for name, x in constants.items()]
    types = [helper.make_tensor_value_info("places", 7, ["B", 2, 2])]
    graph = helper.make_graph(nodes, "g", types, [helper.make_tensor_value_info("y", 7, ["B", 2])], tensors)
    program, weights = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    found, = ir.interpret(program, {**weights, "places": places}).outputs
    wide = np.cumsum(np.concatenate([np.broadcast_to(x, (3, 4)) for x in (a, b)], axis), axis)
    assert_array_equal(found, wide[places[..., 0], places[..., 1]])
    (op,) = [op for op in program.ops if op.kind == "take"]
    extents = [n * (2 if d == axis else 1) for d, n in enumerate((3, 4))]
    copies = [n for d, n in enumerate(extents) if kept[d] == 1 and d != axis]
    assert op.inputs[0].type.shape == (6 * 4 // (copies[0] if copies else 1),)


SLOPES = {"LeakyRelu": ({"alpha": 0.25}, [], [0.25, 0.25, 1]), "PRelu": ({}, [0.5], [0.5, 0.5, 1]),
          "Elu": ({"alpha": 2.0}, [], [2 / np.e, 2, 1]), "Celu": ({"alpha": 2.0}, [], [np.exp(-0.5), 1, 1]),
          "Selu": ({"alpha": 2.0, "gamma": 3.0}, [], [6 / np.e, 6, 3]), "Clip": ({}, [-1, 1], [1, 1, 1]),
          "ReduceL2": ({}, [], [0, 0, 0])}


@pytest.mark.parametrize("kind", SLOPES)
def test_gradients_at_corners_are_those_of_pytorch(kind):
    """At -1, 0 and 1, the bounds of Clip; of a norm at zeros.  PyTorch 2.13.0 gave these, its Selu with other numbers."""
    attributes, others, wanted = SLOPES[kind]
    x = np.zeros((3, 1), np.float32) if kind == "ReduceL2" else np.array([[-1], [0], [1]], np.float32)
    given = {"x": x, **{f"b{i}": np.float32(n).reshape(()) for i, n in enumerate(others)}}
    node = helper.make_node(kind, [*given], ["y"], **attributes)
    made = np.ones((1, 1), np.float32) if kind == "ReduceL2" else np.ones_like(x)
    program, weights = from_onnx(model(node, given, {"y": made}, 18))
    slope, = ir.interpret(ir.gradient(program, "x"), {**weights, **given, "grad.0": made}).outputs
    assert_allclose(slope.ravel(), wanted, rtol=1e-6)
