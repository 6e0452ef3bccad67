"""The arrays that a program is given: their checks, and the numbers of its symbols that their shapes give.

Every way to run a program reads its symbols here, so a program is taken or refused by all of them alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.display.quantities import cut, plural
from parallelism.ir.core import Extent, Function, Value, names_in
from parallelism.ir.core.extents import specialized
from parallelism.ir.passes.stacked_weights import rows_of_stacks

MOST_NAMES = 300
"""Characters of a list of names in an error, about."""
FEW = 8
"""Names that one can compare by eye."""


def named_arrays(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
    """The inputs by name, in the order of the function.  They are given in order or by name; by name an array may hold the
    rows of several inputs (`rows_of_stacks`).

    ``ValueError`` if there are more or fewer, or others; ``TypeError`` for masked arrays.
    """
    names = [value.name for value in function.inputs]
    if isinstance(inputs, Mapping):
        inputs = rows_of_stacks(names, inputs)
        if inputs.keys() != set(names):
            raise ValueError(
                f"@{function.name} takes the inputs {_listed(names)}; got {_listed(inputs)}{_differing(inputs, names)}"
            )
        inputs = [inputs[name] for name in names]
    if len(inputs) != len(names):
        one = f", as rows of one array; write [{names[0]}]" if len(names) == 1 and _is_array(inputs) else ""
        raise ValueError(
            f"@{function.name} takes {plural(len(names), 'input')} ({_listed(names)}), got {len(inputs)}{one}"
        )
    return {name: plain_array(f"%{name}", array) for name, array in zip(names, inputs, strict=True)}


def _is_array(inputs: Any) -> bool:
    return isinstance(inputs, np.ndarray)


def _listed(names: Iterable[Any]) -> str:
    return cut(", ".join(map(str, names)), MOST_NAMES) or "none"


def _differing(inputs: Mapping[str, Any], names: Sequence[str]) -> str:
    """Which names are missing and which are not known, where there are many."""
    if max(len(inputs), len(names)) <= FEW:
        return ""
    known = set(names)
    told = (
        ("missing", [name for name in names if name not in inputs]),
        ("unknown", [n for n in inputs if n not in known]),
    )
    return "".join(f"; {what}: {_listed(which)}" for what, which in told if which)


def one_of(name: str, arguments: Sequence[Any]) -> Any:
    """The inputs, which are one argument of a run.  ``TypeError`` for any other number of arguments."""
    if len(arguments) != 1:
        raise TypeError(
            f"{name} takes its inputs as one list, or one dict by name; got {len(arguments)} arguments"
        )
    return arguments[0]


def checked(function: Function, arrays: Mapping[str, Array], numbers: Mapping[str, int]) -> None:
    """``ValueError`` or ``TypeError`` names an input whose array does not have its type.  Nothing is converted."""
    for value in function.inputs:
        array = arrays[value.name]
        if array.dtype != value.type.dtype:
            raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
        if array.shape != tuple(specialized(extent, numbers) for extent in value.type.shape):
            raise _of_another_shape(function, value, array, numbers)


def numbers_of(function: Function, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The numbers of all symbols of a function.  ``ValueError`` names a symbol that has none, or has two."""
    numbers = numbers_in(function, arrays)
    if missing := function.symbols - numbers.keys():
        raise without_number(function.name, missing)
    return numbers


def numbers_in(function: Function, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The numbers of the symbols that the shapes of these arrays give.  Not every input need have an array.

    A dim whose extent is a symbol gives its number.  So does one that is linear in its only symbol that is not known
    yet, as ``2*B``, and ``T*B`` where T is known.  ``ValueError`` names a symbol that has two numbers.
    """
    dims: list[tuple[Value, Extent, int]] = []
    for value in function.inputs:
        if (array := arrays.get(value.name)) is None or not value.type.symbols:
            continue
        if array.ndim != value.type.ndim:
            raise _of_another_shape(function, value, array, {})
        dims += [
            (value, extent, actual)
            for extent, actual in zip(value.type.shape, array.shape, strict=True)
            if names_in(extent)
        ]
    numbers: dict[str, int] = {}
    for value, extent, actual in dims:
        symbol = str(extent)
        if symbol in names_in(extent) and numbers.setdefault(symbol, actual) != actual:
            raise ValueError(
                f"@{function.name}: {symbol} is {numbers[symbol]} elsewhere and {actual} in input {value}"
            )
    while found := _solved(dims, numbers):
        numbers |= found
    return numbers


def _solved(dims: Iterable[tuple[Value, Extent, int]], known: Mapping[str, int]) -> dict[str, int]:
    """A symbol that is not known, with its number from an extent in which it stands alone; empty if there is none."""
    for _, extent, actual in dims:
        unknown = names_in(extent) - known.keys()
        if len(unknown) != 1:
            continue
        (symbol,) = unknown
        number = _root(specialized(extent, known), symbol, actual)
        if number is not None:
            return {symbol: number}
    return {}


def _root(extent: Extent, symbol: str, actual: int) -> int | None:
    """The number of the symbol with which an extent that is linear in it is ``actual``; None if there is none."""
    try:
        at_0, at_1 = (specialized(extent, {symbol: number}) for number in (0, 1))
        if not isinstance(at_0, int) or not isinstance(at_1, int) or at_0 == at_1:
            return None
        number = (actual - at_0) // (at_1 - at_0)
        return number if number >= 0 and specialized(extent, {symbol: number}) == actual else None
    except ValueError:  # a quotient that is not whole
        return None


def without_number(name: str, symbols: Iterable[str]) -> ValueError:
    """The error for a program with symbols whose numbers nothing says: it tells how to give them."""
    missing = sorted(symbols)
    one = f"{missing[0]}=64"
    return ValueError(
        f"@{name}: nothing says what {', '.join(missing)} is; in a run the shapes of the arrays say it, simulate takes "
        f"numbers={{{missing[0]!r}: 64}}, and the program's specialize({one}) fixes it"
    )


def sized_by(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> Function:
    """The function with the numbers of its symbols that the shapes of its inputs give.

    ``ValueError`` names a symbol that has none, or has two.
    """
    if not function.symbols:
        return function
    return with_numbers(function, numbers_of(function, named_arrays(function, inputs)))


def with_numbers(function: Function, numbers: Mapping[str, int]) -> Function:
    """``function.specialize(**numbers)``.  The results of the last calls are kept: equal calls return one object."""
    return _specialized(function, tuple(sorted(numbers.items())))


@lru_cache(maxsize=8)
def _specialized(function: Function, numbers: tuple[tuple[str, int], ...]) -> Function:
    return function.specialize(**dict(numbers))


def _of_another_shape(
    function: Function, value: Value, array: Array, numbers: Mapping[str, int]
) -> ValueError:
    own = [f"{name}={number}" for name, number in sorted(numbers.items())]
    known = f", with {', '.join(own)}" if own else ""
    return ValueError(f"@{function.name}: input {value} was given an array of shape {array.shape}{known}")
