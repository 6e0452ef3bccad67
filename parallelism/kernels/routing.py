"""Routing of tokens to experts, and the capacity of experts.

A token is routed to the ``k`` experts of largest router probability; of equal ones the lower number comes first.  Its
gates are these probabilities: unchanged for k = 1 (Fedus et al., *Switch Transformers*, 2021, arXiv:2101.03961,
section 2.1), divided by their sum for larger k (Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, algorithm 1).

**When an expert overflows.**  An expert accepts at most `expert_capacity` choices.  All first choices come before all
second ones and so on; among choices of one rank, tokens come in the row-major order of the whole batch.  A choice
beyond the capacity is dropped: it adds nothing to the token's output and gets no gradient; other gates do not change.
The order does not depend on devices, so the same choices are dropped on every mesh.

Tokens are counted by *run* to find the order: a run is a stretch of consecutive tokens of the whole batch.
"""

from math import ceil
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Array


class Choice(NamedTuple):
    """The experts chosen for each token."""

    probabilities: Array
    """The probability of every expert, ``(tokens, experts)``."""
    experts: Array
    """The k chosen experts, best first, ``(tokens, k)``."""
    gates: Array
    """The weights of the chosen experts, ``(tokens, k)``."""


def choose_experts(logits: Array, k: int) -> Choice:
    """Choose the ``k`` best experts of each token from router logits of shape ``(tokens, experts)``."""
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    gates = np.take_along_axis(probabilities, experts, axis=-1)
    if k > 1:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    return Choice(probabilities, experts, gates)


def choose_experts_backward(choice: Choice, gates_grad: Array, probabilities_grad: Array) -> Array:
    """The gradient of the logits, given the gradients of the gates and of the probabilities.

    ``probabilities_grad`` is added for uses other than the gates; it broadcasts, so ``(experts,)`` suffices.
    """
    probabilities, experts, gates = choice
    if gates.shape[1] > 1:
        chosen = np.take_along_axis(probabilities, experts, axis=-1).sum(axis=-1, keepdims=True)
        gates_grad = (gates_grad - (gates_grad * gates).sum(axis=-1, keepdims=True)) / chosen
    grad = np.broadcast_to(probabilities_grad, probabilities.shape).astype(probabilities.dtype)
    grad[np.arange(len(experts))[:, None], experts] += gates_grad
    logits_grad: Array = probabilities * (grad - (grad * probabilities).sum(axis=-1, keepdims=True))
    return logits_grad


def expert_capacity(tokens: int, experts: int, k: int, factor: float | None) -> int:
    """The number of choices that an expert accepts: ``ceil(factor * k * tokens / experts)``, at most ``tokens``.

    ``factor=None`` means no limit: ``tokens``.
    """
    return tokens if factor is None else min(tokens, ceil(factor * k * tokens / experts))


def count_choices(chosen: Array, runs: int, experts: int) -> tuple[Array, Array]:
    """Count the choices of each run, and number the choices of one kind.

    ``chosen``, of shape ``(tokens, k)``, holds experts; its tokens are ``runs`` runs of equal length.  The first
    result, ``(runs, k, experts)``, counts choices by run, rank (first, second, ...) and expert.  The second,
    ``(tokens, k)``, is the number of earlier choices with the same run, rank and expert.
    """
    tokens, k = chosen.shape
    run = np.repeat(np.arange(runs), tokens // max(1, runs))
    kinds = ((run[:, None] * k + np.arange(k)) * experts + chosen).reshape(-1)
    counts = np.bincount(kinds, minlength=runs * k * experts)
    # In the stable order the choices of one kind stand side by side, the earlier ones first.
    order = np.argsort(kinds, kind="stable")
    begins = np.cumsum(counts) - counts
    preceding = np.empty(tokens * k, np.int64)
    preceding[order] = np.arange(tokens * k) - begins[kinds[order]]
    return counts.reshape(runs, k, experts), preceding.reshape(tokens, k)


def places_before(counts: Array) -> Array:
    """The number of choices of an expert that come before those of each run and rank.

    ``counts`` is ``(runs, k, experts)`` for all runs of the batch; the result has the same shape.
    """
    runs, k, experts = counts.shape
    ordered = counts.transpose(1, 0, 2).reshape(k * runs, experts)
    before = np.cumsum(ordered, axis=0) - ordered
    return before.reshape(k, runs, experts).transpose(1, 0, 2)


def balance_loss(first_choices: Array, probability_sums: Array, tokens: int) -> tuple[float, Array]:
    """The load-balancing loss, and its gradient with respect to each token's probabilities, ``(experts,)``.

    The loss is ``experts * sum(f * p)``.  f is the fraction of tokens whose first choice is an expert, dropped or not;
    p is the mean probability of the expert.  It is 1 if both are even (Fedus et al., equations 4 to 6, without their
    factor alpha).  f has no gradient.
    """
    shares = first_choices / max(1, tokens)
    grad: Array = shares * (len(first_choices) / max(1, tokens))
    return float((grad * probability_sums).sum()), grad
