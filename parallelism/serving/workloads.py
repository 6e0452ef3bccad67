"""Workloads, and an engine run through one at the prices of its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.serving.engine import Engine
from parallelism.serving.priced_engine import PricedEngine
from parallelism.serving.prices import StepPrices
from parallelism.serving.requests import Request
from parallelism.serving.serve import Answered, Served

MOST_BYTES = 1 << 26
FEWEST = 64
"""The fewest requests that arrive by themselves."""
MOST_UNDER_WAY = 1024
"""The most that are taken to be there at a time; where more are, nobody can keep up."""


@dataclass(frozen=True)
class Workload:
    """Requests, by the lengths of prompt and answer in turn.

    With a ``concurrency`` so many clients send a request each, and the next when it is answered.  With a ``rate`` requests a
    second arrive by themselves, as a Poisson process of ``seed``.  ``hits`` is what part of each prompt has its keys and
    values in the cache already, of a prefix that others have had.  ``ValueError`` for lengths below 1, and unless one of both
    is given.
    """

    lengths: tuple[tuple[int, int], ...]
    """Tokens in and out."""
    concurrency: int | None = None
    rate: float | None = None
    hits: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths must have at least one pair of tokens in and out, got none")
        for pair in self.lengths:
            if len(pair) != 2 or any(type(each) is not int or each < 1 for each in pair):
                raise ValueError(
                    f"lengths must be pairs of integers of at least 1, tokens in and out, got {pair!r}"
                )
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a workload has either a concurrency or a rate")
        if self.concurrency is not None and (type(self.concurrency) is not int or self.concurrency < 1):
            raise ValueError(f"concurrency must be an integer of at least 1, got {self.concurrency!r}")
        if self.rate is not None and not 0 < self.rate < inf:
            raise ValueError(f"rate must be a number of requests a second, above 0, got {self.rate!r}")
        if not 0 <= self.hits < 1:
            raise ValueError(f"hits must be at least 0 and below 1, got {self.hits!r}")

    @property
    def longest(self) -> int:
        """The most tokens of a request in the cache."""
        return max(prompt + new - 1 for prompt, new in self.lengths)

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """The mean tokens in and out."""
        prompts, news = zip(*self.lengths, strict=True)
        return sum(prompts) / len(prompts), sum(news) / len(news)

    def shared(self, replicas: int) -> Workload:
        """The share of one of so many replicas; where they differ, the largest."""
        if self.concurrency is not None:
            return replace(self, concurrency=-(-self.concurrency // replicas))
        assert self.rate is not None
        return replace(self, rate=self.rate / replicas)

    def enough(self, token_seconds: float, taken: int | None = None) -> int:
        """So many requests tell what becomes of all: twice as many as there are at a time, and of a file all of it.

        Of requests that arrive by themselves as many are there at a time as arrive while one is answered, whose tokens take
        ``token_seconds`` (Little's law).  Arrivals are random, so they are at least `FEWEST`.  How many places a plan has
        does not matter, so that plans are compared on the same arrivals; but where more arrive than are answered, all its
        places are ``taken``.
        """
        if self.concurrency is not None:
            return max(2 * self.concurrency, len(self.lengths))
        assert self.rate is not None
        _, new = self.mean_lengths
        under_way = taken or min(ceil(self.rate * new * token_seconds), MOST_UNDER_WAY)
        return max(8 * under_way, FEWEST, len(self.lengths))

    def requests(self, count: int) -> Iterator[Request]:
        """The first requests."""
        rng = np.random.default_rng(self.seed)
        now = 0.0
        for number in range(count):
            prompt, new = self.lengths[number % len(self.lengths)]
            if self.rate is not None:
                now += float(rng.exponential(1 / self.rate))
            prefix = min(int(self.hits * prompt), prompt - 1)
            yield Request((0,) * prompt, new, arrival_seconds=now, prefix_tokens=prefix)


def lengths_in(path: str | PathLike[str]) -> tuple[tuple[int, int], ...]:
    """The lengths in a file of JSON: a list of ``{"input_tokens": 3000, "output_tokens": 300}``, or such lines.

    ``ValueError`` for any other file.
    """
    with Path(path).open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES} bytes")
    try:
        text = content.decode()
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.split("\n") if line]
        )
        return tuple((_whole(row["input_tokens"]), _whole(row["output_tokens"])) for row in rows)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f'{path} must be a list of requests in JSON, as [{{"input_tokens": 3000, "output_tokens": 300}}]: {error}'
        ) from None


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"tokens must be integers of at least 1, got {value!r}")
    return value


class PricedRun:
    """An engine run through the first ``count`` requests of a workload."""

    def __init__(self, engine: Engine, prices: StepPrices, workload: Workload, count: int) -> None:
        self.engine, self.prices = engine, prices
        self.left = list(workload.requests(count))[::-1]
        self.closed = workload.concurrency is not None
        self._run = PricedEngine(engine, prices)
        for _ in range(min(count, workload.concurrency or count)):
            self._send()

    def served(self) -> Served:
        """Runs until every request is answered, and returns what became of each."""
        engine, run = self.engine, self._run
        while not engine.is_done:
            answered = run.advance()
            for _ in answered if self.closed else ():
                self._send()
        told = tuple(
            Answered(
                request.arrival_seconds, run.first[number], run.last[number], len(engine.answers[number])
            )
            for number, request in enumerate(engine.requests)
        )
        return Served(told, run.now, run.steps)

    def _send(self) -> None:
        """The next request; in a closed loop it is sent now."""
        if self.left:
            request = self.left.pop()
            sent = self._run.now if self.closed else request.arrival_seconds
            self._run.send(request, sent + self.prices.hardware.request_seconds)
