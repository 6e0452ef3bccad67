"""The outcome of a run: one error is built from the replies of all devices."""

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallelism.events import HOST, Event
from parallelism.operation import Stuck, Undelivered, undelivered_error
from parallelism.operation.deadlock import of_other_tags
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
from vcluster.tracing.failed_run import open_call

MOST_LINES = 16
"""Maximal number of ranks with a line of their own among ranks that failed at one line with different messages."""

_OWN = (
    DeadlockError,
    CollectiveMismatchError,
    ChannelClosedError,
    UndeliveredMessageError,
    ClusterTimeoutError,
)
"""Errors that the library itself raises in a device. They are passed on without a `DeviceFailedError` around them."""

Reply = Done | Failed | Cancelled | Died


_CAUSES = {
    "SIGSEGV": "a crash inside compiled code",
    "SIGABRT": "aborted by compiled code: a failed check, or an allocation refused",
    "SIGBUS": "shared memory could not be allocated: the machine or the container is out of memory",
    "SIGFPE": "a division by zero inside compiled code",
    "SIGILL": "compiled code for a different processor",
    "SIGTERM": "ended from outside",
    "SIGHUP": "ended from outside",
    "SIGQUIT": "ended from outside",
    "SIGUSR1": "sent from outside, or by the kernel or a library that it calls",
    "SIGUSR2": "sent from outside, or by the kernel or a library that it calls",
    "SIGALRM": "an alarm of the kernel's, or of a library's that it calls, and nothing handles it",
    "SIGPIPE": "it wrote to a pipe that nobody reads",
    "SIGXCPU": "the CPU time limit was reached, see ulimit -t",
    "SIGXFSZ": "the file size limit was reached, see ulimit -f",
}


def memory_kills() -> int | None:
    """Number of processes that this system has killed for lack of memory so far; None where it is not known."""
    try:
        with open("/proc/vmstat", "rb") as file:
            counts = file.read()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith(b"oom_kill ")), None)


def error_of(
    replies: Mapping[int, Reply],
    last_seen: Callable[[int], LastSeen],
    killed_for_memory: Callable[[], bool | None],
) -> ClusterError | None:
    """The error of a run in which something failed, or None. ``replies`` are in the order of their arrival.

    ``last_seen(rank)`` is the last call of a device that died. ``killed_for_memory()`` tells whether the system killed
    a process for lack of memory during the run; it is None where that is not known.
    """
    by_rank = sorted(replies.items())
    died = {rank: reply for rank, reply in by_rank if isinstance(reply, Died) and not reply.by_host}
    failed = {rank: reply for rank, reply in by_rank if isinstance(reply, Failed)}
    first = next((reply for reply in replies.values() if reply in (*died.values(), *failed.values())), None)
    if isinstance(first, Died):
        return _death(died, {rank: last_seen(rank) for rank in died}, killed_for_memory())
    if failed:
        return _failure(failed, replies)
    return _undelivered({rank: reply for rank, reply in replies.items() if isinstance(reply, Done)})


def _death(
    died: Mapping[int, Died], seen: Mapping[int, LastSeen], killed_for_memory: bool | None
) -> DeviceFailedError:
    """The error for processes that died: how each died, its last call, and the usual cause. ``died`` is by rank."""
    lines = [
        f"the process of rank {rank} (pid {reply.pid}) {_how(reply, killed_for_memory)}{seen[rank]}"
        for rank, reply in died.items()
    ]
    first = next(iter(died))
    code = died[first].exitcode
    return DeviceFailedError(
        "\n".join(lines),
        ranks=list(died),
        operation=seen[first].operation,
        locations=[one.location for one in seen.values() if one.location],
        exitcode=code if code >= 0 else None,
        signal=_signal_name(code) if code < 0 else None,
    )


def _how(died: Died, killed_for_memory: bool | None) -> str:
    code = died.exitcode
    if died.lost:
        return (
            "has closed its connection to the host, which ended it (os.exec or os.closerange in the kernel?)"
        )
    if code == 0:  # a device that has lost its connection to the host ends so, too
        return "ended with exit code 0 (os._exit or os.closerange in the kernel or in a library it calls?)"
    if code > 0:
        return f"ended with exit code {code} (os._exit in the kernel or in a library it calls?)"
    name = _signal_name(code)
    cause = _CAUSES.get(name, "")
    if name == "SIGKILL":
        cause = {
            True: "by the system, which has killed a process for lack of memory",
            False: "from outside",
            None: "from outside, or by the system for lack of memory",
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
    locations = [
        getattr(exceptions[rank], "called_at", "") or reply.failure.location or "?"
        for rank, reply in failed.items()
    ]
    if type(cause) in _OWN:
        assert isinstance(cause, ClusterError)  # found by the devices themselves, and never wrapped
        lines = dict(zip(failed, locations, strict=True))
        if isinstance(cause, CollectiveMismatchError) and cause.calls:
            raised = {rank for rank, error in exceptions.items() if isinstance(error, type(cause))}
            lines |= _called_at(
                tuple(cause.calls), {rank: replies[rank] for rank in replies if rank not in raised}
            )
        elif isinstance(cause, CollectiveMismatchError):
            cause.sent_at = _sent_at(cause.ranks, replies)
        return located(cause, dict(sorted(lines.items())))
    kind = failed[first].failure.type_name
    paragraphs = combined_tracebacks({rank: reply.failure for rank, reply in failed.items()})
    head = (
        f"{ranks_in_words(list(failed))} raised {kind}"
        if len(paragraphs) == 1
        else f"rank {first} raised {kind}"
    )
    error = DeviceFailedError(
        "\n\n".join([head, *paragraphs]), ranks=list(failed), locations=locations, exceptions=exceptions
    )
    error.__cause__ = cause
    error.failures = {rank: reply.failure for rank, reply in failed.items()}
    return error


def combined_tracebacks(failures: Mapping[int, Failure]) -> list[str]:
    """One paragraph for each different traceback, the first rank's first.

    Equal failures are reported once. Failures that differ only in their message get one line each below the traceback.
    """
    by_path: dict[Any, dict[str, list[int]]] = {}
    for rank, failure in failures.items():
        ranks_by_text = by_path.setdefault((failure.type_name, failure.frames), {})
        ranks_by_text.setdefault(failure.format().rstrip(), []).append(rank)
    paragraphs = []
    for ranks_by_text in by_path.values():
        (text, ranks), *others = ranks_by_text.items()
        lines = [f"on {ranks_in_words(ranks)}:\n{text}"]
        below = [(ranks, failures[ranks[0]].in_a_line) for _, ranks in others[:MOST_LINES]]
        if len(others) > MOST_LINES:
            rest = [rank for _, ranks in others[MOST_LINES:] for rank in ranks]
            below.append((rest, f"{failures[rest[0]].type_name}, with other messages"))
        lines += [f"at the same line on {ranks_in_words(ranks)}: {words}" for ranks, words in below]
        paragraphs.append("\n".join(lines))
    return paragraphs


def _called_at(group: tuple[int, ...], replies: Mapping[int, Reply]) -> dict[int, str]:
    """The lines of calls whose members differ, of those that did not raise it: they did something else, or were stopped
    on their way.
    """
    lines = {}
    for rank, reply in replies.items():
        if rank not in group or isinstance(reply, Died):
            continue
        assert not isinstance(reply.record, int)
        columns = columns_of({rank: reply.record})
        not_ended = columns.isin("kind", {"collective"}) & (columns.numbers("wall_duration_seconds") == 0)
        call = open_call(columns.take(not_ended).events(), group)
        if call is not None and call.location:
            lines[rank] = call.location
        elif isinstance(reply, Cancelled) and reply.stack:
            lines[rank] = reply.stack[-1].place
    return lines


def _sent_at(ranks: tuple[int, ...], replies: Mapping[int, Reply]) -> str | None:
    """The line that sent the message which the receiver took last. ``ranks`` are the receiver and the sender."""
    receiver, sender = (replies.get(rank) for rank in ranks)
    if receiver is None or sender is None or isinstance(receiver, Died) or isinstance(sender, Died):
        return None
    taken = [
        event
        for event in _events(ranks[0], receiver)
        if event.kind == "recv"
        and event.peer == ranks[1]
        and event.parent is None
        and event.wall_duration_seconds
    ]
    if not taken:
        return None
    last = max(taken, key=lambda event: event.wall_start_seconds + event.wall_duration_seconds)
    sought = "send", ranks[0], last.tag, last.sequence
    events = _events(ranks[1], sender)
    return next((e.location for e in events if (e.kind, e.peer, e.tag, e.sequence) == sought), None)


def _events(rank: int, reply: Done | Failed | Cancelled) -> list[Event]:
    assert not isinstance(reply.record, int)
    return list(columns_of({rank: reply.record}).events())


def _undelivered(done: Mapping[int, Done]) -> UndeliveredMessageError | None:
    missing = {}
    for source, reply in done.items():
        for target, (sent, _) in reply.counts.items():
            if target in done:
                received = done[target].counts.get(source, (0, 0))[1]
                if sent != received:
                    missing[source, target] = sent - received
    if not missing:
        return None
    messages = _not_received(done)
    if messages:
        return undelivered_error(messages)
    texts = [f"rank {a} sent {n} messages more to rank {b} than it received" for (a, b), n in missing.items()]
    return UndeliveredMessageError(
        "the run ended with messages that nobody received: " + "; ".join(texts),
        ranks=sorted({rank for pair in missing for rank in pair}),
        operation="send",
    )


def remarks_on(stuck: Sequence[Stuck], replies: Mapping[int, Reply], capacity: int) -> list[str]:
    """What explains a deadlock besides its waits: where messages went that ranks wait for, and why sends wait."""
    recorded = {
        rank: reply
        for rank, reply in sorted(replies.items())
        if not isinstance(reply, Died) and not isinstance(reply.record, int)
    }
    remarks = []
    if any(each.lane[0] == "recv" for each in stuck):
        remarks += [*of_other_tags(stuck, _not_received(recorded)), *_sent_to_the_host(stuck, recorded)]
    if any(each.lane[0] == "send" for each in stuck):
        until = f"while {capacity} messages of its tag lie in the channel" if capacity else "for its receiver"
        remarks.append(f"a send waits {until} (channel_capacity={capacity})")
    return remarks


def _sent_to_the_host(stuck: Sequence[Stuck], recorded: Mapping[int, Done | Failed | Cancelled]) -> list[str]:
    """Messages that went to the host, while a rank waits for one of that tag: -1 is not the last rank."""
    wanted = {each.lane[1:] for each in stuck if each.lane[0] == "recv"}
    remarks = []
    for rank in sorted(recorded.keys() & {source for source, _ in wanted}):
        record = recorded[rank].record
        assert not isinstance(record, int)
        events = columns_of({rank: record})
        sends = events.take(events.isin("kind", {"send"}) & events.isin("peer", {HOST})).events()
        lines = [event.location for event in sends if (rank, event.tag) in wanted]
        if lines:
            remarks.append(
                f"rank {rank} sent a message with that tag to -1, the host, at {lines[0]}; "
                "the device before rank 0 is (device.rank - 1) % device.size"
            )
    return remarks


def _not_received(done: Mapping[int, Done | Failed | Cancelled]) -> list[Undelivered]:
    """The messages that were sent and not received, by channel and tag."""
    sends: dict[Any, list[Event]] = {}
    received: Counter[Any] = Counter()
    for rank, reply in done.items():
        assert not isinstance(reply.record, int)
        events = columns_of({rank: reply.record})
        messages = (
            events.isin("kind", {"send", "recv"}) & ~events.present("parent") & ~events.isin("peer", {HOST})
        )
        for event in events.take(messages).events():
            if event.kind == "send":
                sends.setdefault((rank, event.peer, event.tag), []).append(event)
            else:
                received[event.peer, rank, event.tag] += 1
    left = [
        (sent[received[key]], len(sent) - received[key])
        for key, sent in sends.items()
        if len(sent) > received[key]
    ]
    return [
        Undelivered(event.rank, event.peer or 0, event.tag or 0, count, event.location)
        for event, count in left
    ]
