"""`auto_plans`: the layouts of a program on each shape of mesh that so many devices can have, the best first.

plans = auto_plans(step, "dgx-h100", devices=8, limit_bytes=40_000_000_000)
print(plans)
plans.best.executable                       # runs on 8 processes, or is simulated
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isqrt
from os import PathLike

from parallelism.auto_sharding.integer_program import NoLayoutFits
from parallelism.auto_sharding.solution import AutoSharding, auto_shard
from parallelism.display import in_columns
from parallelism.display.quantities import decimal_bytes, plural, seconds
from parallelism.hardware import Hardware, sized_hardware
from parallelism.ir import Function
from parallelism.mesh import Mesh

_log = logging.getLogger("parallelism")
Progress = Callable[[str, int, int], None]
"""``(what, done, all)``: told before each mesh."""


@dataclass(frozen=True)
class Refusal:
    """A mesh on which no layouts fit the memory."""

    mesh: Mesh
    reason: str
    least_bytes: int | None
    """The bytes that a device must hold at least."""


@dataclass(frozen=True)
class AutoPlans:
    """The layouts of a program on each mesh that was tried."""

    function: Function
    hardware: Hardware
    devices: int
    limit_bytes: int | None
    solutions: tuple[AutoSharding, ...]
    """The fastest first."""
    refused: tuple[Refusal, ...] = ()
    """The one that needs least memory first."""

    @property
    def best(self) -> AutoSharding:
        """The fastest.  `NoLayoutFits` if the memory is too small on every mesh."""
        if not self.solutions:
            raise NoLayoutFits(self.refused[0].reason, self.refused[0].least_bytes)
        return self.solutions[0]

    def __len__(self) -> int:
        return len(self.solutions)

    def __str__(self) -> str:
        head = f"@{self.function.name} on {plural(self.devices, 'device')} of {self.hardware.name}"
        limit = "" if self.limit_bytes is None else f", {decimal_bytes(self.limit_bytes)} each"
        if not self.solutions:
            return f"{head}{limit}: nothing fits\n  {self.refused[0].reason}"
        meshes = [["mesh", "time", "memory", "proved"]]
        for each in self.solutions:
            proved = f"to {each.choice.gap:.1%}" if each.choice.gap else "the least"
            meshes.append([_shape(each.mesh), seconds(each.seconds), decimal_bytes(each.peak_bytes), proved])
        meshes += [[_shape(refusal.mesh), "-", "-", "does not fit"] for refusal in self.refused]
        best = self.best
        inputs = [["input", "whole", "lies as", "bytes a device"]]
        inputs += [
            [
                f"%{value.name}",
                str(value.type),
                best.layout(value.name).short(),
                decimal_bytes(best.bytes_of(value.name)),
            ]
            for value in self.function.inputs
        ]
        moved = [["collective", "over", "calls", "bytes received"]]
        moved += [
            [each.kind, " ".join(each.axes), str(each.calls), decimal_bytes(each.nbytes)]
            for each in best.collectives
        ]
        return "\n".join(
            [
                f"{head}{limit}",
                "",
                *in_columns(meshes, 4),
                "",
                f"On {_shape(best.mesh)}:",
                "",
                *in_columns(inputs, 4),
                "",
                *(in_columns(moved, 2) if moved[1:] else ["No collectives."]),
            ]
        )


def auto_plans(
    function: Function,
    hardware: Hardware | str | PathLike[str],
    *,
    devices: int | None = None,
    limit_bytes: int | None = None,
    meshes: Iterable[Mesh] | None = None,
    blocks: str | None = "block.*",
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> AutoPlans:
    """`auto_shard` on each of the meshes; None: on `shapes_of` the devices.

    ``ValueError`` and ``ModuleNotFoundError`` as `auto_shard` and `sized_hardware` raise them.
    """
    machine = sized_hardware(hardware, devices)
    count = machine.ranks if devices is None else devices
    tried = list(shapes_of(machine, count) if meshes is None else meshes)
    solutions: list[AutoSharding] = []
    refused: list[Refusal] = []
    for number, mesh in enumerate(tried):
        if mesh.size != count:
            raise ValueError(f"{mesh!r} has {plural(mesh.size, 'device')}, and {count} are planned for")
        if progress:
            progress("meshes", number, len(tried))
        try:
            solutions.append(
                auto_shard(
                    function, mesh, machine, blocks=blocks, time_limit=time_limit, limit_bytes=limit_bytes
                )
            )
        except NoLayoutFits as error:
            refused.append(Refusal(mesh, str(error), error.least_bytes))
    _log.info(
        "layouts found on %d meshes of %d devices; on %d nothing fits", len(solutions), count, len(refused)
    )
    return AutoPlans(
        function,
        machine,
        count,
        limit_bytes,
        tuple(sorted(solutions, key=lambda each: each.seconds)),
        tuple(sorted(refused, key=lambda each: each.least_bytes or 0)),
    )


def shapes_of(hardware: Hardware, devices: int) -> tuple[Mesh, ...]:
    """The shapes of two axes, x and y, that are tried: x joins nodes where there are several, y the devices of one.

    A value may be split over both axes, so a mesh of one axis has no layout that these have not.  Within one node, x is
    the smaller one: which devices are neighbours makes no difference there.  One device, and a prime number of them,
    have one axis.
    """
    for level in range(len(hardware.links) - 1, 0, -1):
        node = hardware.inside(level)
        if 1 < node < devices and devices % node == 0:
            return (Mesh(x=devices // node, y=node),)
    pairs = [(a, devices // a) for a in range(2, isqrt(devices) + 1) if devices % a == 0]
    return tuple(Mesh(x=a, y=b) for a, b in pairs) or (Mesh(x=devices),)


def _shape(mesh: Mesh) -> str:
    return " ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
