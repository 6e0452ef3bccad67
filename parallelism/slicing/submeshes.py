"""Submeshes: the numbers of devices that a stage may have, the meshes of each, and where stages lie on the nodes.

As in Zheng et al., *Alpa*, 2022, a stage has 1, 2, 4, ... devices of a node, or 1, 2, 4, ... whole nodes.  Each of
these numbers divides the next one.  So stages that are laid out one after the other, those with most devices first, all
begin at a multiple of their own number of devices: none crosses the end of a node without filling whole nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from parallelism.hardware import Hardware
from parallelism.mesh import Mesh


def node_of(hardware: Hardware, devices: int) -> int:
    """The devices of a node: those that the innermost links join; at most ``devices``."""
    inside = hardware.inside(1) if len(hardware.links) > 1 else hardware.devices
    return min(inside, devices)


def submesh_sizes(node: int, devices: int) -> tuple[int, ...]:
    """The numbers of devices that a stage may have, on nodes of ``node`` devices.

    >>> submesh_sizes(8, 32), submesh_sizes(6, 18)
    ((1, 2, 4, 8, 16, 32), (1, 2, 6, 12))
    """
    found = [1]
    while found[-1] * 2 <= devices and (node % (found[-1] * 2) == 0 or devices <= node):
        found.append(found[-1] * 2)
    if devices > node:
        whole = node
        while whole <= devices:
            found.append(whole)
            whole *= 2
    return tuple(sorted(set(found)))


def meshes_of(size: int, axes: Sequence[str], node: int) -> tuple[Mesh, ...]:
    """The meshes of so many devices, of one or two axes; the devices of the last of two are in one node.

    >>> [str(dict(mesh.shape)) for mesh in meshes_of(4, ("dp", "tp"), 8)]
    ["{'dp': 4, 'tp': 1}", "{'dp': 2, 'tp': 2}", "{'dp': 1, 'tp': 4}"]
    """
    if len(axes) == 1:
        return (Mesh(**{axes[0]: size}),)
    outer, inner = axes
    return tuple(
        Mesh(**{outer: size // each, inner: each})
        for each in submesh_sizes(node, min(size, node))
        if size % each == 0
    )


def starts_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The first device of each stage, if stages of ``sizes`` devices are placed one after another, the largest first.

    >>> starts_of((2, 8, 4, 2))
    (12, 0, 8, 14)
    """
    order = sorted(range(len(sizes)), key=lambda stage: (-sizes[stage], stage))
    starts = accumulate((sizes[stage] for stage in order[:-1]), initial=0)
    start_of = dict(zip(order, starts, strict=True))
    return tuple(start_of[stage] for stage in range(len(sizes)))


def placed(hardware: Hardware, sizes: Sequence[int]) -> Hardware:
    """The hardware with the ranks of stage after stage where those from `starts_of` the stages on were.

    It stays as it is if nothing moves.
    """
    ranks = [
        *chain.from_iterable(
            range(start, start + size) for start, size in zip(starts_of(sizes), sizes, strict=True)
        )
    ]
    if ranks == [*range(len(ranks))]:
        return hardware
    return hardware.placed([hardware.place(rank) for rank in ranks])
