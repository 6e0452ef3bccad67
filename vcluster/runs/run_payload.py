"""What a run sends to its devices: the program, the arguments that all get, and those that each has of its own.

What cannot be sent is named as the caller knows it: by the parameter of the program, not by its place in a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster.code import PerDevice, Sharded, code_of
from vcluster.code.arguments import deal
from vcluster.code.pickling import dump
from vcluster.messages import Encoded
from vcluster.messages.encoding import encode


class Shipment(NamedTuple):
    """Ready to be handed over; ``own``, by rank, is empty if no argument is `PerDevice` or `Sharded`."""

    common: Encoded
    own: list[Encoded]


def pack(
    program: Any, shipped: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh
) -> Shipment:
    """The program (``shipped``, where that is to run in its place) and its arguments for the devices of ``mesh``.

    Raises ``TypeError`` that tells which argument, which part of it and of which type cannot be sent.
    """
    common_args, common_kwargs, own = deal(args, dict(kwargs), mesh)
    try:
        common = encode((shipped or program, common_args, common_kwargs), "the program and its arguments")
        mine = [
            encode([argument.values[rank] for argument in own], f"the arguments of rank {rank}")
            for rank in range(mesh.size if own else 0)
        ]
    except TypeError as error:
        named = _named(program, args, kwargs)
        if named is None:
            raise
        raise named from error.__cause__
    return Shipment(common, mine)


def _named(program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError | None:
    """The error of the first part that cannot be sent; None if each can by itself."""
    for subject, value in _parts(program, args, kwargs):
        try:
            dump(value, subject, lambda buffer: None)
        except TypeError as error:
            return error
    return None


def _parts(program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    code = code_of(program)
    yield "the program" + ("" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"), program
    names = _names(program, len(args))
    for name, value in [*zip(names, args, strict=True), *((f"argument {name!r}", v) for name, v in kwargs.items())]:
        if isinstance(value, PerDevice):
            yield from ((f"{name} of rank {rank}", own) for rank, own in enumerate(value.values))
        elif isinstance(value, Sharded):
            yield name, value.value
        else:
            yield name, value


def _names(program: Any, count: int) -> list[str]:
    """What the positional arguments are called: by the program's signature, behind the device."""
    if isinstance(program, Operation):
        return [f"input {i + 1} of {type(program).__name__}" for i in range(count)]
    numbers = [f"argument {i + 1}" for i in range(count)]
    try:
        parameters = list(inspect.signature(program).parameters.values())[1:]
    except (TypeError, ValueError):  # of a function of compiled code
        return numbers
    names = [
        f"argument {parameter.name!r}" for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][:count]
    return names + numbers[len(names):]
