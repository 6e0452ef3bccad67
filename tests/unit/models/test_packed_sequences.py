"""Packed sequences: lengths of documents from their mean, the loss of documents by themselves, and what attention costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism import Mesh, ir, models
from parallelism.models.packed import document_lengths
from parallelism.planning import find_plan
from parallelism.simulation import simulate
from parallelism.training import scaled_down
from parallelism.transforms import SGD, train_step

SPEC = models.TransformerSpec(
    layers=2, width=12, heads=3, key_value_heads=1, feed_forward=20, vocabulary=10, sequence=12, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False, dtype=np.float64)


@given(st.integers(1, 4000), st.integers(1, 500), st.floats(0, 3))
def test_lengths_fill_the_sequence_and_vary_as_they_are_to(sequence: int, mean: int, variation: float) -> None:
    count = max(1, round(sequence / mean))
    if count > 1024 or (variation and variation >= 0.99 * sqrt(count - 1)):
        return
    lengths = document_lengths(sequence, mean, variation)
    assert len(lengths) == count and sum(lengths) == sequence and min(lengths) >= 1
    of_mean = np.std(lengths) / np.mean(lengths)
    assert abs(of_mean - variation) <= 1.5 * count / sequence * (1 + variation) ** 2


def test_a_variation_that_so_few_documents_cannot_have_is_refused() -> None:
    assert document_lengths(4096, 5000, 0.0) == (4096,)
    with pytest.raises(ValueError, match=r"4 documents of 1024 tokens in the mean cannot have .* of 2: it is below 1\.73"):
        document_lengths(4096, 1024, 2.0)
    with pytest.raises(ValueError, match="has 4096 documents of 1 in the mean; at most 1024 are listed"):
        document_lengths(4096, 1, 0.0)


def test_the_lengths_of_a_model() -> None:
    assert SPEC.document_lengths == ()
    assert replace(SPEC, documents=4).document_lengths == (4,)              # three of them, and so on
    assert replace(SPEC, documents=5).document_lengths == (6,)              # the nearest that fill the sequence
    assert replace(SPEC, documents=[7, 2]).document_lengths == (7, 2)
    assert replace(SPEC, documents=4, document_variation=0.5).document_lengths == (7, 3, 2)
    for wrong, error in (({"documents": 0}, "documents must be a length of at least 1 token, or several, or None, got 0"),
                         ({"documents": ()}, r"got \(\)"), ({"documents": (3, True)}, r"got \(3, True\)"),
                         ({"document_variation": 0.5}, r"document_variation=0\.5 needs the mean length of .*, got None"),
                         ({"documents": (3, 4), "document_variation": 0.5}, r"got \(3, 4\)"),
                         ({"documents": 3, "document_variation": -1}, "must be a number of at least 0, got -1")):
        with pytest.raises(ValueError, match=error):
            replace(SPEC, **wrong)


@pytest.mark.parametrize("more", [
    {"documents": (5, 3, 4)}, {"documents": 4}, {"documents": 4, "document_variation": 0.5},
    {"documents": (5, 4), "fused_attention": False}, {"documents": (5, 3, 4), "window": 2}])
def test_the_loss_is_the_mean_of_documents_by_themselves(more: dict[str, Any]) -> None:
    """Rotary positions count from anywhere, so a document by itself has the loss that it has behind others."""
    spec, rng = replace(SPEC, **more), np.random.default_rng(0)
    given = {value.name: rng.integers(0, 10, value.type.shape) if value.type.dtype.kind == "i"
             else rng.normal(size=value.type.shape) for value in spec.function(2).inputs}
    found, = ir.interpret(spec.function(2), given).outputs
    ends = [*np.cumsum(spec.document_lengths * 12)]
    bounds = [0, *(end for end in ends if end < 12), 12]
    wanted = 0.0
    for first, last in pairwise(bounds):
        alone = replace(spec, documents=None, document_variation=0.0, sequence=int(last - first))
        part = {name: array[:, first:last] if name in ("tokens", "targets") else array for name, array in given.items()}
        wanted += float(ir.interpret(alone.function(2), part).outputs[0]) * (last - first) / 12
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.takes_seconds
def test_attention_costs_what_the_lengths_cost() -> None:
    spec, rows = replace(SPEC, documents=(5, 3, 4)), 4
    squares, halves = 25 + 9 + 16, 15 + 6 + 10
    difference = 3 * rows * 2 * 2 * 3 * 2 * 4 * (144 - squares)
    assert SPEC.flops(rows * 12) - spec.flops(rows * 12) == difference
    trace = simulate(train_step(spec.function(rows), SGD(0.1)), "dgx-h100:1", mesh=Mesh(devices=1))
    forward = trace.filter(name="attention")
    backward = trace.filter(name="attention_gradient")
    assert forward.flops() == 2 * rows * 3 * halves * 2 * 2 * 4                 # two products of 4 terms, in 2 layers
    assert backward.flops() == 2 * rows * 3 * halves * 2 * 5 * 4
    long = replace(SPEC, sequence=4096, width=512, heads=4, head_width=128, dtype="bfloat16")
    seconds = {}
    for length in (None, 512, 64):
        step = train_step(replace(long, documents=length).function(1), SGD(0.1))
        traced = simulate(step, "dgx-h100:1", mesh=Mesh(devices=1)).filter(name="attention_gradient", kind="compute")
        seconds[length] = sum(event.duration_seconds for event in traced)
    assert seconds[64] < seconds[512] < seconds[None] / 4


@pytest.mark.slow
def test_plans_on_packed_sequences_are_their_simulations_and_can_be_scaled_down() -> None:
    spec = replace(SPEC, heads=4, key_value_heads=2, width=64, sequence=64, vocabulary=128, dtype="bfloat16", documents=16,
                   document_variation=0.5)
    plans = find_plan(spec, hardware="dgx-h100", devices=4, batch=4, cp=2, microbatch=1, recompute="none", pp=1, tp=2,
                      zero=0, exchange=["p2p", "all_gather"])
    assert len(plans) == 2 and not plans.one_by_one
    for plan in plans:
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())
    small: Any = scaled_down(plans.best.run).model
    assert small.document_lengths == (small.sequence // 2,)
