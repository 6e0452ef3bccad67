"""Imperfect clusters: which devices and ports are slow, what is left of lost ones, and what a search says of them."""

from __future__ import annotations

from fractions import Fraction
from math import log, sqrt
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, models
from parallelism.budgets import Budget, find_budget
from parallelism.budgets.degraded import Degraded, best_of, search_degraded
from parallelism.budgets.imperfect import Imperfections, SlowDevices, SlowLinks, expected_largest
from parallelism.planning import find_plan
from parallelism.planning.search import hardware_with_slow_links, hardware_without_faults
from parallelism.simulation import simulate

SPEC = models.TransformerSpec(layers=4, width=64, heads=4, vocabulary=24, sequence=12, dtype="bfloat16")
FEW: dict[str, Any] = {"schedule": "1f1b", "microbatch": 2, "sp": False, "recompute": "none", "cp": 1, "tp": 1, "pp": [1, 2],
                       "order": "pp dp cp tp", "zero": 1}


def search(hardware: Hardware, devices: int) -> Any:
    return find_plan(SPEC, hardware=hardware, devices=devices, batch=32, **FEW)


@pytest.mark.parametrize(("share", "devices", "ranks"), [
    ("1/10", 32, [0, 10, 20, 30]), ("1/10", 30, [0, 10, 20]), ("1/10", 3, [0]), ("1", 4, [0, 1, 2, 3]),
    ("3/10", 10, [0, 3, 6]), ("1/3", 7, [0, 3, 6]), ("3/1000", 8, [0])])
def test_slow_ports_are_spread_evenly_from_rank_0_and_rounded_up(share: str, devices: int, ranks: list[int]) -> None:
    assert SlowLinks(Fraction(share), 0.5).ranks(devices) == ranks
    assert len(ranks) == -(-Fraction(share) * devices // 1)


def test_faults_are_those_of_hardware_in_python() -> None:
    wrong = Imperfections((SlowLinks(Fraction(1, 10), 0.5), SlowLinks(Fraction(1, 16), 0.25, "nvlink")),
                          (SlowDevices(2, 0.8),))
    expected = Hardware.preset("dgx-h100:2")
    for rank in (0, 10):
        expected = expected.fault(source=rank, bandwidth_factor=0.5, level="infiniband")
        expected = expected.fault(target=rank, bandwidth_factor=0.5, level="infiniband")
    expected = expected.fault(source=0, bandwidth_factor=0.25, level="nvlink").fault(
        target=0, bandwidth_factor=0.25, level="nvlink")
    expected = expected.slow(rank=0, factor=1.25).slow(rank=8, factor=1.25)
    assert wrong.on(Hardware.preset("dgx-h100:2"), 16) == expected
    with pytest.raises(ValueError, match="dgx-a100 has no links ethernet; it has nvlink, infiniband"):
        Imperfections((SlowLinks(Fraction(1, 10), 0.5, "ethernet"),)).on(Hardware.preset("dgx-a100"), 8)
    with pytest.raises(ValueError, match="9 of 8 devices cannot be slow"):
        Imperfections(slow_devices=(SlowDevices(9, 0.5),)).on(Hardware.preset("dgx-a100"), 8)


@pytest.mark.parametrize(("lost", "devices", "batch", "left"), [
    (0, 61, 512, [61]), (3, 64, 512, [56, 32]), (8, 64, 512, [56, 32]), (3, 64, 56, [56]), (1, 8, 6, [7, 6]),
    (17, 64, 96, [40, 32]), (16, 64, 96, [48])])
def test_whole_nodes_are_left_and_as_many_as_divide_the_batch(
    lost: int, devices: int, batch: int, left: list[int]
) -> None:
    assert Imperfections(lost_devices=lost).left(devices, 8, batch) == left


def test_none_may_be_left() -> None:
    with pytest.raises(ValueError, match="8 of 8 devices are lost: none are left"):
        Imperfections(lost_devices=8).left(8, 8, 4)


@pytest.mark.slow
def test_the_largest_of_many_is_as_drawn() -> None:
    draws = np.random.default_rng(0)
    for count in (1, 2, 16, 300):
        found = draws.standard_normal((20_000, count)).max(axis=1).mean()
        assert expected_largest(count) == pytest.approx(found, abs=0.02)
    assert expected_largest(10**6) == pytest.approx(sqrt(2 * log(10**6)), rel=0.1)
    assert Imperfections(jitter=0.03).seconds(2.0, 1.5, 16) == 2.0 + 0.03 * 1.5 * expected_largest(16)


@pytest.mark.slow
def test_a_search_on_an_imperfect_cluster_tells_what_it_costs() -> None:
    hardware = Hardware.preset("dgx-h100:2")
    wrong = Imperfections((SlowLinks(Fraction(1, 10), 0.1),), (SlowDevices(1, 0.8),), jitter=0.02)
    found = search_degraded(search, hardware, 16, 32, wrong)
    assert isinstance(found, Degraded)
    best = best_of(found.plans)
    faulty = wrong.on(hardware, 16)
    whole = simulate(best.step, faulty, fold=False, **best.run.placed).makespan_seconds
    assert best.figures.seconds == pytest.approx(whole, rel=1e-9)
    assert found.seconds > best.figures.seconds > found.perfect_seconds == best_of(search(hardware, 16)).figures.seconds
    json = found.json()
    assert json["slowdown"] == found.seconds / found.perfect_seconds and json["devices"] == 16
    assert json["suffers"] == min(found.suffering.values()) and json["suffers_least"] in found.suffering
    assert all(each >= 1 for each in found.suffering.values())
    assert f"takes {json['slowdown'] - 1:.1%} longer than on the perfect cluster, with the jitter" in found.text


@pytest.mark.slow
def test_bounds_are_those_of_the_perfect_cluster_and_no_plan_is_faster() -> None:
    hardware = Hardware.preset("dgx-h100:2")
    faulty = Imperfections((SlowLinks(Fraction(1, 10), 0.1),), (SlowDevices(1, 0.5),)).on(hardware, 16)
    whole = find_plan(SPEC, hardware=hardware, devices=16, batch=32, simulations=0, **FEW)
    found = find_plan(SPEC, hardware=faulty, devices=16, batch=32, simulations=None, **FEW)
    assert sorted(found.bounds) == sorted(whole.bounds) and not found.one_by_one and found.gap == 0
    assert all(found.full[row] >= found.bounds[row] * (1 - 1e-12) for row in found.full)
    least = min(found.task.simulate(plan.settings).makespan_seconds for plan in found)
    assert found.best.seconds == pytest.approx(least, rel=1e-12)
    task = found.task
    assert hardware_without_faults(task).hardware == task.hardware.__class__.preset("dgx-h100:2")
    slow = hardware_with_slow_links(task).hardware
    assert slow.links[1].bytes_per_second == 5e9 and slow.links[0] == hardware.links[0] and not slow.faults


@pytest.mark.slow
def test_lost_devices_leave_whole_nodes_and_the_sweep_pays_for_all() -> None:
    found = find_budget(SPEC, Budget(1e9, prices={"": 1.0}), hardware=["dgx-h100"], devices=[24], batch=48,
                        imperfections=Imperfections(lost_devices=2), **FEW)
    (cell,) = found.cells
    assert cell.devices == 24 and cell.degraded is not None and cell.degraded["devices"] == 16
    assert cell.slower is not None and cell.slower > 0 and cell.seconds == cell.degraded["seconds"]
    assert cell.device_hours == cell.days * 24 * 24 if cell.days else False
    assert "slower" in str(found) and cell.json()["degraded"] == cell.degraded
    same = search_degraded(
        lambda hardware, devices: find_plan(SPEC, hardware=hardware, devices=devices, batch=48, **FEW),
        "dgx-h100", 24, 48, Imperfections(lost_devices=2))
    assert isinstance(same, Degraded) and same.seconds == cell.seconds
