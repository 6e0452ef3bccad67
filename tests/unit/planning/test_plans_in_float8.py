"""Plans whose products are in float8 or float4: each row is its simulation, and the best one is that of all simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallelism import models
from parallelism.ir import symbol
from parallelism.planning import Plans, find_plan
from parallelism.transforms import MixedPrecision

SPEC = replace(models.TransformerSpec(
    layers=2, width=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=128, sequence=32, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False), dtype="bfloat16")
ROUTED = replace(SPEC, experts=models.Experts(count=4, chosen=2, width=48, load=2.0))


def planned(spec: models.TransformerSpec, hardware: str = "dgx-h100", devices: int = 2, **given: Any) -> Plans:
    how = {name: given.pop(name) for name in ("recipe", "gathers", "first_blocks", "history") if name in given}
    products = "float4" if how.get("recipe") == "nvfp4" else "float8"
    precision = MixedPrecision("bfloat16", products=products, **how)
    return find_plan(spec, hardware=hardware, devices=devices, batch=8, precision=precision, simulations=None, **given)


PLAIN = {"recompute": "none", "microbatch": 2, "schedule": "1f1b"}


@pytest.mark.slow
@pytest.mark.slow_for("megatron", "routed", "context", "block", "nvfp4", "nvfp4-context", "delayed", "delayed-context")
@pytest.mark.parametrize(("spec", "hardware", "given"), [
    pytest.param(SPEC, "dgx-h100", PLAIN | {"recipe": "block"}, id="block"),
    pytest.param(SPEC, "dgx-h100", PLAIN | {"recipe": "mx", "gathers": "float8", "zero": [1, 2], "dp": 2}, id="gathers"),
    pytest.param(SPEC, "dgx-h100", PLAIN | {"recipe": "tensor", "cp": 2, "pp": 1, "devices": 4}, id="context"),
    pytest.param(SPEC, "b200-node", PLAIN | {"recipe": "nvfp4"}, id="nvfp4"),
    pytest.param(SPEC, "dgx-h100", PLAIN | {"history": 8, "zero": [0, 1], "devices": 4, "cp": 1}, id="delayed"),
    pytest.param(SPEC, "dgx-h100+megatron-core-h100", PLAIN | {"history": 8, "cp": 2, "pp": 1}, id="delayed-context"),
    pytest.param(SPEC, "gb300-nvl72", PLAIN | {"recipe": "nvfp4", "cp": 2, "pp": 1, "devices": 4}, id="nvfp4-context"),
    pytest.param(SPEC, "dgx-h100+megatron-core-h100", PLAIN | {"recipe": "tensor"}, id="megatron"),
    pytest.param(ROUTED, "dgx-h100", PLAIN | {"recipe": "block", "ep": 2, "pp": 1, "zero": 1, "devices": 4}, id="routed"),
])
def test_each_row_is_its_simulation_and_the_first_is_the_best(
    spec: models.TransformerSpec, hardware: str, given: dict[str, Any]
) -> None:
    plans = planned(spec, hardware, **given)
    assert len(plans) > 1 and not plans.one_by_one
    seconds = []
    for plan in plans:
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())
        seconds.append(plan.simulate().makespan_seconds)
    assert plans.best.seconds == min(seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["tensor", "block", "mx", "nvfp4"])
def test_the_first_of_a_small_space_is_the_best_of_all_simulations(recipe: str) -> None:
    """Every split, recomputation and stage of ZeRO of two devices, each by its full simulation."""
    hardware = "b200-node" if recipe == "nvfp4" else "dgx-h100"
    plans = planned(SPEC, hardware, recipe=recipe, microbatch=[1, 2], schedule="1f1b")
    assert len(plans) > 20
    traces = [plan.simulate() for plan in plans]
    assert plans.best.seconds == pytest.approx(min(trace.makespan_seconds for trace in traces), rel=1e-9) and plans.gap == 0
    assert [plan.peak_bytes for plan in plans] == [max(trace.peaks().values()) for trace in traces]


@pytest.mark.slow
def test_a_plan_in_float8_says_so_and_takes_less_time_for_its_products() -> None:
    large = replace(SPEC, width=2048, heads=16, key_value_heads=16, feed_forward=8192, sequence=1024)
    fixed = {"pp": 1, "dp": 2, "tp": 2, "zero": 1, "recompute": "none", "microbatch": 1}
    narrow = planned(large, devices=4, recipe="block", **fixed).best
    wide = find_plan(large, hardware="dgx-h100", devices=4, batch=8, **fixed).best
    assert "precision=bf16,products:f8,recipe:block" in str(narrow.strategy)
    assert narrow.task.model.dtypes == "bfloat16, products of blocks in float8 (block) with main copies in float32"
    parts = [plan.figures.parts for plan in (narrow, wide)]
    assert parts[0]["products"] < 0.75 * parts[1]["products"]
    assert parts[0]["elementwise"] > parts[1]["elementwise"]
    assert narrow.figures.memory[0]["activations"] < wide.figures.memory[0]["activations"]


@pytest.mark.slow
def test_a_plan_in_float4_has_smaller_products_and_activations_and_needs_hardware_with_a_rate_for_it() -> None:
    large = replace(SPEC, width=2048, heads=16, key_value_heads=16, feed_forward=8192, sequence=1024)
    fixed = {"pp": 1, "dp": 1, "tp": 2, "zero": 0, "recompute": "none", "microbatch": 1}
    four, eight = (planned(large, "b200-node", recipe=recipe, **fixed).best for recipe in ("nvfp4", "mx"))
    assert "precision=bf16,products:f4,recipe:nvfp4" in str(four.strategy)
    assert four.figures.parts["products"] < 0.75 * eight.figures.parts["products"]
    assert four.figures.memory[0]["activations"] < eight.figures.memory[0]["activations"]
    with pytest.raises(ValueError, match="dgx-h100 has no rate for float4"):
        planned(large, recipe="nvfp4", **fixed)


@pytest.mark.parametrize(("model", "message"), [
    (replace(SPEC, dtype="float32"), "is for a TransformerSpec whose dtype has 16 bits; got a model in float32"),
    (replace(SPEC, dtype="float16"), "is for a model in bfloat16, got one in float16"),
    (models.mlp((6, 4), symbol("B")), "whose dtype has 16 bits; got a program"),
])
def test_a_precision_that_does_not_fit_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(model)
