"""Where the time went, what moved when, the critical path: small traces that can be added up by hand."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
from hypothesis import given, strategies as st

from parallelism.hardware import Hardware
from parallelism.mesh import Mesh
from parallelism.timeline.replay import replay
from parallelism.trace import HOST, PARTS, Event, Split, Trace
from parallelism.trace.breakdown import split
from parallelism.trace.collectives import collectives
from parallelism.trace.critical_path import critical_path
from parallelism.trace.transfers import moving
from vcluster.demo.traffic import show_elsewhere


def compute(rank, start, seconds, phase=None, name="work", **fields):
    return Event(rank, "compute", name, start, seconds, cpu_seconds=seconds, phase=phase, **fields)


def all_reduce(rank, start, seconds, group=(0, 1), sequence=0, name="all_reduce", **fields):
    return Event(rank, "collective", name, start, seconds, group=group, sequence=sequence, **fields)


def send(rank, peer, start, seconds=0.0, sequence=0, **fields):
    return Event(rank, "send", "send", start, seconds, peer=peer, tag=0, sequence=sequence, **fields)


def recv(rank, peer, start, seconds, sequence=0, **fields):
    return Event(rank, "recv", "recv", start, seconds, peer=peer, tag=0, sequence=sequence, **fields)


def test_a_collective_is_waited_for_until_the_last_has_come_and_moves_from_then_on():
    trace = Trace([compute(0, 0, 2, "F"), all_reduce(0, 2, 6), compute(1, 0, 5, "B"), all_reduce(1, 5, 3)])
    assert split(trace) == {0: Split(forward=2, communication=3, bubble=3), 1: Split(backward=5, communication=3)}
    np.testing.assert_array_equal(moving(trace).since, [0, 5, 0, 5])


def test_a_message_is_waited_for_until_it_is_sent():
    trace = Trace([compute(0, 0, 4), send(0, 1, 4), compute(0, 4, 6), recv(1, 0, 0, 7), compute(1, 7, 1)])
    assert split(trace) == {0: Split(other=10), 1: Split(other=1, communication=3, bubble=4, idle=2)}


def test_what_a_device_does_before_its_first_event_and_after_its_last_is_idle_and_a_gap_between_is_bubble():
    trace = Trace([compute(0, 0, 10), compute(1, 2, 1), compute(1, 6, 1)], size=3)
    assert split(trace) == {0: Split(other=10), 1: Split(other=2, bubble=3, idle=5), 2: Split(idle=10)}


def test_a_gap_that_rounding_leaves_is_no_bubble():
    assert 0.1 + 0.2 > 0.3
    found = split(Trace([compute(0, 0, 0.3), compute(0, 0.1 + 0.2, 1)]))[0]
    assert (found.other, found.bubble, found.idle) == (1.3, 0, 0)


def test_communication_behind_compute_is_in_no_part_and_a_wait_splits_into_waiting_and_moving():
    trace = Trace([
        all_reduce(0, 0, 9, work=3), compute(0, 0, 4, "I"), Event(0, "wait", "all_reduce", 4, 5, work=3),
        compute(1, 0, 6, "W"), all_reduce(1, 6, 3),
    ])
    assert split(trace) == {0: Split(backward=4, communication=3, bubble=2), 1: Split(backward=6, communication=3)}


def test_recompute_is_known_by_its_name_and_its_letter_and_children_and_memory_count_nothing():
    trace = Trace([compute(0, 0, 1, name="recompute 2F3"), compute(0, 1, 2, "R"), compute(0, 3, 1, parent=0),
                   Event(0, "memory", "weights", 3, 9, nbytes=8), Event(0, "h2d", "x", 4, 1)])
    assert split(trace) == {0: Split(recompute=3, communication=1, bubble=1, idle=7)}


def test_a_collective_that_is_never_waited_for_is_exposed_alike_in_the_demo_and_in_the_summary():
    """Rank 1 issues an all_reduce and does not wait; the demo once gave it 0 s of exposed communication."""
    def moved(rank):
        return all_reduce(rank, 0, 0, work=None if rank == 0 else 5, bytes_received=3 * 10**11, bytes_sent=3 * 10**11,
                          payload_bytes=3 * 10**11)

    trace = Trace([moved(0), moved(1)], 2, priced=("modelled",))
    hardware = Hardware.preset("dgx-h100")
    there = trace.on(hardware)
    assert [part.communication for part in split(there).values()] == [there.makespan_seconds] * 2
    lines = []
    screen = SimpleNamespace(heading=lines.append, line=lines.append)
    show_elsewhere(screen, trace, Mesh(x=2), hardware)
    assert "  exposed communication  100.0% of the devices' time" in lines
    assert "  bubble                 0.0% of the devices' time" in lines


def test_a_wait_that_compute_shortens_is_exposed_for_what_is_left_and_an_unknown_wait_is_a_bubble():
    trace = Trace([
        send(0, 1, 1), recv(1, 0, 0, 5, work=1), compute(1, 0, 3), Event(1, "wait", "recv", 3, 2, work=1),
        Event(1, "wait", "unknown", 5, 1, work=7), recv(1, HOST, 6, 0),
    ])
    assert split(trace) == {0: Split(idle=6), 1: Split(other=3, communication=2, bubble=1)}


def test_without_partners_all_of_a_transfer_is_communication():
    trace = Trace([recv(0, 1, 0, 2), recv(0, HOST, 2, 1), all_reduce(0, 3, 4, group=None)], size=2)
    assert split(trace)[0] == Split(communication=7)


def test_an_empty_trace_has_no_split_and_no_path():
    assert split(Trace([])) == {} and split(Trace([], size=2)) == {0: Split(), 1: Split()}
    assert critical_path(Trace([])) == () and collectives(Trace([])) == ()


@st.composite
def records(draw):
    """Replayed records of a few ranks: compute, messages round the ring, collectives of all."""
    size = draw(st.integers(1, 4))
    lanes = [[] for _ in range(size)]
    for number in range(draw(st.integers(0, 12))):
        step = draw(st.sampled_from("cmas"))
        for rank in range(size):
            if step == "c":
                lanes[rank].append(compute(rank, 0, draw(st.integers(0, 5)), draw(st.sampled_from("FBWR"))))
            elif step == "m" and size > 1:
                lanes[rank] += [send(rank, (rank + 1) % size, 0, sequence=number),
                                recv(rank, (rank - 1) % size, 0, 0, sequence=number)]
            elif step == "a":
                lanes[rank].append(all_reduce(rank, 0, 0, tuple(range(size)), number))
            elif step == "s":
                lanes[rank] += [all_reduce(rank, 0, 0, tuple(range(size)), number, work=number),
                                compute(rank, 0, draw(st.integers(0, 3))),
                                Event(rank, "wait", "all_reduce", work=number)]
    return Trace(replay(lanes), size)


@given(records())
def test_the_parts_add_up_to_the_makespan_of_every_device(trace):
    by_rank = split(trace)
    assert [sum(parts) for parts in by_rank.values()] == [trace.makespan_seconds] * trace.size
    assert all(part >= 0 for parts in by_rank.values() for part in parts)
    for rank, parts in by_rank.items():
        assert sum(parts[:4]) == trace.totals[rank].compute_seconds
    busy = sum(sum(parts[:4]) for parts in by_rank.values())
    assert trace.bubble_fraction == (1 - busy / (trace.size * trace.makespan_seconds) if trace.makespan_seconds else 0)


@given(records())
def test_the_critical_path_is_a_chain_that_covers_the_makespan_when_messages_are_free(trace):
    steps = critical_path(trace)
    assert sum(step.end_seconds - step.start_seconds for step in steps) == trace.makespan_seconds
    for before, after in pairwise(steps):
        assert before.end_seconds == after.start_seconds
    assert all(trace[step.event].kind == "compute" for step in steps)       # free transfers are on no path


def path(trace):
    return [(trace[step.event].rank, trace[step.event].name, step.start_seconds, step.end_seconds)
            for step in critical_path(trace)]


def test_the_critical_path_goes_over_to_the_device_that_was_waited_for():
    trace = Trace([
        compute(0, 0, 3, name="a"), send(0, 1, 3), compute(0, 3, 1, name="b"),
        compute(1, 0, 1, name="c"), recv(1, 0, 1, 4), compute(1, 5, 4, name="d"), all_reduce(1, 9, 2),
        Event(0, "collective", "all_reduce", 4, 7, group=(0, 1), sequence=0),
    ])
    assert path(trace) == [(0, "a", 0, 3), (1, "recv", 3, 5), (1, "d", 5, 9), (0, "all_reduce", 9, 11)]


def test_the_critical_path_follows_an_asynchronous_transfer_to_where_it_began():
    trace = Trace([
        compute(0, 0, 1, name="a"), all_reduce(0, 1, 7, work=0), compute(0, 1, 2, name="hidden"),
        Event(0, "wait", "all_reduce", 3, 5, work=0), compute(1, 0, 2, name="b"), all_reduce(1, 2, 6),
        compute(0, 8, 1, name="end"),
    ])
    assert path(trace) == [(1, "b", 0, 2), (0, "all_reduce", 2, 8), (0, "end", 8, 9)]


def test_a_circle_of_forged_times_ends():
    trace = Trace([recv(0, 1, 0, 5), send(0, 1, 5), recv(1, 0, 0, 5), send(1, 0, 5)])
    assert len(critical_path(trace)) == 0


def test_bus_bandwidth_is_that_of_nccl_tests():
    nbytes, size = 1200, 3
    received = 2 * nbytes * (size - 1) // size
    events = [all_reduce(rank, rank, 6 - rank, (0, 1, 2), bytes_received=received, algorithm="ring", bytes_sent=7,
                         axes=("tp",), payload_bytes=nbytes) for rank in range(3)]
    (row,) = collectives(Trace(events))
    assert row == ("all_reduce", "ring", ("tp",), 1, 4800, 21, 4.0, nbytes / 4 * 2 * (size - 1) / size)
    (row,) = collectives(Trace(events).filter(rank=(0, 1)))
    assert row.bus_bytes_per_second is None         # a member is missing: nobody knows how long it took
    (row,) = collectives(Trace([all_reduce(0, 0, 4, (0,), name="reshard", bytes_received=9)]))
    assert row[:5] == ("reshard", "direct", None, 1, 9) and row.bus_bytes_per_second is None


def test_rows_of_collectives_differ_by_name_algorithm_and_axes_and_count_operations():
    ways = ("ring", ("dp",)), ("tree", ("dp",)), ("ring", ("tp",)), ("ring", ("dp",))
    events = [all_reduce(rank, 0, 1, sequence=n, algorithm=way, axes=axes) for rank in (0, 1)
              for n, (way, axes) in enumerate(ways)]
    assert [row[:4] for row in collectives(Trace(events))] == [
        ("all_reduce", "ring", ("dp",), 2), ("all_reduce", "tree", ("dp",), 1), ("all_reduce", "ring", ("tp",), 1)]


def test_what_adding_up_floats_leaves_is_no_transfer():
    times = [(2.840101e-3, 0.4e-3), (2.9e-3, 0.340101e-3 + 4e-19)]
    trace = Trace([all_reduce(rank, start, seconds) for rank, (start, seconds) in enumerate(times)]
                  + [compute(0, 0, 2.840101e-3), compute(1, 0, 2.9e-3)])
    late = Trace([all_reduce(0, 0.1, 0.2), all_reduce(1, 0.1 + 0.2, 0.0)])
    assert collectives(late)[0].seconds == 0 and late[1].start_seconds > 0.3
    assert split(late)[0].communication == 0 and split(trace)[0].communication > 0


def test_the_names_of_the_parts():
    assert PARTS == ("forward", "backward", "recompute", "other", "communication", "bubble", "idle")
