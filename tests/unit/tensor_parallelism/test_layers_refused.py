"""What the layers refuse, on the host, before anything is sent; and what their plans say.  No process is started."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.recorder import record
from tensor_parallelism import (
    CrossEntropy,
    CrossEntropySharding,
    Dropout,
    Embedding,
    EmbeddingSharding,
    LayerNorm,
    MixtureOfExperts,
    MixtureOfExpertsSharding,
    NormalizationSharding,
    RMSNorm,
    VocabularyLoss,
    VocabularyLossSharding,
)

T = TensorSharding
MESH = Mesh(x=2, y=3)
EMBEDDING = Embedding(EmbeddingSharding.vocabulary("y", "x"))
LOSS = CrossEntropy(CrossEntropySharding.vocabulary("y", "x"))
HEAD = VocabularyLoss(VocabularyLossSharding.vocabulary("y", "x"))
MIXTURE = MixtureOfExperts(MixtureOfExpertsSharding.expert_parallel("y", "x"), top_k=2)
TOKENS = np.array([[0, 6, 2], [3, 1, 5]])
EXPERTS = [np.zeros(shape) for shape in ((2, 3, 4), (4, 5), (5, 4, 6), (5, 6), (5, 6, 4), (5, 4))]


def changed(at, shape):
    return [np.zeros(shape) if i == at else x for i, x in enumerate(EXPERTS)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("operation", "values", "reason"),
    [
        (EMBEDDING, [TOKENS + 1, np.zeros((7, 4))], "tokens are from 0 to 6, the vocabulary; got 7 at (0, 1)"),
        (EMBEDDING, [TOKENS - 1, np.zeros((7, 4))], "tokens are from 0 to 6, the vocabulary; got -1 at (0, 0)"),
        (EMBEDDING, [TOKENS, np.zeros(7)], "got shapes tokens (2, 3) and table (7,)"),
        (EMBEDDING, [TOKENS[0], np.zeros((7, 4))], "tokens of shape (3,) and tokens=TensorSharding('x', None)"),
        (Embedding(EmbeddingSharding.vocabulary("z")), [TOKENS, np.zeros((7, 4))], "names axis 'z', but the axes of"),
        (LOSS, [np.zeros((2, 3, 6)), TOKENS], "targets are from 0 to 5, the vocabulary; got 6 at (0, 1)"),
        (LOSS, [np.zeros((2, 4, 7)), TOKENS], "got logits of shape (2, 4, 7) and targets of (2, 3)"),
        (LOSS, [np.zeros((2, 0, 7)), TOKENS[:, :0]], "the mean over no tokens"),
        (HEAD, [np.zeros((2, 3, 4)), np.zeros((6, 4)), TOKENS], "targets are from 0 to 5, the vocabulary; got 6 at (0"),
        (HEAD, [np.zeros((2, 3, 5)), np.zeros((7, 4)), TOKENS], "got x of shape (2, 3, 5) and table of (7, 4)"),
        (HEAD, [np.zeros((2, 2, 4)), np.zeros((7, 4)), TOKENS], "got x of shape (2, 2, 4) and targets of (2, 3)"),
        (HEAD, [np.zeros((2, 0, 4)), np.zeros((7, 4)), TOKENS[:, :0]], "the mean over no tokens"),
        (LayerNorm(T("x", None)), [np.zeros((2, 4)), np.zeros(3), np.zeros(4)], "weight must have the shape of the last "
         "dim of x, (4,), got (3,)"),
        (LayerNorm(T("x", None)), [np.zeros((2, 4)), np.zeros(4), np.zeros(5)], "bias must have the shape of the last"),
        (RMSNorm(T("x", None)), [np.zeros((2, 0)), np.zeros(0)], "an element at least; got shape (2, 0)"),
        (Dropout(T("x", None), 0.5), [np.zeros(4)], "x of shape (4,) and TensorSharding('x', None)"),
        (Dropout(T("x"), 0.5), [np.zeros(4), -1], "the step of Dropout is an integer from 0 to 2**64 - 1, got -1"),
        (MIXTURE, changed(0, (2, 3, 5)), "got x of shape (2, 3, 5) and router of (4, 5)"),
        (MIXTURE, changed(3, (5, 7)), "b1 is of shape (5, 6) beside a router of (4, 5) and w1 of (5, 4, 6), got (5, "),
        (MIXTURE, changed(4, (5, 4, 6)), "w2 is of shape (5, 6, 4)"),
        (MIXTURE, changed(2, (5, 4)), "the router of 2 and w1 of 3, got shapes"),
        (MIXTURE, [x[:, :1] if i == 1 else x[:1] if i > 1 else x for i, x in enumerate(EXPERTS)],
         "a token goes to top_k=2 experts, the router of shape (4, 1) has 1"),
        (MIXTURE, [x[:, :0] if i == 1 else x[:0] if i > 1 else x for i, x in enumerate(EXPERTS)], "has an expert"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_reason(operation, values, reason):
    with pytest.raises(ValueError) as caught:
        operation.inputs(MESH, *values)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: EmbeddingSharding(T(None), T("x"), T(None, None)), ValueError,
         "table of an EmbeddingSharding is of at least 2 dims, got TensorSharding('x')"),
        (lambda: EmbeddingSharding(T(None), ("x", None), T(None, None)), TypeError, "table of an EmbeddingSharding is"),
        (lambda: CrossEntropySharding(T(None, None, partial="x"), T(None)), ValueError,
         "logits of a CrossEntropySharding cannot be partial, got TensorSharding(None, None, partial='x')"),
        (lambda: EmbeddingSharding(T(None), T("x", None), T(None, None, partial="y", op="max")), ValueError,
         "out of an EmbeddingSharding may have a pending sum, but no other"),
        (lambda: NormalizationSharding(T(..., partial="x")), ValueError, "x of a NormalizationSharding cannot be"),
        (lambda: LayerNorm(T(...), epsilon=0), ValueError, "epsilon must be above 0, got 0"),
        (lambda: LayerNorm("x"), TypeError, "LayerNorm takes a NormalizationSharding, got 'x'"),
        (lambda: Dropout(T(...), 1.0), ValueError, "the rate of Dropout must be at least 0 and below 1, got 1.0"),
        (lambda: Dropout(T(...), 0.5, seed=2**64), ValueError, "the seed of Dropout is an integer from 0 to 2**64 - 1"),
        (lambda: Dropout(T(..., partial="x", op="max"), 0.5), ValueError,
         "the layout of Dropout may have a pending sum, but no other"),
        (lambda: Dropout("x", 0.5), TypeError, "Dropout takes a TensorSharding, got 'x'"),
        (lambda: Dropout(T("x"), 0.5).inputs(MESH, np.arange(4)), TypeError, "floating point numbers, got int64"),
        (lambda: Dropout(T("x"), 0.5).inputs(MESH), TypeError, "Dropout takes x and, if it likes, a step, got nothing"),
        (lambda: MixtureOfExperts(MIXTURE.sharding, top_k=0), ValueError, "top_k is a whole number of at least 1"),
        (lambda: MixtureOfExperts(MIXTURE.sharding, capacity_factor=0), ValueError, "capacity_factor is above 0"),
        (lambda: MixtureOfExperts(MIXTURE.sharding, activation="gleu"), ValueError, "activation is one of relu, tanh"),
        (lambda: EMBEDDING.inputs(MESH, TOKENS * 1.0, np.zeros((7, 4))), TypeError, "tokens must be integers, got float64"),
        (lambda: LOSS.inputs(MESH, np.zeros((2, 3, 7))), TypeError, "CrossEntropy takes logits, targets, got 1 arrays"),
    ],
)
def test_what_cannot_be_made_or_called_is_refused_with_the_reason(make, error, reason):
    with pytest.raises(error) as caught:
        make()
    assert reason in str(caught.value)


def test_a_gradient_of_another_shape_is_refused():
    def kernel(device, operation, grad, *shards):
        operation.backward(device, operation.forward(device, *shards)[1], grad)

    for operation, values, reason in (
        (EMBEDDING, [TOKENS, np.zeros((7, 4))], r"have the shape of its shard, \(1, 3, 4\) on rank \d, got \(7,\)"),
        (LOSS, [np.zeros((2, 3, 7)), TOKENS], r"the gradient of the loss is a number, got shape \(7,\)"),
        (RMSNorm(T("x", None)), [np.ones((2, 4)), np.ones(4)], r"\(1, 4\) on rank \d, got \(7,\)"),
        (Dropout(T("x", None), 0.5), [np.ones((2, 4))], r"\(1, 4\) on rank \d, got \(7,\)"),
    ):
        inputs = [(operation, np.zeros(7), *mine) for mine in operation.inputs(MESH, *values)]
        with pytest.raises(ValueError, match=reason):
            record(kernel, MESH, inputs=inputs)


def test_a_plan_prints_what_moves():
    assert str(EMBEDDING.plan([(4, 6), (9, 5)], MESH)) == """\
y[..., m] = table[tokens[...], m], tokens (4, 6), table (9, 5) on Mesh(x=2, y=3)
  forward: out [x, None, None] partial=y -> [x, None, None]
    all_reduce  over y  sum  2x6x5 -> 2x6x5  3840 bytes
  backward: table_grad [y, None] partial=x -> [y, None]
    all_reduce  over x  sum  3x5 -> 3x5  720 bytes
3840 bytes forward, 720 backward"""
    assert str(LayerNorm(T("x", None)).plan([(4, 6), (6,), (6,)], Mesh(x=1))).splitlines()[1:] == [
        "  forward: nothing moves", "  backward: nothing moves", "0 bytes forward, 0 backward",
    ]
    with pytest.raises(KeyError):
        EMBEDDING.plan([(4, 6), (9, 5)], MESH)["logits"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layers_keep_the_dtype(dtype):
    def both(device, operation, *shards):
        out, saved = operation.forward(device, *shards)
        return out, *operation.backward(device, saved, out)

    x = np.ones((4, 6), dtype)
    for operation, values in (
        (Embedding(EmbeddingSharding(T("x"), T("y", None), T("x", None))), [np.arange(4) % 3, x]),
        (CrossEntropy(CrossEntropySharding(T("x", "y"), T("x"))), [x, np.arange(4)]),
        (LayerNorm(T("x", "y")), [x, x[0], x[0]]), (RMSNorm(T("x", "y")), [x, x[0]]),
        (Dropout(T("x", "y"), 0.5), [x]),
    ):
        recorded = record(both, MESH, inputs=[(operation, *mine) for mine in operation.inputs(MESH, *values)])
        assert {np.asarray(found).dtype for found in recorded.outputs[0] if found is not None} == {np.dtype(dtype)}
    mixture = MixtureOfExperts(MixtureOfExpertsSharding.expert_parallel("x"))
    recorded = record(both, Mesh(x=1), inputs=[(mixture, *(value.astype(dtype) for value in EXPERTS))])
    assert {found.dtype for found in recorded.outputs[0]} == {np.dtype(dtype)}
