"""Blocks dealt to stages of unequal speed: against all ways."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from parallelism.mixing.dealt_blocks import dealt, least_load


def every_way(loads, blocks):
    """All ways with the load of their slowest stage."""
    ways = {}
    for counts in product(range(1, blocks + 1), repeat=len(loads)):
        if sum(counts) == blocks and max(counts) <= loads.shape[1]:
            load = max(loads[stage, count - 1] for stage, count in enumerate(counts))
            if load < inf:
                ways[counts] = load
    return ways


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_ways_are_those_whose_slowest_stage_is_not_too_slow(data):
    stages, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    load = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, inf])
    loads = np.array([[data.draw(load) for _ in range(blocks)] for _ in range(stages)])
    most, limit = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([2.5, 6.0, inf]))
    every = every_way(loads, blocks)
    assert least_load(loads, blocks) == min(every.values(), default=inf)
    found = dealt(loads, blocks, most, limit)
    assert len(found.counts) == len({*found.counts}) <= most
    assert all(every[counts] < limit for counts in found.counts)
    left = [load for counts, load in every.items() if counts not in found.counts]
    assert all(load >= found.others for load in left)
    assert found.counts or not any(load < limit for load in every.values())


def test_ways_with_less_load_come_first_and_at_last_some_of_those_with_the_least():
    loads = np.array([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]])
    assert dealt(loads, 4, most=9) == ([(1, 3), (2, 2), (3, 1)], inf)
    assert dealt(loads, 4, most=2) == ([(2, 2), (3, 1)], 9.0)
    assert dealt(loads, 4, most=9, limit=9.0) == ([(2, 2), (3, 1)], 9.0)
    assert dealt(loads, 4, most=9, limit=3.0) == ([], 3.0)
    assert dealt(np.ones((2, 3)), 4, most=2) == ([(1, 3), (2, 2)], 1.0)
    assert dealt(np.full((2, 3), inf), 4, most=2) == ([], inf) and least_load(np.full((2, 3), inf), 4) == inf


@pytest.mark.parametrize("blocks", [1, 7])
def test_too_few_and_too_many_blocks_have_no_way(blocks):
    assert least_load(np.ones((2, 3)), blocks) == inf and dealt(np.ones((2, 3)), blocks, 5) == ([], inf)
