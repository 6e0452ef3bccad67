"""Which experts a token goes to, and which of them have room for it.

A token goes to the ``k`` experts of largest router probability; equal ones go by their number.  Its gates are these
probabilities: for k = 1 as they are (Fedus et al., *Switch Transformers*, 2021, arXiv:2101.03961, section 2.1), for
more divided by their sum (Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, algorithm 1).

**When an expert overflows.**  An expert takes at most `expert_capacity` tokens, in this order: all first choices before
all second ones and so on, and among equals the token that comes first in the whole (row-major) batch.  A choice that
finds no room is dropped: it adds nothing to the token's output, and gets no gradient; the other gates stay as they
are.  That order knows no devices, so who is dropped is the same on every mesh.

To find it, tokens are counted by *run*: a run is any stretch of tokens that follow each other in the whole batch.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Array


class Choice(NamedTuple):
    """Of each token: the probabilities of all experts (tokens, experts); its k experts and their gates (tokens, k)."""

    probabilities: Array
    experts: Array
    gates: Array


def choose_experts(logits: Array, k: int) -> Choice:
    """The ``k`` best experts of each token, best first, from router logits of shape (tokens, experts)."""
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    gates = np.take_along_axis(probabilities, experts, axis=-1)
    if k > 1:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    return Choice(probabilities, experts, gates)


def choose_experts_backward(choice: Choice, gates_grad: Array, probabilities_grad: Array) -> Array:
    """The gradient of the logits from those of the gates and, besides, of all probabilities ((experts,) will do)."""
    probabilities, experts, gates = choice
    if gates.shape[1] > 1:
        chosen = np.take_along_axis(probabilities, experts, axis=-1).sum(axis=-1, keepdims=True)
        gates_grad = (gates_grad - (gates_grad * gates).sum(axis=-1, keepdims=True)) / chosen
    grad = np.broadcast_to(probabilities_grad, probabilities.shape).astype(probabilities.dtype)
    rows = np.arange(len(experts))[:, None]
    grad[rows, experts] += gates_grad
    found: Array = probabilities * (grad - (grad * probabilities).sum(axis=-1, keepdims=True))
    return found


def expert_capacity(tokens: int, experts: int, k: int, factor: float | None) -> int:
    """How many choices an expert takes: ``ceil(factor * k * tokens / experts)``, at most tokens; None: all of them."""
    return tokens if factor is None else min(tokens, ceil(factor * k * tokens / experts))


def count_choices(chosen: Array, runs: int, experts: int) -> tuple[Array, Array]:
    """How many choices each run makes, (runs, k, experts), and for each of ``chosen`` how many of its kind precede it.

    ``chosen`` (tokens, k) are experts; its tokens are ``runs`` runs of one length.  Of a kind are choices of one run,
    one rank (first, second, ...) and one expert.
    """
    tokens, k = chosen.shape
    run = np.repeat(np.arange(runs), tokens // max(1, runs))
    kinds = ((run[:, None] * k + np.arange(k)) * experts + chosen).reshape(-1)
    counts = np.bincount(kinds, minlength=runs * k * experts)
    order = np.argsort(kinds, kind="stable")
    preceding = np.empty(tokens * k, np.int64)
    preceding[order] = np.arange(tokens * k) - (np.cumsum(counts) - counts)[kinds[order]]
    return counts.reshape(runs, k, experts), preceding.reshape(tokens, k)


def places_before(counts: Array) -> Array:
    """How many choices of an expert go before those of each run and rank, of all ``counts`` (runs, k, experts)."""
    runs, k, experts = counts.shape
    ordered = counts.transpose(1, 0, 2).reshape(k * runs, experts)
    before = np.cumsum(ordered, axis=0) - ordered
    return before.reshape(k, runs, experts).transpose(1, 0, 2)


def balance_loss(first_choices: Array, probability_sums: Array, tokens: int) -> tuple[float, Array]:
    """How unevenly the experts are used, and its gradient with respect to each token's probabilities, (experts,).

    ``experts * sum(f * p)``, f the fraction of tokens whose first choice an expert is, dropped or not, and p its mean
    probability: 1 when both are even (Fedus et al., equations 4 to 6, without their factor alpha).  f has no gradient.
    """
    experts = len(first_choices)
    shares = first_choices / max(1, tokens)
    grad: Array = shares * (experts / max(1, tokens))
    return float((grad * probability_sums).sum()), grad
