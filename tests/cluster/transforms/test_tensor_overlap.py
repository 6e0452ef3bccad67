"""Steps whose collectives over tp run in chunks beside their products: every bit, every byte, and the simulation of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from overlapped import assert_moved_as, bits, check_step, in_pipeline, moved
from simulated_runs import assert_simulated
from trained_runs import ON, B, in_turn, simulated, trained_on

from parallelism import Hardware, models
from parallelism.transforms import SGD, Adam, Overlap, Strategy, TensorOverlap, train_step

PLAIN = {"layers": 1, "width": 16, "heads": 4, "vocabulary": 28, "sequence": 16, "feed_forward": 24, "dtype": np.float64}
GATED = {**PLAIN, "activation": "swiglu", "norm": "rms", "positions": "rotary", "biases": False, "tied": False,
         "key_value_heads": 4, "feed_forward": 24}


def programs(spec, rows, text, rule):
    """The step with so many rows, and what the strategy is applied to."""
    alone = train_step(spec.function(rows), rule)
    return alone, train_step(spec.function(B), rule) if in_pipeline(text) else alone


def calls(trace):
    return Counter(event.name for event in trace if event.kind == "collective" and event.axes == ("tp",))


CASES = [
    (PLAIN, 4, "dp=2 tp=2 sp zero=1", Overlap(100)), (GATED, 4, "pp=1 1f1b:2 tp=4 sp", None),
    ({**PLAIN, "layers": 2}, 6, "pp=2 1f1b:3 tp=2 sp recompute=block.*.attention.core", None),
    (GATED, 8, "pp=1 1f1b:2 dp=2 tp=2 sp zero=1", Overlap(64)),
    ({**GATED, "layers": 2}, 4, "pp=2 zero_bubble_h1:2 tp=2 sp", None),
    (GATED, 4, "tp=2 sp cp=2 recompute=block.*", Overlap()), (PLAIN, 4, "dp=2 tp=2 sp zero=3", Overlap(200)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "rows", "text", "overlap", "backend"), in_turn(CASES), ids=[text for _, _, text, _ in CASES])
def test_chunks_change_no_bit_and_no_byte(cluster_of, spec, rows, text, overlap, backend):
    alone, program = programs(models.TransformerSpec(**spec), rows, text, Adam(0.01))
    mesh = Strategy.parse_on_mesh(text)[1]
    cut = TensorOverlap() if overlap is None else Strategy(overlap, TensorOverlap())
    before, after = check_step(cluster_of(mesh, backend, compute="modelled", **ON), alone, program, rows, text, cut)
    assert calls(after)["reduce_scatter"] > calls(before)["reduce_scatter"]


@pytest.mark.parametrize(("spec", "rows", "text"), [
    pytest.param(PLAIN, 2, "pp=1 1f1b:1 tp=2 sp", marks=pytest.mark.slow),
    pytest.param(GATED, 4, "pp=1 1f1b:2 tp=4 sp", marks=pytest.mark.slow),
    pytest.param({**GATED, "layers": 2}, 4, "pp=2 1f1b:2 tp=2 sp", marks=pytest.mark.slow),
    pytest.param({**GATED, "dtype": np.float32, "width": 64, "feed_forward": 128}, 4,
                 "pp=1 1f1b:1 tp=2 sp precision=bf16,products:f8", marks=pytest.mark.slow)])
def test_chunks_run_beside_products_on_a_stack_that_does_so(cluster_of, spec, rows, text):
    alone, program = programs(models.TransformerSpec(**spec), rows, text, SGD(0.1))
    strategy, mesh = Strategy.parse_on_mesh(text)
    stack = {"hardware": Hardware.preset("dgx-h100:1+megatron-core-h100"), "priced_dtype": "bfloat16"}
    cluster = cluster_of(mesh, "thread", compute="modelled", **stack)
    plain, before = trained_on(cluster, strategy(program), alone, steps=1)
    step = Strategy(strategy, TensorOverlap())(program)
    chunked, after = trained_on(cluster, step, alone, steps=1)
    assert bits(chunked) == bits(plain)
    assert_moved_as(before, after)
    assert moved(after)["reduce_scatter", ("tp",)] == moved(before)["reduce_scatter", ("tp",)]
    assert_simulated(simulated(step, mesh, rows, stack), after)
    folded = simulated(step, mesh, rows, stack, fold=True)
    assert folded.makespan_seconds == pytest.approx(after.makespan_seconds, rel=1e-9)
    assert has_product_beside(after, "all_gather") and has_product_beside(after, "reduce_scatter")


def has_product_beside(trace, kind):
    """Whether two collectives of a kind follow each other, and the first one goes on while a product of the forward runs."""
    own = [event for event in trace if event.rank == 0]
    forward = [event for event in own if event.phase == "F" and event.name in ("matmul", "scaled_einsum")]
    started = [event for event in own if event.kind == "collective" and event.name == kind]
    return any(
        one.start_seconds <= product.start_seconds < one.start_seconds + one.duration_seconds
        for one, _ in pairwise(started) for product in forward)
