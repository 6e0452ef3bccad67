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
        passed = np.exp(sums)
        left = np.exp(sums[..., -1:, :] - sums)
        added = beta[..., None] * v
        solved = between  # not read without the delta rule
        if delta:
            # (1 + A) U = beta V - beta (exp(G) K) S_0: the 1 is the diagonal, A lies below it.
            keys = beta[..., None] * _products(k, k, between)
            solved = np.where(np.tri(tokens, k=-1, dtype=np.bool_), keys, np.eye(tokens, dtype=k.dtype))
            right = added - beta[..., None] * ((k * passed) @ state)
            added = np.linalg.solve(solved, right)
        return cls(q, k, v, beta, state, delta, passed, left, between, solved, added)

    def read(self) -> Array:
        """What the queries read."""
        scores = _products(self.q, self.k, self.between)
        found: Array = (self.q * self.passed) @ self.state + scores @ self.added
        return found

    def next_state(self) -> Array:
        """The state behind the chunk."""
        kept = (self.k * self.left).mT @ self.added
        found: Array = self.passed[..., -1, :, None] * self.state + kept
        return found

    def backward(self, grad: Array, of_next: Array) -> tuple[Array, ...]:
        """The gradients of the state before the chunk, and of q, k, v, g and beta; given those of what is read, and of the
        state behind it.  ``of_x`` is the gradient of x."""
        q, k, state, added, beta = self.q, self.k, self.state, self.added, self.beta
        passed, left, between = self.passed, self.left, self.between
        # Of what is read, O = (exp(G) Q) S_0 + M U, where M are the products of queries and keys.
        scores = _products(q, k, between)
        of_scores = np.where(np.tri(q.shape[-2], dtype=np.bool_), grad @ added.mT, 0)
        from_state = grad @ state.mT
        by_scores = _rows(of_scores, k, between)
        of_q = from_state * passed + by_scores
        # Of the next state too, S = exp(G_T) S_0 + (exp(G_T - G) K)^T U, with T the last token.
        to_state = added @ of_next.mT
        of_k = to_state * left + _columns(of_scores, q, between)
        of_state = (q * passed).mT @ grad + passed[..., -1, :, None] * of_next
        of_added = scores.mT @ grad + (k * left) @ of_next
        # A feature of G_t stands as exp(G_t) before that of a query, and as exp(-G_t) before that of a key.
        of_sums = from_state * passed * q + by_scores * q - k * of_k
        of_sums[..., -1, :] += (to_state * left * k).sum(axis=-2)
        of_sums[..., -1, :] += passed[..., -1, :] * (state * of_next).sum(axis=-1)
        if self.delta:
            # (1 + A) U = beta (V - (exp(G) K) S_0), where A are beta times the products of keys and earlier keys.
            of_right = np.linalg.solve(self.solved.mT, of_added)
            earlier = np.tri(q.shape[-2], k=-1, dtype=np.bool_)
            of_solved = np.where(earlier, -of_right @ added.mT, 0)
            of_products = of_solved * beta[..., None]
            by_later, by_earlier = _rows(of_products, k, between), _columns(of_products, k, between)
            by_state = -beta[..., None] * (of_right @ state.mT) * passed
            of_k = of_k + by_state + by_later + by_earlier
            of_sums += k * (by_state + by_later - by_earlier)
            of_state -= (beta[..., None] * k * passed).mT @ of_right
            of_beta = np.vecdot(of_right, self.v - (k * passed) @ state)
            of_beta = of_beta + (of_solved * _products(k, k, between)).sum(axis=-1)
        else:  # U = beta V
            of_right = of_added
            of_beta = np.vecdot(of_right, self.v)
        of_v = beta[..., None] * of_right
        return of_state, of_q, of_k, of_v, sums_from(of_sums, -2), of_beta


def sums_from(x: Array, axis: int) -> Array:
    """Of each token the sum of it and all later ones: the gradient of ``x`` through sums up to each token."""
    found: Array = np.flip(np.cumsum(np.flip(x, axis), axis=axis), axis)
    return found


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
