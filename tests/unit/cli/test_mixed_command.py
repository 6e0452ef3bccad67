"""`python -m vcluster plan --with`: two kinds of nodes; its text, its JSON, its exit status, and its errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from mixed_nodes import FAST, SLOW

from parallelism import ir, models
from parallelism.hardware import Across, mixed
from parallelism.mixing import find_mixed
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve
from vcluster.cli.plan import _arguments
from vcluster.cli.sweeps.question import Search

SMALL = shlex.split(
    "gpt --fp32 --num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 --fix pp=2 "
    "--fix microbatch=2 --fix sp=0 --fix recompute=none --fix tp=1 --fix zero=0 --global-batch-size 8")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of hardware, as words."""
    folder = tmp_path_factory.mktemp("nodes")
    SLOW.save(folder / "slow.json")
    FAST.save(folder / "fast.json")
    return ["--hardware", str(folder / "slow.json"), "--with", str(folder / "fast.json")]


def said(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    status = serve(PROGRAM, main, given)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.slow
def test_its_json_has_the_plans_that_a_search_in_python_finds(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *words, "--across", "80Mb/s:1ms", "--top", "2", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found["across"] == {"bytes_per_second": 1e7, "latency_seconds": 1e-3}
    assert [part["name"] for part in found["hardware"]] == ["slow", "fast"] and found["devices"] == 8
    hardware = mixed(SLOW, FAST, across=Across(1e7, 1e-3))
    spec = Search.of(PROGRAM, _arguments(PROGRAM, [*SMALL, *words], loads=False)).model
    plans = find_mixed(spec, hardware=hardware, batch=8, pp=2, microbatch=2, sp=0, recompute="none", tp=1, zero=0)
    assert [row["seconds"] for row in found["plans"]] == [plan.seconds for plan in plans.found[:2]]
    assert [row["parts_of_hardware"] for row in found["plans"]] == [
        plan.json()["parts_of_hardware"] for plan in plans.found[:2]]
    assert found["verdict"] == plans.verdict and [row["hardware"] for row in found["alone"]] == ["slow", "fast"]


@pytest.mark.takes_seconds
def test_its_text_has_80_columns(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *words)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for told in ("on 4 of slow and 4 of fast; 8 sequences a step", "seconds  memory of the two parts  plan", "slow",
                 "slow alone: ", "fast alone: ", "the first is the best over both parts", "; both: ", " pp@block."):
        assert told in " ".join(out.split()) or told in out, told


@pytest.mark.takes_seconds
def test_where_nothing_fits_the_exit_status_is_1(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *words, "--memory", "1kB")
    assert status == 1 and "no plan fits over both parts." in out and err.count("\n") == 1
    assert err.startswith("no plan fits: slow alone: no plan fits: ") and "; fast alone: " in err


DGX = ["--hardware", "dgx-a100:1", "--with", "dgx-h100:1"]


@pytest.mark.parametrize(("given", "wanted"), [
    (["--hardware", "dgx-a100:1", "--with", "dgx-h200:1"], "--with: no hardware 'dgx-h200:1'; did you mean "),
    (["--hardware", "dgx-a101:1", "--with", "dgx-h100:1"], "--hardware: no hardware 'dgx-a101:1'; did you mean "),
    (["--hardware", "dgx-a100:1", "--with", "dgx-h100:0"], "--with: extents must be a whole number of at least 1"),
    (["--hardware", "dgx-a100:-1", "--with", "dgx-h100:1"], "--hardware: extents of dgx-a100 must be like 140; got '-1'"),
    (["--hardware", "dgx-a100:1", "--with", "dgx-h100"], "--with must say how many nodes there are, as dgx-h100:4; got"),
    (["--hardware", "dgx-a100", "--with", "dgx-h100:1"], "--hardware must say how many nodes there are, as dgx-a100:4"),
    (["--hardware", "dgx-a100:1", "--with", "no.toml"], "no.toml"),
    (["--with", "dgx-h100:1"], "the following arguments are required: --hardware"),
    (["--hardware", "dgx-a100:1", "--across", "10Gb/s"], "--across is the link to a second site; give --with, too"),
    *[([*DGX, "--across", text], "--across: needs a rate above 0 with a unit, and maybe a latency, as 10Gb/s or 10Gb/s:5ms")
      for text in ("10", "0Gb/s", "-1Gb/s", "nanGb/s", "10Gb", "10Gb/s:5", "10Gb/s:", ":5ms", "10 parsecs/s", "")],
    ([*DGX, "--devices", "16"], "--devices is for one kind of nodes; with --with the names say how many"),
    *[([*DGX, *flag.split()], f"{flag.split()[0]} is for one kind of nodes; leave it out with --with")
      for flag in ("--tokens 1T", "--slow-links 10%:0.5", "--jitter 3%", "--verify", "--why-not tp=2", "--slices 4",
                   "--html x.html")],
    ([*DGX, "--fix", "schedule=gpipe"], "plans over two kinds of nodes have schedule=1f1b; got 'gpipe'"),
    (["--hardware", "dgx-a100:1", "--with", "laptop:4"], "laptop has no rate for"),
    (["--hardware", "dgx-a100:1,dgx-a100:2", "--with", "dgx-h100:1"], "several --hardware are a sweep"),
])
def test_wrong_words_get_one_line(capsys: pytest.CaptureFixture[str], given: list[str], wanted: str) -> None:
    model = [word for word in SMALL if word != "--fp32"]
    status, out, err = said(capsys, "plan", *model, *given)
    assert (status, out) == (2, "") and err.count("\n") == 1 and wanted in err


def test_a_program_in_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "loss.ir"
    path.write_text(str(models.mlp((4, 8, 4), ir.symbol("B"))), encoding="utf-8")
    status, out, err = said(capsys, "plan", str(path), "--batch", "B=8", *words)
    assert (status, out) == (2, "") and err.count("\n") == 1 and "--with is for a Transformer by its name" in err
