"""`Run.unshard` joins one array of each rank, or a tuple, list or dict of arrays; what cannot be joined is told."""

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from vcluster.runs.joining import joined

MESH, ROWS, WHOLE = Mesh(tp=3), TensorSharding("tp", None), TensorSharding()
X = np.arange(20.0).reshape(5, 4)
SHARDS = ROWS.shard(X, MESH)


def test_several_outputs_are_joined_in_their_form():
    outputs = [(shard, {"sum": np.float64(190), "turned": [shard.T]}) for shard in SHARDS]
    rows, rest = joined(outputs, (ROWS, {"sum": WHOLE, "turned": ["[None, tp]"]}), MESH)
    np.testing.assert_array_equal(rows, X)
    np.testing.assert_array_equal(rest["turned"][0], X.T)
    assert rest["sum"] == 190 and list(rest) == ["sum", "turned"]


def test_a_dict_of_layouts_may_leave_outputs_out():
    assert joined([{"x": shard, "rank": rank} for rank, shard in enumerate(SHARDS)], {"x": ROWS}, MESH)["x"].shape == (5, 4)


def test_a_list_of_numbers_is_an_array():
    assert joined([[0, 1], [2], [3]], "[tp]", MESH).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(joined([list(shard) for shard in SHARDS], ROWS, MESH), X)


@pytest.mark.parametrize(("outputs", "layout", "told"), [
    ([None] * 3, ROWS, "the output is None on every rank, and there is nothing to join: the kernel's return is missing"),
    ([X, None, None], ROWS, "the output is None on ranks 1 and 2, as after a reduce or a gather to one rank"),
    ([(X, X[0])] * 3, ROWS, r"the output of rank 0 is a tuple of 2, not one array: give .* each, as \(layout, layout\)"),
    ([{"x": X}] * 3, ROWS, r"the output of rank 0 is a dict with 'x', not one array: give .* each, as \{'w': layout\}"),
    ([(X, X)] * 3, (ROWS,), "the layouts are for a tuple or list of 1; the output of rank 0 is a tuple of 2"),
    ([(X, {"a": X})] * 3, (ROWS, {"b": ROWS}), r"a dict with 'b'; the output\[1\] of rank 0 is a dict with 'a'"),
    ([X] * 3, (ROWS, ROWS), r"the output of rank 0 is an array of shape \(5, 4\)"),
    ([(1, None)] * 3, (WHOLE, WHOLE), r"the output\[1\] is None on every rank"),
], ids=range(8))
def test_what_cannot_be_joined_is_told(outputs, layout, told):
    with pytest.raises(ValueError, match=told):
        joined(outputs, layout, MESH)


@pytest.mark.parametrize("layout", [3, None, Mesh(tp=3)])
def test_what_is_no_layout_is_told(layout):
    with pytest.raises(TypeError, match="unshard takes a TensorSharding, its text such as"):
        joined(SHARDS, layout, MESH)
