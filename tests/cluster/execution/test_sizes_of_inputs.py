"""A program with a free symbol runs on arrays that give it a value, in a pipeline and outside of one."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism import ir
from parallelism.ir import TensorType
from parallelism.transforms import SGD, Strategy, train_step
from vcluster import VirtualCluster

B, = ir.symbols("B")
LOSS = ir.record(
    lambda p, x, y: ((np.tanh(x @ p["w"]) @ p["v"] - y) ** 2).mean(),
    {"w": TensorType("f64", (5, 4)), "v": TensorType("f64", (4, 2))}, TensorType("f64", (B, 5)),
    TensorType("f64", (B, 2)))
STEP = train_step(LOSS, SGD(0.1))


def arrays(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = {"p.w": (5, 4), "p.v": (4, 2), "x": (rows, 5), "y": (rows, 2)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


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


def test_sizes_that_disagree_or_are_not_there_are_told() -> None:
    with VirtualCluster(1, backend="thread") as cluster:
        with pytest.raises(ValueError, match=r"B is 3 elsewhere and 4 in input %y"):
            cluster.run(LOSS, arrays(3) | {"y": np.ones((4, 2))})
        free = ir.record(lambda x: x.sum(), TensorType("f64", (2 * B,)))
        with pytest.raises(ValueError, match="the shapes of the inputs do not determine B"):
            cluster.run(free, [np.ones(4)])
