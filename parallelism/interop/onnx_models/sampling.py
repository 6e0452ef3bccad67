"""What operators mean that pick by computed places: GridSample, and NonMaxSuppression with a given count."""

from __future__ import annotations

from itertools import product as combinations
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.folding import traced
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning
from parallelism.ir.tracing import apply

# -- GridSample --------------------------------------------------------------------------------------------------------


@meaning("GridSample")
def _grid_sample(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Elements at places from -1 to 1 along each dim after the second; the last dim of the grid has the places, the
    innermost dim first.  Between elements it interpolates, dim by dim."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(
        node.get("mode", "linear"), node.get("mode", "linear")
    )
    if mode not in ("linear", "nearest", "cubic") or node.get("padding_mode", "zeros") not in _PADDINGS:
        raise node.wrong(
            "the mode must be linear, nearest or cubic, and padding_mode zeros, border or reflection"
        )
    a, grid = traced(x[0]), traced(x[1])
    extents: Any = a.shape[2:]
    if not all(isinstance(n, int) for n in (*a.shape, *grid.shape)):
        raise node.unsupported("the extents must be numbers: give them as sizes=")
    taps = [_taps(node, mode, grid[..., len(extents) - 1 - d], n) for d, n in enumerate(extents)]
    table = a.reshape((*a.shape[:2], prod(extents)))
    total: Any = None
    for chosen in combinations(*taps):
        term = _weighted(table, chosen, extents)
        total = term if total is None else total + term
    return total.reshape((*a.shape[:2], *grid.shape[1:-1])).astype(a.dtype)


def _taps(node: GraphNode, mode: str, grid: Any, n: int) -> list[tuple[Any, Any, Any]]:
    """Along one dim, for each element that has a weight: its place, its weight, and where it is inside the array."""
    low, high = (0.0, n - 1.0) if node.get("align_corners", 0) else (-0.5, n - 0.5)
    padding = node.get("padding_mode", "zeros")
    place = (grid + 1) * ((high - low) / 2) + low
    if mode == "nearest":
        place = np.rint(place)
    if padding != "zeros":
        outside = np.logical_or(place < low, place > high)
        place = np.where(outside, _PADDINGS[padding](place, low, high, n), place)
    first = np.floor(place)
    rest = place - first
    found = []
    for step, weight in _WEIGHTS[mode](rest):
        at = first + float(step)
        inside = np.logical_and(at >= 0, at <= n - 1)
        moved = at if padding == "zeros" else np.where(inside, at, _PADDINGS[padding](at, low, high, n))
        found.append((np.clip(moved, 0, n - 1), weight, inside if padding == "zeros" else None))
    return found


def _reflected(place: Any, low: float, high: float, n: int) -> Any:
    if high == low:
        return np.zeros_like(place)
    away = np.mod(place - low, 2 * (high - low))
    return low + np.where(away > high - low, 2 * (high - low) - away, away)


_PADDINGS: dict[str, Any] = {
    "zeros": None,
    "border": lambda place, low, high, n: np.clip(place, 0, n - 1),
    "reflection": _reflected,
}


def _cubic(rest: Any) -> list[tuple[int, Any]]:
    """The weights of four elements by Keys, with a = -0.75, as ONNX has them."""
    a = -0.75
    before, after = rest + 1, 1 - rest
    return [
        (-1, ((a * before - 5 * a) * before + 8 * a) * before - 4 * a),
        (0, ((a + 2) * rest - (a + 3)) * rest * rest + 1),
        (1, ((a + 2) * after - (a + 3)) * after * after + 1),
        (2, ((a * (after + 1) - 5 * a) * (after + 1) + 8 * a) * (after + 1) - 4 * a),
    ]


_WEIGHTS: dict[str, Any] = {
    "nearest": lambda rest: [(0, None)],
    "linear": lambda rest: [(0, 1 - rest), (1, rest)],
    "cubic": _cubic,
}


def _weighted(table: Any, chosen: tuple[tuple[Any, Any, Any], ...], extents: Any) -> Any:
    """The elements at these places along all dims, times their weights.  ``table`` has these dims as its last one."""
    places: Any = None
    weight: Any = None
    for (at, share, inside), n in zip(chosen, extents, strict=True):
        index = at.astype(np.int64)
        places = index if places is None else places * n + index
        for factor in (share, None if inside is None else inside.astype(table.dtype)):
            if factor is not None:
                weight = factor if weight is None else weight * factor
    flat = places.reshape((places.shape[0], 1, prod(places.shape[1:])))
    picked = apply("take_along", table, np.broadcast_to(flat, (*table.shape[:2], flat.shape[2])), axis=2)
    return picked if weight is None else picked * weight.reshape(flat.shape)


# -- NonMaxSuppression -------------------------------------------------------------------------------------------------


@meaning("NonMaxSuppression")
def _non_max_suppression(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The boxes that stay, as many as the caller said: rows of batch, class and box; -1 in rows that are left over.

    For each batch and class the box of the highest score stays, and those that overlap it too much go; then the next.
    """
    boxes: Any = traced(x[0])
    scores: Any = traced(x[1])
    if not all(isinstance(n, int) for n in scores.shape):
        raise node.unsupported("the extents must be numbers: give them as sizes=")
    most, overlap, least = (_setting(reader, node, x, i) for i in (2, 3, 4))
    count = reader.count(node, 0, "how many boxes stay")
    most = min(int(most or 0), scores.shape[2])
    if not most or not count:
        return np.full((count, 3), -1, np.int64)
    edges = _edges(boxes, node.get("center_point_box", 0))
    chosen, stays = _picked_boxes(edges, scores, most, float(overlap or 0), least)
    return _rows(chosen, stays, count)


def _setting(reader: Reader, node: GraphNode, x: list[Any], at: int) -> Any:
    """The number of an input; None if it is left out."""
    if len(x) <= at or x[at] is None:
        return None
    return reader.numbers(node, x[at], ("the most boxes", "the overlap", "the least score")[at - 2]).reshape(
        -1
    )[0]


def _edges(boxes: Any, centred: int) -> tuple[Any, Any, Any, Any]:
    """The least and the largest places of boxes along both dims, each of shape (batch, 1, boxes)."""
    a, b, c, d = (boxes[..., i][:, None, :] for i in range(4))
    if centred:
        return a - c / 2, b - d / 2, a + c / 2, b + d / 2
    return np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)


def _picked_boxes(edges: Any, scores: Any, most: int, overlap: float, least: Any) -> tuple[Any, Any]:
    """The numbers of the boxes that stay, in the order of their scores, and whether there is one."""
    none = -np.inf
    left = scores if least is None else np.where(scores > float(least), scores, none)
    low_y, low_x, high_y, high_x = edges
    area = (high_y - low_y) * (high_x - low_x)
    numbers = np.arange(scores.shape[2])
    chosen, stays = [], []
    for _ in range(most):
        best = np.argmax(left, axis=-1, keepdims=True)
        found = np.take_along_axis(left, best, axis=-1) > none
        chosen.append(best)
        stays.append(found)
        y0, x0, y1, x1, own = (_of_best(each, best) for each in (low_y, low_x, high_y, high_x, area))
        height = np.maximum(np.minimum(high_y, y1) - np.maximum(low_y, y0), 0)
        width = np.maximum(np.minimum(high_x, x1) - np.maximum(low_x, x0), 0)
        shared = height * width
        goes = np.logical_or(shared > overlap * (area + own - shared), numbers == best)
        left = np.where(goes, none, left)
    return np.concatenate(chosen, axis=-1), np.concatenate(stays, axis=-1)


def _of_best(each: Any, best: Any) -> Any:
    """What the best box of each class has of an array of shape (batch, 1, boxes)."""
    batch, classes, _ = best.shape
    return np.take_along_axis(np.broadcast_to(each, (batch, classes, each.shape[-1])), best, axis=-1)


def _rows(chosen: Any, stays: Any, count: int) -> Any:
    batch, classes, most = chosen.shape
    numbers = [np.broadcast_to(np.arange(batch)[:, None, None], chosen.shape)]
    numbers += [np.broadcast_to(np.arange(classes)[None, :, None], chosen.shape), chosen]
    rows = np.stack([np.reshape(each, (batch * classes * most,)) for each in numbers], axis=1)
    is_kept = stays.reshape((batch * classes * most,))
    order = np.argsort(
        np.logical_not(is_kept).astype(np.int64)
    )  # stable: those that stay come first, in order
    kept = np.take(np.where(is_kept[:, None], rows, -1), order, axis=0)
    total = batch * classes * most
    return kept[:count] if count <= total else np.pad(kept, ((0, count - total), (0, 0)), constant_values=-1)
