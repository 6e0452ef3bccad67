"""Faults are planted around the runs of a cluster; afterwards it is checked that they happened."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from vcluster.code import ClusterError
from vcluster.faults.kinds import ENDING, Fault
from vcluster.faults.planted import PlantedProgram, words_of
from vcluster.messages import Endpoint
from vcluster.runs import VirtualCluster


class FaultNotReachedError(ClusterError):
    """The runs ended before a planted fault happened, so they did not test it."""


class Planted:
    """The planted faults, and whether they happened."""

    def __init__(self, faults: tuple[Fault, ...], seed: int, size: int) -> None:
        self.faults = faults
        """The faults with the ranks and operations that the seed chose."""
        self.runs = 0
        """Number of runs so far."""
        self.happened: set[Fault] = set()
        self._seed, self._size = seed, size
        self._made: dict[int, list[int]] = {}

    @contextmanager
    def around_run(self, endpoint: Endpoint, program: Any) -> Iterator[Any]:
        """A context for a run. It yields the program to run in place of ``program``."""
        self.runs += 1
        now = tuple(map(self._if_now, self.faults))
        place, block = endpoint.heap.block(8 * words_of(self._size, len(now)))
        words = block.view(np.int64)
        words[0], words[1:] = 1, 0
        try:
            yield PlantedProgram(program, now, self._seed, place)
        finally:
            known = bool(words[0])  # otherwise the run has closed the cluster and the counts are lost
            if known:
                self._made[self.runs] = words[1 : 1 + self._size].tolist()
            self.happened.update(
                fault
                for fault, yes in zip(now, words[1 + self._size :].tolist(), strict=True)
                if fault is not None and (yes or not known)
            )

    def _if_now(self, fault: Fault) -> Fault | None:
        """The fault, if it is one of this run."""
        return fault if fault.run in (None, self.runs) else None

    def check(self) -> None:
        """Raise `FaultNotReachedError` if a fault has not happened."""
        for fault in self.faults:
            if fault in self.happened:
                continue
            if self.runs < (fault.run or 1):
                raise FaultNotReachedError(f"{fault!r} was not reached: there were {self.runs} runs")
            assert isinstance(fault.rank, int)
            counts = [
                operations[fault.rank] for run, operations in self._made.items() if fault.run in (None, run)
            ]
            raise FaultNotReachedError(
                f"{fault!r} was not reached: rank {fault.rank} made {max(counts, default=0)} operations"
                + ("" if fault.run is None else f" in run {fault.run}"),
                ranks=[fault.rank],
            )


@contextmanager
def plant(
    cluster: VirtualCluster, *faults: Fault, seed: int = 0, must_happen: bool = True
) -> Iterator[Planted]:
    """Plant faults in the runs of ``cluster`` inside the ``with`` block. Yields a `Planted` with their state.

    Runs are counted from 1 inside the block. A fault happens in the run that it names, by default the first, so a run
    that is repeated succeeds. If the block ends without an error and a fault did not happen, `FaultNotReachedError` is
    raised, unless ``must_happen=False``. Raises ``ValueError`` for a fault that cannot happen on this cluster, and if
    the cluster already has faults.
    """
    rng = np.random.default_rng(seed)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"plant() takes faults, such as faults.Kill(rank=0, operation=1), got {fault!r}")
        fault.check(cluster.size)
        if isinstance(fault, ENDING) and cluster.backend == "thread":
            raise ValueError(
                f"{fault!r} ends a process, and a device of backend='thread' has no process of its own"
            )
    if cluster.around_run is not None:
        raise ValueError("this cluster already has faults; pass all faults to one plant()")
    planted = Planted(
        tuple(replace(f, rank=_chosen(f.rank, rng), operation=_chosen(f.operation, rng)) for f in faults),
        seed,
        cluster.size,
    )
    cluster.around_run = planted.around_run
    try:
        yield planted
    finally:
        cluster.around_run = None
    if must_happen:
        planted.check()


class Mark(Protocol):
    """A mark of pytest, such as ``@pytest.mark.faults(...)``."""

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...


@contextmanager
def plant_marks(cluster: VirtualCluster, marks: Iterable[Mark]) -> Iterator[Planted | None]:
    """`plant` the faults of all marks together. Does nothing without marks.

    The positional arguments of a mark are faults, its keywords are those of `plant`.
    """
    faults = list[Any]()
    options = dict[str, Any]()
    planted_by = list(marks)
    for mark in planted_by:
        faults += mark.args
        options |= mark.kwargs
    with plant(cluster, *faults, **options) if planted_by else nullcontext() as planted:
        yield planted


def _chosen(value: int | range, rng: np.random.Generator) -> int:
    return value[int(rng.integers(len(value)))] if isinstance(value, range) else int(value)
