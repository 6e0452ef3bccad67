"""Runs a resharding plan on a `Device`: each step is one collective, or local.

Where a collective of one dim will not do (blocks of several dims that come together, parts of different sizes), the
parts are laid one after the other in a flat array and travel so; each rank knows everybody's blocks, so it knows what
comes from whom.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import Array, Ints, plain_array
from parallelism.collectives import MemberCall
from parallelism.dtypes import is_floating
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding.blocks import Blocks
from parallelism.resharding.plan import ReshardingPlan, ReshardingStep
from parallelism.sharding import DimSharding, TensorSharding, device_op
from parallelism.sharding.partial import combine, identity

Block = tuple[slice, ...]


def run_step(device: Device, step: ReshardingStep, x: Array) -> Array:
    """This device's part after one step of a plan, from its part ``x`` before it; those that it joins run it, too.

    **Communication**: ``step.bytes_received[device.rank]`` bytes are received.
    """
    return _MOVES[step.kind](device, step, x)


def calls_of_groups(step: ReshardingStep, groups: Ints, dtype: np.dtype[Any]) -> list[tuple[MemberCall, ...]]:
    """For each group along ``step.axes``, the collectives that `run_step` calls on its members, with flat arrays.

    The step moves blocks of several dims, or permutes them.  ``groups[i]`` are the ranks of group i.  Groups with the
    same calls share one tuple.
    """
    starts, stops = (each[:, groups] for each in _intervals(step.before, step))
    held = (stops - starts).prod(axis=0)
    if step.kind == "all_gather":
        moved = held
    elif step.kind == "permute":
        position = np.zeros(step.mesh.size, np.int64)
        position[groups] = np.arange(groups.shape[1])
        moved = position[np.array(step.donors)[groups]]
    else:
        wanted_starts, wanted_stops = (each[:, groups] for each in _intervals(step.after, step))
        moved = (
            (wanted_stops - wanted_starts).prod(axis=0)
            if step.kind == "reduce_scatter"
            else (
                np.minimum(stops[..., None], wanted_stops[..., None, :])
                - np.maximum(starts[..., None], wanted_starts[..., None, :])
            )
            .clip(0)
            .prod(axis=0)
        )
    return [
        _calls(step.kind, dtype, own.tobytes(), how.tobytes()) for own, how in zip(held, moved, strict=True)
    ]


@lru_cache(maxsize=1024)
def _calls(kind: str, dtype: np.dtype[Any], own: bytes, how: bytes) -> tuple[MemberCall, ...]:
    """The calls of a group whose members hold so many elements; the arrays are those of `calls_of_groups`."""
    held, moved = (np.frombuffer(array, np.int64).tolist() for array in (own, how))
    if kind == "exchange":
        count = len(held)
        return tuple(
            MemberCall("all_to_all", dtype, (size,), sizes=tuple(moved[count * i : count * (i + 1)]))
            for i, size in enumerate(held)
        )
    pairs = tuple((donor, i) for i, donor in enumerate(moved) if donor != i) if kind == "permute" else None
    sizes = tuple(moved) if kind == "reduce_scatter" else ()
    if len(set(sizes)) > 1:
        kind = "all_to_all"
    calls = {size: MemberCall(kind, dtype, (size,), pairs=pairs, sizes=sizes) for size in set(held)}
    return tuple(calls[size] for size in held)


def run_plan(device: Device, plan: ReshardingPlan, x: Any, *, spent: bool = False) -> Array:
    """This device's shard of the target, from its shard ``x`` of the source: a new array.

    Every device that a step of the plan joins to this one must run it, too.  ``spent``: nobody needs ``x`` afterwards,
    so that what it becomes may lie in its place; its dims lie in memory in the same order on every device then.

    **Communication**: ``plan.bytes_received[device.rank]`` bytes are received.  ``ValueError``, before anything is
    sent, if the device is on another mesh or ``x`` is not the shard that the plan starts from.
    """
    array = plain_array("a plan", x)
    if device.mesh != plan.mesh:
        raise ValueError(f"a plan for {plan.mesh!r} does not run on a device of {device.mesh!r}")
    expected = plan.held[device.rank]
    if array.shape != expected or array.dtype != plan.dtype:
        raise ValueError(
            f"rank {device.rank} must pass its shard {plan.dtype}{list(expected)} of {plan.dtype}{list(plan.shape)} as "
            f"{plan.source!r}, got {array.dtype}{list(array.shape)}"
        )
    result = array
    for step in plan.steps:
        if spent and step.kind == "all_reduce" and is_floating(result.dtype):
            dims = result if result.flags.carray else result.transpose(np.argsort(result.strides)[::-1])
            if dims.flags.carray:
                device.all_reduce(dims, step.axes, op=device_op(step.before.op, result.dtype), out=dims)
                continue
        result = run_step(device, step, result)
    return result.copy() if not spent and np.may_share_memory(result, array) else result


def _slice(device: Device, step: ReshardingStep, x: Array) -> Array:
    block = _block(step.after, step, device.rank)
    forgets = [axis for axis in step.after.partial if axis in step.axes]
    if any(device.index[axis] for axis in forgets):
        return np.full(_shape(block), identity(step.after.op, x.dtype), x.dtype)
    if 0 in _shape(block):
        return np.empty(_shape(block), x.dtype)
    return x[_inside(block, _block(step.before, step, device.rank))]


def _all_gather(device: Device, step: ReshardingStep, x: Array) -> Array:
    shrunk = step.shrunk
    if len(shrunk) == 1:
        return np.asarray(device.all_gather(x, step.axes, dim=shrunk[0]))
    parts = _blocks(step.before, step, device.group(step.axes))
    return _unpacked(
        device.all_gather(x.reshape(-1), step.axes), parts, _block(step.after, step, device.rank)
    )


def _permute(device: Device, step: ReshardingStep, x: Array) -> Array:
    received = device.permute(x, _pairs(step, device.group(step.axes)), step.axes)
    if step.donors[device.rank] != device.rank:
        return np.asarray(received)
    shape = _shape(_block(step.after, step, device.rank))
    return x if x.shape == shape else np.empty(shape, x.dtype)  # empty, where it is another


def _reduce_scatter(device: Device, step: ReshardingStep, x: Array) -> Array:
    op, grown = device_op(step.before.op, x.dtype), step.grown
    if len(grown) == 1:
        return np.asarray(device.reduce_scatter(x, step.axes, dim=grown[0], op=op))
    mine = _shape(_block(step.after, step, device.rank))
    parts = _blocks(step.after, step, device.group(step.axes))
    sizes = list(map(_size, parts))
    packed = _packed(x, parts, _block(step.before, step, device.rank))
    if len(set(sizes)) == 1:
        rows = packed.reshape(len(sizes), sizes[0])
        summed = device.reduce_scatter(rows, step.axes, dim=0, op=op)
        return np.asarray(summed).reshape(mine)
    # No reduce_scatter has parts of different sizes: each rank gets the terms of its part, and sums them.
    received = device.all_to_all(packed, step.axes, split_sizes=sizes)
    terms = received.reshape(len(sizes), prod(mine))
    return combine(step.before.op, list(terms)).reshape(mine)


def _exchange(device: Device, step: ReshardingStep, x: Array) -> Array:
    group = device.group(step.axes)
    mine = _block(step.before, step, device.rank)
    wanted = _block(step.after, step, device.rank)
    given = [_common(mine, block) for block in _blocks(step.after, step, group)]
    taken = [_common(wanted, block) for block in _blocks(step.before, step, group)]
    sizes = list(map(_size, given))
    received = device.all_to_all(_packed(x, given, mine), step.axes, split_sizes=sizes)
    return _unpacked(received, taken, wanted)


_MOVES: dict[str, Callable[[Device, ReshardingStep, Array], Array]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "permute": _permute,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "all_to_all": lambda device, step, x: np.asarray(
        device.all_to_all(x, step.axes, split_dim=step.grown[0], concat_dim=step.shrunk[0])
    ),
    "all_reduce": lambda device, step, x: np.asarray(
        device.all_reduce(x, step.axes, op=device_op(step.before.op, x.dtype))
    ),
}


def _pairs(step: ReshardingStep, group: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The positions between which a permutation moves blocks in a group: (source, target)."""
    position = {rank: i for i, rank in enumerate(group)}
    return tuple(
        (position[step.donors[rank]], i) for i, rank in enumerate(group) if step.donors[rank] != rank
    )


# -- blocks and their parts --------------------------------------------------------------------------------------------


def _blocks(layout: TensorSharding, step: ReshardingStep, ranks: Sequence[int]) -> list[Block]:
    return [_block(layout, step, rank) for rank in ranks]


def _block(layout: TensorSharding, step: ReshardingStep, rank: int) -> Block:
    return layout.slices(step.shape, step.mesh, rank)


def _intervals(layout: TensorSharding, step: ReshardingStep) -> Ints:
    """Where the blocks of all ranks start and stop: an array of shape (2, dims, ranks)."""
    return _intervals_of(step.shape, layout.over(len(step.shape)).dims, step.mesh)


@lru_cache(maxsize=1024)
def _intervals_of(shape: tuple[int, ...], dims: tuple[DimSharding, ...], mesh: Mesh) -> Ints:
    numbers = {axis: number for number, axis in enumerate(mesh.axes)}
    blocks = Blocks(shape, [(extent,) for extent in mesh.shape.values()])
    intervals = []
    for extent, dim in zip(shape, dims, strict=True):
        intervals.append(blocks.interval(extent, tuple(numbers[axis] for axis in dim.axes)))
    return np.array(intervals, np.int64).reshape(len(shape), 2, mesh.size).swapaxes(0, 1)


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(piece.stop - piece.start for piece in block)


def _size(block: Block) -> int:
    return prod(_shape(block))


def _common(a: Block, b: Block) -> Block:
    """What lies in both; an empty part of ``a`` if nothing does."""
    both = [slice(max(m.start, n.start), min(m.stop, n.stop)) for m, n in zip(a, b, strict=True)]
    return tuple(slice(piece.start, max(piece.start, piece.stop)) for piece in both)


def _inside(part: Block, whole: Block) -> Block:
    """Where a part lies in the array of a whole block."""
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))


def _packed(x: Array, parts: Sequence[Block], whole: Block) -> Array:
    """The parts of a block one after the other."""
    return np.concatenate([x[_inside(part, whole)].reshape(-1) for part in parts])


def _unpacked(flat: Any, parts: Sequence[Block], whole: Block) -> Array:
    """A block from its parts."""
    result = np.empty(_shape(whole), flat.dtype)
    for part, place in zip(parts, accumulate(map(_size, parts), initial=0), strict=False):
        result[_inside(part, whole)] = flat[place : place + _size(part)].reshape(_shape(part))
    return result
