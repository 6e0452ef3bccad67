"""The operations that can be simulated, each with its mesh and the events of its devices."""

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from parallelism.execution import Executable, PipelinedProgram, TypedArray
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.pipelined_step import PipelinedStep, PriceEvents
from parallelism.simulation.typed_device import TypedDevice


class SimulatedOperation(Protocol):
    """An operation on a mesh that can make the events of its devices without running on them."""

    @property
    def mesh(self) -> Mesh: ...
    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class of devices; with a ``price``, repeated work may be one piece of compute."""


class SimulatedExecutable:
    """An `Executable`, run on a `TypedDevice` for each class of its devices."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.mesh = executable, executable.mesh

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class of devices.  An `Executable` repeats no work, so ``price`` is not used."""
        executable = self.executable
        if executable not in _EVENTS:
            _EVENTS[executable] = [
                _events(executable, number, rank) for number, (rank, _) in enumerate(executable.programs.classes)]
        classes = _EVENTS[executable]
        ranks = range(self.mesh.size)
        class_of = [executable.programs.class_of(rank) for rank in ranks] if len(classes) > 1 else [0] * len(ranks)
        return Templates(self.mesh, classes, np.array(class_of, np.int64))


_EVENTS: WeakKeyDictionary[Executable, list[DeviceEvents]] = WeakKeyDictionary()
"""The events of each class of an executable, which are the same on every hardware."""


def _events(executable: Executable, number: int, rank: int) -> DeviceEvents:
    device = TypedDevice(executable.mesh, rank)
    executable(device.device, *(TypedArray.of(x.type) for x in executable.of_class(number).function.inputs))
    return device.events


def simulated_operation(
    operation: Any, mesh: Mesh | None, batch: int | None, numbers: Mapping[str, int] | None
) -> SimulatedOperation:
    """``operation`` in a form that makes events.  ``TypeError`` for another type, ``ValueError`` for a wrong mesh."""
    if isinstance(operation, PipelinedProgram):
        if mesh is None or batch is None:
            raise TypeError("a PipelinedProgram is simulated on a mesh with a batch of some rows: simulate(program, "
                            "hardware, mesh=Mesh(...), batch=64)")
        return PipelinedStep(operation, mesh, batch, **(numbers or {}))
    if not isinstance(operation, Executable | PipelinedStep):
        raise TypeError(f"simulate takes an Executable(function, mesh) or a PipelinedProgram, got "
                        f"{type(operation).__name__}")
    if batch is not None or numbers:
        raise TypeError(f"batch= and numbers= are for a PipelinedProgram; the {type(operation).__name__} has its own")
    if mesh not in (None, operation.mesh):
        raise ValueError(f"the {type(operation).__name__} is for {operation.mesh!r}, not for {mesh!r}")
    return SimulatedExecutable(operation) if isinstance(operation, Executable) else operation
