"""What `run` refuses before any device has heard of it: programs that cannot run, and inputs that are not by rank."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from parallelism import Operation
from parallelism.display import shortened
from vcluster.code import PerDevice, code_of

_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_program(program: Any) -> None:
    """Raise ``TypeError`` for what is no function of a device and no `Operation`, or would not run when called."""
    if not callable(program):
        raise TypeError(
            f"run() takes a function of a device or an Operation, got {type(program).__name__}; the function comes first, "
            f"and is not called: run(kernel, x) and not run(kernel(x))"
        )
    if isinstance(program, type) and issubclass(program, Operation):
        name = program.__name__
        raise TypeError(f"run() takes an Operation, got the class {name}; make one of it, as {name}(...)")
    code = code_of(program)
    if code is None or isinstance(program, type):
        return
    if code.co_flags & _ASYNCHRONOUS:
        raise TypeError(
            f"run() takes a function that returns its result, and {code.co_name} is an async function: "
            f"called, it does nothing; write def, and asyncio.run(...) inside it where it has to await"
        )
    if code.co_flags & inspect.CO_GENERATOR:
        raise TypeError(
            f"run() takes a function that returns its result, and {code.co_name} has a yield: called, it "
            f"does nothing; return a list in place of the yield"
        )


def by_rank(inputs: Any, size: int, program: Operation) -> tuple[Any, ...]:
    """The inputs of an operation as arguments. An argument that is the same object on every rank is passed whole."""
    name = f"{type(program).__name__}.inputs"
    if not _is_listed(inputs):
        raise TypeError(
            f"{name} must return a list with one tuple for each of the {size} devices, "
            f"got {shortened(inputs)}"
        )
    if len(inputs) != size:
        raise ValueError(
            f"{name} must return one tuple for each of the {size} devices, got {len(inputs)} tuples"
        )
    for rank, mine in enumerate(inputs):
        if not _is_listed(mine):
            raise TypeError(
                f"{name} must return a tuple for each device, with its arguments; for rank {rank} "
                f"it has {shortened(mine)}. Of one argument it is (argument,)"
            )
    lengths = [len(mine) for mine in inputs]
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} must return tuples of one length, got lengths {lengths}")
    columns: list[Any] = []
    for column in zip(*inputs, strict=True):
        is_shared = all(value is column[0] for value in column)
        columns.append(column[0] if is_shared else PerDevice(column))
    return tuple(columns)


def _is_listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
