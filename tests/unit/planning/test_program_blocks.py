"""Programs whose blocks are alike: they are found, one with another number of them follows, and plans come from pieces."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.planning import find_plan
from parallelism.planning.batch_pricing import MOST_LEFT, _fewer
from parallelism.planning.program_blocks import Blocks, with_regions
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.simulation import simulate
from parallelism.training.training_run import ADAM_W

B, = ir.symbols("B")
WIDTH, INNER = 8, 12


def residual(layers, *, regions=True, inner=INNER, activation=lambda i: np.tanh):
    """The mean of the squares behind so many blocks."""
    def loss(p, x):
        x = x @ p["first"]
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}") if regions else ir.region("all"):
                x = x + activation(i)(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(WIDTH, inner), "bias": f32(inner), "down": f32(inner, WIDTH)}
    types = {"first": f32(5, WIDTH), "layers": [each] * layers, "last": f32(WIDTH, 4)}
    made = ir.record(loss, types, f32(B, 5))
    return made if regions else without_regions(made)


def without_regions(function):
    from dataclasses import replace
    return replace(function, ops=tuple(replace(op, region=None) for op in function.ops))


def run(function, rows=3):
    """The result for numbers that follow from the names of the inputs."""
    arrays = {}
    for value in function.inputs:
        shape = value.type.specialize({"B": rows}).shape
        seed = sum(map(ord, value.name)) + len(value.name)
        arrays[value.name] = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return ir.interpret(function, arrays).outputs[0]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [2, 3])
def test_a_program_with_another_number_of_blocks(count, layers):
    blocks = Blocks.of(residual(count), "layers", count)
    made = blocks.of_layers(layers)
    assert [value.name for value in made.inputs] == [value.name for value in residual(layers).inputs]
    assert_array_equal(run(made), run(residual(layers)))
    assert sorted(op.kind for op in made.ops) == sorted(op.kind for op in residual(layers).ops)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_are_found_by_what_they_compute(count):
    found = with_regions(residual(count, regions=False))
    assert found.regions == ("block", *(f"block.{i}" for i in range(count)))
    assert_array_equal(run(found), run(residual(count)))
    blocks = Blocks.of(found, "block", count)
    assert_array_equal(run(blocks.of_layers(3)), run(residual(3)))


def test_what_has_regions_or_does_not_repeat_stays_as_it_is():
    assert with_regions(residual(3)) == residual(3)
    assert with_regions(residual(1, regions=False)).regions == ()


def test_blocks_that_differ_are_none():
    assert Blocks.of(residual(3, activation=lambda i: np.sin if i == 2 else np.tanh), "layers", 3) is None
    assert Blocks.of(residual(3), "layers", 2) is None

    def shared(p, x):  # what the first block made is used at the end
        made = []
        for i in range(3):
            with ir.region(f"layers.{i}"):
                x = x @ p["w"][i]
            made.append(x)
        return np.mean((x + made[0]) ** 2)

    f32 = ir.TensorType("f4", (4, 4))
    assert Blocks.of(ir.record(shared, {"w": [f32] * 3}, ir.TensorType("f4", (B, 4))), "layers", 3) is None


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_plans_of_such_a_program_are_put_together_from_pieces(regions):
    fixed = {"recompute": "none", "zero": 1, "microbatch": 2}
    plans = find_plan(residual(4, regions=regions), hardware="dgx-h100", devices=4, batch=16, **fixed)
    assert not plans.one_by_one and len(plans) > 3
    for plan in plans:
        trace = simulate(plan.run.step, "dgx-h100", link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9)
        assert max(trace.peaks().values()) == pytest.approx(plan.peak_bytes, abs=1024)


def test_of_the_plans_without_pieces_the_least_split_are_simulated():
    model = TrainedModel.of(residual(4), ADAM_W)
    possible = choices(model, 8, 32, {})
    left = dict.fromkeys(range(len(possible)), "a dim of 11 is not split evenly over tp")
    kept, refused = _fewer(possible, left, 1)
    (rest, rows), = refused.items()
    assert len(kept) == MOST_LEFT and {int(possible["tp"][row]) for row in kept} == {1}
    assert len(rows) == len(possible) - MOST_LEFT
    assert rest.startswith(f"a dim of 11 is not split evenly over tp, and only {MOST_LEFT} such plans are simulated")
    assert _fewer(possible, left, 0) == (left, {})
