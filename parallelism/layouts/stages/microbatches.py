"""The program of one microbatch, such that the outputs of all microbatches add up to those of the whole batch.

A batch is cut along one symbol.  In shapes the symbol then means the rows of the microbatch.  Where a program computes
with it, as a mean over the batch does, it is replaced by the rows of the whole batch.  So losses that are sums and
losses that are means both add up without weights, even for microbatches of different sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir import Expression, Function, Op, TensorType, Value, symbol
from parallelism.ir.core import Extent, names_in
from parallelism.ir.core.extents import product, quotient, specialized
from parallelism.ir.core.lines import line_of, on_line
from parallelism.ir.core.rules import Dim, Rule
from parallelism.layouts.localization.local_program import free_name

T = TypeVar("T")
OF_WHOLE_BATCHES = "find_plan(..., strategies='auto') and plan --auto lay out the whole batch"
"""What can be done with a program whose rows are not each alone."""


def microbatched(function: Function, batch: str = "B") -> Function:
    """The program of a microbatch of ``function``.

    ``batch`` is the symbol for the number of rows in the shapes of the inputs.  The result has two more symbols, for
    ``batch="B"``: ``B_whole``, the rows of the whole batch, and ``B_first``, the number of the microbatch's first row.
    With these, ``iota`` and random numbers have the values that they have in the whole batch.

    A value without rows that is added to a sum over the rows, as a norm of weights is to a loss, would be added once
    for each microbatch: each adds as much of it as it has of the rows.

    ``ValueError`` names the op if an output is not a sum over the rows.  Reasons are: an operator needs all rows at
    once (a softmax over the batch, a norm over it); it combines dims in which rows lie in different
    ways; a function of a sum over the batch is not linear.
    """
    if batch not in function.symbols:
        raise ValueError(
            f"@{function.name} has no symbol {batch} for the rows of a batch: its symbols are "
            f"{', '.join(sorted(function.symbols)) or 'none'}"
        )
    for name in (f"{batch}_whole", f"{batch}_first"):
        if name in function.symbols:
            raise ValueError(f"@{function.name} has a symbol {name} already, which the part of a batch needs")
    sums = _checked_sums(function, batch)
    names = {value.name for value in function.values}
    ops = list[Op]()
    zeros = {op.outputs[0] for op in function.ops if op.kind == "constant" and op["value"] == 0}
    for op in function.ops:
        inputs = op.inputs
        if _adds(op) and not sums.isdisjoint(inputs):
            for value in {*inputs} - sums - zeros:
                weighted = _weighted(value, batch, op.region, names)
                share = {value: weighted[-1].outputs[0]}
                inputs = tuple(share.get(each, each) for each in inputs)
                ops += weighted
        part = _of_rows(op, batch)
        ops.append(part if inputs == op.inputs else replace(part, inputs=inputs))
    return replace(function, ops=tuple(ops))


def _adds(op: Op) -> bool:
    return op.kind in ("add", "subtract")


def _weighted(value: Value, batch: str, region: str | None, names: set[str]) -> list[Op]:
    """The ops that multiply a value by the part of all rows that a microbatch has."""
    exact = TensorType(np.float64, ())
    own = TensorType(value.type.dtype, ())

    def new(name: str, type: TensorType) -> Value:
        return Value(free_name(f"{value.name}.{name}", names), type)

    def constant(made: Value, name: str) -> Op:
        attributes = (("dtype", exact.dtype), ("shape", ()), ("value", symbol(name)))
        return Op("constant", (), attributes, (made,), region)

    rows, whole, share = new("rows", exact), new("whole", exact), new("part", exact)
    narrow, made = new("share", own), new("weighted", value.type)
    return [
        constant(rows, batch),
        constant(whole, f"{batch}_whole"),
        Op("divide", (rows, whole), (), (share,), region),
        Op("convert", (share,), (("dtype", own.dtype),), (narrow,), region),
        Op("multiply", (value, narrow), (), (made,), region),
    ]


@lru_cache(maxsize=4096)
def batch_dim(type: TensorType, batch: str) -> int | None:
    """The dim whose extent is ``batch`` times something; None if no extent has this symbol.

    ``ValueError`` if several dims have it, or one has it in another way, as in ``batch + 1``.
    """
    dims = [d for d, extent in enumerate(type.shape) if batch in names_in(extent)]
    if not dims:
        return None
    each = quotient((type.shape[dims[0]],), (symbol(batch),))
    if len(dims) > 1 or each is None or batch in names_in(each):
        pairs = f", where each row meets all others, as in a contrastive loss: {OF_WHOLE_BATCHES}"
        raise ValueError(
            f"rows are counted by {batch} in one dim, or that times something, not in {type}"
            f"{pairs if len(dims) > 1 else ''}"
        )
    return dims[0]


def has_rows(value: Value, batch: str) -> bool:
    """Whether any of its extents depends on the rows, also in a way that `batch_dim` refuses."""
    return any(batch in names_in(extent) for extent in value.type.shape)


def _of_rows(op: Op, batch: str) -> Op:
    """The op with the rows of the whole batch wherever it computes with their number."""
    given = dict(op.attributes)
    if given.keys().isdisjoint(("starts", "value", "rows", "whole")):
        return op
    whole: dict[str, Extent] = {batch: symbol(f"{batch}_whole")}
    first: dict[str, Extent] = {batch: symbol(f"{batch}_first")}
    if "starts" in given:
        starts = list(given["starts"])
        for dim, extent in enumerate(op.outputs[0].type.shape):
            if batch in names_in(extent):
                starts[dim] += specialized(extent, first)
        given["starts"] = tuple(starts)
    for name in given.keys() & {"value", "rows", "whole"}:
        given[name] = _with(given[name], whole)
    return replace(op, attributes=tuple(given.items()))


def _with(value: Any, numbers: Mapping[str, Extent]) -> Any:
    if isinstance(value, tuple):
        return tuple(_with(part, numbers) for part in value)
    return specialized(value, numbers) if isinstance(value, Expression) else value


def _checked_sums(function: Function, batch: str) -> set[Value]:
    """The sums over the rows.  A value has rows, or is such a sum, or depends on none; the outputs must be sums."""
    sums, outside = set[Value](), dict[Value, Extent]()
    for value in function.inputs:
        _naming("input {}", value, partial(batch_dim, value.type, batch))
    for op in function.ops:
        if _naming("{}", op, partial(is_sum, op, batch, sums, outside)):
            sums.update(op.outputs)
    for value in function.outputs:
        if value not in sums:
            raise ValueError(
                f"@{function.name}: output {value} is not a sum over the rows of the batch {batch}"
                f"{on_line(line_of(function, value))}"
            )
    return sums


def _naming(what: str, part: Op | Value, check: Callable[[], T]) -> T:
    """The result of ``check``; an error of it names the part, as ``what`` says."""
    try:
        return check()
    except ValueError as error:
        line = part.line if isinstance(part, Op) else None
        raise ValueError(
            f"{what.format(part)}: it cannot be cut into microbatches: {error}{on_line(line)}"
        ) from None


class RowPlace(NamedTuple):
    """Where the rows are in the rule of an op."""

    letter: str
    outside: Extent
    """How many elements the letter has outside of the rows: T for tokens and rows in one dim, ``T * B``."""


def _row_places(op: Op, batch: str, outside: dict[Value, Extent]) -> set[RowPlace]:
    """Where the rows of the inputs and outputs of an op are.

    ``outside`` has for values the number of elements of the dim with the rows that are outside of them, if it is not 1;
    those of the outputs are added.
    """
    rule, places = op.rule, set[RowPlace]()
    for value, dims in zip(op.inputs, rule.inputs, strict=True):
        if (d := batch_dim(value.type, batch)) is not None:
            places.add(_row_place(dims[d], rule, outside.get(value, 1)))
    for value, dims in zip(op.outputs, rule.outputs, strict=True):
        if (d := batch_dim(value.type, batch)) is None:
            continue
        place = next((place for place in places if place.letter in dims[d]), RowPlace(dims[d][0], 1))
        before = dims[d][: dims[d].index(place.letter)]
        if (outer := product([place.outside, *(rule.extents[letter] for letter in before)])) != 1:
            outside[value] = outer
        places.add(place)
    return places


def _row_place(dim: Dim, rule: Rule, outside: Extent) -> RowPlace:
    """Where the rows are in a dim, with so many elements outside of them."""
    before: Extent = 1
    for letter in dim:
        if before == outside:
            return RowPlace(letter, 1)
        before = product([before, rule.extents[letter]])
    return RowPlace(dim[0], outside)


def is_sum(op: Op, batch: str, sums: set[Value], outside: dict[Value, Extent]) -> bool:
    """Whether the output of an op is a sum over rows; ``ValueError`` if the op mixes rows in another way.

    ``sums`` are the sums so far.  ``outside`` says where the rows of values are: see `_row_places`.
    """
    rule, places = op.rule, _row_places(op, batch, outside)
    letters = {place.letter for place in places}
    summed = [value in sums for value in op.inputs]
    if any(summed):
        if letters:
            raise ValueError(
                f"it combines a sum over all rows with single rows, as a batch norm in training does: {OF_WHOLE_BATCHES}"
            )
        # Integers may be rounded, and bools are not numbers.
        if any(not is_floating(value.type.dtype) for value in op.outputs) or not (
            _adds(op)
            or op.operator.is_linear_in([i for i, is_sum in enumerate(summed) if is_sum], len(summed))
        ):
            raise ValueError(
                "it is not linear in a sum over all rows, so microbatches do not add up to the batch: a loss may be such a "
                "sum, or that divided by sums of data alone; return any other function of sums, as a perplexity, behind it"
            )
        return True
    if len(places) > 1 or letters & rule.whole:
        raise ValueError(f"it does not compute each row alone: {OF_WHOLE_BATCHES}")
    reduced = not letters.isdisjoint(rule.reduced)
    if reduced and rule.op != "sum":
        raise ValueError(f"the {rule.op} over all rows is not a sum")
    return reduced
