"""What normalizations mean."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.interop.arrays import number, padded, reshaped
from parallelism.interop.folding import convert, emit, spread, whole
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning
from parallelism.interop.onnx_models.shapes import axis_of
from parallelism.interop.windows import grid


def along(vector: Any, ndim: int, axis: int = 1) -> Any:
    """A vector along a dim of an array with so many dims."""
    return reshaped(vector, vector_shape(ndim, axis, vector.shape[0]))


@meaning("BatchNormalization")
def _batch_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a = x[0]
    ndim = len(x[0].shape)
    epsilon = node.get("epsilon", 1e-5)
    scale, shift, mean, variance = x[1:]
    if node.get("training_mode", 0):
        axes = tuple(d for d in range(ndim) if d != 1)
        count = number(prod(a.shape[d] for d in axes), a)
        now = ew("divide", emit("sum", whole(a), axes=axes, keepdims=False), count)
        away = ew("subtract", a, along(now, ndim))
        spread_now = ew(
            "divide", emit("sum", whole(ew("multiply", away, away)), axes=axes, keepdims=False), count
        )
        momentum = node.get("momentum", 0.9)

        def moved(old: Any, new: Any) -> Any:
            return ew(
                "add",
                ew("multiply", old, number(momentum, old)),
                convert(ew("multiply", new, number(1 - momentum, new)), old.dtype),
            )

        running = [moved(mean, now), moved(variance, spread_now)]
        mean, variance = now, spread_now
    else:
        running = []
    factor = ew("divide", scale, ew("sqrt", ew("add", variance, number(epsilon, variance))))
    offset = ew("subtract", shift, ew("multiply", mean, factor))
    factor, offset = (along(convert(each, a.dtype), ndim) for each in (factor, offset))
    return [ew("add", ew("multiply", a, factor), offset), *running]


def normalized(a: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """``a`` with mean 0 and variance 1 along dims, the mean, and the reciprocal of the deviation."""
    count = number(prod(a.shape[d] for d in axes), a)
    mean = ew("divide", emit("sum", whole(a), axes=axes, keepdims=True), count)
    away = ew("subtract", a, mean)
    variance = ew("divide", emit("sum", whole(ew("multiply", away, away)), axes=axes, keepdims=True), count)
    scale = ew("reciprocal", ew("sqrt", ew("add", variance, number(epsilon, a))))
    return ew("multiply", away, scale), mean, scale


@meaning("InstanceNormalization")
def _instance_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    ndim, dtype = len(x[0].shape), x[0].dtype
    a, scale, shift = x if dtype.itemsize > 2 else (convert(each, np.dtype(np.float32)) for each in x)
    result = normalized(a, tuple(range(2, ndim)), node.get("epsilon", 1e-5))[0]
    return convert(ew("add", ew("multiply", result, along(scale, ndim)), along(shift, ndim)), dtype)


@meaning("LayerNormalization")
def _layer_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    ndim = len(x[0].shape)
    axes = tuple(range(axis_of(node, ndim, -1), ndim))
    if _is_one_op(node, x, axes):
        shift = x[2] if len(x) > 2 and x[2] is not None else spread(np.zeros(1, x[1].dtype), x[1].shape)
        return emit("layer_norm", whole(x[0]), whole(x[1]), whole(shift), epsilon=node.get("epsilon", 1e-5))
    a = x[0] if x[0].dtype.itemsize > 2 else convert(x[0], np.dtype(np.float32))
    result, mean, scale = normalized(a, axes, node.get("epsilon", 1e-5))
    result = ew("multiply", convert(result, x[0].dtype), x[1])
    return [result if len(x) < 3 or x[2] is None else ew("add", result, x[2]), mean, scale]


def _is_one_op(node: GraphNode, x: list[Any], axes: tuple[int, ...]) -> bool:
    """Whether a norm is one op of programs: along the last dim, of at least 4 bytes, with no other result."""
    a, scale = x[0], x[1]
    return (
        len(axes) == 1
        and len(a.shape) > 1
        and tuple(scale.shape) == (a.shape[-1],)
        and a.dtype == scale.dtype
        and a.dtype.itemsize >= 4
        and len([name for name in node.outputs if name]) == 1
    )


@meaning("RMSNormalization")
def _rms_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    ndim = len(x[0].shape)
    axes = tuple(range(axis_of(node, ndim, -1), ndim))
    epsilon = node.get("epsilon", 1e-5)
    if _is_one_op(node, x, axes):
        return emit("rms_norm", whole(x[0]), whole(x[1]), epsilon=epsilon)
    a = x[0] if x[0].dtype.itemsize > 2 else convert(x[0], np.dtype(np.float32))
    count = number(prod(a.shape[d] for d in axes), a)
    square = ew("divide", emit("sum", whole(ew("multiply", a, a)), axes=axes, keepdims=True), count)
    result = ew("multiply", a, ew("reciprocal", ew("sqrt", ew("add", square, number(epsilon, a)))))
    return ew("multiply", convert(result, x[0].dtype), x[1])


@meaning("LRN")
def _lrn(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, size = x[0], node.get("size")
    low = (size - 1) // 2
    squares = padded(
        ew("multiply", a, a),
        number(0, a),
        [0, low, *[0] * (len(a.shape) - 2)],
        [0, size - 1 - low, *[0] * (len(a.shape) - 2)],
        [0] * len(a.shape),
    )
    total = emit("sum", whole(grid(squares, [1], [size], [1], [1])), axes=(len(a.shape),), keepdims=False)
    base = ew(
        "add",
        ew("multiply", total, number(node.get("alpha", 1e-4) / size, a)),
        number(node.get("bias", 1.0), a),
    )
    return ew("divide", a, ew("power", base, number(node.get("beta", 0.75), a)))


@meaning("LpNormalization")
def _lp_normalization(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Where the norm is 0, so is the result."""
    a, axis = x[0], axis_of(node, len(x[0].shape), -1)
    size = ew("absolute", a)
    if node.get("p", 2) == 2:
        norm = ew("sqrt", emit("sum", whole(ew("multiply", a, a)), axes=(axis,), keepdims=True))
    else:
        norm = emit("sum", whole(size), axes=(axis,), keepdims=True)
    none = ew("equal", norm, number(0, norm))
    return ew("divide", a, ew("where", none, number(1, norm), norm))
