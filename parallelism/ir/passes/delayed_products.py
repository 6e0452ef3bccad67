"""Products for the gradients of weights, behind the sum of the gradient of their input.

A gated block multiplies its input by two weights.  The gradient of the input is then a sum of two products, and between
these stand those for the gradients of the weights.  Nothing waits for them: behind the collective that sums the gradient
of the input over devices, they run beside it.  So Megatron-LM does, where both weights lie in one matrix
(``linear_fc1`` of megatron/core/transformer/mlp.py), whose gradients are two products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parallelism.ir.core import Function, Op
from parallelism.ir.core.regions import inside
from parallelism.ir.operators.contractions import PRODUCTS
from parallelism.ir.passes.gradients import UPDATE

_SUMS = ("all_reduce", "reduce_scatter")


def with_delays(program: Function) -> tuple[int, ...]:
    """The numbers of the ops of a program in an order in which these products stand behind the sum."""
    delayed = dict(_Delays(program).found())
    behind: dict[int, list[int]] = defaultdict(list)
    for number, total in sorted(delayed.items()):
        behind[total].append(number)
    ordered: list[int] = []
    for number in range(len(program.ops)):
        if number not in delayed:
            ordered += [number, *behind[number]]
    return tuple(ordered)


class _Delays:
    def __init__(self, program: Function) -> None:
        self.ops = program.ops
        self.made = {value.name: number for number, op in enumerate(self.ops) for value in op.outputs}

    def found(self) -> Iterator[tuple[int, int]]:
        """The numbers of ops that run later, each with that of the sum behind which they do."""
        for number, op in enumerate(self.ops):
            if op.kind not in _SUMS or op["group"] == 1 or inside(op, UPDATE):
                continue
            terms = self._terms(op)
            if len(terms) > 1:
                yield from ((each, number) for each in self._delayed(terms, number))

    def _terms(self, op: Op) -> set[int]:
        """The products whose results a collective sums; none if it sums anything else."""
        terms, new = set[int](), [op.inputs[0].name]
        while new:
            number = self.made.get(new.pop())
            if number is None:
                return set()
            maker = self.ops[number]
            if maker.kind in PRODUCTS:
                terms.add(number)
            elif maker.kind == "add" or maker.operator.view:
                new += [value.name for value in maker.inputs]
            else:
                return set()
        return terms

    def _delayed(self, terms: set[int], total: int) -> list[int]:
        """The other products of what the terms multiply, and what is made of their results alone, if the sum needs none."""
        given = {value.name for each in terms for value in self.ops[each].inputs}
        later: list[int] = []
        names: set[str] = set()
        for number in range(min(terms) + 1, total):
            op = self.ops[number]
            read = {value.name for value in op.inputs}
            is_product = op.kind in PRODUCTS and number not in terms and not given.isdisjoint(read)
            if is_product or not names.isdisjoint(read):
                later.append(number)
                names |= {value.name for value in op.outputs}
        is_needed = any(number in terms or self.ops[number].operator.received is not None for number in later)
        return (
            [] if is_needed or not names.isdisjoint(value.name for value in self.ops[total].inputs) else later
        )
