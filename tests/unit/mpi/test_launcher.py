"""What a process does around joining a job, without MPI."""

import signal
import sys
from types import SimpleNamespace

import pytest

from vcluster.mpi import alike_scripts, job, launcher


@pytest.mark.parametrize("rank", [0, 2])
def test_an_interrupt_ends_a_rank_that_joins_and_later_only_the_host_hears_it(monkeypatch, rank):
    heard, told = [], []
    watched = SimpleNamespace(is_rank=told.append, ends_well=lambda: told.append("ends"))

    def join():
        heard.append(signal.getsignal(signal.SIGINT))       # a handler in Python would wait for MPI, which waits for all
        return SimpleNamespace(rank=rank, leave=lambda: told.append("leaves"))

    monkeypatch.setattr(launcher, "find_mpi", lambda: None)
    monkeypatch.setattr(launcher, "guard", lambda: watched)
    monkeypatch.setattr(job, "join", join)
    monkeypatch.setattr("vcluster.mpi.serving.serve", lambda *_: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        with launcher.as_rank() as is_host:
            heard.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_host == (rank == 0)
    assert heard == [signal.SIG_DFL, signal.SIG_IGN if rank else before]
    assert told == ([2, "ends"] if rank else [0, "leaves", "ends"])


@pytest.mark.parametrize(("arguments", "status", "stream"), [
    (["--help"], 0, "out"), (["-h"], 0, "out"), ([], 2, "err"), (["-m"], 2, "err"),
])
def test_help_that_is_asked_for_is_no_error(capsys, arguments, status, stream):
    assert launcher.main(arguments) == status
    told = capsys.readouterr()._asdict()
    assert told.pop(stream).startswith("usage: mpiexec -n RANKS") and set(told.values()) == {""}


@pytest.mark.parametrize(("variables", "is_told"), [
    ({}, False), ({"PMI_RANK": "0", "PMI_SIZE": "4"}, True), ({"PMI_RANK": "1", "PMI_SIZE": "4"}, False),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False), ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, True),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),        # a script of sbatch has them, and runs once
])
def test_the_first_of_several_alike_scripts_tells_how_to_start_one_cluster(monkeypatch, variables, is_told):
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "10"])
    monkeypatch.delitem(sys.modules, "vcluster.mpi.job")
    expected = ("mpiexec runs this script 4 times, and each has a cluster of its own; for one cluster on the ranks type: "
                "mpiexec -n 3 python -m vcluster.mpi train.py --steps 10")
    assert alike_scripts(2) == (expected if is_told else None)


def test_no_more_is_told_in_a_job_of_vcluster_itself(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert "vcluster.mpi.job" in sys.modules and alike_scripts(2) is None
