"""The preset that a measured GPU is one of; for any other one a hardware by the best rates that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallelism.hardware import Hardware
from vcluster.calibration.gpu.items import COPIES, PRODUCTS
from vcluster.calibration.gpu.measuring import Tables

KNOWN = (
    (("H100", "PCIe"), "h100-pcie-node"),
    (("H100",), "dgx-h100"),
    (("H200",), "h200-node"),
    (("GB300",), "gb300-nvl72"),
    (("B300",), "b300-node"),
    (("GB200",), "gb200-nvl72"),
    (("B200",), "b200-node"),
    (("A100", "PCIe"), "a100-pcie-node"),
    (("A100", "40GB"), "dgx-a100-40"),
    (("A100",), "dgx-a100"),
    (("L40S",), "l40s-node"),
    (("RTX PRO 6000", "Server"), "rtx-pro-6000-node"),
    (("V100", "16GB"), "dgx-1-v100-16"),
    (("V100",), "dgx-1-v100"),
)
"""Words in the name that the driver gives a GPU, and its preset; the first that has all of them."""
UNKNOWN = "laptop"
"""The preset whose links are taken where no preset has this GPU."""
_ROOM = 4.0
"""How many times the best rate is assumed at first, so that what is reached of it is a part."""


def preset_of(gpu: str) -> str | None:
    """The preset of a GPU by the name that the driver gives it; None if there is none.

    >>> preset_of("NVIDIA H100 80GB HBM3"), preset_of("NVIDIA GeForce RTX 4090")
    ('dgx-h100', None)
    """
    for words, preset in KNOWN:
        if all(word.lower() in gpu.lower() for word in words):
            return preset
    return None


def base_of(tables: Tables) -> tuple[str, bool, Hardware]:
    """The name of the preset, whether it is that of the GPU, and a hardware to fit to: one node of it.

    If there is no preset of the GPU, the rates of that hardware are some times the best that were measured.
    """
    preset = preset_of(tables.machine["gpu"])
    if preset is not None:
        return preset, True, one_node(Hardware.preset(preset))
    rates: dict[str, float] = {}
    for row in tables.measured(PRODUCTS):
        rates[row["dtype"]] = max(rates.get(row["dtype"], 0.0), _ROOM * row["flops_per_second"])
    if not rates:
        raise ValueError("no product was measured; a stack needs some")
    copied = [row["bytes_per_second"] for row in tables.measured(COPIES, way="device")]
    first = ["float32"] if "float32" in rates else []
    ordered = {name: rates[name] for name in [*first, *rates]}
    changed: dict[str, Any] = {
        "flops_per_second": ordered,
        "flops_efficiency": 1.0,
        "flops_efficiencies": {},
        "flops_ramp_seconds": 0.0,
        "memory_efficiency": 1.0,
        "memory_ramp_seconds": 0.0,
        "products": None,
    }
    if copied:
        changed["memory_bytes_per_second"] = 2 * _ROOM * max(copied)
    if memory := tables.machine.get("memory_bytes"):
        changed["memory_bytes"] = float(memory)
    return UNKNOWN, False, one_node(replace(Hardware.preset(UNKNOWN), **changed))


def one_node(hardware: Hardware) -> Hardware:
    """A hardware with one unit of its outermost level, if that joins nodes."""
    if len(hardware.links) < 2:
        return hardware
    return hardware.resized(*(1 for _ in hardware.links[-1].extents))


def folded(hardware: Hardware) -> Mapping[str, Any]:
    """The rates that are reached, in place of those that were assumed and what is reached of them."""
    rates = {name: rate * hardware.efficiency(name) for name, rate in hardware.flops_per_second.items()}
    return {
        "flops_per_second": rates,
        "flops_efficiency": 1.0,
        "memory_bytes_per_second": hardware.memory_bytes_per_second * hardware.memory_efficiency,
        "memory_efficiency": 1.0,
        "memory_bytes": hardware.memory_bytes,
    }
