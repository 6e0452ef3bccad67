"""The plans that are simulated by themselves: of many those that promise most; the others are told with the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
ONLY_SOME = "such plans are simulated; fix their settings for others"
"""Stands in the reason why plans are refused of which a few others are simulated."""
MOST_LEFT = 2
"""So many plans of a program are simulated by themselves, where others are put together from pieces."""
MOST_PIPELINES = 12
"""So many plans of several stages of a program without equal blocks are simulated, where a plan of one stage fits."""
MOST_OPS_ALONE = 250_000
"""So many ops have the plans of a program, together, that are all simulated by themselves."""
MOST_OF_MESHES = 80_000
"""So many ops have those that are simulated of more, beside one plan of each mesh; `LEAST_OF_MESHES` plans at least."""
LEAST_OF_MESHES = 16
BY_MESH = f"{PROMISING}, by one plan of each mesh; fix settings for others"
"""The reason why the other plans of meshes are refused, behind the number of those that were simulated."""
BY_ONE_STAGE = f"plans of several stages {PROMISING}, by those of one; fix settings for others"
"""The reason why other plans of several stages are refused, behind the number of those that were simulated."""
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


def leaves_some_out(reasons: Iterable[str]) -> bool:
    """Whether some plans were refused although they can be: then a search has not timed them."""
    return any(PROMISING in reason or ONLY_SOME in reason for reason in reasons)


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
    ops, every = task.model.ops, left
    if table is not None:
        left, rest = _fewer(table, left, seconds, limits)
    if len(left) * ops > MOST_OPS_ALONE:
        of_mesh = one_of_each_mesh(possible, [*left])
        first = _all_simulated(task, possible, [*of_mesh], told)
        order = sorted(of_mesh, key=lambda row: _promise(first[row], float(limits[row])))
        kept = most_promising(
            [of_mesh[row] for row in order], order, max(LEAST_OF_MESHES, MOST_OF_MESHES // ops)
        )
        rest = {**rest, f"{len(kept)} {BY_MESH}": [row for row in left if row not in kept]}
        left = {row: left[row] for row in sorted(kept)}
    simulated = first | _all_simulated(task, possible, [row for row in left if row not in first], told)
    for reason in [reason for reason in rest if reason.endswith(BY_ONE_STAGE)]:
        cannot_be = sum(isinstance(simulated[row], str) for row in left)
        while cannot_be and rest[reason]:  # the next ones that promise most take their places
            more = rest[reason][:cannot_be]
            rest = {**rest, reason: rest[reason][cannot_be:]}
            found = _all_simulated(task, possible, more, told)
            simulated, left = simulated | found, {**left, **{row: every[row] for row in more}}
            cannot_be = sum(isinstance(each, str) for each in found.values())
    return simulated, left, {reason: rows for reason, rows in rest.items() if rows}


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
    if table.task.model.is_whole:
        return _fewer_of_whole(table, left, seconds, limits)
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
        reason = f"{left[row]}, and only {MOST_LEFT} {ONLY_SOME}"
        rest[reason].append(row)
    return {row: left[row] for row in order[:MOST_LEFT].tolist()}, rest


def _fewer_of_whole(
    table: PlanCosts,
    left: Mapping[int, str],
    seconds: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
) -> tuple[Mapping[int, str], Mapping[str, list[int]]]:
    """Of a program without equal blocks those of several stages that promise most, and those of one stage that are most
    like the best; all, if no plan of one stage fits."""
    if not np.isfinite(seconds).any():
        return left, {}
    stages = table.possible["pp"]
    kept, rest = most_like_the_best(
        table.possible, {row: why for row, why in left.items() if stages[row] == 1}, seconds
    )
    several = [row for row in left if stages[row] > 1]
    if len(several) > MOST_PIPELINES:
        expected = dict(zip(several, _expected_of_stages(table, several), strict=True))
        several.sort(key=lambda row: (max(expected[row][1] / limits[row], EXPECTED), expected[row][0]))
        rest[f"{MOST_PIPELINES} {BY_ONE_STAGE}"] = several[MOST_PIPELINES:]
    kept |= {row: left[row] for row in several[:MOST_PIPELINES]}
    return dict(sorted(kept.items())), rest


def _expected_of_stages(table: PlanCosts, rows: Sequence[int]) -> Iterator[tuple[float, float]]:
    """The seconds and the peak that are expected of each plan of several stages, infinite where they are not known.

    Each stage is taken to have an equal share of what one stage does and holds; and to wait for the others at the ends, as
    pipelines do.  It keeps as many microbatches as there are stages at most, of its share: as much as one stage does.
    """
    possible = table.possible.take(np.array(rows))
    stages, chunks = possible["pp"].tolist(), possible["chunks"].tolist()
    one = dict.fromkeys(("pp", "chunks"), np.ones(len(rows), np.int64))
    schedules = ("1f1b",) * len(possible.words["schedule"])
    alone = replace(
        possible,
        columns={**possible.columns, **one},
        words={**possible.words, "schedule": schedules},
    )
    of_one = PlanCosts(table.task, alone)
    for row, (pp, several) in enumerate(zip(stages, chunks, strict=True)):
        try:
            found = _Parts.of(of_one, row)
        except Unpriceable:
            yield np.inf, np.inf
            continue
        waits = 1 + (pp - 1) / (of_one.microbatches(row) * several)
        held = sum(found.held.values())
        yield (found.actions * waits + found.end) / pp, found.peak - held * (1 - 1 / pp)


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
    parts = _Parts.of(table, row)
    shared = (parts.held["weights"] + parts.held["gradients"]) * (1 - 1 / table.settings(row)["dp"])
    return max(parts.actions, table.microbatches(row) * MOVED_BY_FSDP * parts.end), parts.peak - shared


class _Parts(NamedTuple):
    """What a plan that is put together from pieces takes and holds."""

    actions: float
    """The seconds of all before the end of the step."""
    end: float
    peak: int
    held: Mapping[str, int]
    """The bytes that the first device holds during the whole step, by category."""

    @classmethod
    def of(cls, table: PlanCosts, row: int) -> _Parts:
        """`Unpriceable` if the plan is not put together from pieces."""
        table.prepare(row)
        end, peak = table.end_seconds(row), int(table.peaks(table.shape(row), [row])[0])
        (costs, place, blocks), *_ = table.devices(row)
        held = table.held_by_category(row, costs, place, blocks)
        return cls(float(table.seconds([row])[0]) - end, end, peak, held)
