"""A program with a free symbol runs on arrays that give it a value, in a pipeline and outside of one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from parallelism import Mesh, ir
from parallelism.ir import TensorType
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Strategy, train_step
from vcluster import VirtualCluster

B, = ir.symbols("B")
LOSS = ir.record(
    lambda p, x, y: ((np.tanh(x @ p["w"]) @ p["v"] - y) ** 2).mean(),
    {"w": TensorType("f64", (5, 4)), "v": TensorType("f64", (4, 2))}, TensorType("f64", (B, 5)),
    TensorType("f64", (B, 2)), name="loss")
STEP = train_step(LOSS, SGD(0.1))


def arrays(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = {"p.w": (5, 4), "p.v": (4, 2), "x": (rows, 5), "y": (rows, 2)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@pytest.mark.sampled(4, 3)
@pytest.mark.parametrize("text", [
    "dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "dp=2 tp=2", "pp=1 1f1b:2", "pp=1 dp=2 1f1b:2"])
def test_a_step_takes_its_rows_from_its_inputs(text: str) -> None:
    strategy, mesh = Strategy.parse_on_mesh(text)
    with VirtualCluster(mesh, backend="thread") as cluster:
        for rows in (4, 8, 4):
            given = arrays(rows)
            expected = ir.interpret(STEP, given).outputs
            for inputs in (given, [given[value.name] for value in STEP.inputs]):
                found = cluster.run(strategy(STEP), inputs).result
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_program_without_a_strategy_does_too() -> None:
    with VirtualCluster(1, backend="thread") as cluster:
        loss, = cluster.run(LOSS, arrays(3)).result
        assert loss == ir.interpret(LOSS, arrays(3)).outputs[0]


SAID = ("@{}: nothing says what B is; in a run the shapes of the arrays say it, simulate takes numbers={{'B': 64}}, and the "
        "program's specialize(B=64) fixes it")
EACH = ["", "dp=2", "pp=1 1f1b:2", "pp=1 dp=2 1f1b:2"]


def placed(text: str, step: ir.Function = STEP) -> tuple[Any, Any]:
    """The step under a strategy, and the mesh."""
    if not text:
        return step, Mesh(devices=1)
    strategy, mesh = Strategy.parse_on_mesh(text)
    return strategy(step), mesh


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", EACH)
def test_all_ways_take_the_rows_alike(text: str) -> None:
    step, mesh = placed(text)
    with VirtualCluster(mesh, backend="thread", hardware="dgx-h100", compute="modelled") as cluster:
        ran = cluster.run(step, arrays(6)).trace
    for given in ({"batch": 6}, {"numbers": {"B": 6}}, {"batch": 6, "numbers": {"B": 6}}):
        trace = simulate(step, "dgx-h100", mesh=mesh, **given)
        assert trace.makespan_seconds == ran.makespan_seconds and trace.bytes_received() == ran.bytes_received()


@pytest.mark.parametrize("text", EACH)
def test_all_ways_refuse_alike(text: str) -> None:
    step, mesh = placed(text)
    with VirtualCluster(mesh, backend="thread") as cluster:
        for wrong, error, told in [
            (arrays(3) | {"y": np.ones((4, 2))}, ValueError, "@.*: B is 3 elsewhere and 4 in input %y"),
            (arrays(3) | {"x": np.ones(5)}, ValueError, r"@.*: input %x: .* was given an array of shape \(5,\)$"),
            (arrays(3) | {"y": np.ones((3, 1))}, ValueError, r"@.*: input %y: .* was given an array of shape \(3, 1\)"),
            (arrays(3) | {"y": np.ones((3, 2), "f4")}, TypeError, r"@.*: input %y: .* was given an array of float32"),
            ({"x": np.ones((3, 5))}, ValueError, "@.* takes the inputs p.w, p.v, x, y; got x"),
        ]:
            with pytest.raises(error, match=told):
                cluster.run(step, wrong)
            if text in ("", EACH[1]):
                with pytest.raises(error, match=told):
                    ir.interpret(step, wrong)
        for count in (0, 2):
            with pytest.raises(TypeError, match=f"@.* takes its inputs as one list, or one dict by name; got {count} arg"):
                cluster.run(step, *[arrays(3)] * count)
    with pytest.raises(ValueError, match=re.escape(SAID.format("loss.step"))):
        simulate(step, "dgx-h100", mesh=mesh)


def test_rows_that_the_arrays_do_not_say_are_asked_for() -> None:
    free = ir.record(lambda x: np.sum(x) + np.sum(np.zeros_like(x, shape=(B,))), TensorType("f64", (4,)), name="free")
    with VirtualCluster(1, backend="thread") as cluster:
        for refused in (lambda: cluster.run(free, [np.ones(4)]), lambda: ir.interpret(free, [np.ones(4)]),
                        lambda: simulate(free, "dgx-h100", mesh=Mesh(devices=1))):
            with pytest.raises(ValueError, match=re.escape(SAID.format("free"))):
                refused()
        assert cluster.run(free.specialize(B=2), [np.ones(4)]).result[0] == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", EACH)
def test_rows_that_are_a_part_of_a_dim_are_taken(text: str) -> None:
    pairs = ir.record(lambda p, x: np.mean((x.reshape(-1, 2, 3) @ p["w"]) ** 2), {"w": TensorType("f64", (3, 4))},
                      TensorType("f64", (2 * B, 3)), name="pairs")
    step, mesh = placed(text, train_step(pairs, SGD(0.1)))
    rng = np.random.default_rng(0)
    given = {"p.w": rng.normal(size=(3, 4)), "x": rng.normal(size=(8, 3))}
    with VirtualCluster(mesh, backend="thread") as cluster:
        np.testing.assert_allclose(cluster.run(step, given).result[0], np.mean((given["x"] @ given["p.w"]) ** 2), rtol=1e-12)


@pytest.mark.takes_seconds
def test_two_symbols_have_two_numbers() -> None:
    tokens = ir.symbol("T")
    function = ir.record(lambda x: x.sum(), TensorType("f64", (tokens, ir.symbol("N"))), name="two")
    assert len(simulate(function, "dgx-h100", mesh=Mesh(devices=1), numbers={"T": 2, "N": 3}, priced_dtype="bfloat16")) > 0
    with pytest.raises(ValueError, match="@two: nothing says what N is"):
        simulate(function, "dgx-h100", mesh=Mesh(devices=1), numbers={"T": 2})
    with pytest.raises(ValueError, match="@two has no symbol B: its symbols are N, T"):
        simulate(function, "dgx-h100", mesh=Mesh(devices=1), numbers={"T": 2, "N": 3}, batch=4)
