"""NumPy as people write it: whole programs, recorded, make what NumPy makes; so do their gradients."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from parallelism import ir

RNG = np.random.default_rng(3)


def draw(*shape):
    return RNG.normal(size=shape)


def below(bound, *shape):
    return RNG.integers(0, bound, shape)


PROGRAMS = {}


def program(*arrays):
    def keep(function):
        PROGRAMS[function.__name__] = (function, arrays)
        return function

    return keep


# -- networks ----------------------------------------------------------------------------------------------------------


@program(draw(4, 6), below(6, 4))
def cross_entropy(x, y):
    z = x - np.max(x, axis=-1, keepdims=True)
    z -= np.log(np.sum(np.exp(z), axis=-1, keepdims=True))
    return -z[np.arange(len(y)), y].mean()


@program(draw(2, 2, 5, 3), draw(2, 2, 5, 3), draw(2, 2, 5, 3))
def attention(q, k, v):
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v


@program(draw(2, 2, 5, 3), draw(2, 2, 5, 3), draw(2, 2, 5, 3))
def attention_otherwise(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores = np.where(np.tril(np.ones(scores.shape[-2:])) == 0, -1e9, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


@program(draw(5, 6))
def rotary(x):
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] / 10 ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


@program(draw(2, 5, 6))
def positions(x):
    table, places = np.zeros(x.shape[1:]), np.arange(x.shape[1])[:, None]
    table[:, 0::2], table[:, 1::2] = np.sin(places), np.cos(places)
    return x + table


@program(draw(2, 4, 3), draw(3, 5), draw(5, 5), draw(2, 5))
def recurrent(x, w, u, h):
    out = []
    for t in range(x.shape[1]):
        h = np.tanh(x[:, t] @ w + h @ u)
        out.append(h)
    return np.stack(out, axis=1)


@program(draw(4, 3), draw(5, 8), draw(2), draw(2))
def lstm(x, w, h, c):
    for step in x:
        i, f, g, o = np.split(np.concatenate([step, h]) @ w, 4)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
    return h, c


@program(draw(2, 6, 5, 3))
def patches(x, k=3):
    n, h, w, c = x.shape
    cols = np.zeros_like(x, shape=(n, h - k + 1, w - k + 1, k, k, c))
    for i in range(k):
        for j in range(k):
            cols[:, :, :, i, j, :] = x[:, i:i + h - k + 1, j:j + w - k + 1, :]
    return cols.reshape(n, -1, k * k * c)


@program(draw(2, 7, 3), draw(3, 3, 4))
def convolution(x, w):
    return sum(x[:, i:i + x.shape[1] - len(w) + 1] @ w[i] for i in range(len(w)))


@program(draw(2, 4, 6, 3))
def pooling(x):
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))


@program(draw(7, 3), draw(3), draw(3))
def batch_norm(x, weight, bias):
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * weight + bias


@program(draw(3, 4))
def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


@program(draw(2, 3), draw(3, 4), draw(3, 4))
def swiglu(x, a, b):
    h = x @ a
    return (h / (1 + np.exp(-h)) * (x @ b)).sum()


@program(draw(7, 3), below(7, 4, 5))
def bag_of_words(table, tokens):
    return table[tokens].mean(axis=1) @ table.T


@program(draw(5, 4))
def router(x, k=2):
    best = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    gates = np.exp(np.take_along_axis(x, best, axis=-1))
    return gates / gates.sum(-1, keepdims=True)


@program(draw(5, 3), below(4, 5))
def one_hot(x, y):
    return (y[:, None] == np.arange(4)).astype(x.dtype).T @ x


# -- losses and training -----------------------------------------------------------------------------------------------


@program(draw(3, 4), draw(3, 4))
def huber(a, b):
    error = np.abs(a - b)
    return np.mean(np.where(error < 1, 0.5 * error ** 2, error - 0.5))


@program(draw(3, 4), draw(3, 4))
def cosine(a, b):
    return np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


@program(draw(4, 3), draw(4, 3))
def contrastive(a, b):
    logits = np.inner(a, b) / 0.5
    return np.mean(np.log(np.exp(logits).sum(axis=1)) - np.diag(logits))


@program(draw(3, 2), draw(3, 2), draw(3, 2), draw(3, 2) ** 2)
def adam(w, g, m, v):
    m *= 0.9
    m += 0.1 * g
    v *= 0.99
    v += 0.01 * g ** 2
    w -= 0.001 * (m / (1 - 0.9 ** 3)) / (np.sqrt(v / (1 - 0.99 ** 3)) + 1e-8)
    return w, m, v


@program(draw(3, 4), draw(2))
def clipped(g, h):
    norm = np.sqrt(sum((x ** 2).sum() for x in (g, h)))
    return g * np.minimum(1, 1 / norm), h * np.minimum(1, 1 / norm)


@program(draw(3), draw(8, 3), below(2, 8))
def logistic_regression(w, x, y):
    for _ in range(3):
        p = 1 / (1 + np.exp(-(x @ w)))
        w = w - 0.1 * x.T @ (p - y) / len(y)
    return w


@program(draw(5, 3), draw(3, 4), draw(4, 2), draw(5, 2))
def backward_by_hand(x, w1, w2, y):
    hidden = x @ w1
    mask = hidden > 0
    hidden = hidden * mask
    grad = 2 * (hidden @ w2 - y) / len(x)
    back = grad @ w2.T
    back[~mask] = 0
    return x.T @ back, hidden.T @ grad


# -- other things that are computed ------------------------------------------------------------------------------------


@program(draw(9, 2), draw(3, 2))
def k_means(x, centres):
    nearest = ((x[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
    members = (nearest[:, None] == np.arange(len(centres))).astype(x.dtype)
    return members.T @ x / np.maximum(members.sum(0), 1)[:, None]


@program(draw(4, 4))
def power_iteration(a):
    v = np.ones(a.shape[0])
    for _ in range(5):
        v = a @ v
        v /= np.linalg.norm(v)
    return v @ a @ v


@program(draw(6, 7))
def heat(u):
    for _ in range(3):
        u[1:-1, 1:-1] = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    return u


@program(below(2, 6, 7))
def life(cells):
    around = sum(np.roll(np.roll(cells, i, 0), j, 1) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
    return ((around == 3) | ((cells == 1) & (around == 2))).astype(cells.dtype)


@program(draw(4))
def polynomial(x):
    total = np.zeros_like(x)
    for c in (3.0, -1.0, 0.5, 2.0):
        total = total * x + c
    return total


@program(draw(5, 2))
def distances(x):
    squares = np.sum(x ** 2, axis=1)
    return np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0)


@program(draw(3, 3))
def gauss(a):
    a = a + 5 * np.eye(3)
    for i in range(3):
        for j in range(i + 1, 3):
            a[j] -= a[j, i] / a[i, i] * a[i]
    return np.prod(np.diagonal(a))


@program(draw(8))
def smoothed(x):
    return np.lib.stride_tricks.sliding_window_view(np.pad(x, 1, mode="edge"), 3).mean(axis=-1)


@program(draw(10, 3))
def whitened(x):
    centred = x - x.mean(0)
    return np.tensordot(centred, centred, axes=(0, 0)) / (len(x) - 1)


@program(draw(6, 2))
def trimmed_mean(x):
    return np.sort(x, axis=0)[1:-1].mean(axis=0)


# -- what holds --------------------------------------------------------------------------------------------------------


def recorded(name):
    function, arrays = PROGRAMS[name]
    return function, arrays, ir.record(function, *(ir.TensorType(x.dtype, x.shape) for x in arrays))


def test_there_are_thirty_of_them():
    assert len(PROGRAMS) >= 30


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_makes_what_numpy_makes(name):
    function, arrays, found = recorded(name)
    assert ir.parse(str(found)) == found
    expected = function(*(x.copy() for x in arrays))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b in zip(ir.interpret(found, arrays).outputs, expected, strict=True):
        assert a.dtype == np.asarray(b).dtype
        assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"life"}))
def test_the_gradient_of_a_program_is_that_of_central_differences(name):
    function, arrays, found = recorded(name)
    directions = [np.random.default_rng(5).normal(size=x.shape) if x.dtype.kind == "f" else 0 for x in arrays]

    def total(step):
        moved = [x + step * d if x.dtype.kind == "f" else x.copy() for x, d in zip(arrays, directions, strict=True)]
        made = function(*moved)
        return sum(np.sum(y) for y in (made if isinstance(made, tuple) else (made,)))

    alone = len(found.outputs) == 1 and not found.outputs[0].type.shape
    seeds = [] if alone else [np.ones(value.type.shape) for value in found.outputs]
    grads = iter(ir.interpret(ir.gradient(found), [*arrays, *seeds]).outputs)
    along = sum(np.sum(next(grads) * d) for x, d in zip(arrays, directions, strict=True) if x.dtype.kind == "f")
    assert_allclose(along, (total(1e-6) - total(-1e-6)) / 2e-6, rtol=1e-5, atol=1e-7)
