"""Recording of writes: ``x[...] = value``, and NumPy's functions that write into an array."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape, with_extent
from parallelism.ir.core import Extent, broadcast as common_shape, product
from parallelism.ir.operators.shapes import count
from parallelism.ir.recording.numpy_diagonals import places_along
from parallelism.ir.recording.numpy_indexing import is_mask, keys_of, span_of
from parallelism.ir.recording.numpy_shapes import axis_of, broadcast, reshaped, stands_for, transposed
from parallelism.ir.recording.selected_elements import Selected
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse

WHOLE = slice(None)


@stands_for("setitem")
def _setitem(x: Any, key: Any, value: Any) -> Any:
    if isinstance(value, Selected):
        if not is_mask(key):
            refuse("writing the elements that bools select at another place", "use numpy.where")
        return value.written_into(x, key)
    value = lift(value, builder=x.builder, dtype=None if hasattr(value, "dtype") else x.dtype).astype(x.dtype)
    keys = [k for k in keys_of(x, key) if k is not Ellipsis]
    arrays = [k for k in keys if isinstance(k, Traced | np.ndarray)]
    if not arrays:
        return _written_in_spans(x, keys, value)
    if len(arrays) == 1 and is_mask(arrays[0]) and all(k is arrays[0] or k == WHOLE for k in keys):
        return _written_where(x, keys, arrays[0], value)
    return _combined_at(x, keys, value, "set")


def _written_where(x: Any, keys: list[Any], mask: Any, value: Any) -> Any:
    """``x`` with ``value`` where bools are true."""
    axis = next(axis for axis, k in enumerate(keys) if k is mask)
    rest = x.ndim - axis - mask.ndim
    if value.ndim > rest:
        refuse(
            f"writing an array of shape {value.shape} where bools of shape {mask.shape} are true",
            "use numpy.where",
        )
    return np.where(lift(mask).reshape((*mask.shape, *[1] * rest)), value, x)


# -- at the indices of arrays ------------------------------------------------------------------------------------------


def _combined_at(x: Any, keys: list[Any], value: Any, op: str) -> Any:
    """``x`` with ``value`` put in, or combined in another way, at an index with arrays.

    Spans of dims that are not taken whole are written as a block.
    """
    if any(k is None for k in keys):
        refuse("writing at the indices of an array and along a new dim", "reshape the array before")
    keys = [place for k in keys for place in _without_bools(k)]
    spans = tuple(k if isinstance(k, slice) else WHOLE for k in keys)
    if any(k != WHOLE for k in spans):
        taken = CALLS["getitem"](x, spans)
        inner = [WHOLE if isinstance(k, slice) else k for k in keys]
        return _written_in_spans(x, list(spans), _combined_at(taken, inner, value, op))
    axes = [axis for axis, k in enumerate(keys) if not isinstance(k, slice)]
    arrays = [keys[axis] for axis in axes]
    for i, k in enumerate(arrays):
        if isinstance(k, int | np.integer):
            arrays[i] = np.asarray(k)
    return _scattered(x, axes, arrays, value, op)


def _without_bools(key: Any) -> Sequence[Any]:
    if not is_mask(key):
        return (key,)
    if isinstance(key, Traced):
        refuse("writing where bools are true and at other indices at once", "use numpy.where")
    return np.nonzero(key)


def _scattered(x: Any, axes: list[int], arrays: list[Any], value: Any, op: str) -> Any:
    """``x`` with ``value`` at the indices ``arrays`` of the dims ``axes``, the other dims whole."""
    shape = common_shape([k.shape for k in arrays])
    first = axes[0]
    rest = [d for d in range(x.ndim) if d not in axes]
    together = axes == list(range(first, first + len(axes)))
    at = first if together else 0  # as in NumPy, where the dims of the indices stand in the result
    order = [*rest[:at], *axes, *rest[at:]]
    kept = [x.shape[d] for d in rest]
    value = broadcast(_fitting(value, x.ndim - len(axes) + len(shape)), (*kept[:at], *shape, *kept[at:]))
    turned = transposed(x, order)
    flat = reshaped(turned, (*kept[:at], product(x.shape[a] for a in axes), *kept[at:]))
    places = reshaped(broadcast(_flat_places(x, axes, arrays), shape), (product(shape),))
    updates = reshaped(value, (*kept[:at], product(shape), *kept[at:]))
    made = reshaped(apply("scatter", flat, places, updates, axis=at, op=op), turned.shape)
    return transposed(made, sorted(range(x.ndim), key=order.__getitem__))


def _fitting(value: Any, ndim: int) -> Any:
    while value.ndim > ndim and value.shape[0] == 1:
        value = reshaped(value, value.shape[1:])
    return value


def _flat_places(x: Any, axes: list[int], arrays: list[Any]) -> Any:
    """The places in several dims taken as one.  An index that is out of range is an error when the program runs."""
    places: Any = None
    for axis, k in zip(axes, arrays, strict=True):
        if k.dtype.kind not in "iu":
            refuse(f"indexing by an array of {k.dtype}")
        found = apply("take", places_along(x.shape[axis]), lift(k), axis=0)
        places = found if places is None else places * x.shape[axis] + found
    return places


_COMBINED = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
}


@stands_for("at")
def _at(ufunc: np.ufunc, x: Any, indices: Any, values: Any = None) -> None:
    name = f"numpy.{ufunc.__name__}.at"
    if not isinstance(x, Traced):
        refuse(f"{name} into an array of numbers", "write into numpy.zeros_like of a recorded array")
    if ufunc is np.subtract:
        ufunc, values = np.add, np.negative(values)
    if ufunc not in _COMBINED or values is None:
        refuse(name, f"it is recorded of {', '.join(f'numpy.{each.__name__}' for each in _COMBINED)}")
    value = lift(values, builder=x.builder, dtype=None if hasattr(values, "dtype") else x.dtype)
    if not np.can_cast(value.dtype, x.dtype, "same_kind"):
        refuse(f"{name} of {value.dtype} into an array of {x.dtype}")
    keys = [k for k in keys_of(x, indices) if k is not Ellipsis]
    if not any(isinstance(k, Traced | np.ndarray) for k in keys) or any(map(is_mask, keys)):
        refuse(f"{name} at an index without arrays of integers", "write x[...] = x[...] + y")
    x.become(_combined_at(x, keys, value.astype(x.dtype), _COMBINED[ufunc]))


# -- in spans ----------------------------------------------------------------------------------------------------------


def _written_in_spans(x: Any, keys: list[Any], value: Any) -> Any:
    """``x`` with ``value`` in the part that slices and numbers select."""
    selecting = [k for k in keys if k is not None]
    spans = [span_of(extent, k) for extent, k in zip(x.shape, selecting, strict=True)]
    counts = [count(begin, end, abs(step)) for begin, end, step in spans]
    extents = iter(counts)
    shape: list[Extent] = []  # of the part, as reading it returns it
    for k in keys:
        size = 1 if k is None else next(extents)
        if k is None or isinstance(k, slice):
            shape.append(size)
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = reshaped(value, value.shape[1:])
    value = reshaped(broadcast(value, shape), counts)
    written: Any = None
    """True where ``value`` is written; None: everywhere."""
    for axis, (begin, end, step) in enumerate(spans):
        if step < 0:
            value = apply("flip", value, axis=axis)
        if (begin, end, abs(step)) != (0, x.shape[axis], 1):
            if written is None:
                ones = vector_shape(x.ndim, axis, counts[axis])
                written = apply("constant", value=True, shape=ones, dtype=np.dtype(bool))
            else:
                written = broadcast(written, with_extent(written.shape, axis, counts[axis]))
            how = {"axis": axis, "begin": begin, "step": abs(step), "extent": x.shape[axis]}
            value, written = apply("place", value, **how), apply("place", written, **how)
    return value if written is None else np.where(written, value, x)


# -- functions that write ----------------------------------------------------------------------------------------------


def _recorded_target(x: Any, name: str) -> Traced:
    if not isinstance(x, Traced):
        refuse(f"{name} into an array of numbers", "write into numpy.zeros_like of a recorded array")
    return x


@stands_for(np.copyto)
def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    target = _recorded_target(dst, "numpy.copyto")
    value = lift(src, dtype=None if hasattr(src, "dtype") else target.dtype)
    if not np.can_cast(value.dtype, target.dtype, casting):  # type: ignore[arg-type]
        refuse(f"numpy.copyto of {value.dtype} into an array of {target.dtype}")
    new = broadcast(value.astype(target.dtype), target.shape)
    target.become(new if where is True else np.where(lift(where), new, target))


@stands_for(np.putmask)
def _putmask(a: Any, mask: Any, values: Any) -> None:
    target = _recorded_target(a, "numpy.putmask")
    value = lift(values, dtype=None if hasattr(values, "dtype") else target.dtype)
    if value.size != 1 and value.shape != target.shape:
        refuse("numpy.putmask with fewer values than elements, which it repeats", "use numpy.where")
    target.become(np.where(lift(mask), value.astype(target.dtype), target))


@stands_for(np.place)
def _place(arr: Any, mask: Any, vals: Any) -> None:
    if np.size(vals) != 1:
        refuse("numpy.place of several values", "where each goes depends on the values; use numpy.where")
    _putmask(arr, mask, lift(vals).reshape(()))


@stands_for(np.put)
def _put(a: Any, ind: Any, v: Any) -> None:
    target = _recorded_target(a, "numpy.put")
    flat = reshaped(target, (target.size,)).copy()
    flat[ind] = v
    target.become(flat.reshape(target.shape))


@stands_for(np.put_along_axis)
def _put_along_axis(arr: Any, indices: Any, values: Any, axis: Any = -1) -> None:
    target = _recorded_target(arr, "numpy.put_along_axis")
    axis = axis_of(axis, target.ndim)
    where = list(np.indices(np.shape(indices), sparse=True))
    where[axis] = indices
    target[tuple(where)] = values
