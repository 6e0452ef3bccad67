"""Hardware of as many devices as are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from parallelism.hardware import Hardware, sized_hardware


@pytest.mark.parametrize(("name", "devices", "room"), [
    ("dgx-h100", 20, 24), ("dgx-h100", 8, 8), ("dgx-h100", 3, 8), ("dgx-a100", 3072, 3072), ("dgx-h100:8", 64, 64),
    ("dgx-h100:8", None, 64), ("laptop", 2, 2), ("tpu-v4:4x4x8", 128, 128), ("tpu-v4", 5, 64),
])
def test_a_preset_gets_as_many_nodes_as_there_must_be(name: str, devices: int | None, room: int) -> None:
    found = sized_hardware(name, devices)
    assert found.devices == room
    assert found.links[0] == Hardware.preset(name).links[0] or len(found.links) == 1


@pytest.mark.parametrize(("hardware", "devices", "error"), [
    ("dgx-h100:8", 32, "dgx-h100:8 has 64 devices, and 32 are asked for"),
    ("dgx-h100:2", 17, "dgx-h100:2 has 16 devices, and 17 are asked for"),
    ("tpu-v4", 65, "tpu-v4 has 64 devices, fewer than 65; its name may say"),
    (Hardware.preset("dgx-a100:2"), 17, "dgx-a100 has 16 devices, fewer than 17"),
    ("dgx-h100", 0, "devices must be an integer of at least 1, got 0"),
    ("dgx-h10", 8, "did you mean 'dgx-h100'"),
])
def test_two_numbers_that_differ_and_too_few_devices_are_refused(hardware: Any, devices: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        sized_hardware(hardware, devices)


def test_a_hardware_that_is_given_stays_as_it_is() -> None:
    given = Hardware.preset("dgx-a100:2")
    assert sized_hardware(given, 9) is given
