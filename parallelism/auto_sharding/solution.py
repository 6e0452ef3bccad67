"""`auto_shard`: the layouts in which a program takes the least time on a mesh of a hardware, as a program.

The pipeline: the shardings of each op (`op_sharding`), one set for all repeated blocks (`repeated_blocks`), and their
prices (`prices`) make a problem (`problem`).  An integer program (`integer_program`) solves it, within the memory of a
device (`memory`).  On meshes of three or more axes, two-axis versions are solved first (`merged_axes`).  The solution
is a program with layouts.  It says why each value has its layout (`explanation`), and what more memory or another mesh
would buy (`dual_prices`).

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
from parallelism.auto_sharding.memory import Memory, shard_bytes
from parallelism.auto_sharding.merged_axes import candidates_near, groupings, is_large, merged, over_merged
from parallelism.auto_sharding.op_sharding import OpSharding
from parallelism.auto_sharding.prices import Prices, reshard_op
from parallelism.auto_sharding.problem import Candidates, Problem, made_in, problem_of
from parallelism.display.quantities import decimal_bytes
from parallelism.execution import Executable
from parallelism.execution.device_program import communicates
from parallelism.hardware import Hardware
from parallelism.ir import Function, Op, Value
from parallelism.ir.passes import donations, freed_after, taken_by, with_room
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
    """The bytes that the device receives in all of them."""


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
    """The pattern of the regions that get the same layouts."""
    ties: tuple[tuple[str, str], ...] = ()
    """The pairs of names of values that were to have the same layout."""

    @property
    def is_limited(self) -> bool:
        """Whether memory had to be limited: with any amount of it another choice might be faster."""
        return self.limit_bytes is not None and (
            bool(self.choice.moments) or self.choice.limit_bytes != self.limit_bytes
        )

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
        """The program as an operation of a cluster.  A training step makes its new state in the memory of the old.

        Experts have room for every token that may choose them (`with_room`); `simulate` counts a mean load.
        """
        return self._executable(with_room(self.function))

    @cached_property
    def _simulated(self) -> Executable:
        return self._executable(self.function)

    def _executable(self, function: Function) -> Executable:
        is_step = any(value.name.startswith(NEXT) for value in function.outputs)
        return Executable(
            Localized(function, Devices.of(self.mesh)),
            donate=replaced_by(function),
            categories=categories(function) if is_step else None,
        )

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds at any time, as its trace says."""
        return peak_bytes(self.function, self.mesh)

    @cached_property
    def collectives(self) -> tuple[Traffic, ...]:
        """The collectives of the first device, those that receive most first."""
        found: dict[tuple[str, tuple[str, ...]], Traffic] = {}
        for op in self._simulated.programs.program(0).ops:
            if communicates(op):
                key = op.kind, tuple(op["axes"])
                before = found.get(key, Traffic(*key, 0, 0))
                found[key] = Traffic(*key, before.calls + 1, before.nbytes + int(op.bytes_received))
        return tuple(sorted(found.values(), key=lambda each: -each.nbytes))

    def bytes_of(self, name: str) -> int:
        """The bytes that a device holds of a value, in its layout.  ``KeyError`` if there is no such value."""
        value = self.problem.values[self.problem.number(name)]
        return shard_bytes(value.type, self.layout(name), self.problem)

    def simulate(self, **options: Any) -> Trace:
        """The trace that a run would leave; ``options`` are those of `simulate`."""
        return simulate(self._simulated, self.hardware, **{"priced_dtype": self.priced_dtype} | options)

    def layout(self, name: str) -> TensorSharding:
        """The layout of a value of the program that was given; ``KeyError`` if there is none."""
        number = self.problem.number(name)
        return self.problem.values[number].layouts[self.choice.layout_of[number]]

    def why(self, name: str, *, time_limit: float | None = None) -> Why:
        """Why a value has its layout: the least seconds of the program if it had another one.

        One integer program is solved for each other layout, each within ``time_limit`` seconds.  ``KeyError`` if there
        is no such value.
        """
        return why(
            self.problem, self.choice, name, time_limit=time_limit, donate=replaced_by(self.problem.function)
        )

    def __str__(self) -> str:
        gap = f", at most {self.choice.gap:.1%} above the least" if self.choice.gap else ", the least"
        return f"@{self.problem.function.name} on {self.mesh!r} of {self.hardware.name}: {self.seconds:.3g} s{gap}"


def auto_shard(
    function: Function,
    mesh: Mesh,
    hardware: Hardware | str | PathLike[str],
    *,
    priced_dtype: str | None = None,
    blocks: str | None = "block.*",
    ties: Iterable[tuple[str, str]] = (),
    time_limit: float | None = None,
    limit_bytes: int | None = None,
) -> AutoSharding:
    """The layouts of all values of a program that take the least time, proved by an integer program.

    Layouts that the program has stay.  Values in regions that match ``blocks`` and have the same ops get the same
    layouts.  ``ties`` are pairs of names of values with the same layout; what a training step replaces always keeps its
    layout.  After ``time_limit`` seconds of the solver the best choice found is returned, with its gap.  Over more than
    two axes a program with many shardings is not searched as a whole, unless ``time_limit`` is infinite: two-axis
    versions of the mesh are solved first, and their choices are tried (`merged_axes`); the gap says how far the result
    is from a bound.

    With ``limit_bytes`` no device holds more at any time: weights, gradients, state and what the forward leaves to the
    backward are stored in shards, and gathered before use, where that costs least time.  A copy that forward and
    backward need is kept, or made twice.  `NoLayoutFits` says how many bytes a device needs at least.

    ``ValueError`` for a program with symbols or collectives, and for a layout that names an axis that the mesh does not
    have; ``ModuleNotFoundError`` without SciPy.
    """
    _check(function, mesh)
    if limit_bytes is not None and (not isinstance(limit_bytes, int) or limit_bytes < 1):
        raise ValueError(f"limit_bytes must be an integer of at least 1, got {limit_bytes!r}")
    machine = Hardware.of(hardware)
    start = perf_counter()
    replaced = [
        (value.name.removeprefix(NEXT), value.name)
        for value in function.outputs
        if value.name.removeprefix(NEXT) in replaced_by(function)
    ]
    ties = [*replaced, *ties]
    within = None
    if time_limit != inf and is_large(function, mesh, blocks):
        within = _candidates(
            function,
            mesh,
            machine,
            priced_dtype=priced_dtype,
            blocks=blocks,
            ties=ties,
            limit_bytes=limit_bytes,
            time_limit=time_limit,
        )
    problem = problem_of(
        function, mesh, Prices(mesh, machine, priced_dtype), blocks=blocks, ties=ties, within=within
    )
    built = perf_counter() - start
    found = laid_within(problem, machine, priced_dtype, limit_bytes, time_limit)
    return replace(found, build_seconds=built, blocks=blocks, ties=tuple(ties))


def _check(function: Any, mesh: Any) -> None:
    """``TypeError`` for what is no program or no mesh, ``ValueError`` for a layout with an axis that the mesh lacks."""
    if not isinstance(function, Function):
        instead = "; ir.record makes a program of a function" if callable(function) else ""
        raise TypeError(f"auto_shard takes a Function, got {type(function).__name__}{instead}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh, got {mesh!r}")
    devices = Devices.of(mesh)
    for value in function.values:
        if value.layout is not None:
            devices.check(value.layout, f"@{function.name}, %{value.name}")


def laid_within(
    problem: Problem,
    hardware: Hardware,
    priced_dtype: str | None,
    limit_bytes: int | None,
    time_limit: float | None,
) -> AutoSharding:
    """The best choice of a problem in which no device holds more than ``limit_bytes``.  `NoLayoutFits` if none does."""
    start = perf_counter()
    function, mesh = problem.function, problem.mesh
    memory = None if limit_bytes is None else Memory(problem, replaced_by(function))
    choice = solve(problem, time_limit=time_limit, memory=memory, limit_bytes=limit_bytes)
    bound, left = choice.bound_seconds, 0
    while True:
        # A smaller limit may exclude what is faster and has no such buffers: only the first bound is one for all.
        found = AutoSharding(
            problem,
            replace(choice, bound_seconds=min(bound, choice.seconds)),
            hardware,
            priced_dtype,
            0.0,
            perf_counter() - start,
            limit_bytes,
        )
        if limit_bytes is None or (over := found.peak_bytes - limit_bytes) <= 0:
            return found
        left += over  # for buffers inside of changes of layout: they have no variables
        try:
            if left >= limit_bytes:
                raise NoLayoutFits(f"no layouts of @{function.name} on {mesh!r} fit")
            choice = solve(problem, time_limit=time_limit, memory=memory, limit_bytes=limit_bytes - left)
        except NoLayoutFits as error:
            raise NoLayoutFits(
                f"{error}; {decimal_bytes(left)} of the {decimal_bytes(limit_bytes)} a device are left for the buffers "
                "inside of changes of layout",
                (error.least_bytes or 0) + left,
            ) from None


def _candidates(
    function: Function, mesh: Mesh, hardware: Hardware, *, time_limit: float | None, **options: Any
) -> Candidates | None:
    """The choices of the two-axis versions of a mesh; None if the given layouts fit none of them."""
    solved = []
    for groups in groupings(mesh):
        given = over_merged(function, groups)
        if given is not None:
            each = auto_shard(given, merged(mesh, groups), hardware, time_limit=time_limit, **options)
            solved.append((groups, each.problem, each.choice))
    return candidates_near(mesh, solved) if solved else None


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
    """The program of a choice: every value has a layout, and every change of layout is a ``reshard`` op."""
    written = _Written(problem, choice)
    for op, number in zip(problem.function.ops, problem.class_of_op, strict=True):
        written.add(op, problem.ops[number].shardings[choice.sharding_of[number]], problem.phases[number])
    return written.function()


class _Written:
    """The program of a choice, written op by op."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem, self.choice = problem, choice
        self.class_of: dict[str, int] = {}
        layouts: dict[str, TensorSharding] = {}
        for number, (each, layout) in enumerate(zip(problem.values, choice.layout_of, strict=True)):
            self.class_of |= dict.fromkeys(each.names, number)
            layouts |= dict.fromkeys(each.names, each.layouts[layout])
        self.values = {
            value.name: Value(value.name, value.type, layouts[value.name])
            for value in problem.function.values
        }
        self.taken = {*self.values}
        self.copies: dict[tuple[str, TensorSharding, int], Value] = {}
        self.ops: list[Op] = []

    def add(self, op: Op, sharding: OpSharding, phase: int) -> None:
        """Adds an op, after the copies that it needs, and before the changes of what it makes."""
        inputs = tuple(
            self._needed(value, layout, phase, op.region)
            for value, layout in zip(op.inputs, sharding.inputs, strict=True)
        )
        made = tuple(
            self._made(value, layout) for value, layout in zip(op.outputs, sharding.outputs, strict=True)
        )
        self.ops.append(op.with_values(inputs, made))
        for value, output in zip(op.outputs, made, strict=True):
            if output.name != value.name:
                self._reshard(output, self.values[value.name], op.region)

    def _needed(self, value: Value, layout: TensorSharding, phase: int, region: str | None) -> Value:
        """The value in the layout that an op needs: itself, or the copy of the phase."""
        own = self.values[value.name]
        if layout == own.layout:
            return own
        number = self.class_of[value.name]
        needed = self.problem.values[number].needed.index(layout)
        key = value.name, layout, made_in(phase, number, needed, self.choice.kept)
        if key not in self.copies:
            self.copies[key] = Value(free_name(f"{value.name}.laid", self.taken), value.type, layout)
            self._reshard(own, self.copies[key], region)
        return self.copies[key]

    def _made(self, value: Value, layout: TensorSharding) -> Value:
        """The value as its op makes it: itself, or another one that is then resharded."""
        own = self.values[value.name]
        if layout == own.layout:
            return own
        return Value(free_name(f"{value.name}.made", self.taken), value.type, layout)

    def _reshard(self, before: Value, after: Value, region: str | None) -> None:
        self.ops.append(replace(reshard_op(before, after), region=region))

    def function(self) -> Function:
        """The program, once all ops are added."""
        before = self.problem.function
        return replace(
            before,
            inputs=tuple(self.values[value.name] for value in before.inputs),
            ops=tuple(self.ops),
            outputs=tuple(self.values[value.name] for value in before.outputs),
        )
