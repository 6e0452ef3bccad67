"""Recording: a plain NumPy function runs once on traced arrays, and its NumPy calls become a program."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from parallelism.ir.core import Builder, Function, RecordError, SymbolError, TensorType
from parallelism.ir.recording.numpy_conversions import conversions_recorded
from parallelism.ir.tracing import Traced, lift, recording, refuse_symbols
from parallelism.ir.tracing.refusing import recorded_line


def record(function: Callable[..., Any], *types: Any, name: str | None = None) -> Function:
    """The program of ``function`` for arguments of these types.

    An argument may be a `TensorType`, or a dict, list or tuple of them.  Each type becomes an input, named after the
    parameter and the keys that lead to it (``params.w1``).  Any other argument is passed to the function as it is and
    is constant in the program.  The function returns an array or a dict, list or tuple of arrays: these are the
    outputs, in order.

    The function runs once.  NumPy's calls are recorded; Python's ``for`` and ``if`` have run and are not in the
    program.  `RecordError` names the call and the line of anything that cannot be recorded: code that needs values
    (``if x > 0``, ``float(x)``) or the number of a symbol (``if x.shape[0] > 2``), or functions without an operator.
    """
    builder = Builder(recorded_line)
    names = _parameters(function, len(types))
    with recording(builder), conversions_recorded():
        arguments = [_traced(builder, parameter, type) for parameter, type in zip(names, types, strict=True)]
        try:
            returned = function(*arguments)
        except SymbolError as error:
            refuse_symbols(error)
        outputs = [lift(leaf, builder=builder).value for leaf in _leaves(returned)]
    title = (
        name
        or re.sub(r"[^A-Za-z0-9_.]+", "_", getattr(function, "__name__", "recorded")).strip("_")
        or "recorded"
    )
    return builder.function(title, outputs)


def _parameters(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first ``count`` positional parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "x")
    return names + [f"{rest}.{i}" for i in range(count - len(names))]


def _traced(builder: Builder, name: str, type: Any) -> Any:
    if isinstance(type, TensorType):
        return Traced(builder, builder.input(re.sub(r"[^A-Za-z0-9_.]", "_", name), type))
    if isinstance(type, dict):
        return {key: _traced(builder, f"{name}.{key}", part) for key, part in type.items()}
    if isinstance(type, list | tuple):
        parts = [_traced(builder, f"{name}.{i}", part) for i, part in enumerate(type)]
        return type.__class__(*parts) if hasattr(type, "_fields") else type.__class__(parts)
    return type


def _leaves(returned: Any) -> Iterator[Any]:
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    if isinstance(returned, list | tuple):
        for part in returned:
            yield from _leaves(part)
    elif returned is None:
        raise RecordError(
            "a recorded function must return arrays, or dicts, lists and tuples of them, got None"
        )
    else:
        yield returned
