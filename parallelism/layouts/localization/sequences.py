"""Context parallelism laid out: attention of rows that are split becomes attention of whole rows, or of blocks in a ring.

Of the axes that split the rows of a ``context_attention``, those of ``heads_over`` are dealt to its heads instead: the op
then needs its inputs in other layouts, which all_to_alls bring about.  Over the others blocks of keys and values travel
round a ring.  Of n devices, a device receives n - 1 blocks of keys and of values in the forward, and in the backward these
again and n - 1 blocks of their gradients: the gradients of a block travel with it from the first device that it visits, and
come home with the last step (Liu et al., *Ring Attention*, 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallelism.ir.core import Op, Value
from parallelism.ir.operators.context_attention import KINDS
from parallelism.layouts.localization.local_program import layout_of
from parallelism.layouts.propagation import Axes, Devices
from parallelism.layouts.propagation.placement import Placement
from parallelism.sharding import TensorSharding

ROWS, HEADS = 1, 2
"""The dims of queries, keys and values, of results and of their gradients."""


def dealt_to_heads(op: Op, place: Placement, devices: Devices) -> Placement:
    """The placement of a `KINDS` op with the axes of ``heads_over`` at its heads in place of its rows.

    ``ValueError`` where the devices do not divide the heads of keys and values.
    """
    moved = tuple(op["heads_over"].split())
    if not moved:
        return place
    groups = op.inputs[-1 - _more(op)].type.shape[HEADS]
    over = (*layout_of_dims(place, op)[HEADS], *moved)
    count = devices.along(over)
    if not isinstance(groups, int) or not isinstance(count, int) or groups % count:
        raise ValueError(
            f"attention deals its heads to the {count} devices along {', '.join(over)}, which must divide the {groups} heads "
            "of keys and values"
        )
    inputs = [_moved(layout, value, moved) for layout, value in zip(place.inputs, op.inputs, strict=True)]
    outputs = [_moved(layout, value, moved) for layout, value in zip(place.outputs, op.outputs, strict=True)]
    return Placement(tuple(inputs), tuple(outputs))


def _more(op: Op) -> int:
    """How many inputs of the op stand behind the values."""
    return len(op.inputs) - (3 if op.kind == KINDS[0] else 6)


def layout_of_dims(place: Placement, op: Op) -> tuple[Axes, ...]:
    """The axes of the dims of the queries."""
    queries = place.inputs[0 if op.kind == KINDS[0] else 3]
    return tuple(dim.axes for dim in queries.dims)


def _moved(layout: TensorSharding, value: Value, axes: Axes) -> TensorSharding:
    """The layout with these axes at the heads: all is (batch, rows, heads, width), but the log-sum-exp has no width and
    its heads before its rows."""
    rows, heads = {4: (ROWS, HEADS), 3: (2, 1)}.get(value.type.ndim, (None, None))
    if rows is None or heads is None:
        return layout
    dims = [dim.axes for dim in layout.dims]
    dims[heads] += tuple(axis for axis in axes if axis in dims[rows])
    dims[rows] = tuple(axis for axis in dims[rows] if axis not in axes)
    return TensorSharding(*dims, partial=layout.partial, op=layout.op)


def steps_of(
    op: Op, inputs: Sequence[Value], outputs: Sequence[Value], devices: Devices, name: Callable[[Value], str]
) -> list[Op]:
    """The ops that compute the ``outputs`` of a `KINDS` op from its ``inputs``, all in the layouts of its placement.

    ``name`` gives a free name for a value that is made from another.  ``ValueError`` for rows that the devices of a ring
    do not divide, and for a number of these that is a symbol.
    """
    forward = op.kind == KINDS[0]
    queries = inputs[0 if forward else 3]
    axes = layout_of(queries).dims[ROWS].axes
    plain = tuple((each, value) for each, value in op.attributes if each != "heads_over")
    count, rows = devices.along(axes), queries.type.shape[ROWS]
    if count == 1:
        return [Op(op.kind.removeprefix("context_"), tuple(inputs), plain, tuple(outputs), op.region)]
    if not isinstance(count, int) or not isinstance(rows, int) or rows % count:
        raise ValueError(
            f"the {count} devices of a ring along {', '.join(axes)} must divide the {rows} tokens of a sequence"
        )
    ring = _Ring(op, axes, count, plain, name)
    if forward:
        ring.attend(inputs, outputs)
    else:
        ring.attend_backward(inputs, outputs)
    return ring.ops


class _Ring:
    """The ops of attention in a ring, one after the other.

    What travels is sent before the block that is computed in the meantime.
    """

    def __init__(
        self,
        op: Op,
        axes: Axes,
        count: int,
        attributes: tuple[tuple[str, Any], ...],
        name: Callable[[Value], str],
    ) -> None:
        self.op, self.axes, self.count, self.attributes, self.name = op, axes, count, attributes, name
        self.ops: list[Op] = []

    def attend(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """The forward: each block joins its result to that of the blocks before."""
        q, k, v, *step = inputs
        result: list[Value] = []
        for number in range(self.count):
            last = number == self.count - 1
            following = () if last else (self._shifted(k), self._shifted(v))
            made = [*outputs] if last else [self._like(value) for value in outputs]
            self._block("attention_block", number, (*result, q, k, v, *step), made)
            result = made
            k, v = following or (k, v)

    def attend_backward(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """The backward: the gradients of queries stay, those of a block of keys and values travel with it."""
        given, (k, v), more = inputs[:4], inputs[4:6], inputs[6:]
        of_queries, *own = [self._like(value) for value in outputs]
        moving: list[Value] = []
        for number in range(self.count):
            last = number == self.count - 1
            following = () if last else (self._shifted(k), self._shifted(v))
            made = [self._like(value) for value in outputs] if number else [of_queries, *own]
            self._block("attention_block_gradient", number, (*given, k, v, *more), made)
            k, v = following or (k, v)
            if number:
                of_queries = self._sum(of_queries, made[0], outputs[0] if last else None)
                arrived = zip(moving, made[1:], strict=True) if moving else ()
                travelling = [self._sum(old, new) for old, new in arrived] or made[1:]
                moving = [self._shifted(value) for value in travelling]
        for kept, value, output in zip(own, moving, outputs[1:], strict=True):
            self._sum(kept, value, output)

    def _block(self, kind: str, number: int, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        attributes = (*self.attributes, ("blocks", self.count), ("number", number))
        self._emit(kind, inputs, tuple(sorted(attributes)), outputs)

    def _shifted(self, x: Value) -> Value:
        """The block that the device before has."""
        made = self._like(x)
        self._emit("ring_shift", (x,), (("axes", self.axes), ("dim", ROWS), ("group", self.count)), [made])
        return made

    def _sum(self, a: Value, b: Value, into: Value | None = None) -> Value:
        made = self._like(a) if into is None else into
        self._emit("add", (a, b), (), [made])
        return made

    def _like(self, value: Value) -> Value:
        return Value(self.name(value), value.type, value.layout)

    def _emit(self, kind: str, inputs: Sequence[Value], attributes: Any, outputs: Sequence[Value]) -> None:
        self.ops.append(Op(kind, tuple(inputs), attributes, tuple(outputs), self.op.region))
