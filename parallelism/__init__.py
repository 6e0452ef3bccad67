"""Describes, plans and predicts work on many devices.  Values only: nothing here starts a process."""

from parallelism.explain import explain
from parallelism.mesh import Mesh, MeshIndex
from parallelism.operation import Device, Operation, PipelinedOperation, ShardedOperation
from parallelism.pipelining import Action, Pipeline, PipelineStage, Schedule, Status
from parallelism.trace import Event, Trace

__all__ = [
    "Action", "Device", "Event", "Mesh", "MeshIndex", "Operation", "Pipeline", "PipelineStage", "PipelinedOperation",
    "Schedule", "ShardedOperation", "Status", "Trace", "explain",
]
