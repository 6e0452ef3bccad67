"""Seconds on described hardware: the textbook's formulas, and laws that hold whatever the hardware."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product
from math import ceil, isclose, sqrt

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism import Costs, Hardware, HostLink, Link, Mesh, TensorSharding, plan_resharding
from parallelism.algorithms import COLLECTIVES
from parallelism.algorithms.algorithms import algorithm, algorithms
from parallelism.algorithms.kinds import ROOTED
from parallelism.algorithms.phases import names, phases
from parallelism.cost.cost import bus_factor
from parallelism.hardware import Piece
from parallelism.resharding.plan import move_seconds

A, B = 2.0**-18, 2.0**-30                      # seconds, and seconds per byte: sums and products of these are exact
FAR_A, FAR_B = 2.0**-15, 2.0**-26


def cluster(*links: Link, **fields: object) -> Hardware:
    values = {
        "flops_per_second": {"float32": 2.0**40, "float64": 2.0**39}, "memory_bytes": 2.0**34,
        "memory_bytes_per_second": 2.0**36, "host": HostLink(2.0**-17, 2.0**33), **fields,
    }
    return Hardware("made up", links=links, **values)


def near(extents=64, **fields) -> Link:
    return Link("near", extents, A, 1 / B, **fields)


def far(extents=4, **fields) -> Link:
    return Link("far", extents, FAR_A, 1 / FAR_B, **fields)


FLAT = Costs(cluster(near()))
TWO_LEVELS = Costs(cluster(near(4), far(4)))


def lg(g):
    return (g - 1).bit_length()


def formulas(g):
    """The textbook: collective, algorithm -> latencies, and parts of S per link; of g positions, powers of two."""
    share, k = Fraction(g - 1, g), lg(g)
    return {
        ("all_reduce", "ring"): (2 * (g - 1), 2 * share),
        ("all_reduce", "direct"): (2 * (g - 1), 2 * share),
        ("all_reduce", "recursive_doubling"): (k, Fraction(k)),
        ("all_reduce", "halving_doubling"): (2 * k, 2 * share),
        ("all_reduce", "tree"): (2 * k, Fraction(2 * k)),
        ("all_reduce", "naive"): (g - 1, Fraction(g - 1)),
        ("all_gather", "ring"): (g - 1, share),
        ("all_gather", "direct"): (g - 1, share),
        ("all_gather", "naive"): (g - 1, share),
        ("all_gather", "recursive_doubling"): (k, share),
        ("all_gather", "bruck"): (k, share),
        ("reduce_scatter", "ring"): (g - 1, share),
        ("reduce_scatter", "pairwise"): (g - 1, share),
        ("reduce_scatter", "direct"): (g - 1, share),
        ("reduce_scatter", "halving_doubling"): (k, share),
        ("reduce_scatter", "naive"): (g - 1, Fraction(g - 1)),
        ("all_to_all", "pairwise"): (g - 1, share),
        ("all_to_all", "direct"): (g - 1, share),
        ("all_to_all", "ring"): (g - 1, Fraction(g - 1, 2)),
        ("all_to_all", "bruck"): (k, Fraction(k, 2)),
        ("all_scatter", "ring"): (g - 1, share),
        ("all_scatter", "direct"): (g - 1, share),
        ("scatter", "tree"): (k, share),
        ("gather", "tree"): (k, share),
        ("scatter", "direct"): (g - 1, share),
        ("gather", "direct"): (g - 1, share),
        ("permute", "direct"): (1, Fraction(1)),
        ("barrier", "dissemination"): (k, Fraction(0)),
        ("barrier", "direct"): (g - 1, Fraction(0)),
        **{(collective, name): cost for collective in ("broadcast", "reduce") for name, cost in {
            "tree": (k, Fraction(k)), "ring": (g - 1, Fraction(g - 1)), "direct": (g - 1, Fraction(g - 1)),
            "naive": (g - 1, Fraction(g - 1)), "van_de_geijn": (k + g - 1, 2 * share),
        }.items()},
    }


def rotated(g):
    return tuple((p, (p + 1) % g) for p in range(g))


def every_algorithm(g):
    return [(collective, name) for collective in COLLECTIVES for name in names(collective, g)]


# -- collectives over one level --------------------------------------------------------------------------------------


def test_a_chain_in_a_memory_takes_the_latency_and_rate_of_collectives_of_its_size():
    """Not those of messages, which may be much shorter."""
    pieces = [Piece(1, 3e-5, 5e9), Piece(1 << 16, 6e-5, 2e9)]
    link = Link("memory", 4, 1e-6, 1e12, "memory", collective_pieces=pieces)
    costs = Costs(Hardware("ours", {"float32": 1.0}, 1e9, 1e9, (link,), HostLink(0, 1)))
    for nbytes, piece in ((64, pieces[0]), (1 << 20, pieces[1])):
        found = costs.collective("broadcast", nbytes, range(2), algorithm="pipelined_ring").seconds
        assert found == pytest.approx(piece.latency_seconds + nbytes / piece.bytes_per_second)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("g", [2, 4, 8, 32])
@pytest.mark.parametrize("nbytes", [0, 32, 2**20])
def test_times_are_exactly_the_textbooks(g, nbytes):
    priced = formulas(g)
    assert set(priced) | {("broadcast", "pipelined_ring"), ("reduce", "pipelined_ring")} == set(every_algorithm(g))
    for (collective, name), (latencies, parts) in priced.items():
        pairs = rotated(g) if collective == "permute" else ()
        cost = FLAT.collective(collective, nbytes, range(g), algorithm=name, pairs=pairs)
        assert cost.seconds == latencies * A + float(parts * nbytes) * B, (collective, name)


@pytest.mark.parametrize(("links", "a", "b"), [
    ([near(64)], A, B), ([near(4), far(16)], FAR_A, FAR_B), ([near(2), near(2), far(16)], FAR_A, FAR_B),
])
def test_the_formulas_hold_at_each_level(links, a, b):
    hardware = cluster(*links)
    apart = hardware.devices // links[-1].units
    group = range(0, 8 * apart, apart)              # one in each unit of the outermost level
    for (collective, name), (latencies, parts) in formulas(8).items():
        pairs = rotated(8) if collective == "permute" else ()
        cost = Costs(hardware).collective(collective, 2**16, group, algorithm=name, pairs=pairs)
        assert cost.seconds == latencies * a + float(parts * 2**16) * b, (collective, name)


@pytest.mark.parametrize("g", [3, 5, 6, 7, 12])
def test_the_formulas_hold_for_sizes_that_are_no_power_of_two(g):
    nbytes = 7 * g
    for (collective, name), (latencies, parts) in formulas(g).items():
        halved = (collective, name) in (("scatter", "tree"), ("gather", "tree"), ("all_to_all", "bruck"))
        if halved or name == "van_de_geijn" or name not in names(collective, g):
            continue                                # what is halved has unequal halves: see below
        pairs = rotated(g) if collective == "permute" else ()
        seconds = FLAT.collective(collective, nbytes, range(g), algorithm=name, pairs=pairs).seconds
        assert isclose(seconds, latencies * A + float(parts * nbytes) * B, rel_tol=1e-14), (collective, name)


def test_uneven_trees_and_brucks_blocks_by_hand():
    seconds = FLAT.collective("scatter", 96, range(3), algorithm="tree").seconds
    assert seconds == 2 * A + (32 + 32) * B                 # block 2 to position 2, block 1 to position 1
    seconds = FLAT.collective("scatter", 96, range(6), algorithm="tree").seconds
    assert seconds == 3 * A + (32 + 32 + 16) * B            # blocks 4 5; blocks 2 3; one block
    seconds = FLAT.collective("all_to_all", 96, range(6), algorithm="bruck").seconds
    assert seconds == 3 * A + (3 + 2 + 2) * 16 * B          # blocks 1 3 5; blocks 2 3; blocks 4 5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("g", [2, 3, 8, 33])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 2**22])
def test_a_pipelined_ring_takes_the_best_number_of_pieces(collective, g, nbytes):
    best = min(
        (g - 2 + k) * (A + nbytes * B / k) for k in range(1, max(2, min(nbytes, 1000) + 1))
    )
    cost = FLAT.collective(collective, nbytes, range(g), algorithm="pipelined_ring")
    assert isclose(cost.seconds, best, rel_tol=1e-13)


def test_pieces_are_chosen_as_the_derivative_says():
    g, nbytes = 10, 2**26
    k = sqrt((g - 2) * nbytes * B / A)
    told = [(g - 2 + n) * (A + nbytes * B / n) for n in (int(k), ceil(k))]
    assert FLAT.collective("broadcast", nbytes, range(g), algorithm="pipelined_ring").seconds == min(told)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("g", range(1, 10))
def test_phases_carry_what_the_steps_of_the_algorithms_say(g):
    for collective in COLLECTIVES:
        for name in algorithms(collective, g):
            for root in range(g) if collective in ROOTED else [0]:
                pairs = rotated(g) if collective == "permute" else None
                plan = algorithm(collective, name, g, root=root, pairs=pairs)
                each = {"all_to_all": g, "permute": 1}.get(collective, plan.chunks) if g > 1 else 1
                sent = [Fraction(0)] * g
                for phase in phases(collective, name, g, root, pairs or ()):
                    for source, part in zip(phase.sources.tolist(), phase.parts.tolist(), strict=True):
                        sent[source] += Fraction(phase.times * part, phase.whole)
                expected = plan.bytes_sent([1] * plan.chunks)
                assert sent == [Fraction(n, max(each, 1)) for n in expected], (collective, name, root)


@pytest.mark.parametrize("g", [2, 4, 8, 32])
@pytest.mark.parametrize(("collective", "name"), [
    ("all_reduce", "recursive_doubling"), ("all_reduce", "halving_doubling"), ("all_gather", "recursive_doubling"),
    ("reduce_scatter", "halving_doubling"),
])
def test_doublings_by_rule_are_their_steps(collective, name, g):
    steps = [{(move.source, move.target, len(move.chunks)) for move in step}
             for step in algorithm(collective, name, g).steps]
    by_rule = phases(collective, name, g)
    assert [set(zip(*(ends.tolist() for ends in phase[1:4]), strict=True)) for phase in by_rule] == steps
    assert {(phase.times, phase.whole) for phase in by_rule} == {(1, 1 if name == "recursive_doubling" and collective
                                                                  == "all_reduce" else g)}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("g", [2, 3, 4, 7, 8, 12, 33])
@pytest.mark.parametrize(("collective", "name"), [
    ("all_reduce", "tree"), ("broadcast", "tree"), ("reduce", "tree"), ("scatter", "tree"), ("gather", "tree"),
    ("barrier", "dissemination"), ("broadcast", "ring"), ("reduce", "ring"),
])
def test_trees_and_chains_by_rule_are_their_steps(collective, name, g):
    for root in {0, 1, g // 2, g - 1} if collective in ROOTED else {0}:
        plan = algorithm(collective, name, g, root=root)
        steps = [sorted((move.source, move.target, len(move.chunks)) for move in step) for step in plan.steps]
        by_rule = phases(collective, name, g, root)
        assert [sorted(zip(*(ends.tolist() for ends in phase[1:4]), strict=True)) for phase in by_rule] == steps
        assert {(phase.times, phase.whole) for phase in by_rule} == {(1, plan.chunks_of_buffer)}


def test_very_large_groups_are_priced_by_few_phases():
    costs = Costs(Hardware.of("dgx-h100:512"))
    known = set(costs.algorithms("all_reduce", range(4096)))
    assert known == {"hierarchical", "ring", "recursive_doubling", "halving_doubling", "tree"}
    assert "ring" not in costs.algorithms("all_to_all", range(4096))
    assert "direct" in costs.algorithms("all_reduce", range(1024))


@pytest.mark.parametrize("collective", sorted(set(COLLECTIVES) - {"permute"}))
def test_over_one_rank_every_collective_costs_nothing(collective):
    for costs, rank in product((FLAT, TWO_LEVELS), (0, 5)):
        assert all(cost.seconds == 0 for cost in costs.prices(collective, 2**30, [rank]))
        assert costs.collective(collective, 2**30, [rank]).bus_bytes_per_second == 0


def test_the_root_does_not_matter_over_one_level():
    for collective, name in every_algorithm(7):
        if collective in ROOTED and name not in ("tree", "van_de_geijn"):
            told = {FLAT.collective(collective, 700, range(7), algorithm=name, root=root).seconds for root in range(7)}
            assert len(told) == 1, (collective, name)


def test_a_tree_and_a_ring_cross_where_the_formulas_do():
    for g in (6, 8, 20):
        # 2 lg g (a + S b) = 2(g-1) a + 2(g-1)/g S b
        crossing = (A / B) * (g - 1 - lg(g)) / (lg(g) - (g - 1) / g)
        before, after = (
            {name: FLAT.collective("all_reduce", crossing * factor, range(g), algorithm=name).seconds
             for name in ("tree", "ring")} for factor in (0.999, 1.001)
        )
        assert before["tree"] < before["ring"]
        assert after["ring"] < after["tree"]
        at = [FLAT.collective("all_reduce", crossing, range(g), algorithm=name).seconds for name in ("tree", "ring")]
        assert isclose(*at, rel_tol=1e-12)


def test_the_cheapest_is_chosen_and_the_first_name_where_several_are():
    small = FLAT.collective("all_reduce", 8, range(8))
    large = FLAT.collective("all_reduce", 2**30, range(8))
    assert (small.algorithm, large.algorithm) == ("recursive_doubling", "halving_doubling")
    assert FLAT.collective("all_reduce", 2**30, range(7)).algorithm == "ring"
    assert FLAT.collective("broadcast", 2**30, range(8)).algorithm == "pipelined_ring"
    assert FLAT.collective("all_to_all", 8, range(8)).algorithm == "bruck"
    assert FLAT.collective("all_to_all", 2**30, range(8)).algorithm == "pairwise"
    for collective in set(COLLECTIVES) - {"permute"}:
        prices = FLAT.prices(collective, 4096, range(6))
        assert prices[0].seconds == FLAT.collective(collective, 4096, range(6)).seconds


def test_bus_bandwidth_is_that_of_nccl_tests():
    factors = {
        "all_reduce": 2 * 7 / 8, "all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_to_all": 7 / 8, "scatter": 7 / 8,
        "gather": 7 / 8, "broadcast": 1, "reduce": 1,
    }
    for collective, factor in factors.items():
        assert bus_factor(collective, 8) == factor
        cost = FLAT.collective(collective, 2**24, range(8))
        assert cost.bus_bytes_per_second == cost.algorithm_bytes_per_second * factor == 2**24 / cost.seconds * factor
    ring = FLAT.collective("all_reduce", 2**40, range(8), algorithm="ring")
    assert isclose(ring.bus_bytes_per_second, 1 / B, rel_tol=1e-4)         # that of a link, whatever the ranks


# -- collectives over several levels ---------------------------------------------------------------------------------


def test_hierarchical_all_reduce_is_its_parts():
    m, n, nbytes = 4, 4, 2**20
    inside = 2 * (2 * A + nbytes * B * 3 / 4)                               # halving, doubling
    across = min(2 * FAR_A * 2 + 2 * 3 / 4 * nbytes / m * FAR_B, 2 * FAR_A + 2 * nbytes / m * FAR_B)
    cost = TWO_LEVELS.collective("all_reduce", nbytes, range(m * n), algorithm="hierarchical")
    assert cost.seconds == inside + across


@pytest.mark.parametrize("ranks", [12, 16])
def test_hierarchical_beats_the_flat_ring_and_tree_across_nodes(ranks):
    for collective, nbytes in product(("all_reduce", "all_gather", "reduce_scatter"), (2**10, 2**16, 2**26)):
        told = {cost.algorithm: cost.seconds for cost in TWO_LEVELS.prices(collective, nbytes, range(ranks))}
        hierarchical = told.pop("hierarchical")
        assert all(hierarchical < told[name] for name in ("ring", "tree", "naive", "direct") if name in told)
        if ranks == 12 or nbytes == 2**26:
            assert TWO_LEVELS.collective(collective, nbytes, range(ranks)).algorithm == "hierarchical"


def test_hierarchical_beats_every_flat_broadcast_across_nodes_but_van_de_geijns_of_much():
    told = TWO_LEVELS.prices("broadcast", 2**16, range(12))
    assert told[0].algorithm == "hierarchical"
    assert told[0].seconds < told[1].seconds


def test_inside_a_node_and_with_uneven_nodes_there_is_no_hierarchy():
    for group in (range(4), (0, 4, 8), (0, 1, 2, 4)):
        assert "hierarchical" not in TWO_LEVELS.algorithms("all_reduce", group)
        with pytest.raises(ValueError, match=r"no algorithm 'hierarchical' for all_reduce over .* these apply: ring"):
            TWO_LEVELS.collective("all_reduce", 8, group, algorithm="hierarchical")


def test_three_levels_are_taken_apart_twice():
    costs = Costs(cluster(near(2), Link("middle", 2, 2 * A, 0.5 / B), far(2)))
    nbytes = 2**30
    seconds = costs.collective("all_reduce", nbytes, range(8), algorithm="hierarchical").seconds
    # 8 ranks: groups of 4 inside, taken apart again; pairs across
    halves = 2 * ((A + nbytes / 2 * B) + (2 * A + nbytes / 4 * 2 * B))
    across = FAR_A + nbytes / 4 * FAR_B                          # recursive doubling, of two
    assert isclose(seconds, halves + across, rel_tol=1e-12)


def test_a_ring_crosses_each_node_border_once_and_waits_for_it():
    seconds = TWO_LEVELS.collective("all_gather", 2**20, range(8), algorithm="ring").seconds
    assert seconds == 7 * (FAR_A + 2**17 * FAR_B)


def test_ranks_that_alternate_between_nodes_share_one_port():
    one, each = (Costs(cluster(near(4), far(2, ports=ports))) for ports in (1, None))
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    told = [costs.collective("all_gather", 2**20, order, algorithm="ring").seconds for costs in (one, each)]
    assert told == [7 * (FAR_A + 4 * 2**17 * FAR_B), 7 * (FAR_A + 2**17 * FAR_B)]


def test_placing_neighbours_in_a_node_makes_their_collectives_cheap():
    mesh = Mesh(tp=4, dp=2)                                     # tp is the outer axis: its ranks are 2 apart
    hardware = cluster(near(4), far(2))
    group = mesh.groups("tp")[0]
    apart = Costs(hardware).collective("all_reduce", 2**20, group).seconds
    together = Costs(hardware.placed_by(mesh, ("dp", "tp"))).collective("all_reduce", 2**20, group).seconds
    assert together == FLAT.collective("all_reduce", 2**20, range(4)).seconds < apart


def test_a_ring_of_links_is_for_rings_and_full_connection_for_direct():
    ring, full = (Costs(cluster(near(8, shape=shape))) for shape in ("ring", "fully_connected"))
    assert ring.collective("all_gather", 800, range(8), algorithm="ring").seconds == 7 * (A + 100 * B)
    # from 0 to 2 and from 1 to 3 both go by the link from 1 to 2; half round, all go upwards, and each link has 4
    steps = [(1, 1, 1), (2, 2, 2), (4, 4, 4)]
    assert ring.collective("all_gather", 800, range(8), algorithm="recursive_doubling").seconds == sum(
        hops * A + 100 * shards * load * B for hops, load, shards in steps)
    assert full.collective("all_gather", 800, range(8), algorithm="direct").seconds == A + 100 * B
    assert full.collective("all_reduce", 800, range(8), algorithm="direct").seconds == 2 * (A + 100 * B)
    assert full.collective("all_gather", 800, range(8)).algorithm == "direct"


def test_a_torus_wraps_round_and_takes_the_shorter_way():
    torus = Costs(cluster(near((3, 4), shape="torus")))
    assert torus.message_seconds(0, 0, 3) == A                  # (0, 0) to (0, 3)
    assert torus.message_seconds(0, 0, 2) == 2 * A
    assert torus.message_seconds(0, 0, 11) == 2 * A             # (0, 0) to (2, 3), round both borders
    assert torus.message_seconds(0, 1, 6) == 2 * A


@pytest.mark.parametrize("extents", [(8,), (4, 4), (3, 3, 3), (1, 5)])
def test_on_a_torus_all_links_are_used_at_once(extents):
    costs = Costs(cluster(near(extents, shape="torus")))
    dims = [n for n in extents if n > 1]
    g, nbytes = int(np.prod(extents)), 2**20
    seconds = len(dims) * (dims[0] - 1) * A + (g - 1) / g * nbytes * B / (2 * len(dims))
    for collective, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        cost = costs.collective(collective, nbytes, range(g), algorithm="torus")
        assert isclose(cost.seconds, times * seconds, rel_tol=1e-14)
        assert costs.collective(collective, 2**30, range(g)).algorithm == "torus"


def test_on_an_uneven_torus_the_longer_rings_finish_later():
    costs = Costs(cluster(near((2, 3), shape="torus")))
    # first two steps round 3 beside one round 2, then the other way; both ways between two ranks share a link
    assert costs.collective("all_gather", 24 * 4, range(6), algorithm="torus").seconds == (
        (A + 2 * 12 * B) + (A + 8 * B) + (A + 2 * 4 * B) + (A + 4 * B))


def test_without_whole_rings_there_is_no_torus():
    torus = Costs(cluster(near((2, 3), shape="torus")))
    assert "torus" in torus.algorithms("all_reduce", (0, 1, 2)) and "torus" in torus.algorithms("all_reduce", (1, 4))
    for costs, group in ((torus, (0, 1)), (torus, (0, 1, 2, 3)), (torus, (3,)), (FLAT, range(4))):
        assert "torus" not in costs.algorithms("all_reduce", group)
        with pytest.raises(ValueError, match=r"no algorithm 'torus' for all_reduce .* these apply: ring"):
            costs.collective("all_reduce", 8, group, algorithm="torus")


# -- messages and compute --------------------------------------------------------------------------------------------


def test_a_message_takes_the_level_at_which_its_ends_meet():
    assert TWO_LEVELS.message_seconds(2**20, 0, 3) == A + 2**20 * B
    assert TWO_LEVELS.message_seconds(2**20, 3, 4) == FAR_A + 2**20 * FAR_B
    assert TWO_LEVELS.message_seconds(2**20, 5, 5) == 0


def test_compute_is_the_roofline():
    costs = Costs(cluster(near(), kernel_launch_seconds=2.0**-20))
    assert costs.compute_seconds(2**30, 2**10) == 2.0**-20 + 2.0**-10       # flops decide
    assert costs.compute_seconds(2**30, 2**30) == 2.0**-20 + 2.0**-6        # bytes decide
    assert costs.compute_seconds(2**30, dtype="float64") == 2.0**-20 + 2.0**-9
    assert costs.compute_seconds(2**30, dtype=np.dtype("float64")) == 2.0**-20 + 2.0**-9
    assert costs.compute_seconds(0, 0) == 0


def test_efficiency_rises_smoothly_to_its_best():
    costs = Costs(cluster(near(), flops_efficiency=0.75, flops_ramp_seconds=2.0**-10))
    for full in (2.0**-14, 2.0**-10, 2.0**-4):
        efficiency = 0.75 * sqrt(full / (full + 2.0**-10))
        assert isclose(costs.compute_seconds(full * 2.0**40), full / efficiency, rel_tol=1e-12)


def test_a_rate_that_is_not_told_is_not_guessed():
    with pytest.raises(ValueError, match="made up has no rate for int8; it has float32, float64"):
        FLAT.compute_seconds(1, dtype="int8")
    with pytest.raises(ValueError, match="flops and bytes must be at least 0; got -1 flops"):
        FLAT.compute_seconds(-1)
    assert FLAT.compute_seconds(0, 2**36, dtype="int8") == 1


def test_work_on_a_few_numbers_needs_no_rate():
    nothing = FLAT.compute_seconds(0, 64, dtype="int8")
    assert nothing > 0
    assert FLAT.compute_seconds(1, 64, dtype="int8") == FLAT.compute_seconds(64, 64, dtype="int8") == nothing
    for flops, nbytes in ((1, 65), (65, 64), (1, 0)):
        with pytest.raises(ValueError, match="no rate for int8"):
            FLAT.compute_seconds(flops, nbytes, dtype="int8")


def test_errors_of_collectives_name_what_applies():
    with pytest.raises(ValueError, match="no algorithm 'rings' for all_reduce over 3; these apply: ring, tree, direct"):
        FLAT.collective("all_reduce", 8, range(3), algorithm="rings")
    with pytest.raises(ValueError, match="no collective 'all_gossip'; there are all_reduce"):
        FLAT.collective("all_gossip", 8, range(3))
    with pytest.raises(ValueError, match=r"a group needs at least one rank, and each rank once; got \(1, 1\)"):
        FLAT.collective("all_reduce", 8, (1, 1))
    with pytest.raises(ValueError, match="bytes of all_reduce must be at least 0; got -8"):
        FLAT.collective("all_reduce", -8, range(3))
    with pytest.raises(ValueError, match="root of broadcast must be a position from 0 to 2, got 3"):
        FLAT.collective("broadcast", 8, range(3), root=3)
    with pytest.raises(ValueError, match="made up has places for ranks 0 to 63, got rank 64"):
        FLAT.collective("all_reduce", 8, (0, 64))


# -- what is slower --------------------------------------------------------------------------------------------------


def test_a_straggler_computes_slower_and_the_others_do_not():
    costs = Costs(cluster(near()).slow(rank=3, factor=1.5))
    assert costs.compute_seconds(2**40, rank=3) == 1.5
    assert costs.compute_seconds(2**40, rank=2) == costs.compute_seconds(2**40) == 1
    twice = Costs(costs.hardware.slow(rank=3, factor=2))
    assert twice.compute_seconds(2**40, rank=3) == 3


def test_a_fault_is_met_by_the_messages_that_it_concerns():
    costs = Costs(cluster(near()).fault(source=0, target=1, delay_seconds=1.0, bandwidth_factor=0.5))
    assert costs.message_seconds(2**20, 0, 1) == A + 1 + 2**21 * B
    assert costs.message_seconds(2**20, 1, 0) == A + 2**20 * B
    ring = costs.collective("all_gather", 800, range(8), algorithm="ring").seconds
    assert ring == 7 * (A + 1 + 200 * B)
    there = costs.collective("all_gather", 800, range(1, 8), algorithm="ring").seconds
    assert there == FLAT.collective("all_gather", 800, range(1, 8), algorithm="ring").seconds


def test_half_a_port_is_half_for_all_that_leave_it():
    costs = Costs(cluster(near()).fault(source=2, bandwidth_factor=0.5))
    assert costs.message_seconds(2**20, 2, 5) == A + 2**21 * B
    assert costs.message_seconds(2**20, 5, 2) == A + 2**20 * B


# -- moves between layouts -------------------------------------------------------------------------------------------


def test_a_move_takes_what_its_collective_takes():
    mesh = Mesh(dp=2, tp=4)
    costs = Costs(cluster(near(4), far(2)))
    plan = plan_resharding(TensorSharding("tp", None), TensorSharding(None, None), (8, 6), "f8", mesh)
    [step] = plan.steps
    assert move_seconds(costs, step) == costs.collective("all_gather", 8 * 6 * 8, range(4)).seconds
    plan = plan_resharding(TensorSharding(None, partial="dp"), TensorSharding(None), (8,), "f8", mesh)
    [step] = plan.steps
    assert move_seconds(costs, step) == costs.collective("all_reduce", 64, (0, 4)).seconds
    plan = plan_resharding(TensorSharding(None), TensorSharding("tp"), (8,), "f8", mesh)
    assert [move_seconds(costs, step) for step in plan.steps] == [0]


def test_a_plan_can_be_the_cheapest_in_seconds():
    mesh = Mesh(node=2, tp=4)
    hardware = cluster(near(4), far(2))
    source, target = TensorSharding(("node", "tp"), None), TensorSharding(None, ("node", "tp"))
    costs = Costs(hardware)
    by_bytes = plan_resharding(source, target, (16, 24), "f8", mesh)
    by_seconds = plan_resharding(source, target, (16, 24), "f8", mesh, hardware=hardware)
    seconds = [sum(move_seconds(costs, step) for step in plan.steps) for plan in (by_seconds, by_bytes)]
    assert seconds[0] <= seconds[1]
    assert by_seconds.steps[-1].after == target
    with pytest.raises(ValueError, match="give either cost= or hardware= to plan a resharding"):
        plan_resharding(source, target, (16, 24), "f8", mesh, hardware=hardware, cost=lambda step: 1.0)


# -- laws ------------------------------------------------------------------------------------------------------------

SECONDS = st.floats(1e-9, 1e-2)
RATES = st.floats(1e3, 1e15)
SHAPES = st.sampled_from([("switch", 6), ("ring", 6), ("torus", (2, 3)), ("fully_connected", 6)])
BYTES = st.integers(0, 2**40)


@st.composite
def hardwares(draw):
    shape, extents = draw(SHAPES)
    links = [Link("inner", extents, draw(SECONDS), draw(RATES), shape), Link("outer", 3, draw(SECONDS), draw(RATES))]
    ramps = {field: draw(st.sampled_from([0.0, 1e-6, 1e-3])) for field in ("flops_ramp_seconds", "memory_ramp_seconds")}
    return cluster(*links[: draw(st.integers(1, 2))], kernel_launch_seconds=draw(SECONDS), **ramps)


@st.composite
def calls(draw):
    """Hardware, a collective by an algorithm, and a group."""
    hardware = draw(hardwares())
    group = draw(st.lists(st.integers(0, hardware.devices - 1), min_size=1, max_size=8, unique=True))
    collective = draw(st.sampled_from(COLLECTIVES))
    name = draw(st.sampled_from([None, *Costs(hardware).algorithms(collective, group)]))
    rest = {"pairs": rotated(len(group))} if collective == "permute" else {}
    return hardware, collective, group, {"algorithm": name, **rest}


@given(calls(), BYTES, BYTES)
def test_more_bytes_never_take_less_and_a_split_never_helps(call, first, second):
    hardware, collective, group, options = call
    costs = Costs(hardware)
    a, b, both = (
        costs.collective(collective, nbytes, group, **options).seconds for nbytes in (first, second, first + second)
    )
    assert 0 <= a <= both * (1 + 1e-12)
    assert both <= (a + b) * (1 + 1e-12)
    assert (both == 0) == (len(group) == 1)


@given(calls(), BYTES, st.integers(0, 17), st.floats(1, 100), st.floats(0.01, 1), SECONDS)
def test_what_is_slow_or_faulty_never_speeds_up(call, nbytes, rank, factor, share, delay):
    hardware, collective, group, options = call
    rank %= hardware.ranks
    worse = hardware.slow(rank=rank, factor=factor).fault(
        source=rank, delay_seconds=delay, bandwidth_factor=share).fault(target=group[0], bandwidth_factor=share)
    before, after = (
        Costs(each).collective(collective, nbytes, group, **options).seconds for each in (hardware, worse))
    assert after >= before * (1 - 1e-12)
    for source, target in pairwise(group):
        assert Costs(worse).message_seconds(nbytes, source, target) >= Costs(hardware).message_seconds(
            nbytes, source, target)
    assert Costs(worse).compute_seconds(nbytes, rank=rank) >= Costs(hardware).compute_seconds(nbytes, rank=rank)


@given(hardwares(), BYTES, BYTES, BYTES)
def test_compute_and_messages_grow_and_a_split_never_helps(hardware, flops, more, nbytes):
    costs = Costs(hardware)
    assert 0 <= costs.compute_seconds(flops, nbytes) <= costs.compute_seconds(flops + more, nbytes) * (1 + 1e-12)
    assert costs.compute_seconds(flops, nbytes) <= costs.compute_seconds(flops, nbytes + more) * (1 + 1e-12)
    split = costs.compute_seconds(flops) + costs.compute_seconds(more)
    assert costs.compute_seconds(flops + more) <= split * (1 + 1e-12)
    for target in range(1, hardware.devices):
        one, two, both = (costs.message_seconds(n, 0, target) for n in (flops, more, flops + more))
        assert 0 < one <= both <= (one + two) * (1 + 1e-12)


@up_to(10)
@given(SECONDS, RATES, BYTES, st.integers(1, 15))
def test_more_ranks_never_take_less_on_a_switch(latency, rate, nbytes, size):
    costs = Costs(cluster(Link("switch", 16, latency, rate)))
    for collective, name in every_algorithm(size):
        if collective != "permute" and name in names(collective, size + 1):
            uneven = collective in ("scatter", "gather", "all_to_all") and name in ("tree", "bruck")
            if uneven or name == "van_de_geijn":      # its parts may be larger than those of more ranks
                continue
            few, more = (costs.collective(collective, nbytes, range(g), algorithm=name).seconds
                         for g in (size, size + 1))
            assert few <= more * (1 + 1e-12), (collective, name)


@up_to(8)
@given(SECONDS, RATES, BYTES)
def test_the_cheapest_grows_with_the_ranks_by_powers_of_two(latency, rate, nbytes):
    costs = Costs(cluster(Link("switch", 16, latency, rate)))
    for collective in set(COLLECTIVES) - {"permute"}:
        told = [costs.collective(collective, nbytes, range(1 << k)).seconds for k in range(5)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(told)), collective


@given(calls(), BYTES)
def test_the_cheapest_is_no_dearer_than_any(call, nbytes):
    hardware, collective, group, options = call
    costs, rest = Costs(hardware), {key: value for key, value in options.items() if key != "algorithm"}
    chosen = costs.collective(collective, nbytes, group, **rest)
    assert chosen.seconds <= min(cost.seconds for cost in costs.prices(collective, nbytes, group, **rest))
    assert Costs(hardware).collective(collective, nbytes, group, **rest) == chosen


@given(hardwares(), st.data())
def test_a_phase_of_one_message_takes_what_the_message_takes(hardware, data):
    source, target = data.draw(st.lists(st.integers(0, hardware.devices - 1), min_size=2, max_size=2, unique=True))
    nbytes = data.draw(BYTES)
    hardware = hardware.fault(source=source, delay_seconds=1e-3, bandwidth_factor=0.5)
    costs = Costs(hardware)
    moved = costs.collective("permute", nbytes, (source, target), pairs=((0, 1),)).seconds
    assert isclose(moved, costs.message_seconds(nbytes, source, target), rel_tol=1e-12)


def test_of_very_large_groups_nobody_takes_turns_with_everybody():
    costs = Costs(Hardware.preset("dgx-h100:129"))
    turns = {"direct", "naive", "pairwise"}
    assert turns & set(costs.algorithms("reduce_scatter", range(1024))) == turns
    assert costs.algorithms("reduce_scatter", range(1032)) == ("hierarchical", "ring")
    assert costs.algorithms("permute", range(1032)) == ("direct",)
