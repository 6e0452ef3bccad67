"""Layers of bfloat16 arrays: results of that dtype that are near those of float64, and a quarter of the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from differences import run_whole

from parallelism import Mesh, TensorSharding
from parallelism.dtypes import as_dtype
from tensor_parallelism import (
    Attention,
    AttentionSharding as A,
    Dropout,
    FeedForward,
    FeedForwardSharding as F,
    LayerNorm,
    NormalizationSharding as N,
    TransformerBlock,
    TransformerBlockSharding as B,
)

BFLOAT16 = as_dtype("bfloat16")
X = (2, 8, 6)
HEADS = [(6, 4, 2), (6, 2, 2), (6, 2, 2), (4, 2, 6)]
OPERATIONS = {
    "megatron": (Attention(A.megatron("x"), causal=True), HEADS),
    "sequence": (Attention(A.sequence("x"), causal=True), HEADS),
    "ring": (Attention(A.ring("x"), causal=True, rotary_base=10000.0), HEADS),
    "feed forward": (FeedForward(F.megatron("x")), [(6, 16), (16,), (16, 6), (6,)]),
    "norm": (LayerNorm(N(TensorSharding(None, "x", None))), [(6,), (6,)]),
    "block": (TransformerBlock(B.megatron("x"), causal=True),
              [*TransformerBlock(B.megatron("x")).shapes(X, 4, kv_heads=2, head_dim=2, hidden=16).values()][1:]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("operation", "shapes"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_layer_of_bfloat16_is_that_of_float64_rounded(cluster_of, operation, shapes):
    mesh = Mesh(x=2)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(BFLOAT16) for shape in (X, *shapes)]
    grad = rng.standard_normal(X).astype(BFLOAT16)
    cluster = cluster_of(mesh, "thread")
    run, found = run_whole(cluster, operation, values, grad)
    wide, wanted = run_whole(cluster, operation, [x.astype(float) for x in values], grad.astype(float))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == BFLOAT16
        np.testing.assert_allclose(one.astype(float), other, rtol=0, atol=0.08 * np.abs(other).max())
    plan = operation.plan([x.shape for x in values], mesh, "bfloat16")
    for rank in range(2):
        assert run.trace.bytes_received(rank=rank) == plan.bytes_received[rank] + plan.backward_bytes_received[rank]
        assert 4 * run.trace.bytes_received(rank=rank) == wide.trace.bytes_received(rank=rank)


def test_dropout_leaves_out_the_same_elements_of_bfloat16(cluster_of):
    x = np.random.default_rng(0).standard_normal(X)
    dropout = Dropout(TensorSharding("x", None, None), rate=0.5, seed=1)
    narrow, wide = (cluster_of(Mesh(x=2), "thread").run(dropout, each).result for each in (x.astype(BFLOAT16), x))
    assert narrow.dtype == BFLOAT16
    np.testing.assert_array_equal(narrow == 0, wide == 0)
    np.testing.assert_allclose(narrow.astype(float), wide, rtol=2.0**-8)
