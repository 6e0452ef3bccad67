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
    parts = [("devices", _devices(hardware)), *_compute(hardware), *_memory(hardware)]
    parts += [*_starts(hardware), *_kernels(hardware), *_software(hardware)]
    unit = "devices"
    for link in hardware.links:
        parts += _link(link, unit)
        unit = "groups of those"
    host = hardware.host
    parts.append(("host", f"{given_seconds(host.latency_seconds)}, {given(host.bytes_per_second)}B/s"))
    return [*parts, *_beside(hardware), *_places(hardware), *_disturbances(hardware)]


def _compute(hardware: Hardware) -> list[Row]:
    rates = ", ".join(f"{name} {given(rate)}" for name, rate in hardware.flops_per_second.items())
    reached = _reached(hardware.flops_efficiency, hardware.flops_ramp_seconds)
    for name, part in hardware.flops_efficiencies.items():
        reached += f"; {name} {part:.0%}"
    return [("flop/s", rates), ("reached", reached), *_products(hardware)]


def _memory(hardware: Hardware) -> list[Row]:
    size = f"{given(hardware.memory_bytes)}B at {given(hardware.memory_bytes_per_second)}B/s"
    parts = [
        ("memory", size),
        ("reached", _reached(hardware.memory_efficiency, hardware.memory_ramp_seconds)),
    ]
    if hardware.reserve:
        parts.append(("reserve", hardware.reserve.text))
    if hardware.power is not None:
        parts.append(("power", hardware.power.text))
    if hardware.memory_overlap < 1:
        behind = f"{hardware.memory_overlap:.0%} of the shorter of flops and memory is behind the longer"
        parts.append(("", behind))
    return parts


def _starts(hardware: Hardware) -> list[Row]:
    """What kernels and messages take before they begin."""
    parts = [("launch", given_seconds(hardware.kernel_launch_seconds))]
    if hardware.issue_seconds:
        parts.append(("issue", given_seconds(hardware.issue_seconds)))
    if hardware.message_overhead_seconds:
        parts.append(("message", given_seconds(hardware.message_overhead_seconds)))
    if hardware.message_overhead_seconds_per_byte:
        of_a_mebibyte = given_seconds(hardware.message_overhead_seconds_per_byte * 2**20)
        parts.append(("", f"{of_a_mebibyte} for each MiB of a message"))
    return parts


def _software(hardware: Hardware) -> list[Row]:
    """What the software of a stack does."""
    parts = []
    if hardware.stack:
        parts.append(("stack", hardware.stack))
    if hardware.fused:
        fused = "chains of elementwise ops run as one"
        if isinstance(hardware.fused, str):
            fused += ", without row reductions"
        if hardware.fused == "epilogues":
            fused += ", and products add their biases"
        parts.append(("fused", fused))
    if hardware.collective_share:
        share = f"a collective takes {hardware.collective_share:.0%} of the device from compute"
        parts.append(("beside", share))
    if hardware.overlapping:
        parts.append(("overlapping", "collectives of a backward run beside products"))
    if hardware.gradient_buffers:
        parts.append(("buffers", "gradients of a single microbatch are added to buffers, too"))
    if hardware.fully_sharded:
        parts.append(("FSDP", "parameters are shared out over replicas, and gathered block by block"))
    return parts


def _link(link: Link, unit: str) -> list[Row]:
    """A link that joins so many units, what is reached on it, and its pieces by size."""
    parts = [(link.name, _joined(link, unit))]
    if link.reached is not None:
        parts.append(("", _reached_on(link.reached)))
    for what, pieces in (("", link.pieces), ("collectives ", link.collective_pieces)):
        for piece in pieces:
            speed = f"{given_seconds(piece.latency_seconds)}, {given(piece.bytes_per_second)}B/s"
            parts.append(("", f"{what}from {given(piece.from_bytes)}B on: {speed}"))
    return parts


def _beside(hardware: Hardware) -> list[Row]:
    """How fast collectives are beside compute."""
    rates = [f"{name} {given(rate)}B/s" for name, rate in hardware.collective_bytes_per_second.items()]
    return [("beside", ", ".join(rates))] if rates else []


def _places(hardware: Hardware) -> list[Row]:
    if not hardware.placement:
        return []
    more = ", ..." if len(hardware.placement) > 16 else ""
    return [("ranks at", ", ".join(map(str, hardware.placement[:16])) + more)]


def _disturbances(hardware: Hardware) -> list[Row]:
    """Slow ranks and faults of links."""
    parts = [
        ("slow", f"rank {slow.rank} takes {slow.factor:g} times as long") for slow in hardware.stragglers
    ]
    for fault in hardware.faults:
        source = "any" if fault.source is None else str(fault.source)
        target = "any" if fault.target is None else str(fault.target)
        on = "" if fault.level is None else f" on {fault.level}"
        delay = f"{given_seconds(fault.delay_seconds)} later, {fault.bandwidth_factor:g} of the bandwidth"
        parts.append(("fault", f"{source} to {target}{on}: {delay}"))
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
    lines = wrap(_head(hardware), WIDTH, break_long_words=False, break_on_hyphens=False)
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
