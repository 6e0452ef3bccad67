"""The playground: a page on which the ideas of the package are tried out, without Python, installation or network.

The page has the messages of each algorithm, its phases, the orders of actions of each schedule, the steps from each
layout to each other, and the seconds of products as tables, which are written here from the package.  The plans of some
searches and some steps of serving are kept in ``playground_plans.json`` and ``playground_serving.json``, because they
take seconds (`benchmarks.playground_plans`, `benchmarks.playground_serving`).  What its script computes (bytes,
seconds, the times of a schedule) is in ``playground_sums.js``, which needs no page.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.resources import files
from itertools import permutations, product
from os import PathLike
from typing import Any

import numpy as np

from parallelism.algorithms import COLLECTIVES, Phase, Transfer, record_of
from parallelism.algorithms.algorithms import algorithm
from parallelism.algorithms.phases import names, phases
from parallelism.cost import Costs
from parallelism.hardware import Hardware
from parallelism.hardware.files import presets
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline, Schedule
from parallelism.pipelining.generators import SCHEDULES
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from parallelism.whole_files import written_whole
from vcluster.report.page import page

RANKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""The numbers of ranks of the page's collectives."""
PIPELINE_RANKS = (2, 4, 8)
MICROBATCHES = (2, 4, 8, 16)
MESHES = (Mesh(x=2), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=3))
SHAPES = ((8, 12), (7, 10))
"""The tensors of the page's layouts: one that every axis divides, one with uneven shards."""
EXTENTS = (1, 16, 64, 256, 1024, 4096, 16384)
"""The extents m, n and k of the page's products."""
SECTIONS = {
    "collectives": "playground_collectives.js",
    "layouts": "playground_layouts.js",
    "schedules": "playground_schedules.js",
    "products": "playground_products.js",
    "plans": "playground_plans.js",
    "serving": "playground_serving.js",
}
_LEFT_OUT = {"permute", "barrier"}  # their messages follow from the caller's pairs, or have no bytes


def playground(path: str | PathLike[str]) -> None:
    """Write the page to ``path``.  ``OSError`` if it cannot be written."""
    data = {
        "title": "Collectives, layouts, pipelines, plans, serving: a playground",
        "facts": [],
        "left_out": [],
        "verdict": [
            "Choose an algorithm, a layout, a schedule, a product, a plan or a batch, and see what moves and waits.",
            "All orders are those that vcluster runs. The address of this page keeps your choice.",
        ],
        "collectives": collectives(),
        "layouts": layouts(),
        "schedules": schedules(),
        "products": products(),
        "plans": plans(),
        "serving": serving(),
    }
    with written_whole(path) as file:
        file.write(
            page(data, "playground.html", SECTIONS, ("page.css", "playground.css"), ("playground_sums.js",))
        )


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
                of_size = [
                    plan.chunks_of_buffer,
                    [_transfers(step) for step in plan.steps],
                    _phases(kind, name, size),
                ]
                found.setdefault(kind, {}).setdefault(name, {})[size] = of_size
    return found


def _transfers(step: Iterable[Transfer]) -> list[list[int]]:
    return [[each.source, each.target, int(each.reduce), *_runs(each.chunks)] for each in step]


def _phases(kind: str, name: str, size: int) -> list[list[int]]:
    """Phases in which the busiest rank does the same, as one."""
    found: list[list[int]] = []
    for phase in phases(kind, name, size):
        busiest = [*_busiest(phase)]
        if found and found[-1][1:] == busiest:
            found[-1][0] += phase.times
        else:
            found.append([phase.times, *busiest])
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
        kind = SCHEDULES[name]
        chunk_counts = (2, 4) if kind.is_interleaved else (kind.fewest_chunks,)
        for ranks, microbatches, chunks in product(PIPELINE_RANKS, MICROBATCHES, chunk_counts):
            try:
                schedule = Pipeline(ranks * chunks, microbatches, name, chunks).schedule
            except ValueError:  # the schedule has no order for these sizes
                continue
            found.setdefault(name, {})[f"{ranks * chunks}/{microbatches}/{chunks}"] = _order(schedule)
    return found


def _order(schedule: Schedule) -> dict[str, Any]:
    rows: list[list[int]] = []
    for works in schedule.works:
        rows.append([])
        for stage, kind, k in works:
            rows[-1] += ["FBIW".index(kind), stage, k]
    return {"placement": schedule.placement, "local": schedule.local, "rows": rows}


def layouts() -> dict[str, Any]:
    """By mesh and shape: the layouts, the block of each rank under each of them, and the steps between the layouts.

    The first ``choices`` of the layouts can be chosen; the others are passed through.  A block is [first row, end,
    first column, end].  A step is [kind, axes, what changes, number of the layout after it, bytes of float32 that each
    rank receives].  ``steps`` has a list of them by source and target.
    """
    found: dict[str, Any] = {}
    for mesh in MESHES:
        places = [_text_of(index, " ") for index in mesh]
        shapes = {"x".join(map(str, shape)): _layouts_of(shape, mesh) for shape in SHAPES}
        found[_text_of(mesh.shape)] = {
            "places": places,
            "columns": mesh.shape[mesh.axes[-1]],
            "shapes": shapes,
        }
    return found


def _layouts_of(shape: tuple[int, int], mesh: Mesh) -> dict[str, Any]:
    offered = list(_layouts_on(mesh))
    numbers = {layout: number for number, layout in enumerate(offered)}
    steps: list[list[Any]] = []
    for source in offered:
        plans = (plan_resharding(source, target, shape, np.float32, mesh) for target in offered)
        steps.append([_steps(plan, numbers) for plan in plans])
    return {
        "choices": len(offered),
        "steps": steps,
        "layouts": [layout.short() for layout in numbers],
        "partial": [bool(layout.partial) for layout in numbers],
        "blocks": [_blocks(layout, shape, mesh) for layout in numbers],
    }


def _blocks(layout: TensorSharding, shape: tuple[int, int], mesh: Mesh) -> list[list[int]]:
    found = []
    for rank in range(mesh.size):
        rows, columns = layout.slices(shape, mesh, rank)
        found.append([rows.start, rows.stop, columns.start, columns.stop])
    return found


def _text_of(numbers: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{axis}={number}" for axis, number in numbers.items())


def _layouts_on(mesh: Mesh) -> Iterable[TensorSharding]:
    """All layouts of a matrix: each axis splits rows or columns, in any order, or nothing, or has a pending sum."""
    for uses in product(("nothing", "rows", "columns", "sum"), repeat=len(mesh.axes)):
        axes: dict[str, list[str]] = {"nothing": [], "rows": [], "columns": [], "sum": []}
        for axis, use in zip(mesh.axes, uses, strict=True):
            axes[use].append(axis)
        for dims in product(permutations(axes["rows"]), permutations(axes["columns"])):
            yield TensorSharding(*dims, partial=tuple(axes["sum"]))


def _steps(plan: ReshardingPlan, numbers: dict[TensorSharding, int]) -> list[list[Any]]:
    return [
        [
            step.kind,
            ", ".join(step.axes),
            step.moved,
            numbers.setdefault(step.after, len(numbers)),
            step.bytes_received,
        ]
        for step in plan.steps
    ]


def products() -> dict[str, Any]:
    """By hardware: its rates and the seconds of a product of (m, k) and (k, n) matrices, for all m, n, k in that order.

    The elements have two bytes: bfloat16 or else float16.  CPUs, which compute in neither, are left out.
    """
    found: dict[str, Any] = {}
    for name in presets():
        hardware = Hardware.preset(name)
        dtype = next((dtype for dtype in ("bfloat16", "float16") if dtype in hardware.flops_per_second), None)
        if dtype is not None:
            found[name] = {
                "title": hardware.title,
                "dtype": dtype,
                "flops_per_second": hardware.flops_per_second[dtype],
                "bytes_per_second": hardware.memory_bytes_per_second,
                "seconds": [
                    Costs(hardware).compute_seconds(
                        2 * m * n * k, 2 * (m * k + k * n + m * n), dtype=dtype, shape=(1, m, n, k)
                    )
                    for m, n, k in product(EXTENTS, repeat=3)
                ],
            }
    return {"extents": EXTENTS, "hardware": found}


def plans() -> dict[str, Any]:
    """By question: the names of the settings that differ; of each plan that fits these, its seconds and its bytes."""
    return _kept("playground_plans.json")


def serving() -> dict[str, Any]:
    """By model and precision: the bytes of a device by ``tp``, and the seconds of decode steps by what they are spent on, by
    ``tp``, tokens in the cache and requests at a time; None where the cache does not fit."""
    return _kept("playground_serving.json")


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("vcluster.report") / name).read_text("utf-8"))
    return found
