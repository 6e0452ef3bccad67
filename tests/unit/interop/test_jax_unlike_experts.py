"""Programs of JAX that look like experts whose rows are sorted, and mean something else.

Losses and gradients are JAX's, whether or not rows are dealt.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import ExpertsWarning, from_jax  # noqa: E402

B, = ir.symbols("B")
BATCH, LENGTH, WIDTH, HIDDEN, COUNT, CHOSEN = 3, 6, 5, 7, 4, 2
SHAPES = {"router": (WIDTH, COUNT), "wide": (WIDTH, 2 * COUNT), "up": (COUNT, WIDTH, HIDDEN), "down": (COUNT, HIDDEN, WIDTH),
          "bias": (COUNT, WIDTH)}
pytestmark = pytest.mark.takes_seconds


def routed(p, x, router="router"):
    gates, experts = lax.top_k(jax.nn.softmax(x @ p[router]), CHOSEN)
    return gates / gates.sum(-1, keepdims=True), experts


def feed_forward(p, rows, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)


def layer_of(router="router", numbers=lambda x: x, sizes=lambda x: jnp.bincount(x, length=COUNT), rows=lambda p, x: x,
             made=lambda p, made, x, flat: made, back=None):
    """A layer that differs in one part from the usual one."""
    def layer(p, x):
        gates, experts = routed(p, x, router)
        flat = numbers(experts).reshape(-1)
        order = jnp.argsort(flat)
        own = rows(p, x[order // CHOSEN])
        result = made(p, feed_forward(p, own, sizes(flat)), own, flat[order])
        if back is not None:
            return back(result, order, gates)
        return (result[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)

    return layer


def check(layer, rows=B, batch=BATCH, length=LENGTH):
    """Whether rows are dealt.  Compares the loss and all gradients with those of JAX."""
    def loss(p, x):
        return jnp.mean((x + layer(p, x.reshape(-1, x.shape[-1])).reshape(x.shape)) ** 2)

    random = np.random.default_rng(1)
    weights = {name: random.normal(size=shape).astype("f4") / 2 for name, shape in SHAPES.items()}
    x = random.normal(size=(batch, length, WIDTH)).astype("f4")
    program = from_jax(loss, weights, ir.TensorType("f4", (rows, length, WIDTH)))
    value, (of_weights, of_x) = jax.value_and_grad(loss, (0, 1))(weights, x)
    expected = {f"p.{name}": slope for name, slope in of_weights.items()} | {"x": of_x}
    own = program.specialize(B=batch) if program.symbols else program
    names = [each.name for each in own.inputs]
    inputs = {f"p.{name}": array for name, array in weights.items()} | {"x": x}
    found, *slopes = ir.interpret(ir.gradient(own, names, keep_outputs=True), inputs).outputs
    assert_allclose(found, value, rtol=1e-5)
    for name, slope in zip(names, slopes, strict=True):
        assert_allclose(slope, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    return all(op.inputs[0].type.ndim > 1 for op in program.ops if op.kind == "argsort")


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("numbers", [
    lambda x: x // 2, lambda x: x % COUNT, lambda x: x - COUNT, lambda x: x, lambda x: jnp.where(x > 2, x, COUNT)])
def test_numbers_that_are_not_those_of_different_experts_are_not_dealt(numbers, rows):
    def sizes(flat):
        return (flat[:, None] == jnp.arange(COUNT)).sum(0)

    with pytest.warns(ExpertsWarning, match="that of no expert: none is known to be from 0 to 3|does not take each"):
        assert not check(layer_of("wide", numbers, sizes), rows)


@pytest.mark.parametrize(("sizes", "batch"), [
    (lambda flat: jnp.minimum(jnp.bincount(flat, length=COUNT), 700), 300),
    (lambda flat: jax.nn.one_hot(flat, COUNT, dtype=jnp.bfloat16).sum(0).astype(jnp.int32), 150)])
def test_sizes_that_are_others_with_many_rows_are_found_out(sizes, batch):
    with pytest.warns(ExpertsWarning, match="a product has other groups than those of the experts"):
        assert not check(layer_of(sizes=sizes), batch=batch)


def test_sizes_that_are_compared_with_too_large_a_number_are_not_looked_at():
    with pytest.warns(ExpertsWarning, match="compared with one that is too large"):
        assert not check(layer_of(sizes=lambda flat: jnp.minimum(jnp.bincount(flat, length=COUNT), 2**29)))


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("layer", [
    layer_of(rows=lambda p, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    layer_of(rows=lambda p, x: jnp.log(jnp.abs(x))),
    layer_of(rows=lambda p, x: x / jnp.abs(x).max(-1, keepdims=True)),
    layer_of(made=lambda p, made, x, flat: jnp.abs(made) ** 0.5),
    layer_of(made=lambda p, made, x, flat: made * lax.rsqrt((x * x).mean(-1, keepdims=True)))])
def test_slots_without_a_row_add_no_number_to_gradients(layer, rows):
    with warnings.catch_warnings(action="error"):
        assert check(layer, rows)


def swapped(result, order, gates):
    rows = result[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH).transpose(1, 0, 2)
    return (rows * gates.T[..., None]).transpose(1, 0, 2).sum(1)


def tokens_last(result, order, gates):
    rows = result[jnp.argsort(order)].reshape(-1, LENGTH, CHOSEN, WIDTH) * gates.reshape(-1, LENGTH, CHOSEN, 1)
    return rows.transpose(0, 3, 1, 2).sum(3).transpose(0, 2, 1).reshape(-1, WIDTH)


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("back", [swapped, tokens_last])
def test_choices_in_another_order_are_not_mixed_up(back, rows):
    with pytest.warns(ExpertsWarning, match="(transpose|sum) does not take each of them alone"):
        assert not check(layer_of(back=back), rows)


def longer(result, order, gates):
    tokens = order.shape[0] // CHOSEN
    return jnp.zeros((tokens + 4, WIDTH)).at[order // CHOSEN].add(result)[:tokens]


def of_a_table_in_a_product(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    flat = experts.reshape(-1)
    made = feed_forward(p, p["bias"][flat[order]], jnp.bincount(flat, length=COUNT))
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def of_a_table(p, x):
    """Rows that are those of their expert alone, summed for each token."""
    _, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    own = p["bias"][experts.reshape(-1)[order]]
    return x.at[order // CHOSEN].add(own) + layer_of()(p, x)


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("layer", [
    layer_of(back=longer), of_a_table, of_a_table_in_a_product,
    lambda p, x: layer_of()(p, jnp.concatenate([x, x]))[:x.shape[0]],
    layer_of(rows=lambda p, x: jnp.concatenate([x, x], -1)[:, :WIDTH])])
def test_rows_among_others_are_those_of_jax(layer, rows):
    with warnings.catch_warnings(action="ignore", category=ExpertsWarning):
        check(layer, rows)


def of_twice_as_many(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, jnp.concatenate([x, 2 * x])[order // CHOSEN], jnp.bincount(experts.reshape(-1), length=COUNT))
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def of_a_table_joined(p, x):
    return layer_of(made=lambda p, made, x, flat: jnp.concatenate([made, p["bias"][flat]], -1)[:, 2:WIDTH + 2])(p, x)


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("layer", [of_twice_as_many, of_a_table_joined])
def test_rows_of_other_extents_leave_the_program_as_it_is(layer, rows):
    with pytest.warns(ExpertsWarning, match="does not take each of them alone"):
        assert not check(layer, rows)


@pytest.mark.parametrize("rows", [B, BATCH])
def test_sequences_that_are_shorter_than_there_are_experts_are_not_taken_for_choices(rows):
    def best_alone(p, x):
        chances = jax.nn.softmax(x.reshape(-1, 3, WIDTH) @ p["router"])
        best = jnp.argmax(chances, -1).reshape(-1)
        order = jnp.argsort(best)
        made = feed_forward(p, x[order], jnp.bincount(best, length=COUNT))
        return made[jnp.argsort(order)] * chances.max(-1).reshape(-1, 1)

    with warnings.catch_warnings(action="error", category=ExpertsWarning):
        assert check(best_alone, rows, length=3)
