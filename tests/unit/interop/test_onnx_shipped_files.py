"""Files of ONNX as packages ship them give the numbers of ONNX Runtime, or are refused by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

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
        apart = 1e-2 if name == "u-net, in halves" else 1e-4
        assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=1e-4, atol=apart)
