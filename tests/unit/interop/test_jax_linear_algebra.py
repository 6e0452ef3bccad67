"""Factors and triangular systems of JAX and StableHLO: their numbers are those of JAX and NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import UnsupportedError, from_jax, from_stablehlo  # noqa: E402

RNG = np.random.default_rng(6)
A = RNG.normal(size=(2, 5, 5)).astype(np.float32) + 4 * np.eye(5, dtype=np.float32)
S = A @ A.transpose(0, 2, 1)
B = RNG.normal(size=(2, 5, 3)).astype(np.float32)
FUNCTIONS = {
    "cholesky": (jnp.linalg.cholesky, S[0]),
    "cholesky of several": (jnp.linalg.cholesky, S),
    "the upper factor": (lambda s: jnp.linalg.cholesky(s, upper=True), S[1]),
    "a factored system": (lambda s, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(s), True), b), S[0], B[0]),
    "a triangular system": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True, trans=1), A[0], B[0]),
    "the slope of a factor": (jax.grad(lambda s: jnp.sum(jnp.linalg.cholesky(s) ** 3)), S[0]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_numbers_of_jax(name):
    function, *arrays = FUNCTIONS[name]
    found, = ir.interpret(from_jax(function, *arrays), arrays).outputs
    expected = np.asarray(function(*arrays))
    assert found.dtype == expected.dtype
    assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("left", "lower", "unit", "turned"), [*product((True, False), repeat=4)])
def test_a_triangular_solve_solves_its_system(left, lower, unit, turned):
    shapes = "tensor<2x5x5xf32>", f"tensor<2x{'5x3' if left else '3x5'}xf32>"
    words = [str(each).lower() for each in (left, lower, unit)]
    program = from_stablehlo(f"""module {{
  func.func public @main(%a: {shapes[0]}, %b: {shapes[1]}) -> {shapes[1]} {{
    %0 = "stablehlo.triangular_solve"(%a, %b) {{left_side = {words[0]}, lower = {words[1]}, unit_diagonal = {words[2]},
      transpose_a = #stablehlo<transpose {'TRANSPOSE' if turned else 'NO_TRANSPOSE'}>}} :
      ({shapes[0]}, {shapes[1]}) -> {shapes[1]}
    return %0 : {shapes[1]}
  }}
}}""")
    b = B if left else np.ascontiguousarray(B.transpose(0, 2, 1))
    found, = ir.interpret(program, [A, b]).outputs
    part = np.tril(A, -1) if lower else np.triu(A, 1)
    part = part + (np.eye(5) if unit else np.eye(5) * A)
    part = part.transpose(0, 2, 1) if turned else part
    assert_allclose(part @ found if left else found @ part, b, rtol=1e-3, atol=1e-3)


def test_a_large_matrix_is_refused():
    with pytest.raises(UnsupportedError, match="matrices of at most 64 rows, got 65"):
        from_jax(jnp.linalg.cholesky, np.eye(65, dtype=np.float32))
