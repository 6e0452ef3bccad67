"""The orders of the named schedules: as published, as drawn, and as their closed forms say."""

from __future__ import annotations

import doctest
import itertools
import json
import re

import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from paths import DATA

from parallelism.pipelining import Action, Pipeline, Schedule
from parallelism.pipelining.actions import parts
from parallelism.pipelining.generators import SCHEDULES

PUBLISHED = json.loads((DATA / "pipeline_schedules.json").read_text())["schedules"]
LENGTHS = {"F": 1, "B": 2}
ONE_STAGE = ["gpipe", "1f1b", "pipedream", "pipedream_2bw"]

stages = st.integers(1, 9)
microbatches = st.integers(1, 14)


def chunks_of(name):
    kind = SCHEDULES[name]
    return (1, 2, 3) if kind.is_interleaved else (kind.fewest_chunks,)


def schedule_of(name, ranks, count, chunks=None):
    chunks = chunks or chunks_of(name)[0]
    return Pipeline(ranks * chunks, count, name, chunks).schedule


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", PUBLISHED)
def test_order_times_and_live_activations_are_the_published_ones(key):
    name, ranks, count, chunks = re.fullmatch(r"(.+?)_P(\d+)_M(\d+)(?:_V(\d))?", key).groups()
    schedule, published = schedule_of(name, int(ranks), int(count), int(chunks or 1)), PUBLISHED[key]
    if "order" in published:
        assert [" ".join(map(str, row)) for row in schedule.actions] == published["order"]
    timeline = schedule.timeline()
    assert timeline.makespan == published["makespan"]
    assert list(timeline.rank_spans) == published["spans"]
    assert list(schedule.peak_live()) == list(timeline.peak_live()) == published["peak_live"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_picture_in_the_docstring_is_the_schedule(name):
    examples = doctest.DocTestFinder().find(SCHEDULES[name].generator, name, globs={"Pipeline": Pipeline})
    results = [doctest.DocTestRunner(verbose=False).run(example) for example in examples]
    assert sum(result.attempted for result in results) == 1 and not sum(result.failed for result in results)


@pytest.mark.sampled(9)
@pytest.mark.slow_for("all")
@pytest.mark.parametrize(
    ("sizes", "counts"), [((1, 2, 4), (1, 3, 6)), (range(1, 7), range(1, 11))], ids=["few", "all"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_size_is_valid(name, sizes, counts):
    # The clock's count of live activations and the order's are the same, and so is each rank's work.
    for ranks in sizes:
        for count in counts:
            for chunks in chunks_of(name):
                schedule = schedule_of(name, ranks, count, chunks)
                schedule.validate()
                timeline = schedule.timeline()
                assert timeline.busy == ((3 if schedule.training else 1) * count * chunks,) * ranks
                assert timeline.peak_live() == schedule.peak_live()
                assert timeline.makespan <= 3 * (ranks * chunks) * count


@given(name=st.sampled_from(ONE_STAGE), s=stages, m=microbatches)
def test_flushed_schedules_of_one_stage_take_what_the_closed_form_says(name, s, m):
    schedule = Pipeline(s, m, name).schedule
    assert schedule.makespan() == 2 * (m + s - 1)
    assert schedule.makespan(LENGTHS) == 3 * (m + s - 1)
    assert schedule.idle_fraction(LENGTHS) == pytest.approx((s - 1) / (m + s - 1))
    assert Pipeline(s, m, "inference").schedule.makespan() == m + s - 1


@given(s=stages, m=microbatches)
def test_gpipe_keeps_every_microbatch_and_1f1b_no_more_than_the_stages_to_come(s, m):
    assert Pipeline(s, m, "gpipe").schedule.peak_live() == (m,) * s
    assert Pipeline(s, m, "1f1b").schedule.peak_live() == tuple(min(s - rank, m) for rank in range(s))
    assert Pipeline(s, m, "inference").schedule.peak_live() == (0,) * s


@up_to(30)
@given(ranks=st.integers(1, 6), turns=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, turns, chunks):
    count = turns * ranks
    schedule = schedule_of("interleaved_1f1b", ranks, count, chunks)
    assert schedule.timeline().makespan == 3 * count * chunks + 3 * (ranks - 1)
    assert schedule.peak_live() == tuple(
        min(count * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - r) + 1) for r in range(ranks))
    assert schedule_of("looped_bfs", ranks, count, chunks).timeline().makespan == 3 * count * chunks + 3 * (ranks - 1)
    split = schedule_of("interleaved_zero_bubble", ranks, count, chunks)
    assert split.timeline().makespan == 3 * count * chunks + ranks - 1


@up_to(10)
@given(ranks=st.integers(1, 7), more=st.integers(0, 9))
def test_zero_bubble_schedules_take_one_hop_a_rank_more_than_the_work(ranks, more):
    h1 = schedule_of("zero_bubble_h1", ranks, ranks + more)
    assert h1.timeline().makespan == 3 * (ranks + more) + ranks - 1
    assert max(h1.peak_live()) == ranks
    h2 = schedule_of("zero_bubble_h2", ranks, 2 * ranks - 1 + more).timeline()
    assert h2.makespan == 3 * (2 * ranks - 1 + more) + ranks - 1
    assert h2.span_bubble_fraction == 0 and max(h2.peak_live()) <= 2 * ranks
    for name in ("zero_bubble_v", "dual_pipe_v"):
        timeline = schedule_of(name, ranks, 2 * ranks + more).timeline()
        assert timeline.makespan == 6 * (2 * ranks + more) + ranks - 1
    v = schedule_of("zero_bubble_v", ranks, 2 * ranks + more)
    assert v.timeline().span_bubble_fraction == 0 and max(v.peak_live()) == 2 * ranks


@given(s=stages, m=microbatches)
def test_local_losses_leave_no_gap(s, m):
    timeline = Pipeline(s, m, "local").schedule.timeline()
    assert timeline.makespan == 3 * m + s - 1 and timeline.span_bubble_fraction == 0
    assert timeline.peak_live() == (1,) * s


@given(ranks=st.integers(1, 20), m=microbatches)
def test_v_min_keeps_a_third_for_a_bubble_no_larger_than_that_of_1f1b(ranks, m):
    schedule = schedule_of("v_min", ranks, m)
    schedule.validate()
    assert max(schedule.peak_live()) <= 2 * ((ranks + 1) // 3 + 1)
    assert max(schedule_of("v_min", ranks, 3 * ranks).peak_live()) == 2 * ((ranks + 1) // 3 + 1)
    assert schedule.timeline().makespan <= 2 * 3 * (m + ranks - 1)     # of stages twice as large


def test_stages_of_a_v_lie_on_the_way_down_and_up():
    assert schedule_of("zero_bubble_v", 3, 2).placement == (0, 1, 2, 2, 1, 0)
    assert schedule_of("interleaved_1f1b", 2, 2, 3).placement == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("GPipe", "gpipe"), ("Interleaved-1F1B", "interleaved_1f1b"), ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("ScheduleLoopedBFS", "looped_bfs"), ("ScheduleInterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ScheduleZBVZeroBubble", "zero_bubble_v"), ("ScheduleDualPipeV", "dual_pipe_v"), ("ZB-H1", "zero_bubble_h1"),
        ("dualpipev", "dual_pipe_v"), ("_ScheduleForwardOnly", "inference"), ("Zero_Bubble-V", "zero_bubble_v"),
    ],
)
def test_names_of_torch_and_of_the_papers_are_known(spelling, name):
    chunks = chunks_of(name)[-1]
    assert Pipeline(2 * chunks, 2, spelling, chunks).schedule.name == name


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_actions_of_a_rank_are_single_actions_of_its_stages(name):
    ranks, count = 3, 5
    pipeline = Pipeline(ranks * chunks_of(name)[-1], count, name, chunks_of(name)[-1])
    done = []
    for rank in range(ranks):
        actions = pipeline.actions(rank)
        assert {type(action) for action in actions} == {Action}
        assert {pipeline.schedule.placement[action.stage] for action in actions} == {rank}
        for action in actions:
            done += [(action.stage, part, action.microbatch) for part in parts(action.kind)]
    kinds = "F" if name == "inference" else "FIW"
    everything = itertools.product(range(pipeline.stages), kinds, range(count))
    assert sorted(done) == sorted(everything)


def test_1f1b_with_fewer_microbatches_than_stages_has_one_shape_on_all_but_the_last():
    *rows, last = (" ".join(map(str, row)) for row in Pipeline(4, 2, "1f1b").schedule.actions)
    assert rows == [f"{r}F0 {r}F1 {r}B0 {r}B1" for r in range(3)]
    assert last == "3F0 3B0 3F1 3B1"


def test_csv_that_cannot_be_read_is_a_short_value_error():
    for text in ("0F0," + "1" * 200_000, "0F0\n" + "1" * 100_000, '0F0,"' + "x" * 200_000):
        with pytest.raises(ValueError, match=r"line \d of schedule") as caught:
            Schedule.from_csv(text)
        assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match="unknown schedule") as caught:
        Pipeline(stages=2, microbatches=2, schedule="x" * 100_000)
    assert len(str(caught.value)) < 2000
