"""Steps cut into pipelines, on real devices: they train as the step alone, and a simulation says what they do."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_runs import ON, B, assert_trains, in_turn, simulated
from transformed import MODELS, model_step

from parallelism import ir
from parallelism.transforms import SGD, Adam, AdamW, Strategy, first_state, following, train_step

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "60"))
CASES = [
    ("mlp", 7, "pp=3 gpipe:2 dp=2 zero=2", AdamW(0.01)), ("gpt", 7, "pp=2 1f1b:3 dp=2 tp=2 sp zero=1", Adam(0.01)),
    ("llama", 8, "pp=2 zero_bubble_h1:4 dp=2 tp=2", SGD(0.1, 0.5)), ("convolutional", 6, "pp=2 1f1b:2 tp=3", SGD(0.1)),
    ("mlp", 8, "pp=2 interleaved_1f1b:4x2 dp=2 zero=1", Adam(0.01)),
    ("mixture", 8, "pp=2 1f1b:2 dp=2 zero=1", SGD(0.1, 0.5)), ("residual", 9, "pp=4 1f1b:3 dp=2", Adam(0.01)),
    ("recurrent", 9, "pp=2 zero_bubble_v:4x2 dp=2 zero=2", SGD(0.1, 0.5)),
    ("factored", 8, "pp=2 1f1b:4 tp=2", SGD(0.1)), ("dropout", 5, "pp=1 1f1b:2 dp=2 tp=2 zero=1", SGD(0.1)),
    ("llama", 6, "pp=2 1f1b:3 tp=2 sp recompute=block.*", SGD(0.1, 0.5)),
    ("mlp", 4, "pp=2 1f1b:2 dp=1 zero=1", Adam(0.01)),
    ("dropout", 6, "pp=2 zero_bubble_h1:2 dp=2 tp=2 recompute=block.*.attention,head", SGD(0.1)),
    ("plain_gpt", 6, "pp=2 1f1b:2 dp=3 zero=1", Adam(0.01)), ("gpt", 7, "pp=2 1f1b:2 dp=2 zero=3", Adam(0.01)),
    ("mlp", 9, "pp=2 zero_bubble_h1:2 dp:node=2 dp=2 zero=3", AdamW(0.01)),
    ("mlp", 9, "pp=2 1f1b:2 hsdp=2x2 zero:replica=1", AdamW(0.01)),
    ("mixture", 8, "pp=2 gpipe:2 dp:data=2 ep=2", SGD(0.1, 0.5)),
    ("mlp", 2, "pp=2 1f1b:1 tp=2 dp=1 zero=1", SGD(0.1)), ("llama", 6, "pp=2 1f1b:2 cp=2 zero:cp=2", Adam(0.01)),
    ("mlp", 5, "pp=2 1f1b:2 dp=2 zero=1", Adam(0.01)), ("mlp", 7, "pp=2 gpipe:2 dp=2", SGD(0.1)),
    ("fused", 6, "pp=2 1f1b:3 dp=2 tp=2 sp zero=1", SGD(0.1, 0.5)),
    ("gpt", 8, "pp=2 1f1b:2 dp=2 cp=2 zero=1", Adam(0.01)), ("llama", 8, "pp=2 1f1b:2 dp=2 cp=2 zero=1 overlap", Adam()),
    ("gpt", 4, "pp=2 zero_bubble_h1:2 cp=2 tp=2 sp", SGD(0.1)), ("llama", 4, "pp=1 1f1b:2 dp=2 cp=2 zero=3", Adam(0.01)),
    ("viewed", 7, "pp=2 1f1b:3 dp=2 tp=2 sp zero=1", Adam(0.01)), ("viewed", 6, "pp=2 zero_bubble_h1:2 tp=3", SGD(0.1)),
]
CLIPS = (0.2, None)
"""The largest norm of all gradients in the cases, in turn."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("gradients", "total"), [("f32", 257), ("bf16", 256)])
@pytest.mark.parametrize("text", ["pp=1 1f1b:2", "dp=2", "pp=1 1f1b:1 dp=2", "pp=1 1f1b:1 dp=2 zero=3"])
def test_microbatches_and_replicas_are_summed_in_the_dtype_of_the_gradients(cluster_of, text, gradients, total):
    # The gradient of w is the sum of the rows: 256 and 1, whose sum has one bit more than bfloat16.
    strategy, mesh = Strategy.parse_on_mesh(f"{text} precision=bf16,{gradients}")
    loss = ir.record(lambda p, x: np.sum(x @ p["w"]), {"w": ir.TensorType("f32", (2, 1))},
                     ir.TensorType("f32", (B if "pp" in text else 2, 2)))
    step = strategy(train_step(loss, SGD(1.0)))
    given = first_state(step, {"p.w": np.zeros((2, 1))}) | {"x": np.array([[256, 256], [1, 1]], "f4")}
    run = cluster_of(mesh, "thread").run(step, given)
    assert following(step, run.result)["main.p.w"].tolist() == [[-total]] * 2


def check(cluster_of, model, rows, text, rule, clip, backend="thread"):
    """Two steps in a pipeline are those of the step alone, and a simulation is the run, folded or not."""
    alone = model_step(model, rows, rule, clip=clip)
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(model_step(model, B, rule, clip=clip))
    trace = assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows)
    assert simulated(step, mesh, rows, fold=True).makespan_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "text", "rule", "clip", "backend"),
    in_turn((*case, CLIPS[i // 2 % 2]) for i, case in enumerate(CASES)),
    ids=[f"{m}-{t}" for m, _, t, _ in CASES])
def test_a_pipelined_step_trains_and_is_simulated_as_it_runs(cluster_of, model, rows, text, rule, clip, backend):
    check(cluster_of, model, rows, text, rule, clip, backend)


@st.composite
def texts(draw):
    """The text of a strategy with a pipeline on at most 8 devices, and the number of its microbatches and replicas."""
    stages, data, tensor = draw(st.sampled_from(
        [(2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 3, 1), (3, 2, 1), (1, 2, 2), (4, 2, 1), (2, 4, 1), (2, 1, 1), (4, 1, 2)]))
    microbatches = draw(st.integers(1, 3))
    node = data == 4 and draw(st.booleans())
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble_h1"]))
    words = [f"pp={stages} {schedule}:{microbatches}", f"tp={tensor}", "dp:node=2 dp=2" if node else f"dp={data}"]
    words += draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]]))
    words += ["recompute=*"] * draw(st.booleans()) + ["sp"] * draw(st.booleans())
    return " ".join(words), data * microbatches


def check_composition(cluster_of, model, more, text, rule, clip):
    words, parts = text
    if not MODELS[model](1).regions:
        words = words.replace("recompute=*", "")
    if model in ("factored", "mixture", "residual"):      # have nothing for sequence parallelism in a pipeline
        words = words.replace(" sp", "")
    check(cluster_of, model, parts + more, words, rule, clip)


COMPOSITIONS = (st.sampled_from([*MODELS]), st.integers(0, 3), texts(),
                st.sampled_from([SGD(0.1), SGD(0.1, 0.5), Adam(0.01), AdamW(0.01)]), st.sampled_from([None, 0.3]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*COMPOSITIONS)
def test_hundreds_of_compositions_with_a_pipeline_train_as_the_step_alone(cluster_of, model, more, text, rule, clip):
    check_composition(cluster_of, model, more, text, rule, clip)
