"""A device goes to its own core to wait for others, and runs its program on any."""

from __future__ import annotations

import os

import pytest

from parallelism.mesh import Mesh
from vcluster.memory import HomeCore

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nobody says where processes run")


def where_it_may_run(device):
    return os.sched_getaffinity(0)


def where_it_may_run_behind_a_wait(device):
    before = os.sched_getaffinity(0)
    device.barrier()
    device.barrier()
    return before == os.sched_getaffinity(0)


def narrowed(device):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_a_program_may_use_the_cores_of_the_host(cluster_of):
    cluster = cluster_of(Mesh(devices=3))
    for _ in range(3):
        assert cluster.run(where_it_may_run).outputs == [os.sched_getaffinity(0)] * 3


def test_who_has_gone_to_its_core_may_leave_it(cluster_of):
    assert all(cluster_of(Mesh(devices=3)).run(where_it_may_run_behind_a_wait))


def test_cores_that_a_program_chose_stay_chosen(cluster_of):
    cluster = cluster_of(Mesh(devices=2))
    cluster.run(narrowed)
    assert cluster.run(where_it_may_run).outputs == [{min(os.sched_getaffinity(0))}] * 2
    cluster.restart()
    assert cluster.run(where_it_may_run).outputs == [os.sched_getaffinity(0)] * 2


@pytest.mark.parametrize("number", [0, 1, 7])
def test_at_home_there_is_one_core_and_behind_it_all(monkeypatch, number):
    chosen = [{2, 5, 9}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: chosen[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(set(cores)))
    home = HomeCore(number)
    home.leave()
    assert chosen == [{2, 5, 9}]
    home.stay()
    home.leave()
    home.leave()
    assert chosen == [{2, 5, 9}, {[2, 5, 9][number % 3]}, {2, 5, 9}]
