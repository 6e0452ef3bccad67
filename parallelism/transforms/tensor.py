"""Tensor parallelism: the products of a model, each with its weight split over an axis."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.region_patterns import matching, patterns
from parallelism.ir.operators.contractions import product_shape
from parallelism.layouts.propagation.relations import Letters, Relation
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import Place, dims_of, layout, relation_of, split_at
from parallelism.transforms.parts import Parts
from parallelism.transforms.words import checked_axis, word

FEW = 4
"""If fewer than one weight in so many is split, nearly all stay whole."""
NAMED = 3
"""So many weights that stay whole are named."""


@dataclass(frozen=True)
class TensorParallel:
    """The weights of products are split over ``axis``, by columns or by rows, as the rule of the operators allows.

    The ops are visited in order.  A product whose activation is split where it is contracted takes its weight by
    *rows*: its result is a pending sum.  Another product takes its weight by *columns*, if the split of its result
    lasts until a sum takes it up: the next product, or the loss.  Otherwise the weight stays whole.  A table in which
    rows are looked up is split by rows.  Whatever is added to a split result, such as a bias, is split alike.  On a
    Transformer this is Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053, section 3): two all_reduces of the
    activations of a layer forward, and two backward.

    ``regions`` are patterns; only products in regions that match are split.  A weight that has a layout keeps it, so
    the transform of an inner region comes before that of a region around it, as it does in a `Strategy`.

    ``ValueError`` for a pattern that no region matches, and if no weight is left to be split.  A `WholeWeights` warning
    names the products, and the reasons, if fewer than one in `FEW` of the products in its regions has its weight split.
    """

    axis: str = "tp"
    regions: str | Sequence[str] | None = ()
    phase: ClassVar[int] = 20

    def __post_init__(self) -> None:
        checked_axis(self)
        object.__setattr__(self, "regions", patterns(self.regions, type(self).__name__))

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        scope = {*matching(parts.forward, self._regions, f"{self}")}
        found = _Splits(parts, self.axis, scope)
        taken = next((value for value in parts.data if split_at(value, self.axis) is not None), None)
        if not found.layouts and taken is not None:
            raise ValueError(
                f"{self}: %{taken.name} of @{function.name} is split over {self.axis!r} already, "
                f"{taken.layout and taken.layout.short()}, and with it each activation; weights need an "
                "axis of their own"
            )
        if not found.layouts:
            raise ValueError(
                f"{self}: no weight of @{function.name} is left to be split over {self.axis!r}: of no "
                "product the split lasts until a sum takes it up, or they have layouts already (Zero "
                f"gives them to all and comes after {self}, as does TensorParallel of a wider region)"
            )
        if left := found.left_whole():
            warnings.warn(f"{self}: {left}", WholeWeights, stacklevel=2)
        return parts.laid(found.layouts).joined()

    def size(self, function: Function) -> int:
        """The number of ops of the forward in its regions."""
        return len(matching(Parts.of(function).forward, self._regions, f"{self}"))

    @property
    def _regions(self) -> Sequence[str]:
        return self.regions or ()

    def __str__(self) -> str:
        return word("tp", self.axis, self._regions)


class WholeWeights(UserWarning):
    """`TensorParallel` leaves nearly all weights whole."""


class Product(NamedTuple):
    """An op that contracts or looks up a parameter."""

    weight: Value
    letters: Letters
    """Those of the weight."""
    contracted: tuple[str, ...]
    """Letters of the weight that are summed over."""
    free: tuple[str, ...]
    """Letters of the weight that the result has, and no other input."""


def product_of(op: Op, parameters: Collection[Value]) -> Product | None:
    """The product that an op is, if it sums over letters that one parameter shares with activations."""
    of = relation_of(op)
    places = [place for place, value in enumerate(op.inputs) if value in parameters]
    if len(places) != 1 or len(op.inputs) < 2:
        return None
    letters = of.inputs[places[0]]
    others = {letter for place, each in enumerate(of.inputs) if place != places[0] for letter in each}
    summed = frozenset[str].intersection(*of.reduced) if of.reduced else frozenset[str]()
    contracted = tuple(
        letter for letter in letters if letter in summed and (letter in others or letter == of.indexed)
    )
    made = {letter for each in of.outputs for letter in each}
    free = tuple(
        letter for letter in letters if letter in made and letter not in others and letter is not None
    )
    return (
        Product(op.inputs[places[0]], letters, tuple(each for each in contracted if each), free)
        if contracted and (free or of.indexed)
        else None
    )


def experts_of(parts: Parts) -> set[Place]:
    """The classes of the dims that number experts: at each of their places a product is one of its own.

    A product has such a dim if weight, activations and result share it; or if it sums over it, and two activations have
    it: the rows of all experts, and the gates by which they are added.
    """
    parameters, found = {*parts.parameters}, set[Place]()
    for op in parts.forward.ops:
        product = product_of(op, parameters)
        if product is None:
            continue
        of = relation_of(op)
        others = [
            letters
            for value, letters in zip(op.inputs, of.inputs, strict=True)
            if value is not product.weight
        ]
        made = {letter for letters in of.outputs for letter in letters}
        for dim, letter in enumerate(product.letters):
            given = sum(letter in letters for letters in others)
            if letter and ((given and letter in made) or (given > 1 and letter in product.contracted)):
                found.add(parts.classes.of(product.weight, dim))
    return found


class _Splits:
    """The dims of values that are split over the axis, found op by op."""

    def __init__(self, parts: Parts, axis: str, scope: Collection[Op]) -> None:
        function = parts.forward
        self.function, self.parameters, self.axis, self.scope = function, {*parts.parameters}, axis, {*scope}
        self.classes, self.experts = parts.classes, experts_of(parts)
        self.layouts: dict[str, TensorSharding] = {}
        """The layouts of parameters that were found."""
        self.dims = {value.name: split_at(value, axis) for value in function.values if value.layout}
        """The dim of each value that is split over the axis; None: given as whole."""
        self.users: dict[str, list[Op]] = {}
        for op in function.ops:
            for value in dict.fromkeys(op.inputs):
                self.users.setdefault(value.name, []).append(op)
        self.made = {value.name: op for op in function.ops for value in op.outputs}
        self._outputs = {*function.outputs}
        self._lasting: dict[tuple[str, int], bool] = {}
        for op in function.ops:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        of = relation_of(op)
        product = product_of(op, self.parameters)
        activations = [value for value in op.inputs if product is None or value is not product.weight]
        split = self._letter(op, of, activations)
        if product is not None and op in self.scope and self._open(product.weight):
            letter = self._chosen(op, of, product, split)
            if letter is not None:
                self._give(product.weight, product.letters.index(letter))
        split = split or self._letter(op, of, op.inputs)
        if split is None:
            return
        for value, letters in zip(op.inputs, of.inputs, strict=True):
            if value in self.parameters and product is None and split in letters and self._open(value):
                self._give(value, letters.index(split))  # what is added to a split value, as a bias
        for value, letters in zip(op.outputs, of.outputs, strict=True):
            if split in letters:
                self.dims.setdefault(value.name, letters.index(split))

    def _open(self, value: Value) -> bool:
        return value.layout is None and value.name not in self.layouts

    def _give(self, value: Value, dim: int) -> None:
        axes = dims_of(value)
        axes[dim] = (self.axis,)
        self.layouts[value.name] = layout(axes)
        self.dims[value.name] = dim

    def _letter(self, op: Op, of: Relation, values: Collection[Value]) -> str | None:
        """The letter that is split, by the first of these inputs that is split."""
        for value, letters in zip(op.inputs, of.inputs, strict=True):
            dim = self.dims.get(value.name) if value in values else None
            if dim is not None and letters[dim] is not None:
                return letters[dim]
        return None

    def _chosen(self, op: Op, of: Relation, product: Product, split: str | None) -> str | None:
        """The letter of the weight that is to be split; None if it stays whole."""
        if split is not None:
            return split if split in product.letters else None
        if of.indexed in product.letters:
            return of.indexed
        # Experts are split last: they are for ExpertParallel, which may follow.
        ordered = sorted(
            product.free,
            key=lambda letter: self.classes.of(product.weight, product.letters.index(letter)) in self.experts,
        )
        return next(
            (
                letter
                for letter in ordered
                if all(
                    self._lasts(value, letters.index(letter))
                    for value, letters in zip(op.outputs, of.outputs, strict=True)
                    if letter in letters
                )
            ),
            None,
        )

    # -- what stays whole ----------------------------------------------------------------------------------------------

    def left_whole(self) -> str | None:
        """A sentence on the products that keep their weights whole, if these are nearly all products in scope."""
        whole, split = dict[str, str](), set[str]()
        for op in self.function.ops:
            if op not in self.scope:
                continue
            for weight, way in self._weights(op):
                if self.dims.get(weight.name) is not None:
                    split.add(weight.name)
                elif weight.layout is None:
                    whole.setdefault(weight.name, self._why(op, weight, way))
        if FEW * len(split) >= len(whole.keys() - split) + len(split):
            return None
        reasons: dict[str, list[str]] = {}
        for name, why in whole.items():
            if name not in split:
                reasons.setdefault(why, []).append(f"%{name}")
        count = sum(map(len, reasons.values()))
        told = []
        for why, names in reasons.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            told.append(f"{', '.join(names[:NAMED])}{more}: {why}")
        return (
            f"{count} of the {count + len(split)} weights that products of @{self.function.name} read stay whole "
            f"on each device of {self.axis!r}; {'; '.join(told)}"
        )

    def _weights(self, op: Op) -> Iterator[tuple[Value, list[Op]]]:
        """The weights that a product contracts, each with the ops between them, if it is a product."""
        product = product_of(op, self.parameters)
        if product is not None:
            yield product.weight, []
        if product is not None or product_shape(op) is None:
            return
        for value in op.inputs:
            between = list[Op]()
            while (
                value not in self.parameters
                and value.name in self.made
                and len(self.made[value.name].inputs) == 1
            ):
                between.append(self.made[value.name])
                value = self.made[value.name].inputs[0]
            if value in self.parameters and value.type.ndim > 1 and between:
                yield value, between

    def _why(self, op: Op, weight: Value, between: Sequence[Op]) -> str:
        """Why a weight of a product stays whole."""
        if between:
            kinds = " and ".join(dict.fromkeys(each.kind for each in reversed(between)))
            moves = all(each.operator.linear == "moves" for each in between)
            hint = "; store it as the product reads it" if moves else ""
            return f"a {kinds} is between it and its product{hint}"
        of, product = relation_of(op), product_of(op, self.parameters)
        for value, letters in zip(op.outputs, of.outputs, strict=True):
            for dim, letter in enumerate(letters):
                if product is not None and letter in product.free:
                    return self._end(value, dim)
        return f"the {op.kind} reads it in no dim that may be split"

    def _end(self, value: Value, dim: int) -> str:
        """Which op, of those behind a product, needs the dim of its result whole."""
        new, seen = [(value, dim)], {(value.name, dim)}
        while new:
            value, dim = new.pop(0)
            if value in self._outputs:
                return "its result is returned"
            for op in self.users.get(value.name, ()):
                for following in _followed(op, value, dim):
                    if not following:
                        return f"the {op.kind} behind it needs its result whole"
                    place = (following[0].name, following[1])
                    if place not in seen:
                        seen.add(place)
                        new.append(following)
        return "no product behind it takes up the split of its result"

    def _lasts(self, value: Value, dim: int) -> bool:
        """Whether a split of this dim lasts until a sum takes it up, whatever uses the value.

        It is a search through the uses of the value, those of what is made of it, and so on, each looked at once.
        """
        lasting, path = self._lasting, [(value, dim, self._uses(value, dim))]
        while path:
            value, dim, uses = path[-1]
            following = next(uses, None)
            if following is None:
                lasting[value.name, dim] = True
                path.pop()
            elif not following or lasting.get((following[0].name, following[1])) is False:
                lasting.update(((value.name, dim), False) for value, dim, _ in path)
                return False
            elif (following[0].name, following[1]) not in lasting:
                path.append((*following, self._uses(*following)))
        return True

    def _uses(self, value: Value, dim: int) -> Iterator[tuple[Value, int] | tuple[()]]:
        """The dims of other values that are split like this one, which must last, too; () where it does not last."""
        if (value.name, dim) in self._lasting:
            yield from () if self._lasting[value.name, dim] else [()]
            return
        if value in self._outputs:
            yield ()
        for op in self.users.get(value.name, ()):
            if op not in self.scope and self._sums(op, value, dim):
                yield ()  # the next product is to stay as it is
            yield from _followed(op, value, dim)

    def _sums(self, op: Op, value: Value, dim: int) -> bool:
        """Whether an op is a product that sums over this dim of a value, with a weight that is not split."""
        product = product_of(op, self.parameters)
        if product is None or self.dims.get(product.weight.name) is not None:
            return False
        letters = zip(op.inputs, relation_of(op).inputs, strict=True)
        return any(given is value and each[dim] in product.contracted for given, each in letters)


def _followed(op: Op, value: Value, dim: int) -> Iterator[tuple[Value, int] | tuple[()]]:
    """The dims of what an op makes that are split if this dim of its input is; () where it needs the dim whole."""
    of = relation_of(op)
    for given, letters in zip(op.inputs, of.inputs, strict=True):
        letter = letters[dim] if given is value else ""
        if letter is None:
            yield ()
        for output, made in zip(op.outputs, of.outputs, strict=True):
            if letter and letter in made:
                yield output, made.index(letter)
