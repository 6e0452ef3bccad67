"""An engine run to its end: on a cluster, on this process alone, or on a simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.arrays import Array
from parallelism.ir.core import TensorType
from parallelism.serving.engine import Engine, Step
from parallelism.serving.served_model import ServedModel, sampled_rows, step_arrays

RunStep = Callable[[Engine, Step], tuple[Mapping[int, int], float]]
"""Runs a step: the token that followed each row that samples, by request, and the seconds that it took."""


@dataclass(frozen=True)
class Answered:
    """A request that was answered: when it arrived, when its tokens came, and how many there are."""

    arrival_seconds: float
    first_token_seconds: float
    """When its first token was there."""
    last_token_seconds: float
    tokens: int

    @property
    def waited_seconds(self) -> float:
        """From its arrival to its first token."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def token_seconds(self) -> float:
        """The mean time of a token after the first; 0 if there is none."""
        return (self.last_token_seconds - self.first_token_seconds) / max(self.tokens - 1, 1)


PERCENTILES = (50, 90, 99)


def at_share(values: Iterable[float], percent: float) -> float:
    """The value that so many of a hundred are at most: one of the values, without interpolation."""
    ordered = sorted(values)
    return ordered[max(ceil(percent / 100 * len(ordered)), 1) - 1]


def percentiles(answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """The times of requests by what part of them has no longer ones; of a token each request has its mean."""
    first = [each.waited_seconds for each in answered]
    token = [each.token_seconds for each in answered]
    return {
        "first_token_percentiles": {f"p{percent}": at_share(first, percent) for percent in PERCENTILES},
        "token_percentiles": {f"p{percent}": at_share(token, percent) for percent in PERCENTILES},
    }


@dataclass(frozen=True)
class Served:
    """A workload that was served."""

    requests: tuple[Answered, ...]
    seconds: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers, by the seconds from the start to the last of them."""
        return sum(each.tokens for each in self.requests) / self.seconds if self.seconds else inf


def run_engine(
    engine: Engine, run: RunStep, told: Callable[[Engine, Step, float], object] | None = None
) -> Served:
    """Steps until every request is answered.  Where no request is there, the clock goes on to the next arrival."""
    now, steps = 0.0, 0
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while not engine.is_done:
        step = engine.step(now)
        if step is None:
            now = max(now, engine.next_arrival_seconds)
            continue
        tokens, seconds = run(engine, step)
        now, steps = now + seconds, steps + 1
        for request in tokens:
            first.setdefault(request, now)
            last[request] = now
        if told is not None:
            told(engine, step, now)
        engine.finish(step, tokens)
    answered = tuple(
        Answered(request.arrival_seconds, first[number], last[number], len(engine.answers[number]))
        for number, request in enumerate(engine.requests)
    )
    return Served(answered, now, steps)


def chosen(engine: Engine, step: Step, logits: list[Array]) -> dict[int, int]:
    """The token that follows each row that samples, by request."""
    tokens = {}
    for work, scores in zip(step, logits, strict=True):
        for replica, place, request in sampled_rows(work):
            number = len(engine.running[request].answer)
            sampling = engine.requests[request].sampling
            tokens[request] = sampling.token(scores[replica, place], request, number)
    return tokens


def on_cluster(
    cluster: Any, served: ServedModel, parameters: Mapping[str, Array], runs: list[Any] | None = None
) -> RunStep:
    """Steps run on the devices of a cluster; ``runs`` gets each run."""
    given: list[Any] = [parameters]

    def run(engine: Engine, step: Step) -> tuple[Mapping[int, int], float]:
        if any(request.prefix_tokens for request in engine.requests):
            raise ValueError("prefix_tokens are for prices; a run computes every token")
        arrays = step_arrays(served.placement, served.settings, engine, step)
        result = cluster.run(served, arrays, *given)
        given.clear()
        if runs is not None:
            runs.append(result)
        return chosen(engine, step, result.result), result.trace.makespan_seconds

    return run


def on_this_process(served: ServedModel, parameters: Mapping[str, Array]) -> RunStep:
    """Steps run by NumPy in this process, for a model on one device."""
    if served.mesh.size != 1:
        raise ValueError(f"{served.name} is placed on {served.mesh!r}; this process is one device")
    function = served.stages[0].program(0)
    cache: list[Array] = []

    def run(engine: Engine, step: Step) -> tuple[Mapping[int, int], float]:
        logits = []
        for numbers, arrays in step_arrays(served.placement, served.settings, engine, step):
            program = function.specialize(**{name: numbers[name] for name in function.symbols})
            given = {f"p.{name}": array for name, array in served.parameters(parameters).items()} | arrays
            types = {value.name: value.type for value in program.inputs}
            names = [name for name in types if name.startswith("cache.")]
            if not cache:
                cache.extend(_zeros(types[name]) for name in names)
            given |= dict(zip(names, cache, strict=True))
            out, *cache[:] = ir.interpret(program, [given[name] for name in types]).outputs
            logits.append(out)
        return chosen(engine, step, logits), 0.0

    return run


def _zeros(type: TensorType) -> Array:
    return np.zeros([int(n) for n in type.shape], type.dtype)
