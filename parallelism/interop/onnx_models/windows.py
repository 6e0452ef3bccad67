"""What convolutions and pools mean."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.interop.folding import convert, emit, filled, whole
from parallelism.interop.moving_elements import number, padded, reshaped, transposed
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.normalizations import along as _along
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.interop.windows import convolution, grid


def pads_of(
    node: GraphNode, extents: Any, kernel: Any, strides: Any, dilations: Any
) -> tuple[list[int], list[int]]:
    """The padding on both sides of each dim."""
    count, mode = len(kernel), node.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        given = list(node.get("pads", (0,) * 2 * count))
        return given[:count], given[count:]
    if mode == "VALID":
        return [0] * count, [0] * count
    low, high = [], []
    for n, k, s, d in zip(extents, kernel, strides, dilations, strict=True):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        first = total // 2 if mode == "SAME_UPPER" else total - total // 2
        low.append(first)
        high.append(total - first)
    return low, high


@meaning("Conv")
def _conv(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return conv(node, *with_optional(x, 3))


def conv(node: GraphNode, image: Any, weights: Any, bias: Any) -> Any:
    """A convolution with the attributes of a node."""
    kernel = weights.shape[2:]
    strides, dilations = (node.get(name, (1,) * len(kernel)) for name in ("strides", "dilations"))
    low, high = pads_of(node, image.shape[2:], kernel, strides, dilations)
    result = convolution(
        image, weights, strides=strides, low=low, high=high, dilations=dilations, groups=node.get("group", 1)
    )
    return result if bias is None else ew("add", result, _along(bias, len(result.shape)))


@meaning("ConvInteger")
def _conv_integer(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    wide = np.dtype(np.int32)
    image, weights, image_zero, weights_zero = with_optional(x, 4)
    image, weights = convert(image, wide), convert(weights, wide)
    if image_zero is not None:
        image = ew("subtract", image, convert(image_zero, wide))
    if weights_zero is not None:
        zero = convert(weights_zero, wide)
        has_features = prod(zero.shape) > 1
        zero = _along(zero, len(weights.shape), 0) if has_features else reshaped(zero, ())
        weights = ew("subtract", weights, zero)
    return conv(node, image, weights, None)


@meaning("ConvTranspose")
def _conv_transpose(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The convolution of the image with zeros between its elements, by the kernel turned round."""
    image, weights, bias = with_optional(x, 3)
    groups = node.get("group", 1)
    kernel = weights.shape[2:]
    count = len(kernel)
    strides, dilations = (node.get(name, (1,) * count) for name in ("strides", "dilations"))
    extra = list(node.get("output_padding", (0,) * count))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    total = _padding_of_transposed(node, image.shape[2:], strides, reach, extra)
    if total is None:
        low, high = pads_of(node, image.shape[2:], kernel, strides, dilations)
    else:
        low = [t - t // 2 for t in total]
        high = [t // 2 for t in total]
        if node.get("auto_pad") == "SAME_UPPER":
            low, high = high, low
    inputs = weights.shape[0] // groups
    outputs = weights.shape[1]
    turned = reshaped(weights, (groups, inputs, outputs, *kernel))
    turned = transposed(turned, (0, 2, 1, *range(3, 3 + count)))
    turned = reshaped(turned, (groups * outputs, inputs, *kernel))
    result = convolution(
        image,
        turned,
        strides=(1,) * count,
        low=[r - p for r, p in zip(reach, low, strict=True)],
        high=[r - p + e for r, p, e in zip(reach, high, extra, strict=True)],
        dilations=dilations,
        x_dilations=strides,
        groups=groups,
        reverse=(True,) * count,
    )
    return result if bias is None else ew("add", result, _along(bias, len(result.shape)))


def _padding_of_transposed(
    node: GraphNode, sizes: Sequence[Any], strides: Sequence[int], reach: Sequence[int], extra: Sequence[int]
) -> list[Any] | None:
    """The padding of both ends together, where it follows from the shape of the result; None where it is given."""
    if node.get("output_shape"):
        wanted = node.get("output_shape")[-len(sizes) :]
        dims = zip(sizes, strides, reach, extra, wanted, strict=True)
        return [(n - 1) * s + r + 1 + e - w for n, s, r, e, w in dims]
    if node.get("auto_pad", "NOTSET").startswith("SAME"):
        return [r + 1 + e - s for r, e, s in zip(reach, extra, strides, strict=True)]
    return None


@meaning("MaxPool", "AveragePool", "LpPool")
def _pool(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, kernel = x[0], node.get("kernel_shape")
    count, ndim = len(kernel), len(a.shape)
    if len([name for name in node.outputs if name]) > 1:
        raise node.unsupported("the places of the largest elements are not supported")
    strides, dilations = (node.get(name, (1,) * count) for name in ("strides", "dilations"))
    low, high = pads_of(node, a.shape[2:], kernel, strides, dilations)
    sizes = a.shape[2:]
    extra = [0] * count
    if node.get("ceil_mode", 0):
        for i, (n, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
            space = n + low[i] + high[i] - (k - 1) * d - 1
            out = -(-space // s) + 1
            if (out - 1) * s - n - low[i] >= 0:  # a window must begin before the end
                out -= 1
            extra[i] = max(0, (out - 1) * s + (k - 1) * d + 1 - n - low[i] - high[i])
    axes = list(range(2, ndim))

    def windows(array: Any, value: Any, more: Any) -> Any:
        ends = [0, 0, *(h + e for h, e in zip(high, more, strict=True))]
        wide = padded(array, number(value, array), [0, 0, *low], ends, [0] * ndim)
        return whole(grid(wide, axes, kernel, strides, dilations))

    if node.kind == "MaxPool":
        least = -np.inf if is_floating(a.dtype) else np.iinfo(a.dtype).min
        return emit("max", windows(a, least, extra), axes=(ndim,), keepdims=False)
    if node.kind == "LpPool":
        p = node.get("p", 2)
        powers = ew("power", ew("absolute", a), number(p, a))
        return ew(
            "power", emit("sum", windows(powers, 0, extra), axes=(ndim,), keepdims=False), number(1 / p, a)
        )
    total = emit("sum", windows(a, 0, extra), axes=(ndim,), keepdims=False)
    each: Any = np.ones((1,) * ndim, a.dtype)
    for i, n in enumerate(sizes):
        held = _along(
            _held(
                n,
                a.dtype,
                bool(node.get("count_include_pad", 0)),
                low[i],
                high[i],
                extra[i],
                kernel[i],
                strides[i],
                dilations[i],
            ),
            ndim,
            2 + i,
        )
        each = (
            each * held
            if isinstance(held, np.ndarray) and isinstance(each, np.ndarray)
            else ew("multiply", each, held)
        )
    return ew("divide", total, each)


def _held(
    n: Any, dtype: Any, padding: bool, low: int, high: int, extra: int, size: int, stride: int, dilation: int
) -> Any:
    """How many elements each window along one dim holds.  ``padding`` says whether ``low`` and ``high`` count."""
    if not (extra or (not padding and (low or high))):
        return np.full(1, size, dtype)
    inside = padded(filled(1, (n,), dtype), np.asarray(padding, dtype), [low], [high], [0])
    inside = padded(inside, np.zeros((), dtype), [0], [extra], [0])
    return emit("sum", grid(inside, [0], [size], [stride], [dilation]), axes=(1,), keepdims=False)


@meaning("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axes = tuple(range(2, len(x[0].shape)))
    if node.kind == "GlobalMaxPool":
        return emit("max", whole(x[0]), axes=axes, keepdims=True)
    p = node.get("p", 2)
    a = x[0] if node.kind == "GlobalAveragePool" else ew("power", ew("absolute", x[0]), number(p, x[0]))
    total = emit("sum", whole(a), axes=axes, keepdims=True)
    if node.kind == "GlobalLpPool":
        return ew("power", total, number(1 / p, total))
    return ew("divide", total, number(prod(x[0].shape[d] for d in axes), total))
