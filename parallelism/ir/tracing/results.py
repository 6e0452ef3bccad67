"""What NumPy returns from a call: an array or a number, new memory or that of an argument, and in which order."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from parallelism.ir.tracing.in_place import Writable
from parallelism.ir.tracing.memory_order import (
    Order,
    Place,
    is_by_rows,
    is_reshaped_in_place,
    order_made_by,
    place_of,
)

READ_ONLY = {np.broadcast_to, np.diagonal, np.diag, np.lib.stride_tricks.sliding_window_view}
"""Functions whose results NumPy does not allow to change."""
MAY_COPY: dict[Any, Callable[[Place, Any], bool | None]] = {
    np.reshape: is_reshaped_in_place,
    np.ravel: lambda place, shape: is_by_rows(place),
}
"""Functions that return a view of some arrays and a copy of others."""
MAKING_ARRAYS = {
    np.copy,
    np.zeros_like,
    np.ones_like,
    np.empty_like,
    np.full_like,
    np.where,
    np.select,
    np.tensordot,
    np.roll,
    np.broadcast_to,
    np.pad,
}
"""Functions whose results without dims are arrays.  Others return numbers."""
BY_ROWS = {np.take, np.take_along_axis, np.outer, np.diag, np.repeat, np.tile}
"""Functions whose results lie by rows, whatever the order of the arguments is."""


def computed(result: Any, call: Callable[..., Any], args: Any, options: Any) -> Any:
    """``result`` of a function that computes, with what NumPy would say of its memory."""
    given = result if isinstance(result, list | tuple) else [result]
    results: list[Any] = [x for x in given if isinstance(x, Writable)]
    for x in results:
        x.is_number = not x.ndim and call not in MAKING_ARRAYS
        x.own_memory()
        x._order = None
    operands = list(_arrays_in((args, options)))
    if call in BY_ROWS:
        return result
    if options.get("shape") is not None:  # NumPy keeps the order if the new shape has as many dims
        options = {key: x for key, x in options.items() if key != "shape"}
        if operands[0].ndim != results[0].ndim:
            return result
    if call is np.einsum or not all(_lies_by_rows(x) for x in operands):
        for i, x in enumerate(results):
            x._order = _order_of_call(call, args, options, operands, x.shape, i if result is not x else None)
    return result


def _lies_by_rows(x: Any) -> bool:
    return x._order is None if isinstance(x, Writable) else bool(x.flags.c_contiguous)


def _order_of_call(
    call: Callable[..., Any], args: Any, options: Any, operands: list[Any], shape: Any, place: int | None
) -> Order:
    args, options = _with_places(args, operands), _with_places(options, operands)

    def again(small: list[Any]) -> Any:
        made = call(*_filled(args, small), **_filled(options, small))
        return made if place is None else made[place]

    return order_made_by(again, operands, shape)


class _Hole(int):
    """The place of an operand in the list of them."""


def _with_places(given: Any, operands: list[Any]) -> Any:
    """The arguments without the arrays, which would stay alive."""
    if isinstance(given, dict):
        return {key: _with_places(x, operands) for key, x in given.items()}
    if isinstance(given, list | tuple):
        return (
            [_with_places(x, operands) for x in given]
            if isinstance(given, list)
            else tuple(_with_places(x, operands) for x in given)
        )
    return next((_Hole(i) for i, x in enumerate(operands) if x is given), given)


def _filled(given: Any, small: list[Any]) -> Any:
    if isinstance(given, dict):
        return {key: _filled(x, small) for key, x in given.items()}
    if isinstance(given, list | tuple):
        return (
            [_filled(x, small) for x in given]
            if isinstance(given, list)
            else tuple(_filled(x, small) for x in given)
        )
    return small[given] if isinstance(given, _Hole) else given


def _arrays_in(given: Any) -> Iterator[Any]:
    if isinstance(given, Writable | np.ndarray):
        yield given
    elif isinstance(given, dict):
        yield from _arrays_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _arrays_in(part)


def seen(result: Any, call: Callable[..., Any], base: Any, again: Callable[[Any], Any]) -> Any:
    """``result`` of a function that returns a view of ``base``, or several; ``again`` makes them from the base."""
    if isinstance(result, list | tuple):
        return type(result)(_seen(x, call, base, partial(_one_of, again, i)) for i, x in enumerate(result))
    return _seen(result, call, base, again)


def _one_of(again: Callable[[Any], Any], place: int, base: Any) -> Any:
    return again(base)[place]


def _seen(result: Any, call: Callable[..., Any], base: Any, again: Callable[[Any], Any]) -> Any:
    if not isinstance(base, Writable):
        return result
    array: Any = base
    if not result.ndim and call in _ELEMENTS and not base.is_number:
        result = array.copy() if result is base else result
        result.is_number = True
        return result
    if base.is_number:  # It never changes, so that a view of it is as good as a copy.
        result.is_number = result is base or not (result.ndim or call is np.broadcast_to)
        return result
    if result is base:
        return result
    name = f"numpy.{call.__name__}" if call in READ_ONLY else ""
    if call not in MAY_COPY:
        return result.lies_in(base, again, read_only=name)
    return result.lies_in(base, again, is_view=partial(MAY_COPY[call], place_of(base), result.shape))


_ELEMENTS = {np.flip, np.flipud, np.fliplr, *([np.unstack] if hasattr(np, "unstack") else [])}
"""Functions that return numbers, and not views, where the result has no dims."""
