"""Transformers with the fields of today's dense models: a step trains as the step alone, and a simulation is the run."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_runs import assert_model_trains, in_turn
from transformed import DENSE

from parallelism.transforms import SGD, Adam, AdamW

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "300"))

CASES = [
    ("gemma", 4, "dp=2 tp=2 sp zero=1", Adam(0.01)), ("gemma", 4, "pp=2 1f1b:2 tp=2 sp", SGD(0.1)),
    ("qwen", 3, "tp=2 cp=2 sp", Adam(0.01)), ("sinks", 4, "dp=2 tp=2 zero=3", AdamW(0.01)),
    ("sinks", 4, "pp=2 1f1b:2 cp=2 recompute=block.*.attention.core", SGD(0.1)), ("olmo", 3, "tp=4 sp", Adam(0.01)),
    ("olmo", 5, "dp=2 tp=2 cp=2", SGD(0.1)), ("bloom", 4, "dp=2 tp=3", SGD(0.1)), ("bloom", 2, "cp=3 tp=2 sp", SGD(0.1)),
    ("mpt", 6, "dp=3 zero=2 fused", Adam(0.01)), ("phi", 4, "tp=2 dp=2 sp zero=1", Adam(0.01)),
    ("neox", 3, "tp=3 sp", SGD(0.1)), ("granite", 5, "dp=2 tp=4 zero=2", AdamW(0.01)),
    ("nemotron", 4, "pp=2 1f1b:2 dp=2 tp=2 sp zero=1", Adam(0.01)), ("nemotron", 2, "cp=2 tp=2", SGD(0.1)),
    ("copied", 4, "tp=4 sp", Adam(0.01)), ("copied", 4, "pp=2 1f1b:2 tp=4 sp", AdamW(0.01)),
    ("copied", 4, "dp=2 tp=4 zero=3", SGD(0.1)), ("copied", 3, "cp=2 tp=4", Adam(0.01)), ("one key", 4, "tp=3 sp", SGD(0.1)),
    ("one key", 4, "tp=6 recompute=block.*", Adam(0.01)),
    ("gemma", 3, "cp=2 tp=2 sp recompute=block.*", Adam(0.01)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows", "text", "rule", "backend"), in_turn(CASES),
                         ids=[f"{model}-{text}" for model, _, text, _ in CASES])
def test_dense_fields_train_as_alone_and_are_simulated_as_they_run(cluster_of, model, rows, text, rule, backend):
    assert_model_trains(cluster_of, model, rows, text, rule, backend)


@st.composite
def compositions(draw):
    """A model, a strategy on at most 8 devices, and a number of rows that its microbatches divide."""
    model = draw(st.sampled_from([*DENSE]))
    stages = DENSE[model].get("layers", 1)
    pp, dp, cp, tp = draw(st.sampled_from([sizes for sizes in [
        (1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 1), (1, 1, 1, 3), (1, 1, 1, 4),
        (1, 2, 2, 2), (1, 1, 1, 8), (1, 4, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2),
        (2, 1, 1, 4)] if sizes[0] <= stages]))
    microbatches = draw(st.integers(1, 3)) if pp > 1 else 1
    words = [f"{name}={size}" for name, size in (("dp", dp), ("cp", cp), ("tp", tp)) if size > 1]
    if pp > 1:
        words.append(f"pp={pp} {draw(st.sampled_from(['1f1b', 'gpipe', 'zero_bubble_h1']))}:{microbatches}")
    words += draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]] if dp > 1 else [[]]))
    words += ["sp"] * (tp > 1 and draw(st.booleans()))
    words += draw(st.sampled_from([[], ["recompute=block.*"], ["recompute=block.*.attention.core"]]))
    return model, " ".join(words), microbatches * dp * draw(st.integers(1, 2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(compositions(), st.sampled_from([SGD(0.1), SGD(0.1, 0.5), Adam(0.01), AdamW(0.01)]), st.sampled_from([None, 0.3]))
def test_hundreds_of_compositions_of_dense_fields_train_as_alone(cluster_of, composition, rule, clip):
    model, words, rows = composition
    assert_model_trains(cluster_of, model, rows, words, rule, clip=clip)
