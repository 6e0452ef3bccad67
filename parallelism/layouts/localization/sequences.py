"""Attention in a ring: blocks of keys and values travel over the axes that split the rows of a ``context_attention``.

Of n devices, a device receives n - 1 blocks of keys and of values in the forward, and in the backward these again and n - 1
blocks of their gradients: the gradients of a block travel with it from the first device that it visits, and come home with
the last step (Liu et al., *Ring Attention*, 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallelism.ir.core import Op, Value
from parallelism.ir.operators.context_attention import KINDS
from parallelism.layouts.localization.local_program import layout_of
from parallelism.layouts.propagation import Axes, Devices

ROWS = 1
"""The dim of the tokens in queries, keys and values."""


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
    count, rows = devices.along(axes), queries.type.shape[ROWS]
    if count == 1:
        return [Op(op.kind.removeprefix("context_"), tuple(inputs), op.attributes, tuple(outputs), op.region)]
    if not isinstance(count, int) or not isinstance(rows, int) or rows % count:
        raise ValueError(
            f"the {count} devices of a ring along {', '.join(axes)} must divide the {rows} tokens of a sequence"
        )
    ring = _Ring(op, axes, count, name)
    if forward:
        ring.attend(inputs, outputs)
    else:
        ring.attend_backward(inputs, outputs)
    return ring.ops


class _Ring:
    """The ops of attention in a ring, one after the other.

    What travels is sent before the block that is computed in the meantime.
    """

    def __init__(self, op: Op, axes: Axes, count: int, name: Callable[[Value], str]) -> None:
        self.op, self.axes, self.count, self.name = op, axes, count, name
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
        attributes = (*self.op.attributes, ("blocks", self.count), ("number", number))
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
