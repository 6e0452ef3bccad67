"""A chunk of linear attention in which each feature of a key has a decay of its own (Kimi Delta Attention).

With log-decays g of shape (key width) token t makes of the state, under the delta rule,

    S' = exp(g_t) S_{t-1}            S_t = S' + beta_t k_t (v_t - k_t^T S')^T            o_t = q_t^T S_t

(Kimi Team, *Kimi Linear*, 2025, arXiv:2510.26692, equation 1), so that in a chunk, with sums G of the log-decays, products
``q_t k_j`` are ``sum(q_t exp(G_t - G_j) k_j)``.  Here they are computed so, feature by feature; kernels scale keys instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallelism.arrays import Array


@dataclass(frozen=True)
class Chunk:
    """A chunk, whose arrays are ``(batch, heads, tokens, ...)``, and the state before it.  Where each feature of a key has a
    decay of its own, ``passed``, ``left`` and ``between`` have features as their last dim; else they have none."""

    q: Array
    k: Array
    v: Array
    beta: Array
    state: Array
    delta: bool
    passed: Array
    """By token, what is left of the state before the chunk."""
    left: Array
    """By token, what is left at the end of the chunk of what it adds."""
    between: Array
    """By token and earlier token, what is left of what the latter adds."""
    solved: Array
    """1 + A under the delta rule; not read without it."""
    added: Array
    """What each token adds for its key."""


@dataclass(frozen=True)
class ChannelChunk(Chunk):
    """A chunk in which each feature of a key has a decay of its own."""

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, delta: bool
    ) -> ChannelChunk:
        """The chunk of these tokens."""
        tokens = g.shape[-2]
        sums = np.cumsum(g, axis=-2)
        between = sums[..., :, None, :] - sums[..., None, :, :]
        between = np.exp(np.where(np.tri(tokens, dtype=np.bool_)[..., None], between, -np.inf))
        passed, left = np.exp(sums), np.exp(sums[..., -1:, :] - sums)
        added, solved = beta[..., None] * v, between
        if delta:
            keys = beta[..., None] * _products(k, k, between)
            solved = np.where(np.tri(tokens, k=-1, dtype=np.bool_), keys, np.eye(tokens, dtype=k.dtype))
            added = added - beta[..., None] * ((k * passed) @ state)
            added = np.linalg.solve(solved, added)
        return cls(q, k, v, beta, state, delta, passed, left, between, solved, added)

    def read(self) -> Array:
        """What the queries read."""
        found: Array = (self.q * self.passed) @ self.state + _products(
            self.q, self.k, self.between
        ) @ self.added
        return found

    def next_state(self) -> Array:
        """The state behind the chunk."""
        kept = (self.k * self.left).swapaxes(-1, -2) @ self.added
        found: Array = self.passed[..., -1, :, None] * self.state + kept
        return found

    def backward(self, grad: Array, of_next: Array) -> tuple[Array, ...]:
        """The gradients of the state before the chunk, and of q, k, v, g and beta; given those of what is read, and of the
        state behind it."""
        q, k, state, passed = self.q, self.k, self.state, self.passed
        scores = _products(q, k, self.between)
        of_scores = np.where(np.tri(q.shape[-2], dtype=np.bool_), grad @ self.added.swapaxes(-1, -2), 0)
        of_added = scores.swapaxes(-1, -2) @ grad + (k * self.left) @ of_next
        to_queries, to_last = grad @ state.swapaxes(-1, -2), self.added @ of_next.swapaxes(-1, -2)
        of_state = (q * passed).swapaxes(-1, -2) @ grad + passed[..., -1, :, None] * of_next
        of_q = to_queries * passed + _rows(of_scores, k, self.between)
        inner = _columns(of_scores, q, self.between)
        of_k = to_last * self.left + inner
        of_sums = to_queries * passed * q + _rows(of_scores, k, self.between) * q - k * of_k
        of_sums[..., -1, :] += (to_last * self.left * k).sum(axis=-2)
        of_sums[..., -1, :] += passed[..., -1, :] * (state * of_next).sum(axis=-1)
        rates = self.v
        if self.delta:
            of_added = np.linalg.solve(self.solved.swapaxes(-1, -2), of_added)
            before = np.tri(q.shape[-2], k=-1, dtype=np.bool_)
            of_keys = np.where(before, -of_added @ self.added.swapaxes(-1, -2), 0)
            rates = rates - (k * passed) @ state
            of_pairs = of_keys * self.beta[..., None]
            to_keys = -self.beta[..., None] * (of_added @ state.swapaxes(-1, -2))
            own, others = _rows(of_pairs, k, self.between), _columns(of_pairs, k, self.between)
            of_k = of_k + to_keys * passed + own + others
            of_sums += k * (to_keys * passed + own - others)
            of_state -= (self.beta[..., None] * k * passed).swapaxes(-1, -2) @ of_added
            of_beta = (of_keys * _products(k, k, self.between)).sum(axis=-1)
        of_rates = np.vecdot(of_added, rates)
        of_g = np.flip(np.cumsum(np.flip(of_sums, -2), axis=-2), -2)
        of_beta = of_rates + of_beta if self.delta else of_rates
        return of_state, of_q, of_k, self.beta[..., None] * of_added, of_g, of_beta


def _products(one: Array, other: Array, between: Array) -> Array:
    """The products of two tokens' vectors, with what is left of each feature."""
    found: Array = np.einsum("...tn,...jn,...tjn->...tj", one, other, between)
    return found


def _rows(pairs: Array, other: Array, between: Array) -> Array:
    """For each token the sum over earlier ones."""
    found: Array = np.einsum("...tj,...jn,...tjn->...tn", pairs, other, between)
    return found


def _columns(pairs: Array, one: Array, between: Array) -> Array:
    """For each token the sum over later ones."""
    found: Array = np.einsum("...tj,...tn,...tjn->...jn", pairs, one, between)
    return found
