"""What operators of ``com.microsoft`` mean, which ONNX Runtime writes when it optimizes or quantizes a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.interop.folding import convert, emit, recorded, traced, whole
from parallelism.interop.moving_elements import number, part, reshaped, transposed
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.products import matmul
from parallelism.interop.onnx_models.reading import (
    MEANINGS,
    Meaning,
    Reader,
    meaning as meaning_of_all,
    with_optional,
)

DOMAIN = "com.microsoft"


def meaning(*kinds: str) -> Callable[[Meaning], Meaning]:
    """As `parallelism.interop.onnx_models.reading.meaning`, for operators of this domain."""
    return meaning_of_all(*(f"{DOMAIN}.{kind}" for kind in kinds))


def standard(reader: Reader, node: GraphNode, x: list[Any], kind: str = "", **attributes: Any) -> Any:
    """What an operator of ONNX means for these inputs."""
    kind = kind or node.kind
    plain = replace(node, kind=kind, domain="", attributes={**node.attributes, **attributes})
    return MEANINGS[kind](reader, plain, x)


def _plus(result: Any, added: Any) -> Any:
    """The sum; the ``result`` if the input that is added is left out."""
    return result if added is None else ew("add", result, added)


# -- what is the same, or a few operators in one -----------------------------------------------------------------------


@meaning("QuantizeLinear", "DequantizeLinear", "Pad", "Trilu")
def _same(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return standard(reader, node, x)


@meaning("Gelu", "BiasGelu")
def _gelu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, bias = with_optional(x, 2)
    return standard(reader, node, [_plus(a, bias)], "Gelu", approximate="none")


@meaning("FastGelu")
def _fast_gelu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, bias = with_optional(x, 2)
    return standard(reader, node, [_plus(a, bias)], "Gelu", approximate="tanh")


@meaning("QuickGelu")
def _quick_gelu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    (a,) = x
    scaled = ew("multiply", a, number(node.get("alpha", 1.702), a))
    return ew("multiply", a, ew("sigmoid", scaled))


@meaning("FusedMatMul", "TransposeMatMul")
def _fused_matmul(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        raise node.unsupported("batches that are transposed are not supported")
    sides = []
    for each, name in zip(x[:2], ("transA", "transB"), strict=True):
        ndim = len(each.shape)
        turned = node.get(name, 0) and ndim > 1
        sides.append(transposed(each, [*range(ndim - 2), ndim - 1, ndim - 2]) if turned else each)
    result = matmul(*sides)
    alpha = node.get("alpha", 1.0)
    return result if alpha == 1 else ew("multiply", result, number(alpha, result))


@meaning("FusedConv", "FusedGemm")
def _with_activation(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    *inputs, added = with_optional(x, 4)
    kind = "Conv" if node.kind == "FusedConv" else "Gemm"
    result = _plus(standard(reader, node, inputs, kind), added)
    name = node.get("activation", "")
    if not name:
        return result
    numbers = list(node.get("activation_params", ()))
    if not numbers:
        alpha_and_beta = node.get("activation_alpha"), node.get("activation_beta")
        numbers = [each for each in alpha_and_beta if each is not None]
    if name == "Clip":
        return standard(reader, node, [result, *(number(n, result) for n in numbers)], "Clip")
    if name not in ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"):
        raise node.unsupported(f"the activation {name!r} is not supported")
    return standard(reader, node, [result], name, **dict(zip(("alpha", "beta"), numbers, strict=False)))


# -- norms -------------------------------------------------------------------------------------------------------------


@meaning("SimplifiedLayerNormalization")
def _simplified(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return standard(reader, node, x[:2], "RMSNormalization")


@meaning("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The norm of a sum; the fourth output is the sum."""
    is_simple = node.kind.startswith("SkipSimplified")
    if is_simple:
        a, b, scale, bias = with_optional(x, 4)
        shift = None
    else:
        a, b, scale, shift, bias = with_optional(x, 5)
    total = _plus(ew("add", a, b), bias)
    if any(name for name in node.outputs[1:3]):
        raise node.unsupported("the mean and the deviation of a norm are not supported here")
    normed = [total, scale] if shift is None else [total, scale, shift]
    one = replace(node, outputs=node.outputs[:1])
    kind = "RMSNormalization" if is_simple else "LayerNormalization"
    result = standard(reader, one, normed, kind, axis=-1, epsilon=node.get("epsilon", 1e-12))
    return [result[0] if isinstance(result, list) else result, None, None, total]


# -- quantized ---------------------------------------------------------------------------------------------------------


@meaning("MatMulNBits")
def _matmul_n_bits(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Weights of 4 or 8 bits in blocks along the rows, each with a scale and a zero; those of 4 bits lie in pairs."""
    a, packed, scales, zeros, order, bias = with_optional(x, 6)
    bits, block, rows, columns = (node.get(name) for name in ("bits", "block_size", "K", "N"))
    if bits not in (4, 8) or order is not None:
        raise node.unsupported("only weights of 4 and 8 bits, without an order of their own, are supported")
    dtype, count = a.dtype, -(-rows // block)
    of_blocks = columns, count, 1
    numbers = reshaped(_unpacked(packed, bits), (columns, count, block))
    if zeros is None:
        shifted = ew("subtract", convert(numbers, dtype), number(2 ** (bits - 1), a))
    elif zeros.dtype == dtype:
        shifted = ew("subtract", convert(numbers, dtype), reshaped(zeros, of_blocks))
    else:
        nbytes = (count * bits + 7) // 8
        unpacked = _unpacked(reshaped(zeros, (columns, nbytes)), bits)
        own = reshaped(part(unpacked, 1, 0, count), of_blocks)
        shifted = ew("subtract", convert(numbers, dtype), convert(own, dtype))
    scaled = ew("multiply", shifted, convert(reshaped(scales, of_blocks), dtype))
    weights = part(reshaped(scaled, (columns, count * block)), 1, 0, rows)
    return _plus(matmul(a, transposed(weights, (1, 0))), bias)


@meaning("GatherBlockQuantized")
def _gathered_blocks(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Rows of a table of 4 or 8 bits, whose numbers have a scale and a zero for each block along the last dim."""
    bits, block = node.get("bits", 4), node.get("block_size", 128)
    table, indices, scales, zeros = with_optional(x, 4)
    ndim = len(table.shape)
    last = node.get("quantize_axis", 1) % ndim == ndim - 1
    if node.get("gather_axis", 0) % ndim != 0 or not last or bits not in (4, 8):
        raise node.unsupported(
            "only rows of tables that are quantized along their last dim, to 4 or 8 bits, are supported"
        )
    in_pairs = bits == 4 and table.dtype == np.dtype(np.uint8)
    numbers, factors = _looked_up(table, indices), _looked_up(scales, indices)
    numbers = _unpacked(numbers, bits) if in_pairs else numbers
    dtype = factors.dtype
    if zeros is None:
        # Bytes, and pairs of 4 bits in a byte, count from the middle of their range; types of 4 bits from 0.
        middle = 2 ** (bits - 1) if table.dtype == np.dtype(np.uint8) else 0
        shifted = ew("subtract", convert(numbers, dtype), number(middle, factors))
    else:
        own = _looked_up(zeros, indices)
        own = _unpacked(own, bits) if in_pairs else own
        own = part(own, len(own.shape) - 1, 0, factors.shape[-1])
        shifted = ew(
            "subtract", convert(numbers, dtype), _of_blocks(convert(own, dtype), block, numbers.shape[-1])
        )
    return ew("multiply", shifted, _of_blocks(factors, block, numbers.shape[-1]))


def _looked_up(table: Any, indices: Any) -> Any:
    """The rows of a table at these places."""
    rows: Any = traced(table)
    return np.take(rows, traced(indices), axis=0)


def _of_blocks(each: Any, block: int, columns: Any) -> Any:
    """A number of each block for all columns: ``(..., blocks)`` as ``(..., columns)``."""
    shape = tuple(each.shape)
    numbers: Any = recorded(each)
    repeated = np.broadcast_to(numbers[..., None], (*shape, block))
    flat = reshaped(repeated, (*shape[:-1], shape[-1] * block))
    return part(flat, len(shape) - 1, 0, columns)


def _unpacked(packed: Any, bits: int) -> Any:
    """The numbers in bytes, along the last dim: of 4 bits the lower ones first."""
    if bits == 8:
        return packed
    shape = tuple(packed.shape)
    low = ew("bitwise_and", packed, number(15, packed))
    high = ew("right_shift", packed, number(4, packed))
    pairs = [whole(reshaped(each, (*shape, 1))) for each in (low, high)]
    return reshaped(emit("concatenate", *pairs, axis=len(shape)), (*shape[:-1], 2 * shape[-1]))


def centred(a: Any, zero: Any) -> Any:
    """Whole numbers minus their zero point, in 32 bits."""
    wide = convert(a, np.dtype(np.int32))
    return wide if zero is None else ew("subtract", wide, convert(zero, np.dtype(np.int32)))


@meaning("MatMulIntegerToFloat")
def _to_float(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = with_optional(x, 7)
    product = matmul(centred(a, a_zero), centred(b, b_zero))
    result = ew("multiply", convert(product, a_scale.dtype), ew("multiply", a_scale, b_scale))
    return _plus(result, bias)


@meaning("DynamicQuantizeMatMul")
def _dynamic(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, weights, scale, zero, bias = with_optional(x, 5)
    return _plus(dynamic_product(a, centred(weights, zero), scale), bias)


def dynamic_product(a: Any, weights: Any, scale: Any) -> Any:
    """``a`` times whole numbers and their scale.  ``a`` is quantized to 8 bits by its own range, in which 0 is a number."""
    axes = tuple(range(len(a.shape)))
    zero = number(0, a)
    least = ew("minimum", emit("min", whole(a), axes=axes, keepdims=False), zero)
    most = ew("maximum", emit("max", whole(a), axes=axes, keepdims=False), zero)
    own = ew("divide", ew("subtract", most, least), number(255, a))
    own = ew("where", ew("equal", own, zero), number(1, a), own)

    def limited(each: Any) -> Any:
        return ew("minimum", ew("maximum", ew("rint", each), zero), number(255, a))

    point = limited(ew("divide", ew("negative", least), own))
    quotient = ew("rint", ew("divide", a, own))
    quantized = limited(ew("add", quotient, point))
    steps = ew("subtract", quantized, point)
    product = matmul(convert(steps, np.dtype(np.int32)), weights)
    return ew("multiply", convert(product, a.dtype), ew("multiply", own, scale))


@meaning("QLinearAdd", "QLinearMul")
def _quantized_pair(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, b = (standard(reader, node, [x[i], x[i + 1], x[i + 2]], "DequantizeLinear") for i in (0, 3))
    result = ew("add" if node.kind == "QLinearAdd" else "multiply", a, b)
    return standard(reader, node, [result, x[6], x[7]], "QuantizeLinear")


@meaning("QLinearSigmoid", "QLinearLeakyRelu")
def _quantized_one(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a = standard(reader, node, x[:3], "DequantizeLinear")
    result = standard(reader, node, [a], node.kind.removeprefix("QLinear"))
    return standard(reader, node, [result, x[3], x[4]], "QuantizeLinear")


@meaning("QLinearSoftmax")
def _quantized_softmax(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Before opset 13 the dims from ``axis`` on are one."""
    a = standard(reader, node, x[:3], "DequantizeLinear", axis=0)
    last = node.get("axis", -1) % len(a.shape) == len(a.shape) - 1
    if node.get("opset", 13) < 13 and not last:
        raise node.unsupported("a softmax over several dims is not supported")
    result = standard(reader, node, [a], "Softmax", axis=node.get("axis", -1))
    return standard(reader, node, [result, x[3], x[4]], "QuantizeLinear", axis=0)


@meaning("QLinearConcat")
def _quantized_concat(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The scale and zero of the result, and then an array, its scale and zero for each part."""
    parts = []
    for i in range(2, len(x), 3):
        parts.append(standard(reader, node, x[i : i + 3], "DequantizeLinear", axis=0))
    result = standard(reader, node, parts, "Concat")
    return standard(reader, node, [result, x[0], x[1]], "QuantizeLinear", axis=0)


@meaning("QLinearAveragePool", "QLinearGlobalAveragePool")
def _quantized_pool(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if node.get("channels_last", 0):
        raise node.unsupported("channels that are last are not supported")
    a = standard(reader, node, x[:3], "DequantizeLinear")
    result = standard(reader, node, [a], node.kind.removeprefix("QLinear"))
    return standard(reader, node, [result, x[3], x[4]], "QuantizeLinear")


@meaning("QGemm")
def _quantized_gemm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The product of quantized matrices; the bias has the scale of the product."""
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = with_optional(x, 9)
    if node.get("transA", 0):
        a = transposed(a, (1, 0))
    if node.get("transB", 0):
        b = transposed(b, (1, 0))
    product = _plus(matmul(centred(a, a_zero), centred(b, b_zero)), bias)
    scale = ew("multiply", ew("multiply", a_scale, b_scale), number(node.get("alpha", 1.0), a_scale))
    result = ew("multiply", convert(product, a_scale.dtype), scale)
    if y_scale is None:
        return result
    return standard(reader, node, [result, y_scale, y_zero], "QuantizeLinear")
