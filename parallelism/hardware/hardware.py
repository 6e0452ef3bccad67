"""A cluster that need not exist, as a value: how fast its devices compute, and what joins them.

    Hardware.preset("dgx-h100")             one of the presets; "dgx-h100:4" is four nodes of it, "tpu-v4:4x4x8" a slice
    Hardware.preset("dgx-h100+megatron-h100")       ... with what a software reaches (`parallelism.hardware.stacks`)
    Hardware.load("ours.toml")              your own, in TOML or JSON
    Hardware.of_host()                      this machine, if it was calibrated
    hardware.slow(rank=3, factor=1.5)       the same with a straggler
    hardware.fault(source=0, target=1, bandwidth_factor=0.5)      ... with a link at half its bandwidth
    hardware.placed_by(mesh, ("pp", "dp", "tp"))                  ... with the ranks laid onto it in another order

Its devices have places, 0 to devices-1: the innermost level of links joins neighbours, the next level joins groups of
those, and so on.  Rank r is at place r unless ``placement`` says otherwise.  `parallelism.cost` gives the seconds that
work takes on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import inf, prod
from operator import mul
from os import PathLike
from typing import Any, NamedTuple

from parallelism.hardware import fields as checked, files as hardware_files, table as hardware_table
from parallelism.hardware.degradations import LinkFault, Straggler
from parallelism.hardware.files import HardwareFileError
from parallelism.hardware.host import VARIABLE, host_file, is_calibrated
from parallelism.hardware.kernels import AttentionRate, Kernel, checked_kernels
from parallelism.hardware.links import HostLink, Link, Piece
from parallelism.hardware.power import Power, checked_power
from parallelism.hardware.rates import Products, Reached, by_collective
from parallelism.hardware.reserve import NO_RESERVE, Reserve, checked_reserve
from parallelism.hardware.stacks import PLAIN, on_stack, refuse_stack, split_name, stack_file
from parallelism.hardware.validation import Validation
from parallelism.mesh import Axes, Mesh

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float4": 0.5,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "int4": 0.5,
    "complex128": 16,
    "complex64": 8,
}
"""The dtypes that a rate can be given for, and the bytes of a number.  NumPy has not all of them."""

MOST_DEVICES = 1 << 24

_SECONDS = (
    "kernel_launch_seconds",
    "flops_ramp_seconds",
    "memory_ramp_seconds",
    "issue_seconds",
    "step_seconds",
    "row_seconds",
    "request_seconds",
    "message_overhead_seconds",
    "message_overhead_seconds_per_byte",
)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": checked.text,
    **dict.fromkeys(_SECONDS, checked.seconds),
    **dict.fromkeys(("flops_efficiency", "memory_efficiency"), checked.share),
    **dict.fromkeys(("memory_overlap", "collective_share"), partial(checked.number, most=1)),
    "flops_per_second": partial(
        checked.numbers, names=ITEMSIZE, of="of flops a second", what="rates by dtype", least=1
    ),
    "memory_bytes": partial(checked.number, of="of bytes", above=0),
    "memory_bytes_per_second": checked.bandwidth,
    "collective_bytes_per_second": by_collective,
    "links": partial(checked.each, kind=Link),
    "stragglers": partial(checked.each, kind=Straggler),
    "faults": partial(checked.each, kind=LinkFault),
    "title": partial(checked.text_or_none, most=200),
    "sources": partial(checked.texts, most=500),
    "flops_efficiencies": partial(
        checked.numbers, names=ITEMSIZE, most=1, what="parts of the rates by dtype"
    ),
    "stack": checked.text_or_none,
    "kernels": checked_kernels,
    "validation": partial(checked.each, kind=Validation),
    "fused": partial(checked.switch, others=("elementwise", "epilogues")),
    **dict.fromkeys(("overlapping", "gradient_buffers", "fully_sharded"), checked.switch),
    "reserve": checked_reserve,
    "power": checked_power,
}


def rate_name(dtype: str) -> str:
    """The name under which hardware has the rate of a dtype: its own, but ``float8`` for every format of 8 bits, and
    ``float4`` for that of 4."""
    return dtype.partition("_")[0] if dtype.startswith(("float8_", "float4_")) else dtype


_PARTS: hardware_files.Parts = {
    "links": [Link],
    "pieces": [Piece],
    "collective_pieces": [Piece],
    "host": HostLink,
    "stragglers": [Straggler],
    "faults": [LinkFault],
    "products": Products,
    "reached": Reached,
    "kernels": {"": Kernel},
    "rates": [AttentionRate],
    "validation": [Validation],
    "reserve": Reserve,
    "power": Power,
}
"""The descriptions in a file: a kind, a list of one kind, or a table of one kind, by the name of the field."""

Channel = tuple[int, int, int]
"""What messages share: (level, -1, port or link of that level), or (level, i, 0) for a link that fault i slows."""


class LinkPath(NamedTuple):
    """The way of a message: its latency, what it carries alone, its channels, and the level of links (None: local)."""

    latency_seconds: float
    bytes_per_second: float
    channels: tuple[Channel, ...]
    level: int | None


@dataclass(frozen=True)
class Hardware:
    """Devices that are all alike, and the levels of links that join them, innermost first.

    A piece of compute reaches ``efficiency * sqrt(t / (t + ramp_seconds))`` of the rate, where t is what it takes at
    that rate; so for flops and for memory.  ``memory_overlap`` is what part of the shorter of the two goes on behind
    the longer.  ``kernel_launch_seconds`` comes on top.  A collective of S bytes takes, beside its messages, S over
    ``collective_bytes_per_second`` of its name, where that is given.  ``placement[rank]`` is a place; empty: rank r is
    at place r.  ``sources`` says of a field where its number is from.

    What software reaches is in fields of its own.  ``flops_efficiencies`` are those of single dtypes.  With
    ``products``, products of matrices reach ``efficiency`` times what their shape allows, without a ramp.  An op takes
    at least ``issue_seconds``: issuing it takes as long.
    An engine that serves takes ``step_seconds`` on the host for each step, and ``row_seconds`` for each token that it
    chooses in it; a request is on its way for ``request_seconds``.  A
    message holds its sender and its receiver for ``message_overhead_seconds`` each, and
    ``message_overhead_seconds_per_byte`` more where they copy it.  A collective
    takes ``collective_share`` of the device from the compute beside it.  With ``fused``, programs run there with chains
    of elementwise ops as one (`parallelism.transforms.Fused`); "elementwise": without row reductions in them;
    "epilogues": so, and products add the bias that follows them.  With ``overlapping``, a collective that the gradient
    of one operand of a product needs runs beside the product that makes the gradient of the other one.  With
    ``gradient_buffers``, a stage adds gradients up in buffers that are there
    during the whole step, also those of a single microbatch.  ``fully_sharded``: the software shares out parameters over
    replicas, as FSDP does, and a search of plans tries it.  ``kernels`` has by the names of ops what single kernels
    take.  ``stack`` names the software that these numbers are of, and ``validation`` has the measurements that seconds
    by them were compared with.  ``reserve`` is the memory that tensors cannot use: plans leave it free.
    ``power`` is what devices and their nodes draw; None: it is not known.

    Frozen, hashable, picklable.  Raises ``ValueError`` or ``TypeError``, naming the field.
    """

    name: str
    flops_per_second: Mapping[str, float]
    """By dtype; the first is the rate of work without a dtype."""
    memory_bytes: float
    memory_bytes_per_second: float
    links: tuple[Link, ...]
    host: HostLink
    kernel_launch_seconds: float = 0.0
    flops_efficiency: float = 1.0
    flops_ramp_seconds: float = 0.0
    memory_efficiency: float = 1.0
    memory_ramp_seconds: float = 0.0
    memory_overlap: float = 1.0
    collective_bytes_per_second: Mapping[str, float] = checked.Table({})
    """Bytes per second, by collective, at which a device reduces or rearranges what it received; S divided by it is
    added to the collective's time."""
    placement: tuple[int, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    faults: tuple[LinkFault, ...] = ()
    title: str = ""
    sources: Mapping[str, str] = checked.Table({})
    flops_efficiencies: Mapping[str, float] = checked.Table({})
    products: Products | None = None
    issue_seconds: float = 0.0
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    request_seconds: float = 0.0
    message_overhead_seconds: float = 0.0
    message_overhead_seconds_per_byte: float = 0.0
    collective_share: float = 0.0
    fused: bool | str = False
    overlapping: bool = False
    gradient_buffers: bool = False
    fully_sharded: bool = False
    stack: str = ""
    kernels: Mapping[str, Kernel] = checked.Table({})
    validation: tuple[Validation, ...] = ()
    reserve: Reserve = NO_RESERVE
    power: Power | None = None

    def __post_init__(self) -> None:
        checked.check(self, **_CHECKS)
        if not self.links:
            raise ValueError("links must be at least one Link; got none")
        if not isinstance(self.host, HostLink):
            raise TypeError(f"host must be a HostLink; got {checked.shown(self.host)}")
        if self.products is not None and not isinstance(self.products, Products):
            raise TypeError(f"products must be a Products; got {checked.shown(self.products)}")
        if self.devices > MOST_DEVICES:
            raise ValueError(f"links must join at most {MOST_DEVICES} devices; got {self.devices}")
        for i, (link, inside) in enumerate(zip(self.links, self._insides, strict=True)):
            if (link.ports or 1) > inside:
                raise ValueError(
                    f"links[{i}].ports must be at most the {inside} devices in a unit; got {link.ports}"
                )
        checked.store(self, placement=checked.places(self.placement, self.devices))
        self._check_ranks()

    def _check_ranks(self) -> None:
        named = [(f"stragglers[{i}].rank", straggler.rank) for i, straggler in enumerate(self.stragglers)]
        for i, fault in enumerate(self.faults):
            named += [(f"faults[{i}].source", fault.source or 0), (f"faults[{i}].target", fault.target or 0)]
        names = [link.name for link in self.links]
        for i, fault in enumerate(self.faults):
            if fault.level not in (None, *names):
                raise ValueError(
                    f"faults[{i}].level must be one of {', '.join(names)}; got {checked.shown(fault.level)}"
                )
        for field, rank in named:
            if rank >= self.ranks:
                raise ValueError(f"{field} must be a rank from 0 to {self.ranks - 1}; got {rank}")

    # -- where it comes from -------------------------------------------------------------------------------------------

    presets = staticmethod(hardware_files.presets)

    @classmethod
    @lru_cache(maxsize=64)
    def preset(cls, name: str) -> Hardware:
        """A preset by its name; after a colon the extents of its outermost level, after a plus the name of a stack.

        >>> Hardware.preset("dgx-a100:2").devices
        16
        >>> Hardware.preset("dgx-a100:2+megatron-a100").stack
        'megatron-a100'
        """
        preset, stack = split_name(name)
        if stack:
            plain = cls.preset(preset)
            return plain if stack == PLAIN else on_stack(plain, stack)
        known, colon, extents = name.partition(":")
        if known not in (names := cls.presets()):
            close = hardware_files.meant_preset(known) or f"; there is {', '.join(names)}"
            raise ValueError(f"no hardware {checked.shown(name)}{close}")
        found = hardware_files.build(cls, hardware_files.read_preset(known), known, parts=_PARTS)
        if not colon:
            return found
        sides = extents.lower().split("x")
        if not all(side.isascii() and side.isdigit() and len(side) < 9 for side in sides):
            like = _by(found.links[-1].extents)
            raise ValueError(f"extents of {known} must be like {like}; got {checked.shown(extents)}")
        return found.resized(*map(int, sides))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Hardware:
        """A file, in TOML or JSON.  Raises `HardwareFileError`, a ``ValueError``, that says what is wrong with it."""
        table = hardware_files.read(path)
        refuse_stack(table, path)
        return hardware_files.build(cls, table, path, parts=_PARTS)

    @classmethod
    def of_host(cls, devices: int | None = None) -> Hardware | None:
        """This machine as it was calibrated (`parallelism.hardware.host`); None if it was not.

        Of one level of links it has room for so many ``devices``: they share what there is.  `HardwareFileError` for a
        file that is none.
        """
        path = host_file()
        if path is None or not is_calibrated():
            return None
        try:
            found = cls.load(path)
        except HardwareFileError as error:
            raise HardwareFileError(
                f"{error}; it stands for hardware='host': python -m vcluster calibrate writes it anew, "
                f"{VARIABLE}= does without"
            ) from None
        if (
            devices is not None
            and devices > found.ranks
            and len(found.links) == len(found.links[0].extents) == 1
        ):
            found = found.resized(devices)
        return found

    @classmethod
    def of(cls, hardware: Hardware | str | PathLike[str]) -> Hardware:
        """A hardware as it is given: as itself, as the name of a preset, or as a file.

        Behind a preset and a plus stands a stack or a stack file: ``dgx-h100+ours.toml``.
        """
        if isinstance(hardware, cls):
            return hardware
        if isinstance(hardware, str) and (file := stack_file(hardware)):
            return on_stack(cls.preset(split_name(hardware)[0]), file)
        if isinstance(hardware, str) and not hardware.lower().endswith((".toml", ".json")):
            return cls.preset(hardware)
        if isinstance(hardware, str | PathLike):
            return cls.load(hardware)
        raise TypeError(
            f"hardware must be a Hardware, a preset's name or a file; got {checked.shown(hardware)}"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the hardware as JSON, which `load` reads."""
        hardware_files.write(self, path)

    # -- the same, but -------------------------------------------------------------------------------------------------

    def slow(self, *, rank: int, factor: float) -> Hardware:
        """The same with a straggler: what ``rank`` computes takes ``factor`` times as long; twice is both together."""
        return replace(self, stragglers=(*self.stragglers, Straggler(rank, factor)))

    def fault(
        self,
        *,
        source: int | None = None,
        target: int | None = None,
        delay_seconds: float = 0.0,
        bandwidth_factor: float = 1.0,
        level: str | None = None,
    ) -> Hardware:
        """The same with a `LinkFault` on the way from rank ``source`` to rank ``target`` (None: from or to anyone)."""
        fault = LinkFault(source, target, delay_seconds, bandwidth_factor, level)
        return replace(self, faults=(*self.faults, fault))

    @property
    def port_faults(self) -> tuple[LinkFault, ...]:
        """The faults of single ports."""
        return tuple(fault for fault in self.faults if fault.is_of_port)

    @property
    def path_faults(self) -> tuple[LinkFault, ...]:
        """The faults that are met on any level, and those between two ranks."""
        return tuple(fault for fault in self.faults if not fault.is_of_port)

    def placed(self, placement: Sequence[int]) -> Hardware:
        """This hardware with rank r on device ``placement[r]``; there are no other ranks then."""
        return replace(self, placement=tuple(placement))

    def placed_by(self, mesh: Mesh, order: Sequence[str]) -> Hardware:
        """This hardware, on which the ranks of a mesh lie in an ``order`` of its axes, outermost first.

        Ranks that differ along the last axis of the order alone are neighbours.

        >>> Hardware.preset("dgx-a100").placed_by(Mesh(tp=2, dp=3), ("dp", "tp")).placement
        (0, 2, 4, 1, 3, 5)
        """
        if set(mesh.axes_of(tuple(order))) != set(mesh.axes):
            raise ValueError(f"order must name every axis of {mesh!r}; got {tuple(order)}")
        rank_at = mesh.group(0, tuple(order))
        return self.placed(sorted(range(mesh.size), key=rank_at.__getitem__))

    def resized(self, *extents: int) -> Hardware:
        """The same with other extents of its outermost level: so many nodes, such a slice."""
        *inner, outermost = self.links
        if len(extents) != len(outermost.extents):
            raise ValueError(
                f"extents of {self.name} must be like {_by(outermost.extents)}; got {_by(extents)}"
            )
        return replace(self, links=(*inner, replace(outermost, extents=extents)), placement=())

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return self._insides[-1] * self.links[-1].units

    @property
    def ranks(self) -> int:
        """How many ranks have a place on it."""
        return len(self.placement) or self.devices

    def peak(self, dtype: object = None) -> float:
        """The flops per second in a dtype (None: the first that has a rate).

        ``ValueError`` where there is no rate for it: nothing is guessed.
        """
        if dtype is None:
            return next(iter(self.flops_per_second.values()))
        name = rate_name(str(dtype))
        if name not in self.flops_per_second:
            raise ValueError(
                f"{self.name} has no rate for {name}; it has {', '.join(self.flops_per_second)}: compute in one of "
                "these, or price floats as one of these, where there is a priced_dtype"
            )
        return self.flops_per_second[name]

    def efficiency(self, dtype: object = None) -> float:
        """The part of `peak` that large pieces of work in a dtype reach."""
        if not self.flops_efficiencies:
            return self.flops_efficiency
        name = next(iter(self.flops_per_second)) if dtype is None else rate_name(str(dtype))
        return self.flops_efficiencies.get(name, self.flops_efficiency)

    def slowdown(self, rank: int | None) -> float:
        """The factor by which compute takes longer on a rank: 1 for all but stragglers."""
        return prod((straggler.factor for straggler in self.stragglers if straggler.rank == rank), start=1.0)

    def inside(self, level: int) -> int:
        """How many devices are in a unit that a level joins: 1, then those of a node, and so on."""
        return self._insides[level]

    def place(self, rank: int) -> int:
        """The place of a rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"{self.name} has places for ranks 0 to {self.ranks - 1}, got rank {rank}")
        return self.placement[rank] if self.placement else rank

    def level(self, source: int, target: int) -> int:
        """The level of links at which two ranks meet: an index into `links`."""
        a, b = self.place(source), self.place(target)
        return next(i for i, size in enumerate(self._units) if a // size == b // size)

    def path(self, source: int, target: int) -> LinkPath:
        """The links that a message crosses from one rank to another."""
        if source == target:
            return LinkPath(0.0, inf, (), None)
        level = self.level(source, target)
        link = self.links[level]
        distance, numbers = link.path(self._insides[level], self.place(source), self.place(target))
        channels: list[Channel] = [(level, -1, number) for number in numbers] if link.shared else []
        latency, bandwidth = distance * link.latency_seconds, link.message_bytes_per_second
        for i, fault in enumerate(self.faults):
            if fault.concerns(source, target, link.name):
                if link.shared:
                    channels.append((level, i, 0))
                latency += fault.delay_seconds
                bandwidth = min(bandwidth, fault.bandwidth_factor * link.bytes_per_second)
        return LinkPath(latency, bandwidth, tuple(channels), level)

    def part(self, channel: Channel) -> float:
        """A channel's bandwidth as a fraction of that of its level's links: below 1 only where a fault slows it."""
        return 1.0 if channel[1] < 0 else self.faults[channel[1]].bandwidth_factor

    def spans(self, mesh: Mesh, axes: Axes = None) -> str | None:
        """The name of the outermost level that any group along axes of a mesh meets at; None for groups of one.

        >>> hardware = Hardware.preset("dgx-h100")
        >>> {axis: hardware.spans(Mesh(dp=4, tp=8), axis) for axis in ("dp", "tp")}
        {'dp': 'infiniband', 'tp': 'nvlink'}
        """
        levels = [self.level(group[0], rank) for group in mesh.groups(axes) for rank in group[1:]]
        return self.links[max(levels)].name if levels else None

    @cached_property
    def _insides(self) -> tuple[int, ...]:
        """By level, the devices in a unit that it joins."""
        return tuple(accumulate((link.units for link in self.links[:-1]), mul, initial=1))

    @cached_property
    def _units(self) -> tuple[int, ...]:
        """By level, the devices that it joins."""
        return *self._insides[1:], self.devices

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        return f"<Hardware {self.name}: {self.devices} devices; print it>"

    def __str__(self) -> str:
        return hardware_table.text(self)

    def _repr_html_(self) -> str:
        return hardware_table.html(self)


def _by(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))
