"""The table of kinds: one record each, and one place that says what each is."""

import pytest

from parallelism import cost, trace_collectives
from parallelism.communication import COLLECTIVES


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_price_and_a_trace_mean_the_same_bus_bandwidth(name):
    for size in (1, 2, 4, 7):
        assert cost.bus_factor(name, size) == trace_collectives.bus_factor(name, size)
