"""The performance page and its curves, made of figures that were written down."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks import command, figures_page, page
from benchmarks.copying import name_of
from benchmarks.results import Results, write_json
from benchmarks.targets import PLAIN
from vcluster.cli.command_line import serve

MIB = 1 << 20
SIZES = (8, 1 << 16, MIB, 16 * MIB)
MACHINE = {"processor": "a processor", "cores": 2, "memory_bytes": 1 << 34, "system": "a system", "load_average": 0.5}


def results(scale: float = 1.0, devices: tuple[int, ...] = (4, 8)) -> Results:
    found = Results(versions={"python": "3.11"})
    for system, factor in (("vcluster", 1.0), ("mpich", 2.0), ("jax", 4.0), ("gloo", 20.0)):
        for count, operation, nbytes in itertools.product(devices, ("all_reduce", "broadcast"), SIZES):
            seconds = [(1e-5 + nbytes * 1e-9) * factor * scale * rate for rate in (0.9, 1.0, 1.3)]
            memories = ("private", "shared") if system == "vcluster" else ("private",)
            for memory in memories:
                found.add("peers", system, operation, seconds, devices=count, nbytes=nbytes, memory=memory)
    for count, processes, nbytes in itertools.product(devices, (1, 2), SIZES[1:]):
        found.add("peers", name_of(processes), "copy", [nbytes * 1e-10], devices=count, nbytes=nbytes)
    found.add("run", "vcluster", "empty", [1.9e-4], devices=4)
    return found


@pytest.fixture
def figures(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, results().document(["python", "-m", "benchmarks", "a word"], "2026-01-01", MACHINE))
    return path


def run(*words: object) -> int:
    return serve(command.PROGRAM, command.main, ["page", *map(str, words)])


@pytest.mark.slow
def test_the_page_has_tables_and_curves(figures, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written = tmp_path / "pages" / "performance.md"
    assert run(figures, "--page", written) == 0
    text = written.read_text(encoding="utf-8")
    assert text.startswith("# Figures\n\nMeasured on a processor")
    assert "a processor, 2 cores, 16 GiB" in text
    assert "python -m benchmarks 'a word'" in text
    assert "| all_reduce | private | 10.0 us<br>0.25 ≤ 0.3 JAX ✓ |" in text
    assert "empty run" in text
    for devices, what in itertools.product((4, 8), ("latency", "bandwidth")):
        assert f"![{what} over size on {devices} devices](performance/{what}-{devices}.svg)" in text
        picture = (tmp_path / "pages" / "performance" / f"{what}-{devices}.svg").read_text(encoding="utf-8")
        assert picture.startswith("<?xml")
        assert "Date" not in picture
    before = text, picture
    assert run(figures, "--page", written) == 0
    assert (written.read_text(encoding="utf-8"), picture) == before
    assert capsys.readouterr().err == ""


def test_several_runs_make_one_page_with_the_commands_that_made_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "drawing", lambda what: lambda results, folder: [])     # without matplotlib
    written, first, second = tmp_path / "performance.md", tmp_path / "first.json", tmp_path / "second.json"
    for path, figures, command_words in (
        (first, {"run": 1.7e-4}, ["run", "--passes", "7"]), (second, {"run": 1.9e-4, "idle": 3e-4}, ["run", "idle"])
    ):
        found = Results(versions={"python": "3.11"})
        for suite, seconds in figures.items():
            found.add(suite, "vcluster", "empty" if suite == "run" else "wake", [seconds], devices=4)
        write_json(path, found.document(["python", "-m", "benchmarks", *command_words], "2026-01-01", MACHINE))
    assert run(first, second, "--page", written) == 0
    text = written.read_text(encoding="utf-8")
    assert "190 us" not in text
    places = [text.index(part) for part in ("run --passes 7", "benchmarks run idle", "170 us", "300 us")]
    assert places == sorted(places)
    assert capsys.readouterr().err == ""


def test_of_a_figure_that_two_runs_have_the_first_counts():
    first, second = results(1.0, (4,)), results(3.0, (4, 8))
    whole = page.merged([first, second])
    assert [m for m in whole.measurements if m.devices == 4] == [m for m in first.measurements if m.devices == 4]
    assert {m.devices for m in whole.measurements if m.suite == "peers"} == {4, 8}
    assert len(whole.measurements) == len(results().measurements)


@pytest.fixture
def curves(monkeypatch):
    """The module that draws, without the package that it draws with: it is not needed for what is asked here."""
    for name in ("", ".backends", ".backends.backend_agg", ".figure", ".ticker"):
        monkeypatch.setitem(sys.modules, f"matplotlib{name}", MagicMock())
    monkeypatch.delitem(sys.modules, "benchmarks.curves", raising=False)
    yield importlib.import_module("benchmarks.curves")
    sys.modules.pop("benchmarks.curves", None)


def test_ours_differ_from_peers_in_more_than_colour(tmp_path, curves):
    ours = [style for (system, _), style in curves._STYLES.items() if system == "vcluster"]
    others = [style for (system, _), style in curves._STYLES.items() if system != "vcluster"]
    assert {style.line for style in ours} == {"-"}
    assert "-" not in {style.line for style in others}
    assert min(style.width for style in ours) > max(style.width for style in others)
    assert len({(style.mark, style.filled) for style in [*ours, *others]}) == len(ours) + len(others)
    assert curves.draw(Results(), tmp_path) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        ("{", "{path} has no figures: Expecting property name"),
        ("[]", "{path} has no figures: it is no JSON object"),
        ("{}", "{path} has no figures: figures are 'vcluster benchmarks' in format 1, got None in None"),
    ],
)
def test_a_file_without_figures_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr(page, "drawing", lambda what: lambda results, folder: [])     # without matplotlib
    path = tmp_path / "figures.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert run(path, "--page", tmp_path / "pages" / "performance.md") == 2
    assert f"{command.PROGRAM}: {said.format(path=path)}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["page", "figures.json"], ["peers", "--svg", "curves"]])
def test_without_matplotlib_what_draws_is_one_line_and_status_2_before_anything_is_timed(monkeypatch, capsys, words):
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert serve(command.PROGRAM, command.main, words) == 2
    what = "page" if words[0] == "page" else "--svg"
    assert capsys.readouterr() == (
        "", f"{command.PROGRAM}: {what} needs matplotlib, which is not installed: pip install -e '.[bench]'\n"
    )


# -- what docs/performance.md keeps ------------------------------------------------------------------------------------


DOCUMENT = Path(page.__file__).parents[1] / "docs" / "performance.md"


def test_the_tables_of_the_performance_page_are_those_of_the_figures_that_are_kept(capsys):
    assert serve(command.PROGRAM, command.main, ["figures"]) == 0
    printed = capsys.readouterr().out.strip()
    text = DOCUMENT.read_text(encoding="utf-8")
    assert printed in text
    assert len(text.splitlines()) <= 150
    figures = figures_page.read()
    peers = [figure for figure in figures if figure.suite == "peers"]
    assert f"{sum(figure.met == 'yes' for figure in peers)} of {len(peers)}" in text
    assert printed.count("**NO**") == sum(
        figure.met == "no" for figure in figures if figure.suite not in ("peers", "growth")) > 0


def test_every_target_of_another_suite_has_a_figure_that_is_kept():
    assert {suite for suite, _, _ in PLAIN} <= {figure.suite for figure in figures_page.read()}
    assert all(figure.met in ("yes", "no") and figure.target for figure in figures_page.read())


def test_other_figures_can_be_judged_and_a_file_of_none_is_refused(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    rows = [",".join(figures_page.Figure._fields), "peers,barrier,private,,4,16.0 us,0.66,at most 1 MPICH,yes",
            "peers,round_trip,private,8 B,4,21.4 us,0.71,at most 1.5 MPICH,no"]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert serve(command.PROGRAM, command.main, ["figures", "--figures", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| collectives up to 64 KiB | 4 | 1 of 1 | 0.66 | 0.66 |" in out
    assert "| round trips | 4 | 0 of 1 | 0.71 | 0.71 |" in out
    path.write_text("a,b\n", encoding="utf-8")
    assert serve(command.PROGRAM, command.main, ["figures", "--figures", str(path)]) == 2
    assert "has no figures: its columns are a, b" in capsys.readouterr().err


def test_only_one_module_needs_matplotlib():
    folder = Path(page.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "import matplotlib" in path.read_text(encoding="utf-8")] == [
        "curves.py"
    ]
