"""The clock: examples that can be added up by hand, an oracle that iterates to a fixed point, broken records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from parallelism.timeline import Replay
from parallelism.timeline.replay import replay
from parallelism.trace import HOST, Event, Trace

TICK = 2.0**-10     # sums of ticks are exact


def compute(rank, seconds, **fields):
    return Event(rank, "compute", "work", cpu_seconds=seconds, **fields)


def send(rank, peer, sequence=0, **fields):
    return Event(rank, "send", "send", peer=peer, tag=0, sequence=sequence, **fields)


def recv(rank, peer, sequence=0, **fields):
    return Event(rank, "recv", "recv", peer=peer, tag=0, sequence=sequence, **fields)


def all_reduce(rank, group, sequence=0, **fields):
    return Event(rank, "collective", "all_reduce", group=group, sequence=sequence, **fields)


def times(events):
    return [(event.rank, event.start_seconds, event.duration_seconds) for event in events]


def test_a_receiver_waits_for_the_send_and_a_sender_for_nothing():
    assert times(replay([
        [compute(0, 3.0), send(0, 1), compute(0, 1.0)],
        [compute(1, 1.0), recv(1, 0), compute(1, 2.0)],
    ])) == [(0, 0, 3), (0, 3, 0), (0, 3, 1), (1, 0, 1), (1, 1, 2), (1, 3, 2)]


def test_a_message_that_is_already_there_takes_no_time():
    assert times(replay([[send(0, 1)], [compute(1, 1.0), recv(1, 0)]]))[-1] == (1, 1, 0)


def test_messages_of_another_tag_or_number_do_not_match():
    events = replay([[send(0, 1, 1), compute(0, 5.0), send(0, 1, 0)], [recv(1, 0, 0), recv(1, 0, 1)]])
    assert times(events)[3:] == [(1, 0, 5), (1, 5, 0)]


def test_a_collective_ends_for_all_when_the_last_has_come():
    group = (2, 0, 1)
    events = replay([[compute(r, seconds), all_reduce(r, group), compute(r, 1.0)]
                     for r, seconds in enumerate((4.0, 1.0, 2.0))])
    assert times(events)[1::3] == [(0, 4, 0), (1, 1, 3), (2, 2, 2)]
    assert [event.start_seconds for event in events[2::3]] == [4, 4, 4]


def test_groups_do_not_wait_for_each_other():
    events = replay([[compute(r, float(r)), all_reduce(r, (r - r % 2, r - r % 2 + 1))] for r in range(4)])
    assert times(events)[1::2] == [(0, 0, 1), (1, 1, 0), (2, 2, 1), (3, 3, 0)]


def test_an_asynchronous_operation_overlaps_and_its_wait_holds():
    events = replay([
        [all_reduce(0, (0, 1), work=7), compute(0, 2.0), Event(0, "wait", "all_reduce", work=7), compute(0, 1.0)],
        [compute(1, 5.0), all_reduce(1, (0, 1))],
    ])
    assert times(events)[:4] == [(0, 0, 5), (0, 0, 2), (0, 2, 3), (0, 5, 1)]


def test_a_wait_for_what_is_long_over_takes_no_time():
    events = replay([
        [recv(0, 1, work=0), compute(0, 9.0), Event(0, "wait", "recv", work=0)],
        [compute(1, 2.0), send(1, 0, work=0), Event(1, "wait", "send", work=0)],
    ])
    assert times(events) == [(0, 0, 2), (0, 0, 9), (0, 9, 0), (1, 0, 2), (1, 2, 0), (1, 2, 0)]


def test_host_traffic_and_memory_take_no_time():
    lane = [Event(0, "h2d", "arguments"), recv(0, HOST), compute(0, 1.0), Event(0, "memory", "activations", nbytes=8),
            send(0, HOST), Event(0, "d2h", "result")]
    assert times(replay([lane])) == [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 0), (0, 1, 0)]


@pytest.mark.parametrize("children_first", [False, True])
def test_what_happens_inside_a_collective_lies_at_its_start(children_first):
    inner = [send(0, 1, serial=2, parent=1), compute(0, 9.0, serial=3, parent=2)]
    outer = [all_reduce(0, (0, 1), serial=1)]
    lane = [compute(0, 1.0), *((inner + outer) if children_first else (outer + inner)), compute(0, 1.0, serial=4)]
    events = replay([lane, [compute(1, 3.0), all_reduce(1, (0, 1))]])
    assert {(e.serial, e.start_seconds, e.duration_seconds) for e in events if e.rank == 0} == {
        (0, 0, 1), (1, 1, 2), (2, 1, 0), (3, 1, 0), (4, 3, 1)}


def test_a_wait_is_not_for_what_happens_inside_the_operation():
    lane = [all_reduce(0, (0, 1), serial=1, work=7), send(0, 1, serial=2, parent=1, work=7),
            Event(0, "wait", "all_reduce", serial=3, work=7)]
    events = replay([lane, [compute(1, 5.0), all_reduce(1, (0, 1))]])
    assert times(events)[:3] == [(0, 0, 5), (0, 0, 0), (0, 0, 5)]


def test_partners_that_are_missing_hold_nobody():
    events = replay([
        [recv(0, 1), all_reduce(0, (0, 1, 2)), Event(0, "wait", "?", work=3), compute(0, 1.0)],
        [compute(1, 2.0), all_reduce(1, (0, 1, 2)), compute(1, 1.0)],
        [],
    ])
    assert times(events) == [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 1), (1, 0, 2), (1, 2, 0), (1, 2, 1)]


def test_who_waits_for_a_rank_with_a_missing_partner_waits_as_long_as_ever():
    events = replay([[all_reduce(0, (0, 2)), compute(0, 5.0), send(0, 1)], [recv(1, 0)], []])
    assert times(events)[-1] == (1, 0, 5)


def test_a_circle_of_waits_ends():
    events = replay([[recv(r, 1 - r), compute(r, 1.0), send(r, 1 - r), compute(r, 1.0)] for r in (0, 1)])
    assert times(events)[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_parents_in_a_circle_end():
    events = replay([[compute(0, 1.0, serial=1, parent=2), compute(0, 1.0, serial=2, parent=1)]])
    assert times(events) == [(0, 0, 0), (0, 0, 0)]


def test_nothing_gives_nothing():
    assert replay([]) == () and replay([[], []]) == ()


def test_every_other_field_is_kept():
    event = compute(0, 1.5, flops=7.0, stage=2, wall_start_seconds=3.0, shape=(2, 3), location="a.py:1")
    assert replay([[event]]) == (replace(event, duration_seconds=1.5),)
    assert replay(Trace([event]).by_rank()) == replay([[event]])


@st.composite
def programs(draw):
    """Programs that can run: each step appends to the records of those who take part."""
    size = draw(st.integers(1, 4))
    lanes = [[] for _ in range(size)]
    counts, open_work = {}, []
    ranks = st.integers(0, size - 1)
    for work in range(draw(st.integers(0, 25))):
        step = draw(st.sampled_from(("compute", "message", "collective", "wait", "memory")))
        asynchronous = draw(st.booleans())
        if step == "compute":
            rank = draw(ranks)
            lanes[rank].append(compute(rank, draw(st.integers(0, 9)) * TICK))
        elif step == "message":
            source, target = draw(ranks), draw(ranks)
            number = counts[source, target] = counts.get((source, target), -1) + 1
            posted = [recv(target, source, number, work=work if asynchronous else None)]
            sent = [send(source, target, number)]
            for event in posted + sent if asynchronous else sent + posted:
                lanes[event.rank].append(event)
            open_work += [(target, work)] if asynchronous else []
        elif step == "collective":
            group = tuple(draw(st.lists(ranks, min_size=1, unique=True)))
            number = counts[group] = counts.get(group, -1) + 1
            for rank in group:
                lanes[rank].append(all_reduce(rank, group, number, work=work if asynchronous else None))
            open_work += [(rank, work) for rank in group] if asynchronous else []
        elif step == "wait" and open_work:
            rank, waited = open_work.pop(draw(st.integers(0, len(open_work) - 1)))
            lanes[rank].append(Event(rank, "wait", "wait", work=waited))
        else:
            lanes[0].append(Event(0, "memory", "activations", nbytes=8))
    return lanes


def fixed_point(lanes):
    """The same times, found by sweeping over all records until nothing moves."""
    sends, arrivals, before = {}, {}, None
    while True:
        result = []
        for lane in lanes:
            clock, ends = 0.0, {}
            for event in lane:
                start = end = clock
                if event.kind == "compute":
                    end = start + event.cpu_seconds
                elif event.kind == "send":
                    sends[event.rank, event.peer, event.sequence] = start
                elif event.kind == "recv":
                    end = max(start, sends.get((event.peer, event.rank, event.sequence), 0.0))
                elif event.kind == "collective":
                    came = arrivals.setdefault((event.group, event.sequence), {})
                    came[event.rank] = start
                    end = max(came.values())
                elif event.kind == "wait":
                    end = max(start, ends[event.work])
                if event.work is not None and event.kind != "wait":
                    ends[event.work] = end
                else:
                    clock = end
                result.append(replace(event, start_seconds=start, duration_seconds=end - start))
        if result == before:
            return tuple(result)
        before = result


@given(programs())
def test_times_are_those_of_the_fixed_point(lanes):
    assert replay(lanes) == fixed_point(lanes)


@given(programs())
def test_no_rank_is_busy_beyond_the_makespan_and_nobody_receives_before_it_is_sent(lanes):
    trace = Trace(replay(lanes), size=len(lanes))
    assert all(totals.compute_seconds <= trace.makespan_seconds for totals in trace.totals.values())
    sent = {(e.rank, e.peer, e.sequence): e.start_seconds for e in trace if e.kind == "send"}
    for event in trace.filter(kind="recv"):
        assert event.start_seconds + event.duration_seconds >= sent[event.peer, event.rank, event.sequence]
    ends = {}
    for event in trace.filter(kind="collective"):
        ends.setdefault((event.group, event.sequence), set()).add(event.start_seconds + event.duration_seconds)
    assert all(len(end) == 1 for end in ends.values())


@given(programs(), st.data())
def test_broken_records_end_too_and_the_order_of_looking_never_matters(lanes, data):
    if data.draw(st.booleans()):
        lanes = [[event for event in lane if data.draw(st.integers(0, 4))] for lane in lanes]
    if data.draw(st.booleans()):
        lanes = [data.draw(st.permutations(lane)) for lane in lanes]
    events = replay(lanes)
    assert [replace(e, start_seconds=0.0, duration_seconds=0.0) for e in events] == [e for lane in lanes for e in lane]
    assert all(event.duration_seconds >= 0 for event in events)
    order = data.draw(st.permutations(range(len(lanes))))
    shuffled = replay([lanes[rank] for rank in order])
    assert sorted(shuffled, key=lambda event: event.rank) == list(events)     # sorted keeps the order within a rank


def test_each_step_that_waits_is_looked_at_once_or_twice(monkeypatch):
    size, rounds, looks = 16, 20, Counter()
    lanes = [[event for i in range(rounds) for event in
              (compute(r, (r * 7 + i) % 5 * TICK), all_reduce(r, tuple(range(size)), i), send(r, (r + 1) % size, i),
               recv(r, (r - 1) % size, i))] for r in range(size)]
    until = Replay._until
    monkeypatch.setattr(Replay, "_until", lambda self, i, *given: (looks.update([i]), until(self, i, *given))[1])
    replay(lanes)
    assert len(looks) >= size * rounds and max(looks.values()) <= 2     # when it is reached, and when what held it is over
