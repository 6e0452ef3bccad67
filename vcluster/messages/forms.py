"""The values that kernels pass to collectives and messages: arrays, scalars, and tuples, lists and dicts of them.

A value travels as one contiguous array. Its *form* describes how the receiver rebuilds the value from that array.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import ARRAY, SCALAR, checked_array, is_tree
from parallelism.operation.trees import leaves, rebuild


def as_array(what: str, x: Any) -> tuple[NDArray[Any], bytes]:
    """``x`` as a C-contiguous array, and its form; ``TypeError`` for what holds no numbers."""
    array, form = checked_array(what, x)
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
