"""A schedule as a picture: a row for each rank, a column for each cycle, forwards going down, backwards up."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from parallelism.display import WIDTH
from parallelism.pipelining.timing import SLOTS

if TYPE_CHECKING:
    from parallelism.pipelining.actions import Action
    from parallelism.pipelining.schedule import Schedule

_PLURAL = {"stage": "stages", "rank": "ranks", "microbatch": "microbatches"}
COLOURS = {"F": "#cfe3f7", "B": "#f7d9c4", "I": "#f7e6c4", "W": "#d8efd3"}


def text(schedule: Schedule) -> str:
    """The staircase in 80 columns, folded where it is longer; ``F0`` is the forward of microbatch 0, ``.`` is idle.

    Where a rank holds several stages the stage stands in front, as in ``2F0``.
    """
    lines = [[_label(schedule, action) for action in row] for row in cycles(schedule)]
    numbers = [str(cycle) for cycle in range(len(lines[0]))]
    rows = [("cycle", numbers), *((f"rank {rank}", line) for rank, line in enumerate(lines))]
    margin = max(len(head) for head, _ in rows) + 2
    width = max(len(cell) for _, cells in rows for cell in cells) + 1
    fold = (WIDTH - margin + 1) // width
    return "\n".join(
        [caption(schedule)]
        + [
            (head.ljust(margin) + "".join(cell.ljust(width) for cell in cells[first : first + fold])).rstrip()
            for first in range(0, len(numbers), fold)
            for head, cells in rows
        ]
    )


def html(schedule: Schedule) -> str:
    """The same as a table; every cell names its action, so the colours say nothing that the text does not."""
    rows = []
    for rank, line in enumerate(cycles(schedule)):
        cells = (f'<td style="background:{COLOURS[a.kind]};color:#000">{a}</td>' if a else "<td></td>" for a in line)
        rows.append(f"<tr><th>rank {rank}</th>{''.join(cells)}</tr>")
    return f"<table><caption>{escape(caption(schedule))}</caption>{''.join(rows)}</table>"


def cycles(schedule: Schedule) -> list[list[Action | None]]:
    """By rank, the action of each cycle, or None."""
    timeline = schedule.timeline(SLOTS)
    table: list[list[Action | None]] = [[None] * int(timeline.makespan) for _ in schedule.actions]
    for line, row in zip(table, timeline.spans, strict=True):
        for action, start, _ in row:
            line[int(start)] = action
    return table


def caption(schedule: Schedule) -> str:
    """Name, sizes and bubble in a line."""
    return f"{sizes(schedule)}; {schedule.makespan()} cycles, {schedule.idle_fraction():.0%} idle"


def sizes(schedule: Schedule) -> str:
    """Name and sizes in words."""
    counted = ((schedule.stages, "stage"), (schedule.ranks, "rank"), (schedule.microbatches, "microbatch"))
    stages, ranks, microbatches = (f"{n} {noun if n == 1 else _PLURAL[noun]}" for n, noun in counted)
    return f"{schedule.name}: {stages} on {ranks}, {microbatches}"


def _label(schedule: Schedule, action: Action | None) -> str:
    if action is None:
        return "."
    return str(action) if schedule.chunks > 1 else f"{action.kind}{action.microbatch}"
