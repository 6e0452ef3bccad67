"""A cluster on a laptop: every device a process, every shard a real array, every byte and second on record.

Every public name of `parallelism` is here too.  Names are loaded when they are first used: a device starts in a process
that has loaded only what a device needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import parallelism

if TYPE_CHECKING:
    from parallelism import (
        Action,
        CollectiveAlgorithm,
        CollectiveCost,
        CollectiveKind,
        Costs,
        Device,
        DimSharding,
        Event,
        Executable,
        Explanation,
        Hardware,
        HardwareFileError,
        HostLink,
        Link,
        LinkFault,
        Mesh,
        MeshIndex,
        Operation,
        Overlapped,
        Pipeline,
        PipelinedOperation,
        PipelinedProgram,
        PipelinedStep,
        PipelineStage,
        Profile,
        RegistrationError,
        ReshardingPlan,
        ReshardingStep,
        Schedule,
        ShardedOperation,
        Status,
        Straggler,
        TensorSharding,
        Trace,
        equal_devices,
        explain,
        plan_resharding,
        register_algorithm,
        register_kind,
        replica_groups,
        simulate,
    )
    from vcluster import faults, report
    from vcluster.code import (
        ChannelClosedError,
        ClusterError,
        ClusterTimeoutError,
        CollectiveMismatchError,
        DeadlockError,
        DeviceFailedError,
        OperationCancelled,
        PerDevice,
        Sharded,
        UndeliveredMessageError,
        UnusedResultWarning,
    )
    from vcluster.device import VirtualDevice
    from vcluster.messages import ChannelStatistics, VirtualChannel
    from vcluster.runs import Run, VirtualCluster
    from vcluster.testing.communication import assert_communication

HOST = -1
"""The rank by which the process that owns the cluster is called: ``device.channel(HOST)``."""

__version__ = "0.1.0"

_MODULES = {
    "arguments": ("PerDevice", "Sharded"),
    "channel": ("ChannelStatistics", "VirtualChannel"),
    "cluster": ("VirtualCluster",),
    "device": ("VirtualDevice",),
    "errors": (
        "ChannelClosedError", "ClusterError", "ClusterTimeoutError", "CollectiveMismatchError", "DeadlockError",
        "DeviceFailedError", "OperationCancelled", "UndeliveredMessageError", "UnusedResultWarning",
    ),
    "run": ("Run",),
    "testing.communication": ("assert_communication",),
}
_SUBMODULES = ("faults", "report")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "HOST", "Action", "ChannelClosedError", "ChannelStatistics", "ClusterError", "ClusterTimeoutError",
    "CollectiveAlgorithm", "CollectiveCost", "CollectiveKind", "CollectiveMismatchError", "Costs", "DeadlockError",
    "Device", "DeviceFailedError", "DimSharding", "Event", "Executable", "Explanation", "Hardware",
    "HardwareFileError", "HostLink", "Link", "LinkFault", "Mesh", "MeshIndex", "Operation", "OperationCancelled",
    "Overlapped", "PerDevice", "Pipeline", "PipelineStage", "PipelinedOperation", "PipelinedProgram",
    "PipelinedStep", "Profile", "RegistrationError", "ReshardingPlan", "ReshardingStep", "Run", "Schedule",
    "Sharded", "ShardedOperation", "Status", "Straggler", "TensorSharding", "Trace", "UndeliveredMessageError",
    "UnusedResultWarning", "VirtualChannel", "VirtualCluster", "VirtualDevice", "assert_communication",
    "equal_devices", "explain", "faults", "plan_resharding", "register_algorithm", "register_kind",
    "replica_groups", "report", "simulate",
]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _SUBMODULES:
        value = import_module(f"{__name__}.{name}")
    elif name in parallelism.__all__:
        value = getattr(parallelism, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
