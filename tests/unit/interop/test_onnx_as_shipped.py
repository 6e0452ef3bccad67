"""ONNX files as packages ship them: free dims, old opsets, weights in Constant nodes, dims of -1."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx.version_converter")

from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import InteropError, UnsupportedError, from_onnx  # noqa: E402
from vcluster.__main__ import main  # noqa: E402
from vcluster.cli.command_line import WrongWords  # noqa: E402


def model(nodes, inputs, outputs=("y",), tensors=(), opset=18):
    """``inputs``: names and arrays, or shapes of floats; outputs have any shape."""
    values = [helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(x.dtype) if hasattr(x, "dtype") else TensorProto.FLOAT, getattr(x, "shape", x))
        for name, x in inputs.items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    held = [numpy_helper.from_array(array, name) for name, array in dict(tensors).items()]
    graph = helper.make_graph(list(nodes), "g", values, results, held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)
    inferred = onnx.shape_inference.infer_shapes(made)
    return inferred if all(value.type.WhichOneof("value") for value in inferred.graph.output) else made


def node(kind, inputs, outputs=("y",), **attributes):
    return helper.make_node(kind, list(inputs), list(outputs), name=f"my {kind}", **attributes)


X = np.random.default_rng(3).normal(size=(2, 3, 4, 5)).astype(np.float32)
OLD = [
    (7, node("Softmax", "x", axis=1), {}),
    (11, node("Softmax", "x", axis=2), {}),
    (12, node("LogSoftmax", "x"), {}),
    (11, node("Hardmax", "x", axis=-1), {}),
    (9, node("Slice", "x", starts=[1, -3], ends=[2, 9], axes=[1, 3]), {}),
    (9, node("Slice", "x", starts=[0, 1], ends=[2, 2]), {}),
    (10, node("Pad", "x", pads=[0, 0, 1, 2, 0, 0, 0, 1], value=2.5), {}),
    (9, node("Pad", "x", pads=[0, 0, 1, 2, 0, 0, 0, 1], mode="reflect"), {}),
    (8, node("Clip", "x", min=-0.5, max=0.25), {}),
    (10, node("Clip", "x", max=0.25), {}),
    (9, node("TopK", "x", ("y", "places"), k=2, axis=1), {}),
    (7, node("Upsample", "x", scales=[1.0, 1.0, 2.0, 3.0]), {}),
    (9, node("Upsample", ("x", "s"), mode="nearest"), {"s": np.array([1, 1, 2, 1.5], np.float32)}),
    (10, node("Resize", ("x", "s"), mode="nearest"), {"s": np.array([1, 1, 2, 0.6], np.float32)}),
    (11, node("ReduceSum", "x", axes=[1, -1], keepdims=0), {}),
    (12, node("Squeeze", ("one",), axes=[1]), {}),
    (11, node("Unsqueeze", "x", axes=[0, 5]), {}),
    (11, node("Split", "x", ("y", "z"), split=[1, 3], axis=2), {}),
    (7, node("Dropout", "x", ratio=0.5), {}),
    (9, node("BatchNormalization", ("x", "c", "d", "e", "f")), {name: np.arange(1, 4, dtype=np.float32) for name in "cdef"}),
    (9, node("Scatter", ("x", "i", "u"), axis=3), {"i": np.full((2, 3, 4, 1), 2), "u": np.full((2, 3, 4, 1), 7, np.float32)}),
    (9, node("Flatten", "x", axis=2), {}),
    (7, node("Reshape", ("x", "s")), {"s": np.array([0, -1, 10])}),
]


def meant(made, given):
    """The outputs by ONNX's reference, of what its converter makes of a model; the reference knows what it lacks."""
    with suppress(Exception):
        made = onnx.version_converter.convert_version(made, 15)
    return ReferenceEvaluator(made).run(None, given)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("opset", "made", "tensors"), OLD, ids=[f"{each[1].op_type}-{each[0]}" for each in OLD])
def test_old_forms_of_operators_mean_what_they_meant(opset, made, tensors):
    x = X[:, :1] if made.input[0] == "one" else X
    given = {made.input[0]: x}
    whole = model([made], given, list(made.output), tensors, opset)
    program, weights = from_onnx(whole)
    found = ir.interpret(program, {**weights, **given}).outputs
    expected = meant(whole, given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_what_an_old_opset_had_and_programs_do_not_is_refused():
    statistics = {name: np.ones(3, np.float32) for name in "cdef"}
    made = model([node("BatchNormalization", ("x", *"cdef"), ("y", "m", "v", "s", "t"))], {"x": X}, ("y",), statistics, 9)
    with pytest.raises(UnsupportedError, match=r"BatchNormalization 'my BatchNormalization'.* in training"):
        from_onnx(made)
    with pytest.raises(UnsupportedError, match="opset 6 is not supported: 7 to"):
        from_onnx(model([node("Relu", "x")], {"x": X}, opset=6))


def test_sizes_give_symbols_numbers_where_an_operator_needs_them():
    pads = {"p": np.array([1, 0, 0, 2])}
    made = model([node("Pad", ("x", "p"), mode="reflect")], {"x": ("batch", "time steps")}, tensors=pads)
    with pytest.raises(UnsupportedError, match=r"my Pad.*extent of dim 0, batch, must be a number.*sizes=\{'batch': 8\}"):
        from_onnx(made)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for name in ("time steps", "time_steps"):
        program, _ = from_onnx(made, sizes={"batch": 3, name: 4})
        assert not program.symbols
        assert_array_equal(ir.interpret(program, [x]).outputs[0], np.pad(x, ((1, 0), (0, 2)), "reflect"))
    with pytest.raises(ValueError, match=r"no dim bach, .* are batch, time_steps; did you mean 'batch'"):
        from_onnx(made, sizes={"batch": 3, "time_steps": 4, "bach": 3})
    with pytest.raises(ValueError, match=r"sizes\['batch'\] must be a number from 0 on, got -1"):
        from_onnx(made, sizes={"batch": -1})


def test_a_pad_along_other_dims_leaves_a_symbol_alone():
    made = model([node("Pad", ("x", "p"), mode="edge")], {"x": ("batch", 6)}, tensors={"p": np.array([0, 2, 0, 2])})
    program, _ = from_onnx(made)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert_array_equal(ir.interpret(program, [x]).outputs[0], np.pad(x, ((0, 0), (2, 2)), "edge"))


def test_a_dim_of_minus_one_is_a_symbol():
    made = model([node("Relu", "x")], {"x": (2, 3)})
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = -1
    program, _ = from_onnx(made)
    assert str(program.inputs[0].type) == "tensor<(x_0)x3xf32>"
    assert from_onnx(made, sizes={"x_0": 5}).program.inputs[0].type.shape == (5, 3)


def test_dims_that_are_named_by_a_question_mark_differ():
    program, _ = from_onnx(model([node("Relu", "x")], {"x": ("?", 3, "?")}))
    assert str(program.inputs[0].type) == "tensor<(x_0)x3x(x_2)xf32>"
    assert from_onnx(model([node("Relu", "x")], {"x": ("?", 3, "?")}), sizes={"x_2": 5}).program.symbols == {"x_0"}


def test_an_operator_that_needs_numbers_says_how_they_are_given():
    tensors = {"w": np.ones((1, 8, 3), "f4"), "r": np.ones((1, 8, 2), "f4")}
    made = model([node("LSTM", ("x", "w", "r"), hidden_size=2)], {"x": ("time", 1, 3)}, tensors=tensors)
    with pytest.raises(UnsupportedError, match=r"my LSTM.*time has symbols.*give them values, as sizes=\{'time': 8\}"):
        from_onnx(made)
    assert not from_onnx(made, sizes={"time": 2}).program.symbols


def test_weights_in_constant_nodes_are_weights():
    w, b = np.arange(1200.0, dtype=np.float32).reshape(30, 40), np.arange(40.0, dtype=np.float32)
    nodes = [node("Constant", (), ("w",), value=numpy_helper.from_array(w)), node("MatMul", ("x", "w"), ("h",)),
             node("Constant", (), ("b",), value=numpy_helper.from_array(b)), node("Add", ("h", "b"), ("z",)),
             node("Constant", (), ("s",), value=numpy_helper.from_array(np.array([-1])))]
    program, weights = from_onnx(model([*nodes, node("Reshape", ("z", "s"))], {"x": ("n", 30)}))
    assert [(value.name, value.type.shape) for value in program.inputs[:2]] == [("p.w", (30, 40)), ("p.b", (40,))]
    x = np.ones((2, 30), np.float32)
    assert_array_equal(ir.interpret(program, {**weights, "x": x}).outputs[0], (x @ w + b).reshape(-1))


def test_a_large_constant_node_is_checked_without_its_numbers_and_not_copied():
    w = np.zeros((3000, 1000), np.float32)
    constant = node("Constant", (), ("w",), value=numpy_helper.from_array(w))
    made = model([constant, node("MatMul", ("x", "w"))], {"x": (2, 3000)})
    program, weights = from_onnx(made)
    assert weights["p.w"].shape == (3000, 1000) and len(program.ops) == 1
    twice = model([constant, node("MatMul", ("x", "w"))], {"x": (2, 3000)}, tensors={"w": w})
    with pytest.raises(InteropError, match="w"):
        from_onnx(twice)


@pytest.mark.takes_seconds
def test_size_on_the_command_line_gives_a_model_what_it_needs_to_be_read(tmp_path, capsys):
    made = model([node("Pad", ("x", "p"), mode="reflect")], {"x": ("batch", 6)}, tensors={"p": np.array([1, 0, 0, 0])})
    path = tmp_path / "pad.onnx"
    onnx.save(made, path)
    with pytest.raises(WrongWords, match=r"sizes=\{'batch': 8\}"):
        main(["show", str(path)])
    assert main(["show", str(path), "--size", "batch=2"]) == 0
    assert "tensor<2x6xf32>" in capsys.readouterr().out
    with pytest.raises(WrongWords, match=r"no dim bach.*did you mean 'batch'"):
        main(["show", str(path), "--size", "bach=2"])
    assert main(["convert", str(path), str(tmp_path / "pad.mlir"), "--size", "batch=2"]) == 0
    assert "tensor<3x6xf32>" in (tmp_path / "pad.mlir").read_text()


@pytest.mark.parametrize("x", [
    np.array([[0.0, 2.0, 0.0], [3.0, 0.0, -1.0]], np.float32), np.array([[[1], [0]], [[0], [4]], [[5], [6]]], np.int64),
    np.array([False, True, True])], ids=["floats", "integers", "bools"])
def test_nonzero_needs_the_number_of_its_elements(x):
    made = model([node("NonZero", "x")], {"x": x})
    wanted = np.array(np.nonzero(x))
    program, weights = from_onnx(made, sizes={"y": wanted.shape[1]})
    (found,) = ir.interpret(program, {"x": x, **weights}).outputs
    assert found.dtype == np.int64
    assert_array_equal(found, wanted)
    with pytest.raises(UnsupportedError, match=r"how many elements are not zero depends on the numbers: give it, as sizes="):
        from_onnx(made)
