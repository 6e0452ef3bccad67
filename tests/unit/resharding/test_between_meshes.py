"""Messages between two meshes: every device gets its block, each element once, from a device that has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism import Mesh, TensorSharding as S
from parallelism.resharding.between_meshes import transfers

AXES = ("x", "y")


@st.composite
def laid(draw, ndim):
    """A mesh and a layout on it."""
    mesh = Mesh(**{axis: draw(st.integers(1, 4)) for axis in AXES})
    dims = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(0, ndim))
        if place < ndim:
            dims[place].append(axis)
    return mesh, S(*[tuple(dim) or None for dim in dims])


@given(st.data())
def test_every_device_gets_each_element_of_its_block_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    (before, source), (after, target) = data.draw(laid(len(shape))), data.draw(laid(len(shape)))
    whole = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    had, wanted = source.shard(whole, before), target.shard(whole, after)
    got, count = [np.zeros_like(part) for part in wanted], [np.zeros(part.shape, int) for part in wanted]
    for sender, receiver, given_part, taken in transfers(shape, source, before, target, after):
        got[receiver][taken] = had[sender][given_part]
        count[receiver][taken] += 1
    for part, expected, times in zip(got, wanted, count, strict=True):
        np.testing.assert_array_equal(part, expected)
        assert (times == 1).all()


def test_equal_ranks_send_to_each_other_and_copies_take_turns():
    mesh, layout = Mesh(dp=2, tp=3), S("dp", None)
    assert [(each.sender, each.receiver) for each in transfers((4, 5), layout, mesh, layout, mesh)] == [
        (rank, rank) for rank in range(6)]
    moved = transfers((4, 5), S(None, "tp"), Mesh(tp=2), S(None, None), Mesh(dp=3))
    assert [(each.sender, each.receiver, each.taken[1]) for each in moved] == [
        (sender, receiver, (slice(0, 3), slice(3, 5))[sender]) for receiver in range(3) for sender in range(2)]
    assert [each.sender for each in transfers((), S(), Mesh(dp=2), S(), Mesh(dp=5))] == [0, 1, 0, 1, 0]


def test_a_sum_that_is_pending_is_refused():
    with pytest.raises(ValueError, match="has no reduction pending, got TensorSharding"):
        transfers((4,), S(None, partial="dp"), Mesh(dp=2), S("dp"), Mesh(dp=2))
