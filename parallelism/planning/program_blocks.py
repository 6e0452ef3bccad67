"""The blocks of a program: parts that compute alike, one after another, each with its own weights.

A program of n blocks follows from one with any other number of them, at least two.  So plans of a program whose blocks
are alike are put together from pieces, as those of a Transformer that is described by its figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parallelism.ir import Function, Value
from parallelism.ir.core import Op
from parallelism.ir.passes import tables, unstacked, with_tables_once
from parallelism.ir.passes.frozen import frozen_inputs, with_frozen, without_frozen
from parallelism.planning.block_weights import BLOCK, BlockWeights, key_of, reading, results
from parallelism.training.layer_blocks import MOST_OTHERS, LayerBlocks
from parallelism.transforms.parts import first_argument

CONSTANT = "constant"
LEAST_OPS, MOST_OPS = 4, 20_000
"""Of a block that is found so, and of a program in which blocks are looked for."""
MOST = 0.75
"""The share of the ops that blocks have at least, where a program has regions that are no blocks."""
LEAST = 0.5
"""The share of the ops that blocks have at least, where its layers are blocks."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A program whose regions ``prefix.0``, ``prefix.1``, ... are alike, but some first ones, or alike in groups."""

    function: Function
    layer_blocks: LayerBlocks
    """Which of these regions, its layers, are a block."""
    blocks: tuple[tuple[Op, ...], ...]
    """The blocks that are alike."""
    before: tuple[Op, ...]
    after: tuple[Op, ...]
    weights: BlockWeights

    @classmethod
    def of(cls, function: Function, prefix: str, count: int) -> Blocks | None:
        """The blocks of a function that has ``count`` layers.

        None if no two blocks are alike, or if they do more than to pass values to the next one.
        """
        number = {op: _number(op, prefix) for op in function.ops}
        if count < 2 or {*number.values()} - {None} != {*range(count)}:
            return None
        layers = _grouped(function, number, range(count))
        layer_blocks = LayerBlocks.of(_kinds(function, layers))._replace(region=prefix)
        first, last = layer_blocks.first, layer_blocks.count(count)
        if first > MOST_OTHERS or last - first < 2:
            return None
        block_of = {
            op: None if layer is None else layer_blocks.block_of(layer) for op, layer in number.items()
        }
        blocks = _grouped(function, block_of, range(first, last))
        before = {op for layer in layers[: layer_blocks.before] for op in layer}
        ends = _before_and_after(function, blocks, before)
        weights = BlockWeights.of(function, blocks, layer_blocks)
        if ends is None or weights is None:
            return None
        found = cls(function, layer_blocks, blocks, *ends, weights)
        if found._reads_later_weights or not found._have_gradients:
            return None
        return found if found._are_alike() else None

    @property
    def share(self) -> float:
        """The share of the ops that the blocks have which are alike."""
        return sum(map(len, self.blocks)) / len(self.function.ops)

    def _are_alike(self) -> bool:
        """Whether every block passes on what the second one does, and reads of the block before it what that one does."""
        second, weights = self.blocks[1], self.weights.by_block
        for number in range(2, len(self.blocks)):
            block = self.blocks[number]
            there = dict(zip(results(second), results(block), strict=True))
            there.update(zip(results(self.blocks[0]), results(self.blocks[number - 1]), strict=True))
            there.update(zip(weights[1], weights[number], strict=True))
            for own, op in zip(second, block, strict=True):
                if reading(own, there).inputs != op.inputs:
                    return False
        return True

    @property
    def reads_outside(self) -> bool:
        """Whether a weight of the first block is read outside of it, too: by other blocks, or outside of the blocks."""
        of_first = set(self.function.inputs).intersection(_inputs_of(self.blocks[0]))
        of_others = set(_inputs_of(self.blocks[1]))
        if not of_first.intersection(first_argument(self.function)).isdisjoint(of_others):
            return True
        own = of_first.difference(of_others)
        return not own.isdisjoint(_inputs_of([*self.before, *self.after]))

    @property
    def _reads_later_weights(self) -> bool:
        """Whether a weight of another block than the first is read outside of the blocks: fewer blocks may lack it."""
        later = {value for weights in self.weights.by_block[1:] for value in weights}
        return not later.isdisjoint(_inputs_of([*self.before, *self.after]))

    @property
    def _have_gradients(self) -> bool:
        """Whether a backward goes through the blocks: it does not if they are frozen, and so is all that is before them."""
        trained = {*first_argument(self.function)}
        return not trained.isdisjoint(_inputs_of([*self.before, *self.blocks[0]]))

    def of_blocks(self, count: int) -> Function:
        """The program with so many blocks, the first ones that are like no others among them, and at least one more.

        The first number in the name of a weight is that of its layer, and inputs of no layer have no number in their names.
        """
        others, weights = self.weights.others, self.weights.of_blocks(count - self.layer_blocks.first)
        of_first = others | weights[0]
        ops = [reading(op, of_first) for op in (*self.before, *self.blocks[0])]
        made = results(self.blocks[0])
        for number in range(1, len(weights)):
            values = others | weights[number]
            values.update(zip(results(self.blocks[0]), made, strict=True))
            for op in self.blocks[1]:
                outputs = tuple([replace(value, name=f"{value.name}.{number}") for value in op.outputs])
                values.update(zip(op.outputs, outputs, strict=True))
                ops.append(replace(reading(op, values), outputs=outputs, region=self._region(op, number)))
            made = [values[value] for value in results(self.blocks[1])]
        ends = of_first | dict(zip(results(self.blocks[-1]), made, strict=True))
        ops += [reading(op, ends) for op in self.after]
        frozen = self._frozen(weights)
        return replace(
            self.function,
            inputs=tuple(self._inputs(weights)),
            ops=tuple(ops),
            outputs=tuple([ends.get(value, value) for value in self.function.outputs]),
            attributes=with_frozen(without_frozen(self.function.attributes), frozen),
        )

    def _region(self, op: Op, number: int) -> str:
        """The region, in another block, of an op of the second one."""
        prefix, region = self.layer_blocks.region, op.region or ""
        layer = _number(op, prefix)
        assert layer is not None
        inside = region.removeprefix(f"{prefix}.{layer}")
        return f"{prefix}.{layer + (number - 1) * self.layer_blocks.each}{inside}"

    def _frozen(self, weights: Sequence[Mapping[Value, Value]]) -> list[str]:
        """The names of the frozen inputs of a program with other blocks."""
        found = list[str]()
        for value in frozen_inputs(self.function, self.function.attributes):
            for values in (self.weights.others, *weights):
                if value in values:
                    found.append(values[value].name)
        return found

    def _inputs(self, weights: Sequence[Mapping[Value, Value]]) -> Iterator[Value]:
        """The inputs: those of the blocks stand where the ones of the second block stood."""
        later = {value for own in self.weights.by_block[1:] for value in own}
        of_first = self.weights.others | dict(weights[0])
        told = False
        for value in self.function.inputs:
            if value not in later:
                yield of_first[value]
            elif not told:
                told = True
                for own in weights[1:]:
                    yield from own.values()


def _grouped(
    function: Function, number: Mapping[Op, int | None], numbers: Iterable[int]
) -> tuple[tuple[Op, ...], ...]:
    """The ops with each of these numbers, in order."""
    found: dict[int | None, list[Op]] = {each: [] for each in numbers}
    for op in function.ops:
        if number[op] in found:
            found[number[op]].append(op)
    return tuple(map(tuple, found.values()))


def _kinds(function: Function, layers: Sequence[Sequence[Op]]) -> list[Any]:
    """What layers compute: equal for those that may be alike.

    Layers with windows, and those without, read different masks, which were made before them.
    """
    readers = Counter(value for layer in layers for value in {*_inputs_of(layer)})
    told: dict[Value, Any] = {value: None for value, count in readers.items() if count == 1}
    for layer in layers:
        told.update(dict.fromkeys(results(layer)))
    told.update(dict.fromkeys(function.inputs))
    told.update(dict.fromkeys(frozen_inputs(function, function.attributes), "frozen"))
    found = list[Any]()
    for layer in layers:
        read = [told.get(value, value) for value in _inputs_of(layer)]
        found.append((tuple(map(key_of, layer)), tuple(read)))
    return found


def _before_and_after(
    function: Function, blocks: Sequence[Sequence[Op]], first: Set[Op]
) -> tuple[tuple[Op, ...], tuple[Op, ...]] | None:
    """The ops before blocks, the ``first`` layers among them, and behind them; None if blocks do more than to pass values to
    the next one."""
    of_blocks = {op for block in blocks for op in block}
    inner, last = {*results(of_blocks)}, {*results(blocks[-1])}
    before, after, late = list[Op](), list[Op](), set[Value]()
    for op in function.ops:
        if op in of_blocks:
            continue
        if inner.isdisjoint(op.inputs) and late.isdisjoint(op.inputs):
            before.append(op)
        elif op in first:
            return None
        else:
            late.update(op.outputs)
            after.append(op)
    used = {*_inputs_of(after), *function.outputs}
    if used & inner - last or not late.isdisjoint(_inputs_of([*of_blocks])):
        return None
    return tuple(before), tuple(after)


def _number(op: Op, prefix: str) -> int | None:
    found = re.match(rf"{re.escape(prefix)}\.(\d+)(\.|$)", op.region or "")
    return int(found[1]) if found else None


def _inputs_of(ops: Sequence[Op]) -> list[Value]:
    return [value for op in ops for value in op.inputs]


def with_later_calls_outside(function: Function, prefix: str) -> Function:
    """The function, in which ops of a block that stand behind ops of a later block are in no block.

    A program has the regions of its modules, and a module inside of a block may be called again behind all blocks: the
    DiT of diffusers embeds the time once more with the first block's weights.  What is in no block has constants of its
    own, which a program from elsewhere may have made once, inside of a block.
    """
    latest, ops = -1, list[Op]()
    constants, copies = dict[Value, Op](), dict[Value, Value]()
    for op in function.ops:
        number = _number(op, prefix)
        if number is not None and number >= latest:
            latest = number
            if op.kind == CONSTANT:
                constants[op.outputs[0]] = op
            ops.append(op)
            continue
        inside = (op.region or "").removeprefix(f"{prefix}.{number}")
        region = op.region if number is None else f"{prefix}{inside}"
        for value in op.inputs:
            if value in constants and value not in copies:
                copies[value] = replace(value, name=f"{value.name}.again")
                ops.append(replace(constants[value], outputs=(copies[value],), region=region))
        own = tuple([copies.get(value, value) for value in op.inputs])
        ops.append(replace(op, inputs=own, region=region))
    return replace(function, ops=tuple(ops))


# -- blocks that have no regions ---------------------------------------------------------------------------------------


def with_regions(function: Function) -> Function:
    """The function, in which ops that repeat one after another are the regions ``block.0``, ``block.1``, ...

    It is the same function if it has regions, or if nothing repeats.  Weights of blocks have their number in their names,
    as ``p.layers.0.q``: so has a list of them in JAX.  Tables that blocks share are computed once.
    """
    return function if function.regions else _with_repeated(function)


def with_other_regions(function: Function) -> Function:
    """The function with the regions of `with_regions` in place of its own, if these have `MOST` of its ops.

    Modules say how a program is written: what is added behind a module is in none, and the parts of a block may lie in
    several lists, as norms in one and layers in another.  What repeats are the blocks, however it is written.
    """
    bare = replace(function, ops=tuple([replace(op, region=None) for op in function.ops]))
    found = _with_repeated(bare)
    inside = sum(op.region is not None for op in found.ops)
    return found if inside >= MOST * len(found.ops) else function


def _with_repeated(function: Function) -> Function:
    if len(function.ops) > MOST_OPS:
        return function
    function = with_tables_once(function)
    of_all = tables(function)
    ops = [op for op in function.ops if not of_all.issuperset(op.outputs)]
    found = _longest(_keys(ops, of_all))
    if found is None:
        return function
    start, period, count = found
    for offset in _offsets(ops, start, period, count):
        first = start + offset
        blocks = (len(ops) - first) // period
        number = {op: i // period for i, op in enumerate(ops[first : first + min(count, blocks) * period])}
        named = [replace(op, region=f"{BLOCK}.{number[op]}") if op in number else op for op in function.ops]
        made = replace(function, ops=tuple(named))
        if Blocks.of(made, BLOCK, len(set(number.values()))) is not None:
            return made
    return function


def _keys(ops: Sequence[Op], of_all: Collection[Value]) -> np.ndarray[Any, Any]:
    """A number for each op; equal ones compute alike, and read the same of the tables that are there for all.

    So layers that have a window by turns, whose masks differ, repeat in pairs.
    """
    numbers: dict[Any, int] = {}
    found = []
    for op in ops:
        read = tuple([value if value in of_all else None for value in op.inputs])
        found.append(numbers.setdefault((key_of(op), read), len(numbers)))
    return np.array(found, np.int64)


def _longest(keys: np.ndarray[Any, Any]) -> tuple[int, int, int] | None:
    """Where ops begin to repeat, the number of ops that do, and how often: what covers most ops, in the shortest parts."""
    best: tuple[int, int, int, int] | None = None
    for period in range(LEAST_OPS, len(keys) // 2 + 1):
        same = np.flatnonzero(np.concatenate([[True], keys[:-period] != keys[period:], [True]]))
        runs = np.diff(same) - 1
        run = int(runs.argmax())
        count = int(runs[run]) // period + 1
        if count > 1 and (best is None or count * period > best[0]):
            best = count * period, int(same[run]), period, count
    return None if best is None else best[1:]


def _offsets(ops: Sequence[Op], start: int, period: int, count: int) -> list[int]:
    """Where blocks may begin, in the order of the number of values that pass from one to the next, and then of place."""
    made = {value: i for i, op in enumerate(ops) for value in op.outputs}
    spare = len(ops) - start - period * count
    crossing = []
    for offset in range(max(1, min(period, spare + 1))):
        edge = start + offset + period
        used = {
            value for op in ops[edge:] for value in op.inputs if start + offset <= made.get(value, -1) < edge
        }
        crossing.append(len(used))
    return sorted(range(len(crossing)), key=lambda i: (crossing[i], i))[:8]


# -- the blocks of a search ----------------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"((?:(?!\d+\.)\w+\.)*(?!\d+\.)\w+)\.(\d+)")
"""A path whose last part is its first number: ``model.layers.3`` is part 3 of ``model.layers``."""


def found_blocks(function: Function) -> tuple[Function, str, int]:
    """The function, the region with most numbered parts, and their number: parts that are alike, or those of an outermost
    region.  They are alike in the function, or where modules that are called again behind all blocks are of none, or by
    what the ops compute, in whatever regions; or where stacks are an input for each of their rows (`unstacked`)."""
    named = with_regions(function)
    found = _alike_blocks(named)
    if found is None and (of_rows := unstacked(function)) is not function:
        found = _alike_blocks(with_regions(of_rows))
    if found is not None:
        return found
    outer = [(prefix, len(parts)) for prefix, parts in _numbered_parts(named).items() if "." not in prefix]
    return named, *max(outer, key=lambda item: item[1], default=("", 0))


def _alike_blocks(function: Function) -> tuple[Function, str, int] | None:
    """What `found_blocks` finds where blocks are alike, in a function that has its regions; else None."""
    count = _numbered_parts(function)
    for prefix, parts in sorted(count.items(), key=lambda item: -len(item[1])):
        if parts != {*range(len(parts))}:
            continue
        for made in (function, with_later_calls_outside(function, prefix)):
            found = Blocks.of(made, prefix, len(parts))
            if found is not None and found.share >= LEAST:
                return made, prefix, len(parts)
    if function.regions and (made := with_other_regions(function)) is not function:
        return made, BLOCK, count_of_parts(made, BLOCK)
    return None


def count_of_parts(function: Function, prefix: str) -> int:
    """The number of the numbered parts of a region."""
    return len(_numbered_parts(function).get(prefix, ()))


def _numbered_parts(function: Function) -> dict[str, set[int]]:
    """The numbers of the numbered parts of regions, by the paths of the regions."""
    found: dict[str, set[int]] = {}
    for path in function.regions:
        if match := _NUMBERED.fullmatch(path):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
