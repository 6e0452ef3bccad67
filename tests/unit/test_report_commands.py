"""``python -m vcluster report`` and ``compare``: what they print, and the one line where words or files are wrong."""

from __future__ import annotations

import pytest

from parallelism.trace import Event, Trace
from vcluster import __main__ as top
from vcluster.demo.command_line import serve

TRACE = Trace([Event(rank, "compute", "work", 0, 1.0 + rank) for rank in range(2)])


def run(capsys, *words):
    status = serve(top.PROGRAM, top.main, [str(word) for word in words])
    return status, *capsys.readouterr()


@pytest.fixture
def trace(tmp_path):
    TRACE.save(tmp_path / "t.json")
    return tmp_path / "t.json"


def test_report_prints_the_summary_and_the_timeline(capsys, trace):
    status, out, err = run(capsys, "report", trace)
    assert (status, err) == (0, "") and out.startswith(TRACE.summary() + "\n\nvirtual time: 2 s")
    assert [path.name for path in trace.parent.iterdir()] == ["t.json"]


def test_report_writes_the_page_where_it_is_told(capsys, trace, tmp_path):
    status, out, err = run(capsys, "report", trace, "--html", tmp_path / "p.html")
    assert (status, err) == (0, "") and out.endswith(f"The page is {tmp_path / 'p.html'}\n")
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_compare_prints_what_got_slower(capsys, trace, tmp_path):
    Trace([Event(rank, "compute", "work", 0, 3.0) for rank in range(2)]).save(tmp_path / "b.json")
    status, out, err = run(capsys, "compare", trace, tmp_path / "b.json")
    assert (status, err) == (0, "") and out.startswith("slower: makespan 2 s -> 3 s (+1 s, 50.0% slower)\n")


def test_a_forged_file_whose_numbers_overflow_is_reported_without_a_traceback(capsys, tmp_path):
    most = 1.7e308
    forged = [Event(0, kind, "x", most, most, nbytes=most, flops=most) for kind in ("compute", "memory")] * 2
    Trace([*forged, Event(0, "memory", "x", 0, nbytes=-1.7e308)]).save(tmp_path / "f.json")
    status, out, err = run(capsys, "report", tmp_path / "f.json", "--html", tmp_path / "f.html")
    assert (status, err) == (0, "") and "1 device, 5 events" in out
    assert "add up to more than a number can hold" in (tmp_path / "f.html").read_text()
    told = run(capsys, "compare", tmp_path / "f.json", tmp_path / "f.json")
    assert told == (0, "not to be compared: makespan inf s -> inf s\n", "")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_help_is_no_mistake(capsys, command):
    status, out, err = run(capsys, command, "--help")
    assert (status, err) == (0, "") and f"vcluster {command}" in out


@pytest.mark.parametrize(("words", "message"), [
    (["report"], "report: the following arguments are required: TRACE.json"),
    (["report", "{t}", "--htm", "x"], "report: there is no option --htm; did you mean --html?"),
    (["report", "{t}", "more"], "report: nothing is expected here: 'more'"),
    (["report", "{d}/none.json"], "report: {d}/none.json cannot be read: No such file or directory"),
    (["report", "{d}"], "report: {d} cannot be read: Is a directory"),
    (["report", "{d}/broken.json"], "report: {d}/broken.json: expected a vcluster trace, got what is no JSON: "),
    (["report", "{t}", "--html", "{d}/no/p.html"], "report: --html: {d}/no/p.html cannot be written: No such file"),
    (["report", "{t}", "--html", "{t}"], "report: --html: {t} is the trace itself"),
    (["compare", "{t}"], "compare: the following arguments are required: B.json"),
    (["compare", "{t}", "{d}/broken.json"], "compare: {d}/broken.json: expected a vcluster trace"),
    (["reports"], "there is no 'reports'; did you mean report?"),
])
def test_what_is_wrong_is_one_line_and_status_2(capsys, trace, tmp_path, words, message):
    (tmp_path / "broken.json").write_text('{"format": "vcluster trace", "version"')
    status, out, err = run(capsys, *(word.format(t=trace, d=tmp_path) for word in words))
    assert (status, out) == (2, "") and err.count("\n") == 1
    told = message.format(t=trace, d=tmp_path)
    assert err.startswith(f"{top.PROGRAM} {told}" if words[0] in ("report", "compare") else f"{top.PROGRAM}: {told}")
    assert Trace.load(trace) == TRACE
