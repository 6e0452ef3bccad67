"""A resharding on a device: planned, run, and recorded as one event.

The collectives inside it are its children in the trace: they are in no total, the event of the resharding counts what
they move.  What is said to agree on the shape of the whole counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.mesh import Axes
from parallelism.relayout import run_plan
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from vcluster.calls import Traffic
from vcluster.places import call_site

if TYPE_CHECKING:
    from vcluster.device import VirtualDevice

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
            whole = _agreed(device, array, source) if shape is None else shape
            plan = plan_resharding(source, target, whole, array.dtype, device.mesh, axes=axes)
            recorder.fill(event, axes=plan.axes, group=device.group(plan.axes))
            agreed = recorder.count
            result = run_plan(device, plan, array)
        told = (Traffic(*moved) for moved in recorder.moved_since(agreed))
        recorder.finish_collective(event, reduce(Traffic.plus, told, Traffic(0, 0, 0, ())), start)
    finally:
        recorder.leave()
    return result if isinstance(x, np.ndarray) or result.ndim else result[()]


def global_shape(device: VirtualDevice, x: NDArray[Any], sharding: TensorSharding) -> tuple[int, ...]:
    """See `vcluster.device.VirtualDevice.global_shape`."""
    recorder, dropped = device.recorder, device.collectives.dropped
    before, known = recorder.count, set(dropped)
    shape = _agreed(device, x, sharding)
    for line in dropped.keys() - known:     # it may throw away what the shape is for, but not the shape
        del dropped[line]
    recorder.forget(SHAPES, before)         # there may be messages among these, of what is under way
    return shape


def _agreed(device: VirtualDevice, x: NDArray[Any], source: TensorSharding) -> tuple[int, ...]:
    """The shape of the tensor, from those of the shards in the groups over which it is split."""
    source.check_axes(device.mesh)
    axes = source.over(x.ndim).axes
    if not axes:
        return x.shape
    shapes = device.collectives.run("all_scatter", np.array(x.shape, np.int64), axes, name=SHAPES)
    return source.global_shape(dict(zip(device.group(axes), [s.tolist() for s in shapes], strict=True)), device.mesh)
