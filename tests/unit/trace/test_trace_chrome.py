"""Traces for Perfetto and HolisticTraceAnalysis: what is drawn, arrows that find their slices, keys that are needed."""

from __future__ import annotations

import json
import re

from parallelism.trace import HOST, Event, Trace
from parallelism.trace.chrome import TRACKS
from vcluster import report

TRACE = Trace([
    Event(0, "compute", "</script>", 0.0, 2e-6, flops=3.0, wall_duration_seconds=1.0),
    Event(0, "send", "send", 2e-6, peer=1, tag=0, sequence=0, bytes_sent=8, serial=1),
    Event(0, "send", "lost", 2e-6, peer=1, tag=0, sequence=1),
    Event(1, "recv", "recv", 0.0, 2e-6, peer=0, tag=0, sequence=0, bytes_received=8),
    Event(1, "collective", "all_reduce", 2e-6, 4e-6, work=5),
    Event(1, "wait", "all_reduce", 4e-6, 2e-6, work=5),
    Event(1, "recv", "from the host", 6e-6, 1e-6, peer=HOST),
    Event(1, "send", "inner", 2e-6, peer=0, parent=4), Event(1, "memory", "weights", 2e-6, nbytes=8),
    Event(1, "memory", "saved", 3e-6, nbytes=4), Event(1, "memory", "weights", 4e-6, nbytes=-2),
])


def records(trace, path):
    trace.to_chrome(path)
    return json.loads(path.read_text())["traceEvents"]


def test_every_device_is_a_process_with_a_track_for_compute_collectives_sends_and_receives(tmp_path):
    found = records(TRACE, tmp_path / "c.json")
    named = [r for r in found if r["ph"] == "M" and r["name"] == "process_name"]
    assert [(r["pid"], r["args"]["name"]) for r in named] == [(0, "rank 0"), (1, "rank 1")]
    tracks = [r["args"]["name"] for r in found if r["ph"] == "M" and r["name"] == "thread_name" and r["pid"] == 1]
    assert tracks == list(TRACKS) == ["compute", "collective", "send", "receive"]
    slices = {(r["pid"], TRACKS[r["tid"]], r["name"], r["ts"], r["dur"]) for r in found if r["ph"] == "X"}
    assert slices == {
        (0, "compute", "</script>", 0, 2), (0, "send", "send", 2, 0), (0, "send", "lost", 2, 0),
        (1, "receive", "recv", 0, 2), (1, "collective", "all_reduce", 4, 2), (1, "receive", "from the host", 6, 1)}
    assert [(r["ph"], r["ts"], r["id"]) for r in found if r["ph"] in "be"] == [("b", 2, "1.5"), ("e", 6, "1.5")]


def test_the_other_fields_are_args_with_the_two_that_holistic_trace_analysis_needs(tmp_path):
    found = records(TRACE, tmp_path / "c.json")
    args = next(r["args"] for r in found if r["ph"] == "X" and r["name"] == "</script>")
    assert args == {"flops": 3.0, "wall_duration_seconds": 1.0, "stream": 0, "correlation": 0}
    for record in found:
        if record["ph"] == "X":
            assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} <= record.keys()
            assert {"stream", "correlation"} <= record["args"].keys()
    head = (tmp_path / "c.json").read_text().splitlines()[1]
    assert json.loads(head.removeprefix('"distributedInfo":').removesuffix(",")) == {
        "backend": "vcluster", "rank": 0, "world_size": 2}


def test_an_arrow_joins_every_message_that_was_sent_and_received(tmp_path):
    found = records(TRACE, tmp_path / "c.json")
    arrows = [(r["ph"], r["pid"], TRACKS[r["tid"]], r["ts"], r["id"]) for r in found if r["ph"] in "sf"]
    assert arrows == [("s", 0, "send", 2, 0), ("f", 1, "receive", 2, 0)]


def bound(found):
    """What Perfetto makes of the arrows: by time, an end binds to the slice that was begun last on its track."""
    last, arrows = {}, {}
    for record in sorted(found, key=lambda r: r.get("ts", -1)):
        track = record["pid"], record.get("tid")
        if record["ph"] == "X":
            last[track] = record["args"]["correlation"]
        if record["ph"] == "s":
            arrows[record["id"]] = [(record["pid"], last[track])]
        if record["ph"] == "f":
            arrows[record["id"]].append((record["pid"], last[track]))
    return sorted(map(tuple, arrows.values()))


def test_arrows_bind_to_their_own_slices_where_many_lie_at_one_time(tmp_path):
    def send(sequence, serial, at, **more):
        return Event(1, "send", "send", at, peer=0, tag=0, sequence=sequence, serial=serial, **more)

    def recv(sequence, serial, at, seconds, **more):
        return Event(0, "recv", "recv", at, seconds, peer=1, tag=0, sequence=sequence, serial=serial, **more)

    trace = Trace([
        recv(0, 0, 0.0, 2.0), recv(1, 1, 2.0, 0.0), recv(2, 2, 2.0, 0.0), recv(3, 3, 2.0, 1.0),
        recv(4, 4, 3.0, 2.0, work=1), Event(0, "compute", "c", 3.0, 9.0, serial=5),
        send(0, 0, 2.0), send(1, 1, 2.0), send(2, 2, 2.0), send(3, 3, 3.0), send(4, 4, 4.0, work=2),
    ])
    assert bound(records(trace, tmp_path / "c.json")) == [((1, n), (0, n)) for n in range(5)]


def test_memory_is_a_counter_of_what_is_held_by_category(tmp_path):
    counters = [(r["pid"], r["ts"], r["args"]) for r in records(TRACE, tmp_path / "c.json") if r["ph"] == "C"]
    assert counters == [(1, 2, {"weights": 8}), (1, 3, {"weights": 8, "saved": 4}), (1, 4, {"weights": 6, "saved": 4})]


def test_holistic_trace_analysis_gets_a_file_for_each_rank_with_kernels_it_knows(tmp_path):
    paths = report.holistic(TRACE, tmp_path / "new")
    assert [path.name for path in paths] == ["rank0.json", "rank1.json"]
    text = paths[1].read_text()
    assert re.search(r'"rank":\s+(\d+)', text)[1] == "1"        # how it finds out
    kernels = json.loads(text)["traceEvents"]
    assert [(r["name"], r["args"]["stream"], r["dur"]) for r in kernels] == [
        ("ncclDevKernel_recv", 2, 2), ("ncclDevKernel_all_reduce", 3, 4), ("ncclDevKernel_from the host", 2, 1)]
    assert {r["ph"] for r in kernels} == {"X"} and {r["cat"] for r in kernels} == {"kernel"}
    copied = Trace([Event(0, "h2d", "x", 0, 1), Event(0, "compute", "c", 1, 1)])
    (path,) = report.holistic(copied, tmp_path)
    assert [r["name"] for r in json.loads(path.read_text())["traceEvents"]] == ["Memcpy HtoD x", "c"]


def test_an_empty_trace_is_a_file_without_events(tmp_path):
    assert records(Trace([]), tmp_path / "c.json") == [] and report.holistic(Trace([]), tmp_path / "d") == ()
