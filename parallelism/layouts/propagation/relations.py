"""Relations: the letter of an operator's rule by which each dim may be split, and over how many devices.

A dim of several letters, ``(ab)``, is split by its outermost letter with an extent above 1.  The split is allowed only
if all dims with this letter are cut at the same positions.  Example: ``a`` has extent 3, ``b`` has 2, and there are 2
devices.  The dim ``(ab)`` of extent 6 gives 3 to the first device, but the dim ``a`` gives it 2, which are 4 of the 6.
So this split is not allowed; with extent 4 for ``a`` it is.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

from parallelism.ir.core import OPERATORS, Attributes, Dim, Expression, Extent, TensorType
from parallelism.ir.core.extents import product
from parallelism.ir.core.table import meaning
from parallelism.layouts.propagation.devices import Axes, Devices
from parallelism.mesh import split_sizes

Letters = tuple[str | None, ...]


class Relation(NamedTuple):
    """For each dim of the inputs and outputs of one op, the letter by which it may be split."""

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    extents: Mapping[str, Extent]
    inside: Mapping[str, tuple[Extent, ...]]
    """For each letter, the products of the letters inside of it, in the dims that it shares with others."""
    above: tuple[tuple[int, ...], ...]
    """For each tensor (inputs, then outputs), the numbers of the tensors that have all of its letters."""
    reduced: tuple[frozenset[str], ...]
    """For each output, the letters whose split leaves it partial."""
    op: str
    """The reduction of these letters: sum, prod, max or min."""
    indexed: str | None
    """The letter along which the operator picks elements by their numbers."""

    def exact(self, letter: str, axes: Axes, devices: Devices) -> Axes:
        """The longest prefix of these axes over which the letter may be split."""
        while axes and not self._splits(letter, tuple(devices.shape[axis] for axis in axes)):
            axes = axes[:-1]
        return axes

    def _splits(self, letter: str, factors: tuple[Extent, ...]) -> bool:
        extent = self.extents[letter]
        numbers = tuple(n for n in factors if isinstance(n, int))
        if isinstance(extent, Expression) or len(numbers) < len(factors) or extent % prod(numbers) == 0:
            return True
        sizes = split_sizes(extent, numbers)
        if self.op in ("max", "min") and 0 in sizes and any(letter in reduced for reduced in self.reduced):
            return False  # An empty shard has no largest or smallest element.
        for n in self.inside[letter]:
            if not isinstance(n, int) or split_sizes(extent * n, numbers) != tuple(
                n * size for size in sizes
            ):
                return False
        return True


@lru_cache(maxsize=8192)
def relation(kind: str, types: tuple[TensorType, ...], attributes: Attributes) -> Relation:
    """The relation of an op, memoized for equal ops."""
    rule, entry = meaning(kind, types, attributes).rule, OPERATORS[kind]
    blocked = set(rule.whole)
    inside: dict[str, list[Extent]] = {}
    for dim in chain(*rule.inputs, *rule.outputs):
        if dim == ("1",):
            continue
        at = _outermost(dim, rule.extents)
        blocked.update(dim[:at], dim[at + 1 :])
        rests = inside.setdefault(dim[at], [])
        rest = product(rule.extents[letter] for letter in dim[at + 1 :])
        if rest != 1 and rest not in rests:
            rests.append(rest)

    def splitting(dims: tuple[Dim, ...]) -> Letters:
        letters: list[str | None] = []
        for dim in dims:
            letter = None if dim == ("1",) else dim[_outermost(dim, rule.extents)]
            letters.append(None if letter in blocked else letter)
        return tuple(letters)

    inputs, outputs = (tuple(map(splitting, side)) for side in (rule.inputs, rule.outputs))
    sets = [{*letters} - {None} for letters in (*inputs, *outputs)]
    above = []
    for i, own in enumerate(sets):
        above.append(tuple(j for j, theirs in enumerate(sets) if j != i and own <= theirs))
    free = frozenset(rule.letters) - blocked
    return Relation(
        inputs,
        outputs,
        rule.extents,
        {letter: tuple(rests) for letter, rests in inside.items()},
        tuple(above),
        reduced=tuple(free.difference(*dims) for dims in rule.outputs),
        op=rule.op,
        indexed=entry.indexed,
    )


def _outermost(dim: Dim, extents: Mapping[str, Extent]) -> int:
    return next((i for i, letter in enumerate(dim) if extents[letter] != 1), 0)
