"""A schedule in time: starts and ends under given costs, both bubbles, live activations, and the picture of it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from fractions import Fraction

import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism.events import Event
from parallelism.pipelining import Pipeline, Schedule
from parallelism.pipelining.actions import parts
from parallelism.pipelining.generators import SCHEDULES
from parallelism.timeline import Replay
from parallelism.timeline.replay import replay

costs = st.fixed_dictionaries({kind: st.integers(0, 7) for kind in ("F", "I", "W", "message")})
pipelines = st.builds(
    lambda ranks, microbatches, name: Pipeline(ranks * SCHEDULES[name].fewest_chunks, microbatches, name),
    st.integers(1, 4), st.integers(1, 6), st.sampled_from(sorted(SCHEDULES)),
)


def schedule_of(text):
    return Schedule.from_csv(text)


def test_two_stages_by_hand():
    timeline = schedule_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1").timeline({"F": 2, "B": 3, "message": 1})
    assert [[(str(a), start, end) for a, start, end in row] for row in timeline.spans] == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 9, 12), ("0B1", 14, 17)],
        [("1F0", 3, 5), ("1B0", 5, 8), ("1F1", 8, 10), ("1B1", 10, 13)],
    ]
    assert timeline.makespan == 17 and timeline.busy == (10, 10) and timeline.rank_spans == (17, 10)
    assert timeline.bubble_fraction == 1 - 20 / 34
    assert timeline.span_bubble_fraction == 7 / 17
    assert timeline.live(0) == ((0, 1), (2, 2), (12, 1), (17, 0))
    assert timeline.live(1) == ((3, 1), (13, 0))
    assert timeline.peak_live() == (2, 1)


def test_a_stage_may_have_a_cost_of_its_own_and_a_pair_runs_its_forward_first():
    schedule = schedule_of("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1")
    timeline = schedule.timeline({"F": [1, 10], "B": [2, 20], "message": 100})
    assert [start for _, start, _ in timeline.spans[0]] == [0, 1, 2, 12, 22, 42, 62, 64]
    assert timeline.starts == ((0, 1, 2, 12, 42, 62, 64),)
    assert timeline.bubble_fraction == 0


@up_to(30)
@given(pipelines, costs)
def test_every_action_starts_when_its_rank_and_what_it_needs_allow_it(pipeline, costs):
    schedule = pipeline.schedule
    timeline = schedule.timeline(costs)
    length = {**costs, "B": costs["I"] + costs["W"]}
    ends = {(a.stage, part, a.microbatch): end for row in timeline.spans for a, _, end in row
            for part in parts(a.kind)}
    for rank, row in enumerate(timeline.spans):
        free = 0
        for action, start, end in row:
            ready = [
                ends[need] + (costs["message"] if schedule.placement[need.stage] != rank else 0)
                for need in schedule.needs(action)
            ]
            assert start == max([free, *ready]) and end == start + length[action.kind]
            free = end


def test_schedules_and_records_are_timed_by_one_engine(monkeypatch):
    """Schedules once had a clock of their own, and so had records in which no transfer disturbs another."""
    runs = []
    run = Replay.run
    monkeypatch.setattr(Replay, "run", lambda self: (runs.append(self), run(self))[1])
    assert Pipeline(2, 3, "1f1b").schedule.makespan() == 8
    replay([[Event(0, "compute", "work", cpu_seconds=1.0)]])
    assert len(runs) == 2


@pytest.mark.parametrize("unit", [1, 2**60, Fraction(1, 3), 0.1])
def test_times_are_exact_sums_of_the_costs_in_their_own_type(unit):
    timeline = Pipeline(4, 8, "zero_bubble_h1").schedule.timeline({"F": unit, "I": unit, "W": unit, "message": 0})
    times = {time for row in timeline.spans for _, *span in row for time in span} - {0}
    assert {type(time) for time in times} == {type(unit)}
    assert timeline.makespan == pytest.approx(27 * unit, rel=1e-15 if unit == 0.1 else 0)


def test_an_order_that_cannot_go_on_names_what_each_rank_waits_for():
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    with pytest.raises(ValueError, match=r"^schedule 'odd' cannot go on: rank 0 waits at step 1 \(0B0\) for 1B0; "
                                         r"rank 1 waits at step 0 \(1F1\) for 0F1$"):
        Schedule("odd", rows, 2, 2).timeline()
    listed = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1F0", "1RECV_F0", "1B0", "1SEND_B0"]]
    with pytest.raises(ValueError, match=r"step 3 \(0B0\) for 1SEND_B0; rank 1 .*\(1F0\) for 1RECV_F0$"):
        Schedule("listed", listed, 2, 1).timeline()


@up_to(30)
@given(pipelines)
def test_five_numbers_are_costs_in_their_order(pipeline):
    named = pipeline.schedule.timeline({"F": 1, "B": 7, "I": 3, "W": 2, "message": 4})
    assert pipeline.schedule.timeline([1, 7, 3, 2, 4]) == named


@up_to(30)
@given(pipelines)
def test_equal_messages_between_all_stages_are_one_cost(pipeline):
    costs = {"F": 1, "B": 7, "I": 3, "W": 2}
    several = pipeline.schedule.timeline({**costs, "message": [4] * (pipeline.stages - 1)})
    assert several == pipeline.schedule.timeline({**costs, "message": 4})


def test_messages_may_take_longer_between_some_stages():
    timeline = Pipeline(3, 1, "1f1b").schedule.timeline({"F": 1, "B": 2, "message": [5, 11]})
    assert [[(str(span.action), span.start) for span in row] for row in timeline.spans] == [
        [("0F0", 0), ("0B0", 1 + 5 + 1 + 11 + 1 + 2 + 11 + 2 + 5)], [("1F0", 6), ("1B0", 32)],
        [("2F0", 18), ("2B0", 19)]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([1, 2, 3], ValueError, r"five numbers \(F, B, I, W, message\), or a mapping from these; got \[1, 2, 3\]"),
        ("12345", ValueError, "five numbers"),
        ({"F": [1, 2, 3], "B": 2}, ValueError, "cost of F should be a number, or one for each of 2 stages; got"),
        ({"F": 1, "B": 2, "message": [1, 2]}, ValueError,
         r"cost of message should be a number, or one for each of 1 pairs of neighbouring stages; got \[1, 2\]"),
        ({"F": 1, "B": 2, "X": 3}, ValueError, "costs are of F, B, I, W, message; got one of 'X'"),
        ({"F": 1}, ValueError, "costs should have one of B; got message, F"),
        ({"F": -1, "B": 2}, ValueError, "cost of F should be 0 or more and finite; got -1"),
        ({"F": float("nan"), "B": 2}, ValueError, "cost of F should be 0 or more and finite; got nan"),
        ({"F": "1", "B": 2}, TypeError, "cost of F should be a number; got '1'"),
        ({"F": True, "B": 2}, TypeError, "cost of F should be a number; got True"),
    ],
)
def test_costs_that_are_none_are_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        Pipeline(2, 2, "1f1b").schedule.timeline(given)


def test_a_broken_schedule_is_drawn_or_refused_but_never_a_riddle():
    assert "rank 1  F0" in str(Schedule("twice", [["0F0"], ["0F0"]], 2, 1))
    with pytest.raises(ValueError, match="schedule 'far': 5F0 is of stage 5; it has 2"):
        str(Schedule("far", [["0F0"], ["5F0"]], 2, 1))
    with pytest.raises(ValueError, match="costs should have one of X"):
        str(Schedule("odd", [[(0, "X", 0)]], 1, 1))


def test_free_actions_make_no_bubble_of_nothing():
    timeline = Pipeline(2, 1).schedule.timeline({"F": 0, "B": 0})
    assert (timeline.makespan, timeline.bubble_fraction, timeline.span_bubble_fraction) == (0, 0, 0)


@up_to(30)
@given(pipelines, st.just({"F": 2, "I": 3, "W": 1, "message": 1}))
def test_the_picture_has_a_box_to_scale_for_every_action(pipeline, costs):
    schedule = pipeline.schedule
    timeline = schedule.timeline(costs)
    root = ET.fromstring(schedule.to_svg(costs))
    boxes = root.findall("{http://www.w3.org/2000/svg}g")
    told = [box.find("{http://www.w3.org/2000/svg}title").text for box in boxes]
    spans = [span for row in timeline.spans for span in row]
    assert told == [f"{action}: {start:g} to {end:g}" for action, start, end in spans]
    row = next(each for each in root.findall("{http://www.w3.org/2000/svg}rect") if each.get("fill") == "var(--panel)")
    whole = float(row.get("width"))
    for box, (_, start, end) in zip(boxes, spans, strict=True):
        width = float(box.find("{http://www.w3.org/2000/svg}rect").get("width"))
        assert width == pytest.approx((end - start) * whole / timeline.makespan, abs=0.02)


def test_the_picture_tells_kinds_apart_without_colour_and_escapes_the_name():
    rows = [["0F0", "0I0", "0W0", "0F1", "0B1"]]
    page = Schedule("<own>", rows, 1, 2).to_svg()
    assert "&lt;own&gt;: 1 stage on 1 rank, 2 microbatches; makespan 6, bubble 0.0% of it" in page
    mark = page.split('<pattern id="')[1].split("-")[0]
    for kind in "BIW":
        assert page.count(f'fill="url(#{mark}-{kind})"') == 2     # the box, and the legend's
    for word in (">F0<", ">I0<", ">W0<", ">B1<", "backward for the input", "backward for the weights"):
        assert word in page
    assert Pipeline(2, 4, "dual_pipe_v").schedule.to_svg().count("run together") == 1


def test_every_box_of_an_interleaved_schedule_says_its_action_and_chunks_differ_in_hue() -> None:
    """However many there are, the smallest box has room for its words; the picture is as wide as that needs."""
    page = Pipeline(12, 9, "interleaved_1f1b", 3).schedule.to_svg()
    for stage, k in ((0, 0), (4, 3), (11, 8)):
        assert f">{stage}F{k}<" in page and f">{stage}B{k}<" in page
    hues = re.findall(r'height="5" fill="(.*?)"', page)
    assert len(hues) == 2 * 12 * 9 and {*Counter(hues).values()} == {2 * 4 * 9}      # three chunks of four stages
    assert [page.count(f"chunk {chunk} of a rank<") for chunk in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert re.search(r'height="5" fill=', Pipeline(4, 9, "1f1b").schedule.to_svg()) is None
    many = Pipeline(32, 64, "1f1b").schedule.to_svg()
    assert many.count(">F63<") == 32 and many.count(">B10<") == 32


def test_a_timeline_is_drawn_as_text() -> None:
    """Each column of a rank's line is the action that runs then, and each bar is as long as its cost."""
    timeline = Pipeline(2, 3, "1f1b").schedule.timeline({"F": 1, "B": 2})
    lines = str(timeline).splitlines()
    assert lines[0] == "1f1b: 2 stages on 2 ranks, 3 microbatches; makespan 12, bubble 25.0% of it"
    assert lines[1:3] == [
        "rank 0  F0----F1----............B0----------F2----B1----------......B2----------",
        "rank 1  ......F0----B0----------F1----B1----------F2----B2----------............"]
    assert lines[3].split() == ["0", "12"] and max(map(len, lines)) <= 80


def test_one_chunk_is_not_interleaved_and_says_so() -> None:
    said = "one chunk a rank, so nothing is interleaved"
    assert said in str(Pipeline(4, 8, "interleaved_1f1b"))
    assert said not in str(Pipeline(4, 8, "interleaved_1f1b", 2)) and said not in str(Pipeline(4, 8, "1f1b"))


def test_of_an_action_that_runs_twice_the_first_sends_the_message():
    """`Schedule.validate` refuses it; its timeline is drawn all the same."""
    timeline = Schedule("again", [["0F0", "0F0", "0B0"], ["1F0", "1B0"]], 2, 1).timeline({"F": 1, "B": 2, "message": 0.5})
    assert timeline.spans[1][0].start == 1.5
