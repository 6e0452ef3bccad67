"""Prices of groups and messages: those of few of them stand for all that lie alike."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from parallelism import Mesh
from parallelism.hardware import sized_hardware
from parallelism.simulation.event_classes import members
from parallelism.simulation.folding import same_prices
from parallelism.symbolic.event_prices import EventPrices, MeshOnHardware
from parallelism.timeline import Pricing

CLUSTERS = {"dgx-h100": 48, "tpu-v4:4x4x4": 64, "mi300x-node": 16, "gb200-nvl72": 144}


@pytest.mark.parametrize("name", CLUSTERS)
def test_groups_and_messages_of_each_price_are_the_first_of_all(name: str) -> None:
    size = CLUSTERS[name]
    hardware = sized_hardware(name, None if ":" in name else size)
    prices = EventPrices(Pricing.of(hardware, "modelled", None, link_sharing=False))
    layout = MeshOnHardware(Mesh(a=2, b=size // 8, c=4))
    for axes in [each for count in (1, 2) for each in permutations("abc", count)]:
        groups = members(layout.mesh, axes)
        first = np.sort(np.unique(same_prices(hardware, groups), return_index=True)[1])
        assert prices._different_groups(layout.along(axes), axes, layout) == tuple(map(tuple, groups[first].tolist()))
    for distance in (1, -3, 4, size // 2):
        ranks = np.arange(max(-distance, 0), size - max(distance, 0))
        alike = same_prices(hardware, np.stack([ranks, ranks + distance], axis=1))
        _, first, number = np.unique(alike, return_index=True, return_inverse=True)
        found = prices._alike(distance, size)
        assert found[ranks].tolist() == ranks[first[number.ravel()]].tolist()
        assert np.delete(found, ranks).tolist() == [-1] * abs(distance)
