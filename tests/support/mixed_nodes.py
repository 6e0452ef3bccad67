"""Two kinds of small nodes, of which one computes three times as fast, and its links are twice as fast."""

from dataclasses import replace

from parallelism.hardware import Across, Hardware, HostLink, Link, mixed

SLOW = Hardware(
    "slow", {"float64": 2e9, "float32": 2e9}, 1e9, 1e12,
    (Link("inside", 2, 2e-6, 4e9), Link("network", 2, 5e-6, 1e9)), HostLink(1e-5, 1e10), kernel_launch_seconds=1e-6)
"""Two nodes of two devices."""
FAST = replace(
    SLOW, name="fast", flops_per_second={"float64": 6e9, "float32": 6e9}, memory_bytes=2e9,
    links=(Link("inside", 2, 1e-6, 8e9), Link("network", 2, 4e-6, 2e9)))
FUSED = replace(FAST, name="fused", fused="epilogues", overlapping=True, collective_share=0.25)
"""Software that runs programs with other ops."""


def both(first=SLOW, second=FAST, rate=None, lanes=1):
    """The two beside each other; with a ``rate`` of bytes per second at two sites."""
    return mixed(first, second, across=None if rate is None else Across(rate, 1e-4), lanes=lanes)
