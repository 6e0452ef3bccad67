"""Plans of models with adapters: each row is its simulation, and the first is that of all simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallelism import models
from parallelism.ir import symbol
from parallelism.planning import Plans, find_plan
from parallelism.transforms import MixedPrecision, frozen

SPEC = models.TransformerSpec(
    layers=4, width=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=128, sequence=32, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False, dtype="bfloat16")


FLOAT8 = MixedPrecision(products="float8", recipe="block")


def planned(products: tuple[str, ...] | None, devices: int = 4, **given: Any) -> Plans:
    spec = replace(SPEC, lora=models.LoRA(4, products=products))
    return find_plan(spec, hardware="dgx-h100", devices=devices, batch=8, simulations=None, **given)


def check(plans: Plans) -> None:
    seconds = []
    for plan in plans:
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())
        seconds.append(plan.simulate().makespan_seconds)
    assert plans.best.seconds == pytest.approx(min(seconds), rel=1e-9)


@pytest.mark.slow
def test_a_few_plans_are_their_simulations() -> None:
    plans = planned(None, devices=2, pp=1, tp=[1, 2], microbatch=4, recompute="full", schedule="1f1b", zero=0)
    assert len(plans) == 2 and not plans.one_by_one
    check(plans)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("products", "given"), [
    (None, {"recompute": ["none", "full"]}), (("down",), {"microbatch": [1, 2]}),
    (("qkv", "out", "up", "gate", "down"), {"microbatch": 2}),
    (None, {"schedule": "zero_bubble_h1", "microbatch": 1}), (("out",), {"cp": 2, "recompute": "none", "microbatch": 2}),
    (None, {"precision": FLOAT8, "microbatch": 2, "recompute": "none"}),
    (None, {"precision": FLOAT8, "tp": 2, "pp": 2, "microbatch": 2}),
    (None, {"zero": 3, "microbatch": 1, "recompute": "none"}), (None, {"pp": 4, "microbatch": 2, "recompute": "none"})])
def test_every_row_is_its_simulation_and_the_first_is_the_best(products: Any, given: dict[str, Any]) -> None:
    check(planned(products, **given))


@pytest.mark.slow
def test_a_plan_needs_the_memory_of_its_closed_form() -> None:
    """Weights in 16 bits; of adapters alone there are gradients in float32, a main copy and two moments."""
    plan = planned(None, devices=2, pp=1, dp=2, zero=1, microbatch=1, recompute="full", schedule="1f1b").best
    adapters = 4 * (4 * (64 + 128) + 4 * (64 + 64))
    trace = plan.simulate(link_sharing=False)
    assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
    assert plan.peak_bytes == max(trace.peaks().values())
    frozen_weights = 2 * 128 * 64 + 64 + 4 * (64 * (128 + 64 + 3 * 128) + 2 * 64)
    held, = plan.memory
    narrow, = planned(None, devices=2, pp=1, dp=2, zero=1, microbatch=1, recompute="full", schedule="1f1b",
                      precision=FLOAT8).best.memory
    products, scales = 4 * 64 * (128 + 64 + 3 * 128), 4 * 4 * 8 * 8 * 5
    assert held["weights"] - narrow["weights"] == products - scales and held["optimizer"] == narrow["optimizer"]
    assert held["weights"] == 2 * (frozen_weights + adapters)
    assert held["gradients"] == 4 * adapters and held["optimizer"] == 12 * adapters // 2 + 8


@pytest.mark.slow
def test_a_program_of_which_weights_are_frozen_is_planned() -> None:
    """The head and the embedding alone are trained: then no block has gradients of weights."""
    whole = replace(SPEC, dtype="float32").function(symbol("B"))
    tuned = frozen(whole, [f"p.{layer}" for layer in range(4)])
    plans = [find_plan(each, hardware="dgx-h100", devices=2, batch=4, pp=1, tp=1, recompute="none", microbatch=1, zero=0)
             for each in (whole, tuned)]
    for each in plans:
        trace = each.best.simulate(link_sharing=False)
        assert each.best.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert each.best.peak_bytes == max(trace.peaks().values())
    gradients = [each.best.memory[0]["gradients"] for each in plans]
    of_blocks = 4 * 4 * (64 * (128 + 64 + 3 * 128) + 2 * 64)
    assert gradients[0] - gradients[1] == of_blocks and plans[1].best.seconds < plans[0].best.seconds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_llama2_70b_is_tuned_on_eight_devices() -> None:
    spec = replace(models.transformer("llama2-70b").padded(), dtype="bfloat16", lora=models.LoRA(16))
    assert spec.trained_parameters == 80 * 16 * ((8192 + 10240) + (8192 + 8192)) == 44_564_480
    plans = find_plan(spec, hardware="dgx-h100", devices=8, batch=8)
    for plan in (plans.best, plans[len(plans) // 2], plans[-1]):
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values()) < 80e9
