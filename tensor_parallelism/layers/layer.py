"""What the layers have in common: arguments checked against their layouts and dealt out, a plan made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device, ShardedOperation
from parallelism.sharding import TensorSharding
from tensor_parallelism.layers.layer_plan import LayerPlan
from tensor_parallelism.products import check_shape

Shape = tuple[int, ...]


class Layer(ShardedOperation):
    """An operation whose sharding has a layout for each of its inputs, by name, and for ``out``.

    Subclasses say how the shapes of their inputs fit each other (`_shapes`), what moves (`_planned`), and, where values
    can be wrong, which are right (`_check_values`).
    """

    NAMES: ClassVar[tuple[str, ...]]
    """Of the inputs, in order."""

    def __init__(self, sharding: Any, kind: type) -> None:
        if not isinstance(sharding, kind):
            raise TypeError(f"{type(self).__name__} takes a {kind.__name__}, got {sharding!r}")
        super().__init__(sharding)
        self._plans: dict[Any, LayerPlan] = {}
        """What the host has planned travels with the operation to the devices."""

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of the inputs, by rank.  Everything that can be wrong is found here, before anything is sent."""
        arrays = self._named(*args)
        self.plan([array.shape for array in arrays], mesh, _dtype(arrays))
        self._check_values(*arrays)
        shards = [getattr(self.sharding, name).shard(x, mesh) for name, x in zip(self.NAMES, arrays, strict=True)]
        return list(zip(*shards, strict=True))

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Any:
        """The whole of the output."""
        return self.sharding.out.unshard(outputs, mesh)

    def plan(self, shapes: Sequence[Sequence[int]], mesh: Mesh, dtype: npt.DTypeLike = np.float64) -> LayerPlan:
        """What moves, for inputs of these shapes, in order; ``print`` it.  ``ValueError`` where they do not fit."""
        given = tuple(tuple(int(n) for n in shape) for shape in shapes)
        key = given, mesh, np.dtype(dtype)
        found = self._plans.get(key)
        if found is None:
            named = dict(zip(self.NAMES, given, strict=True))
            for name, shape in self._shapes(named).items():
                check_shape(name, shape, name, getattr(self.sharding, name), mesh)
            found = self._plans[key] = self._planned(named, mesh, np.dtype(dtype))
        return found

    def _shapes(self, shapes: dict[str, Shape]) -> Mapping[str, Shape]:
        """The shapes of the inputs, which must fit each other, and of ``out``."""
        raise NotImplementedError

    def _planned(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        raise NotImplementedError

    def _check_values(self, *arrays: Array) -> None:
        """``ValueError`` for values that cannot be."""

    def _named(self, *args: Any) -> list[Array]:
        if len(args) != len(self.NAMES):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.NAMES)}, got {len(args)} arrays")
        return list(map(np.asarray, args))

    def _arrived(
        self, device: Device, *shards: Any, shapes: list[Shape] | None = None
    ) -> tuple[list[Array], list[Shape], LayerPlan]:
        """On a device: the shards as arrays, the shapes of the whole inputs, and the plan for them."""
        arrays = self._named(*shards)
        if shapes is None:
            shapes = device.global_shapes(arrays, [getattr(self.sharding, name) for name in self.NAMES])
        return arrays, shapes, self.plan(shapes, device.mesh, _dtype(arrays))


def check_gradient(device: Device, grad: Any, layout: TensorSharding, shape: Shape) -> Array:
    """The gradient of an output as an array; ``ValueError`` if it is not of the shape of the output's shard."""
    found = np.asarray(grad)
    expected = _local_shape(layout, shape, device.mesh, device.rank)
    if found.shape != expected:
        raise ValueError(f"the gradient of y is of the shape of its shard, {expected} on rank {device.rank}, "
                         f"got {found.shape}")
    return found


@lru_cache(maxsize=1024)
def _local_shape(layout: TensorSharding, shape: Shape, mesh: Mesh, rank: int) -> Shape:
    return layout.local_shape(shape, mesh, rank)


def check_tokens(name: str, tokens: Array, vocabulary: int) -> None:
    """``TypeError`` for tokens that are no integers, ``ValueError`` for one outside the vocabulary, by its place."""
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} are integers, got {tokens.dtype}")
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name} are from 0 to {vocabulary - 1}, the vocabulary; got {tokens[place]} at {place}")


def _dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    return np.result_type(*([x.dtype for x in arrays if x.dtype.kind not in "iub"] or [np.dtype(np.float64)]))
