"""Small collectives of three or more, repeated: whoever comes last makes the result for all."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.mesh import Mesh
from vcluster.code import CollectiveMismatchError
from vcluster.collectives import last_arriver
from vcluster.collectives.last_arriver import LastArriver
from vcluster.collectives.thresholds import FEWEST_MEMBERS

TIMES = 5


def one_of_each(device, number):
    """The results of every kind, of arrays that differ by rank and number."""
    n = device.size
    x = np.arange(2 * n * 3, dtype=np.int64).reshape(2 * n, 3) + 100 * device.rank + 1000 * number
    return {
        "all_reduce": device.all_reduce(x), "mean": device.all_reduce(x, op="mean"),
        "all_gather": device.all_gather(x), "last dim": device.all_gather(x[:, : 1 + device.rank % 2], dim=1),
        "reduce_scatter": device.reduce_scatter(x), "columns": device.reduce_scatter(x, dim=1),
        "all_to_all": device.all_to_all(x),
        "broadcast": device.broadcast(x if device.rank == n - 1 else None, root=n - 1),
    }


def expected(n, rank, number):
    xs = [np.arange(2 * n * 3).reshape(2 * n, 3) + 100 * r + 1000 * number for r in range(n)]
    total = sum(xs)
    return {
        "all_reduce": total, "mean": total / n, "all_gather": np.concatenate(xs),
        "last dim": np.concatenate([x[:, : 1 + r % 2] for r, x in enumerate(xs)], 1),
        "reduce_scatter": total[2 * rank : 2 * rank + 2], "columns": np.array_split(total, n, 1)[rank],
        "all_to_all": np.concatenate([x[2 * rank : 2 * rank + 2] for x in xs]), "broadcast": xs[-1],
    }


def repeat(device, patches):
    """Results of several rounds, and how often this member released the others."""
    released = Counter()
    release = LastArriver.release

    def counting(self, sequence):
        released[sequence] += 1
        release(self, sequence)

    with mock.patch.multiple(LastArriver, **{"release": counting, **patches}):
        return [one_of_each(device, number) for number in range(TIMES)], released


def check(ranks):
    for rank, (rounds, _) in enumerate(ranks):
        for number, found in enumerate(rounds):
            for what, right in expected(len(ranks), rank, number).items():
                assert_array_equal(found[what], right, err_msg=what)


@pytest.mark.sampled(2)
@pytest.mark.not_on_mpi("what the host replaces is not replaced in another process")
@pytest.mark.parametrize("devices", [2, 3, *(pytest.param(devices, marks=pytest.mark.slow) for devices in (1, 5))])
def test_the_last_one_serves_all(cluster_of, devices):
    cluster = cluster_of(Mesh(devices=devices))
    cluster.restart()
    ranks = cluster.run(repeat, {}).outputs
    check(ranks)
    released = Counter()
    for _, mine in ranks:
        released.update(mine)
    if devices < FEWEST_MEMBERS:
        assert not released
    else:  # from the third time on all calls are repeated ones
        assert len(released) >= len(expected(devices, 0, 0)) * (TIMES - 2)
        assert max(released.values()) <= devices


def without_release(device):
    with mock.patch.object(last_arriver, "TURNS_FOR_THE_LAST", 2):
        return repeat(device, {"release": release_own})


def release_own(self, sequence):
    """As `LastArriver.release`, and nobody hears of it."""
    parity = sequence & 1
    if self._shared[parity] is not None:
        whole = np.empty(self._shared[parity].shape, self._shared[parity].dtype)
        self._fill[parity](whole)
        self._shared[parity][...] = whole


def test_who_is_not_released_does_it_itself(cluster_of):
    cluster = cluster_of(Mesh(devices=3))
    cluster.restart()
    check(cluster.run(without_release).outputs)


def fails_at_the_last(device):
    """A result that cannot be made is told to everybody by itself, and the others go on."""
    x = np.full(3, 1e308)
    caught = 0
    for number in range(TIMES):
        with np.errstate(over="raise" if number == TIMES - 2 else "ignore"):
            try:
                _ = device.all_reduce(x)
            except FloatingPointError:
                caught += 1
    return caught, device.all_reduce(np.ones(2))


def test_an_error_in_making_the_result_reaches_who_makes_it_and_leaves_nobody_behind(cluster_of):
    for caught, total in cluster_of(Mesh(devices=3)).run(fails_at_the_last):
        assert caught == 1
        assert_array_equal(total, np.full(2, 3.0))


def calls_otherwise(device, odd_one):
    x = np.ones(4)
    for _ in range(TIMES):
        _ = device.all_reduce(x)
    if device.rank == odd_one:
        return device.all_gather(x)
    return device.all_reduce(x)


@pytest.mark.parametrize("odd_one", [0, 2])
def test_a_member_that_calls_something_else_is_told(cluster_of, odd_one):
    with pytest.raises(Exception, match="differ in what they call") as caught:
        cluster_of(Mesh(devices=3)).run(calls_otherwise, odd_one)
    assert isinstance(caught.value, CollectiveMismatchError) or isinstance(
        caught.value.__cause__, CollectiveMismatchError
    )


def another_size_by_the_root(device):
    """The tokens of a broadcast depend on the root alone; the others cannot know."""
    found = []
    for number in range(2 * TIMES):
        x = np.arange(3 + number // 4) if device.rank == 1 else None
        found.append(device.broadcast(x, root=1))
    return found


def test_who_shows_another_token_is_served_the_long_way(cluster_of):
    for found in cluster_of(Mesh(devices=4)).run(another_size_by_the_root):
        for number, x in enumerate(found):
            assert_array_equal(x, np.arange(3 + number // 4))
