"""A program is a value: typed values, ops that compute new values, and a function that returns some of them.

Everything is frozen, hashable, and checked when it is built.  An op takes only values that are defined before it,
every value is defined once, and types agree with the table of operators.  A value may carry a layout on a mesh; an op
may carry the region of the model that it belongs to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from parallelism.fast_unpickling import unpickled_quickly
from parallelism.ir.core import regions
from parallelism.ir.core.errors import VerifyError
from parallelism.ir.core.extents import Expression, Extent, is_negative, names_in, specialized
from parallelism.ir.core.lines import Line, on_line
from parallelism.ir.core.printing import names, print_function, print_op, print_value
from parallelism.ir.core.rules import Rule
from parallelism.ir.core.table import Attributes, Operator, known_meaning, meaning, operator
from parallelism.ir.core.types import TensorType, dtype_text
from parallelism.sharding import TensorSharding

NAME = re.compile(r"[A-Za-z0-9_.]+")


@unpickled_quickly
@dataclass(frozen=True, slots=True)
class Value:
    """An output of an op or an input of a function: a name, unique in the function, and a type."""

    name: str
    type: TensorType
    layout: TensorSharding | None = None
    """How the whole tensor lies on a mesh, which the function does not name; None if no layout was given.
    Every dim is written out: ``...`` is expanded."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise VerifyError(
                f"the name of a value must consist of letters, digits, _ and ., got {self.name!r}"
            )
        if not isinstance(self.type, TensorType):
            raise TypeError(f"%{self.name}: its type must be a TensorType, got {self.type!r}")
        if self.layout is None:
            return
        if not isinstance(self.layout, TensorSharding):
            raise TypeError(f"%{self.name}: its layout must be a TensorSharding or None, got {self.layout!r}")
        try:
            object.__setattr__(self, "layout", self.layout.over(self.type.ndim))
        except ValueError as error:
            raise VerifyError(f"%{self.name}: {error}: {self.type}") from None

    def __hash__(self) -> int:
        """That of the name, which tells the values of a function apart."""
        return hash(self.name)

    __str__ = print_value


@unpickled_quickly
@dataclass(frozen=True, slots=True)
class Op:
    """One use of an operator of the table: ``outputs = kind(inputs, **attributes)``."""

    kind: str
    inputs: tuple[Value, ...]
    attributes: Attributes
    """Pairs of name and value, sorted by name.  A mapping is accepted, too."""
    outputs: tuple[Value, ...]
    region: str | None = None
    """The path of the region of the model that the op belongs to, outermost first: ``block.0.attention``."""
    line: Line | None = field(default=None, repr=False, compare=False)
    """The line that it was recorded from.  It is no part of the program: text and pickles are without it."""
    checked: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether its outputs were found to be those that the table of operators says: they are, in any function."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "attributes", frozen_attributes(self.attributes))
        if self.region is not None:
            regions.check_path(self.region)

    def __getitem__(self, attribute: str) -> Any:
        return dict(self.attributes)[attribute]

    def state(self) -> list[Any]:
        """What is pickled: all fields but the line.  Equal programs of two lines are one program on the devices."""
        return [self.kind, self.inputs, self.attributes, self.outputs, self.region, None, self.checked]

    def with_values(self, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Op:
        """The same use of the operator, of other values: neither attributes nor region are checked again."""
        return unchecked_op(
            self.kind, inputs, self.attributes, outputs, self.region, self.line, checked=False
        )

    @property
    def operator(self) -> Operator:
        """The operator's entry in the table."""
        return operator(self.kind)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of the inputs."""
        return tuple([value.type for value in self.inputs])

    @property
    def rule(self) -> Rule:
        """How the dims of inputs and outputs relate."""
        return (known_meaning if self.checked else meaning)(self.kind, self.types, self.attributes).rule

    @property
    def flops(self) -> Extent:
        """Floating-point operations; a multiply-add counts as two."""
        rule, count = self.rule, self.operator.flops
        if callable(count):
            return count(rule, **dict(self.attributes))
        return count * rule.points if count else 0

    @property
    def nbytes(self) -> Extent:
        """Bytes read and written: each input and output once, unless its operator says otherwise; 0 for a view."""
        entry = self.operator
        if entry.view:
            return 0
        if entry.op_nbytes is not None:
            return entry.op_nbytes(self)
        if entry.nbytes is not None:
            return entry.nbytes(self.types, tuple(value.type for value in self.outputs))
        return sum((value.type.nbytes for value in (*self.inputs, *self.outputs)), 0)

    @property
    def bytes_received(self) -> Extent:
        """Bytes that one device receives from other devices."""
        received = self.operator.received
        return received(*self.types, **dict(self.attributes)) if received else 0

    __str__ = print_op


_SLOTS = "kind", "inputs", "attributes", "outputs", "region", "line", "checked"
_PUT_KIND, _PUT_INPUTS, _PUT_ATTRIBUTES, _PUT_OUTPUTS, _PUT_REGION, _PUT_LINE, _PUT_CHECKED = (
    getattr(Op, slot).__set__ for slot in _SLOTS
)


def unchecked_op(
    kind: str,
    inputs: tuple[Value, ...],
    attributes: Attributes,
    outputs: tuple[Value, ...],
    region: str | None,
    line: Line | None,
    *,
    checked: bool,
) -> Op:
    """An op whose attributes and region are right.  Passes make very many: this takes a third of the time of `Op`."""
    op = object.__new__(Op)
    _PUT_KIND(op, kind)
    _PUT_INPUTS(op, inputs)
    _PUT_ATTRIBUTES(op, attributes)
    _PUT_OUTPUTS(op, outputs)
    _PUT_REGION(op, region)
    _PUT_LINE(op, line)
    _PUT_CHECKED(op, checked)
    return op


class Source(Protocol):
    """What a function is derived from."""

    def derived(self) -> Function:
        """The function."""


@dataclass(frozen=True)
class Function:
    """Inputs, ops in an order in which they can run, and the returned values."""

    name: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    attributes: Attributes = ()
    """What is said about the whole function, as pairs of name and value, sorted by name: how devices are to run it.
    It does not change what the function computes."""
    source: Source | None = field(default=None, init=False, repr=False, compare=False)
    """What it is derived from, at the first use of its inputs, ops or outputs; None for a function that was given."""

    def __post_init__(self) -> None:
        for name in ("inputs", "ops", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "attributes", frozen_attributes(self.attributes))
        verify(self)

    if not TYPE_CHECKING:  # with this method every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """The inputs, ops and outputs of a function with a `source`, which are derived now."""
            if self.source is None or name not in ("inputs", "ops", "outputs"):
                raise AttributeError(f"a Function has no attribute {name!r}")
            made = self.source.derived()
            for each in ("inputs", "ops", "outputs"):
                object.__setattr__(self, each, getattr(made, each))
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Everything except the source, from which a function that is copied is derived first."""
        _ = self.ops
        return {name: value for name, value in self.__dict__.items() if name != "source"}

    @property
    def values(self) -> Iterator[Value]:
        """The inputs, then the outputs of the ops."""
        yield from self.inputs
        for op in self.ops:
            yield from op.outputs

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names of all symbolic extents."""
        attributes = {op.attributes for op in self.ops if op.attributes}
        return frozenset().union(*(type.symbols for type in self._types()), *map(_symbols, attributes))

    @cached_property
    def symbols_of_work(self) -> frozenset[str]:
        """The names of the symbols that types, flops or bytes depend on, or any attribute but ``starts``.

        The attribute ``starts`` of an op says where its part of a tensor begins, as for the mask of a dropout.  It
        changes values only.
        """
        attributes: set[Attributes] = set()
        work: list[Extent] = []
        for op in self.ops:
            attributes.add(tuple(pair for pair in op.attributes if pair[0] != "starts"))
            if any(name == "starts" and _symbols(value) for name, value in op.attributes):
                work += op.flops, op.nbytes
        return frozenset().union(
            *(type.symbols for type in self._types()), *map(_symbols, attributes), *map(names_in, work)
        )

    def _types(self) -> set[TensorType]:
        """The different types of its values: many values have the same."""
        return {value.type for value in self.values}

    @property
    def flops(self) -> Extent:
        """Floating-point operations of all ops."""
        return sum((op.flops for op in self.ops), 0)

    @property
    def nbytes(self) -> Extent:
        """Bytes read and written by all ops."""
        return sum((op.nbytes for op in self.ops), 0)

    def specialize(self, **numbers: Extent) -> Function:
        """The function with some or all symbols replaced, each by a number or another expression.

        ``ValueError`` for a symbol that the function does not have, for a negative number, and for numbers that give
        an extent that is not whole.
        """
        for name, number in numbers.items():
            if name not in self.symbols:
                raise ValueError(
                    f"@{self.name} has no symbol {name}: its symbols are "
                    f"{', '.join(sorted(self.symbols)) or 'none'}"
                )
            if isinstance(number, bool) or not isinstance(number, int | Expression):
                raise TypeError(f"symbol {name} must be an integer or an expression, got {number!r}")
            if is_negative(number):
                raise ValueError(f"symbol {name} must be at least 0, because it is an extent, got {number}")
        if not numbers:
            return self
        try:
            return self._specialized(numbers)
        except (ValueError, TypeError) as error:
            given = ", ".join(f"{name}={number}" for name, number in numbers.items())
            if given.partition(",")[0] in str(error):  # that of an extent says it
                raise
            reason = error.reason if isinstance(error, VerifyError) and error.reason else str(error)
            raise type(error)(f"@{self.name} cannot have {given}: {reason}") from None

    def _specialized(self, numbers: Mapping[str, Extent]) -> Function:
        types = {type: type.specialize(numbers) for type in self._types()}
        values: dict[Value, Value] = {}
        for value in self.values:
            type = types[value.type]
            values[value] = value if type is value.type else Value(value.name, type, value.layout)
        ops = tuple(_specialized_op(op, values, numbers) for op in self.ops)
        return Function(
            self.name,
            regions.each(self.inputs, values),
            ops,
            regions.each(self.outputs, values),
            self.attributes,
        )

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of all regions of the ops, and of the regions that contain them, in order."""
        return regions.paths(self)

    def region(self, path: str) -> Function:
        """The ops of a region, and of the regions inside it, as a separate function that is named after the region.

        Its inputs are the values that come from outside, in the order of their use.  Its outputs are the values that
        the rest of this function uses or returns.  Names, layouts and region paths stay.  ``ValueError`` if no op
        belongs to the region.
        """
        return regions.part(self, path)

    def replaced(self, path: str, part: Function) -> Function:
        """This function with the ops of ``part`` in place of the ops of a region.

        ``part`` must take and return the types that ``region(path)`` takes and returns, in order.  Its ops are marked
        with the region.  ``ValueError`` if the types differ, or if an input of the region depends on its outputs.
        """
        return regions.replaced(self, path, part)

    __str__ = print_function

    def _repr_html_(self) -> str:
        from parallelism.ir.core import picture

        return picture.html(self)


def verify(function: Function) -> None:
    """Check a function; `VerifyError` names the op that is wrong.  Every `Function` is verified when it is built."""
    if not isinstance(function.name, str) or not NAME.fullmatch(function.name):
        raise VerifyError(
            f"the name of a function must consist of letters, digits, _ and ., got {function.name!r}"
        )
    known: dict[str, Value] = {}
    for value in function.inputs:
        if value.name in known:
            raise VerifyError(f"@{function.name}: two inputs are named %{value.name}")
        known[value.name] = value
    for number, op in enumerate(function.ops):
        try:
            _verify_op(op, known)
        except (ValueError, TypeError) as error:
            wrong = VerifyError(f"@{function.name}, op {number}, {_short(op)}: {error}{on_line(op.line)}")
            wrong.reason = str(error)
            raise wrong from None
    for value in function.outputs:
        try:
            _check_known(value, known)
        except ValueError as error:
            raise VerifyError(f"@{function.name}, return: {error}") from None
    kinds = {op.kind for op in function.ops}
    entries = [operator(kind) for kind in kinds]
    if reusing := {entry.name for entry in entries if entry.reuses}:
        _check_reused(function, reusing, {entry.name for entry in entries if entry.view})


def _verify_op(op: Op, known: dict[str, Value]) -> None:
    """Check an op, whose outputs are ``known`` afterwards."""
    for value in op.inputs:
        if known.get(value.name) is not value:
            _check_known(value, known)
    if not op.checked:
        check_outputs(op, meaning(op.kind, op.types, op.attributes).outputs)
        object.__setattr__(op, "checked", True)
    for value in op.outputs:
        if value.name in known:
            raise ValueError(f"%{value.name} is defined already; every value is defined once")
        known[value.name] = value


def _check_reused(function: Function, reusing: Collection[str], views: Collection[str]) -> None:
    """Check that no value is read after an op wrote into its memory: an op of a kind that is ``reusing`` memory."""
    owner: dict[str, str] = {}
    """By view, the value whose memory it shows."""
    writer: dict[str, Op] = {}

    def check_read(value: Value) -> None:
        own = owner.get(value.name, value.name)
        if own in writer:
            raise VerifyError(
                f"@{function.name}: %{value.name} is read after its memory was written into: {_short(writer[own])}"
            )

    for op in function.ops:
        if writer:
            for value in op.inputs:
                check_read(value)
        if op.kind in reusing:
            writer[owner.get(op.inputs[0].name, op.inputs[0].name)] = op
        if op.kind in views:
            own = owner.get(op.inputs[0].name, op.inputs[0].name)
            owner.update(dict.fromkeys([value.name for value in op.outputs], own))
    for value in function.outputs:
        check_read(value)


def check_outputs(op: Op, expected: tuple[TensorType, ...]) -> None:
    """Check that the outputs of an op have the expected types and different names; ``ValueError`` if not."""
    given = tuple(value.type for value in op.outputs)
    if given != expected:
        texts = [", ".join(map(str, types)) or "nothing" for types in (expected, given)]
        raise ValueError(f"its output must be {texts[0]}, got {texts[1]}")
    if len({value.name for value in op.outputs}) != len(op.outputs):
        raise ValueError("two of its outputs have the same name")


def frozen_attributes(attributes: Mapping[str, Any] | Attributes) -> Attributes:
    """The attributes as pairs sorted by name, with tuples for lists and Python numbers for NumPy's.

    ``ValueError`` for a nan; ``TypeError`` for a value that is not a number, a string, a dtype or a list of them.
    """
    pairs = dict(attributes).items()
    return tuple(sorted((name, _frozen(name, value)) for name, value in pairs)) if pairs else ()


def _frozen(name: str, value: Any) -> Any:
    if type(value) in (int, str, bool):  # most are
        return value
    if isinstance(value, list | tuple):
        return tuple(_frozen(name, part) for part in value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"attribute {name} cannot be nan, because nan does not equal itself")
    if isinstance(value, np.dtype):
        value = value.newbyteorder("=")
        if dtype_text(value):
            return value
    elif isinstance(value, str | bool | int | float | Expression):
        return value
    raise TypeError(
        f"attribute {name} must be a number, a string, a dtype or a list of them, got {str(value)[:80]}"
    )


def _check_known(value: Value, known: Mapping[str, Value]) -> None:
    defined = known.get(value.name)
    if defined is None:
        raise ValueError(f"%{value.name} is not defined yet")
    if defined is not value and defined != value:
        was, used = (defined.type, value.type) if defined.type != value.type else (defined, value)
        raise ValueError(f"%{value.name} is defined as {was} and used as {used}")


def _specialized_op(op: Op, values: Mapping[Value, Value], numbers: Mapping[str, Extent]) -> Op:
    inputs, outputs = regions.each(op.inputs, values), regions.each(op.outputs, values)
    if not any(map(_symbols, op.attributes)):
        return op.with_values(inputs, outputs)
    attributes = tuple((name, _specialized(value, numbers)) for name, value in op.attributes)
    return Op(op.kind, inputs, attributes, outputs, op.region, op.line)


def _specialized(value: Any, numbers: Mapping[str, Extent]) -> Any:
    return (
        tuple(_specialized(part, numbers) for part in value)
        if isinstance(value, tuple)
        else specialized(value, numbers)
    )


def _symbols(value: Any) -> frozenset[str]:
    return frozenset().union(*map(_symbols, value)) if isinstance(value, tuple) else names_in(value)


def _short(op: Op) -> str:
    return f'{names(op.outputs)} = "{op.kind}"({names(op.inputs)})'[:120]
