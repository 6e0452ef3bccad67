"""`PooledRun`: prompts on devices of their own, answers on others, and the cache moved between them.

An engine of prompts computes a prompt and its first token (prefill).  The keys and values of the prompt are then sent to an
engine of answers, which computes all further tokens (decode).  Neither waits for work of the other kind (Zhong et al.,
*DistServe*, OSDI 2024, arXiv:2401.09670; Patel et al., *Splitwise*, ISCA 2024, arXiv:2311.18677).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from parallelism.serving.priced_engine import PricedEngine
from parallelism.serving.requests import Request
from parallelism.serving.serve import Answered, Served
from parallelism.serving.workloads import Workload


@dataclass
class _Journey:
    """A request on its way."""

    request: Request
    arrival_seconds: float
    first_token_seconds: float = inf
    last_token_seconds: float = inf


class PooledRun:
    """Engines of prompts and engines of answers run through the first ``count`` requests of a workload.

    A request goes to the engine of prompts with the fewest, and its cache to the engine of answers with the fewest.
    ``moved_seconds`` says how long the cache of so many tokens is on its way.  In a closed loop an engine of answers that has
    several steps before somebody leaves takes them at once, also if another one of them answers meanwhile: what this sends
    joins afterwards.
    """

    def __init__(
        self,
        prompts: Sequence[PricedEngine],
        answers: Sequence[PricedEngine],
        workload: Workload,
        count: int,
        moved_seconds: Callable[[int], float],
    ) -> None:
        self.prompts, self.answers, self.moved_seconds = prompts, answers, moved_seconds
        self.left = list(workload.requests(count))[::-1]
        self.closed = workload.concurrency is not None
        self.journeys: list[_Journey] = []
        self._at: dict[tuple[int, int], int] = {}
        """By an engine and the number that it gave, the number of the journey."""
        self._sent: list[tuple[float, int]] = []
        """When requests arrive, with the numbers of their journeys."""
        self._moving: list[tuple[float, int]] = []
        """The same of caches."""
        for _ in range(min(count, workload.concurrency or count)):
            self._send(0.0)

    def served(self) -> Served:
        """Runs until every request is answered."""
        while True:
            self._deliver()
            engine = min((*self.prompts, *self.answers), key=lambda each: each.next_seconds)
            if engine.next_seconds == inf:
                break
            if engine in self.prompts:
                self._prompt(engine)
            else:
                self._answer(engine)
        told = tuple(
            Answered(
                each.arrival_seconds,
                each.first_token_seconds,
                each.last_token_seconds,
                each.request.new_tokens,
            )
            for each in self.journeys
        )
        steps = sum(each.steps for each in (*self.prompts, *self.answers))
        return Served(told, max(each.last_token_seconds for each in told), steps)

    def _send(self, now: float) -> None:
        """The next request; in a closed loop it is sent now."""
        if not self.left:
            return
        request = self.left.pop()
        sent = now if self.closed else request.arrival_seconds
        sent += self.prompts[0].prices.hardware.request_seconds
        heappush(self._sent, (sent, len(self.journeys)))
        self.journeys.append(_Journey(request, sent))

    def _deliver(self) -> None:
        """Requests and caches join the engines in the order in which they arrive: as soon as none can come before them."""
        while self._sent and self._sent[0][0] <= min(self._next_prompt, self._next_answer):
            self._begin(*heappop(self._sent))
        while self._moving and self._moving[0][0] <= self._next_cache:
            self._arrive(*heappop(self._moving))

    @property
    def _next_prompt(self) -> float:
        """When the next step of an engine of prompts begins."""
        return min(each.next_seconds for each in self.prompts)

    @property
    def _next_answer(self) -> float:
        """When the next step of an engine of answers begins, also if a cache comes first."""
        coming = self._moving[0][0] if self._moving else inf
        return min(coming, *(each.next_seconds for each in self.answers))

    @property
    def _next_cache(self) -> float:
        """No cache begins to move sooner, beside those that do."""
        return min(self._next_prompt, self._sent[0][0] if self._sent else inf)

    def _begin(self, seconds: float, journey: int) -> None:
        """A request is there: an engine of prompts has it."""
        request = self.journeys[journey].request
        engine = min(self.prompts, key=_load)
        of_prompt = Request(request.prompt, 1, prefix_tokens=request.prefix_tokens)
        self._at[id(engine), engine.send(of_prompt, seconds)] = journey

    def _prompt(self, engine: PricedEngine) -> None:
        """A step of an engine of prompts; the caches of those that are through begin to move."""
        for number in engine.advance():
            journey = self._at[id(engine), number]
            own = self.journeys[journey]
            own.first_token_seconds = own.last_token_seconds = engine.now
            if own.request.new_tokens == 1:
                self._send_next(engine.now)
            else:
                moved = self.moved_seconds(len(own.request.prompt))
                heappush(self._moving, (engine.now + moved, journey))

    def _arrive(self, seconds: float, journey: int) -> None:
        """A cache is there: the request has its next token from the first one, which is not in the cache yet."""
        engine = min(self.answers, key=_load)
        request = self.journeys[journey].request
        held = len(request.prompt)
        further = Request((0,) * (held + 1), request.new_tokens - 1, prefix_tokens=held)
        self._at[id(engine), engine.send(further, seconds)] = journey

    def _answer(self, engine: PricedEngine) -> None:
        """A step of an engine of answers, or several that begin before another cache may come."""
        coming = self._moving[0][0] if self._moving else inf
        for number in engine.advance(min(self._next_cache, coming)):
            self.journeys[self._at[id(engine), number]].last_token_seconds = engine.last[number]
            self._send_next(engine.now)

    def _send_next(self, now: float) -> None:
        if self.closed:
            self._send(now)


def _load(engine: PricedEngine) -> int:
    """The requests that an engine has."""
    return len(engine.engine.requests) - len(engine.engine.answers)
