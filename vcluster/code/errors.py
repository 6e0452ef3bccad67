"""The errors of a cluster: `ClusterError` and its subclasses.

A wrong argument of a call raises ``ValueError`` or ``TypeError`` in the device, before anything is sent.
The errors here concern the cluster itself. Each names the ranks, the operation and the lines of code involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parallelism.operation import (
    ClusterError,
    CollectiveMismatchError,
    DeadlockError,
    UndeliveredMessageError,
    ranks_in_words,
)

if TYPE_CHECKING:
    from vcluster.code.exceptions import Failure

__all__ = [
    "ChannelClosedError",
    "ClusterError",
    "ClusterTimeoutError",
    "CollectiveMismatchError",
    "DeadlockError",
    "DeviceFailedError",
    "HostWaitWarning",
    "OperationCancelled",
    "ReplicasDifferWarning",
    "UndeliveredMessageError",
    "UnusedResultWarning",
    "ranks_in_words",
]


class DeviceFailedError(ClusterError):
    """A kernel raised, or the process of a device died.

    >>> from vcluster import DeviceFailedError, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(lambda device: 1 // device.rank)
    ...     except DeviceFailedError as error:
    ...         print(error.ranks, repr(error.__cause__))
    (0,) ZeroDivisionError('integer division or modulo by zero')

    For an exception, ``__cause__`` is the exception of the lowest rank that raised first, and ``exceptions`` holds
    all exceptions by rank. For a death, ``exitcode`` or ``signal`` (the name of the signal) gives the reason.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        operation: str | None = None,
        locations: Sequence[str] = (),
        exceptions: Mapping[int, BaseException] | None = None,
        exitcode: int | None = None,
        signal: str | None = None,
    ) -> None:
        super().__init__(message, ranks=ranks, operation=operation, locations=locations)
        self.exceptions = dict(exceptions or {})
        self.failures: dict[int, Failure] = {}
        """The same exceptions as they crossed to the host, with their tracebacks."""
        self.exitcode, self.signal = exitcode, signal


class ChannelClosedError(ClusterError):
    """A channel was used after one of its ends was closed.

    >>> from vcluster import ChannelClosedError, VirtualCluster
    >>> with VirtualCluster(1, backend="thread") as cluster:
    ...     channel = cluster.channel(0)
    >>> try:
    ...     channel.send(1)
    ... except ChannelClosedError as error:
    ...     print(error)
    the channel between the host and rank 0 was closed by the host
    """


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A run took longer than the ``deadline_seconds`` of its cluster.

    >>> import time
    >>> from vcluster import ClusterTimeoutError, VirtualCluster
    >>> with VirtualCluster(1, backend="thread", deadline_seconds=0.2) as cluster:
    ...     try:
    ...         cluster.run(lambda device: time.sleep(0.7))
    ...     except ClusterTimeoutError as error:
    ...         print(str(error).splitlines()[0])
    the run took longer than deadline_seconds=0.2
    """


class OperationCancelled(BaseException):
    """The pending call of a device raises this when the run is cancelled because another device failed.

    >>> from vcluster import OperationCancelled
    >>> issubclass(OperationCancelled, Exception)
    False

    It is a ``BaseException``, so that ``except Exception`` in a kernel does not swallow it.
    """


class HostWaitWarning(UserWarning):
    """Devices wait for the host, and only another thread of the host can make them go on; or the host waits for a device
    while no run is in progress, and only another thread can start one.

    >>> import warnings
    >>> from vcluster import HOST, HostWaitWarning, VirtualCluster
    >>> with VirtualCluster(1, backend="thread") as cluster, warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", HostWaitWarning)        # where another thread of the host will send
    ...     cluster.channel(0).send("now")
    ...     cluster.run(lambda device: device.recv(HOST)).outputs
    ['now']
    """


class ReplicasDifferWarning(UserWarning):
    """By the layout that `Run.unshard` was given some ranks hold the same, and their outputs differ.

    >>> import warnings
    >>> from vcluster import ReplicasDifferWarning, VirtualCluster
    >>> with VirtualCluster(3, backend="thread") as cluster, warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", ReplicasDifferWarning)
    ...     whole = cluster.run(lambda device: device.rank + 5).unshard("[]")
    >>> print(str(caught[0].message).replace(", and", ",\\nand"))
    by the layout [] ranks 0-2 hold the same,
    and the output of ranks 1 and 2 is not that of rank 0, which is taken; is a reduction missing?
    """


class UnusedResultWarning(UserWarning):
    """A collective is called for its result, and the result is thrown away.

    >>> import warnings
    >>> from vcluster import UnusedResultWarning, VirtualCluster
    >>> def kernel(device):
    ...     device.all_reduce(1.0)
    >>> with VirtualCluster(2, backend="thread") as cluster, warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", UnusedResultWarning)
    ...     run = cluster.run(kernel)
    >>> caught[0].category.__name__, str(caught[0].message).split(";")[0]
    ('UnusedResultWarning', 'the result of all_reduce is not used')
    """
