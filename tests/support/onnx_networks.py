"""Networks written with ``onnx.helper``, of any size: GPT-2, BERT, ResNet."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Writer:
    """Nodes and weights so far."""

    def __init__(self, seed=0):
        self.nodes, self.tensors, self.count = [], [], 0
        self.rng = np.random.default_rng(seed)

    def node(self, kind, *inputs, outputs=1, **attributes):
        self.count += 1
        names = [f"{kind.lower()}_{self.count}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"{kind}_{self.count}", **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, name, *shape, scale=0.02, mean=0.0, positive=False):
        array = self.rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(mean)
        return self.tensor(name, np.abs(array) + np.float32(0.5) if positive else array)

    def tensor(self, name, array):
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers):
        return self.tensor(f"ints_{len(self.tensors)}", np.array(numbers, np.int64))

    def model(self, name, inputs, output, shape):
        values = [helper.make_tensor_value_info(*each) for each in inputs]
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, name, values, [result], self.tensors)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(made)
        return made

    def linear(self, x, name, rows, columns):
        product = self.node("MatMul", x, self.weight(f"{name}.w", rows, columns))
        return self.node("Add", product, self.weight(f"{name}.b", columns))

    def norm(self, x, name, width):
        return self.node("LayerNormalization", x, self.weight(f"{name}.g", width, mean=1.0), self.weight(
            f"{name}.b", width), axis=-1, epsilon=1e-5)

    def attention(self, x, name, length, width, heads, mask=None):
        each = width // heads
        parts = self.node("Split", self.linear(x, f"{name}.qkv", width, 3 * width), outputs=3, axis=-1, num_outputs=3)
        q, k, v = (self.node("Transpose", self.node("Reshape", part, self.ints(0, 0, heads, each)), perm=order)
                   for part, order in zip(parts, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True))
        scores = self.node("Div", self.node("MatMul", q, k), self.tensor(f"{name}.root", np.float32(each**0.5)))
        if mask is not None:
            scores = self.node("Where", mask, scores, self.tensor(f"{name}.low", np.float32(-1e4)))
        mixed = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        joined = self.node("Reshape", self.node("Transpose", mixed, perm=(0, 2, 1, 3)), self.ints(0, 0, width))
        return self.linear(joined, f"{name}.out", width, width)


def gpt2(layers=12, width=768, heads=12, length=1024, vocabulary=50257, batch="batch", seed=0):
    """GPT-2: 124 million parameters by default."""
    w = Writer(seed)
    table = w.weight("wte", vocabulary, width)
    x = w.node("Add", w.node("Gather", table, "ids"), w.node("Slice", w.weight("wpe", length, width), w.ints(0), w.ints(
        length), w.ints(0)))
    causal = w.node("Trilu", w.node("ConstantOfShape", w.ints(length, length), value=numpy_helper.from_array(
        np.ones(1, np.int64))), upper=0)
    mask = w.node("Cast", causal, to=TensorProto.BOOL)
    for i in range(layers):
        x = w.node("Add", x, w.attention(w.norm(x, f"h{i}.ln1", width), f"h{i}.attn", length, width, heads, mask))
        hidden = w.linear(w.norm(x, f"h{i}.ln2", width), f"h{i}.fc", width, 4 * width)
        x = w.node("Add", x, w.linear(w.node("Gelu", hidden, approximate="tanh"), f"h{i}.proj", 4 * width, width))
    logits = w.node("MatMul", w.norm(x, "ln_f", width), w.node("Transpose", table, perm=(1, 0)))
    return w.model("gpt2", [("ids", TensorProto.INT64, (batch, length))], logits, (batch, length, vocabulary))


def bert(layers=12, width=768, heads=12, length=128, vocabulary=30522, seed=0):
    """BERT: norms after the sums, an exact gelu, and a mask that is an input."""
    w = Writer(seed)
    words = w.node("Gather", w.weight("words", vocabulary, width), "ids")
    placed = w.node("Add", words, w.weight("places", length, width))
    x = w.norm(w.node("Add", placed, w.weight("segment", width)), "ln", width)
    mask = w.node("Unsqueeze", "mask", w.ints(1, 2))
    for i in range(layers):
        x = w.norm(w.node("Add", x, w.attention(x, f"l{i}.attn", length, width, heads, mask)), f"l{i}.ln1", width)
        inner = w.linear(x, f"l{i}.up", width, 4 * width)
        part = w.node("Erf", w.node("Div", inner, w.tensor(f"l{i}.root2", np.float32(2**0.5))))
        half = w.node("Mul", inner, w.tensor(f"l{i}.half", np.float32(0.5)))
        gelu = w.node("Mul", half, w.node("Add", part, w.tensor(f"l{i}.one", np.float32(1))))
        x = w.norm(w.node("Add", x, w.linear(gelu, f"l{i}.down", 4 * width, width)), f"l{i}.ln2", width)
    first = w.node("Squeeze", w.node("Slice", x, w.ints(0), w.ints(1), w.ints(1)), w.ints(1))
    pooled = w.node("Gemm", first, w.weight("pool.w", width, width), w.weight("pool.b", width), transB=1)
    pooled = w.node("Tanh", pooled)
    inputs = [("ids", TensorProto.INT64, (2, length)), ("mask", TensorProto.BOOL, (2, length))]
    return w.model("bert", inputs, pooled, (2, width))


def resnet(blocks=(3, 4, 6, 3), width=64, image=224, classes=1000, seed=0):
    """ResNet-50 by default: bottlenecks, norms with running statistics."""
    w = Writer(seed)

    def conv(x, name, before, after, size, stride=1):
        scale = (2 / (before * size * size)) ** 0.5
        x = w.node("Conv", x, w.weight(f"{name}.w", after, before, size, size, scale=scale), strides=(stride, stride),
                   pads=(size // 2,) * 4)
        return w.node("BatchNormalization", x, w.weight(f"{name}.g", after, scale=0.1, mean=0.5), w.weight(
            f"{name}.b", after), w.weight(f"{name}.mean", after), w.weight(f"{name}.var", after, positive=True))

    x = w.node("Relu", conv("image", "stem", 3, width, 7, 2))
    x = w.node("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    before = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for i in range(count):
            name, stride = f"s{stage}.{i}", 2 if stage and not i else 1
            y = w.node("Relu", conv(x, f"{name}.a", before, inner, 1))
            y = w.node("Relu", conv(y, f"{name}.b", inner, inner, 3, stride))
            y = conv(y, f"{name}.c", inner, 4 * inner, 1)
            side = x if i else conv(x, f"{name}.side", before, 4 * inner, 1, stride)
            x, before = w.node("Relu", w.node("Add", y, side)), 4 * inner
    x = w.node("Flatten", w.node("GlobalAveragePool", x))
    x = w.node("Gemm", x, w.weight("fc.w", classes, before, scale=0.01), w.weight("fc.b", classes), transB=1)
    return w.model("resnet", [("image", TensorProto.FLOAT, (2, 3, image, image))], x, (2, classes))


SMALL = {
    "gpt2": lambda: gpt2(2, 16, 4, 6, 40, batch=2), "bert": lambda: bert(2, 16, 4, 6, 40),
    "resnet": lambda: resnet((1, 1), 4, 16, 5),
}
FULL = {"gpt2": lambda: gpt2(length=64, batch=1), "bert": bert, "resnet": resnet}


def arrays(model, seed=1):
    """Inputs of a model."""
    rng, found = np.random.default_rng(seed), {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        match value.type.tensor_type.elem_type:
            case TensorProto.INT64:
                found[value.name] = rng.integers(0, 40, shape)
            case TensorProto.BOOL:
                found[value.name] = rng.random(shape) < 0.8
            case _:
                found[value.name] = rng.standard_normal(shape, np.float32)
    return found
