"""Plans scaled down, run on real processes: numbers, time, memory and bytes are those of the simulation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from parallelism import ir
from parallelism.hardware import sized_hardware
from parallelism.training import MegatronFlags, scaled_down
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve
from vcluster.runs import verified as module
from vcluster.runs.verified import verified, verified_text

SMALL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 64}
FEW_OPS: dict[str, Any] = {"disable_bias_linear": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
                          "normalization": "RMSNorm"}
LARGER = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "devices"), [
    ({"use_distributed_optimizer": True, "global_batch_size": 2, **FEW_OPS}, 2),
    pytest.param({"num_layers": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True,
                  "global_batch_size": 4}, 4, marks=pytest.mark.slow),
    pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "selective",
                  "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2,
                  "global_batch_size": 8, "fp32": True, **LARGER}, 8, marks=pytest.mark.slow),
    *(({"tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 4, "fp8_format": "hybrid",
        "use_distributed_optimizer": True, **FEW_OPS, **LARGER, **how}, 4) for how in (
            {"fp8_recipe": "tensorwise"}, {"fp8_recipe": "mxfp8"}, {"fp8_recipe": "blockwise", "fp8_param_gather": True},
            {"fp8_recipe": "delayed", "fp8_amax_history_len": 4}, {"fp8_format": None, "fp4_format": "e2m1"})),
])
def test_a_small_run_is_as_its_simulation(flags: dict[str, Any], devices: int) -> None:
    run = scaled_down(MegatronFlags(**{**SMALL, **flags}).run(devices))
    name = "b200-node" if "fp4_format" in flags else "dgx-h100" if "fp8_format" in flags else "dgx-a100"
    found = verified(run, sized_hardware(name, devices), backend="thread" if devices < 8 else "process")
    near = 0.5 if "fp4_format" in flags else 0.25 if "fp8_format" in flags else 3e-2
    assert found.differences == () and found.apart < near
    text = verified_text(found.json())
    assert "are those of the simulation" in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80


@pytest.mark.takes_seconds
def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = scaled_down(MegatronFlags(**SMALL, **FEW_OPS, global_batch_size=2).run(2))
    hardware = sized_hardware("dgx-a100", 2)
    other = scaled_down(MegatronFlags(
        **SMALL, **FEW_OPS, global_batch_size=2, use_distributed_optimizer=True).run(2))
    simulate = module.simulate
    monkeypatch.setattr(module, "simulate", lambda step, *_, **on: simulate(other.step, hardware, **on))
    interpret = ir.interpret
    monkeypatch.setattr(ir, "interpret", lambda *given: ir.Interpreted(
        tuple(-np.asarray(output, np.float64) for output in interpret(*given).outputs), 0))
    found = verified(run, hardware, backend="thread")
    assert found.differences == ("numbers", "time", "memory", "communication")
    text = " ".join(verified_text(found.json()).split())
    assert text.startswith("NOT verified: ") and "differs from its simulation in numbers and time and memory" in text
    only = " ".join(verified_text({**found.json(), "differences": ["numbers"]}).split())
    assert only.startswith("NOT verified: ") and only.endswith("the communication are those of the simulation.")


@pytest.mark.slow
def test_plan_verifies_its_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan gpt --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 "
             "--hardware dgx-a100 --devices 2 --global-batch-size 2 --fix pp=2 --fix schedule=1f1b --fix microbatch=1 "
             "--recompute-granularity selective --disable-bias-linear --normalization RMSNorm --fix tp=1 --top 1 "
             "--verify")
    assert serve(PROGRAM, main, words.split()) == 0
    out = capsys.readouterr().out
    assert "ran under the first plan on 2 processes (pp=2)" in " ".join(out.split())


@pytest.mark.slow
def test_rounding_in_bfloat16_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of this plan are apart by more than the fixed tolerance, because bfloat16 has eight bits."""
    words = "plan llama3-70b --global-batch-size 1024 --hardware dgx-h100 --devices 256 --memory 72GB --top 1 --verify"
    assert serve(PROGRAM, main, words.split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Verified: a small model .* by (\S+) of the largest; rounding explains (\S+)\. The", text)
    assert found is not None and module.TOLERANCES[2] < float(found[1]) <= float(found[2]) < 0.5
