"""The choices of experts in a program, and what the numbers mean that follow from a choice alone.

A program that sorts the rows of its tokens by expert computes the order of the sorted rows, the token of each row, which
rows each expert has, and the way back.  There are many ways to write them, and a format such as StableHLO adds ops that
check bounds.  So what such numbers mean is not read from the ops: they are computed for some choices, and compared with
what they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Array, Ints
from parallelism.interop.expert_rows.known_numbers import Known, known_numbers
from parallelism.ir.core import Expression, Extent, Function, Op, TensorType, Value
from parallelism.ir.core.extents import divided, rounded_up
from parallelism.ir.passes import interpret
from parallelism.models.expert_feed_forward import Slots, slots_of
from parallelism.models.expert_layers import Experts

ORDER, TOKEN, INVERSE, EXPERT, MASK, ALWAYS = NAMES = "order", "token", "inverse", "expert", "mask", "always"
"""Of the rows of all choices, sorted by expert: the choice of each row, its token, the row of each choice, the expert of each
row; for each expert which rows are its own, of shape ``(experts, rows)``; and what is true of all rows."""
MOST_COMPUTED = 2**28
"""So many numbers are computed at most to see what they mean."""
MOST_SEARCHED = 200
"""So many values before a choice are searched for the sequences of its tokens."""
_SIZES = 2, 3, 5, 7, 11, 13, 17
"""What symbols are while numbers are computed; all of them times `_LARGER` as long as there are fewer than `_FEW` rows, or
not `_LARGER` times as many tokens as any number that they may be compared with."""
_LARGER, _FEW = 4, 64
_ENDLESS = 2**30
"""No program has so many rows."""
_EXACT = {"int8": 2**7, "uint8": 2**8, "int16": 2**15, "uint16": 2**16, "float16": 2**11, "bfloat16": 2**8}
"""Up to which numbers types count that are too narrow for all rows."""
_DRAWN = 16
"""So many choices of few rows are drawn, for which a permutation is often its own inverse; of many rows 3."""


class Choice(NamedTuple):
    """Each of some tokens chooses ``chosen`` experts ``of`` so many."""

    value: Value
    """Integers, of shape ``(tokens, chosen)``, with any dims of tokens; of one expert a token without the last dim."""
    chosen: int
    of: int
    is_of_experts: bool
    """Whether all numbers are those of experts, as far as the program tells."""

    @property
    def tokens(self) -> Extent:
        """The number of tokens."""
        shape = self.value.type.shape
        return prod(shape if self.chosen == 1 and shape[-1:] != (1,) else shape[:-1])

    @property
    def rows(self) -> Extent:
        """The number of rows: one for each choice of each token."""
        return self.tokens * self.chosen


def choices_of(function: Function) -> Iterator[tuple[Choice, frozenset[Value]]]:
    """The choices whose rows the function sorts, each with the values that follow from it alone."""
    sortings = [op for op in function.ops if _sorts_all(op)]
    if not sortings:
        return
    makers = {value: op for op in function.ops for value in op.outputs}
    known, seen = known_numbers(function), set[Value]()
    for op in sortings:
        if op.inputs[0] in seen:
            continue
        value = _before_sorting(op, makers, known)
        own = _following(function, value)
        choice = _choice(value, own, known[value])
        if choice is not None:
            seen.update(own)
            yield choice, own


def _sorts_all(op: Op) -> bool:
    """Whether an op sorts integers, all of them together."""
    if op.kind != "argsort" or op.inputs[0].type.dtype.kind not in "iu":
        return False
    shape = op.inputs[0].type.shape
    return bool(prod(shape) == shape[op["axis"]])


def _before_sorting(sorting: Op, makers: Mapping[Value, Op], known: Mapping[Value, Known]) -> Value:
    """What is sorted, before it was flattened, if these are different numbers for each token; else as it is sorted."""
    value = sorting.inputs[0]
    while (op := makers.get(value)) is not None and op.kind in ("reshape", "convert"):
        value = op.inputs[0]
        if value.type.ndim > 1 and value.type.shape[-1] != 1:
            break
    return value if _are_of_tokens(value, known[value]) else sorting.inputs[0]


def _are_of_tokens(value: Value, known: Known) -> bool:
    """Whether the last dim has the choices of a token, of which no two are equal."""
    return value.type.ndim > 1 and known.different == value.type.ndim - 1


def _choice(value: Value, own: Collection[Value], known: Known) -> Choice | None:
    """The choice, if these are the experts that tokens chose."""
    chosen = value.type.shape[-1] if _are_of_tokens(value, known) else 1
    found = [n for each in own if (n := _number_of_groups(each, value)) is not None]
    count: float = found[0] if found else known.most + 1
    if not isinstance(chosen, int) or not chosen < count < MOST_COMPUTED:
        return None
    return Choice(value, chosen, int(count), known.least >= 0 and known.most < count)


def _number_of_groups(x: Value, value: Value) -> int | None:
    """How many groups of the rows of a choice a value tells apart, by a mask for each; None if it is something else."""
    shape = [n for n in x.type.shape if n != 1]
    rows = prod(value.type.shape)
    if x.type.dtype != bool or len(shape) != 2 or rows not in shape:
        return None
    count = shape[1] if shape[0] == rows else shape[0]
    return count if isinstance(count, int) else None


def even_slots(chosen: int, of: int, length: Extent) -> Slots:
    """The slots of an expert for a sequence of so many tokens, with an even load."""
    # A dim of one slot could not be told from others when it grows.
    if isinstance(length, Expression):
        pairs = rounded_up(divided(chosen * length, 2 * of))
        return Slots(2 * pairs, 2 * pairs, drops=False)
    own = slots_of(Experts(count=of, chosen=chosen), length)
    return Slots(2, 2, drops=False) if own.rows == 1 and length != 1 else own


def is_multiplied(function: Function, choice: Choice, own: frozenset[Value]) -> bool:
    """Whether the rows of a choice are multiplied in groups: as in `Groups`, or by a mask of all rows for each expert."""
    return masks_rows(function, choice, own) or any(
        op.kind == "dispatch" and op.inputs[1] in own for op in function.ops
    )


def masks_rows(function: Function, choice: Choice, own: frozenset[Value]) -> bool:
    """Whether other ops read something that has a mask of all rows for each expert, of what follows from a choice."""
    return any(_mask_shape(each) == (choice.of, choice.rows) for each in _read_by_others(function, own))


def _read_by_others(function: Function, own: frozenset[Value]) -> list[Value]:
    """The values that ops read which make others."""
    read = [value for op in function.ops if not own.issuperset(op.outputs) for value in op.inputs]
    return [value for value in dict.fromkeys(read) if value in own]


def _mask_shape(x: Value) -> tuple[Extent, ...]:
    return tuple([n for n in x.type.shape if n != 1]) if x.type.dtype == bool else ()


def values_before(
    maker: Callable[[Value], Op | None], x: Value, kinds: Collection[str] | None = None
) -> Iterator[Value]:
    """The values that a value is made of, the nearest first; by these kinds of ops, if they are given."""
    seen, queue = {x}, [x]
    for each in queue:
        yield each
        op = maker(each)
        if op is None or len(queue) > MOST_SEARCHED or not (kinds is None or op.kind in kinds):
            continue
        new = [value for value in op.inputs if value not in seen]
        seen.update(new)
        queue += new


def sequences_of(maker: Callable[[Value], Op | None], x: Value, tokens: Extent) -> Extent:
    """The number of sequences that were flattened to these tokens, before ``x``; 1 if none are found."""
    for each in values_before(maker, x):
        shape = each.type.shape
        if len(shape) > 1 and shape[0] * shape[1] == tokens and 1 not in shape[:2]:
            return shape[0]
    return 1


def _following(function: Function, start: Value) -> frozenset[Value]:
    """The values that are computed from one value, and from constants."""
    fixed, found = set[Value](), {start}
    for op in function.ops:
        if fixed.issuperset(op.inputs):
            fixed.update(op.outputs)
        elif all(value in fixed or value in found for value in op.inputs):
            found.update(op.outputs)
    return frozenset(found)


class Meanings:
    """What values mean that follow from choices; equal layers are computed once."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._known: dict[Hashable, list[str | None]] = {}
        self._numbers: dict[Hashable, int] = {}
        """A number for each form of an op: its kind, its attributes, and the numbers of its inputs."""

    def of(self, choice: Choice, own: frozenset[Value]) -> dict[Value, str]:
        """What the values mean that other ops read, of those that follow from a choice: one of the names above.

        ``ValueError`` if there are too many numbers.
        """
        wanted = [value for value in _read_by_others(self.function, own) if value != choice.value]
        program = _program(self.function, wanted, choice.value)
        key = choice.chosen, choice.of, choice.value.type, self._form(program)
        if key not in self._known:
            self._known[key] = _computed(choice, program)
        return {value: name for value, name in zip(wanted, self._known[key], strict=True) if name is not None}

    def _form(self, program: Function) -> Hashable:
        """The same for programs that differ in the names of values alone, and in the order of their ops."""
        numbers = dict.fromkeys(program.inputs, -1)
        for op in program.ops:
            form = op.kind, repr(op.attributes), *[numbers[value] for value in op.inputs]
            for i, value in enumerate(op.outputs):
                numbers[value] = self._numbers.setdefault((i, form), len(self._numbers))
        return tuple([numbers[value] for value in program.outputs])


def _program(function: Function, wanted: Sequence[Value], given: Value) -> Function:
    """What computes the ``wanted`` values of a function from one that is given; what is written several times once."""
    needed, ops = {*wanted} - {given}, list[Op]()
    for op in reversed(function.ops):
        if needed.isdisjoint(op.outputs):
            continue
        ops.append(op)
        needed.update(value for value in op.inputs if value != given)
    first, same, kept = dict[Hashable, Op](), dict[Value, Value](), list[Op]()
    for op in reversed(ops):
        own = replace(op, inputs=tuple([same.get(value, value) for value in op.inputs]))
        equal = first.setdefault((op.kind, own.inputs, repr(op.attributes)), own)
        if equal is own:
            kept.append(own)
        same.update(zip(op.outputs, equal.outputs, strict=True))
    outputs = tuple([same.get(value, value) for value in wanted])
    return Function("numbers", (given,), tuple(kept), outputs)


def _computed(choice: Choice, program: Function) -> list[str | None]:
    """What the outputs of a program of a choice mean; None for other numbers."""
    sizes = dict(zip(sorted(program.symbols), _SIZES, strict=False))
    if len(sizes) < len(program.symbols):
        raise ValueError(f"its numbers depend on {len(program.symbols)} symbols")
    least = max(_FEW, int(_LARGER * _limit(program) * choice.chosen))
    if sizes and least > MOST_COMPUTED:
        raise ValueError("its numbers are compared with one that is too large to be looked at")
    program = _with_rows(program, sizes, least)
    count = sum(_size(value) for op in program.ops for value in op.outputs)
    if count > MOST_COMPUTED:
        raise ValueError(
            f"{count} numbers would tell which rows each expert has; a symbol for the batch helps"
        )
    names = [[*NAMES]] * len(program.outputs)
    for experts in _some_choices(program.inputs[0].type, choice.chosen, choice.of):
        found = interpret(program, [experts]).outputs
        told = [_names(x, experts.reshape(-1, choice.chosen), choice.of) for x in found]
        names = [_in_both(of, also) for of, also in zip(names, told, strict=True)]
    return [of[0] if of else None for of in names]


def _with_rows(program: Function, sizes: Mapping[str, int], rows: int) -> Function:
    """The program with sizes for its symbols that give it at least so many rows, if its rows depend on them."""
    own = program.specialize(**sizes) if sizes else program
    is_fixed = isinstance(prod(program.inputs[0].type.shape), int)
    if is_fixed or _size(own.inputs[0]) >= rows:
        return own
    larger = {name: _LARGER * size for name, size in sizes.items()}
    return _with_rows(program, larger, rows)


def _limit(program: Function) -> float:
    """The largest number that sizes may be compared with or run over; with fewer rows all programs look alike."""
    found = [1.0]
    for op in program.ops:
        if op.kind == "constant" and isinstance(op["value"], int | float | tuple):
            numbers = np.abs(np.asarray(op["value"], np.float64))
            found += [float(n) for n in numbers.reshape(-1) if n < _ENDLESS]
        found += [_EXACT[value.type.dtype.name] for value in op.outputs if value.type.dtype.name in _EXACT]
    return max(found)


def _in_both(names: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in names if name in others]


def _size(value: Value) -> int:
    return prod(map(int, value.type.shape))


def _some_choices(type: TensorType, chosen: int, count: int) -> Iterator[Ints]:
    """Choices of different experts by each token: even ones, all of the same experts, and uneven ones."""
    random = np.random.default_rng(0)
    shape = tuple(map(int, type.shape))
    tokens = prod(shape) // chosen
    steps = np.arange(chosen) * (count // chosen)
    same = np.tile(np.arange(count - chosen, count), (tokens, 1))
    for draw in range(_DRAWN if tokens < _FEW else 3):
        first = random.integers(count, size=(tokens, 1))
        experts = random.permuted((first + steps) % count, axis=1)
        if draw == 1:
            experts = same
        if draw == 2:
            experts = np.where(random.random((tokens, 1)) < 0.5, same[:, ::-1], experts)
        yield experts.reshape(shape).astype(type.dtype)


def _names(x: Array, experts: Ints, count: int) -> list[str]:
    """What an array may mean where the tokens have these ``experts``, of shape ``(tokens, chosen)``."""
    if x.dtype == bool and x.all():
        return [ALWAYS]
    plain = x.reshape([n for n in x.shape if n != 1])
    flat = experts.reshape(-1)
    order = np.argsort(flat, kind="stable")
    if plain.shape == (count, flat.size):
        is_own = np.arange(count)[:, None] == flat[order]
        return [MASK] if np.array_equal(plain, is_own) else []
    meant = {
        ORDER: order,
        TOKEN: order // experts.shape[1],
        INVERSE: np.argsort(order),
        EXPERT: flat[order],
    }
    return [name for name, numbers in meant.items() if np.array_equal(plain, numbers)]
