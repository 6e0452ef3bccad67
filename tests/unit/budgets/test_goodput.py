"""What failures cost is what a thousand histories of them cost, and intervals are the best ones."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import inf, nan, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism.budgets import Budget, Cell, Failures
from parallelism.budgets.failures import (
    asynchronous_goodput,
    best_asynchronous_interval,
    daly_interval,
    goodput,
    young_interval,
)
from parallelism.budgets.measures import Measures

HISTORIES, CHECKPOINTS = 1000, 60


def until_up(time: float, fails: float, restart: float, after: Any) -> tuple[float, float]:
    """The moment at which a run that failed now is up, and that of the next failure."""
    while time + restart > fails:
        time, fails = fails, fails + after()
    return time + restart, fails


def histories(between: float, seed: int) -> Any:
    draws = np.random.default_rng(seed)
    for _ in range(HISTORIES):
        yield lambda: float(draws.exponential(between))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("interval", "write", "restart", "between"), [
    (900.0, 60.0, 300.0, 4000.0), (100.0, 50.0, 0.0, 200.0), (3000.0, 5.0, 1200.0, 2500.0), (50.0, 0.5, 30.0, 1e5)])
def test_the_goodput_is_that_of_a_thousand_histories(
    interval: float, write: float, restart: float, between: float
) -> None:
    """A history saves a number of times; a failure throws away all since the last time."""
    taken = 0.0
    for after in histories(between, 1):
        time, saved, fails = 0.0, 0, after()
        while saved < CHECKPOINTS:
            if time + interval + write <= fails:
                time, saved = time + interval + write, saved + 1
            else:
                time, fails = until_up(fails, fails + after(), restart, after)
        taken += time
    found = goodput(interval, write, restart, between)
    assert found == pytest.approx(HISTORIES * CHECKPOINTS * interval / taken, rel=0.01)


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize(("interval", "stall", "write", "restart", "between"), [
    (900.0, 5.0, 600.0, 300.0, 4000.0), (100.0, 0.0, 100.0, 10.0, 400.0), (50.0, 2.0, 10.0, 30.0, 1e5)])
def test_so_is_that_of_asynchronous_checkpoints(
    interval: float, stall: float, write: float, restart: float, between: float
) -> None:
    """A checkpoint that was begun counts once it is written; a failure goes back to the last one that was."""
    taken = 0.0
    for after in histories(between, 2):
        time, saved, fails = 0.0, 0, after()
        while True:
            whole = [time + k * (interval + stall) + write for k in range(1, CHECKPOINTS - saved + 1)]
            if whole[-1] <= fails:
                taken += whole[-1] - write
                break
            saved += sum(each <= fails for each in whole)
            time, fails = until_up(fails, fails + after(), restart, after)
    found = asynchronous_goodput(interval, stall, write, restart, between)
    assert found == pytest.approx(HISTORIES * CHECKPOINTS * interval / taken, rel=0.01)


@given(st.floats(0.1, 1e3), st.floats(1e2, 1e6))
def test_the_interval_of_daly_is_nearly_the_best_one(write: float, between: float) -> None:
    interval = daly_interval(write, between)
    best = max(goodput(interval * 2 ** (k / 40), write, 60.0, between) for k in range(-160, 161))
    assert goodput(interval, write, 60.0, between) >= (0.999 if write < between / 4 else 0.9) * best
    if write < between / 1000:
        assert interval == pytest.approx(young_interval(write, between) - write, rel=0.02)
    assert young_interval(write, between) == sqrt(2 * write * between)


@given(st.floats(0, 20), st.floats(0.5, 1e3), st.floats(0, 1e3), st.floats(3e3, 1e6))
def test_no_other_interval_of_asynchronous_checkpoints_is_better(
    stall: float, write: float, restart: float, between: float
) -> None:
    interval = best_asynchronous_interval(stall, write, restart, between)
    assert interval + stall >= write * (1 - 1e-9)
    best = asynchronous_goodput(interval, stall, write, restart, between)
    for factor in (1.001, 1.1, 2, 10, 0.999, 0.9, 0.5, 0.1):
        if interval * factor + stall >= write:
            assert asynchronous_goodput(interval * factor, stall, write, restart, between) <= best * (1 + 1e-9)


def test_goodput_falls_with_devices_and_slow_storage_and_beside_steps_costs_less() -> None:
    fails = partial(Failures, 5e4 * 3600)
    by_devices = [fails().of(devices, 1e12, 1.0) for devices in (8, 64, 1024, 16384)]
    assert all(few.goodput > many.goodput for few, many in pairwise(by_devices))
    by_storage = [Failures(5e4 * 3600, rate).of(1024, 1e12, 1.0).goodput for rate in (1e11, 1e10, 1e9)]
    assert all(fast > slow for fast, slow in pairwise(by_storage))
    for found in by_devices:
        assert found.asynchronous_goodput > found.goodput
        assert found.checkpoint_seconds == 100 and found.between_seconds * 16384 >= 5e4 * 3600
    assert fails(1e9, 0.0).of(1, 1e3, 0.0).goodput == pytest.approx(1, abs=1e-3)
    hopeless = Failures(60.0).of(16384, 1e15, 100.0)
    assert hopeless.goodput == 0 and hopeless.asynchronous_goodput == 0


@pytest.mark.parametrize("wrong", [0, -1, nan, inf, "10h", None])
def test_failures_are_of_numbers_above_zero(wrong: Any) -> None:
    for fields in ((wrong,), (1.0, wrong)):
        with pytest.raises((ValueError, TypeError), match="must be a number, above 0"):
            Failures(*fields)


def test_a_cell_takes_longer_by_its_goodput() -> None:
    budget = Budget(1e9, failures=Failures(1e6, 1e9), carbon_grams_per_kwh=400)
    plan = {"seconds": 2.0, "mfu": 0.5, "split": "dp=4"}
    cell = Cell(budget, "dgx-a100", 4, 8, 64, plan, measures=Measures(3000.0, 1e11, 0.5))
    found = budget.failures.of(4, 1e11, 0.5) if budget.failures else None
    assert found is not None and cell.survival == found and cell.goodput == found.goodput < 0.99
    assert cell.days is not None and cell.days * 86_400 * 32 * found.goodput == pytest.approx(1e9, rel=1e-12)
    assert cell.failures is not None
    assert cell.failures["interruptions"] == pytest.approx(cell.days * 86_400 * 4 / 1e6)
    assert cell.energy_kwh == pytest.approx(3 * 24 * cell.days) and cell.carbon_kg == pytest.approx(0.4 * cell.energy_kwh)
    never = Cell(Budget(1e9, failures=Failures(1.0)), "dgx-a100", 4, 8, 64, plan, measures=Measures(None, 1e15, 0.5))
    assert never.goodput == 0 and never.days is None and not never.meets and never.json()["energy_kwh"] is None
