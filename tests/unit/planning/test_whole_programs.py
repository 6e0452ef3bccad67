"""Plans of programs without equal blocks: those of one stage are put together from pieces of the whole program, and of those
of several stages the ones that promise most are simulated."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from parallelism import ir
from parallelism.planning import find_plan, promising
from parallelism.planning.promising import PROMISING, leaves_some_out
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import simulate
from parallelism.training.layer_blocks import WHOLE
from parallelism.training.training_run import ADAM_W

B, = ir.symbols("B")
STAGES = "only blocks that are alike are pieces, and stages of this program are simulated"
KINDS = (np.tanh, np.cos, np.sin, np.abs)


def unlike(layers, *, width=8, seed=0, regions=False, skips=False, shares=False):
    """A program whose layers have widths and kernels of their own; the last may read what the first made, and its weight."""
    random = Random(seed)
    inner = random.sample(range(2, 2 * layers + 2), layers)
    kinds = [random.choice(KINDS) for _ in range(layers)]

    def loss(p, x):
        x = first = x @ p["first"]
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}") if regions else ir.region("all"):
                x = x + kinds[i](x @ layer["up"] + layer["bias"]) @ layer["down"]
        x = (x + first if skips else x) @ (p["layers"][0]["up"] if shares else p["last"])
        return np.mean(x ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = [{"up": f32(width, 4 * n), "bias": f32(4 * n), "down": f32(4 * n, width)} for n in inner]
    last = {} if shares else {"last": f32(width, 12)}
    return ir.record(loss, {"first": f32(5, width), "layers": each, **last}, f32(B, 5))


def check(plans, count=6):
    """Seconds and memory of plans are those of their simulations."""
    assert len(plans) > 3
    for plan in Random(1).sample([*plans], min(count, len(plans))):
        trace = simulate(plan.run.step, plans.task.hardware, link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9)
        assert max(trace.peaks().values()) == plan.peak_bytes


def test_a_program_without_equal_blocks_is_laid_out_as_a_whole():
    model = TrainedModel.of(unlike(4, regions=True), ADAM_W)
    assert model.is_whole and model.of_blocks(2) is model and model.blocks == 4
    assert WHOLE.block_of(0) == WHOLE.block_of(10**6) == 0 and WHOLE.block_in("layers.3") is None
    assert not TrainedModel.of("gpt2", ADAM_W).is_whole


@pytest.mark.takes_seconds
@pytest.mark.parametrize("regions", [False, True])
def test_plans_of_one_stage_are_put_together_from_pieces(regions):
    program = unlike(3, regions=regions, skips=True)
    plans = find_plan(program, hardware="dgx-h100", devices=4, batch=16, pp=1)
    assert not plans.one_by_one and any(plan.settings["tp"] == 4 for plan in plans)
    assert {plan.settings["recompute"] for plan in plans} == {"none", "full"} if regions else {"none"}
    check(plans)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_plans_of_one_stage_of_random_programs_are_those_that_are_simulated(seed):
    random = Random(seed)
    given = {name: random.random() < 0.5 for name in ("regions", "skips", "shares")}
    program = unlike(random.randint(2, 7), width=random.choice([4, 12, 16]), seed=seed, **given)
    hardware = random.choice(["dgx-h100", "dgx-a100", "tpu-v4:2x2x1"])
    check(find_plan(program, hardware=hardware, devices=4, batch=random.choice([12, 16]), pp=1))


@pytest.mark.takes_seconds
def test_pipelines_that_promise_most_are_simulated(monkeypatch):
    monkeypatch.setattr(promising, "MOST_PIPELINES", 5)
    program = unlike(5, width=16, skips=True)
    fixed = {"hardware": "dgx-h100", "devices": 4, "batch": 8, "schedule": "1f1b"}
    every = find_plan(program, pp=[2, 4], **fixed)
    assert every.one_by_one == {STAGES: len(every)} and len(every) > 10
    assert not leaves_some_out(every.refused)
    found = find_plan(program, **fixed)
    (reason,) = (reason for reason in found.refused if PROMISING in reason)
    assert reason == "5 plans of several stages are more promising, by those of one; fix settings for others"
    key = lambda plan: tuple(plan.settings.items())
    told = {key(plan): plan.bound_seconds for plan in every}
    pipelines = [plan for plan in found if plan.settings["pp"] > 1]
    assert len(pipelines) == found.one_by_one[STAGES] and len(pipelines) + found.refused[reason].count == len(every)
    assert all(plan.bound_seconds == told[key(plan)] for plan in pipelines)
    assert every.best.program in {plan.program for plan in pipelines}
    assert leaves_some_out(found.refused) and "the best of those that were timed" in " ".join(str(found).split())


@pytest.mark.takes_seconds
def test_pipelines_are_simulated_where_no_plan_of_one_stage_fits(monkeypatch):
    program = unlike(5, width=16)
    fixed = {"hardware": "dgx-h100", "devices": 4, "batch": 16, "tp": 1, "microbatch": 2, "schedule": "1f1b"}
    alone, several = (min(plan.peak_bytes for plan in find_plan(program, pp=pp, **fixed)) for pp in (1, [2, 4]))
    assert several < alone
    monkeypatch.setattr(promising, "MOST_PIPELINES", 1)
    plans = find_plan(program, memory=alone - 1, **fixed)
    assert plans.best.settings["pp"] > 1 and not leaves_some_out(plans.refused)
    assert plans.refused["memory"].count and plans.one_by_one[STAGES] > 1


@pytest.mark.takes_seconds
def test_pipelines_that_cannot_be_leave_their_places_to_others(monkeypatch):
    f32 = lambda *shape: ir.TensorType("f4", shape)
    loss = lambda p, x: np.mean((np.tanh(x @ p["a"]) @ p["b"]) ** 2)
    program = ir.record(loss, {"a": f32(64, 256), "b": f32(256, 64)}, f32(B, 64))
    monkeypatch.setattr(promising, "MOST_PIPELINES", 4)
    plans = find_plan(program, hardware="dgx-h100", devices=16, batch=256, schedule="1f1b", recompute="none", zero=0)
    programs = {plan.program for plan in plans if plan.settings["pp"] > 1}
    assert len(programs) == 4 and plans.one_by_one[STAGES] == 4
