"""``python -m vcluster report`` and ``compare``: what they print, and the one line where words or files are wrong."""

from __future__ import annotations

import json

import pytest

from parallelism.trace import Event, Trace
from vcluster import __main__ as top
from vcluster.cli.command_line import serve

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


@pytest.mark.takes_seconds
def test_a_forged_file_whose_numbers_overflow_is_reported_without_a_traceback(capsys, tmp_path):
    most = 1.7e308
    forged = [Event(0, kind, "x", most, most, nbytes=most, flops=most) for kind in ("compute", "memory")] * 2
    Trace([*forged, Event(0, "memory", "x", 0, nbytes=-1.7e308)]).save(tmp_path / "f.json")
    status, out, err = run(capsys, "report", tmp_path / "f.json", "--html", tmp_path / "f.html")
    assert (status, err) == (0, "") and "1 device, 5 events" in out
    assert "add up to more than a float can hold" in (tmp_path / "f.html").read_text()
    told = run(capsys, "compare", tmp_path / "f.json", tmp_path / "f.json")
    assert told == (0, "cannot be compared: makespan inf s -> inf s\n", "")


@pytest.mark.takes_seconds
@pytest.mark.parametrize("field", ["start_seconds", "nbytes", "flops", "wall_duration_seconds"])
def test_an_integer_that_is_no_float_is_read_as_the_nearest(capsys, tmp_path, field):
    names = ("start_seconds", "duration_seconds", "nbytes", "flops", "wall_duration_seconds")
    ones = dict.fromkeys(names, 1.0)
    Trace([Event(0, "compute", "x", **ones), Event(0, "collective", "y", **ones)]).save(tmp_path / "f.json")
    document = json.loads((tmp_path / "f.json").read_text())
    document["columns"][field] = [2**70 + 1, 1]
    (tmp_path / "f.json").write_text(json.dumps(document))
    assert getattr(Trace.load(tmp_path / "f.json")[0], field) == 2.0**70
    assert run(capsys, "report", tmp_path / "f.json", "--html", tmp_path / "f.html")[::2] == (0, "")
    assert run(capsys, "compare", tmp_path / "f.json", tmp_path / "f.json")[::2] == (0, "")


@pytest.mark.takes_seconds
def test_the_roof_is_that_of_the_hardware_that_is_asked_for(capsys, trace, tmp_path):
    Trace([Event(0, "compute", "x", 0, 1.0, flops=8.0, nbytes=4.0)]).save(tmp_path / "r.json")
    words = "report", tmp_path / "r.json", "--html", tmp_path / "r.html"
    none = '["roofline","none, as the peak of this machine is not known"]'
    for more, roof in (((), none), (("--hardware", "tpu-v4"), '"hardware":"tpu-v4"')):
        assert run(capsys, *words, *more)[::2] == (0, "")
        assert roof in (tmp_path / "r.html").read_text()
    for name, told in (("dgx-h10", "did you mean 'dgx-h100'"), ("host", "not calibrated"), ("x.json", "cannot be")):
        status, _, err = run(capsys, *words, "--hardware", name)
        assert status == 2 and "--hardware" in err and told in err and err.count("\n") == 1
    assert run(capsys, "report", trace, "--hardware", "tpu-v4")[0] == 2


@pytest.mark.parametrize("command", ["report", "compare", "doctor", "hardware"])
def test_help_is_no_mistake(capsys, command):
    status, out, err = run(capsys, command, "--help")
    assert (status, err) == (0, "") and f"vcluster {command}" in out


@pytest.mark.parametrize(("words", "message"), [
    (["report"], "report: the following arguments are required: TRACE.json; see --help"),
    (["report", "{t}", "--htm", "x"], "report: there is no option --htm; did you mean --html?"),
    (["report", "{t}", "more"], "report: nothing is expected here: 'more'"),
    (["report", "{d}/none.json"], "report: {d}/none.json cannot be read: No such file or directory"),
    (["report", "{d}"], "report: {d} cannot be read: Is a directory"),
    (["report", "{d}/broken.json"], "report: {d}/broken.json: expected a vcluster trace, got what is no JSON: "),
    (["report", "{t}", "--html", "{d}/no/p.html"], "report: --html: {d}/no/p.html cannot be written: No such file"),
    (["report", "{t}", "--html", "{t}"], "report: --html: {t} is the trace itself"),
    (["compare", "{t}"], "compare: the following arguments are required: B.json"),
    (["compare", "{t}", "{d}/broken.json"], "compare: {d}/broken.json: expected a vcluster trace"),
    (["reports"], "there is no command 'reports'; did you mean report?"),
])
def test_what_is_wrong_is_one_line_and_status_2(capsys, trace, tmp_path, words, message):
    (tmp_path / "broken.json").write_text('{"format": "vcluster trace", "version"')
    status, out, err = run(capsys, *(word.format(t=trace, d=tmp_path) for word in words))
    assert (status, out) == (2, "") and err.count("\n") == 1
    told = message.format(t=trace, d=tmp_path)
    assert err.startswith(f"{top.PROGRAM} {told}" if words[0] in ("report", "compare") else f"{top.PROGRAM}: {told}")
    assert Trace.load(trace) == TRACE


def test_a_comparison_is_a_page_with_both_timelines_on_one_axis(tmp_path, capsys):
    for name, seconds in (("a<b>.json", 1.0), ("after.json", 3.0)):
        Trace([Event(0, "compute", "work", 0, seconds)]).save(tmp_path / name)
    a, b, page = (tmp_path / name for name in ("a<b>.json", "after.json", "page.html"))
    status, out, err = run(capsys, "compare", a, b, "--html", page)
    assert (status, err) == (0, "") and out.endswith(f"The page is {page}\n")
    text = page.read_text()
    assert text.count("<svg") == 2 and "a&lt;b&gt;.json" in text and "<b>.json" not in text
    assert 'width="33.333%"' in text and 'width="100.000%"' in text
    assert run(capsys, "compare", a, b, "--html", a)[2].rstrip().endswith("is a trace")
