"""The costs of collectives and messages on two kinds of nodes."""

import copy

import pytest
from mixed_nodes import FAST, SLOW, both

from parallelism import Costs
from parallelism.cost import MixedCosts, costs_of

S = 12_000_000


def test_inside_a_part_everything_costs_what_it_does_there():
    costs = costs_of(both())
    assert isinstance(costs, MixedCosts) and type(costs_of(SLOW)) is Costs
    for first, part in ((0, SLOW), (4, FAST)):
        own, group, there = Costs(part), (0, 1, 3), tuple(first + rank for rank in (0, 1, 3))
        assert costs.collective("all_reduce", S, there) == own.collective("all_reduce", S, group)
        assert costs.algorithms("all_reduce", there) == own.algorithms("all_reduce", group)
        assert costs.message_seconds(S, first, first + 2) == own.message_seconds(S, 0, 2)
        assert costs.compute_seconds(1e9, 8e6, rank=first + 1) == own.compute_seconds(1e9, 8e6)
        price = costs.collective("all_reduce", S, there)
        loads, alone = costs.channel_bytes(price, there), own.channel_bytes(price, group)
        assert {(level - first // 2, fault, port): size for (level, fault, port), size in loads.items()} == dict(alone)


@pytest.mark.parametrize(("kind", "sent", "before", "after"), [
    ("all_reduce", S, "reduce_scatter", "all_gather"),
    ("reduce_scatter", S * 3 / 4, "reduce_scatter", None),
    ("all_gather", S * 3 / 4, None, "all_gather"),
])
def test_a_collective_of_both_parts_takes_three_steps(kind, sent, before, after):
    costs, members = MixedCosts(both()), ((0,), (4, 5, 6))
    inside = [
        max(costs.collective(step, S, each).seconds for each in members) for step in (before, after) if step is not None
    ]
    exchanged = 5e-6 + sent / 1e9                       # the part with one member sends over one port
    price = costs.collective(kind, S, (0, 4, 5, 6))
    assert price.seconds == pytest.approx(exchanged + sum(inside), rel=1e-12)
    assert (price.algorithm, price.size) == ("across parts", 4) and not costs.channel_bytes(price, (0, 4, 5, 6))


def test_the_members_of_the_smaller_part_send_side_by_side_and_over_one_lane_of_a_link_across():
    members = (0, 2, 4, 5, 6)
    costs, apart = MixedCosts(both()), MixedCosts(both(rate=4e8, lanes=2))
    inside = costs.collective("all_reduce", S, members).seconds - (5e-6 + S / 2 / 1e9)
    assert apart.collective("all_reduce", S, members).seconds - inside == pytest.approx(5e-6 + 1e-4 + S / 2e8, rel=1e-12)


def test_it_refuses_what_has_no_price():
    costs = MixedCosts(both())
    with pytest.raises(ValueError, match="all_to_all has no price over ranks of both slow and fast; all_reduce"):
        costs.collective("all_to_all", S, (0, 4))
    with pytest.raises(ValueError, match="depend on the rank; got none"):
        costs.compute_seconds(1e9)
    assert copy.copy(costs).hardware == costs.hardware
