"""`MixedHardware`: two kinds of nodes as one hardware, side by side in one network or with a link between two sites.

    mixed(Hardware.preset("dgx-a100:4"), Hardware.preset("dgx-h100:4"))
    mixed(Hardware.preset("dgx-h100:4"), Hardware.preset("dgx-h100:8"), across=Across(10e9 / 8))

The ranks of the first part come first.  Inside a part everything is as in that hardware.  A message from one part to the
other leaves over the outermost links of the one and arrives over those of the other: it is as fast as the slower of the
two, and as late as the later.  With a link across it goes over that link, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from parallelism.hardware import fields as checked
from parallelism.hardware.hardware import Channel, Hardware, LinkPath
from parallelism.hardware.links import Link
from parallelism.hardware.software import Software

ACROSS = "across"
"""The name of the link between two sites."""


class Across(NamedTuple):
    """The one link between two sites: all that goes in a direction has its bandwidth together."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    """The latency of the link across, in addition to that of the outermost links."""


@dataclass(frozen=True, repr=False)
class MixedHardware(Hardware):
    """Two parts, each a `Hardware`; `mixed` makes it.

    Its rates of flops are the means over all devices, by which the use of the whole is told; nothing is priced by them.
    Its levels of links are those of the first part, those of the second, and the link across.

    ``lanes``: the link across is dealt to so many devices of a part that send at once, each with an even part of the
    bandwidth; a device at place p of its part has lane ``p % lanes``.  That is what each has if as many send equally much
    at the same time, as the devices of a stage do.

    `HardwareFileError` and checks of single fields are those of the parts.  ``ValueError`` for parts with faults or
    stragglers, and where messages hold their ends.
    """

    parts: tuple[Hardware, ...] = field(default=())
    across: Across | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if len(self.parts) != 2 or any(isinstance(part, MixedHardware) for part in self.parts):
            raise ValueError(f"a mixed hardware has two parts of one kind each; got {len(self.parts)}")
        for part in self.parts:
            if part.faults or part.stragglers or part.placement:
                raise ValueError(
                    "each part of a mixed hardware must be whole, with its devices in order; "
                    f"{part.name} has faults, stragglers or a placement"
                )
            if part.message_overhead_seconds or part.message_overhead_seconds_per_byte:
                raise ValueError(
                    f"messages hold their ends on {part.name}, which is not modelled between two parts"
                )
        if self.faults or self.stragglers or self.placement:
            raise ValueError("faults, stragglers and placements of a mixed hardware are not modelled")
        checked.check(self, lanes=lambda name, value: checked.whole_number(name, value, least=1))

    # -- where a rank is -----------------------------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        """The number of devices of both parts together."""
        return sum(part.devices for part in self.parts)

    @property
    def ranks(self) -> int:
        """As many as there are devices."""
        return self.devices

    def number_of_part(self, rank: int) -> int:
        """The number of the part that a rank is in.  ``ValueError`` if it has no place."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"{self.name} has places for ranks 0 to {self.ranks - 1}, got rank {rank}")
        return int(rank >= self.parts[0].devices)

    def place(self, rank: int) -> int:
        """The place of a rank in its part."""
        return rank - self.first_ranks[self.number_of_part(rank)]

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each part."""
        return 0, self.parts[0].devices

    def part_of_group(self, ranks: Sequence[int]) -> int | None:
        """The number of the part that all of these ranks are in; None if they are in both."""
        numbers = {self.number_of_part(rank) for rank in ranks}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def labels(self) -> tuple[str, str]:
        """The names of the parts, with the numbers of devices where the names are equal."""
        first, second = self.parts
        if first.name != second.name:
            return first.name, second.name
        return f"{first.devices} of {first.name}", f"{second.devices} of {second.name}"

    # -- links ---------------------------------------------------------------------------------------------------------

    def first_level(self, part: int) -> int:
        """The level that is the innermost one of a part."""
        return 0 if part == 0 else len(self.parts[0].links)

    def level(self, source: int, target: int) -> int:
        """The level at which two ranks meet; of two in different parts the one that a message is slowest on."""
        part = self.part_of_group((source, target))
        if part is not None:
            return self.first_level(part) + self.parts[part].level(self.place(source), self.place(target))
        return min(self._crossed, key=lambda level: self.links[level].message_bytes_per_second)

    def path(self, source: int, target: int) -> LinkPath:
        """The way of a message from one rank to another."""
        part = self.part_of_group((source, target))
        if part is None:
            return self._path_across(source, target)
        first = self.first_level(part)
        found = self.parts[part].path(self.place(source), self.place(target))
        channels = tuple((first + level, fault, number) for level, fault, number in found.channels)
        return found._replace(channels=channels, level=None if found.level is None else first + found.level)

    def _path_across(self, source: int, target: int) -> LinkPath:
        links = [self.links[level] for level in self._crossed]
        latency = max(link.latency_seconds for link in links[:2]) + sum(
            link.latency_seconds for link in links[2:]
        )
        channels = [*self._port(source, into=False), *self._port(target, into=True)]
        if self.across is not None:
            lane = 2 * (self.place(source) % self.lanes) + self.number_of_part(source)
            channels.append((len(self.links) - 1, -1, lane))
        return LinkPath(
            latency,
            min(link.message_bytes_per_second for link in links),
            tuple(channels),
            self.level(source, target),
        )

    def _port(self, rank: int, *, into: bool) -> list[Channel]:
        """The channel over which a message leaves the part of a rank, or comes ``into`` it; none where the outermost
        links have no ports."""
        number = self.number_of_part(rank)
        part, place = self.parts[number], self.place(rank)
        link = part.links[-1]
        inside = part.inside(len(part.links) - 1)
        if link.shape != "switch":
            return []
        ports = link.ports or inside
        port = 2 * (place // inside * ports + place % inside * ports // inside)
        return [(self.first_level(number) + len(part.links) - 1, -1, port + into)]

    @cached_property
    def _crossed(self) -> tuple[int, ...]:
        """The levels that a message from part to part crosses: the outermost of both parts, and the link across."""
        ends = len(self.parts[0].links), len(self.parts[0].links) + len(self.parts[1].links)
        return ends[0] - 1, ends[1] - 1, *range(ends[1], len(self.links))

    def dealt(self, lanes: int) -> MixedHardware:
        """The same with the link across dealt to so many devices."""
        return mixed(*self.parts, across=self.across, lanes=lanes)

    @property
    def is_alike(self) -> bool:
        """Whether the software of both parts runs programs with the same ops."""
        return len({Software.of(part) for part in self.parts}) == 1

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts))

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in self.parts)


def mixed(
    first: Hardware, second: Hardware, *, across: Across | None = None, lanes: int = 1
) -> MixedHardware:
    """Two parts as one hardware, with the ``across`` between them, if they are at two sites.

    >>> both = mixed(Hardware.preset("dgx-a100:2"), Hardware.preset("dgx-h100:1"))
    >>> both.devices, both.number_of_part(15), both.number_of_part(16), both.place(16)
    (24, 0, 1, 0)
    >>> both.path(0, 16).bytes_per_second == Hardware.preset("dgx-a100:2").path(0, 8).bytes_per_second
    True
    """
    parts = first, second
    devices = [part.devices for part in parts]
    rates = {}
    for dtype in first.flops_per_second:
        if dtype in second.flops_per_second:
            rates[dtype] = sum(part.devices * part.flops_per_second[dtype] for part in parts) / sum(devices)
    if not rates:
        raise ValueError(f"{first.name} and {second.name} must have rates of at least one dtype in common")
    links = (*first.links, *second.links)
    if across is not None:
        checked.bandwidth("across.bytes_per_second", across.bytes_per_second)
        checked.seconds("across.latency_seconds", across.latency_seconds)
        links += (Link(ACROSS, 2, across.latency_seconds, across.bytes_per_second / lanes),)
    return MixedHardware(
        " and ".join(f"{count} of {part.name}" for count, part in zip(devices, parts, strict=True)),
        checked.Table(rates),
        min(part.memory_bytes for part in parts),
        min(part.memory_bytes_per_second for part in parts),
        links,
        first.host,
        fused=first.fused,
        overlapping=first.overlapping,
        gradient_buffers=first.gradient_buffers,
        fully_sharded=first.fully_sharded,
        stack=", ".join(dict.fromkeys(part.stack for part in parts if part.stack)),
        parts=parts,
        across=across,
        lanes=lanes,
    )
