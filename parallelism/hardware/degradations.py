"""What is slower than the hardware is described: a straggler, a link with a fault."""

from __future__ import annotations

from dataclasses import dataclass

from parallelism.hardware import fields as checked


@dataclass(frozen=True)
class Straggler:
    """A rank whose computing takes ``factor`` times as long, at least 1."""

    rank: int
    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checked.whole_number("rank", self.rank, least=0))
        object.__setattr__(self, "factor", checked.number("factor", self.factor, least=1))


@dataclass(frozen=True)
class LinkFault:
    """What happens to the messages from rank ``source`` to rank ``target`` (None: from, or to, anyone).

    Each comes ``delay_seconds`` later, and all of them together have ``bandwidth_factor`` of the bandwidth that one
    link of theirs has without the fault.  At least one end is given.
    """

    source: int | None = None
    target: int | None = None
    delay_seconds: float = 0.0
    bandwidth_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.source is None and self.target is None:
            raise ValueError("source or target must be a rank; got None for both")
        for end in ("source", "target"):
            if (rank := getattr(self, end)) is not None:
                object.__setattr__(self, end, checked.whole_number(end, rank, least=0))
        delay = checked.number("delay_seconds", self.delay_seconds, "of seconds")
        factor = checked.number("bandwidth_factor", self.bandwidth_factor, above=0, most=1)
        object.__setattr__(self, "delay_seconds", delay)
        object.__setattr__(self, "bandwidth_factor", factor)

    def concerns(self, source: int, target: int) -> bool:
        """Whether a message from one rank to another meets it."""
        return self.source in (None, source) and self.target in (None, target)
