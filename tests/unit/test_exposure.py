"""Which part of a wait is communication: worked by hand."""

from __future__ import annotations

from parallelism.trace import HOST, Event, Trace, exposed_seconds


def test_before_a_message_is_sent_it_is_a_bubble_and_then_communication():
    trace = Trace([
        Event(0, "send", "send", start_seconds=2.0, peer=1, tag=0, sequence=0),
        Event(1, "recv", "recv", start_seconds=1.0, duration_seconds=4.0, peer=0, tag=0, sequence=0),
    ])
    assert exposed_seconds(trace) == {0: 0.0, 1: 3.0}


def test_before_the_last_member_comes_it_is_a_bubble():
    trace = Trace([Event(rank, "collective", "all_reduce", start_seconds=float(rank), duration_seconds=5.0 - rank,
                         group=(0, 1, 2), sequence=0) for rank in range(3)])
    assert exposed_seconds(trace) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_what_is_covered_by_compute_is_not_exposed():
    trace = Trace([
        Event(0, "send", "send", start_seconds=1.0, peer=1, tag=0, sequence=0),
        Event(1, "recv", "recv", duration_seconds=5.0, peer=0, tag=0, sequence=0, work=1),
        Event(1, "compute", "work", duration_seconds=3.0),
        Event(1, "wait", "recv", start_seconds=3.0, duration_seconds=2.0, work=1),
        Event(1, "wait", "unknown", start_seconds=5.0, duration_seconds=1.0, work=7),
        Event(1, "recv", "recv", start_seconds=6.0, peer=HOST, tag=0, sequence=0),
    ])
    assert exposed_seconds(trace) == {0: 0.0, 1: 2.0}
