"""`python -m vcluster plan --tokens`: the table of a sweep, its JSON, its exit status, and its errors."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallelism import Hardware, ir, models
from parallelism.planning import find_plan
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve
from vcluster.cli.plan import _arguments
from vcluster.cli.sweeps import swept
from vcluster.cli.sweeps.question import Search

SMALL, ON = map(str.split, (
    "gpt --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 --fix schedule=1f1b "
    "--fix microbatch=2 --fix sp=0 --fix recompute=none --fix cp=1 --fix tp=1 --fix zero=0 --global-batch-size 8",
    "--hardware dgx-a100,dgx-h100 --devices 2,4"))
CELL = ["hardware", "devices", "batch", "seconds", "days", "tokens_per_second", "mfu", "device_hours", "cost",
        "energy_kwh", "carbon_kg", "goodput", "plan", "reason", "failures", "hint", "degraded"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = serve(PROGRAM, main, words)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.slow
def test_a_sweep_has_the_plan_of_each_cell_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "1B", "--days", "300", "--price", "dgx-h100=4,dgx-a100=1.5", "--json"]
    status, out, err = said(capsys, "plan", *SMALL, *ON, *words)
    found = json.loads(out)
    assert (status, err) == (0, "") and found["tokens"] == 1e9 and found["days_asked"] == 300
    assert [(each["hardware"], each["devices"]) for each in found["sweep"]] == [
        ("dgx-a100", 2), ("dgx-a100", 4), ("dgx-h100", 2), ("dgx-h100", 4)]
    for each in found["sweep"]:
        assert [*each] == CELL and each["batch"] == 8 and each["reason"] == "" and each["goodput"] == 1
        assert each["tokens_per_second"] == 64 / each["seconds"] == each["plan"]["tokens_per_second"]
        assert each["days"] * 86_400 * each["tokens_per_second"] == pytest.approx(1e9, rel=1e-12)
        assert each["device_hours"] == pytest.approx(each["days"] * 24 * each["devices"], rel=1e-12)
        price = 4 if each["hardware"] == "dgx-h100" else 1.5
        assert each["cost"] == pytest.approx(price * each["device_hours"], rel=1e-12)
    for each in (found["sweep"][1], found["sweep"][2]):
        on = ["--hardware", each["hardware"], "--devices", str(each["devices"])]
        plan = json.loads(said(capsys, "plan", *SMALL, *on, "--json")[1])["plans"][0]
        assert {**plan, "split": each["plan"]["split"]} == each["plan"]
    cheapest = min((each for each in found["sweep"] if each["days"] <= 300), key=lambda each: each["cost"])
    assert found["cheapest"] == cheapest and found["fastest"] == min(found["sweep"], key=lambda each: each["days"])


@pytest.mark.slow
def test_the_table_has_80_columns_and_its_figures_those_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *ON, "--tokens", "1B", "--price", "2")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "1 G tokens, 8 sequences a step" in out and "goodput" not in out and "(*" not in out
    for words in ("tokens/s", "device h", "cost", "dgx-h100\n", "the best plans:", "The fastest: ", "The cheapest: "):
        assert words in out, words


@pytest.mark.slow
def test_failures_and_carbon_are_told_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--tokens", "1B", "--mtbf", "100h", "--storage", "1MB/s", "--carbon", "350"]
    status, out, err = said(capsys, "plan", *SMALL, *ON, *more)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for words in ("goodput", "kWh", "CO2 kg", "failures and checkpoints:", "fails each", "async"):
        assert words in out, words
    for each in json.loads(said(capsys, "plan", *SMALL, *ON, *more, "--json")[1])["sweep"]:
        assert each["days"] * 86_400 * each["tokens_per_second"] * each["goodput"] == pytest.approx(1e9, rel=1e-12)
        assert each["goodput"] == each["failures"]["goodput"] < each["failures"]["asynchronous_goodput"] < 1
        assert each["carbon_kg"] == pytest.approx(0.35 * each["energy_kwh"]) and each["energy_kwh"] > 0
        assert each["failures"]["interruptions"] == pytest.approx(each["days"] * 24 * each["devices"] / 100)
        assert each["failures"]["checkpoint_seconds"] == each["failures"]["checkpoint_bytes"] / 1e6


@pytest.mark.slow
def test_a_range_of_batches_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in SMALL if word != "8"][:-1] + ["--hardware", "dgx-a100", "--devices", "2", "--tokens", "1B"]
    words[words.index("--seq-length") + 1:words.index("--vocab-size")] = ["8"]
    for given in (["--global-batch-size", "4:12"], ["--global-batch-size=4:12"]):
        status, out, err = said(capsys, "plan", *words, *given, "--json")
        assert (status, err) == (0, "") and [each["batch"] for each in json.loads(out)["sweep"]] == [4, 8, 12]
    out = said(capsys, "plan", *words, "--global-batch-size", "4:8")[1]
    assert "4 to 8 sequences a step" in out and "another batch changes what is trained" in out


@pytest.mark.slow
def test_the_page_has_the_picture_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "budget.html"
    words = ["--hardware", "dgx-a100,dgx-h100", "--devices", "2", "--tokens", "1B", "--days", "3", "--html", str(page)]
    for price in ([], ["--price", "2"]):
        status, out, err = said(capsys, "plan", *SMALL, *words, *price)
        assert (status, err) == (0, "") and out.endswith(f"The page is {page}\n")
        text = page.read_text()
        assert text.count("<circle ") == 2 and text.count("<polyline ") == 2 and "stroke-dasharray" in text
        assert f"{'cost' if price else 'device hours'} over days" in text and "the best plans:" in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text
    said(capsys, "plan", *SMALL, *words, "--memory", "1kB")
    assert "<svg" not in page.read_text() and "no plan fits" in page.read_text()
    assert said(capsys, "plan", *SMALL, *words[:-1], str(tmp_path / "nowhere" / "x.html"))[0] == 2


@pytest.mark.slow
def test_where_nothing_meets_the_days_the_nearest_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *ON, "--tokens", "1T", "--days", "1")
    assert status == 1 and err.count("\n") == 1 and "(* in 1 days)" in out and "\n*" not in out
    assert err.startswith("nothing trains 1 T tokens in 1 days; the nearest: ") and " devices of dgx-" in err
    status, out, err = said(capsys, "plan", *SMALL, *ON, "--tokens", "1T", "--memory", "1kB")
    assert status == 1 and err.startswith("no plan fits anywhere: no plan fits: ") and err.count("\n") == 1
    assert "no plan fits" in out and "the best plans" not in out


@pytest.mark.takes_seconds
def test_an_interrupt_tells_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = swept.find_budget

    def interrupted(*given: Any, took: Any, **more: Any) -> Any:
        def take(cell: Any) -> None:
            took(cell)
            if cell.hardware == "dgx-a100" and cell.devices == 4:
                raise KeyboardInterrupt

        return whole(*given, took=take, **more)

    monkeypatch.setattr(swept, "find_budget", interrupted)
    monkeypatch.setattr("parallelism.side_by_side.copies", lambda: 0)
    status, out, err = said(capsys, "plan", *SMALL, *ON, "--fix", "pp=1", "--tokens", "1T", "--json")
    assert status == 130 and err == "python -m vcluster: stopped after 2 of 4 searches\n"
    assert [each["devices"] for each in json.loads(out)["sweep"]] == [2, 4]


@pytest.mark.slow
def test_a_program_in_a_file_is_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loss.mlir"
    path.write_text(str(models.mlp((8, 16, 4), ir.symbol("N"))))
    words = ["plan", str(path), "--batch", "N=8", "--hardware", "laptop", "--devices", "1,2", "--tokens", "1M", "--fix",
             "zero=0", "--fix", "microbatch=2"]
    status, out, _ = said(capsys, *words, "--row-tokens", "5", "--json")
    found = json.loads(out)["sweep"]
    assert status == 0 and len(found) == 2
    for each in found:
        assert each["tokens_per_second"] == 40 / each["seconds"] and each["plan"]["tokens_per_second"] is None
    assert "row_tokens must say how many tokens" in said(capsys, *words)[2]


@pytest.mark.slow
def test_a_cell_that_cannot_be_keeps_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "pcie-v100,dgx-a100", "--devices", "2", "--tokens", "1B"]
    status, out, err = said(capsys, "plan", *SMALL, *words)
    assert (status, err) == (0, "") and "pcie-v100 has no rate for bfloat16; give --fp32 or --fp16" in " ".join(out.split())
    assert "dgx-a100  2  " in out


@pytest.mark.slow
def test_an_imperfect_cluster_is_told_beside_the_perfect_one(capsys: pytest.CaptureFixture[str]) -> None:
    """And the `simulate` line of its plan has the same faults, so that it gives the same seconds."""
    wrong = ["--slow-links", "10%:0.5", "--slow-links", "nvlink:50%:0.25", "--slow-devices", "1:0.5", "--jitter", "3%"]
    on = ["--hardware", "dgx-a100", "--devices", "4"]
    status, out, err = said(capsys, "plan", *SMALL, *on, *wrong, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found["imperfect"]["slowdown"] > 1 and found["imperfect"]["devices"] == 4
    first = found["plans"][0]
    again = said(capsys, *shlex.split(first["command"])[3:], "--json")[1]
    assert json.loads(again)["seconds"] == first["seconds"] < found["imperfect"]["seconds"]
    text = " ".join(said(capsys, "plan", *SMALL, *on, *wrong)[1].split())
    assert found["imperfect"]["text"] in text and "suffers least" in text
    swept = json.loads(said(capsys, "plan", *SMALL, *on, *wrong, "--tokens", "1B", "--json")[1])["sweep"][0]
    assert swept["seconds"] == found["imperfect"]["seconds"]
    assert swept["degraded"] == {name: each for name, each in found["imperfect"].items() if name != "text"}


@pytest.mark.slow
def test_slow_links_are_faults_of_ports_in_python_and_in_a_simulation_of_every_device(
    capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--hardware", "dgx-a100:2+plain", "--slow-links", "10%:0.5", "--slow-links", "nvlink:25%:0.25"]
    found = json.loads(said(capsys, "plan", *SMALL, *on, "--global-batch-size", "16", "--json")[1])["plans"][0]
    hardware = Hardware.preset("dgx-a100:2+plain")
    for level, factor, ranks in (("infiniband", 0.5, (0, 10)), ("nvlink", 0.25, (0, 4, 8, 12))):
        for rank in ranks:
            hardware = hardware.fault(source=rank, bandwidth_factor=factor, level=level)
            hardware = hardware.fault(target=rank, bandwidth_factor=factor, level=level)
    words = [*SMALL, "--global-batch-size", "16", *on[:2]]
    search = Search.of(PROGRAM, _arguments(PROGRAM, words, loads=False))
    plans = find_plan(search.model, hardware=hardware, devices=16, batch=16, **search.options)
    plan = next(plan for plan in plans if str(plan.strategy) == found["strategy"])
    assert found["seconds"] == plan.figures.seconds
    assert plan.simulate(fold=False).makespan_seconds == pytest.approx(found["seconds"], rel=1e-9)
    whole = replace(plan.task, hardware=Hardware.preset("dgx-a100:2+plain")).simulate(plan.settings)
    assert whole.makespan_seconds < found["seconds"]


WRONG = {
    "--tokens": ["0", "-1T", "nan", "inf", "1TB", "T", "", "1T tokens", "1e400", "one", "1..5T", "0T", "1T,2T", "--"],
    "--days": ["0", "-3", "nan", "inf", "", "30d", "1e999", "a month", "1,2", "--"],
    "--price": ["0", "-2", "nan", "inf", "", "2.50$", "dgx-a100=", "=2", "dgx-a100=0", "2,3", "dgx-a100=1,dgx-a100=2",
                "dgx-h100=-1", "b200-node=3", "dgx-h100=3", "a=b=c", "dgx-a100=nan", ",", "--"],
    "--devices": ["0", "-2", "2,2", "2,,4", "2,", ",", "two", "1.5", "", "2;4", "--"],
    "--hardware": ["dgx", "dgx-a100,", ",", "", "dgx-a100,dgx-a100", "dgx-a100,nowhere", "nowhere.toml,dgx-a100",
                   "dgx-a100:0", "dgx-a100:-1", "dgx-a100+nothing", "--"],
    "--carbon": ["0", "-400", "nan", "inf", "", "400g", "--"],
    "--mtbf": ["0", "0h", "-5h", "nan", "inf", "50000", "50000H", "h", "", "5 weeks", "1e400h", "--"],
    "--storage": ["10GB/s", "0GB/s", "-1GB/s", "10GB", "10", "nan", "10XB/s", "", "--"],
    "--restart": ["10min", "0s", "-3min", "10", "soon", "", "--"],
    "--row-tokens": ["0", "-1", "8.5", "many", "5", ""],
    "--global-batch-size": ["0", "-8", "8.5", "nan", "", "8:", ":8", "8:4", "0:8", "8:16:32", "a:b", "-8:8", "8:8.5", ":"],
    "--memory": ["0", "-1GB", "80", "lots"],
    "--fix": ["tp", "tp=", "nothing=2", "tp=-1"],
    "--slow-links": ["10%", "10%:0", "10%:1.5", "10:0.5", "0%:0.5", "101%:0.5", "-1%:0.5", "nan%:0.5", "10%:nan", ":10%:0.5",
                     "", "ethernet:10%:0.5", "nvlink:10%", "nvlink:10%:0.5:1", "10%:50%", "--"],
    "--slow-devices": ["1", "0:0.8", "1:0", "1:1.2", "-1:0.8", "1:", ":0.8", "x:0.8", "1:x", "9:0.8", "1:0.8:2", "", "--"],
    "--lost-devices": ["0", "-1", "4", "1.5", "nan", "", "all", "--"],
    "--jitter": ["3", "0%", "-3%", "101%", "nan%", "%", "", "3 %", "--"],
    "--token": ["1T"], "--day": ["30"], "--prices": ["2"], "--row-token": ["2"],
}


@pytest.mark.takes_seconds
@pytest.mark.sampled(24)
@pytest.mark.parametrize("flag", WRONG)
def test_wrong_words_of_a_sweep_are_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in WRONG[flag]:
        words = ["plan", *SMALL, *ON, "--tokens", "1B", f"{flag}={value}"]
        status, out, err = said(capsys, *words)
        assert (status, out) == (2, ""), (flag, value, out, err)
        assert err.count("\n") == 1 and err.startswith("python -m vcluster plan: ") and len(err) < 700, (flag, value, err)


@pytest.mark.parametrize("words", ["--slow-links 10%:0.5", "--slow-devices 1:0.8", "--lost-devices 1", "--jitter 3%"])
def test_searches_without_strategies_take_no_faults(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--hardware", "dgx-a100", "--devices", "2", "--slices", "2"]
    status, out, err = said(capsys, "plan", *SMALL[:SMALL.index("--fix")], "--global-batch-size", "8", *on, *words.split())
    assert (status, out) == (2, "") and "is for plans of strategies; leave it out with --slices" in err


def test_a_preset_needs_a_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, "--hardware", "dgx-a100", "--tokens", "1B")
    assert (status, out) == (2, "") and "say how many devices of dgx-a100 there are" in err


@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", [
    "--days 3", "--price 2", "--carbon 400", "--mtbf 5h", "--storage 1GB/s", "--restart 3min",
    "--row-tokens 8", "--global-batch-size 4:8", "--devices 2,4", "--hardware dgx-a100,dgx-h100",
    "--tokens 1B --why-not tp=2", "--tokens 1B --save x.json", "--tokens 1B --load x.json", "--tokens 1B --verify",
    "--tokens 1B --again", "--tokens 1B --auto", "--tokens 1B --slices 2", "--load x.json --days 3"])
def test_words_that_do_not_go_together_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "plan", *SMALL, "--hardware", "dgx-a100", "--devices", "2", *words.split())
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert any(told in err for told in ("give --tokens, too", "leave ")), err
    assert not Path("x.json").exists()
