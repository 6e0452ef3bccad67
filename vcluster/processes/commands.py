"""What a host and its devices send each other: the description of a device, commands, and replies.

A host loads this module and not `vcluster.processes.worker`, which imports everything that only a device needs.
"""

import signal
from typing import Any, NamedTuple

from parallelism.mesh import Mesh
from vcluster.code import Environment, Failure, Frame
from vcluster.memory import Layout
from vcluster.processes.device_process import Descriptor
from vcluster.processes.kept_programs import SentProgram
from vcluster.processes.variables import Changes
from vcluster.tracing import Packed

INTERRUPT = getattr(signal, "SIGUSR1", None)
"""The signal that interrupts a computing device after its run has failed elsewhere."""


class DeviceSpec(NamedTuple):
    """Everything that is needed to create a device."""

    rank: int
    mesh: Mesh
    layout: Layout
    capacity: int
    seed: int
    queues: dict[int, tuple[Any, Any]] | None
    generation: int
    groups: int = 0


class RunCommand(NamedTuple):
    """Run a program: the function and the common arguments lie at ``common``, this device's own arguments at ``own``.

    If devices may keep the program, it is in ``kept``, and None lies in its place at ``common``.
    """

    number: int
    generation: int
    """Counts how often channels and groups were reset after a failure."""
    gone: tuple[int, ...]
    """The ranks that died since the last run."""
    common: int
    common_block_nbytes: int
    common_nbytes: int
    own: int | None
    environment: Environment | None
    variables: Changes
    """The environment variables that the host has set or removed since this device got its own."""
    groups: int = 0
    """Counts how often the directories of groups were emptied."""
    kept: SentProgram | None = None


class Done(NamedTuple):
    """The kernel returned. The output lies at ``place``, or ``place`` is its block if that is small.

    A long record lies at offset ``record``. ``counts`` are the messages sent to and received from each peer so far.
    ``dropped`` maps each line that discards the result of a collective to the name of the collective.
    """

    place: int | bytearray
    record: bytes | Packed | int
    counts: dict[int, tuple[int, int]]
    dropped: dict[str, str]
    run: int = 0
    """The number of the run."""


class Failed(NamedTuple):
    failure: Failure
    record: bytes
    run: int = 0


class Cancelled(NamedTuple):
    """The run was cancelled in this device because of a failure elsewhere. ``stack`` is where the kernel was."""

    record: bytes
    stack: tuple[Frame, ...] = ()
    run: int = 0


def run_in_process(spec: DeviceSpec, memory: Descriptor, wire: Descriptor) -> None:
    """The main function of a device's process."""
    from vcluster.processes.worker import serve_in_process

    serve_in_process(spec, memory.take(), wire.take())
