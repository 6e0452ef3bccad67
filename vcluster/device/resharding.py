"""A resharding on a device: planned, run, and recorded as one event.

The collectives inside it are its children in the trace: they are in no total, the event of the resharding counts what
they move.  What is said to agree on the shape of the whole counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Traffic
from parallelism.mesh import Axes, Mesh
from parallelism.resharding import plan_resharding, run_plan
from parallelism.sharding import TensorSharding
from vcluster.code import call_site

if TYPE_CHECKING:
    from vcluster.device.device import VirtualDevice

SHAPES = "shapes"
"""What agreeing on the shape of the whole is called."""


def reshard(
    device: VirtualDevice, x: Any, source: TensorSharding, target: TensorSharding, shape: Sequence[int] | None,
    axes: Axes,
) -> Any:
    """See `vcluster.device.VirtualDevice.reshard`."""
    recorder, array = device.recorder, np.asarray(x)
    site = call_site()
    if site.drops_result:
        device.collectives.dropped.setdefault(site.location, "reshard")
    start = recorder.enter()
    try:
        with recorder.as_one("reshard", site.location) as event:
            whole = _agreed(device, [array], [source])[0] if shape is None else shape
            plan = plan_resharding(source, target, whole, array.dtype, device.mesh, axes=axes)
            recorder.fill(event, axes=plan.axes, group=device.group(plan.axes))
            agreed = recorder.count
            result = run_plan(device, plan, array)
        told = (Traffic(*moved) for moved in recorder.moved_since(agreed))
        recorder.finish_collective(event, reduce(Traffic.plus, told, Traffic(0, 0, 0, ())), start)
    finally:
        recorder.leave()
    return result if isinstance(x, np.ndarray) or result.ndim else result[()]


def global_shapes(
    device: VirtualDevice, xs: Sequence[NDArray[Any]], shardings: Sequence[TensorSharding]
) -> list[tuple[int, ...]]:
    """See `vcluster.device.VirtualDevice.global_shapes`."""
    recorder, dropped = device.recorder, device.collectives.dropped
    before, known = recorder.count, set(dropped)
    try:
        return _agreed(device, xs, shardings)
    finally:
        for line in dropped.keys() - known:     # it may throw away what the shape is for, but not the shape
            del dropped[line]
        recorder.forget(SHAPES, before)         # there may be messages among these, of what is under way


def _agreed(
    device: VirtualDevice, xs: Sequence[NDArray[Any]], sources: Sequence[TensorSharding]
) -> list[tuple[int, ...]]:
    """The shapes of the tensors, from those of the shards in the groups over which any of them is split."""
    shapes = [x.shape for x in xs]
    axes = _split_axes(tuple(sources), tuple(map(len, shapes)), device.mesh)
    if not axes:
        return shapes
    told = np.array([n for shape in shapes for n in (len(shape), *shape)], np.int64)
    everybodys = device.collectives.run("all_gather", told, axes, name=SHAPES)
    return list(_whole(tuple(sources), everybodys.tobytes(), axes, device.mesh, device.rank))


@lru_cache(maxsize=1024)
def _split_axes(sources: tuple[TensorSharding, ...], ndims: tuple[int, ...], mesh: Mesh) -> tuple[str, ...]:
    """The axes over which tensors of so many dims are split, in the order of the mesh."""
    split: set[str] = set()
    for source, ndim in zip(sources, ndims, strict=True):
        source.check_axes(mesh)
        split.update(source.over(ndim).axes)
    return tuple(axis for axis in mesh.axes if axis in split)


@lru_cache(maxsize=1024)
def _whole(
    sources: tuple[TensorSharding, ...], told: bytes, axes: tuple[str, ...], mesh: Mesh, rank: int
) -> tuple[tuple[int, ...], ...]:
    """The shapes that follow from what each of the group says of its shards: numbers of dims, each before extents."""
    numbers = iter(np.frombuffer(told, np.int64).tolist())
    held = {member: [tuple(islice(numbers, next(numbers))) for _ in sources] for member in mesh.group(rank, axes)}
    found = []
    for i, source in enumerate(sources):
        split = source.over(len(held[rank][i])).axes
        shapes = {member: held[member][i] for member in mesh.group(rank, split)}
        found.append(source.global_shape(shapes, mesh) if split else held[rank][i])
    return tuple(found)
