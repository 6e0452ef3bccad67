"""The plans that are simulated by themselves: of many those that promise most; the others are told with the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.events.columns import combined
from parallelism.models import TransformerSpec
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.settings import AXES, SETTINGS
from parallelism.planning.space import Choices
from parallelism.symbolic.events import Unpriceable
from parallelism.training.state_sharding import FULLY_SHARDED

PROMISING = "are more promising"
"""Stands in the reason why plans that are expected to take longer than others are refused."""
MOST_LEFT = 2
"""So many plans of a program are simulated by themselves, where others are put together from pieces."""
MOST_OPS_ALONE = 250_000
"""So many ops have the plans of a program, together, that are all simulated by themselves."""
MOST_OF_MESHES = 80_000
"""So many ops have those that are simulated of more, beside one plan of each mesh; `LEAST_OF_MESHES` plans at least."""
LEAST_OF_MESHES = 16
BY_MESH = f"{PROMISING}, by one plan of each mesh; fix settings for others"
"""The reason why the other plans of meshes are refused, behind the number of those that were simulated."""
MOST_SHARDED = 8
"""So many plans with FSDP that nobody asked for by name are simulated by themselves."""
MOVED_BY_FSDP = 4 / 3
"""The bytes that FSDP moves in a microbatch, for each that the end of a step with ZeRO-1 moves: it sums gradients of 32 bits
in both, and gathers parameters of 16 bits twice in place of once."""
EXPECTED = 0.95
"""A plan that is expected to need this share of the memory is taken to fit."""
Told = Callable[[str, int, int], None]
Simulated = dict[int, tuple[float, int] | str]
"""By row the seconds and the peak of a plan, or why its program does not allow it."""


def simulated_alone(
    task: Task,
    possible: Choices,
    table: PlanCosts | None,
    left: Mapping[int, str],
    seconds: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
    told: Told,
) -> tuple[Simulated, Mapping[int, str], dict[str, list[int]]]:
    """Of the rows without pieces the results of those that are simulated, the reasons, and the others by the reason.

    How devices and stages lie decides most of the seconds of a program; microbatches, recomputation and ZeRO decide the
    rest, and whether a plan fits.  So of many plans one of each mesh says which promise most.
    """
    rest: Mapping[str, list[int]] = {}
    first: Simulated = {}
    ops = task.model.ops
    if table is not None:
        left, rest = _fewer(table, left, seconds, limits)
    elif len(left) * ops > MOST_OPS_ALONE:
        of_mesh = one_of_each_mesh(possible, [*left])
        first = _all_simulated(task, possible, [*of_mesh], told)
        order = sorted(of_mesh, key=lambda row: _promise(first[row], float(limits[row])))
        kept = most_promising(
            [of_mesh[row] for row in order], order, max(LEAST_OF_MESHES, MOST_OF_MESHES // ops)
        )
        rest = {f"{len(kept)} {BY_MESH}": [row for row in left if row not in kept]}
        left = {row: left[row] for row in sorted(kept)}
    later = _all_simulated(task, possible, [row for row in left if row not in first], told)
    return {**first, **later}, left, {reason: rows for reason, rows in rest.items() if rows}


def _all_simulated(task: Task, possible: Choices, rows: Sequence[int], told: Told) -> Simulated:
    """What the simulations of the rows say; they run side by side on all cores."""
    found = task.all_seconds_and_peaks([possible.settings(row) for row in rows], partial(told, "simulated"))
    return dict(zip(rows, found, strict=True))


def _promise(result: tuple[float, int] | str, limit: float) -> tuple[float, float]:
    """How little a simulated plan promises: by the memory that it lacks, and then by its seconds."""
    if isinstance(result, str):
        return np.inf, np.inf
    seconds, peak = result
    return max(peak / limit, EXPECTED), seconds


def one_of_each_mesh(possible: Choices, rows: Sequence[int]) -> dict[int, list[int]]:
    """The rows of each mesh, number of stages and schedule, by the row that stands for them: one that runs nothing again,
    shares out most of the state, and has a microbatch in the middle of theirs."""
    of_mesh: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        mesh = tuple([int(possible[name][row]) for name in (*AXES, "chunks", "schedule")])
        of_mesh.setdefault(mesh, []).append(row)
    recompute, found = possible.words["recompute"], {}
    for own in of_mesh.values():
        sizes = sorted({int(possible["microbatch"][row]) for row in own})
        middle = sizes[len(sizes) // 2]

        def rank(row: int, middle: int = middle) -> tuple[Any, ...]:
            runs_again = recompute[possible["recompute"][row]] != "none"
            return possible["microbatch"][row] != middle, runs_again, -possible["zero"][row], row

        found[min(own, key=rank)] = own
    return found


def most_promising(plans: Sequence[Sequence[int]], first: Sequence[int], room: int) -> set[int]:
    """The ``first`` row of each mesh, and so many of the other rows of meshes, whose ``plans`` are given best first."""
    kept = set(first)
    for own in plans:
        others = [row for row in own if row not in kept]
        kept.update(others[:room])
        room -= min(room, len(others))
    return kept


def _fewer(
    table: PlanCosts,
    left: Mapping[int, str],
    seconds: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
) -> tuple[Mapping[int, str], Mapping[str, list[int]]]:
    """Those of the rows that are simulated by themselves, and the others by the reason."""
    if not isinstance(table.task.model.model, TransformerSpec):
        return most_like_the_best(table.possible, left, seconds)
    if table.possible.fully_sharded:
        return _fewer_sharded(table, left, limits)
    return left, {}


def most_like_the_best(
    possible: Choices, left: Mapping[int, str], seconds: npt.NDArray[np.float64]
) -> tuple[dict[int, str], dict[str, list[int]]]:
    """Those of the rows that are simulated by themselves, and the others by the reason: all of the rows, if no plan is put
    together from pieces.

    Otherwise `MOST_LEFT`, those that are most like the best of the others: a program of many ops takes seconds for each.
    ``seconds`` are by row, infinite where they are not known.
    """
    rest: dict[str, list[int]] = defaultdict(list)
    best = int(np.argmin(seconds))
    if not np.isfinite(seconds[best]) or len(left) <= MOST_LEFT:
        return dict(left), rest
    rows = np.fromiter(left, np.int64)
    names = [name for name in SETTINGS if name not in ("dp", "microbatch")]
    differing = sum((possible[name][rows] != possible[name][best]).astype(np.int64) for name in names)
    apart = np.abs(np.log2(possible["microbatch"][rows] / possible["microbatch"][best]))
    order = rows[np.lexsort((rows, apart, possible["tp"][rows], differing))]
    for row in order[MOST_LEFT:].tolist():
        reason = f"{left[row]}, and only {MOST_LEFT} such plans are simulated; fix their settings for others"
        rest[reason].append(row)
    return {row: left[row] for row in order[:MOST_LEFT].tolist()}, rest


def _fewer_sharded(
    table: PlanCosts, left: Mapping[int, str], limits: npt.NDArray[np.float64]
) -> tuple[dict[int, str], dict[str, list[int]]]:
    """Those of the rows with FSDP that promise most, `MOST_SHARDED`, and the others by the reason.

    A plan is expected to take as long as the same one with ZeRO-1, without its end: FSDP sums gradients and gathers
    parameters beside the actions.  But it does so in each microbatch, and gathers once more in the backward: where this
    takes longer than the actions, so does the step.  The device holds its share alone of weights and gradients.
    """
    rows = [row for row in left if table.possible["zero"][row] == FULLY_SHARDED]
    if len(rows) <= MOST_SHARDED:
        return dict(left), {}
    expected = dict(zip(rows, _expected_sharded(table, rows), strict=True))
    beyond = {row: max(peak / limits[row], EXPECTED) for row, (_, peak) in expected.items()}
    rows.sort(key=lambda row: (beyond[row], expected[row][0]))
    others = set(rows[MOST_SHARDED:])
    reason = f"{MOST_SHARDED} plans with FSDP {PROMISING}, by those with ZeRO-1; fix settings for others"
    return {row: why for row, why in left.items() if row not in others}, {reason: sorted(others)}


def _expected_sharded(table: PlanCosts, rows: Sequence[int]) -> Iterator[tuple[float, float]]:
    """The seconds and the peak that are expected of each plan with FSDP, by that with ZeRO-1."""
    columns = table.possible.columns
    keys = combined(*(column for name, column in columns.items() if name not in ("zero", "overlap")))
    once = np.flatnonzero((columns["zero"] == 1) & (columns["overlap"] == 0))
    with_key = dict(zip(keys[once].tolist(), once.tolist(), strict=True))
    for row in rows:
        try:
            yield _expected_from(table, with_key[int(keys[row])])
        except Unpriceable:
            yield 0.0, 0.0


def _expected_from(table: PlanCosts, row: int) -> tuple[float, float]:
    """The seconds and the peak that are expected of a plan with FSDP, where this row has ZeRO-1."""
    table.prepare(row)
    end, peak = table.end_seconds(row), int(table.peaks(table.shape(row), [row])[0])
    (costs, place, blocks), *_ = table.devices(row)
    held = table.held_by_category(row, costs, place, blocks)
    shared = (held["weights"] + held["gradients"]) * (1 - 1 / table.settings(row)["dp"])
    actions = float(table.seconds([row])[0]) - end
    return max(actions, table.microbatches(row) * MOVED_BY_FSDP * end), peak - shared
