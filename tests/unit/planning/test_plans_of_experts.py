"""Plans of models with experts: ``ep`` is searched, rows are put together from pieces, and the first plan is the best."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, models
from parallelism.planning import find_plan
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.training.training_run import ADAM_W

LATENT = models.LatentAttention(query_rank=16, key_value_rank=8, head_width=8, rotary_width=4, value_width=6)
MIXTRAL: dict[str, Any] = {"experts": models.Experts(count=4, chosen=2)}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "capacity": {"layers": 2, "experts": models.Experts(count=4, chosen=2, capacity=1.0, shared_width=16)},
    "dense first": {"layers": 5, "experts": models.Experts(count=4, chosen=2, dense_layers=1, shared_width=16, width=24)},
    "deepseek": {"layers": 8, "attention": LATENT, "experts": models.Experts(
        count=8, chosen=2, dense_layers=2, shared_width=16, width=24, router="sigmoid", groups=4, groups_chosen=2,
        deduplicated=True)},
}


def spec(**figures: Any) -> models.TransformerSpec:
    defaults: dict[str, Any] = {
        "layers": 4, "width": 32, "heads": 4, "feed_forward": 48, "vocabulary": 64, "sequence": 16, "activation": "swiglu",
        "norm": "rms", "positions": "rotary", "biases": False, "tied": False, "dtype": "bfloat16"}
    return models.TransformerSpec(**defaults | figures)


def check(model: models.TransformerSpec, devices: int, batch: int, fixed: dict[str, Any], count: int, seed: int) -> None:
    """Some rows of a space from pieces are those of their simulations, and all have a price."""
    task = Task(TrainedModel.of(model, ADAM_W), batch, Hardware.preset("dgx-h100:1").placed(range(devices)), devices)
    possible = choices(task.model, devices, batch, fixed)
    table = PlanCosts(task, possible)
    found = 0
    for row in np.random.default_rng(seed).permutation(len(possible)).tolist():
        settings = possible.settings(row)
        if settings["ep"] == 1 and found % 3:
            continue
        table.prepare(row)
        trace = task.simulate(settings, link_sharing=False)
        seconds = table.seconds([row])[0]
        assert seconds <= trace.makespan_seconds * (1 + 1e-12), settings
        if table.is_exact(row):
            assert seconds == pytest.approx(trace.makespan_seconds, rel=1e-9), settings
        assert table.peaks(table.shape(row), [row])[0] == max(trace.peaks().values()), settings
        found += 1
        if found == count:
            break
    assert found


SPACES: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral", 8, {"schedule": ["1f1b", "zero_bubble_h1"], "sp": [False, True]}),
    ("capacity", 4, {"schedule": "1f1b", "sp": True}),
    ("dense first", 8, {"schedule": ["1f1b", "zero_bubble_h1"], "recompute": ["none", "full"]}),
    ("deepseek", 4, {"schedule": ["1f1b", "interleaved_1f1b", "zero_bubble_v"]}),
    ("mixtral", 8, {"cp": [1, 2], "order": ["pp dp cp tp", "pp cp ep tp dp"], "recompute": "selective"}),
    ("mixtral", 8, {"tp": [2, 4], "experts_over": "ep+tp", "schedule": ["1f1b", "zero_bubble_h1"]}),
    ("deepseek", 8, {"cp": [1, 2], "tp": [1, 2], "experts_over": ["ep+cp", "ep+cp+tp"], "schedule": "1f1b"}),
    ("mixtral", 8, {"cp": 4, "experts_over": "ep+cp", "exchange": ["p2p", "a2a+p2p"], "zero": [0, 1]}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "fixed"), SPACES, ids=[f"{name}-{number}" for number, (name, *_) in
                                                                   enumerate(SPACES)])
def test_rows_from_pieces_are_the_simulated_ones(name: str, devices: int, fixed: dict[str, Any]) -> None:
    check(spec(**MODELS[name]), devices, 16, fixed, 2, 1)


@pytest.mark.slow
def test_a_backward_of_the_only_microbatch_makes_gradients_in_the_order_of_zero() -> None:
    fixed = {"pp": 2, "dp": 4, "ep": 1, "tp": 1, "microbatch": 4, "recompute": "full", "schedule": "1f1b", "zero": [1, 2]}
    check(spec(**MIXTRAL), 8, 16, fixed, 2, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_many_rows_from_pieces_are_the_simulated_ones(seed: int) -> None:
    for name, devices, fixed in SPACES:
        check(spec(**MODELS[name]), devices, 16, fixed, 4, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "exchange", "recompute", "over"), [
    (2, "a2a", "none", "ep"), (2, "a2a", "none", "ep+cp"), (2, "a2a", "selective", "ep+cp"), (4, "a2a", "full", "ep"),
    (4, "a2a+p2p", "selective", "ep+cp")])
def test_gradients_of_latent_attention_are_summed_where_its_backward_leaves_them(cp: int, exchange: str, recompute: str,
                                                                                 over: str) -> None:
    fixed = {"pp": 1, "cp": cp, "ep": 1, "tp": 1, "exchange": exchange, "recompute": recompute, "microbatch": 2, "zero": 1,
             "schedule": "1f1b", "experts_over": over, "order": "pp dp ep cp tp", "tp_overlap": False, "sp": False}
    check(spec(**MODELS["deepseek"]), 8, 16, fixed, 1, 0)


@pytest.mark.slow
def test_plans_that_differ_in_what_runs_again_have_ends_of_their_own() -> None:
    task = Task(TrainedModel.of(spec(attention=LATENT), ADAM_W), 16, Hardware.preset("dgx-h100:1").placed(range(8)), 8)
    possible = choices(task.model, 8, 16, {
        "pp": 2, "cp": [2, 4], "tp": 1, "exchange": ["a2a", "a2a+p2p"], "microbatch": 8, "zero": 1, "schedule": "1f1b",
        "order": "pp dp ep cp tp"})
    table = PlanCosts(task, possible)
    rows = range(len(possible))
    assert {(s["recompute"], s["exchange"]) for s in map(possible.settings, rows)} >= {
        ("none", "a2a"), ("selective", "a2a"), ("full", "a2a"), ("none", "a2a+p2p"), ("full", "a2a+p2p")}
    for row in rows:
        table.prepare(row)
    traces = [task.simulate(possible.settings(row), link_sharing=False) for row in rows]
    assert table.seconds(rows) == pytest.approx([trace.makespan_seconds for trace in traces], rel=1e-9)


@pytest.mark.slow
def test_the_first_plan_is_the_best_of_all_that_are_simulated() -> None:
    plans = find_plan(spec(layers=2, **MIXTRAL), hardware="dgx-h100", devices=4, batch=4, pp=1, zero=0,
                      recompute="none", microbatch=1)
    assert {plan.settings["ep"] for plan in islice(plans, len(plans))} == {1, 2, 4}
    every = [plan.simulate().makespan_seconds for plan in islice(plans, len(plans))]
    assert plans.best.seconds == pytest.approx(min(every), rel=1e-9)
    assert "the fullest expert has 1 times the mean rows" in str(plans).replace("\n", " ")


def test_tp_that_splits_the_rows_of_an_expert_unevenly_is_searched_where_it_is_fixed() -> None:
    """A sequence of 16 with 2 of 12 experts: 3 rows of each expert, which sequence parallelism splits; 3 and 6
    devices do not split the sequence."""
    odd = spec(experts=models.Experts(count=12, chosen=2), width=24, heads=6, vocabulary=96)
    model = TrainedModel.of(odd, ADAM_W)
    assert model.rows_of_expert == 3
    reason = "tp does not divide the rows of an expert, and such plans are searched where tp is fixed"
    found = choices(model, 6, 6, {})
    assert {*found["tp"].tolist()} == {1, 3, 6} and found.refused[reason].count == 1
    for fixed in ({"tp": [2]}, {"sp": [0]}):
        asked = choices(model, 6, 6, fixed)
        assert 2 in asked["tp"] and reason not in asked.refused


def test_ep_that_splits_the_vocabulary_unevenly_is_searched_where_it_is_fixed() -> None:
    """A vocabulary of 98 over 2 and over 4 devices that share the state of the optimizer."""
    odd = spec(experts=models.Experts(count=4, chosen=2), vocabulary=98)
    model = TrainedModel.of(odd, ADAM_W)
    reason = "ep does not divide the vocabulary that ZeRO shares out, and such plans are searched where ep is fixed"
    found = choices(model, 4, 8, {"tp": 1, "pp": 1, "zero": [0, 1]})
    uneven = (found["ep"] == 4) & (found["dp"] == 1)
    assert {*found["zero"][uneven].tolist()} == {0} and 2 in found["ep"] and found.refused[reason].count > 0
    assert reason not in choices(model, 4, 8, {"tp": 1, "pp": 1, "ep": 4}).refused


@pytest.mark.slow
def test_ep_is_told_in_plans_and_strategies_and_of_dense_models_it_is_1() -> None:
    plans = find_plan(spec(**MIXTRAL), hardware="dgx-h100", devices=8, batch=8, ep=4, tp=2, pp=1,
                      recompute="none", microbatch=1)
    best = plans.best
    assert "ep=4" in best.split and "ep=4" in str(best) and best.mesh.shape["ep"] == 4
    dense = find_plan(spec(), hardware="dgx-h100", devices=2, batch=2, pp=1, recompute="none")
    assert {plan.settings["ep"] for plan in islice(dense, len(dense))} == {1}
    assert "ep does not divide the experts" in find_plan(
        spec(**MIXTRAL), hardware="dgx-h100", devices=3, batch=6, ep=3).refused


@pytest.mark.slow
def test_rows_and_devices_of_ep_count_as_replicas_of_what_is_no_expert() -> None:
    plans = find_plan(spec(**MIXTRAL), hardware="dgx-h100", devices=8, batch=16, ep=4, tp=1, pp=1, zero=1, microbatch=1,
                      recompute="none", schedule="1f1b")
    best = plans.best
    assert best.mesh.shape == {"pp": 1, "dp": 2, "ep": 4} and best.microbatches == 2
    layouts = {value.name: value.layout.short() for value in best.step.function.inputs if value.layout}
    assert layouts["mean.p.0.expert_up"] == "[ep, None, dp]" and layouts["mean.p.0.out"] == "[(dp, ep), None]"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("figures", "first"), [
    ({}, 0), (MIXTRAL, 0), (MODELS["deepseek"], 2), ({"experts": models.Experts(count=4, chosen=1, every=2)}, 3)])
def test_the_first_block_that_is_like_all_further_ones(figures: dict[str, Any], first: int) -> None:
    assert TrainedModel.of(spec(**figures), ADAM_W).first_alike == first
