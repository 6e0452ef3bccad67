"""Products of parameters: what a weight is to the op that contracts it, also through views of it.

A view moves the elements of one array, or gives them another dtype: ``w.T``, ``w[0]``, ``w.reshape(4, 8)``,
``w.astype(...)``.  A dim of the weight is split like a dim of a view if the rules of all ops between say so
(`parallelism.layouts.propagation.relations`): there is no other rule for views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.layouts.propagation.relations import Letters
from parallelism.transforms.dims import DimClasses, Place, relation_of, split_at


class View(NamedTuple):
    """A value that holds elements of one parameter, moved; a parameter is a view of itself."""

    weight: Value
    dims: tuple[int | None, ...]
    """For each dim of the value, the dim of the weight that is split like it; None: no split passes the views."""
    ops: tuple[Op, ...] = ()
    """The views between, the weight's first."""


class Product(NamedTuple):
    """An op that contracts or looks up a parameter, or a view of one."""

    weight: Value
    operand: Value
    """What the op reads: the weight, or the view of it."""
    letters: Letters
    """The letters of the weight's dims, through the views."""
    contracted: tuple[str, ...]
    """Letters of the weight that are summed over."""
    free: tuple[str, ...]
    """Letters of the weight that the result has, and no other input."""
    lost_contracted: tuple[str, ...]
    """Letters of the operand that are summed over and no dim of the weight: a split does not pass the views."""
    lost_free: tuple[str, ...]
    """The same of letters that the result has, and no other input."""

    @property
    def lost(self) -> tuple[str, ...]:
        """All letters of the operand, contracted or free, that are no dim of the weight."""
        return (*self.lost_contracted, *self.lost_free)


Views = Mapping[Value, View]


def is_view(op: Op) -> bool:
    """Whether an op moves the elements of one array, or converts them, and computes nothing else.

    ``reshard`` is none: what it says about a layout is meant.
    """
    moves = op.operator.linear == "moves" and op.operator.lays is None
    return len(op.inputs) == 1 and (moves or op.kind == "convert")


def views_of(function: Function, parameters: Iterable[Value]) -> dict[Value, View]:
    """The views of these inputs of a function, the inputs themselves included."""
    found = {value: View(value, tuple(range(value.type.ndim))) for value in parameters}
    for op in function.ops:
        before = found.get(op.inputs[0]) if is_view(op) else None
        if before is None:
            continue
        relation = relation_of(op)
        dims = {
            letter: before.dims[dim] for dim, letter in enumerate(relation.inputs[0]) if letter is not None
        }
        for value, letters in zip(op.outputs, relation.outputs, strict=True):
            through = tuple(dims.get(letter) if letter is not None else None for letter in letters)
            found[value] = View(before.weight, through, (*before.ops, op))
    return found


def product_of(op: Op, views: Views) -> Product | None:
    """The product that an op is, if it sums over letters that one parameter shares with activations.

    ``views`` are those of the program's parameters.
    """
    places = [place for place, value in enumerate(op.inputs) if value in views]
    if len(places) != 1 or len(op.inputs) < 2:
        return None
    relation, operand = relation_of(op), op.inputs[places[0]]
    own, *others = (
        relation.inputs[places[0]],
        *relation.inputs[: places[0]],
        *relation.inputs[places[0] + 1 :],
    )
    of_others = {*chain.from_iterable(others)}
    summed = frozenset[str].intersection(*relation.reduced) if relation.reduced else frozenset[str]()
    made = {*chain.from_iterable(relation.outputs)}
    contracted, free = list[str](), list[str]()
    for letter in own:
        if letter is None:
            continue
        if letter in summed and (letter in of_others or letter == relation.indexed):
            contracted.append(letter)
        if letter in made and letter not in of_others:
            free.append(letter)
    if not contracted or not (free or relation.indexed):
        return None
    view = views[operand]
    by_dim = dict(zip(view.dims, own, strict=True))
    letters = tuple(by_dim.get(dim) for dim in range(view.weight.type.ndim))
    return Product(
        view.weight,
        operand,
        letters,
        contracted=tuple(letter for letter in contracted if letter in letters),
        free=tuple(letter for letter in free if letter in letters),
        lost_contracted=tuple(letter for letter in contracted if letter not in letters),
        lost_free=tuple(letter for letter in free if letter not in letters),
    )


def split_letter(op: Op, product: Product, axis: str) -> str | None:
    """The letter of a product that an axis splits in its weight, or in a view of it with a layout of its own."""
    operand = product.operand
    if operand is not product.weight and operand.layout is not None:
        dim = split_at(operand, axis)
        return None if dim is None else relation_of(op).inputs[op.inputs.index(operand)][dim]
    dim = split_at(product.weight, axis)
    return None if dim is None else product.letters[dim]


def experts_of(function: Function, views: Views, classes: DimClasses) -> set[Place]:
    """The classes of the dims that number experts: at each of their places a product is one of its own.

    A product has such a dim if weight, activations and result share it; or if it sums over it, and two activations have
    it: the rows of all experts, and the gates by which they are added.
    """
    found = set[Place]()
    for op in function.ops:
        product = product_of(op, views)
        if product is None:
            continue
        relation = relation_of(op)
        others = [
            letters
            for value, letters in zip(op.inputs, relation.inputs, strict=True)
            if value is not product.operand
        ]
        made = {letter for letters in relation.outputs for letter in letters}
        for dim, letter in enumerate(product.letters):
            given = sum(letter in letters for letters in others)
            if letter and ((given and letter in made) or (given > 1 and letter in product.contracted)):
                found.add(classes.of(product.weight, dim))
    return found
