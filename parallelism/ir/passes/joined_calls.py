"""The order in which an update communicates: it sums all gradients first, and gathers all parameters last.

Collectives of one kind over the same axes are one call, as in the software that people train with: Megatron-LM has one
buffer for all gradients of a dtype and another one for the parameters, which is summed, or gathered, at once.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any

from parallelism.ir.core import Function, Op
from parallelism.ir.passes.overlapping import Order

SUMS = ("all_reduce", "reduce_scatter")
GATHERS = ("all_gather",)
BETWEEN = ("convert", "widen", "all_slice")
"""The ops that may stand between a gradient and its sum, or between a gather and what is returned, besides views."""


def joined(update: Function) -> Order:
    """The order of the ops of an update, with its calls, each of which is waited for at once.

    An order for the program of one device holds for those of all devices: they differ in shapes and places only.
    """
    return _Joining(update).order()


class _Joining:
    """The sums and the gathers of an update, by the number of the op."""

    def __init__(self, update: Function) -> None:
        self.ops = update.ops
        self.returned = {value.name for value in update.outputs}
        self.given = {value.name for value in update.inputs}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(self.ops):
            for value in op.inputs:
                self.readers[value.name].append(number)

    def order(self) -> Order:
        """Sums, those of sums behind them, then all other ops, then gathers; each in the order of the program."""
        calls: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number in (*self._sums, *self._gathers):
            calls[self._call(number)].append(number)
        first = {number: members[0] for members in calls.values() for number in members}
        places = sorted(
            range(len(self.ops)),
            key=lambda number: (self._turn(number), first.get(number, number), number),
        )
        place_of = {number: place for place, number in enumerate(places)}
        found = (tuple(place_of[number] for number in members) for members in calls.values())
        return Order(tuple(places), tuple(sorted(found)), at_once=True)

    def _call(self, number: int) -> tuple[Any, ...]:
        """What collectives of one call have in common."""
        op = self.ops[number]
        return self._turn(number), op.kind, op["axes"], op.inputs[0].type.dtype, dict(op.attributes).get("op")

    def _turn(self, number: int) -> tuple[int, int]:
        """When an op runs: sums of gradients, others, gathers; and among these, how many of them come before it."""
        if number in self._sums:
            return 0, 2 * self._sums[number] + 1
        if number in self._before_sums:
            return 0, 2 * self._before_sums[number]
        if number in self._gathers:
            return 2, 2 * self._gathers[number]
        if number in self._behind_gathers:
            return 2, 2 * self._behind_gathers[number] + 1
        return 1, 0

    # -- sums ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _sums(self) -> dict[int, int]:
        """The sums over devices among these chains, by the number of the op, and how many sums come before each."""
        return {number: depth for number, depth in self._chains.items() if _is(self.ops[number], SUMS)}

    @cached_property
    def _chains(self) -> dict[int, int]:
        """The chains of ops from what is given to the update, by the number of the op, and how many sums come before each."""
        found: dict[int, int] = {}
        depth = dict.fromkeys(self.given, 0)
        for number, op in enumerate(self.ops):
            is_sum = _is(op, SUMS) and op["op"] in ("sum", "max")
            if len(op.inputs) != 1 or op.inputs[0].name not in depth or not (is_sum or _is_between(op)):
                continue
            found[number] = depth[op.inputs[0].name]
            for value in op.outputs:
                depth[value.name] = found[number] + is_sum
        return found

    @cached_property
    def _before_sums(self) -> dict[int, int]:
        """The other ops of these chains that a sum needs."""
        found: dict[int, int] = {}
        for number in reversed(self._chains):
            needed = any(
                reader in self._sums or reader in found
                for value in self.ops[number].outputs
                for reader in self.readers[value.name]
            )
            if needed and number not in self._sums:
                found[number] = self._chains[number]
        return found

    # -- gathers -------------------------------------------------------------------------------------------------------

    @cached_property
    def _gathers(self) -> dict[int, int]:
        """The gathers of what is returned, each with the number of gathers behind its input."""
        return {number: depth for number, depth in self._depths.items() if _is(self.ops[number], GATHERS)}

    @cached_property
    def _behind_gathers(self) -> dict[int, int]:
        """The ops that read what was gathered, with the number of gathers before each, less one."""
        return {
            number: depth - 1
            for number, depth in self._depths.items()
            if depth and not _is(self.ops[number], GATHERS)
        }

    @cached_property
    def _depths(self) -> dict[int, int]:
        """The ops of which the results are only returned, with the number of gathers before each."""
        made: dict[str, int] = {}
        found: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            if number in self._returning:
                found[number] = max((made.get(value.name, 0) for value in op.inputs), default=0)
                made |= dict.fromkeys((value.name for value in op.outputs), found[number] + _is(op, GATHERS))
        return found

    @cached_property
    def _returning(self) -> frozenset[int]:
        """The gathers, and the ops between, of which the results are only returned, or gathered again."""
        found = set[int]()
        for number in reversed(range(len(self.ops))):
            op = self.ops[number]
            readers = [reader for value in op.outputs for reader in self.readers[value.name]]
            is_returned = any(value.name in self.returned for value in op.outputs)
            if (
                (_is(op, GATHERS) or _is_between(op))
                and found.issuperset(readers)
                and (is_returned or readers)
            ):
                found.add(number)
        return frozenset(found)


def _is(op: Op, kinds: tuple[str, ...]) -> bool:
    """Whether an op is a collective of one of these kinds, over several devices."""
    return op.kind in kinds and bool(op["group"] != 1)


def _is_between(op: Op) -> bool:
    return op.operator.view or op.kind in BETWEEN
