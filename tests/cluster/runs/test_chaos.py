"""Random programs: right ones give no alarm, one planted mistake is always found, a kill at any moment is always told.

The numbers of programs are those that a developer's run can afford; `VCLUSTER_CHAOS=1000 pytest -m slow` runs so many
of each.
"""

import os
import random
import signal
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
from hypothesis import Phase, given, settings, strategies as st

from vcluster import (
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    Mesh,
    UndeliveredMessageError,
    VirtualCluster,
)

MANY = int(os.environ.get("VCLUSTER_CHAOS", "300"))
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


@pytest.fixture(scope="module")
def clusters():
    open_ones = {}

    def get(mesh, backend="process", transport="shared_memory"):
        key = mesh, backend, transport
        if key not in open_ones or open_ones[key].closed:
            open_ones[key] = VirtualCluster(mesh, backend=backend, transport=transport)
        return open_ones[key]

    yield get
    for cluster in open_ones.values():
        cluster.close()


def right_programs(clusters, count):
    """Programs that hypothesis makes."""

    @settings(max_examples=count, phases=[Phase.generate], database=None, derandomize=True)
    @given(st.randoms(use_true_random=False))
    def run(rng):
        mesh = rng.choice(MESHES)
        backend = rng.choice(("thread", *["process"] * 4))
        transport = rng.choice(("queue", *["shared_memory"] * 5))
        clusters(mesh, backend, transport).run(run_program, program(rng, mesh, rng.randint(1, 12)))

    run()


def planted_mistakes(clusters, seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        mesh = rng.choice(MESHES)
        steps = program(rng, mesh, rng.randint(1, 8))
        what = rng.choice(("dtype", "other", "leave", "receive", "skip"))
        steps.append(Step("all_reduce", mesh.axes, 3, False, None, 0))  # so that everybody has something to miss
        place = rng.randrange(len(steps)) if what == "leave" else len(steps) - 1
        rank = rng.randrange(mesh.size)
        expected = {"dtype": CollectiveMismatchError, "other": CollectiveMismatchError}.get(
            what, (DeadlockError, CollectiveMismatchError, UndeliveredMessageError)
        )
        with pytest.raises(expected) as caught:
            clusters(mesh).run(run_program, steps, (rank, place, what))
        error = caught.value
        named = f"rank {rank}" in str(error) or rank in error.ranks or f" {rank}" in str(error)
        assert named, (rank, what, str(error))
        if what in ("dtype", "other"):
            assert rank in error.ranks
            assert error.operation in ("all_reduce", "reduce")


def kills(clusters, seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        mesh = rng.choice(MESHES[:4])
        rank = rng.randrange(mesh.size)
        steps = program(rng, mesh, 40)
        cluster = clusters(mesh)
        with pytest.raises(DeviceFailedError) as caught:
            run_until_it_dies(cluster, steps, (rank, rng.uniform(1e-5, 6e-3)))
        assert caught.value.ranks == (rank,)
        assert caught.value.signal == "SIGALRM"
        assert not cluster.closed


def run_until_it_dies(cluster, steps, die_after):
    cluster.run(run_program, steps, None, die_after)
    for _ in range(100_000):  # it was too late to die in that run, and will in one of the next
        cluster.run(lambda device: device.barrier())


def leftovers():
    me = psutil.Process()
    return me.num_fds(), me.num_threads()


def test_right_programs_run(clusters):
    right_programs(clusters, 30)


def test_a_planted_mistake_is_found(clusters):
    planted_mistakes(clusters, 2, 20)


def test_a_kill_is_told(clusters):
    kills(clusters, 3, 15)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_right_programs_on_crowded_cores_give_no_alarm(clusters, hogs):
    right_programs(clusters, 2 * MANY)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_planted_mistakes_are_all_found(clusters):
    planted_mistakes(clusters, 12, MANY)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_kills_are_all_told_and_leave_nothing(clusters):
    kills(clusters, 13, 20)
    before = leftovers()
    kills(clusters, 14, MANY)
    assert leftovers() == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_descriptors_threads_and_memory_are_flat():
    with VirtualCluster(4) as cluster:
        def once():
            cluster.run(lambda device, x: device.all_reduce(x), np.ones(20_000))

        for _ in range(100):
            once()
        processes = [psutil.Process(), *map(psutil.Process, cluster.pids())]
        before = [(p.num_fds(), p.num_threads(), p.memory_full_info().uss) for p in processes]
        for _ in range(2000):
            once()
        after = [(p.num_fds(), p.num_threads(), p.memory_full_info().uss) for p in processes]
    for (fds, threads, used), (fds_after, threads_after, used_after) in zip(before, after, strict=True):
        assert (fds, threads) == (fds_after, threads_after)
        assert used_after < used + (4 << 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_and_fifty_six_devices_start_reduce_and_stop():
    with VirtualCluster(256) as cluster:
        assert cluster.run(lambda device: device.all_reduce(1)).outputs == [256] * 256
