"""The seconds of a phase: on each level of links a line in S, of which the slowest counts."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from parallelism.hardware import Link


class Line(NamedTuple):
    """On one level of links: latency_seconds + S * load / per_second."""

    latency_seconds: float
    load: int
    per_second: float
    link: Link | None = None
    """The link, if its latency and rate depend on what each member has."""
    share: float = 1.0
    """The part of S that each member has."""

    def seconds(self, nbytes: float) -> float:
        """The seconds for a buffer of ``nbytes``."""
        latency, per_second = self.at(nbytes)
        return latency + nbytes * self.load / per_second

    def at(self, nbytes: float) -> tuple[float, float]:
        """The latency of the line, and its S * load per second, for a buffer of ``nbytes``."""
        latency, per_second = self.latency_seconds, self.per_second
        if self.link is not None:
            other = self.link.line(nbytes * self.share, collective=True)
            latency += other[0] - self.link.latency_seconds
            per_second *= other[1] / self.link.bytes_per_second
        return latency, per_second


class Term(NamedTuple):
    """A phase: it takes as long as the longest of its lines."""

    lines: tuple[Line, ...]
    piped: bool = False

    def seconds(self, times: int, nbytes: float) -> float:
        """The seconds of ``times`` such phases for a buffer of ``nbytes``; piped, of a chain of ``times`` links."""
        if self.piped:
            ats = [line.at(nbytes) for line in self.lines]
            latency = max(latency for latency, _ in ats)
            whole = max(
                nbytes * line.load / per_second for line, (_, per_second) in zip(self.lines, ats, strict=True)
            )
            return _pipelined(times, latency, whole, nbytes)
        return times * max(line.seconds(nbytes) for line in self.lines)


class Falling(NamedTuple):
    """Phases that differ in their parts alone, one for each part."""

    of_one: Term
    """The phase whose part is 1."""
    parts: Sequence[int]

    def seconds(self, times: int, nbytes: float) -> float:
        """The seconds of all phases, ``times`` over each, added in their order; the same bits as one by one."""
        parts, each = np.array(self.parts, np.float64), []
        for line in self.of_one.lines:
            latency, per_second = line.at(nbytes)
            each.append(latency + nbytes * (parts * line.load) / per_second)
        return float(sum((times * np.max(each, axis=0)).tolist()))


def with_pieces(line: Line, link: Link, share: float) -> Line:
    """The line, which knows its link if that has other lines for other sizes."""
    return line._replace(link=link, share=share) if link.pieces or link.collective_pieces else line


def _pipelined(links: int, latency: float, whole: float, nbytes: float) -> float:
    """S goes down a chain of links in k pieces: (links - 1 + k) (a + S b / k) for the k for which it is least."""
    most = max(1, int(nbytes))
    best = min(sqrt((links - 1) * whole / latency), most) if latency else most
    pieces = {max(1, int(best)), min(int(best) + 1, most)}
    return min((links - 1 + k) * (latency + whole / k) for k in pieces)
