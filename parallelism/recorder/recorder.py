"""Runs a program without moving or multiplying anything, and counts what it would: a `Device` that only records.

    recording = record(MatMul(sharding), Mesh(tp=4), a, b)
    recording.trace.bytes_received()        # what the processes' trace says, too
    recording.outputs[0].shape              # of zeros

Every rank runs the program in a thread, in step with the others (`parallelism.recorder.rendezvous`), so a result has
the right shape where extents do not divide, too.  Collectives, messages and `Device.matmul` give zeros; what a program
computes in NumPy itself, it computes on those.  Bytes and messages are those of the algorithms' step lists, as on
processes.  The trace holds what is communicated, declared (`compute`, `matmul`) and held; no time that was not
declared, and no traffic with the host; ``trace.on(hardware)`` says what it would take.
"""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

from parallelism.events import Columns, Event
from parallelism.mesh import Mesh
from parallelism.operation import Operation
from parallelism.recorder.device import RecordingDevice
from parallelism.recorder.rendezvous import Lockstep
from parallelism.timeline import replay_columns
from parallelism.timeline.matching import sequences
from parallelism.trace import Trace


class Recording(NamedTuple):
    """The result of `record`: the outputs by rank, right in shape and dtype only, and the trace."""

    outputs: list[Any]
    trace: Trace


def record(
    program: Callable[..., Any],
    mesh: Mesh,
    *args: Any,
    inputs: Sequence[Sequence[Any]] | None = None,
    ranks: int | Collection[int] | None = None,
) -> Recording:
    """Runs an `Operation`, or a function of a device, on every rank of ``mesh``, and moves nothing.

    ``args`` are dealt out by `Operation.inputs`; a function gets them on every rank; or ``inputs`` are each rank's own.
    ``ranks``: the trace of one rank, or of some; by default of all.

    Raises what the program raises.  Errors of several ranks are those of the runtime: `CollectiveMismatchError`,
    `DeadlockError` and `UndeliveredMessageError`, with the same ranks, operation, lines and text.  A channel under the
    recorder has no capacity, so no send ever waits.
    """
    if inputs is None:
        inputs = program.inputs(mesh, *args) if isinstance(program, Operation) else [args] * mesh.size
    if len(inputs) != mesh.size:
        raise ValueError(f"{mesh!r} has {mesh.size} devices, got inputs for {len(inputs)}")
    lockstep = Lockstep(mesh.size)

    def body(rank: int) -> tuple[Any, list[Event]]:
        device = RecordingDevice(mesh, rank, lockstep)
        given = (
            deepcopy(inputs[rank])
            if isinstance(program, Operation) and program.writes_inputs
            else inputs[rank]
        )
        return program(device, *given), device.finish()

    outputs, records = zip(*lockstep.run(body), strict=True)
    columns = Columns.of(chain.from_iterable(records))
    timed = replay_columns(columns.with_columns(sequence=sequences(columns)), list(map(len, records)))
    trace = Trace(timed, size=mesh.size, mesh_shape=dict(mesh.shape), priced=("modelled",))
    return Recording(list(outputs), trace if ranks is None else trace.filter(rank=ranks))
