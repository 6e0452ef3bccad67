"""`Partitioned`: a program that is already one of each device, with its collectives, as an operation of the cluster.

program = from_stablehlo(text)              # a partitioned module, or a function with shard_map
run = cluster.run(program, inputs)          # VirtualCluster(program.mesh)
simulate(program, "dgx-h100")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from parallelism.execution import Executable
from parallelism.ir.core import Builder, Function, Value, names_in
from parallelism.ir.passes import checked_arrays
from parallelism.layouts import Class, Localized
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

RANK = "rank"


@dataclass(frozen=True)
class Parts:
    """The program of each device, joined of parts: whole programs that were localized, and programs of one device.

    It has the same face as `parallelism.layouts.Localized`.
    """

    name: str
    mesh: Mesh
    whole_inputs: tuple[Value, ...]
    parts: tuple[tuple[Localized | Function, tuple[str, ...], tuple[str, ...]], ...]
    """Each part, with the names of the values that it takes and returns."""
    returned: tuple[str, ...]
    inputs: tuple[TensorSharding, ...] | None
    """The layouts of the inputs; None if each device is given its own arrays."""
    outputs: tuple[TensorSharding, ...] | None
    _programs: dict[int, Function] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def function(self) -> Function:
        """The inputs, whole, as a function that returns nothing: what names and types of inputs are checked by."""
        return Function(self.name, self.whole_inputs, (), ())

    def _class_of(self, rank: int) -> tuple[int, ...]:
        own = (rank,) if self._by_rank else ()
        return (*own, *(part.class_of(rank) for part, _, _ in self.parts if isinstance(part, Localized)))

    @cached_property
    def _by_rank(self) -> bool:
        """Whether each rank is a class of its own: there are groups of ranks that lie along no axes."""
        return any(
            op.kind == "group_collective"
            for part, _, _ in self.parts
            if isinstance(part, Function)
            for op in part.ops
        )

    @property
    def classes(self) -> tuple[Class, ...]:
        """The classes of equal devices, ordered by their lowest ranks."""
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.size):
            ranks.setdefault(self._class_of(rank), []).append(rank)
        return tuple(Class(each[0], len(each)) for each in ranks.values())

    def class_of(self, rank: int) -> int:
        """The number of the class that a rank belongs to."""
        keys = list(dict.fromkeys(map(self._class_of, range(self.mesh.size))))
        return keys.index(self._class_of(rank))

    def program(self, rank: int = 0) -> Function:
        """The program of a rank, from its arrays to its results."""
        if rank not in self._programs:
            self._programs[rank] = self._joined(rank)
        return self._programs[rank]

    def _joined(self, rank: int) -> Function:
        builder = Builder()
        shards = [value.type for value in self.whole_inputs]
        if self.inputs is not None:
            pairs = zip(self.whole_inputs, self.inputs, strict=True)
            shards = [_shard(value, layout, self.mesh, rank) for value, layout in pairs]
        values = {
            value.name: builder.input(value.name, type)
            for value, type in zip(self.whole_inputs, shards, strict=True)
        }
        for part, taken, returned in self.parts:
            function = part.program(rank) if isinstance(part, Localized) else part
            if RANK in function.symbols:
                function = function.specialize(**{RANK: rank})
            inner = {value.name: values[name] for value, name in zip(function.inputs, taken, strict=True)}
            for op in function.ops:
                with builder.region(op.region):
                    made = builder.emit(
                        op.kind, [inner[value.name] for value in op.inputs], dict(op.attributes)
                    )
                inner.update((value.name, new) for value, new in zip(op.outputs, made, strict=True))
            values.update(
                (name, inner[value.name]) for name, value in zip(returned, function.outputs, strict=True)
            )
        return builder.function(self.name, [values[name] for name in self.returned])


def _shard(value: Value, layout: Any, mesh: Mesh, rank: int) -> Any:
    shape = layout.local_shape(tuple(map(int, value.type.shape)), mesh, rank)
    return replace(value.type, shape=tuple(shape))


class Partitioned(Executable):
    """A program of each device of ``mesh``, which runs as it is.

    If the layouts of its inputs are known, ``cluster.run(program, inputs)`` takes whole arrays, in order or by name,
    and ``run.result`` are the outputs, whole.  If not, it takes a list with the arrays of each rank, and the result is
    such a list.

    **Communication**: that of the collectives in the program.
    """

    def __init__(self, parts: Parts, **options: Any) -> None:
        super().__init__(parts, **options)  # type: ignore[arg-type]

    @property
    def takes_whole(self) -> bool:
        """Whether it takes and returns whole arrays; if not, those of each rank."""
        parts: Any = self.programs
        return parts.inputs is not None

    def program(self, rank: int = 0) -> Function:
        """The program of a rank."""
        return self.programs.program(rank)

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The inputs, dealt out by their layouts, or those of each rank as they are."""
        if self.takes_whole:
            return super().inputs(mesh, *args)
        if mesh != self.mesh:
            raise ValueError(f"{self.name} is for {self.mesh!r} and cannot run on {mesh!r}")
        if len(args) != 1 or len(args[0]) != mesh.size:
            raise TypeError(f"{self.name} takes one list with the arrays of each of the {mesh.size} ranks")
        for number in range(len(self.programs.classes)):
            _ = self.of_class(number).steps, self.of_class(number).held
        return [tuple(checked_arrays(self.programs.function, each)) for each in args[0]]

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Any:
        """The whole outputs, or, if the inputs were given by rank, those of each rank."""
        return super().result(mesh, outputs) if self.takes_whole else list(outputs)


def uses_rank(function: Function) -> bool:
    """Whether the program depends on the rank that runs it."""
    for op in function.ops:
        for _, value in op.attributes:
            for part in value if isinstance(value, tuple) else (value,):
                if not isinstance(part, tuple) and RANK in names_in(part):
                    return True
    return False
