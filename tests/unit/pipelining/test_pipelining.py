"""Schedules as values: what is refused and why, text there and back, pictures, and what a stage does when."""

from __future__ import annotations

import pickle
from itertools import chain, pairwise

import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism.pipelining import Action, Overlapped, Pipeline, PipelineStage, Schedule, Status
from parallelism.pipelining.generators import SCHEDULES

TWO_CHUNKS = """\
0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
"""  # interleaved 1F1B of 2 ranks, 4 microbatches, 2 chunks, as torch.distributed.pipelining writes it

named = st.builds(
    lambda ranks, microbatches, name: Pipeline(ranks * SCHEDULES[name].fewest_chunks, microbatches, name),
    st.integers(1, 4), st.integers(1, 6), st.sampled_from(sorted(SCHEDULES)),
)
pipelines = st.builds(Pipeline, st.integers(1, 6), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]))


def test_an_action_is_written_as_stage_kind_and_microbatch():
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("13W7") == Action(13, "W", 7)
    for text in ("1SEND_F3", "2RECV_F3", "2SEND_B3", "1RECV_B3"):
        assert str(Action.parse(text)) == text
    pair = Overlapped.parse("(0F7;7B3)OVERLAP_F_B")
    assert pair == Overlapped(Action(0, "F", 7), Action(7, "B", 3)) and str(pair) == "(0F7;7B3)OVERLAP_F_B"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0;", "2SENDF0", "2SEND_W0", "٣F0"])
def test_text_that_is_no_action_is_named(text):
    with pytest.raises(ValueError, match="as in '2F0'; got") as raised:
        Action.parse(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["(0F1)OVERLAP_F_B", "(0B1;7B3)OVERLAP_F_B", "(0F1;7B3)", "(0F1;7F3)OVERLAP_F_B"])
def test_text_that_is_no_overlapped_pair_is_named(text):
    with pytest.raises(ValueError, match="an F and a B, as in") as raised:
        Overlapped.parse(text)
    assert repr(text) in str(raised.value)


@up_to(30)
@given(named, st.booleans())
def test_csv_goes_there_and_back(pipeline, messages):
    schedule = pipeline.schedule.with_messages() if messages else pipeline.schedule
    options = {"training": schedule.training, "weights": schedule.weights, "local": schedule.local}
    assert Schedule.from_csv(schedule.to_csv(), schedule.name, **options) == schedule


def test_what_torch_lists_of_the_parameters_is_passed_over():
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"
    schedule = Schedule.from_csv(text)
    schedule.validate()
    assert schedule.to_csv() == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@up_to(30)
@given(named)
def test_listing_the_messages_changes_no_time(pipeline):
    schedule = pipeline.schedule.with_messages()
    schedule.validate()
    assert schedule.with_messages() == schedule
    costs = {"F": 2, "I": 3, "W": 1, "message": 5}
    if schedule.name == "dual_pipe_v":  # what the forward of a pair has made is sent after the pair
        assert schedule.timeline(costs).makespan >= pipeline.schedule.timeline(costs).makespan
    else:
        assert schedule.timeline(costs).spans == pipeline.schedule.timeline(costs).spans
    ways = 2 if schedule.training and not schedule.local else 1
    crossing = sum(a != b for a, b in pairwise(schedule.placement)) * ways
    sends = [work for row in schedule.works for work in row if work.kind.startswith("SEND")]
    assert len(sends) == crossing * pipeline.microbatches


def test_csv_of_several_chunks_is_read_valid_and_written_alike():
    schedule = Schedule.from_csv(TWO_CHUNKS)
    schedule.validate()
    assert (schedule.stages, schedule.ranks, schedule.microbatches, schedule.chunks) == (4, 2, 4, 2)
    assert schedule.placement == (0, 1, 0, 1)
    assert schedule.to_csv() == TWO_CHUNKS
    assert schedule.makespan({"F": 1, "B": 2}) == 3 * 4 * 2 + 3 * (2 - 1)
    assert schedule.peak_live() == (5, 3)  # min(MV, (V - 1) P + 2 (P - 1 - r) + 1)


def test_csv_with_idle_cells_and_other_line_ends_is_read():
    assert Schedule.from_csv("0F0,,0B0\r\n,1F0,1B0\r\n").to_csv() == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "blank"),
        ("  \n\n", "blank"),
        ("0F0,0B0\n1F0,1Q0", "line 2 .* got '1Q0'"),
        ("0F0,0B0\n,,\n1F0,1B0", "line 2 .* no action"),
        ("\n0F0,0B0", "line 1 .* no action"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0", "3 stages, which 2 ranks cannot hold equally"),
    ],
)
def test_csv_that_is_no_schedule_is_refused_by_line(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(text)


BROKEN = {
    "missing, and needed": ("0F0,0F1,0B0,0B1\n1F1,1B1,1F2,1B2", "step 2: 0B0 needs 1B0, which is missing on rank 1"),
    "missing, at the end": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "rank 0, step 3, the end: 0B1 is missing"),
    "forward missing": ("0F0,0B0,0B1\n1F0,1B0,1F1,1B1", "step 2: 0B1 needs 0F1, which is missing on rank 0"),
    "half a backward": ("0F0,0B0\n1F0,1I0", "rank 1, step 2, the end: 1W0 is missing"),
    "doubled": ("0F0,0F0,0B0\n1F0,1B0", "rank 0, step 1: 0F0 is doubled; 0F0 was at step 0"),
    "doubled in halves": ("0F0,0B0\n1F0,1I0,1B0", "rank 1, step 2: 1B0 is doubled; 1I0 was at step 1"),
    "too early": ("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0", "rank 1, step 1: 1B1 is too early; 1F1 comes at step 2"),
    "weights before input": ("0F0,0W0,0I0", "rank 0, step 1: 0W0 is too early; 0I0 comes at step 2"),
    "on two ranks": ("0F0,0B0,1B0\n1F0", "rank 1, step 0: 1F0 runs stage 1, which lies on rank 0"),
    "sent to nobody": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        "rank 0, step 1: 0SEND_F0 is without its 1RECV_F0, which is missing on rank 1",
    ),
    "not sent": (
        "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 1, step 0: 1RECV_F0 is without its 0SEND_F0, which is missing on rank 0",
    ),
    "received too late": (
        "0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 0, step 2: 0B0 is too early; 0RECV_B0 comes at step 3",
    ),
    "sent into the void": ("0F0,0B0,0SEND_B0", "rank 0, step 2: 0SEND_B0 has no stage -1 at its other end"),
    "overlapped with itself": (
        "(0F0;0B0)OVERLAP_F_B", "step 0: 0B0 needs 0F0, which the same step runs; they cannot overlap"),
    "the last rank counts from one": (
        "0F0,0F1,0B0,0B1\n1F1,1B1,1F2,1B2",
        "rank 0, step 2: 0B0 needs 1B0, which is missing on rank 1",
    ),
    "messages in a circle": (
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
        "cannot go on: rank 0 waits at step 3 \\(0B0\\) for 1SEND_B0; rank 1 waits at step 3 \\(1F1\\) for 0SEND_F1",
    ),
    "in a circle": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
        "cannot go on: rank 0 waits at step 1 \\(0B0\\) for 1B0; rank 1 waits at step 1 \\(1F1\\) for 0F1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_schedule_is_refused_with_rank_step_and_action(case):
    text, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(text).validate()


def test_last_rank_counting_microbatches_from_one_is_refused():
    rows = [list(map(str, row)) for row in Pipeline(3, 4).schedule.actions]
    rows[-1] = [f"2{kind}{k}" for k in range(1, 5) for kind in "FB"]
    with pytest.raises(ValueError, match="rank 2, step 6: 2F4 is of microbatch 4; the schedule has 4, counted from 0"):
        Schedule("wrong table", rows, 3, 4).validate()


@pytest.mark.parametrize(
    ("actions", "sizes", "message"),
    [
        ([["0F0", "2B0"]], (1, 1), "2B0 is of stage 2; the schedule has 1"),
        ([["0F0", (0, "X", 0)]], (1, 1), "0X0 is of kind 'X'; the kinds are F, B, I, W"),
        ([["0F0", "1F0", "2F0", "0B0"], ["3F0", "3B0"]], (4, 1, 2), "rank 0 runs stages \\[0, 1, 2\\], where chunks=2"),
        ([["0F0", "0B0"], []], (2, 1), "rank 1 runs stages \\[\\], where chunks=1"),
        ([["0F0", "0B0"]], (2, 1), "1 ranks of 1 stages; that is not 2 stages"),
    ],
)
def test_actions_that_do_not_fit_the_sizes_are_refused(actions, sizes, message):
    with pytest.raises(ValueError, match=message):
        Schedule("mine", actions, *sizes).validate()


@given(pipelines, st.data())
def test_leaving_out_any_action_is_noticed(pipeline, data):
    rows = [list(row) for row in pipeline.schedule.actions]
    row = data.draw(st.sampled_from(rows))
    row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(ValueError, match=r"missing|runs stages"):
        Schedule("short", rows, pipeline.stages, pipeline.microbatches).validate()


@given(pipelines)
def test_every_action_starts_after_what_it_needs(pipeline):
    schedule = pipeline.schedule
    starts = dict(zip(chain(*schedule.actions), chain(*schedule.starts()), strict=True))
    for (stage, kind, k), start in starts.items():
        before = [(stage - 1, "F", k)] if kind == "F" else [(stage, "F", k), (stage + 1, "B", k)]
        assert all(starts[need] < start for need in before if need in starts)
    for row in schedule.actions:
        assert len({starts[action] for action in row}) == len(row)


def test_a_split_backward_lets_the_stage_before_go_on_early():
    rows = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    assert Schedule("split", rows, 2, 1).starts() == ((0, 3, 4), (1, 2, 3))


@pytest.mark.parametrize("name", ["gpipe", "GPipe", "g_pipe", "G-PIPE", "ScheduleGPipe"])
def test_names_are_known_however_spelt(name):
    assert Pipeline(2, 2, name).schedule.name == "gpipe"
    assert Pipeline(2, 2, "Schedule1F1B").schedule.name == "1f1b"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stages": 0}, ValueError, "stages must be at least 1, got 0"),
        ({"microbatches": 0}, ValueError, "microbatches must be at least 1, got 0"),
        ({"stages": 2.0}, TypeError, "stages must be an integer, got 2.0"),
        ({"schedule": "1f2b"}, ValueError, r"schedule '1f2b'; did you mean '1f1b'\? \(known: 'gpipe', '1f1b', "),
        ({"schedule": None}, TypeError, "a schedule must be a name, a Schedule, csv, lists of actions or a function, "
                                        "got None"),
        ({"chunks": 2}, ValueError, "3 stages cannot be split over ranks in chunks of 2; 2 or 4 can"),
        ({"chunks": 3}, ValueError, "'1f1b' puts one stage on each rank, got chunks=3; chunks=1 fits"),
        ({"chunks": 5}, ValueError, "3 stages cannot be split over ranks in chunks of 5; 5 can"),
        ({"schedule": Schedule("own", [["0F0", "0B0"]], 1, 1)}, ValueError, "'own' has stages=1, the pipeline stages"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Pipeline(**{"stages": 3, "microbatches": 2, **arguments})


def test_a_schedule_of_ones_own_is_validated_and_run_like_a_named_one():
    own = Schedule.from_csv(TWO_CHUNKS, "own")
    pipeline = Pipeline(4, 4, own, chunks=2)
    assert pipeline.schedule is own and pipeline.ranks == 2
    with pytest.raises(ValueError, match="missing"):
        Pipeline(1, 1, Schedule("own", [["0F0"]], 1, 1))


def test_csv_lists_and_functions_stand_where_a_name_does():
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]

    def mine(rank, ranks, microbatches, chunks=1):
        yield from ((rank + ranks * c, "F", k) for c in range(chunks) for k in range(microbatches))
        yield from ((rank + ranks * c, "B", k) for c in reversed(range(chunks)) for k in range(microbatches))

    expected = Pipeline(2, 2, "1f1b").schedule.actions
    for schedule in (rows, "\n".join(map(",".join, rows)), lambda rank, ranks, microbatches: rows[rank]):
        assert Pipeline(2, 2, schedule).schedule.actions == expected
    assert Pipeline(2, 3, mine).schedule.actions == Pipeline(2, 3, "gpipe").schedule.actions
    assert Pipeline(6, 3, mine, chunks=3).schedule.placement == (0, 1, 0, 1, 0, 1)
    assert Pipeline(4, 4, TWO_CHUNKS).chunks == 2
    with pytest.raises(ValueError, match="'<lambda>', rank 0, step 0: 2F0 is of stage 2; the schedule has 2"):
        Pipeline(2, 1, lambda rank, ranks, microbatches: mine(2, ranks, microbatches))
    with pytest.raises(ValueError, match="rank 1, step 2: 1B1 is too early"):
        Pipeline(2, 2, [rows[0], ["1F0", "1B0", "1B1", "1F1"]])


@pytest.mark.parametrize("name", ["zero_bubble_v", "dual_pipe_v"])
def test_a_v_takes_two_stages_a_rank_and_says_so(name):
    assert Pipeline(4, 1, name).chunks == 2
    with pytest.raises(ValueError, match=f"'{name}' puts two stages on each rank, chunks=2; got chunks=1"):
        Pipeline(4, 1, name, chunks=1)
    with pytest.raises(ValueError, match="two stages on each rank; got 3 stages, 4 fit"):
        Pipeline(3, 1, name)


def test_a_schedule_without_training_has_no_backward():
    with pytest.raises(ValueError, match="rank 0, step 1: 0B0 is a backward; the schedule is one without training"):
        Schedule.from_csv("0F0,0B0", training=False).validate()
    assert Pipeline(2, 2, "inference").schedule.to_csv() == "0F0,0F1\n1F0,1F1\n"


def test_ranks_outside_the_pipeline_are_refused():
    with pytest.raises(ValueError, match="ranks 0 to 2, got 3; a rank is a position on axis 'pp', as device"):
        Pipeline(3, 1).actions(3)
    with pytest.raises(TypeError, match=r"an integer, its position on axis 'stages'; got 1\.0"):
        Pipeline(3, 1, axis="stages").actions(1.0)
    with pytest.raises(ValueError, match="stages 0 to 2, got -1"):
        PipelineStage(Pipeline(3, 1), -1)


@given(pipelines)
def test_a_pipeline_is_a_value(pipeline):
    copy = pickle.loads(pickle.dumps(pipeline))  # noqa: S301
    assert copy == pipeline and hash(copy) == hash(pipeline)
    assert repr(pipeline).startswith("Pipeline(stages=")


@given(st.integers(1, 6), st.integers(1, 8))
def test_a_gpipe_stage_is_forward_and_backward_in_the_cycles_of_the_formula(s, m):
    for i in range(s):
        stage = PipelineStage(Pipeline(s, m, "gpipe"), i)
        seen = {cycle: stage.status(cycle) for cycle in range(2 * (m + s) + 3)}
        for k in range(m):
            assert seen.pop(i + k) == (Status.FORWARD, k)
            assert seen.pop(m + 2 * s - 2 - i + k) == (Status.BACKWARD, k)
        assert set(seen.values()) == {(Status.IDLE, None)}


def test_stages_that_share_a_rank_are_not_busy_together():
    pipeline = Pipeline(4, 4, Schedule.from_csv(TWO_CHUNKS), chunks=2)
    lower, upper = PipelineStage(pipeline, 0), PipelineStage(pipeline, 2)
    assert lower.rank == upper.rank == 0
    assert lower.status(2) == (Status.IDLE, None) and upper.status(2) == (Status.FORWARD, 0)


def test_a_pipeline_is_drawn_as_a_staircase():
    assert str(Pipeline(3, 3, "1f1b")) == """\
1f1b: 3 stages on 3 ranks, 3 microbatches; 10 cycles, 40% idle
cycle   0  1  2  3  4  5  6  7  8  9
rank 0  F0 F1 F2 .  .  B0 .  B1 .  B2
rank 1  .  F0 F1 .  B0 F2 B1 .  B2 .
rank 2  .  .  F0 B0 F1 B1 F2 B2 .  ."""
    assert str(Pipeline(1, 1)).splitlines()[0] == "1f1b: 1 stage on 1 rank, 1 microbatch; 2 cycles, 0% idle"


@given(pipelines, st.integers(1, 40))
def test_a_picture_keeps_to_80_columns_and_leaves_nothing_out(pipeline, microbatches):
    pipeline = Pipeline(pipeline.stages, microbatches, pipeline.schedule.name)
    drawn = str(pipeline).splitlines()
    assert max(map(len, drawn)) <= 80
    for rank in range(pipeline.ranks):
        cells = [cell for line in drawn if line.startswith(f"rank {rank} ") for cell in line.split()[2:] if cell != "."]
        assert cells == [f"{action.kind}{action.microbatch}" for action in pipeline.actions(rank)]


def test_a_picture_of_several_chunks_names_the_stages_and_html_names_every_action():
    schedule = Schedule.from_csv(TWO_CHUNKS, "<own>")
    assert "rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1" in str(schedule)
    page = schedule._repr_html_()
    assert "&lt;own&gt;" in page and page.count(">rank 0</text>") == page.count(">rank 1</text>") == 1
    assert all(f"<title>{action}: " in page for row in schedule.actions for action in row)
