"""Operators of com.microsoft: their numbers are those of NumPy; slow, those of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from numpy.testing import assert_allclose  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_onnx  # noqa: E402

RNG = np.random.default_rng(4)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X, S = floats(2, 3, 8), floats(2, 3, 8)
G, H, K = floats(8), floats(8), floats(8)
BYTES = RNG.integers(0, 256, (5, 2, 8), dtype=np.uint8)
SCALES = np.abs(floats(10)) + 0.1
U, V = RNG.integers(0, 100, (3, 4), dtype=np.uint8), RNG.integers(-60, 60, (4, 5)).astype(np.int8)
"""Small enough for ONNX Runtime, which adds pairs of products in 16 bits on some processors."""


def number(x, dtype=np.float32):
    return np.asarray(x, dtype)


def norm(x, gamma, beta=0.0, epsilon=1e-5):
    away = x - x.mean(-1, keepdims=True)
    return away / np.sqrt((away**2).mean(-1, keepdims=True) + epsilon) * gamma + beta


def simple(x, gamma, epsilon=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma


def of_four_bits(packed, zeros):
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(5, 2, 16).astype(np.float32)
    return ((numbers - zeros) * SCALES.reshape(5, 2, 1)).reshape(5, 32)[:, :27].T


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


A = floats(3, 27)
ZEROS = RNG.integers(0, 256, 5, dtype=np.uint8)
CASES = {
    "FusedMatMul": ([X, floats(5, 8)], {"transB": 1, "alpha": 0.5}, lambda x, y: 0.5 * (x @ y.T)),
    "FusedMatMul of batches": ([X, S], {"transA": 1}, lambda x, y: np.swapaxes(x, 1, 2) @ y),
    "QuickGelu": ([X], {"alpha": 1.5}, lambda x: x / (1 + np.exp(-1.5 * x))),
    "FastGelu": ([X, G], {}, lambda x, b: gelu(x + b)),
    "SkipLayerNormalization": ([X, S, G, H, K], {"epsilon": 1e-5}, lambda x, s, g, h, k: norm(x + s + k, g, h)),
    "SkipSimplifiedLayerNormalization": (
        [X, S, G], {"epsilon": 1e-5}, lambda x, s, g: simple(x + s, g)),
    "FusedConv": ([floats(1, 2, 5, 6), floats(3, 2, 1, 1), floats(3)],
                  {"activation": "LeakyRelu", "activation_params": [0.25]},
                  lambda x, w, b: (lambda y: np.where(y > 0, y, 0.25 * y))(
                      np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]) + b[:, None, None])),
    "MatMulNBits": ([A, BYTES, SCALES], {"K": 27, "N": 5, "bits": 4, "block_size": 16},
                    lambda a, b, s: a @ of_four_bits(b, 8)),
    "MatMulNBits with zeros": ([A, BYTES, SCALES, ZEROS], {"K": 27, "N": 5, "bits": 4, "block_size": 16},
                               lambda a, b, s, z: a @ of_four_bits(b, np.stack([z & 15, z >> 4], -1)[..., None])),
    "MatMulIntegerToFloat": ([U, V, number(0.5), number(0.25), number(7, np.uint8), number(-3, np.int8), floats(5)], {},
                             lambda a, b, s, t, y, z, c: (a.astype(int) - 7) @ (b.astype(int) + 3) * np.float32(0.125) + c),
    "QLinearAdd": ([U, number(0.5), number(3, np.uint8), U[::-1].copy(), number(0.25), number(5, np.uint8), number(1.5),
                    number(9, np.uint8)], {},
                   lambda a, s, z, b, t, y, u, x: np.clip(
                       np.rint(((a.astype(int) - 3) * 0.5 + (b.astype(int) - 5) * 0.25) / 1.5) + 9, 0, 255)),
}


def model(kind, arrays, attributes, dims=2):
    names = [f"x{i}" for i in range(len(arrays))]
    inputs = [helper.make_tensor_value_info("x0", helper.np_dtype_to_tensor_dtype(arrays[0].dtype), arrays[0].shape)]
    held = [numpy_helper.from_array(array, name) for array, name in zip(arrays[1:], names[1:], strict=True)]
    node = helper.make_node(kind, names, ["y"], domain="com.microsoft", **attributes)
    out = TensorProto.UINT8 if kind.startswith("QLinear") else TensorProto.FLOAT
    result = helper.make_tensor_value_info("y", out, [f"d{i}" for i in range(dims)])
    graph = helper.make_graph([node], "g", inputs, [result], held)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_the_numbers_of_numpy(name):
    arrays, attributes, expected = CASES[name]
    program, weights = from_onnx(model(name.split()[0], arrays, attributes, expected(*arrays).ndim))
    found, = ir.interpret(program, {**weights, "x0": arrays[0]}).outputs
    assert_allclose(found, expected(*arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_the_numbers_of_onnx_runtime(name):
    runtime = pytest.importorskip("onnxruntime")
    arrays, attributes, by_numpy = CASES[name]
    made = model(name.split()[0], arrays, attributes, by_numpy(*arrays).ndim)
    program, weights = from_onnx(made)
    found, = ir.interpret(program, {**weights, "x0": arrays[0]}).outputs
    session = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    expected, = session.run(None, {"x0": arrays[0]})
    assert found.dtype == expected.dtype
    apart = 1 if found.dtype == np.uint8 else 1e-4  # ONNX Runtime rounds a half either way
    assert_allclose(found.astype(float), expected.astype(float), rtol=1e-4, atol=apart)


def test_what_is_not_read_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"com\.microsoft\.MurmurHash3"):
        from_onnx(model("MurmurHash3", [U], {}))
