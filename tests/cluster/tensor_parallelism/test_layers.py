"""Embedding, cross-entropy, normalisation and dropout against one process: values, gradients, communication."""

from __future__ import annotations

import os
import random
from functools import cache

import numpy as np
import pytest
from differences import assert_close, central, complex_step, forward_and_backward, run_whole

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import (
    CrossEntropy,
    CrossEntropySharding,
    Dropout,
    Embedding,
    EmbeddingSharding,
    LayerNorm,
    NormalizationSharding,
    RMSNorm,
    VocabularyLoss,
    VocabularyLossSharding,
)
from vcluster import Sharded

T = TensorSharding
BATCH, SEQUENCE, MODEL, VOCABULARY = 3, 7, 5, 11
EPSILON = 1e-5
RANDOM = int(os.environ.get("VCLUSTER_LAYERS", "60"))


# -- the global functions, written anew --------------------------------------------------------------------------------

def embedding(tokens, table):
    return table[tokens]


def cross_entropy(logits, targets):
    rows = logits.reshape(-1, logits.shape[-1])
    exps = np.exp(rows - rows.real.max(axis=1, keepdims=True))
    chosen = exps[np.arange(len(rows)), targets.reshape(-1)] / exps.sum(axis=1)
    return -np.log(chosen).mean()


def vocabulary_loss(x, table, targets):
    return cross_entropy(x @ table.T, targets)


def layer_norm(x, weight, bias):
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + EPSILON) * weight + bias


def rms_norm(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON) * weight


LAYERS = {"embedding": embedding, "cross_entropy": cross_entropy, "vocabulary_loss": vocabulary_loss,
          "layer_norm": layer_norm, "rms_norm": rms_norm}


def arrays(name, batch=BATCH, sequence=SEQUENCE, model=MODEL, vocabulary=VOCABULARY):
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, vocabulary, (batch, sequence))
    x = rng.standard_normal((batch, sequence, model))
    weight, bias = rng.standard_normal((2, model))
    return {
        "embedding": ([tokens, rng.standard_normal((vocabulary, model))], x),
        "cross_entropy": ([4 * rng.standard_normal((batch, sequence, vocabulary)), tokens], np.float64(0.7)),
        "vocabulary_loss": ([x, rng.standard_normal((vocabulary, model)), tokens], np.float64(0.7)),
        "layer_norm": ([3 + x, weight, bias], x[::-1]),
        "rms_norm": ([3 + x, weight], x[::-1]),
    }[name]


@cache
def expected(name):
    values, grad = arrays(name)
    return LAYERS[name](*values), *complex_step(LAYERS[name], values, grad)


def norms(*layouts):
    return [(name, kind(layout)) for name, kind in (("layer_norm", LayerNorm), ("rms_norm", RMSNorm))
            for layout in layouts]


E, C, N, V = EmbeddingSharding, CrossEntropySharding, NormalizationSharding, VocabularyLossSharding
ONE_AXIS = [
    ("embedding", Embedding(E.vocabulary("x"))),
    ("embedding", Embedding(E.vocabulary("x", sequence="x"))),
    ("embedding", Embedding(E(T(None, "x"), T(None, None), T(None, "x", None)))),
    ("embedding", Embedding(E(T("x", None), T("x", None), T("x", None, None)))),
    ("embedding", Embedding(E(T(...), T(None, "x"), T(..., "x")))),
    ("cross_entropy", CrossEntropy(C.vocabulary(()))),
    ("cross_entropy", CrossEntropy(C.vocabulary("x"))),
    ("cross_entropy", CrossEntropy(C.vocabulary((), sequence="x"))),
    ("cross_entropy", CrossEntropy(C(T(None, None, "x"), T("x", None)))),
    ("vocabulary_loss", VocabularyLoss(V.vocabulary("x"))),
    ("vocabulary_loss", VocabularyLoss(V.vocabulary("x", sequence="x"))),
    ("vocabulary_loss", VocabularyLoss(V(T("x", None, None), T(None, "x"), T(None, "x")))),
    *norms(T(None, "x", None), N(T("x", ...), T("x")), N(T(None, None, "x"), T("x")), T(None, None, "x")),
]
TWO_AXES = [
    ("embedding", Embedding(E.vocabulary("y", "x"))),
    ("embedding", Embedding(E.vocabulary("y", "x", "y"))),
    ("embedding", Embedding(E.vocabulary(("y", "x"), "x"))),
    ("embedding", Embedding(E(T("y", "x"), T("x", "y"), T(None, "y", "x")))),
    ("embedding", Embedding(E(T("y", None), T("x", None), T("y", None, None, partial="x")))),
    ("cross_entropy", CrossEntropy(C.vocabulary("y", "x"))),
    ("cross_entropy", CrossEntropy(C.vocabulary(("y", "x")))),
    ("cross_entropy", CrossEntropy(C(T("y", "x", None), T(("x", "y"), None)))),
    ("vocabulary_loss", VocabularyLoss(V.vocabulary("y", "x", "y"))),
    ("vocabulary_loss", VocabularyLoss(V(T("y", None, "x"), T("x", "y"), T("x", None)))),
    ("vocabulary_loss", VocabularyLoss(V(T("y", ...), T("x", None), T(None, "y")))),
    *norms(T("x", "y", None), T(("y", "x"), None, None), N(T("x", None, "y"), T("y")), N(T(None, None, ("x", "y")))),
]
MESHES = [Mesh(x=1), Mesh(x=2), Mesh(x=4), Mesh(x=8), Mesh(x=2, y=2), Mesh(x=2, y=3)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("half", [0, 1])
def test_a_layer_on_a_mesh_is_that_of_one_process_forward_and_backward(cluster_of, mesh, half):
    cluster = cluster_of(mesh, "thread")
    for name, operation in (ONE_AXIS if len(mesh.axes) == 1 else TWO_AXES)[half::2]:
        values, grad = arrays(name)
        run, found = run_whole(cluster, operation, values, grad)
        assert_close(found, expected(name))
        plan = operation.plan([x.shape for x in values], mesh)
        for rank in range(mesh.size):
            assert run.trace.bytes_received(rank=rank) == (
                plan.bytes_received[rank] + plan.backward_bytes_received[rank]
            )
            ran = [event.name for event in run.trace.filter(kind="collective", rank=rank)]
            assert ran == [*plan.kinds, *plan.backward_kinds]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM))
def test_any_layouts_do(cluster_of, seed):
    rng = random.Random(seed)
    mesh = MESHES[seed % len(MESHES)]

    def layout(ndim):
        dims = [[] for _ in range(ndim + 1)]
        for axis in rng.sample(mesh.axes, len(mesh.axes)):
            rng.choice(dims).append(axis)
        return T(*map(tuple, dims[:ndim]))

    for name, operation in (
        ("embedding", Embedding(E(layout(2), layout(2), layout(3)))),
        ("cross_entropy", CrossEntropy(C(layout(3), layout(2)))),
        ("vocabulary_loss", VocabularyLoss(V(layout(3), layout(2), layout(2)))),
        ("layer_norm", LayerNorm(N(layout(3), layout(1)))), ("rms_norm", RMSNorm(N(layout(3), layout(1)))),
    ):
        batch, sequence, vocabulary = (rng.choice([1, 2, 3, 5, 8]) for _ in range(3))
        extents = batch, sequence, rng.choice([2, 3, 5, 8]), vocabulary     # of one feature only rounding is left
        values, grad = arrays(name, *extents)
        _, found = run_whole(cluster_of(mesh, "thread"), operation, values, grad)
        assert_close(found, [LAYERS[name](*values), *complex_step(LAYERS[name], values, grad)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_central_differences_of_the_global_function(cluster_of, name):
    values, grad = arrays(name)
    operation = dict(TWO_AXES)[name]
    _, (_, *found) = run_whole(cluster_of(Mesh(x=2, y=3), "thread"), operation, values, grad)
    assert_close(found, central(LAYERS[name], values, grad), relative=1e-7)


B, S, M, WORDS, X, Y, BYTES = 4, 6, 12, 18, 2, 3, 8
TOKENS, OUT, TABLE = B * S * BYTES, B * S * M * BYTES, WORDS * M * BYTES
LOSS = 3 * 2 * (Y - 1) * TOKENS + Y * 2 * (X - 1) * BYTES
FORMULAS = {
    "vocabulary of a batch": (
        "embedding", Embedding(E.vocabulary("y", "x")), 2 * (Y - 1) * OUT, 2 * (X - 1) * TABLE, ["all_reduce"],
    ),
    "vocabulary and sequence": (
        "embedding", Embedding(E.vocabulary("y", "x", "y")), (Y - 1) * OUT, (Y - 1) * OUT + 2 * (X - 1) * TABLE,
        ["reduce_scatter"],
    ),
    "columns of the table": (
        "embedding", Embedding(E(T("x", None), T(None, "y"), T("x", None, "y"))), 0, 2 * (X - 1) * TABLE, [],
    ),
    "logits by vocabulary": (
        "cross_entropy", CrossEntropy(C.vocabulary("y", "x")), LOSS, 0, ["all_reduce"] * 4,
    ),
    "a head of a batch": (
        "vocabulary_loss", VocabularyLoss(V.vocabulary("y", "x")), LOSS, 2 * (Y - 1) * OUT + 2 * (X - 1) * TABLE,
        ["all_reduce"] * 4,
    ),
    "a head of a sequence": (
        "vocabulary_loss", VocabularyLoss(V.vocabulary("y", "x", "y")), (Y - 1) * OUT + LOSS,
        (Y - 1) * OUT + 2 * (X - 1) * TABLE, ["all_gather", *["all_reduce"] * 4],
    ),
    "logits by token": (
        "cross_entropy", CrossEntropy(C.vocabulary((), "x", "y")), 2 * (X * Y - 1) * BYTES, 0, ["all_reduce"],
    ),
    "norm by token": ("layer_norm", LayerNorm(T("x", "y", None)), 0, 2 * 2 * (X * Y - 1) * M * BYTES, []),
    "norm by feature": (
        "layer_norm", LayerNorm(N(T("x", None, "y"), T("y"))), 2 * 2 * (Y - 1) * TOKENS,
        2 * (Y - 1) * 2 * TOKENS + 2 * 2 * (X - 1) * M * BYTES, ["all_reduce"] * 2,
    ),
    "mean square by feature": (
        "rms_norm", RMSNorm(N(T("x", None, "y"), T("y"))), 2 * (Y - 1) * TOKENS,
        2 * (Y - 1) * TOKENS + 2 * (X - 1) * M * BYTES, ["all_reduce"],
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("which", FORMULAS)
def test_a_layer_runs_the_collectives_it_names_with_the_bytes_of_its_formula(which):
    name, operation, forward_bytes, backward_bytes, kinds = FORMULAS[which]
    values, grad = arrays(name, B, S, M, WORDS)
    mesh, layouts = Mesh(x=X, y=Y), [getattr(operation.sharding, name) for name in operation.NAMES]
    forward = record(operation, mesh, *values).trace
    assert forward.bytes_received() == forward_bytes
    assert [event.name for event in forward.filter(kind="collective", rank=5)] == kinds
    every = [(operation.sharding.out, np.asarray(grad)), *zip(layouts, values, strict=True)]
    shards = zip(*(layout.shard(x, mesh) for layout, x in every), strict=True)
    both = record(forward_and_backward, mesh, inputs=[(operation, *mine) for mine in shards]).trace
    assert both.bytes_received() - forward_bytes == backward_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LAYERS)
def test_processes_do_what_the_recorder_counts(cluster_of, name):
    mesh, operation = Mesh(x=2, y=2), dict(reversed(TWO_AXES))[name]
    values, grad = arrays(name)
    run, found = run_whole(cluster_of(mesh), operation, values, grad)
    assert_close(found, expected(name))
    layouts = [getattr(operation.sharding, name) for name in ("out", *operation.NAMES)]
    shards = zip(*(layout.shard(np.asarray(x), mesh) for layout, x in zip(layouts, [grad, *values], strict=True)),
                 strict=True)
    recorded = record(forward_and_backward, mesh, inputs=[(operation, *mine) for mine in shards])
    for rank in range(mesh.size):
        did, would = (
            [(event.name, event.bytes_received, event.axes) for event in trace.filter(kind="collective", rank=rank)]
            for trace in (run.trace, recorded.trace)
        )
        assert would == did
        assert recorded.trace.flops(rank) == run.trace.flops(rank)


def test_what_is_kept_for_the_backward_is_held_until_then():
    mesh, (values, _) = Mesh(x=2), arrays("layer_norm", 4, 6, 12)
    for operation, inputs, held in (
        (LayerNorm(T("x", ...)), values, {"activations": 2 * 6 * 12 * 8, "statistics": 2 * 6 * 8}),
        (RMSNorm(T("x", ...)), values[:2], {"activations": 2 * 6 * 12 * 8, "statistics": 2 * 6 * 8}),
        (CrossEntropy(C.vocabulary("x")), arrays("cross_entropy", 4, 6, 12, 10)[0], {"activations": 4 * 6 * 5 * 8}),
        (Dropout(T("x", ...), 0.5), values[:1], {"activations": 2 * 6 * 12}),
    ):
        forward = record(operation, mesh, *inputs).trace
        for category, nbytes in held.items():
            assert [forward.peak_bytes(rank, category) for rank in range(2)] == [nbytes] * 2

        def both(device, *shards, operation=operation):
            out, saved = operation.forward(device, *shards)
            operation.backward(device, saved, out)

        events = record(both, mesh, inputs=operation.inputs(mesh, *inputs)).trace.filter(kind="memory", rank=0)
        assert sum(event.nbytes for event in events) == 0


# -- dropout -----------------------------------------------------------------------------------------------------------

def drop(device, operation, x, grad, step):
    out, saved = operation.forward(device, x, step)
    return out, *operation.backward(device, saved, grad)


def test_dropout_drops_the_same_on_every_mesh_and_sends_nothing(cluster_of):
    x = np.arange(1.0, BATCH * SEQUENCE * MODEL + 1).reshape(BATCH, SEQUENCE, MODEL)
    layouts = {1: [T(...), T("x", ...), T(None, "x", None), T(..., "x"), T(..., partial="x")],
               2: [T("x", "y", None), T(("y", "x"), ...), T("y", None, "x"), T(None, "y", None, partial="x")]}
    seen = set()
    for mesh in (Mesh(x=1), Mesh(x=4), Mesh(x=2, y=3)):
        for layout in layouts[len(mesh.axes)]:
            operation = Dropout(layout, rate=0.25, seed=3)
            run = cluster_of(mesh, "thread").run(drop, operation, Sharded(x, layout), Sharded(2 * x, layout), 4)
            out, grad = (layout.unshard([mine[i] for mine in run], mesh) for i in range(2))
            np.testing.assert_array_equal(grad, 2 * out)
            assert run.trace.bytes_received() == 0
            seen.add(out.tobytes())
    assert len(seen) == 1
    stays = out != 0
    np.testing.assert_array_equal(out[stays], x[stays] * (1 / 0.75))
    assert 0.6 < stays.mean() < 0.9


def test_dropout_as_an_operation_takes_a_step_and_a_rate_of_nothing_keeps_all(cluster_of):
    cluster, x = cluster_of(Mesh(x=2), "thread"), np.ones((5, 7))
    first, again, other = (cluster.run(Dropout(T("x", None), 0.5, seed=1), x, step).result for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, cluster.run(Dropout(T("x", None), 0.5, seed=1), x).result)
    assert (first != other).any()
    assert (first != cluster.run(Dropout(T("x", None), 0.5, seed=2), x).result).any()
    np.testing.assert_array_equal(cluster.run(Dropout(T("x", None), 0.0), x).result, x)
