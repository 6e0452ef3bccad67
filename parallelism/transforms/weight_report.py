"""What a strategy does to the weights of products: how each is split, or why it stays whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from parallelism.display.quantities import in_columns
from parallelism.ir.core import Extent, Function
from parallelism.ir.core.lines import Line
from parallelism.ir.core.region_patterns import matching
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.propagation.relations import Relation
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import dims_of, relation_of
from parallelism.transforms.experts import ExpertParallel
from parallelism.transforms.parts import Parts
from parallelism.transforms.pipelines import Step
from parallelism.transforms.products import split_letter
from parallelism.transforms.splits import Splits
from parallelism.transforms.tensor import TensorParallel
from parallelism.transforms.whole_weights import Reading, Whole, readings, sentence, why_whole


@dataclass(frozen=True)
class ProductWeight:
    """A product, and the weight that it reads."""

    line: int
    """The line of the product in the text of the program."""
    region: str | None
    kind: str
    """The product's operator."""
    weight: str
    """The name of the weight."""
    layout: TensorSharding | None
    """The layout of the weight at rest."""
    split: str | None
    """How the axis of tensor or expert parallelism splits the weight for this product: columns, rows, table or experts.
    None if the product reads it whole."""
    reason: str | None
    """Why it is whole."""
    divides: tuple[Extent, ...] = ()
    """What the number of devices must divide; if it does not, the weight is gathered before the product."""

    code: Line | None = None
    """The line of the code that the product was recorded from."""
    is_moved: bool = False
    """Whether it lies in another way at rest, and each use moves it, by an all_to_all."""

    @property
    def how(self) -> str:
        """In words."""
        if self.split is None:
            return f"whole: {self.reason}"
        given = (
            f" (on devices whose number divides {' and '.join(map(str, self.divides))})"
            if self.divides
            else ""
        )
        return f"by {self.split}{given}{', moved from how it lies at rest' if self.is_moved else ''}"

    def __str__(self) -> str:
        return f"line {self.line}: %{self.weight} of the {self.kind}, {self.how}"


@dataclass(frozen=True)
class WeightReport:
    """Every product of a program with each weight that it reads, in the order of the program.

    ``str`` is a table of them.
    """

    program: str
    """The name of the program."""
    tensor: tuple[TensorParallel, ...]
    """The tensor parallelism of the strategy."""
    rows: tuple[ProductWeight, ...]
    asked: tuple[ProductWeight, ...]
    """The rows in the regions of the tensor parallelism."""

    @cached_property
    def whole(self) -> tuple[ProductWeight, ...]:
        """The products that read their weight whole."""
        return tuple(row for row in self.rows if row.split is None)

    def told(self) -> str | None:
        """A sentence on the weights that tensor parallelism was to split and that stay whole; None if there are none."""
        split = {row.weight for row in self.asked if row.split is not None}
        whole: dict[str, Whole] = {}
        for row in self.asked:
            if row.weight not in split:
                whole.setdefault(row.weight, Whole(row.reason or "", row.code))
        words = " ".join(map(str, self.tensor))
        axes = [*dict.fromkeys(each.axis for each in self.tensor)]
        return f"{words}: {sentence(self.program, axes, whole, len(split))}" if whole else None

    def __str__(self) -> str:
        if not self.rows:
            return f"no product of @{self.program} reads a weight"
        named = any(row.code and row.code.file for row in self.rows)
        cells = [("line", *["code"] * named, "region", "weight", "layout", "split")]
        for row in self.rows:
            layout = row.layout.short() if row.layout else "-"
            code = [_short(row.code)] * named
            cells.append((str(row.line), *code, row.region or "", f"%{row.weight}", layout, row.how))
        split = len({row.weight for row in self.rows if row.split is not None})
        count = len({row.weight for row in self.rows})
        first = f"{split} of the {count} weights that products of @{self.program} read are split"
        return "\n".join([first, *in_columns(cells, left=6)])


def _short(line: Line | None) -> str:
    """The name of a file and the number of a line."""
    return f"{Path(line.file).name}:{line.number}" if line and line.file else ""


def report_of(transforms: Sequence[object], program: Function | Step) -> WeightReport:
    """The report on a program that these transforms have made."""
    function = program.function if isinstance(program, Step) else program
    parts = _without_layouts_between(Parts.of(function))
    first = 3 if isinstance(program, Step) else 2
    lines = {op.outputs[0].name: line for line, op in enumerate(function.ops, first) if op.outputs}
    tensor = [each for each in transforms if isinstance(each, TensorParallel)]
    searched = [
        Splits(parts, each.axis, {*matching(parts.forward, each.regions or (), f"{each}")}) for each in tensor
    ]
    experts = [axis for each in transforms if isinstance(each, ExpertParallel) for axis in each.axes]
    rows, asked = list[ProductWeight](), list[ProductWeight]()
    for reading in readings(parts.forward, parts.views):
        inside = [splits for splits in searched if reading.op in splits.scope]
        line = lines[reading.op.outputs[0].name]
        row = _row(parts, reading, line, inside or searched, experts)
        if row.split is None and not inside:
            row = replace(row, reason=_outside(tensor))
        rows.append(row)
        asked += [row] if inside else []
    return WeightReport(function.name, tuple(tensor), tuple(rows), tuple(asked))


def _outside(tensor: Sequence[TensorParallel]) -> str:
    if not tensor:
        return "the strategy has no tensor parallelism"
    return f"it is outside of the regions of {' and '.join(map(str, tensor))}"


def _without_layouts_between(parts: Parts) -> Parts:
    """The parts with layouts of inputs alone, and with those that the program says itself, in ``reshard``."""
    made = [
        value.name
        for op in parts.forward.ops
        for value in op.outputs
        if value.layout is not None and op.kind != "reshard" and value not in parts.views
    ]
    return replace(parts, forward=laid_out(parts.forward, dict.fromkeys(made))) if made else parts


def _row(
    parts: Parts, reading: Reading, line: int, searched: Sequence[Splits], experts: Collection[str]
) -> ProductWeight:
    """The row of a product, of a weight that these look for."""
    op, weight = reading.op, reading.weight
    row = ProductWeight(line, op.region, op.kind, weight.name, weight.layout, None, None, code=op.line)
    tensor = {splits.axis for splits in searched}
    ways: dict[int, str] = {}
    """By dim of the weight that is split, how that splits the product."""
    is_split = False
    for dim, axes in enumerate(dims_of(weight)):
        by_experts = parts.classes.of(weight, dim) in parts.experts
        if tensor.isdisjoint(axes) and not (by_experts and not {*experts}.isdisjoint(axes)):
            continue
        is_split = True
        letter = reading.product.letters[dim] if reading.product else None
        if letter is not None:
            ways[dim] = "experts" if by_experts else _way(letter, relation_of(op))
    if reading.product is not None and reading.product.operand is not weight:
        letters = [split_letter(op, reading.product, axis) for axis in tensor]
        if reading.product.operand.layout is not None and (letter := next(filter(None, letters), None)):
            return replace(row, split=_way(letter, relation_of(op)), is_moved=True)
    if ways:
        divides = [extent for dim in ways for extent in _divisible(reading, dim)]
        return replace(row, split=" and ".join(ways.values()), divides=tuple(dict.fromkeys(divides)))
    if is_split:
        return replace(row, reason="it is split as another product needs it, and gathered for this one")
    return replace(row, reason=why_whole(searched[0], reading) if searched else None)


def _way(letter: str, of: Relation) -> str:
    if letter == of.indexed:
        return "rows of the table"
    return "columns" if any(letter in made for made in of.outputs) else "rows"


def _divisible(reading: Reading, dim: int) -> tuple[Extent, ...]:
    """The extents that the devices must divide so that a split of a weight's dim passes its views."""
    found = list[Extent]()
    for view, following in zip(reading.between, (*reading.between, reading.op)[1:], strict=True):
        relation = relation_of(view)
        letter = relation.inputs[0][dim]
        assert letter is not None, view  # the split passes all views
        if relation.inside[letter]:
            found.append(relation.extents[letter])
        made = next(number for number, value in enumerate(view.outputs) if value in following.inputs)
        dim = relation.outputs[made].index(letter)
    return tuple(dict.fromkeys(found))
