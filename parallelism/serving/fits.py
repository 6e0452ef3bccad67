"""`Fit`: what of the memory of a device a layout leaves for the cache, and bounds of what it can do.

A `Candidate` is a row of a search before it is priced: a layout with a number of requests at a time, and its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelism.memoized import memoized
from parallelism.models.inference.caches import FULL, STATES, WINDOW, kinds_of
from parallelism.serving.engine import padded
from parallelism.serving.placement import PICKED, READ, SCORED, TABLE, TOKENS
from parallelism.serving.plans import Layout, Task
from parallelism.serving.prices import StepParts, StepPrices
from parallelism.serving.workloads import MOST_UNDER_WAY, Workload


@dataclass(frozen=True)
class Room:
    """The pages of a replica of attention by kind of layers, and the bytes of a device."""

    pages: dict[str, int]
    weights_bytes: int
    cache_bytes: int
    activations_bytes: int


@dataclass(frozen=True)
class Fit:
    """What of the memory of a device is left for the cache under a layout."""

    task: Task
    layout: Layout
    prices: StepPrices
    usable: float

    def room(self, batch: int) -> Room | None:
        """The pages for so many requests of a replica of attention; None if they do not fit."""
        spec, longest, page_bytes = self.task.spec, self.task.workload.longest, self.prices.page_bytes()
        pages = {
            kind: batch * self.prices.settings.table_pages(spec, kind, longest) for kind in kinds_of(spec)
        }
        if WINDOW in pages:
            pages[WINDOW] += self.layout.pp * self.prices.settings.step_pages()
        activations = self._activations(batch)
        weights = [int(stage.weights) for stage in self.prices.stages]
        room_for_full = []
        for stage, nbytes in enumerate(page_bytes):
            left = self.usable - weights[stage] - activations[stage]
            left -= sum(pages[kind] * nbytes[kind] for kind in pages if kind != FULL)
            if left < 0:
                return None
            if FULL in pages:  # whose pages share all that is left
                room_for_full.append(int(left // nbytes[FULL]) if nbytes.get(FULL) else pages[FULL])
        if room_for_full:
            if min(room_for_full) < pages[FULL]:
                return None
            pages[FULL] = min(room_for_full)
        cache = []
        for nbytes in page_bytes:
            cache.append(sum(pages[kind] * nbytes[kind] for kind in pages))
        fullest = max(
            range(len(weights)), key=lambda stage: weights[stage] + activations[stage] + cache[stage]
        )
        return Room(pages, weights[fullest], cache[fullest], activations[fullest])

    @memoized
    def _activations(self, batch: int) -> list[int]:
        """By stage the bytes of values of the largest step."""
        settings, spec = self.prices.settings, self.task.spec
        tokens = max(self.task.chunk, batch)
        return self.prices.activations_bytes(
            {
                TOKENS: padded(tokens),
                PICKED: padded(batch),
                TABLE: settings.table_pages(spec, FULL, self.task.workload.longest),
            }
        )

    def token_seconds(self, batch: int) -> float:
        """The seconds of a step in which so many requests, with their prompts in the cache, have their next tokens: of
        a microbatch of them, through all stages."""
        each = -(-batch // self.layout.pp)
        return self.step_seconds(each, each, self._shortest, through=True)

    def bound(self, batch: int) -> float:
        """About the tokens a second of a replica of attention, at most: what a token takes in a step of tokens alone, and its
        share of the prompts, each token of which takes what one more takes in a large step."""
        prompt, new = self.task.workload.mean_lengths
        computed = max(prompt * (1 - self.task.workload.hits), 1)
        most = max(self.task.chunk, 2 * batch)
        alone = self.step_seconds(batch, batch, self._shortest)
        more = max(self.step_seconds(most, batch, 0) - self.step_seconds(batch, batch, 0), 0.0)
        stages = self.layout.pp if batch < self.layout.pp else 1
        return 1 / (alone * stages / batch + computed / new * more / (most - batch))

    def requests_per_second(self, batch: int, *, decodes: bool = False) -> float:
        """About what a replica of attention answers in the long run, with so many requests at a time always: as `bound`, with
        half of each answer in the cache and half of each prompt seen.  With ``decodes`` prompts, and the first token of each
        answer, are computed elsewhere."""
        prompt, new = self.task.workload.mean_lengths
        computed = max(prompt * (1 - self.task.workload.hits), 1)
        if decodes:
            computed, new = 0.0, max(new - 1, 1.0)
        works = min(self.layout.pp, batch)
        each = -(-batch // works)
        most = max(self.task.chunk, 2 * each)

        def seconds(tokens: int, context: float) -> float:
            return self.prices.step_seconds([self._work(tokens, each, int(context))] * works)

        alone = seconds(each, prompt + new / 2)
        more = max(seconds(most, prompt / 2) - seconds(each, prompt / 2), 0.0) / works / (most - each)
        return 1 / (alone / batch * new + computed * more)

    @property
    def _shortest(self) -> int:
        return min(prompt for prompt, _ in self.task.workload.lengths)

    def step_seconds(self, tokens: int, picked: int, context: int, *, through: bool = False) -> float:
        """The seconds of a step with so many tokens, each of which reads so much of the cache; in a pipeline, of the slowest
        stage, or ``through`` all of them."""
        work = self._work(tokens, picked, context)
        seconds = self.prices.stage_seconds({TOKENS: work[TOKENS], PICKED: work[PICKED]}, [work])
        taken = float(seconds.sum() if through else seconds.max())
        return taken + self.prices.host_seconds([work]) * (self.layout.pp == 1)

    def parts(self, batch: int) -> StepParts:
        """What the time of a token is spent on: of a step in which so many requests of a replica of attention have their next
        tokens, with their prompts and half of their answers in the cache; in a pipeline, of a microbatch of them."""
        prompt, new = self.task.workload.mean_lengths
        each = -(-batch // self.layout.pp)
        return self.prices.parts(self._work(each, each, int(prompt + new / 2)))

    def _work(self, tokens: int, picked: int, context: int) -> dict[str, int]:
        """The numbers of a step with so many tokens, each of which reads so much of the cache."""
        settings, spec = self.prices.settings, self.task.spec
        work = {TOKENS: padded(tokens), PICKED: padded(picked), TABLE: -(-context // settings.page_tokens)}
        for kind in kinds_of(spec):
            seen = min(context, spec.window or context) if kind == WINDOW else context
            if kind == STATES:
                work |= {f"{READ}_{kind}": picked, f"{SCORED}_{kind}": self._chunks(tokens - picked)}
                continue
            work |= {f"{READ}_{kind}": picked * seen if context else 0, f"{SCORED}_{kind}": tokens * seen}
        return work

    def _chunks(self, tokens: int) -> int:
        """The chunks of so many tokens of prompts in kernels of whole sequences."""
        linear = self.task.spec.linear_attention
        return -(-tokens // linear.tokens_of_chunk) if linear is not None else 0


@dataclass(frozen=True)
class Candidate:
    """A row before it is priced."""

    layout: Layout
    batch: int
    bound: float
    """About the most tokens a second, of all devices."""
    token_seconds: float
    """About the least."""
    fit: Fit
    room: Room

    @property
    def own_batch(self) -> int:
        """The requests of a replica of attention at a time."""
        return -(-self.batch // self.layout.ep)

    @memoized
    def requests_per_second(self) -> float:
        """About what all devices answer in the long run."""
        return self.fit.requests_per_second(self.own_batch) * self.layout.attentions

    def enough(self, workload: Workload) -> int:
        """So many requests of the workload of a replica of attention tell what becomes of all (`Workload.enough`)."""
        rate = self.fit.task.workload.rate
        if workload.rate is None or rate is None:
            return workload.enough(self.token_seconds)
        if self.requests_per_second() < rate:
            return workload.enough(self.token_seconds, self.own_batch)
        arriving, under_way = workload.rate * workload.mean_lengths[1], 1
        while under_way < min(MOST_UNDER_WAY, arriving * self.fit.token_seconds(under_way)):
            under_way *= 2
        return workload.enough(self.fit.token_seconds(under_way))
