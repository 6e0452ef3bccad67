"""Long work tells its progress on a terminal, in one line that is gone at the end; elsewhere in a line now and then."""

import io
from contextlib import redirect_stderr

import pytest

from parallelism.display import progress, progress_line
from parallelism.models import TransformerSpec
from parallelism.planning import find_plan


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def shown(stream):
    """The lines, one after the other in the same place."""
    return stream.getvalue().split("\r\033[K")[1:]


def test_a_line_is_overwritten_and_gone_at_the_end(terminal):
    with redirect_stderr(terminal), progress("beginning") as told:
        told("timing", 3, 12)
        told("reading", 7, 0)
    first, timing, reading, last = shown(terminal)
    assert first.startswith("beginning ") and reading.startswith("reading 0 s") and last == ""
    assert timing.startswith(f"timing 3 of 12 [{'#' * 7:<30}] 0 s")


def test_the_line_is_gone_after_an_error(terminal):
    with redirect_stderr(terminal), pytest.raises(ZeroDivisionError), progress("dividing") as told:
        told("dividing", 1, 1 // 0)
    assert shown(terminal)[-1] == ""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_where_there_is_no_terminal_nothing_is_written(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    with redirect_stderr(Terminal() if term == "dumb" else io.StringIO()) as stream:
        with progress("beginning") as told:
            told("timing", 3, 12)
        with progress("simulating", alone=True):
            pass
    assert stream.getvalue() == ""


def test_where_there_is_no_terminal_long_work_writes_a_line_now_and_then(monkeypatch):
    clock = iter([100.0, 105.0, 110.5, 119.0, 121.0])
    monkeypatch.setattr(progress_line, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress_line, "LONG_SECONDS", 10.0)
    with redirect_stderr(io.StringIO()) as stream, progress("beginning") as told:
        for done in (1, 2, 3):
            told("timing", done, 12)
        told("simulating", 7, 0)
    assert stream.getvalue() == "timing 2 of 12, 10 s\nsimulating, 21 s\n"


@pytest.mark.slow
def test_a_search_for_plans_tells_how_far_it_is(terminal):
    spec = TransformerSpec(
        layers=1, width=8, heads=2, vocabulary=8, sequence=4, biases=False, norm="rms", activation="relu")
    with redirect_stderr(terminal), progress() as told:
        find_plan(spec, hardware="dgx-a100", devices=1, batch=2, recompute="none", zero=0,
                  schedule="1f1b", tp=1, progress=told)
    assert {line.split(" of ")[0] for line in shown(terminal)} >= {"prepared 0", "simulated 0"}
