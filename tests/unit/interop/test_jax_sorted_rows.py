"""Experts as people write them in JAX: rows are sorted by expert, multiplied in groups, and brought back.

Losses and gradients are JAX's; products are those of an even share of the rows.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import ExpertsWarning, from_jax, from_stablehlo  # noqa: E402
from parallelism.interop.expert_rows import choices  # noqa: E402
from parallelism.layouts.stages.beginnings import by_rows  # noqa: E402
from parallelism.planning import find_plan  # noqa: E402

B, = ir.symbols("B")
BATCH, LENGTH, WIDTH, HIDDEN, COUNT, CHOSEN = 3, 6, 5, 7, 4, 2
SHAPES = {"router": (WIDTH, COUNT), "up": (COUNT, WIDTH, HIDDEN), "gate": (COUNT, WIDTH, HIDDEN),
          "down": (COUNT, HIDDEN, WIDTH), "bias": (COUNT, HIDDEN)}
pytestmark = pytest.mark.takes_seconds


def routed(p, tokens, chosen=CHOSEN):
    gates, experts = lax.top_k(jax.nn.softmax(tokens @ p["router"]), chosen)
    return gates / gates.sum(-1, keepdims=True), experts


def sizes_of(experts):
    return jnp.bincount(experts, length=COUNT)


def feed_forward(p, rows, sizes):
    hidden = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes)) * lax.ragged_dot(rows, p["up"], sizes)
    return lax.ragged_dot(hidden, p["down"], sizes)


def brought_back(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, x[order // CHOSEN], sizes_of(experts.reshape(-1)))
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def as_maxtext(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(jnp.ravel(experts))
    made = feed_forward(p, jnp.take(x, indices=order // CHOSEN, axis=0), sizes_of(jnp.ravel(experts)))
    rows = jnp.take(made, indices=jnp.argsort(order), axis=0).reshape(-1, CHOSEN, WIDTH)
    return jnp.einsum("BKE,BK -> BE", rows, gates.reshape(-1, CHOSEN))


def added_to_their_tokens(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    rows = jnp.repeat(x, CHOSEN, axis=0)[order]
    made = feed_forward(p, rows, jax.nn.one_hot(experts, COUNT, dtype=jnp.int32).sum((0, 1)))
    return x.at[order // CHOSEN].add((made + rows) * gates.reshape(-1)[order][:, None])


def put_back(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, x[order // CHOSEN], sizes_of(experts.reshape(-1)))
    rows = jnp.zeros_like(made).at[order].set(made)
    return (rows.reshape(-1, CHOSEN, WIDTH) * gates.reshape(-1, CHOSEN, 1)).sum(-2)


def the_best_alone(p, x):
    chances = jax.nn.softmax(x @ p["router"])
    best = jnp.argmax(chances, -1)
    order = jnp.argsort(best)
    made = feed_forward(p, x[order], sizes_of(best))
    return made[jnp.argsort(order)] * chances.max(-1)[:, None]


def with_biases(p, x):
    gates, experts = routed(p, x)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    hidden = lax.ragged_dot(x[order // CHOSEN], p["up"], sizes_of(flat)) + p["bias"][flat[order]]
    made = lax.ragged_dot(jax.nn.silu(hidden), p["down"], sizes_of(flat))
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def weights_of_each_row(p, x):
    gates, experts = routed(p, x)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    hidden = jax.nn.silu(jnp.einsum("nd,ndf->nf", x[order // CHOSEN], p["up"][flat[order]]))
    made = jnp.einsum("nf,nfd->nd", hidden, p["down"][flat[order]])
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def normalized_and_joined(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes, rows = sizes_of(experts.reshape(-1)), x[order // CHOSEN]
    rows = rows * lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + 1e-5)
    both = lax.ragged_dot(rows, jnp.concatenate([p["gate"], p["up"]], -1), sizes)
    gate, up = jnp.split(both, 2, -1)
    made = jax.nn.softmax(lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes), -1)
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def with_a_loss_of_the_load(p, x):
    experts = routed(p, x)[1]
    load = sizes_of(experts.reshape(-1)) / x.shape[0]
    return brought_back(p, x) + (load * jax.nn.softmax(x @ p["router"]).mean(0)).sum()


WAYS = [brought_back, as_maxtext, added_to_their_tokens, put_back, the_best_alone, with_biases, weights_of_each_row,
        normalized_and_joined, with_a_loss_of_the_load]


def in_turn(p, x):
    """Two layers, of which each has a choice of its own."""
    return put_back(p, x + brought_back(p, x))


def loss_of(layer):
    def loss(p, x):
        return jnp.mean((x + layer(p, x.reshape(-1, WIDTH)).reshape(x.shape)) ** 2)

    return loss


def numbers():
    random = np.random.default_rng(1)
    weights = {name: random.normal(size=shape).astype("f4") / 2 for name, shape in SHAPES.items()}
    return weights, random.normal(size=(BATCH, LENGTH, WIDTH)).astype("f4")


def check(program, layer):
    """Compares the loss and all gradients with those of JAX."""
    weights, x = numbers()
    value, (of_weights, of_x) = jax.value_and_grad(loss_of(layer), (0, 1))(weights, x)
    expected = {f"p.{name}": slope for name, slope in of_weights.items()} | {"x": of_x}
    own = program.specialize(B=BATCH) if program.symbols else program
    inputs = {f"p.{name}": array for name, array in weights.items()} | {"x": x}
    names = [each.name for each in own.inputs]
    found, *slopes = ir.interpret(ir.gradient(own, names, keep_outputs=True), inputs).outputs
    assert_allclose(found, value, rtol=1e-5)
    for name, slope in zip(names, slopes, strict=True):
        assert_allclose(slope, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def read(layer, rows=B):
    weights, _ = numbers()
    return from_jax(loss_of(layer), weights, ir.TensorType("f4", (rows, LENGTH, WIDTH)))


def is_dealt(program):
    """Whether tokens are dealt to the experts, and are not sorted: the only order is that of their scores."""
    return all(op.inputs[0].type.ndim > 1 for op in program.ops if op.kind == "argsort")


@pytest.mark.parametrize("rows", [B, BATCH])
@pytest.mark.parametrize("layer", [*WAYS, in_turn])
def test_rows_are_dealt_with_the_loss_and_the_gradients_of_jax(layer, rows):
    with warnings.catch_warnings(action="error", category=ExpertsWarning):
        program = read(layer, rows)
    assert is_dealt(program)
    share = -(-LENGTH * (1 if layer is the_best_alone else CHOSEN) // COUNT)
    assert {op["shape"][:3] for op in program.ops if op.kind == "dispatch"} == {(COUNT, rows, max(share, 2))}
    products = [op for op in program.ops if op.kind == "einsum" and op.inputs[0].type.ndim == 4]
    assert products and all(op.outputs[0].type.shape[:3] == (COUNT, rows, max(share, 2)) for op in products)
    if rows is B:
        by_rows(program, "B", [name for name in map(str, program.inputs) if name.startswith("p.")])  # in microbatches
    check(program, layer)


def mean_of_all_rows(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, x[order // CHOSEN], sizes_of(experts.reshape(-1)))
    made = made - made.mean(0)
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def of_some_rows(p, x):
    gates, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, x[order // CHOSEN], jnp.minimum(sizes_of(experts.reshape(-1)), 9))
    return (made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


def chosen_twice(p, x):
    number = jnp.abs(x[:, 0] * 100).astype(jnp.int32)
    experts = jnp.stack([number % COUNT, number * 3 % COUNT], -1)
    order = jnp.argsort(experts.reshape(-1))
    made = feed_forward(p, x[order // CHOSEN], sizes_of(experts.reshape(-1)))
    return made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH).sum(1) + x @ p["router"] @ p["router"].T


@pytest.mark.parametrize(("layer", "why"), [
    (mean_of_all_rows, "sum does not take each of them alone"),
    (of_some_rows, "a product has other groups than those of the experts"),
])
def test_other_uses_of_sorted_rows_stay_as_they_are_with_a_warning(layer, why):
    with pytest.warns(ExpertsWarning, match=rf"{why}.*so they are sorted over the whole batch"):
        program = read(layer)
    assert not is_dealt(program)
    check(program, layer)


def as_jax_lowers_it(layer):
    """The program of the text that JAX makes for CPUs, where each expert has all rows, of which a mask leaves its own."""
    weights, x = numbers()
    return from_stablehlo(jax.jit(loss_of(layer)).lower(weights, x).as_text())


def test_masked_rows_of_a_text_are_dealt():
    program = as_jax_lowers_it(brought_back)
    assert is_dealt(program) and not any(op.kind == "where" for op in program.ops if op.outputs[0].type.ndim > 2)
    weights, x = numbers()
    (found,) = ir.interpret(program, [weights[name] for name in sorted(weights) if name != "bias"] + [x]).outputs
    assert_allclose(found, loss_of(brought_back)(weights, x), rtol=1e-5)


@pytest.mark.parametrize(("layer", "why"), [
    (mean_of_all_rows, "sum does not take each of them alone"), (of_some_rows, "a mask leaves an expert other rows")])
def test_masked_rows_of_a_text_that_are_used_otherwise_are_computed_by_all_experts(layer, why):
    with pytest.warns(ExpertsWarning, match=rf"{why}.*so all {COUNT} experts compute all rows"):
        program = as_jax_lowers_it(layer)
    assert not is_dealt(program)


def test_experts_that_a_token_may_choose_twice_are_not_dealt():
    program = read(chosen_twice)
    assert not is_dealt(program)
    check(program, chosen_twice)


def test_too_many_numbers_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(choices, "MOST_COMPUTED", 100)
    with pytest.warns(ExpertsWarning, match=r"\d+ numbers would tell which rows .* a symbol for the batch helps"):
        program = read(brought_back)
    assert not is_dealt(program)


def test_layers_of_equal_form_are_looked_at_once(monkeypatch):
    computed = []
    original = choices._computed
    monkeypatch.setattr(choices, "_computed", lambda *given: computed.append(given) or original(*given))
    program = read(lambda p, x: brought_back(p, brought_back(p, brought_back(p, x))))
    assert len(computed) == 1 and sum(op.kind == "dispatch" for op in program.ops) == 3


def test_plans_split_the_experts_of_a_function_of_jax():
    program = read(lambda p, x: with_biases(p, in_turn(p, x)))
    plans = find_plan(program, hardware="dgx-h100", devices=8, batch=16)
    assert {plan.settings["ep"] for plan in plans} == {1, 2, 4}


def layer_of(count, chosen, rows, before, between, back, sizes):
    """A way to write a layer of experts, out of parts."""
    ways_to_rows = {
        "token": lambda x, order: x[order // chosen],
        "repeat": lambda x, order: jnp.repeat(x, chosen, axis=0)[order],
        "take": lambda x, order: jnp.take(x, order // chosen, axis=0)}
    ways_to_sizes = {
        "bincount": lambda flat: jnp.bincount(flat, length=count),
        "one_hot": lambda flat: jax.nn.one_hot(flat, count, dtype=jnp.int32).sum(0),
        "segment_sum": lambda flat: jax.ops.segment_sum(jnp.ones_like(flat), flat, count)}
    ways_between = {
        "plain": lambda p, h, flat: h,
        "bias": lambda p, h, flat: h + p["bias"][flat],
        "norm": lambda p, h, flat: h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-3),
        "joined": lambda p, h, flat: jnp.concatenate([h, jnp.tanh(h)], -1)[:, :h.shape[1]] + h}

    def summed(made, order, gates, x):
        if back == "add":
            return jnp.zeros_like(x).at[order // chosen].add(made)
        if back == "set":
            return jnp.zeros_like(made).at[order].set(made).reshape(-1, chosen, WIDTH).sum(1)
        inverse = jnp.argsort(order) if back == "argsort" else jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
        return jnp.einsum("nkd,nk->nd", made[inverse].reshape(-1, chosen, WIDTH), gates)

    def layer(p, x):
        gates, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), chosen)
        flat = experts.reshape(-1)
        order = jnp.argsort(flat)
        own = ways_to_rows[rows](x, order)
        if before:
            own = own * gates.reshape(-1)[order][:, None]
        hidden = lax.ragged_dot(own, p["up"], ways_to_sizes[sizes](flat))
        hidden = jax.nn.silu(ways_between[between](p, hidden, flat[order]))
        return summed(lax.ragged_dot(hidden, p["down"], ways_to_sizes[sizes](flat)) + own, order, gates, x)

    return layer


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 6), chosen=st.integers(1, 3), shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 5, 8])),
    rows=st.sampled_from(["token", "repeat", "take"]), before=st.booleans(),
    between=st.sampled_from(["plain", "bias", "norm", "joined"]), back=st.sampled_from(["add", "set", "argsort", "inverse"]),
    sizes=st.sampled_from(["bincount", "one_hot", "segment_sum"]), is_deep=st.booleans())
def test_any_layer_of_sorted_rows_has_the_loss_and_the_gradients_of_jax(
    count, chosen, shape, rows, before, between, back, sizes, is_deep):
    layer = layer_of(count, min(chosen, count - 1), rows, before, between, back, sizes)
    loss = loss_of((lambda p, x: layer(p, layer(p, x))) if is_deep else layer)
    random = np.random.default_rng(count)
    shapes = {"router": (WIDTH, count), "up": (count, WIDTH, HIDDEN), "down": (count, HIDDEN, WIDTH), "bias": (count, HIDDEN)}
    weights = {name: random.normal(size=each).astype("f4") / 2 for name, each in shapes.items()}
    x = random.normal(size=(*shape, WIDTH)).astype("f4")
    program = from_jax(loss, weights, ir.TensorType("f4", (B, shape[1], WIDTH)))
    assert is_dealt(program)
    value, (of_weights, of_x) = jax.value_and_grad(loss, (0, 1))(weights, x)
    expected = {f"p.{name}": slope for name, slope in of_weights.items()} | {"x": of_x}
    own = program.specialize(B=shape[0])
    names = [each.name for each in own.inputs]
    inputs = {f"p.{name}": array for name, array in weights.items()} | {"x": x}
    found, *slopes = ir.interpret(ir.gradient(own, names, keep_outputs=True), inputs).outputs
    assert_allclose(found, value, rtol=1e-4)
    for name, slope in zip(names, slopes, strict=True):
        most = np.abs(expected[name]).max()
        assert_allclose(slope, expected[name], rtol=0, atol=1e-3 * most + 1e-7, err_msg=name)
