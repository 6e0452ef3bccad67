"""`PricedEngine`: an engine at the prices of its steps, with a clock.

Thousands of steps in which every request has its next token, and nobody joins or leaves, are priced at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.models.inference.caches import STATES, kinds_of
from parallelism.serving.engine import Engine, Step, padded
from parallelism.serving.placement import PICKED, READ, SCORED, TABLE, TOKENS
from parallelism.serving.prices import StepPrices
from parallelism.serving.requests import Request
from parallelism.serving.served_model import numbers_of, sampled_rows

MOST_STEPS = 4096
"""The most steps that are priced at once."""


class PricedEngine:
    """An engine whose steps take what they are priced at."""

    def __init__(self, engine: Engine, prices: StepPrices) -> None:
        self.engine, self.prices = engine, prices
        self.first: dict[int, float] = {}
        """By number of a request, when its first token was there."""
        self.last: dict[int, float] = {}
        self.now, self.steps = 0.0, 0

    @property
    def next_seconds(self) -> float:
        """When its next step begins; infinity if it has nothing to do."""
        if self.engine.running:
            return self.now
        return max(self.now, self.engine.next_arrival_seconds)

    def send(self, request: Request, seconds: float) -> int:
        """The number of a request that arrives then."""
        return self.engine.add(replace(request, arrival_seconds=seconds))

    def advance(self, until: float = inf) -> list[int]:
        """Takes one step, or several at once if all are alike and the last begins before ``until``.  Where no request is
        there, the clock goes on to the next arrival.

        Returns the requests that are answered then.
        """
        engine = self.engine
        before = len(engine.running)
        step = engine.step(self.now)
        if step is None:
            self.now = max(self.now, engine.next_arrival_seconds)
            return []
        joined = len(engine.running) - before
        stretch = self._stretch(step) if not joined else 0
        return self._run_stretch(step, stretch, until) if stretch > 1 else self._run(step)

    def _run(self, step: Step) -> list[int]:
        """One step, and the requests that are answered by it."""
        settings, placement = self.prices.settings, self.prices.placement
        seconds = self.prices.step_seconds([numbers_of(placement, settings, work) for work in step])
        self.now, self.steps = self.now + seconds, self.steps + 1
        tokens = {request: 0 for work in step for _, _, request in sampled_rows(work)}
        for request in tokens:
            self.first.setdefault(request, self.now)
            self.last[request] = self.now
        return self._finish(step, tokens)

    def _finish(self, step: Step, tokens: dict[int, int]) -> list[int]:
        answered = len(self.engine.answers)
        self.engine.finish(step, tokens)
        return [*self.engine.answers][answered:]

    def _stretch(self, step: Step) -> int:
        """So many steps are like this one, in which every running request has its next token: until one is answered."""
        rows = [row for work in step for of_replica in work.rows for row in of_replica]
        running = self.engine.running
        if len(rows) < len(running) or any(not row.samples or row.stop - row.start > 1 for row in rows):
            return 0
        if any(not each.answer for each in running.values()):
            return 0
        return min(MOST_STEPS, *(each.request.new_tokens - len(each.answer) for each in running.values()))

    def _run_stretch(self, step: Step, count: int, until: float) -> list[int]:
        """So many steps at once, or as many as begin before ``until`` and before the next request arrives."""
        arrival = self.engine.next_arrival_seconds
        if arrival > self.now:  # one that has arrived already waits for somebody to leave
            until = min(until, arrival)
        if until < inf:  # no step takes less than the first: each reads more of the cache
            count = min(count, max(int((until - self.now) / self._known_seconds(step, 1)[0]), 0) + 2)
            ends = self.now + np.cumsum(self._known_seconds(step, count))
            count = min(count, int(np.searchsorted(ends, until)) + 1)
        else:
            ends = self.now + np.cumsum(self._seconds(step, count))
        self.now = float(ends[count - 1])
        self.steps = self.steps + count
        for each in self.engine.running.values():
            each.done += count - 1
            each.answer.extend([0] * (count - 1))
            self.last[each.number] = self.now
        last = tuple(work.later(count - 1) for work in step)
        return self._finish(last, {request: 0 for work in last for _, _, request in sampled_rows(work)})

    def _seconds(self, step: Step, count: int) -> Floats:
        """The seconds of each step of a stretch."""
        fixed, moving = self._numbers(step, count)
        return self.prices.seconds_of_stretch(fixed, moving, count) + self.prices.host_seconds(fixed)

    def _known_seconds(self, step: Step, count: int) -> Floats:
        """The same.  Requests that arrive by themselves meet alike whatever a batch has room for, so rows share stretches."""
        key = self.prices.settings.page_tokens, tuple(work.stops for work in step), count
        if key not in self.prices.stretches:
            self.prices.stretches[key] = self._seconds(step, count)
        return self.prices.stretches[key]

    def _numbers(self, step: Step, count: int) -> tuple[list[dict[str, int]], list[dict[str, Ints]]]:
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
            if kind == STATES:  # each is read and written
                yield f"{READ}_{kind}", np.full(len(stops), stops.shape[1])
                continue
            behind = np.maximum(stops - spec.window, 0) // settings.page_tokens if kind == "window" else 0
            yield f"{READ}_{kind}", (pages - behind).sum(axis=1) * settings.page_tokens
            scores = np.minimum(stops, spec.window) if kind == "window" else stops
            yield f"{SCORED}_{kind}", scores.sum(axis=1)
