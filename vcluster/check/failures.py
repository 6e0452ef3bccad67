"""Runs that fail, in a sentence: a deadlock, a message that nobody takes, an exception, a loop without end."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from parallelism.operation import is_ours, ranks_in_words
from vcluster.check.observed_run import Said, Watch, WrongPeer
from vcluster.code import (
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    UndeliveredMessageError,
)

LOOP = "a loop that never ends: what it counts does not change"


class Finding(NamedTuple):
    """A mistake that a check found, and its likely reason."""

    sentence: str
    details: tuple[str, ...] = ()
    likely: str = ""


def failure_of(watch: Watch, *, waits: bool = False, called: str = "mine(device, x)") -> Finding:
    """The failure of a run in words.

    ``waits``: each send waited until its message was received.  ``called``: how the function was called.
    """
    error = watch.error
    if isinstance(error, DeadlockError):
        return _deadlock(error, watch, waits)
    if isinstance(error, UndeliveredMessageError):
        return _undelivered(error, watch)
    if isinstance(error, ClusterTimeoutError):
        return Finding("the function does not come to an end", tuple(str(error).split("\n")[1:]), LOOP)
    if isinstance(error, CollectiveMismatchError):
        first, *others = str(error).split("\n")
        return Finding(
            first, tuple(line.strip() for line in others), "all ranks of a group must make the same calls"
        )
    if isinstance(error, DeviceFailedError):
        return _raised(error, watch, called)
    return Finding(str(error).split("\n")[0])


def each_of(ranks: Sequence[int]) -> str:
    """One rank, or each of several, before a verb: ``rank 2``, ``each of ranks 0-3``."""
    return f"{'each of ' if len(ranks) > 1 else ''}{ranks_in_words(ranks)}"


def at(location: str) -> str:
    """The line of code at a ``file:line``."""
    filename, _, line = location.rpartition(":")
    code = linecache.getline(filename, int(line)).strip() if line.isdigit() else ""
    return f"line {line}: {code}" if code else location


def _waiting(error: DeadlockError, watch: Watch) -> dict[int, Said]:
    """The message that each blocked rank waits for."""
    return {rank: watch.said[rank][-1] for rank in error.ranks if watch.said[rank]}


def _deadlock(error: DeadlockError, watch: Watch, waits: bool) -> Finding:
    waiting = _waiting(error, watch)
    where = dict(zip(error.ranks, error.locations, strict=False))
    lines = []
    for rank, said in waiting.items():
        if rank in where:
            verb = "send to" if said.verb == "send" else "receive from"
            lines.append(f"rank {rank} waits to {verb} rank {said.peer}, {at(where[rank])}")
    head = (
        "deadlock: no rank can go on"
        if len(error.ranks) == watch.size
        else f"deadlock: {ranks_in_words(error.ranks)} can never go on"
    )
    if waits:
        head += ", if a send waits until its message is received"
    if not waiting or not ("in recv(" in str(error) or "in send(" in str(error)):
        first, *others = str(error).split("\n")
        return Finding(
            first,
            tuple(line.strip() for line in others),
            "all ranks of a group must make the same calls of collectives",
        )
    return Finding(head, tuple(lines), _why_blocked(waiting, watch, waits))


def _why_blocked(waiting: dict[int, Said], watch: Watch, waits: bool) -> str:
    if selves := [rank for rank, said in waiting.items() if said.peer == rank]:
        return f"{each_of(selves)} waits for a message of its own"
    if all(said.verb == "send" for said in waiting.values()):
        if waits:
            return (
                "every rank sends before it receives. This works only while channels hold messages: here each send "
                "waits, so no rank comes to its receive"
            )
        return "messages are sent that no rank receives, until the channel is full: a send too many"
    before = {rank: watch.said[rank][:-1] for rank in waiting}
    if len(waiting) == watch.size and not any(
        said.verb == "send" for each in before.values() for said in each
    ):
        return "every rank receives before it sends, so nobody ever sends"
    if told := _unserved(waiting, watch):
        return told
    if any(
        verb == "recv" and before[rank] and before[rank][-1].verb == "recv"
        for rank, (verb, _) in waiting.items()
    ):
        return "one receive too many, or one send too few: a second receive follows, and no rank has sent a second time"
    if waits:
        return (
            "the order of sends and receives works only while channels hold messages: here each send waits until "
            "its message is received"
        )
    return "each rank waits for a message that its peer sends only later"


def _unserved(waiting: dict[int, Said], watch: Watch) -> str:
    """Of a rank that receives from another one, which sends to others, or has sent all that it sends."""
    for rank, (verb, peer) in waiting.items():
        if verb != "recv":
            continue
        sent = Counter(said.peer for said in watch.said[peer] if said.verb == "send")
        if not sent[rank] and sent:
            return (
                f"the directions of send and receive do not agree: rank {rank} receives from rank {peer}, "
                f"which sends to {ranks_in_words(sorted(sent))}"
            )
        if peer not in waiting:
            wanted = sum(said == ("recv", peer) for said in watch.said[rank])
            return (
                f"one receive too many, or one send too few: rank {rank} waits for message {wanted} from rank "
                f"{peer}, which sent {sent[rank]} to it and has returned"
            )
    return ""


def _undelivered(error: UndeliveredMessageError, watch: Watch) -> Finding:
    sent = Counter(
        (rank, said.peer) for rank, each in enumerate(watch.said) for said in each if said.verb == "send"
    )
    got = Counter(
        (said.peer, rank) for rank, each in enumerate(watch.said) for said in each if said.verb == "recv"
    )
    left = [(pair, count, got[pair]) for pair, count in sorted(sent.items()) if count > got[pair]]
    lines = tuple(
        f"rank {source} sends {count} to rank {target}, which receives {taken}"
        for (source, target), count, taken in left[:6]
    )
    sentence = "messages are left over that no rank receives"
    if any(got[pair] > sent[pair] for pair in got):
        return Finding(sentence, lines, "the directions of send and receive do not agree")
    if left and not sum(got.values()):
        return Finding(sentence, lines, "ranks send, and no rank receives")
    where = f", {at(error.locations[0])}" if error.locations else ""
    return Finding(sentence, lines, f"one send too many, or one receive too few{where}")


def _raised(error: DeviceFailedError, watch: Watch, called: str) -> Finding:
    if not error.exceptions:
        return Finding(str(error).split("\n")[0])
    rank, cause = sorted(error.exceptions.items())[0]
    failure = error.failures.get(rank)
    place = failure.location if failure is not None else None
    where = (
        at(place) if place and not is_ours(place.rpartition(":")[0]) else ""
    )  # none: the call itself failed
    values = failure.values if failure is not None else ""
    lines = tuple(line for line in (where, values) if line)
    name, text = type(cause).__name__, str(cause).split("\n")[0]
    if isinstance(cause, WrongPeer):
        verb, peer = text.split()
        word = "sends to" if verb == "send" else "receives from"
        return Finding(
            f"rank {rank} {word} rank {peer}, and there are ranks 0 to {watch.size - 1}",
            lines,
            "the ring is not closed: the neighbour of the last rank, or of rank 0, is computed without a "
            "modulo, or the group has another size than expected",
        )
    sentence = f"{ranks_in_words(sorted(error.exceptions))} raised {name}{text and f': {text}'}"
    likely = ""
    if isinstance(cause, IndexError):
        likely = "a number of a piece or of a rank runs past the last one: it is not taken modulo the number of ranks"
    elif isinstance(cause, ValueError) and (
        "broadcast" in text or "same shape" in text or "shape mismatch" in text
    ):
        likely = (
            "pieces of different sizes meet: sender and receiver mean different pieces, or all pieces are taken "
            "to be equally long"
            if watch.size > 1
            else "two arrays of these shapes do not go together element by element; the product of matrices is a @ b"
        )
    elif isinstance(cause, TypeError) and "NoneType" in text:
        likely = "None is used as an array: it is what a function without return gives, and x of ranks without data"
    elif isinstance(cause, ZeroDivisionError):
        likely = "a size is 0 with so few elements or so few ranks"
    elif isinstance(cause, TypeError) and "argument" in text and not where:
        likely = f"the function is called as {called}"
    elif isinstance(cause, AttributeError):
        likely = "the device, or an array, has no such name"
    elif isinstance(cause, UnboundLocalError | NameError):
        likely = "a name is used that has no value on this rank, or not in this branch"
    return Finding(sentence, lines, likely)
