"""Plans with more devices of tensor parallelism than heads of keys and values: each row is its simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallelism import models
from parallelism.planning import Plans, find_plan
from parallelism.training import MegatronFlags

SPEC = models.TransformerSpec(
    layers=4, width=64, heads=8, key_value_heads=2, feed_forward=128, vocabulary=128, sequence=32, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False, dtype="bfloat16")


def planned(spec: models.TransformerSpec = SPEC, *, hardware: str = "dgx-h100+megatron-core-h100", **given: Any) -> Plans:
    return find_plan(spec, hardware=hardware, devices=8, batch=8, **given)


def check(plans: Plans, copied: int) -> None:
    """Plans with one number of copies or none, which have pieces of their own."""
    found = [plan for plan in plans if plan.settings["tp"] > copied]
    assert found and not plans.one_by_one
    for plan in found:
        model = plan.run.model
        assert isinstance(model, models.TransformerSpec)
        assert model.key_value_copies == plan.settings["tp"] // copied
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("heads", "given"), [
    (2, {"microbatch": 2, "recompute": "none"}), (1, {"microbatch": [1, 4], "recompute": "full", "zero": 1}),
    (2, {"microbatch": 1, "cp": 2, "exchange": "all_gather", "schedule": "1f1b"}), (2, {"hardware": "dgx-h100", "pp": 2})])
def test_every_row_with_copies_is_its_simulation(heads: int, given: dict[str, Any]) -> None:
    check(planned(replace(SPEC, key_value_heads=heads), simulations=0, **given), heads)


@pytest.mark.slow
def test_the_first_plan_with_copies_is_that_of_all_simulations() -> None:
    plans = planned(simulations=None, pp=1, microbatch=2, recompute="none", tp=[2, 4, 8])
    assert {plan.settings["tp"] for plan in plans} == {2, 4, 8}
    assert plans.best.seconds == pytest.approx(min(plan.simulate().makespan_seconds for plan in plans), rel=1e-9)


@pytest.mark.slow
def test_a_plan_with_copies_is_told_by_flags_that_make_the_same_run() -> None:
    plan = planned(simulations=0, tp=8, microbatch=1, recompute="none").best
    flags = MegatronFlags.of(plan.run)
    assert flags is not None
    run = flags.run(8, replace(SPEC, dtype="float32"))
    assert run.model == plan.run.model == replace(SPEC, dtype="float32", key_value_copies=4)
    assert run.mesh == plan.mesh and run.strategy == plan.strategy


@pytest.mark.slow
def test_copies_for_more_than_a_node_are_searched_where_tp_is_fixed() -> None:
    spec = replace(SPEC, heads=32, width=64)
    given = {"hardware": "dgx-h100", "devices": 16, "batch": 16, "pp": 1, "microbatch": 1, "schedule": "1f1b"}
    plans = find_plan(spec, simulations=0, **given)
    assert {plan.settings["tp"] for plan in plans} == {1, 2, 4, 8}
    reason = "copies of heads of keys and values for more than 8 devices are searched where tp is fixed"
    assert plans.refused[reason].count == 1
    assert find_plan(spec, simulations=0, tp=16, **given).best.settings["tp"] == 16
    three = find_plan(replace(spec, heads=33, width=66, key_value_heads=3), simulations=0, **given)
    reason = "tp does not divide heads of keys and values, and is no multiple of them"
    assert {plan.settings["tp"] for plan in three} == {1} and reason not in three.refused  # it divides no heads either
