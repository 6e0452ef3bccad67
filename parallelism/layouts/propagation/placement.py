"""Placement of one op: the layouts that its inputs need and its outputs get, from the rule of its dims alone.

An axis splits one letter of the rule.  Inputs and outputs may split several letters over it; the letter of most tensors
wins, then the letter along which elements are picked by number, then that of the larger tensors, then the first in the
rule.  So few and small tensors have to move, and a table is gathered only if the indices are split over its axes.  All
inputs are then split by the winning letters and are whole otherwise.  If an axis splits a letter that an output does
not have, this output is partial over the axis.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelism.ir.core import Attributes, Expression, Extent, Op, TensorType
from parallelism.ir.core.table import OPERATORS, meaning
from parallelism.layouts.propagation.devices import Axes, Devices
from parallelism.layouts.propagation.relations import Letters, Relation, relation
from parallelism.sharding import TensorSharding

Dims = tuple[Axes, ...]


class Placement(NamedTuple):
    """The layouts of the inputs and outputs of one op."""

    inputs: tuple[TensorSharding, ...]
    """The layout that the op needs for each input."""
    outputs: tuple[TensorSharding, ...]
    """The layout in which the op computes each output."""


@lru_cache(maxsize=65536)
def sharding(dims: Dims, partial: Axes = (), op: str = "sum") -> TensorSharding:
    """The layout with these axes of each dim, memoized."""
    return TensorSharding(*dims, partial=partial, op=op)


@lru_cache(maxsize=65536)
def dims_of(layout: TensorSharding) -> Dims:
    """The axes of each dim of a layout, memoized."""
    return tuple(dim.axes for dim in layout.dims)


@lru_cache(maxsize=65536)
def placement(
    kind: str,
    types: tuple[TensorType, ...],
    attributes: Attributes,
    inputs: tuple[TensorSharding, ...],
    outputs: tuple[TensorSharding, ...],
    devices: Devices,
    *,
    carries: bool,
) -> Placement:
    """The placement of an op whose inputs have, and whose outputs should have, these layouts.

    ``carries`` says that a reduction that is pending in the inputs may stay pending in the output.
    """
    rule = relation(kind, types, attributes)
    if carries and (kept := _kept(inputs)):
        place = _placement(rule, types, (kind, attributes), inputs, outputs, devices, kept)
        # A partial input is not resharded: its reduction stays pending only if the input can stay where it is.
        pairs = zip(inputs, place.inputs, strict=True)
        if all(moved_dim(lies, wanted) is None for lies, wanted in pairs if lies.partial):
            return place
    return _placement(rule, types, (kind, attributes), inputs, outputs, devices, ())


def _kept(inputs: Sequence[TensorSharding]) -> Axes:
    """The axes over which all partial inputs are partial."""
    first, *others = [layout.partial for layout in inputs if layout.partial]
    shared = {*first}.intersection(*others)
    return tuple(axis for axis in first if axis in shared)


def moved_dim(lies: TensorSharding, wanted: TensorSharding) -> int | None:
    """The first dim that differs in more than a further split; None if there is none."""
    pairs = enumerate(zip(dims_of(lies), dims_of(wanted), strict=True))
    return next((d for d, (old, new) in pairs if old != new[: len(old)]), None)


def _placement(
    of: Relation,
    types: Sequence[TensorType],
    called: tuple[str, Attributes],
    inputs: Sequence[TensorSharding],
    outputs: Sequence[TensorSharding],
    devices: Devices,
    kept: Axes,
) -> Placement:
    kind, attributes = called
    all_types = (*types, *meaning(kind, tuple(types), attributes).outputs)
    leaders = OPERATORS[kind].leaders
    asked = None if leaders is None else leaders(len(inputs), len(outputs))
    everything = enumerate(zip((*of.inputs, *of.outputs), all_types, (*inputs, *outputs), strict=True))
    tensors = [tensor for number, tensor in everything if asked is None or number in asked]
    split = letters_split(of, tensors, devices, kept)
    pending = [bool(layout.partial) for layout in inputs]
    op = of.op
    if kept:
        op = next((layout.op for layout in inputs if layout.partial), "sum")
    return placement_by(of, split, devices, kept, pending, op)


def dealt(op: Op, lies: TensorSharding, devices: Devices) -> Placement:
    """The placement of a ``deal``: its axes split the dim ``after``, where they split the dim ``before`` of its input.

    ``ValueError`` where the devices do not divide that dim.
    """
    dims = [*dims_of(lies)]
    moved = tuple(axis for axis in op["axes"] if axis in dims[op["before"]])
    dims[op["before"]] = tuple(axis for axis in dims[op["before"]] if axis not in moved)
    dims[op["after"]] = (*dims[op["after"]], *moved)
    extent = op.outputs[0].type.shape[op["after"]]
    count = devices.along(dims[op["after"]])
    if isinstance(extent, int) and isinstance(count, int) and extent % count:
        raise ValueError(
            f"an all_to_all over {', '.join(moved)} deals a dim of {extent}, such as heads, to {count} devices, which must "
            "divide it"
        )
    return Placement((lies,), (TensorSharding(*dims, partial=lies.partial, op=lies.op),))


def placement_by(
    of: Relation, split: Mapping[str, Axes], devices: Devices, kept: Axes, carrying: Iterable[bool], op: str
) -> Placement:
    """The placement of an op whose letters are split over these axes.

    A reduction by ``op`` stays pending over the axes ``kept``, in the inputs that are ``carrying`` it.
    """

    def lying(letters: Letters) -> Dims:
        return tuple(split.get(letter or "", ()) for letter in letters)

    def partial(reduced: frozenset[str]) -> Axes:
        pending = {*kept, *(axis for letter in reduced for axis in split.get(letter, ()))}
        return tuple(axis for axis in devices.shape if axis in pending)

    inputs = []
    for letters, carries in zip(of.inputs, carrying, strict=True):
        pending = kept if carries else ()
        inputs.append(sharding(lying(letters), pending, op if pending else "sum"))
    outputs = [
        sharding(lying(letters), partial(reduced), op)
        for letters, reduced in zip(of.outputs, of.reduced, strict=True)
    ]
    return Placement(tuple(inputs), tuple(outputs))


def letters_split(
    of: Relation,
    tensors: Iterable[tuple[Letters, TensorType, TensorSharding]],
    devices: Devices,
    taken: Axes = (),
) -> dict[str, Axes]:
    """The axes that split each letter, given the layouts of inputs and outputs; axes in ``taken`` are not used."""
    wishes: dict[str, list[Axes]] = {}
    votes: dict[str, dict[str, list[Extent]]] = {}
    for letters, type, layout in tensors:
        for letter, axes in zip(letters, dims_of(layout), strict=True):
            if letter is None or not axes:
                continue
            axes = of.exact(letter, tuple(axis for axis in axes if axis not in taken), devices)
            if axes:
                wishes.setdefault(letter, []).append(axes)
                weight = 0 if isinstance(type.nbytes, Expression) else type.nbytes
                for axis in axes:
                    votes.setdefault(axis, {}).setdefault(letter, []).append(weight)
    winner = {
        axis: max(asked, key=lambda letter: (len(asked[letter]), letter == of.indexed, sum(asked[letter])))
        for axis, asked in votes.items()
    }
    split = {}
    for letter, asked in wishes.items():
        left = Counter[Axes]()
        for axes in asked:
            left[tuple(axis for axis in axes if winner[axis] == letter)] += 1
        chosen, *others = sorted(left, key=lambda axes: (-left[axes], -len(axes)))
        for axes in others:
            if axes[: len(chosen)] == chosen:
                chosen = axes
        split[letter] = of.exact(letter, chosen, devices)
    return split
