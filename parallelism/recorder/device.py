"""A `Device` that moves nothing and counts everything: `parallelism.recorder` makes one for each rank."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives import kind_of
from parallelism.collectives.call import traffic
from parallelism.collectives.reductions import reduction
from parallelism.mesh import Axes, Mesh, MeshIndex, split_sizes
from parallelism.operation import Groups, ReduceOp, Work
from parallelism.operation.trees import leaves
from parallelism.recorder.calls import CountedCall, result, zeros
from parallelism.recorder.rendezvous import Lockstep, Meeting
from parallelism.resharding import plan_resharding, run_plan
from parallelism.sharding import TensorSharding
from parallelism.trace import Event

Array = npt.NDArray[Any]


@dataclass
class _Pending:
    """An operation under way."""

    conclude: Callable[[], Any]
    ended: list[Any] = field(default_factory=list)

    def wait(self) -> Any:
        if not self.ended:
            self.ended.append(self.conclude())
        return self.ended[0]

    def done(self) -> bool:
        return bool(self.ended)


class RecordingDevice:
    """A device that moves nothing; `record` makes them.  Its methods are those of `parallelism.operation.Device`."""

    def __init__(self, mesh: Mesh, rank: int, lockstep: Lockstep) -> None:
        self.mesh = mesh
        self.rank = rank
        self.size = mesh.size
        self.index: MeshIndex = mesh.index(rank)
        self.state: dict[Any, Any] = {}
        self.rng = np.random.default_rng((0, rank))
        self._lockstep = lockstep
        self._events: list[Event] = []
        self._parent: int | None = None
        self._pending: list[_Pending] = []

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        return self.mesh.group(self.rank, axes)

    def position(self, axes: Axes = None) -> int:
        return self.group(axes).index(self.rank)

    # -- what is computed and held -------------------------------------------------------------------------------------

    @contextmanager
    def compute(
        self, name: str, *, flops: float = 0, nbytes: float = 0, seconds: float | None = None, stage: int | None = None,
        microbatch: int | None = None, phase: str | None = None, dtype: npt.DTypeLike | None = None,
    ) -> Iterator[None]:
        self._add(
            "compute", name, flops=float(flops), nbytes=float(nbytes), cpu_seconds=seconds or 0.0, stage=stage,
            microbatch=microbatch, phase=phase, seconds=None if seconds is None else float(seconds),
            dtype=None if dtype is None else np.dtype(dtype).name,
        )
        yield

    def hold(self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None) -> None:
        self._add("memory", category, nbytes=float(nbytes), stage=stage, microbatch=microbatch)

    def matmul(self, a: npt.ArrayLike, b: npt.ArrayLike, *, out: np.ndarray | None = None) -> Any:
        a, b = np.asarray(a), np.asarray(b)
        k, rows = a.shape[-1] if a.ndim else 0, b.shape[max(b.ndim - 2, 0)] if b.ndim else 0
        if k != rows:
            raise ValueError(f"matmul needs as many rows on the right as columns on the left, got {a.shape}, {b.shape}")
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        m, n = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
        count, m_k_n = prod(batch), (prod(m), k, prod(n))
        dtype = np.result_type(a, b)
        traffic = dtype.itemsize * count * (m_k_n[0] * k + k * m_k_n[2] + m_k_n[0] * m_k_n[2])
        with self.compute("matmul", flops=2.0 * count * prod(m_k_n), nbytes=float(traffic), dtype=dtype):
            if out is not None:
                out[...] = 0
                return out
            product = np.zeros((*batch, *m, *n), dtype)
            return product if product.ndim else product[()]

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> Array:
        return np.zeros(shape, dtype)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, axes: Axes = None, *, op: ReduceOp = "sum", **options: Any) -> Any:
        if isinstance(x, tuple | list | dict):
            return self._reduce_tree("all_reduce", x, axes, op, options)
        return self._collective("all_reduce", x, axes, op=op, **options)

    def all_gather(self, x: Any, axes: Axes = None, *, dim: int = 0, **options: Any) -> Any:
        return self._collective("all_gather", x, axes, dim=dim, **options)

    def reduce_scatter(self, x: Any, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Any) -> Any:
        return self._collective("reduce_scatter", x, axes, dim=dim, op=op, **options)

    def all_to_all(
        self, x: Any, axes: Axes = None, *, split_dim: int = 0, concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None, **options: Any,
    ) -> Any:
        return self._collective(
            "all_to_all", x, axes, dim=split_dim, concat_dim=concat_dim, cut=split_sizes, **options
        )

    def broadcast(self, x: Any, axes: Axes = None, *, root: int = 0, **options: Any) -> Any:
        return self._collective("broadcast", x, axes, root=root, **options)

    def reduce(self, x: Any, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Any) -> Any:
        return self._collective("reduce", x, axes, root=root, op=op, **options)

    def scatter(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        return self._collective("scatter", x, axes, root=root, dim=dim, **options)

    def gather(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        return self._collective("gather", x, axes, root=root, dim=dim, **options)

    def all_scatter(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        return self._collective("all_scatter", x, axes, **options)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]], axes: Axes = None, **options: Any) -> Any:
        return self._collective("permute", x, axes, pairs=tuple((int(s), int(t)) for s, t in pairs), **options)

    def shift(self, x: Any, axes: Axes = None, *, by: int = 1, **options: Any) -> Any:
        size = len(self._members(axes, options.get("groups")) or ())
        return self.permute(x, [(p, (p + by) % size) for p in range(size)], axes, **options)

    def barrier(self, axes: Axes = None, **options: Any) -> Any:
        return self._collective("barrier", None, axes, **options)

    def collective(
        self, kind: str, x: Any, axes: Axes = None, *, split_sizes: Sequence[int] | None = None,
        pairs: Sequence[tuple[int, int]] | None = None, **options: Any,
    ) -> Any:
        """The collective of this name; see `vcluster.VirtualDevice.collective`."""
        if kind_of(kind).elementwise and isinstance(x, tuple | list | dict):
            return self._reduce_tree(kind, x, axes, options.pop("op", None), options)
        named = None if pairs is None else tuple((int(source), int(target)) for source, target in pairs)
        return self._collective(kind, x, axes, cut=split_sizes, pairs=named, **options)

    def all_gather_object(self, obj: Any, axes: Axes = None) -> list[Any]:
        group = self.group(axes)
        counted = np.zeros(len(pickle.dumps(obj)), np.uint8)
        said = self._said("all_scatter", counted, group, stands_for=obj)
        everybody = self._meet("all_gather_object", said, group, self.mesh.axes_of(axes))
        return [other.value for other in everybody]

    def broadcast_object(self, obj: Any, axes: Axes = None, *, root: int = 0) -> Any:
        group = self.group(axes)
        counted = np.zeros(len(pickle.dumps(obj)), np.uint8)
        said = self._said("broadcast", counted, group, root=root, stands_for=obj)
        return self._meet("broadcast_object", said, group, self.mesh.axes_of(axes))[root].value

    def reshard(
        self, x: Any, source: TensorSharding, target: TensorSharding, *, shape: Sequence[int] | None = None,
        axes: Axes = None,
    ) -> Any:
        array = np.asarray(x)
        whole = self.global_shape(array, source) if shape is None else shape
        plan = plan_resharding(source, target, whole, array.dtype, self.mesh, axes=axes)
        place = self._add("collective", "reshard", axes=plan.axes, group=self.group(plan.axes), algorithm=None)
        before, self._parent = self._parent, place if self._parent is None else self._parent
        result = run_plan(self, plan, array)
        self._parent = before
        inside = self._events[place + 1:]
        sources: Counter[int] = Counter()
        for event in inside:
            sources.update(dict(event.sources))
        self._events[place] = replace(
            self._events[place], bytes_sent=sum(event.bytes_sent for event in inside),
            bytes_received=sum(event.bytes_received for event in inside),
            messages=sum(event.messages for event in inside), sources=tuple(sorted(sources.items())),
        )
        return result if isinstance(x, np.ndarray) or result.ndim else result[()]

    def global_shape(self, x: Any, sharding: TensorSharding) -> tuple[int, ...]:
        shape: tuple[int, ...] = np.shape(x)
        sharding.check_axes(self.mesh)
        axes = sharding.over(len(shape)).axes
        if not axes:
            return shape
        group = self.group(axes)
        said = CountedCall("global_shape", np.dtype(bool), shape)
        shapes = [other.shape or () for other in self._agree(self._lockstep.say(self.rank, group, said), said, group)]
        return sharding.global_shape(dict(zip(group, shapes, strict=True)), self.mesh)

    def global_shapes(self, xs: Sequence[Any], shardings: Sequence[TensorSharding]) -> list[tuple[int, ...]]:
        return [self.global_shape(x, sharding) for x, sharding in zip(xs, shardings, strict=True)]

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> None:
        peer = self._peer(dst, axes)
        nbytes = sum(np.asarray(leaf).nbytes for leaf in leaves(x))
        dtype = x.dtype.name if isinstance(x, np.ndarray) else None
        self._add("send", "send", peer=peer, tag=tag, bytes_sent=nbytes, messages=1, dtype=dtype)
        self._lockstep.put((self.rank, peer, tag), zeros(x))

    def recv(self, src: int, *, tag: int = 0, out: Any = None, axes: Axes = None) -> Any:
        peer = self._peer(src, axes)
        message = self._lockstep.take(self.rank, (peer, self.rank, tag), f"recv from rank {peer}")
        nbytes = sum(np.asarray(leaf).nbytes for leaf in leaves(message))
        self._add("recv", "recv", peer=peer, tag=tag, bytes_received=nbytes)
        return message if out is None else out

    def isend(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> Work:
        self.send(x, dst, tag=tag, axes=axes)
        return _Pending(lambda: None)

    def irecv(
        self, src: int, *, tag: int = 0, shape: Sequence[int] | None = None, dtype: npt.DTypeLike | None = None,
        axes: Axes = None,
    ) -> Work:
        pending = _Pending(lambda: self.recv(src, tag=tag, axes=axes))
        self._pending.append(pending)
        return pending

    def sendrecv(self, x: Any, dst: int, src: int, *, tag: int = 0, axes: Axes = None) -> Any:
        self.send(x, dst, tag=tag, axes=axes)
        return self.recv(src, tag=tag, axes=axes)

    # -- the record ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The end of the program: what nobody waited for is waited for."""
        for pending in self._pending:
            pending.wait()

    def events(self) -> list[Event]:
        """What this rank did, in order; numbered as what belongs together is."""
        counts: Counter[Any] = Counter()
        numbered = []
        for serial, event in enumerate(self._events):
            key: Any = event.group if event.kind == "collective" else None
            if event.kind in ("send", "recv"):
                key = event.kind, event.peer, event.tag
            sequence = None if key is None else counts[key]
            counts[key] += 1
            numbered.append(replace(event, sequence=sequence, serial=serial))
        return numbered

    def _add(self, kind: str, name: str, **values: Any) -> int:
        self._events.append(Event(self.rank, kind, name, parent=self._parent, **values))
        return len(self._events) - 1

    # -- one collective ------------------------------------------------------------------------------------------------

    def _collective(
        self, kind: str, x: Any, axes: Axes, *, groups: Groups | None = None, out: Any = None,
        algorithm: str | None = None, async_op: bool = False, op: ReduceOp | None = None, **options: Any,
    ) -> Any:
        group = self._members(axes, groups)
        if group is None:
            return zeros(x)
        names = self.mesh.axes_of(axes) if groups is None else None
        said = self._said(kind, x, group, op=op, axes=names, algorithm=algorithm, **options)
        place, meeting = self._begin(kind, said, group, names)

        def conclude() -> Any:
            found = result(self._end(place, meeting, said, group), group.index(self.rank), x)
            if out is None or found is None:
                return found
            np.copyto(out, found)
            return out

        if not async_op:
            return conclude()
        pending = _Pending(conclude)
        self._pending.append(pending)
        return pending

    def _said(
        self, kind: str, x: Any, group: tuple[int, ...], *, op: ReduceOp | None = None,
        axes: tuple[str, ...] | None = None, dim: int = 0, concat_dim: int = 0,
        cut: Sequence[int] | None = None, root: int = 0, pairs: tuple[tuple[int, int], ...] | None = None,
        algorithm: str | None = None, stands_for: Any = None,
    ) -> CountedCall:
        of_kind = kind_of(kind)
        gives = of_kind.is_given_by(group.index(self.rank), root)
        value: Any = None
        dtype: np.dtype[Any] | None = None
        sizes: tuple[int, ...] = ()
        if gives and isinstance(x, tuple | list | dict):
            value = np.zeros(sum(np.asarray(leaf).nbytes for leaf in leaves(x)), np.uint8)
            stands_for = x
        elif gives:
            value = np.asarray(x)
        if gives:
            dtype = reduction("sum" if op is None else op, value.dtype).dtype if of_kind.reduces else value.dtype
        if gives and value.ndim:
            dim, concat_dim = dim % value.ndim, concat_dim % value.ndim
        if gives and of_kind.cuts:
            factors = (len(group),) if axes is None else tuple(self.mesh.shape[axis] for axis in axes)
            sizes = split_sizes(value.shape[dim], factors) if cut is None else tuple(int(n) for n in cut)
        shape = value.shape if gives else None
        return CountedCall(kind, dtype, shape, dim, concat_dim, sizes, root, pairs, algorithm, stands_for)

    def _meet(
        self, name: str, said: CountedCall, group: tuple[int, ...], axes: tuple[str, ...] | None
    ) -> list[CountedCall]:
        place, meeting = self._begin(name, said, group, axes)
        return self._end(place, meeting, said, group)

    def _begin(
        self, name: str, said: CountedCall, group: tuple[int, ...], axes: tuple[str, ...] | None
    ) -> tuple[int, Meeting]:
        dtype = None if said.dtype is None or isinstance(said.value, tuple | list | dict) else said.dtype.name
        place = self._add(
            "collective", name, axes=axes, group=group, algorithm=said.algorithm or "direct", dtype=dtype)
        return place, self._lockstep.say(self.rank, group, said)

    def _end(self, place: int, meeting: Meeting, said: CountedCall, group: tuple[int, ...]) -> list[CountedCall]:
        everybody = self._agree(meeting, said, group)
        moved = traffic(everybody, group, group.index(self.rank))
        self._events[place] = replace(self._events[place], **moved.on_event())
        return everybody

    def _agree(self, meeting: Meeting, said: CountedCall, group: tuple[int, ...]) -> list[CountedCall]:
        everybody: list[CountedCall] = self._lockstep.all_said(self.rank, meeting, said.kind)
        for rank, other in zip(group, everybody, strict=True):
            if other.differs(said):
                raise ValueError(f"members of group {list(group)} differ: rank {self.rank} calls {said}, rank {rank} "
                                 f"calls {other}")
        return everybody

    def _reduce_tree(self, kind: str, tree: Any, axes: Axes, op: ReduceOp | None, options: dict[str, Any]) -> Any:
        """One buffer for each dtype, as one operation."""
        place = len(self._events)
        for dtype in dict.fromkeys(np.asarray(leaf).dtype for leaf in leaves(tree)):
            size = sum(np.asarray(leaf).size for leaf in leaves(tree) if np.asarray(leaf).dtype == dtype)
            self._collective(kind, np.zeros(size, dtype), axes, op=op, **{**options, "async_op": False})
        parts = self._events[place:]
        sources: Counter[int] = Counter()
        for part in parts:
            sources.update(dict(part.sources))
        self._events[place:] = [replace(
            parts[0], bytes_sent=sum(part.bytes_sent for part in parts), messages=sum(part.messages for part in parts),
            bytes_received=sum(part.bytes_received for part in parts), sources=tuple(sorted(sources.items())),
            payload_bytes=sum(part.payload_bytes or 0 for part in parts),
        )]
        return _Pending(lambda: zeros(tree)) if options.get("async_op") else zeros(tree)

    def _members(self, axes: Axes, groups: Groups | None) -> tuple[int, ...] | None:
        if groups is None:
            return self.group(axes)
        return next((tuple(group) for group in groups if self.rank in group), None)

    def _peer(self, place: int, axes: Axes) -> int:
        return place if axes is None else self.group(axes)[place]
