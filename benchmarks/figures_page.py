"""``python -m benchmarks figures``: the figures that have a target, summed up as ``docs/performance.md`` has them.

``figures.csv`` holds each such figure of the last full measurement, as it was printed: what was measured, its ratio to
what the target names, the target, and whether it was met.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from vcluster.cli.command_line import Parser, WrongWords

FIGURES = Path(__file__).parent / "figures.csv"
SMALL = ("", "8 B", "512 B", "4 KiB", "32 KiB", "64 KiB")
GROUPS = ("collectives up to 64 KiB", "from 1 MiB, private arrays", "from 1 MiB, shared memory", "new results",
          "round trips", "growth with the number of devices")


class Figure(NamedTuple):
    """A row of ``figures.csv``."""

    suite: str
    what: str
    arrays: str
    bytes: str
    devices: str
    measured: str
    ratio: str
    target: str
    met: str

    @property
    def group(self) -> str:
        """Which of `GROUPS` a figure of the peers belongs to."""
        if self.suite == "growth":
            return GROUPS[5]
        if "new result" in self.arrays:
            return GROUPS[3]
        if self.what == "round_trip":
            return GROUPS[4]
        return GROUPS[0] if self.bytes in SMALL else GROUPS[1 + (self.arrays == "shared")]


def main(words: Sequence[str]) -> int:
    """Prints the tables of the page; status 0."""
    parser = Parser(prog="python -m benchmarks figures", description="Figures that have a target, as tables.")
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="FILE.csv", help="others than those kept")
    path = parser.parse(words).figures
    try:
        print(tables(read(path)))
    except (OSError, ValueError, TypeError) as error:
        raise WrongWords(f"{path} has no figures: {error}") from None
    return 0


def read(path: Path = FIGURES) -> list[Figure]:
    """The figures of a file, in order.  ``ValueError`` for a file with other columns."""
    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    if tuple(header) != Figure._fields:
        raise ValueError(f"its columns are {', '.join(header)}")
    return [Figure(*row) for row in rows]


def tables(figures: Iterable[Figure]) -> str:
    """Both tables in Markdown: vcluster alone, each figure; beside the peers, by group and number of devices."""
    every = list(figures)
    alone = [f for f in every if f.suite not in ("peers", "growth")]
    lines = ["| vcluster alone | measured | target | |", "|---|---:|---|---|"]
    lines += [f"| {_described(f)} | {f.measured}{_ratio(f)} | {f.target} | {_mark(f.met == 'yes')} |" for f in alone]
    lines += ["", "| beside the peers | devices | met | median ratio to MPICH | largest |", "|---|---|---:|---:|---:|"]
    for group in GROUPS:
        of_group = [f for f in every if f.suite in ("peers", "growth") and f.group == group]
        numbers = dict.fromkeys(f.devices for f in of_group)
        by_devices = [[f for f in of_group if f.devices == devices] for devices in numbers]
        if not numbers:
            continue
        ratios = [[float(f.ratio) for f in mine if f.ratio and f.target.endswith("MPICH")] for mine in by_devices]
        cells = [
            [*numbers],
            [f"{sum(f.met == 'yes' for f in mine)} of {len(mine)}" for mine in by_devices],
            [f"{median(some):.2f}" for some in ratios if some], [f"{max(some):.2f}" for some in ratios if some],
        ]
        lines.append(f"| {group} | {' | '.join('; '.join(cell) for cell in cells)} |")
    return "\n".join(lines)


def _described(figure: Figure) -> str:
    devices = f"on {figure.devices}" if figure.devices else ""
    words = {"step": "pipelined step, ", "block": "Transformer block, ", "run": "run: ", "loops": "plain loop, "}
    prefix = words.get(figure.suite, "")
    return " ".join(filter(None, (prefix + figure.what, figure.bytes, devices)))


def _ratio(figure: Figure) -> str:
    return f" ({figure.ratio}{'' if figure.ratio.endswith('%') else ' x'})" if figure.ratio else ""


def _mark(met: bool) -> str:
    return "met" if met else "**NO**"
