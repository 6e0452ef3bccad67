"""The predicted time of a demo's run on described hardware: the option ``--hardware`` and its output."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from parallelism.display.quantities import seconds
from parallelism.hardware import Hardware
from parallelism.hardware.host import host_summary
from parallelism.mesh import Mesh
from parallelism.trace import Trace, UndeclaredComputeWarning
from vcluster.demo.command_line import WrongWords

if TYPE_CHECKING:
    from vcluster.demo.screen import Screen


def hardware_of(name: str | None, size: int | None = None) -> Hardware | None:
    """The hardware of ``--hardware``, with room for ``size`` devices (None: any number). Raises `WrongWords`."""
    if name is None:
        return None
    from parallelism.timeline import Pricing

    try:
        hardware = Hardware.of_host(size) if name == "host" else Hardware.of(name)
        if hardware is None:
            raise WrongWords(f"--hardware host: {host_summary()}")
        if size is not None:
            Pricing(hardware).for_devices(size)
    except (ValueError, OSError) as error:
        raise WrongWords(f"--hardware: {error}") from None
    return hardware


def show_elsewhere(screen: Screen, trace: Trace, mesh: Mesh, hardware: Hardware | None) -> Trace:
    """Print the predicted time, its parts, and the axes whose groups leave a node. Returns the priced trace."""
    if hardware is None:
        return trace
    from parallelism.trace.breakdown import split

    dtype = None if "float64" in hardware.flops_per_second else next(iter(hardware.flops_per_second))
    try:
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            there = trace.on(hardware, compute="modelled", priced_dtype=dtype)
    except ValueError as error:
        raise WrongWords(f"--hardware: {error}") from None
    screen.heading(f"The same on {hardware.name}, by declared flops and bytes")
    available = mesh.size * there.makespan_seconds
    computing = sum(totals.compute_seconds for totals in there.totals.values())
    exposed = sum(parts.communication for parts in split(there).values())
    if dtype is not None:
        screen.line(f"  priced as              {dtype}, because it has no float64")
    screen.line(f"  step time              {seconds(there.makespan_seconds)}")
    for name, part in (("compute", computing), ("exposed communication", exposed),
                       ("bubble", max(0.0, available - computing - exposed))):
        screen.line(f"  {name:22} {part / available if available else 0:.1%} of the devices' time")
    screen.line(f"  undeclared compute     {seconds(there.undeclared_seconds)} of CPU time here, not priced there")
    near = hardware.links[0].name
    leaving = [f"{axis} (over {level})" for axis in mesh.axes
               if (level := hardware.spans(mesh, axis)) not in (None, near)]
    devices = hardware.inside(1) if len(hardware.links) > 1 else hardware.devices
    screen.line(f"  axes that leave a node {', '.join(leaving) or 'none'}")
    screen.line(f"                         (a node is {devices} devices joined by {near})")
    return there
