"""``jax.lax.ragged_dot``: each row is multiplied with the matrix of its group alone, with JAX's numbers and gradients."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from numpy.testing import assert_array_equal  # noqa: E402

from parallelism import Mesh, ir, simulate  # noqa: E402
from parallelism.interop import from_jax, from_stablehlo  # noqa: E402
from parallelism.planning import find_plan  # noqa: E402

B, = ir.symbols("B")
ROWS, INNER, OUTER, GROUPS = 6, 5, 4, 3
RNG = np.random.default_rng(6)
X = RNG.integers(-3, 4, (ROWS, INNER)).astype(np.float32)
W = RNG.integers(-3, 4, (GROUPS, INNER, OUTER)).astype(np.float32)


def squares(x, w, sizes):
    return jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2)


def with_slopes(x, w, sizes):
    """Both gradients: products with the matrices the other way round, and of the rows of each group."""
    return jax.value_and_grad(squares, argnums=(0, 1))(x, w, sizes)


def kinds(program):
    return [op.kind for op in program.ops]


def by_numpy(x, w, sizes):
    ends = np.cumsum(sizes)
    parts = [x[end - size:end] @ matrix for end, size, matrix in zip(ends, sizes, w, strict=True)]
    return np.concatenate([*parts, np.zeros((len(x) - ends[-1], w.shape[2]), x.dtype)])


@pytest.mark.parametrize("sizes", [(2, 3, 1), (6, 0, 0), (0, 1, 2), (0, 0, 0)])
def test_rows_are_multiplied_with_the_matrix_of_their_group_and_those_behind_are_zeros(sizes):
    arrays = X, W, np.array(sizes, np.int32)
    program = from_jax(jax.lax.ragged_dot, *arrays)
    assert kinds(program)[-4:] == ["dispatch", "einsum", "combine", "reshape"]
    assert_array_equal(ir.interpret(program, arrays).outputs[0], by_numpy(*arrays))


@pytest.mark.parametrize("sizes", [(2, 3, 1), (0, 1, 2)])
def test_gradients_of_jax_and_those_of_the_program_are_equal(sizes):
    arrays = X, W, np.array(sizes, np.int32)
    expected = jax.tree.leaves(with_slopes(*arrays))
    of_jax = from_jax(with_slopes, *arrays)
    rows = ir.TensorType("f32", (ROWS // 2 * B, INNER))
    symbolic = from_jax(squares, rows, *[ir.TensorType(a.dtype, a.shape) for a in arrays[1:]])
    own = ir.gradient(symbolic.specialize(B=2), ["x", "w"], keep_outputs=True)
    for program in (of_jax, own):
        assert kinds(program).count("einsum") >= 3 and "dispatch" in kinds(program)
        for found, wanted in zip(ir.interpret(program, arrays).outputs, expected, strict=True):
            assert_array_equal(found, wanted)


def test_a_module_for_tpus_has_the_same_products():
    arrays = X, W, np.array((1, 0, 4), np.int32)
    text = export.export(jax.jit(with_slopes), platforms=["tpu"])(*arrays).mlir_module()
    program = from_stablehlo(text)
    assert kinds(program).count("combine") == 2 and kinds(program).count("dispatch") == 4
    for found, wanted in zip(ir.interpret(program, arrays).outputs, jax.tree.leaves(with_slopes(*arrays)), strict=True):
        assert_array_equal(found, wanted)


def test_batches_of_groups_are_as_jax_lowers_them():
    arrays = np.stack([X, -X]), np.stack([W, W + 1]), np.array([[1, 0, 4], [2, 2, 2]], np.int32)
    program = from_jax(jax.vmap(jax.lax.ragged_dot), *arrays)
    assert "dispatch" not in kinds(program)
    found, = ir.interpret(program, arrays).outputs
    assert_array_equal(found, np.stack([by_numpy(*each) for each in zip(*arrays, strict=True)]))


def test_a_simulation_counts_each_row_once():
    types = [ir.TensorType("bf16", shape) for shape in ((4096, 1024), (8, 1024, 2048))]
    grouped = from_jax(jax.lax.ragged_dot, *types, ir.TensorType("i32", (8,)))
    flops = sum(event.flops for event in simulate(grouped, "dgx-h100", mesh=Mesh(dp=1)).events if event.name == "einsum")
    assert flops == 2 * 4096 * 1024 * 2048


def experts(p, x, y):
    """A layer of experts as it is written in JAX: rows are sorted by their expert, and put back."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=GROUPS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(x[order // 2], p["up"], sizes))
    made = jax.lax.ragged_dot(hidden, p["down"], sizes) * gates.reshape(-1)[order][:, None]
    return jnp.mean((jnp.zeros_like(x).at[order // 2].add(made) - y) ** 2)


@pytest.mark.takes_seconds
def test_a_layer_of_experts_is_planned_as_a_whole():
    pytest.importorskip("scipy")
    f32 = lambda *shape: ir.TensorType("f32", shape)
    weights = {"router": f32(INNER, GROUPS), "up": f32(GROUPS, INNER, OUTER), "down": f32(GROUPS, OUTER, INNER)}
    program = from_jax(experts, weights, f32(B, INNER), f32(B, INNER))
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=12, strategies="auto").best.seconds > 0
