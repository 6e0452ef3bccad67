"""Degradations of a hardware: a straggler, a link with a fault."""

from dataclasses import dataclass
from functools import partial

from parallelism.hardware import fields as checked


@dataclass(frozen=True)
class Straggler:
    """A rank whose computing takes ``factor`` times as long, at least 1.

    >>> from dataclasses import replace
    >>> from parallelism import Hardware, Straggler
    >>> slowed = replace(Hardware.preset("dgx-h100"), stragglers=(Straggler(rank=3, factor=1.2),))
    >>> slowed.slowdown(3), slowed.slowdown(4)
    (1.2, 1.0)
    """

    rank: int
    factor: float

    def __post_init__(self) -> None:
        checked.check(
            self,
            rank=partial(checked.whole_number, least=0),
            factor=partial(checked.number, least=1),
        )


@dataclass(frozen=True)
class LinkFault:
    """A fault of the link from rank ``source`` to rank ``target`` (None: from any rank, or to any).

    >>> from dataclasses import replace
    >>> from parallelism import Costs, Hardware, LinkFault
    >>> whole = Hardware.preset("dgx-h100")
    >>> late = replace(whole, faults=(LinkFault(source=0, target=1, delay_seconds=1e-3),))
    >>> seconds = [Costs(hardware).message_seconds(2**20, 0, 1) for hardware in (whole, late)]
    >>> round(seconds[1] - seconds[0], 6)
    0.001

    With the name of a ``level`` of links it is a fault of one port: it has one end, and only messages over that level meet
    it.  A collective of a group that the rank is in, and that meets others of it at this level, then goes over the whole
    level as fast as that port, since its rings and trees wait for their slowest member.

    Each message arrives ``delay_seconds`` later.  All messages together have ``bandwidth_factor`` of the bandwidth that
    one of their links has without the fault.  At least one end is given.
    """

    source: int | None = None
    target: int | None = None
    delay_seconds: float = 0.0
    bandwidth_factor: float = 1.0
    level: str | None = None

    def __post_init__(self) -> None:
        if self.source is None and self.target is None:
            raise ValueError("source or target must be a rank; got None for both")
        given = [end for end in ("source", "target") if getattr(self, end) is not None]
        if self.level is not None and len(given) > 1:
            raise ValueError(
                f"a fault of a port on the level {self.level} has one end; got source {self.source} and target {self.target}"
            )
        checked.check(
            self,
            level=checked.text_or_none,
            **dict.fromkeys(given, partial(checked.whole_number, least=0)),
            delay_seconds=checked.seconds,
            bandwidth_factor=checked.share,
        )

    @property
    def is_of_port(self) -> bool:
        """Whether it is of one port on one level."""
        return self.level is not None

    @property
    def rank(self) -> int:
        """The end that is given; of two the source."""
        end = self.target if self.source is None else self.source
        assert end is not None
        return end

    def concerns(self, source: int, target: int, level: str) -> bool:
        """Whether a message from one rank to another over a level of links meets it."""
        if self.level not in (None, level):
            return False
        return self.source in (None, source) and self.target in (None, target)
