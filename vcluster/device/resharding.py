"""A resharding on a device: planned, run, and recorded as one event.

The collectives inside it are its children in the trace: they are in no total, because the event of the resharding
counts what they move.  The exchange that agrees on the global shape counts nothing.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import islice
from typing import Any

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.collectives import Traffic
from parallelism.mesh import Axes, Mesh
from parallelism.resharding import plan_resharding, run_plan
from parallelism.sharding import TensorSharding
from vcluster.code import call_site
from vcluster.device.device import VirtualDevice

SHAPES = "shapes"
"""The name of the exchange that agrees on global shapes."""


def reshard(
    device: VirtualDevice,
    x: Any,
    source: TensorSharding | str,
    target: TensorSharding | str,
    shape: Sequence[int] | None,
    axes: Axes,
) -> Any:
    """See `vcluster.device.VirtualDevice.reshard`."""
    recorder, array = device.recorder, plain_array("reshard", x)
    source = TensorSharding.of(source, device.mesh, "the source of a resharding")
    site = call_site()
    if site.drops_result:
        device.collectives.dropped.setdefault(site.location, "reshard")
    with recorder as start:
        with recorder.as_one("reshard", site.location) as event:
            whole = _agreed(device, [array], [source])[0] if shape is None else shape
            plan = plan_resharding(source, target, whole, array.dtype, device.mesh, axes=axes)
            recorder.fill(event, axes=plan.axes, group=device.group(plan.axes))
            agreed = recorder.count
            result = run_plan(device, plan, array)
        moved = reduce(
            Traffic.plus, (Traffic(*each) for each in recorder.moved_since(agreed)), Traffic(0, 0, 0, ())
        )
        recorder.finish_collective(event, lambda: moved, start)
    return result if isinstance(x, np.ndarray) or result.ndim else result[()]


def global_shapes(
    device: VirtualDevice, xs: Sequence[Array], shardings: Sequence[TensorSharding | str]
) -> list[tuple[int, ...]]:
    """See `vcluster.device.VirtualDevice.global_shapes`."""
    sources = [TensorSharding.of(each, device.mesh) for each in shardings]
    recorder, dropped = device.recorder, device.collectives.dropped
    before, known = recorder.count, set(dropped)
    try:
        return _agreed(device, xs, sources)
    finally:
        for line in dropped.keys() - known:  # the line may drop a result, but it uses the shape
            del dropped[line]
        recorder.forget(SHAPES, before)  # messages of pending work may lie between and are kept


def _agreed(
    device: VirtualDevice, xs: Sequence[Array], sources: Sequence[TensorSharding]
) -> list[tuple[int, ...]]:
    """The shapes of the tensors, from those of the shards in the groups over which any of them is split."""
    shapes = [x.shape for x in xs]
    axes = _split_axes(tuple(sources), tuple(map(len, shapes)), device.mesh)
    if not axes:
        return shapes
    numbers = np.array([n for shape in shapes for n in (len(shape), *shape)], np.int64)
    gathered = device.collectives.run("all_gather", numbers, axes, name=SHAPES)
    return list(_whole(tuple(sources), gathered.tobytes(), axes, device.mesh, device.rank))


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
    sources: tuple[TensorSharding, ...], gathered: bytes, axes: tuple[str, ...], mesh: Mesh, rank: int
) -> tuple[tuple[int, ...], ...]:
    """The global shapes, from the shapes of each member's shards: for each, the number of dims, then the extents."""
    numbers = iter(np.frombuffer(gathered, np.int64).tolist())
    shards: dict[int, list[tuple[int, ...]]] = {}
    for member in mesh.group(rank, axes):
        shards[member] = [tuple(islice(numbers, next(numbers))) for _ in sources]
    wholes = []
    for i, source in enumerate(sources):
        split = source.over(len(shards[rank][i])).axes
        shapes = {member: shards[member][i] for member in mesh.group(rank, split)}
        wholes.append(source.global_shape(shapes, mesh) if split else shards[rank][i])
    return tuple(wholes)
