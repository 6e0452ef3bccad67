"""`WholeBatch`: what devices compute of all rows of a batch, before the first action of their stages and after the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallelism.arrays import Array
from parallelism.execution.device_program import ACTIVATIONS, DeviceProgram
from parallelism.execution.overlapping import arranged
from parallelism.ir import Function, TensorType, Value
from parallelism.layouts.localization import Localized
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.stages import Stages
from parallelism.layouts.stages.backwards import needed_ops
from parallelism.layouts.stages.microbatches import batch_dim
from parallelism.layouts.stages.stages import with_numbers
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import dims_of, layout


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """The beginning and the ending of some stages: see `parallelism.layouts.stages.beginnings`."""

    stages: Stages
    fused: bool | str

    def known_at(self, numbers: Collection[int]) -> frozenset[str]:
        """The names of what the stages of these numbers need of the beginning; the last one returns the results."""
        read = {name for number in numbers for name in self.stages.functions[number].weights}
        if len(self.stages) - 1 in numbers:
            read.update(self.stages.results)
            if self.stages.ending:
                read.update(value.name for value in self.stages.ending.inputs)
        return self.stages.known & read

    @memoized
    def beginning(
        self,
        names: frozenset[str],
        rows: int,
        numbers: tuple[tuple[str, int], ...],
        mesh: Mesh,
        replicas: tuple[str, ...],
    ) -> Beginning:
        """What computes the values of these names on ``mesh``, for a batch of so many rows."""
        return Beginning.of(
            self.stages, names, {**dict(numbers), self.stages.batch: rows}, mesh, replicas, self.fused
        )

    def results(
        self,
        device: Device,
        rows: int,
        numbers: tuple[tuple[str, int], ...],
        known: Mapping[str, Array],
        totals: Sequence[Array],
    ) -> tuple[Array, ...]:
        """The loss and its metrics, from the sums over all rows of what the last stage returns.

        ``known`` has what the beginning computed, by name.
        """
        names = (value.name for value in self.stages.function.outputs)
        found = {**known, **dict(zip(names, totals, strict=True))}
        if self.stages.ending is not None:
            ending = self._ending(rows, numbers)
            results = ending.run(device, [found[value.name] for value in ending.function.inputs])
            made = (value.name for value in ending.function.outputs)
            found.update(zip(made, results, strict=True))
        return tuple(found[name] for name in self.stages.results)

    @memoized
    def _ending(self, rows: int, numbers: tuple[tuple[str, int], ...]) -> DeviceProgram:
        assert self.stages.ending is not None
        known = {**dict(numbers), self.stages.batch: rows}
        return DeviceProgram(with_numbers(self.stages.ending, known), {})


@dataclass(frozen=True, eq=False)
class Beginning:
    """The program of the devices of ``mesh``, which have the rows of the batch together.

    **Communication**: the sums over rows that lie on several devices, by their layouts; as a rule an all_reduce of one
    number.
    """

    localized: Localized
    fused: bool | str
    programs: dict[int, DeviceProgram]
    """By the class of devices."""

    @classmethod
    def of(
        cls,
        stages: Stages,
        names: Collection[str],
        numbers: Mapping[str, int],
        mesh: Mesh,
        replicas: Sequence[str],
        fused: bool | str,
    ) -> Beginning:
        """What computes the values of these ``names``.  ``numbers`` are those of all symbols, the batch whole.

        Rows are dealt to the ``replicas``, and as in the stages to the axes inside; a result has the layout that it has
        in a stage.
        """
        assert stages.beginning is not None
        wanted = [value for value in stages.beginning.outputs if value.name in names]
        ops = needed_ops(stages.beginning.ops, wanted)
        read = {value for op in ops for value in op.inputs}
        inputs = tuple(value for value in stages.beginning.inputs if value in read)
        in_stages = {value.name: value for value in stages.function.inputs}
        given = {value.name: _dealt(in_stages[value.name], stages.batch, replicas) for value in inputs}
        results = {value.name: _whole(in_stages[value.name]) for value in wanted}
        bare = {value.name: None for op in ops for value in op.outputs}
        function = Function(stages.beginning.name, inputs, tuple(ops), tuple(wanted))
        function = laid_out(function, bare | given | results)
        return cls(localize(with_numbers(function, numbers), mesh), fused, {})

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(value.name for value in self.localized.function.inputs)

    def shards(self, arrays: Mapping[str, Array], place: int) -> dict[str, Array]:
        """What the device at a place has of the inputs."""
        given = zip(self.inputs, self.localized.inputs, strict=True)
        return {name: layout.shard(arrays[name], self.localized.mesh)[place] for name, layout in given}

    def types(self, place: int) -> dict[str, TensorType]:
        """The types of these."""
        own = self.program(place).function.inputs
        return {name: value.type for name, value in zip(self.inputs, own, strict=True)}

    def program(self, place: int) -> DeviceProgram:
        """The program of the device at a place."""
        number = self.localized.class_of(place)
        if number not in self.programs:
            function, calls, chains = arranged(self.localized.program(place), None, fused=self.fused)
            categories = {value.name: ACTIVATIONS for value in function.outputs}
            self.programs[number] = DeviceProgram(function, categories, calls=calls, chains=chains)
        return self.programs[number]

    def run(self, device: Device, place: int, given: Mapping[str, Any]) -> dict[str, Array]:
        """The results, by name, from the device's shards of the inputs."""
        program = self.program(place)
        results = program.run(device, program.own([given[name] for name in self.inputs]))
        return {
            value.name: array for value, array in zip(self.localized.function.outputs, results, strict=True)
        }


def _dealt(value: Value, batch: str, replicas: Sequence[str]) -> TensorSharding:
    """The layout of an input whose rows are dealt to replicas, too."""
    dims = list(dims_of(value))
    rows = batch_dim(value.type, batch)
    if rows is not None:
        dims[rows] = (*replicas, *dims[rows])
    return layout(dims)


def _whole(value: Value) -> TensorSharding:
    """The layout of a value in a stage."""
    return value.layout or layout([()] * value.type.ndim)
