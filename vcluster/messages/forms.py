"""The values that kernels pass to collectives and messages: arrays, scalars, and tuples, lists and dicts of them.

A value travels as one contiguous array. Its *form* describes how the receiver rebuilds the value from that array.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from parallelism.operation.trees import leaves

if TYPE_CHECKING:
    from vcluster.collectives import Call

NUMERIC_KINDS = "biufc"

ARRAY = b""
SCALAR = b"scalar"
"""Forms. Any other form is the pickled structure of a tree, whose leaves lie one after another in an array of bytes."""


def as_array(what: str, x: Any) -> tuple[NDArray[Any], bytes]:
    """``x`` as a C-contiguous array, and its form. ``TypeError`` if it does not hold numbers."""
    if isinstance(x, np.ndarray):
        form = ARRAY
        array = x
    elif isinstance(x, bool | int | float | complex | np.generic):
        form = SCALAR
        array = np.asarray(x)
    elif hasattr(x, "__array__"):
        form = ARRAY
        array = np.asarray(x)
    else:
        hint = "; all_gather_object and broadcast_object accept other objects" if what != "a message" else ""
        raise TypeError(f"{what} takes an array or a scalar, got {type(x).__name__}{hint}")
    if array.dtype.kind not in NUMERIC_KINDS:
        raise TypeError(f"{what} takes numbers or bools, got an array of dtype {array.dtype}")
    if type(array) is not np.ndarray:
        array = np.asarray(array)
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)), form


def pack(tree: Any) -> tuple[NDArray[np.uint8], bytes]:
    """A tree as an array of bytes, and its form."""
    arrays = [as_array("a tree of arrays", leaf) for leaf in leaves(tree)]
    structure = rebuild(tree, list(range(len(arrays))))
    form = cloudpickle.dumps((structure, [(a.dtype.str, a.shape, leaf_form) for a, leaf_form in arrays]))
    return np.frombuffer(b"".join(a.tobytes() for a, _ in arrays), np.uint8), form


def from_form(form: bytes, array: NDArray[Any]) -> Any:
    """Rebuild the value from its form and the array."""
    if form == ARRAY:
        return array
    if form == SCALAR:
        return array[()]
    structure, signatures = pickle.loads(form)
    content = array.tobytes()
    values = []
    offset = 0
    for dtype, shape, leaf_form in signatures:
        leaf = np.ndarray(shape, dtype, content, offset).copy()
        offset += leaf.nbytes
        values.append(from_form(leaf_form, leaf))
    return rebuild(structure, values)


def zeros_like(x: Any) -> Any:
    """Zeros in the shape of a value, which may be a tree."""
    if is_tree(x):
        return rebuild(x, [zeros_like(leaf) for leaf in leaves(x)])
    array, form = as_array("a rank that receives nothing", x)
    return from_form(form, np.zeros_like(array))


def rebuild(value: Any, new_leaves: list[Any]) -> Any:
    """A tree like ``value`` with other leaves, which are taken from the front of ``new_leaves``."""
    if isinstance(value, dict):
        return {key: rebuild(child, new_leaves) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = [rebuild(child, new_leaves) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return new_leaves.pop(0)


def is_tree(value: Any) -> bool:
    return isinstance(value, tuple | list | dict)


def check_out(call: Call, out: Any, x: NDArray[Any] | None) -> None:
    """Check that ``out`` can take the result, as far as the result is known before the collective runs."""
    check_array(call.kind, out)
    kind = call.of_kind
    if kind.lists:
        raise TypeError(f"{call.kind} takes no out=: its result is a list of arrays")
    if x is None or call.shape is None:
        return
    own = kind.is_got_by(call.position, call.root) and (kind.reduces or (kind.rooted and not kind.joins))
    if own and not kind.cuts:
        check_shape(call.kind, out, call.shape, x.dtype)
    elif own:
        piece = (*call.shape[: call.dim], call.sizes[call.position], *call.shape[call.dim + 1 :])
        check_shape(call.kind, out, piece, x.dtype)
    elif kind.function is None and out.dtype != x.dtype:
        raise ValueError(f"out= of {call.kind} must have dtype {x.dtype}, got {out.dtype}")
    if np.may_share_memory(out, x) and not _same(out, x) and np.shares_memory(out, x):
        raise ValueError(f"out= of {call.kind} overlaps its input; it must be the input itself or separate memory")


def check_array(kind: str, out: Any) -> None:
    """Check that ``out`` is a writable array."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out= must be an array, got {type(out).__name__}")
    if not out.flags.writeable:
        raise ValueError(f"out= of {kind} is read-only")


def check_shape(kind: str, out: NDArray[Any], shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise ``ValueError`` unless ``out`` has the shape and dtype of the result."""
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"out= of {kind} must be {dtype}{list(shape)}, got {out.dtype}{list(out.shape)}")


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    there = a.__array_interface__["data"] == b.__array_interface__["data"]
    return there and a.shape == b.shape and a.strides == b.strides
