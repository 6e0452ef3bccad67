"""A function with other values of the same types, in place of the old ones.

A function was verified when it was built.  Names, layouts and regions change neither its order nor its types, so what
is derived here is not verified again; the caller gives different names to different values.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from parallelism.ir.core.extents import Extent
from parallelism.ir.core.function import Function, Op, Source, Value, unchecked_op
from parallelism.ir.core.lines import Line
from parallelism.ir.core.table import Attributes
from parallelism.sharding import TensorSharding

Built = TypeVar("Built", Function, Value)


def with_values(
    function: Function,
    values: Mapping[str, Value],
    *,
    name: str | None = None,
    region: Callable[[str | None], str | None] | None = None,
    attributes: Callable[[Attributes], Attributes] | None = None,
) -> Function:
    """The function with ``values``, by the names of the old ones; each has the type of the old one.

    ``name`` is a new name of the function; ``region`` gives the new path of a region, ``attributes`` the new attributes
    of an op, which must have the same types.
    """

    def each(side: tuple[Value, ...]) -> tuple[Value, ...]:
        for value in side:
            if values[value.name] is not value:
                return tuple([values[value.name] for value in side])
        return side

    ops = []
    for op in function.ops:
        inputs, outputs = each(op.inputs), each(op.outputs)
        path = op.region if region is None else region(op.region)
        given = op.attributes if attributes is None else attributes(op.attributes)
        if (
            inputs is not op.inputs
            or outputs is not op.outputs
            or path is not op.region
            or given is not op.attributes
        ):
            op = unchecked_op(op.kind, inputs, given, outputs, path, op.line, checked=op.checked)
        ops.append(op)
    return _built(
        Function,
        name=name or function.name,
        inputs=each(function.inputs),
        ops=tuple(ops),
        outputs=each(function.outputs),
        attributes=function.attributes,
    )


def derived_later(name: str, source: Source, attributes: Attributes = ()) -> Function:
    """The function of this name that ``source.derived()`` returns, which is called at the first use of an op."""
    return _built(Function, name=name, source=source, attributes=attributes)


def specialized_ops(ops: Iterable[Op], numbers: Mapping[str, Extent]) -> tuple[Op, ...]:
    """Each of the ops by itself with symbols replaced, as `Function.specialize` does; their values get other names."""
    inputs: list[Value] = []
    alone: list[Op] = []
    for place, op in enumerate(ops):
        own = {
            value.name: renamed_value(value, f"{place}.{i}")
            for i, value in enumerate((*op.inputs, *op.outputs))
        }
        inputs += dict.fromkeys(own[value.name] for value in op.inputs)
        alone.append(
            repeated_op(op, (own[value.name] for value in op.inputs), (own[v.name] for v in op.outputs))
        )
    function = Function("ops", tuple(inputs), tuple(alone), ())
    return function.specialize(**{name: numbers[name] for name in function.symbols & numbers.keys()}).ops


def checked_op(
    kind: str,
    inputs: Iterable[Value],
    attributes: Attributes,
    outputs: Iterable[Value],
    region: str | None,
    line: Line | None = None,
) -> Op:
    """An op whose attributes are frozen, and whose outputs have the types that the table of operators says."""
    return unchecked_op(kind, tuple(inputs), attributes, tuple(outputs), region, line, checked=True)


def repeated_op(op: Op, inputs: Iterable[Value], outputs: Iterable[Value]) -> Op:
    """The same op with other values, which have the types of the old ones."""
    return unchecked_op(
        op.kind, tuple(inputs), op.attributes, tuple(outputs), op.region, op.line, checked=op.checked
    )


def renamed_value(value: Value, name: str) -> Value:
    """The value under another name, made of letters, digits, _ and . only."""
    return _built(Value, name=name, type=value.type, layout=value.layout)


def laid_value(value: Value, layout: TensorSharding | None) -> Value:
    """The value in another layout, which is checked."""
    return value if value.layout is layout else Value(value.name, value.type, layout)


def _built(cls: type[Built], **fields: Any) -> Built:
    made, put = object.__new__(cls), object.__setattr__
    for name, value in fields.items():
        put(made, name, value)
    return made
