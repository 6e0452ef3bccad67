"""Actions that are repeated as columns leave the events that the loop of a device leaves, to the last number."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, ir, models, simulate
from parallelism.events import Columns
from parallelism.execution import TypedArray
from parallelism.layouts import annotate, partition
from parallelism.layouts.stages import Stages
from parallelism.pipelining import KINDS, NOBODY, passed
from parallelism.pipelining.generators import SCHEDULES
from parallelism.simulation import priced_pieces
from parallelism.simulation.device_events import FIELDS, Bulk, DeviceEvents, EventRow
from parallelism.simulation.repeated_stages import RepeatedEvents, in_runs
from parallelism.simulation.typed_device import TypedDevice
from parallelism.timeline import Pricing

NAMES = sorted(name for name in SCHEDULES if SCHEDULES[name].training and not SCHEDULES[name].local)


@cache
def stages_of(count: int, recompute: bool, *, split: bool) -> Stages:
    """A small Transformer, cut."""
    spec = models.TransformerSpec(layers=count, width=8, heads=2, vocabulary=12, sequence=3, dtype="float32",
                                  biases=False, norm="rms", activation="relu")
    function = spec.function(ir.symbol("B"))
    if split:
        layouts = {"qkv": "[None, tp]", "up": "[None, tp]", "out": "[tp, None]", "down": "[tp, None]"}
        function = annotate(function, {
            f"p.{layer}.{name}": layout for layer in range(count) for name, layout in layouts.items()})
    return partition(function, count, recompute=recompute)


def pipeline_of(name: str, ranks: int, microbatches: int, *, listed: bool) -> Pipeline:
    """A pipeline by the name of its schedule, whose messages may be listed."""
    kind = SCHEDULES[name]
    chunks = 2 if kind.is_interleaved else kind.fewest_chunks
    microbatches += -microbatches % ranks if kind.is_interleaved else 0
    pipeline = Pipeline(ranks * chunks, microbatches, name, chunks)
    return Pipeline(ranks * chunks, microbatches, pipeline.schedule.with_messages(), chunks) if listed else pipeline


pipelines = st.builds(
    pipeline_of, st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 6), listed=st.booleans())


def told(events: DeviceEvents, mesh: Mesh) -> tuple[object, ...]:
    """All that a template takes from the events of a device."""
    collectives = sorted(events.collectives, key=lambda each: each.event)
    pieces = sorted((int(place), piece.stage) for piece in events.pieces for place in piece.places)
    return events.columns, collectives, pieces, events.peer_axis(mesh).tolist(), len(events)


@pytest.mark.slow
@settings(max_examples=2)
@given(pipelines, st.booleans(), st.integers(0, 3), st.booleans(), st.booleans())
@example(pipeline_of("interleaved_zero_bubble", 1, 1, listed=False), True, 0, False, True)
def test_repeated_actions_are_those_of_the_loop(
    pipeline: Pipeline, split: bool, more: int, recompute: bool, pieces: bool
) -> None:
    stages = stages_of(pipeline.stages, recompute, split=split)
    mesh = Mesh(pp=pipeline.ranks, dp=2, **({"tp": 2} if split else {}))
    rows = 2 * pipeline.microbatches + more
    found = []
    for loop in (False, True):
        step = PipelinedStep(PipelinedProgram(stages, pipeline, Mesh(tp=2) if split else None), mesh, rows)
        if loop:
            step._has_messages = lambda position: True     # type: ignore[method-assign]
        templates = step.templates((lambda ranks, events: 1.0 + len(events.rows)) if pieces else None)
        found.append([told(each, mesh) for each in templates.classes])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("fold", [True, False])
def test_a_trace_is_the_same_with_and_without_repetition(fold: bool) -> None:
    traces = []
    for loop in (False, True):
        program = PipelinedProgram(stages_of(2, recompute=True, split=True), Pipeline(2, 3), Mesh(tp=2))
        step = PipelinedStep(program, Mesh(pp=2, dp=2, tp=2), 7)
        if loop:
            step._has_messages = lambda position: True     # type: ignore[method-assign]
        traces.append(simulate(step, "dgx-h100:2", fold=fold))
    assert list(traces[0].events) == list(traces[1].events)


@given(pipelines)
def test_what_actions_pass_on_are_the_messages_that_a_schedule_lists(pipeline: Pipeline) -> None:
    schedule = pipeline.schedule.with_messages()
    taken, given_away, listed = [], [], []
    for rank, actions in enumerate(schedule.works):
        for action, (source, tag, target, next_tag) in zip(actions, passed(pipeline, actions), strict=True):
            step = 1 if action.kind[-1] == "F" else -1
            if action.kind in KINDS and source not in (NOBODY, rank):
                assert schedule.placement[action.stage - step] == source
                taken.append((source, rank, tag))
            if action.kind in KINDS and target not in (NOBODY, rank):
                assert schedule.placement[action.stage + step] == target
                given_away.append((rank, target, next_tag))
            if action.kind.startswith("SEND"):
                listed.append((rank, target, next_tag))
    assert sorted(taken) == sorted(given_away) == sorted(listed)
    assert len({tag for _, _, tag in taken}) == len(taken)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("hardware", "alike"), [("dgx-h100:2", True), ("tpu-v4:4x4x4", False)])
def test_an_action_that_stages_share_has_one_price_for_places_that_are_connected_alike(
    hardware: str, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PipelinedStep(
        PipelinedProgram(stages_of(5, recompute=False, split=True), Pipeline(5, 4), Mesh(tp=2)), Mesh(pp=5, tp=2), 4)
    priced, asked = priced_pieces.PricedPieces._price, []

    def counted(self: priced_pieces.PricedPieces, rank: int, events: DeviceEvents) -> Columns:
        asked.append(rank)
        return priced(self, rank, events)

    monkeypatch.setattr(priced_pieces.PricedPieces, "_price", counted)
    pricing = Pricing.of(hardware, "modelled")
    shared = step.templates(priced_pieces.PricedPieces(step.mesh, pricing))
    stages, forms = 5, len({id(programs.first) for programs in (step.programs(i, 2 * i) for i in range(5))})
    assert forms < stages and len(asked) == 2 * (forms if alike else stages)
    alone = step.templates(lambda ranks, events: priced_pieces.PricedPieces(step.mesh, pricing)(ranks, events))
    assert shared.looks == alone.looks


def test_events_that_are_repeated_behind_many_others_have_places_behind_them() -> None:
    mesh = Mesh(dp=2)
    device, more = TypedDevice(mesh, 0), TypedDevice(mesh, 0)
    device.all_reduce(TypedArray((3,), "float32"), "dp")
    more.wait(more.all_gather(TypedArray((5,), "float32"), "dp", async_op=True))
    device.events.add_bulk(Bulk(Columns.of_rows([EventRow("compute", "x")] * 4, FIELDS), np.full(4, -1), np.array([0, 4])))
    device.events.repeat(more.events)
    device.events.repeat(more.events)
    assert [each[:3] for each in device.events.collectives] == [(0, ("dp",), 0), (5, ("dp",), 1), (7, ("dp",), 2)]
    assert device.events.columns.values("work") == [None] * 5 + [1, 1, 2, 2]
    assert device.events.columns.values("sequence")[5::2] == [1, 2]


def test_equal_collectives_of_an_action_are_priced_as_one_object() -> None:
    device = TypedDevice(Mesh(dp=2, tp=3), 0)
    for size, axis in ((6, "dp"), (6, "tp"), (6, "dp"), (12, "dp")):
        device.all_reduce(TypedArray((size,), "float32"), axis)
    alone = RepeatedEvents(None, 0, 0, None, None, device.events).alone
    assert [alone.index(each) for each in alone] == [0, 1, 0, 3] and alone[0] is alone[2]
    assert [each.collectives[0].call.shape for each in alone] == [(6,), (6,), (6,), (12,)]


def test_a_collective_is_in_a_run_if_nothing_else_is_under_way_until_its_wait() -> None:
    device = TypedDevice(Mesh(dp=2, tp=3), 0)

    def computed(name: str, phase: str = "F") -> None:
        with device.compute(name, flops=2.0, phase=phase):
            pass

    def started(axis: str) -> Any:
        return device.all_gather(TypedArray((6,), "float32"), axis, async_op=True)

    computed("a")
    device.wait(started("tp"))      # at once
    computed("b")
    beside = started("tp")
    computed("c")
    device.wait(beside)             # beside a compute
    first = started("dp")           # beside another one, as the next
    device.wait(started("tp"))
    computed("d")
    device.wait(first)
    computed("e")
    across = started("tp")          # in two phases
    computed("f", "B")
    device.wait(across)
    action = RepeatedEvents(None, 0, 0, None, None, device.events)
    assert [each is not None for each in action.alone] == [True, True, False, False, False]
    assert action.alone[0] is action.alone[1] and action.alone[0].rows[0].work is None
    made, of_computes = (in_runs(action, lambda events: 1.0, beside_others=beside) for beside in (False, True))
    assert [(row.kind, row.name) for row in made.events.rows if row.kind != "memory"] == [
        ("compute", "ops"), ("collective", "all_gather"), ("collective", "all_gather"), ("wait", "all_gather"),
        ("compute", "d"), ("wait", "all_gather"), ("compute", "e"), ("collective", "all_gather"), ("compute", "f"),
        ("wait", "all_gather")]
    (piece,) = made.events.pieces
    assert [row.name for row in piece.events.rows if row.kind == "compute"] == ["a", "b", "c"]
    assert [each.axes for each in piece.events.collectives] == [("tp",), ("tp",)]
    assert len(of_computes.events.collectives) == 5 and not of_computes.events.pieces


@pytest.mark.parametrize(("hardware", "groups"), [("tpu-v4:4x2x1", 4), ("dgx-h100", 1)])
def test_equal_collectives_of_a_group_are_priced_once(hardware: str, groups: int) -> None:
    step = PipelinedStep(
        PipelinedProgram(stages_of(4, recompute=False, split=True), Pipeline(4, 3), Mesh(tp=2)), Mesh(pp=4, tp=2), 6)
    pricing, templates = Pricing.of(hardware, "modelled"), step.templates()
    events, _, looks = templates.by_rank(range(8))
    at = np.flatnonzero(events.isin("kind", {"collective"}))
    ranks = events.numbers("rank")[at]
    found = priced_pieces.collective_prices(templates, pricing, looks[at], ranks)
    calls = [
        templates.collective(look, rank // 2) for look, rank in zip(looks[at].tolist(), ranks.tolist(), strict=True)]
    assert found.seconds.tolist() == [pricing.collective(*call).seconds for call in calls]
    assert len(found.prices) == 1 + groups * len({(call.kind, call.nbytes) for call, _ in calls}) < len(calls)
    assert [found.groups[price] for price in found.price.tolist()] == [call.group for call, _ in calls] or groups == 1


def test_the_price_of_nothing_is_not_asked_for() -> None:
    rows = [EventRow("compute", "a", 2.0, 3.0), EventRow("memory", "activations", 4.0), EventRow("compute", "b", 5.0, 6.0)]
    asked: list[int] = []

    def price(events: DeviceEvents) -> float:
        asked.append(len(events.rows))
        return 7.0

    made = in_runs(RepeatedEvents(None, 0, 0, None, None, DeviceEvents(rows)), price)
    assert asked == [3]
    assert [(row.name, row.nbytes, row.flops, row.seconds) for row in made.events.rows if row.kind == "compute"] == [
        ("ops", 7.0, 9.0, 7.0)]


def test_the_pieces_of_equal_prices_are_made_once_and_a_stage_gives_them_its_number() -> None:
    rows = [EventRow("compute", "a", 2.0, 3.0, microbatch=0), EventRow("compute", "b", 5.0, 6.0, microbatch=0)]
    action = RepeatedEvents(None, 0, 0, None, None, DeviceEvents(rows))
    made, again, dearer, whole = (in_runs(action, lambda _, took=took: took) for took in (7.0, 7.0, 8.0, None))
    assert made is again and made is not dearer
    assert [[row.seconds for row in each.events.rows] for each in (made, dearer, whole)] == [[7.0], [8.0], [None, None]]
    events = DeviceEvents()
    for stage in (3, 1):
        events.repeat(made.events, stage, 2)
    assert [(piece.places, piece.stage) for piece in events.pieces] == [((0,), 3), ((1,), 1)]
    assert [(row.stage, row.microbatch) for row in events.rows] == [(3, 2), (1, 2)]
