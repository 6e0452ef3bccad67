"""Sums over what several stages have: each stage adds up its own terms, and one all_reduce adds up the stages.

An update may need a number that depends on all parameters, as the norm of all gradients does, although no stage has
them all.  That is possible if the number is a *joint sum*: each of its terms depends on what belongs to one parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from parallelism.ir.core import Function, Op, TensorType, Value
from parallelism.ir.core.function import frozen_attributes
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.sharding import TensorSharding

Terms = tuple[tuple[Value, str], ...]
"""The terms of a sum in order, each with the owner that it belongs to."""


@dataclass(frozen=True)
class JointSums:
    """The joint sums of a function, whose inputs and outputs belong to owners."""

    function: Function
    terms: Mapping[Value, Terms]
    """The terms of each joint sum.  None if values that belong to different owners are never combined."""

    @classmethod
    def of(cls, function: Function, owners: Mapping[str, str | None]) -> JointSums:
        """The joint sums, where ``owners`` says for each input and output what it belongs to; None stands for all.

        ``ValueError`` for a value that depends on several owners in any other way.
        """
        nothing = frozenset[str]()
        behind = {value: frozenset(filter(None, [owners[value.name]])) for value in function.inputs}
        adding: dict[Value, Terms] = {}
        found: dict[Value, Terms] = {}
        for op in function.ops:
            joined = nothing.union(*(behind[value] for value in op.inputs))
            if (
                len(joined) > 1
                and _adds(op)
                and all(value in adding or len(behind[value]) == 1 for value in op.inputs)
            ):
                adding[op.outputs[0]] = tuple(
                    term
                    for value in op.inputs
                    for term in adding.get(value) or ((value, min(behind[value])),)
                )
            else:
                found |= {value: adding[value] for value in op.inputs if value in adding}
                joined = nothing.union(*(behind[value] for value in op.inputs if value not in adding))
                _check(function, op.outputs[0], joined)
            behind.update(dict.fromkeys(op.outputs, joined))
        for value in function.outputs:
            _check(function, value, behind[value] | frozenset(filter(None, [owners[value.name]])))
        return cls(function, found)

    def of_one_stage(
        self, outputs: Collection[Value], counted: Collection[str], axis: str, stages: int
    ) -> Function:
        """The part of the function that computes ``outputs``, with joint sums over so many stages on ``axis``.

        The stage adds up its own terms, whose owners are ``counted``.  Their sum is its row of a tensor that has a row
        for each stage and is split over the axis.  So the sum of this tensor is an all_reduce of one number.
        """
        sums = self.terms if stages > 1 else {}
        ops, layouts = list[Op](), dict[str, TensorSharding | None]()
        names = {*self._names} if sums else set()
        for place in self._needed(outputs, sums, counted):
            op = self.function.ops[place]
            total = op.outputs[0]
            if total in sums:
                rows = Value(free_name(f"{total.name}.rows", names), TensorType(total.type.dtype, (stages,)))
                layouts |= {rows.name: TensorSharding(axis), total.name: TensorSharding()}
                own = [term for term, owner in sums[total] if owner in counted]
                ops += [
                    *_added(own, total, op, names, rows),
                    _op("sum", (rows,), total, op, axes=(0,), keepdims=False),
                ]
            else:
                ops.append(op)
        read = {value for op in ops for value in op.inputs} | {*outputs}
        inputs = tuple(sorted(self._inputs.keys() & read, key=self._inputs.__getitem__))
        return laid_out(Function(self.function.name, inputs, tuple(ops), tuple(outputs)), layouts)

    def _needed(
        self, outputs: Collection[Value], sums: Mapping[Value, Terms], counted: Collection[str]
    ) -> list[int]:
        """The places of the ops that the outputs and all joint sums need, of these only the ``counted`` terms."""
        open_values, places = [*outputs, *sums], set[int]()
        while open_values:
            value = open_values.pop()
            place = self._makers.get(value)
            if place is not None and place not in places:
                places.add(place)
                open_values += (
                    [term for term, owner in sums[value] if owner in counted]
                    if value in sums
                    else self.function.ops[place].inputs
                )
        return sorted(places)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(value.name for value in self.function.values)

    @cached_property
    def _inputs(self) -> dict[Value, int]:
        """The place of each input; a function of many stages has many more than one of them reads."""
        return {value: place for place, value in enumerate(self.function.inputs)}

    @cached_property
    def _makers(self) -> dict[Value, int]:
        """The place of the op that makes each value."""
        return {value: place for place, op in enumerate(self.function.ops) for value in op.outputs}


def _added(terms: list[Value], total: Value, like: Op, names: set[str], rows: Value) -> list[Op]:
    """The ops that add up the terms of a stage and put the sum into its row."""
    ops: list[Op] = []
    if not terms:
        terms = [Value(free_name(f"{total.name}.none", names), total.type)]
        ops.append(_op("constant", (), terms[0], like, dtype=total.type.dtype, shape=(), value=0.0))
    sum_so_far = terms[0]
    for term in terms[1:]:
        more = Value(free_name(f"{total.name}.own", names), total.type)
        ops.append(_op("add", (sum_so_far, term), more, like))
        sum_so_far = more
    return [*ops, _op("broadcast_to", (sum_so_far,), rows, like, shape=rows.type.shape)]


def _op(kind: str, inputs: tuple[Value, ...], result: Value, like: Op, **attributes: object) -> Op:
    """An op in the region of another one."""
    return Op(kind, inputs, frozen_attributes(attributes), (result,), like.region)


def _adds(op: Op) -> bool:
    return op.kind == "add" and not op.outputs[0].type.shape


def _check(function: Function, value: Value, joined: Collection[str]) -> None:
    if len(joined) > 1:
        first, second = sorted(joined)[:2]
        raise ValueError(
            f"%{value.name} of @{function.name} depends on what belongs to %{first} and to %{second}, "
            "which different stages may have; stages can only add up numbers of one parameter each"
        )
