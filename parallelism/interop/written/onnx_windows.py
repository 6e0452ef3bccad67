"""Convolutions and pools in a program: windows, and then a product with a kernel, a maximum, or a sum.

A program has an op for each step, whose numbers are as many as all windows have; ONNX has one operator for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.written.onnx_nodes import Nodes
from parallelism.ir.core import Function, Op, Value

IMAGE = 2
"""The number of the first dim in which an image of ONNX has windows: behind the batch and the features."""
_POOLED = (np.dtype(np.float32), np.dtype(np.float16))


@dataclass(frozen=True)
class Windows:
    """Windows of ``image`` along all its dims from the third on; a value has the dims of a window behind its own."""

    image: Value
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()

    @property
    def axis(self) -> int:
        """The dim along which the next windows would be."""
        return IMAGE + len(self.sizes)

    @property
    def is_whole(self) -> bool:
        return len(self.sizes) > 0 and self.axis == self.image.type.ndim

    def attributes(self) -> dict[str, Any]:
        """Those of a convolution or a pool."""
        return {
            "kernel_shape": list(self.sizes),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
        }


@dataclass(frozen=True)
class Windowed:
    """A convolution or pool, which the last of its ops computes.  ``kind`` is the operator of ONNX.

    A convolution with groups has the groups as a dim of the kernel, (groups, out features, in features, ...), and of the
    result, whose ``shape`` is given then.
    """

    kind: str
    windows: Windows
    kernel: Value | None = None
    shape: tuple[int, ...] | None = None

    @property
    def inputs(self) -> list[str]:
        """The names of the values that it reads."""
        return [value.name for value in (self.windows.image, self.kernel) if value is not None]

    def write(self, nodes: Nodes, output: str) -> None:
        """Its nodes."""
        image, attributes = self.windows.image.name, self.windows.attributes()
        if self.kind == "MaxPool":
            nodes.node("MaxPool", image, output=output, **attributes)
        elif self.kind == "AveragePool":
            mean = nodes.node("AveragePool", image, count_include_pad=1, **attributes)
            count = nodes.number(prod(self.windows.sizes), self.windows.image.type.dtype)
            nodes.node("Mul", mean, count, output=output)
        else:
            self._convolution(nodes, output)

    def _convolution(self, nodes: Nodes, output: str) -> None:
        """The groups of features are dims of their own in a program, and none in ONNX."""
        assert self.kernel is not None
        image, kernel, attributes = self.windows.image.name, self.kernel.name, self.windows.attributes()
        if self.shape is None:
            nodes.node("Conv", image, kernel, output=output, **attributes)
            return
        groups, features, *rest = map(int, self.kernel.type.shape)
        flat = nodes.node("Reshape", kernel, nodes.ints(groups * features, *rest))
        made = nodes.node("Conv", image, flat, group=groups, **attributes)
        nodes.node("Reshape", made, nodes.ints(*self.shape), output=output)


def windowed(function: Function) -> dict[str, Windowed]:
    """The convolutions and pools of a program, by the names of their results."""
    made = {value.name: op for op in function.ops for value in op.outputs}
    found = {}
    for op in function.ops:
        whole = _pool(op, made) if op.kind in ("max", "sum") else _convolution(op, made)
        if whole is not None and whole.windows.image.type.dtype in _POOLED:
            found[op.outputs[0].name] = whole
    return found


def _windows(value: Value, made: Mapping[str, Op]) -> Windows:
    """The windows that a value holds, from the first dim of an image on; none if it holds something else."""
    op, dilation = made.get(value.name), 1
    if op is not None and op.kind == "slice":
        op, dilation = _dilated(op, made)
    if op is None or op.kind != "windows":
        return Windows(value)
    before = _windows(op.inputs[0], made)
    if op["axis"] != before.axis:
        before = Windows(op.inputs[0])  # windows of windows
    if op["axis"] != before.axis:
        return Windows(value)
    return Windows(
        before.image,
        (*before.sizes, (op["size"] - 1) // dilation + 1),
        (*before.strides, op["step"]),
        (*before.dilations, dilation),
    )


def _dilated(op: Op, made: Mapping[str, Op]) -> tuple[Op | None, int]:
    """The windows of which a slice keeps each so many-th element from the first to the last, and that number."""
    before, step = made.get(op.inputs[0].name), op["step"]
    if before is None or before.kind != "windows":
        return None, 1
    is_all = (op["axis"], op["begin"], op["end"]) == (op.inputs[0].type.ndim - 1, 0, before["size"])
    return (before, step) if is_all and (before["size"] - 1) % step == 0 else (None, 1)


def _pool(op: Op, made: Mapping[str, Op]) -> Windowed | None:
    """A maximum or sum of windows, whose elements were put into one dim."""
    (value,) = op.inputs
    if op["keepdims"] or tuple(op["axes"]) != (value.type.ndim - 1,):
        return None
    before = made.get(value.name)
    held = before.inputs[0] if before is not None and before.kind == "reshape" else value
    windows = _windows(held, made)
    pooled = (*held.type.shape[: windows.image.type.ndim], prod(windows.sizes))
    if not windows.is_whole or value.type.shape != pooled:
        return None
    return Windowed("MaxPool" if op.kind == "max" else "AveragePool", windows)


def _convolution(op: Op, made: Mapping[str, Op]) -> Windowed | None:
    """``nchwHW,ocHW->nohw``, or with groups k ``nkchwHW,kocHW->nkohw``, of windows H W at h w."""
    if op.kind != "einsum" or len(op.inputs) != 2:
        return None
    patches, kernel = op.inputs
    before = made.get(patches.name)
    in_groups = (
        before is not None
        and before.kind == "reshape"
        and patches.type.shape[0] == before.inputs[0].type.shape[0]
        and patches.type.shape[3:] == before.inputs[0].type.shape[2:]
    )
    windows = _windows(before.inputs[0] if before is not None and in_groups else patches, made)
    count = len(windows.sizes)
    if not windows.is_whole or not _is_product(op["equation"], in_groups, count):
        return None
    return Windowed("Conv", windows, kernel, _shape(op.outputs[0]) if in_groups else None)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(map(int, value.type.shape))


def _is_product(equation: str, in_groups: bool, count: int) -> bool:
    """Whether it is that of a convolution with so many dims in a window, whatever its letters are."""
    terms, result = equation.split("->")
    patches, kernel = terms.split(",")
    places, inner = "hwdefgij"[:count], "HWDEFGIJ"[:count]
    group = "k" if in_groups else ""
    model = f"n{group}c{places}{inner}", f"{group}oc{inner}", f"n{group}o{places}"
    given = patches, kernel, result
    if [*map(len, model)] != [*map(len, given)]:
        return False
    pairs = {*zip("".join(model), "".join(given), strict=True)}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
