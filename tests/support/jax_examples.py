"""Functions of JAX, each with its arguments: what the tests of StableHLO go through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(7)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.normal(size=shape).astype(dtype)


def ints(bound: int, *shape: int, dtype: Any = np.int32) -> Any:
    return RNG.integers(0, bound, shape).astype(dtype)


def layer_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def transformer_block(p, x):
    batch, length, width = x.shape
    h = layer_norm(x, p["ln1"], p["b1"])
    q, k, v = (jnp.reshape(h @ p[name], (batch, length, 2, width // 2)).transpose(0, 2, 1, 3) for name in "qkv")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // 2)
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, width) @ p["o"]
    h = jax.nn.gelu(layer_norm(x, p["ln2"], p["b2"]) @ p["up"])
    return x + h @ p["down"]


def block_parameters(width=8):
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width),
              "up": (width, 3 * width), "down": (3 * width, width)}
    vectors = {name: floats(width) for name in ("ln1", "b1", "ln2", "b2")}
    return {name: floats(*shape) * 0.3 for name, shape in shapes.items()} | vectors


def loss(p, x, targets):
    logits = transformer_block(p, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def rnn(w, u, xs):
    def step(h, x):
        h = jnp.tanh(h @ w + x @ u)
        return h, h.sum()

    return lax.scan(step, jnp.zeros((xs.shape[1], w.shape[0])), xs)


def image_net(w1, w2, x):
    x = lax.conv_general_dilated(x, w1, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = lax.conv_general_dilated(x, w2, (1, 1), ((1, 0), (0, 2)), rhs_dilation=(1, 2), feature_group_count=2,
                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x.mean((1, 2))


def adam_step(p, m, v, x):
    grad = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p) ** 2))(p)
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
    return p - 1e-2 * m / (jnp.sqrt(v) + 1e-8), m, v


def _images():
    return floats(3, 3, 2, 4), floats(3, 2, 2, 6), floats(2, 9, 8, 2)


P = block_parameters()
X = floats(2, 5, 8)
EXAMPLES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "transformer block": (transformer_block, (P, X)),
    "gradients of a transformer block": (jax.value_and_grad(loss), (P, X, ints(8, 2, 5))),
    "a vmap over a block": (jax.vmap(transformer_block, (None, 0)), (P, floats(3, 2, 5, 8))),
    "a hessian": (jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x[0])), (floats(4),)),
    "a jacobian forward": (jax.jacfwd(lambda x: jnp.cumsum(x) * x), (floats(5),)),
    "scan": (rnn, (floats(3, 3), floats(2, 3), floats(6, 4, 2))),
    "gradient of a scan": (jax.grad(lambda w, u, xs: rnn(w, u, xs)[1].sum()), (floats(3, 3), floats(2, 3),
                                                                                floats(6, 4, 2))),
    "fori_loop": (lambda x: lax.fori_loop(0, 7, lambda i, y: y * 0.5 + i, x), (floats(3),)),
    "a long scan": (lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0], x), (floats(40, 3),)),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), (floats(9, 2),)),
    "convolutions": (image_net, _images()),
    "gradients of convolutions": (jax.grad(lambda *a: jnp.sum(image_net(*a) ** 2), (0, 1, 2)), _images()),
    "a convolution in one dim": (lambda x, w: lax.conv_general_dilated(x, w, (1,), [(2, 1)]),
                                 (floats(2, 3, 7), floats(4, 3, 3))),
    "a transposed convolution": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
                                 (floats(1, 4, 5, 3), floats(3, 3, 3, 2))),
    "depthwise": (lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=4),
                  (floats(1, 4, 5, 6), floats(4, 1, 3, 3))),
    "average pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2), (1, 2, 1), "SAME"), (floats(2, 7, 5),)),
    "gradient of a max pool": (jax.grad(lambda x: jnp.sum(lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 3), (1, 2, 1), "SAME") ** 2)), (floats(2, 7, 5),)),
    "windows of any reducer": (lambda x: lax.reduce_window(
        x, 1.0, lambda a, b: a * b, (3,), (1,), [(1, 1)]), (floats(6),)),
    "cumulative sums": (lambda x: (jnp.cumsum(x, 0), lax.cumsum(x, 1, reverse=True), lax.cummax(x, 0),
                                   jnp.cumprod(x, 1)), (floats(4, 5),)),
    "elementwise": (lambda x: (jnp.exp(x), jnp.log1p(jnp.abs(x)), jnp.expm1(x), jnp.sqrt(jnp.abs(x)), lax.rsqrt(
        jnp.abs(x) + 1), jnp.tanh(x), jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.cbrt(x), jnp.floor(x), jnp.ceil(x),
        jnp.round(x), lax.round(x), jnp.sign(x), jax.nn.sigmoid(x), jnp.isfinite(x), -x, jnp.arctan2(x, x + 1)),
        (floats(3, 4),)),
    "special functions": (lambda x: (
        lax.erf(x), lax.erfc(x), lax.erf_inv(jnp.tanh(x)), lax.lgamma(jnp.abs(x) + 0.1), lax.digamma(x), jnp.arcsinh(x),
        jnp.arccosh(jnp.abs(x) + 1.5), jnp.arctanh(jnp.tanh(x)), jnp.sinh(x), jnp.cosh(x), jnp.arcsin(jnp.tanh(x)),
        jnp.arccos(jnp.tanh(x)), jnp.arctan(x)), (floats(20),)),
    "integers": (lambda a, b: (a // (b + 1), a % (b + 1), lax.div(-a, b + 1), lax.rem(-a, b + 1), a << 2, (-a) >> 1,
                               lax.shift_right_logical(-a, 3), a & b, a | b, a ^ b, ~a, lax.population_count(a),
                               lax.clz(a), jnp.clip(a, 2, 5), abs(-a), jnp.maximum(a, b), a.astype(jnp.float32)),
                 (ints(99, 3, 4), ints(9, 3, 4))),
    "unsigned and small integers": (lambda a: (a * 77, a - 3, a >> 1, a.astype(jnp.int8), a.astype(jnp.uint16) * 999),
                                    (ints(200, 7, dtype=np.uint8),)),
    "bools": (lambda a, b: (a & b, a | ~b, a ^ b, jnp.any(a, 0), jnp.all(b), jnp.where(a, 1.5, -2.0), a + b),
              (ints(2, 3, 4).astype(bool), ints(2, 3, 4).astype(bool))),
    "comparisons": (lambda a, b: (a < b, a <= b, a > b, a >= b, a == b, a != b), (ints(4, 9), ints(4, 9))),
    "reductions": (lambda x: (x.sum(), x.mean(0), x.max(1), x.min((0, 2)), x.prod(-1), x.var(), x.std(0), jnp.median(x),
                              jax.nn.logsumexp(x, 1), jnp.linalg.norm(x)), (floats(3, 4, 2),)),
    "argmax and argmin": (lambda x: (x.argmax(1), x.argmin(0), jnp.argmax(x)), (floats(4, 5),)),
    "a reducer of one's own": (lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)), (floats(3, 5),
                                                                                                   floats(3, 5))),
    "sorting": (lambda x: (jnp.sort(x, 0), jnp.argsort(x), jnp.sort(x, descending=True), lax.top_k(x, 2)),
                (floats(5, 4),)),
    "sorting by two keys": (lambda a, b, c: lax.sort((a, b, c), num_keys=2), (ints(3, 20), ints(4, 20), floats(20))),
    "sorting pairs": (lambda a, b: lax.sort((a, b), num_keys=1), (ints(5, 3, 8), floats(3, 8))),
    "searchsorted and unique counts": (lambda a, x: (jnp.searchsorted(a, x), jnp.bincount(
        jnp.clip(a.astype(int), 0, 3), length=4)), (np.sort(floats(9)), floats(6))),
    "indexing": (lambda x, i: (x[i], x[:, i], x[i, i + 1], x[1:3, ::2], x[-1], x[i][:, 0], jnp.take(x, i, 1)),
                 (floats(5, 6), ints(4, 3))),
    "indexing of many kinds": (lambda x, i, j: (x[i, :, j], x[:, i[:, None], j[None]], x[..., -1], x[::-1],
                                                jnp.take_along_axis(x, i[:, None, None] % 3, 0), jnp.flip(x, 1)),
                               (floats(3, 4, 5), ints(3, 2), ints(4, 2))),
    "scatters": (lambda x, i, u: (x.at[i].set(u), x.at[i].add(u), x.at[:, i].multiply(2.0), x.at[i].max(u),
                                  x.at[i, i].min(-1.0), x.at[1].set(0.0), x.at[2:4, 1:3].add(1.0)),
                 (floats(6, 6), np.array([3, 0, 3], np.int32), floats(3, 6) * 0 + 1.5)),
    "gradient of an embedding": (jax.grad(lambda e, i: jnp.sum(e[i] ** 2 * 3)), (floats(7, 3), ints(7, 2, 4))),
    "a segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), (floats(9, 2), ints(4, 9))),
    "dynamic slices": (lambda x, i: (lax.dynamic_slice(x, (i, 1), (2, 3)), lax.dynamic_update_slice(
        x, x[:2, :2] * 0, (i, i)), lax.dynamic_index_in_dim(x, i, 1)), (floats(5, 6), np.int32(4))),
    "updates at known places": (lambda x: (lax.dynamic_update_slice(x, x[:1, :2], (9, 1, 1)), x.at[1:3, ::2, 1].set(
        5.0), x.at[2, 1:].add(x[0, 1:])), (floats(4, 5, 3),)),
    "few bits": (lambda x: (lax.reduce_precision(x, 5, 2), lax.reduce_precision(x, 8, 7)), (floats(40) * 100,)),
    "shapes": (lambda x: (x.reshape(6, 4), x.T, jnp.concatenate([x, x * 2], 1), jnp.pad(x, ((1, 2), (0, 1))),
                          jnp.stack([x, x], 1), jnp.tile(x, (2, 1)), jnp.repeat(x, 2, 0), jnp.roll(x, 2, 1),
                          jnp.pad(x, 1, constant_values=3.0), jnp.pad(x, 1, "edge"), lax.pad(
                              x, 9.0, ((-1, 2, 1), (0, -1, 0)))), (floats(4, 6),)),
    "einsums": (lambda a, b: (jnp.einsum("bij,bjk->bik", a, b), jnp.einsum("bij,cjk->bcik", a, b), jnp.einsum(
        "bij->ji", a), jnp.tensordot(a, b, ((2,), (1,))), jnp.inner(a[0], a[1]), jnp.outer(a[0, 0], b[0, 0])),
        (floats(2, 3, 4), floats(2, 4, 5))),
    "branches": (lambda x, i: (lax.cond(x[0] > 0, lambda y: y * 2, lambda y: y - 1, x), lax.switch(
        i, [jnp.sin, jnp.cos, jnp.exp], x)), (floats(4), np.int32(1))),
    "float16": (lambda x: (x @ x.T, jnp.exp(x), x.sum()), (floats(4, 3, dtype=np.float16),)),
    "iota and masks": (lambda x: jnp.where(jnp.arange(90)[:, None] >= jnp.arange(90), x, 0).sum(1), (floats(90, 90),)),
    "random bits": (lambda s: (jax.random.bits(jax.random.key(s), (5,)), jax.random.uniform(jax.random.key(s), (3, 4)),
                               jax.random.randint(jax.random.key(s), (6,), 0, 10), jax.random.permutation(
                                   jax.random.key(s), 9)), (np.int32(3),)),
    "random normals": (lambda s: (jax.random.normal(jax.random.key(s), (3, 5)), jax.random.bernoulli(
        jax.random.key(s), 0.3, (7,)), jax.random.categorical(jax.random.key(s), jnp.zeros(4), shape=(5,))),
        (np.int32(3),)),
    "dropout with a split key": (lambda x, s: x * jax.random.bernoulli(jax.random.split(jax.random.key(s))[0], 0.5,
                                                                      x.shape), (floats(3, 4), np.int32(1))),
    "an optimizer's step": (adam_step, (floats(3, 4), floats(3, 4), abs(floats(3, 4)), floats(5, 3))),
    "nested functions": (lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1)(x) * 2, (floats(3),)),
    "checkpoints": (jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()), (floats(4),)),
    "a matrix power": (lambda x: jnp.linalg.matrix_power(x, 5), (floats(3, 3) * 0.5,)),
    "constants with nan and infinity": (lambda x: (jnp.where(x > 0, jnp.nan, x), jnp.where(x > 0, -jnp.inf, x)),
                                        (floats(6),)),
    "bitcasts": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (floats(5),)),
    "counter bits": (lambda k: lax.rng_bit_generator(k, (5, 3), algorithm=lax.RandomAlgorithm.RNG_PHILOX),
                     (np.array([1, 2, 3, 4], np.uint32),)),
    "more counter bits": (lambda k: lax.rng_bit_generator(k, (7,), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY),
                          (np.array([1, 2, 3, 4], np.uint32),)),
    "no arrays at all": (lambda: jnp.arange(5.0) * 2, ()),
    "empty arrays": (lambda x: (x.sum(0), jnp.concatenate([x, x]), x @ jnp.ones((4, 2))), (floats(0, 4),)),
    "polynomials and interpolation": (lambda x: (jnp.polyval(jnp.array([1.0, -2.0, 3.0]), x), jnp.interp(
        x, jnp.array([-1.0, 0.0, 2.0]), jnp.array([3.0, 1.0, 5.0]))), (floats(8),)),
}
