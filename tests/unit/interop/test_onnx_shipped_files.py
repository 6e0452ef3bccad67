"""Files of ONNX as packages ship them give the numbers of ONNX Runtime, or are refused by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from later import later

later("torch")
later("onnxscript")
onnx = later("onnx")
runtime = later("onnxruntime")

from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import from_onnx  # noqa: E402

pytestmark = pytest.mark.slow
NAMES = [
    "residual, free batch", "residual, opset 9", "residual, opset 12, weights not folded", "residual, free height",
    "residual, weights in Constant nodes", "residual, quantized by data (QDQ)", "residual, quantized by data (operators)",
    "residual, optimized", "u-net, opset 11", "u-net, in halves", "tagger, LSTM", "tagger, GRU", "tagger, quantized",
    "encoder, free batch and time", "encoder, by dynamo, external data", "encoder, external data", "encoder, quantized",
    "encoder, optimized", "decoder, optimized, fixed", "encoder, fused as BERT", "encoder, in four bits",
    "turned by a grid", "detector",
]


HALVES = "u-net, in halves"
STEP = 2 ** -10
"""Of a float of 16 bits, as a part of it."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_numbers_of_onnx_runtime(name, tmp_path):
    from shipped_models import FILES

    assert sorted(FILES) == sorted(NAMES)
    logging.getLogger().setLevel(logging.ERROR)
    path, given, sizes = FILES[name](tmp_path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if "QDQ" in name:       # what is optimized rounds at other places
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, given)
    counts = {"kept": len(expected[0])} if name == "detector" else {}
    program, weights = from_onnx(path, sizes={**sizes, **counts})
    found = ir.interpret(program, {**weights, **given}).outputs
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        apart = STEP * np.abs(theirs).max() if name == HALVES else 1e-4
        assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=1e-4, atol=apart)


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_halves_is_the_standards_and_onnx_runtime_computes_it_in_32_bits(tmp_path):
    """The reference of ONNX rounds the result of each node, as we do; ONNX Runtime rounds none."""
    from onnx.reference import ReferenceEvaluator
    from shipped_models import FILES

    path, given, _ = FILES[HALVES](tmp_path)
    runtime.set_default_logger_severity(4)
    by_runtime, = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, given)
    model = in_order(onnx.load(path))
    by_reference, = ReferenceEvaluator(model).run(None, given)
    program, weights = from_onnx(path)
    largest = np.abs(by_reference).max()
    for other in (by_reference, by_runtime):
        assert_allclose(ir.interpret(program, {**weights, **given}).outputs[0], other, rtol=0, atol=STEP * largest)
    program, weights = from_onnx(widened(model))
    in_32_bits, = ir.interpret(program, {**weights, **given}).outputs
    assert_allclose(in_32_bits, by_runtime, rtol=0, atol=2e-6 * largest)


def in_order(model):
    """The model with each node after those that it reads; a converter puts its casts at the end."""
    known = {"", *(value.name for value in (*model.graph.input, *model.graph.initializer))}
    left, found = list(model.graph.node), []
    while left:
        ready = [node for node in left if known.issuperset(node.input)]
        known.update(name for node in ready for name in node.output)
        found += [onnx.NodeProto.FromString(node.SerializeToString()) for node in ready]
        left = [node for node in left if not known.issuperset(node.output)]
    del model.graph.node[:]
    model.graph.node.extend(found)
    return model


def widened(model):
    """The model with floats of 32 bits in place of those of 16 bits, whose values are the same."""
    half, whole = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    wide = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in wide.graph.initializer:
        if tensor.data_type == half:
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == half:
                attribute.i = whole
            if attribute.HasField("t") and attribute.t.data_type == half:
                array = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array))
    del wide.graph.value_info[:]
    return wide
