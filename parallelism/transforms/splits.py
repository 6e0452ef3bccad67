"""Which dims of which values tensor parallelism splits, found op by op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from parallelism.ir.core import Op, Value
from parallelism.ir.passes.donation import owners
from parallelism.ir.passes.product_parts import FusedProduct, fused_product
from parallelism.layouts.propagation.relations import Relation
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import dims_of, layout, relation_of, split_at
from parallelism.transforms.parts import Parts, needed
from parallelism.transforms.products import Product, View, product_of


class Splits:
    """The dims of values that are split over the axis, found op by op."""

    def __init__(self, parts: Parts, axis: str, scope: Collection[Op]) -> None:
        function = parts.forward
        self.function, self.views, self.axis, self.scope = function, parts.views, axis, {*scope}
        self.classes, self.experts = parts.classes, parts.experts
        self.layouts: dict[str, TensorSharding] = {}
        """The layouts of parameters that were found."""
        self.dims = {value.name: split_at(value, axis) for value in function.values if value.layout}
        """The dim of each value that is split over the axis; None: given as whole."""
        of_loss = function.ops if parts.update is None else needed(function.ops, function.outputs[:1])
        self.users, self._all_users = _users(of_loss), _users(function.ops)
        """Those of metrics beside a loss do not count: what needs a value whole for a metric has it gathered."""
        self._constants = {op.outputs[0] for op in function.ops if op.kind == "constant"}
        self._views: dict[str, list[tuple[Value, View]]] = {}
        """The views of each parameter, by its name."""
        for value, view in self.views.items():
            self._views.setdefault(view.weight.name, []).append((value, view))
        own = owners(function)
        self.kept = {value: own[value] for value in function.outputs if own[value] in parts.data}
        """What a step returns in the memory of its data, as a cache: it may be split, as it is in the next step."""
        self.outputs = {*function.outputs} - {*self.kept}
        self.fused: list[FusedProduct] = []
        """The products that are to be one for each part of their result."""
        self._held: set[str] = set()
        """The weights that are split at rest in another dim than their products need."""
        self._lasting: dict[tuple[str, int], bool] = {}
        for op in function.ops:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        relation = relation_of(op)
        product = product_of(op, self.views)
        activations = [value for value in op.inputs if product is None or value is not product.operand]
        split = self.letter(op, relation, activations)
        if product is not None and op in self.scope:
            self._choose(op, relation, product, split)
        split = split or self.letter(op, relation, op.inputs)
        if split is None:
            return
        for value, letters in zip(op.inputs, relation.inputs, strict=True):
            view = self.views.get(value)
            if view is None or product is not None or split not in letters or not self._open(view.weight):
                continue
            dim = view.dims[letters.index(split)]
            if dim is not None:
                self._give(view.weight, dim)  # what is added to a split value, as a bias
        for value, letters in zip(op.outputs, relation.outputs, strict=True):
            if split in letters:
                self.dims.setdefault(value.name, letters.index(split))
                self._lay_kept(value, letters.index(split))

    def _lay_kept(self, value: Value, dim: int) -> None:
        """Split an input of data in whose memory a value is returned as this value is, beside what splits it already."""
        kept = self.kept.get(value)
        if kept is not None and kept.name not in self.layouts and not dims_of(kept)[dim]:
            self._lay(kept, dim)

    def _open(self, value: Value) -> bool:
        return value.layout is None and value.name not in self.layouts

    def _choose(self, op: Op, of: Relation, product: Product, split: str | None) -> None:
        """Split the weight of a product, or note that it is to be one product for each part of its result."""
        weight, operand = product.weight, product.operand
        is_open = self._open(weight)
        letter = self._chosen(op, of, product, split) if is_open else None
        # Experts are split last: they are for ExpertParallel, which may follow.
        if letter is None and not (is_open and split is None and self._note_parts(op, product)):
            may_hold = (is_open or weight.name in self._held) and self._open(operand)
            if may_hold and self._hold(op, of, product, split):
                return
            if is_open and split is None:
                letter = self._first_lasting(op, of, product, experts=True)
        if letter is not None:
            self._give(weight, product.letters.index(letter))

    def _hold(self, op: Op, of: Relation, product: Product, split: str | None) -> bool:
        """Split a view in the dim that a product needs, and its weight at rest in another one, that passes the views.

        False if there is no such view.
        """
        operand, letters = product.operand, of.inputs[op.inputs.index(product.operand)]
        own = [
            letter
            for letter in product.lost
            if self.classes.of(operand, letters.index(letter)) not in self.experts
        ]
        wanted = split if split is not None else next((it for it in own if self._all_last(op, of, it)), None)
        rest = next(iter((*product.contracted, *product.free)), None)
        if wanted not in product.lost or rest is None:
            return False
        if product.weight.name not in self._held:
            self._held.add(product.weight.name)
            self._give(product.weight, product.letters.index(rest))
        self._lay(operand, letters.index(wanted))
        return True

    def _note_parts(self, op: Op, product: Product) -> bool:
        """Note a product whose result is nothing but cut into parts, if a split of each part lasts."""
        if not product.contracted or len(op.outputs) > 1:
            return False
        for letter in product.free:
            fused = fused_product(op, product.operand, letter, self._all_users, self.outputs, self.views)
            if fused is not None and all(self.lasts(value, dim) for value, dim in fused.parts):
                self.fused.append(fused)
                self.dims.update((value.name, dim) for value, dim in fused.parts)
                return True
        return False

    def _lay(self, value: Value, dim: int) -> None:
        axes = dims_of(value)
        axes[dim] = (self.axis,)
        self.layouts[value.name] = layout(axes)
        self.dims[value.name] = dim

    def _give(self, value: Value, dim: int) -> None:
        self._lay(value, dim)
        for each, view in self._views[value.name]:
            if dim in view.dims:
                self.dims[each.name] = view.dims.index(dim)

    def letter(self, op: Op, of: Relation, values: Collection[Value]) -> str | None:
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
        if of.indexed is not None and of.indexed in product.letters:
            return of.indexed
        return self._first_lasting(op, of, product, experts=False)

    def _first_lasting(self, op: Op, of: Relation, product: Product, *, experts: bool) -> str | None:
        """The first free letter, of experts or of others, of which a split lasts."""
        for letter in product.free:
            of_experts = self.classes.of(product.weight, product.letters.index(letter)) in self.experts
            if of_experts == experts and self._all_last(op, of, letter):
                return letter
        return None

    def _all_last(self, op: Op, of: Relation, letter: str) -> bool:
        """Whether an output of an op has this letter, and a split of it lasts in all that have."""
        having = [
            (value, letters.index(letter))
            for value, letters in zip(op.outputs, of.outputs, strict=True)
            if letter in letters
        ]
        return bool(having) and all(self.lasts(value, dim) for value, dim in having)

    def lasts(self, value: Value, dim: int) -> bool:
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
        if value in self.outputs:
            yield ()
        for op in self.users.get(value.name, ()):
            if op not in self.scope and self._sums(op, value, dim):
                yield ()  # the next product is to stay as it is
            elif self._sums(op, value, dim) and self._meets_split(op):
                yield ()  # the next product is to be split as what it is added to
            yield from followed(op, value, dim)

    def _sums(self, op: Op, value: Value, dim: int) -> bool:
        """Whether an op is a product that sums over this dim of a value, with a weight that is not split."""
        product = product_of(op, self.views)
        if product is None or self.dims.get(product.weight.name) is not None:
            return False
        letters = zip(op.inputs, relation_of(op).inputs, strict=True)
        return any(given is value and each[dim] in product.contracted for given, each in letters)

    def _meets_split(self, product: Op) -> bool:
        """Whether what a product makes is added to a value that is split, as that of an adapter to that of its weight.

        If the product made a pending sum, this would be reduced for the sake of the other value, which is as large.
        """
        left = [*product.outputs]
        while left:
            value = left.pop()
            for op in self.users.get(value.name, ()):
                places = [place for place, given in enumerate(op.inputs) if given is value]
                others = [given for given in op.inputs if given is not value]
                if op.operator.linear == "together" and any(
                    self.dims.get(other.name) is not None for other in others
                ):
                    return True
                if self._constants.issuperset(others) and op.operator.is_linear_in(places, len(op.inputs)):
                    left += op.outputs
        return False


def _users(ops: Iterable[Op]) -> dict[str, list[Op]]:
    """The ops that read each value, by its name."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        for value in dict.fromkeys(op.inputs):
            found.setdefault(value.name, []).append(op)
    return found


def followed(op: Op, value: Value, dim: int) -> Iterator[tuple[Value, int] | tuple[()]]:
    """The dims of what an op makes that are split if this dim of its input is; () where it needs the dim whole."""
    relation = relation_of(op)
    for given, letters in zip(op.inputs, relation.inputs, strict=True):
        letter = letters[dim] if given is value else ""
        if letter is None:
            yield ()
        for output, made in zip(op.outputs, relation.outputs, strict=True):
            if letter and letter in made:
                yield output, made.index(letter)
