"""The quick replay and the engine give the same times, to the last bit, whatever disturbs what from when on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from test_pricing import compute, machine, on, recv, ring, send, times, wait

from parallelism.hardware import Link
from parallelism.timeline import Replay


def by_the_engine(monkeypatch, lanes, hardware, **options):
    with monkeypatch.context() as patch:
        patch.setattr("parallelism.timeline.replay.undisturbed", lambda *_, **__: None)
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
def test_it_gives_the_times_of_the_engine_to_the_last_bit(number, lanes, link_sharing):
    with pytest.MonkeyPatch.context() as patch:
        wanted = by_the_engine(patch, lanes, MACHINES[number], link_sharing=link_sharing)
    assert times(on(lanes, MACHINES[number], link_sharing=link_sharing)) == times(wanted)


def test_which_links_had_a_transfer_before_changes_no_bit(monkeypatch):
    """Found by the test above: three links are full at one rate, and the engine had numbered them by their first use."""
    lanes = [
        [ring(0, (0, 1), 6), send(0, 2, 35), recv(0, 1, 3)],
        [ring(1, (0, 1), 6), compute(1, 31 / 7), ring(1, (1, 2), 6, work=9), send(1, 2, 3, 1), send(1, 0, 3), wait(1, 9)],
        [recv(2, 0, 35, work=1), ring(2, (1, 2), 6, work=9), recv(2, 1, 3, 1)],
    ]
    wanted = by_the_engine(monkeypatch, lanes, machine(8))
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


def looked_at(monkeypatch):
    """The lanes that the engine runs from now on."""
    seen, advance = [], Replay.advance
    monkeypatch.setattr(Replay, "advance", lambda self, lane: (seen.append(self.next[lane]), advance(self, lane))[1])
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


def test_where_nothing_is_disturbed_the_engine_does_not_run(monkeypatch):
    seen = looked_at(monkeypatch)
    trace = on(pipeline(20), machine(2))
    assert trace.makespan_seconds == 20 * (9 + 2) and not seen


def test_the_engine_goes_on_where_messages_first_share_a_link(monkeypatch):
    lanes = pipeline(20, last=(send(0, 1, 8, 20, work=1000), send(0, 1, 8, 21, work=1001)))
    wanted = by_the_engine(monkeypatch, lanes, machine(2))
    seen = looked_at(monkeypatch)
    trace = on(lanes, machine(2))
    assert times(trace) == times(wanted) and trace.makespan_seconds == 220 + 1 + 16 / 2
    assert seen and min(place for place in seen if place < len(lanes[0])) >= 60


def test_collectives_that_queue_and_are_disturbed_are_left_to_the_engine(monkeypatch):
    group, other = (0, 1), (0, 2)
    lanes = [
        [ring(0, group, 8, 0, work=1), ring(0, other, 8, 0, work=2), send(0, 1, 30, work=3), wait(0, 1), wait(0, 2)],
        [compute(1, 3.0), ring(1, group, 8), recv(1, 0, 30)],
        [ring(2, other, 8)],
    ]
    wanted = by_the_engine(monkeypatch, lanes, machine(4))
    seen = looked_at(monkeypatch)
    assert times(on(lanes, machine(4))) == times(wanted) and seen
