"""`TypedPart`: a `TypedDevice` as a member of a mesh of its own; see `parallelism.operation.part.DevicePart`.

It adds its events to those of the device.  Its groups have no axes: the ranks of the cluster stand for each.
"""

from collections.abc import Sequence
from typing import Any

from parallelism.collectives import MemberCall
from parallelism.execution import TypedArray
from parallelism.mesh import Axes, Mesh
from parallelism.operation.part import Ranks
from parallelism.simulation.device_events import Call, GroupKey, StepCall
from parallelism.simulation.typed_device import TypedDevice


class TypedPart(TypedDevice):
    """A device of ``ranks`` on a ``mesh`` of its own; arguments as those of `DevicePart`."""

    def __init__(
        self, whole: TypedDevice, mesh: Mesh, ranks: Sequence[int], together: tuple[str, Sequence[int]] | None = None
    ) -> None:
        self.of = Ranks(mesh, ranks, whole.rank, together)
        super().__init__(mesh, self.of.place, whole.incoming)
        self.whole, self.events = whole, whole.events
        self._append = self.events.rows.append

    def all_reduce(self, x: TypedArray, axes: Axes = None, **options: Any) -> Any:
        """Records the collective; over the axis of all meshes, an all_reduce of first devices, and a broadcast."""
        if not self.of.is_together(axes):
            return super().all_reduce(x, axes, **options)
        if not self.rank:
            self._among(self.of.first, MemberCall("all_reduce", x.dtype, x.shape), x.dtype_name)
        if self.size > 1:
            self._among(self.of.ranks, MemberCall("broadcast", x.dtype, x.shape), None if self.rank else x.dtype_name)
        return x

    def _among(self, ranks: tuple[int, ...], call: MemberCall, dtype: str | None) -> None:
        self.events.add_collective(None, ranks, call, call.kind, dtype)

    def _axes_of(self, axes: Axes) -> tuple[None, GroupKey]:
        return None, self.of.along(axes)

    def _factors(self, axes: Axes) -> tuple[int, ...]:
        return len(self.group(axes)),

    def _step_call(self, call: StepCall) -> Call:
        return call.of_rank(self.rank)
