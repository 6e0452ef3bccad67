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
    "ChannelClosedError", "ClusterError", "ClusterTimeoutError", "CollectiveMismatchError", "DeadlockError",
    "DeviceFailedError", "HostWaitWarning", "OperationCancelled", "UndeliveredMessageError", "UnusedResultWarning",
    "ranks_in_words",
]


class DeviceFailedError(ClusterError):
    """A kernel raised, or the process of a device died.

    For an exception, ``__cause__`` is the exception of the lowest rank that raised first, and ``exceptions`` holds
    all exceptions by rank. For a death, ``exitcode`` or ``signal`` (the name of the signal) gives the reason.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), operation: str | None = None, locations: Sequence[str] = (),
        exceptions: Mapping[int, BaseException] | None = None, exitcode: int | None = None, signal: str | None = None,
    ) -> None:
        super().__init__(message, ranks=ranks, operation=operation, locations=locations)
        self.exceptions = dict(exceptions or {})
        self.failures: dict[int, Failure] = {}
        """The same exceptions as they crossed to the host, with their tracebacks."""
        self.exitcode, self.signal = exitcode, signal


class ChannelClosedError(ClusterError):
    """A channel was used after one of its ends was closed."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A run took longer than the ``deadline_seconds`` of its cluster."""


class OperationCancelled(BaseException):
    """The pending call of a device raises this when the run is cancelled because another device failed.

    It is a ``BaseException``, so that ``except Exception`` in a kernel does not swallow it.
    """


class HostWaitWarning(UserWarning):
    """Devices wait for the host, and only another thread of the host can make them go on."""


class UnusedResultWarning(UserWarning):
    """A collective is called for its result, and the result is thrown away."""
