"""Overlapped steps on devices: every result has the same bits, and a simulation says what they do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from simulated_runs import assert_simulated
from transformed import MODELS, trained

from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, AdamW, Overlap, Strategy, train_step

ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}
CASES = [
    ("gpt", 5, "dp=2 tp=2 sp zero=1", Overlap(500)), ("mlp", 7, "dp=3 tp=2 zero=2", Overlap(100)),
    ("residual", 8, "dp=2 tp=2 sp zero=3", Overlap(200, 2)), ("llama", 4, "dp=2 tp=4 zero=3", Overlap(1)),
    ("mixture", 6, "dp=4 ep=2 zero=2", Overlap()), ("plain_gpt", 8, "dp=8 zero=3", Overlap(1000, 0)),
    ("dropout", 4, "dp=2 tp=2 sp cp=2 recompute=block.*", Overlap(ahead=3)), ("recurrent", 6, "dp:outer=2 dp=3 zero=1",
                                                                             Overlap(64)),
]


def run(cluster, step):
    """What two steps give, and the trace of the second."""
    traces = []

    def once(inputs):
        done = cluster.run(step, inputs)
        traces.append(done.trace)
        return done.result

    return trained(step, once, steps=2), traces[-1]


def bits(results):
    losses, state = results
    return [np.asarray(x).tobytes() for x in losses], {name: np.asarray(x).tobytes() for name, x in state.items()}


def moved(trace):
    """Bytes by kind and axes of all collectives."""
    found = Counter()
    for event in trace:
        if event.kind == "collective":
            found[event.name, event.axes] += event.bytes_received
    return found


def check(cluster_of, backend, text, overlap, alone):
    strategy, mesh = Strategy.parse_on_mesh(text)
    cluster = cluster_of(mesh, backend, compute="modelled", **ON)
    plain, before = run(cluster, strategy(alone))
    step = Strategy(strategy, overlap)(alone)
    overlapped, after = run(cluster, step)
    assert bits(overlapped) == bits(plain)
    assert moved(after) == moved(before)
    assert_simulated(simulate(step, mesh=mesh, **ON), after)
    folded = simulate(step, mesh=mesh, fold=True, **ON)
    assert folded.makespan_seconds == pytest.approx(after.makespan_seconds, rel=1e-9)
    return before, after


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize(("model", "rows", "text", "overlap"), CASES, ids=[f"{m}-{t}" for m, _, t, _ in CASES])
def test_overlap_changes_no_bit_and_no_byte(cluster_of, model, rows, text, overlap, backend):
    before, after = check(cluster_of, backend, text, overlap, train_step(MODELS[model](rows), AdamW(0.01), clip=1.0))
    assert after.makespan_seconds < before.makespan_seconds


@st.composite
def texts(draw):
    """The text of a strategy on at most 8 devices, without overlap."""
    dp, tp = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (2, 4), (1, 3), (5, 1), (8, 1), (1, 1)]))
    words = [f"dp={dp}", f"tp={tp}"] + ["sp"] * draw(st.booleans())
    return " ".join(words + draw(st.sampled_from([[], ["zero=1"], ["zero=2"], ["zero=3"]])))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", "process"])
@up_to(60)
@given(
    model=st.sampled_from(sorted({*MODELS} - {"factored"})), rows=st.integers(2, 9), text=texts(), rule=st.sampled_from(
        [SGD(0.1), SGD(0.1, 0.5), Adam(0.01)]), clip=st.sampled_from([None, 1.0]),
    overlap=st.builds(Overlap, st.sampled_from([1, 100, 300, 1000, 10**9]), st.integers(0, 3)))
def test_any_overlapped_composition_changes_no_bit_and_no_byte(
        cluster_of, backend, model, rows, text, rule, clip, overlap):
    check(cluster_of, backend, text, overlap, train_step(MODELS[model](rows), rule, clip=clip))
