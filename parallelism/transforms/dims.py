"""Dims that belong together: a dim of one value is a dim of another one, through the rules of the operators.

The rows of a batch are such a class: a dim of the inputs, of the activations and of the logits.  Strategies look for
classes, and for the ops at which a parameter meets them, never for names of values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from parallelism.dtypes import is_integer
from parallelism.ir.core import Function, Op, Value
from parallelism.layouts.propagation.relations import Letters, Relation, relation
from parallelism.sharding import TensorSharding

Place = tuple[str, int]
"""A dim of a value: the name of the value, and the number of the dim."""
Dims = list[tuple[str, ...]]
"""The axes of each dim."""


def relation_of(op: Op) -> Relation:
    """The letters by which the dims of an op may be split."""
    return relation(op.kind, op.types, op.attributes)


def lettered(op: Op) -> Iterator[tuple[Value, Letters]]:
    """The values of an op, inputs first, each with the letters of its dims."""
    rule = relation_of(op)
    yield from zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)


class DimClasses:
    """The classes of the dims of a program's values: dims of one letter of an op are of one class."""

    def __init__(self, function: Function) -> None:
        self._above: dict[Place, Place] = {}
        for op in function.ops:
            first: dict[str, Place] = {}
            for value, letters in lettered(op):
                for dim, letter in enumerate(letters):
                    if letter is None:
                        continue
                    place = value.name, dim
                    before = first.setdefault(letter, place)
                    if before is not place:
                        self._join(before, place)

    def of(self, value: Value, dim: int) -> Place:
        """A place that stands for the class of a dim."""
        return self._top((value.name, dim))

    def all_of(self, values: Iterable[Value]) -> set[Place]:
        """The classes of all dims of these values."""
        return {self.of(value, dim) for value in values for dim in range(value.type.ndim)}

    def axes(self, values: Iterable[Value]) -> dict[Place, tuple[str, ...]]:
        """The axes that the layouts of these values give to classes."""
        return {
            self.of(value, dim): split.axes
            for value in values
            if value.layout
            for dim, split in enumerate(value.layout.dims)
            if split.axes
        }

    def _top(self, place: Place) -> Place:
        path = []
        while (above := self._above.get(place, place)) != place:
            path.append(place)
            place = above
        for below in path[:-1]:  # the last one is below it already
            self._above[below] = place
        return place

    def _join(self, one: Place, other: Place) -> None:
        self._above[self._top(other)] = self._top(one)


def batch_class(function: Function, parameters: Iterable[Value], classes: DimClasses) -> Place | None:
    """The class of the rows of the batch; None if there is none.

    It is that of a dim of the inputs other than parameters, if no parameter has a dim of the class.  Of several classes
    it is the one that most inputs have; then that of the outermost dim.
    """
    parameters = set(parameters)
    data = [value for value in function.inputs if value not in parameters and value.type.ndim]
    taken = classes.all_of(parameters)
    found: dict[Place, list[int]] = {}
    for value in data:
        for dim in range(value.type.ndim):
            if (place := classes.of(value, dim)) not in taken:
                found.setdefault(place, []).append(dim)
    return max(found, key=lambda place: (len(found[place]), -min(found[place])), default=None)


def sequence_class(
    function: Function, parameters: Iterable[Value], views: Collection[Value], classes: DimClasses
) -> Place | None:
    """The class of the sequences of the batch; None if there is none.

    ``views`` are the values that hold elements of parameters, moved.

    It is that of a dim of the inputs other than parameters and other than the rows, or of the order in which their tokens
    are picked.  It is no dim of a parameter that
    an op contracts or looks up, and values that ops compute have it, too.  Of several classes the one is chosen that
    integers have, as tokens and targets; then that most inputs have; then that of the outermost dim.
    """
    parameters = set(parameters)
    taken = {batch_class(function, parameters, classes)}
    made: set[Place] = set()
    for op in function.ops:
        rule = relation_of(op)
        made |= classes.all_of(op.outputs)
        contracted = {rule.indexed}.union(*rule.reduced) - {None}
        for value, letters in zip(op.inputs, rule.inputs, strict=True):
            cut = value in parameters and None in letters
            if cut or (value in views and not contracted.isdisjoint(letters)):
                taken |= classes.all_of([value])  # a weight or a table, not what is added to a sequence
    data = [value for value in function.inputs if value not in parameters]
    found: dict[Place, list[int]] = {}
    counted: set[Place] = set()
    for value in (*data, *orders_of(function)):
        for dim in range(value.type.ndim):
            if (place := classes.of(value, dim)) in made - taken:
                found.setdefault(place, []).append(dim)
                if is_integer(value.type.dtype):
                    counted.add(place)
    return max(
        found, key=lambda place: (place in counted, len(found[place]), -min(found[place])), default=None
    )


def orders_of(function: Function) -> list[Value]:
    """The orders in which tokens of the batch are picked (`parallelism.ir.operators.token_order`)."""
    return [op.outputs[0] for op in function.ops if op.kind == "token_order"]


def dims_of(value: Value) -> Dims:
    """The axes of each dim of a value; a value without a layout is split over none."""
    return [dim.axes for dim in value.layout.dims] if value.layout else [()] * value.type.ndim


def axes_of(*values: Value) -> set[str]:
    """The axes over which dims of these values are split."""
    return {axis for value in values if value.layout for axis in value.layout.axes}


def without(dims: Dims, axes: Collection[str]) -> Dims:
    """The axes of each dim without those in ``axes``."""
    left = []
    for dim in dims:
        left.append(tuple(axis for axis in dim if axis not in axes))
    return left


def split_at(value: Value, axis: str) -> int | None:
    """The dim of a value that its layout splits over an axis; None if there is none."""
    return next((dim for dim, axes in enumerate(dims_of(value)) if axis in axes), None)


def layout(dims: Dims, like: TensorSharding | None = None) -> TensorSharding:
    """The layout with these axes of each dim, and with the pending reduction of ``like``."""
    return TensorSharding(*dims, partial=like.partial, op=like.op) if like else TensorSharding(*dims)
