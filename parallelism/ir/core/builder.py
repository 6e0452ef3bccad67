"""A builder collects the inputs and ops of a function that is being written."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, filterfalse
from typing import Any

from parallelism.ir.core import regions
from parallelism.ir.core.derived import checked_op
from parallelism.ir.core.function import Function, Op, Value, frozen_attributes
from parallelism.ir.core.lines import Line
from parallelism.ir.core.table import Attributes, meaning, operator
from parallelism.ir.core.types import TensorType
from parallelism.sharding import TensorSharding


class Builder:
    """The inputs and ops so far.  The outputs of ops are named by consecutive numbers.

    ``recorded_line`` is a function.  It returns the line of the user's code that adds the current op.
    """

    def __init__(self, recorded_line: Callable[[], Line] | None = None) -> None:
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self._names: set[str] = set()
        self._numbers = filterfalse(self._names.__contains__, map(str, count()))
        self._constants: dict[Any, tuple[Value, ...]] = {}
        self._region: str | None = None
        self._recorded_line = recorded_line
        self._line: Line | None = None
        self._attributes: Attributes = ()
        self._makers: dict[Value, Op] = {}
        """The op that makes each value, of the first ``_noted`` ops."""
        self._noted = 0

    def maker(self, value: Value) -> Op | None:
        """The op that makes a value; None for an input."""
        for op in self.ops[self._noted :]:
            self._makers.update(dict.fromkeys(op.outputs, op))
        self._noted = len(self.ops)
        return self._makers.get(value)

    def input(self, name: str, type: TensorType, layout: TensorSharding | None = None) -> Value:
        """Add an input.  ``ValueError`` if the name is taken."""
        if name in self._names:
            raise ValueError(f"two inputs are named %{name}")
        self._names.add(name)
        self.inputs.append(Value(name, type, layout))
        return self.inputs[-1]

    def emit(self, kind: str, inputs: Sequence[Value], attributes: Mapping[str, Any]) -> tuple[Value, ...]:
        """Add an op and return its outputs.  An equal constant of the same region is reused."""
        frozen = frozen_attributes(attributes)
        # 1, 1.0 and True are equal as keys of a dict, but they are different constants.
        key = (self._region, frozen, repr(frozen)) if not inputs and kind == "constant" else None
        if key in self._constants:
            return self._constants[key]
        types = meaning(kind, tuple(value.type for value in inputs), frozen).outputs
        lays = operator(kind).lays
        layout = None if lays is None else lays(**dict(frozen))
        outputs = tuple([Value(next(self._numbers), type, layout) for type in types])
        line = self._line if self._recorded_line is None else self._recorded_line()
        self.ops.append(checked_op(kind, inputs, frozen, outputs, self._region, line))
        if key is not None:
            self._constants[key] = outputs
        return outputs

    @contextmanager
    def region(self, path: str | None, line: Line | None = None) -> Iterator[None]:
        """Mark the ops added in this context with a region, nested in the current one.  None changes nothing.

        ``line`` is that of the op from which they are derived.
        """
        before = self._region, self._line
        self._region = regions.joined(self._region, path)
        self._line = line or self._line
        try:
            yield
        finally:
            self._region, self._line = before

    @property
    def in_region(self) -> bool:
        """Whether ops that are added now get a region."""
        return self._region is not None

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no op to come gets."""
        self._names.update(names)

    def copy(self, function: Function) -> None:
        """Add all inputs and ops of ``function`` under their names, and its attributes.

        Call it before adding anything else.
        """
        self._attributes = function.attributes
        self.inputs.extend(function.inputs)
        self.ops.extend(function.ops)
        self._names.update(value.name for value in function.values)

    def function(self, name: str, outputs: Iterable[Value], *, prune: bool = False) -> Function:
        """The function built so far.  With ``prune``, ops that no output needs are left out; messages always stay."""
        outputs = tuple(outputs)
        needed, kept = set(outputs), list[Op]()
        for op in reversed(self.ops):
            if not prune or not op.outputs or not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
                kept.append(op)
        return Function(name, tuple(self.inputs), tuple(reversed(kept)), outputs, self._attributes)
