"""Two kinds of nodes as one hardware: where ranks are, what messages cross, and what it refuses."""

import copy
from dataclasses import replace

import pytest
from mixed_nodes import FAST, SLOW, both

from parallelism import Hardware
from parallelism.hardware import Across, MixedHardware, mixed


def test_the_ranks_of_the_first_part_come_first_and_have_their_places_there():
    hardware = mixed(SLOW, FAST.resized(3))
    assert (hardware.devices, hardware.ranks, hardware.first_ranks) == (10, 10, (0, 4))
    assert [hardware.number_of_part(rank) for rank in range(10)] == [0] * 4 + [1] * 6
    assert [hardware.place(rank) for rank in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert hardware.part_of_group((1, 3)) == 0 and hardware.part_of_group((4, 9)) == 1
    assert hardware.part_of_group((3, 4)) is None
    for rank in (-1, 10):
        with pytest.raises(ValueError, match=f"places for ranks 0 to 9, got rank {rank}"):
            hardware.place(rank)


def test_its_rates_are_the_means_over_all_devices_in_the_dtypes_of_both():
    hardware = mixed(replace(SLOW, flops_per_second={"float32": 2e9, "int8": 1e9}), FAST.resized(3))
    assert dict(hardware.flops_per_second) == {"float32": (4 * 2e9 + 6 * 6e9) / 10}
    assert hardware.name == "4 of slow and 6 of fast" and hardware.memory_bytes == 1e9
    assert hardware.labels == ("slow", "fast") and mixed(SLOW, SLOW.resized(3)).labels == ("4 of slow", "6 of slow")


def test_inside_a_part_a_message_has_the_path_of_that_part():
    hardware = both()
    for source, target in ((0, 1), (1, 2), (3, 0), (2, 2)):
        for first, levels, part in ((0, 0, SLOW), (4, 2, FAST)):
            found, own = hardware.path(first + source, first + target), part.path(source, target)
            assert found[:2] == own[:2]
            assert found.channels == tuple((level + levels, fault, port) for level, fault, port in own.channels)
            assert found.level == (None if own.level is None else own.level + levels)
            assert hardware.level(first + source, first + target) == part.level(source, target) + levels


def test_between_parts_a_message_leaves_one_network_and_enters_the_other():
    path = both().path(3, 4)
    assert path.latency_seconds == 5e-6 and path.bytes_per_second == 1e9
    assert path.channels == ((1, -1, 2 * 3), (3, -1, 2 * 0 + 1)) and path.level == 1
    assert both().path(4, 3).channels == ((3, -1, 0), (1, -1, 7))


def test_at_two_sites_it_crosses_the_link_between_them_too_in_its_lane():
    hardware = both(rate=4e8, lanes=2)
    path = hardware.path(3, 5)
    assert path.latency_seconds == 5e-6 + 1e-4 and path.bytes_per_second == 2e8 and path.level == 4
    assert path.channels[-1] == (4, -1, 2 * 1) and hardware.path(5, 3).channels[-1] == (4, -1, 2 * 1 + 1)
    assert hardware.path(2, 4).channels[-1] == (4, -1, 0)
    assert hardware.links[4].name == "across" and hardware.dealt(1).links[4].bytes_per_second == 4e8
    assert hardware.dealt(2) == hardware


def test_it_is_a_value():
    hardware = both(rate=1e9)
    assert copy.deepcopy(hardware) == hardware and hash(hardware) == hash(both(rate=1e9))
    assert isinstance(hardware, MixedHardware) and hardware != both()
    assert str(SLOW) in str(hardware) and str(FAST) in str(hardware)


def test_it_refuses_what_is_not_modelled():
    for wrong, words in (
        (SLOW.slow(rank=0, factor=2), "slow has faults, stragglers or a placement"),
        (SLOW.fault(source=0, bandwidth_factor=0.5), "slow has faults, stragglers or a placement"),
        (SLOW.placed([1, 0]), "slow has faults, stragglers or a placement"),
        (replace(SLOW, message_overhead_seconds=1e-6), "messages hold their ends on slow"),
        (both(), "two parts of one kind each"),
        (replace(SLOW, flops_per_second={"int8": 1e9}), "slow and fast must have rates of at least one dtype in common"),
    ):
        with pytest.raises(ValueError, match=words):
            mixed(wrong, FAST)
    with pytest.raises(ValueError, match="faults, stragglers and placements of a mixed hardware are not modelled"):
        both().slow(rank=0, factor=2)
    with pytest.raises(ValueError, match=r"across.bytes_per_second must be .*; got 0"):
        mixed(SLOW, FAST, across=Across(0.0))
    with pytest.raises(ValueError, match=r"lanes must be a whole number of at least 1; got 0"):
        both().dealt(0)


def test_only_parts_of_one_software_run_a_program_in_one_way():
    assert both().is_alike and not mixed(SLOW, replace(FAST, fused=True)).is_alike
    assert not mixed(Hardware.preset("dgx-a100:1+megatron-a100"), Hardware.preset("dgx-h100:1+megatron-core-h100")).is_alike
