"""A `Hardware` as a table: in the terminal and in a notebook."""

from __future__ import annotations

from math import prod
from textwrap import wrap
from typing import TYPE_CHECKING

from parallelism.display import WIDTH, given_seconds
from parallelism.display.markup import facts, figure
from parallelism.display.quantities import given
from parallelism.hardware.files import presets, read_preset

if TYPE_CHECKING:
    from parallelism.hardware.hardware import Hardware
    from parallelism.hardware.kernels import Kernel
    from parallelism.hardware.links import Link
    from parallelism.hardware.rates import Reached

Row = tuple[str, str]


def rows(hardware: Hardware) -> list[Row]:
    """Each part of a hardware: its name and its description in words."""
    rates = ", ".join(f"{name} {given(rate)}" for name, rate in hardware.flops_per_second.items())
    parts = [
        ("devices", _devices(hardware)),
        ("flop/s", rates),
        (
            "reached",
            _reached(hardware.flops_efficiency, hardware.flops_ramp_seconds)
            + "".join(f"; {name} {part:.0%}" for name, part in hardware.flops_efficiencies.items()),
        ),
        *_products(hardware),
        ("memory", f"{given(hardware.memory_bytes)}B at {given(hardware.memory_bytes_per_second)}B/s"),
        ("reached", _reached(hardware.memory_efficiency, hardware.memory_ramp_seconds)),
        *[("reserve", hardware.reserve.text) for _ in range(bool(hardware.reserve))],
        *([] if hardware.power is None else [("power", hardware.power.text)]),
        ("launch", given_seconds(hardware.kernel_launch_seconds)),
        *[
            (name, given_seconds(seconds))
            for name, seconds in (
                ("issue", hardware.issue_seconds),
                ("message", hardware.message_overhead_seconds),
            )
            if seconds
        ],
        *[
            (
                "",
                f"{given_seconds(hardware.message_overhead_seconds_per_byte * 2**20)} for each MiB of a message",
            )
            for _ in range(bool(hardware.message_overhead_seconds_per_byte))
        ],
        *_kernels(hardware),
        *[("stack", hardware.stack) for _ in range(bool(hardware.stack))],
        *[
            (
                "fused",
                "chains of elementwise ops run as one"
                + ", without row reductions" * isinstance(hardware.fused, str)
                + ", and products add their biases" * (hardware.fused == "epilogues"),
            )
            for _ in range(bool(hardware.fused))
        ],
        *[
            ("beside", f"a collective takes {hardware.collective_share:.0%} of the device from compute")
            for _ in range(bool(hardware.collective_share))
        ],
        *[
            ("overlapping", "collectives of a backward run beside products")
            for _ in range(hardware.overlapping)
        ],
        *[
            ("buffers", "gradients of a single microbatch are added to buffers, too")
            for _ in range(hardware.gradient_buffers)
        ],
    ]
    unit = "devices"
    for link in hardware.links:
        parts.append((link.name, _joined(link, unit)))
        if link.reached is not None:
            parts.append(("", _reached_on(link.reached)))
        for what, pieces in (("", link.pieces), ("collectives ", link.collective_pieces)):
            parts += [
                (
                    "",
                    f"{what}from {given(piece.from_bytes)}B on: {given_seconds(piece.latency_seconds)}, "
                    f"{given(piece.bytes_per_second)}B/s",
                )
                for piece in pieces
            ]
        unit = "groups of those"
    host = hardware.host
    parts.append(("host", f"{given_seconds(host.latency_seconds)}, {given(host.bytes_per_second)}B/s"))
    if hardware.memory_overlap < 1:
        place = next(i for i, part in enumerate(parts) if part[0] == "launch")
        behind = f"{hardware.memory_overlap:.0%} of the shorter of flops and memory is behind the longer"
        parts.insert(place, ("", behind))
    if hardware.collective_bytes_per_second:
        rates = ", ".join(
            f"{name} {given(rate)}B/s" for name, rate in hardware.collective_bytes_per_second.items()
        )
        parts.append(("beside", rates))
    if hardware.placement:
        more = ", ..." * (len(hardware.placement) > 16)
        parts.append(("ranks at", ", ".join(map(str, hardware.placement[:16])) + more))
    parts += [
        ("slow", f"rank {slow.rank} takes {slow.factor:g} times as long") for slow in hardware.stragglers
    ]
    for fault in hardware.faults:
        source, target = ("any" if end is None else str(end) for end in (fault.source, fault.target))
        on = "" if fault.level is None else f" on {fault.level}"
        parts.append(
            (
                "fault",
                f"{source} to {target}{on}: {given_seconds(fault.delay_seconds)} later, "
                f"{fault.bandwidth_factor:g} of the bandwidth",
            )
        )
    return parts


def _devices(hardware: Hardware) -> str:
    """How many, in which groups, and how to ask for another number of groups of a preset."""
    *inner, outer = hardware.links
    if not inner:
        return f"{hardware.devices}"
    groups = prod(outer.extents)
    text = f"{hardware.devices}: {groups} groups on {outer.name}, each of {hardware.devices // groups} on {inner[-1].name}"
    if hardware.name not in presets() or read_preset(hardware.name)["links"][-1]["extents"] != groups:
        return text
    return f"{text}, the largest that is described; {hardware.name}:4 has 4 groups"


def _reached(efficiency: float, ramp_seconds: float) -> str:
    short = f", {efficiency * 0.5**0.5:.0%} in those of {given_seconds(ramp_seconds)}" if ramp_seconds else ""
    return f"{efficiency:.0%} of that in large pieces{short}"


def _products(hardware: Hardware) -> list[Row]:
    if hardware.products is None:
        return []
    tiles = ", ".join(f"{rows}x{columns}" for rows, columns in hardware.products.tiles)
    square = ", ".join(
        f"{hardware.efficiency() * hardware.products.reached((1, n, n, n)):.0%} {n} wide"
        for n in (1024, 4096, 16384)
    )
    return [("products", f"{hardware.products.units} tiles at once, of {tiles}: {square}")]


def _kernels(hardware: Hardware) -> list[Row]:
    """What single kernels take: those of attention by the width of a head, then all others in one line."""
    found = []
    for name, kernel in hardware.kernels.items():
        rates = ", ".join(
            f"{rate.efficiency:.0%} of the peak with heads of {rate.width}{', causal' * rate.causal}, half of that "
            f"over {rate.half_length:.0f} keys"
            for rate in kernel.rates
        )
        found += [("kernels", f"{name}: {rates}")] * bool(rates)
    words = [_kernel(name, kernel) for name, kernel in hardware.kernels.items() if not kernel.rates]
    return [*found, ("kernels", ", ".join(words))] if words else found


def _kernel(name: str, kernel: Kernel) -> str:
    several = "" if kernel.launches == 1 else f" as {kernel.launches:.3g} kernels"
    others = f", {kernel.others:.3g} times those of other dtypes behind it" if kernel.others else ""
    waits = f", then {given_seconds(kernel.host_seconds)} of the host" if kernel.host_seconds else ""
    return f"{name} {kernel.times:.3g} times its bytes{several}{others}{waits}"


def _reached_on(reached: Reached) -> str:
    rates = [
        ("messages", reached.message_bytes_per_second),
        ("collectives", reached.bus_bytes_per_second),
        *((f"{name} in the switch", rate) for name, rate in reached.in_switch_bytes_per_second.items()),
    ]
    base = [f"{given_seconds(reached.base_seconds)} before the first byte"] if reached.base_seconds else []
    return "reached: " + ", ".join(
        [*(f"{name} {given(rate)}B/s" for name, rate in rates if rate is not None), *base]
    )


def text(hardware: Hardware) -> str:
    """The table for a terminal."""
    lines_by_name = rows(hardware)
    width = max(len(name) for name, _ in lines_by_name)
    lines = [_head(hardware)]
    for name, words in lines_by_name:
        first, *rest = wrap(words, WIDTH - width - 4, break_long_words=False) or [""]
        lines += [f"  {name:{width}}  {first}", *(f"{'':{width + 4}}{line}" for line in rest)]
    return "\n".join(lines)


def html(hardware: Hardware) -> str:
    """The table for a notebook; names from outside are escaped."""
    return figure(facts(rows(hardware)), title=_head(hardware))


def _head(hardware: Hardware) -> str:
    return f"{hardware.name}: {hardware.title}" if hardware.title else hardware.name


def _joined(link: Link, unit: str) -> str:
    extents = "x".join(map(str, link.extents))
    ports = "" if link.ports is None else f", {link.ports} port{'s' * (link.ports > 1)} for each"
    shape = f"{'striped ' * link.striped}{link.shape.replace('_', ' ')}"
    return (
        f"{extents} {unit}, {shape}: {given_seconds(link.latency_seconds)}, "
        f"{given(link.bytes_per_second)}B/s{ports}"
    )
