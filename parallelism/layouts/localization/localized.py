"""Localization turns a program of whole tensors with layouts into the program of each device.

localized = localize(propagate(annotate(loss, {"x": TensorSharding("dp", None)}), mesh), mesh)
localized.program(rank=0)       # local shapes; communication appears as ops
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parallelism.ir.core import Extent, Function, Value
from parallelism.ir.passes.chunked_collectives import candidates, chunked_over, in_chunks
from parallelism.layouts.localization.explicit_moves import placed
from parallelism.layouts.localization.local_program import begun_at, layout_of, local_program, moves_of
from parallelism.layouts.localization.rank_classes import ByRank, Ranks
from parallelism.layouts.localization.token_orders import with_orders
from parallelism.layouts.propagation import Devices
from parallelism.layouts.propagation.propagation import propagate
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep
from parallelism.sharding import TensorSharding


class Class(NamedTuple):
    """Equal devices: their programs differ at most in the positions of their shards."""

    rank: int
    """The lowest rank of the class."""
    size: int
    """The number of devices in the class."""


@dataclass(frozen=True)
class Localized:
    """A program laid out on devices: the program of whole tensors, and that of each device."""

    function: Function
    """The program of whole tensors.  Every value has a layout, and every change of layout is a ``reshard`` op, so
    each other op has its inputs in the layouts that it needs."""
    devices: Devices
    """The mesh, possibly with symbolic extents."""
    _programs: dict[int, Function] = field(default_factory=dict, init=False, repr=False, compare=False)
    _whole: dict[int, Function] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The programs before collectives were cut."""

    @property
    def mesh(self) -> Mesh:
        """The mesh.  ``ValueError`` if a number of devices is a symbol."""
        return self.devices.mesh

    @property
    def inputs(self) -> tuple[TensorSharding, ...]:
        """The layout of each input."""
        return tuple(map(layout_of, self.function.inputs))

    @property
    def outputs(self) -> tuple[TensorSharding, ...]:
        """The layout of each output."""
        return tuple(map(layout_of, self.function.outputs))

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """The classes of equal devices, ordered by their lowest ranks.

        Programs of one class have the same ops, shapes and bytes received; only the attributes ``starts`` and
        ``first`` may differ.
        ``ValueError`` if a number of devices is a symbol.
        """
        first, counts = np.unique(self._classes, return_index=True, return_counts=True)[1:]
        return tuple(Class(int(rank), int(count)) for rank, count in zip(first, counts, strict=True))

    def class_of(self, rank: int) -> int:
        """The number of the class that a rank belongs to."""
        return int(self._classes[rank])

    def class_in_time(self, rank: int) -> int:
        """The number of the ranks that take as long as ``rank``: one or several classes (`class_of`).

        Where the members of an all_reduce receive different numbers of bytes, these differ by an element at most, which
        has no price.
        """
        return int(self._classes_in_time[rank])

    def program(self, rank: int = 0) -> Function:
        """The program of a rank: a function from its shards of the inputs to its shards of the outputs.

        Its ops work on local shapes, and collectives stand between them.  Random numbers and ``iota`` have the values
        of this part of the whole tensor.  If a number of devices is symbolic, the result is the program of rank 0,
        whose shards begin at 0.
        """
        if self.devices.symbolic:
            number, first = 0, 0
            place: Mapping[str, int] = dict.fromkeys(self.devices.shape, 0)
        else:
            number = self.class_of(rank)
            first = self.classes[number].rank
            place = self.mesh.index(first)
        program = self._programs.get(number)
        if program is None:
            program = self._programs[number] = self._with_chunks(self._local(number, first, place))
        if rank == first or self.devices.symbolic:
            return program
        return begun_at(program, self.function, self.devices, self.mesh.index(rank))

    def _local(self, number: int, first: int, place: Mapping[str, int]) -> Function:
        """The program of a class, its collectives as they follow from the layouts."""
        if number not in self._whole:
            self._whole[number] = local_program(
                self.function,
                self.devices,
                place,
                lambda move: 0 if self.devices.symbolic else self._ranks.received(move.step, first),
            )
        return self._whole[number]

    def _with_chunks(self, program: Function) -> Function:
        """A program with collectives in chunks, if the function says so: the same ones in the programs of all devices.
        Those of symbols stay whole."""
        axis = chunked_over(self.function)
        if axis is None or self.devices.symbolic:
            return program
        return in_chunks(program, axis, self._cut)

    @cached_property
    def _cut(self) -> frozenset[int]:
        """The collectives that can be cut on all devices, by the number of the op."""
        axis = chunked_over(self.function) or ""
        found = [
            {*candidates(self._local(number, each.rank, self.mesh.index(each.rank)), axis)}
            for number, each in enumerate(self.classes)
        ]
        return frozenset(set[int].intersection(*found))

    def received(self, rank: int = 0) -> tuple[int, ...]:
        """The exact number of bytes that a rank receives in each op of its program.

        `Op.bytes_received` is exact only for the first member of a group if an array does not divide by the group.
        ``ValueError`` if symbols are left.
        """
        if self.devices.symbolic or self.function.symbols:
            names = sorted(
                {*self.function.symbols, *(a for a, n in self.devices.extents if not isinstance(n, int))}
            )
            raise ValueError(
                f"the bytes that a device receives are known only with numbers for {', '.join(names)}; "
                f"Op.bytes_received is an expression of these symbols"
            )
        received: list[int] = []
        for op in self.function.ops:
            moved = [self._ranks.received(move.step, rank) for move in moves_of(op, self.devices)]
            received += moved if op.kind == "reshard" else [0]
        return tuple(received)

    def part(self, value: Value, rank: int = 0) -> tuple[slice, ...]:
        """The slices of the whole tensor that a rank holds of a value."""
        return layout_of(value).slices(tuple(map(int, value.type.shape)), self.mesh, rank)

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(self.devices)

    @cached_property
    def _steps(self) -> list[ReshardingStep]:
        return [move.step for op in self.function.ops for move in moves_of(op, self.devices)]

    @cached_property
    def _classes(self) -> ByRank:
        return self._numbered(self._steps)

    @cached_property
    def _classes_in_time(self) -> ByRank:
        return self._numbered([step for step in self._steps if step.kind != "all_reduce"])

    def _numbered(self, counted: Sequence[ReshardingStep]) -> ByRank:
        """The classes of ranks that have shards of equal shapes and receive equal bytes in the steps ``counted``."""
        laid = [(value.type.shape, layout_of(value)) for value in self.function.values]
        return self._ranks.classes([*laid, *((step.shape, step.after) for step in self._steps)], counted)


def localize(function: Function, mesh: Mesh | Mapping[str, Extent]) -> Localized:
    """Lay a program out on devices.  `propagate` fills in missing layouts.

    A number of devices may be a symbol, ``{"dp": ir.symbol("dp"), "tp": 2}``.  Splits are then assumed to be even, and
    shapes in `Localized.program` are expressions of the symbol.  ``ValueError`` for an axis that the mesh does not
    have, and for a program with collectives, because that is the program of one device already.
    """
    devices = Devices.of(mesh)
    return Localized(placed(propagate(with_orders(function, devices), mesh), devices), devices)
