"""What a group moves in closed form is what the step lists of the algorithms come to, uneven pieces and all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism.algorithms.algorithms import algorithms
from parallelism.collectives import MemberCall, Moved, moved_alike
from parallelism.collectives.call import chunks_of, moved, payload_bytes, traffic, traffics
from parallelism.mesh import split_sizes


def call(kind, shape, **fields):
    return MemberCall(kind, np.dtype(np.uint16), shape, **fields)


def by_steps(calls):
    """The same from the steps: bytes sent, received, messages and sources of each position."""
    steps, chunks = calls[0].over(len(calls)), chunks_of(calls)
    for position in range(len(calls)):
        sources = steps.sources(position, chunks)
        yield (sum(n for _, n in steps.targets(position, chunks)), sum(n for _, n in sources),
               sum(map(len, steps.sends(position))), tuple(sorted((p, n) for p, n in sources if n)))


def agree(calls):
    found = Moved(calls)
    moved = [
        (int(found.sent[p]), int(found.received[p]), int(found.messages[p]), found.sources(p))
        for p in range(len(calls))
    ]
    assert moved == list(by_steps(calls))
    assert found.payload_bytes == payload_bytes(calls[0].over(len(calls)), chunks_of(calls))


extents = st.integers(0, 7)
groups = st.integers(1, 5)


@given(groups, extents, extents)
def test_reductions(size, n, m):
    agree([call("all_reduce", (n, m))] * size)
    for dim in (0, 1):
        cut = split_sizes((n, m)[dim], (size,))
        agree([call("reduce_scatter", (n, m), dim=dim, sizes=cut)] * size)


@given(st.lists(extents, min_size=1, max_size=5), extents)
def test_gathering_parts_of_different_sizes(rows, m):
    agree([call("all_gather", (n, m)) for n in rows])


@given(st.lists(extents, min_size=1, max_size=5), extents)
def test_exchanges_whose_members_have_different_shapes(rows, m):
    size = len(rows)
    agree([call("all_to_all", (n, m), dim=1, sizes=split_sizes(m, (size,))) for n in rows])


@given(st.data())
def test_exchanges_with_sizes_that_are_told(data):
    size = data.draw(groups)
    cuts = [tuple(data.draw(st.lists(extents, min_size=size, max_size=size))) for _ in range(size)]
    agree([call("all_to_all", (sum(cut),), sizes=cut) for cut in cuts])


@given(st.data())
def test_permutations(data):
    size = data.draw(groups)
    targets = data.draw(st.permutations(range(size)))
    pairs = tuple(zip(range(size), targets, strict=True))[:data.draw(st.integers(0, size))]
    calls = [call("permute", (data.draw(extents),), pairs=pairs) for _ in range(size)]
    agree(calls)
    assert Moved(calls).pairs == tuple(sorted((s, t) for s, t in pairs if s != t and calls[s].nbytes))


def test_over_two_axes_an_extent_is_cut_axis_by_axis():
    found = moved_alike(call("reduce_scatter", (7,), sizes=split_sizes(7, (2, 2))), 4)
    np.testing.assert_array_equal(found.received, [2 * 3 * n for n in split_sizes(7, (2, 2))])


def test_a_group_of_thousands_is_counted_without_its_messages():
    found = moved_alike(call("all_reduce", (100_000,)), 10_000)
    assert found.even and found.received[0] == 2 * (9_998 * 10 + 100_000)
    assert moved_alike(call("all_reduce", (100_000,)), 10_000) is found


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_what_all_call_alike_is_what_each_would(kind):
    mine = call(kind, (5, 3))
    one, other = moved((mine,) * 3), moved_alike(mine, 3)
    np.testing.assert_array_equal(one.received, other.received)
    assert one.sources(1) == other.sources(1)


def calls_of(kind, size, root, n, m, **fields):
    """The calls of a group in which each member gives what it can."""
    if kind in ("broadcast", "scatter"):
        cut = split_sizes(n, (size,)) if kind == "scatter" else ()
        return [call(kind, (n, m), root=root, sizes=cut, **fields) if p == root
                else MemberCall(kind, None, None, root=root, **fields) for p in range(size)]
    if kind == "barrier":
        return [MemberCall(kind, None, None, **fields)] * size
    if kind == "permute":
        pairs = tuple((p, (p + 2) % size) for p in range(size))
        return [call(kind, (n + p, m), pairs=pairs, **fields) for p in range(size)]
    cuts = {"sizes": split_sizes(n, (size,))} if kind in ("reduce_scatter", "all_to_all") else {}
    return [call(kind, (n, m), root=root if kind in ("reduce", "gather") else 0, **cuts, **fields)] * size


@given(st.sampled_from(["broadcast", "scatter", "reduce", "gather", "barrier"]), groups, st.integers(0, 4), extents)
def test_calls_with_a_root_and_barriers(kind, size, root, n):
    agree(calls_of(kind, size, root % size, n, 3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", [
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather",
    "all_scatter", "permute", "barrier"])
def test_the_traffic_of_a_group_at_once_is_that_of_each_member(kind, size):
    ranks = tuple(range(5, 5 + 3 * size, 3))
    for name in algorithms(kind, size):
        for n in (0, 2, 11):
            calls = calls_of(kind, size, size // 2, n, 3, algorithm=name)
            assert traffics(calls, ranks) == [traffic(calls, ranks, p) for p in range(size)], (name, n)
