"""Rows that are sorted by expert: in a program they are dealt to the experts.

Layers of experts in JAX and PyTorch repeat each token for its choices, sort these rows by expert, multiply the rows of
each expert by its weights, and bring them back to their tokens.  The products are `Groups` of rows; in a text that was
lowered for CPUs each expert has all rows, of which a mask leaves its own.  Where rows are sorted, no batch can be cut into
microbatches or split over devices.

So rows go through the slots of `parallelism.ir.operators.dispatch` here, from their tokens on.  A row stays the same row,
whether rows are sorted or back in the order of the tokens; so sorting costs nothing, and each op between is that of the
slots:

    what the program does                       what becomes of it
    x[token of each row]                        dispatch
    gates[order], gates of tokens times rows    dispatch_gates
    a product of groups, or of masked rows      the product of each expert's slots, ``ebcd,edf->ebcf``
    rows[inverse], out.at[order].set(rows)      nothing
    a sum over the choices of each token        combine
    out.at[token of each row].add(rows)         combine

A slot that holds no row has numbers without a meaning.  So where a program does anything else with such rows, as a sum
over them, it stays as it is, and an `ExpertsWarning` says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from parallelism.interop.errors import ExpertsWarning
from parallelism.interop.expert_rows.choices import (
    EXPERT,
    MASK,
    ORDER,
    TOKEN,
    Choice,
    Meanings,
    choices_of,
    is_multiplied,
    masks_rows,
)
from parallelism.interop.expert_rows.dealt_program import SLOTS, DealtProgram, Kept, Rows
from parallelism.interop.expert_rows.row_ops import MEANINGS, PICKING, each_row
from parallelism.ir.core import Function, Op, Value


def with_sorted_rows_dealt(function: Function) -> Function:
    """The function, in which rows that were sorted by expert are dealt; itself if there are none."""
    found = dict(choices_of(function))
    if not found:
        return function
    meant = _meant(function, found)
    while meant:
        at = DealtProgram(function, meant, frozenset().union(*found.values()))
        try:
            result = _rewritten(at)
            for choice in meant.keys() - at.dealings.keys():
                _warn(function, choice, found[choice], "no rows of tokens are looked up for their choices")
            return result
        except Kept as kept:
            del meant[kept.choice]
            _warn(function, kept.choice, found[kept.choice], str(kept))
    return function


def _meant(function: Function, found: Mapping[Choice, frozenset[Value]]) -> dict[Choice, dict[Value, str]]:
    """What the numbers mean that follow from each choice.  Choices are left out whose masks are not those of its rows."""
    meanings, meant = Meanings(function), dict[Choice, dict[Value, str]]()
    for choice, own in found.items():
        try:
            names = meanings.of(choice, own)
        except ValueError as error:
            _warn(function, choice, own, str(error))
            continue
        if not choice.is_of_experts:
            why = f"a number may be that of no expert: none is known to be from 0 to {choice.of - 1}"
            _warn(function, choice, own, why)
        elif masks_rows(function, choice, own) and MASK not in names.values():
            _warn(function, choice, own, "a mask leaves an expert other rows than those that chose it")
        else:
            meant[choice] = names
    return meant


def _warn(function: Function, choice: Choice, own: frozenset[Value], why: str) -> None:
    """Warns that rows of a choice stay sorted, if they are multiplied in groups."""
    if not is_multiplied(function, choice, own):
        return
    price = f"all {choice.of} experts compute all rows, and a plan counts that"
    order = "they are sorted over the whole batch, and find_plan needs strategies='auto'"
    warnings.warn(
        f"@{function.name}: rows are sorted by expert, and {why}; so {price if masks_rows(function, choice, own) else order}",
        ExpertsWarning,
        stacklevel=6,
    )


def _rewritten(at: DealtProgram) -> Function:
    """The new program.  `Kept` for rows that cannot be dealt."""
    for op in at.old.ops:
        _add(at, op)
    for value in at.old.outputs:
        if value in at.rows:
            raise Kept(at.rows[value].of.choice, at.makers[value])
    outputs = [at.now(value) for value in at.old.outputs]
    return at.builder.function(at.old.name, outputs, prune=True)


def _add(at: DealtProgram, op: Op) -> None:
    rows = [at.rows[value] for value in op.inputs if value in at.rows]
    names = {at.meant[value][1]: at.meant[value][0] for value in op.inputs if value in at.meant}
    picks_rows = op.kind in PICKING and not names.keys().isdisjoint((TOKEN, ORDER, EXPERT))
    if at.own.issuperset(op.outputs) or not (rows or picks_rows):
        inputs = tuple([at.now(value) for value in op.inputs])
        at.builder.ops.append(op if inputs == op.inputs else replace(op, inputs=inputs))
        return
    choice = rows[0].of.choice if rows else next(iter(names.values()))
    if any(each.of.choice != choice for each in rows):
        raise Kept(choice, op)
    with at.builder.region(op.region, op.line):
        found = MEANINGS.get(op.kind, each_row)(at, op, choice)
    if found is None or not _fits(found, op):
        raise Kept(choice, op)
    (output,) = op.outputs
    if isinstance(found, Rows):
        at.rows[output] = found
    else:
        at.values[output] = found


def _fits(found: Rows | Value, op: Op) -> bool:
    """Whether what was found has the extents and the dtype of the output of the op."""
    type = op.outputs[0].type
    if isinstance(found, Value):
        return found.type == type
    shape, own = type.shape, found.value.type
    others = [shape[d] for d in found.others(type.ndim)]
    rows = prod([shape[d] for d in found.dims])
    has_rows = found.in_groups or rows == found.of.choice.rows
    return has_rows and own.dtype == type.dtype and [*own.shape[SLOTS:]] == others
