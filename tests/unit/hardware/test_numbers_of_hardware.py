"""Every number of a hardware file is refused by name, or gives times that are finite numbers."""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from math import inf, isfinite, nan
from typing import Any

import pytest

from parallelism import Hardware, Mesh, simulate
from parallelism.execution import Executable
from parallelism.hardware.fields import LARGEST, SMALLEST
from parallelism.hardware.files import HardwareFileError, build
from parallelism.hardware.hardware import _PARTS
from parallelism.ir import TensorType, record
from parallelism.layouts import localize
from parallelism.transforms import Adam, DataParallel, train_step

FILE: dict[str, Any] = {
    "name": "ours", "memory_bytes": 24e9, "memory_bytes_per_second": 9e11, "kernel_launch_seconds": 2e-6,
    "flops_efficiency": 0.7, "flops_ramp_seconds": 7e-6, "memory_efficiency": 0.8, "memory_ramp_seconds": 1e-6,
    "memory_overlap": 0.5, "collective_share": 0.1, "issue_seconds": 1e-6, "message_overhead_seconds": 1e-6,
    "message_overhead_seconds_per_byte": 1e-12, "flops_per_second": {"float32": 40e12},
    "flops_efficiencies": {"float32": 0.5}, "collective_bytes_per_second": {"all_reduce": 1e11},
    "host": {"latency_seconds": 1e-5, "bytes_per_second": 16e9},
    "products": {"units": 4, "half_depth": 3.0, "half_intensity": 5.0},
    "links": [
        {"name": "pcie", "extents": 3, "latency_seconds": 5e-6, "bytes_per_second": 25e9, "reached": {
            "message_bytes_per_second": 2e10, "bus_bytes_per_second": 2e10, "base_seconds": 1e-6, "step_seconds": 1e-6,
            "in_switch_bytes_per_second": {"all_reduce": 1e10}}},
        {"name": "memory", "extents": 2, "shape": "memory", "latency_seconds": 3e-5, "bytes_per_second": 3e9,
         "pieces": [{"from_bytes": 10.0, "latency_seconds": 1e-6, "bytes_per_second": 1e9}]}],
    "stragglers": [{"rank": 1, "factor": 1.5}],
    "faults": [{"source": 0, "target": 1, "delay_seconds": 1e-6, "bandwidth_factor": 0.5}],
}

Place = tuple[str | int, ...]


def numbers_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """The place of each float in a file."""
    if isinstance(value, float):
        yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield from numbers_in(entry, (*place, name))


PLACES = tuple(numbers_in(FILE))


def changed(place: Place, value: float) -> dict[str, Any]:
    """The file with another number at a place."""
    file = deepcopy(FILE)
    inside: Any = file
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return file


def hardware(place: Place, value: float) -> Hardware:
    return build(Hardware, changed(place, value), "ours.toml", parts=_PARTS)


LOSS = record(lambda p, x: ((x @ p["w"]) ** 2).sum(), {"w": TensorType("f32", (5, 3))}, TensorType("f32", (12, 5)))


@cache
def program() -> Executable:
    return Executable(localize(DataParallel()(train_step(LOSS, Adam())), Mesh(dp=6)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_a_number_that_gives_no_time_is_refused_by_its_name(place: Place) -> None:
    for value in (nan, inf, -inf, -1.0, 1e-300, 1e-37, 1e37, 1e308, 5e-324):
        with pytest.raises(HardwareFileError, match=str(place[-1])) as refused:
            hardware(place, value)
        assert len(str(refused.value)) < 300


@pytest.mark.takes_seconds
@pytest.mark.sampled(34)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_a_number_that_is_taken_gives_finite_times(place: Place) -> None:
    for value in (0.0, SMALLEST, 1e-9, 1e9, LARGEST):
        try:
            found = hardware(place, value)
        except HardwareFileError:
            continue
        with warnings.catch_warnings(action="error"):
            assert isfinite(simulate(program(), found).makespan_seconds)
