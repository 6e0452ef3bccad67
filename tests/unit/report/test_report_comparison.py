"""Two traces compared: the changes add up, and the text says what got slower, and why."""

from __future__ import annotations

from hypothesis import given, strategies as st

from parallelism.trace import Event, Trace
from vcluster import report
from vcluster.report import Change, compare


def trace(forward=2.0, backward=4.0, transfer=1.0, size=2, straggler=0.0):
    events = []
    for rank in range(size):
        late = straggler * (rank == 1)
        end = forward + backward + late
        events += [
            Event(rank, "compute", f"{rank}F0", 0, forward, stage=rank, microbatch=0, phase="F"),
            Event(rank, "compute", f"{rank}B0", forward, backward + late, stage=rank, microbatch=0, phase="B"),
            Event(rank, "collective", "all_reduce", end, forward + backward + straggler + transfer - end,
                  axes=("dp",), group=tuple(range(size)), sequence=0),
        ]
    return Trace(events)


def test_a_straggler_is_named_and_the_rest_is_what_waits_for_it():
    changes = compare(trace(), trace(straggler=3.0))
    assert changes.makespan == Change("makespan", 7, 10) and changes.makespan.seconds == 3
    assert {part.name: part.seconds for part in changes.parts if part.seconds} == {"backward": 1.5, "bubble": 1.5}
    assert changes.names[0] == Change("backward of stage 1 (B)", 4, 7) and changes.devices[0] == Change("rank 1", 6, 9)
    assert str(changes) == """\
slower: makespan 7 s -> 10 s (+3 s, 42.9% slower)
main cause: backward, +1.50 s on the mean device, 50% of the difference
largest increase: backward of stage 1 (B), +3 s on all devices together

the mean device        before   after   change
forward                   2 s     2 s      0 s
backward                  4 s  5.50 s  +1.50 s
exposed communication     1 s     1 s      0 s
bubble                    0 s  1.50 s  +1.50 s
makespan                  7 s    10 s     +3 s

all devices together     before  after  change
backward of stage 1 (B)     4 s    7 s    +3 s

compute of a device  before  after  change
rank 1                  6 s    9 s    +3 s"""


def test_faster_says_faster_and_a_slower_collective_is_named_with_its_axes():
    text = str(compare(trace(transfer=9.0), trace(transfer=1.0)))
    assert text.startswith("faster: makespan 15 s -> 7 s (-8 s, 53.3% faster)\nmain cause: exposed communication, -8 s")
    assert "largest decrease: all_reduce over dp, -16 s on all devices together" in text


def test_the_same_trace_is_as_long_as_before_and_runs_are_taken_for_their_traces():
    class Run:
        trace = trace()

    assert str(compare(Run(), trace())).startswith("unchanged: makespan 7 s -> 7 s\n\nthe mean device")
    assert repr(report.compare(Run(), trace())) == str(report.compare(trace(), trace()))


def test_numbers_of_devices_may_differ_and_traces_may_be_empty():
    text = str(compare(trace(), trace(size=3, forward=5.0)))
    assert "2 devices before, 3 after" in text and "rank 2" not in text
    assert str(compare(Trace([]), Trace([]))) == "unchanged: makespan 0 s -> 0 s"
    assert str(compare(Trace([]), trace())).startswith("slower: makespan 0 s -> 7 s (+7 s)")


def test_numbers_in_names_are_left_out_and_hostile_names_are_told_harmlessly():
    def named(name, seconds):
        return [Event(0, "compute", name, 0, seconds), Event(0, "send", name, seconds, 1, peer=0)]

    changes = compare(Trace(named("block 7", 1)), Trace([*named("block 7", 1), *named("block 19", 1)]))
    assert {change.name for change in changes.names} == {"compute block #", "send block #"}
    text = str(compare(Trace([]), Trace(named("\x1b[2J" + "long " * 50, 1))))
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


whole = st.integers(0, 9).map(float)


@given(*[st.builds(trace, whole, whole, whole, st.integers(2, 4), whole)] * 2)
def test_the_changes_of_the_parts_add_up_to_that_of_the_makespan(a, b):
    changes = compare(a, b)
    assert abs(sum(change.seconds for change in changes.parts) - changes.makespan.seconds) < 1e-12
