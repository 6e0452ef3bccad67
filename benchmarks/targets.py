"""What vcluster is to reach beside its peers, and whether it does: for each figure of the peers suite its bounds.

The bounds are ratios to a peer's median in the same run, to the time that the least memory traffic takes
(`benchmarks.traffic`), to vcluster's own figure with ``out=``, or plain seconds.

1. Collectives up to 64 KiB.  4 and 8 devices: 1.0 x MPICH, 0.3 x JAX and 0.1 x gloo; 2 devices: 2.5 x MPICH and 12 us.
   A broadcast is held against the peer's barrier and broadcast together, since its root returns early.
2. Collectives of 1 to 64 MiB with ``out=``.  4 and 8 devices, private arrays: all_reduce and reduce_scatter 0.7 x
   MPICH; others 1.0 x MPICH or 1.3 x the least, whichever is more.  Arrays in shared memory: all_reduce 0.9 x the best
   peer and 0.45 x MPICH; others 0.9 x the best or 1.3 x the least, whichever is more.  2 devices: all_reduce 0.9 x,
   others 1.3 x MPICH.  Without ``out=``: 1.15 x the figure with it.
3. Round trips.  Below 64 KiB: 12 us on 2 devices, 1.5 x MPICH on 4; above: 1.0 x MPICH.
4. More than 8 devices: the time on 2g over the time on g is no more than that of the peer that is fastest on 2g.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import COLLECTIVES
from benchmarks.installed import PEERS
from benchmarks.plan import KIB, MIB
from benchmarks.results import Measurement, Results
from benchmarks.systems import OURS
from benchmarks.tables import seconds_text, table
from benchmarks.traffic import CopyRates, least_bytes

SUITE = "peers"
SMALL_BYTES = 64 * KIB
LARGE_BYTES = MIB
SMALL_SECONDS = 12e-6
FRESH = 1.15
PLAIN = {
    ("startup", "cold minus numpy", 4): 0.080, ("startup", "warm", 4): 0.020, ("startup", "cold", 64): 0.5,
    ("startup", "cold", 256): 2.5, ("startup", "shutdown", 64): 0.2, ("run", "empty", 4): 200e-6,
    ("run", "empty", 64): 4e-3, ("idle", "wake", 2): 60e-6,
    ("simulate", "op", 8): 4e-6, ("simulate", "whole", 8192): 2.0, ("simulate", "whole", 3072): 3.0,
    ("simulate", "folded", 102400): 5.0, ("simulate", "all_reduce", 1024): 0.02,
    ("plan", "set-up", 64): 2.0, ("plan", "set-up", 1024): 2.0, ("plan", "timed", 64): 200e-6,
    ("plan", "timed", 1024): 200e-6, ("plan", "slicing", 128): 2.0,
}
"""Of other suites: seconds by suite, operation and devices."""
MEMORY_BYTES = {4: 10 * MIB, 64: 6 * MIB}
"""Proportional set size of an idle device, by the number of devices."""
SMALL_ON_RANKS_SECONDS, LARGE_ON_RANKS = 15e-6, 1.2
"""Over plain mpi4py on the same ranks: seconds of a collective of up to 1 KiB, and how many times those of 16 MiB."""
FIRST_TEST_FACTOR = 20.0
"""How many times sooner than torch's a first test on 4 devices is over."""
COPIES_FACTOR = 1.5
"""A run with arguments and results, by the copies that it needs."""
STEP_OVERHEAD = 0.10
"""CPU time of a step of a pipeline over the same arithmetic in one process, in parts of it."""
BLOCK_OVERHEAD = 0.15
"""CPU time of a block of a Transformer, forward and backward, over the same in one process, in parts of it."""
IDLE_PART = 0.01
"""Of a core, for an idle cluster of 64."""
STREAM_RATE, STREAM_FACTOR = 10e9, 40.0
"""Bytes a second in messages of 4 MiB, and how many times faster than ``multiprocessing.Queue``."""
LOOP_FACTORS = {2: (1.5, 3.0), 4: (1.0, 2.0), 8: (1.0, 2.0)}
"""A small collective in a plain loop, by its mean over the best peer's: in a fast phase of the machine and in a slow
one, by the number of devices."""
CLIFF_FACTORS = {
    "a float": 1.5, "a np.float64": 1.5, "an int": 1.5, "64 KiB + 4 B": 2.0, "transposed": 1.0, "1100 shapes": 2.0,
    "a new shape": 12.0,
}
"""Calls beside the same on the fast way, by the name that `benchmarks.suites.cliffs` gives them."""
CLIFF_SECONDS = {"100,000 numbers": 10e-3, "recorded": 1.0}
"""Cases that are held against plain seconds."""
GROWTH_FACTOR = 2.5
"""From 32 to 64 and from 64 to 128 devices: in proportion, and a quarter more."""
SLOW_SECONDS = 1.0
"""10^7 additions in Python take longer in a slow phase."""
JUDGED = (2, 4, 8)
"""Numbers of devices that have bounds of their own; larger ones are judged by their growth."""


def against(limit: float | None, value: float, text: str) -> str:
    """``20.0 ms yes`` or ``20.0 ms NO``: a plain limit as ``text``, and whether a value keeps it; ``-`` without one."""
    if limit is None:
        return "-"
    return f"{text} {'yes' if value <= limit else 'NO'}"


def against_plain(results: Results, suite: str, texts: Mapping[str, str]) -> str:
    """A table with a line for each figure of a suite: the text of its operation, its seconds, and its plain limit."""
    rows = []
    for m in results.of(suite):
        limit = PLAIN.get((suite, m.operation, m.devices))
        rows.append([
            texts[m.operation].format(m.memory), str(m.devices), seconds_text(m.seconds.median),
            f"{m.seconds.spread:.0%}", against(limit, m.seconds.median, seconds_text(limit or 0.0)),
        ])
    return table(("", "devices", "median", "spread", "at most"), rows)


@dataclass(frozen=True)
class Bound:
    """At most ``seconds``: ``factor`` times what ``of`` says, or plain seconds where that is empty."""

    factor: float
    of: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """A figure of vcluster and all that it must not exceed."""

    ours: Measurement
    bounds: tuple[Bound, ...]

    @property
    def tightest(self) -> Bound:
        """The one that decides."""
        return min(self.bounds, key=lambda bound: bound.seconds)

    @property
    def ratio(self) -> float:
        """The figure by what is allowed: met at 1 or below."""
        return self.ours.seconds.median / self.tightest.seconds

    @property
    def met(self) -> bool:
        return self.ratio <= 1

    def plain(self) -> dict[str, Any]:
        """For the JSON document."""
        ours, tightest = self.ours, self.tightest
        return {
            "operation": ours.operation, "devices": ours.devices, "nbytes": ours.nbytes, "memory": ours.memory,
            "fresh": ours.fresh, "seconds": ours.seconds.median, "allowed_seconds": tightest.seconds,
            "factor": tightest.factor, "of": tightest.of, "met": self.met,
        }


@dataclass(frozen=True)
class Growth:
    """How many times longer an operation takes on twice the devices."""

    operation: str
    memory: str
    nbytes: int
    devices: int
    """The larger number."""
    ours: float
    theirs: dict[str, float]
    """By peer."""
    allowed: float | None
    """The growth of the peer that is fastest on the larger number; None where growth is not judged."""

    @property
    def met(self) -> bool:
        return self.allowed is None or self.ours <= self.allowed


class Standing:
    """All figures of the peers suite, to be asked for one by one."""

    def __init__(self, results: Results) -> None:
        found = list(results.of(SUITE))
        self._found = {(m.system, m.operation, m.memory, m.fresh, m.devices, m.nbytes): m for m in found}
        self.devices = tuple(sorted({m.devices for m in found}))
        self.peers = tuple(name for name in PEERS if any(m.system == name for m in found))
        self.rates = {
            devices: CopyRates([m for m in found if m.devices == devices]) for devices in self.devices
        }

    def ours(self) -> Iterator[Measurement]:
        """vcluster's own figures."""
        return (m for m in self._found.values() if m.system == OURS)

    def own(self, operation: str, memory: str, devices: int, nbytes: int, *, fresh: bool = False) -> Measurement | None:
        """One of vcluster's figures."""
        return self._found.get((OURS, operation, memory, fresh, devices, nbytes))

    def theirs(self, peer: str, operation: str, devices: int, nbytes: int) -> float | None:
        """A peer's median: for a small broadcast, that of its barrier and its broadcast together."""
        found = self._found.get((peer, operation, "private", False, devices, nbytes))
        if found is None:
            return None
        barrier = self._found.get((peer, "barrier", "private", False, devices, 0))
        early = operation == "broadcast" and nbytes <= SMALL_BYTES and barrier is not None
        return found.seconds.median + (barrier.seconds.median if early and barrier is not None else 0.0)

    def least(self, operation: str, devices: int, nbytes: int) -> float | None:
        """The seconds of the least memory traffic, for large buffers."""
        return self.rates[devices].least_seconds(operation, nbytes, devices) if nbytes >= SMALL_BYTES else None

    def verdicts(self) -> list[Verdict]:
        """Of every figure that has a bound."""
        judged = ((m, self._bounds(m)) for m in self.ours())
        return [Verdict(m, tuple(bounds)) for m, bounds in judged if bounds]

    def growths(self) -> list[Growth]:
        """Of every figure (with ``out=``) that was measured on twice as many devices, too."""
        found = []
        for after in self.ours():
            before = self.own(after.operation, after.memory, after.devices // 2, after.nbytes)
            if after.fresh or after.devices % 2 or before is None:
                continue
            ends: dict[str, tuple[float, float]] = {}
            for peer in self.peers:
                first, last = (
                    self.theirs(peer, after.operation, devices, after.nbytes)
                    for devices in (before.devices, after.devices)
                )
                if first and last:
                    ends[peer] = first, last
            fastest = min(ends.values(), key=lambda pair: pair[1], default=None)
            found.append(Growth(
                after.operation, after.memory, after.nbytes, after.devices,
                after.seconds.median / before.seconds.median,
                {peer: last / first for peer, (first, last) in ends.items()},
                None if after.devices in JUDGED or fastest is None else fastest[1] / fastest[0],
            ))
        return found

    def plain(self) -> dict[str, Any]:
        """What follows from the figures, for the JSON document."""
        least = []
        for devices, operation, nbytes in dict.fromkeys((m.devices, m.operation, m.nbytes) for m in self.ours()):
            seconds = self.least(operation, devices, nbytes)
            if seconds is not None:
                read, written = least_bytes(operation, nbytes, devices)
                least.append({
                    "operation": operation, "devices": devices, "nbytes": nbytes, "bytes_read": read,
                    "bytes_written": written, "seconds": seconds,
                })
        return {
            "targets": [verdict.plain() for verdict in self.verdicts()],
            "least_traffic": least,
            "growth": [{**asdict(growth), "met": growth.met} for growth in self.growths()],
        }

    def _bounds(self, m: Measurement) -> list[Bound]:
        if m.devices not in JUDGED:
            return []
        if m.fresh:
            given = self.own(m.operation, m.memory, m.devices, m.nbytes)
            return [] if given is None else [Bound(FRESH, "with out=", FRESH * given.seconds.median)]
        if m.operation == "round_trip":
            return self._round_trip(m)
        if m.operation not in COLLECTIVES:
            return []
        if m.nbytes <= SMALL_BYTES:
            if m.devices == 2:
                return [*self._of("mpich", 2.5, m), Bound(0.0, "", SMALL_SECONDS)]
            return [*self._of("mpich", 1.0, m), *self._of("jax", 0.3, m), *self._of("gloo", 0.1, m)]
        return self._large(m) if m.nbytes >= LARGE_BYTES else []

    def _round_trip(self, m: Measurement) -> list[Bound]:
        if m.nbytes > SMALL_BYTES:
            return self._of("mpich", 1.0, m)
        if m.nbytes == SMALL_BYTES:
            return []
        return [Bound(0.0, "", SMALL_SECONDS)] if m.devices == 2 else self._of("mpich", 1.5, m)

    def _large(self, m: Measurement) -> list[Bound]:
        if m.devices == 2:
            return self._of("mpich", 0.9 if m.operation == "all_reduce" else 1.3, m)
        if m.memory == "private":
            if m.operation in ("all_reduce", "reduce_scatter"):
                return self._of("mpich", 0.7, m)
            return _more([*self._of("mpich", 1.0, m), *self._least(m)])
        if m.operation == "all_reduce":
            return [*self._best(m), *self._of("mpich", 0.45, m)]
        return _more([*self._best(m), *self._least(m)])

    def _of(self, peer: str, factor: float, m: Measurement) -> list[Bound]:
        seconds = self.theirs(peer, m.operation, m.devices, m.nbytes)
        return [] if seconds is None else [Bound(factor, peer, factor * seconds)]

    def _best(self, m: Measurement) -> list[Bound]:
        bounds = [bound for peer in self.peers for bound in self._of(peer, 0.9, m)]
        return [min(bounds, key=lambda bound: bound.seconds)] if bounds else []

    def _least(self, m: Measurement) -> list[Bound]:
        seconds = self.least(m.operation, m.devices, m.nbytes)
        return [] if seconds is None else [Bound(1.3, "least", 1.3 * seconds)]


def _more(bounds: list[Bound]) -> list[Bound]:
    """Where two are given and the larger counts.  The least traffic alone is no bound: there was no peer."""
    if all(bound.of == "least" for bound in bounds):
        return []
    return [max(bounds, key=lambda bound: bound.seconds)]
