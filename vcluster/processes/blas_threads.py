"""A device has one BLAS thread: the variables that libraries read, and a limit for libraries that are loaded."""

import importlib
import os
from contextlib import suppress

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS",
)  # fmt: skip
"""The variables from which numerical libraries read their number of threads, once, when they are loaded."""


def device_environment() -> dict[str, str]:
    """The environment variables of a device: the host's present ones, and one BLAS thread."""
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}


def limit_threads() -> None:
    """Set one BLAS thread in a fork of the host, which has already read the variables."""
    with suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(1)
