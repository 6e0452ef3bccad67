"""Plans that are not put together from pieces are simulated one by one, for a reason that is told, to the same figures."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from parallelism import ir, models
from parallelism.execution import placing
from parallelism.hardware import sized_hardware
from parallelism.planning import find_plan
from parallelism.planning.batch_pricing import price_plans
from parallelism.planning.plan import Task
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import simulate
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import pipelines
from vcluster.__main__ import main
from vcluster.cli.command_line import serve

B, = ir.symbols("B")
PROGRAM = "only blocks that are alike are pieces, and stages of this program are simulated"
SPEC = models.TransformerSpec(layers=4, width=64, heads=4, vocabulary=64, sequence=16)


@pytest.mark.takes_seconds
def test_a_loss_that_compares_all_rows_is_planned_as_a_whole():
    def contrastive(p, x, y):
        a, b = x @ p["a"], y @ p["b"]
        scores = a @ b.T
        return np.mean(np.log(np.sum(np.exp(scores), axis=1))) - np.mean(np.sum(a * b, axis=1))

    f32 = lambda *shape: ir.TensorType("f32", shape)
    rows = f32(ir.symbol("B"), 6)
    program = ir.record(contrastive, {"a": f32(6, 4), "b": f32(6, 4)}, rows, rows)
    told = ("not in tensor<BxBxf32>, where each row meets all others, as in a contrastive loss: "
            "find_plan(..., strategies='auto') and plan --auto lay out the whole batch")
    with pytest.raises(ValueError, match=re.escape(told)):
        find_plan(program, hardware="dgx-h100", devices=2, batch=8)
    pytest.importorskip("scipy")
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=8, strategies="auto").best.seconds > 0


@pytest.mark.takes_seconds
def test_a_batch_norm_in_training_is_planned_as_a_whole():
    def normed(p, x):
        y = x @ p["a"]
        return np.mean(np.maximum((y - np.mean(y, axis=0)) / np.std(y, axis=0), 0))

    f32 = lambda *shape: ir.TensorType("f32", shape)
    program = ir.record(normed, {"a": f32(6, 4)}, f32(ir.symbol("B"), 6))
    with pytest.raises(ValueError, match=r"as a batch norm in training does: find_plan.* lay out the whole batch"):
        find_plan(program, hardware="dgx-h100", devices=2, batch=8)
    pytest.importorskip("scipy")
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=8, strategies="auto").best.seconds > 0


@pytest.mark.slow
def test_each_plan_of_several_stages_of_a_program_is_simulated_and_the_reason_is_told():
    plans = find_plan(recorded(unlike), hardware="dgx-h100", devices=4, batch=12, schedule="1f1b", pp=2)
    assert plans.timed == len(plans) > 3 and plans.one_by_one == {PROGRAM: len(plans)}
    assert str(plans).splitlines()[-1] == f"simulated one by one {len(plans)}: {PROGRAM}"
    for plan in plans:
        trace = simulate(plan.run.step, "dgx-h100", link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9)
        assert max(trace.peaks().values()) == plan.peak_bytes


@pytest.mark.slow
def test_settings_without_pieces_are_told_beside_those_with_them():
    plans = find_plan(SPEC, hardware="dgx-h100", devices=4, batch=8, pp=2, zero=[1, 3], recompute="none", microbatch=2)
    of_three = np.count_nonzero(plans.choices["zero"] == 3)
    assert 0 < of_three < len(plans) and plans.one_by_one == {"zero=3 is not put together from pieces": of_three}
    assert not find_plan(SPEC, hardware="dgx-h100", devices=4, batch=8, pp=2, zero=1, microbatch=2).one_by_one


@pytest.mark.slow
def test_plans_that_a_program_does_not_allow_are_not_among_them():
    def gated(p, x):
        with ir.region("block.0"):
            h = ir.apply("softmax", x @ p["a"], axis=1)
        with ir.region("block.1"):
            return np.mean(ir.apply("softmax", h @ p["b"], axis=1) ** 2)

    plans = find_plan(recorded(gated), hardware="dgx-h100", devices=2, batch=4, recompute="none")
    refused = [each for reason, each in plans.refused.items() if "no weight of @gated.step is left to be split" in reason]
    assert sum(each.count for each in refused) > 0 and len(plans)
    assert plans.one_by_one == {PROGRAM: np.count_nonzero(plans.choices["pp"] > 1)}


def unlike(p, x):
    with ir.region("encoder"):
        h = np.tanh(x @ p["a"])
    with ir.region("decoder"):
        return np.mean((np.maximum(h @ p["b"], 0.0) @ p["a"]) ** 2)     # the stages share a weight


@pytest.mark.takes_seconds
def test_plans_that_are_simulated_one_after_another_are_as_each_alone(monkeypatch):
    task = Task(TrainedModel.of(recorded(unlike), ADAM_W), 12, sized_hardware("dgx-h100", 4), 4)
    fixed = {"pp": 2, "tp": [1, 2], "zero": [0, 1], "microbatch": [1, 2, 3], "schedule": "1f1b"}
    cut, calls = pipelines.partition, []
    monkeypatch.setattr(pipelines, "partition", lambda *given, **more: calls.append(given[1]) or cut(*given, **more))
    monkeypatch.setattr("parallelism.side_by_side.copies", lambda: 0)
    possible = choices(task.model, 4, 12, fixed)
    priced = price_plans(task, possible, np.full(len(possible), np.inf), lambda *_: None)
    assert priced.one_by_one == {PROGRAM: 9} and calls == [2, 2]      # with tensor parallelism and without
    placing._placed.cache_clear()
    for row in (3, 8):
        trace = task.simulate(priced.possible.settings(row), link_sharing=False)
        assert (priced.seconds[row], priced.peaks[row]) == (trace.makespan_seconds, max(trace.peaks().values()))
    assert calls == [2] * 4


def recorded(function):
    types = {"a": ir.TensorType("f4", (4, 8)), "b": ir.TensorType("f4", (8, 4))}
    return ir.record(function, types, ir.TensorType("f4", (B, 4)), name=function.__name__)


@pytest.mark.takes_seconds
def test_a_program_that_cannot_be_cut_is_refused_before_any_search(monkeypatch, tmp_path, capsys):
    def perplexity(p, x):
        with ir.region("block.0"):
            h = x @ p["a"]
        with ir.region("block.1"):
            return np.exp(np.mean(h @ p["b"]))

    monkeypatch.setattr("parallelism.planning.search.price_plans", None)
    line = perplexity.__code__.co_firstlineno + 4
    with pytest.raises(ValueError, match=rf'^no plan of @perplexity can be: %\d+ = "exp"(.|\n)*'
                                         rf'as a perplexity, behind it\n  {re.escape(__file__)}:{line}: return np.exp'):
        find_plan(recorded(perplexity), hardware="dgx-h100", devices=2, batch=4)
    file = tmp_path / "loss.mlir"
    file.write_text(str(recorded(perplexity)))
    assert serve("vcluster", main, ["plan", f"{file}", "--hardware", "dgx-h100", "--devices", "2", "--batch", "B=4"]) == 2
    number = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if '"exp"' in text)
    assert capsys.readouterr().err.endswith(f"as a perplexity, behind it at line {number} of its text\n")


@pytest.mark.slow
def test_commands_tell_them_as_text_and_as_json(tmp_path, capsys):
    file, saved = tmp_path / "loss.mlir", tmp_path / "plans.json"
    file.write_text(str(recorded(unlike)))
    words = [f"{file}", "--hardware", "dgx-h100", "--devices", "2", "--batch", "B=4",
             "--fix", "schedule=1f1b", "--fix", "pp=2"]
    assert main(["plan", *words, "--json", "--save", f"{saved}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["one_by_one"] == {PROGRAM: found["timed"]}
    assert main(["plan", "--load", f"{saved}"]) == 0
    assert f"{found['timed']} simulated one by one: {PROGRAM}" in " ".join(capsys.readouterr().out.split())
