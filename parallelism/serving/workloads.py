"""Workloads, and an engine run through one at the prices of its steps.

Thousands of steps in which every request has its next token, and nobody joins or leaves, are priced at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.models.inference.programs import kinds_of
from parallelism.serving.engine import Engine, Step, padded
from parallelism.serving.placement import PICKED, READ, SCORED, TABLE, TOKENS
from parallelism.serving.prices import StepPrices
from parallelism.serving.requests import Request
from parallelism.serving.serve import Answered, Served
from parallelism.serving.served import numbers_of, sampled_rows

MOST_BYTES = 1 << 26
MOST_STEPS = 4096
"""So many steps are priced at once."""


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
        """What one of so many replicas has of it: the largest share."""
        if self.concurrency is not None:
            return replace(self, concurrency=-(-self.concurrency // replicas))
        assert self.rate is not None
        return replace(self, rate=self.rate / replicas)

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
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.now, self.steps = 0.0, 0
        self.decode_seconds, self.decode_steps = 0.0, 0
        self.closed = workload.concurrency is not None
        for _ in range(min(count, workload.concurrency or count)):
            self._send()

    def served(self) -> Served:
        """Runs until every request is answered."""
        engine = self.engine
        while not engine.is_done:
            before = len(engine.running)
            step = engine.step(self.now)
            if step is None:
                self.now = max(self.now, engine.next_arrival_seconds)
                continue
            joined = len(engine.running) - before
            stretch = self._stretch(step) if not joined else 0
            if stretch > 1:
                self._run_stretch(step, stretch)
            else:
                self._run(step)
        answered = tuple(
            Answered(
                request.arrival_seconds, self.first[number], self.last[number], len(engine.answers[number])
            )
            for number, request in enumerate(engine.requests)
        )
        return Served(answered, self.now, self.steps)

    def _send(self) -> None:
        """The next request; in a closed loop it is sent now."""
        if self.left:
            request = self.left.pop()
            sent = self.now if self.closed else request.arrival_seconds
            self.engine.add(replace(request, arrival_seconds=sent + self.prices.hardware.request_seconds))

    def _run(self, step: Step) -> None:
        """One step."""
        settings, placement = self.prices.settings, self.prices.placement
        seconds = self.prices.step_seconds([numbers_of(placement, settings, work) for work in step])
        self.now, self.steps = self.now + seconds, self.steps + 1
        tokens = {request: 0 for work in step for _, _, request in sampled_rows(work)}
        for request in tokens:
            self.first.setdefault(request, self.now)
            self.last[request] = self.now
        self._finish(step, tokens)

    def _finish(self, step: Step, tokens: dict[int, int]) -> None:
        answered = len(self.engine.answers)
        self.engine.finish(step, tokens)
        if self.closed:
            for _ in range(len(self.engine.answers) - answered):
                self._send()

    def _stretch(self, step: Step) -> int:
        """So many steps are like this one, in which every running request has its next token: until one is answered."""
        rows = [row for work in step for of_replica in work.rows for row in of_replica]
        running = self.engine.running
        if len(rows) < len(running) or any(not row.samples or row.stop - row.start > 1 for row in rows):
            return 0
        if any(not each.answer for each in running.values()):
            return 0
        return min(MOST_STEPS, *(each.request.new_tokens - len(each.answer) for each in running.values()))

    def _run_stretch(self, step: Step, count: int) -> None:
        """So many steps at once, or as many as there are before the next request arrives."""
        fixed, moving = self._numbers(step, count)
        seconds = self.prices.seconds_of_stretch(fixed, moving, count) + self.prices.host_seconds(fixed)
        ends = self.now + np.cumsum(seconds)
        arrival = self.engine.next_arrival_seconds
        if self.now < arrival < inf:  # one that has arrived already waits for somebody to leave
            count = min(count, int(np.searchsorted(ends, arrival)) + 1)
        self.now, self.steps = float(ends[count - 1]), self.steps + count
        for each in self.engine.running.values():
            each.done += count - 1
            each.answer.extend([0] * (count - 1))
            self.last[each.number] = self.now
        last = tuple(
            type(work)(tuple(tuple(row.later(count - 1) for row in rows) for rows in work.rows))
            for work in step
        )
        self._finish(last, {request: 0 for work in last for _, _, request in sampled_rows(work)})

    def _numbers(
        self, step: Step, count: int
    ) -> tuple[list[dict[str, int]], list[dict[str, npt.NDArray[np.int64]]]]:
        """For each work what stays in the stretch, and what differs, by step."""
        fixed, moving = [], []
        spec, settings = self.prices.placement.spec, self.prices.settings
        later = np.arange(count)[:, None]
        for work in step:
            fixed.append({TOKENS: padded(work.tokens), PICKED: max(padded(work.sampled), 1)})
            differing: dict[str, Any] = {}
            for rows in work.rows:
                stops = np.array([row.stop for row in rows], np.int64)[None] + later
                pages = -(-stops // settings.page_tokens)
                for name, value in self._of_replica(spec, stops, pages):
                    differing[name] = np.maximum(differing.get(name, 0), value)
            moving.append(differing)
        return fixed, moving

    def _of_replica(self, spec: Any, stops: Any, pages: Any) -> Iterator[tuple[str, Any]]:
        settings = self.prices.settings
        if stops.shape[1]:
            yield TABLE, pages.max(axis=1)
        for kind in kinds_of(spec):
            held = np.minimum(pages, settings.ring_pages(spec)) if kind == "window" else pages
            yield f"{READ}_{kind}", held.sum(axis=1) * settings.page_tokens
            scores = np.minimum(stops, spec.window) if kind == "window" else stops
            yield f"{SCORED}_{kind}", scores.sum(axis=1)
