"""Groups over replicas and partitions, beside the facts of StableHLO's specification and tests.

The facts in ``data/stablehlo_groups.json`` are transcribed from openxla/stablehlo, each with its file and commit.
"""

import json
from itertools import product

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from paths import DATA

from parallelism import Mesh, replica_groups
from parallelism.mesh.stablehlo_groups import STRATEGIES

FACTS = json.loads((DATA / "stablehlo_groups.json").read_text())


@pytest.mark.parametrize("case", FACTS["process_groups"], ids=lambda case: case["strategy"])
def test_the_specification(case):
    groups = replica_groups(case["strategy"], case["groups"], case["num_replicas"], case["num_partitions"])
    assert [[list(divmod(rank, case["num_partitions"])) for rank in group] for group in groups] == case["expected"]


@pytest.mark.parametrize("case", FACTS["mesh_axes_to_replica_groups"], ids=lambda case: case["name"])
def test_axes_of_a_mesh_as_groups(case):
    if not case["mesh_axes"]:       # a mesh of one device: ours has an axis of size 1
        assert Mesh(x=1).groups() == ((0,),)
        return
    mesh = Mesh(**dict(case["mesh_axes"]))
    ids = case["device_ids"] or range(mesh.size)
    assert [[ids[rank] for rank in group] for group in mesh.groups(tuple(case["axes"]))] == case["expected"]


@st.composite
def grids(draw):
    """A strategy, ragged groups of some of its ids in any order, replicas, partitions."""
    strategy = draw(st.sampled_from(STRATEGIES))
    replicas, partitions = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = {"cross_partition": partitions, "flattened_ids": replicas * partitions}.get(strategy, replicas)
    ids = list(draw(st.permutations(range(count))))[: draw(st.integers(0, count))]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ids) - 1)))))
    groups = [part.tolist() for part in np.split(np.array(ids, int), cuts) if len(part)]
    return strategy, groups, replicas, partitions


@given(grids())
@up_to(60)
def test_every_process_is_where_its_ids_say_and_nowhere_else(drawn):
    strategy, groups, replicas, partitions = drawn
    found = replica_groups(strategy, groups, replicas, partitions)
    expected = set()
    for replica, partition in product(range(replicas), range(partitions)):
        id_ = {"cross_partition": partition, "flattened_ids": replica * partitions + partition}.get(strategy, replica)
        if any(id_ in group for group in groups):
            expected.add(replica * partitions + partition)
    ranks = [rank for group in found for rank in group]
    assert sorted(ranks) == sorted(expected)
    times = {"cross_replica": partitions, "cross_partition": replicas}.get(strategy, 1)
    wide = partitions if strategy == "cross_replica_and_partition" else 1
    assert [len(group) for group in found] == [len(group) * wide for group in groups for _ in range(times)]


def test_order_is_kept_and_groups_may_be_ragged():
    assert replica_groups("cross_replica", [[3, 0], [2]], 4, 2) == ((6, 0), (7, 1), (4,), (5,))
    assert replica_groups("cross_partition", [[1, 0]], 2, 3) == ((1, 0), (4, 3))
    assert replica_groups("cross_replica_and_partition", [[1, 0]], 2, 2) == ((2, 0, 3, 1),)
    assert replica_groups("flattened_ids", np.array([[5, 0], [1, 4]]), 3, 2) == ((5, 0), (1, 4))


@pytest.mark.parametrize(("arguments", "words"), [
    (("cross", [[0]], 1, 1), "the strategy must be one of cross_replica, cross_partition, .*, got 'cross'"),
    (("cross_replica", [[0, 1], [1]], 2, 2), r"replica 1 appears twice, in \[0, 1\] and in \[1\]; an id belongs to "
                                             r"one group"),
    (("cross_partition", [[0, 0]], 2, 2), r"partition 0 appears twice, in \[0, 0\]"),
    (("cross_replica", [[0, 2]], 2, 4), r"of cross_replica hold replica ids 0 to 1, got 2 in \[0, 2\]"),
    (("cross_partition", [[2]], 4, 2), "of cross_partition hold partition ids 0 to 1, got 2"),
    (("flattened_ids", [[-1, 0]], 2, 2), "of flattened_ids hold process ids 0 to 3, got -1"),
    (("cross_replica", [[0], []], 1, 1), r"at least one replica, got an empty one in groups=\[\[0\], \[\]\]"),
    (("cross_replica", [[0]], 0, 1), "num_replicas must be at least 1, got 0"),
    (("cross_replica", [[0]], 1, -2), "num_partitions must be at least 1, got -2"),
])
def test_invalid_groups_are_refused_with_the_reason(arguments, words):
    with pytest.raises(ValueError, match=words):
        replica_groups(*arguments)


def test_missing_ids_are_refused_where_all_are_asked_for():
    assert replica_groups("cross_replica", [[2, 1]], 4, 1) == ((2, 1),)
    with pytest.raises(ValueError, match=r"must name every replica of 0 to 3; 0 is missing in groups=\[\[2, 1\]\]"):
        replica_groups("cross_replica", [[2, 1]], 4, 1, complete=True)
    assert len(replica_groups("cross_replica", [[2, 1], [0, 3]], 4, 3, complete=True)) == 6


@pytest.mark.parametrize("arguments", [
    ("cross_replica", [0, 1], 2, 1), ("cross_replica", [["0"]], 2, 1), ("cross_replica", [[True]], 2, 1),
    ("cross_replica", [[0]], 2.0, 1), ("cross_replica", [[0]], 2, None), ("cross_replica", ["01"], 2, 1),
])
def test_what_is_no_integer_is_a_type_error(arguments):
    with pytest.raises(TypeError, match=r"integer|a group must be a sequence"):
        replica_groups(*arguments)
