"""How an endpoint sleeps, with a clock of the test's own."""

from __future__ import annotations

import pytest

from vcluster.code import OperationCancelled
from vcluster.memory import NAPS_SECONDS, NAPS_WITH_QUEUES_SECONDS, PAGE, Arena, Layout, Signals


@pytest.fixture
def arena():
    made = Arena(Layout(2, 16 * PAGE).nbytes)
    yield made
    made.close_descriptor()


def naps_of(arena, naps_seconds, woken_after, count):
    """In nanoseconds, those of a wait that ends after ``count`` of them; somebody wakes it after ``woken_after``."""
    signals = Signals(arena, Layout(2, 16 * PAGE), 0, spins=0, naps_seconds=naps_seconds)
    naps = []

    def sleep(address, seen, longest_ns):
        naps.append(longest_ns)
        if len(naps) == woken_after:
            signals._word[0] += 1

    signals._sleep = sleep
    signals.wait(lambda: len(naps) >= count)
    return naps


def test_a_sleeper_that_nobody_need_wake_twice_sleeps_long(arena):
    assert naps_of(arena, NAPS_SECONDS, 2, 4) == [10**9] * 4


def test_a_sleeper_with_queues_naps_shortly_first_and_again_when_it_was_woken(arena):
    first, longest = (int(seconds * 1e9) for seconds in NAPS_WITH_QUEUES_SECONDS)
    assert naps_of(arena, NAPS_WITH_QUEUES_SECONDS, 3, 6) == [first * n for n in (1, 2, 4, 1, 2, 4)]
    assert naps_of(arena, NAPS_WITH_QUEUES_SECONDS, 0, 12)[-1] == longest


@pytest.mark.parametrize("quiet_ns", [10**12, 0])
def test_what_is_awaited_is_published_only_in_a_long_wait(arena, monkeypatch, quiet_ns):
    monkeypatch.setattr("vcluster.memory.signals.QUIET_NS", quiet_ns)
    signals = Signals(arena, Layout(2, 16 * PAGE), 0, spins=0)
    done, published = [], []
    signals._sleep = lambda *_: done.append("slept")
    signals.threads.some_other_may_act = lambda asleep: False     # pytest-xdist has a thread
    signals.note_awaited, signals.publish_awaited = lambda: "a message", published.append
    signals.wait(lambda: len(done) == 2)
    assert published == ([] if quiet_ns else ["a message"] * 2)


def test_a_wait_that_becomes_long_is_published_as_soon_as_it_is(arena, monkeypatch):
    monkeypatch.setattr("vcluster.memory.signals.QUIET_NS", 10**9)
    signals = Signals(arena, Layout(2, 16 * PAGE), 0, spins=0)
    clock, naps, published = [0], [], []
    monkeypatch.setattr("vcluster.memory.signals.time.perf_counter_ns", lambda: clock[0])

    def sleep(address, seen, longest_ns):
        naps.append(longest_ns)
        clock[0] += longest_ns // 2 if len(naps) == 1 else longest_ns

    signals._sleep = sleep
    signals.threads.some_other_may_act = lambda asleep: False
    signals.note_awaited, signals.publish_awaited = lambda: "a message", lambda what: published.append(len(naps))
    signals.wait(lambda: len(naps) == 3)
    assert naps == [10**9, 5 * 10**8, 10**9]    # no longer than nothing may be published
    assert published == [2]


def test_who_was_woken_looks_before_anything_else(arena):
    signals = Signals(arena, Layout(2, 16 * PAGE), 0, spins=0)
    done = []
    signals._sleep = lambda *_: done.append("slept")
    signals.before_sleep = lambda: done.append("took in")
    signals.wait(lambda: "slept" in done)
    assert done == ["took in", "slept"]


def test_calls_that_never_wait_for_long_do_not_outlast_a_cancellation(arena):
    signals = Signals(arena, Layout(2, 16 * PAGE), 0, spins=5)
    signals.cancel()
    polls = iter([False, True, True, False, True])
    signals.wait(lambda: next(polls))  # what has happened all the same is told, as that members call different things
    signals.wait(lambda: next(polls))
    with pytest.raises(OperationCancelled):
        signals.wait(lambda: next(polls))
