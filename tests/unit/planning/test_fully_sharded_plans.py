"""Plans with FSDP, which a search tries under software that shares parameters out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parallelism.hardware import Hardware
from parallelism.models import LoRA, TransformerSpec
from parallelism.planning import find_plan
from parallelism.planning.promising import MOST_SHARDED, PROMISING
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import simulate
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import Overlap
from vcluster.__main__ import main
from vcluster.cli.command_line import serve

SPEC = TransformerSpec(layers=4, width=32, heads=4, vocabulary=64, sequence=16, dtype="bfloat16")
HARDWARE = replace(Hardware.preset("dgx-h100:1"), fully_sharded=True)
ALONE = "zero=3 is not put together from pieces"


def rows_of(found, **wanted):
    return np.flatnonzero(np.all([found[name] == value for name, value in wanted.items()], axis=0))


def test_each_plan_of_one_stage_with_zero_1_is_tried_with_fsdp():
    found = choices(TrainedModel.of(SPEC, ADAM_W), 6, 12, {}, fully_sharded=True)
    once, shared = rows_of(found, zero=1, pp=1), rows_of(found, zero=3)
    assert len(once) > 5 and found.fully_sharded and {*found["overlap"][shared]} == {1} and {*found["pp"][shared]} == {1}
    names = [name for name in found.columns if name not in ("zero", "overlap")]
    of_both = [np.stack([found[name][rows] for name in names]) for rows in (once, shared)]
    np.testing.assert_array_equal(*of_both)
    plain = choices(TrainedModel.of(SPEC, ADAM_W), 6, 12, {})
    assert len(found) == len(plain) + len(once) and not plain.fully_sharded and not len(rows_of(plain, zero=3))


@pytest.mark.parametrize("fixed", [{"zero": 1}, {"overlap": [0]}, {"instances": 1}])
def test_no_plan_is_added_where_it_is_said_what_is_shared_out(fixed):
    found = choices(TrainedModel.of(SPEC, ADAM_W), 4, 8, fixed, fully_sharded=True)
    assert len(found) and not len(rows_of(found, zero=3)) and not found.fully_sharded


@pytest.mark.parametrize("changed", [{"window": 4, "full_attention_every": 2}, {"lora": LoRA(2)}])
def test_layers_that_are_not_alike_or_have_adapters_have_no_such_plans_and_it_is_told(changed):
    model = TrainedModel.of(replace(SPEC, **changed), ADAM_W)
    found = choices(model, 4, 8, {}, fully_sharded=True)
    once = rows_of(choices(model, 4, 8, {}), zero=1, pp=1)
    reason = "FSDP of layers that are not alike, or of adapters, is searched where fsdp or zero=3 is fixed"
    assert found.refused[reason].count == len(once) > 0 and not len(rows_of(found, zero=3))


@pytest.mark.slow
def test_the_most_promising_are_simulated_and_the_others_are_counted():
    asked = {"hardware": HARDWARE, "devices": 4, "batch": 8, "tp": [1, 2]}
    plans = find_plan(SPEC, simulations=0, **asked)
    shared = [plan for plan in plans if plan.settings["zero"] == 3]
    (reason,) = (reason for reason in plans.refused if PROMISING in reason)
    assert len(shared) == MOST_SHARDED and plans.one_by_one == {ALONE: MOST_SHARDED}
    every = find_plan(SPEC, simulations=0, zero=3, overlap=True, pp=1, **asked)
    assert plans.refused[reason].count == len(every) - MOST_SHARDED > 0
    for plan in shared[:2]:
        assert next(each for each in plan.strategy.transforms if isinstance(each, Overlap)) == Overlap()
        trace = simulate(plan.step, plans.task.hardware, mesh=plan.mesh, batch=8, link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())


@pytest.mark.slow
def test_a_plan_says_that_it_is_the_best_of_those_that_were_timed(capsys):
    asked = ["--devices", "8", "--global-batch-size", "64", "--seq-length", "512", "--fix", "tp=1", "--fix", "pp=1"]
    for stack, proof in (("torch-fsdp-h100", "of those that were timed"), ("megatron-core-h100", "of all")):
        assert serve("vcluster", main, ["plan", "llama3.2-1b", *asked, "--hardware", f"dgx-h100+{stack}"]) == 0
        assert f"the first is the best {proof}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "devices", "batch"), [("llama3-8b", 16, 64), ("llama2-13b", 32, 256)])
def test_the_fastest_of_all_plans_with_fsdp_is_among_the_most_promising(model, devices, batch):
    asked = {"hardware": "dgx-h100+torch-fsdp-h100", "devices": devices, "batch": batch, "pp": 1, "simulations": 0}
    every = find_plan(model, zero=3, overlap=True, **asked)
    plans = find_plan(model, **asked)
    best = max(plans.where(zero=3), key=lambda plan: -plan.bound_seconds)
    assert best.bound_seconds == min(plan.bound_seconds for plan in every)
