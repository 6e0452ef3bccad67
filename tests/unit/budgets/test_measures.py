"""What a plan draws is what its devices draw, and a checkpoint is what a step goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from parallelism import Hardware, ir, models
from parallelism.budgets.measures import BUSY, Measures, checkpoint_bytes, watts
from parallelism.hardware import Power
from parallelism.planning import find_plan
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import StepParts
from parallelism.training import Figures
from parallelism.transforms import SGD, Adam, Parts

SPEC = models.TransformerSpec(layers=3, width=16, heads=2, vocabulary=24, sequence=12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9), Adam(0.1)], ids=["plain", "momentum", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "program"])
def test_a_checkpoint_has_what_a_step_goes_on_with(optimizer: Any, dtype: str) -> None:
    model: Any = models.mlp((6, 9, 4), ir.symbol("B")) if dtype == "program" else models.TransformerSpec(
        layers=3, width=16, heads=2, vocabulary=24, sequence=12, dtype=dtype)
    trained = TrainedModel.of(model, optimizer)
    step = trained.step if trained.precision is None else trained.precision(trained.step)
    parts = Parts.of(step)
    arrays = [value for value in parts.state if value.type.shape]
    if trained.precision is None:
        arrays += parts.parameters
    assert checkpoint_bytes(trained) == sum(value.type.nbytes for value in arrays)


def test_moments_of_two_bytes_are_kept_as_such() -> None:
    spec = models.TransformerSpec(layers=3, width=16, heads=2, vocabulary=24, sequence=12, dtype="bfloat16")
    trained = TrainedModel.of(spec, Adam(0.1), state={"mean": "bfloat16", "square": "bfloat16"})
    assert checkpoint_bytes(trained) == spec.parameters * (4 + 2 + 2)


@pytest.mark.slow
def test_devices_draw_by_the_time_in_which_they_compute() -> None:
    plan = find_plan(SPEC, hardware="dgx-a100", devices=4, batch=8, pp=2, dp=2, tp=1, cp=1, zero=0, schedule="1f1b",
                     microbatch=2, recompute="none", order="pp dp cp tp").best
    found = Measures.of(plan)
    trace = plan.simulate(fold=False)
    all_devices = Figures(plan.run, plan.task.hardware, StepParts.of_all(trace))
    power = Hardware.preset("dgx-a100").power
    assert power == Power(400, 40, 412.5) and len(all_devices.step.devices) == 4
    busy = [sum(getattr(split, part) for part in BUSY) / trace.makespan_seconds
            for split in all_devices.step.step_split.values()]
    assert all(0 < each < 1 for each in busy)
    assert found.watts == pytest.approx(sum(412.5 + 40 + 360 * each for each in busy), rel=1e-9)
    assert found.watts == pytest.approx(watts(all_devices, power), rel=1e-9)
    assert found.checkpoint_bytes == SPEC.parameters * 12
    assert found.stall_seconds == SPEC.parameters * 3 / plan.task.hardware.host.bytes_per_second


def test_presets_say_what_they_draw_or_nothing() -> None:
    drawn = {name: Hardware.preset(name).power for name in Hardware.presets()}
    assert {name for name, power in drawn.items() if power is None} == {
        "laptop", "tpu-v5e", "tpu-v5e-multislice", "tpu-v5p", "tpu-v6e", "tpu-v6e-multislice", "trainium2",
        "trainium2-ultra"}
    systems = {"dgx-h100": 10.2, "dgx-a100": 6.5, "h200-node": 10.2, "b200-node": 14.3, "dgx-1-v100": 3.5}
    for name, kilowatts in systems.items():
        power = drawn[name]
        assert power is not None and 8 * power.watts(busy=1.0) == pytest.approx(1000 * kilowatts)
    assert all(power.idle_watts <= power.busy_watts / 2 for power in drawn.values() if power is not None)
    assert "power       700 W a device, 70 W idle; 575 W of the node for each" in str(Hardware.preset("dgx-h100"))


@pytest.mark.parametrize(("fields", "error"), [
    ({"busy_watts": 0, "idle_watts": 0}, "busy_watts must be a number of watts, above 0; got 0"),
    ({"busy_watts": 5, "idle_watts": -1}, "idle_watts must be a number of watts, at least 0; got -1"),
    ({"busy_watts": 5, "idle_watts": 6}, "idle_watts must be at most the 5 busy_watts; got 6"),
    ({"busy_watts": 5, "idle_watts": 1, "node_watts": "3"}, "node_watts must be a number of watts"),
])
def test_a_power_that_cannot_be_is_refused_by_its_field(fields: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        Power(**fields)
