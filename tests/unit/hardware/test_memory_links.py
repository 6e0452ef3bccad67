"""A level of links that is memory: its devices copy, each for itself, and what that takes has pieces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parallelism import Costs, Event, Hardware, HostLink, Link, Trace
from parallelism.hardware import HardwareFileError, Piece

A, B = 2.0**-18, 2.0**-30
PIECES = (Piece(1024, 2 * A, B**-1 / 4), Piece(4096, A / 2, B**-1 * 2))


def memory(devices=4, pieces=PIECES, **fields) -> Hardware:
    link = {"pieces": pieces, **{name: fields.pop(name) for name in ("collective_pieces",) if name in fields}}
    return Hardware("ours", {"float64": 2.0**30}, 2.0**34, 2.0**30, (Link("m", devices, A, 1 / B, "memory", **link),),
                    HostLink(A, 1 / B), **fields)


@pytest.mark.parametrize(("nbytes", "seconds"), [
    (0, A), (8, A + 8 * B), (1023, A + 1023 * B), (1024, 2 * A + 1024 * 4 * B), (4095, 2 * A + 4095 * 4 * B),
    (4096, A / 2 + 2048 * B), (2**20, A / 2 + 2**19 * B),
])
def test_a_message_takes_the_line_of_its_size(nbytes, seconds):
    assert Costs(memory()).message_seconds(nbytes, 1, 3) == seconds


def test_a_fault_is_on_top_of_the_piece():
    faulty = Costs(memory().fault(source=1, delay_seconds=8 * A, bandwidth_factor=0.5))
    assert faulty.message_seconds(1024, 1, 0) == 10 * A + 1024 * 8 * B
    assert faulty.message_seconds(1024, 0, 1) == 2 * A + 1024 * 4 * B


def test_messages_share_nothing_however_many_there_are():
    assert memory().fault(source=0, bandwidth_factor=0.5).path(0, 1).channels == ()
    lanes = [Event(0, "send", "send", peer=1, tag=0, sequence=i, bytes_sent=2048, messages=1) for i in range(3)]
    lanes += [Event(1, "recv", "recv", peer=0, tag=0, sequence=i, bytes_received=2048) for i in range(3)]
    assert Trace(lanes).on(memory()).makespan_seconds == 2 * A + 2048 * 4 * B


def test_a_collective_takes_the_line_of_its_size_and_what_its_members_add_up():
    pieces = (Piece(1, 4 * A, 1 / B), Piece(2048, 8 * A, 1 / B))
    costs = Costs(memory(collective_pieces=pieces, collective_bytes_per_second={"all_reduce": 2.0**28}))
    small, large = (costs.collective("all_reduce", nbytes, (0, 1), algorithm="ring") for nbytes in (1024, 2048))
    assert small.seconds == 2 * (4 * A + 512 * B) + 2**-18 and large.seconds == 2 * (8 * A + 1024 * B) + 2**-17
    small, large = (costs.collective("all_gather", nbytes, (0, 1), algorithm="ring") for nbytes in (2048, 4096))
    assert small.seconds == 4 * A + 1024 * B and large.seconds == 8 * A + 2048 * B      # each member has half
    assert costs.collective("all_reduce", 2048, (2,)).seconds == 0
    assert Costs(memory()).collective("reduce_scatter", 1024, (0, 1), algorithm="ring").seconds == 2 * A + 512 * 4 * B


def test_what_is_not_behind_the_longer_comes_on_top():
    behind, half = Costs(memory()), Costs(memory(memory_overlap=0.5))
    assert behind.compute_seconds(2.0**30, 2.0**29) == 1 and half.compute_seconds(2.0**30, 2.0**29) == 1.25
    assert half.compute_seconds(2.0**29, 2.0**30) == 1.25 and half.compute_seconds(2.0**30) == 1


def test_it_is_saved_and_loaded_and_printed(tmp_path):
    told = memory(collective_pieces=PIECES[:1], collective_bytes_per_second={"all_reduce": 3e9}, memory_overlap=0.25)
    told.save(tmp_path / "ours.json")
    assert Hardware.load(tmp_path / "ours.json") == told != memory()
    for words in ("4 devices, memory: 3.81 us, 1.074 GB/s", "from 1.024 kB on: 7.63 us, 268.4 MB/s",
                  "collectives from 1.024 kB on", "all_reduce 3 GB/s", "25% of the shorter of flops and memory"):
        assert words in str(told)


@pytest.mark.parametrize(("change", "words"), [
    ({"pieces": [{"from_bytes": 0, "latency_seconds": 0, "bytes_per_second": 1}]},
     r"links\[0\]\.pieces\[0\]\.from_bytes must be a number of bytes, above 0; got 0"),
    ({"pieces": [{"from_bytes": 8}]}, r"links\[0\]\.pieces\[0\]\.latency_seconds is missing"),
    ({"collective_pieces": {"from_bytes": 8}}, r"links\[0\]\.collective_pieces must be a list of tables"),
    ({"shape": "switch"}, r"links\[0\]\.pieces are of a memory, where messages share nothing; got some of a switch"),
    ({"pieces": [{"from_bytes": n, "latency_seconds": 0, "bytes_per_second": 1} for n in (8, 8)]},
     r"links\[0\]\.pieces must begin one after the other, by from_bytes; got 8, 8"),
])
def test_a_broken_piece_is_named(tmp_path, change, words):
    memory().save(tmp_path / "ours.json")
    document = json.loads((tmp_path / "ours.json").read_text())
    document["links"][0].update(change)
    (tmp_path / "ours.json").write_text(json.dumps(document))
    with pytest.raises(HardwareFileError, match=words):
        Hardware.load(tmp_path / "ours.json")


@pytest.mark.parametrize(("fields", "words"), [
    ({"collective_bytes_per_second": {"all_redcue": 1}}, "must be of .*; got 'all_redcue'; did you mean 'all_re"),
    ({"collective_bytes_per_second": {"all_reduce": 0}}, "per_second.all_reduce must be a number of bytes a second"),
    ({"collective_bytes_per_second": [1]}, r"must be a table of numbers by collective; got \[1\]"),
    ({"memory_overlap": 1.5}, "memory_overlap must be a number, at least 0 and at most 1; got 1.5"),
])
def test_a_wrong_rate_is_named(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        replace(memory(), **fields)
