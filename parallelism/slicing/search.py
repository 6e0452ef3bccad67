"""`find_slicing`: the blocks of a model are cut into stages, and each stage gets a mesh of its own size and shape.

Every block is priced once on every mesh (`block_costs`), the dynamic program finds the best slicings, the timeline of
the schedule times them anew with their messages, and the best of these are simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import numpy as np

from parallelism.arrays import Floats
from parallelism.cost import Costs
from parallelism.display.quantities import decimal_bytes, plural
from parallelism.execution.stage_messages import whole_of
from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.pipelining import Pipeline as Scheduled
from parallelism.planning.search import Progress, logged, machine_of, memory_of
from parallelism.planning.trained import BATCH, TrainedModel
from parallelism.rarely_collected import rarely_collected
from parallelism.slicing.block_costs import BlockCosts, in_blocks
from parallelism.slicing.boundaries import Boundaries
from parallelism.slicing.dynamic_program import MOST_STAGES, best_slicings
from parallelism.slicing.sliced_plans import SlicedPlan, SlicedPlans, SlicingTask
from parallelism.slicing.slices import NoSlicingFits, Slices, Slicing, check_at_least
from parallelism.slicing.submeshes import meshes_of, node_of, starts_of, submesh_sizes
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import SGD, Adam, DataParallel, Strategy

_log = logging.getLogger("parallelism")
MOST_BLOCKS = 32
"""Regions with more numbers are put together to so many blocks, unless it is said where these begin."""


@rarely_collected()
def find_slicing(
    model: TransformerSpec | Function | str,
    *,
    hardware: Hardware | str | PathLike[str],
    batch: int,
    microbatches: int,
    devices: int | None = None,
    memory: float | str | None = None,
    optimizer: SGD | Adam | None = None,
    strategy: Strategy | str = "dp tp",
    begin: Sequence[str] | None = None,
    most_blocks: int = MOST_BLOCKS,
    most_stages: int = MOST_STAGES,
    candidates: int = 50,
    simulations: int = 4,
    priced_dtype: str | None = None,
    progress: Progress | None = None,
) -> SlicedPlans:
    """The pipelines of ``model`` whose stages lie on meshes of different sizes, the best first.

    >>> from parallelism import ir, models
    >>> loss = models.mlp((512, 8192, 512, 512), ir.symbol("B"), "f4")
    >>> plans = find_slicing(loss, hardware="dgx-h100", devices=3, batch=4096, microbatches=4)
    >>> print(plans.best)
    dp tp pp@layer.2 1f1b:4,meshes=dp=1.tp=2|dp=1.tp=1

    ``model``, ``hardware``, ``devices``, ``memory`` and ``optimizer`` are as for `parallelism.planning.find_plan`.  The
    blocks ``begin`` at the start and at these regions or values; None: at the regions of the model with numbers, such
    as ``block.1``, of which several are one block if there are more than ``most_blocks``.  A ``batch`` of rows is cut
    into as many equal ``microbatches``, which 1F1B orders.  Inside a stage the ``strategy`` splits the work, over one
    axis or two; over two, every shape of a mesh is tried, and ``tp``, or else the last axis, stays inside a node; an
    axis over which nothing can be split is left out.  A stage has a part of a node, or whole nodes
    (`parallelism.slicing.submeshes`).

    Of the slicings that use all devices, in at most ``most_stages`` stages, the best ``candidates`` are those of
    `best_slicings`.  They are timed by the timeline of their schedule, without shared links, and simulated in the order
    of these times until so many ``simulations`` fit the memory.  A simulation has all devices and microbatches, so
    many of them take minutes: with ``simulations=0`` the timeline alone decides.  ``progress(what, done, all)`` is
    called as the search goes on.

    `NoSlicingFits` if nothing fits; ``TypeError``, ``ValueError`` for a model, a batch or a strategy that cannot be.
    """
    check_at_least(1, batch=batch, microbatches=microbatches, most_blocks=most_blocks)
    check_at_least(0, simulations=simulations)
    if batch % microbatches:
        raise ValueError(f"batch must be a multiple of the {microbatches} microbatches, got {batch}")
    machine, count = machine_of(hardware, devices)
    trained = TrainedModel.of(model, ADAM_W if optimizer is None else optimizer)
    inside = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if trained.precision is not None:
        inside = Strategy(trained.precision, inside)
    begin = trained.begin(min(trained.blocks, most_blocks)) if begin is None else begin
    task = SlicingTask(
        trained.step, inside, tuple(begin), BATCH, batch, microbatches, machine, count, priced_dtype
    )
    limit = memory_of(memory, machine)
    report = progress or logged
    task, costs, refused = _priced(task, report)
    slicings = best_slicings(
        _slices(costs),
        devices=count,
        microbatches=microbatches,
        memory_bytes=limit,
        most_stages=most_stages,
        count=candidates,
    )
    clock = _Timed(task, costs)
    timed = sorted((clock.plan(each) for each in slicings), key=lambda each: each.timeline_seconds)
    _log.info("%d slicings timed of %d blocks on %d meshes", len(timed), len(task.begin) + 1, len(costs))
    return SlicedPlans(task, _simulated(timed, simulations, limit, report), limit, refused)


def _simulated(
    timed: Sequence[SlicedPlan], simulations: int, limit: float, report: Progress
) -> tuple[SlicedPlan, ...]:
    """The plans, so many of which were simulated and fit, the fastest first; then those that were not simulated.

    `NoSlicingFits` if none fits.
    """
    fit = list[SlicedPlan]()
    needed = list[int]()
    left = list(timed)
    while left and len(fit) < simulations:
        report("simulating slicings", len(fit), simulations)
        plan = left.pop(0).simulated()
        assert plan.peak_bytes is not None
        needed.append(plan.peak_bytes)
        fit += [plan] * (plan.peak_bytes <= limit)
    if simulations and not fit:
        simulated = plural(len(needed), "simulated one")
        raise NoSlicingFits(
            f"no slicing fits {decimal_bytes(limit)} a device: of {simulated} the one that needs "
            f"least needs {decimal_bytes(min(needed))}",
            min(needed),
        )
    return *sorted(fit, key=lambda each: each.seconds), *left


def _axes_of(strategy: Strategy) -> tuple[str, ...]:
    """The axes that a strategy splits over; ``ValueError`` for more than two, for none, and for a pipeline."""
    if strategy.pipeline is not None:
        raise ValueError(f"strategy must say what happens inside a stage, without a pipeline; got {strategy}")
    axes = tuple(
        dict.fromkeys(
            axis for each in strategy.transforms if isinstance(axis := getattr(each, "axis", None), str)
        )
    )
    if not 1 <= len(axes) <= 2:
        raise ValueError(
            f"strategy must split over one axis or two, such as dp tp; got {str(strategy)!r}, over "
            f"{' and '.join(axes) or 'none'}"
        )
    return tuple(sorted(axes, key=lambda axis: axis == "tp"))


def _priced(
    task: SlicingTask, report: Progress = logged
) -> tuple[SlicingTask, list[BlockCosts], dict[Mesh, str]]:
    """The costs of all blocks on each mesh that a stage may have; the meshes that cannot be, with the reasons.

    If none can be, one axis of two is left out of the task: the strategy finds nothing to split over it.
    """
    axes = _axes_of(task.strategy)
    node = node_of(task.hardware, task.devices)
    rows_over = [each.axis for each in task.strategy.transforms if isinstance(each, DataParallel)]
    costs: list[BlockCosts] = []
    refused: dict[Mesh, str] = {}
    meshes = [mesh for size in submesh_sizes(node, task.devices) for mesh in meshes_of(size, axes, node)]
    for done, mesh in enumerate(meshes):
        report("pricing blocks on meshes", done, len(meshes))
        if split := next((axis for axis in rows_over if task.rows % mesh.shape[axis]), None):
            refused[mesh] = f"{task.rows} rows of a microbatch are no multiple of {split}={mesh.shape[split]}"
            continue
        try:
            costs.append(
                BlockCosts.of(
                    task.step,
                    task.strategy,
                    task.begin,
                    mesh,
                    task.hardware,
                    batch=task.symbol,
                    rows=task.rows,
                    microbatches=task.microbatches,
                    priced_dtype=task.priced_dtype,
                )
            )
        except ValueError as error:
            refused[mesh] = str(error)
    if costs:
        return task, costs, refused
    for axis in reversed(axes) if len(axes) > 1 else ():
        others = [each for each in task.strategy.transforms if getattr(each, "axis", None) != axis]
        try:
            fewer, costs, more = _priced(replace(task, strategy=Strategy(*others)), report)
        except NoSlicingFits:
            continue
        return fewer, costs, {mesh: reason for mesh, reason in refused.items() if mesh.shape[axis] > 1} | more
    raise NoSlicingFits(f"no mesh can have a stage: {next(iter(refused.values()))}")


def _slices(costs: Sequence[BlockCosts]) -> Slices:
    """The costs of all slices of blocks."""
    seconds = Slices.of_blocks(
        np.stack([each.seconds for each in costs], axis=1), [each.mesh.size for each in costs]
    )
    held, kept = zip(*(each.memory() for each in costs), strict=True)
    return replace(seconds, held_bytes=np.stack(held, axis=2), microbatch_bytes=np.stack(kept, axis=2))


class _Timed:
    """Slicings of a task, timed by the timeline of their schedules."""

    def __init__(self, task: SlicingTask, costs: Sequence[BlockCosts]) -> None:
        self.task, self.costs = task, costs
        step = in_blocks(task.step, task.strategy, task.begin, costs[0].mesh, task.symbol)
        self.boundaries = Boundaries(step, len(task.begin) + 1, task.rows, Costs(task.hardware))

    def plan(self, slicing: Slicing) -> SlicedPlan:
        """The slicing as a plan."""
        own = [self.costs[each.submesh] for each in slicing.slices]
        meshes = tuple(each.mesh for each in own)
        schedule = Scheduled(len(own), self.task.microbatches, "1f1b").schedule
        timeline = schedule.timeline(
            {
                "F": self._of(slicing, [each.forward_seconds for each in own]),
                "B": self._of(slicing, [each.backward_seconds for each in own]),
                "message": self._messages(slicing, meshes),
            }
        )
        updates = self._of(slicing, [each.update_seconds for each in own])
        seconds = max(row[-1].end + update for row, update in zip(timeline.spans, updates, strict=True))
        return SlicedPlan(self.task, slicing, meshes, seconds)

    def _of(self, slicing: Slicing, costs: Sequence[Floats]) -> list[float]:
        """The sums of the blocks of each stage."""
        return [
            float(own[each.first : each.last + 1].sum())
            for each, own in zip(slicing.slices, costs, strict=True)
        ]

    def _messages(self, slicing: Slicing, meshes: Sequence[Mesh]) -> list[float]:
        """The seconds of what passes between each stage and the next."""
        starts = starts_of([mesh.size for mesh in meshes])
        whole = whole_of(meshes)
        return [
            self.boundaries.seconds(each.first, whole, meshes[stage : stage + 2], starts[stage : stage + 2])
            for stage, each in enumerate(slicing.slices[1:])
        ]
