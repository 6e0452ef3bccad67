"""Overlapped steps on devices: every result has the same bits, and a simulation says what they do."""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from overlapped import bits, check, check_step, moved
from simulated_runs import assert_simulated
from trained_runs import ON, B, in_turn, simulated, trained_on
from transformed import MODELS, model_step
from viewed import Viewed

from parallelism import Hardware
from parallelism.transforms import SGD, Adam, AdamW, Overlap, Strategy, train_step

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "60")) // 5
CASES = [
    ("mlp", 7, "dp=3 tp=2 zero=2", Overlap(100)), ("gpt", 5, "dp=2 tp=2 sp zero=1", Overlap(500)),
    ("llama", 4, "dp=2 tp=4 zero=3", Overlap(1)), ("recurrent", 6, "dp:outer=2 dp=3 zero=1", Overlap(64)),
    ("mixture", 6, "dp=4 ep=2 zero=2", Overlap()), ("plain_gpt", 8, "dp=8 zero=3", Overlap(1000, 0)),
    ("dropout", 4, "dp=2 tp=2 sp cp=2 recompute=block.*", Overlap(ahead=3)),
    ("residual", 8, "dp=2 tp=2 sp zero=3", Overlap(200, 2)),
    ("residual", 5, "dp=2 zero=3", Overlap(200, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "text", "overlap", "backend"), [*in_turn(CASES[:-1]), (*CASES[-1], "process")],
    ids=[f"{m}-{t}" for m, _, t, _ in CASES])
def test_overlap_changes_no_bit_and_no_byte(cluster_of, model, rows, text, overlap, backend):
    mesh = Strategy.parse_on_mesh(text)[1]
    _, after = check(
        cluster_of(mesh, backend, compute="modelled", **ON), model, rows, text, overlap, AdamW(0.01), 1.0)
    assert any(event.kind == "wait" and event.name == "all_reduce" for event in after)


PIPELINES = [
    ("mlp", 7, "pp=3 gpipe:2 dp=2 zero=2", AdamW(0.01)), ("gpt", 7, "pp=2 1f1b:3 dp=2 tp=2 sp zero=1", Adam(0.01)),
    ("llama", 8, "pp=2 zero_bubble_h1:4 dp=2 tp=2", SGD(0.1, 0.5)), ("plain_gpt", 6, "pp=2 1f1b:2 dp=3 zero=1", SGD(1)),
    ("mlp", 8, "pp=2 interleaved_1f1b:4x2 dp=2 zero=1", Adam(0.01)), ("residual", 9, "pp=4 1f1b:3 dp=2", Adam(0.01)),
    ("dropout", 6, "pp=2 zero_bubble_h1:2 dp=2 tp=2 recompute=block.*.attention,head", SGD(0.1)),
    ("recurrent", 9, "pp=2 zero_bubble_v:4x2 dp=2 zero=2", SGD(0.1, 0.5)),
    ("convolutional", 17, "pp=2 zero_bubble_v:4x2 dp:node=2 dp=2 zero=2", SGD(0.1)),
    ("llama", 8, "pp=1 1f1b:2 dp=2 zero=3 recompute=block.*", Adam(0.01)),
    ("gpt", 7, "pp=1 1f1b:3 dp:node=2 dp=2 zero=3", AdamW(0.01)),
    ("dropout", 5, "pp=1 1f1b:2 dp=2 tp=2 zero=1", SGD(0.1)), ("llama", 4, "pp=1 1f1b:2 dp=2 tp=2 sp zero=3", SGD(0.1)),
    ("mlp", 5, "pp=2 gpipe:2 dp=2 zero=2", Adam(0.01)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "text", "rule", "backend"), in_turn(PIPELINES), ids=[f"{m}-{t}" for m, _, t, _ in PIPELINES])
def test_the_last_backward_of_a_stage_sums_over_replicas(cluster_of, model, rows, text, rule, backend):
    mesh = Strategy.parse_on_mesh(text)[1]
    steps = 1 if model == "mlp" else 2
    _, after = check(
        cluster_of(mesh, backend, compute="modelled", **ON), model, rows, text, Overlap(64), rule, steps=steps)
    backwards = {}
    for event in after:
        if event.kind == "compute" and event.phase in ("B", "W"):
            backwards[event.rank] = max(backwards.get(event.rank, 0), event.start_seconds)
    assert any(event.kind == "collective" and event.axes == ("dp",) and event.start_seconds < backwards[event.rank]
               for event in after)


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("model", "rows", "text"), [
    ("gpt", 2, "pp=1 1f1b:1 tp=2 sp"), pytest.param("gpt", 8, "pp=2 1f1b:2 tp=2 sp", marks=pytest.mark.slow),
    pytest.param("dropout", 4, "tp=2 sp cp=2", marks=pytest.mark.slow),
    pytest.param("gpt", 8, "pp=1 1f1b:2 dp=2 tp=2 sp zero=1 recompute=block.*", marks=pytest.mark.slow)])
def test_a_stack_that_runs_collectives_beside_products_changes_no_bit_and_no_byte(cluster_of, model, rows, text):
    strategy, mesh = Strategy.parse_on_mesh(text)
    rule = SGD(0.1) if rows == 2 else Adam(0.1)
    alone, on = model_step(model, rows, rule), {**ON, "hardware": Hardware.preset("dgx-a100:1")}
    stack = {**on, "hardware": Hardware.preset("dgx-a100:1+megatron-a100")}
    step = strategy(model_step(model, B, rule) if "pp=" in text else alone)
    plain, before = trained_on(cluster_of(mesh, "thread", compute="modelled", **on), step, alone, steps=1)
    beside, after = trained_on(cluster_of(mesh, "thread", compute="modelled", **stack), step, alone, steps=1)
    assert bits(beside) == bits(plain) and moved(after) == moved(before)
    ways = {"all_gather", "reduce_scatter"}
    assert {event.name for event in after if event.kind == "wait"} >= ways
    assert not ways & {event.name for event in before if event.kind == "wait"}
    assert_simulated(simulated(step, mesh, rows, stack), after)
    folded = simulated(step, mesh, rows, stack, fold=True)
    assert folded.makespan_seconds == pytest.approx(after.makespan_seconds, rel=1e-9)


@st.composite
def texts(draw):
    """The text of a strategy on at most 8 devices, without overlap."""
    dp, tp = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (2, 4), (1, 3), (5, 1), (8, 1), (1, 1)]))
    words = [f"dp={dp}", f"tp={tp}"] + ["sp"] * draw(st.booleans())
    return " ".join(words + draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]])))


SCHEDULES = ["1f1b:3", "gpipe:2", "zero_bubble_h1:4", "interleaved_1f1b:4x2", "zero_bubble_v:4x2", "1f1b:1"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", "process"])
@settings(max_examples=MANY)
@given(
    model=st.sampled_from(["gpt", "mlp", "llama", "mixture", "residual", "recurrent", "dropout", "plain_gpt"]),
    rows=st.integers(8, 13), schedule=st.sampled_from(SCHEDULES), dp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]), sp=st.booleans(), zero=st.sampled_from(["", "zero=1", "zero=2 fused", "zero=3"]),
    clip=st.sampled_from([None, 1.0]), rule=st.sampled_from([SGD(0.1), SGD(0.1, 0.5), Adam(0.01)]), overlap=st.builds(
        Overlap, st.sampled_from([1, 100, 300, 1000, 10**9]), st.integers(0, 2)))
def test_any_overlapped_pipeline_changes_no_bit_and_no_byte(
        cluster_of, backend, model, rows, schedule, dp, tp, sp, zero, clip, rule, overlap):
    text = f"pp=2 {schedule} dp={dp} {zero} tp={tp} {'sp' if sp else ''}"
    mesh = Strategy.parse_on_mesh(text)[1]
    check(cluster_of(mesh, backend, compute="modelled", **ON), model, rows, text, overlap, rule, clip)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", "process"])
@settings(max_examples=MANY)
@given(
    model=st.sampled_from(sorted({*MODELS} - {"factored"})), rows=st.integers(2, 9), text=texts(), rule=st.sampled_from(
        [SGD(0.1), SGD(0.1, 0.5), Adam(0.01)]), clip=st.sampled_from([None, 1.0]),
    overlap=st.builds(Overlap, st.sampled_from([1, 100, 300, 1000, 10**9]), st.integers(0, 3)))
def test_any_overlapped_composition_changes_no_bit_and_no_byte(
        cluster_of, backend, model, rows, text, rule, clip, overlap):
    mesh = Strategy.parse_on_mesh(text)[1]
    check(cluster_of(mesh, backend, compute="modelled", **ON), model, rows, text, overlap, rule, clip)


ZEROS = ["", "zero=1", "zero=2", "zero=3", "zero=3 fused"]
SMALL = [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2)]
SEEDS = int(os.environ.get("VCLUSTER_VIEWS", "100"))


# A weight behind a reshape stays whole on each device, and a warning says so. Such weights are the subject here.
@pytest.mark.filterwarnings("ignore::parallelism.transforms.tensor.WholeWeights")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_weights_and_activations_that_are_views_change_no_bit_under_overlap(cluster_of, seed):
    rng, model = Random(seed), Viewed(seed)
    pp, (dp, tp) = rng.choice(["", "pp=1 1f1b:1 ", "pp=1 1f1b:2 ", "pp=2 1f1b:2 "]), rng.choice(SMALL)
    rows = B if pp else 12
    sizes = f"dp={dp} tp={tp}" if model.splits(tp, rows) else f"dp={dp}"
    text, rule = f"{pp}{sizes} {rng.choice(ZEROS)}", rng.choice([SGD(0.1), Adam(0.01)])
    overlap = Overlap(rng.choice([1, 100, 1000, 10**9]), rng.randint(0, 3))
    alone, program = train_step(model.loss(12), rule), train_step(model.loss(rows), rule)
    mesh = Strategy.parse_on_mesh(text)[1]
    check_step(cluster_of(mesh, "thread", compute="modelled", **ON), alone, program, 12, text, overlap, steps=1)
