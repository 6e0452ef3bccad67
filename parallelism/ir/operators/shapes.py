"""Operators that move elements without computing, and operators that create arrays.

``slice`` takes a part of one dim and ``place`` puts a part into zeros: each is the gradient of the other.  So are
``windows`` and ``windows_sum``, of which convolutions consist.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape, with_extent
from parallelism.dtypes import common_dtype, is_floating
from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    Shape,
    TensorType,
    along_whole,
    broadcast,
    broadcast_term,
    ceil_div,
    checked_axis,
    first_dtype,
    is_negative,
    largest,
    letters,
    quotient,
    register,
    reshape,
    rule,
    shape_text,
    terms_along,
)
from parallelism.ir.core.extents import constant_term, is_rounded
from parallelism.ir.core.rules import LETTERS
from parallelism.ir.tracing import apply

# -- the same elements in another shape --------------------------------------------------------------------------------


def _reshape_rule(x: TensorType, shape: Shape) -> Rule:
    if x.size != TensorType(x.dtype, shape).size:
        raise ValueError(
            f"shape {shape_text(x.shape)} has {x.size} elements, {shape_text(shape)} has "
            f"{TensorType(x.dtype, shape).size}"
        )
    return reshape(x.shape, shape)


def _transpose_rule(x: TensorType, permutation: tuple[int, ...]) -> Rule:
    if sorted(permutation) != list(range(x.ndim)):
        raise ValueError(f"expected a permutation of {x.ndim} dims, got {list(permutation)}")
    names = letters(x.ndim)
    return rule(f"{names}->{''.join(names[d] for d in permutation)}", [x.shape])


def _broadcast_rule(x: TensorType, shape: Shape) -> Rule:
    if len(shape) < x.ndim or broadcast([x.shape, shape]) != tuple(shape):
        raise ValueError(f"shape {shape_text(x.shape)} cannot be broadcast to {shape_text(shape)}")
    names = letters(len(shape))
    return rule(
        f"{broadcast_term(x.shape, shape, names)}->{names}", [x.shape], dict(zip(names, shape, strict=True))
    )


register(
    Operator(
        "reshape",
        _reshape_rule,
        first_dtype,
        lambda x, shape: np.reshape(x, shape),
        lambda g, y, x, shape: [g.reshape(x.shape)],
        attributes={"shape": "a shape"},
        view=True,
        linear="moves",
    )
)
register(
    Operator(
        "transpose",
        _transpose_rule,
        first_dtype,
        lambda x, permutation: np.transpose(x, permutation),
        lambda g, y, x, permutation: [g.transpose(sorted(range(x.ndim), key=permutation.__getitem__))],
        attributes={"permutation": "a list of integers"},
        linear="moves",
    )
)
register(
    Operator(
        "broadcast_to",
        _broadcast_rule,
        first_dtype,
        lambda x, shape: np.broadcast_to(x, shape),
        lambda g, y, x, shape: [g],
        attributes={"shape": "a shape"},
        linear="moves",
        grows=True,
    )
)
register(
    Operator(
        "flip",
        along_whole,
        first_dtype,
        lambda x, axis: np.flip(x, axis),
        lambda g, y, x, axis: [apply("flip", g, axis=axis)],
        attributes={"axis": "an integer"},
        linear="moves",
    )
)


# -- several arrays and one --------------------------------------------------------------------------------------------


def _parts(count: int, ndim: int, axis: int, refused: str) -> tuple[str, list[str]]:
    """A letter for each part of a tensor along a dim and one for the whole, and the terms of these tensors.

    ``ValueError`` with the text ``refused`` if there are not enough letters.
    """
    own = letters(count + 1)
    if count + ndim > len(LETTERS):
        raise ValueError(refused)
    return own, terms_along(ndim, axis, *(f"{letter}!" for letter in own))


def _concatenate_rule(*types: TensorType, axis: int) -> Rule:
    if not types:
        raise ValueError("at least one input is needed")
    ndim = types[0].ndim
    own, terms = _parts(
        len(types),
        ndim,
        checked_axis(axis, ndim),
        f"{len(types)} arrays of {ndim} dims are more than it can join",
    )
    for type in types:
        if type.ndim != ndim:
            raise ValueError(f"the inputs must have equally many dims, got {types[0]} and {type}")
    return rule(
        f"{','.join(terms[:-1])}->{terms[-1]}",
        [type.shape for type in types],
        {own[-1]: sum((type.shape[axis] for type in types), 0)},
    )


def _split_rule(x: TensorType, axis: int, sizes: Shape) -> Rule:
    checked_axis(axis, x.ndim)
    if not sizes or sum(sizes) != x.shape[axis]:
        raise ValueError(f"the sizes must add up to dim {axis} of {x}, got {shape_text(sizes)}")
    own, terms = _parts(
        len(sizes), x.ndim, axis, f"{len(sizes)} pieces of {x.ndim} dims are more than it can make"
    )
    return rule(f"{terms[-1]}->{','.join(terms[:-1])}", [x.shape], dict(zip(own, sizes, strict=False)))


def _split(x: Any, axis: int, sizes: Sequence[int]) -> Any:
    pieces = tuple(np.split(x, np.cumsum(sizes)[:-1], axis=axis))
    return pieces if len(pieces) > 1 else pieces[0]


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def or_zeros(g: Any, y: Any) -> Any:
    """The gradient ``g`` of an output ``y``; zeros if nothing depends on the output."""
    return apply("constant", value=0, shape=y.shape, dtype=y.dtype) if g is None else g


def _split_derivative(g: Any, y: Any, x: Any, axis: int, sizes: Shape) -> list[Any]:
    pieces = (or_zeros(*each) for each in zip(_as_tuple(g), _as_tuple(y), strict=True))
    return [apply("concatenate", *pieces, axis=axis)]


register(
    Operator(
        "concatenate",
        _concatenate_rule,
        lambda *types, axis: common_dtype(*(t.dtype for t in types)),
        lambda *arrays, axis: np.concatenate(arrays, axis),
        lambda g, y, *x, axis: list(
            _as_tuple(apply("split", g, axis=axis, sizes=tuple(array.shape[axis] for array in x)))
        ),
        attributes={"axis": "an integer"},
        linear="moves",
    )
)
register(
    Operator(
        "split",
        _split_rule,
        first_dtype,
        _split,
        _split_derivative,
        attributes={"axis": "an integer", "sizes": "a shape"},
        linear="moves",
    )
)


# -- parts -------------------------------------------------------------------------------------------------------------


def count(begin: Extent, end: Extent, step: int) -> Extent:
    """The number of elements of ``begin:end:step``."""
    if step < 1:
        raise ValueError(f"a step must be at least 1, got {step}")
    if step == 1:
        return largest(end - begin, 0) if isinstance(end - begin, int) else end - begin
    if isinstance(begin, int) and isinstance(end, int):
        return len(range(begin, end, step))
    whole = quotient((end - begin,), (step,))
    if whole is None:
        raise ValueError(f"a slice with step {step} needs known bounds, got {begin}:{end}")
    return whole


def _slice_rule(x: TensorType, axis: int, begin: Extent, end: Extent, step: int) -> Rule:
    extent = x.shape[checked_axis(axis, x.ndim)]
    if any(map(is_negative, (begin, end, extent - begin, extent - end))):
        raise ValueError(f"{begin}:{end} is not inside a dim of {extent}")
    return rule("->".join(terms_along(x.ndim, axis, "y!", "z!")), [x.shape], {"z": count(begin, end, step)})


def _part(ndim: int, axis: int, begin: int, end: int, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(begin, end, step), *[slice(None)] * (ndim - 1 - axis))


def _place_rule(x: TensorType, axis: int, begin: Extent, step: int, extent: Extent) -> Rule:
    n = x.shape[checked_axis(axis, x.ndim)]
    last = begin + (n - 1) * step
    if step < 1 or is_negative(begin) or (n != 0 and is_negative(extent - 1 - last)):
        raise ValueError(
            f"{n} elements that start at {begin} with step {step} do not fit into a dim of {extent}"
        )
    return rule("->".join(terms_along(x.ndim, axis, "y!", "z!")), [x.shape], {"z": extent})


def _place(x: Any, axis: int, begin: int, step: int, extent: int) -> Any:
    whole = np.zeros(with_extent(x.shape, axis, extent), x.dtype)
    whole[_part(x.ndim, axis, begin, begin + x.shape[axis] * step, step)] = x
    return whole


register(
    Operator(
        "slice",
        _slice_rule,
        first_dtype,
        lambda x, axis, begin, end, step: x[_part(x.ndim, axis, begin, end, step)],
        lambda g, y, x, axis, begin, end, step: [
            apply("place", g, axis=axis, begin=begin, step=step, extent=x.shape[axis])
        ],
        attributes={"axis": "an integer", "begin": "an extent", "end": "an extent", "step": "an integer"},
        linear="moves",
    )
)
register(
    Operator(
        "place",
        _place_rule,
        first_dtype,
        _place,
        lambda g, y, x, axis, begin, step, extent: [
            apply("slice", g, axis=axis, begin=begin, end=begin + (x.shape[axis] - 1) * step + 1, step=step)
        ],
        attributes={"axis": "an integer", "begin": "an extent", "step": "an integer", "extent": "an extent"},
        linear="moves",
        grows=True,
    )
)


# -- chunks ------------------------------------------------------------------------------------------------------------

# Chunks of a tensor, and the tensor that they are put together to, have no price.  A product that runs in chunks
# (`parallelism.ir.passes.chunked_collectives`) reads its operands where they are, and writes each chunk where it belongs:
# the kernels of libraries take a stride.  Here, too, a chunk is a view; what puts chunks together copies, which takes a run
# on a host some time.


def _chunk_rule(x: TensorType, axis: int, number: int, count: int) -> Rule:
    """Of ``count`` equal parts of a dim that with this number."""
    extent = _size_of_chunk(x.shape[checked_axis(axis, x.ndim)], count)
    if not 0 <= number < count:
        raise ValueError(f"chunk {number} is none of {count}")
    return rule("->".join(terms_along(x.ndim, axis, "y!", "z!")), [x.shape], {"z": extent})


def _size_of_chunk(extent: Extent, count: int) -> Extent:
    if count < 1 or not isinstance(extent, int) or extent % count:
        raise ValueError(f"a dim of {extent} does not have {count} equal chunks")
    return extent // count


def _chunk(x: Any, axis: int, number: int, count: int) -> Any:
    size = x.shape[axis] // count
    place = slice(number * size, (number + 1) * size)
    return x[(*[slice(None)] * axis, place)]


def _joined_rule(*chunks: TensorType, axis: int, group: int) -> Rule:
    first = chunks[0]
    if any(chunk != first for chunk in chunks):
        raise ValueError(f"chunks are of one type, got {', '.join(map(str, chunks))}")
    extent = first.shape[checked_axis(axis, first.ndim)]
    _size_of_chunk(extent, group)
    own = letters(len(chunks) + 1)
    terms = terms_along(first.ndim, axis, *(f"{letter}!" for letter in own))
    shapes = [chunk.shape for chunk in chunks]
    return rule(f"{','.join(terms[:-1])}->{terms[-1]}", shapes, {own[-1]: len(chunks) * extent})


def _joined(*chunks: Any, axis: int, group: int) -> Any:
    """The parts of each chunk, one of each member of a group, next to those of the other chunks of the same member."""
    first = chunks[0]
    before, extent, after = first.shape[:axis], first.shape[axis], first.shape[axis + 1 :]
    parts = [chunk.reshape(*before, group, extent // group, *after) for chunk in chunks]
    return np.concatenate(parts, axis + 1).reshape(*before, len(chunks) * extent, *after)


def _nothing(inputs: Any, outputs: Any) -> int:
    return 0


register(
    Operator(
        "chunk",
        _chunk_rule,
        first_dtype,
        _chunk,
        attributes={"axis": "an integer", "number": "an integer", "count": "an integer"},
        view=True,
        linear="moves",
    )
)
register(
    Operator(
        "joined_chunks",
        _joined_rule,
        first_dtype,
        _joined,
        attributes={"axis": "an integer", "group": "an integer"},
        nbytes=_nothing,
        linear="moves",
    )
)


# -- windows -----------------------------------------------------------------------------------------------------------


def _windows_rule(x: TensorType, axis: int, size: int, step: int) -> Rule:
    """``a h c -> a p c k``: windows of k elements, one every ``step`` elements, along a new last dim."""
    extent = x.shape[checked_axis(axis, x.ndim)]
    if size < 1 or step < 1 or is_negative(extent - size):
        raise ValueError(f"windows of {size}, one every {step}, do not fit into a dim of {extent}")
    before, after = terms_along(x.ndim, axis, "y!", "z!")
    return rule(f"{before}->{after}W!", [x.shape], {"z": _windows_in(extent, size, step), "W": size})


def _windows_in(extent: Extent, size: int, step: int) -> Extent:
    """The number of whole windows; elements left over at the end are in none.

    With symbols nothing is taken to be left over where that may be, as of n / 16 windows of 16 elements.  Where a fraction
    is added, as in (n + 1) / 2, or where the dim was rounded before, the number is rounded, here to ceil(n / 2).
    """
    if isinstance(extent, int):
        return (extent - size) // step + 1
    even = count(0, extent - size + step, step)
    may_be_even = isinstance(constant_term(even), int) and not is_rounded(extent)
    return even if step == 1 or may_be_even else ceil_div(extent - size + 1, step)


def _windows(x: Any, axis: int, size: int, step: int) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis)
    return windows[_part(windows.ndim, axis, 0, windows.shape[axis], step)]


def _windows_sum_rule(x: TensorType, axis: int, step: int, extent: Extent) -> Rule:
    """The adjoint of ``windows``: each window is added to the place that it was taken from."""
    if x.ndim < 2:
        raise ValueError(f"the input must have at least two dims, the last one of windows, got {x}")
    checked_axis(axis, x.ndim - 1)
    size = x.shape[-1]
    if not isinstance(size, int) or step < 1 or size < 1 or _windows_in(extent, size, step) != x.shape[axis]:
        raise ValueError(
            f"a dim of {extent} does not have {x.shape[axis]} windows of {size}, one every {step}"
        )
    before, after = terms_along(x.ndim - 1, axis, "y!", "z!")
    return rule(f"{before}W!->{after}", [x.shape], {"z": extent})


def _windows_sum(x: Any, axis: int, step: int, extent: int) -> Any:
    whole = np.zeros((*x.shape[:axis], extent, *x.shape[axis + 1 : -1]), x.dtype)
    for k in range(x.shape[-1]):
        whole[_part(whole.ndim, axis, k, k + x.shape[axis] * step, step)] += x[..., k]
    return whole


register(
    Operator(
        "windows",
        _windows_rule,
        first_dtype,
        _windows,
        lambda g, y, x, axis, size, step: [
            apply("windows_sum", g, axis=axis, step=step, extent=x.shape[axis])
        ],
        attributes={"axis": "an integer", "size": "an integer", "step": "an integer"},
        linear="moves",
        grows=True,
    )
)
register(
    Operator(
        "windows_sum",
        _windows_sum_rule,
        first_dtype,
        _windows_sum,
        lambda g, y, x, axis, step, extent: [apply("windows", g, axis=axis, size=x.shape[-1], step=step)],
        1,
        attributes={"axis": "an integer", "step": "an integer", "extent": "an extent"},
        linear="together",
        grows=True,
    )
)


# -- creation ----------------------------------------------------------------------------------------------------------


def created(shape: Shape, starts: Shape | None = None) -> Rule:
    """The rule of an operator that creates an array; ``starts`` is its position in a larger tensor."""
    if starts is not None and len(starts) != len(shape):
        raise ValueError(
            f"starts must have one entry for each dim of shape {shape_text(shape)}, got {shape_text(starts)}"
        )
    names = letters(len(shape))
    return rule(f"->{names}", [], dict(zip(names, shape, strict=True)))


def _constant_rule(value: Any, shape: Shape, dtype: np.dtype[Any]) -> Rule:
    new = created(shape)
    if isinstance(value, tuple):
        if len(value) != TensorType(dtype, shape).size:
            raise ValueError(
                f"shape {shape_text(shape)} needs {TensorType(dtype, shape).size} values, got {len(value)}"
            )
        return Rule((), new.outputs, new.extents, frozenset(new.letters))
    if isinstance(value, float) and not is_floating(dtype):
        raise TypeError(f"{value} is not a value of {dtype}")
    return new


def _iota_rule(dim: int, shape: Shape, starts: Shape, dtype: np.dtype[Any]) -> Rule:
    checked_axis(dim, len(shape))
    return created(shape, starts)


def _iota(dim: int, shape: Sequence[int], starts: Sequence[int], dtype: np.dtype[Any]) -> Any:
    places = np.arange(starts[dim], starts[dim] + shape[dim]).astype(dtype)
    return np.broadcast_to(places.reshape(vector_shape(len(shape), dim)), shape)


register(
    Operator(
        "constant",
        _constant_rule,
        lambda value, shape, dtype: dtype,
        lambda value, shape, dtype: (
            np.array(value, dtype).reshape(shape)
            if isinstance(value, tuple)
            else np.full(shape, value, dtype)
        ),
        attributes={"value": "a number or a list of them", "shape": "a shape", "dtype": "a dtype"},
    )
)
register(
    Operator(
        "iota",
        _iota_rule,
        lambda dim, shape, starts, dtype: dtype,
        _iota,
        attributes={"dim": "an integer", "shape": "a shape", "starts": "a shape", "dtype": "a dtype"},
    )
)
