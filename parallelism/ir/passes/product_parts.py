"""Products whose result is cut into parts, as of a weight with queries, keys and values side by side: a product for each.

``x @ w`` that is split into halves is ``x @ w[:, :n]`` and ``x @ w[:, n:]``: the same numbers from the same operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from parallelism.ir.core import Builder, Function, Op, Value

THROUGH = ("add", "subtract", "multiply", "convert")
"""What may stand between a product and the op that cuts its result."""


class FusedProduct(NamedTuple):
    """A product of which nothing but parts are used."""

    product: Op
    operand: Value
    """The input whose dim is that of the parts."""
    between: tuple[Op, ...]
    """The ops between the product and those that cut its result, in order: they add, scale, or convert."""
    cuts: tuple[Op, ...]
    """The ``split`` and ``slice`` ops that cut the result."""

    @property
    def parts(self) -> Iterator[tuple[Value, int]]:
        """The parts, each with the dim along which it was cut."""
        for op in self.cuts:
            for value in op.outputs:
                yield value, op["axis"]


def fused_product(
    product: Op,
    operand: Value,
    letter: str,
    users: Mapping[str, Sequence[Op]],
    outputs: Collection[Value],
    given: Collection[Value],
) -> FusedProduct | None:
    """The product, if all that uses its result are cuts along the dim with this letter of the operand.

    ``users`` are the ops that read each value, by name; ``outputs`` those of the function.  Values ``given`` are there
    before the product; of others none but constants may be added or multiplied in between.
    """
    (result,) = product.outputs
    dims = product.rule.outputs[0]
    if (letter,) not in dims:
        return None
    between, cuts = list[Op](), list[Op]()
    waiting = [(result, dims.index((letter,)))]
    while waiting:
        value, dim = waiting.pop(0)
        if value in outputs:
            return None
        for op in users.get(value.name, ()):
            if op.kind in ("split", "slice") and op["axis"] == dim:
                cuts.append(op)
            elif op.kind in THROUGH and _is_along(op, value, dim, given):
                between.append(op)
                waiting.append((op.outputs[0], dim + op.outputs[0].type.ndim - value.type.ndim))
            else:
                return None
    return FusedProduct(product, operand, tuple(between), tuple(cuts)) if _are_parts(cuts, product) else None


def _is_along(op: Op, value: Value, dim: int, given: Collection[Value]) -> bool:
    """Whether an elementwise op takes the value once, as wide as its result, and else what is given, or one number."""
    others = [each for each in op.inputs if each is not value]
    wide = op.outputs[0].type
    return (
        len(others) == len(op.inputs) - 1
        and wide.shape[dim - value.type.ndim] == value.type.shape[dim]
        and all(other in given or not other.type.ndim for other in others)
    )


def _are_parts(cuts: Sequence[Op], product: Op) -> bool:
    """Whether the cuts take neighbouring elements, by numbers, and together no more than there are."""
    taken = 0
    for op in cuts:
        if op.kind == "slice" and op["step"] != 1:
            return False
        for begin, end in _ranges(op):
            if not isinstance(begin, int) or not isinstance(end, int):
                return False
            taken += end - begin
    extents = {op.inputs[0].type.shape[op["axis"]] for op in cuts}
    whole = extents.pop() if len(extents) == 1 else None
    return isinstance(whole, int) and 0 < taken <= whole and len(product.outputs) == 1


def _ranges(op: Op) -> list[tuple[Any, Any]]:
    """Where each part of a cut begins and ends."""
    if op.kind == "slice":
        return [(op["begin"], op["end"])]
    ends = [*accumulate(op["sizes"])]
    return [*zip([0, *ends[:-1]], ends, strict=True)]


def in_parts(function: Function, fused: Sequence[FusedProduct]) -> Function:
    """The function with a product for each part, of a slice of the operand, in place of these products."""
    return _Parting(function, fused).function()


class _Parting:
    def __init__(self, function: Function, fused: Sequence[FusedProduct]) -> None:
        self.before = function
        self.by_cut = {op: each for each in fused for op in each.cuts}
        self.gone = {op for each in fused for op in (each.product, *each.between)}
        self.builder = Builder()
        self.builder.copy(function)
        self.builder.ops.clear()  # the names stay taken
        self.new: dict[Value, Value] = {}

    def function(self) -> Function:
        for op in self.before.ops:
            if op in self.by_cut:
                for value, (begin, end) in zip(op.outputs, _ranges(op), strict=True):
                    self.new[value] = self._part(self.by_cut[op], op, begin, end)
            elif op not in self.gone:
                inputs = tuple(self.new.get(value, value) for value in op.inputs)
                self.builder.ops.append(op if inputs == op.inputs else op.with_values(inputs, op.outputs))
        outputs = [self.new.get(value, value) for value in self.before.outputs]
        return self.builder.function(self.before.name, outputs)

    def _part(self, fused: FusedProduct, cut: Op, begin: int, end: int) -> Value:
        """What a cut takes from ``begin`` to ``end``, computed by itself."""
        product, operand = fused.product, fused.operand
        dim_of_result = _dim_of(fused, cut)
        (letter,) = product.rule.outputs[0][dim_of_result]
        dim = product.rule.inputs[product.inputs.index(operand)].index((letter,))
        made = {operand: self._slice(product, operand, dim, begin, end)}
        # Ops behind the product are elementwise: the dim has as many dims behind it in all their operands.
        from_end = product.outputs[0].type.ndim - dim_of_result
        for op in (product, *_way(fused, cut)):
            others = op.inputs if op is not product else ()
            for value in others:
                if value not in made and value.type.ndim >= from_end and value.type.shape[-from_end] != 1:
                    made[value] = self._slice(op, value, value.type.ndim - from_end, begin, end)
            inputs = [made.get(value, self.new.get(value, value)) for value in op.inputs]
            with self.builder.region(op.region, op.line):
                (made[op.outputs[0]],) = self.builder.emit(op.kind, inputs, dict(op.attributes))
        return made[cut.inputs[0]]

    def _slice(self, op: Op, value: Value, dim: int, begin: int, end: int) -> Value:
        value = self.new.get(value, value)
        with self.builder.region(op.region, op.line):
            (part,) = self.builder.emit(
                "slice", [value], {"axis": dim, "begin": begin, "end": end, "step": 1}
            )
        return part


def _way(fused: FusedProduct, cut: Op) -> list[Op]:
    """The ops between the product and a cut of its result, in order."""
    way, value = list[Op](), cut.inputs[0]
    for op in reversed(fused.between):
        if value in op.outputs:
            way.append(op)
            value = next(each for each in op.inputs if _is_made(each, fused))
    return way[::-1]


def _is_made(value: Value, fused: FusedProduct) -> bool:
    return any(value in op.outputs for op in (fused.product, *fused.between))


def _dim_of(fused: FusedProduct, cut: Op) -> int:
    """The dim of the product's result along which a cut behind it cuts."""
    axis: int = cut["axis"]
    return axis + fused.product.outputs[0].type.ndim - cut.inputs[0].type.ndim
