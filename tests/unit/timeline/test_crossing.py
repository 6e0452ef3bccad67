"""Links are shared from the first moment on at which transfers disturb each other: the same times, to the last bit, as from
the beginning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from test_pricing import compute, machine, on, recv, ring, send, times, wait

from parallelism.hardware import Link
from parallelism.timeline import Replay
from parallelism.timeline.steps import Lanes


def beginnings(lanes, engine):
    """Instead of `Lanes.first_shared`: all lanes share their links from the beginning."""
    return None if lanes.crossing is None else [0, *engine.ends[:-1]]


def shared_from_the_beginning(monkeypatch, lanes, hardware, **options):
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "first_shared", beginnings)
        return on(lanes, hardware, **options)


@st.composite
def programs(draw):
    """Programs that can run, on up to five ranks; with times that make rounding differ if sums do."""
    size = draw(st.integers(1, 5))
    lanes = [[] for _ in range(size)]
    counts, under_way = {}, []
    ranks, nbytes = st.integers(0, size - 1), st.sampled_from((0, 3, 8, 35))
    for work in range(draw(st.integers(0, 30))):
        step = draw(st.sampled_from(("compute", "compute", "message", "message", "collective", "wait", "memory")))
        number = work if draw(st.booleans()) else None
        if step == "compute":
            rank = draw(ranks)
            lanes[rank].append(compute(rank, draw(st.integers(0, 40)) / 7))
        elif step == "message":
            source, target, size_of = draw(ranks), draw(ranks), draw(nbytes)
            nth = counts[source, target] = counts.get((source, target), -1) + 1
            sent = send(source, target, size_of, nth, work=draw(st.sampled_from((None, 1000 + work))))
            received = recv(target, source, size_of, nth, work=number)
            for event in (sent, received) if number is None or draw(st.booleans()) else (received, sent):
                lanes[event.rank].append(event)
            under_way += [(source, sent.work)] if sent.work is not None else []
            under_way += [(target, work)] if number is not None else []
        elif step == "collective":
            group = tuple(draw(st.lists(ranks, min_size=1, unique=True)))
            nth = counts[group] = counts.get(group, -1) + 1
            size_of = len(group) * draw(nbytes)
            for rank in group:
                lanes[rank].append(ring(rank, group, size_of, nth, work=number))
            under_way += [(rank, work) for rank in group] if number is not None else []
        elif step == "wait" and under_way:
            lanes[(each := under_way.pop(draw(st.integers(0, len(under_way) - 1))))[0]].append(wait(*each))
        else:
            lanes[0].append(replace(compute(0), kind="memory", name="activations", nbytes=8.0))
    return [[replace(event, serial=i) for i, event in enumerate(lane)] for lane in lanes]


MACHINES = [
    machine(8), machine(8, message_overhead_seconds=0.3), machine(8, message_overhead_seconds_per_byte=0.1),
    machine(8, collective_share=0.3),
    machine(links=[Link("inside", 2, 0, 8), Link("between", 4, latency_seconds=0.1, bytes_per_second=3, ports=1)]),
    machine(links=[Link("inside", 2, 0.7, 8), Link("between", 4, latency_seconds=0, bytes_per_second=3)]),
    machine(8).fault(source=0, target=1, bandwidth_factor=0.5),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(len(MACHINES)))
@given(programs(), st.booleans())
def test_times_are_those_of_links_that_are_shared_from_the_beginning(number, lanes, link_sharing):
    with pytest.MonkeyPatch.context() as patch:
        wanted = shared_from_the_beginning(patch, lanes, MACHINES[number], link_sharing=link_sharing)
    assert times(on(lanes, MACHINES[number], link_sharing=link_sharing)) == times(wanted)


def test_which_links_had_a_transfer_before_changes_no_bit(monkeypatch):
    """Found by the test above: three links are full at one rate, and had been numbered by their first use."""
    lanes = [
        [ring(0, (0, 1), 6), send(0, 2, 35), recv(0, 1, 3)],
        [ring(1, (0, 1), 6), compute(1, 31 / 7), ring(1, (1, 2), 6, work=9), send(1, 2, 3, 1), send(1, 0, 3), wait(1, 9)],
        [recv(2, 0, 35, work=1), ring(2, (1, 2), 6, work=9), recv(2, 1, 3, 1)],
    ]
    wanted = shared_from_the_beginning(monkeypatch, lanes, machine(8))
    assert times(on(lanes, machine(8))) == times(wanted)


@given(programs(), st.randoms(use_true_random=False), st.booleans())
def test_the_numbers_of_the_ranks_do_not_matter(lanes, random, link_sharing):
    names = random.sample(range(len(lanes)), len(lanes))

    def renamed(event):
        group = tuple(names[rank] for rank in event.group) if event.group else event.group
        peer = None if event.peer is None else names[event.peer]
        return replace(event, rank=names[event.rank], group=group, peer=peer)

    others = [[renamed(event) for event in lanes[names.index(rank)]] for rank in range(len(lanes))]
    found, again = (times(on(each, machine(8), link_sharing=link_sharing)) for each in (lanes, others))
    for rank, name in enumerate(names):
        expected = [of_event[1:] for of_event in found if of_event[0] == rank]
        assert [of_event[1:] for of_event in again if of_event[0] == name] == [
            pytest.approx(pair, rel=1e-9, abs=1e-12) for pair in expected]


def first_shared(monkeypatch):
    """The steps from which lanes run on shared links from now on."""
    seen, share = [], Replay.share
    monkeypatch.setattr(Replay, "share", lambda self, crossing, first: (seen.append(first), share(self, crossing, first)))
    return seen


def pipeline(rounds, last=()):
    """Two ranks that send each other a message after each second of work; and events of the first after that."""
    lanes = [[], []]
    for i in range(rounds):
        for rank in range(2):
            lanes[rank] += [compute(rank, 9.0), send(rank, 1 - rank, 2, i, work=i)]
        for rank in range(2):
            lanes[rank] += [recv(rank, 1 - rank, 2, i)]
    return [[*lanes[0], *last], [*lanes[1], *(recv(1, 0, 8, rounds + i) for i, _ in enumerate(last))]]


def test_where_nothing_is_disturbed_no_link_is_shared(monkeypatch):
    seen = first_shared(monkeypatch)
    trace = on(pipeline(20), machine(2))
    assert trace.makespan_seconds == 20 * (9 + 2) and not seen


def test_lanes_go_on_where_messages_first_share_a_link(monkeypatch):
    lanes = pipeline(20, last=(send(0, 1, 8, 20, work=1000), send(0, 1, 8, 21, work=1001)))
    wanted = shared_from_the_beginning(monkeypatch, lanes, machine(2))
    seen = first_shared(monkeypatch)
    trace = on(lanes, machine(2))
    assert times(trace) == times(wanted) and trace.makespan_seconds == 220 + 1 + 16 / 2
    assert seen == [[60, 62 + 60]]      # behind three steps in each round; the first lane has two more


def test_collectives_that_queue_and_are_disturbed_run_again_from_the_beginning(monkeypatch):
    group, other = (0, 1), (0, 2)
    lanes = [
        [compute(0, 1.0), ring(0, group, 8, 0, work=1), ring(0, group, 8, 1, work=2), ring(0, other, 8, 0, work=3),
         send(0, 1, 30, work=4), wait(0, 1), wait(0, 2), wait(0, 3)],
        [compute(1, 3.0), ring(1, group, 8, work=1), ring(1, group, 8, 1, work=2), recv(1, 0, 30), wait(1, 1), wait(1, 2)],
        [ring(2, other, 8)],
    ]
    wanted = shared_from_the_beginning(monkeypatch, lanes, machine(4))
    seen = first_shared(monkeypatch)
    assert times(on(lanes, machine(4))) == times(wanted) and seen == [[0, 8, 14]]


@pytest.mark.parametrize("link_sharing", [False, True])
def test_of_several_sends_of_one_message_the_first_counts(link_sharing):
    lanes = [[compute(0, 1.0), send(0, 1, 6), compute(0, 2.0), send(0, 1, 6)],
             [recv(1, 0, 6), compute(1, 8.0), recv(1, 0, 6)]]
    ends = {event.start_seconds + event.duration_seconds for event in on(lanes, machine(2), link_sharing=link_sharing)}
    assert ends == {1, 3, 5, 13}


def test_asynchronous_operations_may_have_any_names():
    lanes = [[send(0, 1, 6), send(0, 1, 6, 1)],
             [recv(1, 0, 6, work="a"), recv(1, 0, 6, 1, work=2.5), compute(1, 9.0), wait(1, "a"), wait(1, 2.5), wait(1, "b")]]
    numbered = [lanes[0], [replace(event, work={"a": 1, 2.5: 2, "b": 3}.get(event.work)) for event in lanes[1]]]
    assert times(on(lanes, machine(2))) == times(on(numbered, machine(2)))
