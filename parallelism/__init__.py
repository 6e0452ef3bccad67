"""Descriptions, plans and predictions of work on many devices.  All are values: nothing here starts a process.

Names are imported when they are first used, so that a device's process imports only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelism.collectives import Explanation, explain
    from parallelism.cost import CollectiveCost, Costs
    from parallelism.execution import Executable, PipelinedProgram, Profile
    from parallelism.hardware import Hardware, HardwareFileError, HostLink, Link, LinkFault, Straggler
    from parallelism.mesh import Mesh, MeshIndex, replica_groups
    from parallelism.operation import Device, Operation, ShardedOperation
    from parallelism.pipelining import Action, Overlapped, Pipeline, PipelinedOperation, PipelineStage, Schedule, Status
    from parallelism.resharding import ReshardingPlan, ReshardingStep, plan_resharding
    from parallelism.sharding import DimSharding, TensorSharding
    from parallelism.simulation import PipelinedStep, equal_devices, simulate
    from parallelism.trace import Event, Trace

_MODULES = {
    "cost": ("CollectiveCost", "Costs"),
    "executable": ("Executable",),
    "explanation": ("Explanation", "explain"),
    "hardware": ("Hardware",),
    "hardware_files": ("HardwareFileError",),
    "links": ("HostLink", "Link"),
    "mesh": ("Mesh", "MeshIndex"),
    "operation": ("Device", "Operation", "ShardedOperation"),
    "pipelined_operation": ("PipelinedOperation",),
    "pipelined_program": ("PipelinedProgram",),
    "pipelined_step": ("PipelinedStep",),
    "pipelining": ("Action", "Overlapped", "Pipeline", "PipelineStage", "Schedule", "Status"),
    "process_groups": ("replica_groups",),
    "profile": ("Profile",),
    "resharding": ("ReshardingPlan", "ReshardingStep", "plan_resharding"),
    "sharding": ("DimSharding", "TensorSharding"),
    "simulator": ("equal_devices", "simulate"),
    "slowdowns": ("LinkFault", "Straggler"),
    "trace": ("Event", "Trace"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Action", "CollectiveCost", "Costs", "Device", "DimSharding", "Event", "Executable", "Explanation", "Hardware",
    "HardwareFileError", "HostLink", "Link", "LinkFault", "Mesh", "MeshIndex", "Operation", "Overlapped",
    "Pipeline", "PipelineStage", "PipelinedOperation", "PipelinedProgram", "PipelinedStep", "Profile",
    "ReshardingPlan", "ReshardingStep", "Schedule", "ShardedOperation", "Status", "Straggler", "TensorSharding",
    "Trace", "equal_devices", "explain", "plan_resharding", "replica_groups", "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
