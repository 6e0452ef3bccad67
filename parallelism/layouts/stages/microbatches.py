"""The program of a part of a batch: of some of its rows, so that what the parts make adds up to what the whole makes.

A batch is cut along one symbol.  In shapes the symbol stays, and stands for the rows of the part; where a program
computes with it, as a mean over the batch does, it is the rows of the whole.  So losses that are sums over the batch
and losses that are means of it add up alike, with no weights, however uneven the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallelism.ir import Expression, Function, Op, Rule, TensorType, Value, symbol
from parallelism.ir.core import Extent, names_in
from parallelism.ir.core.extents import quotient, specialized


def microbatched(function: Function, batch: str = "B") -> Function:
    """``function``, for some of the rows of its batch.

    ``batch`` is the symbol that stands for the rows of the batch in the shapes of the inputs that have any.  The result
    has two more: with ``B`` of them, ``B_whole`` are the rows of the whole batch, ``B_first`` the number of the first
    one in the part, so that counted numbers and random ones are those that they are in the whole.

    ``ValueError``, naming the op, where the outputs are no sums over the rows: an operator that sees all rows at once
    (a softmax over the batch, a norm with its mean), a dim made of the batch in which it is not the outermost,
    something not linear of a sum over the batch, a sum to which something is added that knows no rows (it would be
    added for each part).
    """
    if batch not in function.symbols:
        known = ", ".join(sorted(function.symbols)) or "none"
        raise ValueError(f"@{function.name} has no symbol {batch} for the rows of a batch: its symbols are {known}")
    for name in (f"{batch}_whole", f"{batch}_first"):
        if name in function.symbols:
            raise ValueError(f"@{function.name} has a symbol {name} already, which the part of a batch needs")
    _check_sums(function, batch)
    return replace(function, ops=tuple(_of_rows(op, batch) for op in function.ops))


def batch_dim(type: TensorType, batch: str) -> int | None:
    """The dim that has the rows, ``batch`` times something; None if none has.  ``ValueError`` if it is not so plain."""
    dims = [d for d, extent in enumerate(type.shape) if batch in names_in(extent)]
    if not dims:
        return None
    each = quotient((type.shape[dims[0]],), (symbol(batch),))
    if len(dims) > 1 or each is None or batch in names_in(each):
        raise ValueError(f"rows are counted by {batch} in one dim, or that times something, not in {type}")
    return dims[0]


def _of_rows(op: Op, batch: str) -> Op:
    """The op with the numbers of the whole batch where it computes with them."""
    given = dict(op.attributes)
    whole: dict[str, Extent] = {batch: symbol(f"{batch}_whole")}
    first: dict[str, Extent] = {batch: symbol(f"{batch}_first")}
    if "starts" in given:
        given["starts"] = tuple(
            start + (specialized(extent, first) if batch in names_in(extent) else 0)
            for start, extent in zip(given["starts"], given["shape"], strict=True)
        )
    for name in given.keys() & {"value", "rows", "whole"}:
        given[name] = _with(given[name], whole)
    return replace(op, attributes=tuple(given.items()))


def _with(value: Any, numbers: Mapping[str, Extent]) -> Any:
    if isinstance(value, tuple):
        return tuple(_with(part, numbers) for part in value)
    return specialized(value, numbers) if isinstance(value, Expression) else value


def _check_sums(function: Function, batch: str) -> None:
    """That the outputs are sums over the rows.  A value has rows, or is a sum over them, or knows none."""
    sums: set[Value] = set()
    for value in function.inputs:
        _told(f"input {value}", lambda value=value: batch_dim(value.type, batch))
    for op in function.ops:
        if _told(f"{op}", lambda op=op: _is_sum(op, batch, sums)):
            sums.update(op.outputs)
    for value in function.outputs:
        if value not in sums:
            raise ValueError(f"@{function.name}: output {value} is no sum over the rows of the batch {batch}")


def _told(what: str, found: Any) -> Any:
    try:
        return found()
    except ValueError as error:
        raise ValueError(f"{what}: it cannot be cut into microbatches: {error}") from None


def _is_sum(op: Op, batch: str, sums: set[Value]) -> bool:
    """Whether the op makes a sum over rows; ``ValueError`` if what it makes is neither that nor anything else plain."""
    rule = op.rule
    letters = {
        _outermost(rule, dims, d)
        for values, side in ((op.inputs, rule.inputs), (op.outputs, rule.outputs))
        for value, dims in zip(values, side, strict=True)
        if (d := batch_dim(value.type, batch)) is not None
    }
    summed = [value in sums for value in op.inputs]
    if any(summed):
        if letters:
            raise ValueError("it takes a sum over all rows together with single rows")
        # Whole numbers may be rounded, and bools are no numbers.
        if any(value.type.dtype.kind != "f" for value in op.outputs) or not op.operator.is_linear_in(
                [i for i, is_sum in enumerate(summed) if is_sum], len(summed)):
            raise ValueError("of a sum over all rows it makes something that is none")
        return True
    if not letters:
        return False
    if len(letters) > 1 or letters & rule.whole:
        raise ValueError("it does not treat the rows one by one")
    letter, = letters
    if letter in rule.reduced and rule.op != "sum":
        raise ValueError(f"the {rule.op} over all rows is no sum")
    return letter in rule.reduced


def _outermost(rule: Rule, dims: tuple[tuple[str, ...], ...], d: int) -> str:
    """The slowest letter of a dim."""
    return dims[d][0]
