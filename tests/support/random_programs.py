"""Random programs on devices: every rank does the same steps and checks each result against NumPy on all arrays.

With a mistake, one rank does another thing at one step.
"""

from __future__ import annotations

import inspect
import signal
from dataclasses import dataclass

import numpy as np

from parallelism.mesh import Mesh

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=2, b=2, c=2)]
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_scatter", "shift", "barrier",
    "reduce", "gather", "scatter", "permute",
)
OTHERS = ("ring", "pairs", "exchange", "objects", "groups", "compute")


@dataclass(frozen=True)
class Step:
    """One operation of everybody."""

    kind: str
    axes: tuple[str, ...]
    extent: int
    asynchronous: bool
    algorithm: str | None
    tag: int


def program(rng, mesh, length):
    steps = []
    for _ in range(length):
        kind = rng.choice(COLLECTIVES + OTHERS)
        axes = tuple(rng.sample(mesh.axes, rng.randint(1, len(mesh.axes))))
        extent = rng.choice((0, 1, 3, 7, 40, 3000))
        algorithm = rng.choice((None, None, None, "ring")) if kind in ("all_reduce", "all_gather") else None
        steps.append(Step(kind, axes, extent, rng.random() < 0.3 and kind in COLLECTIVES, algorithm, rng.randint(0, 3)))
    return steps


def run_step(device, step, number, x, axes):
    """Do one step; what it gives, and what it should give."""
    group = device.group(axes)
    everybody = [x + (rank - device.rank) for rank in group]
    options = {"async_op": step.asynchronous, "algorithm": step.algorithm}
    here = group.index(device.rank)
    if step.kind == "all_reduce":
        return device.all_reduce(x, axes, **options), sum(everybody)
    if step.kind == "all_gather":
        return device.all_gather(x, axes, **options), np.concatenate(everybody)
    if step.kind == "all_scatter":
        return device.all_scatter(x, axes, **options), everybody
    if step.kind == "barrier":
        return device.barrier(axes, **options), None
    if step.kind == "shift":
        return device.shift(x, axes, **options), everybody[here - 1]
    if step.kind == "broadcast":
        root = number % len(group)
        return device.broadcast(x if here == root else None, axes, root=root, **options), everybody[root]
    if step.kind == "reduce_scatter":
        sizes = split(step.extent, device.mesh, axes)
        return device.reduce_scatter(x, axes, **options), np.split(sum(everybody), np.cumsum(sizes)[:-1])[here]
    if step.kind == "all_to_all":
        cut = np.cumsum(split(step.extent, device.mesh, axes))[:-1]
        return device.all_to_all(x, axes, **options), np.concatenate([np.split(e, cut)[here] for e in everybody])
    if step.kind in ("reduce", "gather", "scatter"):
        return rooted(device, step, x, axes, number % len(group), everybody, options)
    if step.kind == "permute":
        pairs = [(i, len(group) - 1 - i) for i in range(len(group))]
        return device.permute(x, pairs, axes, **options), everybody[len(group) - 1 - here]
    if step.kind == "objects":
        return device.all_gather_object(("of rank", x), axes), [("of rank", y) for y in everybody]
    if step.kind == "groups":
        pairs = [list(range(first, min(first + 2, device.size))) for first in range(0, device.size, 2)]
        mine = pairs[device.rank // 2]
        return device.all_reduce(x, groups=pairs), sum(x + (rank - device.rank) for rank in mine)
    after, before = group[(here + 1) % len(group)], group[here - 1]
    if step.kind == "exchange":
        work = device.irecv(before, tag=step.tag, shape=x.shape, dtype=x.dtype)
        device.isend(x, after, tag=step.tag)
        return work.wait(), everybody[here - 1]
    if step.kind == "ring":
        return device.sendrecv(x, after, before, tag=step.tag), everybody[here - 1]
    if step.kind == "pairs":  # each sends to all others, then receives from all
        for rank in group:
            device.isend(x, rank, tag=step.tag)
        return [device.recv(rank, tag=step.tag) for rank in group], everybody
    return int(np.arange(200 * (device.rank + 1)).sum()), None


def rooted(device, step, x, axes, root, everybody, options):
    """What only the root gives, or gets."""
    here = device.position(axes)
    if step.kind == "scatter":
        cut = np.cumsum(split(step.extent, device.mesh, axes))[:-1]
        result = device.scatter(x if here == root else None, axes, root=root, **options)
        return result, np.split(everybody[root], cut)[here]
    whole = sum(everybody) if step.kind == "reduce" else np.concatenate(everybody)
    return getattr(device, step.kind)(x, axes, root=root, **options), whole if here == root else None


def split(extent, mesh, axes):
    pieces = [extent]
    for axis in axes:
        factor = mesh.shape[axis]
        pieces = [n // factor + (i < n % factor) for n in pieces for i in range(factor)]
    return pieces


def run_program(device, steps, mistake=None, die_after=None):
    """All steps; with a ``mistake`` (rank, number of the step, what), that rank does another thing there."""
    if die_after is not None and die_after[0] == device.rank:
        signal.setitimer(signal.ITIMER_REAL, die_after[1])  # nobody handles it: the process ends there
    pending = []
    for number, step in enumerate(steps):
        x = np.arange(step.extent, dtype=np.int64) + device.rank
        axes = step.axes
        if mistake is not None and mistake[:2] == (device.rank, number):
            what = mistake[2]
            if what == "skip":
                continue
            if what == "leave":
                break
            if what == "dtype":
                x = x.astype(np.int32)
            if what == "other":
                device.reduce(x, axes)
                continue
            if what == "receive":
                device.recv((device.rank + 1) % device.size, tag=99)
            if what == "raise":
                raise ValueError(mistake)
        result, expected = run_step(device, step, number, x, axes)
        if step.asynchronous:
            pending.append((result, expected))
        else:
            check(result, expected)
        if len(pending) > 2:
            work, wanted = pending.pop(0)
            check(work.wait(), wanted)
    for work, wanted in pending:
        check(work.wait(), wanted)


def check(result, expected):
    if isinstance(expected, list):
        for a, b in zip(result, expected, strict=True):
            check(a, b)
    elif isinstance(expected, tuple):
        assert result[0] == expected[0]
        np.testing.assert_array_equal(result[1], expected[1])
    elif expected is not None:
        np.testing.assert_array_equal(result, expected)


def line_of(text):
    """The place, as errors name it, of the line of `run_program` or `run_step` that has this text."""
    for function in (run_program, run_step):
        lines, first = inspect.getsourcelines(function)
        for number, line in enumerate(lines, first):
            if text in line:
                return f"{inspect.getsourcefile(function)}:{number}"
    raise ValueError(text)
