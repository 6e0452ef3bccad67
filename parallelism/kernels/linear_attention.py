"""Linear attention with decay, whole sequences chunk by chunk, forward and backward; and the short convolution before it.

A head keeps a state S of shape (key width, value width).  Token t, with key k, query q, value v, log-decay g and rate
beta, makes of it, and reads,

    S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T            o_t = q_t^T S_t

Under the delta rule the state first loses what it holds for this key: v_t is then v_t - k_t^T (exp(g_t) S_{t-1}).  With
k = B, q = C, v = x, beta = dt and g = dt A the first is Mamba-2 (Dao and Gu, *Transformers are SSMs*, 2024,
arXiv:2405.21060, equation 16); the second is Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464, equation 10).

In a chunk, with sums G of the log-decays from its first token on, and U of what each token adds for its key,

    U = beta V, or (1 + A) U = beta (V - exp(G) K S_0), where A_tj = beta_t exp(G_t - G_j) k_t k_j for j < t
    O = exp(G) Q S_0 + M U, where M_tj = exp(G_t - G_j) q_t k_j for j <= t

so that all is products of matrices (arXiv:2405.21060, section 6; arXiv:2412.06464, section 3.3).  Queries, keys and values
are ``(batch, tokens, heads, width)``, decays and rates ``(batch, tokens, heads)``; decays may also have a number for each
feature of a key (`parallelism.kernels.channel_decays`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels.activations import ACTIVATIONS
from parallelism.kernels.channel_decays import ChannelChunk, Chunk, sums_from

UNIT_EPSILON = 1e-6
"""What is added to the sum of the squares of a vector that is made one of length 1, as in flash-linear-attention."""


def linear_attend(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | None = None,
    *,
    chunk: int,
    delta: bool,
) -> tuple[Array, Array]:
    """What each token reads, of the shape of ``v``, and the state behind the last one; ``state`` is that before the first
    one, ``(batch, heads, key width, value width)``, and None is zeros."""
    out = np.empty(v.shape, v.dtype)
    state = _first_state(k, v) if state is None else state
    for tokens in _chunks(q.shape[1], chunk):
        part = _part(q, k, v, g, beta, state, tokens, delta=delta)
        out[:, tokens] = _by_head(part.read())
        state = part.next_state()
    return out, state


def linear_attend_backward(
    grad: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, chunk: int, delta: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of all five, given that of the result.  The state at the begin of each chunk is computed again."""
    parts, state = [], _first_state(k, v)
    for tokens in _chunks(q.shape[1], chunk):
        parts.append((tokens, _part(q, k, v, g, beta, state, tokens, delta=delta)))
        state = parts[-1][1].next_state()
    found = tuple(np.empty(x.shape, x.dtype) for x in (q, k, v, g, beta))
    of_state = np.zeros_like(state)
    for tokens, part in reversed(parts):
        of_state, *grads = part.backward(_by_head(grad[:, tokens]), of_state)
        for whole, own in zip(found, grads, strict=True):
            whole[:, tokens] = _by_head(own)
    return found  # type: ignore[return-value]


def _part(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, tokens: slice, *, delta: bool
) -> _HeadChunk | ChannelChunk:
    """The chunk of these tokens of whole sequences."""
    q, k, v, g, beta = (_by_head(x[:, tokens]) for x in (q, k, v, g, beta))
    kind = _HeadChunk if g.ndim == beta.ndim else ChannelChunk
    return kind.of(q, k, v, g, beta, state, delta=delta)


@dataclass(frozen=True)
class _HeadChunk(Chunk):
    """A chunk in which a head has one decay a token."""

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        state: Array,
        *,
        delta: bool,
    ) -> _HeadChunk:
        """The chunk of these tokens."""
        sums = np.cumsum(g, axis=-1)
        between = sums[..., :, None] - sums[..., None, :]
        between = np.exp(np.where(_earlier(g.shape[-1], itself=True), between, -np.inf))
        passed = np.exp(sums)
        left = np.exp(sums[..., -1:] - sums)
        added = beta[..., None] * v
        solved = between  # not read without the delta rule
        if delta:
            # (1 + A) U = beta V - beta exp(G) K S_0: the 1 is the diagonal, A lies below it.
            keys = k @ k.mT * between * beta[..., None]
            solved = np.where(_earlier(g.shape[-1], itself=False), keys, np.eye(g.shape[-1], dtype=k.dtype))
            right = added - (beta * passed)[..., None] * (k @ state)
            added = np.linalg.solve(solved, right)
        return cls(q, k, v, beta, state, delta, passed, left, between, solved, added)

    def read(self) -> Array:
        """What the queries read."""
        scores = self.q @ self.k.mT * self.between
        found: Array = self.passed[..., None] * (self.q @ self.state) + scores @ self.added
        return found

    def next_state(self) -> Array:
        """The state behind the chunk."""
        kept = (self.k * self.left[..., None]).mT @ self.added
        found: Array = self.passed[..., -1, None, None] * self.state + kept
        return found

    def backward(self, grad: Array, of_next: Array) -> tuple[Array, ...]:
        """The gradients of the state before the chunk, and of q, k, v, g and beta; given those of what is read, and of the
        state behind it.  ``of_x`` is the gradient of x."""
        q, k, state, added = self.q, self.k, self.state, self.added
        passed, left, between = self.passed, self.left, self.between
        # Of what is read, O = exp(G) Q S_0 + M U, where M = Q K^T * between.
        scores = q @ k.mT * between
        of_scores = grad @ added.mT
        of_products = of_scores * between
        from_state = grad @ state.mT
        of_q = of_products @ k + passed[..., None] * from_state
        of_k = of_products.mT @ q
        of_state = (q * passed[..., None]).mT @ grad
        of_added = scores.mT @ grad
        # Of the next state, S = exp(G_T) S_0 + (exp(G_T - G) K)^T U, with T the last token.
        to_state = added @ of_next.mT
        of_k += left[..., None] * to_state
        of_state += passed[..., -1, None, None] * of_next
        of_added += left[..., None] * (k @ of_next)
        # exp(G_t - G_j) stands in M, and exp(G_t) before Q S_0.
        of_pairs = of_scores * scores
        of_passed = np.vecdot(q, from_state)
        if self.delta:
            of_right = np.linalg.solve(self.solved.mT, of_added)
            read = k @ state
            more = self._of_equations(of_right, read)
            of_k += more.k
            of_state += more.state
            of_pairs += more.pairs
            of_passed += more.passed
            of_beta = np.vecdot(of_right, self.v - passed[..., None] * read) + more.beta
        else:  # U = beta V
            of_right = of_added
            of_beta = np.vecdot(of_right, self.v)
        # Behind j, G_t - G_j grows with g of the tokens after j: the later ones add, the earlier ones subtract.
        kept = np.vecdot(k, to_state) * left
        of_sums = of_pairs.sum(axis=-1) - of_pairs.sum(axis=-2) + of_passed * passed - kept
        of_sums[..., -1] += kept.sum(axis=-1) + passed[..., -1] * (state * of_next).sum(axis=(-1, -2))
        of_v = self.beta[..., None] * of_right
        return of_state, of_q, of_k, of_v, sums_from(of_sums, -1), of_beta

    def _of_equations(self, of_right: Array, read: Array) -> _OfEquations:
        """What the equations of the delta rule add to gradients, given that of their right side, and ``read``, K S_0.

            (1 + A) U = beta (V - exp(G) K S_0), where A_tj = beta_t exp(G_t - G_j) k_t k_j for j < t

        The gradient of A is that of the right side times -U^T.
        """
        k, beta = self.k, self.beta
        products = k @ k.mT
        of_solved = np.where(_earlier(k.shape[-2], itself=False), -of_right @ self.added.mT, 0)
        of_scaled = of_solved * self.between
        of_products = of_scaled * beta[..., None]
        of_read = -(beta * self.passed)[..., None] * of_right
        return _OfEquations(
            k=(of_products + of_products.mT) @ k + of_read @ self.state.mT,
            state=k.mT @ of_read,
            beta=(of_scaled * products).sum(axis=-1),
            pairs=of_products * products,
            passed=-beta * np.vecdot(of_right, read),
        )


class _OfEquations(NamedTuple):
    """What the delta rule adds to the gradients of keys, of the state before the chunk and of beta; and, for those of the
    log-decays, to the gradients of each pair of tokens (times the pair) and of what is left of that state."""

    k: Array
    state: Array
    beta: Array
    pairs: Array
    passed: Array


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """The tokens of each chunk; the last one may be shorter."""
    for first in range(0, tokens, chunk):
        yield slice(first, min(first + chunk, tokens))


def _first_state(k: Array, v: Array) -> Array:
    return np.zeros((k.shape[0], k.shape[2], k.shape[3], v.shape[3]), v.dtype)


def _earlier(tokens: int, *, itself: bool) -> Array:
    """Whether a token, by row, comes behind another one, or is it ``itself``."""
    return np.tri(tokens, tokens, 0 if itself else -1, dtype=np.bool_)


def _by_head(x: Array) -> Array:
    return x.swapaxes(1, 2)


# -- vectors of length 1 -----------------------------------------------------------------------------------------------


def unit_vectors(x: Array) -> tuple[Array, Array]:
    """``x`` divided by the length of its last dim, and what each vector was multiplied by."""
    scale: Array = (1 / np.sqrt(np.vecdot(x, x) + x.dtype.type(UNIT_EPSILON)))[..., None]
    return x * scale, scale


def unit_vectors_backward(grad: Array, y: Array, scale: Array) -> Array:
    """The gradient of ``x``, given that of y, y and the scale of `unit_vectors`."""
    found: Array = (grad - y * np.vecdot(grad, y)[..., None]) * scale
    return found


# -- the short convolution ---------------------------------------------------------------------------------------------


def short_convolution(x: Array, weight: Array, *bias: Array, plain: bool = False) -> Array:
    """The silu of sums over the last tokens, or the ``plain`` sums, of each channel by itself; the last tap is the token's
    own.

    ``x`` is ``(batch, tokens, ...)``, ``weight`` ``(..., taps)``.  Before the first token are zeros.
    """
    sums = _convolved(x, weight, *bias)
    return sums if plain else _SILU.forward(sums)


def _convolved(x: Array, weight: Array, *bias: Array) -> Array:
    found = x * weight[..., -1]
    for back in range(1, min(weight.shape[-1], x.shape[1])):
        found[:, back:] += x[:, :-back] * weight[..., -1 - back]
    return sum(bias, found)


def short_convolution_backward(
    grad: Array, x: Array, weight: Array, *bias: Array, plain: bool = False
) -> tuple[Array, ...]:
    """The gradients of ``x``, of the weight, and of the bias if there is one; what was convolved is computed again."""
    of_sums = grad if plain else _SILU.backward(_convolved(x, weight, *bias), grad)
    of_x = of_sums * weight[..., -1]
    of_weight = np.zeros_like(weight)
    of_weight[..., -1] = (of_sums * x).sum(axis=(0, 1))
    for back in range(1, min(weight.shape[-1], x.shape[1])):
        tap = -1 - back
        later, earlier = of_sums[:, back:], x[:, :-back]
        of_x[:, :-back] += later * weight[..., tap]
        of_weight[..., tap] = (later * earlier).sum(axis=(0, 1))
    of_bias = [of_sums.sum(axis=(0, 1)) for _ in bias]
    return of_x, of_weight, *of_bias


_SILU = ACTIVATIONS["silu"]
