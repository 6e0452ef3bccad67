"""Traces: what is in one, what is counted, and what is told about it."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from parallelism.trace import HOST, Event, Trace


def collective(rank, group, sequence, nbytes, name="all_gather", **fields):
    peers = [peer for peer in group if peer != rank]
    return Event(rank, "collective", name, group=group, sequence=sequence, bytes_sent=nbytes * len(peers),
                 bytes_received=nbytes * len(peers), messages=len(peers),
                 sources=tuple((peer, nbytes) for peer in peers), **fields)


EVENTS = (
    *(collective(rank, group, 0, 24, axes=("tp",)) for group in ((0, 1), (2, 3)) for rank in group),
    collective(0, (0, 1), 1, 8, axes=("tp",)),
    collective(1, (0, 1), 1, 8, axes=("tp",)),
    Event(0, "send", "send", peer=3, tag=0, sequence=0, bytes_sent=100, messages=1),
    Event(3, "recv", "recv", peer=0, tag=0, sequence=0, bytes_received=100),
    Event(0, "send", "send", peer=1, bytes_sent=5, messages=1, parent=0),       # inside the first collective
    Event(2, "h2d", "arguments", bytes_received=1000, messages=1),
    Event(2, "d2h", "result", bytes_sent=2000, messages=1),
    Event(1, "send", "send", peer=HOST, bytes_sent=64, messages=1),
    Event(0, "compute", "work", flops=10.0, stage=0, microbatch=1, phase="F"),
    Event(1, "compute", "work", flops=20.0, stage=1, microbatch=1, phase="B"),
    Event(1, "wait", "all_gather", work=0),
)
TRACE = Trace(EVENTS, mesh_shape={"dp": 2, "tp": 2}, hardware="host")


def test_is_a_sequence_of_its_events():
    assert len(TRACE) == len(EVENTS) and list(TRACE) == list(EVENTS) and TRACE[-1] is EVENTS[-1]
    assert TRACE[2:5] == Trace(EVENTS[2:5], 4, mesh_shape=TRACE.mesh_shape, hardware="host") and TRACE[2:5].size == 4
    assert EVENTS[3] in TRACE and TRACE.index(EVENTS[3]) == 3 and list(reversed(TRACE)) == list(reversed(EVENTS))


def test_is_a_value():
    same = Trace(list(EVENTS), 4, mesh_shape=[("dp", 2), ("tp", 2)], hardware="host")
    assert same == TRACE and hash(same) == hash(TRACE) and pickle.loads(pickle.dumps(TRACE)) == TRACE  # noqa: S301
    assert Trace(EVENTS) != TRACE and TRACE[1:] != TRACE and TRACE != EVENTS
    with pytest.raises(AttributeError, match=r"a Trace is immutable; 'size' cannot be set"):
        TRACE.size = 5


def test_collectives_count_once_for_each_group_and_others_for_each_event():
    assert TRACE.count("all_gather") == 3 and [TRACE.count("all_gather", rank) for rank in range(4)] == [2, 2, 1, 1]
    assert TRACE.count("work") == 2 and TRACE.count("recv") == 1 and TRACE.count("nothing") == 0
    assert TRACE.count("send") == 2 and TRACE.count("send", rank=0) == 1       # the one inside a collective is none


@pytest.mark.parametrize("name", ["allgather", "AllGather", "all-gather"])
def test_a_name_that_is_written_otherwise_is_not_counted_as_none(name):
    with pytest.raises(ValueError, match=f"a trace has no operation '{name}'; this one has 'all_gather'"):
        TRACE.count(name)
    with pytest.raises(ValueError, match=f"a trace has no operation '{name}'; this one has 'all_gather'"):
        TRACE.filter(name=("work", name))


@pytest.mark.parametrize("ask", [
    lambda trace, rank: trace.count("all_gather", rank), lambda trace, rank: trace.peak_bytes(rank),
    lambda trace, rank: trace.bytes_sent(rank), lambda trace, rank: trace.filter(rank=rank),
    lambda trace, rank: trace.filter(rank=(0, rank)),
], ids=["count", "peak_bytes", "bytes_sent", "filter", "filter-several"])
def test_a_rank_that_is_not_there_has_no_numbers(ask):
    for rank in (4, -1):
        with pytest.raises(ValueError, match=f"the ranks of 4 devices are 0 to 3, got rank={rank}"):
            ask(TRACE, rank)
    ask(TRACE.filter(rank=0), 3)                                    # was left out, and is a rank of the devices


@pytest.mark.parametrize(("call", "recorded"), [("isend", "send"), ("irecv", "recv"), ("sendrecv", "send")])
def test_a_call_that_is_recorded_by_another_name_is_not_counted_as_none(call, recorded):
    with pytest.raises(ValueError, match=f"a trace has no operation '{call}'; this one has '{recorded}'"):
        TRACE.count(call)
    assert TRACE.count("shift") == 0                                # nor is there a permute


def test_of_a_name_that_only_messages_of_collectives_have_none_are_counted():
    inside = [Event(0, "send", "send", 0, 1, parent=0), Event(0, "wait", "SEND", 1, 1)]
    assert Trace(inside).count("send") == 0


def test_totals_are_between_devices():
    assert [TRACE.bytes_received(rank) for rank in range(4)] == [32, 32, 24, 124]
    assert [TRACE.bytes_sent(rank) for rank in range(4)] == [132, 32, 24, 24]
    assert TRACE.bytes_received() == TRACE.bytes_sent() == 212
    assert TRACE.messages() == 7 and TRACE.messages(rank=0) == 3
    assert TRACE.flops() == 30 and TRACE.flops(rank=1) == 20
    with pytest.raises(ValueError, match="0 to 3, got rank=4"):
        TRACE.bytes_received(rank=4)


def test_host_traffic_is_totalled_when_it_is_asked_for():
    assert TRACE.filter(kind="h2d").bytes_received() == 1000 and TRACE.filter(kind="d2h").bytes_sent() == 2000
    assert TRACE.filter(kind=("h2d", "d2h")).messages() == 2
    assert TRACE.filter(kind="h2d").filter(rank=2).bytes_received(rank=2) == 1000
    assert TRACE.filter(peer=HOST).bytes_sent() == 64
    assert TRACE.filter(kind="send").bytes_sent() == 100 and TRACE.filter(rank=2).bytes_received() == 24
    assert Trace([EVENTS[9]]).bytes_received() == 0         # nothing but host traffic, and not asked for


def test_filters_combine_and_take_collections():
    assert list(TRACE.filter(kind="compute", rank=1)) == [EVENTS[-2]]
    assert len(TRACE.filter(name=["work", "result"])) == 3 and len(TRACE.filter(stage=range(2), phase="B")) == 1
    assert TRACE.filter(axes="tp") == TRACE.filter(axes=("tp",)) and len(TRACE.filter(axes="tp")) == 6
    assert len(TRACE.filter(axes=("dp", "tp"))) == 0 and len(TRACE.filter(microbatch=1)) == 2
    assert TRACE.filter(stage=0)[0].rank == 0               # zero is a stage, not "any"
    assert TRACE.filter() == TRACE and TRACE.filter(rank=[3, 1]).ranks == (1, 3)
    with pytest.raises(ValueError, match="no kind of event is called 'computes'; the kinds are compute, "):
        TRACE.filter(kind="computes")


def test_matrix_holds_the_bytes_received_by_source_and_destination():
    matrix = TRACE.communication_matrix()
    expected = np.zeros((4, 4), int)
    expected[0, 1] = expected[1, 0] = 32
    expected[2, 3] = expected[3, 2] = 24
    expected[0, 3] = 100
    np.testing.assert_array_equal(matrix, expected)
    assert matrix.sum() == TRACE.bytes_received() and matrix.dtype == np.int64
    with pytest.raises(ValueError, match="between devices"):
        TRACE.filter(kind="h2d").communication_matrix()


def test_peak_memory_sums_the_categories_held_at_one_time():
    def hold(rank, category, nbytes):
        return Event(rank, "memory", category, nbytes=nbytes)

    trace = Trace([hold(0, "activations", 10), hold(0, "weights", 5), hold(1, "weights", 99),
                   hold(0, "activations", -8), hold(0, "weights", 6)], size=3)
    assert [trace.peak_bytes(rank) for rank in range(3)] == [15, 99, 0]
    assert trace.peak_bytes(0, "weights") == 11 and trace.peak_bytes(0, "activations") == 10


def test_two_bubbles_by_makespan_and_by_span():
    trace = Trace([Event(0, "compute", "a", 0.0, 2.0), Event(0, "compute", "b", 6.0, 2.0),
                   Event(1, "compute", "a", 2.0, 4.0), Event(1, "wait", "w", 6.0, 4.0)])
    assert trace.makespan_seconds == 10
    assert trace.bubble_fraction == 1 - 8 / 20
    assert trace.span_bubble_fraction == (8 - 4) / 8        # rank 0: from 0 to 8, busy for 4
    assert trace.filter(rank=1).bubble_fraction == 0.5 and trace[3:].makespan_seconds == 4
    assert trace.totals[1].waiting_seconds == 4


def test_an_idle_device_counts_in_the_bubble():
    assert Trace([Event(0, "compute", "a", 0.0, 2.0)], size=4).bubble_fraction == 0.75


def test_asynchronous_operations_do_not_count_as_waiting_but_their_waits_do():
    trace = Trace([Event(0, "collective", "all_reduce", 0.0, 5.0, work=0), Event(0, "compute", "a", 0.0, 3.0),
                   Event(0, "wait", "all_reduce", 3.0, 2.0, work=0)])
    assert trace.totals[0].waiting_seconds == 2 and trace.bubble_fraction == 1 - 3 / 5


def test_an_empty_trace_has_totals_of_nothing():
    for trace in (Trace([]), Trace([], size=2)):
        assert trace.bytes_received() == trace.messages() == trace.makespan_seconds == 0
        assert trace.bubble_fraction == trace.span_bubble_fraction == 0
        assert trace.communication_matrix().shape == (trace.size, trace.size)
        assert trace.summary() and trace._repr_html_() and repr(trace)


def test_ranks_and_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ranks of 2 devices are 0 to 1, got an event of rank 3"):
        Trace(EVENTS, size=2)
    with pytest.raises(ValueError, match="rank -1"):
        Trace([Event(-1, "compute", "a")])
    with pytest.raises(ValueError, match="6 devices, the trace has 4"):
        Trace(EVENTS, mesh_shape={"dp": 2, "tp": 3})


def test_summary_tells_ranks_and_collectives_and_keeps_the_two_times_apart():
    trace = Trace([*EVENTS, Event(2, "memory", "weights", nbytes=3 * 2**20),
                   Event(1, "compute", "work", 0.0, 0.25, wall_start_seconds=1.0, wall_duration_seconds=0.5)])
    assert trace.summary() == """\
4 devices, 17 events; traffic between devices
virtual time  makespan 250 ms; bubble 75.0% (all but compute), 0.0% by span
wall time     1.50 s on this machine, whose cores the devices share

rank  forward  backward  recompute   other  exposed  bubble    idle
 all      0 s       0 s        0 s  250 ms      0 s     0 s  750 ms
         0.0%      0.0%       0.0%   25.0%     0.0%    0.0%   75.0%
   0      0 s       0 s        0 s     0 s      0 s     0 s  250 ms
   1      0 s       0 s        0 s  250 ms      0 s     0 s     0 s
   2      0 s       0 s        0 s     0 s      0 s     0 s  250 ms
   3      0 s       0 s        0 s     0 s      0 s     0 s  250 ms

rank  received   sent  messages  flops  peak memory
   0      32 B  132 B         3     10          0 B
   1      32 B   32 B         2     20          0 B
   2      24 B   24 B         1      0        3 MiB
   3     124 B   24 B         1      0          0 B

collective  algorithm  axes  count  bytes  time  bus
all_gather  direct     tp        3  112 B   0 s    -"""


def test_summary_fits_80_columns_and_says_hostile_names_harmlessly():
    name = "<script>\x1b[2J\n" + "long " * 40
    events = [Event(r, "collective", name, 123.456, 999.4999, 0, 9e8, bytes_received=2**60, bytes_sent=10**17,
                    messages=10**7, flops=9.999e20, algorithm=name, axes=(name, name), group=(r,), sequence=0)
              for r in range(100)]
    trace = Trace([*events, *(Event(r, "memory", "x", nbytes=2.0**50) for r in range(100))],
                  mesh_shape={name: 100}, hardware=name)
    text = trace.summary()
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text and "... and 36 more" in text
    html = trace._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and html.count("<table>") == 3 + 2


def test_in_a_notebook_no_column_and_no_table_is_all_zeros():
    events = [Event(0, "compute", "f", 0, 1.0, phase="F"), Event(1, "compute", "b", 0, 1.0, phase="B")]
    html = Trace(events)._repr_html_()
    assert re.findall("<th(?: [^>]*)?>(.*?)</th>", html) == ["rank", "forward", "backward"]
    assert html.count("<td>0\N{NO-BREAK SPACE}s</td>") == 2      # a rank has a 0 where another one has none


def test_in_a_notebook_collectives_have_their_names_and_compute_of_one_sort_is_compute():
    group = {"group": (0, 1), "sequence": 0, "algorithm": "ring", "bytes_received": 8.0}
    events = [Event(r, "compute", "c", 0, 1.0) for r in (0, 1)] + [
        Event(r, "collective", "all_reduce", 1.0, 0.5, **group) for r in (0, 1)]
    html = Trace(events)._repr_html_()
    assert "data moves: all_reduce</span>" in html and ">compute</span>" in html
    assert "<th>compute</th>" in html and not re.search(">other", html)
    assert "by span" not in html and "wall time" not in html and "bubble" not in html    # it was never run, and nothing waits
    html = Trace([*events, Event(0, "compute", "f", 2.0, 1.0, phase="F", wall_duration_seconds=1.0)])._repr_html_()
    assert "<th>other</th>" in html and ">compute without a phase, such as an update</span>" in html
    assert "wall time     1\N{NO-BREAK SPACE}s" in html


def test_the_ops_of_an_update_are_one_bar_and_other_compute_without_a_phase_keeps_its_own():
    step = [Event(0, "compute", "0F0", 0, 1.0, phase="F"), Event(0, "compute", "scale", 1.0, 0.5),
            Event(0, "compute", "0B0", 2.0, 2.0, phase="B"),
            *(Event(0, "compute", "multiply", 4.0 + k / 4, 0.25) for k in range(8))]
    told = re.findall("<title>(.*?)</title>", Trace(step)._repr_html_())
    assert told == ["0F0, 1 s", "0B0, 2 s", "scale, 500 ms", "8 bars without a phase, 2 s"]
    alike = [event for event in step if event.phase is None]      # of compute of one sort each op has its bar
    assert re.findall("<title>(.*?),", Trace(alike)._repr_html_()) == ["scale", *["multiply"] * 8]


@pytest.mark.parametrize("count", [16, 17])
def test_in_a_notebook_tables_of_more_than_16_ranks_fold_and_the_slowest_and_the_fullest_stay_outside(count):
    events = [Event(r, "compute", "c", 0, 5.0 if r == 3 else 1.0) for r in range(count)]
    trace = Trace([*events, *(Event(r, "memory", "x", nbytes=9.0 if r == 11 else 8.0) for r in range(count))])
    html = trace._repr_html_()
    assert html.count("<details><summary>17 ranks</summary>") == (2 if count > 16 else 0)
    for rank in (3, 11):        # a row in both tables, folded or not
        assert html.count(f'<td class="left">{rank}</td>') == 2
    outside = re.sub("<details>.*?</details>", "", html)
    assert (outside.count(">slowest: 3</td>"), outside.count(">fullest: 11</td>")) == (
        (2, 2) if count > 16 else (0, 0))
    assert ('<td class="left">4</td>' in outside) == (count == 16)


def test_by_rank_keeps_the_order_of_record():
    lanes = TRACE.by_rank()
    assert len(lanes) == 4 and sum(map(len, lanes)) == len(TRACE)
    assert all(event.rank == rank for rank, lane in enumerate(lanes) for event in lane)
    assert lanes[0] == tuple(event for event in EVENTS if event.rank == 0)
