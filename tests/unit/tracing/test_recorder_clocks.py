"""When a device reads its clocks: the CPU time is a system call, and is read seldom where calls follow at once."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from vcluster.tracing import Recorder, recorder
from vcluster.tracing.recorder import _OLDEST_CPU_MARK_NS, _SHORTEST_COMPUTE_NS

TEMPLATE = ("collective", "barrier", {})


class Clocks:
    """Wall and CPU time as a program of the test passes them."""

    def __init__(self) -> None:
        self.wall = self.cpu = 1_000_000
        self.read = 0

    def work(self, wall: int, cpu: int) -> None:
        self.wall += wall
        self.cpu += cpu

    def perf_counter_ns(self) -> int:
        return self.wall

    def thread_time_ns(self) -> int:
        self.read += 1
        return self.cpu


@pytest.fixture
def clocks(monkeypatch):
    return patched(monkeypatch)


def patched(monkeypatch):
    found = Clocks()
    monkeypatch.setattr(recorder, "perf_counter_ns", found.perf_counter_ns)
    monkeypatch.setattr(recorder, "thread_time_ns", found.thread_time_ns)
    return found


def call(record, clocks, nanoseconds):
    """A call of the library that takes so long."""
    start = record.enter("barrier", "a.py:1")
    clocks.work(nanoseconds, nanoseconds)
    record.leave_repeated(TEMPLATE, "a.py:1", start)


def computed(record):
    entries = record.stop()[1]
    return [round(entries[at + 4] * 1e9) for at in range(0, len(entries), 5) if entries[at][0] == "compute"]


def test_calls_that_follow_at_once_read_the_cpu_time_now_and_then(clocks):
    record = Recorder()
    record.start()
    before = clocks.read
    for _ in range(1000):
        call(record, clocks, 4_000)
        clocks.work(1_000, 1_000)
    assert clocks.read - before == pytest.approx(1000 * 5_000 / _OLDEST_CPU_MARK_NS, abs=1)
    assert computed(record) == []


def test_compute_between_calls_is_measured_to_the_nanosecond_however_long_it_had_no_core(clocks):
    record = Recorder()
    record.start()
    for number in range(5):
        clocks.work(50_000_000, 3_000 + number)
        call(record, clocks, 4_000)
    assert computed(record) == [3_000, 3_001, 3_002, 3_003, 3_004]


def test_compute_after_calls_that_follow_at_once_is_its_wall_time_where_nobody_takes_the_core(clocks):
    record = Recorder()
    record.start()
    for _ in range(3):
        call(record, clocks, 4_000)
    clocks.work(70_000, 70_000)
    call(record, clocks, 4_000)
    assert computed(record) == [70_000]


@given(st.lists(st.tuples(st.integers(1, 60_000), st.integers(0, 10_000), st.integers(0, 10_000_000)), max_size=30))
def test_compute_is_never_told_short_and_too_long_by_one_old_mark_at_most(steps):
    """Each step is a call, and behind it compute and a time without a core."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        clocks = patched(monkeypatch)
        record = Recorder()
        record.start()
        wanted = []
        for duration, work, lost in steps:
            call(record, clocks, duration)
            clocks.work(work + lost, work)
            wanted.append(work)
        call(record, clocks, 1)
        entries = record.stop()[1]
    found, at = [], 0
    for place in range(0, len(entries), 5):
        if entries[place][0] == "compute":
            found.append((at, round(entries[place + 4] * 1e9)))
        else:
            at += 1
    for number, spent in found:
        assert number > 0 and wanted[number - 1] <= spent <= wanted[number - 1] + _OLDEST_CPU_MARK_NS
    told = {number for number, _ in found}
    assert all(number + 1 in told for number, work in enumerate(wanted) if work >= _SHORTEST_COMPUTE_NS)
