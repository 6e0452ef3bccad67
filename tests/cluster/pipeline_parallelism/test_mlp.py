"""The pipelined perceptron on real clusters: the same numbers as one process, by the messages of its schedule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from emptied import emptied
from numpy.testing import assert_allclose, assert_array_equal

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline, Schedule
from pipeline_parallelism import MLP, SGD, Adam, Training

SIZES = (5, 7, 6, 4, 8, 9, 3)  # six layers
ROWS = 8
HALVES = [
    [("F", stage, k) for k in range(3) for stage in pair] + [("B", stage, k) for k in (2, 1, 0) for stage in pair[::-1]]
    for pair in ([0, 1], [2, 3])
]


cluster_of = emptied("thread")


def mlp_of(stages, microbatches, schedule="1f1b", chunks=1, **options):
    return MLP(layer_sizes=SIZES, pipeline=Pipeline(stages, microbatches, schedule, chunks), **options)


def batch(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, SIZES[0])), rng.standard_normal((rows, SIZES[-1]))


def arrays_of(step):
    return [array for pair in step.parameters + step.gradients for array in pair]


def assert_same_training(step, reference, **tolerance):
    assert len(step.parameters) == len(step.gradients) == len(SIZES) - 1
    assert_allclose(step.loss, reference.loss, **tolerance)
    for array, expected in zip(arrays_of(step), arrays_of(reference), strict=True):
        assert array.dtype == expected.dtype
        assert_allclose(array, expected, **tolerance)


def train(cluster, mlp, optimizer, steps, **order):
    """The last of ``steps`` on the cluster, and in one process."""
    step, reference = mlp.train_step(optimizer=optimizer), None
    for i in range(steps):
        x, targets = batch(seed=i)
        result = cluster.run(step, x, targets).result
        reference = mlp.reference_step(x, targets, optimizer, previous=reference, **order)
    return result, reference


@pytest.mark.slow_for("6-thread")
@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("numbers", [(1, 4, 9), pytest.param(range(1, 10), marks=pytest.mark.slow)], ids=len)
def test_training_equals_the_full_batch_for_every_number_of_microbatches(cluster_of, stages, backend, numbers):
    cluster = cluster_of(Mesh(pp=stages), backend)
    for microbatches in numbers:  # of 8 rows, so that the ninth is empty
        mlp = mlp_of(stages, microbatches, schedule=["gpipe", "1f1b"][microbatches % 2])
        result, reference = train(cluster, mlp, Adam(0.01), steps=2)
        assert_same_training(result, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01)])
def test_where_the_order_of_the_sums_is_the_same_the_bits_are(cluster_of, optimizer, schedule, backend):
    mlp = mlp_of(3, 4, schedule)
    result, reference = train(cluster_of(Mesh(pp=3), backend), mlp, optimizer, steps=3, microbatches=4)
    assert_same_training(result, reference, rtol=0)


@pytest.mark.sampled(6, 2)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize(("mesh", "stages"), [(Mesh(dp=2, pp=3), 3), (Mesh(pp=2, dp=3), 2), (Mesh(dp=3), 1)])
def test_replicas_add_up_to_the_batch(cluster_of, mesh, stages, backend):
    replicas = mesh.shape["dp"]
    cluster = cluster_of(mesh, backend)
    result, reference = train(cluster, mlp_of(stages, 2), Adam(0.01), steps=2)
    assert_same_training(result, reference, rtol=1e-9, atol=1e-12)
    same_order = train(cluster, mlp_of(stages, 2, "gpipe"), Adam(0.01), 2, microbatches=2, replicas=replicas)
    assert_same_training(*same_order, rtol=0)


def test_more_replicas_than_rows_leave_some_without_work(cluster_of):
    mlp, optimizer = mlp_of(1, 2), SGD(0.1)
    x, targets = batch(rows=2)
    result = cluster_of(Mesh(dp=3), "thread").run(mlp.train_step(optimizer=optimizer), x, targets).result
    assert_same_training(result, mlp.reference_step(x, targets, optimizer), rtol=1e-12, atol=1e-15)


@pytest.mark.slow_for("process")
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_stages_that_share_a_rank_hand_over_without_a_message(cluster_of, backend):
    rows = [[f"{stage}{kind}{k}" for kind, stage, k in order] for order in HALVES]
    mlp = mlp_of(4, 3, Schedule("halves, last microbatch first", rows, 4, 3, chunks=2), chunks=2)
    cluster = cluster_of(Mesh(pp=2), backend)
    result, reference = train(cluster, mlp, SGD(0.1), steps=2, microbatches=3)
    assert_same_training(result, reference, rtol=0)  # summed in the order of the microbatches all the same
    trace = cluster.run(mlp.train_step(), *batch()).trace
    assert len(trace.filter(kind="send")) == 2 * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_trace_has_the_actions_of_the_schedule_in_its_order(cluster_of, schedule):
    mlp = mlp_of(3, 4, schedule)
    trace = cluster_of(Mesh(pp=3)).run(mlp.train_step(), *batch()).trace
    for rank in range(3):
        done = [e for e in trace.filter(rank=rank, kind="compute") if e.phase]
        assert [e.name for e in done] == [str(action) for action in mlp.pipeline.actions(rank)]
        assert [(e.stage, e.phase, e.microbatch) for e in done] == list(mlp.pipeline.actions(rank))
    products = sum(2 * ROWS * a * b for a, b in pairwise(SIZES))
    assert trace.flops() == 3 * products - 2 * ROWS * SIZES[0] * SIZES[1]  # nobody wants the gradient of x


def test_messages_are_the_activations_and_gradients_at_the_cuts(cluster_of):
    mlp = mlp_of(3, 5)
    trace = cluster_of(Mesh(pp=3)).run(mlp.train_step(), *batch()).trace
    sends = trace.filter(kind="send")
    assert len(sends) == 2 * (3 - 1) * 5
    cuts = SIZES[mlp.layers_of(1).start], SIZES[mlp.layers_of(2).start]
    matrix = np.zeros((3, 3), int)
    for rank, size in enumerate(cuts):
        matrix[rank, rank + 1] = matrix[rank + 1, rank] = ROWS * size * 8
    assert_array_equal(trace.communication_matrix(), matrix)


def test_only_gpipe_keeps_the_activations_of_every_microbatch(cluster_of):
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        mlp = mlp_of(3, 8, schedule)
        trace = cluster_of(Mesh(pp=3)).run(mlp.train_step(), *batch()).trace
        peaks[schedule] = [trace.filter(name="activations").peak_bytes(rank) for rank in range(3)]
        assert [sum(e.nbytes for e in trace.filter(rank=rank, kind="memory")) for rank in range(3)] == [0] * 3
    each = [peak // 8 for peak in peaks["gpipe"]]
    assert peaks["1f1b"] == [live * size for live, size in zip((3, 2, 1), each, strict=True)]


def test_two_models_on_one_cluster_do_not_meet_and_equal_ones_go_on(cluster_of):
    cluster = cluster_of(Mesh(pp=2), "process")
    x, targets = batch()
    one, other = mlp_of(2, 3, seed=9), mlp_of(2, 3, seed=10)
    references = [mlp.reference_step(x, targets, microbatches=3) for mlp in (one, other)]
    for mlp, reference in zip((one, other), references, strict=True):
        assert cluster.run(mlp.train_step(), x, targets).result.loss == reference.loss
    again = cluster.run(mlp_of(2, 3, seed=9).train_step(), x, targets).result
    assert_same_training(again, one.reference_step(x, targets, previous=references[0], microbatches=3), rtol=0)
    cluster.run(one.reset_step())
    assert_same_training(cluster.run(one.train_step(), x, targets).result, references[0], rtol=0)


def test_another_optimizer_starts_anew_with_the_parameters_that_are_there(cluster_of):
    cluster, mlp, (x, targets) = cluster_of(Mesh(pp=2)), mlp_of(2, 2), batch()
    cluster.run(mlp.train_step(optimizer=SGD(0.1, momentum=0.5)), x, targets)
    result = cluster.run(mlp.train_step(optimizer=Adam(0.01)), x, targets).result
    reference = mlp.reference_step(x, targets, SGD(0.1, momentum=0.5), microbatches=2)
    moved = Training(reference.loss, reference.parameters, None)
    reference = mlp.reference_step(x, targets, Adam(0.01), previous=moved, microbatches=2)
    assert_same_training(result, reference, rtol=0)


def test_returns_chooses_what_comes_back(cluster_of):
    cluster, mlp = cluster_of(Mesh(pp=2)), mlp_of(2, 2)
    result = cluster.run(mlp.train_step(returns="gradients"), *batch()).result
    assert result.parameters is None and len(result.gradients) == len(SIZES) - 1 and result.loss > 0
    assert cluster.run(mlp.train_step(returns=()), *batch()).result.gradients is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_predictions_are_the_forward_with_the_parameters_in_the_devices(cluster_of, rows, backend):
    mlp, cluster = mlp_of(2, 4), cluster_of(Mesh(dp=2, pp=2), backend)
    parameters = cluster.run(mlp.train_step(), *batch()).result.parameters
    x = batch(rows, seed=3)[0]
    result = cluster.run(mlp.predict_step(), x).result
    assert result.shape == (rows, SIZES[-1])
    assert_allclose(result, mlp.forward(parameters, x), rtol=1e-12, atol=1e-15)


def test_classes_are_learnt_in_float32(cluster_of):
    mlp = mlp_of(3, 4, loss="softmax_cross_entropy", activation="tanh", dtype=np.float32)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, SIZES[0]))
    targets = x[:, :3].argmax(axis=1)
    cluster, step = cluster_of(Mesh(pp=3)), mlp.train_step(optimizer=Adam(0.1))
    losses = [cluster.run(step, x, targets).result.loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_bad_data_are_refused_on_the_host_and_the_cluster_goes_on(cluster_of):
    cluster, mlp = cluster_of(Mesh(pp=2)), mlp_of(2, 2)
    x, targets = batch()
    with pytest.raises(ValueError, match="x must be finite, got nan in row 0, column 0"):
        cluster.run(mlp.train_step(), np.full_like(x, np.nan), targets)
    with pytest.raises(ValueError, match=r"takes 3 ranks on axis 'pp'; Mesh\(pp=2\) has axis 'pp' of size 2"):
        cluster.run(mlp_of(3, 2).train_step(), x, targets)
    assert cluster.run(mlp.train_step(), x, targets).result.loss > 0
