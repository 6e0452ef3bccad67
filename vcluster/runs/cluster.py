"""`VirtualCluster` starts its devices once, runs many programs on them, and ends them when it is closed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from numbers import Real
from operator import index
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from parallelism.hardware import Software, is_calibrated
from parallelism.mesh import Mesh
from parallelism.mesh.mesh import checked_integer
from parallelism.spelling import closest, no_attribute
from vcluster.code import ClusterError
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.mpi import BACKENDS, alike_scripts, usual_backend
from vcluster.processes import start_early
from vcluster.runs.log import log

if TYPE_CHECKING:
    from parallelism.hardware import Hardware
    from parallelism.ir import Function
    from parallelism.timeline import Pricing
    from parallelism.transforms.pipelines import Step
    from vcluster.messages import Endpoint, VirtualChannel
    from vcluster.runs.engine import Body
    from vcluster.runs.run import Kernel, Output, Run
    from vcluster.runs.run_loop import ShowOutput, ShowWarning

QUEUE_DEVICES = 16
"""The ``queue`` transport accepts at most this many devices: it needs one queue for each ordered pair of devices."""

_USUAL_ELSEWHERE = {
    "timeout": "deadline_seconds",
    "world_size": "the number of devices: VirtualCluster(4)",
    "nprocs": "the number of devices: VirtualCluster(4)",
    "num_devices": "the number of devices: VirtualCluster(4)",
    "n": "the number of devices: VirtualCluster(4)",
    "size": "the number of devices: VirtualCluster(4)",
    "context": "start_method",
    "capacity": "channel_capacity",
    "rank": "device.rank inside the kernel",
}
_MEANT = {
    "cluster.run(kernel, PerDevice([...]))": "map",
    "cluster.run(kernel)": "submit execute launch spawn apply call",
    "cluster.close()": "shutdown terminate stop join destroyprocessgroup",
    "cluster.size": "worldsize numdevices getworldsize",
    "range(cluster.size)": "devices ranks",
    "cluster.mesh.shape": "shape",
    "cluster.mesh.axes": "axisnames",
    "device.rank inside the kernel": "rank",
    "cluster.run(lambda device: device.all_reduce(x))": "allreduce",
    "device.barrier() inside the kernel": "barrier",
}
"""What to write here, and the names of that elsewhere, without case and underscores."""
_ATTRIBUTES_ELSEWHERE = {name: here for here, names in _MEANT.items() for name in names.split()}
_OPTIONS = (
    "backend",
    "transport",
    "start_method",
    "hardware",
    "compute",
    "priced_dtype",
    "channel_capacity",
    "seed",
    "deadline_seconds",
)


class VirtualCluster:
    """A cluster of virtual devices. Each device is a process of its own.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(dp=2, tp=2, backend="thread") as cluster:
    ...     cluster.run(lambda device: device.all_reduce(device.rank, "tp")).outputs
    [np.int64(1), np.int64(1), np.int64(5), np.int64(5)]

    ``mesh`` is a `Mesh` or the number of devices. Alternatively, give the axes by name, outermost first.

    ``backend``
        ``"process"``, or ``"thread"`` for debugging. Threads give the same results but share the globals. ``"mpi"``:
        the ranks of an MPI job that ``mpiexec ... python -m vcluster.mpi script.py`` has started; the default there.
    ``transport``
        ``"shared_memory"``, or ``"queue"``, which sends everything as messages through ``multiprocessing.Queue``. The
        queue transport is a simple reference for teaching. It takes up to 16 devices.
    ``start_method``
        ``"forkserver"`` (the default on Linux), ``"spawn"`` (the default on macOS) or ``"fork"``.
    ``hardware``
        the hardware whose time virtual time predicts: a `Hardware`, the name of a preset, a file, or ``"host"``.
        ``"host"`` is this machine as ``python -m vcluster calibrate`` measured it. If there is no calibration, compute
        takes the measured CPU seconds and messages take no time.
    ``compute``
        ``"measured"``: compute takes the CPU seconds of the device's thread. ``"modelled"``: compute takes the time
        that follows from the declared flops, bytes or seconds, and is bitwise equal in every run.
    ``priced_dtype``
        a dtype such as ``"bfloat16"``: the flops and bytes of every float array are priced as if it had this dtype.
    ``channel_capacity``
        the number of messages of one tag that a channel holds before the sender waits. With 0, every send waits until
        its message is taken.
    ``seed``
        ``device.rng`` is seeded with (seed, rank, number of the run).
    ``deadline_seconds``
        the time limit of a run in seconds. A run that exceeds it is cancelled with `ClusterTimeoutError`. There is no
        limit by default.

    The constructor starts the devices. They live until the cluster is closed: at the end of ``with``, by `close`, when
    the last reference to the cluster goes, or when the host process ends in any way.
    """

    def __init__(
        self,
        mesh: Mesh | int | None = None,
        *,
        backend: str | None = None,
        transport: str = "shared_memory",
        start_method: str | None = None,
        hardware: Hardware | str | PathLike[str] = "host",
        compute: str = "measured",
        priced_dtype: str | None = None,
        channel_capacity: int = 16,
        seed: int = 0,
        deadline_seconds: float | None = None,
        **axes: int,
    ) -> None:
        self.mesh = _mesh(mesh, axes)
        backend = backend or usual_backend()
        _one_of("backend", backend, BACKENDS)
        pricing = _pricing(hardware, compute, priced_dtype, self.mesh.size)
        self._software = Software.of(None if pricing is None else pricing.hardware)
        channel_capacity = _whole("channel_capacity", channel_capacity, " number of messages")
        seed = _whole("seed", seed)
        _check_deadline(deadline_seconds)
        _check_transport(transport, backend, self.mesh.size)
        alike = alike_scripts(self.mesh.size) if backend == "process" else None
        if alike is not None:
            warnings.warn(alike, stacklevel=2)
        if backend == "process" and start_method in (None, "forkserver"):
            start_early()
        from vcluster.runs.engine import Body  # this loads NumPy while the fork server starts
        from vcluster.runs.run_loop import print_with_rank

        self._backend = backend
        self._transport = "messages" if backend == "mpi" else transport
        priced_as = None if pricing is None else pricing.hardware
        self._hardware = "this machine, where messages take no time" if priced_as is None else priced_as.name
        self._new_body = partial(
            Body,
            self.mesh,
            backend,
            transport,
            start_method,
            channel_capacity,
            seed,
            deadline_seconds,
            pricing,
        )
        self._running = threading.Lock()
        self._runner: int | None = None
        self._body: Body | None = None
        self.around_run: Callable[[Endpoint, Any], AbstractContextManager[Any]] | None = None
        """A function that returns a context manager for each run. The context manager yields the program to run in
        place of the given one. `vcluster.faults` uses it.
        """
        self.show_output: ShowOutput = print_with_rank
        """A function that is called with each device's printed lines: ``(rank, "stdout" or "stderr", text)``."""
        self.show_warning: ShowWarning | None = None
        """A function that is called with each `Warned` of a device's process; None: it is output like any other."""
        self._start()

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def backend(self) -> str:
        """``"process"``, ``"thread"`` or ``"mpi"``."""
        return self._backend

    @property
    def closed(self) -> bool:
        """Whether the devices have ended. In a forked copy of the process the cluster is closed."""
        return self._body is None or self._body.closed or self._body.pid != os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._backend} backend, {self._transport}"
        return f"<VirtualCluster of {self.mesh!r}, {state}>"

    def _repr_html_(self) -> str:
        pids = [] if self.closed or self._backend == "thread" else self.pids()
        from vcluster.runs import notebook

        return notebook.html_of(self, pids, self._hardware)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """IPython asks for this wherever it shows a cluster, in a terminal, too."""
        from vcluster.runs import notebook

        notebook.let_go_after_the_cell(self)
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cluster cannot be sent to another process: a kernel cannot call run() of its own cluster"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def run(self, program: Kernel[Output], /, *args: Any, **kwargs: Any) -> Run[Output]: ...
    @overload
    def run(self, program: Function | Step, /, *args: Any, **kwargs: Any) -> Run[Any]: ...
    def run(self, program: Any, /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Run a program on every device and return when all devices have finished.

        ``program`` is a function, called on each device with its `VirtualDevice` and the arguments, or an `Operation`,
        which distributes the arguments itself. A program of `parallelism.ir` or a step of `parallelism.transforms` is
        laid out on the cluster's mesh and takes its inputs (`parallelism.execution.operation_on`), whose shapes give
        the values of its symbols. A `PerDevice`
        argument gives each device its own value. Every other argument reaches every device whole. Each device gets its
        own copy of every argument and may modify it.

        Returns a `Run`: the outputs by rank, the operation's result, and the trace.

        Raises `DeviceFailedError` if a kernel raises or a process dies; the pending calls of the other devices then
        raise `OperationCancelled`. Raises the other errors of `vcluster.code.errors` for deadlocks, mismatched
        collectives and undelivered messages. The cluster can be used again afterwards, unless the error says that it is
        closed.
        """
        __tracebackhide__ = True  # for pytest and IPython
        body = self._open()
        if not callable(program):
            from parallelism.execution.placing import (
                as_run,
                operation_on,
                sized,
            )  # what loads much, for those who need it

            program = operation_on(as_run(sized(program, args)), self.mesh, **self._software._asdict())
        self._refuse_if_running("a cluster runs one program at a time")
        mine = threading.get_ident()
        with self._running:  # an interrupt can come between `acquire` and the next statement
            try:
                self._runner = mine  # there is no call before it, so no handler of a signal that finds none
                body.show_output, body.show_warning = self.show_output, self.show_warning
                if self.around_run is None:
                    return body.run(program, args, kwargs)
                with self.around_run(body.endpoint, program) as shipped:
                    return body.run(program, args, kwargs, shipped)
            except ClusterError as error:
                from vcluster.runs import notebook

                notebook.name_cells(error)
                raise
            finally:
                self._runner = None
                del self  # a traceback that a notebook keeps must not keep the devices alive

    def channel(self, rank: int) -> VirtualChannel:
        """The host's end of its channel to device ``rank``. The device's end is ``device.channel(HOST)``."""
        rank = checked_integer("a rank", rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.mesh!r} has ranks 0 to {self.size - 1}, got {rank}")
        return self._open().channel(rank)

    def pids(self) -> list[int]:
        """The process id of each device, by rank."""
        return self._open().crew.pids()

    def close(self) -> None:
        """End the devices. Outputs of earlier runs stay valid. Closing a closed cluster does nothing."""
        body = self._body
        if body is None or body.closed:
            return
        if body.pid != os.getpid():  # in a forked copy of the process, which owns none of it
            self._body, self._runner, self._running = None, None, threading.Lock()
            return
        mine = threading.get_ident()
        if self._runner == mine:  # a signal handler called close() inside a run; the run notices
            body.end()
            return
        try:
            body.break_off(ClusterError("the cluster was closed while a run was in progress"))
            with self._running:
                try:
                    self._runner = mine
                    body.end()
                finally:
                    self._runner = None
            log("%s ended", repr(self))
        except BaseException:  # Ctrl-C while another thread's run comes to its end
            body.asked = None
            raise

    def forget(self) -> None:
        """Reset the devices to the state of a new cluster, without restarting them.

        ``device.state`` and the channels become empty, and the seeds start again as for a first run. Other changes that
        a kernel made in its process stay, such as imported modules and the current directory.
        """
        body = self._open()
        self._refuse_if_running("forget() must be called between runs")
        mine = threading.get_ident()
        with self._running:
            try:
                self._runner = mine
                body.forget()
            finally:
                self._runner = None

    def restart(self) -> None:
        """Replace all devices by new ones with empty state. This also opens a closed cluster again."""
        self.close()
        self._start()

    def _refuse_if_running(self, rule: str) -> None:
        if self._running.locked():
            raise ClusterError(f"a run is in progress on this cluster; {rule}")

    def _start(self) -> None:
        from vcluster.runs.system_limits import naming_limits

        with naming_limits(self.size), DeferredInterrupt() as interrupt:
            self._body = self._new_body(owner=self, interrupt=interrupt)
        # Not the cluster itself: a handler that keeps records would keep the devices.
        log("%s started; pids by rank: %s", repr(self), self._body.crew.pids())

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            no_attribute("cluster", self, name, _ATTRIBUTES_ELSEWHERE)

    def _open(self) -> Body:
        if self._body is None or self._body.closed:
            raise ClusterError(f"this cluster of {self.mesh!r} is closed; cluster.restart() opens it again")
        if self._body.pid != os.getpid():
            raise ClusterError(
                f"this cluster of {self.mesh!r} belongs to pid {self._body.pid}, of which this process (pid "
                f"{os.getpid()}) is a fork; make a new cluster here, or call cluster.restart()"
            )
        return self._body


def _mesh(mesh: Mesh | int | None, axes: dict[str, Any]) -> Mesh:
    for name in axes:
        meant = _USUAL_ELSEWHERE.get(name) or closest(name, _OPTIONS, cutoff=0.75)
        if meant is not None:
            raise TypeError(f"VirtualCluster has no option {name!r}; did you mean {meant}?")
    if mesh is None:
        if not axes:
            raise TypeError(
                "VirtualCluster needs a mesh: VirtualCluster(4), VirtualCluster(dp=2, tp=2) or Mesh(...)"
            )
        return Mesh(**axes)
    if axes:
        raise TypeError(
            f"VirtualCluster takes a mesh or axes by name, not both: got {mesh!r} and {', '.join(map(repr, axes))}; "
            f"the options are {', '.join(_OPTIONS)}"
        )
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, bool) or not hasattr(mesh, "__index__"):
        named = "; axes have names, as in Mesh(dp=2, tp=4)" if hasattr(mesh, "__len__") else ""
        raise TypeError(f"a mesh must be a Mesh or a number of devices, got {mesh!r}{named}")
    return Mesh(devices=mesh)


def _pricing(
    hardware: Hardware | str | PathLike[str], compute: str, priced_dtype: str | None, size: int
) -> Pricing | None:
    """The pricing of runs, or None for the default: the CPU seconds of this machine, and messages that take no time."""
    _one_of("compute", compute, ("measured", "modelled"))
    host = isinstance(hardware, str) and hardware == "host"
    calibrated = host and is_calibrated()
    if host and not calibrated and compute == "measured" and priced_dtype is None:
        return None  # without a described hardware, its modules need not be loaded
    from parallelism.hardware import Hardware
    from parallelism.timeline import Pricing

    if calibrated:
        hardware = Hardware.of_host(size) or hardware
    return Pricing.of(hardware, compute, priced_dtype).for_devices(size)


def _whole(name: str, number: Any, unit: str = "") -> int:
    """A checked option: an integer, Python's or NumPy's, of 0 or more."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < 0:
        raise ValueError(f"{name} must be an integer{unit}, 0 or more, got {number!r}")
    return index(number)


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and float(value) > 0


def _check_deadline(deadline_seconds: float | None) -> None:
    if deadline_seconds is not None and not _is_positive(deadline_seconds):
        raise ValueError(
            f"deadline_seconds must be more than 0, or None for no limit, got {deadline_seconds!r}"
        )


def _check_transport(transport: str, backend: str, devices: int) -> None:
    _one_of("transport", transport, ("shared_memory", "queue"))
    if transport == "queue" and backend == "mpi":
        raise ValueError(
            "transport='queue' is for processes and threads; backend='mpi' has a transport of its own"
        )
    if transport == "queue" and devices > QUEUE_DEVICES:
        raise ValueError(
            f"transport='queue' needs a queue for each pair of devices and takes at most {QUEUE_DEVICES} devices, "
            f"got {devices}; transport='shared_memory' has no such limit"
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
