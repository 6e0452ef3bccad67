"""`VirtualCluster`: devices that are started once, run many programs, and are gone when it is."""

from __future__ import annotations

import difflib
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self

from parallelism.hardware import is_calibrated
from parallelism.mesh import Mesh
from vcluster.code import ClusterError
from vcluster.processes import start_early

if TYPE_CHECKING:
    from parallelism.hardware import Hardware
    from parallelism.timeline import Pricing
    from vcluster.messages import Endpoint, VirtualChannel
    from vcluster.runs.engine import Body
    from vcluster.runs.run import Run
    from vcluster.runs.run_loop import ShowOutput

QUEUE_DEVICES = 16
"""The ``queue`` transport has a queue for each ordered pair of devices, so it is for few."""

_USUAL_ELSEWHERE = {
    "timeout": "deadline_seconds", "world_size": "the number of devices: VirtualCluster(4)",
    "nprocs": "the number of devices: VirtualCluster(4)", "num_devices": "the number of devices: VirtualCluster(4)",
    "n": "the number of devices: VirtualCluster(4)", "size": "the number of devices: VirtualCluster(4)",
    "context": "start_method", "capacity": "channel_capacity", "rank": "device.rank inside the kernel",
}
_OPTIONS = (
    "backend", "transport", "start_method", "hardware", "compute", "priced_dtype", "channel_capacity", "seed",
    "deadline_seconds",
)


class VirtualCluster:
    """A cluster of virtual devices, each a process of its own.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(dp=2, tp=2, backend="thread") as cluster:
    ...     cluster.run(lambda device: device.all_reduce(device.rank, "tp")).outputs
    [np.int64(1), np.int64(1), np.int64(5), np.int64(5)]

    ``mesh`` is a `Mesh`, or the number of devices; or the axes are given by name, outermost first.

    ``backend``
        ``"process"``, or ``"thread"`` for debugging: the same results, no isolation of globals.
    ``transport``
        ``"shared_memory"``, or ``"queue"``: everything as messages through ``multiprocessing.Queue``, for teaching and
        as a reference; up to 16 devices.
    ``start_method``
        ``"forkserver"`` (Linux), ``"spawn"`` (macOS) or ``"fork"``.
    ``hardware``
        what virtual time stands for: a `Hardware`, a preset's name, a file, or ``"host"``: this machine as `python -m
        vcluster calibrate` found it; if it never did, CPU seconds, and messages are free.
    ``compute``
        ``"measured"``: CPU seconds of the device's thread; ``"modelled"``: declared flops, bytes or seconds, the same
        to the last bit in every run.
    ``priced_dtype``
        prices the flops and bytes of any float array as those of this dtype, as ``"bfloat16"``.
    ``channel_capacity``
        messages of one tag that may lie in a channel before a sender waits; 0: until each is taken.
    ``seed``
        ``device.rng`` draws from (seed, rank, number of the run).
    ``deadline_seconds``
        a run that takes longer is broken off with `ClusterTimeoutError`; off by default.

    The devices start here and live until the cluster is closed: at the end of ``with``, by `close`, when nobody refers
    to it any more, or when the process ends, however it ends.
    """

    def __init__(
        self, mesh: Mesh | int | None = None, *, backend: str = "process", transport: str = "shared_memory",
        start_method: str | None = None, hardware: Hardware | str | PathLike[str] = "host", compute: str = "measured",
        priced_dtype: str | None = None, channel_capacity: int = 16, seed: int = 0,
        deadline_seconds: float | None = None, **axes: int,
    ) -> None:
        self.mesh = _mesh(mesh, axes)
        _one_of("backend", backend, ("process", "thread"))
        _one_of("transport", transport, ("shared_memory", "queue"))
        self._pricing = _pricing(hardware, compute, priced_dtype, self.mesh.size)
        if isinstance(channel_capacity, bool) or not isinstance(channel_capacity, int) or channel_capacity < 0:
            raise ValueError(f"channel_capacity is a number of messages, 0 or more, got {channel_capacity!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is an integer, 0 or more, got {seed!r}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds is more than 0, or None, got {deadline_seconds!r}")
        if transport == "queue" and self.mesh.size > QUEUE_DEVICES:
            raise ValueError(
                f"transport='queue' has a queue for each pair of devices and goes up to {QUEUE_DEVICES} of them, "
                f"got {self.mesh.size}; transport='shared_memory' has no such limit"
            )
        if backend == "process" and start_method in (None, "forkserver"):
            start_early()
        from vcluster.runs.run_loop import show_with_rank  # loads NumPy and all else, while the fork server does

        self._backend = backend
        self._transport = transport
        self._start_method = start_method
        self._capacity = channel_capacity
        self._seed = seed
        self._deadline_seconds = deadline_seconds
        self._running = threading.Lock()
        self._runner: int | None = None
        self._body: Body | None = None
        self.around_run: Callable[[Endpoint, Any], AbstractContextManager[Any]] | None = None
        """A context around each run that gives what is to run in the program's place; see `vcluster.faults`."""
        self.show_output: ShowOutput = show_with_rank
        """What is done with the lines that devices print: called with the rank, ``stdout`` or ``stderr``, the lines."""
        self._start()

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def backend(self) -> str:
        """``"process"`` or ``"thread"``."""
        return self._backend

    @property
    def closed(self) -> bool:
        """Whether its devices are gone."""
        return self._body is None or self._body.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._backend} backend, {self._transport}"
        return f"<VirtualCluster of {self.mesh!r}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster stays with its host: run() inside a kernel is not possible")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Any, /, *args: Any, **kwargs: Any) -> Run:
        """Run a program on every device and return when all have finished.

        ``program`` is a function of a device, called with a `VirtualDevice` and the arguments; or an `Operation`, which
        deals the arguments out itself.  A `PerDevice` argument gives each device its own; anything else reaches every
        device whole.  Each device has its own copy of everything: it may write into it.

        Raises `DeviceFailedError` if a kernel raises or a process dies (`OperationCancelled` releases the others), and
        the other errors of `vcluster.code.errors`.  Unless it then says that it is closed, the cluster can be used again.
        """
        body = self._open()
        if not self._running.acquire(blocking=False):
            raise ClusterError("a run is under way on this cluster; it runs one program at a time")
        self._runner = threading.get_ident()
        body.show_output = self.show_output
        try:
            if self.around_run is None:
                return body.run(program, args, kwargs)
            with self.around_run(body.endpoint, program) as shipped:
                return body.run(program, args, kwargs, shipped)
        finally:
            self._runner = None
            self._running.release()
            del self  # a traceback that a notebook keeps must not keep the devices

    def channel(self, rank: int) -> VirtualChannel:
        """The host's end of its channel to a device, whose end is ``device.channel(HOST)``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.mesh!r} has ranks 0 to {self.size - 1}, got {rank}")
        return self._open().channel(rank)

    def pids(self) -> list[int]:
        """The process of each device, by rank."""
        return self._open().crew.pids()

    def close(self) -> None:
        """End the devices.  Outputs of earlier runs stay valid; closing twice is fine."""
        body = self._body
        if body is None or body.closed:
            return
        if self._runner == threading.get_ident():  # by a signal's handler: the run notices
            body.finalizer()
            return
        if not self._running.acquire(blocking=False):
            body.break_off(ClusterError("the cluster was closed while the run was under way"))
            self._running.acquire()
        try:
            body.finalizer()
        finally:
            self._running.release()

    def forget(self) -> None:
        """Let the next run find what it would in a new cluster, at no cost: empty ``device.state``, empty channels, and
        the seeds of a first run.  (What a kernel changed in its process stays: modules, the current directory.)
        """
        body = self._open()
        if not self._running.acquire(blocking=False):
            raise ClusterError("a run is under way on this cluster; it forgets between runs")
        try:
            body.forget()
        finally:
            self._running.release()

    def restart(self) -> None:
        """Fresh devices in place of the present ones, with empty state; also opens a closed cluster again."""
        self.close()
        self._start()

    def _start(self) -> None:
        from vcluster.runs.engine import Body, close

        self._body = Body(
            self.mesh, self._backend, self._transport, self._start_method, self._capacity, self._seed,
            self._deadline_seconds, self._pricing,
        )
        self._body.finalizer = weakref.finalize(
            self, close, self._body.crew, self._body.arena, self._body.layout, self._body.endpoints, os.getpid()
        )

    def _open(self) -> Body:
        if self._body is None or self._body.closed:
            raise ClusterError(f"this cluster of {self.mesh!r} is closed; cluster.restart() opens it again")
        return self._body


def _mesh(mesh: Mesh | int | None, axes: dict[str, Any]) -> Mesh:
    for name in axes:
        meant = _USUAL_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, _OPTIONS, 1, 0.75)), None)
        if meant is not None:
            raise TypeError(f"VirtualCluster has no option {name!r}; did you mean {meant}?")
    if mesh is None:
        if not axes:
            raise TypeError("VirtualCluster needs a mesh: VirtualCluster(4), VirtualCluster(dp=2, tp=2) or Mesh(...)")
        return Mesh(**axes)
    if axes:
        raise TypeError(
            f"VirtualCluster takes a mesh or axes by name, not both: got {mesh!r} and {', '.join(map(repr, axes))}; "
            f"the options are {', '.join(_OPTIONS)}"
        )
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, bool) or not hasattr(mesh, "__index__"):
        raise TypeError(f"a mesh is a Mesh or a number of devices, got {mesh!r}")
    return Mesh(devices=mesh)


def _pricing(
    hardware: Hardware | str | PathLike[str], compute: str, priced_dtype: str | None, size: int
) -> Pricing | None:
    """How runs are priced; None: as always, by the CPU time of the host."""
    _one_of("compute", compute, ("measured", "modelled"))
    host = isinstance(hardware, str) and hardware == "host"
    calibrated = host and is_calibrated()
    if host and not calibrated and compute == "measured" and priced_dtype is None:
        return None     # the descriptions of hardware are loaded by who has one
    from parallelism.hardware import Hardware
    from parallelism.timeline import Pricing

    if calibrated:
        hardware = Hardware.of_host(size) or hardware
    return Pricing.of(hardware, compute, priced_dtype).for_devices(size)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
