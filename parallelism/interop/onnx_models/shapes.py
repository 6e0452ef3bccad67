"""What operators mean that move elements, create arrays, or tell shapes."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.folding import as_extents, convert, filled, known
from parallelism.interop.moving_elements import (
    broadcast_dims,
    concatenated,
    flipped,
    iota,
    number,
    padded,
    part,
    reshaped,
    taken,
    transposed,
)
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.files import dtype_of
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, vector, with_optional
from parallelism.ir.core import Expression, bounds_in, broadcast, ceil_div


def axes_of(
    reader: Reader, node: GraphNode, x: list[Any], at: int = 1, name: str = "axes"
) -> list[int] | None:
    """Axes that are an input, or an attribute in older opsets; None if they are left out."""
    if len(x) > at and x[at] is not None:
        return [int(n) for n in reader.ints(node, x[at], name)]
    given = node.get(name)
    return None if given is None else [int(n) for n in given]


def axis_of(node: GraphNode, ndim: int, default: int = 0, name: str = "axis") -> int:
    """An axis from 0 on."""
    axis = int(node.get(name, default))
    if not -ndim <= axis < max(ndim, 1):
        raise node.wrong(f"{name} must be from {-ndim} to {ndim - 1}, got {axis}")
    return axis % ndim if ndim else 0


@meaning("Constant")
def _constant(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    for name, value in node.attributes.items():
        if isinstance(value, Exception):
            raise value
        if name == "value":
            return value
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
    raise node.unsupported("a constant must be a tensor or numbers")


@meaning("Shape")
def _shape(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return vector(x[0].shape[slice(node.get("start", 0), node.get("end"))])


@meaning("Size")
def _size(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    size = vector([prod(x[0].shape)])
    return size.reshape(())


@meaning("Reshape")
def _reshape(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    shape = list(reader.ints(node, x[1], "the shape"))
    for i, n in enumerate(shape):
        if isinstance(n, int) and n == 0 and not node.get("allowzero", 0):
            shape[i] = x[0].shape[i]
    if -1 in [n for n in shape if isinstance(n, int)]:
        at = next(i for i, n in enumerate(shape) if isinstance(n, int) and n == -1)
        rest = prod(n for i, n in enumerate(shape) if i != at)
        shape[at] = prod(x[0].shape) // rest if not (isinstance(rest, int) and rest == 0) else 0
    return _reshaped(x[0], shape)


def _reshaped(x: Any, shape: Any) -> Any:
    if x.dtype == object:
        return x.reshape([int(n) for n in shape])
    return reshaped(x, as_extents(shape))


@meaning("Flatten")
def _flatten(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    shape = x[0].shape
    axis = int(node.get("axis", 1))
    axis = axis + len(shape) if axis < 0 else axis
    return reshaped(x[0], (prod(shape[:axis]), prod(shape[axis:])))


@meaning("Squeeze")
def _squeeze(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axes, shape = axes_of(reader, node, x), x[0].shape
    gone = {d for d, n in enumerate(shape) if n == 1} if axes is None else {a % len(shape) for a in axes}
    if any(shape[d] != 1 for d in gone):
        raise node.wrong(f"dims {sorted(gone)} of shape {list(shape)} must have extent 1")
    return _reshaped(x[0], [n for d, n in enumerate(shape) if d not in gone])


@meaning("Unsqueeze")
def _unsqueeze(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axes = axes_of(reader, node, x) or []
    ndim = len(x[0].shape) + len(axes)
    new, rest = {a % ndim for a in axes}, iter(x[0].shape)
    return _reshaped(x[0], [1 if d in new else next(rest) for d in range(ndim)])


@meaning("Transpose")
def _transpose(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return transposed(x[0], node.get("perm", tuple(reversed(range(len(x[0].shape))))))


@meaning("Concat")
def _concat(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if any(part.dtype == object for part in x):
        return np.concatenate([np.asarray(known(part), object) for part in x], axis_of(node, x[0].ndim))
    return concatenated(x, axis_of(node, len(x[0].shape)))


@meaning("Split")
def _split(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = axis_of(node, len(x[0].shape))
    extent = x[0].shape[axis]
    sizes = axes_of(reader, node, x, 1, "split")
    if sizes is None:
        count = node.get("num_outputs", len(node.outputs))
        each = -(-extent // count)
        sizes = [each] * (count - 1) + [extent - each * (count - 1)]
    places = np.cumsum([0, *sizes]).tolist()
    return [part(x[0], axis, begin, end) for begin, end in pairwise(places)]


@meaning("Slice")
def _slice(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    starts, ends = (reader.ints(node, x[i], name) for i, name in ((1, "starts"), (2, "ends")))
    axes = axes_of(reader, node, x, 3) or list(range(len(starts)))
    steps = axes_of(reader, node, x, 4, "steps") or [1] * len(starts)
    result = x[0]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(x[0].shape)
        extent = result.shape[axis]
        if result.dtype == object:
            result = result[slice(int(start), int(end), step)]
            continue
        if any(isinstance(n, Expression) for n in (extent, start, end)):
            result = part(result, axis, *bounds_in(extent, start, end), step)
            continue
        begin, last, step = slice(start, end, step).indices(extent)
        if step < 0:
            count = len(range(begin, last, step))
            result = flipped(
                part(
                    result, axis, begin + (count - 1) * step if count else 0, begin + 1 if count else 0, -step
                ),
                axis,
            )
        else:
            result = part(result, axis, begin, max(begin, last), step)
    return result


@meaning("Expand")
def _expand(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    shape = broadcast([tuple(x[0].shape), as_extents(reader.ints(node, x[1], "the shape"))])
    ndim = len(x[0].shape)
    return broadcast_dims(x[0], shape, range(len(shape) - ndim, len(shape))) if ndim else _filled(x[0], shape)


def _filled(x: Any, shape: Any) -> Any:
    return broadcast_dims(x, shape, ())


@meaning("Tile")
def _tile(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    repeats = reader.ints(node, x[1], "repeats")
    shape = x[0].shape
    wide = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    result = broadcast_dims(x[0], wide, range(1, 2 * len(shape), 2))
    return reshaped(result, [a * n for a, n in zip(repeats, shape, strict=True)])


@meaning("ConstantOfShape")
def _constant_of_shape(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    value = node.get("value", np.zeros(1, np.float32))
    return filled(
        np.asarray(value).reshape(-1)[0], as_extents(reader.ints(node, x[0], "the shape")), value.dtype
    )


@meaning("Range")
def _range(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    names = ("start", "limit", "delta")
    numbers = [reader.numbers(node, each, name) for each, name in zip(x, names, strict=True)]
    start, end, step = (each.item() for each in numbers)
    if isinstance(step, Expression):
        raise node.unsupported(f"delta must be a number without symbols, got {step}")
    symbolic = isinstance(end - start, Expression)
    extent = ceil_div(end - start, step) if symbolic else max(0, int(np.ceil((end - start) / step)))
    dtype = next((n.dtype for n in numbers if n.dtype != object), np.dtype(np.int64))
    places = convert(iota(extent, np.dtype(np.int64)), dtype)
    places = places if step == 1 else ew("multiply", places, number(step, places))
    return places if isinstance(start, int) and start == 0 else ew("add", places, number(start, places))


@meaning("EyeLike")
def _eye_like(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    rows, columns = x[0].shape
    wanted: Any = dtype_of(node.get("dtype")) if node.get("dtype") else x[0].dtype
    below = ew("add", reshaped(iota(rows), (rows, 1)), np.asarray(node.get("k", 0)))
    return convert(ew("equal", below, reshaped(iota(columns), (1, columns))), wanted)


@meaning("Trilu")
def _trilu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, offset = with_optional(x, 2)
    k = 0 if offset is None else reader.ints(node, offset, "k")[0]
    rows, columns = a.shape[-2:]
    diagonal = ew("subtract", reshaped(iota(columns), (1, columns)), reshaped(iota(rows), (rows, 1)))
    relation = "greater_equal" if node.get("upper", 1) else "less_equal"
    is_kept = ew(relation, diagonal, np.asarray(k))
    return ew("where", is_kept, a, number(0, a))


@meaning("Pad")
def _pad(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    pads = axes_of(reader, node, x, 1, "pads") or []
    _, _, given = with_optional(x[:3], 3)
    value = number(0, x[0]) if given is None else given
    ndim = len(x[0].shape)
    axes = axes_of(reader, node, x, 3) or list(range(ndim))
    low, high = [0] * ndim, [0] * ndim
    for i, axis in enumerate(axes):
        low[axis % ndim], high[axis % ndim] = pads[i], pads[i + len(axes)]
    mode = node.get("mode", "constant")
    if mode == "constant":
        return padded(x[0], reshaped(value, ()), low, high, [0] * ndim)
    result = x[0]
    for axis in range(ndim):
        if not (low[axis] or high[axis]):
            continue
        n = result.shape[axis]
        if not isinstance(n, int):
            raise node.unsupported(
                f"the extent of dim {axis}, {n}, must be a number: give it, as sizes={{{sorted(n.symbols)[0]!r}: 8}}"
            )
        places = np.arange(-low[axis], n + high[axis])
        if mode == "reflect":
            places = np.abs(places) if n == 1 else np.abs((places + (n - 1) * 64) % (2 * (n - 1)))
            places = np.where(places >= n, 2 * (n - 1) - places, places)
        else:
            places = places % n if mode == "wrap" else np.clip(places, 0, n - 1)
        if len(places) != n or (places != np.arange(n)).any():
            result = taken(result, places, axis)
    return result


@meaning("DepthToSpace", "SpaceToDepth")
def _depth_to_space(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    n, c, h, w = x[0].shape
    b = node.get("blocksize")
    channels_first = node.get("mode", "DCR") == "CRD"
    if node.kind == "SpaceToDepth":
        parts = reshaped(x[0], (n, c, h // b, b, w // b, b))
        order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 3, 5, 1, 2, 4)
        return reshaped(transposed(parts, order), (n, c * b * b, h // b, w // b))
    fewer = c // (b * b)
    if channels_first:
        parts = transposed(reshaped(x[0], (n, fewer, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    else:
        parts = transposed(reshaped(x[0], (n, b, b, fewer, h, w)), (0, 3, 4, 1, 5, 2))
    return reshaped(parts, (n, fewer, h * b, w * b))
