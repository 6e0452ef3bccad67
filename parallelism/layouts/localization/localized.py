"""From a program of whole tensors, laid out, to the program of one device.

    localized = localize(propagate(annotate(loss, {"x": TensorSharding("dp", None)}), mesh), mesh)
    localized.program(rank=0)       # local shapes; what it says to other devices stands in it as ops
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parallelism.ir.core import Extent, Function, Value
from parallelism.layouts.localization.explicit_moves import placed
from parallelism.layouts.localization.local_program import begun_at, layout_of, local_program, moves_of
from parallelism.layouts.localization.rank_classes import ByRank, Ranks
from parallelism.layouts.propagation import Devices
from parallelism.layouts.propagation.propagation import propagate
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding


class Class(NamedTuple):
    """Devices whose programs differ at most in where their parts begin."""

    rank: int
    """The lowest of them."""
    size: int
    """How many they are."""


@dataclass(frozen=True)
class Localized:
    """A program laid out on devices: of the whole, and of each of them."""

    function: Function
    """The whole: every value with its layout, every change of layout an op ``reshard``, so that each other op finds its
    inputs as it needs them."""
    devices: Devices

    @property
    def mesh(self) -> Mesh:
        """``ValueError`` if a number of devices is a symbol."""
        return self.devices.mesh

    @property
    def inputs(self) -> tuple[TensorSharding, ...]:
        """How each input is dealt out."""
        return tuple(map(layout_of, self.function.inputs))

    @property
    def outputs(self) -> tuple[TensorSharding, ...]:
        """How each output lies."""
        return tuple(map(layout_of, self.function.outputs))

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """The devices by what they do, ordered by their lowest ranks.

        Those of one class have programs with the same ops, shapes, and bytes received; only ``starts`` may differ.
        ``ValueError`` if a number of devices is a symbol.
        """
        first, counts = np.unique(self._classes, return_index=True, return_counts=True)[1:]
        return tuple(Class(int(rank), int(count)) for rank, count in zip(first, counts, strict=True))

    def class_of(self, rank: int) -> int:
        """The number of the class that a device is in."""
        return int(self._classes[rank])

    def program(self, rank: int = 0) -> Function:
        """What the device does: a function of its parts of the inputs that returns its parts of the outputs.

        Ops are those of the table, on local shapes, and between them collectives.  Random numbers and counted places
        are those that the part has in the whole.  With symbolic numbers of devices that of the first device, whose
        parts begin at 0.
        """
        if self.devices.symbolic:
            number, first = 0, 0
            place: Mapping[str, int] = dict.fromkeys(self.devices.shape, 0)
        else:
            number = self.class_of(rank)
            first = self.classes[number].rank
            place = self.mesh.index(first)
        found = self._programs.get(number)
        if found is None:
            found = self._programs[number] = local_program(
                self.function, self.devices, place,
                lambda move: 0 if self.devices.symbolic else self._ranks.received(move.step, first),
            )
        if rank == first or self.devices.symbolic:
            return found
        return begun_at(found, self.function, self.devices, self.mesh.index(rank))

    def received(self, rank: int = 0) -> tuple[int, ...]:
        """The bytes that each op of its program receives from other devices, exactly: where an array does not divide by
        the devices that reduce it, `Op.bytes_received` is that of the first of them only.  ``ValueError`` where symbols
        are left."""
        if self.devices.symbolic or self.function.symbols:
            names = sorted({*self.function.symbols, *(a for a, n in self.devices.extents if not isinstance(n, int))})
            raise ValueError(f"what a device receives is a number when there are numbers for {', '.join(names)}; "
                             f"before that Op.bytes_received is an expression")
        found = []
        for op in self.function.ops:
            if op.kind == "reshard":
                found += [self._ranks.received(move.step, rank) for move in moves_of(op, self.devices)]
            else:
                found.append(0)
        return tuple(found)

    def part(self, value: Value, rank: int = 0) -> tuple[slice, ...]:
        """Where the part of a value that the device holds lies in the whole."""
        return layout_of(value).slices(tuple(map(int, value.type.shape)), self.mesh, rank)

    @cached_property
    def _programs(self) -> dict[int, Function]:
        return {}

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(self.devices)

    @cached_property
    def _classes(self) -> ByRank:
        laid = [(value.type.shape, layout_of(value)) for value in self.function.values]
        steps = [move.step for op in self.function.ops for move in moves_of(op, self.devices)]
        return self._ranks.classes([*laid, *((step.shape, step.after) for step in steps)], steps)


def localize(function: Function, mesh: Mesh | Mapping[str, Extent]) -> Localized:
    """Lays a program out on devices: layouts that are missing are found by `propagate`.

    A number of devices may be a symbol, ``{"dp": ir.symbol("dp"), "tp": 2}``: then extents are taken to divide, and
    `Localized.program` is an expression of it.  ``ValueError`` for axes that the mesh has not, and for a program with
    collectives, which is one of a device already.
    """
    devices = Devices.of(mesh)
    return Localized(placed(propagate(function, mesh), devices), devices)
