"""Mistakes that end a run: 19 kinds, each over a group of any size from 3 on, of which one member is the odd one."""

from __future__ import annotations

import numpy as np

from parallelism.mesh import Mesh

SHAPES = {
    "all of three": (Mesh(d=3), None),
    "all of five": (Mesh(d=5), None),
    "rows": (Mesh(a=2, b=3), "b"),
    "columns": (Mesh(a=3, b=2), "a"),
}
"""By name: the mesh, and the axes of the group."""


def skips(device, axes, odd):
    """One member never calls."""
    if not odd:
        device.all_reduce(np.ones(4), axes)


def waits_elsewhere(device, axes, odd):
    """One member waits for a message of another, which is in a barrier."""
    if odd:
        return device.recv(neighbour(device, axes))
    return device.barrier(axes)


def receives_first(device, axes, odd):
    return device.recv(neighbour(device, axes))


def sends_into_full_channels(device, axes, odd):
    for _ in range(100):
        device.send(np.ones(2), neighbour(device, axes))


def wrong_tag(device, axes, odd):
    """The odd member receives with a tag that nobody sends with; who sends has returned."""
    group = device.group(axes)
    if odd:
        return device.recv(neighbour(device, axes), tag=4)
    if group[(group.index(device.rank) - 1) % len(group)] == odd_of(group):
        device.send(np.ones(3), odd_of(group), tag=3)
    return None


def works_in_a_circle(device, axes, odd):
    return device.irecv(neighbour(device, axes)).wait()


def work_that_nobody_joins(device, axes, odd):
    if odd:
        device.all_reduce(np.ones(3), axes, async_op=True)


def groups_in_different_orders(device, axes, odd):
    """Two groups with the same members in another order."""
    group = list(device.group(axes))
    rest = [[rank] for rank in range(device.size) if rank not in group]
    orders = [[group, *rest], [group[::-1], *rest]]
    for groups in reversed(orders) if odd else orders:
        device.all_reduce(np.ones(2), groups=groups)


def circle_beside_a_computing_rank(device, axes, odd):
    """Two members wait for each other; the odd one computes for ever."""
    group = device.group(axes)
    if odd:
        while True:
            pass
    others = [rank for rank in group if rank != odd_of(group)][:2]
    if device.rank in others:
        device.recv(others[1 - others.index(device.rank)])


def neighbour(device, axes):
    group = device.group(axes)
    return group[(group.index(device.rank) + 1) % len(group)]


def odd_of(group):
    return group[-1]


def different(usual, other):
    """A mistake: the odd member calls something else."""
    def planted(device, axes, odd):
        return other(device, axes) if odd else usual(device, axes)

    return planted


MISMATCHES = {
    "shape": different(lambda d, a: d.all_reduce(np.ones(4), a),
                       lambda d, a: d.all_reduce(np.ones(3), a)),
    "dtype": different(lambda d, a: d.all_reduce(np.ones(4, "f4"), a),
                       lambda d, a: d.all_reduce(np.ones(4, "i4"), a)),
    "op": different(lambda d, a: d.all_reduce(np.ones(4), a),
                    lambda d, a: d.all_reduce(np.ones(4), a, op="max")),
    "kind": different(lambda d, a: d.all_reduce(np.ones(4), a),
                      lambda d, a: d.broadcast(np.ones(4), a)),
    "barrier": different(lambda d, a: d.all_reduce(np.ones(4), a),
                         lambda d, a: d.barrier(a)),
    "root": different(lambda d, a: d.reduce(np.ones(4), a),
                      lambda d, a: d.reduce(np.ones(4), a, root=1)),
    "dim": different(lambda d, a: d.all_gather(np.ones((4, 4)), a),
                     lambda d, a: d.all_gather(np.ones((4, 4)), a, dim=1)),
    "ndim": different(lambda d, a: d.all_gather(np.ones(4), a),
                      lambda d, a: d.all_gather(np.ones((4, 4)), a)),
    "algorithm": different(lambda d, a: d.all_reduce(np.ones(4), a),
                           lambda d, a: d.all_reduce(np.ones(4), a, algorithm="ring")),
    "pairs": different(lambda d, a: d.permute(np.ones(4), [(1, 0)], a),
                       lambda d, a: d.permute(np.ones(4), [(0, 1)], a)),
}
DEADLOCKS = {function.__name__: function for function in (
    skips, waits_elsewhere, receives_first, sends_into_full_channels, wrong_tag, works_in_a_circle, work_that_nobody_joins,
    groups_in_different_orders, circle_beside_a_computing_rank)}
KINDS = MISMATCHES | DEADLOCKS


def planted(device, kind, axes):
    """A right beginning, and then the mistake of this kind in every group."""
    group = device.group(axes)
    for _ in range(3):
        device.all_reduce(np.ones(4), axes)
    device.sendrecv(np.ones(2), neighbour(device, axes), group[group.index(device.rank) - 1])
    KINDS[kind](device, axes, device.rank == odd_of(group))
