"""Pipelines whose stages have any numbers of layers, one beside the other on a rank, train as one device does."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_runs import ON, B, assert_trains
from transformed import transformer

from parallelism.mesh import Mesh
from parallelism.training import MegatronFlags
from parallelism.training.stage_layers import begins_of, counts_of, layout_counts, layout_text
from parallelism.transforms import SGD, DataParallel, Pipeline, Strategy, TensorParallel, Zero, train_step

MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "60"))


@dataclass(frozen=True)
class Case:
    """Layers of stages on ``ranks``, and what is beside the pipeline."""

    counts: tuple[int, ...]
    ranks: int
    schedule: str
    rounds: int
    beside: str
    tied: bool

    @property
    def microbatches(self) -> int:
        return self.rounds * self.ranks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, chunks = draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2)]))
    inner = draw(st.lists(st.integers(1, 3), min_size=ranks * chunks - 2, max_size=ranks * chunks - 2))
    ends = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    counts = (ends[0], *inner, ends[1] if inner or ends[0] else ends[1] + 1)
    schedule = "1f1b" if chunks == 1 else draw(st.sampled_from(["interleaved_1f1b", "looped_bfs"]))
    return Case(counts, ranks, schedule, draw(st.integers(1, 2)), draw(st.sampled_from(["", "dp", "tp", "zero"])),
                draw(st.booleans()))


def check(cluster_of, case: Case, backend: str) -> None:
    spec = transformer(layers=sum(case.counts), tied=case.tied)
    beside = {"": [], "dp": [DataParallel()], "tp": [TensorParallel()], "zero": [DataParallel(), Zero(1)]}[case.beside]
    axis = {"": {}, "tp": {"tp": 2}}.get(case.beside, {"dp": 2})
    pipeline = Pipeline("pp", case.microbatches, case.schedule, len(case.counts) // case.ranks, begins_of(case.counts))
    assert counts_of(pipeline.begin, spec.layers) == case.counts == layout_counts(layout_text(case.counts), spec.layers)
    rows = case.microbatches * axis.get("dp", 1)
    step = Strategy(*beside, pipeline)(train_step(spec.function(B), SGD(0.1)))
    alone = train_step(spec.function(rows), SGD(0.1))
    mesh = Mesh(pp=case.ranks, **axis)
    assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows)


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case((2, 1, 3, 1), 2, "interleaved_1f1b", 2, "dp", True),
    Case((0, 1, 2, 1, 1, 0), 3, "interleaved_1f1b", 1, "zero", False),
    Case((3, 1), 2, "1f1b", 2, "tp", False),
], ids=str)
def test_uneven_stages_train_on_processes(cluster_of, case: Case) -> None:
    check(cluster_of, case, "process")


@pytest.mark.slow
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_random_stages_train_as_one_device(cluster_of, case: Case) -> None:
    check(cluster_of, case, "thread")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(["thread", "process"]))
def test_many_random_stages_train_as_one_device(cluster_of, case: Case, backend: str) -> None:
    check(cluster_of, case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    {"num_virtual_stages_per_pipeline_rank": 2}, {"pipeline_model_parallel_layout": "E|t|t*2|tttL"},
    {"decoder_first_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
     "num_layers_per_virtual_pipeline_stage": 2},
], ids=lambda flags: next(iter(flags)))
def test_a_run_by_flags_of_uneven_stages_is_executed_as_simulated(cluster_of, flags: dict[str, object]) -> None:
    spec = transformer(layers=6, tied=False, vocabulary=128)
    run = MegatronFlags(pipeline_model_parallel_size=2, global_batch_size=4, fp32=True, **flags).run(2, spec)  # type: ignore[arg-type]
    step = Strategy(*run.strategy.transforms)(train_step(spec.function(B), SGD(0.1)))
    cluster = cluster_of(run.mesh, "thread", compute="modelled", **ON)
    assert_trains(cluster, step, train_step(spec.function(4), SGD(0.1)), 4)
    assert MegatronFlags.of(run).run(2, spec) == run  # type: ignore[union-attr]
