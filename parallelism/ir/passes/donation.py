"""Donation: the memory of an input that is not read any more becomes that of an output of the same type.

So a step that returns new weights, gradients or moments never holds a new tensor beside the old one.  A donated input
and its output are matched here; `parallelism.ir.passes.memory` counts what a program then holds.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from parallelism.ir.core import Function, Op, TensorType, Value
from parallelism.sharding import TensorSharding

Donated = Mapping[Value, Value]
"""For each value that is computed into the memory of a donated input, that input."""


Kind = tuple[TensorType, TensorSharding | None]
"""A type and a layout."""


class Kinds(NamedTuple):
    """What must be equal for an input to donate its memory to an output."""

    inputs: Sequence[Kind]
    outputs: Sequence[Kind]

    @classmethod
    def of(cls, function: Function) -> "Kinds":
        """The types and layouts of the inputs and outputs of a function."""
        return cls(list(map(_kind, function.inputs)), list(map(_kind, function.outputs)))


def _kind(value: Value) -> Kind:
    return value.type, value.layout


def owns_nothing(op: Op, output: Value) -> bool:
    """Whether an output of an op lies in the memory of its first input."""
    return op.operator.view or (op.operator.reuses and output is op.outputs[0])


def owners(function: Function, donated: Donated | None = None) -> dict[Value, Value]:
    """For each value, the value in whose memory it lies: itself, or an earlier one."""
    owner = {value: value for value in function.inputs}
    for op in function.ops:
        for value in op.outputs:
            owner[value] = (
                owner[op.inputs[0]] if owns_nothing(op, value) else (donated or {}).get(value, value)
            )
    return owner


def kept(function: Function, owner: Mapping[Value, Value], given_up: Collection[str] = ()) -> set[Value]:
    """The values whose memory is in use after the last op: that of outputs, and of inputs that are not ``given_up``."""
    stay = [value for value in function.inputs if value.name not in given_up]
    return {owner[value] for value in (*stay, *function.outputs)}


def inputs_named(function: Function, name: str) -> list[Value]:
    """The inputs of this name, or whose names begin with it and a dot."""
    return [value for value in function.inputs if value.name == name or value.name.startswith(f"{name}.")]


def donations(function: Function, names: str | Iterable[str], kinds: Kinds | None = None) -> Donated:
    """Each donated input with the value that takes its memory: the one that an output of the same kind lies in.

    ``names`` are those of inputs, or the beginnings of names before a dot.  The value must be made after the last read
    of the input; an op that reads the input may make it if it works on each element alone.  As many inputs as possible
    are matched: those that are read last choose first.

    ``ValueError`` for a name that fits no input, if no output of the kind is left for an input, and if it is read too
    late for all that are left.
    """
    inputs = _donated(function, names)
    if not inputs:
        return {}
    kinds = kinds or Kinds.of(function)
    kind_of = dict(zip(function.inputs, kinds.inputs, strict=True))
    owner = owners(function)
    made: dict[Value, int] = {}
    last: dict[Value, float] = dict.fromkeys(function.inputs, -1)
    for number, op in enumerate(function.ops):
        made.update((value, number) for value in op.outputs if owner[value] is value)
        last.update((owner[value], number) for value in (*op.inputs, *op.outputs))
    last.update((owner[value], inf) for value in function.outputs)
    returned = {owner[value]: kind for value, kind in zip(function.outputs, kinds.outputs, strict=True)}
    free: dict[Kind, list[Value]] = {}
    for value in sorted((value for value in returned if value in made), key=made.__getitem__):
        free.setdefault(returned[value], []).append(value)
    donated: dict[Value, Value] = {}
    for value in sorted(inputs, key=last.__getitem__, reverse=True):
        kind, read = kind_of[value], last[value]
        if returned.get(value) == kind:
            continue  # it lies in its own memory: it is returned as it is, or as a sum in place
        candidates = free.get(kind, [])
        place = bisect_right(candidates, read, key=made.__getitem__)
        if (
            place
            and made[candidates[place - 1]] == read
            and _in_place(function.ops[made[candidates[place - 1]]], value, candidates[place - 1], owner)
        ):
            place -= 1
        if place == len(candidates):
            what = f"@{function.name} cannot take the memory of the donated %{value.name}: "
            if kind not in kinds.outputs:
                where = f" in layout {kind[1].short()}" if kind[1] else ""
                raise ValueError(f"{what}it has no output of type {kind[0]}{where}")
            if not candidates:
                raise ValueError(f"{what}its outputs of this type take the memory of other inputs")
            reader = "it is returned" if read == inf else f"it is read by {function.ops[int(read)]}"
            raise ValueError(f"{what}{reader}, and no output of this type that is left is made later")
        donated[candidates.pop(place)] = value
    return donated


def _donated(function: Function, names: str | Iterable[str]) -> list[Value]:
    """The inputs that the names fit, in the order of the function."""
    begun: dict[str, list[Value]] = {}
    for value in function.inputs:
        for beginning in accumulate(value.name.split("."), "{}.{}".format):
            begun.setdefault(beginning, []).append(value)
    found: set[Value] = set()
    for name in [names] if isinstance(names, str) else names:
        fitting = begun.get(name, [])
        if not fitting:
            raise ValueError(
                f"donate names {name!r}, which no input of @{function.name} is called, or begins with: "
                f"{', '.join(value.name for value in function.inputs) or 'it has none'}"
            )
        found.update(fitting)
    return [value for value in function.inputs if value in found]


def _in_place(op: Op, donated: Value, output: Value, owner: Mapping[Value, Value]) -> bool:
    """Whether an op may write the output over the input: it reads no element of it after writing to its place."""
    rule, letters = op.rule, op.rule.outputs[op.outputs.index(output)]
    return (
        not rule.reduced
        and rule.whole.isdisjoint(letter for dim in letters for letter in dim)
        and all(
            value.type.shape == output.type.shape and dims == letters
            for value, dims in zip(op.inputs, rule.inputs, strict=True)
            if owner[value] == donated
        )
    )
