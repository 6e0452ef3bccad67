"""Ranks by node, and the places of devices in a hardware, from what the ranks of a job say."""

import pytest

from parallelism import Hardware
from vcluster import ClusterError
from vcluster.mpi import node_lines, places_of_devices
from vcluster.mpi.job import Job, Place
from vcluster.mpi.nodes import NodeMemory, ranks_by_node, sharing

IN_TURN = [Place(f"node{rank % 3}", 100 + rank, rank % 3) for rank in range(8)]


@pytest.fixture
def job(monkeypatch):
    made = Job.__new__(Job)
    made.rank, made.size, made.places = 0, len(IN_TURN), IN_TURN
    made._free, made._clusters, made.lost = list(range(1, made.size)), 0, set()
    monkeypatch.setattr("vcluster.mpi.job._job", made)
    return made


def test_ranks_are_told_by_node():
    assert [*ranks_by_node(IN_TURN).values()] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert node_lines(IN_TURN) == [
        ("node0", "the host and devices 2 5"), ("node1", "devices 0 3 6"), ("node2", "devices 1 4")]
    assert node_lines([Place("a", 1, 0), Place("a", 1, 1)]) == [("a", "the host"), ("a", "devices 0")]


def test_the_devices_of_a_node_share_a_memory_if_they_can_map_it():
    places = [Place(f"node{rank // 4}", 100 + rank, rank // 4 * 4, rank != 1 and rank < 8) for rank in range(10)]
    assert sharing(places, [1, 2, 3, 4, 6, 8, 9]) == [
        NodeMemory((0,)), NodeMemory((1, 2)), NodeMemory((3, 4)), NodeMemory((5,)), NodeMemory((6,))]
    two_names = [Place("a", 1, 0, True), Place("b", 2, 0, True), Place("a", 3, 0, True)]
    assert sharing(two_names, [0, 1, 2]) == [NodeMemory((0, 2)), NodeMemory((1,))]


def test_places_of_one_node_are_beside_each_other(job):
    assert places_of_devices(7, 4) == (4, 8, 0, 5, 9, 1, 6)
    assert places_of_devices(2, 4) == (0, 4)
    hardware = Hardware.preset("dgx-a100:3").placed(places_of_devices(7, 8))
    assert [hardware.level(0, rank) for rank in (3, 6)] == [0, 0]
    assert [hardware.level(0, rank) for rank in (1, 2, 4, 5)] == [1, 1, 1, 1]
    job.take(2)
    assert places_of_devices(3, 4) == (0, 4, 8)     # of the next cluster, whose ranks are 3, 4 and 5
    assert job.free == 5


def test_a_node_holds_no_more_devices_than_it_has(job):
    with pytest.raises(ClusterError, match="3 devices lie on node1, and a node of the hardware has 2"):
        places_of_devices(7, 2)
    with pytest.raises(ClusterError, match="mpiexec -n 9 "):
        places_of_devices(8, 8)
