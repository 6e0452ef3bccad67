"""Lookups and sums in each row, as ``vmap`` makes them in JAX: no row depends on another one."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_array_equal  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import from_jax  # noqa: E402
from parallelism.layouts.stages.beginnings import by_rows  # noqa: E402
from parallelism.planning import find_plan  # noqa: E402
from parallelism.planning.program_blocks import Blocks, found_blocks  # noqa: E402

B, = ir.symbols("B")
ROWS, NODES, EDGES, WIDTH = 3, 7, 11, 5


def picked(x, chosen):
    """The vectors of some nodes of each row."""
    return jax.vmap(lambda row, places: row[places])(x, chosen)


def picked_twice(x, chosen):
    return jax.vmap(lambda row, places: row[jnp.stack([places, places + 1])])(x, chosen)


def summed(x, chosen):
    """Sums of vectors by the node that each goes to; what goes outside is lost."""
    messages = jnp.concatenate([x, x[:, :EDGES - NODES]], 1)
    return jax.vmap(lambda row, places: jax.ops.segment_sum(row, places, num_segments=NODES))(messages, chosen)


def added(x, chosen):
    update = jnp.ones((EDGES, WIDTH))
    return jax.vmap(lambda row, places: row.at[places].add(update))(x, chosen)


def numbers(outside):
    """Vectors, and places of which some count from the end, and some lie ``outside`` by so many."""
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 10, (ROWS, NODES, WIDTH)).astype(np.float32)
    return x, rng.integers(-NODES - outside, NODES - 1 + outside, (ROWS, EDGES)).astype(np.int32)


@pytest.mark.parametrize(("function", "outside"), [(picked, 0), (picked_twice, 0), (summed, 3), (added, 3)])
def test_a_lookup_of_vectors_in_each_row_stays_in_it(function, outside):
    x, chosen = numbers(outside)
    loss = lambda w, x, chosen: (function(x * w, chosen) ** 2).sum()
    shapes = [ir.TensorType("f32", (B, NODES, WIDTH)), ir.TensorType("i32", (B, EDGES))]
    program = from_jax(loss, ir.TensorType("f32", (WIDTH,)), *shapes)
    by_rows(program, "B", ["w"])           # it can be cut into microbatches
    weights = np.arange(1.0, WIDTH + 1).astype(np.float32)
    step = ir.gradient(program.specialize(B=ROWS), ["w"], keep_outputs=True)
    found, slope = ir.interpret(step, {"w": weights, "x": x, "chosen": chosen}).outputs
    value, expected = jax.value_and_grad(loss)(weights, x, chosen)
    assert_array_equal(found, value)
    assert_array_equal(slope, expected)


@pytest.mark.parametrize(("before", "behind"), [((1,), ()), ((), (1,)), ((2, 1), ()), ((1, 1), (1,))])
def test_a_lookup_along_a_dim_beside_dims_of_one_element_stays_in_its_row(before, behind):
    axis = 1 + len(before)
    loss = lambda w, x, chosen: (jnp.take_along_axis(x * w, chosen, axis) ** 2).sum()
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 10, (ROWS, *before, NODES, *behind)).astype(np.float32)
    chosen = rng.integers(-NODES, NODES, (ROWS, *before, EDGES, *behind)).astype(np.int32)
    shapes = [ir.TensorType("f32", (B, *x.shape[1:])), ir.TensorType("i32", (B, *chosen.shape[1:]))]
    program = from_jax(loss, ir.TensorType("f32", x.shape[1:]), *shapes)
    by_rows(program, "B", ["w"])
    weights = rng.integers(-2, 3, x.shape[1:]).astype(np.float32)
    step = ir.gradient(program.specialize(B=ROWS), ["w"], keep_outputs=True)
    found, slope = ir.interpret(step, {"w": weights, "x": x, "chosen": chosen}).outputs
    value, expected = jax.value_and_grad(loss)(weights, x, chosen)
    assert_array_equal(found, value)
    assert_array_equal(slope, expected)


@pytest.mark.takes_seconds
def test_a_net_over_graphs_is_planned_from_pieces():
    def loss(p, x, source, target):
        for w in p["w"]:
            messages = jax.vmap(lambda nodes, places: nodes[places])(x @ w, source)
            sums = jax.vmap(lambda m, places: jax.ops.segment_sum(m, places, num_segments=NODES))(messages, target)
            x = x + jax.nn.relu(sums)
        return jnp.mean(x * x)

    edges = ir.TensorType("i32", (B, EDGES))
    weights = {"w": [ir.TensorType("f32", (WIDTH, WIDTH))] * 3}
    program = from_jax(loss, weights, ir.TensorType("f32", (B, NODES, WIDTH)), edges, edges)
    plans = find_plan(program, hardware="dgx-h100", devices=4, batch=16, tp=1)
    assert plans.best.is_simulated and not plans.one_by_one


@pytest.mark.takes_seconds
def test_layers_of_a_scan_are_blocks():
    """``lax.scan`` goes over weights that are stacked layer behind layer; each layer is a block with its own rows."""
    layers, width = 3, 6

    def loss(p, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"] * w["scale"]) @ w["down"], None)
        return (jax.lax.scan(layer, x @ p["first"], p["layers"])[0] ** 2).mean()

    f32 = lambda *shape: ir.TensorType("f32", shape)
    stacks = {"up": f32(layers, width, 7), "down": f32(layers, 7, width), "scale": f32(layers)}
    program = from_jax(loss, {"first": f32(5, width), "layers": stacks}, f32(B, 5))
    found, prefix, count = found_blocks(program)
    assert count == layers == len({value.name for value in found.inputs if value.name.startswith("p.layers.scale.")})
    assert Blocks.of(found, prefix, count) is not None
    rng = np.random.default_rng(0)
    arrays = {value.name: rng.normal(size=value.type.specialize({"B": ROWS}).shape).astype("f4") for value in program.inputs}
    names = [value.name for value in found.inputs if value.name != "x"]
    step = ir.gradient(found.specialize(B=ROWS), names, keep_outputs=True)
    value, *slopes = ir.interpret(step, arrays).outputs
    params = {"first": arrays["p.first"], "layers": {name: arrays[f"p.layers.{name}"] for name in stacks}}
    expected, slope = jax.value_and_grad(loss)(params, arrays["x"])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in stacks:
        rows = [own for own, each in zip(slopes, names, strict=True) if each.startswith(f"p.layers.{name}.")]
        np.testing.assert_allclose(np.stack(rows), slope["layers"][name], rtol=1e-4, atol=1e-5)
