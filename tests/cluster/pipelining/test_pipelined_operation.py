"""An operation with stages of one's own: forward and two halves of a backward, under any schedule."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, PipelinedOperation
from parallelism.pipelining import Pipeline, Stage
from vcluster.runs import VirtualCluster

FACTORS = (2.0, 3.0, -1.0, 5.0)
X = np.array([[1.0, 2.0, -1.0], [4.0, 0.0, 3.0], [2.0, -2.0, 1.0], [1.0, 1.0, 7.0], [3.0, 5.0, 2.0]])
"""A microbatch of three columns a row."""


class Factor(Stage):
    """``y = w x``, the loss of the last stage ``sum(y)``; each of ``tp`` has a part of ``w``."""

    def __init__(self, device, number):
        self.device, self.number, self.gradient, self.kept = device, number, 0.0, {}
        self.part = FACTORS[number] - 1 if device.index["tp"] else 1.0

    def forward(self, microbatch, x):
        x = X[microbatch] if x is None else x
        self.kept[microbatch] = x
        return self.device.all_reduce(self.part * x, "tp")

    def backward_input(self, microbatch, grad):
        grad = np.ones_like(X[microbatch]) if grad is None else grad
        self.kept[microbatch] = self.kept[microbatch], grad
        return None if self.number == 0 else self.device.all_reduce(self.part * grad, "tp")

    def backward_weights(self, microbatch):
        x, grad = self.kept.pop(microbatch)
        self.gradient += float(x @ grad)


class Product(PipelinedOperation):
    def __call__(self, device):
        position, _ = self.places(device.mesh)[device.rank]
        stages = {number: Factor(device, number) for number in self.stages_on(position)}
        ended = []
        self.run_stages(device, stages, lambda stage, k: ended.append((stage, k)))
        return {number: stage.gradient for number, stage in stages.items()}, ended

    def result(self, mesh, outputs):
        return {number: gradient for gradients, _ in outputs for number, gradient in gradients.items()}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", 4), ("interleaved_1f1b", 2), ("zero_bubble_v", 2), ("dual_pipe_v", 2)])
def test_stages_of_ones_own_run_under_any_schedule_with_axes_of_their_own(schedule, ranks):
    pipeline = Pipeline(4, 5, schedule, chunks=4 // ranks)
    operation = Product(pipeline, inside=["tp"])
    with VirtualCluster(Mesh(pp=ranks, tp=2), backend="thread") as cluster:
        run = cluster.run(operation)
    whole = np.prod(FACTORS) * X.sum()
    assert_array_equal([run.result[number] for number in range(4)], [whole / factor for factor in FACTORS])
    for rank, (_, ended) in enumerate(run.outputs):
        works = pipeline.schedule.works[rank // 2]
        assert ended == [(work.stage, work.microbatch) for work in works if work.kind in "BW"]


def test_axes_that_are_not_inside_are_refused():
    with pytest.raises(ValueError, match=r"Mesh\(pp=4, tp=2\) also has 'tp' of size 2"):
        Product(Pipeline(4, 5)).places(Mesh(pp=4, tp=2))
