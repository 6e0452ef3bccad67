"""Errors of programs that run on several ranks, whether they run on processes, on threads or under a recorder.

Wrong arguments of one call are ``ValueError`` or ``TypeError``, raised before anything is sent.  The errors here are
about several ranks together: they say which ranks, in which operation, at which lines.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ClusterError(RuntimeError):
    """Something went wrong in a cluster.

    >>> from vcluster import ClusterError, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(lambda device: device.recv(1 - device.rank))
    ...     except ClusterError as error:
    ...         print(type(error).__name__, error.ranks, error.operation)
    DeadlockError (0, 1) recv

    ``ranks`` are those it is about, ``operation`` what they were doing (None if not known), ``locations``
    their lines as ``file:line``, in the order of ``ranks`` where known.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        operation: str | None = None,
        locations: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.ranks, self.operation, self.locations = tuple(ranks), operation, tuple(locations)
        self.outputs: dict[int, Any] = {}
        """By rank, the results of the ranks that had finished when a run failed."""
        self.trace: Any = None
        """The record of a run that failed, `vcluster.tracing.failed_run.FailedRun`: ``error.trace.save(path)`` writes what
        ``python -m vcluster hang`` explains.  None of an error that is not of a run."""
        self.called_at = ""
        """On a rank that found the error in an asynchronous operation: the line that called it."""


class DeadlockError(ClusterError):
    """Ranks wait for each other, or for a rank that has returned, and can never continue.

    >>> from vcluster import DeadlockError, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(lambda device: device.recv(1 - device.rank))
    ...     except DeadlockError as error:
    ...         print(error.ranks, error.operation)
    (0, 1) recv
    """


class CollectiveMismatchError(ClusterError):
    """The members of a group called different collectives, or with arguments that must agree and do not.

    >>> from vcluster import CollectiveMismatchError, VirtualCluster
    >>> def kernel(device):
    ...     device.barrier() if device.rank == 1 else device.all_reduce(1.0)
    >>> with VirtualCluster(3, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(kernel)
    ...     except CollectiveMismatchError as error:
    ...         print(error.ranks, error.calls)
    (1,) {0: "all_reduce(float64[], op='sum')", 1: 'barrier()', 2: "all_reduce(float64[], op='sum')"}

    ``ranks`` are those that differ from the majority (all, if there is none); ``calls`` is what each rank called, and
    ``locations`` are the lines of all these calls, as far as they are known, by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        operation: str | None = None,
        locations: Sequence[str] = (),
        calls: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, ranks=ranks, operation=operation, locations=locations)
        self.calls = dict(calls or {})
        self.sent_at: str | None = None
        """The line that sent a message which is not what its receiver declared."""

    def at(self, locations: Mapping[int, str]) -> "CollectiveMismatchError":
        """The same error with one line of text for each different call, the most frequent first.

        ``locations`` are the lines of the calls.  A rank whose line is not known, as its process has died, stands with
        those that called the same, if all of them called it at one line.
        """
        lines_of: dict[str, set[str]] = {call: set() for call in self.calls.values()}
        for rank, at in locations.items():
            if rank in self.calls:
                lines_of[self.calls[rank]].add(at)
        texts = {}
        for rank, call in self.calls.items():
            line = locations.get(rank) or (min(lines_of[call]) if len(lines_of[call]) == 1 else None)
            texts[rank] = f"called {call}" + (f" at {line}" if line else "")
        by_frequency = sorted(keys_by_value(texts).items(), key=lambda item: -len(item[1]))
        lines = [f"  {ranks_in_words(ranks)} {text}" for text, ranks in by_frequency]
        return CollectiveMismatchError(
            "\n".join([str(self), *lines]),
            ranks=self.ranks,
            operation=self.operation,
            locations=[at for rank, at in locations.items() if rank in self.calls],
            calls=self.calls,
        )


class UndeliveredMessageError(ClusterError):
    """A run ended with messages that no rank received.

    >>> from vcluster import UndeliveredMessageError, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(lambda device: device.send(1, 1) if device.rank == 0 else None)
    ...     except UndeliveredMessageError as error:
    ...         print(error.operation, error.ranks)
    send (0, 1)
    """


def located(error: ClusterError, locations: Mapping[int, str]) -> ClusterError:
    """An error that ranks found themselves, with the lines at which they raised it."""
    if isinstance(error, CollectiveMismatchError) and error.calls:
        return error.at(locations)
    places = [f"rank {rank} at {place}" for rank, place in locations.items()]
    where = list(locations.values())
    if isinstance(error, CollectiveMismatchError) and error.sent_at is not None:
        places[-1] += f"; sent at {error.sent_at}"
        where.append(error.sent_at)
    return type(error)(
        f"{error} ({'; '.join(places)})",
        ranks=error.ranks or list(locations),
        operation=error.operation,
        locations=where,
    )


class Undelivered(NamedTuple):
    """Messages of one source, target and tag that were sent and not received."""

    source: int
    target: int
    tag: int
    how_many: int
    location: str | None
    """The line that sent the first of them."""


def undelivered_error(messages: Sequence[Undelivered]) -> UndeliveredMessageError:
    """The error of a run that ended with these messages undelivered; those of one source in the order of sending."""
    messages = sorted(messages, key=lambda each: each.source)  # stable: of one source, in the order given
    texts = []
    for each in messages:
        count = f"{each.how_many} messages" if each.how_many > 1 else "a message"
        texts.append(
            f"rank {each.source} sent {count} to rank {each.target} (tag {each.tag}) at {each.location}"
        )
    return UndeliveredMessageError(
        f"the run ended with messages that nobody received: {'; '.join(texts)}",
        ranks=sorted({rank for each in messages for rank in each[:2]}),
        operation="send",
        locations=[each.location or "?" for each in messages],
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2-5``; -1 is the host."""
    numbers = [rank for rank in ranks if rank >= 0]
    spans: list[list[int]] = []
    for rank in numbers:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts: list[str] = []
    for span in spans:
        texts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    words = []
    if texts:
        noun = "ranks" if len(numbers) > 1 else "rank"
        words.append(f"{noun} {_list_in_words(texts)}")
    if any(rank < 0 for rank in ranks):
        words.append("the host")
    return " and ".join(words) or "no rank"


def folded(text_by_rank: Mapping[int, str]) -> list[str]:
    """A line for each different text, behind the ranks that have it."""
    return [f"  {ranks_in_words(ranks)} {text}" for text, ranks in keys_by_value(text_by_rank).items()]


def keys_by_value(values: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """The keys of each different value, both in the order of their first appearance."""
    keys: dict[Value, list[Key]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return keys


def _list_in_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
