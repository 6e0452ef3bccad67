"""How the ranks of a test ended is told in one outcome, the first failing rank's first."""

from __future__ import annotations

import pytest

from parallelism import Mesh
from vcluster import DeadlockError, DeviceFailedError
from vcluster.code import describe_exception
from vcluster.testing.body import HostSide, Outcome
from vcluster.testing.outcomes import RanksDisagree, agreed, exception_of, failure_of

MESH = Mesh(tp=6)


def kernel(rank):
    if rank == 4:
        raise KeyError("four")
    if rank:
        raise ValueError("odd" if rank % 2 else "even")


def failures(*ranks):
    told = {}
    for rank in ranks:
        try:
            kernel(rank)
        except Exception as error:
            told[rank] = describe_exception(error)
    return told


def failed(*ranks):
    error = DeviceFailedError("...", ranks=ranks)
    error.failures = failures(*ranks)
    error.exceptions = {rank: failure.exception() for rank, failure in error.failures.items()}
    return error


def told(error, code=kernel.__code__):
    return failure_of(error, MESH, code, HostSide())


def test_the_first_failing_rank_leads_and_the_same_line_is_folded():
    raised, sections = told(failed(1, 2, 3, 5))
    assert type(raised) is ValueError
    assert raised.__notes__ == [
        "on rank 1 of Mesh(tp=6)", "at the same line on rank 2: even", "the same on ranks 3 and 5"
    ]
    assert sections == []
    lines = [(entry.path.name, entry.name) for entry in pytest.ExceptionInfo.from_exception(raised).traceback]
    assert lines[-1] == ("test_outcomes_of_tests.py", "kernel")


def test_failures_at_other_lines_have_sections():
    raised, [(title, text)] = told(failed(2, 4))
    assert raised.__notes__ == ["on rank 2 of Mesh(tp=6)"]
    assert title == "failure of rank 4"
    assert text.startswith("Traceback")
    assert text.endswith("KeyError: 'four'")


def test_threads_raise_the_exception_itself():
    host = HostSide()
    host.raised[1] = ValueError("the very one")
    raised, _ = failure_of(failed(1), MESH, kernel.__code__, host)
    assert raised is host.raised[1]


def test_the_clusters_own_errors_come_from_the_first_line_they_name():
    line = kernel.__code__.co_firstlineno + 2
    error = DeadlockError("deadlock", ranks=[0, 1], locations=[f"{__file__}:{line}", "elsewhere.py:7"])
    error.outputs = {2: Outcome("skipped", describe_exception(pytest.skip.Exception("why"))), 3: Outcome("passed")}
    raised, _ = told(error)
    assert raised is error
    assert raised.__notes__ == ["while rank 2 skipped (why)"]
    [entry] = pytest.ExceptionInfo.from_exception(raised).traceback
    assert (entry.lineno + 1, entry.name) == (line, "kernel")


def test_a_death_without_a_line_comes_from_the_tests_def():
    raised, _ = told(DeviceFailedError("the process of rank 1 was ended", ranks=[1], signal="SIGKILL"))
    [entry] = pytest.ExceptionInfo.from_exception(raised).traceback
    assert entry.lineno + 1 == kernel.__code__.co_firstlineno


def test_ranks_that_agree_have_one_outcome():
    skipped = Outcome("skipped", describe_exception(pytest.skip.Exception("why")))
    assert agreed([Outcome("passed")] * 3).kind == "passed"
    assert agreed([skipped, skipped]) is skipped
    assert isinstance(exception_of(skipped), pytest.skip.Exception)


def test_ranks_that_disagree_are_an_error():
    skipped = Outcome("skipped", describe_exception(pytest.skip.Exception("why")))
    with pytest.raises(RanksDisagree, match=r"^the ranks disagree .*: ranks 0 and 2 passed, rank 1 skipped \(why\)$"):
        agreed([Outcome("passed"), skipped, Outcome("passed")])
