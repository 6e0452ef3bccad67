"""Records of messages that are under way in crowds, each of another size: what the clock has most to do with."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from parallelism.events import Event
from parallelism.trace import Trace

Lanes = list[list[Event]]

MESSAGES = 4000
"""About so many in a storm."""


def all_pairs(ranks: int, seed: int = 0) -> Trace:
    """Everybody sends to everybody, all at once, and so again when all has come."""
    random, lanes, sent = Random(seed), _lanes(ranks), 0
    while sent < MESSAGES:
        sizes = {(s, t): random.randrange(1, 1 << 24) for s in range(ranks) for t in range(ranks) if s != t}
        for (source, target), size in sizes.items():
            _send(lanes, source, target, size, sent // (ranks * ranks - ranks))
        for (source, target), size in sizes.items():
            _receive(lanes, source, target, size, sent // (ranks * ranks - ranks))
        sent += len(sizes)
    return _trace(lanes)


def random_pairs(ranks: int, seed: int = 0) -> Trace:
    """Everybody computes a little and sends to anybody, eight times, and then receives what was sent to it."""
    random, lanes, numbers = Random(seed), _lanes(ranks), dict[tuple[int, int], int]()
    for _ in range(max(1, MESSAGES // (8 * ranks))):
        came = []
        for rank in range(ranks):
            for _ in range(8):
                target = (rank + random.randrange(1, ranks)) % ranks
                number = numbers[rank, target] = numbers.get((rank, target), -1) + 1
                size = random.randrange(1, 1 << 24)
                lanes[rank].append(Event(rank, "compute", "work", seconds=random.random() * 1e-4))
                _send(lanes, rank, target, size, number)
                came.append((rank, target, size, number))
        for sent in came:
            _receive(lanes, *sent)
    return _trace(lanes)


def ring(ranks: int, seed: int = 0) -> Trace:
    """Everybody sends to both neighbours, three messages each, computes and receives."""
    random, lanes = Random(seed), _lanes(ranks)
    for step in range(max(1, MESSAGES // (6 * ranks))):
        sent = [(rank, (rank + way) % ranks, random.randrange(1, 1 << 24), 3 * step + i)
                for rank in range(ranks) for way in ((1, -1) if ranks > 2 else (1,)) for i in range(3)]
        for message in sent:
            _send(lanes, *message)
        for rank in range(ranks):
            lanes[rank].append(Event(rank, "compute", "work", seconds=random.random() * 1e-4))
        for message in sent:
            _receive(lanes, *message)
    return _trace(lanes)


STORMS: dict[str, Callable[[int], Trace]] = {"all pairs": all_pairs, "random pairs": random_pairs, "ring": ring}


def _lanes(ranks: int) -> Lanes:
    return [[] for _ in range(ranks)]


def _send(lanes: Lanes, source: int, target: int, nbytes: int, number: int) -> None:
    lanes[source].append(Event(
        source, "send", "send", peer=target, tag=0, sequence=number, bytes_sent=nbytes, messages=1))


def _receive(lanes: Lanes, source: int, target: int, nbytes: int, number: int) -> None:
    lanes[target].append(Event(target, "recv", "recv", peer=source, tag=0, sequence=number, bytes_received=nbytes))


def _trace(lanes: Lanes) -> Trace:
    return Trace([event for lane in lanes for event in lane], len(lanes))
