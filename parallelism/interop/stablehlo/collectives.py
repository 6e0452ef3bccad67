"""What collectives mean, with the groups of StableHLO: replicas, partitions, both, or flattened ids.

A collective whose groups lie along axes of the mesh becomes the collective of the IR along these axes.  Any other keeps
its groups of ranks (the operator ``group_collective``).
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from parallelism.interop.folding import Plain, convert, recorded, recorded_op, traced, whole
from parallelism.interop.moving_elements import concatenated, part, reshaped
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.reductions import reducer, tree
from parallelism.interop.stablehlo.shardings import RankGroups, axes_of_groups
from parallelism.ir.core import symbol
from parallelism.mesh import Mesh
from parallelism.mesh.stablehlo_groups import replica_groups

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
)
COLLECTIVES = (*(f"stablehlo.{kind}" for kind in KINDS), "mhlo.all_to_all")
RANK = "rank"
"""The symbol that stands for the rank of a device in the program of all."""


def groups_of(node: Node, replicas: int, partitions: int) -> RankGroups:
    """The groups of ranks of a collective, in the order of its text.  No groups: one of all."""
    given = node.attributes.get("replica_groups")
    rows: list[list[int]] = []
    for row in given.tolist() if isinstance(given, np.ndarray) else ():
        rows.append([int(rank) for rank in row if rank >= 0])  # -1 fills up a shorter group
    channel = _channel(node)
    if node.attributes.get("use_global_device_ids"):
        strategy = "flattened_ids"
    elif node.kind.endswith((".all_to_all", ".collective_permute", ".collective_broadcast")):
        strategy = "cross_partition" if channel > 0 else "cross_replica"
    else:
        strategy = "cross_replica_and_partition" if channel > 0 else "cross_replica"
    if not any(rows):
        count = {"flattened_ids": replicas * partitions, "cross_partition": partitions}.get(
            strategy, replicas
        )
        rows = [list(range(count))]
    try:
        return replica_groups(strategy, [row for row in rows if row], replicas, partitions)
    except (ValueError, TypeError) as error:
        raise node.wrong(str(error)) from None


def pairs_of(node: Node, replicas: int, partitions: int) -> list[tuple[int, int]]:
    """The pairs of ranks of a permute."""
    pairs = [(int(a), int(b)) for a, b in np.asarray(node.attributes["source_target_pairs"]).reshape(-1, 2)]
    ids = partitions if _channel(node) > 0 else replicas
    for pair in pairs:
        if not 0 <= min(pair) <= max(pair) < ids:
            raise node.wrong(f"ids must be from 0 to {ids - 1}, got {pair}")
    if _channel(node) > 0:
        return [(r * partitions + a, r * partitions + b) for r in range(replicas) for a, b in pairs]
    return [(a * partitions + p, b * partitions + p) for a, b in pairs for p in range(partitions)]


def _channel(node: Node) -> int:
    text = str(node.attributes.get("channel_handle", ""))
    return int(text.split("handle = ")[1].split(",")[0].rstrip("> ")) if "handle = " in text else 0


def _groups(reader: Reader, node: Node) -> tuple[RankGroups, tuple[str, ...] | None, int]:
    """The groups, the axes along which they lie or None, and the size of a group."""
    mesh, replicas, partitions = reader.devices(node)
    groups = groups_of(node, replicas, partitions)
    sizes = {len(group) for group in groups}
    if len(sizes) != 1:
        raise node.unsupported(f"groups of different sizes are not supported, got {list(map(list, groups))}")
    return groups, axes_of_groups(groups, mesh), sizes.pop()


def _collective(reader: Reader, node: Node, kind: str, x: Plain, shape: Any, **attributes: Any) -> Any:
    """A collective along axes if its groups lie so, else over groups of ranks."""
    groups, axes, size = _groups(reader, node)
    if size == 1 and kind != "broadcast":
        return x
    array = recorded(x)
    if axes is not None and kind != "broadcast":
        return recorded_op(kind, array, axes=axes, group=size, **attributes)
    missing = sorted(set(range(reader.devices(node)[0].size)) - {rank for group in groups for rank in group})
    if missing and kind != "broadcast":
        raise node.unsupported(f"rank {missing[0]} is in no group, but runs the collective")
    return recorded_op(
        "group_collective",
        array,
        collective=kind,
        groups=groups,
        group=size,
        shape=tuple(shape),
        dim=attributes.get("dim", attributes.get("split_dim", 0)),
        concat_dim=attributes.get("concat_dim", 0),
        op=attributes.get("op", "sum"),
    )


@meaning("stablehlo.all_reduce")
def _all_reduce(reader: Reader, node: Node, operands: list[Any]) -> Any:
    results = []
    for x in operands:
        op = reducer(node.body, x.dtype)
        if op is not None:
            results.append(_collective(reader, node, "all_reduce", whole(x), x.shape, op=op))
        else:
            results.append(_reduced_here(reader, node, x))
    return results


def _reduced_here(reader: Reader, node: Node, x: Any) -> Any:
    """A reducer that no device has: the terms are gathered, and each device reduces them."""
    size = _groups(reader, node)[2]
    wide = reshaped(whole(x), (1, *x.shape))
    terms = _collective(reader, node, "all_gather", wide, (size, *x.shape), dim=0, extent=size)
    return reshaped(tree(reader, node.body, [terms])[0], x.shape)


@meaning("stablehlo.all_gather")
def _all_gather(reader: Reader, node: Node, operands: list[Any]) -> Any:
    dim = node.attributes["all_gather_dim"]
    return [
        _collective(
            reader, node, "all_gather", whole(x), node.type(i).shape, dim=dim, extent=node.type(i).shape[dim]
        )
        for i, x in enumerate(operands)
    ]


@meaning("stablehlo.reduce_scatter")
def _reduce_scatter(reader: Reader, node: Node, operands: list[Any]) -> Any:
    dim = node.attributes["scatter_dimension"]
    x = operands[0]
    type = node.type()
    op = reducer(node.body, x.dtype)
    if op is None:
        raise node.unsupported("a reduce_scatter needs add, multiply, maximum or minimum, or and/or of bools")
    return _collective(
        reader, node, "reduce_scatter", whole(x), type.shape, dim=dim, extent=type.shape[dim], op=op
    )


@meaning("stablehlo.all_to_all", "mhlo.all_to_all")
def _all_to_all(reader: Reader, node: Node, operands: list[Any]) -> Any:
    """The blocks of a dim, joined along another one; along the same one where it is cut into two dims first.

    In XLA's own form each block is an operand, and each block that comes a result.
    """
    if node.attributes.get("split_dimension") is None:
        blocks = concatenated([reshaped(whole(x), (1, *x.shape)) for x in operands], 0)
        moved = _exchanged(reader, node, blocks, 0, len(operands))
        return [reshaped(part(moved, 0, i, i + 1), x.shape) for i, x in enumerate(operands)]
    split, join = node.attributes["split_dimension"], node.attributes["concat_dimension"]
    count, results = node.attributes["split_count"], []
    for x in operands:
        shape = tuple(x.shape)
        if split != join:
            after = [*shape]
            after[split] //= count
            after[join] *= count
            results.append(
                _collective(
                    reader,
                    node,
                    "all_to_all",
                    whole(x),
                    after,
                    split_dim=split,
                    split_extent=shape[split] // count,
                    concat_dim=join,
                    concat_extent=shape[join] * count,
                )
            )
            continue
        results.append(_exchanged(reader, node, x, split, count))
    return results


def _exchanged(reader: Reader, node: Node, x: Any, dim: int, count: int) -> Any:
    """The blocks of a dim, each in the place of the one that was sent for it."""
    shape = tuple(x.shape)
    n = shape[dim]
    blocks = reshaped(whole(x), (*shape[:dim], count, n // count, *shape[dim + 1 :]))
    moved = _collective(
        reader,
        node,
        "all_to_all",
        whole(blocks),
        [*shape[:dim], 1, n, *shape[dim + 1 :]],
        split_dim=dim,
        split_extent=1,
        concat_dim=dim + 1,
        concat_extent=n,
    )
    return reshaped(moved, shape)


@meaning("stablehlo.collective_permute")
def _permute(reader: Reader, node: Node, x: list[Any]) -> Any:
    mesh, replicas, partitions = reader.devices(node)
    pairs = pairs_of(node, replicas, partitions)
    axes, positions = _along(pairs, mesh)
    size = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    return recorded_op("permute", traced(x[0]), axes=axes, group=size, pairs=positions)


def _along(pairs: list[tuple[int, int]], mesh: Mesh) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The fewest axes along which pairs of ranks lie, the same in each group, and the pairs of positions there."""
    for number in range(1, len(mesh.axes) + 1):
        for axes in combinations(mesh.axes, number):
            groups = mesh.groups(axes)
            place = {rank: (g, i) for g, group in enumerate(groups) for i, rank in enumerate(group)}
            if any(place[a][0] != place[b][0] for a, b in pairs):
                continue
            by_group: dict[int, list[tuple[int, int]]] = {g: [] for g in range(len(groups))}
            for a, b in pairs:
                by_group[place[a][0]].append((place[a][1], place[b][1]))
            first = sorted(by_group[0])
            if all(sorted(each) == first for each in by_group.values()):
                return axes, tuple(first)
    return mesh.axes, tuple(pairs)


@meaning("stablehlo.collective_broadcast")
def _broadcast(reader: Reader, node: Node, x: list[Any]) -> Any:
    return _collective(reader, node, "broadcast", whole(x[0]), x[0].shape)


@meaning("stablehlo.partition_id", "stablehlo.replica_id")
def _process_id(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The rank of the device, of which the id is a part."""
    _, replicas, partitions = reader.devices(node)
    place = recorded_op("iota", dim=0, shape=(1,), starts=(symbol(RANK),), dtype=np.dtype(np.int64))
    rank = reshaped(place, ())
    if node.kind.endswith("replica_id"):
        number = recorded_op("floor_divide", rank, recorded(np.asarray(partitions)))
    else:
        number = rank if replicas == 1 else recorded_op("remainder", rank, recorded(np.asarray(partitions)))
    return convert(number, node.type().dtype)
