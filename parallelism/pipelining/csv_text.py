"""Schedules as csv, one line for each rank: the format of ``torch.distributed.pipelining``."""

from __future__ import annotations

import csv
import itertools
from typing import TYPE_CHECKING

from parallelism.pipelining.actions import Step, is_about_parameters, parse_step

if TYPE_CHECKING:
    from parallelism.pipelining.schedule import Schedule


def write(schedule: Schedule) -> str:
    """The csv text of a schedule."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def read(text: str, name: str) -> list[list[Step]]:
    """The entries of each rank.  ``name`` is that of the schedule, for errors.

    Empty cells are idle slots and are ignored, and so are torch's actions for parameters, such as ``0UNSHARD``.
    ``ValueError`` names line and cell.
    """
    rows: list[list[Step]] = []
    lines = csv.reader(text.rstrip().splitlines())
    for line in itertools.count(1):
        try:
            cells = next(lines, None)
        except csv.Error as error:
            raise ValueError(f"line {line} of schedule {name!r} is no csv: {error}") from None
        if cells is None:
            break
        try:
            rows.append(
                [parse_step(cell) for cell in cells if cell.strip() and not is_about_parameters(cell)]
            )
        except ValueError as error:
            raise ValueError(f"line {line} of schedule {name!r}: {error}") from None
        if not rows[-1]:
            raise ValueError(
                f"line {line} of schedule {name!r} has no action; it is the order of rank {line - 1}"
            )
    if not rows:
        raise ValueError(f"schedule {name!r} is blank; a line of actions for each rank was expected")
    return rows
