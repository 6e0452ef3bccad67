"""Common parts of the demos: layouts and plans, the traffic of each device, and the time on described hardware."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.display import WIDTH
from parallelism.display.quantities import seconds
from parallelism.hardware import Hardware
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from parallelism.trace import Trace, UndeclaredComputeWarning
from vcluster.cli.command_line import WrongWords
from vcluster.runs import Run, VirtualCluster

if TYPE_CHECKING:
    from vcluster.demo.screen import Screen

CLOSE = 1e-10
"""Largest difference from one process, relative to the largest element (at least 1)."""
MOST_EXTENT = 4096


def extents_of(arguments: argparse.Namespace, names: str, most: int | None = MOST_EXTENT) -> tuple[int, ...]:
    """The extents of ``--shape``, one for each name, at most ``most`` each (None: no limit). Raises `WrongWords`."""
    extents: tuple[int, ...] = arguments.shape
    if len(extents) != names.count(",") + 1:
        count = "three" if names.count(",") == 2 else "four"
        raise WrongWords(f"--shape needs {count} extents {names}; got {len(extents)}")
    if most is not None and max(extents) > most:
        raise WrongWords(f"--shape: a demo takes extents up to {most}, got {max(extents)}")
    return extents


def forward_backward(device: Device, operation: Any, grad: Any, *shards: Any) -> tuple[Any, ...]:
    """A kernel that runs forward and backward. It returns the output and the gradient of each shard."""
    out, saved = operation.forward(device, *shards)
    return out, *operation.backward(device, saved, grad)


def run_here(arguments: argparse.Namespace, mesh: Mesh, program: Any, *values: Any) -> Run[Any]:
    """The run of a program on a cluster of this mesh, on the backend that the arguments name."""
    with VirtualCluster(mesh, backend=arguments.backend) as cluster:
        return cluster.run(program, *values)


def whole_outputs(run: Any, layouts: Iterable[TensorSharding], mesh: Mesh) -> list[Any]:
    """The first outputs of a run's devices as whole arrays, according to their layouts."""
    by_output = zip(*run, strict=False)
    return [layout.unshard(shards, mesh) for layout, shards in zip(layouts, by_output, strict=False)]


def show_layouts(
    screen: Screen, tensors: Iterable[tuple[str, tuple[int, ...], TensorSharding]], mesh: Mesh
) -> None:
    """Draw the layout of each tensor. A tensor is given as (name, shape, layout)."""
    screen.line("\n\n".join(f"{name}:\n{layout.draw(shape, mesh)}" for name, shape, layout in tensors))


def show_plan(screen: Screen, plan: Any) -> None:
    """Print a plan with its long lines broken."""
    for line in str(plan).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 6)
        for part in wrap(line, WIDTH - 2, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            screen.line(f"  {part}")


def show_devices(screen: Screen, trace: Trace, names: Sequence[str], arrays: Iterable[Sequence[Any]]) -> None:
    """Write one row for each device, below the plan: shapes of its arrays, flops, bytes received and their sources."""
    screen.line()
    matrix, rows = trace.communication_matrix(), []
    for rank, mine in enumerate(arrays):
        sources = [f"r{source}" for source in np.flatnonzero(matrix[:, rank])]
        shapes = ["x".join(map(str, np.shape(array))) for array in mine]
        rows.append(
            (
                f"r{rank}",
                *shapes,
                f"{trace.flops(rank):,.0f}",
                f"{trace.bytes_received(rank):,}",
                " ".join(sources) if len(sources) <= 4 else f"{len(sources)} devices",
            )
        )
    screen.table(("device", *names, "flops", "bytes received", "from"), rows)


def verdict_of_values(screen: Screen, arrays: Iterable[Any], expected: Iterable[Any]) -> None:
    """Say whether output and gradients are `CLOSE` to those of one process."""
    worst = max(
        float(np.abs(one - other).max() / max(1.0, np.abs(other).max()))
        for one, other in zip(arrays, expected, strict=True)
    )
    screen.verdict(
        worst < CLOSE, f"largest relative difference from one process, y and all gradients: {worst:.1e}"
    )


def planned_bytes(plan: Any) -> int:
    """The bytes that a plan moves forward and backward, summed over the devices."""
    return int(sum(plan.bytes_received) + sum(plan.backward_bytes_received))


def verdict_of_bytes(screen: Screen, trace: Trace, predicted: int, formula: str | None = None) -> None:
    """Say whether the bytes that were moved equal those of a formula, or with None those of the plan."""
    moved = trace.bytes_received()
    word = "equal" if moved == predicted else "NOT equal"
    whose = "plan" if formula is None else "closed form"
    screen.verdict(moved == predicted, f"{moved:,} bytes moved; {word} to the {whose}'s {predicted:,}")
    for line in wrap(f"closed form: {formula}", WIDTH - 7, subsequent_indent="    ") if formula else ():
        screen.line(f"       {line}")


# -- on described hardware ---------------------------------------------------------------------------------------------


def show_elsewhere(screen: Screen, trace: Trace, mesh: Mesh, hardware: Hardware | None) -> Trace:
    """Print the predicted time, its parts, and the axes whose groups leave a node. Returns the priced trace."""
    screen.record = trace, None
    if hardware is None:
        return trace
    from parallelism.trace.breakdown import split

    dtype = None if "float64" in hardware.flops_per_second else next(iter(hardware.flops_per_second))
    try:
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            there = trace.on(hardware, compute="modelled", priced_dtype=dtype)
    except ValueError as error:
        raise WrongWords(f"--hardware: {error}") from None
    screen.record = there, hardware
    screen.heading(f"The same on {hardware.name}, by declared flops and bytes")
    available = mesh.size * there.makespan_seconds
    computing = sum(totals.compute_seconds for totals in there.totals.values())
    exposed = sum(parts.communication for parts in split(there).values())
    if dtype is not None:
        screen.line(f"  priced as              {dtype}, because it has no float64")
    screen.line(f"  step time              {seconds(there.makespan_seconds)}")
    for name, part in (
        ("compute", computing),
        ("exposed communication", exposed),
        ("bubble", max(0.0, available - computing - exposed)),
    ):
        screen.line(f"  {name:22} {part / available if available else 0:.1%} of the devices' time")
    screen.line(
        f"  undeclared compute     {seconds(there.undeclared_seconds)} of CPU time here, not priced there"
    )
    near = hardware.links[0].name
    leaving = [
        f"{axis} (over {level})"
        for axis in mesh.axes
        if (level := hardware.spans(mesh, axis)) not in (None, near)
    ]
    devices = hardware.inside(1) if len(hardware.links) > 1 else hardware.devices
    screen.line(f"  axes that leave a node {', '.join(leaving) or 'none'}")
    screen.line(f"                         (a node is {devices} devices joined by {near})")
    return there
