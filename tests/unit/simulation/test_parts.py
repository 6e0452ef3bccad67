"""The parts of a step: those of its trace op by op, from one event for each action."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import (
    Hardware,
    Mesh,
    Pipeline,
    PipelinedProgram,
    PipelinedStep,
    Trace,
    ir,
    models,
    simulate,
    step_parts,
)
from parallelism.layouts import annotate, partition
from parallelism.simulation import priced_pieces
from parallelism.trace import Operation, OperationTotals, split, totals_by_operation
from parallelism.trace.breakdown import PARTS

ON: Any = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}
LAYOUTS = {"qkv": "[None, tp]", "up": "[None, tp]", "out": "[tp, None]", "down": "[tp, None]"}


def step_of(
    mesh: Mesh, rows: int, microbatches: int, *, layers: int = 2, schedule: str = "1f1b", chunks: int = 1,
    recompute: bool = False, width: int = 8, heads: int = 4, inside: Mesh | None = None,
    layouts: dict[str, str] = LAYOUTS,
) -> PipelinedStep:
    """A step of a small Transformer, with stages on ``pp`` and split over ``tp`` inside."""
    inside, stages = inside or Mesh(tp=mesh.shape.get("tp", 1)), mesh.shape["pp"] * chunks
    function = models.TransformerSpec(
        layers=layers, width=width, heads=heads, vocabulary=12, sequence=3, dtype="float64", biases=False, norm="rms",
        activation="relu").function(ir.symbol("B"))
    if inside.size > 1:
        function = annotate(function, {
            f"p.{layer}.{name}": layout for layer in range(layers) for name, layout in layouts.items()})
    cut = partition(function, stages, batch="B", recompute=recompute)
    return PipelinedStep(
        PipelinedProgram(cut, Pipeline(stages, microbatches, schedule, chunks), inside), mesh, rows)


@pytest.mark.takes_seconds
@pytest.mark.sampled(12, 1)
@pytest.mark.parametrize(("mesh", "rows", "microbatches", "options", "link_sharing"), [
    (Mesh(pp=2), 7, 3, {}, True),      # microbatches of 3 and 2 rows
    (Mesh(pp=2, dp=2, tp=2), 12, 3, {}, False),
    (Mesh(pp=2, dp=2, tp=2), 12, 3, {}, True),     # messages share the links of collectives: pieces between these
    (Mesh(pp=2, tp=3), 4, 2, {}, False),   # extents that do not divide: no pieces
    (Mesh(pp=2, dp=2), 9, 3, {"recompute": True}, True),
    (Mesh(pp=2), 4, 4, {"layers": 4, "schedule": "zero_bubble_v", "chunks": 2}, True),
    (Mesh(pp=1), 3, 1, {}, True),
    # Stages of equal programs, whose members wait for unequal ones: no pieces.
    (Mesh(pp=4, tp=3), 8, 4, {"layers": 4, "width": 12, "heads": 6}, False),
])
def test_equal_to_the_parts_of_all_events(
    mesh: Mesh, rows: int, microbatches: int, options: dict[str, Any], link_sharing: bool
) -> None:
    step = step_of(mesh, rows, microbatches, **options)
    trace = simulate(step, fold=True, op_by_op=True, link_sharing=link_sharing, **ON)
    parts = step_parts(step, link_sharing=link_sharing, **ON)
    tolerance = 1e-12 * trace.makespan_seconds
    expected, by_part = totals_by_operation(trace.columns), split(trace)
    assert parts.trace.makespan_seconds == pytest.approx(trace.makespan_seconds, rel=1e-12)
    assert parts.trace.peaks() == trace.peaks()
    assert parts.split.keys() == parts.by_operation.keys() == expected.keys() == set(trace.ranks)
    for rank in trace.ranks:
        assert parts.split[rank] == pytest.approx(by_part[rank], rel=0, abs=tolerance)
        assert sum(parts.split[rank]) == pytest.approx(trace.makespan_seconds, rel=1e-12)
        assert parts.by_operation[rank].keys() == expected[rank].keys()
        for operation, total in expected[rank].items():
            told = parts.by_operation[rank][operation]
            assert told._replace(seconds=0.0) == total._replace(seconds=0.0), operation     # to the last bit
            assert told.seconds == pytest.approx(total.seconds, rel=0, abs=tolerance), operation
        assert sum(total.flops for total in expected[rank].values()) == trace.flops(rank)


@pytest.mark.takes_seconds
def test_computes_between_two_collectives_are_one_event_where_collectives_share_links_with_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(Mesh(pp=2, dp=2, tp=2), 12, 3)
    made, templates = Counter[bool](), PipelinedStep.templates

    def counted(self: PipelinedStep, price: Any = None) -> Any:
        made[price is None] += 1
        return templates(self, price)

    monkeypatch.setattr(PipelinedStep, "templates", counted)
    runs, ops = (simulate(step, fold=True, op_by_op=op_by_op, **ON) for op_by_op in (False, True))
    for rank in ops.ranks:
        few, all_ = ([event for event in trace.events if event.rank == rank] for trace in (runs, ops))
        assert [event.name for event in few if event.kind == "collective"] == [
            event.name for event in all_ if event.kind == "collective"]
        assert [event.start_seconds for event in few if event.kind == "collective"] == pytest.approx(
            [event.start_seconds for event in all_ if event.kind == "collective"], rel=1e-12)
        assert 3 * sum(event.kind == "compute" for event in few) < sum(event.kind == "compute" for event in all_)
        assert any(event.name == "ops" for event in few)
    assert made == {False: 1, True: 1}      # what shares links is seen before the events of all devices are made
    assert runs.peaks() == ops.peaks() and runs.makespan_seconds == pytest.approx(ops.makespan_seconds, rel=1e-12)
    assert runs.flops(0) == ops.flops(0)
    for rank, parts in split(runs).items():     # a run has the phase of its computes
        assert parts == pytest.approx(split(ops)[rank], rel=1e-9, abs=1e-15) and min(parts.forward, parts.backward) > 0
    assert {event.stage for event in runs.events if event.name == "ops" and event.rank == 4} == {1}
    assert {event.microbatch for event in runs.events if event.name == "ops"} == {0, 1, 2}


@pytest.mark.takes_seconds
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_collectives_inside_of_nodes_are_in_runs_between_those_that_share_links_with_messages(recompute: bool) -> None:
    """Nodes of two devices: ``tp`` is inside of them, while ``x`` and the messages of stages are between them."""
    hardware = Hardware.of("dgx-h100")
    of_two, between = (replace(link, extents=(each,)) for link, each in zip(hardware.links, (2, 6), strict=True))
    on: Any = {"hardware": replace(hardware, links=(of_two, between)), "priced_dtype": "bfloat16"}
    step = step_of(
        Mesh(pp=2, x=3, tp=2), 12, 4, recompute=recompute, width=12, heads=6, inside=Mesh(x=3, tp=2),
        layouts={**LAYOUTS, "up": "[None, x]", "down": "[x, None]"})
    parts, ops = step_parts(step, **on), simulate(step, fold=True, op_by_op=True, **on)
    every = simulate(step, **on)
    expected, by_part = totals_by_operation(ops.columns), split(ops)
    counts = {
        axis: [len(trace.filter(kind="collective", axes=axis)) for trace in (parts.trace, ops)] for axis in ("tp", "x")}
    assert counts["tp"][0] == 0 < counts["tp"][1] and counts["x"][0] == counts["x"][1] > 0
    assert parts.trace.peaks() == ops.peaks()
    for trace in (parts.trace, ops):
        assert trace.makespan_seconds == pytest.approx(every.makespan_seconds, rel=1e-12)
    for rank in ops.ranks:
        assert parts.split[rank] == pytest.approx(by_part[rank], rel=0, abs=1e-12 * ops.makespan_seconds)
        for operation, total in expected[rank].items():
            told = parts.by_operation[rank][operation]
            assert told._replace(seconds=0.0) == total._replace(seconds=0.0)
            assert told.seconds == pytest.approx(total.seconds, rel=1e-9)


@pytest.mark.takes_seconds
def test_a_run_of_computes_ends_where_their_phase_changes() -> None:
    step = step_of(Mesh(pp=2, dp=2, tp=2), 12, 3, recompute=True)
    runs, ops = (split(simulate(step, fold=True, op_by_op=op_by_op, **ON)) for op_by_op in (False, True))
    for rank, one in runs.items():
        assert one == pytest.approx(ops[rank], rel=1e-9, abs=1e-15) and one.recompute > 0


@pytest.mark.takes_seconds
def test_what_is_computed_again_is_one_part_in_pieces_and_op_by_op() -> None:
    step = step_of(Mesh(pp=2, dp=2), 9, 3, recompute=True)
    pieces, ops = (split(simulate(step, fold=True, op_by_op=op_by_op, **ON)) for op_by_op in (False, True))
    for rank, one in pieces.items():
        assert one == pytest.approx(ops[rank], rel=1e-9, abs=1e-15) and one.recompute > 0


@pytest.mark.takes_seconds
def test_the_collectives_of_repeated_actions_are_counted() -> None:
    step = step_of(Mesh(pp=2, dp=2, tp=2), 12, 3)
    parts = step_parts(step, link_sharing=False, **ON)
    assert parts.trace.count("all_reduce", 0) == 1      # of the gradients; those of the stages are inside pieces
    found = parts.by_operation[0]
    inside = found[Operation("collective", "all_reduce", axes=("tp",))]
    events = simulate(step, link_sharing=False, **ON).filter(kind="collective", rank=0, axes="tp")
    assert inside.times == len(events) == 2 * 2 * 3     # a layer, forward and backward, three microbatches
    assert inside.bytes_received == events.bytes_received(0)
    assert {each.stage for each in found if each.kind == "compute"} == {0}
    assert {each.stage for each in parts.by_operation[4] if each.kind == "compute"} == {1}
    assert parts.split[0].communication >= inside.seconds > 0


@pytest.mark.takes_seconds
@pytest.mark.parametrize("microbatches", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_ops_are_priced_once_however_many_microbatches_there_are(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    priced = priced_pieces.PricedPieces._price

    def counted(self: priced_pieces.PricedPieces, *arguments: Any) -> Any:
        counts["priced"] += 1
        return priced(self, *arguments)

    monkeypatch.setattr(priced_pieces.PricedPieces, "_price", counted)
    lengths = []
    for layers in (2, 4):
        counts.clear()
        parts = step_parts(step_of(Mesh(pp=2), microbatches, microbatches, layers=layers), **ON)
        assert counts["priced"] == 2 * 2            # F and B of two stages, once for their pieces and their parts
        lengths.append(len(parts.trace))
    assert lengths[0] == lengths[1] <= 2 * (8 + 12 * microbatches)      # events of actions, none of their ops


def test_operations_of_a_trace_by_hand() -> None:
    from parallelism import Event

    trace = Trace([
        Event(0, "compute", "matmul", 0.0, 2.0, flops=3, nbytes=5, stage=1, phase="F"),
        Event(1, "send", "send", 0.0, 0.0, peer=0, bytes_sent=8, messages=1),
        Event(0, "compute", "matmul", 2.0, 1.0, flops=4, nbytes=6, stage=1, phase="F"),
        Event(0, "memory", "weights", nbytes=7),
        Event(0, "compute", "1F0"),
        Event(0, "collective", "all_reduce", 3.0, 0.5, axes=("tp",), bytes_sent=4, bytes_received=2, messages=3),
        Event(0, "send", "send", 3.0, 0.1, parent=5, bytes_sent=4),
        Event(0, "compute", "matmul", 3.5, 1.0, flops=1, stage=1, phase="B"),
    ])
    assert totals_by_operation(trace.columns) == {
        0: {
            Operation("compute", "matmul", 1, "F"): OperationTotals(2, 3.0, 7.0, 11.0),
            Operation("collective", "all_reduce", axes=("tp",)): OperationTotals(1, 0.5, 0.0, 0.0, 4, 2, 3),
            Operation("compute", "matmul", 1, "B"): OperationTotals(1, 1.0, 1.0),
        },
        1: {Operation("send", "send"): OperationTotals(1, 0.0, 0.0, 0.0, 8, 0, 1)},
    }
    assert totals_by_operation(Trace([]).columns) == {}
    one, two = OperationTotals(1, 0.5, 2.0, 3.0, 4, 5, 6), OperationTotals(2, 1.5, 1.0, 1.0, 1, 1, 1)
    assert one.plus(two, 3) == OperationTotals(7, 5.0, 5.0, 6.0, 7, 8, 9)
    assert len(PARTS) == 7 and np.sum(split(trace)[0]) == trace.makespan_seconds
