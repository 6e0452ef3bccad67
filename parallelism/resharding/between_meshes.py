"""Messages that bring a tensor from the devices of one mesh to those of another: the overlaps of their blocks.

sender 0   rows 0-3  ──> receiver 0  rows 0-1
                     └─> receiver 1  rows 2-3
sender 1   rows 4-5  ──> receiver 2  rows 4-5
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

Slices = tuple[slice, ...]


class Transfer(NamedTuple):
    """A part of a tensor that one device sends to another."""

    sender: int
    """The rank on the mesh that has the tensor."""
    receiver: int
    """The rank on the mesh that gets it."""
    given: Slices
    """The part, of the sender's block."""
    taken: Slices
    """The part, of the receiver's block."""


@lru_cache(maxsize=4096)
def transfers(
    shape: tuple[int, ...],
    source: TensorSharding,
    source_mesh: Mesh,
    target: TensorSharding,
    target_mesh: Mesh,
) -> tuple[Transfer, ...]:
    """The messages after which each device of ``target_mesh`` has its block of a tensor of ``shape``.

    Each device receives each element of its block once.  Where several devices of ``source_mesh`` have the same block,
    the receivers take turns: between equal meshes and layouts, equal ranks send to each other.  The order is that of
    receivers, then of blocks.  ``ValueError`` for a source with a pending reduction, and for layouts that do not fit.
    """
    if source.partial or target.partial:
        raise ValueError(
            f"what is sent between meshes has no reduction pending, got {source!r} and {target!r}"
        )
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(source_mesh.size):
        holders.setdefault(_block(source, shape, source_mesh, rank), []).append(rank)
    asked = dict.fromkeys(holders, 0)
    found = []
    for receiver in range(target_mesh.size):
        mine = _block(target, shape, target_mesh, receiver)
        for block, ranks in holders.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, mine, strict=True)]
            if all(start < stop for start, stop in common):
                sender = ranks[asked[block] % len(ranks)]
                asked[block] += 1
                found.append(Transfer(sender, receiver, _inside(common, block), _inside(common, mine)))
    return tuple(found)


def _block(
    layout: TensorSharding, shape: Sequence[int], mesh: Mesh, rank: int
) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in layout.slices(shape, mesh, rank))


def _inside(part: Sequence[tuple[int, int]], block: Sequence[tuple[int, int]]) -> Slices:
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, block, strict=True)
    )
