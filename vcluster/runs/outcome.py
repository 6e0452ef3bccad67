"""How a run went, told by its devices, and the one error that is made of it when it went wrong."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallelism.events import HOST, Event
from parallelism.operation import Undelivered, undelivered_error
from parallelism.operation.errors import located
from vcluster.code import (
    ChannelClosedError,
    ClusterError,
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    Failure,
    UndeliveredMessageError,
    ranks_in_words,
)
from vcluster.memory import LastSeen
from vcluster.processes import Cancelled, Died, Done, Failed
from vcluster.tracing import columns_of

MOST_LINES = 16
"""Of very many ranks that failed at one line in different words not all words are told."""

_OWN = (
    DeadlockError, CollectiveMismatchError, ChannelClosedError, UndeliveredMessageError, ClusterTimeoutError
)
"""Found by the library inside a device."""

Reply = Done | Failed | Cancelled | Died


_CAUSES = {
    "SIGSEGV": "a crash inside compiled code",
    "SIGABRT": "aborted by compiled code: a failed check, or an allocation refused",
    "SIGBUS": "shared memory could not be had: the machine or the container is out of memory",
    "SIGFPE": "a division by zero inside compiled code",
    "SIGILL": "compiled code for another processor",
    "SIGTERM": "ended from outside",
    "SIGXCPU": "the limit on CPU time, ulimit -t",
    "SIGXFSZ": "the limit on the size of files, ulimit -f",
}


def memory_kills() -> int | None:
    """How many processes this system has killed for want of memory so far; None where it does not tell."""
    try:
        counts = Path("/proc/vmstat").read_bytes()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith(b"oom_kill ")), None)


def error_of(
    replies: Mapping[int, Reply], last_seen: Callable[[int], LastSeen], killed_for_memory: Callable[[], bool | None]
) -> ClusterError | None:
    """The error of a run in which something failed, None if all is well; ``replies`` in the order of their arrival.

    ``last_seen`` says what a dead device had called; ``killed_for_memory`` whether the system has killed a process for
    want of memory meanwhile (None: cannot be told).
    """
    died = {rank: reply for rank, reply in sorted(replies.items()) if isinstance(reply, Died) and not reply.by_host}
    failed = {rank: reply for rank, reply in sorted(replies.items()) if isinstance(reply, Failed)}
    first = next((reply for reply in replies.values() if reply in (*died.values(), *failed.values())), None)
    if isinstance(first, Died):
        return _death(died, {rank: last_seen(rank) for rank in died}, killed_for_memory())
    if failed:
        return _failure(failed, replies)
    done = {rank: reply for rank, reply in replies.items() if isinstance(reply, Done)}
    return _undelivered(done)


def _death(
    died: Mapping[int, Died], seen: Mapping[int, LastSeen], killed_for_memory: bool | None
) -> DeviceFailedError:
    """Each process that died, how, where it was last seen, and what that usually means; ``died`` by rank."""
    lines = [
        f"the process of rank {rank} (pid {reply.pid}) {_how(reply.exitcode, killed_for_memory)}{seen[rank]}"
        for rank, reply in died.items()
    ]
    first = next(iter(died))
    code = died[first].exitcode
    return DeviceFailedError(
        "\n".join(lines), ranks=list(died), operation=seen[first].operation,
        locations=[one.location for one in seen.values() if one.location],
        exitcode=code if code >= 0 else None, signal=_signal_name(code) if code < 0 else None,
    )


def _how(code: int, killed_for_memory: bool | None) -> str:
    if code >= 0:
        return f"ended with exit code {code} (os._exit in the kernel or in a library it calls?)"
    name = _signal_name(code)
    cause = _CAUSES.get(name, "")
    if name == "SIGKILL":
        cause = {
            True: "by the system, which has killed a process for want of memory", False: "from outside",
            None: "from outside, or by the system for want of memory",
        }[killed_for_memory]
    return f"was ended by {name}" + (f" ({cause})" if cause else "")


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _failure(failed: Mapping[int, Failed], replies: Mapping[int, Reply]) -> ClusterError:
    first = min(failed)
    exceptions = {rank: reply.failure.exception() for rank, reply in failed.items()}
    cause = exceptions[first]
    locations = [reply.failure.location or "?" for reply in failed.values()]
    if type(cause) in _OWN:
        assert isinstance(cause, ClusterError)      # found by the devices themselves, and never wrapped
        if isinstance(cause, CollectiveMismatchError) and not cause.calls:
            cause.sent_at = _sent_at(cause.ranks, replies)
        return located(cause, dict(zip(failed, locations, strict=True)))
    kind = failed[first].failure.type_name
    told = told_together({rank: reply.failure for rank, reply in failed.items()})
    head = f"{ranks_in_words(list(failed))} raised {kind}" if len(told) == 1 else f"rank {first} raised {kind}"
    error = DeviceFailedError(
        "\n\n".join([head, *told]), ranks=list(failed), locations=locations, exceptions=exceptions
    )
    error.__cause__ = cause
    error.failures = {rank: reply.failure for rank, reply in failed.items()}
    return error


def told_together(failures: Mapping[int, Failure]) -> list[str]:
    """The traceback of each failure, that of the first rank first; those that differ in their words only are a line
    each below it, equal ones are told once."""
    by_path: dict[Any, dict[str, list[int]]] = {}
    for rank, failure in failures.items():
        told = by_path.setdefault((failure.type_name, failure.frames), {})
        told.setdefault(failure.format().rstrip(), []).append(rank)
    paragraphs = []
    for told in by_path.values():
        (text, ranks), *others = told.items()
        lines = [f"on {ranks_in_words(ranks)}:\n{text}"]
        below = [(ranks, failures[ranks[0]].in_a_line) for _, ranks in others[:MOST_LINES]]
        if len(others) > MOST_LINES:
            rest = [rank for _, ranks in others[MOST_LINES:] for rank in ranks]
            below.append((rest, f"{failures[rest[0]].type_name}, in other words"))
        lines += [f"at the same line on {ranks_in_words(ranks)}: {words}" for ranks, words in below]
        paragraphs.append("\n".join(lines))
    return paragraphs


def _sent_at(ranks: tuple[int, ...], replies: Mapping[int, Reply]) -> str | None:
    """The line that sent the message which a receiver took last; ``ranks`` are the receiver and the sender."""
    receiver, sender = (replies.get(rank) for rank in ranks)
    if receiver is None or sender is None or isinstance(receiver, Died) or isinstance(sender, Died):
        return None
    taken = [
        event for event in _events(ranks[0], receiver)
        if event.kind == "recv" and event.peer == ranks[1] and event.parent is None and event.wall_duration_seconds
    ]
    if not taken:
        return None
    last = max(taken, key=lambda event: event.wall_start_seconds + event.wall_duration_seconds)
    for event in _events(ranks[1], sender):
        if event.kind == "send" and event.peer == ranks[0] and (event.tag, event.sequence) == (last.tag, last.sequence):
            return event.location
    return None


def _events(rank: int, reply: Done | Failed | Cancelled) -> list[Event]:
    assert not isinstance(reply.record, int)
    return list(columns_of({rank: reply.record}).events())


def _undelivered(done: Mapping[int, Done]) -> UndeliveredMessageError | None:
    missing = {}
    for source, reply in done.items():
        for target, (sent, _) in reply.counts.items():
            if target in done:
                received = done[target].counts.get(source, (0, 0))[1]
                if source == target:
                    received = reply.counts[source][1]
                if sent != received:
                    missing[source, target] = sent - received
    if not missing:
        return None
    messages = [
        Undelivered(event.rank, event.peer or 0, event.tag or 0, count, event.location)
        for event, count in _not_received(done)
    ]
    if messages:
        return undelivered_error(messages)
    texts = [f"rank {a} sent {n} messages more to rank {b} than it received" for (a, b), n in missing.items()]
    return UndeliveredMessageError(
        "the run ended with messages that nobody received: " + "; ".join(texts),
        ranks=sorted({rank for pair in missing for rank in pair}), operation="send",
    )


def _not_received(done: Mapping[int, Done]) -> list[tuple[Event, int]]:
    """The first send that was not received, and how many, for each channel and tag."""
    sends: dict[Any, list[Event]] = {}
    received: Counter[Any] = Counter()
    for rank, reply in done.items():
        assert not isinstance(reply.record, int)
        events = columns_of({rank: reply.record})
        messages = events.isin("kind", {"send", "recv"}) & ~events.present("parent") & ~events.isin("peer", {HOST})
        for event in events.take(messages).events():
            if event.kind == "send":
                sends.setdefault((rank, event.peer, event.tag), []).append(event)
            else:
                received[event.peer, rank, event.tag] += 1
    return [
        (sent[received[key]], len(sent) - received[key])
        for key, sent in sends.items() if len(sent) > received[key]
    ]
