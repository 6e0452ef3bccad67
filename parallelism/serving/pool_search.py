"""The search for plans with prefill on devices of its own: how many devices, and the layouts of both pools.

Pairs of layouts are ordered by a bound of their requests a second, that of the slower pool.  The best pairs are run
through the workload (`parallelism.serving.pools`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, gcd, prod
from typing import TYPE_CHECKING

from parallelism.memoized import memoized
from parallelism.serving.engine import Engine, EngineSettings
from parallelism.serving.fits import Candidate, Fit, Room
from parallelism.serving.plans import SLACK, Layout, PrefillPool, ServingPlan, Task, memory_of
from parallelism.serving.pools import PooledRun
from parallelism.serving.priced_engine import PricedEngine

if TYPE_CHECKING:
    from parallelism.serving.search import Search

PREFILL_SETTINGS = ("tp", "pp", "ep", "replicas")
LONGEST_CHUNK = 8192
"""The most tokens of a step of prompts, unless prompts and answers together have more."""
MOST_SPLITS = 16
"""The most ways to divide the devices that are tried, where the layout of prefill does not say it."""
MOST_PAIRS = 8
"""The most pairs of layouts that are run through the workload: those with the best bounds, and `QUICKEST` more."""
QUICKEST = 4
"""The pairs that are run besides, whose tokens take least."""
MOST_ENGINES = 5
"""A pair that is no multiple of a part with at most so many replicas of attention is left out: each is an engine."""


@dataclass(frozen=True)
class _Prompts:
    """A layout of prefill."""

    layout: Layout
    fit: Fit
    batch: int
    """Prompts of a replica of attention at a time."""
    room: Room
    requests_per_second: float
    """About the most."""
    seconds: float
    """About the least that a prompt takes."""


@dataclass(frozen=True)
class _Pair:
    """A layout of prefill, and one of the other devices with its requests at a time."""

    prompts: _Prompts
    answers: Candidate
    requests_per_second: float


def checked_prefill(prefill: Mapping[str, int], devices: int) -> dict[str, int]:
    """The settings of devices that compute prompts.  ``ValueError`` for others, and where no device is left."""
    if not isinstance(prefill, Mapping):
        raise TypeError(f"prefill must be a dict of settings, as {{'tp': 2, 'replicas': 3}}; got {prefill!r}")
    for name, value in prefill.items():
        if name not in PREFILL_SETTINGS:
            raise ValueError(f"the settings of prefill are {', '.join(PREFILL_SETTINGS)}, got {name!r}")
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} of prefill must be an integer of at least 1, got {value!r}")
    least = prod(prefill.values())
    if least >= devices:
        raise ValueError(f"prefill on {least} devices leaves none of {devices} for the answers")
    return dict(prefill)


def task_of_prompts(task: Task) -> Task:
    """The task of the devices that compute prompts alone."""
    lengths = tuple((prompt, 1) for prompt, _ in task.workload.lengths)
    longest = max(prompt for prompt, _ in lengths)
    chunk = max(task.chunk, min(longest, LONGEST_CHUNK))
    return replace(task, workload=replace(task.workload, lengths=lengths), chunk=chunk)


class PoolSearch:
    """Plans with prefill on devices of its own, for the task of a search."""

    def __init__(self, search: Search, of_prompts: Search, fixed: Mapping[str, int]) -> None:
        self.search, self.task = search, search.task
        self.of_prompts = of_prompts
        """The search for the layouts of prefill, with the task of `task_of_prompts`."""
        self.fixed = fixed
        self.mean = self.task.workload.mean_lengths[0]
        """Tokens of a prompt."""

    def rows(self) -> Iterator[ServingPlan]:
        """The plans of the best pairs.  Those that are left out are counted by the search."""
        pairs = [pair for pair in self._pairs() if not self._is_hopeless(pair)]
        pairs.sort(key=lambda pair: (-pair.requests_per_second, pair.answers.batch))
        quickest = sorted(pairs[MOST_PAIRS:], key=lambda pair: pair.answers.token_seconds)[:QUICKEST]
        chosen = [*pairs[:MOST_PAIRS], *quickest]
        self.search.left_out += len(pairs) - len(chosen)
        for reason, count in self.of_prompts.refused.items():
            self.search.refused[f"prefill: {reason}"] += count
        for pair in chosen:
            yield self.search.priced(partial(self._priced, pair))

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def _pairs(self) -> Iterator[_Pair]:
        for devices in self._sizes():
            prompts = [each for layout in self.of_prompts.layouts(devices) for each in self._prompts(layout)]
            if not prompts:
                continue
            answers = [
                [*self.search.candidates(layout)]
                for layout in self.search.layouts(self.task.devices - devices)
            ]
            for one, others in product(prompts, filter(None, answers)):
                yield from self._matched(one, others)

    def _matched(self, prompts: _Prompts, answers: Sequence[Candidate]) -> Iterator[_Pair]:
        """The pairs of two layouts: with fewer requests at a time than keep up with prefill, and with the fewest that do."""
        if _engines(prompts.layout, answers[0].layout) > MOST_ENGINES:
            self.search.left_out += len(answers)
            return
        for number, each in enumerate(answers):  # the fewest requests at a time first
            answered = self._answered(each)
            yield _Pair(prompts, each, min(prompts.requests_per_second, answered))
            if answered >= prompts.requests_per_second:
                self.search.left_out += len(answers) - number - 1
                return

    def _sizes(self) -> list[int]:
        """The numbers of devices of prefill that are tried."""
        if len(self.fixed) == len(PREFILL_SETTINGS):
            return [Layout(**self.fixed).devices]
        step = -(-self.task.devices // MOST_SPLITS)
        return [*range(step, self.task.devices, step)]

    def _prompts(self, layout: Layout) -> Iterator[_Prompts]:
        fit = self._fit(layout._replace(replicas=1))
        task = self.of_prompts.task
        batch = max(1, round(task.chunk / self.mean))
        room = fit.room(2 * batch)  # as many again wait until their caches are sent
        if room is None:
            self.search.refused["the cache of prompts does not fit the memory of prefill"] += 1
            return
        computed = max(self.mean * (1 - task.workload.hits), 1.0)
        tokens = int(min(computed, task.chunk))
        alone = fit.step_seconds(tokens, 1, 0, through=True) * computed / tokens
        works = min(layout.pp, batch)
        slowest = fit.step_seconds(task.chunk, batch, 0)
        through = fit.step_seconds(task.chunk, batch, 0, through=True)
        many = max(slowest, through / works) * computed / task.chunk
        yield _Prompts(layout, fit, batch, room, layout.attentions / many, alone)

    @memoized
    def _fit(self, layout: Layout) -> Fit:
        """As of the other devices, with the same prices."""
        found = self.search.fit(layout)
        task = self.of_prompts.task
        settings = replace(found.prices.settings, chunk=task.chunk)
        return replace(found, task=task, prices=found.prices.with_settings(settings))

    def _answered(self, answers: Candidate) -> float:
        """About the most requests a second that a layout of the other devices answers."""
        _, new = self.task.workload.mean_lengths
        own = -(-answers.batch // answers.layout.ep)
        return answers.layout.attentions * own / answers.token_seconds / max(new - 1, 1)

    def _is_hopeless(self, pair: _Pair) -> bool:
        task = self.task
        limits = (
            (pair.prompts.seconds, task.first_token_seconds),
            (pair.answers.token_seconds, task.token_seconds),
        )
        late = any(limit is not None and found > SLACK * limit for found, limit in limits)
        if task.is_loaded and None not in (task.first_token_seconds, task.token_seconds):
            late = late or self._most_seconds < self._loaded_seconds(pair) / SLACK
        self.search.left_out += late
        return late

    @property
    def _most_seconds(self) -> float:
        """The limits of a whole request; both are given."""
        first, token = self.task.first_token_seconds, self.task.token_seconds
        assert first is not None
        assert token is not None
        return first + (self.task.workload.mean_lengths[1] - 1) * token

    def _loaded_seconds(self, pair: _Pair) -> float:
        """By Little's law, about the least that a request takes where there are as many as the plan takes at a time."""
        answering = pair.answers.batch * pair.answers.layout.replicas
        return answering / pair.requests_per_second

    # -- a pair --------------------------------------------------------------------------------------------------------

    def _priced(self, pair: _Pair, seed: int = 0) -> ServingPlan:
        """The plan of a pair, with the arrivals of this seed: one of the equal parts that its replicas can be divided into is
        run."""
        task, layout, prompts = self.task, pair.answers.layout, pair.prompts
        times = gcd(prompts.layout.attentions, layout.attentions)
        own = -(-pair.answers.batch // layout.ep)
        of_prompts = [self._prompt_engine(prompts) for _ in range(prompts.layout.attentions // times)]
        of_answers = [self._answer_engine(pair.answers, own) for _ in range(layout.attentions // times)]
        workload = replace(task.workload.shared(times), seed=seed)
        if task.is_loaded:
            places = own * len(of_answers) + prompts.batch * len(of_prompts)
            workload = replace(workload, concurrency=min(places, self._busy(pair, times)))
        keeps_up = task.workload.rate is None or self._capacity(pair) >= task.workload.rate
        count = workload.enough(pair.answers.token_seconds, None if keeps_up else own * len(of_answers))
        moved = partial(self._moved_seconds, prompts, pair.answers)
        run = PooledRun(of_prompts, of_answers, workload, count, moved)
        mean = round(self.mean)
        pool = PrefillPool(
            *prompts.layout,
            prompts.batch * prompts.layout.ep,
            max(_cache_bytes(pair.answers.fit, mean)),
            self._moved_seconds(prompts, pair.answers, mean),
            memory_of(self.of_prompts.task, prompts.layout, prompts.room),
        )
        parts = pair.answers.fit.parts(own)
        return ServingPlan.of(
            task,
            layout,
            pair.answers.batch,
            pair.answers.room,
            run.served(),
            parts,
            times=times,
            capacity=self._capacity(pair),
            prefill=pool,
        )

    def _capacity(self, pair: _Pair) -> float:
        """About the requests a second that the slower pool answers in the long run."""
        own = pair.answers.own_batch
        answered = pair.answers.fit.requests_per_second(own, decodes=True) * pair.answers.layout.attentions
        prompts = pair.prompts
        computed = prompts.fit.requests_per_second(prompts.batch) * prompts.layout.attentions
        return min(computed, answered)

    def _busy(self, pair: _Pair, times: int) -> int:
        """So many requests at a time keep one of ``times`` equal parts busy, by Little's law: with more of them, they would
        wait before the slower pool."""
        _, new = self.task.workload.mean_lengths
        seconds = pair.prompts.seconds + (new - 1) * pair.answers.token_seconds
        return max(1, ceil(pair.requests_per_second * seconds / times))

    def _prompt_engine(self, prompts: _Prompts) -> PricedEngine:
        settings = replace(
            prompts.fit.prices.settings,
            batch=2 * prompts.batch,
            chunk=max(self.of_prompts.task.chunk, 2 * prompts.batch),
            pages=prompts.room.pages,
            microbatches=min(prompts.layout.pp, prompts.batch),
            replicas=1,
        )
        return self._engine(prompts.fit, settings)

    def _answer_engine(self, answers: Candidate, own: int) -> PricedEngine:
        settings = replace(
            answers.fit.prices.settings,
            batch=own,
            chunk=max(self.task.chunk, own),
            pages=answers.room.pages,
            microbatches=min(answers.layout.pp, own),
            replicas=1,
        )
        return self._engine(answers.fit, settings)

    def _engine(self, fit: Fit, settings: EngineSettings) -> PricedEngine:
        return PricedEngine(Engine(self.task.spec, settings), fit.prices.with_settings(settings))

    def _moved_seconds(self, prompts: _Prompts, answers: Candidate, tokens: int) -> float:
        """The seconds in which the cache of a prompt of so many tokens is sent, from all devices of a replica at once.

        The fullest device of either side says how many bytes.  They go over the links between the first device of all and
        the last one, where no other message is.
        """
        nbytes = max(*_cache_bytes(prompts.fit, tokens), *_cache_bytes(answers.fit, tokens))
        costs = answers.fit.prices.prices.pricing.costs
        return float(costs.message_seconds(nbytes, 0, self.task.devices - 1))


def _engines(one: Layout, other: Layout) -> int:
    """The replicas of attention of the smallest part that the pools can be divided into."""
    return (one.attentions + other.attentions) // gcd(one.attentions, other.attentions)


def _cache_bytes(fit: Fit, tokens: int) -> list[int]:
    """By stage, the bytes of the cache of a sequence of so many tokens on a device."""
    settings, spec = fit.prices.settings, fit.task.spec
    by_stage = []
    for page_bytes in fit.prices.page_bytes():
        held = (nbytes * settings.table_pages(spec, kind, tokens) for kind, nbytes in page_bytes.items())
        by_stage.append(sum(held))
    return by_stage
