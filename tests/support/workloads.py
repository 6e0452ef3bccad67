"""Random workloads, and an engine that runs them without a model: a token that follows is a hash of all before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.models import TransformerSpec
from parallelism.models.inference.caches import kinds_of
from parallelism.serving import Engine, EngineSettings, Request
from parallelism.serving.served_model import sampled_rows


def following(tokens: Any, vocabulary: int) -> int:
    """The token that follows some tokens."""
    return (sum((place + 1) * (token + 3) for place, token in enumerate(tokens)) * 2_654_435_761 >> 7) % vocabulary


def answer_to(request: Request, vocabulary: int) -> tuple[int, ...]:
    """What answers a request."""
    tokens = list(request.prompt)
    for _ in range(request.new_tokens):
        tokens.append(following(tokens, vocabulary))
        if tokens[-1] in request.stop:
            break
    return tuple(tokens[len(request.prompt):])


def random_workload(seed: int, spec: TransformerSpec) -> tuple[EngineSettings, list[Request]]:
    """Settings of an engine, and requests that it can answer."""
    rng = np.random.default_rng(seed)
    replicas, microbatches = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    batch, page_tokens = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    chunk = int(rng.integers(-(-batch // microbatches), 12 + batch))
    requests = [
        Request(tuple(rng.integers(0, spec.vocabulary, rng.integers(1, 25)).tolist()), int(rng.integers(1, 12)),
                frozenset(rng.integers(0, spec.vocabulary, rng.integers(0, 3)).tolist()),
                arrival_seconds=float(rng.integers(0, 20)))
        for _ in range(rng.integers(1, 15))
    ]
    first = EngineSettings(batch, chunk, page_tokens, {"full": 1, "window": 1}, replicas, microbatches)
    pages = {}
    for kind in kinds_of(spec):
        least = max(first.table_pages(spec, kind, request.cached_tokens) for request in requests)
        pages[kind] = least + int(rng.integers(0, 2 * least + 2))
    return EngineSettings(batch, chunk, page_tokens, pages, replicas, microbatches), requests


class CheckedEngine:
    """Runs the steps of an engine, and holds each against what may be: it writes down who has which page and place."""

    def __init__(self, spec: TransformerSpec) -> None:
        self.spec, self.written = spec, dict[tuple[int, str, int, int], tuple[int, int]]()

    def __call__(self, engine: Engine, step: Any) -> tuple[dict[int, int], float]:
        self._check_pages(engine)
        tokens: dict[int, int] = {}
        seen: set[int] = set()
        for work in step:
            for replica, rows in enumerate(work.rows):
                assert sum(row.stop - row.start for row in rows) <= engine.settings.chunk
                for row in rows:
                    assert row.request not in seen, "a request is in a step once"
                    seen.add(row.request)
                    each = engine.running[row.request]
                    assert (each.replica, each.done) == (replica, row.start)
                    self._write(engine, replica, row)
                    self._read(engine, replica, row)
            tokens |= {request: following(engine.context(request), self.spec.vocabulary)
                       for _, _, request in sampled_rows(work)}
        return tokens, 1.0

    def _check_pages(self, engine: Engine) -> None:
        """No two requests have a page, and a page is free or somebody's."""
        for replica, pages in enumerate(engine.pages):
            for kind, of_kind in pages.items():
                own = [page for number, each in engine.running.items() if each.replica == replica
                       for page in engine.table(number, kind)]
                assert len(own) == len({*own})
                assert len(own) + of_kind.free == of_kind.count

    def _place(self, engine: Engine, kind: str, request: int, position: int) -> tuple[int, int]:
        table, size = engine.table(request, kind), engine.settings.page_tokens
        ring = engine.settings.ring_pages(self.spec) if kind == "window" else len(table)
        place = position % (ring * size)
        return table[place // size], place % size

    def _write(self, engine: Engine, replica: int, row: Any) -> None:
        for kind in engine.kinds:
            for position in range(row.start, row.stop):
                self.written[replica, kind, *self._place(engine, kind, row.request, position)] = row.request, position

    def _read(self, engine: Engine, replica: int, row: Any) -> None:
        """Every token finds all that it attends to."""
        for kind in engine.kinds:
            for position in range(row.start, row.stop):
                window = self.spec.window if kind == "window" else None
                for before in range(0 if window is None else max(0, position - window + 1), position + 1):
                    there = self.written[replica, kind, *self._place(engine, kind, row.request, before)]
                    assert there == (row.request, before), (kind, position, before)
