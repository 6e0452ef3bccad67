"""vcluster's collectives and mpi4py's, in turn on the same ranks: a script of MPI jobs.

    mpiexec -n 3 python -m vcluster.mpi -m benchmarks.peers.beside '{"suite": "mpi", "plan": {...}, "cases": [...]}'

The host prints what it measured as a JSON document, in one line.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import Case, Times, Trial, WrongAnswerError, timed_rounds
from benchmarks.peers.mpi import call_of, version_of
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, run_case, take_turns
from vcluster.code import DeviceFailedError
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

PLAIN, LIBRARY = "mpi4py", "library"
"""mpi4py by itself, and vcluster with ``algorithm="mpi"``."""


class OnRanks:
    """The ranks of a cluster, which run cases by one kernel."""

    def __init__(self, name: str, cluster: VirtualCluster, kernel: Callable[..., Times]) -> None:
        self.name, self.devices = name, cluster.mesh.size
        self._cluster, self._kernel = cluster, kernel

    def supports(self, case: Case) -> bool:
        return True

    def rounds(self, case: Case, count: int) -> list[Times]:
        try:
            return self._cluster.run(self._kernel, case, count).outputs
        except DeviceFailedError as error:
            if isinstance(error.__cause__, WrongAnswerError):
                raise WrongAnswerError(str(error.__cause__)) from None
            raise

    def close(self) -> None:
        """The cluster is closed by its owner."""


def run_plain(device: VirtualDevice, case: Case, count: int) -> Times:
    """The kernel: ``count`` rounds of mpi4py on one rank. The host, rank 0 of the job, takes no part."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    if "ranks" not in device.state:
        world = mpi.COMM_WORLD
        device.state["ranks"] = world.Create_group(world.Get_group().Incl(range(1, device.size + 1)))
    ranks = device.state["ranks"]
    trial = Trial(case, device.rank, device.size)
    in_place = case.operation == "broadcast" and device.rank == 0
    return timed_rounds(trial, count, ranks.Barrier, call_of(ranks, trial), trial.load if in_place else None)


def main(request: str) -> None:
    """Measure what the request says."""
    asked = json.loads(request)
    results = Results()
    with VirtualCluster(asked["devices"]) as cluster:
        systems = [
            OnRanks(OURS, cluster, run_case), OnRanks(LIBRARY, cluster, partial(run_case, algorithm="mpi")),
            OnRanks(PLAIN, cluster, run_plain)]
        results.versions[PLAIN] = version_of(importlib.import_module("mpi4py.MPI"))
        cases = [Case(**case) for case in asked["cases"]]
        take_turns(asked["suite"], systems, cases, Plan(**asked["plan"]), results, lambda text: None)
    print(json.dumps(results.document([], "", {})))


if __name__ == "__main__":
    main(sys.argv[1])
