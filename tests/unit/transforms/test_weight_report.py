"""The report of a strategy: how the weight of each product is split, or why it stays whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformed import model_step

from parallelism import ir
from parallelism.transforms import SGD, Adam, Strategy, train_step
from vcluster.__main__ import main

B, = ir.symbols("B")
TYPES = {"fused": (12, 4), "out": (4, 6), "flat": (8, 3, 2), "wave": (8, 5), "left": (5, 3), "right": (5, 4), "odd": (7, 9)}
REASONS = {
    "p.fused": "the split behind it needs its result whole",
    "p.wave": "a tanh is between it and its product",
    "p.left": "a concatenate is between it and its product; store it as the product reads it",
    "p.right": "a concatenate is between it and its product; store it as the product reads it",
    "p.odd": "a flip is between it and its product; store it as the product reads it",
}


def loss_of(rows):
    """Products that tensor parallelism splits, and such that it leaves whole for one reason each."""
    def loss(p, x):
        with ir.region("attention"):
            q, k, v = np.split(x @ p["fused"].T, 3, axis=1)
            y = ir.apply("softmax", q * k, axis=1) * v @ p["out"]
        with ir.region("rest"):
            y = np.maximum(y @ p["flat"].reshape(8, 6).T, 0) @ np.tanh(p["wave"])
            y = y @ np.concatenate([p["left"], p["right"]], axis=1)
            return np.mean(y @ np.flip(p["odd"]))

    types = {name: ir.TensorType("f64", shape) for name, shape in TYPES.items()}
    return ir.record(loss, types, ir.TensorType("f64", (rows, 4)), name="m")


def step_of(rows):
    return train_step(loss_of(rows), SGD(0.1))


@pytest.mark.slow
def test_it_lists_each_product_with_its_line_its_weight_and_how_that_is_split_or_why_not():
    strategy = Strategy.parse("tp")
    step = strategy(step_of(5))
    report = strategy.report(step)
    lines = str(step).splitlines()
    for row in report.rows:
        assert f'"{row.kind}"(' in lines[row.line - 1] and f'region="{row.region}"' in lines[row.line - 1]
    split = {row.weight: (row.layout.short(), row.split, row.divides) for row in report.rows if row.split}
    assert split == {"p.out": ("[None, tp]", "columns", ()), "p.flat": ("[None, tp, None]", "rows", (3,))}
    assert {row.weight: row.reason for row in report.whole if row.weight in REASONS} == REASONS
    assert {row.weight for row in report.rows} == {f"p.{name}" for name in TYPES}
    for row in report.rows:
        assert f"%{row.weight}" in str(report) and row.how in str(report)


@pytest.mark.slow
def test_it_is_the_same_before_and_after_the_strategy_was_applied():
    for model, text in [("gpt", "dp tp sp zero=3"), ("llama", "tp"), ("mixture", "dp tp ep"), ("viewed", "dp tp sp zero=1")]:
        strategy, step = Strategy.parse(text), model_step(model, 4, Adam())
        report = strategy.report(step)
        assert report == strategy.report(strategy(step))
        assert (report.told() is None) == (not report.whole) == (model != "mixture")


def test_weights_of_experts_and_tables_and_reshaped_ones_are_told():
    rows = {row.weight: row for row in Strategy.parse("tp ep").report(model_step("mixture", 4, Adam())).rows}
    assert rows["p.up"].how == "by experts and columns" and rows["p.down"].how == "by experts and rows"
    assert rows["p.router"].how == "whole: the softmax behind it needs its result whole"
    rows = Strategy.parse("tp").report(model_step("viewed", 4, Adam())).rows
    assert {row.weight: row.divides for row in rows if row.divides} == {"p.more0": (4,), "p.more1": (4,)}
    assert "by columns (on devices whose number divides 4)" in {row.how for row in rows}
    rows = Strategy.parse("tp").report(model_step("gpt", 4, Adam())).rows
    assert [row.how for row in rows if row.weight == "p.tokens"] == ["by rows of the table", "by columns"]


def test_what_no_tensor_parallelism_asked_for_is_no_finding():
    report = Strategy.parse("tp@block.*").report(model_step("gpt", 4, Adam()))
    assert {row.reason for row in report.whole} == {"it is outside of the regions of tp@block.*"}
    assert report.told() is None and len(report.asked) == 4
    report = Strategy.parse("dp zero=1").report(model_step("gpt", 4, Adam()))
    assert {row.reason for row in report.whole} == {"the strategy has no tensor parallelism"} and report.told() is None


def test_a_step_of_a_pipeline_has_its_own_lines():
    strategy = Strategy.parse("tp pp@block.1 1f1b:2")
    step = strategy(model_step("viewed", B, Adam()))
    report = strategy.report(step)
    lines = str(step).splitlines()
    assert len(report.rows) == 8 and all(f'"{row.kind}"(' in lines[row.line - 1] for row in report.rows)


def test_a_strategy_that_splits_nothing_is_refused_with_the_reasons():
    loss = ir.record(lambda p, x: np.mean(ir.apply("softmax", x @ p["w"].T, axis=1)),
                     {"w": ir.TensorType("f64", (12, 4))}, ir.TensorType("f64", (5, 4)), name="m")
    with pytest.raises(ValueError, match=r"no weight of @m.step is left to be split over 'tp': .*; %p.w: the softmax behind"):
        Strategy.parse("tp").report(train_step(loss, SGD(0.1)))


@pytest.mark.takes_seconds
@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("words", [
    ["run", "--strategy", "tp=2", "--backend", "thread"], ["show", "--strategy", "tp=2"],
    ["simulate", "--strategy", "tp=2", "--hardware", "dgx-h100"],
    ["simulate", "--strategy", "tp=2", "--hardware", "dgx-h100", "--json"],
    ["plan", "--batch", "B=4", "--hardware", "dgx-h100", "--devices", "2", "--fix", "tp=2", "--json"],
])
def test_commands_on_programs_say_in_one_line_what_stays_whole(tmp_path, capsys, words):
    file = tmp_path / "loss.mlir"
    file.write_text(str(loss_of(B)))
    more = ["--optimizer", "sgd"] + ["--size", "B=4"] * (words[0] != "plan")
    assert main([words[0], str(file), *words[1:], *more]) == 0
    out, err = capsys.readouterr()
    told, = [line for line in err.splitlines() if "whole" in line]
    assert told.startswith("vcluster: tp: ") and "%p.fused: the split behind it needs its result whole" in told
    if "--json" in words:
        json.loads(out)
