"""The lessons: solutions pass, wrong answers get the right sentence, and the notebooks are those of the sources."""

import json
import re
import subprocess
import sys
import warnings

import pytest
from lone_lesson import WITHOUT, run_alone, solved_notebook
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


@pytest.mark.sampled(10, 5)
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exercises", "without"), [
    pytest.param(4, 3, WITHOUT, id="on threads"), pytest.param(6, 4, "", id="as it is")])
def test_a_notebook_and_lesson_py_are_all_that_a_student_needs(number, exercises, without, tmp_path):
    """In a folder with these two files alone: a lesson runs, its score is kept there, and it is reset.

    On threads, too, where Python has neither fcntl nor memfd_create, as on native Windows, which is untested.
    """
    source = make.lesson(number)
    notebook, mine = solved_notebook(number, tmp_path)
    done = run_alone(notebook, without)
    assert done.returncode == 0, done.stderr
    assert f"{exercises} of {exercises} exercises (each by its last check)" in done.stdout
    assert "passes" in done.stdout.splitlines()
    assert "on thread" in done.stdout.splitlines() or not without
    assert notebook.read_text(encoding="utf-8") == make.notebook(source)
    assert json.loads(notebook.with_suffix(".old.ipynb").read_text(encoding="utf-8")) == mine
    assert not list(tmp_path.glob(".score*"))


def test_the_notebooks_show_no_answers():
    """A cell of a check calls it, and has nothing more in it; all else that a student gets is text and exercises."""
    for source in LESSONS:
        for cell in json.loads(make.notebook(source))["cells"]:
            text = "".join(cell["source"])
            if "check" in cell["metadata"].get("tags", ()):
                assert re.fullmatch(r'lesson\.check\("\w+", \w+\)', text)
            for block in source.blocks:
                assert block.kind != "solution" or block.text not in text


def test_the_checks_are_those_of_the_lessons():
    assert {source.number: source.exercises for source in LESSONS} == {
        number: tuple(checks) for number, checks in lesson_module.EXERCISES.items()}


def test_the_score_of_an_exercise_is_that_of_its_last_check(tmp_path, capsys):
    def gpipe(rank, stages, microbatches):
        return [f"{kind}{k}" for kind in "FB" for k in range(microbatches)]

    lesson = lesson_module.Lesson(6)
    assert capsys.readouterr().out == ""
    assert lesson.check("gpipe", gpipe)
    assert not lesson.check("one_f_one_b", gpipe)
    again = lesson_module.Lesson(6)                         # the kernel starts again
    assert "done before: 1 of 4 exercises" in capsys.readouterr().out
    again.score()
    told = capsys.readouterr().out
    assert "done   gpipe" in told
    assert "to do  one_f_one_b" in told
    assert not again.check("gpipe", lambda rank, stages, microbatches: [])
    again.score()
    assert "0 of 4" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no exercise 'nothing'"):
        lesson.check("nothing", gpipe)
    with pytest.raises(ValueError, match="there is no lesson 10"):
        lesson_module.Lesson(10)


def test_a_lesson_without_a_notebook_is_not_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_module, "HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no notebook 2-"):
        lesson_module.Lesson(2).reset()
    notebook = tmp_path / "2-mine.ipynb"
    notebook.write_text('{"cells": [], "metadata": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="has lost the cells that it was given with"):
        lesson_module.Lesson(2).reset()
    assert [path.name for path in tmp_path.iterdir()] == ["2-mine.ipynb"]


def test_the_folder_of_a_student_has_no_solutions(tmp_path):
    subprocess.run([sys.executable, "-m", "workshop.make", "students", str(tmp_path / "mine")], cwd=ROOT, check=True)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"lesson.py", *(f"{each.name}.ipynb" for each in LESSONS)}
    for source in LESSONS:
        assert (tmp_path / "mine" / f"{source.name}.ipynb").read_text(encoding="utf-8") == make.notebook(source)
    wrong = subprocess.run([sys.executable, "workshop/make.py", "student"], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    assert wrong.returncode == 1
    assert "make.py students FOLDER" in wrong.stderr


def test_a_check_shows_its_verdict_and_nothing_in_front_of_it(capfd):
    def rows(rank, rows, size):
        print("noise of mine")
        warnings.warn("noise of a library", stacklevel=1)
        return 1

    lesson = lesson_module.Lesson(1)
    answer = lesson.check("rows", rows)
    assert not answer
    assert capfd.readouterr() == ("", "")
    assert "&#10008; NOT YET</span>formula rows" in answer._repr_html_()
    assert "&#10004; PASSED</span>formula rows" in lesson.check(
        "rows", lambda rank, rows, size: rows // size + (rank < rows % size))._repr_html_().replace("&lt;lambda&gt;", "rows")


def test_the_pictures_of_slides_are_in_them():
    page = make.slides()
    for name, picture in make.pictures().items():
        assert picture in page, name
    assert page.count('<div class="picture">') == len(make.pictures())
