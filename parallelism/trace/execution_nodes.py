"""The nodes of a Chakra execution trace: what each rank does, and after which of its other nodes.

    compute                 COMP_NODE
    collective              COMM_COLL_NODE; one that Chakra has no type for, as a permute, is its sends and recvs
    send, recv              COMM_SEND_NODE, COMM_RECV_NODE; the two ends of a message have one tag, and no other has it
    h2d, d2h                MEM_LOAD_NODE, MEM_STORE_NODE; messages from and to the host are, too
    wait                    no node: what comes after it depends on the operation that is waited for

A node depends on the node before it, by ``data``, and on what was waited for since.  An asynchronous operation and a
send, which is buffered, hold nothing up: what comes after them depends on what was before.  A collective depends on
the collective of its group before it, too, by ``control``: a rank has one stream for each of its groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms.kinds import kind_of_event
from parallelism.events import HOST, Event
from parallelism.timeline import sends_of_recvs
from parallelism.trace.trace import Trace

TYPES = {
    "all_reduce": "ALL_REDUCE",
    "reduce": "REDUCE",
    "all_gather": "ALL_GATHER",
    "all_scatter": "ALL_GATHER",
    "gather": "GATHER",
    "scatter": "SCATTER",
    "broadcast": "BROADCAST",
    "all_to_all": "ALL_TO_ALL",
    "reduce_scatter": "REDUCE_SCATTER",
    "barrier": "BARRIER",
}
"""The collectives of Chakra, by our kinds."""
_GIVES_A_PART = ("all_gather", "all_scatter", "gather")
_MEMORY = {"h2d": "MEM_LOAD_NODE", "d2h": "MEM_STORE_NODE", "recv": "MEM_LOAD_NODE", "send": "MEM_STORE_NODE"}

Ranks = tuple[int, ...]


class Node(NamedTuple):
    """One node of a rank."""

    id: int
    """From 1, in the order of record."""
    name: str
    type: str
    """As Chakra's ``NodeType``."""
    data: tuple[int, ...]
    """The nodes that must be over before it starts."""
    control: tuple[int, ...]
    """The nodes that must be over before it starts because they use the same stream."""
    start_seconds: float
    duration_seconds: float
    attributes: dict[str, Any]
    """The numbers that ASTRA-sim reads, by its names."""


class ExecutionNodes:
    """The nodes of all ranks of a trace.  ``ValueError`` if the trace does not cover them all."""

    def __init__(self, trace: Trace) -> None:
        if len(trace.ranks) != trace.size:
            raise ValueError(
                f"a Chakra trace needs all {trace.size} ranks; this trace covers {len(trace.ranks)} of "
                "them: do not filter it, and simulate with fold=False"
            )
        self.trace = trace
        self.groups: dict[Ranks, int] = {}
        """The groups of the collectives, numbered from 1 in the order in which ranks reach them."""
        recvs, sends = (places.tolist() for places in sends_of_recvs(trace.columns))
        self._tags = {place: tag for places in (recvs, sends) for tag, place in enumerate(places)}
        """The tags of messages, by the places of their ends in the trace."""
        self._next_tag = len(recvs)
        self._moved: dict[tuple[Any, ...], dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
        for event in trace.filter(kind="collective"):
            if event.parent is None and _type_of(event) is None:
                moved = self._moved[event.group, event.sequence]
                for source, nbytes in event.sources:
                    moved[source, event.rank] = self._new_tag(), nbytes

    def _new_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def of_rank(self, rank: int) -> Iterator[Node]:
        """The nodes of a rank."""
        count = 0
        frontier: tuple[int, ...] = ()
        streams: dict[Ranks | None, tuple[int, ...]] = {}
        works: dict[int, tuple[int, ...]] = {}
        columns = self.trace.columns
        places = np.flatnonzero(columns.isin("rank", {rank}))
        for place, event in zip(places.tolist(), columns.take(places).events(), strict=True):
            if event.parent is not None or event.kind == "memory":
                continue
            if event.kind == "wait":
                awaited = works.get(-1 if event.work is None else event.work, ())
                frontier = tuple(sorted({*frontier, *awaited}))
                continue
            control = (
                tuple(node for node in streams.get(event.group, ()) if node not in frontier)
                if event.kind == "collective"
                else ()
            )
            made = []
            for name, type, attributes in self._parts(event, place):
                count += 1
                made.append(count)
                yield Node(
                    count,
                    name,
                    type,
                    frontier,
                    control,
                    event.start_seconds,
                    event.duration_seconds,
                    attributes,
                )
            ids = tuple(made)
            if event.kind == "collective" and ids:
                streams[event.group] = ids
            if event.work is not None:
                works[event.work] = ids
            elif ids and event.kind != "send":
                frontier = ids

    def _parts(self, event: Event, place: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Name, type and attributes of the nodes of an event."""
        if event.kind in ("h2d", "d2h") or (event.kind in ("send", "recv") and event.peer in (HOST, None)):
            yield event.name, _MEMORY[event.kind], {"tensor_size": event.bytes_sent + event.bytes_received}
        elif event.kind == "compute":
            yield event.name, "COMP_NODE", {"num_ops": round(event.flops), "tensor_size": round(event.nbytes)}
        elif event.kind in ("send", "recv"):
            assert event.peer is not None
            ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
            tag = self._tags[place] if place in self._tags else self._new_tag()
            yield _message(event.name, *ends, event.rank, tag, event.bytes_sent + event.bytes_received)
        elif event.group is not None and len(event.group) > 1:
            if (type := _type_of(event)) is not None:
                group = self.groups.setdefault(event.group, len(self.groups) + 1)
                yield (
                    event.name,
                    "COMM_COLL_NODE",
                    {
                        "comm_type": type,
                        "comm_size": _given_bytes(event),
                        "pg_name": str(group),
                        "bytes_sent": event.bytes_sent,
                        "bytes_received": event.bytes_received,
                        **({} if event.root is None else {"root": event.group[event.root]}),
                    },
                )
                return
            for (source, target), (tag, nbytes) in self._moved[event.group, event.sequence].items():
                if event.rank in (source, target):
                    yield _message(event.name, source, target, event.rank, tag, nbytes)


def _type_of(event: Event) -> str | None:
    """Chakra's type of a collective; None if it has none."""
    kind = kind_of_event(event.name)
    return None if kind is None else TYPES.get(kind.name)


def _given_bytes(event: Event) -> int:
    """The bytes that a rank gives to a collective, which is what ASTRA-sim takes for its size."""
    if event.payload_bytes is None:
        return max(event.bytes_sent, event.bytes_received)
    kind = kind_of_event(event.name)
    assert kind is not None and event.group is not None
    return round(event.payload_bytes / (len(event.group) if kind.name in _GIVES_A_PART else 1))


def _message(
    name: str, source: int, target: int, rank: int, tag: int, nbytes: int
) -> tuple[str, str, dict[str, Any]]:
    return (
        name,
        "COMM_SEND_NODE" if rank == source else "COMM_RECV_NODE",
        {"comm_size": nbytes, "comm_src": source, "comm_dst": target, "comm_tag": tag},
    )
