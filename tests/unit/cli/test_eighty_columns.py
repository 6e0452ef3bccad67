"""What the commands print fits a terminal of 80 columns; only an address in the web is never cut."""

import shlex

import pytest

from parallelism.hardware import Hardware
from vcluster.__main__ import COMMANDS, main
from vcluster.cli.hardware import description, preset_list
from vcluster.cli.serving.text import _continued
from vcluster.demo.__main__ import DEMOS
from vcluster.demo.options import parser_of


@pytest.fixture(autouse=True)
def eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def longest(text: str) -> int:
    return max(len(line) for line in text.splitlines() if "http" not in line)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert longest(capsys.readouterr().out) <= 80


@pytest.mark.parametrize("name", DEMOS)
def test_the_help_of_a_demo(name: str) -> None:
    assert longest(parser_of(name).format_help()) <= 80


def test_the_described_hardware() -> None:
    listed = preset_list()
    assert longest(listed) <= 80
    assert {line.split()[0] for line in listed.splitlines() if line[:1].strip()} >= {*Hardware.presets()}
    assert all(longest(description(name)) <= 80 for name in Hardware.presets())


def test_a_command_goes_on_behind_backslashes() -> None:
    command = shlex.join(["python", "-m", "vcluster", "serve", "a model", *["--tokens", "1 2"] * 9, "--top", "3"])
    lines = _continued(command)
    assert longest("\n".join(lines)) <= 80 and len(lines) == 3
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)     # as a shell reads it
    assert _continued("python -m vcluster serve m") == ["  python -m vcluster serve m"]
