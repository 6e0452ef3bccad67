"""Rates that are reached: of products by shape, of links by their use; and the prices that follow."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism import Costs, Hardware, HostLink, Link
from parallelism.hardware import Products, Reached

WIRE = Link("wire", 4, 2e-6, 100e9)
REACHED = Reached(message_bytes_per_second=80e9, bus_bytes_per_second=50e9, base_seconds=10e-6, step_seconds=3e-6,
                  in_switch_bytes_per_second={"all_reduce": 90e9}, in_switch_from=3)
FAR = Link("far", 2, 5e-6, 10e9)


def hardware(**fields) -> Hardware:
    return Hardware(**{
        "name": "ours", "flops_per_second": {"float32": 1e12, "float16": 4e12}, "memory_bytes": 16e9,
        "memory_bytes_per_second": 1e12, "links": (replace(WIRE, reached=REACHED), FAR), "host": HostLink(1e-5, 16e9),
        **fields})


def test_whole_waves_of_whole_tiles_reach_all_and_one_tile_more_a_wave_more():
    products = Products(6, ((8, 4),))
    assert products.reached((1, 24, 8, 5)) == 1
    assert products.reached((1, 25, 8, 5)) == pytest.approx(25 * 8 / (12 * 8 * 4))
    assert products.reached((3, 9, 4, 7)) == pytest.approx(3 * 9 * 4 / (6 * 8 * 4))        # two tiles each
    assert products.reached((2, 0, 4, 7)) == 1


def test_filling_a_tile_and_reading_for_it_take_their_part():
    assert Products(1, ((8, 8),), half_depth=16).reached((1, 8, 8, 16)) == pytest.approx(1 / 2)
    assert Products(1, ((8, 8),), half_intensity=12).reached((1, 8, 8, 16)) == pytest.approx(4 / 16)
    grouped = Products(1, ((8, 8),), half_depth=16, grouped=0.75)
    assert grouped.reached((1, 8, 8, 16)) == 1 / 2 and grouped.reached((3, 8, 8, 16)) == pytest.approx(3 / 8)
    small, large = Products(4, ((8, 8),), half_intensity=2), Products(4, ((16, 16), (8, 8)), half_intensity=2)
    assert large.reached((1, 64, 64, 3)) > small.reached((1, 64, 64, 3))
    assert large.reached((1, 16, 16, 3)) == small.reached((1, 16, 16, 3))                   # four small tiles at once


@up_to(100)
@given(st.tuples(*[st.integers(0, 300)] * 4), st.integers(1, 40), st.integers(0, 100), st.integers(0, 10))
def test_no_shape_reaches_more_than_all(shape, units, depth, intensity):
    products = Products(units, ((16, 8), (8, 8)), depth, intensity)
    assert 0 < products.reached(shape) <= 1
    count, m, n, k = shape
    if count * m * n * k and min(m, n) == 1:
        assert products.reached(shape) == 1
    elif count * m * n * k:
        tiles = min(ceil(count * ceil(m / r) * ceil(n / c) / units) * units * (r * c + intensity * (r + c))
                    for r, c in products.tiles)
        assert products.reached(shape) == pytest.approx(count * m * n * k / tiles / (k + depth))


def test_a_product_whose_tiles_leave_units_idle_is_split_over_them():
    products = Products(12, ((8, 4), (4, 4)), half_depth=16, split_depth=2)
    (of_large,) = products.split((1, 16, 7, 240))                          # 4 tiles, of 3 units each; of the small ones 8
    assert of_large.sum_bytes == 4 * 2 * 3 * 16 * 7
    assert of_large.reached == pytest.approx(16 * 7 * 240 / (12 * 8 * 4 * (80 + 16)))
    assert [each.sum_bytes for each in products.split((1, 8, 4, 5))] == [4 * 2 * 2 * 8 * 4] * 2  # 2 parts of 2 terms
    assert not products.split((1, 48, 8, 240)) and not products.split((3, 16, 7, 240)) and not products.split((1, 1, 7, 240))
    assert not replace(products, split_depth=0).split((1, 16, 7, 240))


def test_a_product_in_parts_takes_their_sum_and_a_launch_more_and_is_whole_where_that_is_faster():
    products = Products(12, ((8, 8),), half_depth=16)
    whole = Costs(hardware(products=products, kernel_launch_seconds=1e-6))
    in_parts = Costs(hardware(products=replace(products, split_depth=100), kernel_launch_seconds=1e-6))
    deep, flops = (1, 16, 8, 1_000_000), 2.0 * 16 * 8 * 1_000_000
    took = in_parts.compute_seconds(flops, dtype="float32", shape=deep)
    reached = 1_000_000 / (6 * (1_000_000 / 6 + 16)) * 16 * 8 / (2 * 8 * 8)
    assert took == pytest.approx(flops / 1e12 / reached + 4 * 2 * 6 * 16 * 8 / 1e12 + 2e-6)
    assert whole.compute_seconds(flops, dtype="float32", shape=deep) > 5 * took
    flat = (1, 16, 8, 150)
    assert len({each.compute_seconds(1e4, dtype="float32", shape=flat) for each in (whole, in_parts)}) == 1


def test_a_product_is_priced_by_its_shape_and_other_compute_by_the_ramp():
    costs = Costs(hardware(products=Products(6, ((8, 4),)), flops_efficiency=0.5, flops_efficiencies={"float16": 0.25}))
    assert costs.compute_seconds(2 * 24 * 8 * 5, dtype="float32", shape=(1, 24, 8, 5)) == 2 * 24 * 8 * 5 / 1e12 / 0.5
    assert costs.compute_seconds(1e9, dtype="float16", shape=(1, 24, 8, 5)) == 1e9 / 4e12 / 0.25
    assert costs.compute_seconds(1e9, dtype="float32") == 1e9 / 1e12 / 0.5
    assert costs.compute_seconds(8.0, 4e12, dtype="float32", shape=(1, 1, 1, 4)) == 4           # memory is longer
    without = Costs(hardware(flops_efficiency=0.5))
    assert without.compute_seconds(1e9, dtype="float32", shape=(1, 1, 1, 4)) == 1e9 / 1e12 / 0.5


def test_a_product_with_a_vector_takes_what_its_bytes_take():
    products = Products(6, ((8, 4),), half_depth=16, half_intensity=2, grouped=0.5)
    for shape in ((1, 1, 24, 5), (1, 24, 1, 5), (7, 1, 1, 5)):
        assert products.reached(shape) == 1
    assert products.reached((1, 2, 24, 5)) < 1 and products.reached((1, 24, 8, 1)) < 1      # k may be 1: it has a tile
    count, k = 16384, 2880                                                                # the gradients of gates
    costs = Costs(hardware(products=products, memory_efficiency=0.5))
    took = costs.compute_seconds(2.0 * count * k, 4.0 * count * k, dtype="float16", shape=(count, 1, 1, k))
    assert took == 4.0 * count * k / 1e12 / 0.5


def test_a_product_waits_for_a_part_of_the_float32_array_that_it_adds_to_unless_memory_is_longer():
    flops, shape = 2.0 * 24 * 8 * 5, (1, 24, 8, 5)
    added = 8 * 24 * 8
    for part in (0, 0.25, 1):
        costs = Costs(hardware(products=Products(6, ((8, 4),), accumulated=part), memory_efficiency=0.5))
        alone = costs.compute_seconds(flops, dtype="float16", shape=shape)
        assert alone == flops / 4e12
        took = costs.compute_seconds(flops, dtype="float16", shape=shape, added_bytes=added)
        assert took == pytest.approx(alone + part * added / 1e12 / 0.5)
        moved = costs.compute_seconds(flops, 4e12, dtype="float16", shape=shape, added_bytes=added)
        assert moved == 4 / 0.5                                                          # memory is longer, and has them
        attention = (2, 64, 64, 16, 1)
        assert costs.compute_seconds(1e9, shape=attention, dtype="float16", added_bytes=added) == costs.compute_seconds(
            1e9, shape=attention, dtype="float16")
    without = Costs(hardware())
    assert without.compute_seconds(1e9, dtype="float16", shape=shape, added_bytes=1e9) == 1e9 / 4e12
    with pytest.raises(ValueError, match=r"accumulated must be a number, at least 0 and at most 1; got 1\.5"):
        Products(6, accumulated=1.5)


def test_no_compute_is_shorter_than_issuing_it():
    costs = Costs(hardware(issue_seconds=5e-6, kernel_launch_seconds=1e-6).slow(rank=1, factor=2))
    assert costs.compute_seconds(1e6, dtype="float32") == 5e-6
    assert costs.compute_seconds(1e6, dtype="float32", rank=1) == 10e-6
    assert costs.compute_seconds(9e6, dtype="float32") == pytest.approx(10e-6)
    assert costs.compute_seconds() == 0


def test_messages_and_collectives_reach_rates_of_their_own():
    costs = Costs(hardware())
    assert costs.message_seconds(8e9, 0, 1) == pytest.approx(2e-6 + 8e9 / 80e9)
    assert costs.message_seconds(8e9, 0, 4) == pytest.approx(5e-6 + 8e9 / 10e9)
    for g, bus in ((2, 50e9), (3, 90e9), (4, 90e9)):
        took = costs.collective("all_reduce", 8e9, range(g), algorithm="ring").seconds
        assert took == pytest.approx(10e-6 + 2 * (g - 1) * (3e-6 + 8e9 / g / bus))
    took = costs.collective("all_gather", 8e9, range(4), algorithm="ring").seconds
    assert took == pytest.approx(10e-6 + 3 * (3e-6 + 2e9 / 50e9))
    far = costs.collective("all_gather", 8e9, (0, 4), algorithm="ring").seconds
    assert far == pytest.approx(10e-6 + 5e-6 + 4e9 / 10e9)          # the largest base of the levels up to there, once
    assert costs.collective("all_reduce", 8e9, range(8), algorithm="hierarchical").seconds < far * 4
    assert costs.collective("all_reduce", 8e9, (2,)).seconds == 0


def test_a_link_without_reached_rates_costs_what_it_did():
    plain = hardware(links=(WIRE, FAR))
    empty = hardware(links=(replace(WIRE, reached=Reached()), FAR))
    for group in ((0, 1), range(4), range(8), (0, 4)):
        for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
            assert Costs(plain).prices(kind, 3e6, group) == Costs(empty).prices(kind, 3e6, group)


NODES = (Link("inner", 4, 1e-6, 100e9), Link("outer", 3, 2e-6, 10e9))


def test_a_collective_over_striped_links_leaves_a_node_by_the_ports_of_all_its_members():
    plain = Costs(hardware(links=NODES))
    striped = Costs(hardware(links=(NODES[0], replace(NODES[1], striped=True))))
    size = 12e9
    for group, ports in ((range(12), 4), (range(8), 4), ((0, 1, 4, 5), 2), ((0, 4, 8), 1)):
        one, all_of_them = (costs.collective("all_gather", size, group, algorithm="ring") for costs in (plain, striped))
        g = len(group)
        assert one.seconds == pytest.approx((g - 1) * (2e-6 + size / g / 10e9))
        slowest = max(size / g / 10e9 / ports, size / g / 100e9 if ports > 1 else 0)
        assert all_of_them.seconds == pytest.approx((g - 1) * (2e-6 + slowest))
        loads = [costs.channel_bytes(one, group) for costs in (plain, striped)]
        outer = [{channel: load for channel, load in each.items() if channel[0] == 1} for each in loads]
        assert len(outer[1]) == 2 * g and len({*outer[1].values()}) == 1
        assert sum(outer[0].values()) == pytest.approx(sum(outer[1].values()))
        assert {c: n for c, n in loads[0].items() if c[0] == 0} == {c: n for c, n in loads[1].items() if c[0] == 0}
    uneven = striped.collective("all_gather", size, (0, 1, 2, 4), algorithm="ring").seconds
    assert uneven == pytest.approx(3 * (2e-6 + size / 4 / 10e9))            # the unit with one port is the busiest


@pytest.mark.parametrize(("name", "inner"), [("dgx-a100", 231.58e9), ("dgx-h100", 466.4e9), ("h200-node", 467.6e9)])
def test_a_large_all_reduce_over_whole_nodes_reaches_the_eight_ports_of_a_node_or_what_a_node_reaches(name, inner):
    hardware = Hardware.preset(f"{name}:3")
    port = hardware.links[-1].reached.bus_bytes_per_second
    found = Costs(hardware).collective("all_reduce", 64e9, range(24))
    assert found.bus_bytes_per_second == pytest.approx(min(8 * port, inner), rel=0.01)


@pytest.mark.parametrize(("name", "devices", "size", "measured"), [
    ("dgx-h100:12", 96, 16e9, 386.6e9),
    ("h200-node", 4, 4e9, 363.3e9),
    ("gb200-nvl72", 72, 1e9, 724e9),
    ("gb200-nvl72", 4, 1e9, 646.9e9),
])
def test_large_collectives_that_no_constant_is_from_take_what_was_measured(name, devices, size, measured):
    """CoreWeave, nccl-tests (2026); Machine Learning Engineering Open Book; Azure AI benchmarking guide."""
    found = Costs(Hardware.preset(name)).collective("all_reduce", size, range(devices))
    assert found.bus_bytes_per_second == pytest.approx(measured, rel=0.05)


def test_a_file_has_all_of_it(tmp_path):
    told = hardware(products=Products(108, ((256, 128), (64, 64)), 88.0, 4.74), issue_seconds=1e-6, fused=True,
                    message_overhead_seconds=2e-6, message_overhead_seconds_per_byte=1e-10, stack="ours",
                    flops_efficiencies={"float16": 0.8})
    told.save(tmp_path / "ours.json")
    assert Hardware.load(tmp_path / "ours.json") == told
    assert re.search(r"products +108 tiles at once", str(told)) and "90 GB/s" in str(told)
    assert "105 us for each MiB of a message" in str(told)


@pytest.mark.parametrize(("made", "words"), [
    (lambda: Products(0), "units must be a whole number of at least 1 and at most 1048576; got 0"),
    (lambda: Products(1, ()), "tiles must be a list of pairs"),
    (lambda: Products(1, ((1, 2, 3),)), "tiles must be a list of pairs"),
    (lambda: Products(1, half_depth=-1), "half_depth must be a number, at least 0; got -1"),
    (lambda: Reached(bus_bytes_per_second=0), "bus_bytes_per_second must be a number of bytes a second, above 0"),
    (lambda: Reached(in_switch_bytes_per_second={"all_redcue": 1}), "did you mean 'all_reduce'"),
    (lambda: Reached(in_switch_from=1), "in_switch_from must be a whole number of at least 2"),
    (lambda: replace(WIRE, shape="memory", reached=REACHED), "reached is of links"),
    (lambda: replace(WIRE, shape="ring", striped=True), "striped must be true or false, and is of a switch; got True"),
    (lambda: replace(WIRE, striped=1), "striped must be true or false, and is of a switch; got 1 of a switch"),
    (lambda: replace(WIRE, reached=3), "reached must be a Reached; got 3"),
    (lambda: hardware(products=3), "products must be a Products; got 3"),
    (lambda: hardware(fused=1), 'fused must be true or false or "elementwise" or "epilogues"; got 1'),
    (lambda: hardware(overlapping="products"), "overlapping must be true or false; got 'products'"),
    (lambda: hardware(gradient_buffers=2), "gradient_buffers must be true or false; got 2"),
    (lambda: hardware(collective_share=1.5), "collective_share must be"),
    (lambda: hardware(flops_efficiencies={"float16": 1.5}), "flops_efficiencies.float16 must be a number, above 0 and"),
])
def test_what_is_wrong_is_named(made, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        made()
