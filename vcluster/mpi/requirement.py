"""What MPI needs, and what is said if it is not there."""

from importlib.util import find_spec


def find_mpi() -> None:
    """Return if mpi4py is installed; it is not loaded. ``ImportError`` says what to install."""
    if find_spec("mpi4py") is None:
        raise ImportError(
            "backend='mpi' needs mpi4py and an MPI: pip install mpi4py mpich, or pip install mpi4py beside the MPI of "
            "your cluster")
