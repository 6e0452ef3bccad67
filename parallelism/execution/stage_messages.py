"""Stages on meshes of their own: a message between them is one for each pair of devices whose blocks overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.device_program import array_maker
from parallelism.execution.stage_runner import ProgramStage
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import TensorType, Value
from parallelism.layouts.stages import gradient_layout
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.operation.part import part_of
from parallelism.pipelining import Pipeline, message_user
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
        return [
            TensorType(type.dtype, layout.local_shape(_shape(type), mesh, place))
            for type, layout in zip(self.types, self.layouts, strict=True)
        ]

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
    works = []
    for receiver, pieces in crossing.sent(device.rank).items():
        parts = [_contiguous(values[piece.value][piece.part]) for piece in pieces]
        works.append(device.isend(packed(parts), ranks[receiver], tag=tag))
    return Leaving(works)


def arriving(device: Device, crossing: Crossing, ranks: Sequence[int], tag: int) -> Arriving:
    """Receives the parts of a message; ``ranks`` are those of the source.  **Communication**: as in `leaving`."""
    works = []
    for sender, pieces in crossing.received(device.rank).items():
        nbytes = sum(int(piece.type.nbytes) for piece in pieces)
        shape, dtype = (
            ((nbytes,), np.uint8) if len(pieces) > 1 else (_shape(pieces[0].type), pieces[0].type.dtype)
        )
        works.append((device.irecv(ranks[sender], tag=tag, shape=shape, dtype=dtype), pieces))
    return Arriving(array_maker(device), crossing.local(crossing.target, device.rank), works)


class OwnMeshes:
    """The mesh at each position of a pipeline, on consecutive ranks of all devices.

    All have the same axes: one that is not given to a mesh has one device there.
    """

    def __init__(self, given: Sequence[Mesh]) -> None:
        axes = {axis: 1 for each in given for axis in each.axes}
        self.meshes = [Mesh(**{**each.shape, **axes, **each.shape}) for each in given]
        ends = accumulate((each.size for each in given), initial=0)
        self.ranks = [range(start, end) for start, end in pairwise(ends)]
        """The ranks at each position."""
        self.places = [(position, 0) for position, ranks in enumerate(self.ranks) for _ in ranks]
        """By rank, its position and 0 for the only replica."""

    def place(self, rank: int) -> int:
        """The rank on the mesh at its position."""
        return rank - self.ranks[self.places[rank][0]][0]

    def part(self, device: Device, together: str) -> Device:
        """The device on the mesh at its position; the first devices of all meshes lie on an axis ``together``."""
        position, _ = self.places[device.rank]
        return part_of(
            device,
            self.meshes[position],
            self.ranks[position],
            (together, [ranks[0] for ranks in self.ranks]),
        )

    def exchanged(
        self, device: Device, values: Sequence[Value], mine: Array, here: int, other: int, tag: int
    ) -> Array:
        """The sums of another position for weights that both have, as one array, in exchange for those of this one.

        ``device`` is the part of one at a position.  **Communication**: as in `leaving`.
        """
        layouts = tuple(gradient_layout(value.layout) for value in values if value.layout)
        types = tuple(TensorType(mine.dtype, value.type.shape) for value in values)
        out, back = (
            Crossing(types, layouts, self.meshes[source], self.meshes[target])
            for source, target in ((here, other), (other, here))
        )
        message = mine.view(np.uint8)
        if len(values) == 1:
            message = mine.reshape(_shape(out.local(out.source, device.rank)[0]))
        sent = leaving(device, out, message, self.ranks[other], tag)
        received = arriving(device, back, self.ranks[other], tag).wait()
        sent.wait()
        return np.ravel(received).view(mine.dtype)


class StageDevice:
    """A device for which a message to another position of the pipeline is several, to devices of another mesh."""

    def __init__(
        self,
        device: Device,
        here: int,
        own: OwnMeshes,
        pipeline: Pipeline,
        stages: Mapping[int, ProgramStage],
    ) -> None:
        self.device, self.here, self.own, self.pipeline, self.stages = device, here, own, pipeline, stages
        self._crossings: dict[Any, Crossing] = {}

    def crossing(self, tag: int) -> Crossing:
        """The values that a message with this tag carries."""
        user, kind, microbatch = message_user(self.pipeline, tag)
        lower, upper = (user - 1, user) if kind == "F" else (user, user + 1)
        above = upper in self.stages
        mine = self.stages[upper if above else lower]
        key = user, kind == "F", mine.programs.alike(mine.parts[microbatch])
        if key not in self._crossings:
            numbers, functions = mine.programs.numbers(key[2]), mine.programs.functions
            forward = {value.name: value for value in (*functions.forward.outputs, *functions.forward.inputs)}
            if kind == "F":
                names = functions.received if above else functions.sent
            else:
                names = functions.returned if above else functions.answered
            ends = [self.own.meshes[self.pipeline.schedule.placement[stage]] for stage in (lower, upper)]
            source, target = ends if kind == "F" else ends[::-1]
            values = [forward[name] for name in names]
            self._crossings[key] = Crossing(
                tuple(value.type.specialize(numbers) for value in values),
                tuple(gradient_layout(value.layout) for value in values if value.layout),
                source,
                target,
            )
        return self._crossings[key]

    def __getattr__(self, name: str) -> Any:
        """All else is that of the device."""
        return getattr(self.device, name)

    def position(self, axes: str) -> int:
        """The position in the pipeline."""
        return self.here

    def isend(self, x: Array, dst: int, *, tag: int, axes: str) -> Leaving:
        """Sends a message to the devices at a position."""
        return leaving(self.device, self.crossing(tag), x, self.own.ranks[dst], tag)

    def irecv(self, src: int, *, tag: int, axes: str) -> Arriving:
        """Receives one from the devices at a position."""
        return arriving(self.device, self.crossing(tag), self.own.ranks[src], tag)

    def recv(self, src: int, *, tag: int, axes: str) -> Array:
        """Receives a message, and waits for it."""
        return self.irecv(src, tag=tag, axes=axes).wait()


def _contiguous(array: Any) -> Any:
    return np.array(array, order="C") if isinstance(array, np.ndarray | np.generic) else array


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(map(int, type.shape))


def whole_of(meshes: Sequence[Mesh]) -> Mesh:
    """The mesh with the least common multiples of the extents of meshes that have the same axes."""
    extents = {}
    for axis in meshes[0].axes:
        extents[axis] = lcm(*(mesh.shape[axis] for mesh in meshes))
    return Mesh(**extents)
