"""What ops mean that move elements, and that create arrays."""

from __future__ import annotations

import re
from string import ascii_letters
from typing import Any

import numpy as np

from parallelism.dtypes import bits_of, integer_of
from parallelism.interop.folding import convert, elementwise as ew, emit, known, spread, whole
from parallelism.interop.moving_elements import (
    broadcast_dims,
    clipped,
    concatenated,
    flipped,
    iota,
    padded,
    part,
    reshaped,
    sliced,
    taken,
    to_index,
    transposed,
    window_at,
)
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.ir.core import Expression


def numbers(node: Node, name: str) -> tuple[Any, ...]:
    """An attribute that is a list of integers."""
    value = node.attributes[name]
    return tuple(n if isinstance(n, Expression) else int(n) for n in np.asarray(value).reshape(-1))


def fields(text: str) -> dict[str, Any]:
    """The fields of an attribute such as ``#stablehlo.gather<offset_dims = [1], index_vector_dim = 1>``."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+) = (\[[^\]]*\]|-?\w+)", text):
        found[name] = tuple(map(int, re.findall(r"-?\d+", value))) if value[0] == "[" else int(value)
    return found


@meaning("stablehlo.reshape")
def _reshape(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reshaped(x[0], node.type().shape)


@meaning("mhlo.bitcast")
def _bitcast(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The same memory, read in another shape, order of dims, or dtype.  Layouts list dims, the innermost first."""
    before, after = (
        np.reshape(node.attributes.get(name, ()), -1)[::-1].tolist() or list(range(ndim))
        for name, ndim in (("source_layout", x[0].ndim), ("result_layout", node.type().ndim))
    )
    shape = node.type().shape
    if not shape:  # in a comparator or reducer, arrays stand for single numbers
        return _bits(x[0], node.type().dtype)
    flat = reshaped(transposed(_bits(x[0], node.type().dtype), before), [shape[dim] for dim in after])
    return transposed(flat, [after.index(dim) for dim in range(len(after))])


@meaning("stablehlo.transpose")
def _transpose(reader: Reader, node: Node, x: list[Any]) -> Any:
    return transposed(x[0], numbers(node, "permutation"))


@meaning("stablehlo.broadcast_in_dim")
def _broadcast_in_dim(reader: Reader, node: Node, x: list[Any]) -> Any:
    return broadcast_dims(x[0], node.type().shape, numbers(node, "broadcast_dimensions"))


@meaning("stablehlo.slice")
def _slice(reader: Reader, node: Node, x: list[Any]) -> Any:
    return sliced(x[0], *(numbers(node, name) for name in ("start_indices", "limit_indices", "strides")))


@meaning("stablehlo.concatenate")
def _concatenate(reader: Reader, node: Node, x: list[Any]) -> Any:
    return concatenated(x, node.attributes["dimension"])


@meaning("stablehlo.reverse")
def _reverse(reader: Reader, node: Node, x: list[Any]) -> Any:
    result = x[0]
    for axis in numbers(node, "dimensions"):
        result = flipped(result, axis)
    return result


@meaning("stablehlo.iota")
def _iota(reader: Reader, node: Node, x: list[Any]) -> Any:
    type, axis = node.type(), node.attributes["iota_dimension"]
    return spread(iota(type.shape[axis], type.dtype, type.ndim, axis), type.shape)


@meaning("stablehlo.pad")
def _pad(reader: Reader, node: Node, x: list[Any]) -> Any:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return padded(x[0], x[1], *(numbers(node, name) for name in names))


@meaning("stablehlo.dynamic_slice")
def _dynamic_slice(reader: Reader, node: Node, x: list[Any]) -> Any:
    operand, *starts = x
    return window_at(operand, dict(enumerate(starts)), numbers(node, "slice_sizes"))


@meaning("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(reader: Reader, node: Node, x: list[Any]) -> Any:
    """Parts before and after are joined where the start is known; else a mask says where the update lies."""
    whole_array, update, *starts = x
    if 0 in update.shape:
        return whole_array
    inside: Any = None
    for axis, start in enumerate(starts):
        extent, size = whole_array.shape[axis], update.shape[axis]
        if size == extent:
            continue
        first = clipped(start, 0, extent - size)
        differing = [d for d in range(update.ndim) if update.shape[d] != whole_array.shape[d]]
        if inside is None and differing == [axis] and (number := known(first)) is not None:
            return _replaced(whole_array, update, axis, int(number))
        place = ew("subtract", iota(extent), to_index(first))
        here = ew(
            "logical_and", ew("greater_equal", place, np.asarray(0)), ew("less", place, np.asarray(size))
        )
        update = taken(update, clipped(place, 0, size - 1), axis)
        mask = broadcast_dims(here, whole_array.shape, (axis,))
        inside = mask if inside is None else ew("logical_and", inside, mask)
    return update if inside is None else ew("where", inside, update, whole_array)


def _replaced(x: Any, update: Any, axis: int, begin: int) -> Any:
    """``x`` with ``update`` from ``begin`` on along a dim."""
    end = begin + update.shape[axis]
    return concatenated([part(x, axis, 0, begin), update, part(x, axis, end, x.shape[axis])], axis)


@meaning("stablehlo.dot_general", "stablehlo.dot")
def _dot_general(reader: Reader, node: Node, x: list[Any]) -> Any:
    a, b = x
    if node.kind == "stablehlo.dot":
        named: dict[str, Any] = {
            "lhs_contracting_dimensions": (a.ndim - 1,),
            "rhs_contracting_dimensions": (0,),
        }
    else:
        named = fields(node.attributes["dot_dimension_numbers"])
    batch = named.get("lhs_batching_dimensions", ()), named.get("rhs_batching_dimensions", ())
    summed = named.get("lhs_contracting_dimensions", ()), named.get("rhs_contracting_dimensions", ())
    letters = iter(ascii_letters)
    terms = [[""] * a.ndim, [""] * b.ndim]
    for pairs in (batch, summed):
        for i, j in zip(*pairs, strict=True):
            terms[0][i] = terms[1][j] = next(letters)
    for term in terms:
        term[:] = [letter or next(letters) for letter in term]
    shared = {*terms[0]} & {*terms[1]}
    out = [terms[0][i] for i in batch[0]] + [
        letter for term in terms for letter in term if letter not in shared
    ]
    wanted = node.type().dtype
    sides = [whole(convert(side, wanted)) for side in (a, b)]
    if any(n == 0 for side in (a, b) for n in side.shape) and 0 not in node.type().shape:
        return broadcast_dims(np.asarray(0, wanted), node.type().shape, ())
    return emit("einsum", *sides, equation=f"{''.join(terms[0])},{''.join(terms[1])}->{''.join(out)}")


@meaning("stablehlo.rng_bit_generator")
def _rng_bit_generator(reader: Reader, node: Node, x: list[Any]) -> Any:
    algorithm = str(node.attributes["rng_algorithm"])
    for name, ours in (("THREE_FRY", "three_fry"), ("PHILOX", "philox")):
        if name in algorithm:
            bits = node.type(1)
            state, made = emit("random_bits", whole(x[0]), algorithm=ours, shape=bits.shape, dtype=bits.dtype)
            return [state, made]
    raise node.unsupported("the algorithm DEFAULT gives other bits on each machine; name THREE_FRY or PHILOX")


@meaning("stablehlo.get_dimension_size")
def _dimension_size(reader: Reader, node: Node, x: list[Any]) -> Any:
    return np.asarray(x[0].shape[node.attributes["dimension"]], node.type().dtype)


@meaning("stablehlo.bitcast_convert")
def _bitcast_convert(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The same bits.  A dim of parts is new or gone where the dtypes have different numbers of bits."""
    array, wanted = x[0], node.type().dtype
    before, after = bits_of(array.dtype), bits_of(wanted)
    if bool in (array.dtype, wanted):
        raise node.unsupported("bools have no bits that could be another number's")
    if before == after:
        return _bits(array, wanted)
    narrow, wide = (integer_of(select(before, after), signed=False) for select in (min, max))
    shifts = [np.asarray(at, wide) for at in range(0, max(before, after), min(before, after))]
    if before > after:
        words = whole(_bits(array, wide))
        parts = [convert(ew("right_shift", words, shift), narrow) for shift in shifts]
        return _bits(concatenated([reshaped(part, (*part.shape, 1)) for part in parts], array.ndim), wanted)
    words, total = _bits(array, narrow), None
    for i, shift in enumerate(shifts):
        at = [0] * (array.ndim - 1)
        part = sliced(words, [*at, i], [*array.shape[:-1], i + 1], [1] * array.ndim)
        moved = ew("left_shift", convert(reshaped(part, array.shape[:-1]), wide), shift)
        total = moved if total is None else ew("bitwise_or", total, moved)
    return _bits(total, wanted)


def _bits(x: Any, dtype: np.dtype[Any]) -> Any:
    return x if x.dtype == dtype else ew("bitcast", x, dtype=dtype)
