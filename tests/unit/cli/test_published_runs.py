"""Published training runs, each written down in one command: `tests/data/published_training_runs.csv`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from parallelism.hardware import sized_hardware
from parallelism.training import TrainingRun, figures
from vcluster.cli.megatron_words import flags_of, training_parser
from vcluster.cli.training import training_run

FILE = Path(__file__).parents[2] / "data" / "published_training_runs.csv"
RUNS = [*csv.DictReader(line for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#"))]
"""In bfloat16, of dense models.  That with peft=lora trains all weights here."""
STRATEGY: dict[str, Any] = {"--strategy": {}, "--mesh": {}}


def model_words(run: dict[str, str]) -> list[str]:
    words = ["gpt", "--num-layers", run["layers"], "--hidden-size", run["width"], "--ffn-hidden-size", run["ffn"],
             "--num-attention-heads", run["heads"], "--seq-length", run["seq"], "--vocab-size", run["vocab"],
             "--attention-backend", "flash", "--attention-dropout", "0", "--hidden-dropout", "0"]
    if run["kv"] != run["heads"]:
        words += ["--group-query-attention", "--num-query-groups", run["kv"]]
    words += {"gelu": [], "swiglu": ["--swiglu"], "relu2": ["--squared-relu"]}[run["act"]]
    words += ["--normalization", "RMSNorm"] * (run["norm"] == "rms")
    words += ["--position-embedding-type", "rope"] * (run["pos"] == "rotary")
    words += ["--untie-embeddings-and-output-weights"] * (run["tied"] == "False")
    return words + ["--disable-bias-linear"] * (run["biases"] == "False")


def strategy_words(run: dict[str, str]) -> list[str]:
    """The run in the words of FSDP, with a strategy, where devices share the weights; else in Megatron-LM's flags."""
    if int(run["fsdp"]):
        gpus, shared, count = int(run["gpus"]), int(run["fsdp"]), int(run["gbs"]) // int(run["gpus"]) // int(run["mbs"])
        split = f"fsdp={gpus}" if shared == gpus else f"hsdp={gpus // shared}x{shared}"
        split = split if run["zero"] == "3" else f"dp={gpus} zero={run['zero']} overlap"
        again = "" if run["recompute"] == "none" else "recompute=block.*"  # another policy runs less again
        gradients = ",bf16" if run["mp_mode"] == "PURE" else ""
        words = f"precision=bf16{gradients} {split} {again} pp=1 1f1b:{count}"
        return ["--strategy", " ".join(words.split()), "--global-batch-size", run["gbs"], "--micro-batch-size", run["mbs"]]
    words = ["--bf16", "--tensor-model-parallel-size", run["tp"], "--pipeline-model-parallel-size", run["pp"],
             "--context-parallel-size", run["cp"], "--micro-batch-size", run["mbs"], "--global-batch-size", run["gbs"]]
    words += ["--num-virtual-stages-per-pipeline-rank", run["vp"]] * (run["vp"] != "1")
    words += ["--sequence-parallel"] * (run["tp"] != "1") + ["--cp-comm-type", "p2p"] * (run["cp"] != "1")
    words += ["--use-distributed-optimizer"] * (run["zero"] == "1")
    words += ["--overlap-grad-reduce"] * (run["dp_overlap"] == "True")
    words += ["--tp-comm-overlap"] * (run["tp_overlap"] == "True")
    return words + ["--recompute-granularity", "selective"] * (run["recompute"] == "selective")


def written(run: dict[str, str]) -> TrainingRun:
    """What the command line of a run says."""
    words = [*model_words(run), *strategy_words(run), "--hardware", run["hw"], "--devices", run["gpus"]]
    arguments = training_parser("vcluster", "simulate", "", (), STRATEGY).parse(words)
    return training_run(arguments, flags_of(arguments), arguments.devices)


def test_every_dense_run_in_16_bits_is_one_command() -> None:
    assert len(RUNS) == 142
    for row in RUNS:
        run = written(row)
        assert (run.mesh.size, run.batch, run.microbatch, run.dtype) == (
            int(row["gpus"]), int(row["gbs"]), int(row["mbs"]), "bfloat16")
        assert run.pipeline is not None and run.pipeline.chunks == int(row["vp"])
        shape = {axis: run.mesh.shape.get(axis, 1) for axis in ("pp", "cp", "tp")}
        assert shape == {axis: int(row[axis]) for axis in shape}
        assert run.mesh.shape.get("replica", 1) * int(row["fsdp"] or 0) in (0, int(row["gpus"]))
        assert run.replicas * shape["pp"] * shape["cp"] * shape["tp"] == run.mesh.size


@pytest.mark.sampled(24, 5)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_program_of_every_dense_run_is_built(number: int) -> None:
    run = written(RUNS[number])
    function = run.step if run.pipeline is None else run.step.function  # type: ignore[union-attr]
    assert sum(value.name.startswith("next.p.") for value in function.outputs) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(0, len(RUNS), 9))
def test_a_sample_of_the_runs_is_simulated(number: int) -> None:
    """Within a factor of 3 of what was published, on hardware without the constants of a software."""
    row = RUNS[number]
    run = written(row)
    found = figures(run, sized_hardware(row["hw"], run.mesh.size))
    assert float(row["step_s"]) / 3 < found.seconds < 3 * float(row["step_s"])
