"""Arguments of a run that differ between devices: `PerDevice` and `Sharded`, also in dicts, lists and tuples."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parallelism.mesh import Mesh
    from parallelism.sharding import TensorSharding


class PerDevice:
    """One value for each device, by rank.

    >>> from vcluster import PerDevice, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     cluster.run(lambda device, name: f"{device.rank}: {name}", PerDevice(["a", "b"])).outputs
    ['0: a', '1: b']
    """

    __slots__ = ("values",)

    def __init__(self, values: Iterable[Any]) -> None:
        if isinstance(values, Mapping | set | frozenset) or not isinstance(values, Iterable):
            raise TypeError(
                "PerDevice takes a list with one value for each device, in the order of ranks; got "
                f"{type(values).__name__}"
            )
        self.values = list(values)

    def __repr__(self) -> str:
        return f"PerDevice({self.values!r})"


class Sharded:
    """An array of which each device gets its shard.  It may lie in a dict, list or tuple, as the weights of a model do.

    >>> import numpy as np
    >>> from vcluster import Sharded, TensorSharding, VirtualCluster
    >>> with VirtualCluster(dp=2, backend="thread") as cluster:
    ...     cluster.run(lambda device, x: x.tolist(), Sharded(np.arange(4), TensorSharding("dp"))).outputs
    [[0, 1], [2, 3]]

    The layout is a `TensorSharding` or its text, ``"[dp, None]"``.
    Under a partial layout, the first member of each group gets the value and the others get the identity element of
    the pending reduction.
    """

    __slots__ = ("sharding", "value")

    def __init__(self, value: Any, sharding: "TensorSharding | str") -> None:
        if not isinstance(sharding, str) and not hasattr(sharding, "shard"):
            raise TypeError(
                f"Sharded takes an array and its TensorSharding, or the text of one, as '[dp, None]'; got {sharding!r}"
            )
        self.value, self.sharding = value, sharding

    def __repr__(self) -> str:
        return f"Sharded({self.value!r}, {self.sharding!r})"

    def per_device(self, mesh: "Mesh") -> PerDevice:
        """The shards, by rank."""
        if isinstance(self.sharding, str):
            from parallelism.sharding import TensorSharding  # most runs need no layout to be read

            return PerDevice(TensorSharding.parse(self.sharding, mesh).shard(self.value, mesh))
        return PerDevice(self.sharding.shard(self.value, mesh))


class Hole(NamedTuple):
    """A placeholder in the common arguments, where each device inserts its own value."""

    number: int


def deal(
    args: tuple[Any, ...], kwargs: dict[str, Any], mesh: "Mesh"
) -> tuple[tuple[Any, ...], dict[str, Any], list[PerDevice]]:
    """The arguments with a `Hole` in place of what differs between devices, and the list of these as `PerDevice`.

    That is a `PerDevice`, a `Sharded`, or a dict, list or tuple that has one in it, at any depth.
    """
    own: list[PerDevice] = []

    def common(value: Any, name: str) -> Any:
        if not _holds_own(value):
            return value
        own.append(PerDevice(_by_rank(value, name, mesh)))
        return Hole(len(own) - 1)

    return (
        tuple(common(value, f"argument {i + 1}") for i, value in enumerate(args)),
        {name: common(value, f"argument {name!r}") for name, value in kwargs.items()},
        own,
    )


def _holds_own(value: Any) -> bool:
    """Whether devices get different values of an argument."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, PerDevice | Sharded):
            return True
        if isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))  # a list may have itself in it
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return False


def _by_rank(value: Any, name: str, mesh: "Mesh") -> list[Any]:
    """The values of an argument, by rank."""
    if isinstance(value, Sharded):
        try:
            return value.per_device(mesh).values
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, PerDevice):
        if len(value.values) != mesh.size:
            raise ValueError(
                f"{name} is a PerDevice and needs one value for each of the {mesh.size} devices, "
                f"got {len(value.values)} values"
            )
        return value.values
    if not _holds_own(value):
        return [value] * mesh.size
    if isinstance(value, dict):
        parts = {key: _by_rank(each, f"{name}[{key!r}]", mesh) for key, each in value.items()}
        return [{key: part[rank] for key, part in parts.items()} for rank in range(mesh.size)]
    items = [_by_rank(each, f"{name}[{place}]", mesh) for place, each in enumerate(value)]
    make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
    values = []
    for rank in range(mesh.size):
        values.append(make([item[rank] for item in items]))
    return values


def fill(value: Any, own: list[Any]) -> Any:
    """An argument with its hole filled from the device's own values."""
    return own[value.number] if isinstance(value, Hole) else value
