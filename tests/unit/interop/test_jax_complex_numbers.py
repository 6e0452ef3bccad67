"""Complex numbers and Fourier transforms inside of functions of JAX are pairs of real arrays, and give what JAX gives."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402

from parallelism import Mesh, ir, simulate  # noqa: E402
from parallelism.interop import from_jax  # noqa: E402
from parallelism.interop.complex_numbers import numbers_in  # noqa: E402
from parallelism.layouts import annotate  # noqa: E402

RNG = np.random.default_rng(3)
X, Y = (RNG.normal(size=shape).astype("f4") for shape in ((3, 4, 6), (3, 6, 5)))


def parts(z):
    return z.real, z.imag


def turned(x):
    """Rotary positions as complex numbers."""
    angles = jnp.exp(1j * jnp.arange(4)[:, None] * jnp.arange(3))
    return jnp.stack(parts(jax.lax.complex(x[..., ::2], x[..., 1::2]) * angles), -1)


CASES = {
    "fft": (lambda x: parts(jnp.fft.fft(x)), X),
    "fft of a vector": (lambda x: jnp.abs(jnp.fft.fft(x)), X[0, 0]),
    "fft of another dim, of 5": (lambda y: parts(jnp.fft.fft(y, axis=1)), Y),
    "rfft": (lambda x: jnp.abs(jnp.fft.rfft(x)), X),
    "rfft of 1,000": (lambda x: jnp.abs(jnp.fft.rfft(x)), RNG.normal(size=(2, 1000)).astype("f4")),
    "irfft": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2j), X),
    "irfft of 5": (lambda y: jnp.fft.irfft(jnp.fft.rfft(y), 5), Y),
    "two dims": (lambda x: parts(jnp.fft.ifft2(jnp.fft.fft2(x) * (1 + 2j))), X),
    "three dims": (lambda x: jnp.fft.irfftn(jnp.fft.rfftn(x), x.shape), X),
    "a convolution": (lambda x, y: jnp.fft.irfft(jnp.fft.rfft(x[:, 0]) * jnp.fft.rfft(y[:, :, 0]), 6), X, Y),
    "products": (lambda x, y: parts((x * (1 - 1j)) @ (y + 1j * y * y)), X, Y),
    "elementwise": (lambda x: (jnp.exp(1j * x).sum((0, 1)).imag, *parts((x + 1j) / (x * x + 2j * x)), jnp.log(x + 1j).imag,
                               jnp.angle(x + 2j), -(x - 1j).imag, (x + 1j == x + 1j).sum(), (x + 1j != x - 1j).sum()), X),
    "moved": (lambda x: jnp.concatenate([(x + 1j).reshape(3, 24), (x * 1j).transpose(0, 2, 1).reshape(3, 24)[:, ::-1]], 1)[
        :, 3:40].imag, X),
    "chosen": (lambda x: (jnp.where(x > 0, x + 1j * x, 2j).conj().imag, (x + 2j)[jnp.array([2, 0])].imag), X),
    "a table": (lambda x: (x[:, :, 0] * np.array([1, 2j, 3, 4 + 1j], np.complex64)).imag, X),
    "a function inside": (lambda x: jax.jit(lambda z: z * 1j)(x + 0j).imag, X),
    "a gradient": (jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(x)) ** 2 / 2)), X),
    "rotary positions": (turned, X),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_a_function_with_complex_numbers_gives_what_jax_gives(name):
    function, *given = CASES[name]
    expected = jax.tree.leaves(jax.jit(function)(*given))
    found = ir.interpret(from_jax(function, *given), given).outputs
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * max(1, np.abs(theirs).max()))


def test_a_transform_is_split_over_its_rows():
    program = from_jax(lambda x: jnp.abs(jnp.fft.rfft(x)), jax.ShapeDtypeStruct((8, 6), "float32"))
    trace = simulate(annotate(program, {"x": "[dp, None]"}), "dgx-h100:1", mesh=Mesh(dp=4))
    assert trace.count("all_gather") == 0 and trace.makespan_seconds > 0


def test_complex_inputs_are_refused_by_type():
    with pytest.raises(TypeError, match="got complex64"):
        from_jax(lambda z: z.real, jax.ShapeDtypeStruct((3, 3), "complex64"))


@pytest.mark.parametrize(("text", "numbers"), [
    ("dense<(1.0,-2.5)> : tensor<2xcomplex<f32>>", [1 - 2.5j, 1 - 2.5j]),
    ("dense<[(0x7F800000,0.0), (1.0e+00,0xC0000000)]> : tensor<2xcomplex<f32>>", [complex(np.inf, 0), 1 - 2j]),
    ('dense<"0x0000803F000000400000404000008040"> : tensor<2xcomplex<f32>>', [1 + 2j, 3 + 4j])])
def test_complex_constants_as_they_are_written(text, numbers):
    assert numbers_in(text, [2]).tolist() == numbers
    assert numbers_in("dense_resource<x> : tensor<2xcomplex<f32>>", [2]) is None
