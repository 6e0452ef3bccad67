"""The blocks of a program: parts that compute alike, one after another, each with its own weights.

A program of n blocks follows from one with any other number of them, at least two.  So plans of a program whose blocks
are alike are put together from pieces, as those of a Transformer that is described by its figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.ir import Function, Value
from parallelism.ir.core import Op
from parallelism.ir.passes import tables, unstacked, with_tables_once
from parallelism.transforms.parts import first_argument

CONSTANT = "constant"
BLOCK = "block"
"""The region of blocks that are found by what they compute."""
LEAST_OPS, MOST_OPS = 4, 20_000
"""Of a block that is found so, and of a program in which blocks are looked for."""
MOST = 0.75
"""The share of the ops that blocks have at least, where a program has regions that are no blocks."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A program whose regions ``prefix.0``, ``prefix.1``, ... are alike."""

    function: Function
    prefix: str
    blocks: tuple[tuple[Op, ...], ...]
    before: tuple[Op, ...]
    after: tuple[Op, ...]

    @classmethod
    def of(cls, function: Function, prefix: str, count: int) -> Blocks | None:
        """The blocks of a function; None if they are not alike, or do more than to pass values to the next one."""
        number = {op: _number(op, prefix) for op in function.ops}
        blocks = []
        for i in range(count):
            blocks.append(tuple(op for op in function.ops if number[op] == i))
        if count < 2 or not all(blocks) or any(n is not None and n >= count for n in number.values()):
            return None
        inner = {value for block in blocks for op in block for value in op.outputs}
        last = {value for op in blocks[-1] for value in op.outputs}
        before, after, late = [], [], set[Value]()
        for op in function.ops:
            if number[op] is not None:
                continue
            if any(value in inner or value in late for value in op.inputs):
                late.update(op.outputs)
                after.append(op)
            else:
                before.append(op)
        used = [value for op in after for value in op.inputs] + list(function.outputs)
        if any(value in inner and value not in last for value in used):
            return None
        if any(value in late for block in blocks for op in block for value in op.inputs):
            return None
        found = cls(function, prefix, tuple(blocks), tuple(before), tuple(after))
        if not found._are_alike() or found._reads_later_weights:
            return None
        return found

    def _are_alike(self) -> bool:
        if _matched(self.blocks[0], self.blocks[1], self.function.inputs) is None:
            return False
        if any(self._weight_name(own, 1) != own.name for own in self._weights):
            return False  # the numbers in names of weights are not those of blocks
        for i in range(2, len(self.blocks)):
            values = self._values_of(i)
            if values is None:
                return False
            for own, op in zip(self.blocks[1], self.blocks[i], strict=True):
                if [values.get(value, value) for value in own.inputs] != [*op.inputs]:
                    return False
        return True

    def _values_of(self, number: int) -> dict[Value, Value] | None:
        """The values of a block that exists, by those that the second block has in their place."""
        if _matched(self.blocks[1], self.blocks[number], self.function.inputs) is None:
            return None
        pairs = [*zip(_results(self.blocks[1]), _results(self.blocks[number]), strict=True)]
        pairs += zip(_results(self.blocks[0]), _results(self.blocks[number - 1]), strict=True)
        named = {value.name: value for value in self.function.inputs}
        for own in self._weights:
            there = named.get(self._weight_name(own, number))
            if there is None or there.type != own.type:
                return None
            pairs.append((own, there))
        return dict(pairs)

    @cached_property
    def _weights(self) -> dict[Value, int]:
        """The inputs that the second block alone has, with the place of its number in their names."""
        found = _matched(self.blocks[0], self.blocks[1], self.function.inputs)
        assert found is not None
        return found

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
        later = {
            self._weight_name(own, number) for own in self._weights for number in range(1, len(self.blocks))
        }
        return any(value.name in later for value in _inputs_of([*self.before, *self.after]))

    def _weight_name(self, own: Value, number: int) -> str:
        parts = own.name.split(".")
        parts[self._weights[own]] = str(number)
        return ".".join(parts)

    def of_layers(self, layers: int) -> Function:
        """The program with so many blocks, at least one."""
        ops, inputs = [*self.before, *self.blocks[0]], dict[str, Value]()
        results = _results(self.blocks[0])
        for number in range(1, layers):
            values: dict[Value, Value] = dict(zip(_results(self.blocks[0]), results, strict=True))
            for own in self._weights:
                name = self._weight_name(own, number)
                values[own] = inputs[name] = replace(own, name=name)
            for op in self.blocks[1]:
                outputs = tuple([replace(value, name=f"{value.name}.{number}") for value in op.outputs])
                values.update(zip(op.outputs, outputs, strict=True))
                region = f"{self.prefix}.{number}{(op.region or '')[len(self.prefix) + 2 :]}"
                own_inputs = tuple([values.get(value, value) for value in op.inputs])
                ops.append(replace(op, inputs=own_inputs, outputs=outputs, region=region))
            results = [values[value] for value in _results(self.blocks[1])]
        ends = dict(zip(_results(self.blocks[-1]), results, strict=True))
        for op in self.after:
            ops.append(replace(op, inputs=tuple([ends.get(value, value) for value in op.inputs])))
        outputs = tuple([ends.get(value, value) for value in self.function.outputs])
        return replace(self.function, inputs=tuple(self._inputs(inputs)), ops=tuple(ops), outputs=outputs)

    def _inputs(self, made: Mapping[str, Value]) -> Iterator[Value]:
        """The inputs: those of the blocks stand where the ones of the second block stood."""
        dropped = {
            self._weight_name(own, number) for own in self._weights for number in range(1, len(self.blocks))
        }
        told = False
        for value in self.function.inputs:
            if value.name not in dropped:
                yield value
            elif not told:
                told = True
                yield from made.values()


def _number(op: Op, prefix: str) -> int | None:
    found = re.match(rf"{re.escape(prefix)}\.(\d+)(\.|$)", op.region or "")
    return int(found[1]) if found else None


def _inputs_of(ops: Sequence[Op]) -> list[Value]:
    return [value for op in ops for value in op.inputs]


def _results(ops: Sequence[Op]) -> list[Value]:
    return [value for op in ops for value in op.outputs]


def _matched(first: Sequence[Op], second: Sequence[Op], inputs: Sequence[Value]) -> dict[Value, int] | None:
    """The inputs of the function that the second block has in place of those of the first, with the place of the number
    in their names; None if the blocks do not compute alike."""
    if [_key(op) for op in first] != [_key(op) for op in second]:
        return None
    given, found = set(inputs), dict[Value, int]()
    own = dict(zip(_results(first), _results(second), strict=True))
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if x in own:
                if own[x] != y:
                    return None
            elif x != y and (x in given and y in given):
                place = _place_of_number(x.name, y.name)
                if place is None or x.type != y.type:
                    return None
                found[y] = place
            elif x.type != y.type:
                return None
    return found


def _key(op: Op) -> Any:
    return op.kind, op.attributes, tuple(value.type for value in op.outputs)


def _place_of_number(a: str, b: str) -> int | None:
    """Which part of two names of weights differs, if it is the first number in both.

    The pieces of a step find the block of a weight by this number (`parallelism.symbolic.stages.layer_in`).
    """
    a_parts, b_parts = a.split("."), b.split(".")
    place = _first_number(a_parts)
    if len(a_parts) != len(b_parts) or place is None or place != _first_number(b_parts):
        return None
    differing = [i for i, (x, y) in enumerate(zip(a_parts, b_parts, strict=True)) if x != y]
    return place if differing == [place] else None


def _first_number(parts: Sequence[str]) -> int | None:
    """The place of the first part that is a number."""
    return next((i for i, part in enumerate(parts) if part.isdecimal()), None)


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
    found = _longest(_keys(ops))
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


def _keys(ops: Sequence[Op]) -> np.ndarray[Any, Any]:
    """A number for each op; equal ones compute alike."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_key(op), len(numbers)) for op in ops], np.int64)


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
    count = _numbered_parts(named)
    outer = [(prefix, len(parts)) for prefix, parts in count.items() if "." not in prefix]
    return named, *max(outer, key=lambda item: item[1], default=("", 0))


def _alike_blocks(function: Function) -> tuple[Function, str, int] | None:
    """What `found_blocks` finds where blocks are alike, in a function that has its regions; else None."""
    count = _numbered_parts(function)
    for prefix, parts in sorted(count.items(), key=lambda item: -len(item[1])):
        if parts != {*range(len(parts))}:
            continue
        for made in (function, with_later_calls_outside(function, prefix)):
            if Blocks.of(made, prefix, len(parts)) is not None:
                return made, prefix, len(parts)
    if function.regions and (made := with_other_regions(function)) is not function:
        return made, BLOCK, len(_numbered_parts(made)[BLOCK])
    return None


def _numbered_parts(function: Function) -> dict[str, set[int]]:
    """The numbers of the numbered parts of regions, by the paths of the regions."""
    found: dict[str, set[int]] = {}
    for path in function.regions:
        if match := _NUMBERED.fullmatch(path):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
