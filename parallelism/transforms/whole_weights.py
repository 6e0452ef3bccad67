"""Which weights of products tensor parallelism leaves whole, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.lines import Line
from parallelism.ir.operators.contractions import product_shape
from parallelism.transforms.dims import relation_of
from parallelism.transforms.products import Product, Views, product_of
from parallelism.transforms.splits import Splits, followed

FEW = 4
"""If fewer than one weight in so many is split, nearly all stay whole."""
NAMED = 3
"""The most whole weights that are named."""


class Reading(NamedTuple):
    """A product that reads a weight."""

    op: Op
    weight: Value
    product: Product | None
    """What the weight is to the product; None if more than views are between both."""
    between: tuple[Op, ...]
    """The ops between the weight and the product, the first one first."""


def readings(function: Function, views: Views) -> Iterator[Reading]:
    """Every product of a function with each weight that it reads, also through views and other ops."""
    made = _made_of_parameters(function, views)
    for op in function.ops:
        product = product_of(op, views)
        if product is not None:
            yield Reading(op, product.weight, product, views[product.operand].ops)
            continue
        operands = [made[value] for value in op.inputs if made.get(value)]
        if product_shape(op) is None or len(operands) != 1:
            continue
        for weight, between in operands[0].items():
            if between:
                yield Reading(op, weight, None, between)


def _made_of_parameters(function: Function, views: Views) -> dict[Value, dict[Value, tuple[Op, ...]]]:
    """What is computed from weights alone, or from nothing: the weights of each value, with the ops between both."""
    found: dict[Value, dict[Value, tuple[Op, ...]]] = {}
    for value, view in views.items():
        if value is view.weight and value.type.ndim > 1:
            found[value] = {value: ()}
    for op in function.ops:
        if any(value not in found for value in op.inputs):
            continue
        weights: dict[Value, tuple[Op, ...]] = {}
        for value in op.inputs:
            weights |= {weight: (*between, op) for weight, between in found[value].items()}
        for value in op.outputs:
            if value.type.ndim > 1 or not weights:
                found[value] = weights
    return found


def told_whole(splits: Splits) -> str | None:
    """A sentence on the products that keep their weights whole, if these are nearly all products in scope."""
    whole, split = dict[str, Whole](), set[str]()
    for reading in readings(splits.function, splits.views):
        if reading.op not in splits.scope:
            continue
        if splits.dims.get(reading.weight.name) is not None:
            split.add(reading.weight.name)
        elif reading.weight.layout is None:
            whole.setdefault(reading.weight.name, Whole(why_whole(splits, reading), reading.op.line))
    if FEW * len(split) >= len(whole.keys() - split) + len(split):
        return None
    stay = {name: each for name, each in whole.items() if name not in split}
    return sentence(splits.function.name, [splits.axis], stay, len(split))


class Whole(NamedTuple):
    """Why a weight stays whole."""

    why: str
    line: Line | None
    """The line of the first product that reads it."""


def sentence(program: str, axes: Sequence[str], whole: Mapping[str, Whole], split: int) -> str:
    """A sentence on the weights that stay ``whole``, by their names with the reasons, beside so many that are split."""
    reasons: dict[str, list[str]] = {}
    for name, each in whole.items():
        reasons.setdefault(each.why, []).append(name)
    told = []
    for why, names in [*reasons.items()][:NAMED]:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        line = whole[names[0]].line
        place = f" ({line.place})" if line is not None else ""
        told.append(f"%{', %'.join(names[:NAMED])}{more}: {why}{place}")
    if rest := sum(map(len, [*reasons.values()][NAMED:])):
        told.append(f"{rest} more for other reasons")
    return (
        f"{len(whole)} of the {len(whole) + split} weights that products of @{program} read "
        f"stay{'s' * (len(whole) == 1)} whole on each device of {' and '.join(map(repr, axes))}; {'; '.join(told)}"
    )


def why_whole(splits: Splits, reading: Reading) -> str:
    """Why the weight of a product stays whole."""
    product, op = reading.product, reading.op
    if product is None:
        return _in_between(reading.between)
    activations = [value for value in op.inputs if value is not product.operand]
    relation = relation_of(op)
    taken = splits.letter(op, relation, activations)
    if taken in product.lost or (taken is None and product.lost and not product.free):
        return _in_between([_without(product, taken or product.lost[0], splits.views, op)])
    for value, letters in zip(op.outputs, relation.outputs, strict=True):
        for dim, letter in enumerate(letters):
            if taken is None and letter in product.free:
                return _end(splits, value, dim)
    return f"the {op.kind} reads it in no dim that may be split"


def _in_between(ops: Sequence[Op]) -> str:
    kinds = " and ".join(dict.fromkeys(each.kind for each in ops))
    moves = all(each.operator.linear == "moves" for each in ops)
    hint = "; store it as the product reads it" if moves else ""
    return f"a {kinds} is between it and its product{hint}"


def _without(product: Product, letter: str, views: Views, op: Op) -> Op:
    """The view, the nearest to the product, that does not pass on a split of this letter of the product's operand."""
    value = product.operand
    dim = relation_of(op).inputs[op.inputs.index(value)].index(letter)
    first, *_ = ops = views[value].ops
    for view in reversed(ops):
        relation = relation_of(view)
        through = relation.outputs[view.outputs.index(value)][dim]
        if through is None or through not in relation.inputs[0]:
            return view
        value = view.inputs[0]
        dim = relation.inputs[0].index(through)
    return first


def _end(splits: Splits, value: Value, dim: int) -> str:
    """Which op, of those behind a product, needs the dim of its result whole."""
    new, seen = [(value, dim)], {(value.name, dim)}
    while new:
        value, dim = new.pop(0)
        if value in splits.outputs:
            return "its result is returned"
        for op in splits.users.get(value.name, ()):
            for following in followed(op, value, dim):
                if not following:
                    return f"the {op.kind} behind it needs its result whole{_hint(splits, op, dim)}"
                place = (following[0].name, following[1])
                if place not in seen:
                    seen.add(place)
                    new.append(following)
    return "no product behind it takes up the split of its result"


def _hint(splits: Splits, op: Op, dim: int) -> str:
    """What to write if an op cuts a result of a fused weight into parts, and these could be split."""
    if op.kind not in ("split", "slice") or dim != op["axis"]:
        return ""
    if not all(splits.lasts(part, dim) for part in op.outputs):
        return ""
    return "; give each part a weight of its own, or a place in a stack"
