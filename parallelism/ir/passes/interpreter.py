"""The reference executor: it runs a function op by op in one process, each op by its NumPy kernel."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.ir.core import Extent, Function, Op, Value, names_in
from parallelism.ir.passes.memory import freed_after, owners, owns_nothing, unread_after


class Interpreted(NamedTuple):
    """The result of `interpret`."""

    outputs: tuple[Array, ...]
    """The outputs of the function, in order."""
    peak_bytes: int
    """The largest number of bytes that were in use at one time."""


def interpret(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> Interpreted:
    """Run a function on arrays, which are given in order or by name.  Symbols are read from the shapes.

    ``ValueError`` or ``TypeError`` names an input whose array does not have its type; nothing is converted.  Values
    are freed after their last use.  Inputs are never written.  An output may share the memory of an input.
    """
    arrays = _arrays(function, inputs)
    if function.symbols:
        function = function.specialize(**_numbers(function, arrays))
    values: dict[Value, Array] = {}
    owner = owners(function)
    written = {owner[op.inputs[0]] for op in function.ops if op.operator.reuses}
    for value, array in zip(function.inputs, checked_arrays(function, arrays), strict=True):
        own = np.array(array, order="C") if value in written else array
        values[value] = np.ascontiguousarray(own) if own.ndim else own
    held = peak = sum(array.nbytes for array in values.values())
    for op, freed, unread in zip(function.ops, freed_after(function), unread_after(function), strict=True):
        outputs = run(op, [values[value] for value in op.inputs], in_place=True)
        for value, array in zip(op.outputs, outputs, strict=True):
            values[value] = array
            held += 0 if owns_nothing(op) else array.nbytes
        peak = max(peak, held)
        held -= sum(int(value.type.nbytes) for value in freed)
        for value in unread:
            del values[value]
    return Interpreted(tuple(values[value] for value in function.outputs), peak)


def run(op: Op, arrays: Sequence[Array], *, in_place: bool = False) -> tuple[Array, ...]:
    """Run one op by its kernel.  The outputs are contiguous and own their memory, unless the op is a view.

    With ``in_place`` an op that reuses the memory of its first input writes into that array; without it no input is
    written.
    """
    entry = op.operator
    out = arrays[0] if in_place and entry.reuses and arrays[0].flags.writeable else None
    result = entry.run(arrays, op.attributes, out)
    owned = []
    for value, output in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True):
        array = np.asarray(output)
        if array.dtype != value.type.dtype or array.shape != value.type.shape:
            raise RuntimeError(f"the kernel of {op.kind} returned {array.dtype}{list(array.shape)} for {value}")
        if not entry.view and out is None and (array.base is not None or not array.flags.c_contiguous):
            array = np.array(array, order="C")
        owned.append(array)
    return tuple(owned)


def checked_arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Array]:
    """The inputs in order.  ``ValueError`` or ``TypeError`` names an input whose array does not have its type."""
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
    return [plain_array(f"%{name}", array) for name, array in zip(names, inputs, strict=True)]


def _numbers(function: Function, arrays: Sequence[Array]) -> dict[str, Extent]:
    """The values of the symbols, from those dims of the inputs whose extent is just a symbol."""
    numbers: dict[str, Extent] = {}
    for value, array in zip(function.inputs, arrays, strict=True):
        if array.ndim != value.type.ndim:
            _check_input(function, value, array)
        for extent, actual in zip(value.type.shape, array.shape, strict=True):
            symbol = str(extent)
            if symbol in names_in(extent) and numbers.setdefault(symbol, actual) != actual:
                raise ValueError(f"@{function.name}: {symbol} is {numbers[symbol]} elsewhere and {actual} in input "
                                 f"{value}")
    if missing := sorted(function.symbols - numbers.keys()):
        raise ValueError(f"@{function.name}: the shapes of the inputs do not determine {', '.join(missing)}; "
                         "give a value with specialize first")
    return numbers


def _check_input(function: Function, value: Value, array: Array) -> None:
    if array.dtype != value.type.dtype:
        raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
    if array.shape != value.type.shape:
        raise ValueError(f"@{function.name}: input {value} was given an array of shape {array.shape}")
