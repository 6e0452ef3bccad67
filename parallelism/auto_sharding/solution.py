"""`auto_shard`: the layouts in which a program takes the least time on a mesh of a hardware, as a program.

    solution = auto_shard(train_step(loss, Adam()), Mesh(x=2, y=4), "dgx-h100")
    solution.function                           # every value has a layout, every change of layout is an op
    simulate(Executable(solution.function, solution.mesh), "dgx-h100", link_sharing=False).makespan_seconds
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from os import PathLike
from time import perf_counter
from typing import Any, NamedTuple

from parallelism.auto_sharding.explanation import Why, why
from parallelism.auto_sharding.integer_program import Choice, NoLayoutFits, solve
from parallelism.auto_sharding.joined_axes import is_large, joined, joinings, near, over_joined
from parallelism.auto_sharding.memory import Memory, shard_bytes
from parallelism.auto_sharding.op_sharding import OpSharding
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import Problem, Within, made_in, problem_of
from parallelism.display.quantities import decimal_bytes
from parallelism.execution import Executable
from parallelism.execution.device_program import communicates
from parallelism.hardware import Hardware
from parallelism.ir import Function, Op, Value
from parallelism.ir.operators import layout_text
from parallelism.ir.passes import donations, freed_after, taken_by
from parallelism.ir.passes.donation import Kinds
from parallelism.layouts import Devices, Localized
from parallelism.layouts.localization.local_program import free_name
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.transforms.parts import NEXT
from parallelism.transforms.training import carried, categories


class Traffic(NamedTuple):
    """Collectives of one kind over the same axes, in the program of a device."""

    kind: str
    axes: tuple[str, ...]
    calls: int
    nbytes: int
    """That the device receives in all of them."""


@dataclass(frozen=True)
class AutoSharding:
    """A program with the layouts that take the least time."""

    problem: Problem
    choice: Choice
    hardware: Hardware
    priced_dtype: str | None
    build_seconds: float
    solve_seconds: float
    limit_bytes: int | None = None
    """What a device may hold; None: anything."""
    blocks: str | None = "block.*"
    """The pattern of the regions that are laid out alike."""
    ties: tuple[tuple[str, str], ...] = ()
    """The pairs of names of values that were to lie alike."""

    @property
    def is_limited(self) -> bool:
        """Whether memory had to be limited: with any amount of it another choice might be faster."""
        return self.limit_bytes is not None and (
            bool(self.choice.moments) or self.choice.limit_bytes != self.limit_bytes)

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
        """The program as an operation of a cluster.  A training step makes its new state in the memory of the old."""
        function = self.function
        is_step = any(value.name.startswith(NEXT) for value in function.outputs)
        return Executable(Localized(function, Devices.of(self.mesh)), donate=replaced_by(function),
                          categories=categories(function) if is_step else None)

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds at any time, as its trace says."""
        return peak_bytes(self.function, self.mesh)

    @cached_property
    def collectives(self) -> tuple[Traffic, ...]:
        """The collectives of the first device, those that receive most first."""
        found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for op in self.executable.programs.program(0).ops:
            if communicates(op):
                each = found.setdefault((op.kind, tuple(op["axes"])), [0, 0])
                each[0] += 1
                each[1] += int(op.bytes_received)
        return tuple(sorted((Traffic(*key, *each) for key, each in found.items()), key=lambda each: -each.nbytes))

    def bytes_of(self, name: str) -> int:
        """The bytes that a device holds of a value, in the layout in which it lies.  ``KeyError`` if there is none."""
        value = self.problem.values[self.problem.number(name)]
        return shard_bytes(value.type, self.layout(name), self.problem)

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
        return why(self.problem, self.choice, name, time_limit=time_limit, donate=replaced_by(self.problem.function))

    def __str__(self) -> str:
        gap = f", at most {self.choice.gap:.1%} above the least" if self.choice.gap else ", the least"
        return f"@{self.problem.function.name} on {self.mesh!r} of {self.hardware.name}: {self.seconds:.3g} s{gap}"


def auto_shard(
    function: Function, mesh: Mesh, hardware: Hardware | str | PathLike[str], *, priced_dtype: str | None = None,
    blocks: str | None = "block.*", ties: Iterable[tuple[str, str]] = (), time_limit: float | None = None,
    limit_bytes: int | None = None,
) -> AutoSharding:
    """The layouts of all values of a program that take the least time, proved by an integer program.

    Layouts that the program has stay.  Values in regions that match ``blocks`` and have the same ops are laid out
    alike.  ``ties`` are pairs of names of values that lie alike; what a training step replaces always lies as before.
    After ``time_limit`` seconds of the solver the best choice found is returned, with its gap.  Over more than two axes
    a program with many shardings is not searched as a whole, unless ``time_limit`` is infinite: the choices are those
    found with the axes joined into two, in each way (`joined_axes`), and the gap says how far they are from a bound.

    With ``limit_bytes`` no device holds more at any time: weights, gradients, state and what the forward leaves to the
    backward are split where they lie, and gathered before use, where that costs least time.  A copy that forward and
    backward need is kept, or made twice.  `NoLayoutFits` says how little a device can hold.

    ``ValueError`` for a program with symbols or collectives; ``ModuleNotFoundError`` without SciPy.
    """
    if limit_bytes is not None and (not isinstance(limit_bytes, int) or limit_bytes < 1):
        raise ValueError(f"limit_bytes must be an integer of at least 1, got {limit_bytes!r}")
    machine = Hardware.of(hardware)
    start = perf_counter()
    replaced = [(value.name.removeprefix(NEXT), value.name) for value in function.outputs
                if value.name.removeprefix(NEXT) in replaced_by(function)]
    ties = [*replaced, *ties]
    within = None
    if time_limit != inf and is_large(function, mesh, blocks):
        within = _near(function, mesh, machine, priced_dtype=priced_dtype, blocks=blocks, ties=ties,
                       limit_bytes=limit_bytes, time_limit=time_limit)
    problem = problem_of(
        function, mesh, Prices(mesh, machine, priced_dtype), blocks=blocks, ties=ties, within=within)
    built = perf_counter() - start
    found = laid_within(problem, machine, priced_dtype, limit_bytes, time_limit)
    return replace(found, build_seconds=built, blocks=blocks, ties=tuple(ties))


def laid_within(
    problem: Problem, hardware: Hardware, priced_dtype: str | None, limit_bytes: int | None, time_limit: float | None
) -> AutoSharding:
    """The best choice of a problem in which no device holds more than ``limit_bytes``.  `NoLayoutFits` if none does."""
    start = perf_counter()
    function, mesh = problem.function, problem.mesh
    memory = None if limit_bytes is None else Memory(problem, replaced_by(function))
    choice = solve(problem, time_limit=time_limit, memory=memory, limit_bytes=limit_bytes)
    bound, left = choice.bound_seconds, 0
    while True:
        # A smaller limit may exclude what is faster and has no such buffers: only the first bound is one for all.
        found = AutoSharding(problem, replace(choice, bound_seconds=min(bound, choice.seconds)), hardware,
                             priced_dtype, 0.0, perf_counter() - start, limit_bytes)
        if limit_bytes is None or (over := found.peak_bytes - limit_bytes) <= 0:
            return found
        left += over        # for buffers inside of changes of layout: they have no variables
        try:
            if left >= limit_bytes:
                raise NoLayoutFits(f"no layouts of @{function.name} on {mesh!r} fit")
            choice = solve(problem, time_limit=time_limit, memory=memory, limit_bytes=limit_bytes - left)
        except NoLayoutFits as error:
            raise NoLayoutFits(
                f"{error}; {decimal_bytes(left)} of the {decimal_bytes(limit_bytes)} a device are left for the buffers "
                "inside of changes of layout", (error.least_bytes or 0) + left) from None


def _near(
    function: Function, mesh: Mesh, hardware: Hardware, *, time_limit: float | None, **options: Any
) -> Within | None:
    """What is chosen where the axes of the mesh are joined into two; None if given layouts cannot be joined so."""
    found = []
    for groups in joinings(mesh):
        given = over_joined(function, groups)
        if given is not None:
            each = auto_shard(given, joined(mesh, groups), hardware, time_limit=time_limit, **options)
            found.append((groups, each.problem, each.choice.ways, each.choice.lies))
    return near(mesh, found) if found else None


def replaced_by(function: Function) -> tuple[str, ...]:
    """The names of the inputs that a training step replaces; none of another program."""
    names = {value.name for value in function.inputs}
    return tuple(name for name in carried(function) if name in names)


def peak_bytes(function: Function, mesh: Mesh) -> int:
    """The most that the first device holds in a program that is laid out."""
    local = Localized(function, Devices.of(mesh)).program(0)
    donated = donations(local, replaced_by(function), Kinds.of(function))
    held = most = sum(int(value.type.nbytes) for value in local.inputs)
    for taken, freed in zip(taken_by(local, donated), freed_after(local), strict=True):
        held += sum(int(value.type.nbytes) for value in taken)
        most = max(most, held)
        held -= sum(int(value.type.nbytes) for value in freed)
    return most


def laid_out_by(problem: Problem, choice: Choice) -> Function:
    """The program of a choice."""
    function = problem.function
    ways: dict[int, OpSharding] = {
        at: each.shardings[way] for each, way in zip(problem.ops, choice.ways, strict=True) for at in each.ops}
    lies = {name: each.layouts[at] for each, at in zip(problem.values, choice.lies, strict=True) for name in each.names}
    taken = {value.name for value in function.values}
    whole = {value.name: Value(value.name, value.type, lies[value.name]) for value in function.values}
    class_of = {name: number for number, each in enumerate(problem.values) for name in each.names}
    copies: dict[tuple[str, TensorSharding, int], Value] = {}
    ops: list[Op] = []

    def resharded(before: Value, after: Value, region: str | None) -> None:
        assert after.layout is not None
        ops.append(Op("reshard", (before,), (("layout", layout_text(after.layout)),), (after,), region))

    def laid(value: Value, layout: TensorSharding, phase: int, region: str | None) -> Value:
        if layout == whole[value.name].layout:
            return whole[value.name]
        number = class_of[value.name]
        key = value.name, layout, made_in(phase, number, problem.values[number].needed.index(layout), choice.kept)
        if key not in copies:
            copies[key] = Value(free_name(f"{value.name}.laid", taken), value.type, layout)
            resharded(whole[value.name], copies[key], region)
        return copies[key]

    for at, op in enumerate(function.ops):
        way, phase = ways[at], problem.phases[problem.class_of_op[at]]
        inputs = tuple(laid(value, layout, phase, op.region)
                       for value, layout in zip(op.inputs, way.inputs, strict=True))
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
