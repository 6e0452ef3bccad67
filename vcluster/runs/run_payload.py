"""The data that a run sends to its devices: the program, the common arguments, and each device's own arguments.

If a part cannot be pickled, the error names it by the program's parameter, as the caller knows it.
"""

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
    """The encoded data of a run. ``own`` is by rank; it is empty if no argument is `PerDevice` or `Sharded`."""

    common: Encoded
    own: list[Encoded]


def pack(
    program: Any, shipped: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh
) -> Shipment:
    """Encode the program and its arguments for the devices of ``mesh``. ``shipped``, if given, replaces the program.

    Raises ``TypeError`` that names the argument, the part of it that cannot be pickled, and the type of that part.
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
    """The error of the first part that cannot be pickled; None if each part can be pickled by itself."""
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
        else:
            yield name, value.value if isinstance(value, Sharded) else value


def _names(program: Any, count: int) -> list[str]:
    """Names of the positional arguments, from the program's signature without the device."""
    if isinstance(program, Operation):
        return [f"input {i + 1} of {type(program).__name__}" for i in range(count)]
    numbers = [f"argument {i + 1}" for i in range(count)]
    try:
        parameters = list(inspect.signature(program).parameters.values())[1:]
    except (TypeError, ValueError):  # a function of compiled code has no signature
        return numbers
    names = [
        f"argument {parameter.name!r}" for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][:count]
    return names + numbers[len(names):]
