"""One collective as it is counted: what each member says of it, what it would receive, and zeros of the right shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives import ARRAY, Algorithm, all_to_all_nbytes, chunk_nbytes
from parallelism.collectives.algorithms import algorithm

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Said:
    """A collective as one member calls it."""

    kind: str
    value: Any
    """Of the shape and dtype that take part; None where this member gives nothing."""
    dim: int = 0
    concat_dim: int = 0
    sizes: tuple[int, ...] = ()
    """Extents of the pieces along ``dim``."""
    root: int = 0
    pairs: tuple[tuple[int, int], ...] | None = None
    algorithm: str | None = None
    told: Any = None
    """What the others are to know, besides what is counted."""

    op: str | None = None
    form: bytes = ARRAY
    """What the array was: see `parallelism.collectives.arguments`."""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None where this member gives nothing, as for `shape`."""
        return None if self.value is None else self.value.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of what takes part."""
        return None if self.value is None else self.value.shape

    def steps(self, size: int) -> Algorithm:
        """The algorithm as data."""
        return algorithm(self.kind, self.algorithm, size, root=self.root, pairs=self.pairs)


def chunk_sizes(everybody: Sequence[Said]) -> tuple[int, ...]:
    """The bytes of every chunk, as the algorithm numbers them."""
    giver = next((said for said in everybody if said.value is not None), None)
    if giver is None:
        return ()
    shapes = [None if said.value is None else said.value.shape for said in everybody]
    if giver.kind == "all_to_all":
        known = [shape for shape in shapes if shape is not None]
        return all_to_all_nbytes(known, giver.value.itemsize, giver.dim, [said.sizes for said in everybody])
    steps, sizes = giver.steps(len(everybody)), giver.sizes or None
    return chunk_nbytes(steps, shapes, giver.value.itemsize, dim=giver.dim, sizes=sizes)


def result(everybody: Sequence[Said], position: int, x: Any) -> Any:
    """What the member at ``position`` gets: zeros."""
    said = everybody[position]
    root = everybody[said.root]
    match said.kind:
        case "barrier":
            return None
        case "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all":
            found = _made(everybody, position)
            return found if isinstance(x, np.ndarray) or found.ndim else found[()]
        case "reduce" | "gather":
            return _made(everybody, position) if position == said.root else None
        case "broadcast":
            return zeros(root.value if root.told is None else root.told)
        case "scatter":
            return _zeros_of(root.value, {root.dim: root.sizes[position]})
        case "all_scatter":
            return [zeros(other.value) for other in everybody]
    source = next((everybody[s] for s, t in said.pairs or () if t == position), None)
    return zeros(x) if source is None else zeros(source.value if source.told is None else source.told)


def _made(everybody: Sequence[Said], position: int) -> Array:
    said = everybody[position]
    match said.kind:
        case "all_gather" | "gather":
            if said.value.ndim == 0:
                return np.zeros(len(everybody), said.value.dtype)
            return _zeros_of(said.value, {said.dim: sum(other.value.shape[said.dim] for other in everybody)})
        case "reduce_scatter":
            return _zeros_of(said.value, {said.dim: said.sizes[position]})
        case "all_to_all":
            def part(other: Said) -> int:
                joined: int = other.value.shape[said.concat_dim]
                return other.sizes[position] if said.dim == said.concat_dim else joined

            extents = {said.dim: said.sizes[position], said.concat_dim: sum(map(part, everybody))}
            return _zeros_of(said.value, extents)
    return np.zeros(said.value.shape, said.value.dtype)


def _zeros_of(like: Array, extents: dict[int, int]) -> Array:
    return np.zeros([extents.get(d, n) for d, n in enumerate(like.shape)], like.dtype)


def blank(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Zeros that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def zeros(value: Any) -> Any:
    """Zeros in the shape of a value, a tree of arrays or one."""
    if isinstance(value, dict):
        return {key: zeros(child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = [zeros(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    array = np.zeros(np.shape(value), np.asarray(value).dtype)
    return array if isinstance(value, np.ndarray) else array[()]
