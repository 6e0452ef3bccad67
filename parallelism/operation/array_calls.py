"""The types of collectives, for type checkers: an array in gives an array out, and ``async_op=True`` gives a `Work`.

The dtype of the result is not said: the sum of bools is int64.  Of a scalar, a tree of arrays or another value, nothing
is said.  `Device` has these methods, and `typed_as` gives their types to the methods of a class that has docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

import numpy as np

from parallelism.arrays import Array
from parallelism.mesh import Axes

if TYPE_CHECKING:
    from parallelism.sharding import TensorSharding

Groups = Sequence[Sequence[int]]
ReduceOp = str | Callable[[Any, Any], Any]
Ints = Sequence[int]
Pairs = Sequence[tuple[int, int]]
Other = complex | np.generic | tuple[Any, ...] | list[Any] | dict[Any, Any] | None
"""What a collective takes beside an array: a scalar or a tree of arrays; None of a rank that has nothing to give."""
Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result", covariant=True)


class Options(TypedDict, total=False):
    """The options of every collective; `vcluster.VirtualDevice` documents them."""

    groups: Groups | None
    out: Array | None
    algorithm: str | None


class Now(Options, total=False):
    """Options of a call that returns its result."""

    async_op: Literal[False]


class Later(Options):
    """Options of a call that returns a `Work`."""

    async_op: Literal[True]


class Work(Protocol[Result]):
    """An asynchronous operation: `wait` returns its result, `done` says whether the result is there."""

    def wait(self) -> Result: ...
    def done(self) -> bool: ...


def typed_as(declared: Method) -> Callable[[Callable[..., Any]], Method]:
    """A decorator: for a type checker, the method has the types of ``declared``.  When run, it is the method itself."""
    return lambda method: method  # type: ignore[return-value]


class ArrayCalls(Protocol):
    """The collectives of a device, by what they give for arrays.

    ``axes`` names the group: members are those devices that differ in these axes only.  `vcluster.VirtualDevice` says
    of each call what it refuses, and the bytes that it moves.
    """

    @overload
    def all_reduce(
        self, x: Array, axes: Axes = None, *, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Array: ...
    @overload
    def all_reduce(
        self, x: Other, axes: Axes = None, *, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Any: ...
    @overload
    def all_reduce(
        self, x: Array, axes: Axes = None, *, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Array]: ...
    @overload
    def all_reduce(
        self, x: Other, axes: Axes = None, *, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Any]: ...
    def all_reduce(self, x: Any, axes: Axes = None, *, op: ReduceOp = "sum", **options: Any) -> Any:
        """Every member gets the reduced (``op``) arrays of all."""

    @overload
    def all_gather(self, x: Array, axes: Axes = None, *, dim: int = 0, **options: Unpack[Now]) -> Array: ...
    @overload
    def all_gather(self, x: Other, axes: Axes = None, *, dim: int = 0, **options: Unpack[Now]) -> Any: ...
    @overload
    def all_gather(
        self, x: Array, axes: Axes = None, *, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Array]: ...
    @overload
    def all_gather(
        self, x: Other, axes: Axes = None, *, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Any]: ...
    def all_gather(self, x: Any, axes: Axes = None, *, dim: int = 0, **options: Any) -> Any:
        """Every member gets the arrays of all, joined along ``dim``."""

    @overload
    def reduce_scatter(
        self, x: Array, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Array: ...
    @overload
    def reduce_scatter(
        self, x: Other, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Any: ...
    @overload
    def reduce_scatter(
        self, x: Array, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Array]: ...
    @overload
    def reduce_scatter(
        self, x: Other, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Any]: ...
    def reduce_scatter(
        self, x: Any, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Any
    ) -> Any:
        """Each member gets its piece, along ``dim``, of the reduced arrays of all."""

    @overload
    def all_to_all(
        self,
        x: Array,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Ints | None = None,
        **options: Unpack[Now],
    ) -> Array: ...
    @overload
    def all_to_all(
        self,
        x: Other,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Ints | None = None,
        **options: Unpack[Now],
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        x: Array,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Ints | None = None,
        **options: Unpack[Later],
    ) -> Work[Array]: ...
    @overload
    def all_to_all(
        self,
        x: Other,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Ints | None = None,
        **options: Unpack[Later],
    ) -> Work[Any]: ...
    def all_to_all(
        self,
        x: Any,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Ints | None = None,
        **options: Any,
    ) -> Any:
        """Each member gets its piece of each array: cut along one dim, joined along another."""

    @overload
    def broadcast(
        self, x: Array | None, axes: Axes = None, *, root: int = 0, **options: Unpack[Now]
    ) -> Array: ...
    @overload
    def broadcast(self, x: Other, axes: Axes = None, *, root: int = 0, **options: Unpack[Now]) -> Any: ...
    @overload
    def broadcast(
        self, x: Array | None, axes: Axes = None, *, root: int = 0, **options: Unpack[Later]
    ) -> Work[Array]: ...
    @overload
    def broadcast(
        self, x: Other, axes: Axes = None, *, root: int = 0, **options: Unpack[Later]
    ) -> Work[Any]: ...
    def broadcast(self, x: Any, axes: Axes = None, *, root: int = 0, **options: Any) -> Any:
        """Every member gets the array of the member at position ``root``."""

    @overload
    def scatter(
        self, x: Array | None, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Now]
    ) -> Array: ...
    @overload
    def scatter(
        self, x: Other, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Now]
    ) -> Any: ...
    @overload
    def scatter(
        self, x: Array | None, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Array]: ...
    @overload
    def scatter(
        self, x: Other, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Any]: ...
    def scatter(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """Each member gets its piece, along ``dim``, of the array of the member at position ``root``."""

    @overload
    def reduce(
        self, x: Array, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Array | None: ...
    @overload
    def reduce(
        self, x: Other, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Unpack[Now]
    ) -> Any: ...
    @overload
    def reduce(
        self, x: Array, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Array | None]: ...
    @overload
    def reduce(
        self, x: Other, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Unpack[Later]
    ) -> Work[Any]: ...
    def reduce(
        self, x: Any, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Any
    ) -> Any:
        """The member at position ``root`` gets the reduced arrays of all; the others get None."""

    @overload
    def gather(
        self, x: Array, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Now]
    ) -> Array | None: ...
    @overload
    def gather(
        self, x: Other, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Now]
    ) -> Any: ...
    @overload
    def gather(
        self, x: Array, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Array | None]: ...
    @overload
    def gather(
        self, x: Other, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Unpack[Later]
    ) -> Work[Any]: ...
    def gather(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """The member at position ``root`` gets the arrays of all, joined along ``dim``; the others get None."""

    @overload
    def all_scatter(self, x: Array, axes: Axes = None, **options: Unpack[Now]) -> list[Array]: ...
    @overload
    def all_scatter(self, x: Other, axes: Axes = None, **options: Unpack[Now]) -> Any: ...
    @overload
    def all_scatter(self, x: Array, axes: Axes = None, **options: Unpack[Later]) -> Work[list[Array]]: ...
    @overload
    def all_scatter(self, x: Other, axes: Axes = None, **options: Unpack[Later]) -> Work[Any]: ...
    def all_scatter(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """Every member gets a list of the arrays of all, not joined."""

    @overload
    def permute(self, x: Array, pairs: Pairs, axes: Axes = None, **options: Unpack[Now]) -> Array: ...
    @overload
    def permute(self, x: Other, pairs: Pairs, axes: Axes = None, **options: Unpack[Now]) -> Any: ...
    @overload
    def permute(self, x: Array, pairs: Pairs, axes: Axes = None, **options: Unpack[Later]) -> Work[Array]: ...
    @overload
    def permute(self, x: Other, pairs: Pairs, axes: Axes = None, **options: Unpack[Later]) -> Work[Any]: ...
    def permute(self, x: Any, pairs: Pairs, axes: Axes = None, **options: Any) -> Any:
        """Member ``b`` gets the array of member ``a`` for each pair ``(a, b)``, and zeros without one."""

    @overload
    def shift(self, x: Array, axes: Axes = None, *, by: int = 1, **options: Unpack[Now]) -> Array: ...
    @overload
    def shift(self, x: Other, axes: Axes = None, *, by: int = 1, **options: Unpack[Now]) -> Any: ...
    @overload
    def shift(self, x: Array, axes: Axes = None, *, by: int = 1, **options: Unpack[Later]) -> Work[Array]: ...
    @overload
    def shift(self, x: Other, axes: Axes = None, *, by: int = 1, **options: Unpack[Later]) -> Work[Any]: ...
    def shift(self, x: Any, axes: Axes = None, *, by: int = 1, **options: Any) -> Any:
        """Each member gets the array of the member ``by`` positions before it, in a circle."""

    @overload
    def reshard(
        self,
        x: Array,
        source: TensorSharding | str,
        target: TensorSharding | str,
        *,
        shape: Ints | None = None,
        axes: Axes = None,
    ) -> Array: ...
    @overload
    def reshard(
        self,
        x: Other,
        source: TensorSharding | str,
        target: TensorSharding | str,
        *,
        shape: Ints | None = None,
        axes: Axes = None,
    ) -> Any: ...
    def reshard(
        self,
        x: Any,
        source: TensorSharding | str,
        target: TensorSharding | str,
        *,
        shape: Ints | None = None,
        axes: Axes = None,
    ) -> Any:
        """The device's shard in the layout ``target``, from its shard in ``source``."""
