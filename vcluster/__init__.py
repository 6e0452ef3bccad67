"""A cluster on a laptop: every device a process, every shard a real array, every byte and second on record."""

from parallelism import *  # noqa: F403
from parallelism import __all__ as _described
from vcluster.arguments import PerDevice
from vcluster.channel import ChannelStatistics, VirtualChannel
from vcluster.cluster import VirtualCluster
from vcluster.device import VirtualDevice
from vcluster.errors import (
    ChannelClosedError, ClusterError, ClusterTimeoutError, CollectiveMismatchError, DeadlockError, DeviceFailedError,
    OperationCancelled, UndeliveredMessageError,
)
from vcluster.run import Run

HOST = -1
"""The rank by which the process that owns the cluster is called: ``device.channel(HOST)``."""

__version__ = "0.1.0"
__all__ = [
    "HOST", "ChannelClosedError", "ChannelStatistics", "ClusterError", "ClusterTimeoutError", "CollectiveMismatchError",
    "DeadlockError", "DeviceFailedError", "OperationCancelled", "PerDevice", "Run", "UndeliveredMessageError",
    "VirtualChannel", "VirtualCluster", "VirtualDevice", *_described,
]
