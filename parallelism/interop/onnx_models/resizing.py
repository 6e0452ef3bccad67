"""What Resize means.

Dims are resized one after the other: an element of the result is a weighted sum of a few elements along the dim.  The
weights are constants.  Where one element has all the weight, as always for the nearest one, it is only picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isclose
from string import ascii_letters
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.dtypes import is_floating
from parallelism.interop.folding import MOST_CONSTANT, convert, emit, whole
from parallelism.interop.moving_elements import number, taken
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning
from parallelism.interop.onnx_models.shapes import axes_of

_REACH = {"linear": 1, "cubic": 2}
"""How many elements on each side have a weight."""


@dataclass(frozen=True)
class _Resized:
    """How one dim is resized."""

    axis: int
    extent: int
    new_extent: int
    scale: float
    begin: np.float32
    part: np.float32
    """The part of the dim that is cropped: where it begins and how long it is, of 1."""


@meaning("Resize")
def _resize(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, mode = x[0], node.get("mode", "nearest")
    if mode != "nearest" and mode not in _REACH:
        raise node.wrong(f"mode must be nearest, linear or cubic, got {mode!r}")
    if mode == "nearest" and node.get("antialias", 0):
        raise node.unsupported("antialias=1 needs the mode linear or cubic")
    result, outside = a, list[Any]()
    for dim in _resized_dims(reader, node, x):
        places = _checked_places(node, dim)
        indices, weights = _nearest(node, places) if mode == "nearest" else _weighted(node, dim, places, mode)
        result = _along(node, result, dim.axis, np.clip(indices, 0, dim.extent - 1), weights)
        beyond = (places < 0) | (places > dim.extent - 1)
        if _crops(node) and beyond.any():
            outside.append(beyond.reshape(vector_shape(len(a.shape), dim.axis)))
    result = _narrowed(result, a.dtype)
    value = node.get("extrapolation_value", 0.0)
    if a.dtype.kind in "iu":
        value = min(max(round(value), np.iinfo(a.dtype).min), np.iinfo(a.dtype).max)
    for beyond in outside:
        result = ew("where", beyond, number(value, result), result)
    return result


def _along(
    node: GraphNode, x: Any, axis: int, indices: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]
) -> Any:
    """One dim resized: elements are picked where one has all the weight, and summed otherwise."""
    if (np.count_nonzero(weights, axis=1) == 1).all() and (weights.sum(1) == 1).all():
        return taken(x, indices[np.arange(len(indices)), weights.argmax(1)], axis)
    if x.dtype.kind == "b":
        raise node.unsupported("bools have no sums: only the nearest element is supported")
    # Sums are rounded once, at the end, as ONNX's reference does it.
    if not is_floating(x.dtype):
        x = convert(x, np.dtype(np.float64))
    elif x.dtype.itemsize < 4:
        x = convert(x, np.dtype(np.float32))
    return _sums(x, indices, weights, axis)


def _sums(x: Any, indices: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], axis: int) -> Any:
    """The weighted sums of elements along a dim; both arrays have a row for each place of the result."""
    dims = ascii_letters[: len(x.shape)]
    place, term = dims[axis], ascii_letters[len(dims)]
    spread_out = f"{dims[:axis]}{place}{term}{dims[axis + 1 :]}"
    return emit(
        "einsum",
        whole(taken(x, indices, axis)),
        weights.astype(x.dtype),
        equation=f"{spread_out},{place}{term}->{dims}",
    )


def _narrowed(x: Any, dtype: np.dtype[Any]) -> Any:
    """The numbers in a dtype: those of integers are rounded to the nearest one, and brought into its range."""
    if is_floating(dtype) or x.dtype == dtype:
        return convert(x, dtype)
    limits = np.iinfo(dtype)
    x = ew("maximum", ew("rint", x), number(limits.min, x))
    if dtype.itemsize < 8:
        return convert(ew("minimum", x, number(limits.max, x)), dtype)
    # The largest integer of 8 bytes is no float64: it is put in where the float is at least as large.
    below = ew("minimum", x, number(np.nextafter(float(limits.max), 0.0), x))
    return ew(
        "where",
        ew("greater_equal", x, number(limits.max, x)),
        np.asarray(limits.max, dtype),
        convert(below, dtype),
    )


# -- extents -----------------------------------------------------------------------------------------------------------


def _resized_dims(reader: Reader, node: GraphNode, x: list[Any]) -> list[_Resized]:
    """The dims that change, in the order of the node's axes."""
    shape = x[0].shape
    axes = _resized_axes(reader, node, len(shape))
    roi, scales, sizes = _given_sizes(reader, node, x, len(axes))
    if sizes and node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        scales, sizes = _kept_ratio(node, [shape[axis] for axis in axes], sizes)
    found = []
    for i, axis in enumerate(axes):
        begin = np.float32(roi[i] if roi else 0)
        end = np.float32(roi[len(axes) + i] if roi else 1)
        part = end - begin
        n, whole_dim = shape[axis], begin == 0 and part == 1
        if whole_dim and (not sizes or sizes[i] == n) and (not scales or isclose(scales[i], 1)):
            continue
        if not isinstance(n, int) or (sizes and not isinstance(sizes[i], int)):
            raise node.unsupported(f"dim {axis} is resized, so its extent must be a number, got {n}")
        new, scale = _new_extent(node, n, scales[i] if scales else None, sizes[i] if sizes else None)
        found.append(_Resized(axis, n, new, scale, begin, part))
    return found


def _resized_axes(reader: Reader, node: GraphNode, ndim: int) -> list[int]:
    axes = axes_of(reader, node, [])
    if axes is None:
        axes = list(range(ndim))
    if any(not -ndim <= axis < ndim for axis in axes):
        raise node.wrong(f"axes must be from {-ndim} to {ndim - 1}, got {axes}")
    return [axis % ndim for axis in axes]


def _given_sizes(reader: Reader, node: GraphNode, x: list[Any], count: int) -> list[list[Any]]:
    """What is given as the node's roi, scales and sizes for so many dims; a roi only where it is cropped to it."""
    found, crops = [], _crops(node)
    for i, (name, wanted) in enumerate((("roi", 2 * count), ("scales", count), ("sizes", count)), 1):
        given = len(x) > i and x[i] is not None and (name != "roi" or crops)
        found.append(reader.ints(node, x[i], name) if given else [])
        if found[-1] and len(found[-1]) != wanted:
            raise node.wrong(f"{name} must have {wanted} numbers, got {len(found[-1])}")
    roi, scales, sizes = found
    if bool(scales) == bool(sizes):
        raise node.wrong("either scales or sizes must be given")
    if crops and not roi:
        raise node.wrong("tf_crop_and_resize needs roi")
    return found


def _crops(node: GraphNode) -> bool:
    return bool(node.get("coordinate_transformation_mode") == "tf_crop_and_resize")


def _new_extent(node: GraphNode, n: int, scale: float | None, size: int | None) -> tuple[int, float]:
    """The new extent of a dim, and its scale, of one of them or both."""
    if scale is None:
        assert size is not None
        scale = size / n if n else 1.0
    if not 0 < scale < np.inf:
        raise node.wrong(f"a dim of {n} elements cannot be resized by {scale:g}")
    new = floor(n * scale) if size is None else size
    if n < 1 or new < 1:
        raise node.unsupported(f"a dim of {n} elements cannot be resized to {new}: both must be at least 1")
    return new, scale


def _kept_ratio(
    node: GraphNode, extents: Sequence[Any], sizes: Sequence[Any]
) -> tuple[list[float], list[int]]:
    """One scale for all dims, and the sizes that it gives."""
    policy = node.get("keep_aspect_ratio_policy")
    if policy not in ("not_larger", "not_smaller"):
        raise node.wrong(
            f"keep_aspect_ratio_policy must be stretch, not_larger or not_smaller, got {policy!r}"
        )
    if not all(isinstance(n, int) and n > 0 for n in [*extents, *sizes]):
        raise node.unsupported(
            f"{policy} needs extents that are positive numbers, got {list(extents)} and {list(sizes)}"
        )
    scale = (min if policy == "not_larger" else max)(size / n for size, n in zip(sizes, extents, strict=True))
    return [scale] * len(sizes), [int(scale * n + 0.5) for n in extents]


# -- places and weights ------------------------------------------------------------------------------------------------


def _places(node: GraphNode, dim: _Resized) -> np.ndarray[Any, Any]:
    """Where each element of the result lies along the dim.

    The formulas are those of ONNX's reference: it takes the scale times the extent for the length of the result, also
    if that is not whole.
    """
    _check_size(node, dim, 1)
    y, n, scale = np.arange(dim.new_extent, dtype=np.float64), dim.extent, dim.scale
    length = scale * n
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    match mode:
        case "half_pixel":
            return (y + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return np.full_like(y, -0.5) if length == 1 else (y + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return n / 2 * (1 - dim.new_extent / length) + (y + 0.5) / scale - 0.5
        case "asymmetric":
            return y / scale
        case "align_corners":
            return y * 0 if length == 1 else y * (n - 1) / (length - 1)
        case "tf_crop_and_resize":
            middle = np.full_like(y, dim.part * (n - 1) / 2)
            return (middle if length == 1 else y * dim.part * (n - 1) / (length - 1)) + dim.begin * (n - 1)
    raise node.unsupported(f"coordinate_transformation_mode={mode!r} is not supported")


def _checked_places(node: GraphNode, dim: _Resized) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        places = _places(node, dim)
    if not (np.abs(places) < 2**53).all():
        raise node.wrong(
            f"roi and scales must give places near dim {dim.axis}, got {places.min():g} to {places.max():g}"
        )
    return places


def _nearest(
    node: GraphNode, places: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The nearest element, which has all the weight."""
    down = np.floor(places)
    rest = places - down
    match mode := node.get("nearest_mode", "round_prefer_floor"):
        case "round_prefer_floor":
            up = rest > 0.5
        case "round_prefer_ceil":
            up = rest >= 0.5
        case "floor":
            up = rest >= 1
        case "ceil":
            up = rest > 0
        case _:
            raise node.wrong(
                f"nearest_mode must be round_prefer_floor, round_prefer_ceil, floor or ceil, got {mode!r}"
            )
    return (down + up).astype(np.int64)[:, None], np.ones((len(places), 1))


def _weighted(
    node: GraphNode, dim: _Resized, places: np.ndarray[Any, Any], mode: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The elements around each place, which may lie outside, and their weights."""
    narrow = min(dim.scale, 1.0) if node.get("antialias", 0) else 1.0
    first = floor(-_REACH[mode] / narrow) + 1
    _check_size(node, dim, 2 - 2 * first)
    steps = np.arange(first, 2 - first)
    left = np.ceil(places) - 1  # the last element before the place
    distances = np.abs(steps - (places - left)[:, None]) * narrow
    weights = (
        np.clip(1 - distances, 0, 1)
        if mode == "linear"
        else _cubic(distances, node.get("cubic_coeff_a", -0.75))
    )
    if narrow < 1:
        weights = weights / weights.sum(1, keepdims=True)
    indices = left.astype(np.int64)[:, None] + steps
    if node.get("exclude_outside", 0):
        weights = np.where((indices >= 0) & (indices < dim.extent), weights, 0)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return indices, weights


def _cubic(d: np.ndarray[Any, Any], a: float) -> np.ndarray[Any, Any]:
    """The weights at distances, by the kernel of Keys (1981) with the parameter ``a``."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _check_size(node: GraphNode, dim: _Resized, terms: int) -> None:
    """Raises for more weights than a constant may have, before they are made."""
    if dim.new_extent * terms > MOST_CONSTANT:
        raise node.unsupported(
            f"{terms} terms for each of {dim.new_extent} places along dim {dim.axis} are too many: "
            f"at most {MOST_CONSTANT} in all are supported"
        )
