"""What an executable would do on a hardware, without running it: the trace of `VirtualCluster.run`, made by columns.

    simulate(Executable(function, mesh), "dgx-h100").makespan_seconds

No array is touched and nothing is started.  The events are those that the devices would record, priced and timed by the
same clock, so an executed run under ``compute="modelled"`` has the same: kinds, groups, bytes, memory, times.  What goes
to and from the host is left out.
"""

from __future__ import annotations

from os import PathLike

import numpy as np

from parallelism.executable import Executable
from parallelism.hardware import Hardware
from parallelism.pricing import Pricing
from parallelism.simulated_events import Rows, Templates, row
from parallelism.trace import Trace


def simulate(
    executable: Executable, hardware: Hardware | str | PathLike[str], *, priced_dtype: str | None = None,
    link_sharing: bool = True,
) -> Trace:
    """The trace that ``executable`` would leave on ``hardware``: a `Hardware`, a preset's name or a file.

    ``priced_dtype`` and ``link_sharing`` as for `Trace.on`.
    """
    mesh = executable.mesh
    pricing = Pricing.of(hardware, "modelled", priced_dtype, link_sharing).for_devices(mesh.size)
    events, _ = templates(executable).by_rank(range(mesh.size))
    return Trace(events, mesh.size, mesh_shape=mesh.shape, priced=("modelled",)).priced_by(pricing)


def templates(executable: Executable) -> Templates:
    """The events of each class of its devices."""
    mesh, programs = executable.mesh, executable.programs
    rows = []
    for number in range(len(programs.classes)):
        program, made = executable.of_class(number), Rows()
        made.rows.append(row("compute", executable.name, seconds=0.0))
        made.rows += [row("memory", category, nbytes=float(nbytes)) for category, nbytes in program.held]
        made.add_program(program, mesh)
        rows.append(made)
    if len(rows) == 1:
        class_of = np.zeros(mesh.size, np.int64)
    else:
        class_of = np.array([programs.class_of(rank) for rank in range(mesh.size)], np.int64)
    return Templates(mesh, rows, class_of)
