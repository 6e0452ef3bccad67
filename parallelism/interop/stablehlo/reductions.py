"""What reductions and sorts mean, with any reducer and any comparator.

A reducer of one op that the IR has, as ``add``, is a reduction of the IR.  Any other is run on arrays in place of
single numbers: an array and its other half, again and again, in the order of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import numpy as np

from parallelism.dtypes import integer_limits, is_floating
from parallelism.interop.folding import convert, elementwise as ew, emit, same_everywhere, spread, whole
from parallelism.interop.moving_elements import (
    broadcast_dims,
    concatenated,
    flipped,
    iota,
    number,
    reshaped,
    sliced,
    transposed,
)
from parallelism.interop.stablehlo.elementwise import total_order
from parallelism.interop.stablehlo.module import Block, Node
from parallelism.interop.stablehlo.reading import RETURNS, Reader, meaning
from parallelism.interop.stablehlo.shapes import numbers

_REDUCERS = {
    "stablehlo.add": "sum",
    "stablehlo.multiply": "prod",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "min",
    "stablehlo.or": "max",
}
MOST_COMPARED = 4096
"""The largest extent of a dim that is sorted by an unusual comparator, for which each pair is compared."""


def reducer(block: Block, dtype: np.dtype[Any]) -> str | None:
    """The name of a reducer of one op on both arguments: sum, prod, max or min; None for any other.

    Of bools, *and* is the smallest and *or* the largest.  JAX may say of the result where it lies, which is left out.
    """
    nodes = [node for node in block.nodes if node.kind != "sdy.sharding_constraint"]
    if len(nodes) != 2 or nodes[1].kind not in RETURNS or len(block.arguments) != 2:
        return None
    node, returned = nodes
    passed_on = {n for each in block.nodes if each not in nodes for n in each.results} | {*node.results}
    if not passed_on.issuperset(returned.operands) or sorted(node.operands) != sorted(block.arguments):
        return None
    name = _REDUCERS.get(node.kind)
    if node.kind in ("stablehlo.and", "stablehlo.or") and dtype.kind != "b":
        return None
    if dtype.kind == "b":
        return {"sum": "max", "prod": "min"}.get(name or "", name)
    return name


_NAMES = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_BINARY = {name: kind for kind, name in _NAMES.items()}


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """The number that a reduction starts from."""
    if op in ("sum", "prod"):
        return op == "prod"
    if dtype.kind == "b":
        return op == "min"
    if is_floating(dtype):
        return inf if op == "min" else -inf
    least, most = integer_limits(dtype)
    return most if op == "min" else least


def reduce_plain(x: Any, axes: Sequence[int], op: str) -> Any:
    """A reduction of the IR, in the dtype of ``x``."""
    kind = {"max": "any", "min": "all"}[op] if x.dtype == bool else op
    return convert(emit(kind, whole(x), axes=tuple(axes), keepdims=False), x.dtype)


def reduced_from(start: Any, x: Any, axes: Sequence[int], op: str) -> Any:
    """A reduction of the IR that begins with a number; one that changes nothing is left out."""
    result = reduce_plain(x, axes, op)
    value = same_everywhere(start)
    changes_nothing = value is not None and bool(value == identity(op, x.dtype))
    return result if changes_nothing else combined(op, start, result)


def combined(op: str, a: Any, b: Any) -> Any:
    """Two arrays combined by a reduction."""
    if a.dtype == bool:
        return ew({"max": "logical_or", "min": "logical_and"}[op], a, b)
    return ew(_BINARY[op], a, b)


@meaning("stablehlo.reduce")
def _reduce(reader: Reader, node: Node, operands: list[Any]) -> Any:
    arrays = operands[: len(operands) // 2]
    starts = operands[len(operands) // 2 :]
    axes = sorted(numbers(node, "dimensions"))
    if (
        len(arrays) == 2
        and len(axes) == 1
        and (found := _argument(reader, node, arrays, axes[0])) is not None
    ):
        return found
    return reduced(reader, node.body, arrays, starts, axes)


def reduced(
    reader: Reader, body: Block, arrays: Sequence[Any], starts: Sequence[Any], axes: Sequence[int]
) -> list[Any]:
    """Arrays reduced together along dims, by the block ``body``, from the numbers ``starts``."""
    shape = tuple(n for d, n in enumerate(arrays[0].shape) if d not in axes)
    if any(arrays[0].shape[axis] == 0 for axis in axes):
        return [broadcast_dims(start, shape, ()) for start in starts]
    if len(arrays) == 1 and (op := reducer(body, arrays[0].dtype)) is not None:
        return [reduced_from(starts[0], arrays[0], axes, op)]
    order = [*axes, *(d for d in range(arrays[0].ndim) if d not in axes)]
    count = prod(arrays[0].shape[axis] for axis in axes)
    parts = [reshaped(transposed(x, order), (count, *shape)) for x in arrays]
    results = [reshaped(x, shape) for x in tree(reader, body, parts)]
    return reader.applied(body, [*(spread_like(start, shape) for start in starts), *results])


def spread_like(x: Any, shape: Sequence[Any]) -> Any:
    """An array of no dims, broadcast to a shape."""
    return broadcast_dims(x, shape, ())


def tree(reader: Reader, body: Block, parts: list[Any]) -> list[Any]:
    """Arrays reduced along dim 0: neighbours are combined, then their results, and so on.  The dim stays, with 1."""
    while (n := parts[0].shape[0]) > 1:
        first = [_every_second(x, 0, n - n % 2) for x in parts]
        second = [_every_second(x, 1, n - n % 2) for x in parts]
        last = [_rows(x, n - 1, n) for x in parts] if n % 2 else []
        parts = reader.applied(body, [*first, *second])
        if last:
            parts = [concatenated([x, end], 0) for x, end in zip(parts, last, strict=True)]
    return parts


def _every_second(x: Any, start: int, end: int) -> Any:
    return sliced(x, [start] + [0] * (x.ndim - 1), [end, *x.shape[1:]], [2] + [1] * (x.ndim - 1))


def _rows(x: Any, start: int, end: int) -> Any:
    return sliced(x, [start] + [0] * (x.ndim - 1), [end, *x.shape[1:]], [1] * x.ndim)


_ARGUMENT = ["compare", "compare", "or", "compare", "compare", "and", "or", "select", "select"]


def _argument(reader: Reader, node: Node, arrays: list[Any], axis: int) -> list[Any] | None:
    """The largest or smallest number and its place, if the reducer is the one that JAX writes for ``argmax``."""
    nodes = node.body.nodes[:-1]
    origin = reader.producer(node, 1)
    if (
        [inner.kind.split(".")[-1] for inner in nodes] != _ARGUMENT
        or origin is None
        or origin.kind != "stablehlo.iota"
        or origin.attributes["iota_dimension"] != axis
        or not arrays[0].shape[axis]
    ):
        return None
    words = [inner.word("comparison_direction") for inner in nodes if "compare" in inner.kind]
    a, i, b, j = (node.body.arguments[k] for k in (0, 1, 2, 3))
    first, *others = words
    if others != ["NE", "EQ", "LT"] or nodes[0].operands != (a, b) or nodes[4].operands != (i, j):
        return None
    if first not in ("GT", "LT"):
        return None
    largest = first == "GT"
    x = whole(arrays[0])
    place = emit("argmax" if largest else "argmin", x, axis=axis)
    return [
        emit("max" if largest else "min", x, axes=(axis,), keepdims=False),
        convert(place, arrays[1].dtype),
    ]


# -- sorting -----------------------------------------------------------------------------------------------------------


@meaning("stablehlo.sort")
def _sort(reader: Reader, node: Node, arrays: list[Any]) -> Any:
    axis = node.attributes.get("dimension", -1) % arrays[0].ndim
    block = node.body
    arrays = [whole(x) for x in arrays]
    extent = arrays[0].shape[axis]
    if len(block.nodes) < 2 or (isinstance(extent, int) and extent <= 1):
        return arrays
    compare = block.nodes[-2]
    direction = _simple(block)
    if direction is None:
        order = _order(reader, node, arrays, axis)
        return [emit("take_along", x, order, axis=axis) for x in arrays]
    keys = arrays[0]
    if is_floating(keys.dtype) and "TOTALORDER" in str(compare.attributes.get("compare_type")):
        zero, nan = number(0, keys), number(np.nan, keys)
        keys = (
            ew("where", ew("equal", keys, zero), zero, ew("where", ew("isnan", keys), nan, keys))
            if len(block.nodes) > 2
            else keys
        )
        keys = whole(total_order(keys))
    order = _stable(keys, axis, down=direction == "GT")
    return [emit("take_along", x, order, axis=axis) for x in arrays]


def _stable(keys: Any, axis: int, *, down: bool) -> Any:
    """The places of the elements in order, equal ones in their own order."""
    if not down:
        return emit("argsort", keys, axis=axis)
    # Backwards, equal elements are in the opposite order; the argsort of the flipped keys undoes that.
    last = np.asarray(keys.shape[axis] - 1)
    return flipped(ew("subtract", last, emit("argsort", flipped(keys, axis), axis=axis)), axis)


def _simple(block: Block) -> str | None:
    """LT or GT if the block compares the first array's two elements, perhaps with zeros and nans made alike."""
    compare, returned = block.nodes[-2:]
    if compare.kind != "stablehlo.compare" or returned.operands != compare.results:
        return None
    allowed = {"stablehlo.constant", "stablehlo.compare", "stablehlo.select"}
    if any(node.kind not in allowed for node in block.nodes[:-1]):
        return None
    sources = {result: node for node in block.nodes for result in node.results}

    def root(value: int) -> int:
        """The argument that a chain of selects ends in."""
        while value in sources and sources[value].kind == "stablehlo.select":
            value = sources[value].operands[2]
        return value

    roots = [root(value) for value in compare.operands]
    word = compare.word("comparison_direction")
    if roots == [block.arguments[0], block.arguments[1]]:
        return word if word in ("LT", "GT") else None
    if roots == [block.arguments[1], block.arguments[0]]:
        return {"LT": "GT", "GT": "LT"}.get(word)
    return None


def _order(reader: Reader, node: Node, arrays: list[Any], axis: int) -> Any:
    """The places of the elements in order, by comparing each pair: an element's place is the number of those before it.

    Of two that are not in order either way, the first comes first.
    """
    n = arrays[0].shape[axis]
    if n > MOST_COMPARED:
        raise node.unsupported(
            f"a comparator of several comparisons sorts at most {MOST_COMPARED} elements, got {n}"
        )
    order = [*(d for d in range(arrays[0].ndim) if d != axis), axis]
    lines = [transposed(x, order) for x in arrays]
    shape = (*lines[0].shape, n)
    pairs = []
    for x in lines:
        wide = emit("reshape", x, shape=(*x.shape, 1))
        pairs += [spread(emit("reshape", x, shape=(*x.shape[:-1], 1, n)), shape), spread(wide, shape)]
    before = whole(
        reader.applied(node.body, pairs)[0]
    )  # at [..., i, j]: whether element j comes before element i
    after = emit("transpose", before, permutation=(*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
    places = iota(n)
    earlier = ew("less", spread(reshaped(places, (1, n)), (n, n)), spread(reshaped(places, (n, 1)), (n, n)))
    tied = ew(
        "logical_and",
        ew("logical_not", ew("logical_or", before, after)),
        spread(reshaped(earlier, (1,) * (len(shape) - 2) + (n, n)), shape),
    )
    rank = emit(
        "sum",
        convert(whole(ew("logical_or", before, tied)), np.dtype(np.int64)),
        axes=(len(shape) - 1,),
        keepdims=False,
    )
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return transposed(emit("argsort", rank, axis=rank.ndim - 1), inverse)


@meaning("chlo.top_k")
def _top_k(reader: Reader, node: Node, x: list[Any]) -> Any:
    array, k = whole(x[0]), node.attributes["k"]
    axis = array.ndim - 1
    keys = whole(total_order(array)) if is_floating(array.dtype) else array
    order = _stable(keys, axis, down=True)
    first = sliced(order, [0] * array.ndim, [*array.shape[:-1], k], [1] * array.ndim)
    return [emit("take_along", array, first, axis=axis), convert(first, node.type(1).dtype)]
