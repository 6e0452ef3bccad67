"""Layers of several kinds that come again and again are one block of a search, put together from pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from parallelism import Hardware, models
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.training.layer_blocks import EACH_LAYER, MOST_OTHERS, LayerBlocks
from parallelism.training.training_run import ADAM_W

EXPERTS = models.Experts(count=4, chosen=2)
MODELS: dict[str, tuple[LayerBlocks, dict[str, Any]]] = {
    "gpt-oss": (LayerBlocks(0, 0, 2), {"layers": 12, "window": 4, "full_attention_every": 2, "experts": EXPERTS}),
    "gemma": (LayerBlocks(1, 8, 6), {
        "layers": 20, "window": 4, "full_attention_every": 6, "window_rotary_base": 100.0, "norm_places": "both"}),
    "gemma of 4 more": (LayerBlocks(1, 4, 6), {"layers": 16, "window": 4, "full_attention_every": 6}),
    "smollm": (LayerBlocks(0, 0, 4), {"layers": 16, "unrotated_every": 4}),
    "llama 4": (LayerBlocks(0, 0, 4), {
        "layers": 16, "unrotated_every": 4, "experts": models.Experts(count=4, chosen=1, layers=(False, True) * 8)}),
}


def spec(**figures: Any) -> models.TransformerSpec:
    defaults: dict[str, Any] = {
        "width": 24, "heads": 4, "feed_forward": 40, "vocabulary": 48, "sequence": 16, "activation": "swiglu",
        "norm": "rms", "positions": "rotary", "biases": False, "tied": False, "dtype": "bfloat16"}
    return models.TransformerSpec(**defaults | figures)


def check(figures: dict[str, Any], devices: int, fixed: dict[str, Any], count: int) -> set[int]:
    """Some rows from pieces are those of their simulations; their numbers of stages."""
    task = Task(TrainedModel.of(spec(**figures), ADAM_W), 8, Hardware.preset("dgx-h100:1").placed(range(devices)), devices)
    possible = choices(task.model, devices, 8, fixed)
    table = PlanCosts(task, possible)
    stages = set()
    for row in np.random.default_rng(3).permutation(len(possible))[:count].tolist():
        settings = possible.settings(row)
        table.prepare(row)
        trace = task.simulate(settings, link_sharing=False)
        assert table.peaks(table.shape(row), [row])[0] == max(trace.peaks().values()), settings
        if table.is_exact(row):
            assert table.seconds([row])[0] == pytest.approx(trace.makespan_seconds, rel=1e-9), settings
        stages.add(settings["pp"])
    return stages


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model_are_its_shortest_period(name: str) -> None:
    blocks, figures = MODELS[name]
    model = TrainedModel.of(spec(**figures), ADAM_W)
    assert model.layer_blocks == blocks and model.blocks == blocks.count(figures["layers"])
    assert blocks.layer_of(model.blocks) == figures["layers"]


def test_stages_begin_where_blocks_do() -> None:
    model = TrainedModel.of(spec(**MODELS["gemma"][1]), ADAM_W)
    assert model.blocks == 3 and model.begin(3) == ("block.8", "block.14") and model.begin(2) == ("block.8",)
    assert model.layer_blocks.layers_of([1, 2]) == (8, 12) and EACH_LAYER.layers_of([3, 1, 2]) == (3, 1, 2)
    assert "there are more stages than blocks" in choices(model, 4, 8, {}).refused


@pytest.mark.takes_seconds
def test_rows_of_layers_that_take_turns_are_their_simulations() -> None:
    assert check(MODELS["smollm"][1], 2, {"pp": [1, 2], "recompute": ["none"], "schedule": ["1f1b"]}, 3) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_every_model_are_their_simulations(name: str, devices: int) -> None:
    check(MODELS[name][1], devices, {"schedule": ["1f1b", "zb-h1", "interleaved_1f1b"]}, 8)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9), st.integers(1, 3))
def test_every_block_behind_the_first_ones_has_the_same_kinds_of_layers(
    layers: int, period: int, before: int, kinds: int
) -> None:
    shown = ["other" if layer < before else (layer - before) % period % kinds for layer in range(layers)]
    blocks = LayerBlocks.of(shown)
    count = blocks.count(layers)
    firsts = [blocks.layer_of(block) for block in range(count + 1)]
    assert firsts[0] == 0 and firsts[-1] == layers and firsts == sorted({*firsts})
    for block in range(count):
        assert {blocks.block_of(layer) for layer in range(firsts[block], firsts[block + 1])} == {block}
    alike = {tuple(shown[firsts[block]:firsts[block + 1]]) for block in range(blocks.first, count)}
    assert len(alike) <= 1


def test_layers_that_never_repeat_are_blocks_of_their_own() -> None:
    irregular = [layer * layer % 7 % 3 for layer in range(23)] + [5]
    assert LayerBlocks.of(irregular).first > MOST_OTHERS
    assert LayerBlocks.of(["same"] * 40) == EACH_LAYER
    assert LayerBlocks.of(["dense"] * 3 + ["experts"] * 58) == LayerBlocks(3, 3, 1)
