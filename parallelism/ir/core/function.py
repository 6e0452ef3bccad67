"""A program as a value: values with types, ops that make new ones of them, a function that returns some.

Everything is frozen, hashable, and checked when it is built: an op takes values that are there, every value is made
once, and the types are those that the table of operators says.  A value may say how it lies on a mesh, an op to which
part of the model it belongs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parallelism.ir.core import regions
from parallelism.ir.core.errors import VerifyError
from parallelism.ir.core.extents import Expression, Extent, specialized
from parallelism.ir.core.printing import print_function, print_op, print_value
from parallelism.ir.core.rules import Rule
from parallelism.ir.core.table import Attributes, Operator, flops, meaning, operator
from parallelism.ir.core.types import DTYPE_NAMES, TensorType
from parallelism.sharding import TensorSharding

NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, slots=True)
class Value:
    """What an op makes, or a function is given: a name, which is its own in a function, and a type."""

    name: str
    type: TensorType
    layout: TensorSharding | None = None
    """How the whole tensor lies on the devices of a mesh, which the function does not know; None: nobody has said.
    Kept with each dim spelt out, no ``...``."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise VerifyError(f"the name of a value is made of letters, digits, _ and ., got {self.name!r}")
        if not isinstance(self.type, TensorType):
            raise TypeError(f"%{self.name}: its type is a TensorType, got {self.type!r}")
        if self.layout is None:
            return
        if not isinstance(self.layout, TensorSharding):
            raise TypeError(f"%{self.name}: its layout is a TensorSharding or None, got {self.layout!r}")
        try:
            object.__setattr__(self, "layout", self.layout.over(self.type.ndim))
        except ValueError as error:
            raise VerifyError(f"%{self.name}: {error}: {self.type}") from None

    def __str__(self) -> str:
        return print_value(self)


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of the table at work: ``outputs = kind(inputs, **attributes)``."""

    kind: str
    inputs: tuple[Value, ...]
    attributes: Attributes
    """Given as a mapping or as pairs, kept as pairs in the order of their names."""
    outputs: tuple[Value, ...]
    region: str | None = None
    """The part of the model that it belongs to, and the parts in which that lies: ``block.0.attention``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "attributes", frozen_attributes(self.attributes))
        if self.region is not None:
            regions.check_path(self.region)

    def __getitem__(self, attribute: str) -> Any:
        return dict(self.attributes)[attribute]

    @property
    def operator(self) -> Operator:
        """Its entry in the table."""
        return operator(self.kind)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Of the inputs."""
        return tuple(value.type for value in self.inputs)

    @property
    def rule(self) -> Rule:
        """How its dims relate."""
        return meaning(self.kind, self.types, self.attributes).rule

    @property
    def flops(self) -> Extent:
        """Floating point operations; two for each multiply-add."""
        return flops(self.kind, self.types, self.attributes)

    @property
    def nbytes(self) -> Extent:
        """Bytes read and written: inputs and outputs once each, none by a view."""
        if self.operator.view:
            return 0
        return sum((value.type.nbytes for value in (*self.inputs, *self.outputs)), 0)

    @property
    def bytes_received(self) -> Extent:
        """Bytes that a device receives from others."""
        received = self.operator.received
        return received(*self.types, **dict(self.attributes)) if received else 0

    def __str__(self) -> str:
        return print_op(self)


@dataclass(frozen=True)
class Function:
    """Inputs, ops in an order in which they can run, and the values that are returned."""

    name: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]

    def __post_init__(self) -> None:
        for field in ("inputs", "ops", "outputs"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        verify(self)

    @property
    def values(self) -> Iterator[Value]:
        """The inputs, then what the ops make."""
        yield from self.inputs
        for op in self.ops:
            yield from op.outputs

    @property
    def symbols(self) -> frozenset[str]:
        """The names that stand for extents."""
        attributes = (_symbols(value) for op in self.ops for _, value in op.attributes)
        return frozenset().union(*(value.type.symbols for value in self.values), *attributes)

    @property
    def flops(self) -> Extent:
        """Of all ops."""
        return sum((op.flops for op in self.ops), 0)

    @property
    def nbytes(self) -> Extent:
        """Bytes read and written by all ops."""
        return sum((op.nbytes for op in self.ops), 0)

    def specialize(self, **numbers: Extent) -> Function:
        """With these in place of the symbols, some or all: a number, or another expression.

        ``ValueError`` for a symbol that the function has not, and for numbers that make an extent that is not whole.
        """
        for name, number in numbers.items():
            if name not in self.symbols:
                known = ", ".join(sorted(self.symbols)) or "none"
                raise ValueError(f"@{self.name} has no symbol {name}: its symbols are {known}")
            if isinstance(number, bool) or not isinstance(number, int | Expression):
                raise TypeError(f"symbol {name} stands for an integer or an expression, got {number!r}")
            if isinstance(number, int) and number < 0:
                raise ValueError(f"symbol {name} stands for an extent, which is at least 0, got {number}")
        values = {value: replace(value, type=value.type.specialize(numbers)) for value in self.values}
        ops = tuple(
            Op(
                op.kind, tuple(values[v] for v in op.inputs),
                tuple((name, _specialized(value, numbers)) for name, value in op.attributes),
                tuple(values[v] for v in op.outputs), op.region,
            )
            for op in self.ops
        )
        return Function(self.name, tuple(values[v] for v in self.inputs), ops, tuple(values[v] for v in self.outputs))

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of all regions that ops are marked with, and of those in which they lie, in order."""
        return regions.paths(self)

    def region(self, path: str) -> Function:
        """The ops of a region, and of those inside it, as a function of its own, named after it.

        Its inputs are the values that come from outside, in the order of their use; its outputs those that the rest
        of this function needs, or returns.  Names, layouts and marks stay.  ``ValueError`` if no op belongs to it.
        """
        return regions.part(self, path)

    def replaced(self, path: str, part: Function) -> Function:
        """This function with ``part`` in place of the ops of a region.

        ``part`` takes and returns the types that ``region(path)`` takes and returns, in order; its ops are marked with
        the region, too.  ``ValueError`` if it does not, and for a region that is needed for one of its own inputs.
        """
        return regions.replaced(self, path, part)

    def __str__(self) -> str:
        return print_function(self)


def verify(function: Function) -> None:
    """That it is one: `VerifyError` names the op.  Done whenever a `Function` is built."""
    if not isinstance(function.name, str) or not NAME.fullmatch(function.name):
        raise VerifyError(f"the name of a function is made of letters, digits, _ and ., got {function.name!r}")
    known: dict[str, Value] = {}
    for value in function.inputs:
        if value.name in known:
            raise VerifyError(f"@{function.name}: two inputs are named %{value.name}")
        known[value.name] = value
    for number, op in enumerate(function.ops):
        try:
            for value in op.inputs:
                _check_known(value, known)
            found = meaning(op.kind, op.types, op.attributes).outputs
            check_outputs(op, found)
            for value in op.outputs:
                if value.name in known:
                    raise ValueError(f"%{value.name} is there already, and every value is made once")
                known[value.name] = value
        except (ValueError, TypeError) as error:
            raise VerifyError(f"@{function.name}, op {number}, {_short(op)}: {error}") from None
    for value in function.outputs:
        try:
            _check_known(value, known)
        except ValueError as error:
            raise VerifyError(f"@{function.name}, return: {error}") from None


def check_outputs(op: Op, found: tuple[TensorType, ...]) -> None:
    """That the outputs of an op are those that its inputs make; ``ValueError`` if not."""
    given = tuple(value.type for value in op.outputs)
    if given != found:
        told = [", ".join(map(str, types)) or "nothing" for types in (found, given)]
        raise ValueError(f"it makes {told[0]}, not {told[1]}")
    if len({value.name for value in op.outputs}) != len(op.outputs):
        raise ValueError("two of its outputs have one name")


def frozen_attributes(attributes: Mapping[str, Any] | Attributes) -> Attributes:
    """As pairs in the order of their names, lists as tuples, numbers as Python's; ``ValueError`` for a nan."""
    pairs = dict(attributes).items()
    return tuple(sorted((name, _frozen(name, value)) for name, value in pairs)) if pairs else ()


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(name, part) for part in value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"attribute {name} cannot be nan, which equals nothing")
    if isinstance(value, np.dtype):
        value = value.newbyteorder("=")
        if value in DTYPE_NAMES:
            return value
    elif isinstance(value, str | bool | int | float | Expression):
        return value
    raise TypeError(f"attribute {name} is a number, a string, a dtype or a list of them, got {str(value)[:80]}")


def _check_known(value: Value, known: Mapping[str, Value]) -> None:
    found = known.get(value.name)
    if found is None:
        raise ValueError(f"%{value.name} is not there yet")
    if found is not value and found != value:
        told = (found.type, value.type) if found.type != value.type else (str(found), str(value))
        raise ValueError(f"%{value.name} is a {told[0]}, not a {told[1]}")


def _specialized(value: Any, numbers: Mapping[str, Extent]) -> Any:
    if isinstance(value, tuple):
        return tuple(_specialized(part, numbers) for part in value)
    return specialized(value, numbers) if isinstance(value, Expression) else value


def _symbols(value: Any) -> frozenset[str]:
    if isinstance(value, tuple):
        return frozenset().union(*(_symbols(part) for part in value if isinstance(part, tuple | Expression)))
    return value.symbols if isinstance(value, Expression) else frozenset()


def _short(op: Op) -> str:
    outputs = ", ".join(f"%{value.name}" for value in op.outputs)
    inputs = ", ".join(f"%{value.name}" for value in op.inputs)
    return f'{outputs} = "{op.kind}"({inputs})'[:120]
