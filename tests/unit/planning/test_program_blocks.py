"""Programs whose blocks are alike: they are found, one with another number of them follows, and plans come from pieces."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import ir
from parallelism.ir.passes import with_tables_once
from parallelism.ir.passes.frozen import frozen
from parallelism.planning import find_plan, promising
from parallelism.planning.program_blocks import Blocks, found_blocks, with_regions
from parallelism.planning.promising import (
    MOST_LEFT,
    PROMISING,
    most_like_the_best,
    most_promising,
    one_of_each_mesh,
)
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
    made = blocks.of_blocks(layers)
    assert [value.name for value in made.inputs] == [value.name for value in residual(layers).inputs]
    assert_array_equal(run(made), run(residual(layers)))
    assert sorted(op.kind for op in made.ops) == sorted(op.kind for op in residual(layers).ops)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_are_found_by_what_they_compute(count):
    found = with_regions(residual(count, regions=False))
    assert found.regions == ("block", *(f"block.{i}" for i in range(count)))
    assert_array_equal(run(found), run(residual(count)))
    blocks = Blocks.of(found, "block", count)
    assert_array_equal(run(blocks.of_blocks(3)), run(residual(3)))


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


def test_of_the_plans_without_pieces_those_most_like_the_best_are_simulated():
    possible = choices(TrainedModel.of(residual(4), ADAM_W), 8, 32, {"order": "pp dp cp tp"})
    seconds = np.full(len(possible), np.inf)
    rows = np.flatnonzero((possible["tp"] == 1) & (possible["pp"] == 2) & (possible["microbatch"] == 2))
    best = int(rows[-1])
    seconds[best], seconds[rows[0]] = 0.1, 0.2
    left = dict.fromkeys(np.flatnonzero(possible["tp"] > 1).tolist(), "a dim of 11 is not split evenly over tp")
    kept, refused = most_like_the_best(possible, left, seconds)
    (rest, others), = refused.items()
    assert len(kept) == MOST_LEFT and not set(kept) & set(others) and len(others) == len(left) - MOST_LEFT
    told = [possible.settings(row) for row in (best, *kept)]
    assert [each["tp"] for each in told] == [1, 2, 2]
    for name in ("pp", "zero", "recompute", "schedule", "chunks"):
        assert len({each[name] for each in told}) == 1, name
    assert told[1]["microbatch"] == 2 and told[2]["microbatch"] in (1, 4)
    assert rest.startswith(f"a dim of 11 is not split evenly over tp, and only {MOST_LEFT} such plans are simulated")
    assert most_like_the_best(possible, left, np.full(len(possible), np.inf)) == (left, {})


def rotating(layers, *, given=False):
    """Blocks of which each makes the table of its angles by itself, or is given one."""
    angles = lambda: np.sin(ir.apply("iota", dim=0, shape=(3, WIDTH), starts=(0, 0), dtype=np.dtype("f4")))

    def loss(p, x):
        before = angles() if given else None
        for layer in p["layers"]:
            x = x + np.tanh(x * (before if given else angles()) @ layer["up"]) @ layer["down"]
        return np.mean(x ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    return ir.record(loss, {"layers": [{"up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH)}] * layers}, f32(B, 3, WIDTH))


def test_tables_that_each_block_makes_are_computed_once():
    program = rotating(3)
    assert [op.kind for op in program.ops].count("sin") == 3
    once = with_tables_once(program)
    assert [op.kind for op in once.ops] == [op.kind for op in rotating(3, given=True).ops]
    assert_array_equal(run(once), run(program))
    assert with_tables_once(once) is once
    found = with_regions(program)
    assert found.regions == ("block", "block.0", "block.1", "block.2")
    assert next(op.region for op in found.ops if op.kind == "sin") is None
    assert_array_equal(run(Blocks.of(found, "block", 3).of_blocks(2)), run(rotating(2)))
    in_regions = residual(3)
    assert with_tables_once(in_regions) == in_regions


def called_again(layers, *, own=False, of=0):
    """`residual` layers whose scale is computed in each, and that of one layer once more behind them, as in DiT.

    The program makes a constant of the scale once, in the first layer; ``own``: the last call is in no layer, and has a
    constant of its own.
    """
    def scale(layer, x):
        return np.tanh(x.sum(axis=1, keepdims=True) * 0.5 @ layer["scale"])

    def loss(p, x):
        given = x
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}"):
                x = x + np.tanh(x @ layer["up"]) @ layer["down"] * scale(layer, given)
        with ir.region("layers.again") if own else ir.region(f"layers.{of}.again"):
            x = x * scale(p["layers"][of], given)
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH), "scale": f32(1, WIDTH)}
    made = ir.record(loss, {"layers": [each] * layers, "last": f32(WIDTH, 4)}, f32(B, WIDTH))
    if own:
        return made
    halves = {op.outputs[0]: op.region for op in made.ops if op.kind == "constant" and dict(op.attributes)["value"] == 0.5}
    (first, *_, last) = halves
    ops = []
    for op in made.ops:
        inputs = tuple(first if value == last else value for value in op.inputs)
        if last not in op.outputs:
            ops.append(replace(op, inputs=inputs))
    return replace(made, ops=tuple(ops))


def test_a_module_of_a_block_that_is_called_again_behind_all_blocks_is_of_none():
    program = called_again(3)
    assert Blocks.of(program, "layers", 3) is None
    model = TrainedModel.of(program, ADAM_W)
    assert (model.prefix, model.blocks) == ("layers", 3) and model.alike is not None
    assert_array_equal(run(model.model), run(program))
    assert [op.kind for op in model.model.ops] == [op.kind for op in called_again(3, own=True).ops]
    again = [op.kind for op in model.model.ops if op.region == "layers.again"]
    assert again == ["sum", "constant", "multiply", "matmul", "tanh", "multiply"]
    assert_array_equal(run(model.of_blocks(2).model), run(called_again(2)))


def test_a_program_whose_end_reads_a_weight_of_a_later_block_has_no_blocks():
    program = called_again(3, of=1)
    model = TrainedModel.of(program, ADAM_W)
    assert model.alike is None
    assert_array_equal(run(model.model), run(program))


@pytest.mark.takes_seconds
def test_plans_of_a_program_with_a_module_of_a_later_block_called_again_are_simulated():
    plans = find_plan(called_again(4, of=2), hardware="dgx-h100", devices=4, batch=16, zero=1, microbatch=2, pp=[2, 4])
    assert plans.timed == 4 == sum(plans.one_by_one.values())
    assert [*plans.one_by_one] == ["only blocks that are alike are pieces, and stages of this program are simulated"]


@pytest.mark.takes_seconds
def test_plans_of_a_program_with_a_module_that_is_called_again_are_put_together_from_pieces():
    plans = find_plan(called_again(4), hardware="dgx-h100", devices=4, batch=16, zero=1, microbatch=2)
    assert plans.timed - sum(plans.one_by_one.values()) == 2    # dp=4, with and without recomputation
    elsewhere = "a weight of a block is read in another stage, too"
    assert elsewhere in plans.one_by_one and any(elsewhere in reason for reason in plans.refused)
    for plan in plans:
        trace = simulate(plan.run.step, "dgx-h100", link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9)
        assert max(trace.peaks().values()) == pytest.approx(plan.peak_bytes, abs=1024)


def written_otherwise(layers, *, lists=1, before=0):
    """`residual`, where each block is added outside of regions, and its parts lie in several, behind other numbered ones."""
    def loss(p, x):
        x = x @ p["first"]
        for i in range(before):
            with ir.region(f"stem.{i}"):
                x = (np.sin if i in (0, 3, 4, 8) else np.cos)(x @ p["stem"][i])
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"ups.{i}" if lists > 1 else f"layers.{i}"):
                y = np.tanh(x @ layer["up"] + layer["bias"])
            with ir.region(f"downs.{i}" if lists > 1 else f"layers.{i}"):
                y = y @ layer["down"]
            x = x + y
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(WIDTH, INNER), "bias": f32(INNER), "down": f32(INNER, WIDTH)}
    types = {"first": f32(5, WIDTH), "layers": [each] * layers, "last": f32(WIDTH, 4), "stem": [f32(WIDTH, WIDTH)] * before}
    return ir.record(loss, types, f32(B, 5))


@pytest.mark.parametrize("lists", [1, 2])
def test_blocks_whose_parts_lie_in_several_regions_or_in_none_are_found_by_what_they_compute(lists):
    program = written_otherwise(4, lists=lists)
    model = TrainedModel.of(program, ADAM_W)
    assert (model.prefix, model.blocks) == ("block", 4) and model.alike is not None
    assert [op.region for op in model.model.ops if op.region].count("block.1") == 5     # with what is added behind it
    assert_array_equal(run(model.model), run(residual(4)))
    assert_array_equal(run(model.of_blocks(3).model), run(residual(3)))


def test_regions_stay_where_blocks_have_few_of_the_ops():
    program = written_otherwise(2, before=9)
    model = TrainedModel.of(program, ADAM_W)
    assert model.model is program and (model.prefix, model.blocks) == ("stem", 9)


@pytest.mark.takes_seconds
def test_plans_of_a_program_that_adds_outside_of_its_modules_are_put_together_from_pieces():
    fixed = {"recompute": "none", "zero": 1, "microbatch": 2}
    plans = find_plan(written_otherwise(4), hardware="dgx-h100", devices=4, batch=16, **fixed)
    same = find_plan(residual(4), hardware="dgx-h100", devices=4, batch=16, **fixed)
    assert not plans.one_by_one and len(plans) > 3
    told = lambda found: {plan.split: (plan.bound_seconds, plan.peak_bytes) for plan in found}
    assert told(plans) == told(same)


@pytest.mark.takes_seconds
def test_of_many_plans_of_a_program_without_pieces_those_of_the_best_meshes_are_simulated(monkeypatch):
    program = residual(2, activation=lambda i: (np.tanh, np.abs)[i])
    whole = find_plan(program, hardware="dgx-h100", devices=4, batch=16, pp=2)
    assert whole.timed == len(whole) and not any(PROMISING in reason for reason in whole.refused)
    assert "the first is the best\n" in str(whole).replace(". ", "\n").replace(".\n", "\n\n")
    monkeypatch.setattr(promising, "MOST_OPS_ALONE", 0)
    monkeypatch.setattr(promising, "MOST_OF_MESHES", 0)
    monkeypatch.setattr(promising, "LEAST_OF_MESHES", 3)
    found = find_plan(program, hardware="dgx-h100", devices=4, batch=16, pp=2)
    (reason, others), = [(why, each) for why, each in found.refused.items() if PROMISING in why]
    assert reason.endswith("are more promising, by one plan of each mesh; fix settings for others")
    assert others.count == len(whole) - len(found) > 20
    axes = lambda plan: tuple(plan.settings[name] for name in ("dp", "tp", "pp", "schedule", "chunks"))
    assert {axes(plan) for plan in found} == {axes(plan) for plan in whole}
    seconds = {tuple(plan.settings.items()): plan.bound_seconds for plan in whole}
    for plan in found:
        assert plan.bound_seconds == seconds[tuple(plan.settings.items())]
    assert "the best of those that were timed" in " ".join(str(found).split())


def test_one_plan_stands_for_those_of_a_mesh():
    possible = choices(TrainedModel.of(residual(4), ADAM_W), 8, 64, {"order": "pp dp cp tp"})
    rows = [*range(len(possible))]
    of_mesh = one_of_each_mesh(possible, rows)
    assert sorted(row for own in of_mesh.values() for row in own) == rows
    for first, own in of_mesh.items():
        told, sizes = possible.settings(first), sorted({int(possible["microbatch"][row]) for row in own})
        assert first in own and told["recompute"] == "none" and told["microbatch"] == sizes[len(sizes) // 2]
        alike = [row for row in own if possible["microbatch"][row] == told["microbatch"]]
        assert told["zero"] == max(possible.settings(row)["zero"] for row in alike)


def test_rows_of_the_best_meshes_fill_the_room():
    meshes = [[7, 8, 9], [1, 2, 3, 4], [5, 6]]
    assert most_promising(meshes, [8, 1, 5], 0) == {8, 1, 5}
    assert most_promising(meshes, [8, 1, 5], 3) == {8, 1, 5, 7, 9, 2}
    assert most_promising(meshes, [8, 1, 5], 99) == {1, 2, 3, 4, 5, 6, 7, 8, 9}


def with_stacks(layers, *, regions):
    """`residual`, whose layers read their own rows of weights that are stacked."""
    def loss(p, x):
        x = x @ p["first"]
        for i in range(layers):
            with ir.region(f"layers.{i}") if regions else ir.region("all"):
                up, bias, down = (p["layers"][name][i] for name in ("up", "bias", "down"))
                x = x + np.tanh(x @ up + bias) @ down
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(layers, WIDTH, INNER), "bias": f32(layers, INNER), "down": f32(layers, INNER, WIDTH)}
    made = ir.record(loss, {"first": f32(5, WIDTH), "layers": each, "last": f32(WIDTH, 4)}, f32(B, 5))
    return made if regions else without_regions(made)


@pytest.mark.takes_seconds
@pytest.mark.parametrize("regions", [True, False])
def test_layers_that_read_rows_of_stacks_are_blocks(regions):
    program = with_stacks(4, regions=regions)
    found, prefix, count = found_blocks(program)
    assert (prefix, count) == ("layers" if regions else "block", 4)
    assert [value.name for value in found.inputs if ".up" in value.name] == [f"p.layers.up.{i}" for i in range(4)]
    assert found_blocks(found) == (found, prefix, count)
    listed = residual(4, regions=regions)
    fixed = {"recompute": "none", "microbatch": 2, "schedule": "1f1b", "hardware": "dgx-h100", "devices": 4, "batch": 16}
    rows, others = find_plan(program, **fixed), find_plan(listed, **fixed)
    assert not rows.one_by_one and len(rows) == len(others) > 5 and {row.settings["pp"] for row in rows} == {1, 2, 4}
    for row, other in zip(rows, others, strict=True):
        assert row.settings == other.settings and row.peak_bytes == other.peak_bytes
        assert row.seconds == pytest.approx(other.seconds, rel=1e-12)


def test_stacks_stay_where_layers_are_not_alike():
    program = ir.record(lambda p, x: np.mean(np.sin(x @ p["w"][0]) @ p["w"][1]), {"w": ir.TensorType("f4", (2, 5, 5))},
                        ir.TensorType("f4", (B, 5)))
    assert found_blocks(program)[0] == program


def put_together(program, **fixed):
    """The plans of a program, each of which takes the seconds and the memory of its simulation."""
    fixed = {"hardware": "dgx-h100", "devices": 4, "batch": 16, **fixed}
    plans = find_plan(program, **fixed)
    for plan in plans:
        trace = simulate(plan.run.step, "dgx-h100", link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9), plan.split
        assert max(trace.peaks().values()) == pytest.approx(plan.peak_bytes, abs=1024), plan.split
    return plans


@pytest.mark.parametrize("layers", [3, 5])
def test_weights_of_blocks_have_the_number_of_their_block_in_pieces(layers):
    """Behind a first layer of another kind block 0 has the weights of layer 1."""
    program = residual(layers, regions=False, activation=lambda i: np.tanh if i else np.cos)
    found, prefix, count = found_blocks(program)
    assert (prefix, count) == ("block", layers - 1)
    assert found.inputs == program.inputs
    made = Blocks.of(found, prefix, count).of_blocks(2)
    names = {value.name for value in made.inputs}
    assert names == {
        "x", "p.first", "p.last", "p.layers._0.up", "p.layers._0.bias", "p.layers._0.down",
        "p.block.0.layers.1.up", "p.block.0.layers.1.bias", "p.block.0.layers.1.down",
        "p.block.1.layers.1.up", "p.block.1.layers.1.bias", "p.block.1.layers.1.down"}
    as_layers = lambda name: (name.replace("p.block.0.layers.1", "p.layers.1").replace("p.block.1.layers.1", "p.layers.2")
                              .replace("_0", "0"))
    there = {value: replace(value, name=as_layers(value.name)) for value in made.inputs}
    ops = [replace(op, inputs=tuple(there.get(value, value) for value in op.inputs)) for op in made.ops]
    renamed = replace(made, inputs=tuple(there.values()), ops=tuple(ops))
    assert_array_equal(run(renamed), run(residual(3, activation=lambda i: np.tanh if i else np.cos)))


@pytest.mark.takes_seconds
def test_plans_of_blocks_behind_a_layer_of_another_kind_are_put_together_from_pieces():
    program = residual(5, regions=False, activation=lambda i: np.tanh if i else np.cos)
    plans = put_together(program, microbatch=2, recompute="full", schedule="1f1b")
    assert not plans.one_by_one and {plan.settings["pp"] for plan in plans} == {1, 2, 4}


@pytest.mark.takes_seconds
@pytest.mark.parametrize("regions", [True, False])
def test_pairs_of_layers_are_blocks(regions):
    """As in GPT-Neo, whose layers have a window by turns."""
    program = residual(8, regions=regions, activation=lambda i: (np.tanh, np.cos)[i % 2])
    plans = put_together(program, microbatch=2, recompute="full", schedule="1f1b")
    model = plans.task.model
    assert (model.blocks, *model.layer_blocks) == (4, 0, 0, *((2, "layers") if regions else (1, "block")))
    assert not plans.one_by_one and {plan.settings["pp"] for plan in plans} == {1, 2, 4}


def test_masks_tell_kinds_of_layers():
    """Layers that compute alike, of which every third reads another mask: they repeat in threes."""
    def loss(p, x):
        masks = [np.sin(ir.apply("iota", dim=1, shape=(5, WIDTH), starts=(0, 0), dtype=np.dtype("f4")) * i) for i in (1, 2)]
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}"):
                x = x + np.tanh(x @ layer["up"] * masks[i % 3 == 2]) @ layer["down"]
        return np.mean(x ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    program = ir.record(loss, {"layers": [{"up": f32(WIDTH, WIDTH), "down": f32(WIDTH, WIDTH)}] * 6}, f32(B, 5, WIDTH))
    model = TrainedModel.of(program, ADAM_W)
    bare = TrainedModel.of(without_regions(program), ADAM_W)
    assert (model.blocks, model.layer_blocks.each, bare.blocks, bare.prefix) == (2, 3, 2, "block")
    assert_array_equal(run(model.of_blocks(2).model), run(program))


@pytest.mark.takes_seconds
@pytest.mark.parametrize("other", [False, True])
def test_numbers_outside_of_the_blocks_are_not_those_of_blocks(other):
    """A head that is a list has weights with the numbers of blocks, or of an ``other`` layer before them."""
    def loss(p, x):
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}"):
                x = x + (np.cos if other and i == 0 else np.tanh)(x @ layer["up"]) @ layer["down"]
        for i in range(2):
            with ir.region(f"head.{i}"):
                x = np.sin(x @ p["head"][i])
        return np.mean(x ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH)}
    types = {"layers": [each] * (4 + other), "head": [f32(WIDTH, WIDTH), f32(WIDTH, 3)]}
    plans = put_together(ir.record(loss, types, f32(B, WIDTH)), microbatch=2, recompute="none", schedule="1f1b")
    assert not plans.one_by_one and {plan.settings["pp"] for plan in plans} == ({1, 2} if other else {1, 2, 4})


@pytest.mark.takes_seconds
@pytest.mark.slow_for("p.last", "p.layers.2.bias")
@pytest.mark.parametrize(("names", "first"), [
    (("p.layers.0", "p.layers.1"), 2), (("p.first", "p.layers.0"), 1), (("p.layers",), 0), (("p.last",), 0),
    (tuple(f"p.layers.{i}.up" for i in range(6)), 0), (("p.layers.2.bias",), 3), (("p.first", "p.layers"), None),
], ids=lambda value: value if isinstance(value, int) else None if value is None else " ".join(value[:2]))
def test_frozen_layers_are_of_another_kind(names, first):
    """The first layers are often frozen where a model is adapted.  ``first``: None where no gradient goes through layers."""
    program = frozen(residual(6), names)
    plans = put_together(program, microbatch=2, recompute="none")
    assert bool(plans.one_by_one) == (first is None)
    assert plans.task.model.first_alike == (first or 0)


def any_layers(random):
    """Up to nine layers, whose kinds repeat behind some first ones, before a list of others; some weights may be frozen."""
    layers, period, first, heads = random.randint(2, 9), random.randint(1, 3), random.randint(0, 2), random.randint(0, 2)
    activations = [random.choice([np.tanh, np.cos, np.sin, np.abs]) for _ in range(first + period)]
    regions = random.random() < 0.6

    def loss(p, x):
        x = x @ p["first"]
        for i, layer in enumerate(p["layers"]):
            with ir.region(f"layers.{i}"):
                kind = i if i < first else first + (i - first) % period
                x = x + activations[kind](x @ layer["up"] + layer["bias"]) @ layer["down"]
        for i, weight in enumerate(p["heads"]):
            with ir.region(f"heads.{i}"):
                x = np.sin(x @ weight)
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    each = {"up": f32(WIDTH, INNER), "bias": f32(INNER), "down": f32(INNER, WIDTH)}
    types = {"first": f32(5, WIDTH), "heads": [f32(WIDTH, WIDTH)] * heads, "last": f32(WIDTH, 4), "layers": [each] * layers}
    program = ir.record(loss, types, f32(B, 5))
    choices_of_frozen = [[], [f"p.layers.{i}" for i in range(random.randint(1, layers))],
                         [f"p.layers.{i}.up" for i in range(layers)]]
    held = random.choice(choices_of_frozen) + random.choice([[], [], ["p.first"]])
    program = frozen(program, held) if held else program
    return program if regions else without_regions(program)


@pytest.mark.sampled(24, 3)
@pytest.mark.takes_seconds
@pytest.mark.parametrize("seed", range(24))
def test_plans_of_any_layers_are_those_of_simulations(seed):
    random = Random(seed)
    program = any_layers(random)
    plans = put_together(program, microbatch=2, recompute="none", schedule=random.choice(["1f1b", "gpipe", "zb_h1"]))
    assert not [reason for reason in plans.one_by_one if "has no product" in reason]


@pytest.mark.takes_seconds
def test_stages_that_share_the_weights_of_blocks_are_simulated():
    """As in ALBERT, whose layers have the same weights: their gradients are summed over stages, which no piece tells."""
    def loss(p, x):
        x = x @ p["first"]
        for _ in range(4):
            x = x + np.tanh(x @ p["up"]) @ p["down"]
        return np.mean((x @ p["last"]) ** 2)

    f32 = lambda *shape: ir.TensorType("f4", shape)
    types = {"first": f32(5, WIDTH), "up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH), "last": f32(WIDTH, 4)}
    fixed = {"recompute": "none", "zero": 1, "microbatch": 2, "schedule": "1f1b"}
    program = ir.record(loss, types, f32(B, 5))
    plans = find_plan(program, hardware="dgx-h100", devices=4, batch=16, **fixed)
    assert found_blocks(program)[1:] == ("block", 4)
    assert [*plans.one_by_one] == ["a weight of a block is read in another stage, too"]
    for plan in plans:
        trace = simulate(plan.run.step, "dgx-h100", link_sharing=False, **plan.run.placed)
        assert trace.makespan_seconds == pytest.approx(plan.bound_seconds, rel=1e-9)
