"""A simulated training step without a pipeline tells forward, backward, what is computed again, and the update apart."""

import numpy as np
import pytest

from parallelism import Mesh, ir, models, simulate
from parallelism.trace.breakdown import split, step_split
from parallelism.transforms import Adam, Recompute, Strategy, train_step


def without_regions(w, x):
    return np.mean(np.tanh(x @ w["up"]) @ w["down"])


PLAIN = ir.record(
    without_regions, {"up": ir.TensorType("f32", (6, 5)), "down": ir.TensorType("f32", (5, 3))}, ir.TensorType("f32", (8, 6))
)
LAYERS = models.mlp((6, 5, 3), 8, dtype="float32")


def on_one(program):
    return simulate(program, "dgx-h100:1", mesh=Mesh(dp=1))


@pytest.mark.takes_seconds
@pytest.mark.parametrize("loss", [PLAIN, LAYERS], ids=["without regions", "with regions"])
def test_compute_of_a_step_is_that_of_the_loss_of_its_gradient_and_of_the_update(loss):
    trace = on_one(train_step(loss, Adam()))
    parts, finer = split(trace)[0], step_split(trace)[0]
    trained = [name for name, value in enumerate(loss.inputs) if value.name.startswith(loss.inputs[0].name.split(".")[0])]
    both = split(on_one(ir.gradient(loss, trained, keep_outputs=True)))[0]
    assert parts.forward == pytest.approx(split(on_one(loss))[0].other, rel=1e-12)      # a loss alone has no phases
    assert (parts.forward, parts.backward) == pytest.approx((both.forward, both.backward), rel=1e-12)
    assert both.other == both.recompute == parts.recompute == 0 < parts.other == finer.update
    assert sum(parts) == pytest.approx(trace.makespan_seconds)


@pytest.mark.takes_seconds
def test_what_is_computed_again_is_neither_forward_nor_backward():
    step = train_step(LAYERS, Adam())
    again = split(on_one(Strategy(Recompute("layer.0"))(step)))[0]
    once = split(on_one(step))[0]
    assert again.recompute > 0 == once.recompute
    assert (again.forward, again.backward, again.other) == pytest.approx((once.forward, once.backward, once.other), rel=1e-12)


@pytest.mark.takes_seconds
def test_the_phases_of_a_run_on_devices_of_a_mesh_are_those_of_its_parts():
    step = Strategy.parse("dp tp")(train_step(LAYERS, Adam()))
    parts = split(simulate(step, "dgx-h100:4", mesh=Mesh(dp=2, tp=2), fold=True))
    assert all(min(each.forward, each.backward, each.other, each.communication) > 0 for each in parts.values())
