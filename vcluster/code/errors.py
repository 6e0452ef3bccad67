"""What can go wrong in a cluster: `ClusterError` and the small tree below it.

Wrong arguments of a call are ``ValueError`` or ``TypeError`` in the device, before anything is sent.
Everything here is about the cluster itself, and says which ranks, in which operation, at which lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcluster.code.exceptions import Failure


class ClusterError(RuntimeError):
    """Something went wrong in a cluster.

    ``ranks`` are those it is about, ``operation`` what they were doing (None if not known), ``locations``
    their lines as ``file:line``, in the order of ``ranks`` where known.
    """

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), operation: str | None = None, locations: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation
        self.locations = tuple(locations)
        self.outputs: dict[int, Any] = {}
        """What the ranks that had finished when a run failed returned."""


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


class DeadlockError(ClusterError):
    """Devices wait for each other, or for somebody who has gone, and can never go on."""


class CollectiveMismatchError(ClusterError):
    """The members of a group called different collectives, or with arguments that must agree and do not.

    ``ranks`` are those that differ from the majority (all, if there is none); ``calls`` is what each rank called.
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
    """A run ended with messages that nobody received."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A run took longer than the ``deadline_seconds`` of its cluster."""


class OperationCancelled(BaseException):
    """Raised by the pending call of a device whose peer failed.

    A ``BaseException``, so that ``except Exception`` in a kernel cannot swallow it.
    """


class UnusedResultWarning(UserWarning):
    """A collective is called for its result, and the result is thrown away."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2-5``; -1 is the host."""
    numbers = [rank for rank in ranks if rank >= 0]
    spans: list[list[int]] = []
    for rank in numbers:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    told = [word for span in spans for word in ([f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span))]
    words = [f"rank{'s' if len(numbers) > 1 else ''} " + _list_in_words(told)] if told else []
    if any(rank < 0 for rank in ranks):
        words.append("the host")
    return " and ".join(words) or "nobody"


def _list_in_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
