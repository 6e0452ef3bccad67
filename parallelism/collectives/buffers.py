"""The chunks that one position holds while an algorithm runs, by number, as NumPy arrays.

    held = start(algorithm, position, x)                       # before the first step
    held = arrive(held, messages, position, op)                # once for each step
    result = finish(algorithm, position, held, x)              # after the last

It is arithmetic only: vcluster moves the messages over channels, `parallelism.collectives.explanation` within one
process.  Held arrays are never written to, so a chunk may be a view of ``x`` and travel without a copy; a step's
messages are taken (`outgoing`) before the step's arrivals are applied.  A result may be a view too.

What chunk number c is:

    all_reduce, reduce              piece c of x in C order, split by `numpy.array_split`; a single
    broadcast                       chunk is x itself, so it carries its shape
    all_gather, gather, all_scatter,
    permute                         the array of position c
    reduce_scatter, scatter         block c of x along dim
    all_to_all                      block c % g of position c // g, along dim
    barrier                         there are none
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import ARRAYS, BLOCKS, BLOCKS_OF_ALL, PIECES, Algorithm, Transfer, kind_of
from parallelism.arrays import Array
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts

Held = dict[int, Array]


class Message(NamedTuple):
    """What arrives: a `Transfer` with its arrays, one for each of its chunks."""

    source: int
    chunks: tuple[int, ...]
    arrays: Sequence[Array]
    reduce: bool


def start(
    algorithm: Algorithm, position: int, x: Array | None, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Held:
    """The chunks that ``position`` holds before the first step; ``x`` is its value.

    ``dim`` and ``sizes`` cut the blocks of reduce_scatter, scatter and all_to_all (``dim`` is its split_dim).  Without
    ``sizes`` the cut is that of `numpy.array_split`.  ``x`` is ignored, and may be None, at positions that give no
    array: all but the root of broadcast and scatter, all of a barrier.  Raises ``ValueError`` for a 0-d array, for a
    dim that cannot be cut, and for sizes that do not add up.
    """
    collective, size = algorithm.collective, algorithm.size
    kind = kind_of(collective)
    if not kind.is_given_by(position, algorithm.root):
        return {}
    if x is None:
        raise ValueError(f"{collective} needs an array at position {position}, got None")
    if kind.unit == ARRAYS:
        return {position: x}
    if kind.cuts:
        first = position * size if kind.unit == BLOCKS_OF_ALL else 0
        return dict(enumerate(_blocks(collective, x, size, dim, sizes), first))
    return (
        {0: x}
        if algorithm.chunks == 1
        else dict(enumerate(_blocks(collective, x.reshape(-1), algorithm.chunks, 0, None)))
    )


def outgoing(held: Mapping[int, Array], transfer: Transfer) -> list[Array]:
    """The arrays of a message that ``transfer.source`` sends."""
    return [held[chunk] for chunk in transfer.chunks]


def arrive(
    held: Mapping[int, Array],
    messages: Sequence[Message],
    position: int,
    op: Callable[[Array, Array], Array] | None = None,
) -> Held:
    """The chunks that ``position`` holds after a step in which ``messages`` arrived.

    Reducing messages are combined with the position's own value in order of position, two at a time:
    ``op(op(x0, x1), x2)``; they may come in any order.  Other messages replace what was held.
    """
    after = dict(held)
    terms: dict[int, list[tuple[int, Array]]] = {}
    for source, chunks, arrays, reduce in messages:
        for chunk, array in zip(chunks, arrays, strict=True):
            if reduce:
                terms.setdefault(chunk, [(position, held[chunk])]).append((source, array))
            else:
                after[chunk] = array
    for chunk, summands in terms.items():
        if op is None:
            raise ValueError(
                f"position {position} received a message with values to reduce, and the call has no op"
            )
        summands.sort(key=lambda term: term[0])
        total = summands[0][1]
        for _, term in summands[1:]:
            total = np.asarray(op(total, term))
        after[chunk] = total
    return after


def finish(
    algorithm: Algorithm,
    position: int,
    held: Mapping[int, Array],
    x: Array | None = None,
    *,
    dim: int = 0,
    shape: Sequence[int] | None = None,
) -> Any:
    """The result at ``position``: an array, a list of them for all_scatter, None where there is none.

    ``x`` is the position's own value, for its shape (all_reduce, reduce) and for the zeros of a permute without
    a source.  ``dim`` is where all_gather and gather join, and the concat_dim of all_to_all.  ``shape`` is for a
    broadcast in several chunks, whose receivers know none; no algorithm has one so far.
    """
    collective, size, root = algorithm.collective, algorithm.size, algorithm.root
    kind = kind_of(collective)
    if not kind.is_got_by(position, root):
        return None
    if kind.unit == PIECES:
        if algorithm.chunks == 1:
            return held[0]
        if shape is None:
            if x is None:
                raise ValueError(f"{collective} in {algorithm.chunks} chunks needs the shape of its result")
            shape = x.shape
        return np.concatenate([held[i] for i in range(algorithm.chunks)]).reshape(shape)
    if kind.unit == BLOCKS:
        return held[position]
    sources = kind.sources_of(position, size, root, algorithm.pairs)
    if not sources:
        return np.zeros_like(x)
    arrays = sources_held(algorithm, position, held)
    if kind.joins:
        return np.stack(arrays) if arrays[0].ndim == 0 else np.concatenate(arrays, axis=dim)
    if kind.function is not None:
        return np.asarray(kind.function(arrays))
    return arrays if kind.lists else arrays[0]


def sources_held(algorithm: Algorithm, position: int, held: Mapping[int, Array]) -> list[Array]:
    """The arrays, or blocks of them, that the result at ``position`` is made of, in group order."""
    kind, size = kind_of(algorithm.collective), algorithm.size
    sources = kind.sources_of(position, size, algorithm.root, algorithm.pairs)
    if kind.unit == BLOCKS_OF_ALL:
        sources = tuple(source * size + position for source in sources)
    return [held[chunk] for chunk in sources]


def chunk_nbytes(
    algorithm: Algorithm,
    shapes: Sequence[Sequence[int] | None],
    itemsize: int,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The bytes of every chunk, from the shape of every position's value; what `Algorithm.bytes_sent` asks for.

    ``shapes`` by position; only those that count are looked at: the root's for broadcast and scatter, the first
    where all are alike.  ``sizes`` are those of all positions; if each position of an all_to_all has its own
    sizes, combine them with `all_to_all_nbytes`.
    """
    kind, size = kind_of(algorithm.collective), algorithm.size
    if not kind.moves:
        return ()
    if kind.unit == ARRAYS:
        return tuple(itemsize * prod(_known(shapes, position)) for position in range(size))
    if kind.unit == BLOCKS_OF_ALL:
        return all_to_all_nbytes([_known(shapes, p) for p in range(size)], itemsize, dim, [sizes] * size)
    shape = _known(shapes, algorithm.root)
    if kind.cuts:
        return block_nbytes(shape, itemsize, size, dim, sizes)
    return tuple(itemsize * n for n in split_sizes(prod(shape), (algorithm.chunks,)))


def all_to_all_nbytes(
    shapes: Sequence[Sequence[int]], itemsize: int, dim: int, sizes: Sequence[Sequence[int] | None]
) -> tuple[int, ...]:
    """The bytes of every block of an all_to_all, from each position's shape and its sizes of blocks along ``dim``."""
    return tuple(
        n
        for shape, cut in zip(shapes, sizes, strict=True)
        for n in block_nbytes(shape, itemsize, len(shapes), dim, cut)
    )


def block_nbytes(
    shape: Sequence[int], itemsize: int, size: int, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """The bytes of every block of one array, cut along ``dim``."""
    rest = itemsize * prod(n for d, n in enumerate(shape) if d != dim % len(shape))
    return tuple(n * rest for n in (sizes or split_sizes(shape[dim], (size,))))


def _blocks(collective: str, x: Array, size: int, dim: int, sizes: Sequence[int] | None) -> list[Array]:
    before = (slice(None),) * normal_dim(collective, dim, x.ndim)
    places = starts(pieces(collective, x.shape[dim], dim, sizes, (size,), size))
    return [x[(*before, slice(a, b))] for a, b in pairwise(places)]


def normal_dim(kind: str, dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    if ndim == 0:
        raise ValueError(f"{kind} splits its array along a dim, and a 0-d one has none")
    if not -ndim <= dim < ndim:
        raise ValueError(f"{kind} of an array of {ndim} dims has dims {-ndim} to {ndim - 1}, got {dim}")
    return dim % ndim


def pieces(
    kind: str, extent: int, dim: int, sizes: Sequence[int] | None, factors: Sequence[int], size: int
) -> tuple[int, ...]:
    """The extents of the pieces along a dim of ``extent``, one for each of ``size`` members.

    They are the caller's ``sizes``, checked, or those of `split_sizes` with ``factors``.
    """
    if sizes is None:
        return split_sizes(extent, tuple(factors))
    checked = tuple(sizes)
    negative = any(part < 0 for part in checked)
    if len(checked) != size or negative or sum(checked) != extent:
        raise ValueError(
            f"{kind} over {size} ranks needs {size} split_sizes that add up to {extent}, the extent of dim {dim}"
            f"{', and none below 0' * negative}; got {list(checked)}"
        )
    return checked


def _known(shapes: Sequence[Sequence[int] | None], position: int) -> Sequence[int]:
    shape = shapes[position]
    if shape is None:
        raise ValueError(f"the shape of position {position} is needed, got None")
    return shape
