"""How a run went, told by its devices, and the one error that is made of it when it went wrong."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

from parallelism.trace import HOST, Event
from vcluster.crew import Died
from vcluster.errors import (
    ChannelClosedError,
    ClusterError,
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    UndeliveredMessageError,
    ranks_in_words,
)
from vcluster.records import columns_of
from vcluster.worker import Cancelled, Done, Failed

_OWN = (
    DeadlockError, CollectiveMismatchError, ChannelClosedError, UndeliveredMessageError, ClusterTimeoutError
)
"""Found by the library inside a device."""

Reply = Done | Failed | Cancelled | Died

_CAUSES = {
    "SIGKILL": "killed from outside, or by the system for want of memory",
    "SIGSEGV": "a crash inside compiled code",
    "SIGABRT": "aborted by compiled code",
    "SIGBUS": "shared memory could not be had: the machine or the container is out of memory",
    "SIGTERM": "ended from outside",
}


def error_of(replies: Mapping[int, Reply]) -> ClusterError | None:
    """The error of a run in which something failed, None if all is well; ``replies`` in the order of their arrival."""
    died = {rank: reply for rank, reply in replies.items() if isinstance(reply, Died) and not reply.by_host}
    failed = {rank: reply for rank, reply in sorted(replies.items()) if isinstance(reply, Failed)}
    first = next((reply for reply in replies.values() if reply in (*died.values(), *failed.values())), None)
    if isinstance(first, Died):
        return _death(died)
    if failed:
        return _failure(failed)
    done = {rank: reply for rank, reply in replies.items() if isinstance(reply, Done)}
    return _undelivered(done)


def _death(died: Mapping[int, Died]) -> DeviceFailedError:
    rank = min(died)
    code = died[rank].exitcode
    name = None
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        cause = _CAUSES.get(name, "")
        how = f"was ended by {name}" + (f" ({cause})" if cause else "")
    else:
        how = f"ended with exit code {code} (os._exit in the kernel or in a library it calls?)"
    others = "" if len(died) == 1 else f"; so did ranks {', '.join(str(r) for r in sorted(died) if r != rank)}"
    return DeviceFailedError(
        f"the process of rank {rank} (pid {died[rank].pid}) {how}{others}",
        ranks=sorted(died), exitcode=code if code >= 0 else None, signal=name,
    )


def _failure(failed: Mapping[int, Failed]) -> ClusterError:
    first = min(failed)
    exceptions = {rank: reply.failure.exception() for rank, reply in failed.items()}
    cause = exceptions[first]
    locations = [reply.failure.location or "?" for reply in failed.values()]
    texts: dict[str, list[int]] = {}
    for rank, reply in failed.items():
        texts.setdefault(reply.failure.format().rstrip(), []).append(rank)
    told = "\n\n".join(f"on {ranks_in_words(ranks)}:\n{text}" for text, ranks in texts.items())
    if type(cause) in _OWN:
        # found by the devices themselves, and never wrapped: told once, with the line of each
        if isinstance(cause, CollectiveMismatchError) and cause.calls:
            return _mismatch(cause, dict(zip(failed, locations, strict=True)))
        places = "; ".join(f"rank {rank} at {place}" for rank, place in zip(failed, locations, strict=True))
        assert isinstance(cause, ClusterError)
        return type(cause)(f"{cause} ({places})", ranks=cause.ranks, operation=cause.operation, locations=locations)
    kind = failed[first].failure.type_name
    head = f"{ranks_in_words(list(failed))} raised {kind}" if len(texts) == 1 else f"rank {first} raised {kind}"
    error = DeviceFailedError(f"{head}\n\n{told}", ranks=list(failed), locations=locations, exceptions=exceptions)
    error.__cause__ = cause
    error.failures = {rank: reply.failure for rank, reply in failed.items()}
    return error


def _mismatch(error: CollectiveMismatchError, locations: Mapping[int, str]) -> CollectiveMismatchError:
    """What each rank called and where, a line for each different call, that of the most ranks first."""
    callers: dict[str, list[int]] = {}
    for rank, call in error.calls.items():
        where = f" at {locations[rank]}" if rank in locations else ""
        callers.setdefault(f"called {call}{where}", []).append(rank)
    lines = [
        f"  {ranks_in_words(ranks)} {text}" for text, ranks in sorted(callers.items(), key=lambda item: -len(item[1]))
    ]
    return CollectiveMismatchError(
        "\n".join([str(error), *lines]), ranks=error.ranks, operation=error.operation,
        locations=list(locations.values()), calls=error.calls,
    )


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
    told, locations = [], []
    for event, count in _not_received(done):
        what = f"{count} messages" if count > 1 else "a message"
        told.append(f"rank {event.rank} sent {what} to rank {event.peer} (tag {event.tag}) at {event.location}")
        locations.append(event.location or "?")
    if not told:
        told = [f"rank {a} sent {n} messages more to rank {b} than it received" for (a, b), n in missing.items()]
    return UndeliveredMessageError(
        "the run ended with messages that nobody received: " + "; ".join(told),
        ranks=sorted({rank for pair in missing for rank in pair}), operation="send", locations=locations,
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
