"""Random programs: right ones give no alarm, one planted mistake is always found, a kill at any moment is always told.

The numbers of programs are those that a developer's run can afford; `VCLUSTER_CHAOS=1000 pytest -m slow` runs so many
of each.
"""

import os
import random

import numpy as np
import psutil
import pytest
from hypothesis import Phase, given, settings, strategies as st
from random_programs import MESHES, Step, program, run_program

from vcluster import (
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    UndeliveredMessageError,
    VirtualCluster,
)

MANY = int(os.environ.get("VCLUSTER_CHAOS", "300"))
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
    right_programs(clusters, 1)


def test_a_planted_mistake_is_found(clusters):
    planted_mistakes(clusters, 3, 2)


def test_a_kill_is_told(clusters):
    kills(clusters, 3, 2)


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
