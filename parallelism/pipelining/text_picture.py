"""A schedule as a text picture: one row for each rank and one column for each cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelism.display import WIDTH
from parallelism.display.quantities import plural
from parallelism.pipelining.generators import SCHEDULES
from parallelism.pipelining.timing import SLOTS

if TYPE_CHECKING:
    from parallelism.pipelining.actions import Action
    from parallelism.pipelining.schedule import Schedule
    from parallelism.pipelining.timing import ScheduleTimeline


def text(schedule: Schedule) -> str:
    """The picture in 80 columns, folded if it is longer.  ``F0`` is the forward of microbatch 0, ``.`` is idle.

    If a rank has several stages, the stage stands in front: ``2F0``.
    """
    kind = SCHEDULES.find(schedule.name)
    is_alone = kind is not None and kind.is_interleaved and schedule.chunks == 1 < schedule.ranks
    lines = [[_label(schedule, action) for action in row] for row in cycles(schedule)]
    numbers = [str(cycle) for cycle in range(len(lines[0]))]
    rows = [("cycle", numbers), *((f"rank {rank}", line) for rank, line in enumerate(lines))]
    margin = max(len(head) for head, _ in rows) + 2
    width = max(len(cell) for _, cells in rows for cell in cells) + 1
    fold = (WIDTH - margin + 1) // width
    picture = [caption(schedule)]
    if is_alone:
        picture.append("one chunk a rank, so nothing is interleaved; chunks=2 gives each rank two stages")
    for first in range(0, len(numbers), fold):
        for head, cells in rows:
            line = "".join(cell.ljust(width) for cell in cells[first : first + fold])
            picture.append((head.ljust(margin) + line).rstrip())
    return "\n".join(picture)


def cycles(schedule: Schedule) -> list[list[Action | None]]:
    """For each rank, the action in each cycle, or None."""
    timeline = schedule.timeline(SLOTS)
    table: list[list[Action | None]] = [[None] * int(timeline.makespan) for _ in schedule.actions]
    for line, row in zip(table, timeline.spans, strict=True):
        for action, start, _ in row:
            line[int(start)] = action
    return table


def caption(schedule: Schedule) -> str:
    """One line with the name, the sizes and the bubble of a schedule."""
    return f"{sizes(schedule)}; {schedule.makespan()} cycles, {schedule.idle_fraction():.0%} idle"


def sizes(schedule: Schedule) -> str:
    """The name and the sizes of a schedule in words."""
    return (
        f"{schedule.name}: {plural(schedule.stages, 'stage')} on {plural(schedule.ranks, 'rank')}, "
        f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches != 1)}"
    )


def bars(timeline: ScheduleTimeline) -> str:
    """The actions of each rank as bars on one time axis, in 80 columns; ``.`` is idle."""
    schedule, makespan = timeline.schedule, timeline.makespan
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, heads)) + 2
    columns = WIDTH - margin
    first = min((span.start for row in timeline.spans for span in row), default=0)
    lines = [f"{sizes(schedule)}; makespan {makespan:.6g}, bubble {timeline.bubble_fraction:.1%} of it"]
    for head, row in zip(heads, timeline.spans, strict=True):
        line = "." * columns
        for action, start, end in row:
            begin, stop = (round((time - first) / (makespan or 1) * columns) for time in (start, end))
            label = _label(schedule, action)
            bar = label if len(label) < stop - begin else action.kind
            line = line[:begin] + bar.ljust(stop - begin, "-")[: stop - begin] + line[stop:]
        lines.append(head.ljust(margin) + line)
    return "\n".join([*lines, " " * margin + "0" + f"{makespan:.6g}".rjust(columns - 1)])


def _label(schedule: Schedule, action: Action | None) -> str:
    if action is None:
        return "."
    return str(action) if schedule.chunks > 1 else f"{action.kind}{action.microbatch}"
