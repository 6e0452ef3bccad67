"""The reference executor: it runs a function op by op in one process, each op by its NumPy kernel."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.ir.core import Extent, Function, Op, Value, names_in
from parallelism.ir.passes.donation import donations
from parallelism.ir.passes.memory import freed_after, taken_by, unread_after, written_inputs
from parallelism.ir.passes.room import with_room


class Interpreted(NamedTuple):
    """The result of `interpret`."""

    outputs: tuple[Array, ...]
    """The outputs of the function, in order."""
    peak_bytes: int
    """The largest number of bytes that were in use at one time."""


def interpret(
    function: Function, inputs: Sequence[Any] | Mapping[str, Any], *, donate: str | Iterable[str] = ()
) -> Interpreted:
    """Run a function on arrays, which are given in order or by name.  Symbols are read from the shapes.

    ``ValueError`` or ``TypeError`` names an input whose array does not have its type; nothing is converted.  Values
    are freed after their last use.  Inputs are never written, because those whose memory is written into, as that of
    the inputs named in ``donate`` (see `peak_bytes`), are copied.  An output may share the memory of an input.
    """
    arrays = _arrays(function, inputs)
    if function.symbols:
        function = function.specialize(**_numbers(function, arrays))
    function = with_room(function)
    donated = donations(function, donate)
    written = written_inputs(function, donated)
    values: dict[Value, Array] = {}
    for value, array in zip(function.inputs, checked_arrays(function, arrays), strict=True):
        values[value] = contiguous(array, own=value in written)
    held = peak = sum(array.nbytes for array in values.values())
    for op, taken, freed, unread in zip(
        function.ops,
        taken_by(function, donated),
        freed_after(function),
        unread_after(function, donated),
        strict=True,
    ):
        into: list[Array | None] = []
        for value in op.outputs:
            place = donated.get(value)
            into.append(None if place is None else values[place])
        outputs = run(op, [values[value] for value in op.inputs], in_place=True, into=into)
        values.update(zip(op.outputs, outputs, strict=True))
        held += sum(values[value].nbytes for value in taken)
        peak = max(peak, held)
        held -= sum(int(value.type.nbytes) for value in freed)
        for value in unread:
            del values[value]
    return Interpreted(tuple(values[value] for value in function.outputs), peak)


def contiguous(array: Array, *, own: bool = False) -> Array:
    """The array with contiguous elements: itself or a copy; always a copy if it is to be one's own."""
    if own:
        return np.array(array, order="C")
    return np.ascontiguousarray(array) if array.ndim else array


def run(
    op: Op, arrays: Sequence[Array], *, in_place: bool = False, into: Sequence[Array | None] = ()
) -> tuple[Array, ...]:
    """Run one op by its kernel.  The outputs are contiguous and own their memory, unless the op is a view.

    With ``in_place`` an op that reuses the memory of its first input writes into that array; without it no input is
    written.  ``into`` has, for each output, the array in whose memory it is to lie, or None; empty: all are None.
    """
    entry = op.operator
    out = arrays[0] if in_place and entry.reuses and arrays[0].flags.writeable else None
    if entry.kernel in _WRITE_INTO and into and (place := into[0]) is not None:
        out = place.reshape(op.outputs[0].type.shape)
    result = entry.run(arrays, op.attributes, out)
    owned = []
    for value, output in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True):
        array = np.asarray(output)
        if array.dtype != value.type.dtype or array.shape != value.type.shape:
            raise RuntimeError(
                f"the kernel of {op.kind} returned {array.dtype}{list(array.shape)} for {value}"
            )
        if not entry.view and out is None and (array.base is not None or not array.flags.c_contiguous):
            array = np.array(array, order="C")
        owned.append(array)
    return tuple(owned) if out is not None else written_into(owned, into)


_WRITE_INTO = (np.add, np.subtract, np.multiply, np.divide)
"""The kernels that may write over their inputs: each element has the same bits, however an array is gone through."""


def written_into(outputs: Sequence[Array], into: Sequence[Array | None]) -> tuple[Array, ...]:
    """The outputs of an op, copied into the memory of the arrays ``into``, where there is one."""
    if not into:
        return tuple(outputs)
    written = []
    for output, place in zip(outputs, into, strict=True):
        if place is not None:
            lies = place.reshape(output.shape)
            lies[...] = output
            written.append(lies)
        else:
            written.append(output)
    return tuple(written)


def checked_arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Array]:
    """The inputs in order.  ``ValueError`` or ``TypeError`` names an input whose array does not have its type."""
    arrays = _arrays(function, inputs)
    for value, array in zip(function.inputs, arrays, strict=True):
        _check_input(function, value, array)
    return arrays


def sized_by(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> Function:
    """The function with the values of its symbols that the shapes of its inputs have.

    ``ValueError`` names a symbol that they do not determine, or have twice.
    """
    if not function.symbols:
        return function
    return _specialized(function, tuple(sorted(_numbers(function, _arrays(function, inputs)).items())))


@lru_cache(maxsize=8)
def _specialized(function: Function, numbers: tuple[tuple[str, Extent], ...]) -> Function:
    return function.specialize(**dict(numbers))


def _arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Array]:
    names = [value.name for value in function.inputs]
    if isinstance(inputs, Mapping):
        if inputs.keys() != set(names):
            raise ValueError(
                f"@{function.name} takes the inputs {', '.join(names) or 'none'}; got "
                f"{', '.join(map(str, inputs)) or 'none'}"
            )
        inputs = [inputs[name] for name in names]
    if len(inputs) != len(names):
        raise ValueError(
            f"@{function.name} takes {len(names)} inputs ({', '.join(names)}), got {len(inputs)}"
        )
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
                raise ValueError(
                    f"@{function.name}: {symbol} is {numbers[symbol]} elsewhere and {actual} in input {value}"
                )
    if missing := sorted(function.symbols - numbers.keys()):
        raise ValueError(
            f"@{function.name}: the shapes of the inputs do not determine {', '.join(missing)}; "
            "give a value with specialize first"
        )
    return numbers


def _check_input(function: Function, value: Value, array: Array) -> None:
    if array.dtype != value.type.dtype:
        raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
    if array.shape != value.type.shape:
        raise ValueError(f"@{function.name}: input {value} was given an array of shape {array.shape}")
