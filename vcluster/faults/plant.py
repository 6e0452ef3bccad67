"""How failures are planted around the runs of a cluster, and how one learns whether they happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vcluster.code import ClusterError
from vcluster.faults.kinds import ENDING, Fault
from vcluster.faults.planted import PlantedProgram, words_of

if TYPE_CHECKING:
    from vcluster.messages import Endpoint
    from vcluster.runs import VirtualCluster


class FaultNotReachedError(ClusterError):
    """The runs ended without a planted fault, so that they show nothing about it."""


class Planted:
    """What was planted, and what came of it."""

    def __init__(self, faults: tuple[Fault, ...], seed: int, size: int) -> None:
        self.faults = faults
        """As the seed has chosen them."""
        self.runs = 0
        """How many there were so far."""
        self.happened: set[Fault] = set()
        self._seed = seed
        self._size = size
        self._made: dict[int, list[int]] = {}

    @contextmanager
    def around_run(self, endpoint: Endpoint, program: Any) -> Iterator[Any]:
        """For the cluster: what is to run in the place of ``program``."""
        self.runs += 1
        now = tuple(fault if fault.run in (None, self.runs) else None for fault in self.faults)
        nbytes = 8 * words_of(self._size, len(now))
        place, block = endpoint.heap.block(nbytes)
        words = block.view(np.int64)
        words[0], words[1:] = 1, 0
        try:
            yield PlantedProgram(program, now, self._seed, place)
        finally:
            if words[0]:  # else the run has closed the cluster, and nobody knows
                self._made[self.runs] = words[1 : 1 + self._size].tolist()
                told = words[1 + self._size :].tolist()
            else:
                told = [True] * len(now)
            self.happened.update(fault for fault, yes in zip(now, told, strict=True) if fault is not None and yes)

    def check(self) -> None:
        """`FaultNotReachedError` if one of the faults has not happened."""
        for fault in self.faults:
            if fault in self.happened:
                continue
            if self.runs < (fault.run or 1):
                raise FaultNotReachedError(f"{fault!r} was not reached: there were {self.runs} runs")
            assert isinstance(fault.rank, int)
            made = [counts[fault.rank] for run, counts in self._made.items() if fault.run in (None, run)]
            raise FaultNotReachedError(
                f"{fault!r} was not reached: rank {fault.rank} made {max(made, default=0)} operations"
                + ("" if fault.run is None else f" in run {fault.run}"), ranks=[fault.rank],
            )


@contextmanager
def plant(cluster: VirtualCluster, *faults: Fault, seed: int = 0, must_happen: bool = True) -> Iterator[Planted]:
    """Runs of ``cluster`` inside of the ``with`` block have these faults; yields what becomes of them.

    Runs count from 1 here, and a fault happens in the one it names, the first if it names none: so a run that is tried
    again goes well.  Where the block ends without an error though a fault did not happen, that is a
    `FaultNotReachedError`, unless ``must_happen=False``.  ``ValueError`` for a fault that cannot happen on this
    cluster, and where faults are planted already.
    """
    rng = np.random.default_rng(seed)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"plant() takes faults, such as faults.Kill(rank=0, operation=1), got {fault!r}")
        fault.check(cluster.size)
        if isinstance(fault, ENDING) and cluster.backend == "thread":
            raise ValueError(f"{fault!r} ends a process, and a device of backend='thread' has none of its own")
    if cluster.around_run is not None:
        raise ValueError("this cluster has faults already; give all of them to one plant()")
    planted = Planted(
        tuple(replace(f, rank=_chosen(f.rank, rng), operation=_chosen(f.operation, rng)) for f in faults),
        seed, cluster.size,
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
    """`plant` what marks say, all together; nothing where there are none.

    The positional arguments of a mark are faults, its keywords those of `plant`.
    """
    told = list(marks)
    if not told:
        yield None
        return
    options: dict[str, Any] = {}
    for mark in told:
        options.update(mark.kwargs)
    with plant(cluster, *(fault for mark in told for fault in mark.args), **options) as planted:
        yield planted


def _chosen(value: int | range, rng: np.random.Generator) -> int:
    return value[int(rng.integers(len(value)))] if isinstance(value, range) else int(value)
