"""The result of a run: the outputs by rank, the operation's result, and the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Operation
from parallelism.spelling import no_attribute
from vcluster.tracing import Packed, make_trace

if TYPE_CHECKING:
    from parallelism.sharding import TensorSharding
    from parallelism.timeline import Pricing
    from parallelism.trace import Trace
    from vcluster.device import VirtualDevice

Output = TypeVar("Output")
Returned = TypeVar("Returned", covariant=True)
_ELSEWHERE = {
    "results": "run.outputs",
    "values": "run.outputs",
    "value": "run[0]",
    "output": "run[0]",
    "returned": "run.outputs",
    "get": "run.outputs",
    "gather": "run.unshard(sharding)",
    "fulltensor": "run.unshard(sharding)",
    "addressableshards": "run.outputs",
    "shards": "run.outputs",
    "events": "run.trace",
    "profile": "run.trace",
    "time": "run.trace.makespan_seconds",
    "seconds": "run.trace.makespan_seconds",
}
"""Names elsewhere, without case and underscores, and what to write here."""


class Kernel(Protocol[Returned]):
    """A function of a device and other arguments, for type checkers."""

    def __call__(self, device: VirtualDevice, /, *args: Any, **kwargs: Any) -> Returned: ...


class _Outputs(list[Output]):
    """The outputs of a run, by rank."""

    if not TYPE_CHECKING:  # a type checker reports the call itself

        def __call__(self, *args, **kwargs):
            """Raise ``TypeError`` for ``run.outputs()``, with what to write."""
            raise TypeError("run.outputs is no method: write run.outputs, without ()")


class Run(Sequence[Output]):
    """A finished run. It is a sequence of the outputs, by rank.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(3, backend="thread") as cluster:
    ...     run = cluster.run(lambda device: 10 * device.rank)
    >>> run[2], len(run), list(run)
    (20, 3, [0, 10, 20])

    The outputs belong to the caller and stay valid after the cluster is closed.
    """

    def __init__(
        self,
        mesh: Mesh,
        program: Any,
        outputs: list[Output],
        records: list[bytes | Packed],
        pricing: Pricing | None = None,
    ) -> None:
        self.mesh = mesh
        self.outputs: list[Output] = _Outputs(outputs)
        """The return value of the program on each device, by rank."""
        self._program = program if isinstance(program, Operation) else None
        self._declares_all = getattr(program, "declares_all", False)
        self._name = getattr(program, "__qualname__", type(program).__name__)
        self._records = records
        self._pricing = pricing

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            no_attribute("run", self, name, _ELSEWHERE)

    @overload
    def __getitem__(self, rank: int) -> Output: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Output]: ...
    def __getitem__(self, rank: Any) -> Any:
        try:
            return self.outputs[rank]
        except IndexError:
            raise IndexError(f"the run has ranks 0 to {len(self.outputs) - 1}, got {rank}") from None

    def __len__(self) -> int:
        return len(self.outputs)

    @cached_property
    def result(self) -> Any:
        """The result that the `Operation` computes from the outputs. ``TypeError`` if the program was a function."""
        if self._program is None:
            raise TypeError(
                f"{self._name} is a function, and only an Operation has a result; a function has outputs by rank: "
                f"run[0] or run.outputs, and run.unshard(sharding) joins them"
            )
        return self._program.result(self.mesh, self.outputs)

    @overload
    def unshard(self, sharding: TensorSharding | str) -> Array: ...
    @overload
    def unshard(self, sharding: Sequence[Any]) -> tuple[Any, ...]: ...
    @overload
    def unshard(self, sharding: Mapping[Any, Any]) -> dict[Any, Any]: ...
    def unshard(self, sharding: Any) -> Any:
        """The global array. The outputs are its shards under ``sharding``; partial values are reduced.

        Of several replicas that of the lowest rank is taken, and a `ReplicasDifferWarning` names those that differ from
        it by more than devices that round in another order.

        If a kernel returns several arrays, ``sharding`` is a tuple, list or dict of layouts in the form of an output.

        >>> from vcluster import TensorSharding, VirtualCluster
        >>> with VirtualCluster(2, backend="thread") as cluster:
        ...     run = cluster.run(lambda device: ([device.rank, 5], {"sum": device.all_reduce(device.rank)}))
        >>> run.unshard(("[devices]", {"sum": TensorSharding()}))
        (array([0, 5, 1, 5]), {'sum': array(1)})
        """
        from vcluster.runs.joining import joined

        return joined(self.outputs, sharding, self.mesh, stacklevel=3)

    @cached_property
    def trace(self) -> Trace:
        """What happened in this run, in the virtual time of the cluster's hardware."""
        trace = make_trace(
            self._records, dict(self.mesh.shape), self._pricing, declares_all=self._declares_all
        )
        self.__dict__["trace"] = (
            trace  # before the records are let go: a handler of a signal may raise at the return
        )
        self._records = []
        return trace

    def __repr__(self) -> str:
        return f"<Run of {self._name} on {self.mesh!r}>"

    def _repr_html_(self) -> str:
        from vcluster.runs import (
            notebook,
        )  # few look at a run, and each start of a cluster would load its picture

        return notebook.html_of_run(self)
