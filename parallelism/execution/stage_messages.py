"""Messages between stages that lie on meshes of their own: one for each pair of devices whose blocks overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.device_program import array_maker
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import TensorType
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.resharding.between_meshes import Slices, transfers
from parallelism.sharding import TensorSharding


class Piece(NamedTuple):
    """A part of one of the values of a message."""

    value: int
    """The number of the value."""
    part: Slices
    """The part of the device's block."""
    type: TensorType


@dataclass(frozen=True)
class Crossing:
    """Values, of these types and layouts, that go from the devices of one mesh to those of another."""

    types: tuple[TensorType, ...]
    layouts: tuple[TensorSharding, ...]
    source: Mesh
    target: Mesh

    def sent(self, place: int) -> dict[int, list[Piece]]:
        """What a device of the source sends, by the place of the receiver."""
        return self._pieces(lambda each: (each.sender, each.receiver, each.given), place)

    def received(self, place: int) -> dict[int, list[Piece]]:
        """What a device of the target receives, by the place of the sender."""
        return self._pieces(lambda each: (each.receiver, each.sender, each.taken), place)

    def local(self, mesh: Mesh, place: int) -> list[TensorType]:
        """The types of a device's blocks."""
        return [TensorType(type.dtype, layout.local_shape(_shape(type), mesh, place))
                for type, layout in zip(self.types, self.layouts, strict=True)]

    def _pieces(self, ends: Callable[[Any], tuple[int, int, Slices]], place: int) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for value, (type, layout) in enumerate(zip(self.types, self.layouts, strict=True)):
            for each in transfers(_shape(type), layout, self.source, layout, self.target):
                mine, other, part = ends(each)
                if mine == place:
                    extents = [each.stop - each.start for each in part]
                    found.setdefault(other, []).append(Piece(value, part, TensorType(type.dtype, extents)))
        return found


@dataclass(frozen=True)
class Arriving:
    """Messages under way; `wait` returns the message that they make together."""

    arrays: ArrayMaker
    types: Sequence[TensorType]
    """The types of the values in the message."""
    works: Sequence[tuple[Work[Any], Sequence[Piece]]]

    def wait(self) -> Array:
        """The values, packed."""
        values = [self.arrays.full(_shape(type), 0, type.dtype) for type in self.types]
        for work, pieces in self.works:
            arrays = unpacked(work.wait(), [piece.type for piece in pieces])
            for piece, array in zip(pieces, arrays, strict=True):
                values[piece.value][piece.part] = array
        return packed(values)

    def done(self) -> bool:
        """Whether all are there."""
        return all(work.done() for work, _ in self.works)


@dataclass(frozen=True)
class Leaving:
    """Messages that are sent."""

    works: Sequence[Work[None]]

    def wait(self) -> None:
        """Returns when all are sent."""
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        """Whether all are sent."""
        return all(work.done() for work in self.works)


def leaving(device: Device, crossing: Crossing, message: Array, ranks: Sequence[int], tag: int) -> Leaving:
    """Sends the parts of a message to the devices that need them; ``ranks`` are those of the target.

    ``device`` has its place on the source as its rank.  **Communication**: a message to each device whose blocks
    overlap with those of this one.
    """
    values = unpacked(message, crossing.local(crossing.source, device.rank))
    return Leaving([
        device.isend(packed([_contiguous(values[piece.value][piece.part]) for piece in pieces]), ranks[receiver],
                     tag=tag)
        for receiver, pieces in crossing.sent(device.rank).items()])


def arriving(device: Device, crossing: Crossing, ranks: Sequence[int], tag: int) -> Arriving:
    """Receives the parts of a message; ``ranks`` are those of the source.  **Communication**: as in `leaving`."""
    works = []
    for sender, pieces in crossing.received(device.rank).items():
        nbytes = sum(int(piece.type.nbytes) for piece in pieces)
        shape, dtype = ((nbytes,), np.uint8) if len(pieces) > 1 else (_shape(pieces[0].type), pieces[0].type.dtype)
        works.append((device.irecv(ranks[sender], tag=tag, shape=shape, dtype=dtype), pieces))
    return Arriving(array_maker(device), crossing.local(crossing.target, device.rank), works)


class StageDevice:
    """A device for which a message to another position of the pipeline is several, to devices of another mesh.

    ``crossing(tag)`` has what a message with this tag carries, and ``ranks`` the ranks at each position.
    """

    def __init__(
        self, device: Device, position: int, ranks: Mapping[int, Sequence[int]], crossing: Callable[[int], Crossing]
    ) -> None:
        self.device, self.here, self.ranks, self.crossing = device, position, ranks, crossing

    def __getattr__(self, name: str) -> Any:
        """All else is that of the device."""
        return getattr(self.device, name)

    def position(self, axes: str) -> int:
        """The position in the pipeline."""
        return self.here

    def isend(self, x: Array, dst: int, *, tag: int, axes: str) -> Leaving:
        """Sends a message to the devices at a position."""
        return leaving(self.device, self.crossing(tag), x, self.ranks[dst], tag)

    def irecv(self, src: int, *, tag: int, axes: str) -> Arriving:
        """Receives one from the devices at a position."""
        return arriving(self.device, self.crossing(tag), self.ranks[src], tag)

    def recv(self, src: int, *, tag: int, axes: str) -> Array:
        """`irecv`, and its wait."""
        return self.irecv(src, tag=tag, axes=axes).wait()


def _contiguous(array: Any) -> Any:
    return np.array(array, order="C") if isinstance(array, np.ndarray | np.generic) else array


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(map(int, type.shape))
