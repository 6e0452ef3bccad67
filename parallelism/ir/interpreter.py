"""The reference executor: one process, op by op, each by its NumPy kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.ir.extents import Extent, names_in
from parallelism.ir.function import Function, Op, Value
from parallelism.ir.memory import freed_after


class Interpreted(NamedTuple):
    """What came of a function: its outputs, in order, and the most bytes that were in use at a moment."""

    outputs: tuple[Array, ...]
    peak_bytes: int


def interpret(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> Interpreted:
    """Run a function on arrays, given in order or by name; symbols take their numbers from the shapes.

    ``ValueError`` or ``TypeError``, naming the input, for an array that is not of its type; nothing is converted.
    Values are freed after their last use.  Inputs are never written; an output may be an input, or lie in its memory.
    """
    arrays = _arrays(function, inputs)
    if function.symbols:
        function = function.specialize(**_numbers(function, arrays))
    values: dict[Value, Array] = {}
    for value, array in zip(function.inputs, checked_arrays(function, arrays), strict=True):
        values[value] = np.ascontiguousarray(array) if array.ndim else array
    held = peak = sum(array.nbytes for array in values.values())
    freed = freed_after(function)
    unread = _last_reads(function)
    for number, op in enumerate(function.ops):
        outputs = run(op, [values[value] for value in op.inputs])
        for value, array in zip(op.outputs, outputs, strict=True):
            values[value] = array
            held += 0 if op.operator.view else array.nbytes
        peak = max(peak, held)
        held -= sum(int(value.type.nbytes) for value in freed[number])
        for value in unread[number]:
            del values[value]
    return Interpreted(tuple(values[value] for value in function.outputs), peak)


def run(op: Op, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """One op by its kernel: contiguous arrays that own their memory, unless it is a view."""
    entry = op.operator
    made = entry.kernel(*arrays, **dict(op.attributes))
    outputs = made if isinstance(made, tuple) else (made,)
    found = []
    for value, output in zip(op.outputs, outputs, strict=True):
        array = np.asarray(output)
        if array.dtype != value.type.dtype or array.shape != value.type.shape:
            raise RuntimeError(f"the kernel of {op.kind} made {array.dtype}{list(array.shape)} for {value}")
        if not entry.view and (array.base is not None or not array.flags.c_contiguous):
            array = np.array(array, order="C")
        found.append(array)
    return tuple(found)


def checked_arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Array]:
    """The inputs in order, each of its type; ``ValueError`` or ``TypeError``, naming the input, if one is not."""
    arrays = _arrays(function, inputs)
    for value, array in zip(function.inputs, arrays, strict=True):
        _check_input(function, value, array)
    return arrays


def _arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Array]:
    names = [value.name for value in function.inputs]
    if isinstance(inputs, Mapping):
        if inputs.keys() != set(names):
            raise ValueError(f"@{function.name} takes the inputs {', '.join(names) or 'none'}; got "
                             f"{', '.join(map(str, inputs)) or 'none'}")
        inputs = [inputs[name] for name in names]
    if len(inputs) != len(names):
        raise ValueError(f"@{function.name} takes {len(names)} inputs ({', '.join(names)}), got {len(inputs)}")
    return [np.asarray(array) for array in inputs]


def _numbers(function: Function, arrays: Sequence[Array]) -> dict[str, Extent]:
    """What the symbols stand for, from the dims that are a symbol and nothing else."""
    numbers: dict[str, Extent] = {}
    for value, array in zip(function.inputs, arrays, strict=True):
        if array.ndim != value.type.ndim:
            _check_input(function, value, array)
        for extent, found in zip(value.type.shape, array.shape, strict=True):
            symbol = str(extent)
            if symbol in names_in(extent) and numbers.setdefault(symbol, found) != found:
                raise ValueError(f"@{function.name}: {symbol} is {numbers[symbol]} elsewhere and {found} in input "
                                 f"{value}")
    missing = sorted(function.symbols - numbers.keys())
    if missing:
        raise ValueError(f"@{function.name}: no shape of an input tells {', '.join(missing)}; specialize it first")
    return numbers


def _check_input(function: Function, value: Value, array: Array) -> None:
    if array.dtype != value.type.dtype:
        raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
    if array.shape != value.type.shape:
        raise ValueError(f"@{function.name}: input {value} was given an array of shape {array.shape}")


def _last_reads(function: Function) -> list[list[Value]]:
    """For each op the values that nobody reads after it."""
    last: dict[Value, int] = {}
    for number, op in enumerate(function.ops):
        for value in (*op.inputs, *op.outputs):
            last[value] = number
    unread: list[list[Value]] = [[] for _ in function.ops]
    for value, number in last.items():
        if value not in function.outputs:
            unread[number].append(value)
    return unread
