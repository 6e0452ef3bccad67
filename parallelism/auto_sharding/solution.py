"""`auto_shard`: the layouts in which a program takes the least time on a mesh of a hardware, as a program.

    solution = auto_shard(train_step(loss, Adam()), Mesh(x=2, y=4), "dgx-h100")
    solution.function                           # every value has a layout, every change of layout is an op
    simulate(Executable(solution.function, solution.mesh), "dgx-h100", link_sharing=False).makespan_seconds
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from time import perf_counter
from typing import Any

from parallelism.auto_sharding.explanation import Why, why
from parallelism.auto_sharding.integer_program import Choice, solve
from parallelism.auto_sharding.op_sharding import OpSharding
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import Problem, problem_of
from parallelism.execution import Executable
from parallelism.hardware import Hardware
from parallelism.ir import Function, Op, Value
from parallelism.ir.operators import layout_text
from parallelism.layouts import Devices, Localized
from parallelism.layouts.localization.local_program import free_name
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.transforms.parts import NEXT


@dataclass(frozen=True)
class AutoSharding:
    """A program with the layouts that take the least time."""

    problem: Problem
    choice: Choice
    hardware: Hardware
    priced_dtype: str | None
    build_seconds: float
    solve_seconds: float

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.problem.mesh

    @property
    def seconds(self) -> float:
        """The seconds of a run: what `simulate` says without shared links."""
        return self.choice.seconds

    @cached_property
    def function(self) -> Function:
        """The program: every value has a layout, and every change of layout is a ``reshard`` op."""
        return laid_out_by(self.problem, self.choice)

    @cached_property
    def executable(self) -> Executable:
        """The program as an operation of a cluster."""
        return Executable(Localized(self.function, Devices.of(self.mesh)))

    def simulate(self, **options: Any) -> Trace:
        """The trace that a run would leave; ``options`` are those of `simulate`."""
        return simulate(self.executable, self.hardware, **{"priced_dtype": self.priced_dtype} | options)

    def layout(self, name: str) -> TensorSharding:
        """The layout of a value of the program that was given; ``KeyError`` if there is none."""
        number = self.problem.number(name)
        return self.problem.values[number].layouts[self.choice.lies[number]]

    def why(self, name: str, *, time_limit: float | None = None) -> Why:
        """Why a value lies as it does: what the program would take at best if it lay in another layout.

        One integer program is solved for each other layout, each within ``time_limit`` seconds.  ``KeyError`` if there
        is no such value.
        """
        return why(self.problem, self.choice, name, time_limit=time_limit)

    def __str__(self) -> str:
        gap = f", at most {self.choice.gap:.1%} above the least" if self.choice.gap else ", the least"
        return f"@{self.problem.function.name} on {self.mesh!r} of {self.hardware.name}: {self.seconds:.3g} s{gap}"


def auto_shard(
    function: Function, mesh: Mesh, hardware: Hardware | str | PathLike[str], *, priced_dtype: str | None = None,
    blocks: str | None = "block.*", ties: Iterable[tuple[str, str]] = (), time_limit: float | None = None,
) -> AutoSharding:
    """The layouts of all values of a program that take the least time, proved by an integer program.

    Layouts that the program has stay.  Values in regions that match ``blocks`` and have the same ops are laid out
    alike.  ``ties`` are pairs of names of values that lie alike; what a training step replaces always lies as before.
    After ``time_limit`` seconds of the solver the best choice found is returned, with its gap.

    ``ValueError`` for a program with symbols or collectives; ``ModuleNotFoundError`` without SciPy.
    """
    machine = Hardware.of(hardware)
    start = perf_counter()
    names = {value.name for value in function.inputs}
    replaced = [(value.name.removeprefix(NEXT), value.name) for value in function.outputs
                if value.name.startswith(NEXT) and value.name.removeprefix(NEXT) in names]
    problem = problem_of(
        function, mesh, Prices(mesh, machine, priced_dtype), blocks=blocks, ties=[*replaced, *ties])
    built = perf_counter()
    choice = solve(problem, time_limit=time_limit)
    return AutoSharding(problem, choice, machine, priced_dtype, built - start, perf_counter() - built)


def laid_out_by(problem: Problem, choice: Choice) -> Function:
    """The program of a choice."""
    function = problem.function
    ways: dict[int, OpSharding] = {
        at: each.shardings[way] for each, way in zip(problem.ops, choice.ways, strict=True) for at in each.ops}
    lies = {name: each.layouts[at] for each, at in zip(problem.values, choice.lies, strict=True) for name in each.names}
    taken = {value.name for value in function.values}
    whole = {value.name: Value(value.name, value.type, lies[value.name]) for value in function.values}
    copies: dict[tuple[str, TensorSharding], Value] = {(name, each.layout): each for name, each in whole.items()
                                                       if each.layout is not None}
    ops: list[Op] = []

    def resharded(before: Value, after: Value, region: str | None) -> None:
        assert after.layout is not None
        ops.append(Op("reshard", (before,), (("layout", layout_text(after.layout)),), (after,), region))

    def laid(value: Value, layout: TensorSharding, region: str | None) -> Value:
        if (value.name, layout) not in copies:
            copy = Value(free_name(f"{value.name}.laid", taken), value.type, layout)
            resharded(whole[value.name], copy, region)
            copies[value.name, layout] = copy
        return copies[value.name, layout]

    for at, op in enumerate(function.ops):
        way = ways[at]
        inputs = tuple(laid(value, layout, op.region) for value, layout in zip(op.inputs, way.inputs, strict=True))
        made = tuple(
            whole[value.name] if lies[value.name] == layout
            else Value(free_name(f"{value.name}.made", taken), value.type, layout)
            for value, layout in zip(op.outputs, way.outputs, strict=True))
        ops.append(op.with_values(inputs, made))
        for value, output in zip(op.outputs, made, strict=True):
            if output.name != value.name:
                resharded(output, whole[value.name], op.region)
    return replace(function, inputs=tuple(whole[value.name] for value in function.inputs), ops=tuple(ops),
                   outputs=tuple(whole[value.name] for value in function.outputs))
