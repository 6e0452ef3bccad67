"""The bubble rates of the zero-bubble paper, from its times: on paper, and as a run on the one clock."""

from __future__ import annotations

import pytest
from priced_stage import PricedStage
from zero_bubble_costs import MEASURED, SCHEDULES, costs_of, printed

from parallelism.hardware import Hardware, HostLink, Link
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.pipelining.execution import run_actions
from parallelism.recorder import record


@pytest.mark.slow_for("28.3B-128")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_the_timeline_of_a_schedule_has_the_printed_bubbles(row):
    for name in SCHEDULES:
        found = Pipeline(row["ranks"], row["microbatches"], name).schedule.timeline(costs_of(row)).span_bubble_fraction
        assert abs(found - printed(row, name)) <= 1e-4, name


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_on_the_clock_has_them_too(name):
    row = MEASURED[0]
    costs, pipeline = costs_of(row), Pipeline(row["ranks"], row["microbatches"], name)

    def program(device):
        run_actions(device, pipeline, "pp", {device.rank: PricedStage(costs)}, pipeline.actions(device.rank))

    hardware = Hardware(
        "in milliseconds", {"float64": 1}, 1, 1, (Link("link", row["ranks"], costs["message"], 1),), HostLink(1, 1))
    trace = record(program, Mesh(pp=row["ranks"])).trace.on(hardware)
    assert abs(trace.span_bubble_fraction - printed(row, name)) <= 1e-4
    assert trace.makespan_seconds == pytest.approx(pipeline.schedule.timeline(costs).makespan, rel=1e-12)
