"""A `Hardware` as a table: in the terminal and in a notebook."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelism.hardware.hardware import Hardware
    from parallelism.hardware.links import Link

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

WIDTH = 80
"""Of a terminal."""

Row = tuple[str, str]


def rows(hardware: Hardware) -> list[Row]:
    """What is said of each part, in words."""
    rates = ", ".join(f"{name} {quantity(rate)}" for name, rate in hardware.flops_per_second.items())
    told = [
        ("devices", f"{hardware.devices}"),
        ("flop/s", rates),
        ("reached", _reached(hardware.flops_efficiency, hardware.flops_ramp_seconds)),
        ("memory", f"{quantity(hardware.memory_bytes)}B at {quantity(hardware.memory_bytes_per_second)}B/s"),
        ("reached", _reached(hardware.memory_efficiency, hardware.memory_ramp_seconds)),
        ("launch", duration(hardware.kernel_launch_seconds)),
    ]
    unit = "devices"
    for link in hardware.links:
        told.append((link.name, _joined(link, unit)))
        for what, pieces in (("", link.pieces), ("collectives ", link.collective_pieces)):
            told += [("", f"{what}from {quantity(piece.from_bytes)}B on: {duration(piece.latency_seconds)}, "
                          f"{quantity(piece.bytes_per_second)}B/s") for piece in pieces]
        unit = "groups of those"
    host = hardware.host
    told.append(("host", f"{duration(host.latency_seconds)}, {quantity(host.bytes_per_second)}B/s"))
    if hardware.memory_overlap < 1:
        told.insert(5, ("", f"{hardware.memory_overlap:.0%} of the shorter of flops and memory is behind the longer"))
    if hardware.collective_bytes_per_second:
        rates = ", ".join(f"{name} {quantity(rate)}B/s" for name, rate in hardware.collective_bytes_per_second.items())
        told.append(("beside", rates))
    if hardware.placement:
        places = ", ".join(map(str, hardware.placement[:16])) + ", ..." * (len(hardware.placement) > 16)
        told.append(("ranks at", places))
    told += [("slow", f"rank {slow.rank} takes {slow.factor:g} times as long") for slow in hardware.stragglers]
    for fault in hardware.faults:
        source, target = ("any" if end is None else str(end) for end in (fault.source, fault.target))
        told.append(("fault", f"{source} to {target}: {duration(fault.delay_seconds)} later, "
                              f"{fault.bandwidth_factor:g} of the bandwidth"))
    return told


def _reached(efficiency: float, ramp_seconds: float) -> str:
    short = f", {efficiency * 0.5 ** 0.5:.0%} in those of {duration(ramp_seconds)}" if ramp_seconds else ""
    return f"{efficiency:.0%} of that in large pieces{short}"


def text(hardware: Hardware) -> str:
    """The table for a terminal."""
    told = rows(hardware)
    width = max(len(name) for name, _ in told)
    head = hardware.name + (f": {hardware.title}" if hardware.title else "")
    lines = [head]
    for name, words in told:
        first, *rest = wrap(words, WIDTH - width - 4, break_long_words=False) or [""]
        lines += [f"  {name:{width}}  {first}", *(f"{'':{width + 4}}{line}" for line in rest)]
    return "\n".join(lines)


def html(hardware: Hardware) -> str:
    """The table for a notebook; names from outside are escaped."""
    head = escape(hardware.name + (f": {hardware.title}" if hardware.title else ""))
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>" for name, words in rows(hardware))
    return f"<table><caption>{head}</caption>{cells}</table>"


def quantity(value: float) -> str:
    """A number with three digits and a decimal prefix.

    >>> quantity(3.12e14), quantity(80e9)
    ('312 T', '80 G')
    """
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.3g} "


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> duration(1.9e-6), duration(0.0)
    ('1.9 us', '0 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _joined(link: Link, unit: str) -> str:
    extents = "x".join(map(str, link.extents))
    ports = "" if link.ports is None else f", {link.ports} port{'s' * (link.ports > 1)} for each"
    shape = link.shape.replace("_", " ")
    return (
        f"{extents} {unit}, {shape}: {duration(link.latency_seconds)}, {quantity(link.bytes_per_second)}B/s{ports}"
    )
