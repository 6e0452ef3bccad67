"""Arguments of a run that are not the same on every device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelism.mesh import Mesh
    from parallelism.sharding import TensorSharding


class PerDevice:
    """One value for each device, by rank: ``cluster.run(kernel, PerDevice(["a", "b"]))``."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def __repr__(self) -> str:
        return f"PerDevice({self.values!r})"


class Sharded:
    """An array of which each device gets its shard: ``cluster.run(kernel, Sharded(x, TensorSharding("dp", None)))``.

    Of a partial layout the first of each group gets the value, the others the identity of its operation.
    """

    __slots__ = ("sharding", "value")

    def __init__(self, value: Any, sharding: TensorSharding) -> None:
        if not hasattr(sharding, "shard"):
            raise TypeError(f"Sharded takes an array and its TensorSharding, got {sharding!r}")
        self.value = value
        self.sharding = sharding

    def __repr__(self) -> str:
        return f"Sharded({self.value!r}, {self.sharding!r})"

    def per_device(self, mesh: Mesh) -> PerDevice:
        """The shards, by rank."""
        return PerDevice(self.sharding.shard(self.value, mesh))


class Hole:
    """Stands, in what all devices get, for the argument that each has of its own."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Hole, (self.number,)


def deal(
    args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any], list[PerDevice]]:
    """The arguments with holes in place of those that each device has of its own, and these."""
    own: list[PerDevice] = []

    def common(value: Any, name: str) -> Any:
        if isinstance(value, Sharded):
            try:
                value = value.per_device(mesh)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not isinstance(value, PerDevice):
            return value
        if len(value.values) != mesh.size:
            raise ValueError(f"{name} is a PerDevice of {len(value.values)} values for {mesh.size} devices")
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
