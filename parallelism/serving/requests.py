"""Requests as values, and the choice of a token from logits by a counter, so that it is the same on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.arrays import Array, with_plain_numbers
from parallelism.kernels.dropout import splitmix64


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the most likely one, the first of equal ones, if ``temperature`` is 0.

    Else it is drawn from the softmax of the logits divided by ``temperature``, of which only the ``top_k`` most likely
    tokens are left, and of these the fewest that have ``top_p`` of the probability together (Holtzman et al., *The Curious
    Case of Neural Text Degeneration*, 2019, arXiv:1904.09751, section 3.1).  What is drawn depends on ``seed``, the number
    of the request and the number of the token alone.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature!r}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k must be an integer of at least 1, or None, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")

    def token(self, logits: Array, request: int, number: int) -> int:
        """The token of these logits, ``(vocabulary,)``: token ``number`` of the answer to a request."""
        if self.temperature == 0:
            return int(logits.argmax())
        scores = np.asarray(logits, np.float64) / self.temperature
        order = np.argsort(-scores, kind="stable")[: self.top_k]
        weights = np.exp(scores[order] - scores[order[0]])
        sums = np.cumsum(weights / weights.sum())
        kept = int(np.searchsorted(sums, self.top_p * (1 - 1e-12))) + 1
        drawn = self._uniform(request, number) * sums[min(kept, len(sums)) - 1]
        return int(order[min(int(np.searchsorted(sums, drawn, side="right")), kept - 1)])

    def _uniform(self, request: int, number: int) -> float:
        """A number in [0, 1)."""
        key = int(splitmix64(self.seed, [request])[0]) >> 1
        return float(splitmix64(key, [number])[0] >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Request:
    """A prompt to be answered with at most ``new_tokens`` tokens; a token among ``stop`` is the last.

    ``arrival_seconds`` is when it arrives.  ``ValueError`` for an empty prompt, and where nothing is to be generated.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    arrival_seconds: float = 0.0
    prefix_tokens: int = 0
    """So many tokens of the prompt have their keys and values already; prices count with it, and a run refuses it."""

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        if not 0 <= self.prefix_tokens < max(len(self.prompt), 1):
            raise ValueError(
                f"prefix_tokens must be at least 0 and fewer than the prompt has, got {self.prefix_tokens!r}"
            )
        if not self.prompt:
            raise ValueError("a prompt must have at least one token, got an empty one")
        if type(self.new_tokens) is not int or self.new_tokens < 1:
            raise ValueError(f"new_tokens must be an integer of at least 1, got {self.new_tokens!r}")
        if not 0 <= self.arrival_seconds < np.inf:
            raise ValueError(f"arrival_seconds must be a number of at least 0, got {self.arrival_seconds!r}")

    @property
    def cached_tokens(self) -> int:
        """The most tokens that are in the cache: nothing follows the last one, so it is not."""
        return len(self.prompt) + self.new_tokens - 1


def checked_prompts(prompts: Any, vocabulary: int) -> list[tuple[int, ...]]:
    """Prompts as tuples of integers.  ``ValueError`` or ``TypeError`` names the first that is none."""
    try:
        given = list(prompts)
    except TypeError:
        raise TypeError(f"prompts must be sequences of tokens, got {type(prompts).__name__}") from None
    if not given:
        raise ValueError("prompts must hold at least one prompt, got none")
    return [_checked(prompt, number, vocabulary) for number, prompt in enumerate(given)]


def _checked(prompt: Any, number: int, vocabulary: int) -> tuple[int, ...]:
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise TypeError(
            f"prompt {number} must be a sequence of tokens, integers, got {type(prompt).__name__}"
        )
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        raise ValueError(f"prompt {number} must have at least one token, got an empty one")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(
            f"prompt {number} must be a sequence of tokens, integers, got shape {tokens.shape} of {tokens.dtype}"
        )
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if wrong.size:
        raise ValueError(
            f"prompt {number}: tokens must be in [0, {vocabulary}), the vocabulary of the model, got {wrong[0]}"
        )
    return tuple(map(int, tokens))
