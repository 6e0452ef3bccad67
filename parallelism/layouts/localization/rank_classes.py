"""Classes of ranks that run the same program, computed for all ranks at once.

Programs of two ranks differ if uneven splits give them shards of different extents, or if they receive different
numbers of bytes.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from parallelism.arrays import Ints
from parallelism.ir.core import Extent
from parallelism.layouts.propagation import Devices
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep
from parallelism.sharding import TensorSharding

ByRank = Ints


def coordinates_of(mesh: Mesh) -> dict[str, ByRank]:
    """By axis, the place of each rank along it."""
    coordinates = np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values()))
    return dict(zip(mesh.axes, coordinates, strict=True))


class Ranks:
    """Quantities of all devices of a mesh, as arrays of shape ``(mesh.size,)`` indexed by rank."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.mesh = devices.mesh
        self._smaller: dict[Mesh, ByRank] = {}

    @cached_property
    def _coordinates(self) -> dict[str, ByRank]:
        return coordinates_of(self.mesh)

    def index(self, axes: Iterable[str]) -> ByRank:
        """The row-major index of each rank along these axes; the first axis varies slowest."""
        index = np.zeros(self.mesh.size, np.int64)
        for axis in axes:
            index = index * self.mesh.shape[axis] + self._coordinates[axis]
        return index

    def received(self, step: ReshardingStep, rank: int) -> int:
        """The bytes that ``rank`` receives in a step, which may be planned on a mesh of only some of the axes."""
        return step.bytes_received[int(self._on(step.mesh)[rank])]

    def classes(
        self, laid: Iterable[tuple[Sequence[Extent], TensorSharding]], steps: Iterable[ReshardingStep]
    ) -> ByRank:
        """The class number of each rank.  Classes are numbered in the order of their lowest ranks.

        The ranks of one class have shards of equal shapes of all tensors ``laid``, and receive equal bytes in all
        steps.
        """
        number = np.zeros(self.mesh.size, np.int64)
        for column in (*self._extents(laid), *self._bytes(steps)):
            number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1].reshape(-1)
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        return np.asarray(np.argsort(np.argsort(first))[number.reshape(-1)])

    def _on(self, mesh: Mesh) -> ByRank:
        if mesh not in self._smaller:
            self._smaller[mesh] = self.index(axis for axis in mesh.axes if axis in self.mesh.shape)
        return self._smaller[mesh]

    def _extents(self, laid: Iterable[tuple[Sequence[Extent], TensorSharding]]) -> Iterable[ByRank]:
        tensors = dict.fromkeys((tuple(shape), layout) for shape, layout in laid)
        cuts = ((n, dim.axes) for shape, layout in tensors for n, dim in zip(shape, layout.dims, strict=True))
        for extent, axes in dict.fromkeys(cut for cut in cuts if cut[1]):
            sizes = self.devices.cut(extent, axes)
            if sizes is not None:
                yield np.array(sizes, np.int64)[self.index(axes)]

    def _bytes(self, steps: Iterable[ReshardingStep]) -> Iterable[ByRank]:
        for step in dict.fromkeys(steps):
            values, numbers = np.unique(step.bytes_received, return_inverse=True)
            if len(values) > 1:
                yield numbers.reshape(-1)[self._on(step.mesh)]
