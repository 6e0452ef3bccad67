"""Arguments of a run that are not the same on every device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PerDevice:
    """One value for each device, by rank: ``cluster.run(kernel, PerDevice(["a", "b"]))``."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def __repr__(self) -> str:
        return f"PerDevice({self.values!r})"


class Hole:
    """Stands, in what all devices get, for the argument that each has of its own."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Hole, (self.number,)


def deal(
    args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> tuple[tuple[Any, ...], dict[str, Any], list[PerDevice]]:
    """The arguments with holes in place of `PerDevice` values, and those."""
    own: list[PerDevice] = []

    def common(value: Any, name: str) -> Any:
        if not isinstance(value, PerDevice):
            return value
        if len(value.values) != size:
            raise ValueError(f"{name} is a PerDevice of {len(value.values)} values for {size} devices")
        own.append(value)
        return Hole(len(own) - 1)

    return (
        tuple(common(value, f"argument {i + 1}") for i, value in enumerate(args)),
        {name: common(value, f"argument {name!r}") for name, value in kwargs.items()},
        own,
    )


def fill(value: Any, own: list[Any]) -> Any:
    """An argument as a device gets it."""
    return own[value.number] if isinstance(value, Hole) else value
