"""The choice of a token: greedy, or drawn by a counter from what temperature, top-k and top-p leave."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from parallelism.serving import Request, Sampling
from parallelism.serving.requests import checked_prompts

LOGITS = np.log(np.array([0.05, 0.4, 0.15, 0.4]))


def test_greedy_takes_the_first_of_the_largest():
    assert Sampling().token(LOGITS, 3, 5) == 1


def shares(sampling, count=4000):
    found = Counter(sampling.token(LOGITS, request, number) for request in range(40) for number in range(count // 40))
    return np.array([found[token] / count for token in range(len(LOGITS))])


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [
    ({}, [0.05, 0.4, 0.15, 0.4]),
    ({"top_k": 2}, [0, 0.5, 0, 0.5]),
    ({"top_p": 0.9}, [0, 0.4 / 0.95, 0.15 / 0.95, 0.4 / 0.95]),  # 0.4 + 0.4 < 0.9 <= 0.95
    ({"top_p": 0.8}, [0, 0.5, 0, 0.5]),
    ({"top_k": 1}, [0, 1, 0, 0]),
    ({"temperature": 0.5}, np.array([0.0025, 0.16, 0.0225, 0.16]) / 0.345),
])
def test_tokens_are_drawn_with_their_probabilities(given, expected):
    assert np.abs(shares(Sampling(**{"temperature": 1.0} | given)) - expected).max() < 0.03


def test_what_is_drawn_depends_on_the_seed_the_request_and_the_number_alone():
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = [sampling.token(LOGITS, 2, number) for number in range(50)]
    assert drawn == [Sampling(temperature=1.0, seed=3).token(LOGITS + 7.0, 2, number) for number in range(50)]
    assert drawn != [sampling.token(LOGITS, 1, number) for number in range(50)]
    assert drawn != [Sampling(temperature=1.0, seed=4).token(LOGITS, 2, number) for number in range(50)]


@pytest.mark.parametrize(("given", "message"), [
    ({"temperature": -1}, "temperature must be a number of at least 0, got -1"),
    ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
    ({"top_k": 0}, "top_k must be an integer of at least 1, or None, got 0"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
    ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), got -1"),
])
def test_figures_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**given)


@pytest.mark.parametrize(("prompts", "error", "message"), [
    ([], ValueError, "prompts must hold at least one prompt, got none"),
    ([[1], []], ValueError, "prompt 1 must have at least one token, got an empty one"),
    ([[1, 11]], ValueError, r"prompt 0: tokens must be in \[0, 11\), the vocabulary of the model, got 11"),
    ([[1, -1]], ValueError, r"prompt 0: tokens must be in \[0, 11\), the vocabulary of the model, got -1"),
    ([[1.5]], TypeError, r"prompt 0 must be a sequence of tokens, integers, got shape \(1,\) of float64"),
    (["hello"], TypeError, "prompt 0 must be a sequence of tokens, integers, got str"),
    ([3], TypeError, "prompt 0 must be a sequence of tokens, integers, got int"),
    (7, TypeError, "prompts must be sequences of tokens, got int"),
])
def test_prompts_are_checked(prompts, error, message):
    with pytest.raises(error, match=message):
        checked_prompts(prompts, 11)


@pytest.mark.parametrize(("prompt", "count", "message"), [
    ((), 1, "a prompt must have at least one token"), ((1,), 0, "new_tokens must be an integer of at least 1, got 0"),
])
def test_requests_are_checked(prompt, count, message):
    with pytest.raises(ValueError, match=message):
        Request(prompt, count)
