"""What becomes of an op on rows that are sorted by expert, where the rows lie in slots: see `sorted_rows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from parallelism.interop.expert_rows.choices import ALWAYS, EXPERT, INVERSE, MASK, ORDER, TOKEN, Choice
from parallelism.interop.expert_rows.dealt_program import SLOTS, DealtProgram, Rows
from parallelism.interop.expert_rows.empty_slots import filled
from parallelism.ir.core import Extent, Op, Value
from parallelism.ir.core.rules import elementwise, letters
from parallelism.ir.core.table import meaning

# -- ops that sort and bring back --------------------------------------------------------------------------------------

Found = Rows | Value | None


def _picked(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """``x[places]``, of rows."""
    x, places = op.inputs
    name = at.name(places, choice)
    if op["axis"] != 0 or places.type.ndim != 1 or name is None:
        return None
    others = x.type.shape[1:]
    rows = at.rows.get(x)
    if rows is not None:
        if rows.dims != (0,) or rows.is_sorted != (name == INVERSE) or name not in (INVERSE, ORDER):
            return None
        return _in_order_of_tokens(at, rows, op) if name == INVERSE else replace(rows, is_sorted=True)
    if name == EXPERT and x.type.shape[0] == choice.of:
        weights = at.reshaped(at.now(x), (choice.of, 1, 1, *others))
        return Rows(at.dealing(choice), weights, (0,), is_sorted=True)
    repeated = _repeated(at, x, choice) if name == ORDER else None
    if name == TOKEN or (name == ORDER and choice.chosen == 1):
        repeated = at.now(x)
    if repeated is not None and repeated.type.shape[0] == choice.tokens:
        return Rows(at.dealing(choice), at.of_tokens(repeated, choice, others), (0,), is_sorted=True)
    if name == ORDER and prod(others) == 1 and x.type.shape[0] == choice.rows:
        gates = at.of_choices(at.now(x), choice)
        of = at.dealing(choice)
        return Rows(of, at.reshaped(gates, (*of.shape, *others)), (0,), is_sorted=True)
    return None


def _repeated(at: DealtProgram, x: Value, choice: Choice) -> Value | None:
    """The tokens ``(tokens, ...)`` of rows that repeat each for its choices, as ``repeat`` makes them; else None."""
    others = x.type.shape[1:]
    op = at.makers.get(x)
    if op is None or op.kind != "reshape":
        return None
    wide = at.makers.get(op.inputs[0])
    if wide is None or wide.kind != "broadcast_to":
        return None
    if wide.outputs[0].type.shape != (choice.tokens, choice.chosen, *others):
        return None
    before = wide.inputs[0]
    if before.type.shape != (choice.tokens, 1, *others):
        return None
    return at.reshaped(at.now(before), (choice.tokens, *others))


def _in_order_of_tokens(at: DealtProgram, rows: Rows, op: Op) -> Found:
    """Sorted rows that are brought back; with one choice a row is its token."""
    if rows.of.choice.chosen > 1:
        return replace(rows, is_sorted=False)
    return at.combined(rows, op.outputs[0].type.shape)


def _put(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """``x.at[places].add(rows)`` and ``x.at[order].set(rows)``."""
    x, places, updates = op.inputs
    name = at.name(places, choice)
    rows = at.rows.get(updates)
    if rows is None or x in at.rows or op["axis"] != 0 or rows.dims != (0,) or not rows.is_sorted:
        return None
    if name == TOKEN or (name == ORDER and choice.chosen == 1):
        if op["op"] != "sum" and not (choice.chosen == 1 and op["op"] == "set"):
            return None
        sums = at.combined(rows, op.outputs[0].type.shape)
        if sums is None or op["op"] == "set" or _is_zero(at, x):
            return sums
        return at.emit("add", at.now(x), sums)
    if x.type.shape[0] != choice.rows:
        return None
    if name == ORDER and (op["op"] == "set" or (op["op"] == "sum" and _is_zero(at, x))):
        return replace(rows, is_sorted=False)
    return None


def _summed(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """The sums of the rows at their places, among zeros."""
    updates, places = op.inputs
    rows, name = at.rows.get(updates), at.name(places, choice)
    if rows is None or op["axis"] != 0 or rows.dims != (0,) or not rows.is_sorted:
        return None
    if name == TOKEN or (name == ORDER and choice.chosen == 1):
        return at.combined(rows, op.outputs[0].type.shape)
    is_back = name == ORDER and op.outputs[0].type.shape[0] == choice.rows
    return replace(rows, is_sorted=False) if is_back else None


def _is_zero(at: DealtProgram, x: Value) -> bool:
    """Whether a value is known to be zero everywhere."""
    op = at.makers.get(x)
    while op is not None and op.kind in ("broadcast_to", "reshape", "convert"):
        op = at.makers.get(op.inputs[0])
    return op is not None and op.kind == "constant" and op["value"] == 0


# -- ops on each row ---------------------------------------------------------------------------------------------------


def each_row(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """An elementwise op, also one that leaves each expert its rows."""
    types = tuple(value.type for value in op.inputs)
    found = meaning(op.kind, types, op.attributes)
    if len(op.outputs) != 1 or found.rule != elementwise([type.shape for type in types]):
        return None
    names = [at.meant.get(value, (None, ""))[1] for value in op.inputs]
    if MASK in names:
        return _masked(at, op)
    if op.kind == "where" and names[0] == ALWAYS:
        return at.rows.get(op.inputs[1]) if types[1].shape == op.outputs[0].type.shape else None
    first = next(value for value in op.inputs if value in at.rows)
    own = at.rows[first]
    if op.kind == "convert":  # also of rows that are masked
        return replace(own, value=at.emit("convert", own.value, **dict(op.attributes)))
    ndim = op.outputs[0].type.ndim
    like = replace(own, dims=tuple([d + ndim - first.type.ndim for d in own.dims]))
    operands = [at.aligned(value, ndim, like) for value in op.inputs]
    if any(x is None for x in operands):
        return None
    given = [filled(at, op, i, x, own) for i, x in enumerate(operands) if x is not None]
    made = at.emit(op.kind, *given, **dict(op.attributes))
    return replace(like, value=made)


def _masked(at: DealtProgram, op: Op) -> Found:
    """``where(mask, rows, 0)`` and ``mask * rows``: each expert has its own rows."""
    mask, *rest = op.inputs
    if op.kind == "multiply" and mask in at.rows:
        mask, rest = op.inputs[1], [op.inputs[0]]
    is_where = op.kind == "where" and rest[0] in at.rows and _is_zero(at, rest[1])
    if not (is_where or op.kind == "multiply"):
        return None
    ndim, rows = op.outputs[0].type.ndim, at.rows[rest[0]]
    of_experts, of_rows = [d + ndim - mask.type.ndim for d, n in enumerate(mask.type.shape) if n != 1]
    own = tuple([d + ndim - rest[0].type.ndim for d in rows.dims])
    if own != (of_rows,) or not rows.is_sorted or rows.of_experts is not None or not rows.are_in_slots:
        return None
    shape = (*[1] * (ndim - rest[0].type.ndim), *rest[0].type.shape)
    if shape[of_experts] != 1:
        return None
    others = [n for d, n in enumerate(shape) if d not in (of_experts, of_rows)]
    value = at.reshaped(rows.value, (*rows.of.shape, *others))
    return replace(rows, value=value, dims=own, of_experts=of_experts)


def _one(at: DealtProgram, op: Op) -> Rows | None:
    """The rows of an op that has one operand."""
    rows = at.rows.get(op.inputs[0])
    return rows if len(op.inputs) == 1 and rows is not None and rows.of_experts is None else None


def _reshaped(at: DealtProgram, op: Op, choice: Choice) -> Found:
    rows, shape = _one(at, op), op.outputs[0].type.shape
    if rows is None or rows.dims != (*range(rows.dims[0], rows.dims[-1] + 1),):
        return None
    before = prod(op.inputs[0].type.shape[: rows.dims[0]])
    dims = _dims_of_rows(shape, before, rows)
    if dims is None:
        return None
    others = [n for d, n in enumerate(shape) if d not in dims]
    own = rows.value.type.shape[:SLOTS]
    return replace(rows, value=at.reshaped(rows.value, (*own, *others)), dims=dims)


def _dims_of_rows(shape: Sequence[Extent], before: Extent, rows: Rows) -> tuple[int, ...] | None:
    """The dims of rows in another shape, in which so many elements stand before them; None if there are none."""
    choice = rows.of.choice
    for first in range(len(shape)):
        if prod(shape[:first]) != before:
            continue
        for last in range(first, len(shape)):
            is_one = last == first
            is_split = not rows.is_sorted and shape[last] == choice.chosen and not is_one
            if prod(shape[first : last + 1]) == choice.rows and (is_one or is_split):
                return tuple(range(first, last + 1))
    return None


def _transposed(at: DealtProgram, op: Op, choice: Choice) -> Found:
    rows, order = _one(at, op), list(op["permutation"])
    if rows is None:
        return None
    others = rows.others(op.inputs[0].type.ndim)
    moved = [SLOTS + others.index(d) for d in order if d in others]
    dims = tuple([order.index(d) for d in rows.dims])
    if list(dims) != sorted(dims):  # the choices of a token no longer lie behind it
        return None
    value = at.emit("transpose", rows.value, permutation=(*range(SLOTS), *moved))
    return replace(rows, value=value, dims=dims)


def _broadcast(at: DealtProgram, op: Op, choice: Choice) -> Found:
    rows, shape = _one(at, op), op.outputs[0].type.shape
    if rows is None:
        return None
    more = len(shape) - op.inputs[0].type.ndim
    dims = tuple([d + more for d in rows.dims])
    if any(shape[d + more] != op.inputs[0].type.shape[d] for d in rows.dims):
        return None
    others = [n for d, n in enumerate(shape) if d not in dims]
    kept = rows.value.type.shape
    narrow = at.reshaped(rows.value, (*kept[:SLOTS], *[1] * (len(others) - len(kept) + SLOTS), *kept[SLOTS:]))
    return replace(rows, value=at.emit("broadcast_to", narrow, shape=(*kept[:SLOTS], *others)), dims=dims)


def _along(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """An op along another dim."""
    rows, ndim = at.rows.get(op.inputs[0]), op.inputs[0].type.ndim
    if rows is None or op["axis"] not in rows.others(ndim):
        return None
    given = [at.rows.get(value) for value in op.inputs]
    if any(each is None or replace(each, value=rows.value) != rows for each in given):
        return None
    if len({each.are_in_slots for each in given if each is not None}) > 1:
        return None
    attributes = {**dict(op.attributes), "axis": SLOTS + rows.others(ndim).index(op["axis"])}
    values = [each.value for each in given if each is not None]
    return replace(rows, value=at.emit(op.kind, *values, **attributes))


def _reduced(at: DealtProgram, op: Op, choice: Choice) -> Found:
    rows, axes = _one(at, op), [*op["axes"]]
    if rows is None:
        return None
    others = rows.others(op.inputs[0].type.ndim)
    if axes == [rows.dims[-1]] and len(rows.dims) > 1 and op.kind == "sum":
        are_first = rows.dims[:-1] == (*range(len(rows.dims) - 1),)
        return at.combined(rows, op.outputs[0].type.shape) if are_first else None
    if not {*axes} <= {*others}:
        return None
    own = tuple([SLOTS + others.index(d) for d in axes])
    value = at.emit(op.kind, rows.value, **{**dict(op.attributes), "axes": own})
    kept = [d for d in range(op.inputs[0].type.ndim) if op["keepdims"] or d not in axes]
    return replace(rows, value=value, dims=tuple(map(kept.index, rows.dims)))


# -- groups of rows ----------------------------------------------------------------------------------------------------


def _grouped(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """Sorted rows that are dealt to groups, which are those of the experts: they are in their slots."""
    rows = at.rows.get(op.inputs[0])
    if rows is None or rows.dims != (1,) or not rows.is_sorted or at.name(op.inputs[1], choice) != EXPERT:
        return None
    own = rows.value.type.shape  # the dim of one sequence is beside the rows
    value = at.reshaped(rows.value, (*own[:SLOTS], *own[SLOTS + 1 :]))
    return replace(rows, value=value, dims=(0, 1, 2), in_groups=True)


def _ungrouped(at: DealtProgram, op: Op, choice: Choice) -> Found:
    rows = at.rows.get(op.inputs[0])
    if rows is None or not rows.in_groups or at.name(op.inputs[1], choice) != EXPERT:
        return None
    own = rows.value.type.shape
    value = at.reshaped(rows.value, (*own[:SLOTS], 1, *own[SLOTS:]))
    return replace(rows, value=value, dims=(1,), in_groups=False)


def _product_in_groups(at: DealtProgram, op: Op, terms: Sequence[str]) -> Found:
    result = op["equation"].split("->")[1]
    given = [(term, at.rows.get(value)) for term, value in zip(terms, op.inputs, strict=True)]
    rows = next(rows for _, rows in given if rows is not None)
    in_slots = result[:SLOTS]
    for term, each in given:
        is_own = each is not None and each.in_groups and term.startswith(in_slots)
        is_weight = each is None and not set(in_slots[1:]) & set(term)
        if not (is_own or is_weight):
            return None
    values = [
        at.now(value) if each is None else each.value
        for value, (_, each) in zip(op.inputs, given, strict=True)
    ]
    return replace(rows, value=at.emit(op.kind, *values, **dict(op.attributes)))


# -- products ----------------------------------------------------------------------------------------------------------


def _product(at: DealtProgram, op: Op, choice: Choice) -> Found:
    """A product of each row: with the weights of its expert, or with one for all; or the sum of a token's rows."""
    left, result = op["equation"].split("->")
    terms = left.split(",")
    first = next(i for i, value in enumerate(op.inputs) if value in at.rows)
    rows = at.rows[op.inputs[first]]
    if rows.in_groups:
        return _product_in_groups(at, op, terms)
    row = _of_dims(terms[first], rows.dims)
    if len(row) > 1 and set(result) & set(row) == set(row[:-1]):
        return _combined_product(at, op, terms, row)
    if len(row) > 1 or row not in result:
        return None
    return _product_of_rows(at, op, terms, row)


def _of_dims(term: str, dims: Sequence[int]) -> str:
    """The letters of some dims."""
    return "".join([term[d] for d in dims])


def _product_of_rows(at: DealtProgram, op: Op, terms: Sequence[str], row: str) -> Found:
    """``row`` is the letter of the rows."""
    result = op["equation"].split("->")[1]
    new = letters(SLOTS, "".join(terms))
    of_experts = _letters_of_experts(at, op, terms)
    in_slots = (of_experts or new)[0] + new[1:]
    if in_slots[0] in result or len({*of_experts}) > 1:
        return None
    operands, written = list[Value](), list[str]()
    for term, value in zip(terms, op.inputs, strict=True):
        found = _operand(at, value, term, row, in_slots)
        if found is None:
            return None
        operands.append(found[0])
        written.append(found[1])
    if not any(in_slots in term for term in written):
        return None
    equation = f"{','.join(written)}->{in_slots}{result.replace(row, '')}"
    value = at.emit(op.kind, *operands, **{**dict(op.attributes), "equation": equation})
    given = [at.rows[each] for each in op.inputs if each in at.rows]
    if any(rows.is_sorted != given[0].is_sorted for rows in given):
        return None
    return Rows(given[0].of, value, (result.index(row),), given[0].is_sorted)


def _letters_of_experts(at: DealtProgram, op: Op, terms: Sequence[str]) -> str:
    """The letters of the experts of rows that are masked."""
    found = ""
    for term, value in zip(terms, op.inputs, strict=True):
        rows = at.rows.get(value)
        if rows is not None and rows.of_experts is not None:
            found += term[rows.of_experts]
    return found


def _operand(at: DealtProgram, x: Value, term: str, row: str, in_slots: str) -> tuple[Value, str] | None:
    """An operand of a product of rows, and its letters; None if it does not fit."""
    rows = at.rows.get(x)
    if rows is None:
        return None if row in term else (at.now(x), term)
    others = _of_dims(term, rows.others(len(term)))
    if _of_dims(term, rows.dims) != row or row in others or in_slots[0] in others:
        return None
    value = rows.value
    if value.type.shape[1:SLOTS] == (1, 1) != rows.of.shape[1:]:  # the weights of the row's expert
        return at.reshaped(value, (value.type.shape[0], *value.type.shape[SLOTS:])), in_slots[0] + others
    return value, in_slots + others


def _combined_product(at: DealtProgram, op: Op, terms: Sequence[str], row: str) -> Found:
    """For each token the sum of its rows, times their gates."""
    result = op["equation"].split("->")[1]
    if len(terms) != 2 or all(value in at.rows for value in op.inputs):
        return None
    of_rows = 0 if op.inputs[0] in at.rows else 1
    rows, term = at.rows[op.inputs[of_rows]], terms[of_rows]
    gates, of_gates = op.inputs[1 - of_rows], terms[1 - of_rows]
    if of_gates != row or result != row[:-1] + _of_dims(term, rows.others(len(term))):
        return None
    own = letters(rows.value.type.ndim)
    attributes = {**dict(op.attributes), "equation": f"{own},{own[:SLOTS]}->{own}"}
    value = at.emit(op.kind, rows.value, at.of_choices(at.now(gates), rows.of.choice), **attributes)
    return at.combined(replace(rows, value=value), op.outputs[0].type.shape)


PICKING = ("take", "take_along", "scatter", "take_gradient")
"""Ops that read places of rows."""
MEANINGS: dict[str, Callable[[DealtProgram, Op, Choice], Found]] = {
    "take": _picked,
    "take_along": _picked,
    "scatter": _put,
    "take_gradient": _summed,
    "reshape": _reshaped,
    "transpose": _transposed,
    "broadcast_to": _broadcast,
    "slice": _along,
    "concatenate": _along,
    "flip": _along,
    "softmax": _along,
    "cumsum": _along,
    "sum": _reduced,
    "max": _reduced,
    "min": _reduced,
    "einsum": _product,
    "dispatch": _grouped,
    "combine": _ungrouped,
}
"""What becomes of an op that reads rows, or places of them, by its kind; of others see `each_row`."""
