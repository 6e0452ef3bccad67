"""What products and reductions mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import reduced_shape
from parallelism.dtypes import is_floating
from parallelism.interop.complex_numbers import Pair, from_half, half_transformed, pair, transformed
from parallelism.interop.folding import Spread, convert, emit, known, spread, traced, whole
from parallelism.interop.moving_elements import (
    concatenated,
    flipped,
    iota,
    number,
    padded,
    part,
    reshaped,
    rounded_once,
    sorted_places,
    transposed,
)
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.interop.onnx_models.shapes import axes_of, axis_of
from parallelism.interop.windows import grid

# -- products ----------------------------------------------------------------------------------------------------------


def matmul(a: Any, b: Any) -> Any:
    """The product as ``numpy.matmul`` defines it."""
    left, right = (len(x.shape) for x in (a, b))
    a = reshaped(a, (1, *a.shape)) if left == 1 else a
    b = reshaped(b, (*b.shape, 1)) if right == 1 else b
    if 0 in a.shape or 0 in b.shape:
        raise ValueError("a product of arrays without elements is not supported")
    result = emit("matmul", whole(a), whole(b))
    *batch, rows, columns = result.shape
    return reshaped(result, [*batch, *([] if left == 1 else [rows]), *([] if right == 1 else [columns])])


@meaning("MatMul")
def _matmul(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return matmul(*x)


@meaning("Gemm")
def _gemm(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    left = "ki" if node.get("transA", 0) else "ik"
    right = "jk" if node.get("transB", 0) else "kj"
    result = emit("einsum", whole(x[0]), whole(x[1]), equation=f"{left},{right}->ij")
    if node.get("alpha", 1.0) != 1:
        result = ew("multiply", result, number(node.get("alpha"), result))
    _, _, added = with_optional(x, 3)
    if added is None:
        return result
    beta = node.get("beta", 1.0)
    if beta != 1:
        added = ew("multiply", added, number(beta, added))
    return ew("add", result, added)


@meaning("Einsum")
def _einsum(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    equation = node.get("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    spare = [c for c in ascii_lowercase + ascii_lowercase.upper() if c not in equation]
    own = [len(v.shape) - len(t.replace("...", "")) for t, v in zip(terms, x, strict=True)]
    most = max(own)
    dots = "".join(spare[:most])
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        out = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    named = [t.replace("...", dots[most - count :]) for t, count in zip(terms, own, strict=True)]
    if any(len({*term}) < len(term) for term in named):  # diagonals
        given = [traced(each) for each in x]
        return np.einsum(f"{','.join(named)}->{out.replace('...', dots)}", *given)
    return emit("einsum", *map(whole, x), equation=f"{','.join(named)}->{out.replace('...', dots)}")


@meaning("Det")
def _det(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return np.linalg.det(traced(x[0]))


@meaning("MatMulInteger")
def _matmul_integer(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    sides = []
    for i in (0, 1):
        side = convert(x[i], np.dtype(np.int32))
        if len(x) > i + 2 and x[i + 2] is not None:
            zero = convert(x[i + 2], np.dtype(np.int32))
            if i == 0 and len(zero.shape) == 1 and zero.shape[0] != 1:
                zero = reshaped(zero, (zero.shape[0], 1))
            side = ew("subtract", side, zero)
        sides.append(side)
    return matmul(*sides)


# -- reductions --------------------------------------------------------------------------------------------------------


class _Reduction(NamedTuple):
    """How elements are combined, what is done to each before, and what to the result and the number of elements."""

    kind: str = "sum"
    before: Callable[[Any], Any] = lambda a: a
    after: Callable[[Any, Any], Any] = lambda result, count: result


def _square(a: Any) -> Any:
    return ew("multiply", a, a)


def _mean(total: Any, count: Any) -> Any:
    return ew("divide" if is_floating(total.dtype) else "floor_divide", total, number(count, total))


def _root(total: Any, count: Any) -> Any:
    """The square root, whose gradient is zero at zero, as that of a norm is in PyTorch."""
    if known(total) is not None:
        return ew("sqrt", total)
    is_zero = ew("equal", total, number(0, total))
    return ew("where", is_zero, total, ew("sqrt", ew("where", is_zero, number(1, total), total)))


_OF_NUMBERS = {
    "ReduceSum": _Reduction(),
    "ReduceMean": _Reduction(after=_mean),
    "ReduceMax": _Reduction("max"),
    "ReduceMin": _Reduction("min"),
    "ReduceProd": _Reduction("prod"),
}
"""Those that give a number alone as it is."""
_REDUCTIONS = _OF_NUMBERS | {
    "ReduceL1": _Reduction(before=lambda a: ew("absolute", a)),
    "ReduceL2": _Reduction(before=_square, after=_root),
    "ReduceLogSum": _Reduction(after=lambda total, count: ew("log", total)),
    "ReduceSumSquare": _Reduction(before=_square),
}


def _reduced(reader: Reader, node: GraphNode, x: list[Any]) -> tuple[tuple[int, ...], bool]:
    """The dims of a reduction, and whether they are kept, with extent 1."""
    ndim, axes = len(x[0].shape), axes_of(reader, node, x)
    if not axes:
        axes = [] if node.get("noop_with_empty_axes", 0) else list(range(ndim))
    return tuple(sorted({axis % ndim for axis in axes})), bool(node.get("keepdims", 1))


@meaning(*_REDUCTIONS)
def _reduce(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    (along, kept), reduction = _reduced(reader, node, x), _REDUCTIONS[node.kind]
    if not along and node.get("noop_with_empty_axes", 0) and node.kind in _OF_NUMBERS:
        return x[0]
    if x[0].dtype == object and node.kind in ("ReduceProd", "ReduceSum"):
        combine: Any = np.multiply if node.kind == "ReduceProd" else np.add
        return np.asarray(combine.reduce(known(x[0]), axis=along, keepdims=kept), object)
    a, kind = reduction.before(x[0]), reduction.kind
    extents = [a.shape[dim] for dim in along]
    if kind in ("max", "min") and 0 in extents:
        return _of_no_elements(a, kind, along, kept)
    if a.dtype.kind == "b":
        kind = {"max": "any", "min": "all"}[kind]
    result = convert(emit(kind, whole(a), axes=along, keepdims=kept), a.dtype)
    return reduction.after(result, prod(extents))


@meaning("ReduceLogSumExp")
def _log_sum_exp(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    (along, kept), a = _reduced(reader, node, x), x[0]
    if any(a.shape[dim] == 0 for dim in along):
        return ew("log", emit("sum", whole(a), axes=along, keepdims=kept))
    largest = emit("max", whole(a), axes=along, keepdims=True)
    terms = ew("exp", ew("subtract", a, largest))
    total = emit("sum", whole(terms), axes=along, keepdims=True)
    result = ew("add", ew("log", total), largest)
    return result if kept else reshaped(result, reduced_shape(a.shape, along, keepdims=False))


def _of_no_elements(a: Any, kind: str, along: Sequence[int], kept: bool) -> Any:
    """The maximum or the minimum of no elements: the least, or the largest, that there is."""
    worst: Any = np.inf if kind == "min" else -np.inf
    if a.dtype.kind == "b":
        worst = False
    elif not is_floating(a.dtype):
        limits = np.iinfo(a.dtype)
        worst = limits.max if kind == "min" else limits.min
    shape = reduced_shape(a.shape, along, keepdims=kept)
    return spread(np.asarray(worst, a.dtype).reshape((1,) * len(shape)), shape)


@meaning("ArgMax", "ArgMin")
def _argument(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = axis_of(node, len(x[0].shape))
    kind = node.kind.lower()
    a = whole(x[0])
    if node.get("select_last_index", 0):
        place = ew("subtract", np.asarray(a.shape[axis] - 1), emit(kind, whole(flipped(a, axis)), axis=axis))
    else:
        place = emit(kind, a, axis=axis)
    reader.chosen_rows.note_choice(place, 1, a.shape[axis])
    kept = (*a.shape[:axis], 1, *a.shape[axis + 1 :])
    return reshaped(place, kept) if node.get("keepdims", 1) else place


@meaning("CumSum", "CumProd")
def _cumsum(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = int(reader.ints(node, x[1], "the axis")[0]) % len(x[0].shape)
    a = flipped(x[0], axis) if node.get("reverse", 0) else x[0]
    n, ndim = a.shape[axis], len(a.shape)
    is_sum = node.kind == "CumSum"

    def one_dim(pads: int) -> list[int]:
        return [pads if d == axis else 0 for d in range(ndim)]

    if node.get("exclusive", 0):
        neutral = number(0 if is_sum else 1, a)
        a = padded(a, neutral, one_dim(1), one_dim(-1), [0] * ndim)
    if is_sum:
        own = a.array if isinstance(a, Spread) and a.array.shape[axis] == n else whole(a)
        a = spread(convert(emit("cumsum", own, axis=axis), a.dtype), a.shape)
    else:
        # The product of the n elements up to each one: before the first there are ones.
        wide = padded(a, number(1, a), one_dim(n - 1), [0] * ndim, [0] * ndim)
        windows = grid(wide, [axis], [n], [1], [1])
        a = convert(emit("prod", whole(windows), axes=(ndim,), keepdims=False), a.dtype)
    return flipped(a, axis) if node.get("reverse", 0) else a


# -- Fourier transforms ------------------------------------------------------------------------------------------------


@meaning("DFT")
def _fourier(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The transform along a dim; the last dim of arrays has the real and the imaginary part, or the real one alone."""
    a, length, of_dim = with_optional(x, 3)
    ndim, is_half, is_inverse = len(a.shape), node.get("onesided", 0), node.get("inverse", 0)
    default = 1 if reader.opsets[""] < 20 else -2
    axis = node.get("axis", default) if of_dim is None else int(reader.ints(node, of_dim, "the axis")[0])
    axis %= ndim
    if length is None:
        n = _number_of_elements(a, axis)
        n = 2 * (n - 1) if is_half and is_inverse else n
    else:
        n = int(reader.ints(node, length, "the length of the transform")[0])
    elements = n // 2 + 1 if is_half and is_inverse else n
    parts = _parts(_of_length(a, axis, elements))
    if is_half and is_inverse:
        return reshaped(from_half(parts, axis, n), (*a.shape[:axis], n, *a.shape[axis + 1 : -1], 1))
    return _as_one(_along(parts, axis, n, is_half=is_half, is_inverse=is_inverse))


@meaning("STFT")
def _fourier_of_frames(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The transforms of frames of a signal, each times a window."""
    signal, step, window, length = with_optional(x, 4)
    stride = int(reader.ints(node, step, "the step from frame to frame")[0])
    if window is not None:
        n = _number_of_elements(window, 0)
    elif length is not None:
        n = int(reader.ints(node, length, "the length of frames")[0])
    else:
        n = _number_of_elements(signal, 1)
    frames = grid(signal, [1], [n], [stride], [1])
    last = len(frames.shape) - 1
    frames = transposed(frames, [*range(last - 1), last, last - 1])
    if window is not None:
        frames = ew("multiply", frames, reshaped(window, (n, 1)))
    return _as_one(_along(_parts(frames), 2, n, is_half=node.get("onesided", 1), is_inverse=0))


def _along(parts: Any, axis: int, n: int, *, is_half: int, is_inverse: int) -> Pair:
    if not is_half:
        return transformed(pair(parts), [axis], [n], sign=1 if is_inverse else -1)
    if isinstance(parts, Pair):
        raise ValueError(
            "a transform with onesided=1 takes real numbers, these have a real and an imaginary part"
        )
    return half_transformed(parts, axis, n)


def _number_of_elements(x: Any, axis: int) -> int:
    """The extent of a dim along which there is a transform."""
    n = x.shape[axis]
    if not isinstance(n, int):
        raise ValueError(f"a transform along a dim of {n} elements needs a number: sizes={{...}} gives it")
    return n


def _of_length(x: Any, axis: int, n: int) -> Any:
    """The first ``n`` elements along a dim; zeros behind them where there are fewer."""
    more = n - _number_of_elements(x, axis)
    high = [more if d == axis else 0 for d in range(len(x.shape))]
    return padded(x, number(0, x), [0] * len(high), high, [0] * len(high)) if more else x


def _parts(x: Any) -> Any:
    """The real and the imaginary part, which the last dim has; the real part alone if that has one element."""
    parts = [reshaped(part(x, len(x.shape) - 1, k, k + 1), x.shape[:-1]) for k in range(x.shape[-1])]
    return Pair(*parts) if len(parts) == 2 else parts[0]


def _as_one(x: Pair) -> Any:
    """An array whose last dim has the real and the imaginary part."""
    return concatenated([reshaped(of, (*of.shape, 1)) for of in (x.real, x.imag)], len(x.real.shape))


@meaning("TopK")
def _top_k(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    k = int(reader.ints(node, x[1], "k")[0])
    axis = axis_of(node, len(x[0].shape), -1)
    a = whole(x[0])
    order = sorted_places(a, axis, descending=bool(node.get("largest", 1)))
    places = whole(part(order, axis, 0, k))
    reader.chosen_rows.note_choice(places, k, a.shape[axis])
    return [emit("take_along", a, places, axis=axis), places]


@meaning("NonZero")
def _nonzero(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """The places of the elements that are not zero, row after row: as many as the caller said that there are.

    If nothing is said, they stand for rows that are dealt (`parallelism.interop.expert_rows.chosen_rows`).
    """
    numbers = known(x[0])
    if numbers is not None and numbers.ndim and numbers.dtype != object:
        return np.stack(np.nonzero(numbers)).astype(np.int64)
    refused = partial(reader.uncounted, node, 0, "how many elements are not zero")
    if node.outputs[0] in reader.model.sizes:
        return _counted_places(whole(x[0]), reader.model.sizes[node.outputs[0]])
    found = reader.chosen_rows.places(x[0], refused)
    if found is None:
        raise refused()
    return found


def _counted_places(a: Any, count: int) -> Any:
    """The places of so many elements that are not zero, row after row; zeros behind them if there are fewer."""
    extents = a.shape
    flat = reshaped(a, (prod(extents),))
    is_zero = convert(ew("equal", flat, np.zeros((), a.dtype)), np.dtype(np.int64))
    places = part(
        emit("argsort", is_zero, axis=0), 0, 0, count
    )  # a stable order: those that are not zero come first
    rows = []
    for dim, extent in enumerate(extents):
        stride = np.asarray(prod(extents[dim + 1 :]), np.int64)
        row = ew("remainder", ew("floor_divide", whole(places), stride), np.asarray(extent, np.int64))
        rows.append(reshaped(row, (1, count)))
    return emit("concatenate", *map(whole, rows), axis=0)


@meaning("Softmax", "LogSoftmax")
@rounded_once
def _softmax(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = axis_of(node, len(x[0].shape), -1)
    return emit("softmax" if node.kind == "Softmax" else "log_softmax", whole(x[0]), axis=axis)


@meaning("Hardmax")
def _hardmax(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, ndim = whole(x[0]), len(x[0].shape)
    axis = axis_of(node, ndim, -1)
    place = reshaped(emit("argmax", a, axis=axis), (*a.shape[:axis], 1, *a.shape[axis + 1 :]))
    return convert(ew("equal", place, iota(a.shape[axis], np.dtype(np.int64), ndim, axis)), a.dtype)
