"""Meshes of so many devices, and the layouts that are found on each."""

from __future__ import annotations

import pytest

from parallelism import Mesh, ir, models
from parallelism.auto_sharding import AutoPlans, NoLayoutFits, auto_plans, auto_shard, shapes_of
from parallelism.hardware import sized_hardware
from parallelism.planning import find_plan, search
from parallelism.training.training_run import ADAM_W
from parallelism.transforms.training import train_step

LOSS = models.mlp((64, 128), ir.symbol("B"), "f4")


@pytest.mark.parametrize(("devices", "shapes"), [
    (1, [{"x": 1}]), (2, [{"x": 2}]), (7, [{"x": 7}]), (8, [{"x": 2, "y": 4}]),
    (12, [{"x": 2, "y": 6}, {"x": 3, "y": 4}]),             # eight of a node do not divide them
    (64, [{"x": 8, "y": 8}]),
])
def test_shapes(devices, shapes):
    found = shapes_of(sized_hardware("dgx-h100", devices), devices)
    assert [dict(mesh.shape) for mesh in found] == shapes


@pytest.mark.slow
def test_a_plan_of_layouts_is_the_best_of_its_meshes():
    plans = find_plan(LOSS, hardware="dgx-h100", devices=2, batch=32, strategies="auto")
    assert isinstance(plans, AutoPlans) and len(plans) == 1
    step = train_step(LOSS, ADAM_W).specialize(B=32)
    assert plans.best.seconds == auto_shard(step, Mesh(x=2), "dgx-h100").seconds
    types = ir.TensorType("f4", (32, 64)), ir.TensorType("f4", (64, 128))
    product = ir.record(lambda x, w: x @ w, *types, name="mlp")
    several = auto_plans(product, "dgx-h100", devices=4, meshes=[Mesh(a=4), Mesh(x=2, y=2)])
    assert several.best.seconds == min(each.seconds for each in several.solutions) <= several.solutions[1].seconds
    text = str(several)
    assert text.startswith("@mlp on 4 devices of dgx-h100\n\nmesh ")
    assert all(len(line) <= 80 for line in text.splitlines())
    received = sum(event.bytes_received for event in several.best.simulate().events if event.rank == 0)
    assert sum(each.nbytes for each in several.best.collectives) == received


@pytest.mark.takes_seconds
def test_a_memory_that_nothing_fits():
    plans = find_plan(LOSS, hardware="dgx-h100", devices=2, batch=32, memory="20kB", strategies="auto")
    assert not plans and "nothing fits" in str(plans)
    with pytest.raises(NoLayoutFits, match=r"fit in 20 kB a device: at least .* are held") as caught:
        _ = plans.best
    assert caught.value.least_bytes == plans.refused[0].least_bytes > 20_000


@pytest.mark.parametrize(("given", "error"), [
    ({"strategies": "automatic"}, "strategies is \"auto\", and then there are no settings to fix; got 'automatic'"),
    ({"strategies": "auto", "tp": 2}, "got 'auto', tp=2"),
    ({"strategies": "auto", "model": "gpt2-xl"}, "takes the program of a loss"),
])
def test_what_cannot_be_planned(given, error):
    with pytest.raises((TypeError, ValueError), match=error):
        find_plan(**{"model": LOSS, "hardware": "dgx-h100", "devices": 2, "batch": 8, **given})
    with pytest.raises(ValueError, match=r"Mesh\(x=3\) has 3 devices, and 2 are planned for"):
        auto_plans(train_step(LOSS, ADAM_W).specialize(B=8), "dgx-h100", devices=2, meshes=[Mesh(x=3)])


@pytest.mark.takes_seconds
def test_a_search_for_layouts_has_a_time_limit_for_each_mesh(monkeypatch):
    """Programs of many square matrices have so many equal choices that the best is not proved for minutes."""
    limits = []

    def limited(*arguments, time_limit, **options):
        limits.append(time_limit)
        return auto_plans(*arguments, time_limit=time_limit, **options)

    monkeypatch.setattr("parallelism.auto_sharding.auto_plans", limited)
    found = find_plan(LOSS, hardware="dgx-h100", devices=2, batch=4, strategies="auto")
    assert limits == [search.AUTO_SECONDS] and found.best.choice.gap == 0
