"""The performance page and its curves, made of figures that were written down."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest

from benchmarks import command, page
from benchmarks.copying import name_of
from benchmarks.results import Results, write_json
from vcluster.demo.command_line import serve

MIB = 1 << 20
SIZES = (8, 1 << 16, MIB, 16 * MIB)
MACHINE = {"processor": "a processor", "cores": 2, "memory_bytes": 1 << 34, "system": "a system", "load_average": 0.5}
PAGE = f"# Title\n\nbefore\n\n{page.BEGIN}\nold\n{page.END}\n\nafter\n"


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
    (tmp_path / "performance.md").write_text(PAGE, encoding="utf-8")
    return path


def run(*words: object) -> int:
    return serve(command.PROGRAM, command.main, ["page", *map(str, words)])


@pytest.mark.slow
def test_the_page_gets_tables_and_curves_between_its_marker_lines(figures, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written = tmp_path / "performance.md"
    assert run(figures, "--page", written) == 0
    text = written.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\nbefore\n\n{page.BEGIN}\n")
    assert text.endswith(f"{page.END}\n\nafter\n")
    assert "old" not in text
    assert "a processor, 2 cores, 16 GiB" in text
    assert "python -m benchmarks 'a word'" in text
    assert "| all_reduce | private | 10.0 us<br>0.25 ≤ 0.3 JAX ✓ |" in text
    assert "empty run" in text
    for devices, what in itertools.product((4, 8), ("latency", "bandwidth")):
        assert f"![{what} over size on {devices} devices](performance/{what}-{devices}.svg)" in text
        picture = (tmp_path / "performance" / f"{what}-{devices}.svg").read_text(encoding="utf-8")
        assert picture.startswith("<?xml")
        assert "Date" not in picture
    before = text, picture
    assert run(figures, "--page", written) == 0
    assert (written.read_text(encoding="utf-8"), picture) == before
    assert capsys.readouterr().err == ""


def test_tables_of_other_suites_may_stay_with_the_runs_that_made_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written, old, new = tmp_path / "performance.md", tmp_path / "old.json", tmp_path / "new.json"
    written.write_text(PAGE, encoding="utf-8")
    for path, figures, command_words in (
        (old, {"run": 1.9e-4, "idle": 3e-4}, ["run", "idle"]), (new, {"run": 1.7e-4}, ["run", "--passes", "7"])
    ):
        found = Results(versions={"python": "3.11"})
        for suite, seconds in figures.items():
            found.add(suite, "vcluster", "empty" if suite == "run" else "wake", [seconds], devices=4)
        write_json(path, found.document(["python", "-m", "benchmarks", *command_words], "2026-01-01", MACHINE))
    assert run(old, "--page", written) == 0
    assert run(new, "--page", written, "--keep") == 0
    text = written.read_text(encoding="utf-8")
    assert "190 us" not in text
    places = [text.index(part) for part in ("run --passes 7", "benchmarks run idle", "170 us", "300 us")]
    assert places == sorted(places)
    assert run(new, "--page", written, "--keep") == 0
    assert written.read_text(encoding="utf-8").count("--passes 7") == 1
    assert run(new, "--page", written) == 0
    assert "300 us" not in written.read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_of_a_figure_that_two_runs_have_the_first_counts():
    first, second = results(1.0, (4,)), results(3.0, (4, 8))
    whole = page.merged([first, second])
    assert [m for m in whole.measurements if m.devices == 4] == [m for m in first.measurements if m.devices == 4]
    assert {m.devices for m in whole.measurements if m.suite == "peers"} == {4, 8}
    assert len(whole.measurements) == len(results().measurements)


def test_ours_differ_from_peers_in_more_than_colour(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import curves

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
def test_a_file_without_figures_is_one_line_and_status_2(tmp_path, capsys, text, said):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert run(path, "--page", tmp_path / "performance.md") == 2
    assert f"{command.PROGRAM}: {said.format(path=path)}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", page.BEGIN, f"{page.END}\n{page.BEGIN}", PAGE + PAGE])
def test_a_page_without_its_marker_lines_is_left_as_it_is(figures, tmp_path, capsys, text):
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.md"
    other.write_text(text, encoding="utf-8")
    assert run(figures, "--page", other) == 2
    assert "other.md needs a line <!-- figures: begin --> and, after it, a line" in capsys.readouterr().err
    assert other.read_text(encoding="utf-8") == text


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


def test_the_performance_page_has_its_marker_lines():
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.count(page.BEGIN) == text.count(page.END) == 1


def test_only_one_module_needs_matplotlib():
    folder = Path(page.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "import matplotlib" in path.read_text(encoding="utf-8")] == [
        "curves.py"
    ]
