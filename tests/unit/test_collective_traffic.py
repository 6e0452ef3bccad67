"""What a group moves in closed form is what the step lists of the algorithms come to, uneven pieces and all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism.collectives import Moved, Said, moved_alike
from parallelism.collectives.direct_traffic import moved
from parallelism.mesh import split_sizes
from parallelism.recorder import calls as counted


def by_steps(said, sizes):
    """The same from `parallelism.recorder.calls`: bytes sent, received, messages and sources of each position."""
    everybody = [
        counted.Said(each.kind, counted.blank(each.shape, np.uint16), each.dim, sizes=cut or (),
                     pairs=each.pairs if each.kind == "permute" else None)
        for each, cut in zip(said, sizes, strict=True)
    ]
    steps, chunks = everybody[0].steps(len(said)), counted.chunk_sizes(everybody)
    for position in range(len(said)):
        sources = steps.sources(position, chunks)
        yield (sum(n for _, n in steps.targets(position, chunks)), sum(n for _, n in sources),
               sum(map(len, steps.sends(position))), tuple(sorted((p, n) for p, n in sources if n)))


def agree(said, sizes):
    found = Moved(said)
    told = [
        (int(found.sent[p]), int(found.received[p]), int(found.messages[p]), found.sources(p))
        for p in range(len(said))
    ]
    assert told == list(by_steps(said, sizes))


extents = st.integers(0, 7)
groups = st.integers(1, 5)


@given(groups, extents, extents)
def test_reductions(size, n, m):
    said = [Said("all_reduce", (n, m), 2)] * size
    agree(said, [None] * size)
    for dim in (0, 1):
        cut = split_sizes((n, m)[dim], (size,))
        agree([Said("reduce_scatter", (n, m), 2, dim, (size,))] * size, [cut] * size)


@given(st.lists(extents, min_size=1, max_size=5), extents)
def test_gathering_parts_of_different_sizes(rows, m):
    agree([Said("all_gather", (n, m), 2) for n in rows], [None] * len(rows))


@given(st.lists(extents, min_size=1, max_size=5), extents)
def test_exchanges_whose_members_have_different_shapes(rows, m):
    size = len(rows)
    agree([Said("all_to_all", (n, m), 2, 1, (size,)) for n in rows], [split_sizes(m, (size,))] * size)


@given(st.data())
def test_exchanges_with_sizes_that_are_told(data):
    size = data.draw(groups)
    cuts = [tuple(data.draw(st.lists(extents, min_size=size, max_size=size))) for _ in range(size)]
    agree([Said("all_to_all", (sum(cut),), 2, sizes=cut) for cut in cuts], cuts)


@given(st.data())
def test_permutations(data):
    size = data.draw(groups)
    targets = data.draw(st.permutations(range(size)))
    pairs = tuple(zip(range(size), targets, strict=True))[:data.draw(st.integers(0, size))]
    said = [Said("permute", (data.draw(extents),), 2, pairs=pairs) for _ in range(size)]
    agree(said, [None] * size)
    assert Moved(said).pairs == tuple(sorted((s, t) for s, t in pairs if s != t and said[s].nbytes))


def test_over_two_axes_an_extent_is_cut_axis_by_axis():
    found = moved_alike(Said("reduce_scatter", (7,), 4, 0, (2, 2)), 4)
    np.testing.assert_array_equal(found.received, [4 * 3 * n for n in split_sizes(7, (2, 2))])


def test_a_group_of_thousands_is_counted_without_its_messages():
    found = moved_alike(Said("all_reduce", (100_000,), 4), 10_000)
    assert found.even and found.received[0] == 4 * (9_998 * 10 + 100_000)
    assert moved_alike(Said("all_reduce", (100_000,), 4), 10_000) is found


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_what_all_call_alike_is_what_each_would(kind):
    said = Said(kind, (5, 3), 8)
    one, other = moved((said,) * 3), moved_alike(said, 3)
    np.testing.assert_array_equal(one.received, other.received)
    assert one.sources(1) == other.sources(1)
