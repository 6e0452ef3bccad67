"""How the inputs of one op must lie, and how its outputs then do: from the rule of its dims alone.

An axis splits one letter of the rule at a time.  Of the letters that inputs and outputs have split over it, the one
that most of them have wins; of equal ones that of the larger tensors, then the one that stands first in the rule.  So
what has to move are few and small tensors.  All inputs are then cut by the letters that won, and lie whole otherwise;
an axis over which a letter is split that no output has leaves the output partial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelism.ir.core import Attributes, Expression, Extent, TensorType
from parallelism.ir.core.table import meaning
from parallelism.layouts.propagation.devices import Axes, Devices
from parallelism.layouts.propagation.relations import Letters, Relation, relation
from parallelism.sharding import TensorSharding

Dims = tuple[Axes, ...]


class Placement(NamedTuple):
    """Of one op."""

    inputs: tuple[TensorSharding, ...]
    """How each input must lie."""
    outputs: tuple[TensorSharding, ...]
    """How each output lies when it is made."""


@lru_cache(maxsize=65536)
def sharding(dims: Dims, partial: Axes = (), op: str = "sum") -> TensorSharding:
    """The layout."""
    return TensorSharding(*dims, partial=partial, op=op)


@lru_cache(maxsize=65536)
def dims_of(layout: TensorSharding) -> Dims:
    """The axes of each dim."""
    return tuple(dim.axes for dim in layout.dims)


@lru_cache(maxsize=65536)
def placement(
    kind: str, types: tuple[TensorType, ...], attributes: Attributes, inputs: tuple[TensorSharding, ...],
    outputs: tuple[TensorSharding, ...], devices: Devices, *, carries: bool,
) -> Placement:
    """How an op is done whose inputs lie so, and whose outputs shall lie so.

    ``carries``: a reduction that is pending in inputs, by one operation, may stay pending in the output.
    """
    of = relation(kind, types, attributes)
    kept = _kept(inputs) if carries else ()
    if kept:
        found = _placement(of, types, (kind, attributes), inputs, outputs, devices, kept)
        # terms are not moved about: what is pending stays so only where it lies
        if all(
            all(new[:len(old)] == old for old, new in zip(dims_of(given), dims_of(wanted), strict=True))
            for given, wanted in zip(inputs, found.inputs, strict=True) if given.partial
        ):
            return found
    return _placement(of, types, (kind, attributes), inputs, outputs, devices, ())


def _kept(inputs: Sequence[TensorSharding]) -> Axes:
    """The axes over which all that is pending is."""
    pending = [layout.partial for layout in inputs if layout.partial]
    return tuple(axis for axis in pending[0] if all(axis in partial for partial in pending))


def _placement(
    of: Relation, types: Sequence[TensorType], called: tuple[str, Attributes], inputs: Sequence[TensorSharding],
    outputs: Sequence[TensorSharding], devices: Devices, kept: Axes,
) -> Placement:
    made = meaning(called[0], tuple(types), called[1]).outputs
    tensors = [*zip(of.inputs, types, inputs, strict=True), *zip(of.outputs, made, outputs, strict=True)]
    split = letters_split(of, tensors, devices, kept)
    op = next((layout.op for layout in inputs if layout.partial), "sum") if kept else of.op
    pending = {axis for letter in of.reduced for axis in split.get(letter, ())}
    partial = tuple(axis for axis in devices.shape if axis in pending or axis in kept)

    def lying(letters: Letters) -> Dims:
        return tuple(split.get(letter, ()) if letter else () for letter in letters)

    return Placement(
        tuple(
            sharding(lying(letters), kept if layout.partial else (), op if layout.partial and kept else "sum")
            for letters, layout in zip(of.inputs, inputs, strict=True)
        ),
        tuple(sharding(lying(letters), partial, op) for letters in of.outputs),
    )


def letters_split(
    of: Relation, tensors: Sequence[tuple[Letters, TensorType, TensorSharding]], devices: Devices, taken: Axes = (),
) -> dict[str, Axes]:
    """The axes that each letter is split over, when inputs and outputs would like to lie so; none of ``taken``."""
    wishes: dict[str, list[Axes]] = {}
    votes: dict[str, dict[str, list[Extent]]] = {}
    for letters, type, layout in tensors:
        for letter, axes in zip(letters, dims_of(layout), strict=True):
            if letter is None or not axes:
                continue
            axes = of.exact(letter, tuple(axis for axis in axes if axis not in taken), devices)
            if axes:
                wishes.setdefault(letter, []).append(axes)
                for axis in axes:
                    votes.setdefault(axis, {}).setdefault(letter, []).append(_weight(type))
    winner = {
        axis: max(asked, key=lambda letter: (len(asked[letter]), sum(asked[letter])))
        for axis, asked in votes.items()
    }
    found = {}
    for letter, asked in wishes.items():
        left = Counter(tuple(axis for axis in axes if winner[axis] == letter) for axes in asked)
        order = sorted(left, key=lambda axes: (-left[axes], -len(axes)))
        chosen = order[0]
        for axes in order[1:]:
            chosen = axes if axes[:len(chosen)] == chosen else chosen
        found[letter] = of.exact(letter, chosen, devices)
    return found


def _weight(type: TensorType) -> Extent:
    return 0 if isinstance(type.nbytes, Expression) else type.nbytes
