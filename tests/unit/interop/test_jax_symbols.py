"""JAX with a symbolic batch: shapes with symbols go through ``jax.export``, and open extents of StableHLO are symbols."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import InteropError, UnsupportedError, from_jax, from_stablehlo  # noqa: E402
from parallelism.planning import find_plan  # noqa: E402

B, T = ir.symbols("B T")


def f32(*shape):
    return ir.TensorType("f32", shape)


def language_loss(p, ids, targets):
    x = p["words"][ids]
    for layer in p["layers"]:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = (jnp.reshape(y @ layer[n], (*y.shape[:2], 2, 4)) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
        x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v).reshape(y.shape) @ layer["o"]
        x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]
    logs = jax.nn.log_softmax(x @ p["words"].T)
    return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], -1))


LAYER = {name: f32(8, 8) for name in "qkvo"} | {"up": f32(8, 12), "down": f32(12, 8)}
WEIGHTS = {"words": f32(31, 8), "layers": [LAYER, LAYER]}


def drawn(types, seed=0):
    rng = np.random.default_rng(seed)
    is_type = lambda t: isinstance(t, ir.TensorType)
    return jax.tree.map(lambda t: rng.normal(size=t.shape).astype("f4") / 4, types, is_leaf=is_type)


@pytest.mark.slow
@pytest.mark.parametrize("time", [6, T])
def test_a_language_model_with_a_symbolic_batch_and_time(time):
    tokens = ir.TensorType("i32", (B, time))
    program = from_jax(language_loss, WEIGHTS, tokens, tokens)
    assert program.symbols == ({"B"} if time == 6 else {"B", "T"})
    assert [value.name for value in program.inputs[:2]] == ["p.layers.0.down", "p.layers.0.k"]
    rng, weights = np.random.default_rng(1), drawn(WEIGHTS)
    for rows in (1, 3):
        ids, targets = rng.integers(0, 31, (2, rows, 6)).astype("i4")
        found, = ir.interpret(program, [*jax.tree.leaves(weights), ids, targets]).outputs
        assert_allclose(found, language_loss(weights, ids, targets), rtol=1e-5)


@pytest.mark.slow
def test_such_a_loss_is_planned():
    tokens = ir.TensorType("i32", (B, 6))
    program = from_jax(language_loss, {**WEIGHTS, "layers": []}, tokens, tokens)
    assert any(op.kind == "take_along" for op in program.ops)
    assert find_plan(program, hardware="dgx-h100", devices=2, batch=8, tp=1).best.seconds > 0


FUNCTIONS = {
    "sizes in numbers": (lambda x: x / x.shape[0] + x.shape[1], [f32(B, 3)]),
    "sorted along a symbol": (lambda x: (jnp.sort(x, 0), jnp.argsort(-x, 0), x[jnp.argsort(x[:, 0])]), [f32(B, 3)]),
    "rows of experts": (
        lambda x, w: jax.lax.ragged_dot(x, w, jnp.bincount(jnp.abs(x[:, 0] * 9).astype(int) % 3, length=3)),
        [f32(B, 4), f32(3, 4, 5)]),
    "joined": (lambda x, y: jnp.concatenate([x, y]), [f32(B, 3), f32(T, 3)]),
    "a slice": (lambda x: x[1:-1, ::2], [f32(B, 5)]),
    "parts of the last dim": (lambda x: (x[..., :2], x[..., 2:], jnp.split(x, [1, 4], -1)), [f32(B, 2, 5)]),
    "padded": (lambda x: jnp.pad(x, ((2, 1), (0, 0))), [f32(B, 3)]),
    "counted": (lambda x: jnp.arange(x.shape[0], dtype=jnp.float32) + x, [f32(B)]),
    "picked": (lambda x, i: x[jnp.arange(x.shape[0]), i], [f32(B, 7), ir.TensorType("i32", (B,))]),
    "reshaped": (lambda x: x.reshape(x.shape[0] * 2, -1), [f32(B, 6)]),
    "products": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [f32(B, 2, 3), f32(B, 3, 4)]),
    "convolved": (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), [f32(B, 3, 6, 5), f32(4, 3, 3, 3)]),
    "largest": (lambda x: (jnp.max(x, 1), jnp.argmax(x, 1)), [f32(B, 5)]),
    "gradients": (jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w))), [f32(3, 4), f32(B, 3)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_open_shapes(name):
    function, types = FUNCTIONS[name]
    program = from_jax(function, *types)
    assert program.symbols
    for numbers in ({"B": 4, "T": 3}, {"B": 6, "T": 2}):
        rng = np.random.default_rng(7)
        given = []
        for type in types:
            shape = type.specialize(numbers).shape
            numbers_of = rng.normal(size=shape) if type.dtype == "f4" else rng.integers(0, 7, shape)
            given.append(numbers_of.astype(type.dtype))
        found = ir.interpret(program, given).outputs
        for ours, theirs in zip(found, jax.tree.leaves(function(*given)), strict=True):
            assert ours.dtype == theirs.dtype
            assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_part_at_known_places_is_a_slice():
    program = from_jax(lambda x: jnp.concatenate([x[..., 2:], x[..., :2]], -1), f32(B, 3, 5))
    assert [op.kind for op in program.ops] == ["slice", "slice", "concatenate"]
    assert program.ops[0]["begin"] == 2 and program.ops[1]["end"] == 2


@pytest.mark.slow
def test_open_extents_of_a_module_have_the_names_that_jax_gave_them():
    rows, = export.symbolic_shape("rows")
    made = jax.ShapeDtypeStruct
    found = export.export(jax.jit(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))(
        made((4, 2), jnp.float32), made((rows, 4), jnp.float32), made((rows, 2), jnp.float32))
    program = from_stablehlo(found.mlir_module())
    assert [str(value.type)[7:-1] for value in program.inputs] == ["4x2xf32", "(rows)x4xf32", "(rows)x2xf32"]
    w, x, y = (np.arange(n, dtype=np.float32).reshape(-1, c) for n, c in ((8, 2), (12, 4), (6, 2)))
    assert_allclose(ir.interpret(program, [w, x, y]).outputs[0], np.mean((x @ w - y) ** 2), rtol=1e-6)


def test_an_open_extent_without_a_name_has_that_of_its_argument():
    program = from_stablehlo('''func.func @main(%x: tensor<?x3xf32>) -> tensor<?x3xf32> {
      %0 = stablehlo.add %x, %x : tensor<?x3xf32>
      return %0 : tensor<?x3xf32>
    }''')
    assert program.symbols == {"arg0_0"}
    assert ir.interpret(program, [np.ones((2, 3), np.float32)]).outputs[0].tolist() == [[2, 2, 2]] * 2


def test_an_extent_that_depends_on_numbers_is_refused():
    with pytest.raises(UnsupportedError, match="the shape must be known, or follow from extents of arguments"):
        from_stablehlo('''func.func @main(%x: tensor<3xf32>, %n: tensor<1xi32>) -> tensor<?xf32> {
          %0 = stablehlo.dynamic_reshape %x, %n : (tensor<3xf32>, tensor<1xi32>) -> tensor<?xf32>
          return %0 : tensor<?xf32>
        }''')


def test_what_jax_cannot_say_with_symbols_is_one_error():
    with pytest.raises(InteropError, match=r"JAX cannot export it with these symbols: Cannot divide evenly .*B"):
        from_jax(lambda x: x.reshape(3, -1), f32(B, 2))


def test_open_extents_that_must_be_equal_are_one_symbol_or_a_number():
    """Operands of one shape, and of a product, say so; the first argument has the name."""
    program = from_stablehlo('''func.func @main(%x: tensor<?x4xf32>, %w: tensor<?x3xf32>, %y: tensor<?x?xf32>,
                                                %z: tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?x?xf32>) {
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<?x4xf32>, tensor<?x3xf32>) -> tensor<?x3xf32>
      %1 = stablehlo.add %0, %y : (tensor<?x3xf32>, tensor<?x?xf32>) -> tensor<?x3xf32>
      %2 = stablehlo.transpose %z, dims = [1, 0] : (tensor<?x?xf32>) -> tensor<?x?xf32>
      %3 = stablehlo.dot_general %2, %1, contracting_dims = [1] x [0] : (tensor<?x?xf32>, tensor<?x3xf32>) -> tensor<?x?xf32>
      %4 = stablehlo.constant dense<0.0> : tensor<f32>
      %5 = stablehlo.reduce(%1 init: %4) applies stablehlo.add across dimensions = [1]
          : (tensor<?x3xf32>, tensor<f32>) -> tensor<?xf32>
      return %5, %3 : tensor<?xf32>, tensor<?x?xf32>
    }''', names=["x", "w", "y", "z"])
    rows, others = ir.symbol("x_0"), ir.symbol("z_1")
    assert [value.type.shape for value in program.inputs] == [(rows, 4), (4, 3), (rows, 3), (rows, others)]
    assert [value.type.shape for value in program.outputs] == [(rows,), (others, 3)]
    rng = np.random.default_rng(0)
    x, w, y, z = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 4), (4, 3), (5, 3), (5, 2)))
    found = ir.interpret(program, [x, w, y, z]).outputs
    assert_allclose(found[0], (x @ w + y).sum(1), rtol=1e-5)
    assert_allclose(found[1], z.T @ (x @ w + y), rtol=1e-5)


def test_an_open_extent_behind_an_op_without_a_rule_stays_one_of_its_own():
    program = from_stablehlo('''func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>) {
      %0 = stablehlo.reverse %x, dims = [0] : tensor<?xf32>
      return %0, %y : tensor<?xf32>, tensor<?xf32>
    }''', names=["x", "y"])
    assert [str(value.type.shape[0]) for value in program.inputs] == ["x_0", "y_0"]


def test_a_constant_that_has_no_elements_is_spread_along_a_symbol():
    program = from_jax(lambda x: (x, jnp.broadcast_to(jnp.ones((1, 0, 4)), (x.shape[0], 0, 4))), f32(B, 3))
    assert [value.type for value in program.outputs] == [f32(B, 3), f32(B, 0, 4)]


@pytest.mark.takes_seconds
@pytest.mark.parametrize("function", [
    lambda x: jax.nn.gelu(x, approximate=False), jax.lax.erf, lambda x: jax.lax.erfc(3 * x), jax.lax.erf_inv])
def test_error_functions_have_slopes_at_zero(function):
    x = np.array([[-0.75, -1e-30, 0.0, 1e-20, 0.25, 0.875]], np.float32)
    loss = lambda w, x: jnp.sum(function(x * w))
    weights = np.ones(6, np.float32)
    program = from_jax(loss, weights, ir.TensorType("f32", (ir.symbol("B"), 6))).specialize(B=1)
    found = ir.interpret(ir.gradient(program, ["w", "x"], keep_outputs=True), {"w": weights, "x": x}).outputs
    expected = loss(weights, x), *jax.grad(loss, (0, 1))(weights, x)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
