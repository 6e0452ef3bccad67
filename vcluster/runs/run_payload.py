"""The data that a run sends to its devices: the program, the common arguments, and each device's own arguments.

If a part cannot be pickled, the error names it by the program's parameter, as the caller knows it.
"""

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from parallelism.mesh import Mesh
from parallelism.operation import Operation
from vcluster.code import PerDevice, Sharded, code_of
from vcluster.code.arguments import deal
from vcluster.code.pickling import dump, has_parts_by_value
from vcluster.messages import Encoded
from vcluster.messages.encoding import encode
from vcluster.processes.kept_programs import MOST_PROGRAMS


class Shipment(NamedTuple):
    """The encoded data of a run. ``own`` is by rank; it is empty if no argument is `PerDevice` or `Sharded`."""

    common: Encoded
    own: list[Encoded]
    kept: "KeptEncoding | None" = None
    """The program, if devices may keep it; then ``common`` has None in its place."""


class KeptEncoding(NamedTuple):
    """A program that devices may keep, encoded."""

    encoded: Encoded
    digest: bytes
    """Equal for equal encoded programs."""

    @property
    def is_fixed(self) -> bool:
        """Whether it stays what it is as long as no attribute is replaced: it has no arrays, and nothing in it travels by
        value."""
        return not self.encoded.buffers and not has_parts_by_value(self.encoded.description)


class KeptEncodings:
    """The encodings of the last programs that devices may keep, as long as these programs live."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[weakref.ref[Operation], dict[str, Any], KeptEncoding]] = (
            OrderedDict()
        )

    def of(self, program: Operation) -> KeptEncoding:
        """The encoding of a program, made again if the program may have changed: if one of its attributes was replaced,
        or an attribute of these; and always if it has arrays, or a class or a function in it travels by value, with the
        globals that it reads.

        ``TypeError`` as `encode`.
        """
        key = id(program)
        state = program.__getstate__()
        entries = self._entries
        state = state if isinstance(state, dict) else {"": state}
        known = entries.get(key)
        state = state | _attributes_of(state)
        if known is not None and known[2].is_fixed and _same(known[1], state):
            entries.move_to_end(key)
            return known[2]
        encoded = encode(program, "the program")
        made = KeptEncoding(encoded, encoded.digest)
        entries[key] = weakref.ref(program, lambda _: entries.pop(key, None)), state, made
        while len(entries) > MOST_PROGRAMS:
            entries.popitem(last=False)
        return made


def _attributes_of(parts: dict[str, Any]) -> dict[str, Any]:
    """What the attributes of a program consist of, but for what they derive: an optimizer may be given another rate."""
    found = {}
    for name, part in parts.items():
        for inner, value in getattr(part, "__dict__", {}).items():
            if not isinstance(getattr(type(part), inner, None), cached_property):
                found[f"{name}.{inner}"] = value
    return found


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether all attributes are the same objects, or empty dicts."""
    return a.keys() == b.keys() and all(
        a[name] is b[name] or (type(a[name]) is type(b[name]) is dict and not a[name] and not b[name])
        for name in a
    )


def pack(
    program: Any,
    shipped: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    encodings: KeptEncodings,
) -> Shipment:
    """Encode the program and its arguments for the devices of ``mesh``. ``shipped``, if given, replaces the program.

    Raises ``TypeError`` that names the argument, the part of it that cannot be pickled, and the type of that part.
    """
    common_args, common_kwargs, own = deal(args, dict(kwargs), mesh)
    kept: KeptEncoding | None = None
    try:
        if shipped is None and vars(type(program)).get("kept_by_devices", False):
            kept = encodings.of(program)
        sent = None if kept else shipped or program
        common = encode((sent, common_args, common_kwargs), "the program and its arguments")
        mine = []
        for rank in range(mesh.size if own else 0):
            mine.append(encode([argument.values[rank] for argument in own], f"the arguments of rank {rank}"))
    except TypeError as error:
        named = _named(program, args, kwargs)
        if named is None:
            raise
        raise named from error.__cause__
    return Shipment(common, mine, kept)


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
    for name, value in [
        *zip(names, args, strict=True),
        *((f"argument {name!r}", v) for name, v in kwargs.items()),
    ]:
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
        f"argument {parameter.name!r}"
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][:count]
    return names + numbers[len(names) :]
