"""The order in which a device runs a program: with overlap, beside products, in chains.

What overlap says of the ops alone is in `parallelism.ir.passes.overlapping`.
"""

from collections import defaultdict
from dataclasses import replace

from parallelism.execution.device_program import runs_again
from parallelism.ir import Function
from parallelism.ir.core.regions import inside
from parallelism.ir.operators.contractions import PRODUCTS
from parallelism.ir.passes import chained
from parallelism.ir.passes.delayed_products import with_delays
from parallelism.ir.passes.fusion import ELEMENTWISE, EPILOGUES
from parallelism.ir.passes.gradients import UPDATE
from parallelism.ir.passes.overlapping import ASYNCHRONOUS, Order, overlapped
from parallelism.layouts.localization import Localized
from parallelism.transforms.overlap import Overlap


def order_on_all(localized: Localized, overlap: Overlap | None, *, beside: bool = False) -> Order | None:
    """The order for a program that was localized; None without ``overlap``, ``beside`` (`beside_products`) and rings."""
    if overlap is None and not beside and not has_ring(localized.function):
        return None
    first = localized.program(localized.classes[0].rank)
    return beside_products(first, products=beside) if overlap is None else overlapped(first, overlap)


def has_ring(function: Function) -> bool:
    """Whether blocks of keys and values may travel round a ring in a program."""
    return any(op.kind.startswith(("attention_block", "context_attention")) for op in function.ops)


def beside_products(program: Function, *, products: bool = True) -> Order:
    """The order in which the collectives of a backward run beside a product of the same layer.

    Without ``products`` only what travels round a ring runs beside something: the attention to the block before.

    The two products of a backward, for the gradients of what was multiplied, read one gradient.  What gathers an input
    of the second starts before the first; a sum of what the first makes starts before the second.  Every other
    collective is waited for at once.  So Megatron-LM does since 2021 (Korthikanti et al., *Reducing Activation
    Recomputation in Large Transformer Models*, 2022, arXiv:2205.05198, sections 4.2.2 and 6.2).
    """
    numbers = with_delays(program) if products else tuple(range(len(program.ops)))
    program = replace(program, ops=tuple(program.ops[number] for number in numbers))
    starts: dict[int, list[int]] = defaultdict(list)
    """By number of an op: the collectives that start before it."""
    layer = _Products(program, products=products)
    for number in range(len(program.ops)):
        start = layer.start(number)
        if start is not None:
            starts[start].append(number)
    started = {number for each in starts.values() for number in each}
    ordered: list[int] = []
    calls: list[tuple[int, ...]] = []
    for number in range(len(program.ops) + 1):
        for each in starts[number]:
            calls.append((len(ordered),))
            ordered.append(each)
        if number < len(program.ops) and number not in started:
            ordered.append(number)
    return Order(tuple(ordered), tuple(calls)).numbered(numbers)


class _Products:
    """The products of a program, by number of the op, and what they read."""

    def __init__(self, program: Function, *, products: bool = True) -> None:
        self.ops, self.products = program.ops, products
        self._rings = {op.region for op in self.ops if op.kind.startswith("attention_block")}
        """The regions in which blocks travel round a ring."""
        self._made = {value.name: number for number, op in enumerate(self.ops) for value in op.outputs}
        self._first_read: dict[str, int] = {}
        self._reads: dict[int, set[str]] = {}
        for number, op in enumerate(self.ops):
            for value in op.inputs:
                self._first_read.setdefault(value.name, number)
            if op.kind in PRODUCTS:
                self._reads[number] = {self._whole(value.name) for value in op.inputs}

    def start(self, number: int) -> int | None:
        """Before which op a collective starts, if it runs beside a product; None for other ops."""
        op = self.ops[number]
        if op.kind == "permute" and op.region in self._rings:
            return number
        if not self.products or op.kind not in ASYNCHRONOUS or op["group"] == 1 or inside(op, UPDATE):
            return None
        earliest = self._made.get(op.inputs[0].name, -1) + 1
        reader = self._first_read.get(op.outputs[0].name, len(self.ops))
        between = {each: read for each, read in self._reads.items() if earliest <= each < reader}
        if op.kind in ("all_reduce", "reduce_scatter"):
            given = set().union(*(self._reads[each] for each in self._behind(op.inputs[0].name)))
            return earliest if any(given & read for read in between.values()) else None
        if op.kind == "all_gather" and reader in self._reads:
            same = self._reads[reader]
            return max((each for each, read in between.items() if read & same), default=None)
        return None

    def _whole(self, name: str) -> str:
        """The value that a value is a view of."""
        while (number := self._made.get(name)) is not None and self.ops[number].operator.view:
            name = self.ops[number].inputs[0].name
        return name

    def _behind(self, name: str) -> set[int]:
        """The products that make a value, or the terms of it."""
        number = self._made.get(self._whole(name))
        if number is None:
            return set()
        if self.ops[number].kind == "add":
            return set().union(*(self._behind(value.name) for value in self.ops[number].inputs))
        return {number} & self._reads.keys()


def arranged(
    function: Function, order: Order | None, *, fused: bool | str = False
) -> tuple[Function, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The function in an order, with the calls of its collectives, and if ``fused`` its chains: what a `DeviceProgram`
    takes.  ``fused`` may be `ELEMENTWISE` or `EPILOGUES`."""
    if order is not None:
        function = order.of(function)
    calls = order.calls if order else ()
    chains = tuple[int, ...]()
    if fused:
        before = function.ops
        rows = fused not in (ELEMENTWISE, EPILOGUES)
        function, chains = chained(function, runs_again, rows=rows, biases=fused == EPILOGUES)
        places = {op.outputs: place for place, op in enumerate(function.ops)}
        calls = tuple(tuple(places[before[number].outputs] for number in call) for call in calls)
    return function, calls, chains
