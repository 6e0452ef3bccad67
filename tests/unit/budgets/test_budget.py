"""A budget is a right question, and a sweep has the arithmetic of a training run."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from parallelism import ir, models
from parallelism.budgets import Budget, Cell, Sweep, find_budget
from parallelism.budgets.degraded import TOP, best_of
from parallelism.display.quantities import count_in, duration, rate_in, seconds_in
from parallelism.planning import find_plan

SPEC = models.TransformerSpec(layers=2, width=16, heads=2, vocabulary=24, sequence=12)
FEW: dict[str, Any] = {"schedule": "1f1b", "microbatch": 2, "sp": False, "recompute": "none", "cp": 1, "tp": 1,
                       "order": "pp dp cp tp", "zero": 0}


def cell(budget: Budget, seconds: float | None, hardware: str = "dgx-a100", devices: int = 4) -> Cell:
    plan = None if seconds is None else {"seconds": seconds, "mfu": 0.5, "split": "dp=4"}
    return Cell(budget, hardware, devices, 8, 96, plan, "" if plan else "no plan fits")


def test_days_hours_and_cost_are_those_of_the_tokens() -> None:
    budget = Budget(tokens=96 * 86_400 * 5.0, days=6, prices={"": 2.0, "dgx-h100": 3.0})
    found = cell(budget, 0.5)
    assert found.tokens_per_second == 192 and found.goodput == 1.0
    assert found.days == 2.5 and found.device_hours == 2.5 * 24 * 4 and found.cost == 480
    assert cell(budget, 0.5, "dgx-h100:2+megatron-h100", 16).cost == 2.5 * 24 * 16 * 3
    assert found.meets and not cell(budget, 1.21).meets and cell(budget, 1.2).meets
    assert cell(budget, None).json() == {
        "hardware": "dgx-a100", "devices": 4, "batch": 8, "reason": "no plan fits",
        "carbon_kg": None, "failures": None, "hint": None, "degraded": None, **dict.fromkeys(
            ("seconds", "days", "tokens_per_second", "mfu", "device_hours", "cost", "energy_kwh", "goodput", "plan"))}
    assert replace(found, budget=replace(budget, prices=None)).cost is None


def test_the_cheapest_meets_the_days_and_the_fastest_is_any() -> None:
    budget = Budget(96 * 86_400 * 5.0, 3, {"dgx-a100": 1, "dgx-h100": 4})
    cells = [cell(budget, 0.7), cell(budget, 0.5, "dgx-h100"), cell(budget, 0.6), cell(budget, None)]
    sweep = Sweep(budget, tuple(cells))
    assert sweep.fastest == cells[1] and sweep.cheapest == cells[2] and sweep.meets
    late = Sweep(replace(budget, days=1), tuple(replace(each, budget=replace(budget, days=1)) for each in cells))
    assert not late.meets and late.cheapest is None and late.fastest is not None and late.fastest.days == 2.5
    assert Sweep(budget, (cells[3],)).fastest is None and not Sweep(budget, (cells[3],)).meets
    found = sweep.json()
    assert found["sweep"] == [each.json() for each in cells] and found["cheapest"] == found["sweep"][2]
    assert late.json()["cheapest"] is None and late.json()["fastest"]["days"] == 2.5


@pytest.mark.parametrize("wrong", [0, -1, nan, inf, "1T", True, None])
def test_a_budget_is_of_numbers_above_zero(wrong: Any) -> None:
    for fields in ({"tokens": wrong}, {"tokens": 1e9, "days": wrong}, {"tokens": 1e9, "prices": {"": wrong}}):
        if fields.get("days", 0) is None:
            continue
        with pytest.raises((ValueError, TypeError), match="must be a number, above 0"):
            Budget(**fields)


@pytest.mark.parametrize(("text", "number"), [
    ("1T", 1e12), ("15.6t", 15.6e12), ("300B", 3e11), ("300 G", 3e11), ("2k", 2000), ("1.5M", 1.5e6), ("512", 512),
    ("1e12", 1e12), ("1e+3k", 1e6)])
def test_numbers_with_a_prefix_are_read(text: str, number: float) -> None:
    assert count_in(text) == pytest.approx(number, rel=1e-15)


@pytest.mark.parametrize(("read", "text", "number"), [
    (seconds_in, "50000h", 1.8e8), (seconds_in, "10 min", 600), (seconds_in, "2.5d", 216_000),
    (seconds_in, "30 days", 2_592_000),
    (seconds_in, "1 year", 31_557_600), (rate_in, "10GB/s", 1e10), (rate_in, "10Gb/s", 1.25e9), (rate_in, "400Gbps", 5e10),
    (rate_in, "8 bit/s", 1)])
def test_times_and_rates_have_units(read: Any, text: str, number: float) -> None:
    assert read(text) == number


def test_times_of_a_run_are_written_in_the_largest_unit() -> None:
    assert [*map(duration, (0.25, 45, 2250, 7380, 86_400 * 31.26))] == ["0.250 s", "45 s", "37.5 min", "2.05 h", "31.3 d"]


@pytest.mark.parametrize("text", ["", "T", "-1T", "1TB", "nan", "inf", "1e-3", "0x10", "1,000", "١", "1 2", "1__0"])
def test_other_texts_are_no_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="it must be a number, such as 1T"):
        count_in(text)


@pytest.mark.slow
@pytest.mark.slow_for("3")
@pytest.mark.parametrize("simulations", [8, 3])
def test_each_cell_has_the_plan_of_its_search(simulations: int) -> None:
    took: list[Cell] = []
    found = find_budget(SPEC, Budget(1e9), hardware=["dgx-a100", "h200-node"], devices=[1, 2], batch=8,
                        took=took.append, simulations=simulations, **FEW)
    assert [(each.hardware, each.devices) for each in found.cells] == [
        ("dgx-a100", 1), ("dgx-a100", 2), ("h200-node", 1), ("h200-node", 2)]
    assert {*map(id, took)} == {*map(id, found.cells)}
    for each in found.cells:
        plans = find_plan(SPEC, hardware=each.hardware, devices=each.devices, batch=8, simulations=simulations, **FEW)
        best = best_of(plans)
        assert each.plan is not None and each.plan["split"] == best.split
        assert each.seconds == best.figures.seconds and each.tokens_per_second == 8 * 12 / each.seconds
        assert best.figures.seconds == min(
            plan.figures.seconds for plan, _ in zip(plans.programs(), range(TOP), strict=False))
        assert each.days is not None and each.days * 86_400 * each.tokens_per_second == pytest.approx(1e9, rel=1e-12)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80 and "cost" not in text and "goodput" not in text


@pytest.mark.slow
def test_cells_that_cannot_be_have_the_reason_and_a_wrong_question_is_an_error() -> None:
    found = find_budget(SPEC, Budget(1e9), hardware=["dgx-h100:1", "dgx-a100"], devices=[4, 64], batch=8,
                        simulations=0, memory="2kB", **FEW)
    reasons = [each.reason for each in found.cells]
    assert reasons[1].startswith("dgx-h100:1 has 8 devices, and 64 are asked for") and found.cells[1].is_refused
    assert reasons[2].startswith("no plan fits: ") and "2 kB" in reasons[2] and not found.cells[2].is_refused
    assert "replicas and microbatches do not divide the batch" in reasons[3]
    assert all(each.plan is None and each.days is None for each in found.cells)
    assert found.fastest is None and "dgx-h100:1 has 8 devices" in str(found) and max(map(len, str(found).splitlines())) <= 80
    with pytest.raises(ValueError, match="no setting"):
        find_budget(SPEC, Budget(1e9), hardware=["laptop"], devices=[1, 2], batch=8, nonsense=3)


@pytest.mark.slow
def test_several_batches_are_cells_and_are_said_to_change_the_training() -> None:
    found = find_budget(SPEC, Budget(1e9), hardware=["dgx-a100"], devices=[1, 2], batch=[4, 8], **FEW)
    assert [(each.devices, each.batch, each.step_tokens) for each in found.cells] == [
        (1, 4, 48), (1, 8, 96), (2, 4, 48), (2, 8, 96)]
    for each in found.cells[:2]:
        plans = find_plan(SPEC, hardware="dgx-a100", devices=each.devices, batch=each.batch, **FEW)
        assert each.seconds == best_of(plans).figures.seconds
    assert "another batch changes what is trained" in str(found) and "  batch  " in str(found)
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.mark.parametrize(("devices", "batch", "hint"), [
    (96, 256, "96 devices do not divide a batch of 256; they divide 288"), (96, 288, None), (96, 300, None),
    (64, 100, None), (1, 7, None), (6, 8, "6 devices do not divide a batch of 8; they divide 12"), (None, 8, None)])
def test_devices_that_divide_a_batch_badly_have_a_hint(devices: int | None, batch: int, hint: str | None) -> None:
    found = Cell(Budget(1e9), "dgx-a100", devices, batch, 12 * batch, None, "no plan is possible")
    assert found.hint == hint == found.json()["hint"]
    assert (hint is None) == ("do not divide" not in " ".join(str(Sweep(Budget(1e9), (found,))).split()))


@pytest.mark.slow
def test_a_program_needs_the_tokens_of_a_row() -> None:
    program = models.mlp((6, 8, 4), ir.symbol("B"))
    with pytest.raises(ValueError, match="row_tokens must say"):
        find_budget(program, Budget(1e6), hardware=["laptop"], devices=[2], batch=8)
    found = find_budget(program, Budget(1e6), hardware=["laptop"], devices=[2], batch=8, row_tokens=3, dp=2, zero=0)
    assert found.cells[0].step_tokens == 24
    with pytest.raises(ValueError, match="a row of the model has 12 tokens"):
        find_budget(SPEC, Budget(1e6), hardware=["laptop"], devices=[2], batch=8, row_tokens=3)
