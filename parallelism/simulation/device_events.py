"""The events of one device, or of a class of equal ones, as they are added one by one: what the devices' records hold.

What belongs together is told as a run tells it: the k-th collective of a group, the k-th message of a channel and tag.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.execution import DeviceProgram
from parallelism.execution.device_program import communicates
from parallelism.ir import Op, TensorType, Value
from parallelism.layouts import step_of
from parallelism.mesh import Mesh
from parallelism.resharding.execute import called

Axes = tuple[str, ...]

FIELDS = (
    "kind", "name", "nbytes", "flops", "dtype", "seconds", "axes", "algorithm", "bytes_sent", "bytes_received",
    "messages", "peer", "tag", "sequence", "stage", "microbatch", "phase", "work",
)
NAME, DTYPE = FIELDS.index("name"), FIELDS.index("dtype")

Row = tuple[Any, ...]


def row(
    kind: str, name: str, nbytes: float = 0.0, flops: float = 0.0, dtype: str | None = None,
    seconds: float | None = None, axes: Axes | None = None, algorithm: str | None = None, bytes_sent: int = 0,
    bytes_received: int = 0, messages: int = 0, peer: int | None = None, tag: int | None = None,
    sequence: int | None = None, stage: int | None = None, microbatch: int | None = None, phase: str | None = None,
    work: int | None = None,
) -> Row:
    """An event as far as it is the same for all ranks of a class."""
    return (
        kind, name, nbytes, flops, dtype, seconds, axes, algorithm, bytes_sent, bytes_received, messages, peer, tag,
        sequence, stage, microbatch, phase, work)


@dataclass
class Rows:
    """The events of one class of devices, as they are added; and which are collectives."""

    rows: list[Row] = field(default_factory=list)
    collectives: list[tuple[int, Axes, int, Op]] = field(default_factory=list)
    """Event, axes of more than one device, which of its group it is, the op."""
    along: list[tuple[int, str, int]] = field(default_factory=list)
    """Messages to and from a position along an axis: event, axis, position."""
    counts: Counter[Any] = field(default_factory=Counter)

    def add_program(self, program: DeviceProgram, mesh: Mesh, rank: int = 0, **marks: Any) -> None:
        """The events of `DeviceProgram.run` on a rank."""
        places = {name: mark for name, mark in marks.items() if name != "phase"}
        rows = self.rows
        memory = dict[tuple[str, int], Row]()

        def hold(category: str, nbytes: int) -> None:
            found = memory.get((category, nbytes))
            if found is None:
                found = memory[category, nbytes] = row("memory", category, nbytes=float(nbytes), **places)
            rows.append(found)

        for op, price, made, freed, _ in program.steps:
            for category, nbytes in made:
                hold(category, nbytes)
            if price is not None:
                flops, traffic, dtype, seconds = price
                rows.append(row("compute", op.kind, traffic, flops, dtype, seconds, **marks))
            elif communicates(op):
                self.add_call(op, mesh, rank)
            for category, nbytes in freed:
                hold(category, -nbytes)

    def add_call(self, op: Op, mesh: Mesh, rank: int) -> None:
        """The event of a collective, or of a message."""
        if op.kind in ("send", "recv"):
            sends = op.kind == "send"
            peer, x = op["destination" if sends else "source"], (op.inputs if sends else op.outputs)[0].type
            self.add_message(op.kind, peer, op["tag"], int(x.nbytes), x.dtype.name)
            return
        axes = mesh.axes_of(op["axes"])
        apart = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        number = self.counts["collective", apart]
        self.counts["collective", apart] += 1
        self.collectives.append((len(self.rows), apart, number, op))
        name = op.kind
        if name == "relayout":
            name = called(step_of(op, mesh), rank, op.inputs[0].type.dtype).kind
        self.rows.append(row(
            "collective", name, axes=axes, algorithm="direct", dtype=op.inputs[0].type.dtype.name, sequence=number))

    def add_all_reduce(self, mesh: Mesh, axis: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """The event of a sum over an axis."""
        x = Value("x", TensorType(dtype, shape))
        attributes = {"axes": (axis,), "group": mesh.shape[axis], "op": "sum"}
        self.add_call(Op("all_reduce", (x,), tuple(attributes.items()), (Value("y", x.type),)), mesh, 0)

    def add_message(
        self, kind: str, peer: int, tag: int, nbytes: int, dtype: str | None, axis: str | None = None,
        work: int | None = None,
    ) -> None:
        """The event of a send or a recv; ``peer`` is a rank, or a position along an axis."""
        key = kind, axis, peer, tag
        values: dict[str, Any] = {"tag": tag, "sequence": self.counts[key], "work": work}
        if kind == "send":
            values |= {"bytes_sent": nbytes, "messages": 1, "dtype": dtype}
        else:
            values["bytes_received"] = nbytes
        if axis is not None:
            self.along.append((len(self.rows), axis, peer))
        self.rows.append(row(kind, kind, peer=peer, **values))
        self.counts[key] += 1
