"""The outputs of a run joined to whole arrays: one array of each rank, or a tuple, list or dict of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parallelism.display.quantities import shortened
from parallelism.mesh import Mesh
from parallelism.operation import ranks_in_words
from parallelism.sharding import TensorSharding
from vcluster.runs.replicas import warn_of_replicas


def joined(
    outputs: Sequence[Any], layout: Any, mesh: Mesh, name: str = "the output", *, stacklevel: int = 2
) -> Any:
    """The whole arrays of outputs by rank.  ``layout`` is a `TensorSharding`, its text, or has the form of an output.

    ``stacklevel`` is that of a `ReplicasDifferWarning`.
    """
    if isinstance(layout, Mapping):
        keys = list(layout)
        form = f"a dict with {', '.join(map(repr, keys))}"
        _check_form(outputs, form, lambda each: _has_keys(each, keys), name)
        items = {}
        for key, part in layout.items():
            parts = [output[key] for output in outputs]
            items[key] = joined(parts, part, mesh, f"{name}[{key!r}]", stacklevel=stacklevel + 1)
        return items
    if isinstance(layout, tuple | list):
        count = len(layout)
        _check_form(outputs, f"a tuple or list of {count}", lambda each: _has_length(each, count), name)
        found = []
        for place, part in enumerate(layout):
            parts = [output[place] for output in outputs]
            found.append(joined(parts, part, mesh, f"{name}[{place}]", stacklevel=stacklevel + 1))
        return tuple(found)
    sharding = TensorSharding.parse(layout, mesh) if isinstance(layout, str) else layout
    if not hasattr(sharding, "unshard"):
        raise TypeError(
            "unshard takes a TensorSharding, its text such as '[dp, None]', or a tuple, list or dict of these in "
            f"the form of the outputs; got {shortened(layout)}"
        )
    _check_there(outputs, name)
    try:
        whole = sharding.unshard(outputs, mesh)
    except ValueError:
        _check_single(outputs, name)
        raise
    if isinstance(sharding, TensorSharding):
        warn_of_replicas(outputs, sharding, mesh, name, stacklevel + 1)
    return whole


def _has_keys(output: Any, keys: Sequence[Any]) -> bool:
    return isinstance(output, Mapping) and all(key in output for key in keys)


def _has_length(output: Any, count: int) -> bool:
    return isinstance(output, tuple | list) and len(output) == count


def _check_form(outputs: Sequence[Any], form: str, has: Callable[[Any], bool], name: str) -> None:
    for rank, output in enumerate(outputs):
        if not has(output):
            raise ValueError(f"the layouts are for {form}; {name} of rank {rank} is {_told(output)}")


def _check_there(outputs: Sequence[Any], name: str) -> None:
    """``ValueError`` for outputs that are None."""
    silent = [rank for rank, output in enumerate(outputs) if output is None]
    if len(silent) == len(outputs):
        raise ValueError(
            f"{name} is None on every rank, and there is nothing to join: the kernel's return is missing"
        )
    if silent:
        first = next(rank for rank in range(len(outputs)) if rank not in silent)
        raise ValueError(
            f"{name} is None on {ranks_in_words(silent)}, as after a reduce or a gather to one rank: there is nothing "
            f"to join, and run[{first}] has what rank {first} returned"
        )


def _check_single(outputs: Sequence[Any], name: str) -> None:
    """``ValueError`` for outputs that are several arrays."""
    for rank, output in enumerate(outputs):
        if isinstance(output, Mapping):
            form = "{'w': layout}"
        elif isinstance(output, tuple | list) and any(isinstance(each, np.ndarray) for each in output):
            form = f"({', '.join(['layout'] * len(output))})"
        else:
            continue
        raise ValueError(
            f"{name} of rank {rank} is {_told(output)}, not one array: give unshard a layout for each, as {form}"
        )


def _told(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a dict with {', '.join(map(repr, list(output)[:4]))}{', ...' * (len(output) > 4)}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}"
    return f"an array of shape {output.shape}" if hasattr(output, "shape") else f"a {type(output).__name__}"
