"""A message holds its sender and its receiver for a time: in the replay, in simulations, with shared links or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelism import Event, Hardware, HostLink, Link, Trace

OVERHEAD, LATENCY, SIZE = 0.5, 0.25, 8
HARDWARE = Hardware("ours", {"float32": 1.0}, 1e9, 1e9, (Link("wire", 3, LATENCY, 16.0),), HostLink(0, 1),
                    message_overhead_seconds=OVERHEAD)


def send(rank, peer, **more):
    return Event(rank, "send", "send", peer=peer, tag=0, bytes_sent=SIZE, messages=1, dtype="float32", **more)


def recv(rank, peer, **more):
    return Event(rank, "recv", "recv", peer=peer, tag=0, bytes_received=SIZE, **more)


def timed(*events, sharing=True, **fields):
    counts = {}
    numbered = []
    for event in events:
        key = event.rank, event.kind, event.peer
        counts[key] = counts.get(key, -1) + 1
        serial = sum(each.rank == event.rank for each in numbered)
        sequence = counts[key] if event.kind in ("send", "recv") else None
        numbered.append(replace(event, sequence=sequence, serial=serial))
    trace = Trace(numbered, size=3).on(replace(HARDWARE, **fields), compute="modelled", link_sharing=sharing)
    return [(event.start_seconds, event.start_seconds + event.duration_seconds) for event in trace]


@pytest.mark.parametrize("sharing", [False, True])
def test_both_ends_are_held(sharing):
    passing = LATENCY + SIZE / 16
    assert timed(send(0, 1), recv(1, 0), sharing=sharing) == [(0, 0.5), (0, 0.5 + passing + 0.5)]
    late = Event(1, "compute", "work", seconds=3.0)
    assert timed(send(0, 1), late, recv(1, 0), sharing=sharing) == [(0, 0.5), (0, 3), (3, 3.5)]


@pytest.mark.parametrize("sharing", [False, True])
def test_an_asynchronous_send_holds_its_sender_and_an_asynchronous_recv_ends_later(sharing):
    work = Event(0, "compute", "work", seconds=1.0)
    told = timed(send(0, 1, work=1), work, Event(0, "wait", "send", work=1), recv(1, 0, work=1),
                 Event(1, "wait", "recv", work=1), sharing=sharing)
    assert told[:3] == [(0, 0.5), (0.5, 1.5), (1.5, 1.5)]
    assert told[4] == (0, 0.5 + LATENCY + SIZE / 16 + 0.5)


def test_a_stream_is_as_long_as_its_overheads_where_they_are_longer_than_the_link():
    messages = 6
    told = timed(*(send(0, 1) for _ in range(messages)), *(recv(1, 0) for _ in range(messages)),
                 message_overhead_seconds=2.0)
    assert told[messages - 1][1] == 2 * messages
    assert told[-1][1] == pytest.approx(2 * messages + LATENCY + SIZE / 16 + 2)
    free = timed(*(send(0, 1) for _ in range(messages)), *(recv(1, 0) for _ in range(messages)),
                 message_overhead_seconds=0.0)
    assert free[messages - 1] == (0, 0)


@pytest.mark.parametrize("sharing", [False, True])
def test_both_ends_are_held_longer_by_longer_messages(sharing):
    passing, held = LATENCY + SIZE / 16, OVERHEAD + SIZE * 0.125
    assert timed(send(0, 1), recv(1, 0), sharing=sharing, message_overhead_seconds_per_byte=0.125) == [
        (0, held), (0, held + passing + held)]
    empty = replace(send(0, 1), bytes_sent=0), replace(recv(1, 0), bytes_received=0)
    assert timed(*empty, sharing=sharing, message_overhead_seconds_per_byte=0.125)[0] == (0, OVERHEAD)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_receiver_is_held_as_long_as_its_sender_whatever_dtype_stands_for_the_floats(sharing):
    trace = Trace([replace(send(0, 1), sequence=0, serial=0), replace(recv(1, 0), sequence=0, serial=0)], size=3)
    fields = {"message_overhead_seconds": 0.0, "message_overhead_seconds_per_byte": 0.125}
    halves = trace.on(replace(HARDWARE, flops_per_second={"float32": 1.0, "float16": 1.0}, **fields),
                      compute="modelled", priced_dtype="float16", link_sharing=sharing)
    assert [event.duration_seconds for event in halves] == [0.5, 0.5 + LATENCY + SIZE / 2 / 16 + 0.5]


def test_a_stream_of_copies_is_as_long_as_the_copies():
    messages = 6
    told = timed(*(send(0, 1) for _ in range(messages)), *(recv(1, 0) for _ in range(messages)),
                 message_overhead_seconds=0.0, message_overhead_seconds_per_byte=0.25)
    assert told[messages - 1][1] == 2 * messages
    assert told[-1][1] == pytest.approx(2 * messages + LATENCY + SIZE / 16 + 2)


def test_a_recv_of_a_message_that_nobody_sent_holds_nothing_per_byte():
    trace = Trace([replace(recv(1, 0), sequence=0, serial=0)], size=3)
    (event,) = trace.on(replace(HARDWARE, message_overhead_seconds_per_byte=1.0), compute="modelled")
    assert event.duration_seconds == 0


def test_a_collective_takes_its_share_of_the_device_from_compute_beside_it():
    def lane(rank):
        call = Event(rank, "collective", "all_reduce", group=(0, 1), axes=None, dtype="float32", algorithm="direct",
                     bytes_sent=SIZE, bytes_received=SIZE, payload_bytes=SIZE, messages=2, work=1)
        return [call, Event(rank, "compute", "work", seconds=8.0), Event(rank, "wait", "all_reduce", work=1)]

    for share in (0.0, 0.25):
        told = timed(*lane(0), *lane(1), collective_share=share, message_overhead_seconds=0.0)
        lasts = told[0][1]
        assert 0 < lasts < 8 and told[1] == (share * lasts, share * lasts + 8)
