"""What a process does around joining a job, without MPI."""

import signal
from types import SimpleNamespace

import pytest

from vcluster.mpi import job, launcher


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
