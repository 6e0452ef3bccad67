"""Programs written as ONNX: its reference computes what they compute, and what came in from ONNX goes out again."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from ir_examples import EXAMPLES  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import from_onnx, to_onnx  # noqa: E402
from parallelism.interop.written.onnx_operators import OPERATORS  # noqa: E402

T = ir.TensorType
RNG = np.random.default_rng(5)
APPROXIMATE = ("erf", "gelu", "gelu_exact")      # of the reference of ONNX, in float64


def by_reference(model, arrays):
    """The results of a model for the arrays of its inputs, in their order."""
    names = [value.name for value in model.graph.input]
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))


def assert_same(found, expected, tolerance=1e-9):
    for theirs, ours in zip(found, expected, strict=True):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
        assert_allclose(theirs, ours, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.kind in OPERATORS], ids=str)
def test_the_reference_of_onnx_computes_an_operator_as_here(example):
    function, given = example.function(), example.arrays()
    found = by_reference(to_onnx(function), given)
    assert_same(found, ir.interpret(function, given).outputs, 1e-6 if example.kind in APPROXIMATE else 1e-9)


EDGES = np.array([-np.inf, -2.5, -1, -1e-9, -0.0, 0.0, 1e-9, 0.5, 1, 3, np.inf])


@pytest.mark.parametrize("kind", ["arctan2", "hypot", "logaddexp", "remainder", "floor_divide", "fmod"])
def test_every_pair_of_edges_is_computed_as_here(kind):
    a, b = (x.reshape(-1) for x in np.meshgrid(EDGES, EDGES))
    function = ir.record(lambda x, y: ir.apply(kind, x, y), T("f64", a.shape), T("f64", b.shape))
    with np.errstate(all="ignore"):
        expected = getattr(np, kind)(a, b)
    found, = by_reference(to_onnx(function), [a, b])
    finite = np.isfinite(a) & np.isfinite(b) & (b != 0) if kind in ("remainder", "floor_divide", "fmod") else slice(None)
    assert_allclose(found[finite], expected[finite], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["expm1", "log1p"])
def test_small_numbers_keep_their_digits(kind):
    x = np.array([-0.9, -1e-3, -1e-12, 0, 1e-300, 1e-15, 1e-8, 0.1, 5, 300])
    function = ir.record(lambda x: ir.apply(kind, x), T("f64", x.shape))
    assert_allclose(by_reference(to_onnx(function), [x])[0], getattr(np, kind)(x), rtol=1e-13)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32"])
def test_bits_are_shifted_as_here(dtype):
    limits = np.iinfo(np.dtype(dtype))
    x = np.array([limits.min, limits.min // 3, 0, 1, 5, limits.max], np.dtype(dtype))
    by = np.array([1, 2, 3, 7, 1, 4], x.dtype)
    function = ir.record(lambda x, y: (x << y, x >> y), T(dtype, x.shape), T(dtype, x.shape))
    assert_same(by_reference(to_onnx(function), [x, by]), [x << by, x >> by])


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "set"])
def test_a_scatter_leaves_out_what_is_out_of_range(op):
    x, updates = RNG.integers(-4, 5, (3, 4, 2)).astype(float), RNG.integers(-4, 5, (3, 5, 2)).astype(float)
    indices = np.array([2, -1, 0, 4, 2 if op != "set" else 3])
    function = ir.record(lambda x, i, u: ir.apply("scatter", x, i, u, axis=1, op=op),
                         T("f64", x.shape), T("i64", (5,)), T("f64", updates.shape))
    given = [x, indices, updates]
    assert_same(by_reference(to_onnx(function), given), ir.interpret(function, given).outputs)


def test_equal_elements_stay_in_their_order():
    x = np.array([[3.0, 1, 3, 1, 2], [0, 0, 0, -1, 0]])
    function = ir.record(lambda x: (np.sort(x, axis=1), ir.apply("argsort", x, axis=1), x[::-1]), T("f64", x.shape))
    assert_same(by_reference(to_onnx(function), [x]), [np.sort(x, 1), np.argsort(x, 1, kind="stable"), x[::-1]])


# -- windows -----------------------------------------------------------------------------------------------------------

IMAGE = ("x", (2, 6, 9, 8))


def model_of(kind, inputs, **attributes):
    """A model with one node."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    node = helper.make_node(kind, [name for name, _ in inputs], ["y"], **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"y{d}" for d in range(len(inputs[0][1]))])
    graph = helper.make_graph([node], "one", values, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize(("kind", "inputs", "attributes", "written"), [
    ("Conv", [IMAGE, ("w", (4, 6, 3, 2))], {}, "Conv"),
    ("Conv", [IMAGE, ("w", (4, 6, 3, 2)), ("b", (4,))], {"strides": [2, 1], "pads": [1, 0, 2, 1]}, "Conv"),
    ("Conv", [IMAGE, ("w", (4, 6, 3, 2))], {"dilations": [2, 3]}, "Conv"),
    ("Conv", [IMAGE, ("w", (6, 2, 3, 3))], {"group": 3, "dilations": [1, 2]}, "Conv"),
    ("Conv", [IMAGE, ("w", (6, 1, 1, 5))], {"group": 6}, "Conv"),
    ("Conv", [("x", (2, 3, 9)), ("w", (4, 3, 3))], {"strides": [3]}, "Conv"),
    ("Conv", [("x", (1, 2, 5, 4, 6)), ("w", (4, 2, 2, 2, 3))], {}, "Conv"),
    ("Conv", [IMAGE, ("w", (4, 6, 1, 1))], {}, "Einsum"),
    ("ConvTranspose", [IMAGE, ("w", (6, 4, 3, 2))], {"strides": [2, 3]}, "Conv"),
    ("MaxPool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 1, 1, 0]}, "MaxPool"),
    ("MaxPool", [IMAGE], {"kernel_shape": [3, 2], "dilations": [2, 1]}, "MaxPool"),
    ("MaxPool", [("x", (2, 3, 9))], {"kernel_shape": [4]}, "MaxPool"),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0]}, "AveragePool"),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, "AveragePool"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_windows_are_written_as_the_operator_that_they_came_from(kind, inputs, attributes, written):
    model = model_of(kind, inputs, **attributes)
    given = [RNG.integers(-3, 4, shape).astype(np.float32) for _, shape in inputs]
    program, _ = from_onnx(model)
    again = to_onnx(program)
    kinds = Counter(node.op_type for node in again.graph.node)
    assert kinds[written] == 1
    assert not kinds["Gather"]
    assert_same(by_reference(again, given), by_reference(model, given), 1e-6)


def test_windows_that_something_else_reads_stay():
    def both(x, w):
        windows = ir.apply("windows", ir.apply("windows", x, axis=2, size=3, step=1), axis=3, size=2, step=2)
        return np.einsum("nchwHW,ocHW->nohw", windows, w), np.einsum("nchwHW,ocHW->nchw", windows, w), windows

    function = ir.record(both, T("f32", (2, 3, 5, 6)), T("f32", (4, 3, 3, 2)))
    model = to_onnx(function)
    assert Counter(node.op_type for node in model.graph.node)["Conv"] == 1
    given = [RNG.integers(-3, 4, value.type.shape).astype(np.float32) for value in function.inputs]
    assert_same(by_reference(model, given), ir.interpret(function, given).outputs)


def by_runtime(model, arrays):
    """As `by_reference`, by ONNX Runtime if it knows all dtypes and operators of the model."""
    import onnxruntime

    given = {value.name: x for value, x in zip(model.graph.input, arrays, strict=True)}
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    except Exception:       # it has no one type for what it does not know
        return by_reference(model, arrays)


CASTS = [f"{how}{float}" for how in ("", "no_saturate_") for float in ("FLOAT", "FLOAT16")]
FLOATS_OF_8_BITS = {f"test_cast_{words}_to_FLOAT8E4M3FN" for words in CASTS}
"""Of their casts ONNX Runtime returns the bits."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_came_in_from_onnx_goes_out_again(monkeypatch):
    """All of ONNX's own tests of nodes that are read."""
    import onnx_backend

    pytest.importorskip("onnxruntime").set_default_logger_severity(4)
    read = {}
    reading = onnx_backend.from_onnx
    monkeypatch.setattr(onnx_backend, "from_onnx", lambda *given, **more: read.setdefault(len(read), reading(*given, **more)))
    passed, wrong = 0, []
    for case in onnx_backend.cases():
        read.clear()
        if onnx_backend.outcome(case).result != "passed":
            continue
        model = to_onnx(*read[len(read) - 1])
        inputs, expected = case.data_sets[-1]
        names = [value.name for value in case.model.graph.input]
        given = {name: onnx_backend._array(x) for name, x in zip(names, inputs, strict=False) if x is not None}
        found = by_runtime(model, [np.asarray(given[value.name]) for value in model.graph.input])
        apart = [onnx_backend.difference(np.asarray(ours), np.asarray(onnx_backend._array(theirs)), case)
                 for ours, theirs in zip(found, expected, strict=True)]
        passed += not any(apart)
        wrong += [case.name] if any(apart) else []
    assert ({*wrong}, passed) == (FLOATS_OF_8_BITS, 1728)
