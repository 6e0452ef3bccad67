"""Messages and collectives that share links: worked by hand, alone as if nobody shared, crowds beside exact rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_pricing import machine, on, recv, ring, send, times, wait

from benchmarks import storms
from benchmarks.storms import all_pairs, random_pairs
from parallelism.algorithms import COLLECTIVES, closed_form
from parallelism.cost import Costs
from parallelism.hardware import Hardware, Link
from parallelism.mesh import Mesh
from parallelism.recorder import record
from parallelism.sharding import TensorSharding
from parallelism.timeline import fair_sharing as link_sharing


def two_nodes(latency=1, **changed):
    """Of two devices each; what goes from node to node shares a port of two bytes a second."""
    links = [Link("inside", 2, 0, 8), Link("between", 2, latency_seconds=latency, bytes_per_second=2, ports=1)]
    return machine(links=links, **changed)


# -- worked by hand ----------------------------------------------------------------------------------------------------

def test_two_collectives_through_one_port_share_it():
    lanes = [[ring(rank, (0, 2) if rank % 2 == 0 else (1, 3), 8)] for rank in range(4)]
    # each: 2 of latency, 4 for its 8 bytes; so it asks for two thirds of the port, and gets a half
    assert times(on(lanes, two_nodes())) == [(rank, 0, 8) for rank in range(4)]
    assert times(on(lanes, two_nodes(), link_sharing=False)) == [(rank, 0, 6) for rank in range(4)]


@pytest.mark.parametrize("link_sharing", [True, False])
def test_collectives_of_one_group_begin_in_the_order_of_the_program(link_sharing):
    def lane(rank):
        rows = (rank - rank % 2, rank - rank % 2 + 1)
        return [ring(rank, rows, 8, 0, work=1), ring(rank, rows, 8, 1, work=2), wait(rank, 1), wait(rank, 2)]

    # each takes 2 of latency and 1 of its 8 bytes at 8 bytes a second; the second begins when the first is over
    flat = machine(links=[Link("flat", 4, 1, 8)])
    found = times(on([lane(rank) for rank in range(4)], flat, link_sharing=link_sharing))
    assert found == [event for rank in range(4) for event in [(rank, 0, 3), (rank, 0, 6), (rank, 0, 3), (rank, 3, 3)]]


@pytest.mark.parametrize("link_sharing", [True, False])
def test_collectives_of_different_groups_do_not_wait_for_each_other(link_sharing):
    def lane(rank):
        rows = (rank - rank % 2, rank - rank % 2 + 1)
        columns = (rank % 2, rank % 2 + 2)
        return [ring(rank, rows, 8, work=1), ring(rank, columns, 8, work=2), wait(rank, 1), wait(rank, 2)]

    # alone each takes 2 of latency and 1 of its bytes; where both share the ports of their ranks, the bytes of both
    flat = machine(links=[Link("flat", 4, 1, 8)])
    found = times(on([lane(rank) for rank in range(4)], flat, link_sharing=link_sharing))
    assert found == [event for rank in range(4) for event in [(rank, 0, 3), (rank, 0, 3), (rank, 0, 3), (rank, 3, 0)]]


def test_what_a_collective_does_not_ask_for_is_left_to_a_message():
    lanes = [[ring(0, (0, 2), 8)], [send(1, 3, 10)], [ring(2, (0, 2), 8)], [recv(3, 1, 10)]]
    # latency 6: 12 + 4 seconds, a quarter of the port; three quarters are 1.5 bytes a second
    assert times(on(lanes, two_nodes(latency=6))) == [(0, 0, 16), (1, 0, 0), (2, 0, 16), (3, 0, 6 + 10 / 1.5)]


def test_a_message_slows_a_collective_while_it_is_there():
    lanes = [[ring(0, (0, 2), 8)], [send(1, 3, 4)], [ring(2, (0, 2), 8)], [recv(3, 1, 4)]]
    # no latency: the ring alone takes 4 s, all of the port; the message has half of it for 4 s, then 2 s are left
    assert times(on(lanes, two_nodes(latency=0))) == [(0, 0, 6), (1, 0, 0), (2, 0, 6), (3, 0, 4)]


def test_collectives_over_other_links_are_not_disturbed():
    lanes = [[ring(rank, (rank - rank % 2, rank - rank % 2 + 1), 8)] for rank in range(4)]
    assert times(on(lanes, two_nodes())) == times(on(lanes, two_nodes(), link_sharing=False))


def test_a_stream_is_held_as_long_as_its_collective_takes_with_others_on_the_links():
    lanes = [
        [ring(0, (0, 2), 8, 0, work=1), ring(0, (0, 2), 8, 1, work=2), wait(0, 1), wait(0, 2)],
        [],
        [ring(2, (0, 2), 8, 0, work=1), ring(2, (0, 2), 8, 1, work=2), wait(2, 1), wait(2, 2)],
        [send(3, 1, 4)],
    ]
    trace = on(lanes, two_nodes(latency=0))
    # the message into the first node shares its port: the ring ends at 6, and only then the next begins, for 4 s
    assert [(e.group, e.start_seconds + e.duration_seconds) for e in trace.filter(kind="collective", rank=0)] == [
        ((0, 2), 6), ((0, 2), 10)]


# -- alone -------------------------------------------------------------------------------------------------------------

HARDWARE = {
    "dgx-h100:2": Hardware.preset("dgx-h100:2"), "ethernet-cpu": Hardware.preset("ethernet-cpu"),
    "tpu-v4:2x2x4": Hardware.preset("tpu-v4:2x2x4"),
    "a slow link": Hardware.preset("dgx-a100:2").fault(source=0, target=9, bandwidth_factor=0.25),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE.keys())
@pytest.mark.parametrize("kind", sorted(set(COLLECTIVES) - {"permute"}))
def test_a_collective_alone_takes_what_its_algorithm_takes_and_is_named(hardware, kind):
    def program(device):
        x = np.zeros((48, 5 + 1000 * (device.rank % 2)) if kind == "all_gather_object" else (48, 5))
        arguments = () if kind == "barrier" else (x,)
        if kind == "all_scatter":
            arguments = (np.zeros(3), )
        getattr(device, kind)(*arguments)

    trace = record(program, Mesh(dp=2, tp=6)).trace
    (price,) = {e.duration_seconds for e in trace.on(hardware, link_sharing=False, compute="modelled")}
    priced = trace.on(hardware, compute="modelled")
    assert {e.duration_seconds for e in priced} == {price}
    if kind not in ("all_scatter",):
        nbytes = {"barrier": 0, "gather": 12 * 48 * 40, "all_gather": 12 * 48 * 40}.get(kind, 48 * 40)
        costs = Costs(hardware).collective(kind, nbytes, range(12))
        assert price == pytest.approx(costs.seconds, rel=1e-9)
        assert {e.priced_algorithm for e in priced} == {costs.algorithm}
    assert {e.algorithm for e in priced} == {"direct"}


def test_a_resharding_alone_takes_what_the_collectives_inside_take():
    source, target = TensorSharding(("a", "b"), None), TensorSharding("b", "a")
    trace = record(lambda d: d.reshard(np.zeros((1, 6)), source, target, shape=(4, 6)), Mesh(a=2, b=2)).trace
    for hardware in ("dgx-h100", two_nodes()):
        alone, shared = (trace.on(hardware, link_sharing=sharing, compute="modelled") for sharing in (False, True))
        assert times(shared) == times(alone) and shared.makespan_seconds > 0


@pytest.mark.parametrize(("kind", "algorithm"), [
    ("all_reduce", "ring"), ("all_reduce", "direct"), ("all_reduce", "tree"), ("all_gather", "ring"),
    ("reduce_scatter", "halving_doubling"), ("all_to_all", "direct"), ("broadcast", "tree"), ("scatter", "tree"),
])
def test_what_crosses_the_ports_is_what_the_closed_form_says(kind, algorithm):
    costs, size, nbytes = Costs(machine(8)), 8, 64
    cost = costs.collective(kind, nbytes, range(size), algorithm=algorithm)
    crossing = costs.channel_bytes(cost, range(size))
    form = closed_form(kind, algorithm, size)
    into, out = ([crossing.get((0, -1, 2 * rank + way), 0) for rank in range(size)] for way in (1, 0))
    assert into == [part * nbytes for part in form.received] and sum(out) == sum(into)


def test_what_crosses_the_links_of_an_algorithm_over_levels_is_the_sum_of_its_parts():
    costs = Costs(Hardware.preset("dgx-h100:2"))
    cost = costs.collective("all_reduce", 2**20, range(16), algorithm="hierarchical")
    crossing = costs.channel_bytes(cost, range(16))
    inside, between = (sum(nbytes for channel, nbytes in crossing.items() if channel[0] == level) for level in (0, 1))
    # each of 16 sends 2 * 7/8 inside its node, and two of eight parts of that size to the other node
    assert (inside, between) == (2 * 16 * 2 * 7 / 8 * 2**20, 2 * 16 * 1 / 8 * 2**20)


# -- crowds ------------------------------------------------------------------------------------------------------------

def arrivals(trace):
    return np.array([event.start_seconds + event.duration_seconds for event in trace if event.kind == "recv"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storm", [all_pairs, random_pairs])
@pytest.mark.parametrize("hardware", ["ethernet-cpu", "dgx-h100:2"])
def test_a_crowd_is_nearly_as_quick_as_by_exact_rates(monkeypatch, storm, hardware):
    monkeypatch.setattr(storms, "MESSAGES", 1)
    trace = storm(14)
    near, alone = (trace.on(hardware, compute="modelled", link_sharing=sharing) for sharing in (True, False))
    monkeypatch.setattr(link_sharing, "FEW", 10**6)
    exact = trace.on(hardware, compute="modelled")
    assert near.makespan_seconds == pytest.approx(exact.makespan_seconds, rel=0.03)
    assert arrivals(near).mean() == pytest.approx(arrivals(exact).mean(), rel=0.03)
    assert (arrivals(near) >= arrivals(alone)).all()


def test_no_port_carries_more_than_it_can_and_in_a_crowd_hardly_more(monkeypatch):
    monkeypatch.setattr(storms, "MESSAGES", 1)
    trace = all_pairs(9)
    hardware = Hardware.preset("ethernet-cpu")
    through = max(max(trace.bytes_sent(rank), trace.bytes_received(rank)) for rank in range(9))
    least = through / hardware.links[0].bytes_per_second
    assert trace.on(hardware, compute="modelled").makespan_seconds >= 0.99 * least
    monkeypatch.setattr(link_sharing, "FEW", 10**6)
    assert trace.on(hardware, compute="modelled").makespan_seconds >= least


def test_messages_of_one_size_between_all_are_through_together_however_many():
    size = 12       # a crowd of 132
    lanes = [[send(rank, peer, 14) for peer in range(size) if peer != rank]
             + [recv(rank, peer, 14) for peer in range(size) if peer != rank] for rank in range(size)]
    assert on(lanes, machine(size)).makespan_seconds == pytest.approx(1 + 11 * 14 / 2, rel=1e-12)


@given(st.floats(0.01, 1), st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.floats(0, 3))
def test_a_message_that_shares_no_link_has_the_rate_that_filling_gives(wanted, capacities, later):
    foretold = []
    links = link_sharing.SharedLinks(
        lambda channel: capacities[channel[2]], lambda *entry: foretold.append(entry))
    channels = tuple(((0, 0, number), 1.0) for number in range(len(capacities)))
    links.begin(7, link_sharing.Route(channels, wanted), 5.0, 1.0, later)
    links.settle(later)
    flow = links._flows[7]
    links._filled([flow], list(flow.channels))
    assert flow.rate == flow.fixed == min(wanted, *capacities)
    assert foretold == [(flow.end, 7, flow.version)] and flow.end >= later + 4.0
