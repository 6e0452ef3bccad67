"""Runs a program on rank 0 of an MPI job, and serves devices on the others."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vcluster.mpi.guard import Watched, guard
from vcluster.mpi.requirement import find_mpi
from vcluster.processes.blas_threads import THREAD_VARIABLES

if TYPE_CHECKING:
    from vcluster.mpi.job import Job

USAGE = "usage: mpiexec -n RANKS python -m vcluster.mpi (script.py | -m module) [argument ...]"


def main(arguments: Sequence[str]) -> int:
    """Run the script or the module that the arguments name. Returns the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or list(arguments) == ["-m"]:
        print(USAGE, file=sys.stderr)
        return 2
    module = arguments[1] if arguments[0] == "-m" else None
    sys.argv[:] = [module or arguments[0], *arguments[2 if module else 1 :]]
    sys.path[0] = str(Path.cwd() if module else Path(arguments[0]).resolve().parent)

    def program() -> None:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")

    try:
        with as_rank() as is_host:
            return code_of(program) if is_host else 0
    except (ImportError, ValueError) as error:  # of joining the job: those of the program were printed
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


@contextmanager
def as_rank() -> Iterator[bool]:
    """A context in which this process is a rank of its job.

    True on the host. The other ranks have served devices until the host has left the context, and get False.
    ``ImportError`` if there is no mpi4py.
    """
    find_mpi()
    # MPI waits for all ranks, and takes no Ctrl-C meanwhile: each rank ends of it at once.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    watched = guard()
    if any(rank in os.environ for rank in _RANK_VARIABLES):  # NumPy reads them when it is loaded
        for name in THREAD_VARIABLES:
            os.environ.setdefault(name, "1")
    job = _joined(watched)
    signal.signal(signal.SIGINT, signal.SIG_IGN if job.rank else on_interrupt)  # from now on the host decides
    watched.is_rank(job.rank)
    if job.rank:
        from vcluster.mpi.serving import serve

        try:
            serve(job, watched)
        except BaseException:  # MPI would wait at the exit for the host, which waits for this rank
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    try:
        yield job.rank == 0
    finally:
        if job.rank == 0:
            job.leave()
        watched.ends_well()


def _joined(watched: Watched) -> Job:
    """The job, which this process joins."""
    from vcluster.mpi.job import join

    try:
        return join()
    except ValueError:  # the guard need not tell of an end that the error tells of
        watched.ends_well()
        raise


def code_of(program: Callable[[], object]) -> int:
    """Run a program as Python would: its errors are printed, and the result is the exit code."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("KeyboardInterrupt", file=sys.stderr)
        return 130
    except BaseException as error:
        ours = error.__traceback__
        while ours is not None and ours.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            ours = ours.tb_next
        traceback.print_exception(type(error), error, ours)
        return 1
    return 0


_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
