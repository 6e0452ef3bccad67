"""`Sheet`: the events of the pieces of a step as one table of numbers.  `SymbolicSheet`: for any rows and devices.

The rows of a sheet are events and sizes of pieces (`parallelism.planning.pieces`).  In a row only numbers depend on the
rows of a microbatch and on the devices along the axes: flops, bytes and payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.execution.chains import DeclaredCost, declared_cost
from parallelism.execution.device_program import (
    ACTIVATIONS,
    DeviceProgram,
    Held,
    ProgramStep,
    StartStep,
    WaitStep,
    communicates,
)
from parallelism.ir import Expression, Op, TensorType, Value
from parallelism.ir.core import Attributes, Extent, meaning, specialized
from parallelism.ir.passes import freed_after
from parallelism.ir.passes.donation import owners
from parallelism.layouts import Devices
from parallelism.memoized import memoized

Floats = npt.NDArray[np.float64]
Exact = npt.NDArray[np.longdouble]

NUMBERS = 10
MEMORY, COMPUTE, COLLECTIVE, WAIT, MESSAGE, SIZE = "memory", "compute", "collective", "wait", "message", "size"
LEFT = "left"
"""Memory that an action frees at its end, that of all blocks together."""


class Kind(NamedTuple):
    """What a row is, without its numbers."""

    what: str
    name: str | None = None
    """Of an op, of a collective, or of a category of memory."""
    dtype: str | None = None
    axes: tuple[str, ...] = ()
    """Of a collective."""
    pairs: Any = ()
    others: tuple[str, ...] = ()
    """Of a compute event, the dtypes of its other bytes."""
    extents: int = 0
    """Of a compute event, the number of extents in its shape."""
    seconds: float | None = None
    later: int = 0
    """Of a collective, 1 if it is waited for later; of such a wait, for which: 1 for the last that started before it,
    2 for the one before."""


class Unpriceable(ValueError):
    """A step that cannot be put together from pieces."""


Row = tuple[Kind, Sequence[Extent]]


@dataclass(frozen=True)
class Sheet:
    """Rows in sections, each with up to `NUMBERS` numbers: bytes, flops, bytes of other dtypes, and a shape."""

    kinds: tuple[Kind, ...]
    sections: Mapping[Any, slice]
    numbers: Exact = field(repr=False)
    alike: npt.NDArray[np.int64] = field(repr=False)
    """By row, the first row that is equal to it for any rows of a microbatch and any devices."""

    def rows(self, section: Any) -> tuple[tuple[Kind, ...], Exact]:
        """The rows of a section."""
        return self.kinds[self.sections[section]], self.numbers[self.sections[section]]

    def size(self, section: Any, name: str) -> int:
        """The number of the row of a section that has this name; 0 if there is none."""
        rows = self.sections[section]
        return next((int(self.numbers[row, 0]) for row in range(rows.start, rows.stop)
                     if self.kinds[row].name == name), 0)


@dataclass(frozen=True)
class SymbolicSheet:
    """A sheet whose numbers are extents with symbols."""

    kinds: tuple[Kind, ...]
    sections: Mapping[Any, slice]
    formulas: Formulas
    index: npt.NDArray[np.int64] = field(repr=False)
    """By row, the numbers of its extents among the formulas."""

    @classmethod
    def of(cls, sections: Iterable[tuple[Any, Sequence[tuple[Kind, Sequence[Extent]]]]]) -> SymbolicSheet:
        """The sheet of rows by section."""
        places: dict[Any, slice] = {}
        kinds: list[Kind] = []
        number: dict[Extent, int] = {0: 0}
        index: list[list[int]] = []
        for section, rows in sections:
            rows = list(rows)
            places[section] = slice(len(kinds), len(kinds) + len(rows))
            kinds += [kind for kind, _ in rows]
            index += [[number.setdefault(extent, len(number)) for extent in given] + [0] * (NUMBERS - len(given))
                      for _, given in rows]
        return cls(tuple(kinds), places, Formulas(tuple(number)), np.array(index, np.int64).reshape(-1, NUMBERS))

    def at(self, numbers: Mapping[str, int]) -> Sheet:
        """The sheet with these numbers for its symbols."""
        return Sheet(self.kinds, self.sections, self.formulas.at(numbers)[self.index], self.alike)

    @cached_property
    def alike(self) -> npt.NDArray[np.int64]:
        """See `Sheet.alike`."""
        first: dict[Any, int] = {}
        return np.array([first.setdefault(row, place) for place, row in enumerate(
            zip(self.kinds, map(tuple, self.index.tolist()), strict=True))], np.int64)


class Formulas:
    """Extents with symbols, all of which are evaluated at once."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.extents = extents
        monomials: dict[Any, int] = {}
        terms: list[tuple[int, int, Any]] = []
        for place, extent in enumerate(extents):
            of = extent.terms if isinstance(extent, Expression) else (((), extent),)
            terms += [(place, monomials.setdefault(monomial, len(monomials)), factor) for monomial, factor in of]
        self.monomials = tuple(monomials)
        self.calls = {atom: Expression(((((atom, 1),), 1),)) for monomial in monomials for atom, _ in monomial
                      if not isinstance(atom, str)}
        self.factors = np.zeros((len(extents), len(monomials)), np.longdouble)
        for place, monomial, factor in terms:
            above, below = factor.as_integer_ratio()
            self.factors[place, monomial] = np.longdouble(above) / np.longdouble(below)

    def at(self, numbers: Mapping[str, int]) -> Exact:
        """The values of all extents."""
        known: dict[Any, Any] = {name: np.longdouble(number) for name, number in numbers.items()}
        known |= {call: np.longdouble(specialized(extent, numbers)) for call, extent in self.calls.items()}
        values = np.array([prod((known[atom] ** power for atom, power in monomial), start=np.longdouble(1))
                           for monomial in self.monomials], np.longdouble)
        found: Exact = np.rint(self.factors @ values)
        return found


# -- the rows of programs ----------------------------------------------------------------------------------------------


class SymbolicProgram(DeviceProgram):
    """A `DeviceProgram` that may have symbols, so it cannot run: its steps say what they cost.

    Ops of one kind on arrays of equal types cost the same, which is computed once.
    """

    def __post_init__(self) -> None:
        pass

    def _cost(self, op: Op) -> DeclaredCost | None:
        return None if communicates(op) or op.operator.view else _cost_of(op.kind, op.types, op.attributes)

    def _held(self, values: Sequence[Value]) -> Held:
        held: dict[str, Any] = {}
        for value in values:
            category = self._category.get(value.name, ACTIVATIONS)
            held[category] = held.get(category, 0) + nbytes_of_one(value.type)
        return tuple((category, nbytes) for category, nbytes in held.items() if nbytes)

    def rows_of(self, wanted: Sequence[bool], devices: Devices | None) -> Iterator[Row]:
        """The events of some of the ops, by their numbers: those of a program that has no others."""
        later = self._freed_early(wanted)
        for rows, ops in zip(self._rows(devices), self._numbers, strict=True):
            if wanted[ops[-1]]:
                yield from rows
                for op in ops:
                    yield from later.get(op, ())

    @memoized
    def _rows(self, devices: Devices | None) -> list[list[Row]]:
        """The events of each step."""
        return [list(program_rows([step], devices)) for step in self.steps]

    @cached_property
    def _numbers(self) -> list[range]:
        """The numbers of the ops of each step."""
        ends = list(accumulate(len(step.before) + 1 for step in self.steps if isinstance(step, ProgramStep)))
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def _freed_early(self, wanted: Sequence[bool]) -> dict[int, list[Row]]:
        """By the last op of those that are wanted, the memory of values that others use after it."""
        found: dict[int, list[Row]] = {}
        for value, users in self._shared:
            used = [op for op in users if wanted[op]]
            if used and not wanted[users[-1]]:
                found.setdefault(used[-1], []).extend(
                    (Kind(MEMORY, category), [-nbytes]) for category, nbytes in self._held([value]))
        return found

    @cached_property
    def _shared(self) -> list[tuple[Value, list[int]]]:
        """The values that are freed after an op, with the ops that use them, if there are several."""
        owner, users = owners(self.function), dict[Value, list[int]]()
        for number, op in enumerate(self.function.ops):
            for value in dict.fromkeys(owner[value] for value in (*op.inputs, *op.outputs)):
                users.setdefault(value, []).append(number)
        return [(value, users[value]) for freed in freed_after(self.function, self.given_up) for value in freed
                if len(users[value]) > 1]


@lru_cache(maxsize=16384)
def _cost_of(kind: str, types: tuple[TensorType, ...], attributes: Attributes) -> DeclaredCost | None:
    """What an op of this kind declares on inputs of these types."""
    made = meaning(kind, types, attributes).outputs
    inputs, outputs = (tuple(Value(f"{name}{i}", type) for i, type in enumerate(side))
                       for name, side in (("x", types), ("y", made)))
    return declared_cost(Op(kind, inputs, attributes, outputs))


@lru_cache(maxsize=16384)
def nbytes_of_one(type: TensorType) -> Any:
    """The bytes of an array of this type."""
    return type.nbytes


def program_rows(
    steps: Iterable[ProgramStep | StartStep | WaitStep], devices: Devices | None
) -> Iterator[Row]:
    """The events of the steps of a program.  `Unpriceable` for events that have no price of their own."""
    started: list[int] = []
    """The numbers of the collectives that are waited for later."""
    for step in steps:
        for category, nbytes in step.held:
            yield Kind(MEMORY, category), [nbytes]
        if isinstance(step, StartStep):
            for kind, payload in _call(step.call, devices):
                started.append(step.number)
                yield kind._replace(later=1), payload
        elif isinstance(step, WaitStep):
            if step.number in started:
                yield Kind(WAIT, step.ops[0].kind, later=started[::-1].index(step.number) + 1), []
        elif communicates(step.op):
            yield from _call(step.op, devices)
        else:
            yield from _compute(step)
        for category, nbytes in step.freed:
            yield Kind(MEMORY, category), [-nbytes]


def _compute(step: ProgramStep) -> Iterator[Row]:
    cost: Any = step.cost           # its numbers may be extents
    if cost is not None:
        flops, nbytes, dtype, seconds, others, shape = cost
        if 2 + len(others) + len(shape or ()) > NUMBERS:
            raise Unpriceable(f"{step.name} has values of {len(others) + 1} dtypes")
        yield Kind(COMPUTE, step.name, dtype, others=tuple(other for other, _ in others),
                   extents=len(shape or ()), seconds=seconds), [
                       nbytes, flops, *(size for _, size in others), *(shape or ())]


def _call(op: Op, devices: Devices | None) -> Iterator[Row]:
    """A collective.  Its payload is what a member gives, or of an all_gather what it gets."""
    if op.kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        raise Unpriceable(f"{op.kind} has no price of its own")
    assert devices is not None
    over = tuple(axis for axis in op["axes"] if devices.shape[axis] != 1)
    nbytes = (op.outputs if op.kind == "all_gather" else op.inputs)[0].type.nbytes
    if over:
        yield Kind(COLLECTIVE, op.kind, op.inputs[0].type.dtype.name, over), [nbytes]
