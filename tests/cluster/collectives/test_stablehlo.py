"""The collectives over groups of replicas and partitions, beside the examples of StableHLO's specification.

Transcribed from openxla/stablehlo, docs/spec.md; the commit is in ``tests/data/stablehlo_groups.json``.
"""

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from paths import DATA

from vcluster import DeviceFailedError, Mesh, PerDevice, replica_groups

EXAMPLES = json.loads((DATA / "stablehlo_groups.json").read_text())["examples"]


def collective(device, x, op, groups, attributes):
    match op:
        case "all_gather":
            return device.all_gather(x, groups=groups, dim=attributes["all_gather_dim"])
        case "all_reduce":
            return device.all_reduce(x, groups=groups)
        case "reduce_scatter":
            return device.reduce_scatter(x, groups=groups, dim=attributes["scatter_dimension"])
        case "all_to_all":
            split, concat = attributes["split_dimension"], attributes["concat_dimension"]
            return device.all_to_all(x, groups=groups, split_dim=split, concat_dim=concat)
        case "collective_broadcast":
            return device.broadcast(x, groups=groups)
        case "collective_permute":
            return device.permute(x, attributes["source_target_pairs"])
        case "collective_reduce":
            result = device.reduce(x, groups=groups)
            return np.zeros_like(x) if result is None else result     # theirs gives zeros to all but the root
    raise AssertionError(op)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["op"])
def test_the_examples_of_the_specification(cluster_of, example):
    replicas, partitions = example["num_replicas"], example["num_partitions"]
    attributes = example["attrs"]
    groups = None
    if "replica_groups" in attributes:
        groups = replica_groups(example["strategy"], attributes["replica_groups"], replicas, partitions)
    cluster = cluster_of(Mesh(replica=replicas, partition=partitions), "thread")
    places = [f"{replica},{partition}" for replica in range(replicas) for partition in range(partitions)]
    for operand, _ in enumerate(example["inputs"][places[0]]):
        x = PerDevice(np.array(example["inputs"][place][operand]) for place in places)
        run = cluster.run(collective, x, example["op"], groups, attributes)
        for rank, place in enumerate(places):
            assert_array_equal(run[rank], example["expected"][place][operand], err_msg=f"process {place}")


def test_groups_of_a_grid_reduce_over_what_their_strategy_says(cluster_of):
    """4 replicas of 2 partitions, every process with 10 ** its rank."""
    expected = {
        ("cross_replica", ((0, 1), (2, 3))): [101, 1010, 101, 1010, 1010000, 10100000, 1010000, 10100000],
        ("cross_partition", ((1, 0),)): [11, 11, 1100, 1100, 110000, 110000, 11000000, 11000000],
        ("cross_replica_and_partition", ((0, 3), (1, 2))): [11000011] * 2 + [111100] * 4 + [11000011] * 2,
        ("flattened_ids", ((0, 7, 3), (1,), (2, 4, 5, 6))): [10001001, 10, 1110100, 10001001, *[1110100] * 3, 10001001],
    }
    for (strategy, ids), sums in expected.items():
        groups = replica_groups(strategy, ids, 4, 2, complete=True)
        run = cluster_of(Mesh(replica=4, partition=2), "thread").run(
            lambda device, groups: device.all_reduce(10**device.rank, groups=groups), groups
        )
        assert run.outputs == sums


def test_who_is_in_no_group_gets_zeros_or_may_not_call(cluster_of):
    groups = replica_groups("cross_replica", [[2, 1]], 3, 2)
    assert groups == ((4, 2), (5, 3))
    cluster = cluster_of(Mesh(replica=3, partition=2), "thread")
    run = cluster.run(lambda device: device.broadcast(np.array([device.rank + 1]), groups=groups))
    assert np.concatenate(run.outputs).tolist() == [0, 0, 5, 6, 5, 6]
    run = cluster.run(lambda device: device.permute(np.array([device.rank + 1]), [(0, 1)], groups=groups))
    assert np.concatenate(run.outputs).tolist() == [0, 0, 5, 6, 0, 0]
    with pytest.raises(DeviceFailedError, match=r"rank 0 is in none of groups=.*, but calls all_reduce"):
        cluster.run(lambda device: device.all_reduce(1, groups=groups))
    for pairs, words in (([(0, 1), (2, 1)], "position 1 as target"), ([(0, 1), (0, 2)], "position 0 as source")):
        with pytest.raises(DeviceFailedError, match=f"{words} of more than one pair"):
            cluster.run(lambda device, pairs: device.permute(np.ones(1), pairs), pairs)
