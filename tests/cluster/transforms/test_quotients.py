"""Losses that are quotients of sums over rows, as means over the targets that count, train in pipelines as on one device."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_runs import B, assert_model_trains, in_turn

from parallelism import Pipeline, PipelinedProgram, ir
from parallelism.layouts import partition
from parallelism.mesh import Mesh
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, Strategy, train_step

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "60"))
CASES = [
    ("padded", 7, "pp=2 1f1b:3"), ("weighted", 7, "pp=2 1f1b:3 dp=2"), ("padded", 5, "pp=1 1f1b:4"),
    ("weighted", 9, "pp=2 zero_bubble_h1:4 dp=2 zero=1"), ("padded", 8, "pp=2 1f1b:2 dp=2 zero=2"),
    ("weighted", 7, "pp=2 gpipe:2 tp=2 dp=2 zero=3"), ("padded", 6, "pp=2 1f1b:2 tp=2 sp"),
    ("weighted", 7, "pp=2 1f1b:3 tp=3 dp=2 zero=1"), ("padded", 9, "pp=2 zero_bubble_v:2x2 dp=3 zero=1"),
    ("padded", 6, "pp=2 1f1b:2 cp=2 dp=2"), ("weighted", 6, "pp@block.1=2 1f1b:2 recompute=block.*"),
    ("padded", 6, "dp=3 tp=2 zero=3"), ("weighted", 5, "pp=2 1f1b:2 dp=2 overlap=1KB"), ("padded", 1, "pp=2 1f1b:1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows", "text", "backend"), in_turn(CASES))
def test_a_quotient_is_that_of_the_whole_batch_on_every_split(cluster_of, model, rows, text, backend):
    assert_model_trains(cluster_of, model, rows, text, Adam(0.01), backend, clip=0.2)


@st.composite
def cases(draw):
    ranks, replicas, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = replicas * microbatches + draw(st.integers(0, 5))
    schedules = ["1f1b", "gpipe", *(["zero_bubble_h1"] if ranks > 1 else [])]
    beside = f"dp={replicas}" + draw(st.sampled_from(["", " zero=1", " zero=2", " zero=3"])) if replicas > 1 else ""
    inner = draw(st.sampled_from(["", "tp=2", "tp=3"])) if ranks * replicas < 6 else ""
    return draw(st.sampled_from(["padded", "weighted"])), rows, " ".join(
        f"pp={ranks} {draw(st.sampled_from(schedules))}:{microbatches} {inner} {beside}".split())


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_quotients_in_random_pipelines(cluster_of, case):
    assert_model_trains(cluster_of, *case, SGD(0.1), "thread", clip=0.2)


def masked(divided):
    def loss(p, x, mask):
        with ir.region("one"):
            h = np.tanh(x @ p["a"])
        with ir.region("two"):
            return np.sum(mask * np.sum(h @ p["b"], axis=1)) / divided(mask, h)

    f64 = ir.TensorType
    return train_step(ir.record(loss, {"a": f64("f64", (3, 4)), "b": f64("f64", (4, 2))}, f64("f64", (B, 3)),
                                f64("f64", (B,)), name="masked"), SGD(0.1))


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("dp", "reduced"), [(1, 0), (2, 8)])
def test_the_denominator_is_one_number_that_the_devices_of_the_last_stage_sum_before_the_first_forward(dp, reduced):
    step = Strategy.parse("pp 1f1b:2")(masked(lambda mask, h: np.sum(mask)))
    trace = simulate(step, "dgx-h100", mesh=Mesh(pp=2, dp=dp), batch=5)
    first = {rank: next(e for e in trace if e.rank == rank and e.stage is not None) for rank in range(2 * dp)}
    before = [e for e in trace if e.kind == "collective" and e.start_seconds < first[e.rank].start_seconds]
    assert {(e.rank, e.name, e.axes, e.bytes_received) for e in before} == (
        {(rank, "all_reduce", ("dp",), reduced) for rank in range(dp, 2 * dp)} if reduced else set())
    # The last stage holds the mask for its microbatches, and once more for the sum.
    rows = {1: [5], 2: [3, 2]}[dp]
    held = {e.rank: e.nbytes for e in trace if e.kind == "memory" and e.name == "inputs"}
    assert held == {rank: rows[rank % dp] * 8 * (3 if rank < dp else 2) for rank in range(2 * dp)}


def test_a_denominator_that_depends_on_weights_is_refused_at_its_op():
    with pytest.raises(ValueError, match=r'"divide".*region="two": it cannot be cut into microbatches: it is not linear '
                                         "in a sum over all rows, so microbatches do not add up to the batch: a loss may be "
                                         "such a sum, or that divided by sums of data alone; return any other"):
        Strategy.parse("pp 1f1b:2")(masked(lambda mask, h: np.sum(h))).stages(2)


def test_stages_whose_symbols_get_numbers_know_them_in_their_beginning_too(cluster_of):
    def loss(p, x, weights):
        return np.sum(weights * np.tanh(x @ p["a"])) / np.sum(weights)

    tokens = ir.symbol("S")
    function = ir.record(loss, {"a": ir.TensorType("f64", (3,))}, ir.TensorType("f64", (B, tokens, 3)),
                         ir.TensorType("f64", (B, tokens)), name="loss")
    stages = partition(function, 1, sizes={"S": 4}).specialize(S=4)
    assert stages.beginning.symbols == {"B"}
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape) for shape in ((3,), (5, 4, 3))] + [rng.random((5, 4))]
    program = PipelinedProgram(stages, Pipeline(stages=1, microbatches=2))
    run = cluster_of(Mesh(pp=1, dp=2), "thread").run(program, given)
    np.testing.assert_allclose(run.result.loss, ir.interpret(function, given).outputs[0], rtol=1e-12)
