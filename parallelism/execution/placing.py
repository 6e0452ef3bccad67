"""A program, or a step cut into a pipeline, as the operation that runs it on a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from parallelism.execution.executable import Executable
from parallelism.execution.trained_pipeline import TrainedPipeline
from parallelism.hardware import Software
from parallelism.ir import Function
from parallelism.ir.passes import with_room
from parallelism.ir.passes.given_arrays import one_of, sized_by
from parallelism.mesh import Mesh
from parallelism.pipelining.generators import SCHEDULES, ScheduleKind
from parallelism.transforms.parts import NEXT
from parallelism.transforms.pipelines import Step
from parallelism.transforms.training import carried, categories


def operation_on(
    program: Any,
    mesh: Mesh,
    *,
    fused: bool | str = False,
    overlapping: bool = False,
    gradient_buffers: bool = False,
) -> Any:
    """What runs a `parallelism.ir.Function` or a `parallelism.transforms.Step` on ``mesh``; any other ``program``.

    A function becomes an `Executable`.  If it is a training step, its memory is counted as weights, gradients and
    state, and new parameters and state lie in the memory of the old ones.  A step becomes a `TrainedPipeline`.  Equal
    programs on equal meshes become one operation, which is prepared once.  ``fused``: chains of elementwise ops run as
    one there, as under `parallelism.transforms.Fused`.  ``overlapping``: collectives of a backward run beside products
    (`parallelism.execution.overlapping.beside_products`).  ``gradient_buffers``: a `TrainedPipeline` of a single
    microbatch has buffers of gradients, as others do.  A hardware says so of its software.
    """
    if not isinstance(program, Function | Step):
        return program
    # A step names its schedule.  Another one may have been registered under that name since the last call.
    schedule = SCHEDULES[program.pipeline.schedule] if isinstance(program, Step) else None
    return _placed(program, mesh, schedule, Software(fused, overlapping, gradient_buffers))


def sized(program: Any, args: tuple[Any, ...]) -> Any:
    """A function of the IR with the values of its symbols, from the shapes of its inputs, which are the one argument.

    A `parallelism.transforms.Step` finds them itself.  Any other program stays as it is.
    """
    if not isinstance(program, Function):
        return program
    given = one_of(f"@{program.name}", args)
    return sized_by(program, given) if isinstance(given, Sequence | Mapping) else program


def as_run(program: Any) -> Any:
    """What runs: a function or a step that deals tokens to experts has room for all (`parallelism.ir.passes.with_room`).

    Any other program stays as it is.
    """
    if isinstance(program, Function):
        return with_room(program)
    if isinstance(program, Step):
        function = with_room(program.function)
        return program if function is program.function else replace(program, function=function)
    return program


@lru_cache(maxsize=8)
def _placed(
    program: Function | Step, mesh: Mesh, schedule: ScheduleKind | None, software: Software
) -> Executable | TrainedPipeline:
    if isinstance(program, Step):
        return TrainedPipeline(program, mesh, **software._asdict())
    fused, overlapping = software.fused, software.overlapping
    if not any(value.name.startswith(NEXT) for value in program.outputs):
        return Executable(program, mesh, fused=fused, overlapping=overlapping)
    return Executable(
        program,
        mesh,
        categories=categories(program),
        donate=carried(program),
        fused=fused,
        overlapping=overlapping,
    )
