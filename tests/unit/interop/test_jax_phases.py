"""What JAX has differentiated keeps its phases: a simulation tells forward, backward and what is computed again."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from parallelism import Mesh, ir, simulate  # noqa: E402
from parallelism.interop import from_jax, from_stablehlo  # noqa: E402
from parallelism.trace.breakdown import split  # noqa: E402

W, X = ir.TensorType("f32", (6, 5)), ir.TensorType("f32", (7, 6))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def kinds(program, region):
    return [op.kind for op in program.ops if op.region == region]


@pytest.mark.takes_seconds
def test_a_differentiated_function_has_a_forward_and_a_backward():
    program = from_jax(jax.value_and_grad(loss), W, X)
    assert "einsum" in kinds(program, "forward") and "tanh" in kinds(program, "forward")
    assert kinds(program, "backward").count("einsum") == 1 and "tanh" not in kinds(program, "backward")
    assert kinds(program, "recomputed") == []
    w, x = np.ones((6, 5), np.float32), np.ones((7, 6), np.float32) / 8
    value, slope = ir.interpret(program, [w, x]).outputs
    expected, expected_slope = jax.value_and_grad(loss)(w, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-6)


def test_a_simulation_tells_the_phases_and_an_update_apart():
    def step(w, x):
        again = jax.checkpoint(loss)
        value, slope = jax.value_and_grad(again)(w, x)
        return value, w - 0.1 * slope

    program = from_jax(step, W, X)
    assert "tanh" in kinds(program, "recomputed") and "subtract" in kinds(program, None)
    trace = simulate(program, "dgx-h100:1", mesh=Mesh(dp=1))
    parts = split(trace)[0]
    assert min(parts.forward, parts.backward, parts.recompute, parts.other) > 0
    assert sum(parts) == pytest.approx(trace.makespan_seconds)
    assert {event.phase for event in trace.events if event.name == "tanh"} == {"F", "R"}


@pytest.mark.takes_seconds
def test_the_text_of_jax_has_them_too_and_a_forward_alone_has_none():
    lowered = jax.jit(jax.grad(loss)).lower(np.zeros((6, 5), np.float32), np.zeros((7, 6), np.float32))
    assert "einsum" in kinds(from_stablehlo(lowered.as_text(debug_info=True)), "backward")
    assert not from_jax(loss, W, X).regions
