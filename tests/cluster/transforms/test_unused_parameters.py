"""Parameters that the loss does not depend on are trained in pipelines as on one device, and a warning names them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from trained_runs import ON, B, assert_trains, in_turn

from parallelism import ir
from parallelism.planning import find_plan
from parallelism.transforms import SGD, AdamW, Pipeline, Strategy, UnusedParameters, train_step
from vcluster.__main__ import main
from vcluster.cli.command_line import serve

WIDTHS = {"a": (3, 8), "idle": (8, 6), "dead": (8, 6), "metric": (8, 6), "b": (8, 4)}
"""``idle`` is read by nothing, ``dead`` by what nothing reads, and ``metric`` by a metric alone."""


def loss(p, x, y):
    with ir.region("one"):
        h = np.tanh(x @ p["a"])
        np.sum(h @ p["dead"])
    with ir.region("two"):
        return np.mean((h @ p["b"] - y) ** 2), np.mean(h @ p["metric"])


def stepped(rows, rule, clip=None):
    types = {name: ir.TensorType("f64", shape) for name, shape in WIDTHS.items()}
    x, y = ir.TensorType("f64", (rows, 3)), ir.TensorType("f64", (rows, 4))
    return train_step(ir.record(loss, types, x, y, name="some"), rule, clip=clip)


TOLD = ("the loss of @some.step does not depend on %p.idle, %p.dead, %p.metric: a pipeline updates unused parameters with "
        "gradients of zero, as one device does")
CASES = [
    ("pp=2 1f1b:2", SGD(0.1, 0.5), None), ("pp=1 1f1b:3 dp=2", AdamW(0.01), 0.1),
    ("pp=2 1f1b:2 dp=2 zero=1", AdamW(0.01), 0.1), ("pp=2 1f1b:2 tp=2 dp=2 zero=2", SGD(0.1, 0.5), 0.1),
    ("pp=2 1f1b:2 dp=2 zero=3", AdamW(0.01), None), ("pp@two=2 1f1b:2 dp=2 overlap=1KB", AdamW(0.01), 0.1),
    ("pp=2 zero_bubble_v:2x2", AdamW(0.01), 0.1), ("dp tp pp 1f1b:2,meshes=dp=2|tp=2", AdamW(0.01), 0.1),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize(("text", "rule", "clip", "backend"), in_turn(CASES))
def test_unused_parameters_are_trained_as_on_one_device(cluster_of, text, rule, clip, backend):
    if "meshes" in text:
        strategy = Strategy.parse(text)
        mesh = strategy.pipeline.of_all
    else:
        strategy, mesh = Strategy.parse_on_mesh(text)
    with pytest.warns(UnusedParameters) as told:
        step = strategy(stepped(B, rule, clip))
    (warning,) = told
    assert str(warning.message) == TOLD and warning.filename == __file__
    assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, stepped(7, rule, clip), 7, steps=3)


def test_many_are_counted_and_none_are_not_told():
    types = {name: ir.TensorType("f64", (3, 2)) for name in "wabcde"}
    function = ir.record(lambda p, x: np.sum(x @ p["w"]), types, ir.TensorType("f64", (B, 3)), name="few")
    with pytest.warns(UnusedParameters, match=r"does not depend on %p.a, %p.b, %p.c and 2 more: a pipeline updates") as told:
        Pipeline()(train_step(function, SGD(1)))
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline()(train_step(function, SGD(1), parameters=["p.w"]))


@pytest.mark.slow
def test_a_search_and_commands_tell_them_once(tmp_path, capsys):
    types = {name: ir.TensorType("f4", (8, 8)) for name in ("a", "b", "idle")}

    def half(p, x):
        with ir.region("block.0"):
            h = np.tanh(x @ p["a"].T)
        with ir.region("block.1"):
            return np.mean((h @ p["b"].T) ** 2)

    function = ir.record(half, types, ir.TensorType("f4", (B, 8)), name="half")
    with pytest.warns(UnusedParameters) as told:
        assert len(find_plan(function, hardware="dgx-h100", devices=2, batch=4)) > 1
    assert [warning.filename for warning in told if warning.category is UnusedParameters] == [__file__]
    file = tmp_path / "half.mlir"
    file.write_text(str(function))
    for words in (["plan", f"{file}", "--hardware", "dgx-h100", "--devices", "2", "--batch", "B=4"],
                  ["simulate", f"{file}", "--optimizer", "sgd:0.1", "--strategy", "pp=2 1f1b:2", "--size", "B=4",
                   "--hardware", "dgx-h100"]):
        with warnings.catch_warnings(action="default"):
            assert serve("vcluster", main, words) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "does not depend on" in line]
        assert lines == ["vcluster: " + TOLD.replace("some", "half").replace("%p.idle, %p.dead, %p.metric", "%p.idle")]
