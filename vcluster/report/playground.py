"""The playground: a page on which collectives and schedules are tried out, without Python, installation or network.

The page has the messages of each algorithm, its phases, and the orders of actions of each schedule as tables, which
are written here from the package.  What its script computes (bytes, seconds, the times of a schedule) is in
``playground_sums.js``, which needs no page.
"""

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from os import PathLike
from typing import Any

import numpy as np

from parallelism.algorithms import COLLECTIVES, Phase, record_of
from parallelism.algorithms.algorithms import algorithm
from parallelism.algorithms.phases import names, phases
from parallelism.pipelining import Pipeline, Schedule
from parallelism.pipelining.generators import CHUNKED, SCHEDULES, V_SHAPED
from parallelism.whole_files import written_whole
from vcluster.report.page import page

RANKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""The numbers of ranks of the page's collectives."""
PIPELINE_RANKS = (2, 4, 8)
MICROBATCHES = (2, 4, 8, 16)
SECTIONS = {"collectives": "playground_collectives.js", "schedules": "playground_schedules.js"}
_LEFT_OUT = {"permute", "barrier"}     # their messages follow from the caller's pairs, or have no bytes


def playground(path: str | PathLike[str]) -> None:
    """Write the page to ``path``.  ``OSError`` if it cannot be written."""
    data = {
        "title": "Collectives and pipelines: a playground", "facts": [], "left_out": [],
        "verdict": ["Choose an algorithm or a schedule, and see each message and each wait.",
                    "All orders are those that vcluster runs. The address of this page keeps your choice."],
        "collectives": collectives(), "schedules": schedules()}
    with written_whole(path) as file:
        file.write(page(data, "playground.html", SECTIONS, ("page.css", "playground.css"), ("playground_sums.js",)))


def collectives() -> dict[str, Any]:
    """By kind, algorithm and number of ranks: the pieces of the buffer, the steps and the phases.

    A step is a list of [source, target, 1 if the target adds, first piece, how many, first piece, how many, ...].  A
    phase is [how often, parts that the busiest rank sends or receives, of how many].
    """
    found: dict[str, Any] = {}
    for kind in COLLECTIVES:
        if kind in _LEFT_OUT:
            continue
        for size in RANKS:
            for name in names(kind, size):
                if record_of(kind, name, size).steps is None:
                    continue
                plan = algorithm(kind, name, size)
                steps = [[[each.source, each.target, int(each.reduce), *_runs(each.chunks)] for each in step]
                         for step in plan.steps]
                prices = [[len(list(alike)), *each] for each, alike in groupby(
                    each for phase in phases(kind, name, size) for each in [_busiest(phase)] * phase.times)]
                found.setdefault(kind, {}).setdefault(name, {})[size] = [plan.chunks_of_buffer, steps, prices]
    return found


def _runs(chunks: Iterable[int]) -> list[int]:
    """The chunks as first, how many, first, how many, ..."""
    runs: list[int] = []
    for chunk in chunks:
        if runs and chunk == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [chunk, 1]
    return runs


def _busiest(phase: Phase) -> tuple[int, int]:
    """The parts that the busiest rank of a phase sends or receives, and of how many."""
    count = partial(np.bincount, weights=phase.parts)
    return int(max(count(phase.sources).max(), count(phase.targets).max())), phase.whole


def schedules() -> dict[str, Any]:
    """By name, and by stages, microbatches and chunks: the placement of the stages, and each rank's actions in order.

    A rank's actions are [kind, stage, microbatch, ...] in one list; kinds are numbers in the order F, B, I, W.
    """
    found: dict[str, Any] = {}
    for name in SCHEDULES:
        chunk_counts = (2, 4) if name in CHUNKED else (2,) if name in V_SHAPED else (1,)
        for ranks in PIPELINE_RANKS:
            for microbatches in MICROBATCHES:
                for chunks in chunk_counts:
                    try:
                        schedule = Pipeline(ranks * chunks, microbatches, name, chunks).schedule
                    except ValueError:             # the schedule has no order for these sizes
                        continue
                    found.setdefault(name, {})[f"{ranks * chunks}/{microbatches}/{chunks}"] = _order(schedule)
    return found


def _order(schedule: Schedule) -> dict[str, Any]:
    return {"placement": schedule.placement, "local": schedule.local, "rows": [
        [number for stage, kind, k in row for number in ("FBIW".index(kind), stage, k)] for row in schedule.works]}
