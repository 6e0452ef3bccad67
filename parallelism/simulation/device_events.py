"""`DeviceEvents`: the events of one device, or of a class of equal devices, as rows of values.

Collectives and messages are numbered as in a run: the k-th collective of a group, the k-th message of a peer and tag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.collectives import MemberCall
from parallelism.events import Columns
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep
from parallelism.resharding.execute import calls_of_groups

MeshAxes = tuple[str, ...]
GroupKey = MeshAxes | tuple[int, ...]
"""What groups are known by: the mesh axes along which they lie; or the ranks of one group that lies along none."""


class EventRow(NamedTuple):
    """The values of the fields of one event (`parallelism.events`), which are equal for all ranks of a class."""

    kind: str
    name: str
    nbytes: float = 0.0
    flops: float = 0.0
    dtype: str | None = None
    seconds: float | None = None
    axes: MeshAxes | None = None
    algorithm: str | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    peer: int | None = None
    tag: int | None = None
    sequence: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    phase: str | None = None
    work: int | None = None
    other_bytes: tuple[tuple[str, int], ...] = ()
    shape: tuple[int, ...] | None = None


FIELDS = EventRow._fields


class StepCall(NamedTuple):
    """A step of a resharding plan, in which the number of elements may differ between ranks."""

    step: ReshardingStep
    dtype: np.dtype[Any]

    @property
    def kind(self) -> str:
        """The kind of the step."""
        return self.step.kind

    def of_groups(self, groups: Ints) -> list[tuple[MemberCall, ...]]:
        """The call of each rank of several groups; groups that call the same share a tuple."""
        return calls_of_groups(self.step, groups, self.dtype)

    def name_of(self, rank: int) -> str:
        """The kind of the call of one rank."""
        if self.step.kind == "reduce_scatter":
            return self.of_rank(rank).kind
        return "all_to_all" if self.step.kind == "exchange" else self.step.kind

    def of_rank(self, rank: int) -> MemberCall:
        """The call of one rank."""
        group = self.step.mesh.group(rank, self.step.axes)
        return self.of_groups(np.array([group]))[0][group.index(rank)]


Call = MemberCall | StepCall


class CollectiveRow(NamedTuple):
    """The description of a collective event."""

    event: int
    """Its place among the events."""
    axes: GroupKey
    """The mesh axes of the group that have more than one device; or its ranks."""
    number: int
    """Its number among the collectives of the group."""
    call: Call
    """The call, which is the same for every rank; or a step of a resharding plan."""


class PeerRow(NamedTuple):
    """A message whose peer is given by its position along a mesh axis."""

    event: int
    """Its place among the events."""
    axis: str
    position: int


class PieceRow(NamedTuple):
    """Compute events, each of which stands for the same several events."""

    places: Sequence[int] | Ints
    """Their places among the events."""
    events: DeviceEvents
    """The events that each of them stands for.  Equal pieces have the same object."""
    stage: int


class Bulk(NamedTuple):
    """Many events as columns."""

    columns: Columns
    peer_axis: Ints
    """The number of the mesh axis of each message whose peer is a position along it; -1 for other events."""
    actions: Ints
    """The place of the first event of each action among them, and the one behind the last action."""


@dataclass
class DeviceEvents:
    """The events of one class of devices in their order: rows, and maybe a bulk of others among them."""

    rows: list[EventRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    along: list[PeerRow] = field(default_factory=list)
    pieces: list[PieceRow] = field(default_factory=list)
    counts: Counter[Any] = field(default_factory=Counter)
    """The number of collectives so far of each group, and of messages for each peer and tag."""
    piece_end: int = -1
    """The place after the last event of the last piece (`parallelism.simulation.repeated_stages`).  The events of a
    piece contain all changes of memory by it."""
    works: int = 0
    """The largest number of an asynchronous operation so far."""
    bulk: Bulk | None = None
    bulk_start: int = 0
    """The number of rows before the bulk."""
    part_of: tuple[DeviceEvents, int] | None = field(default=None, compare=False, repr=False)
    """The events that these were cut out of, and the place of the first among them."""

    def __len__(self) -> int:
        return len(self.rows) + (0 if self.bulk is None else len(self.bulk.columns))

    @property
    def columns(self) -> Columns:
        """All events as columns."""
        if self.bulk is None:
            return Columns.of_rows(self.rows, FIELDS)
        before, after = self.rows[: self.bulk_start], self.rows[self.bulk_start :]
        return Columns.joined(
            [Columns.of_rows(before, FIELDS), self.bulk.columns, Columns.of_rows(after, FIELDS)]
        )

    def peer_axis(self, mesh: Mesh) -> Ints:
        """The number of the mesh axis of each message whose peer is a position along it; -1 for other events."""
        peer_axis = np.full(len(self), -1)
        if self.bulk is not None:
            peer_axis[self.bulk_start : self.bulk_start + len(self.bulk.columns)] = self.bulk.peer_axis
        for event, axis, _ in self.along:
            peer_axis[event] = mesh.axes.index(axis)
        return peer_axis

    def add_bulk(self, bulk: Bulk) -> None:
        """Adds many events.  Their collectives are added to `collectives` by the caller.  It can be done once."""
        assert self.bulk is None
        self.bulk, self.bulk_start = bulk, len(self.rows)

    def add_memory(self, category: str, nbytes: int, stage: int | None, microbatch: int | None) -> None:
        """Adds a memory event: ``nbytes`` more, or fewer if negative.  Directly after a piece, 0 bytes add no event."""
        if not nbytes and self.piece_end == len(self.rows):
            return
        self.rows.append(EventRow("memory", category, float(nbytes), stage=stage, microbatch=microbatch))

    def add_collective(
        self,
        axes: MeshAxes | None,
        group_axes: GroupKey,
        call: Call,
        kind: str,
        dtype: str | None,
        work: int | None = None,
    ) -> None:
        """Adds a collective over ``axes``; ``group_axes`` are those of them that have more than one device.

        Without axes, ``group_axes`` are the ranks of the group.
        """
        number = self.counts[group_axes]
        self.counts[group_axes] = number + 1
        self.collectives.append(CollectiveRow(len(self), group_axes, number, call))
        algorithm = (isinstance(call, MemberCall) and call.algorithm) or "direct"
        self.rows.append(
            EventRow(
                "collective", kind, dtype=dtype, axes=axes, algorithm=algorithm, sequence=number, work=work
            )
        )

    def add_message(
        self,
        kind: str,
        peer: int,
        tag: int,
        nbytes: int,
        dtype: str | None,
        axis: str | None,
        work: int | None,
    ) -> None:
        """Adds a send or a recv; ``peer`` is a rank, or with an ``axis`` a position along it."""
        key = kind, axis, peer, tag
        number = self.counts[key]
        self.counts[key] = number + 1
        if axis is not None:
            self.along.append(PeerRow(len(self), axis, peer))
        sent, received, messages = (nbytes, 0, 1) if kind == "send" else (0, nbytes, 0)
        self.rows.append(
            EventRow(
                kind,
                kind,
                dtype=dtype,
                bytes_sent=sent,
                bytes_received=received,
                messages=messages,
                peer=peer,
                tag=tag,
                sequence=number,
                work=work,
            )
        )

    def add_wait(self, name: str, work: int) -> None:
        """Adds the wait for an asynchronous operation."""
        self.rows.append(EventRow("wait", name, work=work))

    def since(self, start: int) -> DeviceEvents:
        """A copy of the events from the place ``start`` on."""
        return DeviceEvents(
            self.rows[start:],
            [each._replace(event=each.event - start) for each in self.collectives if each.event >= start],
            pieces=[
                each._replace(places=(each.places[0] - start,))
                for each in self.pieces
                if each.places[0] >= start
            ],
        )

    def repeat(self, events: DeviceEvents, stage: int | None = None, microbatch: int | None = None) -> None:
        """Adds the same events, without messages, maybe for another microbatch and another stage."""
        start, first = len(self.rows), len(self)
        self.rows += [
            row if row.microbatch is None else row._replace(stage=stage, microbatch=microbatch)
            for row in events.rows
        ]
        for piece in events.pieces:
            of_stage = piece.stage if stage is None else stage
            self.pieces.append(piece._replace(places=(first + piece.places[0],), stage=of_stage))
        works: dict[int, int] = {}
        for place in events.asynchronous:
            row = self.rows[start + place]
            assert row.work is not None
            if row.work not in works:
                self.works += 1
                works[row.work] = self.works
            self.rows[start + place] = row._replace(work=works[row.work])
        for event, axes, _, call in events.collectives:
            number, row = self.counts[axes], self.rows[start + event]
            self.counts[axes] = number + 1
            self.collectives.append(CollectiveRow(first + event, axes, number, call))
            self.rows[start + event] = row._replace(sequence=number)

    @cached_property
    def asynchronous(self) -> tuple[int, ...]:
        """The places of asynchronous operations and of the waits for them.  Kept: asked for when no event will change."""
        return tuple(place for place, row in enumerate(self.rows) if row.work is not None)

    def cut(self, start: int) -> None:
        """Removes the events from the place ``start`` on.  There must be no messages among them."""
        del self.rows[start:]
        while self.pieces and self.pieces[-1].places[0] >= start:
            self.pieces.pop()
        if self.piece_end > start:
            self.piece_end = -1
        while self.collectives and self.collectives[-1].event >= start:
            self.counts[self.collectives.pop().axes] -= 1
