"""The errors of a cluster: `ClusterError` and its subclasses.

A wrong argument of a call raises ``ValueError`` or ``TypeError`` in the device, before anything is sent.
The errors here concern the cluster itself. Each names the ranks, the operation and the lines of code involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcluster.code.exceptions import Failure


class ClusterError(RuntimeError):
    """The base class: something went wrong in a cluster.

    ``ranks`` are the ranks involved. ``operation`` is the operation they were in, or None if it is not known.
    ``locations`` are their lines as ``file:line``, in the order of ``ranks`` where they are known.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), operation: str | None = None, locations: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation
        self.locations = tuple(locations)
        self.outputs: dict[int, Any] = {}
        """The results of the ranks that finished before the run failed, by rank."""


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
        self.exitcode = exitcode
        self.signal = signal


class DeadlockError(ClusterError):
    """Devices wait for each other, or for a device that has finished, and can never continue."""


class CollectiveMismatchError(ClusterError):
    """The members of a group called different collectives, or passed arguments that must agree and do not.

    ``ranks`` are the ranks that differ from the majority, or all ranks if there is no majority. ``calls`` maps each
    rank to the text of its call.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), operation: str | None = None, locations: Sequence[str] = (),
        calls: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, ranks=ranks, operation=operation, locations=locations)
        self.calls = dict(calls or {})


class ChannelClosedError(ClusterError):
    """A channel was used after one of its ends was closed."""


class UndeliveredMessageError(ClusterError):
    """A run ended with messages that no device received."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A run took longer than the ``deadline_seconds`` of its cluster."""


class OperationCancelled(BaseException):
    """The pending call of a device raises this when the run is cancelled because another device failed.

    It is a ``BaseException``, so that ``except Exception`` in a kernel does not swallow it.
    """


class UnusedResultWarning(UserWarning):
    """A kernel calls a collective that returns its result, and discards the result."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """A list of ranks as text: ``rank 3``, ``ranks 0 and 2-5``. Rank -1 is the host."""
    numbers = [rank for rank in ranks if rank >= 0]
    spans: list[list[int]] = []
    for rank in numbers:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [text for span in spans for text in ([f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span))]
    words = [f"rank{'s' if len(numbers) > 1 else ''} " + _list_in_words(texts)] if texts else []
    if any(rank < 0 for rank in ranks):
        words.append("the host")
    return " and ".join(words) or "no rank"


def _list_in_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
