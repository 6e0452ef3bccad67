"""Real runs under the times that the zero-bubble paper measured have the bubble rates that it prints."""

from __future__ import annotations

import numpy as np
import pytest
from zero_bubble_costs import MEASURED, SCHEDULES, costs_of, printed

from parallelism import PipelinedOperation
from parallelism.hardware import Hardware, HostLink, Link
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline, Stage

MILLISECOND = 1e-3


class Timed(Stage):
    """Adds up what comes, and says how long that takes."""

    def __init__(self, costs):
        self.costs, self.gradient, self.kept = costs, 0.0, {}

    def forward(self, microbatch, x):
        self.kept[microbatch] = np.array([microbatch + 1.0]) if x is None else x
        return self.kept[microbatch] + 1

    def backward_input(self, microbatch, grad):
        return self.kept[microbatch] if grad is None else grad

    def backward_weights(self, microbatch):
        self.gradient += float(self.kept.pop(microbatch)[0])

    def seconds(self, kind, microbatch):
        return self.costs[kind] * MILLISECOND


class TimedPipeline(PipelinedOperation):
    declares_all = True     # each action sets its seconds; the rest is the library's own Python

    def __init__(self, pipeline, costs):
        super().__init__(pipeline)
        self.costs = costs

    def __call__(self, device):
        stages = {stage: Timed(self.costs) for stage in self.stages_on(device.rank)}
        self.run_stages(device, stages)
        return {number: stage.gradient for number, stage in stages.items()}

    def result(self, mesh, outputs):
        return {number: gradient for gradients in outputs for number, gradient in gradients.items()}


def under_the_times_of(row, cluster_of, backend, **options):
    """A device for each stage, and links so wide that a message takes its latency."""
    link = Link("link", row["ranks"], latency_seconds=costs_of(row)["message"] * MILLISECOND, bytes_per_second=1e30)
    hardware = Hardware("measured", {"float64": 1e12}, 1e9, 1e12, (link,), HostLink(0.0, 1e9))
    return cluster_of(Mesh(pp=row["ranks"]), backend, hardware=hardware, compute="modelled", **options)


def check(cluster, row, schedule):
    stages, microbatches, costs = row["ranks"], row["microbatches"], costs_of(row)
    pipeline = Pipeline(stages, microbatches, schedule)
    run = cluster.run(TimedPipeline(pipeline, costs))
    total = microbatches * (microbatches + 1) // 2
    assert run.result == {stage: total + stage * microbatches for stage in range(stages)}
    trace = run.trace
    assert trace.hardware == "measured" and trace.compute == "modelled"
    assert abs(trace.span_bubble_fraction - printed(row, schedule)) <= 1e-4
    expected = pipeline.schedule.timeline(costs)
    assert trace.makespan_seconds == pytest.approx(expected.makespan * MILLISECOND, rel=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.slow_for("zero_bubble_h1")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_under_measured_times_has_the_printed_bubble(cluster_of, schedule):
    check(under_the_times_of(MEASURED[0], cluster_of, "thread"), MEASURED[0], schedule)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_a_run_on_processes_has_all_printed_bubbles(cluster_of, row):
    cluster = under_the_times_of(row, cluster_of, "process", deadline_seconds=300)
    for schedule in SCHEDULES:
        check(cluster, row, schedule)
    cluster.close()
