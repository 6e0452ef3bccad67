"""Which ranks of the job share a node, and so the memory of its devices and their places in a described hardware.

mpiexec -n 17 python -m vcluster.mpi train.py         # on two nodes of 8 devices
hardware = Hardware.preset("dgx-a100:2")
VirtualCluster(mesh, hardware=hardware.placed(places_of_devices(mesh.size, 8)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vcluster.code import ClusterError
from vcluster.mpi.job import Place, current

ByNode = dict[tuple[str, int], list[int]]
"""Of each node, by its name and a rank: some of its ranks, or devices."""


def ranks_by_node(places: Sequence[Place]) -> ByNode:
    """The ranks of a job by node, in the order of their first ranks.

    A node is its name and the first of the ranks that share its memory, since two containers may have one name.
    """
    nodes: ByNode = {}
    for rank, place in enumerate(places):
        nodes.setdefault((place.node, place.shares_with), []).append(rank)
    return nodes


class NodeMemory(NamedTuple):
    """The memory of a device, which the devices of its node share."""

    devices: tuple[int, ...]
    """The devices of the cluster that share it."""
    file: tuple[int, int] | None = None
    """A process, and its descriptor of the file; None for the first device, which makes it."""


def sharing(places: Sequence[Place], ranks: Sequence[int]) -> list[NodeMemory]:
    """The memories of the devices of a cluster that lie on these ranks."""
    together: ByNode = {}
    for device, rank in enumerate(ranks):
        place = places[rank]
        together.setdefault((place.node, place.shares_with) if place.maps else ("", -1 - rank), []).append(
            device
        )
    return [NodeMemory(tuple(devices)) for devices in together.values()]


def places_of_devices(devices: int, per_node: int) -> tuple[int, ...]:
    """The place of each device of the next cluster in a hardware whose nodes have ``per_node`` devices.

    Devices of one node get places beside each other. ``ClusterError`` outside of a job, if so many ranks are not free,
    and for a node on which more devices lie than it has.
    """
    job = current(devices)
    found: dict[int, int] = {}
    ranks = job.next_ranks(devices)
    by_node = (sorted(set(ranks).intersection(on_node)) for on_node in ranks_by_node(job.places).values())
    for node, on_node in enumerate(filter(None, by_node)):
        if len(on_node) > per_node:
            name = job.places[on_node[0]].node
            raise ClusterError(
                f"{len(on_node)} devices lie on {name}, and a node of the hardware has {per_node}; start "
                f"fewer ranks on a node"
            )
        found.update((rank, node * per_node + at) for at, rank in enumerate(on_node))
    return tuple(found[rank] for rank in ranks)


def node_lines(places: Sequence[Place]) -> list[tuple[str, str]]:
    """For each node, its name and its ranks: the host is rank 0, devices are the others."""
    lines = []
    for (name, _), ranks in ranks_by_node(places).items():
        devices = [str(rank - 1) for rank in ranks if rank]
        parts = ["the host"] * (0 in ranks) + [f"devices {' '.join(devices)}"] * bool(devices)
        lines.append((name, " and ".join(parts)))
    return lines
