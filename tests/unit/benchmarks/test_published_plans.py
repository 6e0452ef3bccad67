"""The table of picks beside what teams published: its settings, its script, and what it says."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from benchmarks.published_plans import FOUND, PAGE, SEARCHES, Setting, published, searched, settings, table
from parallelism.training import MegatronFlags
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve

MEASURED = json.loads(FOUND.read_text())


@pytest.mark.slow
def test_every_published_setting_is_a_run() -> None:
    found = {setting.name: setting for setting in settings()}
    assert len(found) == 22
    for setting in found.values():
        run = setting.flags.run(setting.devices)
        assert run.mesh.size == setting.devices and run.batch == setting.batch
    llama = found["Llama 3 405B, 16384, 128k"].flags.run(16384)
    assert llama.mesh.shape == {"pp": 16, "dp": 8, "cp": 16, "tp": 8} and llama.model.parameters // 10**9 == 405
    interleaved = found["Megatron-LM 310.1B"].flags.run(1920).pipeline
    assert interleaved is not None and interleaved.chunks == 2 and interleaved.microbatches == 144


def test_the_page_has_the_table() -> None:
    assert MEASURED and table(MEASURED) in PAGE.read_text(encoding="utf-8")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, row in MEASURED.items() if "pick" in row])
def test_the_pick_is_never_worse(name: str) -> None:
    """Nothing that fits is faster; where the search has no pick, nothing fits."""
    pick = MEASURED[name]["pick"]
    assert "why" in pick or (pick["gap"] == 0 and pick["peak_bytes"] <= 80e9)
    for other in ("published", *SEARCHES):
        if (row := MEASURED[name].get(other)) is None:
            continue
        assert "why" in row or row["peak_bytes"] > 80e9 or pick["seconds"] <= row["seconds"], other


def test_all_rows_but_those_that_do_not_fit_as_published_have_a_pick() -> None:
    without = {name for name, row in MEASURED.items() if "seconds" not in row["pick"]}
    assert without == {name for name, row in MEASURED.items() if row["published"]["peak_bytes"] > 80e9}
    assert len(MEASURED) == 22 and len(without) == 3


@pytest.mark.slow
def test_a_row_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A small one: its simulate lines give its figures."""
    flags = MegatronFlags(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=100, bf16=True,
        disable_bias_linear=True, use_flash_attn=True, normalization="RMSNorm",
        global_batch_size=4, micro_batch_size=2, recompute_granularity="full")
    setting = Setting("small", "this test", "dgx-a100", 2, flags)
    assert setting.space["microbatch"] == [1, 2, 4] and setting.space["pp"] == [1, 2]
    for row in (published(setting), searched(setting, "dp")):
        assert serve(PROGRAM, main, shlex.split(row["command"])[3:] + ["--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert (again["seconds"], again["peak_bytes"], again["mfu"]) == (row["seconds"], row["peak_bytes"], row["mfu"])
    odd = replace(setting, flags=replace(flags, global_batch_size=3))
    assert searched(odd, "zero3")["why"] == "the batch cannot be dealt"
