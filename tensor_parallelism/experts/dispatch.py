"""The dispatch of tokens to experts and back: how tokens are counted, where each row goes, and the two all_to_alls."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.kernels import count_choices, places_before
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import ReshardingPlan
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, Shape, moved


@dataclass(frozen=True)
class Runs:
    """The runs by which tokens are counted: a *run* is a sequence of consecutive tokens of the whole on one device.

    Each index of the dims before the last split dim has its own runs, one for each part of that dim.  The dims after it
    lie inside a run.
    """

    tokens: tuple[Axes, ...]
    shape: Shape
    """The shape of the tokens: that of x without the model dim."""
    mesh: Mesh

    @property
    def _last(self) -> int:
        return max((dim for dim, axes in enumerate(self.tokens) if axes), default=0)

    def layout(self) -> TensorSharding:
        """The layout of the counts, [one or more dims of runs, choices, experts]."""
        return TensorSharding(*self.tokens[: self._last + 1], None, None)

    def counts_shape(self, k: int, experts: int) -> Shape:
        """The shape of the counts of all runs."""
        parts = prod(self.mesh.shape[axis] for axis in self.tokens[self._last])
        return *self.shape[: self._last], parts, k, experts

    def here(self, rank: int) -> int:
        """The number of runs on a device."""
        local = TensorSharding(*self.tokens).local_shape(self.shape, self.mesh, rank)
        return prod(local[: self._last])


@dataclass(frozen=True)
class Dispatch:
    """The accepted choices of a device, the destinations of their rows, and the rows that arrive.

    A *choice* is a pair (token, rank of the choice), numbered rank by rank: ``rank * tokens + token``.
    """

    axes: Axes
    """The axes over which the experts lie."""
    kept: Array
    """(tokens, k) bools: whether each of this device's choices is accepted."""
    order: Array
    """The kept choices in the order in which their rows are sent: by expert, then by number."""
    sent: tuple[int, ...]
    """The number of rows that are sent to each member of the group, in group order."""
    arrived: Array
    """(members, local experts): the number of rows from each member for each expert."""
    first_choices: Array
    """(experts,): the number of tokens of all devices whose first choice is this expert, dropped or not."""

    @property
    def tokens(self) -> Array:
        """The local token of each row that is sent."""
        return self.order % max(1, len(self.kept))

    @property
    def ranks(self) -> Array:
        """The rank of the choice of each row that is sent."""
        return self.order // max(1, len(self.kept))

    @property
    def by_expert(self) -> Array:
        """The order of the arrived rows by local expert, then by sender."""
        members, experts = self.arrived.shape
        labels = np.repeat(np.tile(np.arange(experts), members), self.arrived.reshape(-1))
        return np.argsort(labels, kind="stable")

    def summed(self, rows: Array) -> Array:
        """For each local token the sum of the rows of its kept choices; the rows are in their `order`."""
        sums = np.zeros((len(self.kept), *rows.shape[1:]), rows.dtype)
        for rank in range(self.kept.shape[1]):
            mine = self.ranks == rank
            sums[self.tokens[mine]] += rows[mine]  # each token once
        return sums

    def to_experts(self, device: Device, rows: Array) -> list[Array]:
        """The rows of each local expert, given the ``rows`` of this device's kept choices in their `order`.

        **Communication**: an all_to_all over `axes` with ``split_sizes``, `rows_received` times the bytes of a row.
        """
        if self.axes:
            rows = device.all_to_all(rows, self.axes, split_sizes=self.sent)
        ends = np.cumsum(self.arrived.sum(axis=0))[:-1]
        return np.split(rows[self.by_expert], ends) if self.arrived.shape[1] else []

    def from_experts(self, device: Device, results: Sequence[Array], like: Array) -> Array:
        """The results of the experts, sent back to the devices of the rows, in their `order`; as many bytes as before.

        ``like`` has the dtype and the row shape, where there is no expert here.
        """
        rows = np.empty((int(self.arrived.sum()), *like.shape[1:]), like.dtype)
        if results:
            rows[self.by_expert] = np.concatenate(results)
        if self.axes:
            rows = device.all_to_all(rows, self.axes, split_sizes=self.arrived.sum(axis=1).tolist())
        return rows


def plan_dispatch(
    device: Device,
    chosen: Array,
    runs: Runs,
    counts_plan: ReshardingPlan,
    experts: TensorSharding,
    capacity: int,
) -> Dispatch:
    """The dispatch of this device's rows: ``chosen`` (tokens, k) has the experts of its tokens.

    ``experts`` is the layout of the experts.  **Communication**: that of ``counts_plan``, which gathers the counts of
    all runs.  ``RuntimeError`` if collectives have no values: on the recorder, which only counts.
    """
    k, count = chosen.shape[1], counts_plan.shape[-1]
    layout, shape = counts_plan.source, counts_plan.shape
    own, preceding = count_choices(chosen, runs.here(device.rank), count)
    counts = moved(device, counts_plan, own.reshape(layout.local_shape(shape, device.mesh, device.rank)))
    here = layout.slices(shape, device.mesh, device.rank)
    if not np.array_equal(counts[here].reshape(own.shape), own):
        raise RuntimeError(
            "a mixture of experts sends what its router says: it needs a device that moves values, "
            "a recorder that counts only cannot run it"
        )
    before = places_before(counts.reshape(-1, k, count)).reshape(shape)
    taken = np.clip(capacity - before, 0, counts)

    offsets = before[here].reshape(own.shape)
    run = np.repeat(np.arange(len(own)), len(chosen) // max(1, len(own)))
    kept = offsets[run[:, None], np.arange(k), chosen] + preceding < capacity
    numbers = np.flatnonzero(kept.T.reshape(-1))
    order = numbers[np.argsort(chosen.T.reshape(-1)[numbers], kind="stable")]

    axes = experts.dims[0].axes
    blocks = [experts.slices((count,), device.mesh, rank)[0] for rank in device.group(axes)]
    rows = taken[here].reshape(-1, count).sum(axis=0)
    mine = blocks[device.position(axes)]
    arrived = np.stack(
        [
            taken[layout.slices(shape, device.mesh, rank)].reshape(-1, count)[:, mine].sum(axis=0)
            for rank in device.group(axes)
        ]
    )
    sent = tuple(int(rows[block].sum()) for block in blocks)
    return Dispatch(axes, kept, order, sent, arrived, counts.reshape(-1, k, count)[:, 0].sum(axis=0))


def rows_received(
    kept: npt.ArrayLike, experts: TensorSharding, mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of rows that each rank receives from others: those for its experts, and its own on their way back.

    ``kept`` (devices, experts) has the number of choices of each device that each expert accepts.  These numbers times
    the bytes of a row (of model) are the bytes received in the all_to_alls of the forward, and again of the backward.
    """
    table, axes = np.asarray(kept), experts.dims[0].axes
    blocks = [experts.slices(table.shape[1:], mesh, rank)[0] for rank in range(mesh.size)]
    for_experts, back = [], []
    for rank, block in enumerate(blocks):
        others = [other for other in mesh.group(rank, axes) if other != rank]
        for_experts.append(int(table[others][:, block].sum()))
        back.append(sum(int(table[rank, blocks[other]].sum()) for other in others))
    return tuple(for_experts), tuple(back)


def kept_by_expert(dispatch: Dispatch, chosen: Array, experts: int) -> Array:
    """(experts,): the number of a device's choices that each expert accepts."""
    return np.bincount(chosen[dispatch.kept], minlength=experts)
