"""What ops on windows mean: ``convolution``, ``reduce_window`` and ``select_and_scatter``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from parallelism.interop.folding import convert, elementwise as ew, emit, same_everywhere, spread, whole
from parallelism.interop.moving_elements import (
    broadcast_dims,
    flipped,
    iota,
    number,
    padded,
    reshaped,
    sliced,
    transposed,
)
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.reductions import (
    identity,
    reduced_from,
    reducer,
    tree,
)
from parallelism.interop.stablehlo.shapes import numbers
from parallelism.interop.windows import convolution, grid


def _layout(text: str) -> list[list[str]]:
    """The dims of ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
    return [[word.strip() for word in part.split(",")] for part in re.findall(r"\[([^\]]*)\]", text)]


def _padding(node: Node, count: int) -> tuple[list[int], list[int]]:
    given = numbers(node, "padding") if "padding" in node.attributes else (0,) * (2 * count)
    return list(given[0::2]), list(given[1::2])


def _listed(node: Node, name: str, count: int) -> tuple[int, ...]:
    return numbers(node, name) if name in node.attributes else (1,) * count


@meaning("stablehlo.convolution")
def _convolution(reader: Reader, node: Node, x: list[Any]) -> Any:
    left, kernel, out = _layout(node.attributes["dimension_numbers"])
    count = len(left) - 2
    spatial = [str(i) for i in range(count)]
    image = transposed(x[0], [left.index(name) for name in ("b", "f", *spatial)])
    weights = transposed(x[1], [kernel.index(name) for name in ("o", "i", *spatial)])
    low, high = _padding(node, count)
    reverse = node.attributes.get("window_reversal", ())
    result = convolution(
        image,
        weights,
        strides=_listed(node, "window_strides", count),
        low=low,
        high=high,
        dilations=_listed(node, "rhs_dilation", count),
        x_dilations=_listed(node, "lhs_dilation", count),
        groups=node.attributes.get("feature_group_count", 1),
        batch_groups=node.attributes.get("batch_group_count", 1),
        reverse=reverse,
        dtype=node.type().dtype,
    )
    order = ["b", "f", *spatial]
    return transposed(result, [order.index(name) for name in out])


@meaning("stablehlo.reduce_window")
def _reduce_window(reader: Reader, node: Node, operands: list[Any]) -> Any:
    arrays = operands[: len(operands) // 2]
    starts = operands[len(operands) // 2 :]
    ndim, sizes = arrays[0].ndim, numbers(node, "window_dimensions")
    strides = _listed(node, "window_strides", ndim)
    dilations = _listed(node, "window_dilations", ndim)
    gaps = _listed(node, "base_dilations", ndim)
    low, high = _padding(node, ndim)
    plain = len(arrays) == 1 and {*strides, *dilations, *gaps} == {1}
    if plain and (sums := _running_sum(node, arrays[0], starts[0], sizes, low, high)) is not None:
        return sums
    axes = [d for d in range(ndim) if sizes[d] != 1 or strides[d] != 1]
    inside = [n - 1 for n in gaps]
    filled = [padded(x, start, low, high, inside) for x, start in zip(arrays, starts, strict=True)]

    def windows(x: Any) -> Any:
        """The elements of each window in one last dim."""
        if not axes:
            return emit("reshape", whole(x), shape=(*x.shape, 1))
        return grid(x, axes, *([numbers[d] for d in axes] for numbers in (sizes, strides, dilations)))

    parts = list(map(windows, filled))
    if 0 in node.type().shape:
        return [broadcast_dims(start, node.type().shape, ()) for start in starts]
    if len(arrays) == 1 and (op := reducer(node.body, arrays[0].dtype)) is not None:
        return reduced_from(starts[0], parts[0], [ndim], op)
    lines = [transposed(x, [ndim, *range(ndim)]) for x in parts]
    results = [reshaped(x, x.shape[1:]) for x in tree(reader, node.body, lines)]
    first = [broadcast_dims(start, results[0].shape, ()) for start in starts]
    return reader.applied(node.body, [*first, *results])


def _running_sum(node: Node, x: Any, start: Any, sizes: Any, low: Any, high: Any) -> Any:
    """A window as long as its dim that begins before it: a cumulative sum, forwards or backwards.  None for others."""
    long = [d for d in range(x.ndim) if sizes[d] != 1]
    if len(long) != 1 or reducer(node.body, x.dtype) != "sum" or same_everywhere(start) != 0:
        return None
    (axis,) = long
    n = x.shape[axis]
    ends = [(low[d], high[d]) for d in range(x.ndim)]
    if sizes[axis] != n or any(end != (0, 0) for d, end in enumerate(ends) if d != axis):
        return None
    if ends[axis] == (n - 1, 0):
        return convert(emit("cumsum", whole(x), axis=axis), x.dtype)
    if ends[axis] == (0, n - 1):
        return flipped(convert(emit("cumsum", whole(flipped(x, axis)), axis=axis), x.dtype), axis)
    return None


@meaning("stablehlo.select_and_scatter")
def _select_and_scatter(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The number of the element that each window selects; then what comes to each element, added up over windows.

    The windows' elements are told apart by a dim of their own; ``windows_sum`` brings each back to its place.
    """
    operand, source, start = x
    ndim, sizes = operand.ndim, numbers(node, "window_dimensions")
    strides = _listed(node, "window_strides", ndim)
    low, high = _padding(node, ndim)
    select, scatter = (region[0] for region in node.regions)
    if reducer(scatter, operand.dtype) != "sum":
        raise node.unsupported("only sums are scattered")
    axes = [d for d in range(ndim) if sizes[d] != 1 or strides[d] != 1]
    own = [sizes[d] for d in axes]
    steps = [strides[d] for d in axes]
    compare = select.nodes[0]
    directions = {"GE": -np.inf, "GT": -np.inf, "LE": np.inf, "LT": np.inf}
    worst = directions.get(compare.word("comparison_direction"))
    if worst is None or len(select.nodes) != 2:
        raise node.unsupported("elements must be selected by one comparison")
    edge = identity("max" if worst < 0 else "min", operand.dtype)
    image = padded(operand, np.asarray(edge, operand.dtype), low, high, [0] * ndim)
    patches = whole(grid(image, axes, own, steps, [1] * len(axes)))
    chosen = emit("argmax" if worst < 0 else "argmin", patches, axis=ndim)
    count = patches.shape[-1]
    hot = ew(
        "equal",
        spread(emit("reshape", chosen, shape=(*chosen.shape, 1)), patches.shape),
        spread(iota(count, np.dtype(np.int64), ndim + 1, ndim), patches.shape),
    )
    shares = ew(
        "where",
        hot,
        spread(emit("reshape", whole(source), shape=(*source.shape, 1)), patches.shape),
        number(0, source),
    )
    total = reshaped(whole(shares), (*source.shape, *own))
    for axis, stride in reversed([*zip(axes, steps, strict=True)]):
        total = emit("windows_sum", whole(total), axis=axis, step=stride, extent=image.shape[axis])
    result = sliced(
        total,
        [max(0, n) for n in low],
        [max(0, a) + n for a, n in zip(low, operand.shape, strict=True)],
        [1] * ndim,
    )
    return result if same_everywhere(start) == 0 else ew("add", result, start)
