"""The table of Llama 3 405B in docs/budget.md has the figures of its command."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from paths import ROOT

from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve

DAY_SECONDS = 86_400


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_of_llama_3_is_what_its_command_finds(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "budget.md").read_text(encoding="utf-8")
    command = next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "llama3.1-405b" in block)
    words = shlex.split(command.replace("\\\n", " "))[3:]
    assert serve(PROGRAM, main, [*words, "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["sweep"]
    table = text.split("<!-- llama 3 405B -->")[1].split("<!-- end of llama 3 405B -->")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", table, re.MULTILINE))
    found = cell["failures"]
    assert rows["MFU of a step"] == f"{100 * cell['mfu']:.1f} %"
    assert rows["interruptions in 54 days"] == f"{54 * DAY_SECONDS / found['between_seconds']:.0f}"
    assert rows["goodput, devices wait for checkpoints"] == f"{100 * cell['goodput']:.1f} %"
    assert rows["goodput, checkpoints beside the steps"] == f"{100 * found['asynchronous_goodput']:.1f} %"
    assert rows["device hours"] == f"{cell['device_hours'] / 1e6:.1f} M"
    assert rows["days on 16,384 devices"] == f"{cell['days']:.1f}"
    assert cell["goodput"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_of_two_kinds_of_nodes_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "budget.md").read_text(encoding="utf-8")
    told = text.split("<!-- mixed -->")[1].split("<!-- end of mixed -->")[0].replace("```text", "").replace("```", "")
    command = next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "--with" in block)
    assert serve(PROGRAM, main, shlex.split(command.replace("\\\n", " "))[3:]) == 0
    said = capsys.readouterr().out
    assert [line for line in told.strip("\n").splitlines() if line not in said.splitlines()] == []
