"""The base classes of the layers and of their layouts.

They check layouts, check arguments against layouts, shard the arguments, and compute a plan once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from html import escape
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, plain_array
from parallelism.display.markup import Markup, figure, note, table, tint
from parallelism.dtypes import as_dtype, common_dtype, is_numeric
from parallelism.mesh import Mesh
from parallelism.operation import Device, ShardedOperation
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.products.layer_plan import LayerPlan
from tensor_parallelism.products.product import DType, Shape

Layouts = TypeVar("Layouts", bound=Any)
Planned = TypeVar("Planned")
Policy = TypeVar("Policy", bound=Enum)
Changes = Mapping[str, tuple[Any, ...]]
"""For each tensor that is resharded, by name: its layout before, its layout after, and its shape.

A fourth entry is its dtype, if that is not the dtype of the layer.
"""
Moving = tuple[str, Changes, Changes]
"""What a layer is, and the moves of its forward and of its backward."""


def with_article(kind: type) -> str:
    """``an Embedding``, ``a MatMul``."""
    return f"a{'n' * (kind.__name__[0] in 'AEIOU')} {kind.__name__}"


@dataclass(frozen=True)
class Sharding:
    """The layouts of an operation: its fields are the layouts of the inputs, and of ``out``.

    ``ndims``: for each field, the number of dims that a layout has at least.  With ``exactly`` a layout must have
    exactly this number; then each field is replaced by the layout without ``...``.  ``waits`` names the fields that may
    have a pending reduction, which must be a sum; None: every field may have any.
    """

    _wanted: ClassVar[tuple[Sequence[int], bool, Sequence[str] | None]]

    def __init_subclass__(
        cls, *, ndims: Sequence[int], exactly: bool = False, waits: Sequence[str] | None = None
    ) -> None:
        cls._wanted = ndims, exactly, waits

    def __post_init__(self) -> None:
        """``TypeError`` or ``ValueError`` unless the fields are as wanted."""
        subject, (ndims, exactly, waits) = f"of {with_article(type(self))}", self._wanted
        for name, ndim in zip((field.name for field in fields(self)), ndims, strict=True):
            layout = getattr(self, name)
            if not isinstance(layout, TensorSharding):
                raise TypeError(f"{name} {subject} is a TensorSharding, got {layout!r}")
            given = len(layout.dims)
            open_ended = layout.ellipsis is not None
            if given < ndim:
                fits = open_ended
            else:
                fits = given == ndim or not exactly
            if not fits:
                least = "" if exactly else "at least "
                raise ValueError(
                    f"{name} {subject} is of {least}{ndim} dim{'s' * (ndim > 1)}, got {layout!r}"
                )
            if exactly:
                object.__setattr__(self, name, layout.over(ndim))
            if waits is not None and layout.partial and name not in waits:
                raise ValueError(f"{name} {subject} cannot be partial, got {layout!r}")
            if waits is not None and layout.op != "sum":
                raise ValueError(
                    f"{name} {subject} may have a pending sum, but no other pending reduction; got {layout!r}"
                )


class PlannedOperation(ShardedOperation, Generic[Layouts, Planned]):
    """An operation with a plan, whose sharding has a layout for each input, by name, and for ``out``.

    Subclasses compute the plan in `_planned`.  Inputs of the same shapes have one plan.  Those whose inputs can have
    wrong values check them in `_check_values`.
    """

    KIND: ClassVar[type]
    """The class of the sharding."""
    NAMES: tuple[str, ...]
    """The names of the inputs, in order."""
    sharding: Layouts

    def __init__(self, sharding: Layouts) -> None:
        if not isinstance(sharding, self.KIND):
            raise TypeError(f"{type(self).__name__} takes {with_article(self.KIND)}, got {sharding!r}")
        super().__init__(sharding)
        self._plans: dict[Any, Planned] = {}
        """The plans that the host has made.  They are sent to the devices with the operation."""

    def _repr_html_(self) -> str:
        policy = getattr(self, "policy", None) or getattr(self.sharding, "policy", None)
        layouts = [(field.name, getattr(self.sharding, field.name)) for field in fields(self.sharding)]
        rows = [
            (
                name,
                Markup(
                    f'<code style="background:{tint(place)};padding:0 4px">{escape(layout.short())}</code>'
                ),
                repr(layout),
            )
            for place, (name, layout) in enumerate(layouts)
        ]
        return figure(
            table(rows, ("tensor", "layout", ""), left=3),
            note("operation.plan(shapes, mesh) shows what will run, and why"),
            title=f"{type(self).__name__}" + (f", {policy.name}" if isinstance(policy, Enum) else ""),
        )

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of the inputs, by rank.  All errors of the inputs are raised here, before anything is sent."""
        arrays = self._named(*args)
        self.plan([array.shape for array in arrays], mesh, self._dtype(arrays))
        self._check_values(*arrays)
        return self._shards(mesh, arrays)

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Any:
        """The whole output."""
        return self.sharding.out.unshard(outputs, mesh)

    def plan(self, shapes: Iterable[Sequence[int]], mesh: Mesh, dtype: npt.DTypeLike = np.float64) -> Planned:
        """The plan for inputs of these shapes, in order; ``print`` it.  ``ValueError`` if they do not fit."""
        key = tuple(tuple(map(int, shape)) for shape in shapes), mesh, as_dtype(dtype)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> Planned:
        raise NotImplementedError

    def _dtype(self, arrays: Sequence[Array]) -> DType:
        """The dtype of the computation."""
        return common_dtype(*(array.dtype for array in arrays))

    def _check_values(self, *arrays: Array) -> None:
        """``ValueError`` or ``TypeError`` for wrong values."""

    def _named(self, *args: Any) -> list[Array]:
        """The inputs as arrays; ``TypeError`` unless there is one of numbers or bools for each name."""
        if len(args) != len(self.NAMES):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.NAMES)}, got {len(args)} arrays")
        arrays = []
        for name, arg in zip(self.NAMES, args, strict=True):
            array = plain_array(name, arg)
            if not is_numeric(array.dtype):
                raise TypeError(
                    f"{name} of {with_article(type(self))} takes numbers or bools, got an array of dtype "
                    f"{array.dtype}; convert it first, as by {name}.astype(np.float64)"
                )
            arrays.append(array)
        return arrays

    def _arrived(
        self, device: Device, *shards: Any, shapes: Iterable[Shape] | None = None
    ) -> tuple[list[Array], Planned]:
        """The shards on a device as arrays, and the plan.

        ``shapes`` are the shapes of the whole inputs; if they are not given, the devices exchange them.
        """
        arrays = self._named(*shards)
        if shapes is None:
            shapes = device.global_shapes(arrays, [getattr(self.sharding, name) for name in self.NAMES])
        return arrays, self.plan(shapes, device.mesh, self._dtype(arrays))

    def _shards(self, mesh: Mesh, arrays: Sequence[Array]) -> list[tuple[Any, ...]]:
        """The shards of the whole inputs, by rank."""
        shards = [
            getattr(self.sharding, name).shard(x, mesh) for name, x in zip(self.NAMES, arrays, strict=True)
        ]
        return list(zip(*shards, strict=True))

    def _check_shapes(self, shapes: Mapping[str, Shape], mesh: Mesh, **called: str) -> None:
        """``ValueError`` if the shape of a tensor does not fit its layout, or the layout does not fit the mesh.

        ``called`` has the names of the tensors that are not called as their layouts.
        """
        for name, shape in shapes.items():
            layout = getattr(self.sharding, name)
            try:
                layout.slices(shape, mesh, 0)
            except ValueError as error:
                raise ValueError(
                    f"{called.get(name, name)} of shape {shape} and {name}={layout!r}: {error}"
                ) from None

    def _allowed(self, policy: Policy | None, kind: type[Policy], allowed: Sequence[Policy]) -> Policy:
        """The given policy, or the first allowed one for None; ``ValueError`` if the layouts do not allow it."""
        wanted = allowed[0] if policy is None else kind(policy)
        if wanted not in allowed:
            raise ValueError(
                f"{type(self).__name__} with policy={wanted.name} needs layouts of that policy, "
                f"{self.sharding!r} is {' or '.join(one.name for one in allowed)}"
            )
        return wanted


class Layer(PlannedOperation[Layouts, LayerPlan]):
    """A planned operation that moves only its inputs, its output and their gradients.

    Subclasses check the shapes of their inputs in `_shapes` and return the title of the plan and the moves of forward
    and backward in `_moves`.
    """

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> LayerPlan:
        named = dict(zip(self.NAMES, shapes, strict=True))
        self._check_shapes(self._shapes(named), mesh)
        title, *moves = self._moves(named, mesh)
        forward, backward = (_plans(changes, dtype, mesh) for changes in moves)
        return LayerPlan(title, shapes, dtype, mesh, forward, backward)

    def _dtype(self, arrays: Sequence[Array]) -> DType:
        return common_dtype(
            *([x.dtype for x in arrays if x.dtype.kind not in "iub"] or [np.dtype(np.float64)])
        )

    def _shapes(self, shapes: dict[str, Shape]) -> Mapping[str, Shape]:
        """The shapes of the inputs and of ``out``; ``ValueError`` if the inputs do not fit each other."""
        raise NotImplementedError

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        raise NotImplementedError


def _plans(changes: Changes, dtype: DType, mesh: Mesh) -> dict[str, ReshardingPlan]:
    plans = {}
    for name, (source, target, shape, *own) in changes.items():
        plans[name] = plan_resharding(source, target, shape, own[0] if own else dtype, mesh)
    return plans


def check_shard(
    device: Device, shard: Any, layout: TensorSharding, shape: Shape, what: str = "the gradient of y"
) -> Array:
    """A shard as an array; ``ValueError`` if it is not that of a tensor of this shape on this device."""
    array = plain_array(what, shard)
    expected = _local_shape(layout, shape, device.mesh, device.rank)
    if array.shape != expected:
        raise ValueError(
            f"{what} must have the shape of its shard, {expected} on rank {device.rank}, got {array.shape}"
        )
    return array


@lru_cache(maxsize=1024)
def _local_shape(layout: TensorSharding, shape: Shape, mesh: Mesh, rank: int) -> Shape:
    return layout.local_shape(shape, mesh, rank)


def check_tokens(name: str, tokens: Array, vocabulary: int) -> None:
    """``TypeError`` if tokens are not integers; ``ValueError`` with the place of a token outside the vocabulary."""
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {tokens.dtype}")
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{name} are from 0 to {vocabulary - 1}, the vocabulary; got {tokens[place]} at {place}"
        )
