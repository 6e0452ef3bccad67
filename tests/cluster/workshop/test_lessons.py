"""The lessons: solutions pass, wrong answers get the right sentence, and the notebooks are those of the sources."""

import json
import subprocess
import sys

import pytest
from paths import ROOT

WORKSHOP = ROOT / "workshop"
sys.path.insert(0, str(WORKSHOP))

import lesson as lesson_module  # noqa: E402
import make  # noqa: E402

LESSONS = make.lessons()


@pytest.fixture(autouse=True)
def small_and_elsewhere(tmp_path, monkeypatch):
    """Devices are threads, and scores are kept in a folder of the test."""
    monkeypatch.setenv("VCLUSTER_WORKSHOP", "small")
    monkeypatch.setenv("VCLUSTER_WORKSHOP_SCORES", str(tmp_path))


def test_every_file_is_what_the_script_makes():
    for path, text in make.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is old: run python workshop/make.py"


def test_every_exercise_has_a_solution_a_check_and_a_wrong_answer():
    for source in LESSONS:
        kinds = [block.kind for block in source.blocks if block.kind not in ("text", "python", "slide", "notes")]
        assert kinds.count("exercise") == kinds.count("solution") == kinds.count("check") == len(source.exercises) > 0
        for place, kind in enumerate(kinds):
            if kind == "exercise":
                assert kinds[place + 1] == "solution"
                assert "wrong" in kinds[place + 2:kinds.index("check", place)]
        assert any(block.kind == "slide" for block in source.blocks)
        assert any(block.kind == "notes" for block in source.blocks)


def execute(block, names):
    exec(compile(block.text, f"<{block.kind}>", "exec"), names)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.name)
def test_a_solved_lesson_passes_and_each_wrong_answer_gets_its_sentence(source, capsys):
    names = {"__name__": "__main__"}
    waiting = []
    for block in source.blocks:
        if block.kind == "wrong":
            waiting.append(block)
        elif block.kind == "check":
            right = dict(names)
            for wrong in waiting:
                execute(wrong, names)
                execute(block, names)
                answer = names["lesson"].last
                assert not answer, wrong.text
                assert wrong.words.lower() in " ".join(str(answer).split()).lower(), f"{wrong.text}\n\n{answer}"
                names = dict(right)
            waiting = []
            execute(block, names)
            assert names["lesson"].last, str(names["lesson"].last)
        elif block.kind in ("python", "solution"):
            execute(block, names)
    capsys.readouterr()
    names["lesson"].score()
    told = capsys.readouterr().out
    assert f"{len(source.exercises)} of {len(source.exercises)} exercises" in told
    assert "to do" not in told


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("solved", [True, False], ids=["solved", "student"])
@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.name)
def test_a_notebook_runs_from_top_to_bottom(source, solved, tmp_path):
    """A student's notebook, too: a check of a function that is not written answers, and raises nothing."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = nbformat.reads(make.notebook(source, solved=solved), 4)
    nbformat.validate(cells)
    nbclient.NotebookClient(cells, timeout=200, resources={"metadata": {"path": str(WORKSHOP)}}).execute()
    answers = [json.dumps(cell.outputs) for cell in cells.cells if "check" in cell.metadata.get("tags", ())]
    assert all(("PASSED" if solved else "NOT YET") in answer for answer in answers)


WITHOUT = """
import os, sys
sys.modules["fcntl"] = None
if hasattr(os, "memfd_create"):
    del os.memfd_create
import make
names = {"__name__": "__main__"}
for block in make.lesson(6).blocks + make.lesson(1).blocks:
    if block.kind in ("python", "solution", "check"):
        exec(block.text, names)
assert names["lesson"].backend == "thread"
"""


def test_lessons_run_on_threads_where_python_has_neither_fcntl_nor_memfd_create():
    """As on native Windows, which is untested."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=WORKSHOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 exercises" in done.stdout


def test_a_lesson_is_reset_and_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lesson_module, "HERE", tmp_path)
    lesson = lesson_module.Lesson(2)
    first = lesson.source.exercises[0]
    lesson.check(first, lesson_module.Answer(True, "x", "right"))
    lesson.score()
    assert f"done   {first}" in capsys.readouterr().out
    notebook = tmp_path / f"{lesson.source.name}.ipynb"
    notebook.write_text("mine", encoding="utf-8")
    lesson.reset()
    assert notebook.read_text(encoding="utf-8") == make.notebook(lesson.source)
    assert notebook.with_suffix(".old.ipynb").read_text(encoding="utf-8") == "mine"
    lesson.score()
    assert f"0 of {len(lesson.source.exercises)}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no exercise 'nothing'"):
        lesson.check("nothing", lesson_module.Answer(True, "x", "right"))
