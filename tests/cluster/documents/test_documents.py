"""The documents are true: their code runs, their links exist, their recorded output is the actual output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE
from page_pictures import PICTURES, svg
from paths import ROOT

from vcluster import DeadlockError
from vcluster.check import check_collective

README = ROOT / "README.md"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [README, *PAGES]
"""The README's blocks fail on purpose: they have tests of their own."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {"plan_gpt", "recovery"}
"""Run with the slow tests alone."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def code_blocks() -> list[Any]:
    return [
        pytest.param(code, output, id=f"{path.stem}-{number}")
        for path in PAGES
        for number, (code, output) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")), 1)
    ]


def run(script: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def run_here(capsys, monkeypatch):
    """Runs a script as the ``__main__`` of this process: what it prints."""
    def run(script: Path) -> str:
        main = ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.chdir(ROOT)
        exec(compile(script.read_text(encoding="utf-8"), script, "exec"), vars(main))
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def block(tmp_path):
    """Writes the code of a block to a file."""
    def write(code: str) -> Path:
        for library in ("jax", "onnx"):
            if re.search(rf"^(import|from) {library}\b", code, re.MULTILINE):
                pytest.importorskip(library)
        script = tmp_path / "block.py"
        script.write_text(code, encoding="utf-8")
        return script

    return write


@pytest.mark.parametrize(("code", "output"), [
    pytest.param(*block.values, id=block.id, marks=pytest.mark.slow)
    for block in code_blocks()])
def test_a_block_of_python_runs_and_prints_what_stands_below_it(block, code, output):
    printed = run(block(code))
    if output:
        assert printed == output


@pytest.mark.sampled(4, 3)
@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize(("code", "output"), [code_blocks()[0], *code_blocks()[14::14]])
def test_some_blocks_run_in_this_process_and_print_what_stands_below_them(run_here, block, code, output):
    printed = run_here(block(code))
    if output:
        assert printed == output


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_its_recorded_output(script):
    assert run(script) == script.with_suffix(".txt").read_text(encoding="utf-8")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", [path for path in EXAMPLES if path.stem not in LONG], ids=lambda path: path.stem)
def test_an_example_prints_its_recorded_output_in_this_process(run_here, script):
    assert run_here(script) == script.with_suffix(".txt").read_text(encoding="utf-8")


def test_the_table_of_plans_on_a_page_is_that_of_its_example():
    recorded = (ROOT / "examples" / "plan_gpt.txt").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    table = page.split("(../examples/plan_gpt.txt):")[1].split("```text\n")[1].split("```")[0]
    assert table and recorded.endswith(table)


def test_there_are_blocks_and_examples_to_run():
    assert len(code_blocks()) >= 4
    assert len(EXAMPLES) >= 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links_within_the_repository_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize(("page", "picture"), [("demo", "1f1b.svg"), ("collectives", "ring.svg")])
def test_a_picture_of_a_page_is_what_its_command_draws(page, picture, capsys):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf'^python -c "(.+)" > docs/{picture}$', text, re.MULTILINE)
    assert f"]({picture})" in text
    exec(code, {})
    assert capsys.readouterr().out == (ROOT / "docs" / picture).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PICTURES, "collectives", "start", "which-split"])
def test_a_page_of_a_concept_begins_with_a_picture(page):
    lines = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    picture = next(re.search(r"!\[.{20,}\]\((.+)\)", line) for line in lines[1:8] if line.startswith("!["))
    assert (ROOT / "docs" / picture[1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", PICTURES)
def test_the_picture_of_a_page_is_what_a_notebook_shows(page):
    """If it changed: `python tests/support/page_pictures.py`, and look at it."""
    assert svg(PICTURES[page]) == (ROOT / "docs" / f"{page}.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_picture_of_a_page_has_room_and_can_be_read(tmp_path):
    browser = Browser()
    try:
        for page, picture in PICTURES.items():
            for dark in (False, True):
                browser.open(ROOT / "docs" / f"{page}.svg", width=picture.width, height=picture.height, dark=dark)
                browser.value("document.querySelectorAll('details:not([open]) > :not(summary)').forEach(e => e.remove())")
                found = browser.value(MEASURE)
                assert not found["bad"] and found["seen"] > 8, (page, found)
                assert browser.value("document.querySelector('.vcluster').offsetHeight") <= picture.height, page
    finally:
        browser.close()


def section(title: str) -> tuple[str, str]:
    """The code and the text below a heading of the README."""
    text = README.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert all(block.count("\n") <= 6 for block in blocks)
    return ("", *blocks)[-2], blocks[-1]


def test_the_readme_is_short_and_begins_with_a_promise_two_commands_and_a_picture():
    readme = README.read_text(encoding="utf-8")
    assert len(readme.split()) <= 500
    first = readme.split("\n## ")[0]
    assert len(re.findall(r"^(?:pip|python) ", first, re.MULTILINE)) == 2
    assert first.count("![") == 1


@pytest.mark.parametrize("title", ["Test", "Debug"])
def test_what_fails_in_the_readme_fails_as_it_says(title, tmp_path, monkeypatch):
    code, told = section(title)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "kernel.py"
    script.write_text(code, encoding="utf-8")
    with pytest.raises((AssertionError, DeadlockError)) as caught:
        exec(compile(code, script, "exec"), {"__name__": "__main__", "__file__": str(script)})
    said = f"{type(caught.value).__name__}: {caught.value}\n"
    assert said.replace(f"{tmp_path}/", "").endswith(told)


COMMAND = re.compile(r"^```sh\npython (-m vcluster plan [^\n]*)\n```\n\n```text\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "told"), COMMAND.findall((ROOT / "docs" / "which-split.md").read_text(encoding="utf-8")),
                         ids=["small", "nodes", "pcie", "large", "fsdp"])
def test_a_rule_of_thumb_is_answered_as_the_page_says(command, told):
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told and in_order(told, done.stdout)


@pytest.mark.slow
def test_the_plan_of_the_readme_is_what_its_command_prints():
    command, told = section("Plan")
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert in_order(told, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "passes"), [(2, False), (1, True)])
def test_the_verdict_of_the_readme_is_that_of_a_ring_with_a_step_too_few(steps, passes):
    def ring(device: Any, x: Any) -> Any:
        total, passing = x, x
        for _ in range(device.size - steps):
            passing = device.sendrecv(passing, (device.rank + 1) % device.size, (device.rank - 1) % device.size)
            total = total + passing
        return total

    answer = check_collective("all_reduce", ring)
    assert bool(answer) == passes
    assert in_order(section("Teach")[1], str(answer)) != passes


def in_order(lines: str, text: str) -> bool:
    """Whether a text has these lines, one behind the other; others may stand between them."""
    rest = iter(text.splitlines())
    return all(line in rest for line in lines.splitlines())


def test_the_errors_of_the_readme_are_those_of_the_table_of_accuracy():
    told = README.read_text(encoding="utf-8").split("The seconds are predicted.")[1].split("; from data sheets")[0]
    rows = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").splitlines()
    for percent, software, gpu in re.findall(r"([\d.]+ %)\s+\(([\w-]+), (\w+)\)", told):
        assert any(f"**{percent}**" in row and software in row and gpu in row for row in rows)
    assert told.count("%") == 3


def test_the_page_of_first_steps_comes_to_a_kernel_soon_and_names_the_other_tools():
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert page[:page.index("```python")].count("\n") < 30
    for peer in ("torch.distributed", "JAX", "mpi4py", "SimGrid", "ASTRA-sim"):
        assert peer in page.split("## Beside other tools")[1].split("##")[0]
