"""ONNX files: broken ones give one error each that names the node, and nothing outside of the folder is opened."""

from __future__ import annotations

import random

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import onnx_networks  # noqa: E402
from numpy.testing import assert_array_equal  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import InteropError, UnsupportedError, from_onnx  # noqa: E402


def model(nodes, inputs=(("x", (2, 3)),), outputs=("y",), tensors=(), opset=20, **options):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b"]) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", values, results, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **options)


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, name=f"my {kind}", **attributes)


@pytest.mark.parametrize(("made", "error", "message"), [
    (model([node("Relu", ["z"], ["y"])]), InteropError, r"(?s)my Relu|Relu"),
    (model([node("Add", ["x", "b"], ["a"]), node("Add", ["a", "x"], ["b"]), node("Relu", ["b"], ["y"])]), InteropError,
     "topological|sorted"),
    (model([node("Relu", ["x"], ["y"])], opset=6), UnsupportedError, "opset 6 is not supported: 7 to"),
    (model([node("Relu", ["x"], ["y"])], opset=999), UnsupportedError, "opset 999 is not supported"),
    (model([node("NonZero", ["x"], ["n"]), node("Cast", ["n"], ["y"], to=1)]), UnsupportedError,
     "NonZero 'my NonZero' at the node of n: how many elements are not zero depends on the numbers"),
    (model([node("Reshape", ["x", "s"], ["y"])], (("x", (2, 3)),), tensors=()), InteropError, "Reshape"),
    (model([node("Frobnicate", ["x"], ["y"])]), InteropError, "Frobnicate"),
    (model([node("MatMul", ["x", "x"], ["y"])]), InteropError, "MatMul"),
])
def test_a_broken_model_is_refused_with_the_name_of_its_node(made, error, message):
    with pytest.raises(error, match=message):
        from_onnx(made)


@pytest.mark.parametrize("content", [b"", b"\x08", b"not a model", b"\xff" * 100, b"\x00" * 64])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(InteropError):
        from_onnx(path)


def test_a_string_that_is_not_text_is_one_error():
    content = model([node("Relu", ["x"], ["y"])], producer_name="maker").SerializeToString()
    with pytest.raises(InteropError, match="not UTF-8"):
        from_onnx(content.replace(b"maker", b"m\xd0ker"))


def external(tmp_path, location, offset=0, length=24):
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    del tensor.float_data[:]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    made = model([node("Add", ["x", "w"], ["y"])], tensors=[tensor])
    path = tmp_path / "model" / "m.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(made.SerializeToString())
    return path


def test_external_data_are_mapped_into_memory(tmp_path):
    path = external(tmp_path, "w.bin", offset=8)
    (path.parent / "w.bin").write_bytes(b"\0" * 8 + np.arange(6, dtype=np.float32).tobytes())
    program, weights = from_onnx(path)
    assert [value.name for value in program.inputs] == ["p.w", "x"]
    assert isinstance(weights["p.w"], np.memmap)
    x = np.ones((2, 3), np.float32)
    assert_array_equal(ir.interpret(program, {**weights, "x": x}).outputs[0], x + np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("location", [
    "../secret.bin", "/etc/passwd", "a/../../secret.bin", "..\\secret.bin", "link.bin", "folder/secret.bin", ""])
def test_external_data_outside_of_the_folder_are_never_opened(tmp_path, location, monkeypatch):
    path = external(tmp_path, location)
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 100)
    (path.parent / "link.bin").symlink_to(secret)
    (path.parent / "folder").symlink_to(tmp_path)
    opened = []
    monkeypatch.setattr(np, "memmap", lambda name, *_: opened.append(name))
    with pytest.raises(InteropError, match="tensor at w: external data must lie in the folder"):
        from_onnx(path)
    assert not opened


@pytest.mark.parametrize(("offset", "message"), [
    (8, "fewer than its data need"), (-4, "fewer"), ("x", "must be a number")])
def test_external_data_that_are_too_short_are_refused(tmp_path, offset, message):
    path = external(tmp_path, "w.bin", offset=offset)
    (path.parent / "w.bin").write_bytes(b"\0" * 24)
    with pytest.raises(InteropError, match=message):
        from_onnx(path)
    (path.parent / "w.bin").unlink()
    with pytest.raises(InteropError, match="does not exist beside the model"):
        from_onnx(path)


def test_a_tensor_with_a_huge_or_a_wrong_shape_is_refused():
    for dims in ([2**40, 2**40], [-1, 3], [5, 5]):
        tensor = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
        tensor.dims[:] = dims
        with pytest.raises(InteropError, match="w"):
            from_onnx(model([node("Add", ["x", "w"], ["y"])], tensors=[tensor]))


def test_arithmetic_of_extents_keeps_symbols_as_exporters_write_it():
    """A scale from a width, an expansion with -1 for what stays, and a mean over rows of a symbolic number."""
    def numbers(name, values, dtype=np.int64):
        return numpy_helper.from_array(np.array(values, dtype), name)

    nodes = [
        node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "one"], ["width"]),
        node("Cast", ["width"], ["wide"], to=TensorProto.FLOAT), node("Div", ["x", "wide"], ["scaled"]),
        node("Gather", ["shape", "zero"], ["rows"]), node("Cast", ["rows"], ["count"], to=TensorProto.FLOAT),
        node("ReduceSum", ["scaled", "axis"], ["sums"]), node("Div", ["sums", "count"], ["means"]),
        node("ReduceMean", ["scaled", "axis"], ["same"]), node("Sub", ["means", "same"], ["none"]),
        node("Unsqueeze", ["rows", "axis"], ["first"]), node("Concat", ["first", "stays"], ["wanted"], axis=0),
        node("Equal", ["wanted", "stays"], ["open"]), node("Where", ["open", "ones", "wanted"], ["target"]),
        node("Expand", ["none", "target"], ["zeros"]), node("Add", ["scaled", "zeros"], ["y"])]
    made = model(nodes, inputs=(("x", ("rows", 4)),), tensors=[
        numbers("zero", 0), numbers("one", 1), numbers("axis", [0]), numbers("stays", [-1]), numbers("ones", [1, 1])])
    program, _ = from_onnx(made)
    assert {str(symbol) for symbol in program.symbols} == {"rows"}
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert_array_equal(ir.interpret(program, [x]).outputs[0], x / 4)


def of_rows(*nodes, **numbers):
    """The program of nodes on ``x``, B rows of 3; ``n`` is the shape [B]."""
    tensors = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    return from_onnx(model([node("Shape", ["x"], ["n"], end=1), *nodes], (("x", ("B", 3)),), tensors=tensors))[0]


ROWS = np.arange(18, dtype=np.float32).reshape(6, 3)


@pytest.mark.parametrize(("bound", "expected"), [
    (node("Sub", ["n", "a"], ["m"]), slice(5)), (node("Div", ["n", "b"], ["m"]), slice(3)),
    (node("Sub", ["zero", "n"], ["m"]), slice(0)), (node("Identity", ["n"], ["m"]), slice(6)),
    (node("Add", ["n", "a"], ["m"]), slice(7)),
])
def test_a_slice_may_end_at_a_number_of_rows_that_is_a_symbol(bound, expected):
    program = of_rows(bound, node("Slice", ["x", "zero", "m"], ["y"]), zero=[0], a=[1], b=[2])
    assert_array_equal(ir.interpret(program, [ROWS]).outputs[0], ROWS[expected])


def test_a_slice_of_joined_rows_may_end_at_the_number_of_rows():
    program = of_rows(node("Concat", ["x", "x"], ["xx"], axis=0), node("Slice", ["xx", "zero", "n"], ["y"]), zero=[0])
    assert str(program.outputs[0].type) == "tensor<Bx3xf32>"
    assert_array_equal(ir.interpret(program, [ROWS]).outputs[0], ROWS)


@pytest.mark.parametrize(("start", "limit", "delta", "extent", "expected"), [
    ("a", "m", "a", "B-1", range(1, 6)), ("b", "plus", "a", "B", range(2, 8)),
    ("zero", "m", "b", "ceil(B/2)", range(0, 6, 2)), ("a", "m", "b", "ceil(B/2+1/2)-1", range(1, 6, 2)),
    ("m", "zero", "minus", "B", range(6, 0, -1)), ("m", "plus", "a", "2", range(6, 8)),
    ("zero", "m", "a", "B", range(6)),
])
def test_a_range_may_have_a_number_of_rows_that_is_a_symbol(start, limit, delta, extent, expected):
    program = of_rows(
        node("Squeeze", ["n"], ["m"]), node("Add", ["m", "b"], ["plus"]), node("Range", [start, limit, delta], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), node("Unsqueeze", ["f", "axis"], ["y"]),
        zero=0, a=1, b=2, minus=-1, axis=[0])
    assert str(program.outputs[0].type.shape[1]) == extent
    assert_array_equal(ir.interpret(program, [ROWS]).outputs[0], np.array([expected], np.float32))


@pytest.mark.parametrize(("nodes", "expected"), [
    ([node("Gather", ["x", "last"], ["y"])], ROWS[[-1]]),
    ([node("Gather", ["x", "two"], ["y"])], ROWS[-2:]),
    ([node("Sub", ["n", "a"], ["i"]), node("Gather", ["x", "i"], ["y"])], ROWS[[5]]),
    ([node("Sub", ["n", "a"], ["i"]), node("Concat", ["zero", "i"], ["j"], axis=0), node("Gather", ["x", "j"], ["y"])],
     ROWS[[0, 5]]),
    ([node("Unsqueeze", ["two", "a"], ["i"]), node("GatherND", ["x", "i"], ["y"])], ROWS[-2:]),
    ([node("Sub", ["n", "a"], ["i"]), node("Unsqueeze", ["i", "a"], ["j"]), node("Slice", ["x", "zero", "a"], ["new"]),
      node("ScatterND", ["x", "j", "new"], ["y"])], ROWS[[0, 1, 2, 3, 4, 0]]),
    ([node("ConstantOfShape", ["n33"], ["table"]), node("Slice", ["table", "zero", "n"], ["t"]),
      node("Add", ["x", "t"], ["y"])], ROWS),
])
def test_indices_may_count_rows_whose_number_is_a_symbol(nodes, expected):
    program = of_rows(*nodes, zero=[0], a=[1], last=[-1], two=[-2, -1], n33=[33, 3])
    assert_array_equal(ir.interpret(program, [ROWS]).outputs[0], expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", [
    node("ConvTranspose", ["x", "k"], ["y"], strides=[2, 2], pads=[1, 0, 0, 1], output_padding=[1, 0]),
    node("AveragePool", ["x"], ["y"], kernel_shape=[3, 2], strides=[1, 2]),
    node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 3], ceil_mode=1),
    node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 3], pads=[1, 0, 1, 1], ceil_mode=1),
    node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], pads=[0, 1, 1, 0], count_include_pad=1),
    node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 3], ceil_mode=1),
])
def test_windows_may_lie_along_a_dim_without_a_number(made):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (
        ("x", ("N", 3, "H", 5)), ("y", list("abcd")))]
    kernel = numpy_helper.from_array(np.arange(36, dtype=np.float32).reshape(3, 2, 3, 2), "k")
    graph = helper.make_graph([made], "g", values[:1], values[1:], [kernel])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    x = np.arange(12 * 2 * 15, dtype=np.float32).reshape(4, 3, 6, 5) * 36
    program, weights = from_onnx(whole)
    assert program.symbols == {"N", "H"}
    assert_array_equal(ir.interpret(program, {**weights, "x": x}).outputs[0],
                       ReferenceEvaluator(whole).run(None, {"x": x})[0])


def test_a_range_with_a_step_that_is_a_symbol_is_refused():
    with pytest.raises(UnsupportedError, match=r"Range.*delta must be a number without symbols, got B"):
        of_rows(node("Squeeze", ["n"], ["m"]), node("Range", ["zero", "m", "m"], ["i"]),
                node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), node("Unsqueeze", ["f", "axis"], ["y"]),
                zero=0, axis=[0])


def test_inputs_that_fix_a_shape_can_be_given():
    graph = helper.make_graph(
        [node("Reshape", ["x", "shape"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3)),
         helper.make_tensor_value_info("shape", TensorProto.INT64, (2,))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    with pytest.raises(UnsupportedError, match="the shape must be known, because it fixes the shape"):
        from_onnx(made)
    program = from_onnx(made, known={"shape": np.array([3, -1])}).program
    assert [str(value) for value in program.inputs] == ["%x: tensor<2x3xf32>"]
    assert program.outputs[0].type.shape == (3, 2)


@pytest.mark.parametrize("declared", [
    helper.make_tensor_value_info("y", TensorProto.FLOAT, None), onnx.ValueInfoProto(name="y")])
def test_a_result_may_have_no_shape_and_no_type(declared):
    made = model([node("Transpose", ["x"], ["t"]), node("Relu", ["t"], ["y"])])
    made.graph.output[0].CopyFrom(declared)
    content = made.SerializeToString()
    program = from_onnx(made).program
    assert made.SerializeToString() == content
    x = np.array([[-1, 2, 3], [4, -5, 6]], np.float32)
    assert_array_equal(ir.interpret(program, [x]).outputs[0], np.maximum(x.T, 0))
    made.graph.node[0].input[0] = "nothing"
    with pytest.raises(InteropError, match=r"onnx refuses the model: .*nothing"):
        from_onnx(made)


def test_an_input_without_a_shape_is_refused_by_its_name_and_a_result_of_another_type_too():
    made = model([node("Relu", ["x"], ["y"])])
    made.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.INT64, None))
    with pytest.raises(InteropError, match=r"Inferred elem type differs from existing elem type: \(1\) vs \(7\)"):
        from_onnx(made)
    made.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InteropError, match=r"^input at x: it has no shape: the number of its dims must be known$"):
        from_onnx(made)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_file_that_is_changed_by_chance_gives_a_program_or_one_error(tmp_path):
    content, rng, read = onnx_networks.SMALL["bert"]().SerializeToString(), random.Random(3), 0
    path = tmp_path / "m.onnx"
    for _ in range(2500):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed))
            match rng.randrange(3):
                case 0:
                    changed[at] = rng.randrange(256)
                case 1:
                    del changed[at:at + rng.randint(1, 30)]
                case 2:
                    del changed[at:]
            if not changed:
                break
        path.write_bytes(bytes(changed))
        try:
            from_onnx(path)
            read += 1
        except InteropError:
            pass
    assert 0 < read < 2500
