"""The documents are true: their code runs, their links exist, their recorded output is the actual output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from vcluster.demo import __main__ as command

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {"plan_gpt", "recovery"}
"""Run with the slow tests."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def code_blocks() -> list[object]:
    return [
        pytest.param(code, output, id=f"{path.stem}-{number}")
        for path in DOCUMENTS
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


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("code", "output"), code_blocks())
def test_a_block_of_python_runs_and_prints_what_stands_below_it(tmp_path, code, output):
    for library in ("jax", "onnx"):
        if re.search(rf"^(import|from) {library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    printed = run(script)
    if output:
        assert printed == output


@pytest.mark.parametrize(
    "script", [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in EXAMPLES],
    ids=lambda path: path.stem)
def test_an_example_prints_its_recorded_output(script):
    assert run(script) == script.with_suffix(".txt").read_text(encoding="utf-8")


def test_there_are_blocks_and_examples_to_run():
    assert len(code_blocks()) >= 4
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links_within_the_repository_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_page_of_demos_shows_one_as_it_is(capsys):
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    shown = page.split("## What the demo prints")[1].split("```text\n")[1].split("```")[0]
    assert command.main(["mlp", "--pp", "4", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    headings = lambda text: [line for line in text.splitlines() if line[:1].isalpha() and ":" not in line[:20]]
    assert [h for h in headings(shown) if not h.startswith("rank")] == [
        h for h in headings(printed) if not h.startswith("rank")
    ]


def test_the_picture_of_a_schedule_is_what_its_command_draws():
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    code, picture = re.search(r'^python -c "(.+)" > (\S+\.svg)$', page, re.MULTILINE).groups()
    assert f"]({Path(picture).name})" in page
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert printed.stdout == (ROOT / picture).read_text(encoding="utf-8")


def test_the_readme_is_short_and_comes_to_a_kernel_soon():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") < 150
    assert 0 < readme.index("![") < readme.index("```python") and readme[:readme.index("```python")].count("\n") < 30
    for peer in ("torch.distributed", "JAX", "mpi4py", "SimGrid", "ASTRA-sim"):
        assert peer in readme.split("## Beside other tools")[1].split("##")[0]
