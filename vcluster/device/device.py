"""`VirtualDevice`: the interface of the cluster for the kernel that runs on one device."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, plain_array
from parallelism.collectives import (
    checked_extents,
    checked_options,
    checked_peer,
    rank_at,
    ring_pairs,
    shift_pairs,
)
from parallelism.collectives.results import integer
from parallelism.dtypes import in_wider_dtype
from parallelism.mesh import Axes, Mesh, MeshIndex
from parallelism.operation import ArrayCalls, ReduceOp, typed_as
from parallelism.operation.declared_work import declared_work, matmul_cost
from parallelism.spelling import no_attribute
from vcluster.code.pickling import dump
from vcluster.collectives import Collectives, Ways
from vcluster.device.fixed_place import FixedPlace
from vcluster.device.other_libraries import NAMES_ELSEWHERE
from vcluster.messages import Endpoint, Pending, VirtualChannel
from vcluster.tracing import Recorder, dtype_name

if TYPE_CHECKING:
    from parallelism.sharding import TensorSharding


class VirtualDevice(FixedPlace):
    """One device of a virtual cluster: its place in the mesh, its state, and the collectives as methods.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(tp=3, backend="thread") as cluster:
    ...     cluster.run(lambda device: int(device.all_reduce(device.rank, "tp"))).outputs
    [3, 3, 3]

    In every collective, ``axes`` is a mesh axis, a tuple of axes (the outermost first) or None for the whole mesh.
    The ranks that differ only along these axes are the *group*, and the index of a rank in its group is its *position*.
    Every collective of arrays also takes these options:

    ``groups``
        lists of ranks in place of ``axes``, the same lists on every member.  The order of a list is the group order.
        A rank that is in none of the lists gets zeros of the shape of its ``x``.
    ``out``
        an array of exactly the result's shape and dtype.  It may be ``x``, but not overlap ``x`` otherwise.
    ``algorithm``
        None or ``"direct"``: each device takes what it needs from its peers at once, in shared memory where there is
        one.  The name of another algorithm (``"ring"``, ``"recursive_doubling"``, ``"halving_doubling"``, ``"tree"``,
        ``"naive"``, where they apply) runs its steps over channels, with the bytes and messages of that algorithm.  A
        sum over a ring is added in the order of the ring, so floats may differ in rounding.  ``"mpi"`` asks for the
        collective of the MPI library (backend ``"mpi"``).
    ``async_op``
        True: return at once with a `Work`, whose ``wait()`` returns the result.  Operations of one group take effect in
        the order in which they were issued.  Do not change ``x`` and ``out`` until ``done()`` is True.

    The value ``x`` is an array or a scalar.  Unless it is ``out``, it is left unchanged.  Without ``out`` the result is
    a new array that belongs to the caller (a NumPy scalar for a scalar).  Wrong arguments raise ``ValueError`` or
    ``TypeError`` before anything is sent.  If members call different collectives, they get `CollectiveMismatchError`.
    Below, ``S`` is the number of bytes of the whole buffer, ``g`` the size of the group, and ``lg`` the base-2
    logarithm, rounded up.
    """

    def __init__(self, mesh: Mesh, rank: int, endpoint: Endpoint, ways: Ways | None = None) -> None:
        """The cluster makes the devices; users do not call this."""
        self.mesh = mesh
        """The `Mesh` of the cluster."""
        self.rank = rank
        """The number of this device, 0 to ``size - 1``."""
        self.size = mesh.size
        """The number of devices in the mesh."""
        self.index: MeshIndex = mesh.index(rank)
        """The coordinate of this device along each axis: ``device.index["tp"]``."""
        self.state: dict[Any, Any] = {}
        """What the kernel stores here is still there in the next run."""
        self._seed: tuple[int, ...] = (0, rank)
        self._rng: np.random.Generator | None = None
        self.endpoint = endpoint
        self.recorder = Recorder(endpoint.threads)
        self.collectives = Collectives(endpoint, mesh, rank, self.recorder, ways)
        self._channels: dict[int, VirtualChannel] = {}

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            no_attribute("device", self, name, NAMES_ELSEWHERE)

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
        """My index in my group along ``axes``."""
        return self.group(axes).index(self.rank)

    # -- compute and memory -------------------------------------------------------------------------------------

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
        """A context for a named piece of work: all that is computed in the ``with`` block is one event of the trace.

        ``flops``, ``nbytes`` (memory traffic) and ``dtype`` decide how long it takes on a `Hardware`.  ``other_bytes``
        is the part of ``nbytes`` that has other dtypes, as ``(("int64", 80),)``.  ``shape`` = (count, m, n, k) says
        that it is ``count`` matrix products of m x k by k x n.  ``seconds`` replaces the measured CPU time.
        ``stage``, ``microbatch`` and ``phase`` (F, B, I or W) mark it as an action of a pipeline.
        """
        flops, nbytes, seconds = declared_work(name, flops, nbytes, seconds)
        values: dict[str, Any] = {
            "flops": flops,
            "nbytes": nbytes,
            "stage": stage,
            "microbatch": microbatch,
            "phase": phase,
        }
        if dtype is not None:
            values["dtype"] = dtype_name(cast(Hashable, dtype))
        if other_bytes:
            values["other_bytes"] = other_bytes
        values |= {} if shape is None else {"shape": shape}
        return self.recorder.compute(name, seconds, values)

    def hold(
        self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        """Record that ``category`` holds ``nbytes`` more memory, or less if negative; see ``trace.peak_bytes``."""
        if not isfinite(nbytes):
            raise ValueError(f"hold() takes a finite number of bytes, got {nbytes}")
        self.recorder.begin_block()
        self.recorder.add_untimed(
            "memory",
            category,
            {
                "nbytes": float(nbytes),
                "wall_start_seconds": self.recorder.now(),
                "stage": stage,
                "microbatch": microbatch,
            },
        )

    def matmul(self, a: npt.ArrayLike, b: npt.ArrayLike, *, out: Array | None = None) -> Any:
        """``a @ b``, written to ``out`` if given.  Its flops (2 m n k) and memory traffic are recorded."""
        a, b = plain_array("matmul", a), plain_array("matmul", b)
        flops, nbytes, dtype, shape = matmul_cost(a, b)
        with self.compute("matmul", flops=flops, nbytes=nbytes, dtype=dtype, shape=shape):
            return (
                in_wider_dtype(np.matmul, (a, b), lambda: (dtype,))
                if out is None
                else np.matmul(a, b, out=out)
            )

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> Array:
        """An uninitialised array in shared memory, which peers read and write without a copy."""
        return self.endpoint.heap.empty(*checked_extents(shape, dtype))

    # -- collectives ---------------------------------------------------------------------------------------------------

    @typed_as(ArrayCalls.all_reduce)
    def all_reduce(
        self, x: Any, axes: Axes = None, *, op: ReduceOp = "sum", out: Any = None, **options: Any
    ) -> Any:
        """Reduce the ``x`` of all members elementwise. Every member gets the result, bitwise equal on all of them.

        The result equals that of a reduce_scatter followed by an all_gather.  ``op`` is ``sum, mean, max, min, prod,
        and, or, xor`` or a function of two arrays that is elementwise, associative and keeps the dtype; terms are
        combined in group order.  Sums and products of bools are int64, means of bools and integers are float64;
        integers wrap on overflow.  ``x`` may also be a tuple, list or dict of arrays.  Shapes and dtypes must agree.

        **Communication**: 2(g-1)/g S received by each rank (direct, ring, halving_doubling), (g-1) S (naive),
        lg g S (recursive_doubling).

        Over 4 devices that hold [0 1], [10 11], [20 21], [30 31], every device gets [60 64].
        """
        if not options:  # a call with a dict of options takes three times as long
            return self.collectives.repeated("all_reduce", x, axes, out, 0, 0, op)
        return self.collectives.run(
            "all_reduce", x, axes, op=op, out=out, **checked_options("all_reduce", options)
        )

    @typed_as(ArrayCalls.all_gather)
    def all_gather(self, x: Any, axes: Axes = None, *, dim: int = 0, out: Any = None, **options: Any) -> Any:
        """Join the ``x`` of all members along ``dim``, in group order. Every member gets the whole.

        0-d values are stacked to shape ``(g,)``.  Extents other than along ``dim`` must agree.
        **Communication**: each rank receives S minus the bytes of its own ``x``.

        Over 3 devices that hold [0], [1 1], [2], every device gets [0 1 1 2].
        """
        if not options:  # a call with a dict of options takes three times as long
            return self.collectives.repeated("all_gather", x, axes, out, dim)
        return self.collectives.run(
            "all_gather", x, axes, dim=dim, out=out, **checked_options("all_gather", options)
        )

    @typed_as(ArrayCalls.reduce_scatter)
    def reduce_scatter(
        self,
        x: Any,
        axes: Axes = None,
        *,
        dim: int = 0,
        op: ReduceOp = "sum",
        out: Any = None,
        **options: Any,
    ) -> Any:
        """Reduce the ``x`` of all members. Each member gets its piece of the result along ``dim``.

        The pieces are those of ``numpy.array_split``, axis by axis, outermost first.  Shapes must agree.
        **Communication**: each rank receives g-1 times the bytes of its own piece. That is (g-1)/g S for equal pieces.

        Over 2 devices that hold [1 2 3], [10 20 30], rank 0 gets [11 22], rank 1 [33].
        """
        if not options:  # a call with a dict of options takes three times as long
            return self.collectives.repeated("reduce_scatter", x, axes, out, dim, 0, op)
        checked = checked_options("reduce_scatter", options)
        return self.collectives.run("reduce_scatter", x, axes, dim=dim, op=op, out=out, **checked)

    @typed_as(ArrayCalls.all_to_all)
    def all_to_all(
        self,
        x: Any,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Cut ``x`` along ``split_dim``, give piece j to member j, and join the received pieces along ``concat_dim``.

        ``split_sizes`` are the extents of the pieces; without it, they are those of ``numpy.array_split``.  The ``x``
        of the members may differ in extent only along ``concat_dim``.
        **Communication**: each rank receives (g-1)/g S, if the pieces are equal.

        Over 2 devices that hold [1 2], [3 4], rank 0 gets [1 3], rank 1 [2 4].
        """
        return self.collectives.run(
            "all_to_all",
            x,
            axes,
            dim=split_dim,
            concat_dim=concat_dim,
            split_sizes=split_sizes,
            **checked_options("all_to_all", options),
        )

    @typed_as(ArrayCalls.broadcast)
    def broadcast(self, x: Any, axes: Axes = None, *, root: int = 0, out: Any = None, **options: Any) -> Any:
        """Everybody gets the ``x`` of the member at position ``root``; any other ``x`` is ignored and may be None.

        ``x`` may be a tuple, list or dict of arrays.
        **Communication**: S received by each rank but the root.
        """
        if not options:  # a call with a dict of options takes three times as long
            return self.collectives.repeated("broadcast", x, axes, out, 0, root)
        return self.collectives.run(
            "broadcast", x, axes, root=root, out=out, **checked_options("broadcast", options)
        )

    @typed_as(ArrayCalls.reduce)
    def reduce(
        self, x: Any, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Any
    ) -> Any:
        """Combine everybody's ``x`` as `all_reduce` does; the member at ``root`` gets the result, the others None.

        **Communication**: the root receives (g-1) S (direct).
        """
        return self.collectives.run("reduce", x, axes, root=root, op=op, **checked_options("reduce", options))

    @typed_as(ArrayCalls.scatter)
    def scatter(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """Cut the ``x`` of the root along ``dim`` and send piece j to member j. The ``x`` of the others may be None.

        **Communication**: each rank except the root receives its piece.
        """
        return self.collectives.run(
            "scatter", x, axes, root=root, dim=dim, **checked_options("scatter", options)
        )

    @typed_as(ArrayCalls.gather)
    def gather(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        """Join the ``x`` of all members along ``dim`` at the root. The others get None.

        **Communication**: the root receives the ``x`` of every other member.
        """
        return self.collectives.run(
            "gather", x, axes, root=root, dim=dim, **checked_options("gather", options)
        )

    @typed_as(ArrayCalls.all_scatter)
    def all_scatter(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """The ``x`` of all members, as a list in group order: an all_gather that joins nothing. Shapes may differ.

        **Communication**: each rank receives the ``x`` of every other member.
        """
        return self.collectives.run("all_scatter", x, axes, **checked_options("all_scatter", options))

    @typed_as(ArrayCalls.permute)
    def permute(self, x: Any, pairs: Sequence[tuple[int, int]], axes: Axes = None, **options: Any) -> Any:
        """For each (source, target) in ``pairs``, which are positions in the group, the target gets the source's ``x``.

        A member that is not a target gets zeros like its own ``x``.  Each position may be a source at most once, and a
        target at most once.  Shapes may differ, and ``x`` may be a tuple, list or dict of arrays.
        **Communication**: one message for each pair.
        """
        return self.collectives.run("permute", x, axes, pairs=pairs, **checked_options("permute", options))

    @typed_as(ArrayCalls.shift)
    def shift(self, x: Any, axes: Axes = None, *, by: int = 1, **options: Any) -> Any:
        """A `permute` around the ring: position p gets the ``x`` of position p - ``by``."""
        by, groups = integer("by", by), options.get("groups")
        if groups is None:
            pairs = ring_pairs(len(self.group(axes)), by)
        else:
            pairs = shift_pairs(self.mesh, self.rank, axes, groups, by)
        return self.collectives.run("permute", x, axes, pairs=pairs, **checked_options("shift", options))

    def barrier(self, axes: Axes = None, **options: Any) -> Any:
        """Return when all members have called it.  **Communication**: no bytes."""
        if not options:  # a call with a dict of options takes three times as long
            return self.collectives.repeated("barrier", None, axes, None)
        return self.collectives.run("barrier", None, axes, **checked_options("barrier", options))

    def all_gather_object(self, obj: Any, axes: Axes = None) -> list[Any]:
        """The objects of all members, as a list in group order. An object is anything that can be pickled."""
        arrays = self.collectives.run("all_scatter", _pickled(obj), axes, name="all_gather_object")
        return [pickle.loads(array.tobytes()) for array in arrays]

    def broadcast_object(self, obj: Any, axes: Axes = None, *, root: int = 0) -> Any:
        """The object of the member at position ``root``; the objects of the others are ignored."""
        mine = _pickled(obj) if self.position(axes) == root else None
        return pickle.loads(
            self.collectives.run("broadcast", mine, axes, root=root, name="broadcast_object").tobytes()
        )

    @typed_as(ArrayCalls.reshard)
    def reshard(
        self,
        x: Any,
        source: TensorSharding | str,
        target: TensorSharding | str,
        *,
        shape: Sequence[int] | None = None,
        axes: Axes = None,
    ) -> Any:
        """Move a tensor from layout ``source`` to ``target``: ``x`` is my shard before, the result my shard after.

        A layout is a `TensorSharding` or its text, ``"[tp, None]"``.
        Runs the plan of `parallelism.plan_resharding`.  ``shape`` is the shape of the whole tensor; without it, the
        devices exchange the shapes of their shards to find it.  ``x`` is left unchanged, the result is a new array.
        All ranks of this device's group along the axes that the plan communicates over must call it.  ``axes`` limits
        the axes that the plan may use; by default it may use all.
        **Communication**: ``plan.bytes_received``, as one event.  The collectives inside are its children.

        From ``[x, None]`` to ``[None, x]``, 2 devices that hold [[1 2]] and [[3 4]] get [[1] [3]] and [[2] [4]].
        """
        from vcluster.device.resharding import reshard  # only a kernel that reshards loads the planner

        return reshard(self, x, source, target, shape, axes)

    def global_shape(self, x: Any, sharding: TensorSharding | str) -> tuple[int, ...]:
        """The shape of the whole tensor of which ``x`` is this device's shard; the ranks exchange shapes to find it.

        All ranks of this device's group along the axes that split the tensor must call it.  **Communication**: shapes,
        not in the trace.  ``ValueError`` if the shards cannot be those of one tensor.
        """
        return self.global_shapes([x], [sharding])[0]

    def global_shapes(
        self, xs: Sequence[Any], shardings: Sequence[TensorSharding | str]
    ) -> list[tuple[int, ...]]:
        """`global_shape` of several tensors in one exchange.  Ranks that must call it for one of them must call it."""
        from vcluster.device.resharding import global_shapes

        return global_shapes(self, [plain_array("global_shape", x) for x in xs], shardings)

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
        """Run the collective of this name: one that has a method, or one that `parallelism.register_kind` has added.

        A kind uses only some of the arguments; they mean the same as in the methods above.  ``dim`` is the dim that is
        split or, for a kind that only joins, the dim along which arrays are joined.  ``concat_dim`` is the dim along
        which a kind that splits and joins puts blocks together.  ``split_sizes`` are the extents of the blocks, ``op``
        is the reduction (None: sum), and ``root`` and ``pairs`` are positions in the group.  ``ValueError`` for an
        unknown name.  **Communication**: that of the kind's ``direct`` algorithm, or of the given ``algorithm``.

        With a kind ``"scan"`` that reduces positions 0 to p, 3 devices that hold [1], [2], [3] get [1], [3], [6].
        """
        return self.collectives.run(
            kind,
            x,
            axes,
            dim=dim,
            concat_dim=concat_dim,
            split_sizes=split_sizes,
            root=root,
            op=op,
            pairs=pairs,
            **checked_options("collective", options),
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def channel(self, peer: int) -> VirtualChannel:
        """My end of the channel to another rank, to myself, or to the `HOST` (-1)."""
        peer = checked_peer(self.mesh, peer)
        return self._channels.get(peer) or self._channels.setdefault(
            peer, VirtualChannel(self.collectives, peer)
        )

    def send(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> None:
        """Send ``x`` to rank ``dst``; with ``axes``, ``dst`` is a position in my group.  See `VirtualChannel.send`."""
        try:
            channel = self._channels.get(dst) if axes is None else None
        except TypeError:  # an array, which `_peer` refuses
            channel = None
        (channel or self.channel(self._peer("dst", dst, axes))).send(x, tag=tag)

    def recv(self, src: int, *, tag: int = 0, out: Any = None, axes: Axes = None) -> Any:
        """Receive the oldest message with this tag from rank ``src``; with ``axes``, from that position there."""
        try:
            channel = self._channels.get(src) if axes is None else None
        except TypeError:  # an array, which `_peer` refuses
            channel = None
        return (channel or self.channel(self._peer("src", src, axes))).recv(tag=tag, out=out)

    def isend(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> Pending:
        """Send as `send` does, but return a `Work` at once."""
        rank = self._peer("dst", dst, axes)
        return (self._channels.get(rank) or self.channel(rank)).isend(x, tag=tag)

    def irecv(
        self,
        src: int,
        *,
        tag: int = 0,
        shape: Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: Axes = None,
    ) -> Pending:
        """Receive as `recv` does, but return a `Work` at once."""
        rank = self._peer("src", src, axes)
        return (self._channels.get(rank) or self.channel(rank)).irecv(tag=tag, shape=shape, dtype=dtype)

    def sendrecv(self, x: Any, dst: int, src: int, *, tag: int = 0, axes: Axes = None) -> Any:
        """Send ``x`` to ``dst`` and receive from ``src`` at the same time: neither waits for the other."""
        sent = self.isend(x, dst, tag=tag, axes=axes)
        received = self.recv(src, tag=tag, axes=axes)
        sent.wait()
        return received

    def _peer(self, name: str, place: int, axes: Axes) -> int:
        return (
            checked_peer(self.mesh, place, name) if axes is None else rank_at(self.group(axes), axes, place)
        )


def _pickled(obj: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(dump(obj, "the object"), np.uint8)
