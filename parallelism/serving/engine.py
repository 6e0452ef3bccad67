"""`Engine`: which tokens of which requests are worked on in each step, and where their caches lie.  It is a value machine:
it runs nothing, so the same engine drives a cluster, a simulation and a price.

A request waits until a place in the batch and all the pages that it may ever need are free, so it is never thrown out
again.  In a step first every request whose prompt is through has its next token; then prompts, in the order of their
arrival, have what is left of ``chunk`` tokens (Agrawal et al., *Sarathi-Serve*, 2024, arXiv:2403.02310, section 4).
Requests join and leave between any two steps (Yu et al., *Orca*, OSDI 2022, section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from parallelism.models import TransformerSpec
from parallelism.models.inference.caches import STATES, WINDOW, kinds_of
from parallelism.serving.pages import Pages
from parallelism.serving.requests import Request

PAGE_TOKENS = 16
"""The tokens of a page, where nobody says another number: those of a block of vLLM."""


@dataclass(frozen=True)
class EngineSettings:
    """How many requests a replica works on at a time, and how many tokens in a step.

    ``pages`` of each kind of layers are those of a replica.  ``microbatches`` share the requests of a replica, so that the
    stages of a pipeline work at the same time.  ``ValueError`` for figures below 1.
    """

    batch: int
    """The most requests of a replica."""
    chunk: int
    """The most tokens of a step, of a replica and microbatch."""
    page_tokens: int
    pages: Mapping[str, int]
    replicas: int = 1
    microbatches: int = 1
    frees_pages: bool = False
    """Whether pages behind a window are free at once, as in software that serves: a sequence keeps its window alone.
    Programs that run have rings, in which the tokens of a step have room beside the window."""

    def __post_init__(self) -> None:
        figures = {"batch": self.batch, "chunk": self.chunk, "page_tokens": self.page_tokens}
        figures |= {"replicas": self.replicas, "microbatches": self.microbatches}
        figures |= {f"pages of {kind} layers": count for kind, count in self.pages.items()}
        for name, value in figures.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        least = -(-self.batch // self.microbatches)
        if self.chunk < least:
            raise ValueError(
                f"chunk must be at least the requests of a microbatch, {least}, got {self.chunk}"
            )

    def ring_pages(self, spec: TransformerSpec) -> int:
        """The pages in which a sequence has its window: it and the tokens of a step, which are written first.  Where pages
        are free at once, the pages that a window touches: its first token lies anywhere in one."""
        window = spec.window or 1
        return -(-(window + (self.page_tokens if self.frees_pages else self.chunk) - 1) // self.page_tokens)

    def step_pages(self) -> int:
        """The pages of the tokens of a step beside the windows of all sequences, where pages behind windows are free."""
        return -(-self.chunk // self.page_tokens) if self.frees_pages else 0

    def table_pages(self, spec: TransformerSpec, kind: str, tokens: int) -> int:
        """The pages that a sequence of so many tokens has in layers of a kind; its states are in one slot."""
        if kind == STATES:
            return 1
        needed = -(-tokens // self.page_tokens)
        return min(needed, self.ring_pages(spec)) if kind == WINDOW else needed


@dataclass(frozen=True)
class Row:
    """Tokens ``start`` to ``stop - 1`` of a request, in one step; ``samples``: another token follows them."""

    request: int
    start: int
    stop: int
    samples: bool

    def later(self, steps: int) -> Row:
        """The same ``steps`` tokens later."""
        return Row(self.request, self.start + steps, self.stop + steps, self.samples)


@dataclass(frozen=True)
class Work:
    """The work of a microbatch of a step: rows for each replica."""

    rows: tuple[tuple[Row, ...], ...]

    @property
    def tokens(self) -> int:
        """The most tokens of a replica."""
        counts = []
        for rows in self.rows:
            counts.append(sum(row.stop - row.start for row in rows))
        return max(counts)

    @property
    def sampled(self) -> int:
        """The most rows of a replica that another token follows."""
        counts = []
        for rows in self.rows:
            counts.append(sum(row.samples for row in rows))
        return max(counts)

    @property
    def stops(self) -> tuple[tuple[int, ...], ...]:
        """Where the rows of each replica stop."""
        return tuple(tuple([row.stop for row in rows]) for rows in self.rows)

    def later(self, steps: int) -> Work:
        """The same ``steps`` tokens later."""
        return Work(tuple(tuple(row.later(steps) for row in rows) for rows in self.rows))


Step = tuple[Work, ...]
"""The works of all microbatches that have any."""


@dataclass
class _Running:
    """A request that has its pages."""

    number: int
    request: Request
    replica: int
    microbatch: int
    done: int = 0
    """Tokens in the cache."""
    answer: list[int] = field(default_factory=list)


class Engine:
    """Requests in the order of their arrival, and the state of those that run.

    ``step(now)`` says what comes next, None if no request is there; ``finish(step, tokens)`` takes the tokens that
    followed.  ``ValueError``, before anything runs, for a request that cannot have its pages or its positions.
    """

    def __init__(
        self, spec: TransformerSpec, settings: EngineSettings, requests: Sequence[Request] = ()
    ) -> None:
        self.spec, self.settings = spec, settings
        self.kinds = kinds_of(spec)
        missing = [kind for kind in self.kinds if kind not in settings.pages]
        if missing:
            raise ValueError(
                f"pages must say how many {missing[0]} layers have; it has {', '.join(settings.pages)}"
            )
        self.pages = [
            {kind: Pages(settings.pages[kind]) for kind in self.kinds} for _ in range(settings.replicas)
        ]
        self.requests: list[Request] = []
        self.answers: dict[int, tuple[int, ...]] = {}
        """By number of a request that is answered, its tokens."""
        self.running: dict[int, _Running] = {}
        self.most_running = 0
        """The most requests that ran at a time."""
        self._waiting: deque[int] = deque()
        for request in sorted(requests, key=lambda each: each.arrival_seconds):
            self.add(request)

    def add(self, request: Request) -> int:
        """The number of a request that arrives, after all others."""
        self._check(request)
        self.requests.append(request)
        self._waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    @property
    def is_done(self) -> bool:
        """Whether every request is answered."""
        return not (self._waiting or self.running)

    @property
    def next_arrival_seconds(self) -> float:
        """When the first request arrives of those that wait; infinity if none does."""
        return min((self.requests[number].arrival_seconds for number in self._waiting), default=inf)

    def step(self, now: float = inf) -> Step | None:
        """What is worked on next, of the requests that have arrived by ``now``; None if there is nothing."""
        self._admit(now)
        works = [self._work(microbatch) for microbatch in range(self.settings.microbatches)]
        return tuple(work for work in works if work is not None) or None

    def finish(self, step: Step, tokens: Mapping[int, int]) -> None:
        """Takes the token that followed each row that samples, by number of its request."""
        for row in (row for work in step for rows in work.rows for row in rows):
            each = self.running[row.request]
            each.done = row.stop
            if not row.samples:
                continue
            each.answer.append(tokens[row.request])
            is_last = len(each.answer) == each.request.new_tokens or each.answer[-1] in each.request.stop
            if is_last:
                self.answers[row.request] = tuple(each.answer)
                self._leave(each)

    def context(self, request: int) -> Sequence[int]:
        """All tokens of a running request: its prompt, and what followed."""
        each = self.running[request]
        return (*each.request.prompt, *each.answer)

    def table(self, request: int, kind: str) -> tuple[int, ...]:
        """The pages of a running request in layers of a kind."""
        return self.pages[self.running[request].replica][kind].of(request)

    # -- who joins -----------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        spec = self.spec
        if spec.positions == "learned" and request.cached_tokens > spec.sequence:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.new_tokens} new ones do not fit the "
                f"{spec.sequence} positions of the model"
            )
        for kind in self.kinds:
            needed = self.settings.table_pages(spec, kind, request.cached_tokens)
            if needed > self.settings.pages[kind]:
                raise ValueError(
                    f"a prompt of {len(request.prompt)} tokens and {request.new_tokens} new ones need {needed} pages of "
                    f"{self.settings.page_tokens} tokens, and the cache has {self.settings.pages[kind]}"
                )

    def _admit(self, now: float) -> None:
        """Those that wait join, in their order, as long as the first of them can."""
        while self._waiting:
            number = self._waiting[0]
            request = self.requests[number]
            replica = self._replica_for(request) if request.arrival_seconds <= now else None
            if replica is None:
                return
            self._waiting.popleft()
            for kind in self.kinds:
                count = self.settings.table_pages(self.spec, kind, request.cached_tokens)
                self.pages[replica][kind].take(number, count)
            self.running[number] = _Running(
                number, request, replica, self._microbatch_of(replica), request.prefix_tokens
            )
            self.most_running = max(self.most_running, len(self.running))

    def _replica_for(self, request: Request) -> int | None:
        """The replica with the fewest requests of those that can take one more; None if none can."""
        counts = [0] * self.settings.replicas
        for each in self.running.values():
            counts[each.replica] += 1
        needed = {
            kind: self.settings.table_pages(self.spec, kind, request.cached_tokens) for kind in self.kinds
        }

        def is_able(replica: int) -> bool:
            pages = self.pages[replica]
            return counts[replica] < self.settings.batch and all(
                pages[kind].free >= needed[kind] for kind in self.kinds
            )

        able = filter(is_able, range(self.settings.replicas))
        return min(able, key=lambda replica: counts[replica], default=None)

    def _microbatch_of(self, replica: int) -> int:
        """The microbatch with the fewest requests of a replica."""
        counts = [0] * self.settings.microbatches
        for each in self.running.values():
            if each.replica == replica:
                counts[each.microbatch] += 1
        return counts.index(min(counts))

    def _leave(self, each: _Running) -> None:
        for kind in self.kinds:
            self.pages[each.replica][kind].give_back(each.number)
        del self.running[each.number]

    # -- what they do --------------------------------------------------------------------------------------------------

    def _work(self, microbatch: int) -> Work | None:
        rows = tuple(tuple(self._rows(replica, microbatch)) for replica in range(self.settings.replicas))
        return Work(rows) if any(rows) else None

    def _rows(self, replica: int, microbatch: int) -> list[Row]:
        """The next token of every request whose prompt is through, and then prompts, as many tokens as are left."""
        own = [
            each for each in self.running.values() if (each.replica, each.microbatch) == (replica, microbatch)
        ]
        prompts = [each for each in own if each.done < len(each.request.prompt)]
        through = [each for each in own if each.done >= len(each.request.prompt)]
        rows = [Row(each.number, each.done, each.done + 1, samples=True) for each in through]
        left = self.settings.chunk - len(rows)
        for each in prompts:
            stop = min(len(each.request.prompt), each.done + left)
            if stop > each.done:
                rows.append(Row(each.number, each.done, stop, samples=stop == len(each.request.prompt)))
                left -= stop - each.done
        return rows


def read_and_scored(
    spec: TransformerSpec, settings: EngineSettings, work: Work, kind: str
) -> tuple[int, int]:
    """What one layer of a kind does for a work, as ``(read, scored)``; of several replicas the largest numbers count.

    In attention, ``read`` counts the places of the cache that are read, in whole pages, and ``scored`` the scores of one
    head.  In a layer with states, ``read`` counts the states that are read and written, and ``scored`` the chunks of rows
    that have several tokens.
    """
    read = scored = 0
    for rows in work.rows:
        if kind == STATES:
            read, scored = max(read, len(rows)), max(scored, sum(_chunks(spec, row) for row in rows))
            continue
        window = spec.window if kind == WINDOW else None
        pages = sum(_pages_read(row, window, settings.page_tokens) for row in rows)
        read = max(read, pages * settings.page_tokens)
        scored = max(scored, sum(_scores(row, window) for row in rows))
    return read, scored


def _pages_read(row: Row, window: int | None, page_tokens: int) -> int:
    """The pages that tokens of a sequence read: from that of the first token in the window of the first of them on."""
    first = 0 if window is None else max(row.start + 1 - window, 0)
    return -(-row.stop // page_tokens) - first // page_tokens


def _chunks(spec: TransformerSpec, row: Row) -> int:
    """The chunks of a row in a kernel of whole sequences; a single token goes through another kernel."""
    assert spec.linear_attention is not None
    tokens = row.stop - row.start
    return -(-tokens // spec.linear_attention.tokens_of_chunk) if tokens > 1 else 0


def _scores(row: Row, window: int | None) -> int:
    """The scores of the tokens of a row: each attends to those before it, and to itself."""
    whole = row.stop * (row.stop + 1) // 2 - row.start * (row.start + 1) // 2
    if window is None:
        return whole
    beyond = max(row.stop - window, 0), max(row.start - window, 0)
    return whole - (beyond[0] * (beyond[0] + 1) // 2 - beyond[1] * (beyond[1] + 1) // 2)


def padded(count: int) -> int:
    """The number of tokens of a step as it runs: captured graphs are there for 1, 2, 4 and multiples of 8, as in vLLM.

    >>> [padded(n) for n in (1, 3, 5, 8, 9, 17)]
    [1, 4, 8, 8, 16, 24]
    """
    if count <= 8:
        return 1 << (count - 1).bit_length() if count > 1 else count
    return -(-count // 8) * 8
