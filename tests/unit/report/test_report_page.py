"""The page of a trace before a browser sees it: what is in it, what is left out; no name gets out of its string."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism.timeline import Priced
from parallelism.trace import Event, Trace
from vcluster import report
from vcluster.report.page import embedded, page
from vcluster.report.payload import packed, payload

HOSTILE = "</script><script>alert(1)</script><!--\u2028\u2029]]>&lt;\x00\x1b[2J\u202e\udc80\"'`${x}@@DATA@@"


def unpacked(array):
    return np.frombuffer(base64.b64decode(array["data"]), f"<{array['type']}")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *(value for name, value in attrs if name in ("src", "href") or name.startswith("on"))))


def tags(text):
    parser = Tags()
    parser.feed(text)
    return parser.found


PIPELINE = Trace([
    Event(0, "memory", "weights", 0, nbytes=64),
    Event(0, "compute", "0F0", 0, 2, stage=0, microbatch=0, phase="F", flops=6),
    Event(0, "send", "send", 2, peer=1, tag=0, sequence=0, bytes_sent=8),
    Event(0, "collective", "all_reduce", 2, 8, group=(0, 1), sequence=0, axes=("pp",), bytes_received=4,
          sources=((1, 4),), payload_bytes=4.0),
    Event(1, "recv", "recv", 0, 3, peer=0, tag=0, sequence=0, bytes_received=8),
    Event(1, "compute", "1F0", 3, 4, stage=1, microbatch=0, phase="F"),
    Event(1, "collective", "all_reduce", 7, 3, group=(0, 1), sequence=0, axes=("pp",), bytes_received=4,
          sources=((0, 4),), payload_bytes=4.0),
    Event(1, "collective", "all_gather", 7, 3, group=(0, 1), sequence=1, work=0),
], mesh_shape={"pp": 2, "dp": 1}, hardware="by hand")


def test_the_timeline_has_a_bar_for_each_event_that_takes_time_by_row_and_start():
    bars = payload(PIPELINE)["timeline"]
    assert bars["count"] == 6 and bars["points"] == 1
    found = {name: unpacked(bars[name]).tolist() for name in ("rank", "lane", "start", "duration", "waited", "part")}
    assert found == {"rank": [0, 0, 1, 1, 1, 1], "lane": [0, 1, 0, 1, 1, 2], "start": [0, 2, 3, 0, 7, 7],
                     "duration": [2, 8, 4, 3, 3, 3], "waited": [0, 5, 0, 2, 0, 0], "part": [0, 4, 0, 4, 4, 4]}
    names = bars["details"]["name"]
    assert [names["values"][i] for i in unpacked(names["index"])] == [
        "0F0", "all_reduce", "1F0", "recv", "all_reduce", "all_gather"]
    path = {name: unpacked(bars["path"][name]).tolist() for name in ("rank", "start", "end")}
    assert path == {"rank": [0, 1, 1, 0], "start": [0, 2, 3, 7], "end": [2, 3, 7, 10]}


def test_the_figures_beside_it_are_those_of_the_trace():
    data = payload(PIPELINE)
    assert data["split"] == {"rows": [(2, 0, 0, 0, 3, 5, 0), (4, 0, 0, 0, 4, 2, 0)], "folds": False,
                             "outside": [("slowest", 1), ("fullest", 0)], "whole": 20,
                             "total": [6, 0, 0, 0, 7, 7, 0]}
    assert data["verdict"][:2] == [
        "2 devices for 10 s: 30.0% of it compute, exposed communication 35.0%, bubble 35.0%, idle 0.0%.",
        "The largest loss is exposed communication, 4 s on rank 1; of the collectives all_reduce over pp takes "
        "longest, 3 s, at 1.33 B/s of bus bandwidth."]
    assert [(one["label"], one["cells"]) for one in data["matrix"]["of"]] == [
        ("all", [(0, 1, 12), (1, 0, 4)]), ("pp", [(0, 1, 12), (1, 0, 4)])]
    assert data["ranks"] == [{"rank": 0, "place": "pp=0 dp=0"}, {"rank": 1, "place": "pp=1 dp=0"}]
    assert data["memory"]["categories"] == ["weights"] and data["left_out"] == []
    assert [row[:4] for row in data["collectives"]] == [
        ["all_reduce", "direct", "pp", "1"], ["all_gather", "direct", "-", "1"]]


def test_the_split_of_more_than_16_devices_folds_and_names_the_slowest_and_the_fullest():
    def given(count):
        return payload(Trace([
            *(Event(r, "compute", "c", 0, 5.0 if r == 7 else 1.0) for r in range(count)),
            Event(9, "memory", "x", nbytes=8.0)]))["split"]

    assert not given(16)["folds"] and given(17)["folds"]
    assert given(17)["outside"] == [("slowest", 7), ("fullest", 9)] and len(given(17)["rows"]) == 17


def test_an_empty_trace_says_so_and_has_no_other_section():
    data = payload(Trace([]))
    assert data["verdict"] == ["This trace has no events."]
    assert not {"timeline", "split", "collectives", "matrix", "memory"} & data.keys()
    assert payload(Trace([Event(0, "h2d", "x")]))["verdict"][0].startswith("Nothing in this trace takes virtual time")


def test_of_too_many_events_the_shortest_are_left_out_and_it_says_so():
    trace = Trace([Event(0, "compute", f"c{i}", 2.0 ** i, 2.0 ** i) for i in range(6)])
    data = payload(trace, most_bars=2)
    assert data["left_out"] == ["The timeline shows the 2 longest of 6 events that take time, 76.2% of all their "
                                 "time; the figures count every event."]
    assert data["timeline"]["details"]["name"]["values"] == ["c4", "c5"] and sum(data["split"]["total"]) == 63
    with pytest.raises(ValueError, match="most_bars must be at least 1, got 0"):
        report.html(trace, "never", most_bars=0)


def test_of_too_many_devices_the_first_are_shown_and_it_says_so():
    trace = Trace([Event(r, "compute", "c", 0, 1) for r in (0, 4000)], size=4001)
    data = payload(trace)
    assert len(data["ranks"]) == 1024 == len(data["split"]["rows"]) and data["timeline"]["count"] == 1
    assert data["left_out"][0].startswith("The first 1,024 of 4,001 devices are shown")
    received = Trace([Event(3999, "recv", "recv", peer=0, bytes_received=8)], size=4000)
    assert "matrix" not in payload(received)
    assert "The communication matrix is shown for up to 256 devices." in payload(received)["left_out"]


def test_messages_without_a_mesh_and_collectives_without_axes_have_labels_too():
    trace = Trace([Event(1, "recv", "recv", 0, 1, peer=0, bytes_received=8),
                   Event(1, "collective", "shift", 0, 1, bytes_received=2, sources=((0, 2),))])
    assert [one["label"] for one in payload(trace)["matrix"]["of"]] == ["all", "groups without axes", "messages"]


def test_more_asynchronous_operations_than_lanes_share_the_last():
    trace = Trace([Event(0, "collective", "a", float(i), 10.0, work=i) for i in range(5)])
    assert sorted(unpacked(payload(trace)["timeline"]["lane"]).tolist()) == [2, 3, 4, 4, 4]


def hostile(name):
    return Trace([
        Event(0, "compute", name, 0, 1, phase=name, location=name), Event(0, "memory", name, 0, nbytes=1),
        Event(1, "collective", name, 0, 1, axes=(name,), algorithm=name, bytes_received=1, sources=((0, 1),)),
    ], mesh_shape={name: 2}, hardware=name)


def test_a_hostile_name_stays_in_its_string(tmp_path):
    clean, bad = page(payload(hostile("name"))), page(payload(hostile(HOSTILE)))
    assert tags(bad) == tags(clean) and bad.isascii() and "alert(1)</script>" not in bad
    assert all(len(tag) == 1 for tag in tags(bad))       # nothing is fetched, and no attribute runs
    assert bad.count("<script") == 2
    data = data_of(bad)
    assert data["timeline"]["details"]["name"]["values"][0].startswith("</script><script>alert(1)</script><!--??]]>")
    report.html(hostile(HOSTILE), tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == bad


@up_to(15)
@given(st.recursive(st.text() | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_embedded_json_is_the_same_json_without_any_markup(value):
    text = embedded(value)
    assert text.isascii() and not set(text) & set("<>&") and json.loads(text) == value


@pytest.mark.parametrize(("numbers", "kind"), [
    ([], "u1"), ([0, 255], "u1"), ([-1, 3], "i1"), ([256], "u2"), ([-200], "i2"), ([70_000], "u4"), ([2**33], "f8"),
    ([-(2**20)], "i4"),
])
def test_integers_are_packed_as_small_as_they_fit(numbers, kind):
    array = packed(np.array(numbers, np.int64))
    assert array["type"] == kind and unpacked(array).tolist() == numbers


def test_the_policy_names_the_scripts_hash_and_lets_nothing_else_run():
    text = page(payload(PIPELINE))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert re.fullmatch(r"default-src 'none'; base-uri 'none'; form-action 'none'; script-src 'sha256-[\w+/]+=*'; "
                        r"style-src 'sha256-[\w+/]+=*'", policy)
    for address in ("http:", "https:", "//cdn", "url(", "@import", "fetch(", "XMLHttp", "innerHTML", "eval("):
        assert address not in text


finite = st.floats(0, 1e308) | st.sampled_from((0.0, 1e-320, 1.0, 1e308, 1.7e308))


@up_to(25)
@given(st.lists(st.builds(
    Event, st.integers(0, 3), st.sampled_from(("compute", "collective", "send", "recv", "wait", "memory", "h2d")),
    st.text(max_size=5), finite, finite, bytes_received=st.integers(0, 2**53), peer=st.none() | st.integers(-1, 3),
    group=st.none() | st.just((0, 1)), sequence=st.none() | st.integers(0, 2), work=st.none() | st.integers(0, 2),
    axes=st.none() | st.just(("a",)), nbytes=finite, parent=st.none() | st.just(0)), max_size=12))
def test_any_trace_has_a_page_and_a_comparison(events):
    trace = Trace(events, 4)
    with np.errstate(all="ignore"):     # as `Trace.makespan_seconds` has it, too
        assert data_of(page(payload(trace)))["verdict"]
        text = str(report.compare(trace, Trace([])))
        assert max(map(len, text.splitlines())) <= 80
        assert max(map(len, trace.summary().splitlines())) <= 80


def test_a_run_has_a_page_too(tmp_path):
    class Run:
        trace = PIPELINE

    report.html(Run(), tmp_path / "r.html")
    written = (tmp_path / "r.html").read_text()
    assert "for 10\\u00a0s:" in written          # no line of a sentence ends between a number and its unit
    assert data_of(written.replace("\\u00a0", " ")) == json.loads(json.dumps(payload(PIPELINE)))


def test_a_page_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        report.html(PIPELINE, tmp_path / "no" / "p.html")


def test_a_cell_shows_the_page_and_a_terminal_the_summary(tmp_path):
    trace = Trace([Event(rank, "compute", HOSTILE, 0, 1 + rank) for rank in range(3)])
    report.html(trace, tmp_path / "page.html")
    shown = report.show(trace, height=300)
    frames = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: frames.append((tag, dict(attributes)))
    parser.feed(shown._repr_html_())
    (tag, attributes), = frames
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts") and "height:300px" in attributes["style"]
    assert attributes["srcdoc"] == (tmp_path / "page.html").read_text(encoding="ascii")
    assert repr(shown) == trace.summary()
    with pytest.raises(ValueError, match="most_bars must be at least 1, got 0"):
        report.show(trace, most_bars=0)


def test_the_title_says_of_how_many_devices_the_events_are(tmp_path):
    events = [Event(rank, "compute", "work", 0, 1) for rank in (0, 5)]
    some, folded = (Trace(events, 8, ranks=(0, 5), priced=Priced("modelled", folded=how)) for how in (False, True))
    assert payload(some)["title"] == "Trace of 2 of 8 devices"
    assert payload(folded)["title"] == "Trace of 2 representatives of 8 devices"
    assert payload(Trace(events[:1], 1))["title"] == "Trace of 1 device"
    folded.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == folded
