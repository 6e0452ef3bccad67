"""Stacks: what a software reaches, on top of a preset; each number says where it is from."""

from __future__ import annotations

import pytest

from parallelism import Hardware
from parallelism.hardware import MARKS, fitted_on, on_stack, read_stack, sized_hardware, stack_names


def test_the_stacks_are_these():
    assert stack_names() == ("megatron-a100", "megatron-h100", "numpy-host", "pytorch-eager-v100")


@pytest.mark.parametrize("name", stack_names())
def test_every_number_of_a_stack_says_what_it_is(name):
    table = read_stack(name)
    numbers = {field for field in table if field not in ("name", "title", "fitted_on", "sources", "reached")}
    numbers |= {f"reached.{link}.{field}" for link, fields in table.get("reached", {}).items() for field in fields}
    assert table["name"] == name and {*table["sources"]} == numbers
    for source in table["sources"].values():
        assert source.split(":")[0] in MARKS
    if any(source.startswith("fitted: on") for source in table["sources"].values()):
        assert fitted_on(name)


def test_a_stack_replaces_constants_of_a_preset_and_nothing_else():
    plain, told = Hardware.preset("dgx-a100:4"), Hardware.preset("dgx-a100:4+megatron-a100")
    assert told == on_stack(plain, "megatron-a100") and told.devices == plain.devices
    assert (told.stack, told.fused, plain.stack, plain.fused) == ("megatron-a100", "elementwise", "", False)
    assert told.overlapping and 0 < told.collective_share < 1 and not plain.overlapping
    assert (told.flops_per_second, told.links[1], told.memory_bytes) == (
        plain.flops_per_second, plain.links[1], plain.memory_bytes)
    assert told.links[0].bytes_per_second == plain.links[0].bytes_per_second
    assert told.sources["links.nvlink.reached.base_seconds"].startswith("megatron-a100, fitted: on nccl-a100")
    assert told.sources["flops_efficiency"].startswith("megatron-a100, fitted: on korthikanti-2022")
    assert "megatron-a100" in str(told)
    assert sized_hardware("dgx-a100+megatron-a100", 20).devices == 24
    assert sized_hardware("dgx-a100:2+megatron-a100", 16).devices == 16


def test_a_typing_error_is_told_the_nearest_stack():
    with pytest.raises(ValueError, match="no stack 'megatron-a10'; did you mean 'megatron-a100'"):
        Hardware.preset("dgx-a100+megatron-a10")
    with pytest.raises(ValueError, match="no hardware 'dgx-a10'"):
        Hardware.preset("dgx-a10+megatron-a100")
