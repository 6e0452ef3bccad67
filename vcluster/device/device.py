"""`VirtualDevice`: the interface of the cluster for the kernel that runs on one device."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from parallelism.collectives import checked_extents, checked_peer, rank_at, shift_pairs
from parallelism.mesh import Axes, Mesh, MeshIndex
from parallelism.operation import ReduceOp
from parallelism.operation.matmul_cost import matmul_cost
from vcluster.code.pickling import dump
from vcluster.collectives import Collectives
from vcluster.messages import Endpoint, Pending, VirtualChannel
from vcluster.tracing import Recorder, dtype_name

if TYPE_CHECKING:
    from parallelism.sharding import TensorSharding

_USUAL_ELSEWHERE = {
    "psum": "all_reduce", "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all",
    "psumscatter": "reduce_scatter", "reducescatter": "reduce_scatter", "bcast": "broadcast", "ppermute": "permute",
    "getrank": "rank", "rankid": "rank", "axisindex": "position", "getsize": "size", "worldsize": "size",
    "numdevices": "size", "isendrecv": "sendrecv", "allgatherobject": "all_gather_object",
}
"""Names in other libraries, in lower case and without underscores, and the names here."""


class VirtualDevice:
    """One device of a virtual cluster: its place in the mesh, its state, and the collectives as methods.

    In every collective, ``axes`` is a mesh axis, a tuple of them (the first is the slowest) or None for the whole mesh.
    The ranks that differ only along these axes form the *group*. The place of a rank in the group is its *position*.
    Every collective also takes

    ``groups``
        lists of ranks, the same on every member, in place of ``axes``. They define the order inside each group.
    ``out``
        an array for the result, with exactly its shape and dtype. It is ``x`` itself, or does not overlap with it.
    ``algorithm``
        None or ``"direct"``: in shared memory. Otherwise the name of an algorithm that runs step by step over channels
        (``"ring"``, ``"recursive_doubling"``, ``"halving_doubling"``, ``"tree"``, ``"naive"``, where they apply): the
        result is the same, with the bytes and messages of that algorithm. A ring reduces in the order of the ring.
    ``async_op``
        return a `Work` at once. Its ``wait()`` returns the result, ``done()`` tells whether it is available. Operations
        of one group take effect in the order in which they were issued. ``x`` and ``out`` must not change until then.

    The value ``x`` is an array or a scalar. It is not changed. The result is a new array that belongs to the caller (a
    NumPy scalar for a scalar). Wrong arguments raise ``ValueError`` or ``TypeError`` before anything is sent. If the
    members of a group call different collectives, each raises `CollectiveMismatchError`. Below, ``S`` is the number of
    bytes of the whole buffer, and ``g`` is the size of the group.
    """

    def __init__(self, mesh: Mesh, rank: int, endpoint: Endpoint, *, by_messages: bool) -> None:
        """The cluster creates its devices."""
        self.mesh = mesh
        """The `Mesh` of the cluster."""
        self.rank = rank
        """The number of this device, 0 to ``size - 1``."""
        self.size = mesh.size
        """The number of devices."""
        self.index: MeshIndex = mesh.index(rank)
        """The coordinate along each axis: ``device.index["tp"]``."""
        self.state: dict[Any, Any] = {}
        """The kernel may keep values here. The next run finds them again."""
        self._seed: tuple[int, ...] = (0, rank)
        self._rng: np.random.Generator | None = None
        self.endpoint = endpoint
        self.recorder = Recorder()
        self.collectives = Collectives(endpoint, mesh, rank, self.recorder, by_messages=by_messages)
        self._channels: dict[int, VirtualChannel] = {}

    def __repr__(self) -> str:
        return f"<VirtualDevice {self.rank} of {self.mesh!r}>"

    def __getattr__(self, name: str) -> Any:
        """Raise an ``AttributeError`` that names the nearest attribute."""
        names = [known for known in dir(type(self)) if not known.startswith("_")]
        usual = _USUAL_ELSEWHERE.get(name.lower().replace("_", ""))
        near = usual or next(iter(difflib.get_close_matches(name, names, 1, 0.6)), None)
        hint = f"; did you mean device.{near}?" if near and not name.startswith("_") else ""
        raise AttributeError(f"a device has no {name!r}{hint}", name=name, obj=self)

    def forget_traffic(self) -> None:
        """Start with empty channels and new groups after a failure. The worker calls this."""
        self.collectives.forget_traffic()
        self._channels.clear()

    def seed_with(self, seed: tuple[int, ...]) -> None:
        """Set the seed of `rng`. The worker calls this. A generator is created only for a kernel that uses it."""
        self._seed, self._rng = seed, None

    @property
    def rng(self) -> np.random.Generator:
        """A generator seeded by (seed of the cluster, rank, number of the run)."""
        if self._rng is None:
            self._rng = np.random.default_rng(self._seed)
        return self._rng

    # -- the place in the mesh -------------------------------------------------------------------------------------

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        """The ranks of this device's group along ``axes``, in group order."""
        return self.mesh.group(self.rank, axes)

    def position(self, axes: Axes = None) -> int:
        """The position of this device in that group."""
        return self.group(axes).index(self.rank)

    # -- compute and memory -------------------------------------------------------------------------------------

    def compute(
        self, name: str, *, flops: float = 0, nbytes: float = 0, seconds: float | None = None, stage: int | None = None,
        microbatch: int | None = None, phase: str | None = None, dtype: npt.DTypeLike | None = None,
    ) -> AbstractContextManager[None]:
        """A context: the compute inside it becomes one event of the trace, with this name.

        ``flops`` and ``nbytes`` (memory traffic) give its price on described hardware, in a ``dtype``. ``seconds`` sets
        the price itself, in place of the measured CPU time. ``stage``, ``microbatch`` and ``phase`` (F, B, I or W)
        mark an action of a pipeline.
        """
        values: dict[str, Any] = {
            "flops": float(flops), "nbytes": float(nbytes), "stage": stage, "microbatch": microbatch, "phase": phase}
        if dtype is not None:
            values["dtype"] = dtype_name(cast(Hashable, dtype))
        return self.recorder.compute(name, seconds, values)

    def hold(self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None) -> None:
        """Record that ``nbytes`` more bytes are held for ``category`` (negative: fewer). See ``trace.peak_bytes``."""
        self.recorder.begin_block()
        self.recorder.add(
            "memory", category, nbytes=float(nbytes), wall_start_seconds=self.recorder.now(), stage=stage,
            microbatch=microbatch,
        )

    def matmul(self, a: npt.ArrayLike, b: npt.ArrayLike, *, out: npt.NDArray[Any] | None = None) -> Any:
        """``a @ b``, in ``out`` if it is given. Its flops (2 m n k) and its memory traffic are counted."""
        a, b = np.asarray(a), np.asarray(b)
        flops, nbytes, dtype = matmul_cost(a, b)
        with self.compute("matmul", flops=flops, nbytes=nbytes, dtype=dtype):
            return np.matmul(a, b, out=out)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """An uninitialised array in shared memory, which peers read and write without a copy."""
        return self.endpoint.heap.empty(*checked_extents(shape, dtype))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, axes: Axes = None, *, op: ReduceOp = "sum", **options: Any) -> Any:
        """Reduce the ``x`` of all members elementwise. Every member gets the result, bitwise equal on all of them.

        ``op`` is ``sum, mean, max, min, prod, and, or, xor`` or a function of two arrays that is elementwise,
        associative and keeps the dtype. Terms are combined in group order. Sums and products of bools are int64, means
        of integers are float64, and integers wrap around. ``x`` may also be a tuple, list or dict of arrays. Shapes and
        dtypes must agree.

        **Communication**: 2(g-1)/g S received by each rank (direct, ring, halving_doubling), (g-1) S (naive),
        lg g S (recursive_doubling).

        Over 4 devices that hold [0 1], [10 11], [20 21], [30 31], every device gets [60 64].
        """
        return self.collectives.run("all_reduce", x, axes, op=op, **options)

    def all_gather(self, x: Any, axes: Axes = None, *, dim: int = 0, **options: Any) -> Any:
        """Join the ``x`` of all members along ``dim``, in group order. Every member gets the whole.

        0-d values are stacked to shape ``(g,)``. All extents except that along ``dim`` must agree.
        **Communication**: each rank receives S minus its own shard.

        Over 3 devices that hold [0], [1 1], [2], every device gets [0 1 1 2].
        """
        return self.collectives.run("all_gather", x, axes, dim=dim, **options)

    def reduce_scatter(self, x: Any, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Any) -> Any:
        """Reduce the ``x`` of all members. Each member gets its piece of the result along ``dim``.

        The pieces are those of ``numpy.array_split``, axis by axis, outermost first. Shapes must agree.
        **Communication**: each rank receives g-1 times the bytes of its own piece: (g-1)/g S.

        Over 2 devices that hold [1 2 3], [10 20 30], rank 0 gets [11 22], rank 1 [33].
        """
        return self.collectives.run("reduce_scatter", x, axes, dim=dim, op=op, **options)

    def all_to_all(
        self, x: Any, axes: Axes = None, *, split_dim: int = 0, concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None, **options: Any,
    ) -> Any:
        """Cut ``x`` along ``split_dim``, send piece j to member j, and join the received pieces along ``concat_dim``.

        ``split_sizes`` are the extents of the pieces; by default those of ``numpy.array_split``. All extents except
        that along ``concat_dim`` must agree. **Communication**: each rank receives (g-1)/g S if the pieces are equal.

        Over 2 devices that hold [1 2], [3 4], rank 0 gets [1 3], rank 1 [2 4].
        """
        return self.collectives.run(
            "all_to_all", x, axes, dim=split_dim, concat_dim=concat_dim, split_sizes=split_sizes, **options
        )

    def broadcast(self, x: Any, axes: Axes = None, *, root: int = 0, **options: Any) -> Any:
        """Every member gets the ``x`` of the member at position ``root``. The ``x`` of the others may be None.

        ``x`` may be a tuple, list or dict of arrays. With ``groups=``, a rank in no group gets zeros like its ``x``.
        **Communication**: each rank except the root receives S.
        """
        return self.collectives.run("broadcast", x, axes, root=root, **options)

    def reduce(self, x: Any, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Any) -> Any:
        """Reduce as `all_reduce` does. The member at position ``root`` gets the result, the others get None.

        **Communication**: the root receives (g-1) S (direct).
        """
        return self.collectives.run("reduce", x, axes, root=root, op=op, **options)

    def scatter(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """Cut the ``x`` of the root along ``dim`` and send piece j to member j. The ``x`` of the others may be None.

        **Communication**: each rank except the root receives its piece.
        """
        return self.collectives.run("scatter", x, axes, root=root, dim=dim, **options)

    def gather(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """Join the ``x`` of all members along ``dim`` at the root. The others get None.

        **Communication**: the root receives the ``x`` of every other member.
        """
        return self.collectives.run("gather", x, axes, root=root, dim=dim, **options)

    def all_scatter(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """The ``x`` of all members, as a list in group order. Shapes may differ.

        **Communication**: each rank receives the ``x`` of every other member.
        """
        return self.collectives.run("all_scatter", x, axes, **options)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]], axes: Axes = None, **options: Any) -> Any:
        """For each (source, target) in ``pairs``, which are positions in the group, the target gets the source's ``x``.

        A member that is no target gets zeros like its own ``x``. Each position is a source at most once and a target at
        most once. Shapes may differ, and ``x`` may be a tree of arrays. **Communication**: one message for each pair.
        """
        return self.collectives.run("permute", x, axes, pairs=pairs, **options)

    def shift(self, x: Any, axes: Axes = None, *, by: int = 1, **options: Any) -> Any:
        """A `permute` around the ring: position p gets the ``x`` of position p - ``by``."""
        groups = options.get("groups")
        if groups is None:
            pairs = _round_the_ring(len(self.group(axes)), by)
        else:
            pairs = shift_pairs(self.mesh, self.rank, axes, groups, by)
        return self.collectives.run("permute", x, axes, pairs=pairs, **options)

    def barrier(self, axes: Axes = None, **options: Any) -> Any:
        """Return when all members have called it. **Communication**: no bytes."""
        return self.collectives.run("barrier", None, axes, **options)

    def all_gather_object(self, obj: Any, axes: Axes = None) -> list[Any]:
        """The objects of all members, as a list in group order. An object is anything that can be pickled."""
        arrays = self.collectives.run("all_scatter", _pickled(obj), axes, name="all_gather_object")
        return [pickle.loads(array.tobytes()) for array in arrays]

    def broadcast_object(self, obj: Any, axes: Axes = None, *, root: int = 0) -> Any:
        """The object of the member at position ``root``. The objects of the others are ignored."""
        mine = _pickled(obj) if self.position(axes) == root else None
        return pickle.loads(self.collectives.run("broadcast", mine, axes, root=root, name="broadcast_object").tobytes())

    def reshard(
        self, x: Any, source: TensorSharding, target: TensorSharding, *, shape: Sequence[int] | None = None,
        axes: Axes = None,
    ) -> Any:
        """This device's shard under ``target`` of the tensor of which ``x`` is its shard under ``source``.

        Runs the plan of `parallelism.plan_resharding`. ``shape`` is the shape of the whole tensor; if it is not given,
        the ranks exchange the shapes of their shards. ``x`` is not changed, and the result is a new array. The plan
        moves data along some axes; the ranks that differ along these axes take part. ``axes`` limits the axes; by
        default all axes of the mesh may be used.
        **Communication**: ``plan.bytes_received``. The trace has one event, and the collectives are its children.

        From ``TensorSharding("x", None)`` to ``TensorSharding(None, "x")``, 2 devices that hold [[1 2]] and [[3 4]] get
        [[1] [3]] and [[2] [4]].
        """
        from vcluster.device.resharding import reshard  # only a kernel that reshards loads the planner

        return reshard(self, x, source, target, shape, axes)

    def global_shape(self, x: Any, sharding: TensorSharding) -> tuple[int, ...]:
        """The shape of the whole tensor of which ``x`` is this device's shard.

        The ranks that differ along the axes over which the tensor is split take part. **Communication**: only shapes,
        which are not in the trace. ``ValueError`` if the shards do not form one tensor.
        """
        return self.global_shapes([x], [sharding])[0]

    def global_shapes(self, xs: Sequence[Any], shardings: Sequence[TensorSharding]) -> list[tuple[int, ...]]:
        """`global_shape` of several tensors at once. A rank takes part if it does for any of them.

        **Communication**: one exchange, which is not in the trace.
        """
        from vcluster.device.resharding import global_shapes

        return global_shapes(self, [np.asarray(x) for x in xs], shardings)

    def collective(
        self, kind: str, x: Any, axes: Axes = None, *, dim: int = 0, concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None, root: int = 0, op: ReduceOp | None = None,
        pairs: Sequence[tuple[int, int]] | None = None, **options: Any,
    ) -> Any:
        """The collective of this name: one of the methods, or a kind that `parallelism.register_kind` has added.

        A kind uses some of the arguments. ``dim`` is the dim along which arrays are cut (or joined, if they are not
        cut), ``concat_dim`` the dim along which blocks are joined, ``split_sizes`` the extents of the blocks, and
        ``op`` the reduction (by default sum). ``root`` and ``pairs`` are positions in the group. ``ValueError`` for an
        unknown name.
        **Communication**: that of the named algorithm, or of ``direct``.

        With a kind ``"scan"`` that reduces the arrays of positions 0 to p, 3 devices that hold [1], [2], [3] get [1],
        [3], [6].
        """
        return self.collectives.run(
            kind, x, axes, dim=dim, concat_dim=concat_dim, split_sizes=split_sizes, root=root, op=op, pairs=pairs,
            **options,
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def channel(self, peer: int) -> VirtualChannel:
        """My end of the channel to another rank, to myself, or to the `HOST` (-1)."""
        found = self._channels.get(peer)
        if found is None:
            found = self._channels[peer] = VirtualChannel(self.collectives, checked_peer(self.mesh, peer))
        return found

    def send(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> None:
        """Send ``x`` to rank ``dst`` (to that position, with ``axes``); see `VirtualChannel.send`."""
        channel = self._channels.get(dst) if axes is None else None
        (channel or self.channel(self._peer(dst, axes))).send(x, tag=tag)

    def recv(self, src: int, *, tag: int = 0, out: Any = None, axes: Axes = None) -> Any:
        """The oldest message of rank ``src`` with this tag; see `VirtualChannel.recv`."""
        channel = self._channels.get(src) if axes is None else None
        return (channel or self.channel(self._peer(src, axes))).recv(tag=tag, out=out)

    def isend(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> Pending:
        """`send` that returns a `Work` at once."""
        return self.channel(self._peer(dst, axes)).isend(x, tag=tag)

    def irecv(
        self, src: int, *, tag: int = 0, shape: Sequence[int] | None = None, dtype: npt.DTypeLike | None = None,
        axes: Axes = None,
    ) -> Pending:
        """`recv` that returns a `Work` at once."""
        return self.channel(self._peer(src, axes)).irecv(tag=tag, shape=shape, dtype=dtype)

    def sendrecv(self, x: Any, dst: int, src: int, *, tag: int = 0, axes: Axes = None) -> Any:
        """Send ``x`` to ``dst`` and receive from ``src``, neither waiting for the other."""
        sent = self.isend(x, dst, tag=tag, axes=axes)
        received = self.recv(src, tag=tag, axes=axes)
        sent.wait()
        return received

    def _peer(self, place: int, axes: Axes) -> int:
        return place if axes is None else rank_at(self.group(axes), axes, place)


@lru_cache(maxsize=256)
def _round_the_ring(size: int, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((position, (position + by) % size) for position in range(size))


def _pickled(obj: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(dump(obj, "the object"), np.uint8)
