"""Collectives on the ranks of an MPI job, beside plain mpi4py on the same ranks, in turn.

Small ones are called in a plain loop, as in `benchmarks.suites.loops`; large ones stand between barriers. vcluster's
are those with equal bits on every backend, and those by ``algorithm="mpi"`` (``library``). Both are checked and
recorded; mpi4py's are not. Each has ``out=``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

from benchmarks.cases import Case
from benchmarks.installed import missing, mpiexec
from benchmarks.peers.beside import LIBRARY, PLAIN
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.remote import ROOT
from benchmarks.results import Results
from benchmarks.systems import OURS, Say, SystemFailedError
from benchmarks.tables import nbytes_text, ratio_text, seconds_text, table
from benchmarks.targets import LARGE_ON_RANKS, SMALL_ON_RANKS_SECONDS, against

NAME = "mpi"
SIZES = (8, KIB, 64 * KIB, MIB, 16 * MIB)
QUICK_SIZES = (8, KIB, MIB, 16 * MIB)
SMALL_BYTES = KIB
LOOP_BYTES = 64 * KIB
LARGE_BYTES = 16 * MIB


def measure(plan: Plan, results: Results, say: Say) -> None:
    """A job for each number of devices."""
    absent = missing(sys.executable)
    if "mpich" in absent:
        results.skipped[NAME] = absent["mpich"]
        return
    cases = [
        Case(operation, nbytes, in_a_loop=nbytes <= LOOP_BYTES)
        for operation in plan.operations
        for nbytes in (plan.sizes_or(SIZES, QUICK_SIZES) if operation != "barrier" else (0,))
    ]
    for devices in plan.devices_or((2, 4), (2,)):
        say(f"{NAME}: a job of {devices + 1} ranks")
        request = {"suite": NAME, "devices": devices, "plan": asdict(replace(plan, peers_python=None)),
                   "cases": [asdict(case) for case in cases]}
        launch = [mpiexec(sys.executable) or "mpiexec", "-n", str(devices + 1), sys.executable, "-m", "vcluster.mpi"]
        job = subprocess.run(
            [*launch, "-m", "benchmarks.peers.beside", json.dumps(request)], cwd=ROOT, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False)
        if job.returncode:
            last = (job.stderr or job.stdout).strip().split("\n")[-1]
            raise SystemFailedError(f"a job of {devices + 1} ranks ended with {job.returncode}: {last}")
        found = Results.from_document(json.loads(job.stdout.splitlines()[-1]))
        results.measurements += found.measurements
        results.versions.update(found.versions)


def report(results: Results) -> str:
    """For each number of devices a row for each operation, size and system, and what ours takes more than mpi4py's.

    Ours are ``default`` and ``library``.
    """
    found = {(m.devices, m.operation, m.nbytes, m.system): m.seconds for m in results.of(NAME)}
    parts = []
    for devices in dict.fromkeys(devices for devices, *_ in found):
        rows = []
        for operation, nbytes in dict.fromkeys(key[1:3] for key in found if key[0] == devices):
            plain = found[devices, operation, nbytes, PLAIN]
            for system in (OURS, LIBRARY, PLAIN):
                ours = found[devices, operation, nbytes, system]
                case = f"{operation} {nbytes_text(nbytes)}" if nbytes else operation
                labels = (case, "default") if system == OURS else ("", system)
                over = _over(nbytes, ours.median, plain.median) if system != PLAIN else ("", "")
                rows.append([*labels, *map(seconds_text, (ours.median, ours.mean, ours.p99)), *over])
        header = (f"{devices} devices", "", "median", "mean", "p99", "over", "at most")
        parts.append(table(header, rows, labels=2))
    return "\n\n".join(parts)


def _over(nbytes: int, ours: float, plain: float) -> tuple[str, str]:
    """What ours takes more than mpi4py's, and what it may."""
    if nbytes >= LARGE_BYTES:
        return f"x {ratio_text(ours / plain)}", against(LARGE_ON_RANKS, ours / plain, f"{LARGE_ON_RANKS}")
    most = SMALL_ON_RANKS_SECONDS if nbytes <= SMALL_BYTES else None
    sign = "+" if ours >= plain else ""
    return f"{sign}{seconds_text(ours - plain)}", against(most, ours - plain, f"{SMALL_ON_RANKS_SECONDS * 1e6:.0f} us")
