"""The outcomes of a test on all ranks are combined into the one outcome that pytest expects."""

import linecache
from collections.abc import Mapping, Sequence
from types import CodeType

from parallelism.mesh import Mesh
from parallelism.operation.errors import keys_by_value
from vcluster.code import ClusterError, DeviceFailedError, Failure, ranks_in_words
from vcluster.testing.body import HostSide, Outcome
from vcluster.testing.tracebacks import attach_tracebacks, frame_at, traceback_of


class RanksDisagree(AssertionError):
    """One rank skipped a test that another one passed."""


def agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that all ranks share. Raises `RanksDisagree` if they differ."""
    if len({outcome.kind for outcome in outcomes}) > 1:
        raising = next(outcome.failure for outcome in outcomes if outcome.failure is not None)
        raise RanksDisagree(
            f"the ranks disagree on the outcome of the test: {_listing(dict(enumerate(outcomes)))}"
        ).with_traceback(traceback_of(raising.frames))
    return outcomes[0]


def exception_of(outcome: Outcome) -> BaseException:
    """The skip or xfail that a rank raised, with a traceback to the rank's line."""
    assert outcome.failure is not None
    error = outcome.failure.exception()
    attach_tracebacks(error, outcome.failure)
    return error


def failure_of(
    error: ClusterError, mesh: Mesh, test: CodeType, host: HostSide
) -> tuple[BaseException, list[tuple[str, str]]]:
    """The exception to raise for a failed test, and further sections (title, text) of the report.

    The exception is that of the first failing rank, with its own traceback and with notes that name the rank and the
    ranks that failed at the same line. Failures at other lines become sections. An error of the cluster, such as a
    deadlock or a death, is raised at the line of the first rank that it names, or at the test's first line.
    """
    sections: list[tuple[str, str]] = []
    if isinstance(error, DeviceFailedError) and error.failures:
        first, *others = sorted(error.failures)
        failure = error.failures[first]
        raised = host.raised.get(first, error.exceptions[first])
        if first not in host.raised:
            attach_tracebacks(raised, failure)
        if all(
            frame.filename != test.co_filename for frame in failure.frames
        ):  # it failed before or after the body
            raised.__traceback__ = traceback_of([frame_at(_first_line(test), test), *failure.frames])
        raised.add_note(f"on rank {first} of {mesh!r}")
        place = failure.type_name, failure.location
        same = {
            rank: other
            for rank in others
            if ((other := error.failures[rank]).type_name, other.location) == place
        }
        apart = {rank: error.failures[rank].format().rstrip() for rank in others if rank not in same}
        sections = [
            (f"failure of {ranks_in_words(ranks)}", text) for text, ranks in keys_by_value(apart).items()
        ]
        for text, ranks in keys_by_value({rank: other.text for rank, other in same.items()}).items():
            raised.add_note(_note_of_same(text, ranks, failure))
    else:
        raised = error
        known = [place for place in error.locations if place != "?"]
        raised.__traceback__ = traceback_of([frame_at(known[0] if known else _first_line(test), test)])
        raised.__cause__, raised.__suppress_context__ = None, True
    left = {rank: outcome for rank, outcome in error.outputs.items() if outcome.kind != "passed"}
    if left:
        raised.add_note(f"while {_listing(left)}")
    if getattr(raised, "pytrace", True) is False:  # pytest.fail(..., pytrace=False) shows only the message
        raised.msg = "\n".join([str(raised), *raised.__notes__])  # type: ignore[attr-defined]
    return raised, sections


def _note_of_same(text: str, ranks: Sequence[int], failure: Failure) -> str:
    """The note that names the ranks that failed at the same line as the first one, with this message."""
    if text == failure.text:
        return f"the same on {ranks_in_words(ranks)}"
    lines = text.splitlines() or [failure.type_name]
    known = failure.text.splitlines()
    differs = next((line for line in lines if line not in known), lines[0])  # skip an equal first part
    return f"at the same line on {ranks_in_words(ranks)}: {differs}"


def _first_line(function: CodeType) -> str:
    """``file:line`` of the function's ``def``, below its decorators."""
    first = function.co_firstlineno
    below = enumerate(linecache.getlines(function.co_filename)[first - 1 :], first)
    line = next((number for number, text in below if text.lstrip().startswith("def ")), first)
    return f"{function.co_filename}:{line}"


def _listing(outcomes: Mapping[int, Outcome]) -> str:
    texts = {rank: str(outcome) for rank, outcome in outcomes.items()}
    return ", ".join(f"{ranks_in_words(ranks)} {text}" for text, ranks in keys_by_value(texts).items())
