"""What conversions to and from quantized numbers mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.dtypes import integer_limits, is_floating
from parallelism.interop.arrays import number, reshaped
from parallelism.interop.folding import convert, spread
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.normalizations import along as _along
from parallelism.interop.onnx_models.reading import Reader, meaning
from parallelism.interop.onnx_models.shapes import axis_of


def _scaled_like(node: GraphNode, scale: Any, a: Any) -> Any:
    """A scale or zero point, brought along the axis of ``a``."""
    if len(scale.shape) == 1 and scale.shape[0] != 1:
        return _along(scale, len(a.shape), axis_of(node, len(a.shape), 1))
    if len(scale.shape) > 1:
        axis, block = axis_of(node, len(a.shape), 1), node.get("block_size", 0)
        if not block:
            raise node.unsupported("a scale of several dims needs block_size")
        wide = reshaped(scale, (*scale.shape[: axis + 1], 1, *scale.shape[axis + 1 :]))
        shape = (*scale.shape[: axis + 1], block, *scale.shape[axis + 1 :])
        full = spread(wide.array if hasattr(wide, "array") else wide, shape)
        return reshaped(full, (*scale.shape[:axis], scale.shape[axis] * block, *scale.shape[axis + 1 :]))
    return reshaped(scale, ())


@meaning("DequantizeLinear")
def _dequantize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    scale = _scaled_like(node, x[1], x[0])
    a = convert(x[0], x[1].dtype)
    if len(x) > 2 and x[2] is not None:
        a = ew("subtract", a, convert(_scaled_like(node, x[2], x[0]), x[1].dtype))
    return ew("multiply", a, scale)


@meaning("QuantizeLinear")
def _quantize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    wanted = x[2].dtype if len(x) > 2 and x[2] is not None else np.dtype(np.uint8)
    if is_floating(wanted) or node.get("output_dtype"):
        raise node.unsupported("only whole numbers of the type of the zero point are supported")
    least, most = integer_limits(wanted)
    a = ew("rint", ew("divide", x[0], convert(_scaled_like(node, x[1], x[0]), x[0].dtype)))
    if len(x) > 2 and x[2] is not None:
        a = ew("add", a, convert(_scaled_like(node, x[2], x[0]), a.dtype))
    return convert(ew("minimum", ew("maximum", a, number(least, a)), number(most, a)), wanted)
