"""What normalizations mean."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.interop.folding import convert, emit, spread, whole
from parallelism.interop.moving_elements import number, padded, reshaped
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
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
    running = []
    if node.get("training_mode", 0):
        axes = tuple(d for d in range(ndim) if d != 1)
        of_batch = _mean(a, axes, keepdims=False)
        away = ew("subtract", a, along(of_batch, ndim))
        spread_of_batch = _mean(ew("multiply", away, away), axes, keepdims=False)
        momentum = node.get("momentum", 0.9)

        def moved(old: Any, new: Any) -> Any:
            """The running average, with ``1 - momentum`` of the new value."""
            kept = ew("multiply", old, number(momentum, old))
            added = ew("multiply", new, number(1 - momentum, new))
            return ew("add", kept, convert(added, old.dtype))

        running = [moved(mean, of_batch), moved(variance, spread_of_batch)]
        mean, variance = of_batch, spread_of_batch
    factor = ew("divide", scale, ew("sqrt", ew("add", variance, number(epsilon, variance))))
    offset = ew("subtract", shift, ew("multiply", mean, factor))
    factor, offset = (along(convert(each, a.dtype), ndim) for each in (factor, offset))
    return [ew("add", ew("multiply", a, factor), offset), *running]


def _mean(x: Any, axes: tuple[int, ...], *, keepdims: bool = True) -> Any:
    """The mean along dims."""
    total = emit("sum", whole(x), axes=axes, keepdims=keepdims)
    return ew("divide", total, number(prod(x.shape[d] for d in axes), x))


def _wide(x: Any) -> Any:
    """The array in at least 4 bytes, in which norms are computed."""
    return x if x.dtype.itemsize > 2 else convert(x, np.dtype(np.float32))


def normalized(a: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """``a`` with mean 0 and variance 1 along dims, the mean, and the reciprocal of the deviation."""
    mean = _mean(a, axes)
    away = ew("subtract", a, mean)
    variance = _mean(ew("multiply", away, away), axes)
    scale = ew("reciprocal", ew("sqrt", ew("add", variance, number(epsilon, a))))
    return ew("multiply", away, scale), mean, scale


@meaning("InstanceNormalization")
def _instance_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    ndim, dtype = len(x[0].shape), x[0].dtype
    a, scale, shift = x if dtype.itemsize > 2 else map(_wide, x)
    result, _, _ = normalized(a, tuple(range(2, ndim)), node.get("epsilon", 1e-5))
    result = ew("add", ew("multiply", result, along(scale, ndim)), along(shift, ndim))
    return convert(result, dtype)


@meaning("LayerNormalization")
def _layer_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, scale, shift = with_optional(x, 3)
    ndim = len(a.shape)
    axes = tuple(range(axis_of(node, ndim, -1), ndim))
    epsilon = node.get("epsilon", 1e-5)
    if _is_one_op(node, x, axes):
        if shift is None:
            shift = spread(np.zeros(1, scale.dtype), scale.shape)
        return emit("layer_norm", whole(a), whole(scale), whole(shift), epsilon=epsilon)
    result, mean, reciprocal = normalized(_wide(a), axes, epsilon)
    result = ew("multiply", convert(result, a.dtype), scale)
    if shift is not None:
        result = ew("add", result, shift)
    return [result, mean, reciprocal]


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
    a = _wide(x[0])
    mean_square = _mean(ew("multiply", a, a), axes)
    reciprocal = ew("reciprocal", ew("sqrt", ew("add", mean_square, number(epsilon, a))))
    result = ew("multiply", a, reciprocal)
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
