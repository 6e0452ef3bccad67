"""What MPI needs, what is said if it is not there, and the backend that is meant if none is named."""

import os
import shlex
import sys
from importlib.util import find_spec

_RANKS_AND_SIZES = ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""Variables of launchers. Slurm's are no sign: a script of `sbatch` has them, too, and runs once."""
BACKENDS = "process", "thread", "mpi"
"""What the devices of a cluster can be."""


def find_mpi() -> None:
    """Check that mpi4py is installed, without loading it. ``ImportError`` says what to install."""
    if find_spec("mpi4py") is None:
        raise ImportError(
            "backend='mpi' needs mpi4py and an MPI: pip install mpi4py mpich, or pip install mpi4py beside the MPI of "
            "your cluster"
        )


def usual_backend() -> str:
    """``"mpi"`` on the host of an MPI job, which `vcluster.mpi` has started; else ``"process"``."""
    job = sys.modules.get("vcluster.mpi.job")
    return "mpi" if job is not None and job.is_host() else "process"


def alike_scripts(devices: int) -> str | None:
    """What is said on the first of the ranks that ``mpiexec`` has started without `vcluster.mpi`; None elsewhere.

    Each rank then runs the whole script, and has devices of its own.
    """
    if "vcluster.mpi.job" in sys.modules:
        return None
    for rank, size in _RANKS_AND_SIZES:
        ranks = os.environ.get(size, "1")
        if os.environ.get(rank) == "0" and ranks != "1":
            return (
                f"mpiexec runs this script {ranks} times, and each has a cluster of its own; for one cluster on the "
                f"ranks type: mpiexec -n {devices + 1} python -m vcluster.mpi {shlex.join(sys.argv)}"
            )
    return None


def device_of(backend: str) -> str:
    """What a device of a backend is, in a word."""
    return "rank" if backend == "mpi" else backend
