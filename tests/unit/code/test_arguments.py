"""`PerDevice` takes values in the order of ranks; it and `Sharded` may lie in dicts, lists and tuples."""

from collections import namedtuple

import numpy as np
import pytest

from vcluster import Mesh, PerDevice, Sharded, TensorSharding
from vcluster.code.arguments import deal, fill


def test_values_come_in_the_order_of_ranks():
    assert PerDevice("ab").values == ["a", "b"]
    assert PerDevice({0: "a", 1: "b"}.values()).values == ["a", "b"]


@pytest.mark.parametrize(("values", "name"), [({0: "a", 1: "b"}, "dict"), ({"a", "b"}, "set"), (3, "int")])
def test_what_has_no_order_of_ranks_is_refused(values, name):
    with pytest.raises(TypeError, match=f"a list with one value for each device, in the order of ranks; got {name}"):
        PerDevice(values)


MESH = Mesh(dp=2, tp=2)
X = np.arange(15.0).reshape(5, 3)
Pair = namedtuple("Pair", "left right")


def dealt(value):
    """What each device gets of an argument."""
    (common,), _, own = deal((value,), {}, MESH)
    return [fill(common, [each.values[rank] for each in own]) for rank in range(MESH.size)]


def test_shards_lie_in_trees_of_arguments():
    layout = TensorSharding("dp", None)
    found = dealt({"w": Sharded(X, layout), "more": [PerDevice("abcd"), Pair(1, (Sharded(X, layout),))], "n": 7})
    for rank, tree in enumerate(found):
        shard = X[:3] if rank < 2 else X[3:]
        np.testing.assert_array_equal(tree["w"], shard)
        np.testing.assert_array_equal(tree["more"][1].right[0], shard)
        assert tree["more"][0] == "abcd"[rank] and type(tree["more"][1]) is Pair and tree["n"] == 7


def test_trees_without_shards_are_not_taken_apart():
    tree = {"w": [X], "n": (1, 2)}
    tree["itself"] = tree
    assert all(each is tree for each in dealt(tree))


def test_the_place_of_a_wrong_shard_is_named():
    with pytest.raises(ValueError, match=r"^argument 1\['w'\]\[1\]: TensorSharding\('dp'\) has 1 dim, the tensor has 2"):
        dealt({"w": [1, Sharded(X, TensorSharding("dp"))]})
    with pytest.raises(ValueError, match=r"^argument 1\[0\] is a PerDevice and needs one value for each of the 4 devices"):
        dealt((PerDevice("abc"),))
