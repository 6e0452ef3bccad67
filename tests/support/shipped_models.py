"""Models of ONNX as packages ship them: exported with free dims and old opsets, quantized, optimized, in halves.

`FILES` has a function for each: it writes a file into a folder and returns its path, the inputs, and the sizes that
reading it needs.  Torch, onnxscript and onnxruntime make them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper
from torch import nn
from torch.nn import functional

RNG = np.random.default_rng(12)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1),
                                     nn.Hardsigmoid())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = functional.max_pool2d(self.first(x), 2)
        y = self.deep(x)
        return self.head((x + y * self.squeeze(y)).mean((2, 3))).softmax(-1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(2, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1)
        self.norm, self.up, self.out = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        y = functional.silu(self.norm(self.middle(self.down(x))))
        up = functional.interpolate(self.up(y), scale_factor=1.0, mode="nearest")
        return self.out(torch.cat([up, x], 1)) + functional.interpolate(y[:, :2], scale_factor=2, mode="bilinear")


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.words, self.layers, self.out = nn.Embedding(20, 6), kind(6, 5, 2, bidirectional=True), nn.Linear(10, 3)

    def forward(self, ids):
        return self.out(self.layers(self.words(ids))[0]).log_softmax(-1)


class Encoder(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(30, 16), nn.Embedding(12, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.causal = nn.Linear(16, 48), nn.Linear(16, 16), causal
        self.up, self.down, self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, ids):
        b, n = ids.shape
        x = self.norm(self.words(ids) + self.places(torch.arange(n)))
        q, k, v = (part.reshape(b, n, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / 2
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, n).tril() == 0, float("-inf"))
        x = self.first(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, 16)))
        return self.second(x + self.down(functional.gelu(self.up(x))))


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Linear(3 * 36, 6)

    def forward(self, x):
        grid = functional.affine_grid(self.theta(x.flatten(1)).reshape(-1, 2, 3), [2, 3, 5, 4], align_corners=False)
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


X, IDS = floats(2, 3, 12, 12), RNG.integers(0, 20, (2, 7))



def exported(folder, module, x, opset=17, dynamic=True, name="model.onnx", **options):
    """By the exporter of TorchScript, as most files have been."""
    torch.manual_seed(0)
    path = Path(folder, name)
    axes = {"x": {0: "batch"}} if dynamic is True else dynamic or None
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(module.eval(), (torch.from_numpy(x),), str(path), input_names=["x"], opset_version=opset,
                          dynamic_axes=axes, dynamo=False, **options)
    return path


def of(module, x, sizes=(), **options):
    return lambda folder: (exported(folder, module(), x, **options), {"x": x}, dict(sizes))


def by_dynamo(folder):
    path = Path(folder, "model.onnx")
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(Encoder(causal=True).eval(), (torch.from_numpy(IDS),), dynamo=True, verbose=False,
                                    dynamic_shapes=({0: "batch", 1: "time"},))
    program.save(str(path), external_data=True)
    return path, {program.model.graph.inputs[0].name: IDS}, {}


def with_constants(folder):
    """Weights are tensors of Constant nodes, as Paddle writes them."""
    path = exported(folder, Residual(), X, opset=11)
    model = onnx.load(path)
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    nodes += list(model.graph.node)
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    return path, {"x": X}, {}


def with_external_data(folder):
    path = exported(folder, Encoder(), IDS)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    return path, {"x": IDS}, {}


def quantized(module, x, dynamic=True, **options):
    """In 7 bits: ONNX Runtime adds pairs of products of 8 bits in 16 bits on some processors."""
    def made(folder):
        from onnxruntime.quantization import quantize_dynamic

        path = Path(folder, "quantized.onnx")
        quantize_dynamic(exported(folder, module(), x, dynamic=dynamic), path, reduce_range=True, **options)
        return path, {"x": x}, {}

    return made


def quantized_by_data(form, **options):
    def made(folder):
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

        class Data(CalibrationDataReader):
            rest = iter([{"x": X}, {"x": -X}])

            def get_next(self):
                return next(self.rest, None)

        path = Path(folder, "quantized.onnx")
        quantize_static(exported(folder, Residual(), X), path, Data(), quant_format=QuantFormat[form], **options)
        return path, {"x": X}, {}

    return made


def optimized(module, x, level="ORT_ENABLE_EXTENDED", **options):
    """What ONNX Runtime saves of a model that it has optimized."""
    def made(folder):
        import onnxruntime

        path, settings = Path(folder, "optimized.onnx"), onnxruntime.SessionOptions()
        settings.optimized_model_filepath = str(path)
        settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        settings.log_severity_level = 3
        onnxruntime.InferenceSession(str(exported(folder, module(), x, **options)), settings,
                                     providers=["CPUExecutionProvider"])
        return path, {"x": x}, {}

    return made


def fused_as_bert(folder):
    from onnxruntime.transformers.optimizer import optimize_model

    plain = exported(folder, Encoder(), IDS)
    model = optimize_model(str(plain), "bert", num_heads=4, hidden_size=16, opt_level=0, verbose=False)
    path = Path(folder, "fused.onnx")
    model.save_model_to_file(str(path))
    return path, {"x": IDS}, {}


def in_halves(folder):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = exported(folder, UNet(), X[:, :2])
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)
    return path, {"x": X[:, :2]}, {}


def in_four_bits(folder):
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(exported(folder, Encoder(), IDS)), block_size=16, is_symmetric=False)
    quantizer.process()
    path = Path(folder, "four_bits.onnx")
    quantizer.model.save_model_to_file(str(path))
    return path, {"x": IDS}, {}


def detector(folder):
    """Boxes and scores, and those that stay."""
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["kept"])], "detector",
        [helper.make_tensor_value_info("boxes", 1, ("batch", "boxes", 4)),
         helper.make_tensor_value_info("scores", 1, ("batch", "classes", "boxes"))],
        [helper.make_tensor_value_info("kept", 7, ("stay", 3))],
        [helper.make_tensor("most", 7, [1], [3]), helper.make_tensor("overlap", 1, [1], [0.4]),
         helper.make_tensor("least", 1, [1], [0.2])])
    path = Path(folder, "detector.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8), path)
    places = RNG.uniform(0, 1, (2, 9, 2)).astype(np.float32)
    boxes = np.concatenate([places, places + RNG.uniform(0.1, 0.6, (2, 9, 2)).astype(np.float32)], -1)
    sizes = {"batch": 2, "boxes": 9, "classes": 2}
    return path, {"boxes": boxes, "scores": RNG.uniform(0, 1, (2, 2, 9)).astype(np.float32)}, sizes


FILES = {
    "residual, free batch": of(Residual, X),
    "residual, opset 9": of(Residual, X, opset=9),
    "residual, opset 12, weights not folded": of(Residual, X, opset=12, do_constant_folding=False),
    "residual, weights in Constant nodes": with_constants,
    "residual, free height": of(Residual, X, sizes={"height": 12, "width": 12},
                                dynamic={"x": {0: "n", 2: "height", 3: "width"}}),
    "residual, quantized by data (QDQ)": quantized_by_data("QDQ", per_channel=True),
    "residual, quantized by data (operators)": quantized_by_data("QOperator"),
    "residual, optimized": optimized(Residual, X),
    "u-net, opset 11": of(UNet, X[:, :2], opset=11, dynamic=False),
    "u-net, in halves": in_halves,
    "tagger, LSTM": of(Tagger, IDS, opset=11, dynamic=False),
    "tagger, GRU": of(lambda: Tagger(nn.GRU), IDS, opset=10, dynamic=False),
    "tagger, quantized": quantized(Tagger, IDS, dynamic=False),
    "encoder, free batch and time": of(Encoder, IDS, dynamic={"x": {0: "batch", 1: "time"}}),
    "encoder, by dynamo, external data": by_dynamo,
    "encoder, external data": with_external_data,
    "encoder, quantized": quantized(Encoder, IDS, per_channel=True),
    "encoder, optimized": optimized(Encoder, IDS),
    "decoder, optimized, fixed": optimized(lambda: Encoder(causal=True), IDS, dynamic=False),
    "encoder, fused as BERT": fused_as_bert,
    "encoder, in four bits": in_four_bits,
    "turned by a grid": of(Turned, floats(2, 3, 6, 6), opset=20, dynamic=False),
    "detector": detector,
}
