"""Steps of deep models, from steps of the same models with few layers, against the programs of all layers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism.hardware import Hardware, Software
from parallelism.models import Experts, TransformerSpec
from parallelism.planning.assembled_steps import figures_of_run
from parallelism.simulation import ran_step, simulate
from parallelism.simulation.device_events import FIELDS
from parallelism.simulation.layered_step import LayeredStep
from parallelism.simulation.operations import simulated_operation
from parallelism.training import TrainingRun, few_layers, figures
from parallelism.training.few_layers import WORTH, layered_step
from parallelism.training.stage_layers import begins_of
from parallelism.transforms import SGD, Pipeline, Strategy

SPEC = TransformerSpec(layers=WORTH, width=24, heads=4, vocabulary=56, sequence=8)
GATED = replace(SPEC, norm="rms", activation="swiglu", positions="rotary", biases=False, tied=False, key_value_heads=2)
PLAIN = Software()


@pytest.fixture(autouse=True)
def as_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is told comes in a pickle, as from another process."""
    def side_by_side(works: Sequence[Callable[[], Any]]) -> list[Any]:
        return [pickle.loads(pickle.dumps(work())) for work in works]  # noqa: S301  (made here)

    for module in (few_layers, ran_step):
        monkeypatch.setattr(module, "side_by_side", side_by_side)


def run_of(strategy: str, spec: TransformerSpec = SPEC, batch: int = 32) -> TrainingRun:
    return TrainingRun(spec, batch, *Strategy.parse_on_mesh(strategy))


def assert_as_whole(run: TrainingRun, software: Software = PLAIN) -> None:
    """Every event of every class of devices is that of the whole program, with all its numbers."""
    step = layered_step(run, software)
    assert step is not None
    placed: Any = run.placed
    whole = simulated_operation(run.step, placed["mesh"], placed["batch"], None, software=software).templates()
    mine = step.templates()
    np.testing.assert_array_equal(mine.class_of, whole.class_of)
    for own, other in zip(mine.classes, whole.classes, strict=True):
        assert own.collectives == other.collectives and own.along == other.along
        for name in FIELDS:
            found, wanted = own.columns.values(name), other.columns.values(name)
            assert numbered(found) == numbered(wanted) if name == "work" else found == wanted, name


def numbered(works: Sequence[int | None]) -> list[int | None]:
    """Asynchronous operations by the order in which they are first met."""
    numbers: dict[int, int] = {}
    return [None if work is None else numbers.setdefault(work, len(numbers)) for work in works]


@pytest.mark.takes_seconds
def test_a_step_with_sharded_parameters_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    run = run_of("fsdp=2 overlap=1B pp=1 1f1b:1", replace(SPEC, layers=5, norm_places="after", positions="none"))
    assert_as_whole(replace(run, optimizer=SGD(0.1)))


@pytest.mark.parametrize("few", [1, 2])
def test_one_layer_or_two_tell_no_others(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(few_layers, "FEW", (few, few + 1))
    assert layered_step(run_of("tp=2 pp=1 1f1b:2"), PLAIN) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "spec"), [
    pytest.param("precision=bf16 fsdp=4 recompute=block.* pp=1 1f1b:2", SPEC, id="fsdp"),
    pytest.param("precision=bf16,products:f8 fsdp=4 recompute=block.*.attention.core overlap=1B pp=1 1f1b:3", GATED,
                 id="float8"),
    pytest.param("precision=bf16,products:f8,gathers:f8,history:4 dp=2 zero=1 overlap=1B pp=1 1f1b:2", GATED,
                 id="scales of earlier steps"),
    pytest.param("tp=2 pp=1 1f1b:2", GATED, id="tp"),
    pytest.param("precision=bf16 fsdp=2 tp=2 sp overlap=2KB pp=1 1f1b:3", GATED, id="sp beside fsdp"),
    pytest.param("precision=bf16,bf16 hsdp=2x2 recompute=block.* overlap=1B pp=1 1f1b:1", GATED, id="hsdp"),
    pytest.param("dp=4 zero=1 overlap=1KB pp=1 1f1b:1", SPEC, id="buckets of the last backward"),
    pytest.param("precision=bf16 fsdp=5 overlap=1B pp=1 1f1b:1", SPEC, id="parts of unequal sizes"),
    pytest.param("pp=1 1f1b:2", SPEC, id="one device"),
])
def test_steps_with_few_layers_tell_that_with_all(strategy: str, spec: TransformerSpec) -> None:
    run = run_of(strategy, spec, batch=30 if "fsdp=5" in strategy else 24)
    assert_as_whole(run)
    assert_as_whole(run, Software(fused=True, overlapping=True, gradient_buffers=True))


def in_stages(counts: Sequence[int], spec: TransformerSpec, strategy: str) -> TrainingRun:
    """A run on four positions, with these numbers of layers in its stages."""
    run = run_of(f"{strategy} pp=4 interleaved_1f1b:8x{len(counts) // 4}", replace(spec, layers=sum(counts)), 96)
    *others, pipeline = run.strategy.transforms
    assert isinstance(pipeline, Pipeline)
    return replace(run, strategy=Strategy(*others, replace(pipeline, begin=begins_of(counts))))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "spec"), [
    pytest.param("precision=bf16 dp=2 zero=1 overlap=1KB", SPEC, id="shared weights"),
    pytest.param("precision=bf16 dp=2 tp=2 sp zero=1 overlap=1GB", GATED, id="sp"),
    pytest.param("precision=bf16 dp=3 overlap=10KB recompute=block.*", GATED, id="parts of unequal sizes"),
    pytest.param("tp=2 sp", GATED, id="no replicas"),
    pytest.param("precision=bf16,products:f8 dp=2 zero=1 overlap=1KB", GATED, id="float8"),
    pytest.param("precision=bf16,products:f8,gathers:f8,history:4 dp=2 tp=2 sp zero=1 overlap=1B", GATED,
                 id="scales of earlier steps"),
])
def test_steps_with_few_stages_tell_that_with_all(
        monkeypatch: pytest.MonkeyPatch, strategy: str, spec: TransformerSpec) -> None:
    monkeypatch.setattr(few_layers, "FEWER", 1)
    run = in_stages([2, *[1] * 15] if "dp=3" in strategy else [1] * 16, spec, strategy)
    assert_as_whole(replace(run, clip=1.0) if "1GB" in strategy else run)
    assert_as_whole(run, Software(fused=True, overlapping=True, gradient_buffers=True))


WINDOWS = replace(GATED, window=4, full_attention_every=3)


@pytest.mark.takes_seconds
def test_few_positions_of_a_pipeline_tell_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    run = in_stages([1, 1, 1, 2], replace(SPEC, positions="none"), "dp=2 overlap=3KB")
    assert_as_whole(replace(run, optimizer=SGD(0.1)))


DENSE_AT_FIRST = replace(GATED, experts=Experts(count=4, chosen=2, dense_layers=3))


def placed(counts: Sequence[int], positions: int, microbatches: int, spec: TransformerSpec, strategy: str) -> TrainingRun:
    """A run with these numbers of layers in its stages, of several at each position."""
    chunks = len(counts) // positions
    schedule = f"interleaved_1f1b:{microbatches}x{chunks}" if chunks > 1 else f"1f1b:{microbatches}"
    run = run_of(f"{strategy} pp={positions} {schedule}", replace(spec, layers=sum(counts)), 12 * microbatches)
    *others, pipeline = run.strategy.transforms
    assert isinstance(pipeline, Pipeline)
    return replace(run, strategy=Strategy(*others, replace(pipeline, begin=begins_of(counts))))


@pytest.mark.parametrize(("counts", "positions", "spec", "wanted"), [
    pytest.param([1] * 5, 5, GATED, (0, 1, 1, 1, 2), id="equal stages"),
    pytest.param([1, 1, *[2] * 5, 1], 8, DENSE_AT_FIRST, (0, 1, 2, 3, 3, 3, 3, 4), id="dense layers in three stages"),
    pytest.param([1] * 9 + [2], 5, DENSE_AT_FIRST, (0, 1, 1, 2, 3), id="two stages of a dense layer"),
    pytest.param([2, 1, 2, 1, 1], 5, GATED, (0, 1, 2, 1, 3), id="stages of two lengths in turn"),
])
def test_positions_whose_stages_compute_the_same_are_told_by_one(
        counts: Sequence[int], positions: int, spec: TransformerSpec, wanted: tuple[int, ...]) -> None:
    assert few_layers._stand_for(placed(counts, positions, positions, spec, "")) == wanted


@pytest.mark.takes_seconds
def test_dense_layers_in_several_stages_are_at_positions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    spec = replace(GATED, experts=Experts(count=4, chosen=2, dense_layers=2))
    run = placed([1, 1, 1, 1, 1, 2], 6, 6, spec, "ep=2")
    step = layered_step(run, PLAIN)
    assert step is not None and step.few.pipeline.ranks == 4
    assert_as_whole(replace(run, optimizer=SGD(0.1)))


@pytest.mark.takes_seconds
def test_a_pipeline_whose_stages_all_differ_is_told_by_few_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    run = placed([1, 2, 2], 3, 13, WINDOWS, "dp=2")
    assert layered_step(placed([1, 2, 2], 3, 5, WINDOWS, "dp=2"), PLAIN) is None
    step = layered_step(run, PLAIN)
    assert step is not None and step.few.pipeline.microbatches == 6
    assert_as_whole(replace(run, optimizer=SGD(0.1)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("counts", [[1, 2, 1, 2, 1], [2, 1, 3, 2, 1]])
@pytest.mark.parametrize("strategy", ["precision=bf16 dp=2 zero=1 overlap=3KB", "dp=2 tp=2 sp", "dp=3 overlap=1KB"])
def test_positions_with_windows_at_different_places_tell_the_step(
        monkeypatch: pytest.MonkeyPatch, counts: Sequence[int], strategy: str) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    run = placed(counts, 5, 21, WINDOWS, strategy)
    assert_as_whole(run)
    assert_as_whole(run, Software(fused=True, overlapping=True, gradient_buffers=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("strategy", [
    "precision=bf16 dp=2 ep=2 zero=1", "precision=bf16,products:f8 dp=2 tp=2 sp zero=2 overlap=3KB", "dp=2 tp=2 cp=2",
    "precision=bf16 dp=2 recompute=block.* overlap=1GB",
])
@pytest.mark.parametrize("spec", [DENSE_AT_FIRST, replace(DENSE_AT_FIRST, tied=True)])
def test_positions_that_stand_for_all_tell_the_step(
        monkeypatch: pytest.MonkeyPatch, schedule: str, strategy: str, spec: TransformerSpec) -> None:
    monkeypatch.setattr(few_layers, "WORTH", 5)
    is_interleaved = schedule == "interleaved"
    run = placed([1, 2, 1, 1, 1, *[1] * (5 * is_interleaved)], 5, 20, spec, strategy)
    if schedule == "gpipe":
        run = replace(run, strategy=run.strategy.with_pipeline(schedule="gpipe"))
    assert_as_whole(run)
    assert_as_whole(run, Software(fused=True, overlapping=True, gradient_buffers=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("counts", "strategy", "spec"), [
    pytest.param([2] * 16, "precision=bf16,products:f8,gathers:f8,history:4 dp=2 tp=2 sp zero=1 overlap=3KB", SPEC,
                 id="buckets of several stages"),
    pytest.param([1] * 15 + [2], "precision=bf16 dp=2 tp=2 sp zero=1 overlap=3KB", GATED, id="a longer last stage"),
    pytest.param([4] * 4, "precision=bf16 dp=2 zero=1 overlap=3KB", GATED, id="one stage at each position"),
    pytest.param([2] * 8, "precision=bf16 ep=2", replace(GATED, experts=Experts(count=4, chosen=2, dense_layers=1)),
                 id="a dense layer in the first stage"),
    pytest.param([3] * 7 + [1], "dp=2", WINDOWS, id="windows"),
    pytest.param([2] * 8, "dp=2 zero=1", WINDOWS, id="windows at other places in each stage"),
    pytest.param([1] * 30 + [2, 1], "precision=bf16 dp=2 overlap=3KB", SPEC, id="a longer stage before the last"),
])
def test_stages_at_few_positions_tell_those_at_all(counts: Sequence[int], strategy: str, spec: TransformerSpec) -> None:
    run = in_stages(counts, spec, strategy)
    assert_as_whole(run)
    assert_as_whole(run, Software(fused=True, overlapping=True, gradient_buffers=True))


def test_a_last_stage_without_layers_is_simulated_as_a_whole() -> None:
    assert layered_step(in_stages([1] * 31 + [0], SPEC, "dp=2"), PLAIN) is None


def test_stages_that_few_others_do_not_stand_for_are_simulated_as_a_whole() -> None:
    """The last layer alone has no window, and would have one as the last of few."""
    spec = replace(GATED, window=4, full_attention_every=16)
    assert layered_step(in_stages([2] * 8, spec, "dp=2"), PLAIN) is None


@pytest.mark.slow
def test_the_figures_of_few_layers_are_those_of_all() -> None:
    run = run_of("precision=bf16 fsdp=16 recompute=block.* overlap=1B pp=1 1f1b:2", batch=64)
    mine, whole = figures_of_run(run, "dgx-h100:2"), figures(run, "dgx-h100:2")
    assert mine.json() == whole.json() and mine.step.by_operation == whole.step.by_operation
    operation: Any = mine.trace.simulation
    assert isinstance(operation.operation, LayeredStep)
    other = Hardware.preset("dgx-h100:2+megatron-core-h100")
    assert mine.trace.on(other).makespan_seconds == simulate(run.step, other, fold=True, **run.placed).makespan_seconds
    assert mine.trace.on("dgx-a100:2").makespan_seconds == whole.trace.on("dgx-a100:2").makespan_seconds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp=2x2 overlap=25MB pp=1 1f1b:2", "dp=4 overlap=40KB pp=1 1f1b:2"])
def test_a_bucket_of_several_layers_is_simulated_as_a_whole(strategy: str) -> None:
    assert layered_step(run_of(strategy), PLAIN) is None


@pytest.mark.slow
@pytest.mark.parametrize("size", ["500B", "3000B"])
def test_a_bucket_that_only_all_layers_fill_is_told_by_as_many_stages_at_a_position(size: str) -> None:
    """The weights of norms of few layers are gathered in one call, and those of all layers in several."""
    chunks = []
    for each in (size, "5KB"):
        step = layered_step(in_stages([1] * 32, GATED, f"precision=bf16,products:f8 dp=2 zero=1 overlap={each}"), PLAIN)
        assert step is not None
        chunks.append(step.few.pipeline.chunks)
    assert chunks == [8, 2]


@pytest.mark.parametrize(("strategy", "spec"), [
    pytest.param("fsdp=4 recompute=block.1 overlap=1B pp=1 1f1b:2", SPEC, id="one layer that runs again"),
    pytest.param("precision=bf16,products:f8,last:4 pp=1 1f1b:2", SPEC, id="the last layers in another precision"),
    pytest.param("pp=2 dp=2 1f1b:2", SPEC, id="two stages"),
    pytest.param("precision=bf16,products:f8 dp=2 zero=1 overlap=25MB pp=1 1f1b:2", SPEC, id="buckets of narrow weights"),
    pytest.param("dp=4 zero=3", SPEC, id="no pipeline"),
    pytest.param("pp=1 1f1b:2", replace(SPEC, layers=WORTH - 1), id="few layers"),
    pytest.param("pp=1 1f1b:2", replace(SPEC, window=4, full_attention_every=16), id="a layer without a window"),
    pytest.param("pp=1 1f1b:2", replace(GATED, unrotated_every=8), id="two layers without positions"),
    pytest.param("pp=1 1f1b:2", replace(GATED, experts=Experts(count=4, chosen=2, dense_layers=1)), id="a dense layer"),
])
def test_layers_that_differ_are_simulated_as_a_whole(strategy: str, spec: TransformerSpec) -> None:
    assert layered_step(run_of(strategy, spec), PLAIN) is None
