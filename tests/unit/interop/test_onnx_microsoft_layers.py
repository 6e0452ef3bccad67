"""Layers of com.microsoft: attention, embeddings, recurrent layers in 8 bits; their numbers are those of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from numpy.testing import assert_allclose  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_onnx  # noqa: E402

RNG = np.random.default_rng(8)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def whole(low, high, *shape, dtype=np.int32):
    return RNG.integers(low, high, shape).astype(dtype)


def scale(x):
    return np.float32(x)


X = floats(2, 5, 12)
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)
TABLES = [floats(11, 12), floats(7, 12), floats(2, 12), floats(12), floats(12)]
PLACES = np.cos(np.arange(24.0).reshape(8, 3)).astype(np.float32)
BYTES = [whole(0, 255, 2, 3, 4, 5, dtype=np.uint8), whole(0, 255, 2, 2, 4, 5, dtype=np.uint8)]
LSTM = [floats(6, 1, 3), whole(-90, 90, 1, 3, 16, dtype=np.int8), whole(-90, 90, 1, 4, 16, dtype=np.int8), floats(1, 32),
        None, floats(1, 1, 4), floats(1, 1, 4), None, np.full(1, 0.01, np.float32), np.zeros(1, np.int8),
        np.full(1, 0.02, np.float32), np.zeros(1, np.int8)]
TWO_WAYS = [LSTM[0], *(np.concatenate([x, x[..., ::-1]]) for x in LSTM[1:4]), None, None, None, None,
            np.array([0.01, 0.02], np.float32), np.zeros(2, np.int8), np.array([0.03, 0.01], np.float32),
            np.zeros(2, np.int8)]
CASES = {
    "Attention": ([X, floats(12, 36), floats(36)], {"num_heads": 3}),
    "Attention with lengths": ([X, floats(12, 36), floats(36), np.array([4, 2], np.int32)], {"num_heads": 3}),
    "Attention with a mask": ([X, floats(12, 36), floats(36), MASK], {"num_heads": 2, "mask_filter_value": -1e4}),
    "Attention to earlier rows": ([X, floats(12, 36), floats(36)], {"num_heads": 3, "unidirectional": 1}),
    "MultiHeadAttention": ([X, floats(2, 7, 12), floats(2, 7, 12), floats(36)], {"num_heads": 3, "scale": 0.3}),
    "MultiHeadAttention with terms": (
        [X, X[::-1].copy(), floats(2, 5, 12), None, None, floats(2, 3, 5, 5)], {"num_heads": 3}),
    "EmbedLayerNormalization": ([whole(0, 11, 2, 5), whole(0, 2, 2, 5), *TABLES, MASK], {"epsilon": 1e-6}),
    "EmbedLayerNormalization of words": ([whole(0, 11, 2, 5), None, TABLES[0], TABLES[1], None, *TABLES[3:]], {}),
    "RotaryEmbedding": ([floats(2, 4, 5, 6), np.array([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]), PLACES, 1 - PLACES], {}),
    "RotaryEmbedding of pairs": ([X, np.array([2]), PLACES, 1 - PLACES], {"interleaved": 1}),
    "DynamicQuantizeLSTM": (LSTM, {"hidden_size": 4}),
    "DynamicQuantizeLSTM in both directions": (TWO_WAYS, {"hidden_size": 4, "direction": "bidirectional"}),
    "QGemm": ([whole(0, 255, 3, 4, dtype=np.uint8), scale(0.02), np.uint8(120), whole(0, 255, 5, 4, dtype=np.uint8),
               scale(0.03), np.uint8(100), whole(-50, 50, 5), scale(0.1), np.uint8(90)], {"transB": 1}),
    "QGemm to floats": ([whole(0, 255, 3, 4, dtype=np.uint8), scale(0.02), np.uint8(120), whole(-9, 9, 4, 5, dtype=np.int8),
                         scale(0.03), np.int8(3), whole(-50, 50, 5)], {"alpha": 2.0}),
    "QLinearConcat": ([BYTES[0], scale(0.2), np.uint8(7), BYTES[1], scale(0.3), np.uint8(9)], {"axis": 1}),
    "QLinearGlobalAveragePool": ([BYTES[0], scale(0.2), np.uint8(7), scale(0.3), np.uint8(9)], {}),
    "QLinearAveragePool": ([BYTES[0], scale(0.2), np.uint8(7), scale(0.3), np.uint8(9)], {"kernel_shape": [2, 2]}),
}


OUTPUTS = {"EmbedLayerNormalization": ("f3", "i1"), "DynamicQuantizeLSTM": ("f4", "f3", "f3"), "QGemm": ("u2",),
           "QLinearConcat": ("u4",), "QLinearGlobalAveragePool": ("u4",), "QLinearAveragePool": ("u4",)}
"""The dtypes of the results and their numbers of dims; of others one that is like the first input."""
DTYPES = {"f": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT32, "u": onnx.TensorProto.UINT8}


def model(kind, arrays, attributes):
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    given = {name: np.asarray(x) for name, x in zip(names, arrays, strict=True) if name}
    first, *others = given
    inputs = [helper.make_tensor_value_info(first, helper.np_dtype_to_tensor_dtype(given[first].dtype), given[first].shape)]
    held = [numpy_helper.from_array(given[name], name) for name in others]
    if kind == "QLinearConcat":     # its first inputs are those of the result
        names = ["rs", "rz", *names]
        held += [numpy_helper.from_array(np.asarray(x), name) for x, name in ((scale(0.25), "rs"), (np.uint8(11), "rz"))]
    outputs = OUTPUTS.get(kind, (f"f{arrays[0].ndim}",))
    outputs = ("f2",) if kind == "QGemm" and len(arrays) < 8 else outputs
    results = [helper.make_tensor_value_info(f"y{i}", DTYPES[dtype], [f"y{i}.{d}" for d in range(int(ndim))])
               for i, (dtype, ndim) in enumerate(outputs)]
    node = helper.make_node(kind, names, [result.name for result in results], domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "g", inputs, results, held)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {first: given[first]}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_the_numbers_of_onnx_runtime(name):
    runtime = pytest.importorskip("onnxruntime")
    arrays, attributes = CASES[name]
    made, given = model(name.split()[0], arrays, attributes)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1        # several threads quantize parts of a batch by their own ranges
    session = runtime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, given)
    program, weights = from_onnx(made)
    found = ir.interpret(program, {**weights, **given}).outputs
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        apart = 1 if theirs.dtype == np.uint8 else 1e-4    # ONNX Runtime rounds a half either way
        assert_allclose(ours.astype(float), theirs.astype(float), rtol=1e-4, atol=apart)


def test_attention_is_the_sum_of_values_by_the_softmax_of_scores():
    made, given = model("Attention", *CASES["Attention to earlier rows"])
    program, weights = from_onnx(made)
    found, = ir.interpret(program, {**weights, **given}).outputs
    product = X @ weights["p.x1"] + weights["p.x2"]
    q, k, v = (part.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3) for part in np.split(product, 3, axis=-1))
    scores = np.where(np.tri(5, dtype=bool), q @ k.transpose(0, 1, 3, 2) / 2, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (shares / shares.sum(-1, keepdims=True)) @ v
    assert_allclose(found, expected.transpose(0, 2, 1, 3).reshape(2, 5, 12), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "arrays", "attributes", "message"), [
    ("Attention", [X, floats(12, 36), None, None, None, None, np.int32(4)], {"num_heads": 3}, "in a buffer"),
    ("MultiHeadAttention", [X], {"num_heads": 2}, "without keys"),
    ("RotaryEmbedding", [floats(2, 4, 5, 6), np.array([[0]]), PLACES, PLACES], {"scale": 2.0},
     "a scale is not supported"),
])
def test_what_a_layer_does_not_read_is_refused(kind, arrays, attributes, message):
    with pytest.raises(UnsupportedError, match=rf"{message}.*com\.microsoft\.{kind}|com\.microsoft\.{kind}.*{message}"):
        from_onnx(model(kind, arrays, attributes)[0])
