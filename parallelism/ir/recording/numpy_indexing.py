"""Recording of ``x[...]`` that is read, and of NumPy's functions that pick elements."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.ir.core import Expression, Extent, bounds_in, broadcast as common_shape, from_start, product
from parallelism.ir.recording.numpy_shapes import axis_of, part, reshaped, stands_for, transposed
from parallelism.ir.recording.selected_elements import Selected
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse

Span = tuple[Extent, Extent, int]
"""``begin, end, step`` of a dim.  A negative step goes backwards from ``end - 1``."""


def keys_of(x: Any, key: Any) -> list[Any]:
    """The keys of an index, with ``...`` expanded.

    There is one key for each dim, one for several dims if it is an array of bools, and None for each new dim.  ``...``
    stays where it stands for no dim.
    """
    keys = []
    for k in key if isinstance(key, tuple) else (key,):
        if isinstance(k, list):
            k = np.asarray(k, None if np.size(k) else np.int64)
        keys.append(k)
    used = sum(map(_dims_used, keys))
    if used > x.ndim:
        raise IndexError(f"{used} indices for an array of {x.ndim} dims")
    dots = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    if used < x.ndim:
        keys[dots : dots + 1] = [slice(None)] * (x.ndim - used)
    axis = 0
    for k in keys:
        if is_mask(k) and (not k.ndim or k.shape != x.shape[axis : axis + k.ndim]):
            refuse(f"indexing an array of shape {x.shape} by bools of shape {k.shape} from dim {axis} on")
        axis += _dims_used(k)
    return keys


def _dims_used(key: Any) -> int:
    """The number of dims that one key stands for; 0 for ``...``, which is not expanded."""
    if key is None or key is Ellipsis:
        return 0
    return key.ndim if is_mask(key) else 1


def is_mask(key: Any) -> bool:
    return isinstance(key, Traced | np.ndarray) and key.dtype == bool


def _places(key: Any) -> Sequence[Any]:
    """The key itself; for an array of bools, the indices of its true elements."""
    if not is_mask(key):
        return (key,)
    if isinstance(key, Traced):
        refuse("indexing by bools", "the shape of the result depends on the values; use numpy.where")
    return np.nonzero(key)


def span_of(extent: Extent, key: Any) -> Span:
    """The span that a slice or a number selects."""
    if not isinstance(key, slice):
        if isinstance(key, bool) or not isinstance(key, int | np.integer | Expression):
            refuse(f"indexing by {key!r}")
        place = _located(key, from_start, key if isinstance(key, Expression) else int(key), extent)
        if isinstance(place, int) and isinstance(extent, int) and not 0 <= place < extent:
            # Python ends a `for` loop over an array at an IndexError.
            raise IndexError(f"index {key} is out of bounds for a dim of {extent}")
        return place, place + 1, 1
    step = 1 if key.step is None else key.step
    if step == -1 and key.start is None and key.stop is None:
        return 0, extent, -1
    known = (
        isinstance(extent, int)
        and not isinstance(key.start, Expression)
        and not isinstance(key.stop, Expression)
    )
    if not isinstance(step, int) or (step < 1 and not known):
        refuse(f"a slice with step {step}")
    if isinstance(extent, int) and known:
        places = range(extent)[key]
        if not places:
            return 0, 0, 1
        return min(places[0], places[-1]), max(places[0], places[-1]) + 1, step
    return *_located(key, bounds_in, extent, key.start, key.stop), step


def _located(key: Any, places: Callable[..., Any], *given: Extent | None) -> Any:
    """The places, or `RecordError` with the line if they are no places."""
    try:
        return places(*given)
    except (TypeError, ValueError) as error:
        refuse(f"indexing by {key!r}", str(error))


def _cut(x: Any, axis: int, span: Span) -> Any:
    begin, end, step = span
    x = part(x, axis, begin, end, abs(step))
    return apply("flip", x, axis=axis) if step < 0 else x


# -- reading -----------------------------------------------------------------------------------------------------------


@stands_for("getitem")
def _getitem(x: Any, key: Any) -> Any:
    if isinstance(key, Traced) and key.dtype == bool and key.ndim:
        keys_of(x, key)  # checks the shape
        return Selected(x, key)
    keys = [each for k in keys_of(x, key) for each in _places(k)]
    taken: dict[int, Any] = {}
    shape: list[Extent] = []
    first = axis = 0
    for k in keys:
        if k is None:
            shape.append(1)
        if k is None or k is Ellipsis:
            continue
        if isinstance(k, Traced | np.ndarray):
            first = first if taken else len(shape)
            taken[axis] = k
        else:
            x = _cut(x, axis, span_of(x.shape[axis], k))
            if isinstance(k, slice):
                shape.append(x.shape[axis])
        axis += 1
    if not taken:
        return reshaped(x, shape)
    x, ndim = _taken(x, taken)
    axis = min(taken)
    x = reshaped(x, (*shape[:first], *x.shape[axis : axis + ndim], *shape[first:]))
    # As in NumPy, the dims of index arrays come first if a slice separates the arrays.
    places = [
        i for i, k in enumerate(keys) if k is not None and k is not Ellipsis and not isinstance(k, slice)
    ]
    if places != list(range(places[0], places[-1] + 1)):
        x = transposed(x, [*range(first, first + ndim), *range(first), *range(first + ndim, x.ndim)])
    return x


def _taken(x: Any, taken: dict[int, Any]) -> tuple[Any, int]:
    """``x`` indexed by arrays along some dims, and the number of dims that replace these.

    ``taken`` has the index array of each such dim.
    """
    for axis, k in taken.items():
        if k.dtype.kind not in "iu":
            refuse(f"indexing by an array of {k.dtype}")
        if (
            isinstance(k, np.ndarray)
            and isinstance(x.shape[axis], int)
            and k.size
            and not (-x.shape[axis] <= k.min() and k.max() < x.shape[axis])
        ):
            raise IndexError(
                f"indices from {k.min()} to {k.max()} are out of bounds for a dim of {x.shape[axis]}"
            )
    if len(taken) == 1:
        ((axis, indices),) = taken.items()
        return apply("take", x, indices, axis=axis), indices.ndim
    axes, arrays = list(taken), list(taken.values())
    if _picks_in_rows(x, arrays):
        picked = apply("take_along", x, lift(arrays[-1]).reshape((*x.shape[:-1], 1)), axis=x.ndim - 1)
        return reshaped(picked, x.shape[:-1]), x.ndim - 1
    at, places = axes[0], 0
    for axis, k in taken.items():
        places = places * x.shape[axis] + np.where(k < 0, k + x.shape[axis], k)
    x = transposed(x, [*range(at), *axes, *(d for d in range(at, x.ndim) if d not in taken)])
    flat = reshaped(x, (*x.shape[:at], product(x.shape[at : at + len(axes)]), *x.shape[at + len(axes) :]))
    return apply("take", flat, places, axis=at), len(common_shape([k.shape for k in arrays]))


def _picks_in_rows(x: Any, arrays: Sequence[Any]) -> bool:
    """Whether indices pick one element of each row, as ``x[np.arange(n), picked]`` does."""
    before = x.shape[:-1]
    if len(arrays) != x.ndim or arrays[-1].shape != before:
        return False
    return all(_counts(k, axis, before) for axis, k in enumerate(arrays[:-1]))


def _counts(k: Any, axis: int, shape: Sequence[Extent]) -> bool:
    """Whether an index array is 0, 1, 2, ... along a dim of this shape, and has the extent 1 in the dims behind it."""
    before, behind = k.ndim - len(shape) + axis, len(shape) - axis - 1
    if tuple(k.shape) != (*[1] * before, shape[axis], *[1] * behind):
        return False
    if isinstance(k, np.ndarray):
        return bool((k.reshape(-1) == np.arange(k.size)).all())
    makers = {value: op for op in k.builder.ops for value in op.outputs}
    op = makers.get(k.value)
    while op is not None and op.kind == "reshape":
        op = makers.get(op.inputs[0])
    return op is not None and op.kind == "iota" and op["shape"] == (shape[axis],) and op["starts"] == (0,)


# -- functions ---------------------------------------------------------------------------------------------------------


@stands_for(np.take)
def _take(a: Any, indices: Any, axis: Any = None, *, mode: str = "raise") -> Any:
    x = lift(a).reshape(-1) if axis is None else lift(a)
    axis = 0 if axis is None else axis_of(axis, x.ndim)
    if mode == "clip":
        indices = np.clip(lift(indices), 0, x.shape[axis] - 1)
    elif mode == "wrap":
        indices = lift(indices) % x.shape[axis]
    elif mode != "raise":
        raise ValueError(f"the mode must be raise, clip or wrap, got {mode!r}")
    return apply("take", x, indices, axis=axis)


CALLS.update(
    {
        np.take_along_axis: lambda x, indices, axis=-1: apply(
            "take_along", lift(x), indices, axis=axis_of(axis, np.ndim(x))
        ),
    }
)
