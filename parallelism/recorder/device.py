"""A `Device` that moves nothing and counts everything: `parallelism.recorder` creates one for each rank."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.algorithms import kind_of
from parallelism.arrays import Array, plain_array
from parallelism.collectives import (
    TreeBuffers,
    call_fields,
    check_agreement,
    check_declared,
    check_out,
    check_shape,
    checked_array,
    checked_extents,
    checked_options,
    checked_peer,
    checked_root,
    checked_tag,
    is_tree,
    members_of,
    plain_pairs,
    rank_at,
    refuse_out_of_tree,
    shift_pairs,
    text_of,
)
from parallelism.collectives.call import Traffic, traffics
from parallelism.dtypes import as_dtype
from parallelism.mesh import Axes, Mesh, MeshIndex
from parallelism.operation import CollectiveMismatchError, Groups, ReduceOp, Work, calling_line
from parallelism.operation.declared_work import declared_work, matmul_cost
from parallelism.operation.trees import leaves
from parallelism.operation.unfinished import Unfinished
from parallelism.recorder.calls import CountedCall, blank, result, zeros
from parallelism.recorder.rendezvous import Channel, Lockstep, Meeting, Message
from parallelism.resharding import plan_resharding, run_plan
from parallelism.sharding import TensorSharding
from parallelism.trace import Event


@dataclass
class _Pending(Unfinished):
    """An operation under way."""

    conclude: Callable[[], Any]
    ended: list[Any] = field(default_factory=list)

    def wait(self) -> Any:
        if not self.ended:
            self.ended.append(self.conclude())
        return self.ended[0]

    def done(self) -> bool:
        return bool(self.ended)

    def __repr__(self) -> str:
        return "<the work of a call>"


class RecordingDevice:
    """A device that moves nothing; `record` creates one for each rank.

    Its methods are those of `parallelism.operation.Device`.
    """

    def __init__(self, mesh: Mesh, rank: int, lockstep: Lockstep) -> None:
        self.mesh, self.rank, self.size = mesh, rank, mesh.size
        self.index: MeshIndex = mesh.index(rank)
        self.state: dict[Any, Any] = {}
        self._lockstep = lockstep
        self._events: list[dict[str, Any]] = []
        """The fields of each event: those of a collective are known in two steps, and an event is made once."""
        self._parent: int | None = None
        self._pending: list[_Pending] = []

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng((0, self.rank))

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        return self.mesh.group(self.rank, axes)

    def position(self, axes: Axes = None) -> int:
        return self.group(axes).index(self.rank)

    # -- what is computed and held -------------------------------------------------------------------------------------

    @contextmanager
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
    ) -> Iterator[None]:
        flops, nbytes, seconds = declared_work(name, flops, nbytes, seconds)
        self._add(
            "compute",
            name,
            flops=flops,
            nbytes=nbytes,
            cpu_seconds=seconds or 0.0,
            stage=stage,
            microbatch=microbatch,
            phase=phase,
            seconds=seconds,
            dtype=None if dtype is None else as_dtype(dtype).name,
            other_bytes=other_bytes,
            shape=shape,
        )
        yield

    def hold(
        self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        self._add("memory", category, nbytes=float(nbytes), stage=stage, microbatch=microbatch)

    def matmul(self, a: npt.ArrayLike, b: npt.ArrayLike, *, out: np.ndarray | None = None) -> Any:
        a, b = np.asarray(a), np.asarray(b)
        flops, nbytes, dtype, shape = matmul_cost(a, b)
        if not a.ndim or not b.ndim or a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
            return np.matmul(a, b)  # raises, in NumPy's words
        with self.compute("matmul", flops=flops, nbytes=nbytes, dtype=dtype, shape=shape):
            if out is not None:
                out[...] = 0
                return out
            batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            product = np.zeros((*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ())), dtype)
            return product if product.ndim else product[()]

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> Array:
        return np.zeros(*checked_extents(shape, dtype))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, axes: Axes = None, *, op: ReduceOp = "sum", **options: Any) -> Any:
        options = checked_options("all_reduce", options)
        if is_tree(x):
            return self._reduce_tree("all_reduce", x, axes, op, options)
        return self._collective("all_reduce", x, axes, op=op, **options)

    def all_gather(self, x: Any, axes: Axes = None, *, dim: int = 0, **options: Any) -> Any:
        return self._collective("all_gather", x, axes, dim=dim, **checked_options("all_gather", options))

    def reduce_scatter(
        self, x: Any, axes: Axes = None, *, dim: int = 0, op: ReduceOp = "sum", **options: Any
    ) -> Any:
        return self._collective(
            "reduce_scatter", x, axes, dim=dim, op=op, **checked_options("reduce_scatter", options)
        )

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
        options = {"dim": split_dim, "concat_dim": concat_dim, **checked_options("all_to_all", options)}
        return self._collective("all_to_all", x, axes, sizes=split_sizes, **options)

    def broadcast(self, x: Any, axes: Axes = None, *, root: int = 0, **options: Any) -> Any:
        return self._collective("broadcast", x, axes, root=root, **checked_options("broadcast", options))

    def reduce(
        self, x: Any, axes: Axes = None, *, root: int = 0, op: ReduceOp = "sum", **options: Any
    ) -> Any:
        return self._collective("reduce", x, axes, root=root, op=op, **checked_options("reduce", options))

    def scatter(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        return self._collective("scatter", x, axes, root=root, dim=dim, **checked_options("scatter", options))

    def gather(self, x: Any, axes: Axes = None, *, root: int = 0, dim: int = 0, **options: Any) -> Any:
        return self._collective("gather", x, axes, root=root, dim=dim, **checked_options("gather", options))

    def all_scatter(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        return self._collective("all_scatter", x, axes, **checked_options("all_scatter", options))

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]], axes: Axes = None, **options: Any) -> Any:
        return self._collective(
            "permute", x, axes, pairs=plain_pairs(pairs), **checked_options("permute", options)
        )

    def shift(self, x: Any, axes: Axes = None, *, by: int = 1, **options: Any) -> Any:
        return self.permute(
            x, shift_pairs(self.mesh, self.rank, axes, options.get("groups"), by), axes, **options
        )

    def barrier(self, axes: Axes = None, **options: Any) -> Any:
        return self._collective("barrier", None, axes, **checked_options("barrier", options))

    def collective(
        self,
        kind: str,
        x: Any,
        axes: Axes = None,
        *,
        split_sizes: Sequence[int] | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
        **options: Any,
    ) -> Any:
        """The collective of this name; see `vcluster.VirtualDevice.collective`."""
        options = checked_options("collective", options)
        if kind_of(kind).elementwise and is_tree(x):
            return self._reduce_tree(kind, x, axes, options.pop("op", None), options)
        return self._collective(kind, x, axes, sizes=split_sizes, pairs=plain_pairs(pairs), **options)

    def all_gather_object(self, obj: Any, axes: Axes = None) -> list[Any]:
        return [call.value for call in self._exchange("all_gather_object", "all_scatter", obj, axes)]

    def broadcast_object(self, obj: Any, axes: Axes = None, *, root: int = 0) -> Any:
        return self._exchange("broadcast_object", "broadcast", obj, axes, root=root)[root].value

    def reshard(
        self,
        x: Any,
        source: TensorSharding | str,
        target: TensorSharding | str,
        *,
        shape: Sequence[int] | None = None,
        axes: Axes = None,
    ) -> Any:
        array = plain_array("reshard", x)
        source = TensorSharding.of(source, self.mesh, "the source of a resharding")
        shape = self.global_shape(array, source) if shape is None else shape
        plan = plan_resharding(source, target, shape, array.dtype, self.mesh, axes=axes)
        place = self._add(
            "collective", "reshard", axes=plan.axes, group=self.group(plan.axes), algorithm=None
        )
        before, self._parent = self._parent, place if self._parent is None else self._parent
        result = run_plan(self, plan, array)
        self._parent = before
        self._counted(place, self._moved(place + 1)._replace(call=None))
        return result if isinstance(x, np.ndarray) or result.ndim else result[()]

    def global_shape(self, x: Any, sharding: TensorSharding | str) -> tuple[int, ...]:
        shape: tuple[int, ...] = np.shape(x)
        sharding = TensorSharding.of(sharding, self.mesh)
        sharding.check_axes(self.mesh)
        axes = sharding.over(len(shape)).axes
        if not axes:
            return shape
        group = self.group(axes)
        call = CountedCall("global_shape", np.dtype(bool), shape)
        calls = self._agreed(self._lockstep.state(self.rank, group, call), call, group, check=False)
        shapes = {rank: other.shape or () for rank, other in zip(group, calls, strict=True)}
        return sharding.global_shape(shapes, self.mesh)

    def global_shapes(
        self, xs: Sequence[Any], shardings: Sequence[TensorSharding | str]
    ) -> list[tuple[int, ...]]:
        return [self.global_shape(x, sharding) for x, sharding in zip(xs, shardings, strict=True)]

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> None:
        peer = self._peer("dst", dst, axes)
        nbytes = 0
        for leaf in leaves(x):
            array = checked_array("a message", leaf)[0] if isinstance(leaf, np.ndarray) else np.asarray(leaf)
            nbytes += array.nbytes
        self._add(
            "send",
            "send",
            peer=peer,
            tag=tag,
            bytes_sent=nbytes,
            messages=1,
            dtype=x.dtype.name if isinstance(x, np.ndarray) else None,
        )
        self._lockstep.put(Channel(self.rank, peer, checked_tag(tag)), zeros(x))

    def recv(self, src: int, *, tag: int = 0, out: Any = None, axes: Axes = None) -> Any:
        message = self._take(Channel(self._peer("src", src, axes), self.rank, checked_tag(tag)))
        if out is None:
            return message.value
        if not isinstance(message.value, np.ndarray):
            raise TypeError(
                f"recv(out=) got a message that is a {type(message.value).__name__}, not an array"
            )
        return _copied(f"recv from rank {src}", out, message.value)

    def _take(self, channel: Channel, issued_at: str | None = None) -> Message:
        message = self._lockstep.take(channel, issued_at)
        self._add(
            "recv",
            "recv",
            peer=channel.source,
            tag=channel.tag,
            bytes_received=sum(np.asarray(leaf).nbytes for leaf in leaves(message.value)),
        )
        return message

    def isend(self, x: Any, dst: int, *, tag: int = 0, axes: Axes = None) -> Work[None]:
        self.send(x, dst, tag=tag, axes=axes)
        return _Pending(lambda: None)

    def irecv(
        self,
        src: int,
        *,
        tag: int = 0,
        shape: Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: Axes = None,
    ) -> Work[Any]:
        channel = Channel(self._peer("src", src, axes), self.rank, checked_tag(tag))
        extents = None if shape is None else tuple(shape)
        wanted = None if dtype is None else as_dtype(dtype)
        issued_at = calling_line()

        def conclude() -> Any:
            message = self._take(channel, issued_at)
            try:
                check_declared(self.rank, channel.source, message.value, extents, wanted)
            except CollectiveMismatchError as error:
                error.sent_at = message.location
                raise
            return message.value

        return self._issued(conclude)

    def sendrecv(self, x: Any, dst: int, src: int, *, tag: int = 0, axes: Axes = None) -> Any:
        self.send(x, dst, tag=tag, axes=axes)
        return self.recv(src, tag=tag, axes=axes)

    # -- the record ----------------------------------------------------------------------------------------------------

    def finish(self) -> list[Event]:
        """What this rank did, in order, when each operation that is still pending has ended."""
        for pending in self._pending:
            pending.wait()
        return [Event(self.rank, serial=serial, **fields) for serial, fields in enumerate(self._events)]

    def _add(self, kind: str, name: str, **values: Any) -> int:
        self._events.append({"kind": kind, "name": name, "parent": self._parent, **values})
        return len(self._events) - 1

    def _moved(self, place: int) -> Traffic:
        """The traffic of the events from a place on, which count as one."""
        events = (Event(self.rank, **fields) for fields in self._events[place:])
        return reduce(Traffic.plus, map(Traffic.of_event, events), Traffic(0, 0, 0, ()))

    # -- one collective ------------------------------------------------------------------------------------------------

    def _collective(
        self,
        kind: str,
        x: Any,
        axes: Axes,
        *,
        groups: Groups | None = None,
        out: Any = None,
        async_op: bool = False,
        text: str | None = None,
        form: bytes | None = None,
        **options: Any,
    ) -> Any:
        group, names, factors = members_of(self.mesh, self.rank, kind, axes, groups)
        if group is None:
            return zeros(x)
        call = self._call(kind, x, group, factors, **options)
        if form is not None:
            call = replace(call, form=form)
        position = group.index(self.rank)
        if out is not None:
            refuse_out_of_tree(kind, x, out)
            check_out(call, position, out, np.asarray(x) if call.gives else None)
        place, meeting = self._begin(kind, call, group, names)
        issued_at = calling_line() if async_op else None

        def conclude() -> Any:
            calls = self._end(place, meeting, call, group, text, issued_at)
            value = result(calls, position, x, meeting.once("blanks", lambda: [*map(blank, calls)]))
            return value if out is None or value is None else _copied(kind, out, value)

        return self._issued(conclude) if async_op else conclude()

    def _issued(self, conclude: Callable[[], Any]) -> _Pending:
        """An asynchronous operation, which ends at the latest with the program."""
        pending = _Pending(conclude)
        self._pending.append(pending)
        return pending

    def _call(
        self,
        kind: str,
        x: Any,
        group: tuple[int, ...],
        factors: Sequence[int] = (),
        *,
        op: ReduceOp | None = None,
        dim: int = 0,
        concat_dim: int = 0,
        sizes: Sequence[int] | None = None,
        root: int = 0,
        pairs: tuple[tuple[int, int], ...] | None = None,
        algorithm: str | None = None,
        value: Any = None,
    ) -> CountedCall:
        """The checked call of this rank; other members receive ``value`` in place of its array."""
        position = group.index(self.rank)
        root = checked_root(kind, root, len(group))
        fields, array, _ = call_fields(
            kind, x, op, dim, concat_dim, sizes, factors, root, position, len(group), _to_array
        )
        if array is not None and is_tree(x):
            value = x
        call = CountedCall(kind, root=root, pairs=pairs, algorithm=algorithm, value=value, **fields)
        call.over(len(group))  # refuses an algorithm, or pairs, that do not apply
        return call

    def _exchange(self, name: str, kind: str, obj: Any, axes: Axes, *, root: int = 0) -> list[CountedCall]:
        """The calls of all members of a collective of pickled objects."""
        group = self.group(axes)
        call = self._call(kind, np.zeros(len(pickle.dumps(obj)), np.uint8), group, root=root, value=obj)
        place, meeting = self._begin(name, call, group, self.mesh.axes_of(axes))
        return self._end(place, meeting, call, group)

    def _begin(
        self, name: str, call: CountedCall, group: tuple[int, ...], axes: tuple[str, ...] | None
    ) -> tuple[int, Meeting]:
        dtype = None if call.dtype is None or is_tree(call.value) else call.dtype.name
        place = self._add(
            "collective", name, axes=axes, group=group, algorithm=call.algorithm or "direct", dtype=dtype
        )
        return place, self._lockstep.state(self.rank, group, call)

    def _end(
        self,
        place: int,
        meeting: Meeting,
        call: CountedCall,
        group: tuple[int, ...],
        text: str | None = None,
        issued_at: str | None = None,
    ) -> list[CountedCall]:
        calls = self._agreed(meeting, call, group, text, issued_at)
        moved = meeting.once("moved", lambda: traffics(calls, group))
        self._counted(place, moved[group.index(self.rank)])
        return calls

    def _counted(self, place: int, moved: Traffic) -> None:
        """Writes the traffic of an operation into its event."""
        self._events[place].update(moved.on_event())

    def _agreed(
        self,
        meeting: Meeting,
        call: CountedCall,
        group: tuple[int, ...],
        text: str | None = None,
        issued_at: str | None = None,
        *,
        check: bool = True,
    ) -> list[CountedCall]:
        """The calls of all members of a group, which must be of one collective."""
        calls: list[CountedCall] = self._lockstep.all_stated(
            self.rank, meeting, lambda: text or text_of(call), issued_at
        )
        if check or any(other.kind != call.kind for other in calls):
            meeting.once("agreed", lambda: check_agreement(group, call.kind, calls))
        return calls

    def _reduce_tree(
        self, kind: str, tree: Any, axes: Axes, op: ReduceOp | None, options: dict[str, Any]
    ) -> Any:
        """One buffer for each dtype, as one operation."""
        refuse_out_of_tree(kind, tree, options.get("out"))
        place, buffers = len(self._events), TreeBuffers(tree)
        for dtype, numbers in buffers.by_dtype.items():
            buffers.put(
                numbers,
                self._collective(
                    kind,
                    np.zeros(buffers.size(numbers), dtype),
                    axes,
                    op=op,
                    form=buffers.form,
                    text=f"{kind}({type(tree).__name__} of arrays)",
                    **{**options, "async_op": False},
                ),
            )
        moved = self._moved(place).on_event()
        self._events[place:] = [first | moved for first in self._events[place:][:1]]
        result = buffers.tree()
        return _Pending(lambda: result) if options.get("async_op") else result

    def _peer(self, name: str, place: int, axes: Axes) -> int:
        return (
            checked_peer(self.mesh, place, name) if axes is None else rank_at(self.group(axes), axes, place)
        )


def _to_array(kind: str, x: Any) -> tuple[Array, bytes]:
    """A value as an array, and its form; a tree that travels as bytes is so many bytes."""
    if kind_of(kind).copies and is_tree(x):
        nbytes = sum(checked_array("a tree of arrays", leaf)[0].nbytes for leaf in leaves(x))
        return np.broadcast_to(np.uint8(0), nbytes), b"tree"
    return checked_array(kind, x)


def _copied(operation: str, out: Array, value: Array) -> Array:
    """``out`` with the value of an operation; an error if it does not fit."""
    check_shape(operation, out, value.shape, value.dtype)
    np.copyto(out, value)
    return out
