"""What operators mean in opsets 7 to 12, where they had another form than from 13 on.

Axes that are attributes in old opsets, and inputs in newer ones, are no case of this: the meanings take both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.moving_elements import reshaped
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import MEANINGS, OLD_MEANINGS, Meaning, Reader
from parallelism.interop.onnx_models.shapes import axis_of


def older(*kinds: str, before: int) -> Callable[[Meaning], Meaning]:
    """A decorator: the function says what operators mean in opsets before one."""

    def register(function: Meaning) -> Meaning:
        OLD_MEANINGS.update(dict.fromkeys(kinds, (before, function)))
        return function

    return register


def _today(reader: Reader, node: GraphNode, x: list[Any], kind: str = "", **attributes: Any) -> Any:
    """What an operator means today, with these inputs and attributes."""
    kind = kind or node.kind
    return MEANINGS[kind](reader, replace(node, kind=kind, attributes={**node.attributes, **attributes}), x)


@older("Softmax", "LogSoftmax", "Hardmax", before=13)
def _of_rows(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The dims from ``axis`` on are one: a softmax runs over all of them."""
    shape = x[0].shape
    axis = axis_of(node, len(shape), 1) if len(shape) > 1 else axis_of(node, len(shape), 0)
    if axis == len(shape) - 1:
        return _today(reader, node, x, axis=-1)
    rows = reshaped(x[0], (prod(shape[:axis]), prod(shape[axis:])))
    return reshaped(_today(reader, node, [rows], axis=-1), shape)


@older("Slice", before=10)
def _slice(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    given = [np.asarray(node.get(name, ()), np.int64) for name in ("starts", "ends")]
    axes = node.get("axes")
    return _today(reader, node, [x[0], *given, None if axes is None else np.asarray(axes, np.int64)])


@older("Pad", before=11)
def _pad(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return _today(reader, node, [x[0], None, np.asarray(node.get("value", 0.0), x[0].dtype)])


@older("Clip", before=11)
def _clip(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    (a,) = x
    bounds = []
    for name in ("min", "max"):
        bound = node.get(name)
        bounds.append(None if bound is None else np.asarray(bound, a.dtype))
    return _today(reader, node, [a, *bounds])


@older("TopK", before=10)
def _top_k(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return _today(reader, node, [x[0], np.asarray([node.get("k")], np.int64)])


@older("Upsample", before=10)
def _upsample(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    scales = x[1] if len(x) > 1 else np.asarray(node.get("scales"), np.float32)
    return _resized(reader, node, x[0], scales)


@older("Resize", before=11)
def _resize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return _resized(reader, node, x[0], x[1])


def _resized(reader: Reader, node: GraphNode, x: Any, scales: Any) -> Any:
    """Places are those of the first element of each block; where there are fewer than before, they are rounded up.

    ONNX leaves the rounding open; this is ONNX Runtime's.
    """
    numbers = reader.numbers(node, scales, "scales").astype(np.float32)
    mode = node.get("mode", "nearest")
    how = {"coordinate_transformation_mode": "asymmetric", "mode": "linear" if mode == "bilinear" else mode}
    for nearest_mode, own in (("floor", np.maximum(numbers, 1)), ("ceil", np.minimum(numbers, 1))):
        if (own != 1).any():
            x = _today(reader, node, [x, None, own], "Resize", **how, nearest_mode=nearest_mode)
    return x


@older("Dropout", before=12)
def _dropout(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return _today(reader, node, x[:1])


@older("BatchNormalization", before=14)
def _batch_norm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if len([name for name in node.outputs if name]) > 1:
        raise node.unsupported("before opset 14 a normalization in training is not supported")
    if not node.get("spatial", 1):
        raise node.unsupported("a normalization of each place by itself (spatial=0) is not supported")
    return _today(reader, node, x)


@older("Scan", before=9)
def _scan(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    raise node.unsupported("before opset 9 a scan has a batch and lengths, which is not supported")
