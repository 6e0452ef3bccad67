"""The pipelined Transformer: the loss of NumPy, gradients by a complex step, the same on every mesh and schedule."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from emptied import emptied
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, Pipeline
from pipeline_parallelism import SGD, Adam, Transformer
from vcluster import VirtualCluster

VOCABULARY, WIDTH, HEADS, HEAD_DIM, HIDDEN = 11, 10, 5, 4, 7
ROWS, SEQUENCE = 7, 6
ALONE = Pipeline(1, 1)
SMALL = {"heads": HEADS, "head_dim": HEAD_DIM, "hidden": HIDDEN}


def gpt(pipeline, blocks=2, **options):
    return Transformer(
        vocabulary=VOCABULARY, width=WIDTH, blocks=blocks, pipeline=pipeline, **{**SMALL, **options})


def batch(seed, rows=ROWS):
    text = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, SEQUENCE + 1))
    return text[:, :-1], text[:, 1:]


# -- the model in NumPy, a function that complex numbers go through ---------------------------------------------------


def norm(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def turned(x):
    angles = np.arange(x.shape[1])[:, None, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)
    return np.stack(pairs, axis=-1).reshape(x.shape)


def block(x, n1, c1, wq, wk, wv, wo, n2, c2, w1, b1, w2, b2):
    y = norm(x, n1, c1)
    q, k, v = (np.einsum("bsm,mhd->bshd", y, w) for w in (wq, wk, wv))
    weights = np.exp(np.einsum("bshd,bthd->bhst", turned(q), turned(k)) / np.sqrt(HEAD_DIM)) * np.tri(x.shape[1])
    x = x + np.einsum("bhst,bthd,hdm->bsm", weights / weights.sum(-1, keepdims=True), v, wo)
    z = norm(x, n2, c2) @ w1 + b1
    return x + 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) @ w2 + b2


def logits(parameters, tokens):
    (table,), *blocks, (weight, bias, head) = parameters
    x = table[tokens]
    for arrays in blocks:
        x = block(x, *arrays)
    return norm(x, weight, bias) @ head.T


def loss(parameters, tokens, targets):
    scores = logits(parameters, tokens)
    found = np.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return (np.log(np.exp(scores).sum(-1)) - found).mean()


# -- clusters, and what they are held against -------------------------------------------------------------------------


cluster_of = emptied("thread")


@cache
def in_one_process(blocks):
    """Two steps on one device."""
    with VirtualCluster(1, backend="thread") as cluster:
        return trained(cluster, gpt(ALONE, blocks))


def trained(cluster, model, steps=2, optimizer=None, rows=ROWS):
    step = model.train_step(optimizer or Adam(0.01))
    for seed in range(steps):
        result = cluster.run(step, *batch(seed, rows)).result
    return result


def arrays_of(training):
    return [array for layer in training.parameters + training.gradients for array in layer]


def assert_same_training(found, expected):
    assert found.step == expected.step
    assert_allclose(found.loss, expected.loss, rtol=1e-12)
    for array, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert array.shape == other.shape
        assert_allclose(array, other, rtol=1e-9, atol=1e-12)


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pp=1), Mesh(pp=2, tp=2)])
def test_loss_gradients_and_logits_are_those_of_numpy(cluster_of, mesh):
    model, (tokens, targets) = gpt(Pipeline(mesh.shape["pp"], 2)), batch(5)
    cluster, parameters = cluster_of(mesh), model.initial_parameters()
    predicted = cluster.run(model.predict_step(), tokens).result
    assert_allclose(predicted, logits(parameters, tokens), rtol=1e-12, atol=1e-14)
    result = cluster.run(model.train_step(SGD(0.5)), tokens, targets).result
    assert_allclose(result.loss, loss(parameters, tokens, targets), rtol=1e-13)
    rng = np.random.default_rng(0)
    for i, layer in enumerate(parameters):
        for j, array in enumerate(layer):
            direction = rng.standard_normal(array.shape)
            moved = [[x.astype(complex) for x in one] for one in parameters]
            moved[i][j] += 1e-30j * direction
            slope = loss(moved, tokens, targets).imag / 1e-30
            gradient = result.gradients[i][j]
            assert_allclose((gradient * direction).sum(), slope, rtol=1e-10, atol=1e-14)
            assert_array_equal(result.parameters[i][j], array - 0.5 * gradient)


@pytest.mark.slow_for("Mesh(dp=2, pp=2, tp=2)")
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("mesh", "pipeline", "policy"),
    [
        (Mesh(pp=2), Pipeline(2, 3), "megatron"), (Mesh(dp=2), Pipeline(1, 3), "megatron"),
        (Mesh(tp=2), Pipeline(1, 2), "megatron"), (Mesh(tp=2), Pipeline(1, 2), "sequence"),
        (Mesh(dp=2, pp=2, tp=2), Pipeline(2, 3, "gpipe"), "megatron"),
        (Mesh(dp=2, pp=2, tp=2), Pipeline(2, 3), "sequence"), (Mesh(tp=3, pp=2), Pipeline(2, 1), "sequence"),
        (Mesh(pp=2, tp=2), Pipeline(4, 3, "interleaved_1f1b", chunks=2), "megatron"),
        (Mesh(pp=2, tp=2), Pipeline(4, 5, "zero_bubble_v", chunks=2), "sequence"),
        (Mesh(pp=3, tp=1), Pipeline(3, 4, "zero_bubble_h1"), "megatron"),
    ],
    ids=lambda value: value.schedule.name if isinstance(value, Pipeline) else str(value),
)
def test_every_mesh_and_schedule_trains_as_one_process_does(cluster_of, mesh, pipeline, policy):
    model = gpt(pipeline, policy=policy)
    assert_same_training(trained(cluster_of(mesh), model), in_one_process(2))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 9])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("zero_bubble_h2", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2),
     ("interleaved_zero_bubble", 2), ("zero_bubble_v", 2), ("dual_pipe_v", 2), ("v_min", 2)],
)
def test_many_schedules_train_as_one_process_does(cluster_of, schedule, chunks, microbatches):
    model = gpt(Pipeline(2 * chunks, microbatches, schedule, chunks), blocks=3)
    assert_same_training(trained(cluster_of(Mesh(dp=2, pp=2, tp=2)), model), in_one_process(3))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [
    Mesh(pp=2, tp=2), pytest.param(Mesh(dp=2, pp=2, tp=2), marks=pytest.mark.slow)], ids=str)
def test_processes_train_as_one_process_does(cluster_of, mesh):
    model = gpt(Pipeline(2, 3))
    assert_same_training(trained(cluster_of(mesh, "process"), model), in_one_process(2))


@pytest.mark.slow
def test_fewer_rows_than_replicas_and_microbatches_leave_some_without_work(cluster_of):
    with VirtualCluster(1, backend="thread") as cluster:
        alone = trained(cluster, gpt(ALONE), rows=1)
    assert_same_training(trained(cluster_of(Mesh(dp=2, pp=2, tp=2)), gpt(Pipeline(2, 3)), rows=1), alone)


@pytest.mark.slow
def test_weights_that_are_stashed_have_the_ages_of_the_schedule_whatever_is_inside(cluster_of):
    model = gpt(Pipeline(2, 3, "pipedream"))
    narrow, wide = (trained(cluster_of(mesh), model, optimizer=SGD(0.5)) for mesh in (Mesh(pp=2), Mesh(pp=2, tp=2)))
    assert_same_training(wide, narrow)
    one_microbatch = trained(cluster_of(Mesh(pp=2)), gpt(Pipeline(2, 1, "pipedream")))
    assert_same_training(one_microbatch, in_one_process(2))


def test_a_reset_begins_anew(cluster_of):
    cluster, model = cluster_of(Mesh(pp=2)), gpt(Pipeline(2, 3))
    first = trained(cluster, model, steps=1)
    cluster.run(model.reset_step())
    assert_array_equal(trained(cluster, model, steps=1).loss, first.loss)


@pytest.mark.slow
def test_the_record_has_the_actions_in_order_and_the_bytes_of_the_closed_forms(cluster_of):
    mesh, model = Mesh(dp=2, pp=2, tp=2), gpt(Pipeline(2, 3))
    trace = cluster_of(mesh).run(model.train_step(), *batch(0)).trace
    for rank, index in enumerate(mesh):
        names = [str(action) for action in model.pipeline.actions(index["pp"])]
        done = [event.name for event in trace.filter(rank=rank) if event.phase]
        assert list(dict.fromkeys(done)) == names
    x = ROWS * SEQUENCE * WIDTH * 8
    assert trace.filter(kind="send").bytes_sent() == 2 * 2 * x                          # both ways, on both of tp
    assert len(trace.filter(kind="send")) == 2 * 2 * 2 * 3
    blocks, ends, numbers = 2 * 8 * x, 2 * 2 * x, 3 * 2 * ROWS * SEQUENCE * 8
    assert trace.filter(axes="tp").bytes_received() == blocks + ends + numbers
    shards = [array for rank in range(4) for layer in model.initial_shards(
        mesh, rank, model.layers_of(mesh.index(rank)["pp"])) for array in layer]
    assert trace.filter(axes="dp").bytes_received() == 2 * sum(array.nbytes for array in shards) + 2 * 2 * 8
    assert trace.count("shapes") == 0
    held = {category: sum(event.nbytes for event in trace.filter(kind="memory", name=category))
            for category in {event.name for event in trace.filter(kind="memory")}}
    assert set(held.values()) == {0}
    assert {"activations", "parameters", "gradients", "optimizer"} <= set(held)
