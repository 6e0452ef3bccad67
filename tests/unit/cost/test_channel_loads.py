"""Loads of channels, as arrays: what a dict of the same numbers has."""

import numpy as np
from hypothesis import given, strategies as st

from parallelism.cost import Costs
from parallelism.cost.channel_loads import NO_LOADS, ChannelLoads
from parallelism.hardware import Hardware

CHANNELS = st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(0, 12))
LOADS = st.dictionaries(CHANNELS, st.integers(1, 1000).map(float), max_size=12)


@given(LOADS)
def test_loads_are_a_mapping_in_the_order_of_the_channels(each):
    loads = ChannelLoads.of(each)
    assert loads == each and list(loads) == sorted(each) and len(loads) == len(each)
    assert all(channel in loads and loads[channel] == load for channel, load in each.items())
    assert (3, -1, 0) not in loads and loads.get((3, -1, 0), 0.5) == 0.5
    assert (loads == NO_LOADS) == (not each)


@given(LOADS, LOADS, st.sampled_from([1, 0.5, 3.0]))
def test_loads_are_added_channel_by_channel(each, other, factor):
    both = ChannelLoads.of(each).added(ChannelLoads.of(other), factor)
    assert both == {channel: each.get(channel, 0.0) + other.get(channel, 0.0) * factor for channel in each | other}


@given(LOADS, st.integers(0, 6))
def test_the_channels_between_two_numbers(each, place):
    found = dict(ChannelLoads.of(each).between(2 * place, 2 * place + 2))
    assert found == {channel: load for channel, load in each.items() if channel[2] // 2 == place}


def test_bytes_of_a_collective_over_the_ports_of_its_members():
    costs = Costs(Hardware.preset("ethernet-cpu"))
    group = (3, 1, 2)
    crossing = costs.channel_bytes(costs.collective("all_gather", 3000, group, algorithm="ring"), group)
    assert crossing == {(0, -1, 2 * rank + way): 2000 for rank in group for way in (0, 1)}
    assert all(isinstance(load, float) for load in crossing.values())
    assert [numbers.dtype for numbers, _ in crossing.by_level.values()] == [np.int64]
