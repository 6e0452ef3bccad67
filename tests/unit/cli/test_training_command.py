"""`python -m vcluster simulate` of a model by its name and Megatron-LM's flags."""

from __future__ import annotations

import gc
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from parallelism.rarely_collected import rarely_collected
from parallelism.trace import Trace
from parallelism.training import MegatronFlags, figures
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve
from vcluster.cli.megatron_words import flags_of, tokens_text, training_parser

MODEL, ON, SPLIT = map(str.split, (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --use-flash-attn --normalization RMSNorm",
    "--hardware dgx-a100+plain --devices 4",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --global-batch-size 4"))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = serve(PROGRAM, main, ["simulate", *words])
    out, err = capsys.readouterr()
    return status, out, err


@cache
def of_flags() -> tuple[int, str, str]:
    """What is said of the run by flags, and of flags without effect."""
    words = ["simulate", "gpt", *MODEL, *SPLIT, *ON, "--json", "--lr", "1e-4", "--seed=3", "--lr=2",
             "--overlap-grad-reduce"]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = serve(PROGRAM, main, words)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_the_json_has_the_figures_of_the_run() -> None:
    status, out, err = of_flags()
    run = MegatronFlags(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=100,
        disable_bias_linear=True, attention_dropout=0.0, hidden_dropout=0.0, use_flash_attn=True,
        normalization="RMSNorm", tensor_model_parallel_size=2, pipeline_model_parallel_size=2, bf16=True,
        global_batch_size=4).run(4)
    assert (status, json.loads(out)) == (0, figures(run, "dgx-a100").json())
    assert err == "without effect on a simulated step: --lr, --seed, --overlap-grad-reduce\n"


@pytest.mark.slow
def test_a_strategy_says_what_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    _, by_flags, _ = of_flags()
    text = "tp=2 precision=bf16 pp@block.1=2 1f1b:4"
    assert said(capsys, "GPT", *MODEL, *ON, "--strategy", text, "--json")[:2] == (0, by_flags)
    sizes = ["--strategy", "tp precision=bf16 pp@block.1 1f1b:4", "--mesh"]
    assert said(capsys, "gpt", *MODEL, *ON, *sizes, "pp=2,tp=2", "--json")[:2] == (0, by_flags)
    other = json.loads(said(capsys, "gpt", *MODEL, *ON, *sizes, "tp=2,pp=2", "--json")[1])
    assert [*other["mesh"]] == ["tp", "pp"] and other["peak_bytes"] == json.loads(by_flags)["peak_bytes"]


@pytest.mark.slow
def test_stages_with_meshes_of_their_own_have_memory_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = "precision=bf16 dp tp pp 1f1b:2,meshes=dp=2|tp=2"
    status, out, _ = said(capsys, "gpt", *MODEL, *ON, "--strategy", text, "--json")
    found = json.loads(out)
    assert status == 0 and found["mesh"] == {"devices": 4} and len(found["memory"]) == 2
    assert found["peak_bytes"] == max(sum(held.values()) for held in found["memory"])


@pytest.mark.slow
def test_a_strategy_without_stages_works_on_the_batch_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt", *MODEL, *ON, "--strategy", "dp=4 zero=3 precision=bf16", "--global-batch-size", "8", "--json")
    status, out, _ = said(capsys, *words)
    found = json.loads(out)
    assert status == 0 and found["strategy"] == "precision=bf16 dp zero=3" and found["parts"]["zero"] > 0
    assert found["bubble"] == 0 and len(found["memory"]) == 1


@pytest.mark.slow
def test_the_text_has_80_columns_and_a_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = said(capsys, "llama3-8b", "--num-layers", "2", "--seq-length", "64", *ON, "--bf16",
                          "--report", str(page), "--pipeline-model-parallel-size", "2")
    assert status == 0 and page.stat().st_size > 10_000
    *lines, written = out.splitlines()
    assert max(map(len, lines)) <= 80 and written == f"The page is {page}"
    for word in ("llama3-8b: 1.49 G parameters", "32 heads, vocabulary 128256\n", "step ", "MFU", "bubble",
                 "stage 0 to 1", "optimizer"):
        assert word in out, word


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "tokens"), [
    ("gpt2", "vocabulary 50304 (padded from 50257)"),
    ("gpt2 --vocab-size 256", "vocabulary 256"),
    ("gpt2 --vocab-size 257", "vocabulary 384 (padded from 257)"),
    ("gpt2 --vocab-size 257 --make-vocab-size-divisible-by 10", "vocabulary 260 (padded from 257)"),
    ("llama3-8b", "vocabulary 128256"),
])
def test_what_a_vocabulary_is_padded_from_is_told(words: str, tokens: str) -> None:
    parsed = training_parser("vcluster", "simulate", "", (), {}).parse([*words.split(), "--hardware", "dgx-a100"])
    assert tokens_text(parsed.model, flags_of(parsed)) == tokens


def test_a_file_with_the_name_of_a_model_is_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text("func @f(%x: tensor<4xf32>) -> (tensor<4xf32>) {\n  return %x\n}\n")
    status, out, _ = said(capsys, "gpt2", "--hardware", "dgx-a100", "--save", "t.json")
    assert status == 0 and "peak memory: 16 bytes" in out
    assert len(Trace.load("t.json")) > 0


@pytest.mark.takes_seconds
def test_a_model_that_fits_without_the_reserve_of_plans_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters of Llama 3 70B: 78.5 GB of tensors are in 80, and plan leaves (80 - 1.07 - 0.3) / 1.08 = 72.8 GB to them."""
    words = ["llama3-70b", "--lora-rank", "16", "--tensor-model-parallel-size", "8", "--sequence-parallel",
             "--global-batch-size", "8", "--hardware", "dgx-h100", "--devices", "8", "--seq-length"]
    status, out, _ = said(capsys, *words, "28672")
    text = " ".join(out.split())
    assert status == 0 and "It hardly fits: 78.5 GB are needed. plan leaves 72.8 of 80.0 GB to tensors" in text
    assert max(map(len, out.splitlines())) <= 80
    assert "fits" not in said(capsys, *words, "16384")[1]


@pytest.mark.takes_seconds
def test_a_model_that_does_not_fit_the_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "gpt", *MODEL, *ON, "--micro-batch-size", "40000000")
    assert status == 0 and "It does not fit: " in out and "dgx-a100 has 80.0 GB" in out


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("words", "error"), [
    ("gpt --hardware dgx-a100 --num-layres 3", "there is no option --num-layres; did you mean --num-layers?"),
    ("gpt --hardware dgx-a100 --hidden-size 8", "gpt needs --num-layers, --num-attention-heads, --seq-length, --voc"),
    ("gpt2", "the following arguments are required: --hardware"),
    ("gpt2 --hardware dgx-a100 --world-size=8", "there is no option --world-size; did you mean --devices?"),
    ("gpt2 --hardware dgx-a100 --tp 8", "there is no option --tp; did you mean --tensor-model-parallel-size?"),
    ("gpt2 --hardware dgx-a100 --zero 3", "did you mean --use-distributed-optimizer, or in --strategy zero=3?"),
    ("gpt2 --hardware dgx-a10", "--hardware: no hardware 'dgx-a10'; did you mean 'dgx-a100'?"),
    ("gpt2 --hardware dgx-a100:2 --devices 8", "--hardware: dgx-a100:2 has 16 devices, and 8 are asked for"),
    ("gpt2 --hardware tpu-v4 --devices 100 --bf16", "--hardware: tpu-v4 has 64 devices, fewer than 100"),
    ("gpt2 --hardware dgx-a100 --devices 3 --tensor-model-parallel-size 2", "3 devices cannot be dealt"),
    ("gpt2 --hardware dgx-a100 --devices 2 --global-batch-size 3", "1 x 2 = 2, got 3"),
    ("gpt2 --hardware laptop --devices 1", "laptop has no rate for bfloat16; give --fp32"),
    ("gpt2 --hardware dgx-a100 --devices 1 --recompute-granularity selectiv", "did you mean selective?"),
    ("gpt2 --hardware dgx-a100 --devices 1 --hidden-dropout 2", "--hidden-dropout must be at least 0 and below 1"),
    ("gpt2 --hardware dgx-a100 --devices 4 --mesh dp=4", "--mesh has a meaning with --strategy only"),
    ("gpt2 --hardware dgx-a100 --devices 4 --strategy dp --mesh dp=four", "--mesh: axis 'dp' needs a whole number"),
    ("gpt2 --hardware dgx-a100 --devices 4 --strategy dp=4 --micro-batch-size 2 --global-batch-size 4",
     "--global-batch-size must be --micro-batch-size 2 times the 4 microbatches of all replicas, 8; got 4"),
    ("gpt2 --hardware dgx-a100 --devices 4 --strategy dp=2", "has 2 devices, not 4"),
    ("gpt2 --hardware dgx-a100 --strategy dq=4", "no transform is written 'dq'; did you mean 'dp'?"),
    ("gpt2 --hardware dgx-a100 --strategy dp=4 --bf16", "leave out --bf16"),
    ("gpt2 --hardware dgx-a100 --devices 2 --strategy x", "no transform"),
    ("gpt2 --hardware dgx-a100 --devices 8 --strategy precision=int7", "a dtype must be one of"),
    ("gpt9 --hardware dgx-a100", "there is neither a model nor a file 'gpt9'; did you mean gpt"),
    ("m.mlir --hardware dgx-a100", "m.mlir cannot be read"),
    ("gpt2 --hardware dgx-a100 --report /nowhere/x.html", "--report: /nowhere/x.html cannot be written"),
])
def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], words: str, error: str) -> None:
    status, out, err = said(capsys, *words.split())
    assert (status, out) == (2, "")
    assert error in err and err.count("\n") == 1


def test_the_collector_of_cycles_is_as_before_after_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold()
    with rarely_collected():
        assert gc.get_threshold()[0] > before[0]
    said(capsys, "gpt", *MODEL, *ON, "--bf16", "--global-batch-size", "7")      # 7 rows do not fit 4 devices
    assert gc.get_threshold() == before


@pytest.mark.takes_seconds
def test_adapters_are_told_and_hold_little(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "gpt", *MODEL, *SPLIT, *ON, "--lora-rank", "4")
    assert (status, err) == (0, "")
    assert "adapters of rank 4 of qkv and out, 768 parameters, are trained, and all else is frozen" in " ".join(out.split())
    status, out, _ = said(capsys, "gpt", *MODEL, *SPLIT, *ON, "--lora-rank", "4", "--json")
    held = json.loads(out)["memory"]
    # A stage has one block: half of its adapters is split over tp.
    assert [stage["gradients"] for stage in held] == [4 * (4 * (16 + 24) + 4 * (8 + 16))] * 2
    float8 = ["--hardware", "dgx-h100", "--devices", "4", "--fp8-format", "hybrid", "--json"]
    float8 += ["--fp8-recipe", "tensorwise"]
    status, out, _ = said(capsys, "gpt", *MODEL, *SPLIT, *float8, "--lora-rank", "4")
    narrow = json.loads(out)["memory"]
    assert status == 0 and [stage["gradients"] for stage in narrow] == [stage["gradients"] for stage in held]
    # Products of half a block lose a byte for each element, and get scales: one for each 16th of each dim, in float32.
    products, scales = (16 * 24 + 8 * 16 + 2 * 16 * 32), 4 * 4 * 16 * 8
    assert [a["weights"] - b["weights"] for a, b in zip(held, narrow, strict=True)] == [products - scales] * 2


@pytest.mark.slow
def test_packed_documents_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "gpt", *MODEL, *SPLIT, *ON, "--document-lengths", "2", "--document-variation", "0.5")
    assert (status, err) == (0, "")
    assert "sequences are packed documents of 1 to 4 tokens, 2 in the mean" in " ".join(out.split())
    status, out, _ = said(capsys, "gpt", *MODEL, *SPLIT, *ON, "--document-lengths", "4")
    assert status == 0 and "sequences are packed documents of 4 tokens" in " ".join(out.split())
