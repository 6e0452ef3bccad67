"""One level of links between devices, as a value: which of its channels a message uses, and what they carry.

A level joins *units*: the innermost one devices, the next one what the one below joins (nodes), and so on.

    switch             each unit has ports on a switch; any two talk through a port at either end
    ring, torus        each unit has a link to its two neighbours along every dim, which wraps round; a message goes
                       dim by dim, the shorter way round (of two that are as short, upwards)
    fully_connected    each two units have a link of their own
    memory             the devices copy, each for itself, in memory that they share: messages do not share anything

``bytes_per_second`` is what one such port or link carries in one direction.  What a copy takes is no straight line over
its size: libraries go another way with large arrays, and caches end somewhere.  So a ``memory`` may have `Piece`s, as
SimGrid has them of MPI within a node (Clauss et al., *Single Node On-Line Simulation of MPI Applications with SMPI*,
2011).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.hardware import fields as checked
from parallelism.hardware.rates import Reached
from parallelism.spelling import did_you_mean

MOST_UNITS = 1 << 20
MOST_ROUND = 4096
"""Along a dim of a ring or torus: a message is followed hop by hop."""

SHAPES = ("switch", "ring", "torus", "fully_connected", "memory")


class Uses(NamedTuple):
    """What messages use of a level: how many hops each makes, and that message i goes over channel i of these pairs."""

    distance: Ints
    message: Ints
    channel: Ints


@dataclass(frozen=True)
class Piece:
    """The latency and the rate of messages, or collectives, of at least ``from_bytes``; smaller ones have others."""

    from_bytes: float
    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        checked.check(
            self,
            from_bytes=partial(checked.number, of="of bytes", above=0),
            latency_seconds=checked.seconds,
            bytes_per_second=checked.bandwidth,
        )


@dataclass(frozen=True, init=False)
class Link:
    """A level of links.

    >>> Link("nvlink", 8, latency_seconds=2e-6, bytes_per_second=300e9).units
    8
    >>> Link("ici", (4, 4, 4), latency_seconds=1e-6, bytes_per_second=45e9, shape="torus").units
    64

    ``extents`` is how many units it joins, of a torus along each of its dims; ``latency_seconds`` of a hop; ``ports``
    how many ports, or parallel links, each unit has: by default one for each device in it; ``pieces`` of a memory, by
    the size of a message; ``collective_pieces`` those of collectives, by what a member has, if they are others.
    ``bytes_per_second`` is the rate of the wire; ``reached`` is what is reached of it, if that is known.  On a
    ``striped`` switch a collective spreads what leaves a unit, and what comes into it, over the ports of all its
    members there, as NCCL's channels do, each of which is a ring that leaves a node by another adapter.  Raises
    ``ValueError`` or ``TypeError`` for what is no such thing, naming the field.
    """

    name: str
    extents: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float
    shape: str = "switch"
    ports: int | None = None
    pieces: tuple[Piece, ...] = ()
    collective_pieces: tuple[Piece, ...] = ()
    reached: Reached | None = None
    striped: bool = False

    def __init__(
        self,
        name: str,
        extents: int | Iterable[int],
        latency_seconds: float,
        bytes_per_second: float,
        shape: str = "switch",
        ports: int | None = None,
        pieces: Sequence[Piece] = (),
        collective_pieces: Sequence[Piece] = (),
        reached: Reached | None = None,
        striped: bool = False,
    ) -> None:
        if not isinstance(shape, str) or shape not in SHAPES:
            close = did_you_mean(shape, SHAPES)
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}; got {checked.shown(shape)}{close}")
        sides = extents if isinstance(extents, list | tuple) else (extents,)
        if not sides or (shape != "torus" and len(sides) > 1):
            wanted = "a list of at least one whole number" if shape == "torus" else "one whole number"
            raise ValueError(f"extents of a {shape} must be {wanted}; got {checked.shown(extents)}")
        most = MOST_ROUND if shape in ("ring", "torus") else MOST_UNITS
        checked.store(
            self,
            name=checked.text("name", name),
            extents=tuple(checked.whole_number("extents", side, most=most) for side in sides),
            latency_seconds=checked.seconds("latency_seconds", latency_seconds),
            bytes_per_second=checked.bandwidth("bytes_per_second", bytes_per_second),
            shape=shape,
            ports=None if ports is None else checked.whole_number("ports", ports, most=MOST_UNITS),
            pieces=_pieces("pieces", pieces, shape),
            collective_pieces=_pieces("collective_pieces", collective_pieces, shape),
            reached=_reached(reached, shape),
            striped=_striped(striped, shape),
        )

    @property
    def units(self) -> int:
        """How many units it joins."""
        return prod(self.extents)

    @property
    def shared(self) -> bool:
        """Whether messages share its channels."""
        return self.shape != "memory"

    @property
    def message_bytes_per_second(self) -> float:
        """The rate of a message that has the link to itself."""
        return (self.reached and self.reached.message_bytes_per_second) or self.bytes_per_second

    def for_collective(self, collective: str, size: int) -> "Link":
        """The link as the steps of a collective over ``size`` devices see it: with the rate and latency they reach."""
        if self.reached is None:
            return self
        rate, step = self.reached.bus(collective, size), self.reached.step_seconds
        return checked.changed(
            self,
            reached=None,
            bytes_per_second=rate or self.bytes_per_second,
            latency_seconds=self.latency_seconds if step is None else step,
        )

    def slowed(self, factor: float, delay_seconds: float) -> "Link":
        """The link with this part of its rates, and with this much more latency."""
        return checked.changed(
            self,
            bytes_per_second=factor * self.bytes_per_second,
            latency_seconds=self.latency_seconds + delay_seconds,
            reached=self.reached and self.reached.slowed(factor),
        )

    def line(self, nbytes: float, *, collective: bool = False) -> tuple[float, float]:
        """Latency and bandwidth of a message of so many bytes, or of those of a collective of so many a member."""
        pieces = (collective and self.collective_pieces) or self.pieces
        line: Piece | Link = next((piece for piece in reversed(pieces) if nbytes >= piece.from_bytes), self)
        return line.latency_seconds, line.bytes_per_second

    def uses(self, inside: int, source: Ints, target: Ints) -> Uses:
        """What messages between devices use, many at once; ``inside`` is how many devices are in a unit.

        ``source`` and ``target`` are places of devices, and each two lie in units that this level joins.
        """
        ports = self.ports or inside
        units = source // inside, target // inside
        lanes = source % inside * ports // inside, target % inside * ports // inside
        message = np.arange(len(source))
        if self.shape in ("switch", "memory"):
            out, into = (2 * (unit * ports + lane) for unit, lane in zip(units, lanes, strict=True))
            return Uses(
                np.ones_like(source), np.concatenate([message, message]), np.concatenate([out, into + 1])
            )
        if self.shape == "fully_connected":
            channel = (units[0] * self.units + units[1] % self.units) * ports + lanes[0]
            return Uses(np.ones_like(source), message, channel)
        return self._round_the_torus(ports, units[0], units[1], lanes[0])

    def path(self, inside: int, source: int, target: int) -> tuple[int, list[int]]:
        """`uses` of one message: the hops it makes, and its channels."""
        if self.shape != "switch":
            distance, _, channel = self.uses(inside, np.array([source]), np.array([target]))
            return int(distance[0]), channel.tolist()
        ports = self.ports or inside
        out, into = (
            2 * (place // inside * ports + place % inside * ports // inside) for place in (source, target)
        )
        return 1, [out, into + 1]

    def _round_the_torus(self, ports: int, here: Ints, there: Ints, lane: Ints) -> Uses:
        distance = np.zeros_like(here)
        at, messages, channels = here.copy(), [], []
        stride = self.units
        for dim, extent in enumerate(self.extents):
            stride //= extent
            ahead = (there // stride - at // stride) % extent
            up = 2 * ahead <= extent
            left = np.where(up, ahead, extent - ahead)
            distance += left
            for step in range(extent // 2):
                moving = np.flatnonzero(left > step)
                channel = (at * len(self.extents) + dim) * 2 + up
                messages.append(moving)
                channels.append((channel * ports + lane)[moving])
                place = at // stride % extent
                to = (place + np.where(up, 1, -1)) % extent
                at[moving] += ((to - place) * stride)[moving]
        return Uses(distance, np.concatenate(messages or [at[:0]]), np.concatenate(channels or [at[:0]]))


def _pieces(field: str, pieces: Sequence[Piece], shape: str) -> tuple[Piece, ...]:
    found = checked.each(field, pieces, Piece)
    if found and shape != "memory":
        raise ValueError(f"{field} are of a memory, where messages share nothing; got some of a {shape}")
    if any(piece.from_bytes >= other.from_bytes for piece, other in pairwise(found)):
        raise ValueError(
            f"{field} must begin one after the other, by from_bytes; got "
            f"{', '.join(f'{piece.from_bytes:g}' for piece in found)}"
        )
    return found


def _reached(reached: Reached | None, shape: str) -> Reached | None:
    if reached is not None and not isinstance(reached, Reached):
        raise TypeError(f"reached must be a Reached; got {checked.shown(reached)}")
    if reached is not None and shape == "memory":
        raise ValueError("reached is of links; a memory has pieces, by the size of a message")
    return reached


def _striped(striped: bool, shape: str) -> bool:
    if not isinstance(striped, bool) or (striped and shape != "switch"):
        told = checked.shown(striped)
        raise ValueError(f"striped must be true or false, and is of a switch; got {told} of a {shape}")
    return striped


@dataclass(frozen=True)
class HostLink:
    """The link between a device and its host.

    >>> from parallelism import Hardware
    >>> Hardware.preset("dgx-h100").host
    HostLink(latency_seconds=1e-05, bytes_per_second=51000000000.0)
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        checked.check(self, latency_seconds=checked.seconds, bytes_per_second=checked.bandwidth)
