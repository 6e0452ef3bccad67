"""Which devices do the same, found for all of them at once: what differs are extents of uneven parts, and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parallelism.ir.core import Extent
from parallelism.layouts.propagation import Axes, Devices
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep
from parallelism.sharding import TensorSharding

ByRank = NDArray[np.int64]


class Ranks:
    """The devices of a mesh, by rank."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.mesh = devices.mesh
        self._smaller: dict[Mesh, ByRank] = {}
        self._received: dict[ReshardingStep, ByRank] = {}

    @cached_property
    def _coordinates(self) -> dict[str, ByRank]:
        sizes = tuple(self.mesh.shape.values())
        return dict(zip(self.mesh.axes, np.unravel_index(np.arange(self.mesh.size), sizes), strict=True))

    def index(self, axes: Iterable[str]) -> ByRank:
        """By rank, the number among those that differ along these axes, the first the slowest."""
        found = np.zeros(self.mesh.size, np.int64)
        for axis in axes:
            found = found * self.mesh.shape[axis] + self._coordinates[axis]
        return found

    def received(self, step: ReshardingStep, rank: int) -> int:
        """The bytes that a device receives in a step on a mesh of some of the axes."""
        return int(self._all_received(step)[self._on(step.mesh)[rank]])

    def classes(
        self, laid: Iterable[tuple[Sequence[Extent], TensorSharding]], steps: Iterable[ReshardingStep]
    ) -> ByRank:
        """By rank, the number of its class, in the order of their lowest ranks.

        Those of one class have parts of the same shapes of all these tensors, and receive the same bytes in all steps.
        """
        number = np.zeros(self.mesh.size, np.int64)
        for column in (*self._extents(laid), *self._bytes(steps)):
            number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1].reshape(-1)
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))
        return np.asarray(order[number.reshape(-1)])

    def _on(self, mesh: Mesh) -> ByRank:
        found = self._smaller.get(mesh)
        if found is None:
            found = self._smaller[mesh] = self.index(axis for axis in mesh.axes if axis in self.mesh.shape)
        return found

    def _all_received(self, step: ReshardingStep) -> ByRank:
        found = self._received.get(step)
        if found is None:
            found = self._received[step] = np.array(step.bytes_received, np.int64)
        return found

    def _extents(self, laid: Iterable[tuple[Sequence[Extent], TensorSharding]]) -> Iterable[ByRank]:
        cuts: dict[tuple[Extent, Axes], None] = {}
        for shape, layout in dict.fromkeys((tuple(shape), layout) for shape, layout in laid):
            cuts.update(((n, dim.axes), None) for n, dim in zip(shape, layout.dims, strict=True) if dim.axes)
        for extent, axes in cuts:
            sizes = self.devices.cut(extent, axes)
            if sizes is not None:
                yield np.array(sizes, np.int64)[self.index(axes)]

    def _bytes(self, steps: Iterable[ReshardingStep]) -> Iterable[ByRank]:
        for step in dict.fromkeys(steps):
            received = self._all_received(step)
            if received.min() != received.max():
                yield np.unique(received, return_inverse=True)[1].reshape(-1)[self._on(step.mesh)]
