"""`BlockCosts`: seconds and memory of every block of a training step on one mesh, by a simulation of all of them.

The blocks are the stages of a pipeline whose one position has them all, for one microbatch.  So a block does there what
it does in a stage (`parallelism.execution.TrainedPipeline` with ``meshes``), and its price is that of the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Floats
from parallelism.execution import PipelinedProgram
from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.ir.passes import Form
from parallelism.ir.passes.chunked_collectives import chunked_over
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import Stages
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.mesh import Mesh
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.transforms import Fused, Overlap, Pipeline, Step, Strategy


def in_blocks(step: Function, strategy: Strategy, begin: Sequence[str], mesh: Mesh, batch: str) -> Step:
    """The step cut before every block, with all stages at one position, on a mesh."""
    cut = Strategy(
        strategy,
        Pipeline(
            microbatches=1,
            schedule="interleaved_1f1b" if begin else "1f1b",
            chunks=len(begin) + 1,
            begin=tuple(begin),
            batch=batch,
            meshes=(mesh,),
        ),
    )(step)
    assert isinstance(cut, Step)
    return cut


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """The costs of each block on a mesh; of the device with most of it."""

    mesh: Mesh
    forward_seconds: Floats
    backward_seconds: Floats
    update_seconds: Floats
    """The seconds of the optimizer, at the end of the step."""
    static_bytes: Floats
    """What is held during the whole step: weights, sums of gradients, state, and the data of all microbatches."""
    kept_bytes: Floats
    """What is kept from the forward of a microbatch to its backward."""
    forward_peak_bytes: Floats
    """The most that a forward holds, beside what was held before."""
    backward_peak_bytes: Floats
    """The most that a backward holds, beside what was held before."""

    @classmethod
    def of(
        cls,
        step: Function,
        strategy: Strategy,
        begin: Sequence[str],
        mesh: Mesh,
        hardware: Hardware,
        *,
        batch: str,
        rows: int,
        microbatches: int,
        priced_dtype: str | None = None,
    ) -> BlockCosts:
        """The costs of blocks that ``begin`` at the start and at these regions, for microbatches of so many rows.

        ``ValueError`` if the strategy cannot lay the step out on the mesh.
        """
        cut = in_blocks(step, strategy, begin, mesh, batch)
        whole = Mesh(pp=1, **mesh.shape)
        program = _OnOneMesh(cut, whole, fused=hardware.fused, overlapping=hardware.overlapping)
        trace = simulate(
            program,
            hardware,
            mesh=whole,
            batch=rows,
            link_sharing=False,
            fold=True,
            op_by_op=True,
            priced_dtype=priced_dtype,
        )
        blocks = len(begin) + 1
        actions = np.max([list(_actions(trace, rank, blocks)) for rank in trace.ranks], axis=0)
        forward, backward = actions[:blocks], actions[blocks:]
        static = np.array([_held(program, whole, number, rows, microbatches) for number in range(blocks)])
        update, state = np.array([*_updates(cut, program.stages, mesh, hardware, priced_dtype)]).T
        return cls(
            mesh,
            forward[:, 0],
            backward[:, 0],
            update,
            static + state,
            forward[:, 2],
            forward[:, 1],
            backward[:, 1],
        )

    @property
    def seconds(self) -> Floats:
        """The seconds of the forward and backward of each block."""
        return self.forward_seconds + self.backward_seconds

    def memory(self) -> tuple[Floats, Floats]:
        """For every slice ``[first, end]``: what a device holds whatever is on its way, and what each microbatch adds.

        With n microbatches on their way it holds at most ``static + (n - 1) * kept`` and the more of what a forward
        takes, and of ``kept`` and what a backward takes.
        """
        blocks = len(self.kept_bytes)
        held, each = np.zeros((blocks, blocks + 1)), np.zeros((blocks, blocks + 1))
        for first in range(blocks):
            kept = static = forward = backward = 0.0
            for end in range(first + 1, blocks + 1):
                block = end - 1
                forward = max(forward, kept + self.forward_peak_bytes[block])
                # The backward of a block before finds that what this one keeps is freed.
                backward = max(float(self.backward_peak_bytes[block]), backward - self.kept_bytes[block])
                kept, static = kept + self.kept_bytes[block], static + self.static_bytes[block]
                held[first, end] = static + max(forward - kept, backward, 0.0)
                each[first, end] = kept
        return held, each


class _OnOneMesh(PipelinedProgram):
    """The stages of a step whose pipeline has one mesh of its own.  They do what they do there, without an update:
    each block has one of its own, which is priced by itself.

    All devices do the same, so one can stand for all in a simulation.  ``mesh`` is that mesh, with an axis of one
    device for the pipeline: the groups of the devices lie along its axes.
    """

    def __init__(
        self, step: Step, mesh: Mesh, *, fused: bool | str = False, overlapping: bool = False
    ) -> None:
        pipeline = step.pipeline.on(mesh)
        stages, sums = step.stages(pipeline.stages), step.sum_dtypes
        shape = {axis: n for axis, n in mesh.shape.items() if axis != pipeline.axis}
        inside = Mesh(**shape) if shape else None
        if inside is not None and inside.size > 1:
            stages = laid_out_stages(stages, inside, sums, [inside] * len(stages))
        self.chunked = chunked_over(step.function)
        self.set_up(
            stages,
            pipeline,
            inside,
            (),
            sums,
            Overlap.of(step.function),
            fused or Fused.of(step.function) is not None,
            overlapping,
        )


def _actions(trace: Trace, rank: int, blocks: int) -> Iterator[tuple[float, float, float]]:
    """The forwards of all blocks on a rank, then the backwards: seconds, most bytes held, and bytes left behind."""
    events = [event for event in trace if event.rank == rank]
    names = [f"{block}F0" for block in range(blocks)] + [f"{block}B0" for block in range(blocks)]
    labels = {
        event.name: place
        for place, event in enumerate(events)
        if event.kind == "compute" and event.name in names
    }
    order = sorted(labels.values())
    last = 1 + max(place for place, event in enumerate(events) if event.stage is not None)
    for name in names:
        start = labels[name]
        end = next((place for place in order if place > start), last)
        seconds = events[end].start_seconds if end < len(events) else trace.makespan_seconds
        held: Floats = np.cumsum(
            [0.0] + [event.nbytes for event in events[start:end] if event.kind == "memory"]
        )
        yield seconds - events[start].start_seconds, float(held.max()), float(held[-1])


class _Update(NamedTuple):
    """The time and the memory that the update of a block takes."""

    seconds: float
    state_bytes: int
    """The bytes of the optimizer's state: that of the block's parameters, and what all parameters share."""


def _updates(
    step: Step, stages: Stages, mesh: Mesh, hardware: Hardware, priced_dtype: str | None
) -> Iterator[_Update]:
    """The update of each block; those that differ in names alone are laid out and simulated once."""
    layouts = {value.name: value.layout for value in stages.function.inputs if value.layout}
    state = {value.name for value in step.parts.state}
    known: dict[Form, _Update] = {}
    for functions in stages.functions:
        if not functions.trained:
            yield _Update(0.0, 0)
            continue
        update = step.update(functions.trained, layouts)
        form = Form([update])
        if form not in known:
            trace = simulate(
                update, hardware, mesh=mesh, fold=True, link_sharing=False, priced_dtype=priced_dtype
            )
            local = localize(update, mesh).program(0)
            known[form] = _Update(
                trace.makespan_seconds,
                sum(
                    int(own.type.nbytes)
                    for value, own in zip(update.inputs, local.inputs, strict=True)
                    if value.name in state
                ),
            )
        yield known[form]


def _held(program: PipelinedProgram, mesh: Mesh, number: int, rows: int, microbatches: int) -> int:
    """The bytes that a block holds during the whole step, without the state of the optimizer."""
    programs = program.programs(number, {}, rows, mesh, 0)
    weights = sum(int(type.nbytes) for type in programs.weight_types)
    sums = sum(int(type.nbytes) for type in programs.sum_types)
    data = sum(int(type.nbytes) for type in programs.data((0, rows)))
    return weights + sums + microbatches * data
