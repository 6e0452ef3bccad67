"""The reference executor: it runs a function op by op in one process, each op by its NumPy kernel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.ir.core import Function, Op, Value
from parallelism.ir.passes.donation import donations
from parallelism.ir.passes.float_warnings import at_lines_of
from parallelism.ir.passes.given_arrays import checked, named_arrays, numbers_of
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
    the inputs named in ``donate`` (see `peak_bytes`), are copied.  An output may share the memory of an input.  NumPy's
    warnings, as of a division by zero, are at the lines from which the ops were recorded.
    """
    arrays = named_arrays(function, inputs)
    if function.symbols:
        function = function.specialize(**numbers_of(function, arrays))
    function = with_room(function)
    donated = donations(function, donate)
    written = written_inputs(function, donated)
    values: dict[Value, Array] = {}
    for value, array in zip(function.inputs, checked_arrays(function, arrays), strict=True):
        values[value] = contiguous(array, own=value in written)
    held = peak = sum(array.nbytes for array in values.values())
    with at_lines_of(function) as running:
        for op, taken, freed, unread in zip(
            function.ops,
            taken_by(function, donated),
            freed_after(function),
            unread_after(function, donated),
            strict=True,
        ):
            running.op = op
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
    return written_into(owned, into) if out is None else (owned[0], *written_into(owned[1:], into[1:]))


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
    arrays = named_arrays(function, inputs)
    checked(function, arrays, {})
    return [*arrays.values()]
