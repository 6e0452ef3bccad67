"""Random inputs of a program: weights of the usual sizes, indices that are in range.

A program does not say what its inputs stand for, so this is read from what the program does with them: which operand of a
product an input is, and which extent an integer indexes.  Inputs are followed through ops that only move or convert elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod, sqrt
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import is_floating
from parallelism.ir.core import Function, Op, Value

PRODUCTS = ("matmul", "einsum")
MOVES = (
    "reshape",
    "transpose",
    "broadcast_to",
    "flip",
    "concatenate",
    "split",
    "slice",
    "place",
    "windows",
    "convert",
    "widen",
    "saturate",
    "stop_gradient",
    "reshard",
    "relayout",
    "where",
    "minimum",
    "maximum",
    "remainder",
)
"""Ops whose results have elements of their operands, or smaller ones."""
PLAIN = 2
"""Integers that index nothing are below it: a factor, a count or a flag."""

Sources = Mapping[Value, frozenset[str]]


def drawn(function: Function, seed: int, trained: Iterable[str] = ()) -> dict[str, Array]:
    """Random arrays for the inputs of a program without symbols, by name.

    Floats are normally distributed.  A weight is divided by the square root of the number of products that are added
    up with it, so that activations do not grow from layer to layer (LeCun et al., *Efficient BackProp*, 1998, section
    4.6): a weight is an input that is ``trained``, or that is the last operand of a product which is an input.  An
    integer that indexes a dim is anywhere in it; others are 0 or 1.  Every second bool is true, so that no row of a
    mask is empty.
    """
    rng = np.random.default_rng(seed)
    sources = _sources(function)
    scales = _scales(function, sources, frozenset(trained))
    extents = _extents(function, sources)
    return {
        value.name: _array(value, rng, scales.get(value.name, 1.0), extents.get(value.name, PLAIN))
        for value in function.inputs
    }


def _array(value: Value, rng: np.random.Generator, scale: float, below: int) -> Array:
    dtype, shape = value.type.dtype, tuple(map(int, value.type.shape))
    if is_floating(dtype):
        return np.asarray(scale * rng.normal(size=shape), dtype)
    if dtype.kind == "b":
        return np.asarray(np.indices(shape).sum(0) % 2 == 0, dtype)
    if dtype.kind not in "iu":
        return np.zeros(shape, dtype)
    most = min(below, int(np.iinfo(dtype).max) + 1)
    return np.asarray(rng.integers(0, max(most, 1), shape), dtype)


def _sources(function: Function) -> Sources:
    """By value, the inputs whose elements it has."""
    found = {value: frozenset({value.name}) for value in function.inputs}
    for op in function.ops:
        if op.kind in MOVES:
            own = frozenset[str]().union(*(found.get(value, frozenset()) for value in op.inputs))
            found |= dict.fromkeys(op.outputs, own)
    return found


def _scales(function: Function, sources: Sources, trained: frozenset[str]) -> dict[str, float]:
    """By name of a weight, its standard deviation."""
    found: dict[str, float] = {}
    for op in function.ops:
        if op.kind not in PRODUCTS:
            continue
        weights = _weights(op, sources, trained)
        added = prod(int(op.rule.extents[letter]) for letter in op.rule.reduced)
        scale = 1 / sqrt(max(1, added))
        for name in weights:
            found[name] = min(scale, found.get(name, scale))
    return found


def _weights(op: Op, sources: Sources, trained: frozenset[str]) -> frozenset[str]:
    """The inputs that are weights in a product."""
    operands = [sources[value] for value in op.inputs if sources.get(value)]
    if trained:
        return frozenset().union(*operands) & trained
    return operands[-1] if operands else frozenset()


def _extents(function: Function, sources: Sources) -> dict[str, int]:
    """By name of an input, the least extent of a dim that it indexes."""
    found: dict[str, int] = {}
    for op in function.ops:
        place, extent = _indexed(op)
        indices = op.inputs[place : place + 1] if place is not None else ()
        for name in frozenset[str]().union(*(sources.get(value, frozenset()) for value in indices)):
            found[name] = min(extent, found.get(name, extent))
    return found


def _indexed(op: Op) -> tuple[int | None, int]:
    """Which operand of an op is indices, and into how many elements; None where there is none."""
    shape: Sequence[Any] = op.inputs[0].type.shape if op.inputs else ()
    if op.kind in ("take", "take_along", "scatter"):
        return 1, int(shape[op["axis"]])
    if op.kind in ("take_part", "take_along_part"):
        return 1, int(op["whole"])
    if op.kind == "one_hot":
        return 0, int(op["extent"])
    if op.kind in ("cross_entropy", "softmax_cross_entropy"):
        return 1, int(shape[-1])
    return None, 0
