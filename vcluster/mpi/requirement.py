"""What MPI needs, what is said if it is not there, and the backend that is meant if none is named."""

import sys
from importlib.util import find_spec

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


def device_of(backend: str) -> str:
    """What a device of a backend is, in a word."""
    return "rank" if backend == "mpi" else backend
