"""Steps of many microbatches from steps of few, against the simulation of all of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, Pipeline, models, step_parts
from parallelism.arrays import Ints
from parallelism.collectives import MemberCall
from parallelism.events import Columns, Event
from parallelism.hardware import Software
from parallelism.pipelining.generators import SCHEDULES
from parallelism.planning.assembled_steps import AssembledStep
from parallelism.planning.plan import Task
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import StepParts, many_microbatches
from parallelism.simulation.device_events import CollectiveRow, DeviceEvents, EventRow, PieceRow
from parallelism.simulation.many_microbatches import parts_of_many
from parallelism.simulation.simulator import Simulation, is_beside_others
from parallelism.simulation.steady_steps import Cut, cuts_of, repetition
from parallelism.timeline import Pricing
from parallelism.training import Figures, MegatronFlags, figures
from parallelism.training.few_layers import layered_step
from parallelism.training.run_figures import FiguresWithoutTrace
from parallelism.training.training_run import ADAM_W

SPEC = models.TransformerSpec(layers=11, width=32, heads=8, vocabulary=64, sequence=16, dtype="bfloat16")
SPARSE = replace(SPEC, layers=7, activation="swiglu", norm="rms", positions="rotary", biases=False, tied=False,
                 experts=models.Experts(count=4, chosen=2))
PLAIN: dict[str, Any] = {
    "pp": 4, "dp": 2, "tp": 1, "cp": 1, "ep": 1, "sp": False, "chunks": 1, "balanced": False, "schedule": "1f1b", "zero": 1,
    "overlap": False, "tp_overlap": False, "instances": 1, "exchange": "all_gather", "experts_over": "ep",
    "recompute": "none", "order": "dp ep cp tp pp", "microbatch": 1}
BEYOND_NODES = "pp dp ep cp tp"  # an order in which messages between stages cross nodes


@pytest.fixture(autouse=True)
def is_worth_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_microbatches, "WORTH", 0)


def step_of(spec: models.TransformerSpec, microbatches: int, settings: dict[str, Any], hardware: str) -> AssembledStep:
    plan = PLAIN | settings
    devices = plan["pp"] * plan["dp"] * plan["cp"] * plan["ep"] * plan["tp"]
    batch = microbatches * plan["dp"] * plan["ep"] * plan["microbatch"]
    placed = Hardware.preset(hardware).placed(range(devices))
    return AssembledStep(Task(TrainedModel.of(spec, ADAM_W), batch, placed, devices), plan)


def assert_as_whole(step: Any, hardware: Hardware, run: Any) -> None:
    """Seconds and their parts are those of the step of all microbatches but for rounding, memory to the byte."""
    many = parts_of_many(step, hardware)
    assert many is not None
    whole = step_parts(step, hardware)
    assert many.seconds == pytest.approx(whole.trace.makespan_seconds, rel=1e-12, abs=0)
    assert len(many.parts.trace) < len(whole.trace)
    assert_alike(many.parts, whole, 1e-11 * many.seconds)
    assert Figures(run, hardware, many.parts).memory == Figures(run, hardware, whole).memory


def assert_alike(mine: StepParts, whole: StepParts, rounding: float) -> None:
    assert mine.devices == whole.devices
    for name in ("split", "step_split"):
        found, wanted = getattr(mine, name), getattr(whole, name)
        assert list(found) == list(wanted)
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=0, atol=rounding)
    for rank, operations in whole.by_operation.items():
        own = mine.by_operation[rank]
        assert list(own) == list(operations)
        for operation, total in operations.items():
            assert own[operation]._replace(seconds=0) == total._replace(seconds=0), operation
            assert own[operation].seconds == pytest.approx(total.seconds, rel=1e-10, abs=rounding)


def check(spec: models.TransformerSpec, microbatches: int, hardware: str = "dgx-h100:1", **settings: Any) -> None:
    step = step_of(spec, microbatches, settings, hardware)
    assert_as_whole(step, step.task.hardware, step.task.run(step.settings))


@pytest.mark.takes_seconds
def test_many_microbatches_of_a_pipeline_of_unequal_stages_are_told_from_few() -> None:
    check(SPEC, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "left"), [
    ("dgx-h100:2", 1), ("dgx-h100:2+megatron-core-h100", 2), ("mi300x-node:2", 3)])
@pytest.mark.parametrize(("spec", "settings"), [
    pytest.param(SPEC, {}, id="1f1b"),
    pytest.param(SPEC, {"order": BEYOND_NODES, "tp": 2, "sp": True}, id="delays between stages"),
    pytest.param(SPEC, {"pp": 1, "dp": 4, "tp": 2}, id="one stage"),
    pytest.param(SPEC, {"pp": 2, "chunks": 2, "schedule": "interleaved_1f1b", "order": BEYOND_NODES}, id="interleaved"),
    pytest.param(replace(SPEC, layers=16), {"chunks": 2, "schedule": "interleaved_1f1b"}, id="equal stages"),
    pytest.param(SPEC, {"schedule": "zero_bubble_h1", "recompute": "selective"}, id="zero bubble"),
    pytest.param(replace(SPEC, layers=16), {"schedule": "zero_bubble_v", "chunks": 2, "order": BEYOND_NODES}, id="v shaped"),
    pytest.param(SPARSE, {"pp": 2, "ep": 2, "tp": 2, "sp": True, "order": BEYOND_NODES}, id="experts"),
    pytest.param(SPARSE, {"pp": 2, "ep": 2, "recompute": "full"}, id="again"),
    pytest.param(SPEC, {"pp": 2, "cp": 4, "exchange": "p2p", "order": BEYOND_NODES}, id="contexts"),
])
def test_many_microbatches_are_told_from_few(
        spec: models.TransformerSpec, settings: dict[str, Any], hardware: str, left: int) -> None:
    """Of any plan, whatever is ``left`` when they are divided by the ranks; chunks take turns in rounds of all ranks."""
    ranks = settings.get("pp", 4)
    more = ranks * left if settings.get("chunks", 1) > 1 else left
    check(spec, 24 * ranks + more, hardware, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    pytest.param({"num_layers": 32, "pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 4},
                 id="chunks"),
    pytest.param({"num_layers": 20, "tensor_model_parallel_size": 2}, id="one stage"),
])
def test_many_microbatches_of_a_layered_step_are_told_from_few(flags: dict[str, Any]) -> None:
    small: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 128, "bf16": True,
                             "global_batch_size": 160, "attention_backend": "flash", "clip_grad": 1.0}
    run = MegatronFlags(**small | flags).run(8)
    hardware = Hardware.preset("dgx-h100:1")
    step = layered_step(run, Software.of(hardware))
    assert step is not None
    assert_as_whole(step, hardware, run)


@pytest.mark.takes_seconds
def test_figures_of_many_microbatches_make_the_trace_of_all_when_it_is_asked_for() -> None:
    step = step_of(SPEC, 48, {"pp": 2}, "dgx-h100:1")
    run = step.task.run(step.settings)
    found = figures(run, step.task.hardware, operation=step)
    assert isinstance(found, FiguresWithoutTrace) and not len(found.step.trace)
    assert found.trace.makespan_seconds == pytest.approx(found.seconds, rel=1e-12)
    assert FiguresWithoutTrace.of(found).again is None and FiguresWithoutTrace.of(found).seconds == found.seconds


def test_a_step_is_simulated_whole_where_little_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_of_many(step_of(SPEC, 14, {}, "dgx-h100:1"), Hardware.preset("dgx-h100:1")) is None
    monkeypatch.setattr(many_microbatches, "WORTH", 100_000)
    assert parts_of_many(step_of(SPEC, 60, {}, "dgx-h100:1"), Hardware.preset("dgx-h100:1")) is None


# -- where periods come into schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"gpipe", "looped_bfs", "dual_pipe_v"}))
def test_periods_make_the_schedule_of_few_microbatches_that_of_many(name: str) -> None:
    """Periods that are put in before any action between the ends of a cut make the actions of each rank."""
    chunks = 1 if name in ("1f1b", "local", "inference") or "pipedream" in name or "_h" in name else 2
    whole = Pipeline(3 * chunks, 45, name, chunks)
    fewer = whole.with_microbatches(21)
    assert fewer is not None
    for period in (1, 3):
        cuts = cuts_of(fewer, whole, period)
        assert (cuts is None) == (period == 1 and name.startswith("interleaved"))
        for few, many, cut in zip(fewer.schedule.works, whole.schedule.works, cuts or (), strict=False):
            for at in {cut.first, (cut.first + cut.last) // 2, cut.last}:
                later = [
                    action._replace(microbatch=action.microbatch + period * turn)
                    for turn in range(1, 1 + 24 // period) for action in few[at - cut.actions : at]]
                behind = [action._replace(microbatch=action.microbatch + 24) for action in few[at:]]
                assert [*few[:at], *later, *behind] == list(many)


def test_a_schedule_without_a_steady_state_has_no_cuts() -> None:
    for name in ("gpipe", "looped_bfs"):
        whole = Pipeline(4, 40, name)
        fewer = whole.with_microbatches(16)
        assert fewer is not None and cuts_of(fewer, whole, 1) is None
    own = Pipeline(1, 4, [[f"0{kind}{k}" for k in range(4) for kind in "FB"]])
    assert own.with_microbatches(2) is None
    whole, other = Pipeline(2, 40, "1f1b"), Pipeline(2, 16, "pipedream")
    assert cuts_of(other, whole, 1) is None and cuts_of(whole, whole, 1) is None and cuts_of(whole, other, 1) is None


# -- steady states ---------------------------------------------------------------------------------------------------------


def lanes(*rows: list[tuple[float, float]]) -> tuple[Columns, list[int], list[Ints]]:
    """Events that start at a time and last so long, one for each action."""
    events = []
    for rank, row in enumerate(rows):
        for number, (start, lasts) in enumerate(row):
            when = {"start_seconds": start, "duration_seconds": lasts}
            events.append(Event(rank=rank, serial=number, kind="compute", name="x", **when))
    lengths = [len(row) for row in rows]
    places = [start + np.arange(length + 1) for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False)]
    return Columns.of(events), lengths, places


def test_the_period_is_found_where_all_lanes_do_the_same_again() -> None:
    slow = [(0.5 + 3 * turn, 2.0) for turn in range(7)]
    quick = [(0.0, 1.0), *((2.0 + 3 * turn, 1.0) for turn in range(6))]
    columns, lengths, places = lanes(slow, quick)
    cuts = [Cut(2, 6, 1), Cut(3, 6, 1)]
    found = repetition(columns, lengths, places, cuts, 10)
    assert found is not None and found.end - found.begin == 3 and found.seconds == 30
    assert np.flatnonzero(found.within).tolist() == [4, 12] and 14 < found.end < 15.5


@pytest.mark.parametrize(("change", "event"), [
    pytest.param((1e-9, 0.0), 11, id="later"), pytest.param((0.0, 1e-9), 11, id="longer"),
    pytest.param((0.0, 7.0), 9, id="goes on"), pytest.param((1.5, 0.0), 12, id="out of the period")])
def test_there_is_no_period_where_one_event_differs(change: tuple[float, float], event: int) -> None:
    row = [(3.0 * turn, 1.0) for turn in range(14)]
    cuts = [Cut(2, 13, 1)] * 2
    assert repetition(*lanes(row, row), cuts, 1) is not None
    other = list(row)
    other[event] = tuple(np.add(row[event], change).tolist())
    assert repetition(*lanes(row, other), cuts, 1) is None


def test_lanes_that_drift_apart_have_no_period() -> None:
    rows = [[(length * turn, 1.0) for turn in range(30)] for length in (2.0, 2.25)]
    assert repetition(*lanes(*rows), [Cut(2, 29, 1)] * 2, 1) is None


def test_a_period_leaves_as_many_bytes_as_before() -> None:
    def events(change: float) -> Columns:
        rows = []
        for turn in range(12):
            when = {"start_seconds": 2.0 * turn, "duration_seconds": 1.0}
            rows.append(Event(rank=0, serial=2 * turn, kind="compute", name="x", **when))
            rows.append(Event(rank=0, serial=2 * turn + 1, kind="memory", name="activations", start_seconds=2.0 * turn + 1,
                              nbytes=8.0 if turn % 2 else change))
        return Columns.of(rows)

    places, cuts = [np.arange(0, 26, 2)], [Cut(4, 11, 2)]
    assert repetition(events(-8.0), [24], places, cuts, 1) is not None
    assert repetition(events(8.0), [24], places, cuts, 1) is None


# -- pieces with collectives -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_collectives_inside_of_pieces_are_beside_none_that_is_under_way() -> None:
    """The backward has collectives over tp that go on beside compute; those of the forward are in pieces nevertheless."""
    spec = replace(SPARSE, layers=4, experts=models.Experts(count=8, chosen=2))
    settings = {"pp": 2, "dp": 1, "ep": 8, "tp": 2, "sp": True, "order": BEYOND_NODES}
    step = step_of(spec, 4, settings, "dgx-h100:4+megatron-core-h100")
    pricing = Pricing.of(step.task.hardware, "modelled", None, True)
    folded, op_by_op = (
        Simulation(step, None, None, None, fold=True, op_by_op=each).folded_on(pricing) for each in (False, True))
    columns = folded.trace.columns
    assert (columns.isin("kind", {"collective"}) & columns.present("work")).any()
    assert any(piece.events.collectives for each in folded.classes for piece in each.pieces)
    assert folded.trace.makespan_seconds == pytest.approx(op_by_op.trace.makespan_seconds, rel=1e-12, abs=0)
    assert folded.trace.peaks() == op_by_op.trace.peaks()


@pytest.mark.parametrize(("place", "is_beside"), [(0, False), (2, True), (4, True), (6, False)])
def test_a_piece_is_beside_a_collective_between_its_begin_and_the_wait_for_it(place: int, is_beside: bool) -> None:
    kinds = ["compute", "collective", "compute", "wait", "compute", "wait", "compute"]
    works = [None, 3, None, 2, None, 3, None]  # the first wait is for a message
    rows = [EventRow(kind, "x", work=work) for kind, work in zip(kinds, works, strict=True)]
    inside = DeviceEvents([EventRow("collective", "all_reduce")], [CollectiveRow(0, ("tp",), 0, MemberCall("all_reduce", 8))])
    pieces = [PieceRow((place,), inside, 0), PieceRow((2,), DeviceEvents([EventRow("compute", "x")]), 0)]
    events = DeviceEvents(rows, pieces=pieces)
    assert is_beside_others(events.columns, events) == is_beside
