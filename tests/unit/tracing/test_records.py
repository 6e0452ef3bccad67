"""The record of a device: what is added to it comes out as events, packed or not."""

from __future__ import annotations

import pickle

import numpy as np

from parallelism.events import HOST
from vcluster.collectives.dispatch import Traffic
from vcluster.tracing import Recorder, columns_of, make_trace, message_template
from vcluster.tracing.columns import pack

GROUP = (0, 1)
TRAFFIC = Traffic(8, 16, 1, ((1, 16),))


def recorded():
    """A record with an event of each look."""
    recorder = Recorder()
    recorder.start()
    recorder.add_untimed("h2d", "arguments", {"peer": HOST, "bytes_received": 100})
    template = recorder.collective_template("all_reduce", ("tp",), GROUP, "direct", None, lambda: TRAFFIC)
    start = recorder.enter()
    row = recorder.add_collective("all_reduce", ("tp",), GROUP, "ring", None, "a.py:1")
    recorder.add("send", "message", None, peer=1, parent=recorder.serial(row), bytes_sent=8, messages=1)
    recorder.finish_collective(row, lambda: TRAFFIC, start)
    recorder.add_repeated(template, "a.py:2", start)
    recorder.add_repeated(message_template("send", 1, 7, 8), "a.py:3", start)
    recorder.add_repeated(message_template("recv", 1, 7, 8), "a.py:4", start)
    recorder.add_repeated(message_template("send", 1, 7, 8), "a.py:3", start)
    recorder.add_repeated(template, "a.py:2", start)
    recorder.leave()
    for _ in range(2):
        with recorder.compute("work", 0.3, {"flops": 6.0, "nbytes": 1.0, "stage": 1}):
            pass
    return recorder.stop()


def test_every_look_gives_its_events():
    events = list(columns_of({3: pickle.dumps(recorded(), 5)}).events())
    assert [event.serial for event in events] == list(range(len(events))) and {event.rank for event in events} == {3}
    inside = {event.serial: event.location for event in events}
    events = [event for event in events if event.name != "compute"]     # what took long between two calls
    told = [(e.kind, e.name, e.location, e.sequence, inside.get(e.parent)) for e in events]
    assert told == [
        ("h2d", "arguments", None, None, None), ("collective", "all_reduce", "a.py:1", 0, None),
        ("send", "message", None, None, "a.py:1"), ("collective", "all_reduce", "a.py:2", 1, None),
        ("send", "send", "a.py:3", 0, None), ("recv", "recv", "a.py:4", 0, None), ("send", "send", "a.py:3", 1, None),
        ("collective", "all_reduce", "a.py:2", 2, None), ("compute", "work", None, None, None),
        ("compute", "work", None, None, None)]
    sent, received, messages = (8, 0, 1), (0, 8, 0), [(e.bytes_sent, e.bytes_received, e.messages) for e in events]
    assert messages == [
        (0, 100, 0), (8, 16, 1), sent, (8, 16, 1), sent, received, sent, (8, 16, 1), (0, 0, 0), (0, 0, 0)]
    assert [e.algorithm for e in events if e.kind == "collective"] == ["ring", "direct", "direct"]
    assert {e.sources for e in events if e.kind == "collective"} == {TRAFFIC.sources}
    assert [(e.cpu_seconds, e.flops, e.stage) for e in events[-2:]] == [(0.3, 6, 1)] * 2
    begun = events[1].wall_start_seconds
    assert begun > 0 and [e.wall_start_seconds for e in events[3:8]] == [begun] * 5
    assert [e.wall_start_seconds for e in (events[0], events[2])] == [0, 0]
    assert all(e.wall_duration_seconds > 0 for e in (events[1], *events[3:8]))


def test_a_packed_record_is_the_same_events():
    record = recorded()
    assert columns_of({3: pack(record)}) == columns_of({3: pickle.dumps(record, 5)})
    assert columns_of({3: pickle.dumps(pack(record), 5)}) == columns_of({3: pack(record)})


def test_the_records_of_several_ranks_are_numbered_each_by_itself():
    record = recorded()
    both = columns_of({0: pack(record), 2: pickle.dumps(record, 5)})
    assert list(both.events()) == [
        event for rank in (0, 2) for event in columns_of({rank: pack(record)}).events()]


def test_templates_stand_once_however_often_they_are_used():
    recorder = Recorder()
    recorder.start()
    template = recorder.collective_template("all_reduce", None, GROUP, "direct", None, lambda: TRAFFIC)
    for _ in range(1000):
        recorder.add_repeated(template, "a.py:2", recorder.enter())
        recorder.leave()
        with recorder.compute("work", None, {"flops": 1.0}):
            pass
    packed = pack(recorder.stop())
    assert len(packed.descriptions) <= 4 and len(packed.description) >= 2000    # long unlabelled compute counts, too
    trace = make_trace([packed, packed], {"tp": 2})
    assert trace.count("all_reduce") == 1000 and trace.flops() == 2000
    np.testing.assert_array_equal(trace.filter(name="all_reduce", rank=1).columns["sequence"], range(1000))


def test_the_traffic_of_a_template_is_counted_once_and_in_every_later_record():
    recorder, counted = Recorder(), []
    template = recorder.collective_template(
        "all_reduce", None, GROUP, "direct", None, lambda: counted.append(1) or TRAFFIC)
    for _ in range(2):
        recorder.start()
        with recorder.as_one("product", "a.py:1"):
            recorder.add_repeated(template, "a.py:2", recorder.enter())
            recorder.leave()
        record = pack(recorder.stop())
        assert len(counted) == 1
        assert make_trace([record, record], {"tp": 2}).filter(name="all_reduce")[0].bytes_received == 16


def test_an_idle_recorder_keeps_nothing():
    recorder = Recorder()
    recorder.add_repeated(message_template("send", 1, 0, 8), "a.py:1", recorder.enter())
    recorder.add("send", "send", peer=1)
    recorder.leave()
    assert recorder.stop()[1] == []
    assert len(make_trace([pickle.dumps(recorder.stop(), 5)] * 2, {"tp": 2})) == 0
