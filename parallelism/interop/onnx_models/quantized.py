"""What conversions to and from quantized numbers mean, and products of these."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.dtypes import integer_limits, is_floating
from parallelism.interop.folding import convert, spread
from parallelism.interop.moving_elements import number, reshaped
from parallelism.interop.onnx_models.elementwise import ew, to_float8
from parallelism.interop.onnx_models.files import dtype_of
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.normalizations import along as _along
from parallelism.interop.onnx_models.products import matmul
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.interop.onnx_models.shapes import axis_of
from parallelism.interop.onnx_models.windows import conv


def _scaled_like(node: GraphNode, scale: Any, a: Any) -> Any:
    """A scale or zero point, brought along the axis of ``a``."""
    if len(scale.shape) == 1 and scale.shape[0] != 1:
        return _along(scale, len(a.shape), axis_of(node, len(a.shape), 1))
    if len(scale.shape) > 1:
        axis = axis_of(node, len(a.shape), 1)
        block = node.get("block_size", 0)
        if not block:
            raise node.unsupported("a scale of several dims needs block_size")
        wide = reshaped(scale, (*scale.shape[: axis + 1], 1, *scale.shape[axis + 1 :]))
        shape = (*scale.shape[: axis + 1], block, *scale.shape[axis + 1 :])
        full = spread(wide.array if hasattr(wide, "array") else wide, shape)
        return reshaped(full, (*scale.shape[:axis], scale.shape[axis] * block, *scale.shape[axis + 1 :]))
    return reshaped(scale, ())


@meaning("DequantizeLinear")
def _dequantize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    numbers, scale, zero = with_optional(x, 3)
    steps = _scaled_like(node, scale, numbers)
    a = convert(numbers, scale.dtype)
    if zero is not None:
        a = ew("subtract", a, convert(_scaled_like(node, zero, numbers), scale.dtype))
    return ew("multiply", a, steps)


@meaning("QuantizeLinear")
def _quantize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    given, scale, zero = with_optional(x, 3)
    wanted = _wanted(node, zero)
    steps = convert(_scaled_like(node, scale, given), given.dtype)
    a = ew("divide", given, steps)
    if not is_floating(wanted):
        a = ew("rint", a)
    if zero is not None:
        a = ew("add", a, convert(_scaled_like(node, zero, given), a.dtype))
    return to_float8(node, a, wanted) if is_floating(wanted) else _clipped(a, wanted)


def _wanted(node: GraphNode, zero: Any) -> np.dtype[Any]:
    """The dtype of quantized numbers: that of the zero point, or the one that the node names, or uint8."""
    if zero is not None:
        return zero.dtype  # type: ignore[no-any-return]
    named = dtype_of(node.get("output_dtype", 0)) if node.get("output_dtype", 0) else np.dtype(np.uint8)
    if isinstance(named, str) or (is_floating(named) and not named.name.startswith("float8")):
        raise node.unsupported(f"quantized numbers of {named} are not supported")
    return named


# -- products ----------------------------------------------------------------------------------------------------------

_INT32 = np.dtype(np.int32)


@meaning("QLinearMatMul")
def _quantized_matmul(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Scales and zeros of the left side may be those of rows, of the right side those of columns."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = x[:8]
    rows = [_as_column(each) for each in (a_scale, a_zero)]
    left = ew("subtract", convert(a, _INT32), convert(rows[1], _INT32))
    right = ew("subtract", convert(b, _INT32), convert(b_zero, _INT32))
    scale = ew("divide", ew("multiply", rows[0], b_scale), y_scale)
    return _requantized(matmul(left, right), scale, y_zero)


def _as_column(x: Any) -> Any:
    return reshaped(x, (x.shape[0], 1)) if len(x.shape) == 1 and x.shape[0] != 1 else x


@meaning("QLinearConv")
def _quantized_conv(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Scales and zeros of the weights may be those of each feature that comes out."""
    a, a_scale, a_zero, w, w_scale, w_zero, y_scale, y_zero = x[:8]
    image = ew("subtract", convert(a, _INT32), convert(reshaped(a_zero, ()), _INT32))
    ndim = len(a.shape)
    weights = ew("subtract", convert(w, _INT32), convert(_of_features(w_zero, ndim, 0), _INT32))
    total = conv(node, image, weights, x[8] if len(x) > 8 else None)
    scale = ew(
        "divide", ew("multiply", reshaped(a_scale, ()), _of_features(w_scale, ndim, 1)), reshaped(y_scale, ())
    )
    return _requantized(total, scale, reshaped(y_zero, ()))


def _of_features(x: Any, ndim: int, axis: int) -> Any:
    return _along(x, ndim, axis) if len(x.shape) == 1 and x.shape[0] != 1 else reshaped(x, ())


def _requantized(total: Any, scale: Any, zero: Any) -> Any:
    """Whole numbers times their scale, rounded, in the dtype of the zero point."""
    a = ew("rint", ew("multiply", convert(total, scale.dtype), scale))
    a = ew("add", a, convert(zero, a.dtype))
    return _clipped(a, zero.dtype)


def _clipped(a: Any, dtype: np.dtype[Any]) -> Any:
    """The numbers in an integer dtype; those out of its range are its limits."""
    least, most = integer_limits(dtype)
    return convert(ew("minimum", ew("maximum", a, number(least, a)), number(most, a)), dtype)
