"""What was measured, as values and as a JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.summary import Summary

FORMAT = "vcluster benchmarks"
FORMAT_VERSION = 1

DEFINITIONS = {
    "seconds": "median and spread over all rounds of all passes; passes go over all systems and cases in turn",
    "collective": "latest end minus latest start over the ranks; two barriers stand before the call",
    "broadcast": "latest end minus earliest start, since its root need not wait",
    "from_first_start": "the same rounds as latest end minus earliest start; an upper bound",
    "round_trip": "rank 0 sends, rank 1 sends back what came; the time of rank 0",
    "loops": "calls in a plain loop; from the end of the call before on the last rank to the end on the last rank",
    "limits": "from the moment from which nothing can save the run until the error leaves it, the cluster repaired",
    "stream": "16 messages one after the other, receiver's end minus sender's start, per message",
    "copy": "each of some processes copies an array of its own; the slowest one's time for one copy",
    "fresh": "without out=: each result is a new array",
    "nbytes": "input of all_reduce, reduce_scatter, all_to_all, broadcast and messages; output of all_gather",
}


@dataclass(frozen=True)
class Measurement:
    """One figure: what was done, by which system, on how many devices, with how many bytes."""

    suite: str
    system: str
    operation: str
    devices: int
    nbytes: int
    memory: str
    seconds: Summary
    from_first_start: Summary | None = None
    fresh: bool = False
    """Without ``out=``."""


@dataclass(frozen=True)
class Quantity:
    """One figure that is no time: how much of what, in which unit."""

    suite: str
    system: str
    what: str
    devices: int
    unit: str
    amount: Summary


@dataclass(frozen=True)
class Level:
    """What one process holds ``after`` so many of ``what``."""

    suite: str
    what: str
    after: int
    process: str
    descriptors: int
    threads: int
    resident_nbytes: int


@dataclass
class Results:
    """Everything one run of the benchmarks found."""

    measurements: list[Measurement] = field(default_factory=list)
    quantities: list[Quantity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Systems that could not be measured, with the reason in one line."""
    levels: list[Level] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """What each peer says of itself."""
    additions: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By suite: seconds of 10^7 additions in Python (`benchmarks.machine.additions_seconds`), before it and after."""

    def add(
        self, suite: str, system: str, operation: str, seconds: Sequence[float], *, devices: int = 0, nbytes: int = 0,
        memory: str = "", from_first_start: Sequence[float] | None = None, fresh: bool = False,
    ) -> None:
        """Note the figures of all rounds of one thing."""
        first = None if from_first_start is None else Summary.of(from_first_start)
        self.measurements.append(
            Measurement(suite, system, operation, devices, nbytes, memory, Summary.of(seconds), first, fresh)
        )

    def note(
        self, suite: str, system: str, what: str, amounts: Sequence[float], unit: str, *, devices: int = 0
    ) -> None:
        """Note the figures of something that is no time."""
        self.quantities.append(Quantity(suite, system, what, devices, unit, Summary.of(amounts)))

    def amounts_of(self, suite: str) -> Iterator[Quantity]:
        """The quantities of one suite, in the order in which they were noted."""
        return (quantity for quantity in self.quantities if quantity.suite == suite)

    def of(self, suite: str) -> Iterator[Measurement]:
        """The measurements of one suite, in the order in which they were added."""
        return (measurement for measurement in self.measurements if measurement.suite == suite)

    def find(self, wanted: Callable[[Measurement], bool]) -> Measurement | None:
        """The first measurement that is ``wanted``."""
        return next(filter(wanted, self.measurements), None)

    def document(self, command: Sequence[str], started: str, machine: dict[str, Any]) -> dict[str, Any]:
        """All of it as plain values; seconds throughout."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "command": list(command),
            "started": started,
            "machine": machine,
            "versions": dict(self.versions),
            "definitions": DEFINITIONS,
            "skipped": dict(self.skipped),
            "measurements": [
                {name: value for name, value in asdict(measurement).items() if value is not None}
                for measurement in self.measurements
            ],
            "levels": [asdict(level) for level in self.levels],
            "quantities": [asdict(quantity) for quantity in self.quantities],
            "additions": {name: list(seconds) for name, seconds in self.additions.items()},
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Results:
        """What `document` made plain values of.  ``ValueError`` if that is something else."""
        if document.get("format") != FORMAT or document.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"figures are {FORMAT!r} in format {FORMAT_VERSION}, got {document.get('format')!r} in "
                f"{document.get('format_version')!r}"
            )
        try:
            return cls(
                [
                    Measurement(**{
                        **values, "seconds": Summary(**values["seconds"]),
                        "from_first_start": Summary(**first) if (first := values.get("from_first_start")) else None,
                    })
                    for values in document["measurements"]
                ],
                [Quantity(**{**values, "amount": Summary(**values["amount"])}) for values in document["quantities"]],
                dict(document["skipped"]), [Level(**values) for values in document["levels"]],
                dict(document["versions"]),
                {name: (before, after) for name, (before, after) in document.get("additions", {}).items()},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the figures are incomplete: {error}") from None


def speed_line(results: Results, suite: str) -> str:
    """How fast this machine ran Python before and after a suite; empty if that was not measured."""
    if suite not in results.additions:
        return ""
    before, after = results.additions[suite]
    return f"10^7 additions in Python took {before:.2f} s before and {after:.2f} s after."


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document in a form that is read by people too."""
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
