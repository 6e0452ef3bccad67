"""The memory of groups over many runs: it is given back, and any number of groups may come and go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from parallelism.mesh import Mesh
from vcluster.code import DeviceFailedError
from vcluster.runs import VirtualCluster, engine


def reductions(device, fails):
    for _ in range(4):
        _ = device.all_reduce(np.ones(1000))
        _ = device.all_reduce(np.ones(1000), "a")
    if fails and device.rank == 1:
        raise ValueError("on purpose")
    return device.endpoint.heap._next


@pytest.fixture(params=["process", "thread"])
def cluster(request, cluster_of):
    return cluster_of(Mesh(a=2, b=2), request.param)


@pytest.mark.sampled(2)
def test_forgetting_and_failing_give_the_slots_of_all_groups_back(cluster):
    tops = []
    for _ in range(3):
        tops.append(cluster.run(reductions, False).outputs)
        cluster.forget()
        with pytest.raises(DeviceFailedError, match="on purpose"):
            cluster.run(reductions, True)
    assert tops[1] == tops[2]


def one_group(device, ranks):
    total = device.all_reduce(np.arange(3) + device.rank, groups=[ranks]) if device.rank in ranks else None
    return None if total is None else total.tolist(), device.endpoint.heap._next


def test_groups_are_made_anew_when_there_are_many(monkeypatch):
    monkeypatch.setattr(engine, "KEPT_GROUPS", 3)
    tops = []
    with VirtualCluster(4) as cluster:
        cluster.channel(0).send(7.0)    # a message that lies there is not lost
        for ranks in [*itertools.permutations(range(4), 3)][::2]:
            outputs = cluster.run(one_group, list(ranks)).outputs
            total = sum(ranks)
            assert [found for found, _ in outputs] == [
                [total, total + 3, total + 6] if rank in ranks else None for rank in range(4)]
            body = cluster._body
            assert body.layout.most_groups(body.arena) <= 4
            tops.append(max(top for _, top in outputs))
        assert cluster.run(lambda device: device.channel(-1).recv() if device.rank == 0 else None).outputs[0] == 7.0
    assert len(set(tops)) <= 6
