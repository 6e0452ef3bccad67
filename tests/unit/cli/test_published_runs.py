"""Published training runs, each written down in one command."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from parallelism.hardware import sized_hardware
from parallelism.training import TrainingRun, figures
from parallelism.transforms import ExpertParallel
from vcluster.calibration.training_runs import PublishedRun, published_runs, training_seconds
from vcluster.cli.megatron_words import flags_of, training_parser
from vcluster.cli.training import training_run

RUNS = published_runs()
"""In bfloat16 and in float8, dense and with experts."""
STRATEGY: dict[str, Any] = {"--strategy": {}, "--mesh": {}}


def written(run: PublishedRun) -> TrainingRun:
    """What the command line of a run says."""
    arguments = training_parser("vcluster", "simulate", "", (), STRATEGY).parse(run.words)
    return training_run(arguments, flags_of(arguments), arguments.devices)


@pytest.mark.slow
def test_every_run_is_one_command() -> None:
    """All of the published table but two of Mamba hybrids, which no Transformer is."""
    assert len(RUNS) == 206
    for published in RUNS:
        row = published.columns
        run = written(published)
        assert run == published.run
        ep = run.mesh.shape.get("ep", 1)
        assert (run.mesh.size, run.batch, run.microbatch, run.dtype) == (
            int(row["gpus"]), int(row["gbs"]), int(row["mbs"]) * ep, "bfloat16")
        assert run.products == ("bfloat16" if row["precision"] == "bf16" else "float8")
        assert run.pipeline is not None and run.pipeline.chunks == int(row["vp"])
        shape = {axis: run.mesh.shape.get(axis, 1) for axis in ("pp", "cp", "tp")}
        assert shape == {axis: int(row[axis]) for axis in shape}
        beside = [each.beside for each in run.strategy.transforms if isinstance(each, ExpertParallel)]
        assert int(row["ep"]) == ep * prod(run.mesh.shape[axis] for axes in beside for axis in axes)
        assert run.mesh.shape.get("replica", 1) * int(row["fsdp"] or 0) in (0, int(row["gpus"]))
        assert run.replicas * ep * prod(shape.values()) == run.mesh.size


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_program_of_every_run_is_built(number: int) -> None:
    run = RUNS[number].run
    function = run.step if run.pipeline is None else run.step.function  # type: ignore[union-attr]
    assert sum(value.name.startswith(("next.p.", "next.lora.")) for value in function.outputs) > 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [48, 83, 109, 119, 124, 137])
def test_a_sample_of_the_runs_is_simulated(number: int) -> None:
    """Within a factor of 3 of what was published, on hardware without the constants of a software."""
    published = RUNS[number]
    run, measured = published.run, published.measured_seconds
    found = figures(run, sized_hardware(published.columns["hw"], run.mesh.size))
    assert measured / 3 < found.seconds < 3 * measured


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "measured", "told"), [("bf16", 9.118, 8.89), ("fp8", 6.5, 6.20)])
def test_runs_that_tune_adapters_take_what_docs_tuning_tells(precision: str, measured: float, told: float) -> None:
    """Llama 3 70B on 8 devices; if all weights were trained it would take a third more, and 210 GB of each device."""
    published, = [run for run in RUNS if run.columns["peft"] == "lora" and run.columns["precision"] == precision]
    found = figures(published.run, sized_hardware("dgx-h100+megatron-core-h100", 8))
    assert published.measured_seconds == measured
    assert found.seconds == pytest.approx(told, rel=2e-3) and found.peak_bytes < 60e9


@pytest.mark.slow
@pytest.mark.parametrize("number", [33, 70])
def test_the_seconds_of_a_deep_model_follow_from_models_of_few_layers(number: int) -> None:
    published = RUNS[number]
    assert published.strategy is not None
    hardware = sized_hardware(published.columns["hw"], published.devices)
    assert training_seconds(published, hardware) == pytest.approx(figures(published.run, hardware).seconds, rel=1e-6)
