"""The timeline in a terminal: what the signs say, and that no line is ever too wide."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from parallelism.trace import Event, Trace
from vcluster.report import coloured_timeline, timeline


def block(rank, start, duration, phase=None, microbatch=None, kind="compute", **fields):
    return Event(rank, kind, "block", start, duration, phase=phase, microbatch=microbatch,
                 stage=None if phase is None else rank, **fields)


def rows(trace, width=80):
    return [line.split(maxsplit=2)[2] for line in timeline(trace, width).splitlines() if line.startswith("rank")]


PIPELINE = Trace([
    block(0, 0, 1, "F", 0), block(0, 1, 1, "F", 1), block(0, 4, 2, "B", 0), block(0, 7, 2, "B", 1),
    block(1, 1, 1, "F", 0), block(1, 2, 2, "B", 0), block(1, 4, 1, "F", 1), block(1, 5, 2, "B", 1),
])


def test_forward_and_backward_of_a_pipeline_differ_without_colour():
    assert timeline(PIPELINE, 8 + 18) == """\
virtual time: 9 s, 500 ms
per column
rank 0  0011....aaaa..bbbb
rank 1  ..00aaaa11bbbb....
        |---------|-------
        0 s       5 s
0-1 forward of a
microbatch, a-b its
backward, . idle"""


def test_backward_for_weights_has_capitals_and_other_work_its_own_signs():
    trace = Trace([block(0, 0, 1, "I", 2), block(0, 1, 1, "W", 2), block(0, 2, 1), block(0, 3, 1, kind="collective"),
                   block(0, 4, 1, kind="recv"), block(0, 5, 1, "F", 13)])
    assert rows(trace, 8 + 18) == ["cccCCC===###...333"]
    assert "(last digit)" in timeline(trace)


def test_a_column_shows_what_took_most_of_it_and_compute_hides_a_collective_behind_it():
    trace = Trace([block(0, 0, 60), block(0, 60, 40, kind="collective"), block(0, 1e3, 100), block(0, 1600 - 1, 1),
                   block(0, 1000, 300, kind="collective", work=0), block(0, 1000, 300, kind="collective", work=1)])
    assert rows(trace, 8 + 16) == ["=.........=##..."]


def test_what_happens_inside_a_collective_is_not_drawn():
    assert rows(Trace([block(0, 0, 2, kind="collective"), block(0, 0, 1, parent=0)]), 24) == ["#" * 16]


@pytest.mark.parametrize(("trace", "count"), [
    (Trace([]), 0), (Trace([], size=3), 3), (Trace([block(0, 0, 0)]), 1), (Trace([block(0, 5, 1)]), 1),
    (Trace([block(63, 0, 1)]), 64), (Trace([block(999, 0, 1)]), 64),
    (Trace([block(r, r, 1) for r in range(4)]).filter(rank=[1, 3]), 2),
])
def test_every_device_told_about_has_a_row_up_to_64(trace, count):
    assert len(rows(trace)) == count
    assert ("more ranks" in timeline(trace)) == (trace.size > 64)


def test_a_width_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 24 columns, got 23"):
        timeline(PIPELINE, 23)


def test_colour_is_added_and_changes_no_sign():
    text = coloured_timeline(PIPELINE)
    assert text.plain == timeline(PIPELINE)
    assert len({str(span.style) for span in text.spans}) == 3


events = st.builds(
    block, st.integers(0, 70), st.floats(0, 1e6) | st.floats(0, 1e308), st.floats(0, 1e6) | st.floats(0, 1e-300),
    st.sampled_from((None, "F", "B", "I", "W", "?")), st.none() | st.integers(0, 1000),
    st.sampled_from(("compute", "collective", "recv", "memory")))


@given(st.lists(events, max_size=8), st.integers(24, 130))
def test_no_line_is_wider_than_allowed_and_rows_have_one_length(events, width):
    text = timeline(Trace(events), width)
    assert text.isascii() and max(map(len, text.splitlines()), default=0) <= width
    assert {len(line) for line in text.splitlines() if line.startswith("rank")} <= {width}
