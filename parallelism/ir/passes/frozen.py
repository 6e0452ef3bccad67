"""Frozen weights: inputs of a program that are weights and are not trained.  An attribute of the function names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelism.ir.core import Attributes, Function, Value, frozen_attributes
from parallelism.spelling import did_you_mean

FROZEN = "frozen"
"""The attribute: names of inputs, and beginnings of names up to a dot."""


def frozen(function: Function, names: str | Sequence[str]) -> Function:
    """The program of a loss with weights that a training step does not train, beside those that it has.

    ``names`` are those of inputs, or what they begin with: ``p`` for ``p.w`` and ``p.b``.  A frozen weight has no
    gradient and no state, and nothing is summed for it.  It is laid out, split and gathered as any other weight.

    ``ValueError`` for a name that no input has.
    """
    given = [names] if isinstance(names, str) else [*names]
    for name in given:
        if not any(_is_under(value, name) for value in function.inputs):
            known = [value.name for value in function.inputs]
            hint = did_you_mean(name, known) or f"; its inputs are {', '.join(known) or 'none'}"
            raise ValueError(f"@{function.name} has no input {name!r} to freeze{hint}")
    return replace(function, attributes=with_frozen(function.attributes, given))


def with_frozen(attributes: Attributes, names: Sequence[str]) -> Attributes:
    """The attributes of a function that also has frozen weights of these names."""
    given = dict(attributes)
    told = tuple(dict.fromkeys([*given.get(FROZEN, ()), *names]))
    return frozen_attributes(given | {FROZEN: told}) if told else attributes


def without_frozen(attributes: Attributes) -> Attributes:
    """The attributes of a function without those that say which of its weights are frozen."""
    return tuple([(name, given) for name, given in attributes if name != FROZEN])


def frozen_inputs(function: Function, attributes: Attributes) -> tuple[Value, ...]:
    """The frozen weights of a function, by these attributes."""
    names: tuple[str, ...] = dict(attributes).get(FROZEN, ())
    beginnings = tuple(f"{name}." for name in names)
    return tuple(
        value for value in function.inputs if value.name in names or value.name.startswith(beginnings)
    )


def _is_under(value: Value, name: str) -> bool:
    """Whether a name is that of a value, or what it begins with."""
    return value.name == name or value.name.startswith(f"{name}.")
