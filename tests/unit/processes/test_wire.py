"""The way of commands and replies: notes and pipe keep the order, whoever sleeps is woken, and an end is an end."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, strategies as st

from vcluster.memory import WIRE_BYTES, Arena
from vcluster.processes.command_link import NOTE_BYTES, Wire
from vcluster.processes.descriptors import is_readable


@contextmanager
def both_ends():
    arena = Arena(WIRE_BYTES)
    ours, theirs = (end.detach() for end in socket.socketpair())
    host, device = Wire(arena, 0, ours, host=True), Wire(arena, 0, theirs, host=False, polls=3)
    try:
        yield host, device
    finally:
        host.close()
        device.close()
        arena.close_descriptor()


@pytest.fixture
def ends():
    with both_ends() as ends:
        yield ends


def has_rung(wire):
    return is_readable(wire.fd, 0)


def test_a_note_is_found_by_looking_and_needs_no_pipe(ends):
    host, device = ends
    assert device.take_note() is None
    host.send(b"run")
    assert device.take_note() == b"run"
    assert device.take_note() is None
    assert not has_rung(device)
    device.send(b"done")
    assert host.take_note() == b"done"
    assert not has_rung(host)


def test_who_sleeps_gets_it_through_the_pipe(ends):
    host, device = ends
    device.fall_asleep()
    host.send(b"run")
    assert device.take_note() is None
    assert device.read() == [b"run"]
    device.awake()
    host.send(b"again")
    assert device.take_note() == b"again"


def test_who_falls_asleep_as_a_note_is_left_is_rung_for(ends):
    host, device = ends
    fence = host._fence
    fences = []

    def falls_asleep_between():
        fences.append(None)
        if len(fences) == 2:
            device.fall_asleep()
        fence()

    host._fence = falls_asleep_between
    host.send(b"run")
    assert device.read() == []  # the bell
    assert device.take_note() == b"run"


def test_what_is_too_long_and_what_comes_too_soon_goes_through_the_pipe_in_order(ends):
    host, device = ends
    device.send(b"first")
    device.send(b"second")  # the first was not taken
    device.send(b"x" * (NOTE_BYTES + 1))
    assert host.take_note() == b"first"
    device.send(b"last")  # a note, which tells that two come before it
    assert host.take_note() is None
    assert host.read() == [b"second", b"x" * (NOTE_BYTES + 1)]
    assert host.take_note() == b"last"


@given(st.lists(st.tuples(st.integers(1, 2 * NOTE_BYTES), st.booleans(), st.booleans()), max_size=12))
def test_any_messages_arrive_once_and_in_order(sent):
    with both_ends() as (host, device):
        found = []

        def take():
            while True:
                data = host.take_note()
                if data is not None:
                    found.append(data)
                elif has_rung(host):
                    found.extend(host.read())
                else:
                    return

        for number, (nbytes, asleep, looks) in enumerate(sent):
            if asleep:
                host.fall_asleep()
            device.send(bytes([number]) * nbytes)
            if looks:
                take()
            host.awake()
        take()
        assert found == [bytes([number]) * nbytes for number, (nbytes, _, _) in enumerate(sent)]


def test_receive_waits_and_wakes(ends):
    host, device = ends
    got = []
    thread = threading.Thread(target=lambda: got.extend(device.receive() for _ in range(200)))
    thread.start()
    for number in range(200):
        host.send(f"{number}".encode())
    thread.join(20)
    assert got == [f"{number}".encode() for number in range(200)]


def test_a_message_larger_than_the_pipe_arrives_whole(ends):
    host, device = ends
    data = os.urandom(1 << 20)
    thread = threading.Thread(target=host.send, args=(data,))
    thread.start()
    assert device.receive() == data
    thread.join(20)


def test_the_end_of_the_other_side_is_told(ends):
    host, device = ends
    device.close()
    with pytest.raises((EOFError, OSError)):
        host.read()
    with pytest.raises(OSError):
        host.send(b"x" * (NOTE_BYTES + 1))
