"""The base classes of the layers: they check arguments against layouts, shard them, and compute a plan once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device, ShardedOperation
from parallelism.sharding import TensorSharding
from tensor_parallelism.products.layer_plan import LayerPlan
from tensor_parallelism.products.layouts import check_shape

Shape = tuple[int, ...]
Plan = TypeVar("Plan")
Policy = TypeVar("Policy", bound=Enum)


class PlannedOperation(ShardedOperation, Generic[Plan]):
    """An operation with a plan, whose sharding has a layout for each input, by name, and for ``out``.

    Subclasses compute the plan in `_planned`.  Inputs of the same shapes have one plan.
    """

    NAMES: tuple[str, ...]
    """The names of the inputs, in order."""

    def __init__(self, sharding: Any, kind: type) -> None:
        if not isinstance(sharding, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise TypeError(f"{type(self).__name__} takes {article} {kind.__name__}, got {sharding!r}")
        super().__init__(sharding)
        self._plans: dict[Any, Plan] = {}
        """The plans that the host has made.  They are sent to the devices with the operation."""

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Any:
        """The whole output."""
        return self.sharding.out.unshard(outputs, mesh)

    def plan(self, shapes: Sequence[Sequence[int]], mesh: Mesh, dtype: npt.DTypeLike = np.float64) -> Plan:
        """The plan for inputs of these shapes, in order; ``print`` it.  ``ValueError`` if they do not fit."""
        given = tuple(tuple(int(n) for n in shape) for shape in shapes)
        key = given, mesh, np.dtype(dtype)
        if key not in self._plans:
            self._plans[key] = self._planned(given, mesh, np.dtype(dtype))
        return self._plans[key]

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: np.dtype[Any]) -> Plan:
        raise NotImplementedError

    def _named(self, *args: Any) -> list[Array]:
        """The inputs as arrays; ``TypeError`` unless there is one for each name."""
        if len(args) != len(self.NAMES):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.NAMES)}, got {len(args)} arrays")
        return list(map(np.asarray, args))

    def _shards(self, mesh: Mesh, arrays: Sequence[Array]) -> list[tuple[Any, ...]]:
        """The shards of the whole inputs, by rank."""
        shards = [getattr(self.sharding, name).shard(x, mesh) for name, x in zip(self.NAMES, arrays, strict=True)]
        return list(zip(*shards, strict=True))

    def _allowed(self, policy: Policy | None, kind: type[Policy], allowed: Sequence[Policy]) -> Policy:
        """The given policy, or the first allowed one for None; ``ValueError`` if the layouts do not allow it."""
        wanted = allowed[0] if policy is None else kind(policy)
        if wanted not in allowed:
            raise ValueError(f"{type(self).__name__} with policy={wanted.name} needs layouts of that policy, "
                             f"{self.sharding!r} is {' or '.join(one.name for one in allowed)}")
        return wanted


class Layer(PlannedOperation[LayerPlan]):
    """A planned operation that moves only its inputs, its output and their gradients.

    Subclasses check the shapes of their inputs in `_shapes` and return the moves in `_moves`.  Those whose inputs can
    have wrong values check them in `_check_values`.
    """

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of the inputs, by rank.  All errors of the inputs are raised here, before anything is sent."""
        arrays = self._named(*args)
        self.plan([array.shape for array in arrays], mesh, _dtype(arrays))
        self._check_values(*arrays)
        return self._shards(mesh, arrays)

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        named = dict(zip(self.NAMES, shapes, strict=True))
        for name, shape in self._shapes(named).items():
            check_shape(name, shape, name, getattr(self.sharding, name), mesh)
        return self._moves(named, mesh, dtype)

    def _shapes(self, shapes: dict[str, Shape]) -> Mapping[str, Shape]:
        """The shapes of the inputs and of ``out``; ``ValueError`` if the inputs do not fit each other."""
        raise NotImplementedError

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        raise NotImplementedError

    def _check_values(self, *arrays: Array) -> None:
        """``ValueError`` or ``TypeError`` for wrong values."""

    def _arrived(
        self, device: Device, *shards: Any, shapes: list[Shape] | None = None
    ) -> tuple[list[Array], list[Shape], LayerPlan]:
        """The shards on a device as arrays, the shapes of the whole inputs, and the plan for these shapes."""
        arrays = self._named(*shards)
        if shapes is None:
            shapes = device.global_shapes(arrays, [getattr(self.sharding, name) for name in self.NAMES])
        return arrays, shapes, self.plan(shapes, device.mesh, _dtype(arrays))


def check_gradient(device: Device, grad: Any, layout: TensorSharding, shape: Shape, name: str = "y") -> Array:
    """The gradient of an output as an array; ``ValueError`` if it is not of the shape of the output's shard."""
    array = np.asarray(grad)
    expected = _local_shape(layout, shape, device.mesh, device.rank)
    if array.shape != expected:
        raise ValueError(f"the gradient of {name} is of the shape of its shard, {expected} on rank {device.rank}, "
                         f"got {array.shape}")
    return array


@lru_cache(maxsize=1024)
def _local_shape(layout: TensorSharding, shape: Shape, mesh: Mesh, rank: int) -> Shape:
    return layout.local_shape(shape, mesh, rank)


def check_tokens(name: str, tokens: Array, vocabulary: int) -> None:
    """``TypeError`` if tokens are not integers; ``ValueError`` with the place of a token outside the vocabulary."""
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} are integers, got {tokens.dtype}")
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name} are from 0 to {vocabulary - 1}, the vocabulary; got {tokens[place]} at {place}")


def _dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    return np.result_type(*([x.dtype for x in arrays if x.dtype.kind not in "iub"] or [np.dtype(np.float64)]))
