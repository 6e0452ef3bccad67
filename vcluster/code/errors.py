"""Errors of a cluster: `ClusterError` and its subclasses.

Wrong arguments of a call are ``ValueError`` or ``TypeError`` in the device, before anything is sent.  The errors here
are about the cluster itself, and say which ranks, in which operation, at which lines.  Those that a recorder raises as
well are defined in `parallelism.operation.errors`.
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
    "DeviceFailedError", "OperationCancelled", "UndeliveredMessageError", "UnusedResultWarning", "ranks_in_words",
]


class DeviceFailedError(ClusterError):
    """A kernel raised, or the process of a device died.

    For an exception, the original of the lowest rank among the first is ``__cause__`` and ``exceptions`` has
    them all by rank.  For a death, ``exitcode`` or ``signal`` (its name) say how.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), operation: str | None = None, locations: Sequence[str] = (),
        exceptions: Mapping[int, BaseException] | None = None, exitcode: int | None = None, signal: str | None = None,
    ) -> None:
        super().__init__(message, ranks=ranks, operation=operation, locations=locations)
        self.exceptions = dict(exceptions or {})
        self.failures: dict[int, Failure] = {}
        """Those exceptions as they crossed, with the lines they came through."""
        self.exitcode = exitcode
        self.signal = signal


class ChannelClosedError(ClusterError):
    """A channel was used after one of its ends was closed."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A run took longer than the ``deadline_seconds`` of its cluster."""


class OperationCancelled(BaseException):
    """Raised by the pending call of a device whose peer failed.

    A ``BaseException``, so that ``except Exception`` in a kernel cannot swallow it.
    """


class UnusedResultWarning(UserWarning):
    """A collective is called for its result, and the result is thrown away."""
