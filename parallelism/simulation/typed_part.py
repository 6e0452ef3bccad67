"""`TypedPart`: a `TypedDevice` as a member of a mesh of its own; see `parallelism.operation.part.DevicePart`.

It adds its events to those of the device.  Its groups have no axes: the ranks of the cluster stand for each.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from parallelism.collectives import MemberCall
from parallelism.execution import TypedArray
from parallelism.mesh import Axes, Mesh
from parallelism.operation.part import Ranks
from parallelism.simulation.device_events import Call, GroupKey, StepCall
from parallelism.simulation.typed_device import TypedDevice, TypedWork


class TypedPart(TypedDevice):
    """A device of ``ranks`` on a ``mesh`` of its own; arguments as those of `DevicePart`."""

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
