"""`TypedDevice`: a device whose arrays are types.  It runs a program and writes the events that a run would record.

    device = TypedDevice(mesh, rank=0)
    executable(device, *(TypedArray.of(value.type) for value in function.inputs))
    device.events.rows

Nothing is computed, moved or waited for, so one device can run alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy.typing as npt

from parallelism.algorithms import Pairs, kind_of
from parallelism.collectives import MemberCall
from parallelism.dtypes import as_dtype
from parallelism.execution import METHODS, TypedArray
from parallelism.execution.device_calls import buffer_size
from parallelism.execution.device_program import communicates
from parallelism.ir import Op
from parallelism.layouts import step_of
from parallelism.mesh import Axes, Mesh, MeshIndex, split_sizes
from parallelism.operation import Device, ReduceOp
from parallelism.operation.declared_work import declared_work
from parallelism.operation.part import Ranks
from parallelism.simulation.device_events import Call, DeviceEvents, EventRow, GroupKey, MeshAxes, StepCall

_BLOCK: AbstractContextManager[None] = nullcontext()


def nothing() -> None:
    """Does nothing."""


@dataclass(slots=True, eq=False)
class TypedWork:
    """An asynchronous operation; `wait` records the wait and returns what it gives."""

    events: DeviceEvents
    name: str
    number: int | None
    """None: there is nothing to wait for."""
    received: Any = None
    then: Callable[[], None] = nothing
    """What happens after the wait."""

    def wait(self) -> Any:
        """The received array, or the outputs of collectives; None for a send."""
        if self.number is not None:
            self.events.add_wait(self.name, self.number)
        self.then()
        return self.received

    def done(self) -> bool:
        """Always True, because nothing takes time here."""
        return True


class Closing(NamedTuple):
    """The last backward of a stage, which leaves collectives under way."""

    stage: int
    events: DeviceEvents
    left: dict[int, TypedWork]
    """The collectives by the numbers that they have among the ``events``."""
    result: Any
    """What the action returns."""


class TypedDevice:
    """The device of one ``rank``; it has those methods of `parallelism.operation.Device` that programs call.

    ``incoming(tag)`` returns an array of the type of the message with this tag.  The peer of a message is a position
    along an axis of the mesh, or a rank if there is no axis.  A collective whose result may have another shape than
    ``x`` returns None, because `run_op` takes the types of results from the program.
    """

    def __init__(self, mesh: Mesh, rank: int, incoming: Callable[[int], TypedArray] | None = None) -> None:
        self.mesh, self.rank, self.size = mesh, rank, mesh.size
        self.events, self.incoming = DeviceEvents(), incoming
        self._append = self.events.rows.append
        self.under_way: dict[int, TypedWork] = {}
        """The started collectives that were not waited for, by the numbers that they had first."""
        self.closings: list[Closing] = []
        """The last backwards of stages that leave collectives under way, in their order."""
        self._group_axes: dict[Axes, tuple[MeshAxes, GroupKey]] = {}

    @property
    def device(self) -> Device:
        """This object, typed as the `Device` that programs expect."""
        return cast(Device, self)

    @cached_property
    def index(self) -> MeshIndex:
        """The place of the rank on the axes of the mesh."""
        return self.mesh.index(self.rank)

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        """The ranks of the device's group along ``axes``."""
        return self.mesh.group(self.rank, axes)

    def position(self, axes: Axes = None) -> int:
        """The device's place in its group."""
        return self.group(axes).index(self.rank)

    def as_part(self, mesh: Mesh, ranks: Sequence[int], together: tuple[str, Sequence[int]] | None) -> Device:
        """This device on a mesh of its own, with the same events."""
        return TypedPart(self, mesh, ranks, together).device

    # -- compute and memory --------------------------------------------------------------------------------------------

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
        """Records a compute event with its declared cost."""
        if dtype is not None and not isinstance(dtype, str):
            dtype = as_dtype(dtype).name
        flops, nbytes, seconds = declared_work(name, flops, nbytes, seconds)
        self._append(
            EventRow(
                "compute",
                name,
                nbytes,
                flops,
                dtype,
                seconds,
                stage=stage,
                microbatch=microbatch,
                phase=phase,
                other_bytes=other_bytes,
                shape=shape,
            )
        )
        return _BLOCK

    def hold(
        self, category: str, nbytes: int, *, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        """Records that ``nbytes`` more are held, or fewer if the number is negative."""
        self.events.add_memory(category, nbytes, stage, microbatch)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def full(self, shape: Sequence[int], value: float, dtype: npt.DTypeLike) -> TypedArray:
        """An array of this shape and dtype."""
        return TypedArray(shape, dtype)

    def run_op(self, op: Op, inputs: Sequence[TypedArray], into: Sequence[Any] = ()) -> list[TypedArray]:
        """Arrays of the types that the program states for the outputs.  Records a collective or a message."""
        if op.kind in METHODS or not op.outputs or op.kind == "recv":
            self._communicate(op, inputs)
        return [TypedArray.of(value.type) for value in op.outputs]

    def start(
        self, call: Op, ops: Sequence[Op], inputs: Sequence[TypedArray], *, at_once: bool = False
    ) -> TypedWork:
        """Records collectives as one call, which may be over ``at_once``."""
        x = inputs[0]
        if len(ops) > 1 or at_once:
            x = TypedArray((buffer_size(call, ops, self.mesh),), x.dtype)
        if at_once:
            METHODS[call.kind](self.device, call, cast(Any, x))
            work = TypedWork(self.events, call.kind, None)
        else:
            work = METHODS[call.kind](self.device, call, cast(Any, x), async_op=True)
        assert isinstance(work, TypedWork)
        work.received = [TypedArray.of(op.outputs[0].type) for op in ops]
        return work

    def wait(self, work: TypedWork, into: Sequence[Any] = ()) -> Any:
        """Arrays of the types that the program states for the outputs.  Records the wait."""
        if work.number is not None:
            self.under_way.pop(work.number, None)
        return work.wait()

    def _communicate(self, op: Op, inputs: Sequence[TypedArray]) -> None:
        if op.kind == "recv":
            self.events.add_message(
                "recv", op["source"], op["tag"], int(op.outputs[0].type.nbytes), None, None, None
            )
        elif op.kind == "send":
            self.send(inputs[0], op["destination"], tag=op["tag"])
        elif op.kind == "relayout" and communicates(op):
            call = StepCall(step_of(op, self.mesh), inputs[0].dtype)
            axes, group_axes = self._axes_of(call.step.axes)
            self.events.add_collective(
                axes, group_axes, self._step_call(call), call.name_of(self.rank), inputs[0].dtype_name
            )
        elif op.kind == "group_collective":
            self._among_ranks(op, inputs[0])
        elif communicates(op):
            METHODS[op.kind](self.device, op, cast(Any, inputs[0]))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: TypedArray,
        axes: Axes = None,
        *,
        op: ReduceOp = "sum",
        out: TypedArray | None = None,
        async_op: bool = False,
    ) -> Any:
        """Records the collective; the result is of the type of ``x``."""
        return self.collective("all_reduce", x, axes, async_op=async_op, result=x)

    def all_gather(
        self,
        x: TypedArray,
        axes: Axes = None,
        *,
        dim: int = 0,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Records the collective."""
        return self.collective("all_gather", x, axes, dim, algorithm=algorithm, async_op=async_op)

    def reduce_scatter(
        self,
        x: TypedArray,
        axes: Axes = None,
        *,
        dim: int = 0,
        op: ReduceOp = "sum",
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Records the collective."""
        return self.collective("reduce_scatter", x, axes, dim, algorithm=algorithm, async_op=async_op)

    def all_to_all(
        self,
        x: TypedArray,
        axes: Axes = None,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Records the collective."""
        return self.collective("all_to_all", x, axes, split_dim, algorithm=algorithm, async_op=async_op)

    def permute(self, x: TypedArray, pairs: Pairs, axes: Axes = None, *, async_op: bool = False) -> Any:
        """Records the collective; the result is of the type of ``x``."""
        named = tuple((source, target) for source, target in pairs)
        return self.collective("permute", x, axes, pairs=named, async_op=async_op, result=x)

    def collective(
        self,
        kind: str,
        x: TypedArray,
        axes: Axes,
        dim: int = 0,
        pairs: Pairs | None = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        result: TypedArray | None = None,
    ) -> Any:
        """Records a collective, and gives its ``result``, or the work that gives it."""
        names, group_axes = self._axes_of(axes)
        factors, shape = self._factors(axes), tuple(map(int, x.shape))
        sizes = split_sizes(shape[dim], factors) if kind_of(kind).cuts else ()
        call = MemberCall(kind, x.dtype, shape, dim, sizes=sizes, pairs=pairs, algorithm=algorithm)
        return self._recorded(names, group_axes, call, x, async_op=async_op, result=result)

    def _recorded(
        self,
        names: MeshAxes | None,
        group_axes: GroupKey,
        call: MemberCall,
        x: TypedArray,
        *,
        async_op: bool,
        result: TypedArray | None,
    ) -> Any:
        """The ``result`` of a collective that is recorded, or the work that gives it."""
        if not async_op:
            self.events.add_collective(names, group_axes, call, call.kind, x.dtype_name)
            return result
        self.events.works += 1
        self.events.add_collective(names, group_axes, call, call.kind, x.dtype_name, self.events.works)
        work = self.under_way[self.events.works] = TypedWork(
            self.events, call.kind, self.events.works, result
        )
        return work

    def _among_ranks(self, op: Op, x: TypedArray) -> None:
        """Records a collective of a group of ranks that lies along no axes, if this rank is in one."""
        kind, dim, shape = op["collective"], op["dim"], tuple(map(int, x.shape))
        sizes = split_sizes(shape[dim], (op["group"],)) if kind_of(kind).cuts else ()
        for group in op["groups"]:
            if self.rank in group and len(group) > 1:
                self.events.add_collective(
                    None, group, MemberCall(kind, x.dtype, shape, dim, sizes=sizes), kind, x.dtype_name
                )

    def _factors(self, axes: Axes) -> tuple[int, ...]:
        """The numbers of devices by which a dim is split over a group, axis by axis."""
        return tuple(self.mesh.shape[axis] for axis in self.mesh.axes_of(axes))

    def _step_call(self, call: StepCall) -> Call:
        """The call of a step of a resharding plan, as it stands among the events."""
        return call

    def _axes_of(self, axes: Axes) -> tuple[MeshAxes | None, GroupKey]:
        """The names of the axes, and of those with more than one device."""
        if axes not in self._group_axes:
            names = self.mesh.axes_of(axes)
            self._group_axes[axes] = names, tuple(axis for axis in names if self.mesh.shape[axis] > 1)
        return self._group_axes[axes]

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, x: TypedArray, dst: int, *, tag: int = 0, axes: str | None = None) -> None:
        """Records a send."""
        self.events.add_message("send", dst, tag, x.nbytes, x.dtype_name, axes, None)

    def recv(self, src: int, *, tag: int = 0, axes: str | None = None) -> TypedArray:
        """Records a recv; the result is of the type that ``incoming`` has for the tag."""
        return self._receive(src, tag, axes, None)

    def isend(self, x: TypedArray, dst: int, *, tag: int = 0, axes: str | None = None) -> TypedWork:
        """`send` that is waited for later."""
        self.events.works += 1
        self.events.add_message("send", dst, tag, x.nbytes, x.dtype_name, axes, self.events.works)
        return TypedWork(self.events, "send", self.events.works)

    def irecv(
        self,
        src: int,
        *,
        tag: int = 0,
        shape: Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: str | None = None,
    ) -> TypedWork:
        """`recv` that is waited for later; with ``shape`` and ``dtype`` the result is of this type."""
        self.events.works += 1
        number = self.events.works
        x = None if shape is None or dtype is None else TypedArray(shape, dtype)
        return TypedWork(self.events, "recv", number, self._receive(src, tag, axes, number, x))

    def sendrecv(
        self, x: TypedArray, dst: int, src: int, *, tag: int = 0, axes: str | None = None
    ) -> TypedArray:
        """Records the exchange of two arrays of one type: an asynchronous send, a recv, and the wait for the send."""
        sent = self.isend(x, dst, tag=tag, axes=axes)
        self.events.add_message("recv", src, tag, x.nbytes, None, axes, None)
        sent.wait()
        return x

    def _receive(
        self, src: int, tag: int, axis: str | None, work: int | None, x: TypedArray | None = None
    ) -> TypedArray:
        if x is None:
            if self.incoming is None:
                raise ValueError(f"a device without messages received one from {src} with tag {tag}")
            x = self.incoming(tag)
        self.events.add_message("recv", src, tag, x.nbytes, None, axis, work)
        return x


class TypedPart(TypedDevice):
    """A device of ``ranks`` on a ``mesh`` of its own, as `parallelism.operation.part.DevicePart` with these arguments.

    It adds its events to those of the device.  Its groups have no axes: the ranks of the cluster stand for each.
    """

    def __init__(
        self,
        whole: TypedDevice,
        mesh: Mesh,
        ranks: Sequence[int],
        together: tuple[str, Sequence[int]] | None = None,
    ) -> None:
        self.of = Ranks(mesh, ranks, whole.rank, together)
        super().__init__(mesh, self.of.place, whole.incoming)
        self.whole, self.events = whole, whole.events
        self._append = self.events.rows.append

    def all_reduce(self, x: TypedArray, axes: Axes = None, **options: Any) -> Any:
        """Records the collective; over the axis of all meshes, an all_reduce of first devices, and a broadcast."""
        if not self.of.is_together(axes):
            return super().all_reduce(x, axes, **options)
        work, later = TypedWork(self.events, "all_reduce", None, x), bool(options.get("async_op"))
        if not self.rank:
            call = MemberCall("all_reduce", x.dtype, x.shape)
            found = self._recorded(None, self.of.first, call, x, async_op=later, result=x)
            work = found if later else work
        work.then = partial(self._share, x)
        return work if later else work.wait()

    def _share(self, x: TypedArray) -> None:
        """Records a broadcast inside the mesh."""
        if self.size > 1:
            call = MemberCall("broadcast", x.dtype, x.shape)
            self.events.add_collective(
                None, self.of.ranks, call, call.kind, None if self.rank else x.dtype_name
            )

    def _axes_of(self, axes: Axes) -> tuple[None, GroupKey]:
        return None, self.of.along(axes)

    def _factors(self, axes: Axes) -> tuple[int, ...]:
        return (len(self.group(axes)),)

    def _step_call(self, call: StepCall) -> Call:
        return call.of_rank(self.rank)
