"""The seconds and the memory of all plans of a space: those from pieces at once, the others by simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from time import process_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.models import TransformerSpec
from parallelism.planning.plan import Task
from parallelism.planning.sheets import Unpriceable
from parallelism.planning.space import Choices, Refused
from parallelism.planning.table import PlanTable, Shape

Told = Callable[[str, int, int], None]


class Costed(NamedTuple):
    """The plans of a space, by row."""

    possible: Choices
    """The space without the plans that the program does not allow, which is known only when they are simulated."""
    seconds: npt.NDArray[np.float64]
    """Of a step in which nothing shares links, or fewer (`PlanTable.is_exact`); infinite for plans that need too much
    memory."""
    peaks: npt.NDArray[np.int64]
    """The bytes of the fullest device; of a plan that needs too much memory at least those that it holds all the time,
    unless no plan fits."""
    timed: int
    setup_seconds: float
    """CPU seconds before the first plan was timed."""
    timing_seconds: float
    """CPU seconds in which plans were timed from their pieces."""


def costed(task: Task, possible: Choices, limit: float, told: Told) -> Costed:
    """The costs of all plans; those that need more memory than ``limit`` are not timed."""
    start = process_time()
    seconds, peaks = np.full(len(possible), np.inf), np.zeros(len(possible), np.int64)
    left = list(range(len(possible)))
    groups: dict[Shape, list[int]] = {}
    try:
        table = PlanTable(task, possible)
    except Unpriceable:
        table = None
    if table is not None:
        groups, left = _prepared(table, possible, limit, peaks, told)
        if not any((peaks[rows] <= limit).any() for rows in groups.values()):
            groups, left = _prepared(table, possible, np.inf, peaks, told)
        for shape in list(groups):
            groups[shape] = [row for row in groups[shape] if peaks[row] <= limit]
        left += table.price(groups)
    setup = process_time() - start
    rows = [row for each in groups.values() for row in each]
    timed = len(rows)
    if table is not None:
        seconds[rows] = table.seconds(rows)
    timing = process_time() - start - setup
    impossible: dict[str, list[int]] = defaultdict(list)
    for done, row in enumerate(left):
        told("simulated", done, len(left))
        try:
            trace = task.simulate(possible.settings(row), link_sharing=False)
        except ValueError as error:
            if isinstance(task.model.model, TransformerSpec):       # its spec says what it allows
                raise
            impossible[str(error)].append(row)
        else:
            seconds[row], peaks[row] = trace.makespan_seconds, max(trace.peaks().values())
    if impossible:
        refused = {reason: Refused(len(rows), possible.settings(rows[0])) for reason, rows in impossible.items()}
        kept = np.setdiff1d(np.arange(len(possible)), [row for rows in impossible.values() for row in rows])
        possible = replace(possible.take(kept), refused={**possible.refused, **refused})
        seconds, peaks = seconds[kept], peaks[kept]
        left = [row for row in left if row in kept]
    return Costed(possible, seconds, peaks, timed + len(left), setup, timing)


def _prepared(
    table: PlanTable, possible: Choices, limit: float, peaks: npt.NDArray[np.int64], told: Told
) -> tuple[dict[Shape, list[int]], list[int]]:
    """The rows whose pieces are known, by the shape of their pipeline, and the others; and their ``peaks``.

    A row that holds more than ``limit`` during the whole step is in neither, since it cannot fit: then its peak is what
    it holds, and its actions are not laid out.
    """
    groups: dict[Shape, list[int]] = defaultdict(list)
    left = []
    for row in range(len(possible)):
        if row % 256 == 0:
            told("prepared", row, len(possible))
        try:
            peaks[row] = table.held(row)
            if peaks[row] <= limit:
                table.prepare(row)
                groups[table.shape(row)].append(row)
        except Unpriceable:
            left.append(row)
    for shape, rows in groups.items():
        peaks[rows] = table.peaks(shape, rows)
    return groups, left
