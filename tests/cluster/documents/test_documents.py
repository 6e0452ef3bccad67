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
from paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {"plan_gpt", "recovery"}
"""Run with the slow tests alone."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def code_blocks() -> list[Any]:
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links_within_the_repository_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_picture_of_a_schedule_is_what_its_command_draws(capsys):
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    code, picture = re.search(r'^python -c "(.+)" > (\S+\.svg)$', page, re.MULTILINE).groups()
    assert f"]({Path(picture).name})" in page
    exec(code, {})
    assert capsys.readouterr().out == (ROOT / picture).read_text(encoding="utf-8")


def test_the_readme_is_short_and_comes_to_a_kernel_soon():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") < 150
    assert 0 < readme.index("![") < readme.index("```python") and readme[:readme.index("```python")].count("\n") < 30
    for peer in ("torch.distributed", "JAX", "mpi4py", "SimGrid", "ASTRA-sim"):
        assert peer in readme.split("## Beside other tools")[1].split("##")[0]
