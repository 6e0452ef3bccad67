"""The interface of strategies: an `Operation` runs on a `Device`.

A strategy never sees a process.  It gets a `Device` and calls its collectives.  So the same strategy runs on
processes, on threads, under a recorder that only counts, and on any other implementation of `Device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Axes, Mesh, MeshIndex
from parallelism.operation.array_calls import ArrayCalls, ReduceOp, Work

if TYPE_CHECKING:
    from parallelism.sharding import TensorSharding


@runtime_checkable
class Device(ArrayCalls, Protocol):
    """The methods that a strategy may call.  `vcluster.VirtualDevice` documents each of them.

    >>> from parallelism import Device
    >>> from vcluster import VirtualCluster
    >>> def doubled(device: Device, x: int) -> int:
    ...     return int(device.all_reduce(2 * x, "tp"))
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     cluster.run(doubled, 5).outputs
    [20, 20]

    ``axes`` is a mesh axis, a tuple of axes (the first varies slowest) or None for the whole mesh.
    ``options`` are ``groups=None, out=None, algorithm=None, async_op=False``.  With ``async_op=True`` the
    result is a `Work`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def index(self) -> MeshIndex: ...
    @property
    def state(self) -> dict[Any, Any]: ...
    @property
    def rng(self) -> np.random.Generator: ...

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        """The ranks of this device's group over ``axes``, in group order."""

    def position(self, axes: Axes = None) -> int:
        """The position of this device in its group over ``axes``."""

    def compute(
        self,
        name: str,
        *,
        flops: float = 0,
        nbytes: float = 0,
        seconds: float | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        phase: str | None = None,
        dtype: npt.DTypeLike | None = None,
        other_bytes: tuple[tuple[str, int], ...] = (),
        shape: tuple[int, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """A block of local work of this device: its flops and bytes, for the trace and the prices."""

    def hold(
        self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        """Declare memory that this device holds, for the peaks of the trace."""

    def matmul(self, a: npt.ArrayLike, b: npt.ArrayLike, *, out: np.ndarray | None = None) -> Any:
        """``a @ b``, with its flops and bytes declared."""

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> np.ndarray:
        """An array without values, in memory that collectives need not copy."""

    def barrier(self, axes: Axes = None, **options: Any) -> Any:
        """No member continues before all members have arrived."""

    def collective(
        self,
        kind: str,
        x: Any,
        axes: Axes = None,
        *,
        dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None,
        root: int = 0,
        op: ReduceOp | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
        **options: Any,
    ) -> Any:
        """The collective ``kind``, one of the package or one that was registered."""

    def global_shape(self, x: Any, sharding: TensorSharding | str) -> tuple[int, ...]:
        """The shape of the whole array of which ``x`` is this device's shard."""

    def global_shapes(
        self, xs: Sequence[Any], shardings: Sequence[TensorSharding | str]
    ) -> list[tuple[int, ...]]:
        """The shapes of several whole arrays, agreed on in one exchange."""

    def all_gather_object(self, obj: Any, axes: Axes = None) -> list[Any]:
        """Every member gets a list of the objects of all; they are pickled."""

    def broadcast_object(self, obj: Any, axes: Axes = None, *, root: int = 0) -> Any:
        """Every member gets the object of the member at position ``root``; it is pickled."""

    def send(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> None:
        """Send ``x`` to device ``dst``; a `recv` of the same ``tag`` takes it."""

    def recv(self, src: int, *, tag: int = 0, out: Any = None, axes: Axes = None) -> Any:
        """The next array that device ``src`` sent to this one with ``tag``."""

    def isend(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> Work[None]:
        """Begin to send; `Work.wait` ends it."""

    def irecv(
        self,
        src: int,
        *,
        tag: int = 0,
        shape: Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: Axes = None,
    ) -> Work[Any]:
        """Begin to receive; `Work.wait` gives the array."""

    def sendrecv(self, x: Any, dst: int, src: int, *, tag: int = 0, axes: Axes = None) -> Any:
        """Send ``x`` to device ``dst``, and receive from device ``src`` at the same time."""


class Operation:
    """A program for the whole cluster: the inputs of each device, its work, and the result on the host.

    >>> from parallelism import Operation
    >>> from vcluster import VirtualCluster
    >>> class Largest(Operation):
    ...     def inputs(self, mesh, numbers):
    ...         return [(number,) for number in numbers]
    ...     def __call__(self, device, number):
    ...         return device.all_reduce(number, op="max")
    ...     def result(self, mesh, outputs):
    ...         return int(outputs[0])
    >>> with VirtualCluster(3, backend="thread") as cluster:
    ...     cluster.run(Largest(), [4, 9, 2]).result
    9

    Subclasses override `__call__`.  They override `inputs` to split arguments over devices, and `result` to combine
    the outputs of devices.
    """

    declares_all: ClassVar[bool] = False
    """Whether every op declares its cost.  Then all other compute is the library's Python, and a modelled trace has no
    price for it."""

    kept_by_devices: ClassVar[bool] = False
    """Whether a device may keep the operation from run to run, with all that it has cached on it.  For classes whose
    objects do not change except for what they derive from themselves: an attribute may be replaced, and an array may
    get new elements, but no list, dict or object in it may change.  Each class says it for itself: subclasses do not
    inherit it."""

    @property
    def writes_inputs(self) -> bool:
        """Whether a device writes into its inputs.  Where devices share the caller's arrays, each then gets copies."""
        return False

    def inputs(self, mesh: Mesh, *args: Any, **_: Any) -> list[tuple[Any, ...]]:
        """The inputs of each rank, as a list indexed by rank.  By default every rank gets all arguments.

        A subclass names its arguments.  No keyword arrives: with ``*args`` alone, type checkers would refuse that.
        """
        return [args] * mesh.size

    def __call__(self, device: Device, *inputs: Any, **named: Any) -> Any:
        """The work of one device, which runs on every device with its own inputs."""
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(device, ...), the work of one device"
        )

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Any:
        """The result on the host, from the outputs indexed by rank.  By default it is the output of rank 0."""
        return outputs[0]


class ShardedOperation(Operation):
    """An operation on sharded tensors with a forward and a backward.

    >>> from parallelism import Mesh, ShardedOperation, TensorSharding
    >>> from tensor_parallelism import Dropout
    >>> isinstance(Dropout(TensorSharding("dp", None), 0.1), ShardedOperation)
    True

    ``forward(device, *shards) -> (out, saved)``; ``backward(device, saved, grad) -> grads``.  The gradients
    have the order and the layouts of the inputs.
    """

    def __init__(self, sharding: Any) -> None:
        self.sharding = sharding

    def forward(self, device: Device, *shards: Any) -> tuple[Any, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, device: Device, saved: Any, grad: Any) -> tuple[Any, ...]:
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def __call__(self, device: Device, *inputs: Any) -> Any:
        return self.forward(device, *inputs)[0]
