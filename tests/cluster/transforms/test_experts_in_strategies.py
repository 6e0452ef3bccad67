"""Experts of a Transformer in strategies: a step trains as the step alone, and a simulation is the run."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_runs import assert_model_trains, in_turn
from transformed import ROUTED

from parallelism.transforms import SGD, Adam, AdamW

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "300"))

CASES = [
    ("mixtral", 4, "ep=2", Adam(0.01)), ("mixtral", 8, "dp=2 ep=2 tp=2 sp zero=1", Adam(0.01)),
    ("deepseek", 8, "dp=2 ep=2 zero=2", AdamW(0.01)), ("deepseek", 6, "tp=2 sp ep=2", SGD(0.1, 0.5)),
    ("capacity", 6, "ep=2 cp=2 tp=2 sp", Adam(0.01)), ("capacity", 8, "dp=2 ep=4 zero=3", SGD(0.1, 0.5)),
    ("mixtral", 8, "pp=2 1f1b:2 dp=2 ep=2 zero=1", Adam(0.01)), ("deepseek", 8, "pp=2 1f1b:2 ep=2 tp=2 sp", SGD(0.1)),
    ("deepseek", 8, "pp=2 1f1b:2 dp=2 ep=2 zero=1", Adam(0.01)), ("mixtral", 8, "pp=2 1f1b:2 cp=2 ep=2", SGD(0.1)),
    ("capacity", 8, "pp=2 gpipe:2 cp=2 ep=2", SGD(0.1)), ("mixtral", 8, "ep=2 dp=2 fused overlap zero=1", Adam(0.01)),
    ("deepseek", 8, "pp=2 zero_bubble_h1:2 dp=2 ep=2 zero=2", Adam(0.01)), ("mixtral", 9, "ep=3", SGD(0.1)),
    ("deepseek", 8, "ep:dp=2 dp=2 zero=1 recompute=block.*", Adam(0.01)), ("capacity", 8, "ep=2 tp=2 dp=2", SGD(0.1)),
    ("deepseek", 8, "pp=2 interleaved_1f1b:4x1 ep=2 zero:ep=1", Adam(0.01)), ("capacity", 7, "ep=2 tp=2", SGD(0.1)),
    ("gpt-oss", 8, "pp=2 1f1b:2 ep=2 tp=2 sp", Adam(0.01)), ("gpt-oss", 8, "dp=2 ep=4 zero=1", SGD(0.1)),
    ("qwen3-moe", 4, "cp=2 ep=2 tp=2 sp", AdamW(0.01)), ("deepseek-v2", 8, "pp=2 1f1b:2 dp=2 ep=2 zero=2", Adam(0.01)),
    ("mixtral", 8, "ep:ep+tp=2 tp=2 sp", Adam(0.01)), ("deepseek", 8, "dp=2 ep:ep+tp=2 tp=2 sp zero=1", AdamW(0.01)),
    ("mixtral", 4, "ep:ep+tp=1 tp=2 sp", SGD(0.1)), ("gpt-oss", 8, "pp=2 1f1b:2 ep:ep+tp=2 tp=2 sp", Adam(0.01)),
    ("qwen3-moe", 4, "cp=2 ep:ep+cp=2", AdamW(0.01)), ("deepseek", 4, "cp=2 ep:ep+cp=1 dp=2 zero=1", SGD(0.1, 0.5)),
    ("capacity", 8, "cp=2 ep:ep+cp+tp=1 tp=2 sp dp=2 zero=2", Adam(0.01)), ("mixtral", 8, "ring=2 ep:ep+cp=2", SGD(0.1)),
    ("capacity", 8, "ep:ep+tp=2 tp=2 dp=2", SGD(0.1)), ("llama4", 8, "ep:ep+tp=2 tp=2 sp dp=2 zero=3", SGD(0.1, 0.5)),
    ("llama4", 8, "dp=2 ep=2 tp=2 sp zero=3", SGD(0.1, 0.5)), ("llama4", 8, "pp=2 gpipe:2 ep=4", Adam(0.01)),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(48)
@pytest.mark.parametrize(("model", "rows", "text", "rule", "backend"), in_turn(CASES),
                         ids=[f"{model}-{text}" for model, _, text, _ in CASES])
def test_experts_train_as_alone_and_are_simulated_as_they_run(cluster_of, model, rows, text, rule, backend):
    assert_model_trains(cluster_of, model, rows, text, rule, backend)


@st.composite
def compositions(draw):
    """A strategy with experts on at most 8 devices, and a number of rows that its microbatches divide."""
    pp, dp, cp, ep, tp = draw(st.sampled_from(
        [(1, 1, 1, 2, 1), (1, 2, 1, 2, 1), (1, 1, 1, 4, 1), (1, 2, 1, 4, 1), (1, 1, 2, 2, 1), (1, 1, 1, 2, 2),
         (1, 2, 1, 2, 2), (2, 1, 1, 2, 1), (2, 2, 1, 2, 1), (2, 1, 2, 2, 1), (2, 1, 1, 2, 2), (2, 1, 1, 4, 1),
         (1, 1, 2, 2, 2), (1, 4, 1, 2, 1)]))
    microbatches = draw(st.integers(1, 3)) if pp > 1 else 1
    words = [f"{name}={size}" for name, size in (("dp", dp), ("cp", cp), ("ep", ep), ("tp", tp)) if size > 1]
    if pp > 1:
        words.append(f"pp={pp} {draw(st.sampled_from(['1f1b', 'gpipe', 'zero_bubble_h1']))}:{microbatches}")
    words += draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]] if dp > 1 else [[], ["zero:ep=1"]]))
    words += ["sp"] * (tp > 1 and draw(st.booleans())) + ["recompute=block.*"] * draw(st.booleans())
    return " ".join(words), microbatches * dp * ep * draw(st.integers(1, 2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["mixtral", "capacity", "deepseek", *ROUTED]), compositions(),
       st.sampled_from([SGD(0.1), SGD(0.1, 0.5), Adam(0.01), AdamW(0.01)]), st.sampled_from([None, 0.3]))
def test_hundreds_of_compositions_with_experts_train_as_alone(cluster_of, model, text, rule, clip):
    words, rows = text
    assert_model_trains(cluster_of, model, rows, words, rule, clip=clip)
