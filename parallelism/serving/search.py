"""`find_serving`: how to serve a model on some devices, under limits of the time to the first token and of a token.

Every layout (tp, pp, ep and replicas) that fits the memory is combined with numbers of requests at a time.  A row is an
engine run through the workload at the prices of its steps (`parallelism.serving.workloads`).  Rows that cannot meet the
limits, or cannot be faster than one that is found, are left out by bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from os import PathLike
from time import perf_counter
from typing import Any

from parallelism.arrays import plain_number
from parallelism.hardware import Hardware, memory_bytes_of, sized_hardware
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec, transformer
from parallelism.models.inference.caches import kinds_of
from parallelism.models.published import published_positions
from parallelism.serving.engine import PAGE_TOKENS, Engine, EngineSettings
from parallelism.serving.fits import Candidate, Fit
from parallelism.serving.placement import (
    ALONE,
    Placement,
    usual_strategy,
)
from parallelism.serving.plans import CACHE, SLACK, WEIGHTS, Layout, ServingPlan, ServingPlans, Spread, Task
from parallelism.serving.pool_search import PoolSearch, checked_prefill, task_of_prompts
from parallelism.serving.prices import StepPrices
from parallelism.serving.serve import Served
from parallelism.serving.workloads import PricedRun, Workload

BATCHES = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
CHUNK = 2048
"""The tokens of a step, where it is not said."""
MOST_TENSOR_DEVICES = 64
Values = int | Sequence[int] | None


def find_serving(
    spec: TransformerSpec | str,
    hardware: Hardware | str | PathLike[str],
    devices: int | None = None,
    *,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    hits: float = 0.0,
    first_token_seconds: float | None = None,
    token_seconds: float | None = None,
    precision: str = "bf16",
    cache_dtype: str | None = None,
    chunk: int | None = None,
    memory: float | str | None = None,
    reserve: float | str | None = None,
    price: float | None = None,
    percentile: float | None = None,
    tp: Values = None,
    pp: Values = None,
    ep: Values = None,
    replicas: Values = None,
    batch: Values = None,
    positions: int | None = None,
    disaggregate: bool = False,
    prefill: Mapping[str, int] | None = None,
) -> ServingPlans:
    """The best ways to serve a model.

    >>> from parallelism import models
    >>> plans = find_serving(models.transformer("llama3.1-8b"), "dgx-h100", 2, input_tokens=500, output_tokens=20, batch=4)
    >>> plans.best.tp * plans.best.pp * plans.best.replicas
    2

    ``spec`` is the model, or the name of a published one.

    ``input_tokens`` and ``output_tokens`` are those of every request, or ``lengths`` has pairs of them in turn.  So many
    clients as ``concurrency`` says send one request after the other; or ``rate`` requests a second arrive; with neither the
    devices have as many requests as the plan takes at a time.  ``hits`` is the part of prompts that is in the cache already.
    ``first_token_seconds`` and ``token_seconds`` are the most that a request waits for its first token, and for each further
    one: in the mean, or of ``percentile`` of a hundred requests, each with the mean of its own tokens.  ``precision`` is
    ``bf16``, ``fp16``, ``fp8``, ``int8`` or ``int4`` (`Precision.parse`), and ``cache_dtype`` that of keys and values, where
    it is another: ``fp8``, ``bf16`` (`CACHE_DTYPES`).  ``chunk`` is the most tokens of a step.  ``memory`` and ``reserve``
    are as for `find_plan`.  ``price`` is that of a device in an hour.  ``tp``, ``pp``, ``ep``, ``replicas`` and ``batch``,
    the requests of a replica at a time, restrict the search to these values.

    Requests that are longer than ``positions`` are refused; None: those of the config of a published model by its name, and
    of a `TransformerSpec` with learned positions its own.

    With ``disaggregate`` plans are searched, too, in which some devices compute prompts alone (prefill) and send what they
    leave in the cache to the others.  ``prefill`` restricts the search to such plans, with these settings of the devices that
    compute prompts: ``{"tp": 2, "replicas": 3}``.  The others are those of the devices that compute answers.

    ``ValueError`` for figures that do not fit together.
    """
    began = perf_counter()
    devices, concurrency, chunk, positions = map(plain_number, (devices, concurrency, chunk, positions))
    _check_limits(first_token_seconds, token_seconds, price, chunk)
    requests = _requests(input_tokens, output_tokens, lengths)
    sized = sized_hardware(hardware, devices)
    count = devices if devices is not None else sized.devices
    is_loaded = concurrency is None and rate is None
    workload = Workload(requests, 1 if is_loaded else concurrency, rate, hits)
    task = Task(
        served_spec(_model(spec), precision),
        sized,
        count,
        workload,
        is_loaded,
        precision,
        chunk or CHUNK,
        first_token_seconds,
        token_seconds,
        None if memory is None else memory_bytes_of("memory", memory),
        None if reserve is None else memory_bytes_of("reserve", reserve, zero=True),
        price,
        cache_dtype,
        percentile,
    )
    _check_length(task, spec, positions)
    search = Search(task, {"tp": tp, "pp": pp, "ep": ep, "replicas": replicas, "batch": batch})
    if disaggregate or prefill is not None:
        search.pools = _pools(search, {} if prefill is None else checked_prefill(prefill, count))
    if prefill is None:
        search.together()
    return search.plans(began)


def _pools(search: Search, fixed: Mapping[str, int]) -> PoolSearch:
    """The search for plans with prefill on devices of its own, with these settings of them."""
    _check_answers(search.task.workload)
    given = {name: (value,) for name, value in fixed.items()}
    of_prompts = Search(task_of_prompts(search.task), {**dict.fromkeys(search.allowed), **given})
    return PoolSearch(search, of_prompts, fixed)


def _model(spec: TransformerSpec | str) -> TransformerSpec:
    if isinstance(spec, str):
        return transformer(spec)
    if not isinstance(spec, TransformerSpec):
        raise TypeError(f"plans of serving are for a TransformerSpec, or its name; got {type(spec).__name__}")
    return spec


def served_spec(spec: TransformerSpec, precision: str) -> TransformerSpec:
    """The model in the dtype of its values."""
    return replace(spec, dtype="float16" if precision == "fp16" else "bfloat16", next_tokens=0)


def _requests(
    input_tokens: int | None, output_tokens: int | None, lengths: Sequence[tuple[int, int]] | None
) -> tuple[tuple[int, int], ...]:
    """The tokens of the prompt and of the answer of requests that come in turn."""
    if lengths is None:
        if input_tokens is None or output_tokens is None:
            raise ValueError(
                "input_tokens and output_tokens must say the lengths of requests, or lengths= of each"
            )
        lengths = [(input_tokens, output_tokens)]
    return tuple(tuple(map(plain_number, pair)) for pair in lengths)


def _check_limits(
    first_token_seconds: float | None, token_seconds: float | None, price: float | None, chunk: int | None
) -> None:
    figures = {"first_token_seconds": first_token_seconds, "token_seconds": token_seconds, "price": price}
    for name, figure in figures.items():
        is_number = not isinstance(figure, str)
        if figure is not None and not (is_number and 0 < figure < inf):
            raise ValueError(f"{name} must be a number above 0, got {figure!r}")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"chunk must be an integer of at least 1, got {chunk!r}")


def _check_length(task: Task, asked: TransformerSpec | str, positions: int | None) -> None:
    """``ValueError`` for requests that are longer than the positions of the model that is asked about."""
    spec, longest = task.spec, task.workload.longest
    if positions is None and isinstance(asked, str):
        positions = published_positions(asked)
    if positions is not None and (type(positions) is not int or positions < 1):
        raise ValueError(f"positions must be an integer of at least 1, got {positions!r}")
    if spec.positions == "learned":
        positions = min(positions or spec.sequence, spec.sequence)
    if positions is not None and longest > positions:
        more = (
            ""
            if spec.positions == "learned"
            else "; positions= (--max-model-len) says to how many it is stretched"
        )
        raise ValueError(
            f"requests of up to {longest} tokens do not fit the {positions} positions of the model{more}"
        )


def _check_answers(workload: Workload) -> None:
    if all(new == 1 for _, new in workload.lengths):
        raise ValueError("answers of one token are prefill alone: there is nothing to disaggregate")


def _values(name: str, value: Values) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = tuple(map(plain_number, value if isinstance(value, Iterable) else (value,)))
    if not values or any(type(each) is not int or each < 1 for each in values):
        raise ValueError(f"{name} must be an integer of at least 1, or several, got {value!r}")
    return values


class Search:
    """The search for the plans of a task: their rows, with figures, and why others are refused."""

    def __init__(self, task: Task, allowed: Mapping[str, Values]) -> None:
        """``allowed``: the settings of the rows; None: any."""
        self.task = task
        self.allowed = {name: _values(name, value) for name, value in allowed.items()}
        self.refused: Counter[str] = Counter()
        self.reasons: dict[Any, str] = {}
        self.rows: list[ServingPlan] = []
        self.left_out = 0
        self._unfilled: dict[Any, tuple[int, Served]] = {}
        """Of runs in which a place in the batch was always free, the most requests at a time, and what became of all."""
        self._again: dict[ServingPlan, Callable[[int], ServingPlan]] = {}
        """By row, what gives its figures with the arrivals of a seed."""
        self.pools: PoolSearch | None = None
        """The search for plans with prefill on devices of its own; None: there are none."""

    def together(self) -> None:
        """Finds the plans in which all devices compute prompts and answers."""
        candidates = [each for layout in self.layouts() for each in self.candidates(layout)]
        candidates.sort(key=lambda each: -each.bound)
        late: list[Candidate] = []
        for each in candidates:
            if self._is_hopeless(each):
                late.append(each)
            elif self._is_beaten(each):
                self.left_out += 1
            else:
                self.rows.append(self.priced(partial(self._priced, each)))
        if late and not any(map(self.task.meets, self.rows)):  # the nearest is told
            nearest = min(late, key=lambda each: each.token_seconds)
            late.remove(nearest)
            self.rows.append(self.priced(partial(self._priced, nearest)))
        self.left_out += len(late)

    def plans(self, began: float) -> ServingPlans:
        """All rows that are found, and those that are left out."""
        if self.pools is not None:
            self.rows += self.pools.rows()
        found = ServingPlans(
            self.task,
            tuple(self.rows),
            dict(self.refused),
            dict(self.reasons),
            self.left_out,
            0.0,
            dict(self.allowed),
        )
        is_random = self.task.workload.rate is not None and len(found) > 0
        spread = self._spread(found.best) if is_random else None
        return replace(found, spread=spread, elapsed_seconds=perf_counter() - began)

    # -- layouts -------------------------------------------------------------------------------------------------------

    def layouts(self, devices: int | None = None) -> Iterator[Layout]:
        """The layouts that use all of so many devices, and fit the model and the memory by their weights alone.

        Where it is not said, tensor parallelism stays among the devices of a node, and a pipeline has a stage for each node,
        or two in the only one.
        """
        spec, hardware = self.task.spec, self.task.hardware
        count = self.task.devices if devices is None else devices
        inner = hardware.inside(1) if len(hardware.links) > 1 else hardware.devices
        nodes = max(-(-count // inner), 1)
        more = 2 if nodes == 1 else nodes
        stages = [each for each in (1, more) if count % each == 0]
        for tp in self._choices("tp", [each for each in _divisors(count) if each <= inner]):
            for pp in self._choices("pp", stages):
                for ep in self._choices("ep", _divisors(count)):
                    replicas = count // (tp * pp * ep)
                    if replicas < 1 or tp * pp * ep * replicas != count:
                        continue
                    layout = Layout(tp, pp, ep, replicas)
                    if self.allowed["replicas"] is not None and replicas not in self.allowed["replicas"]:
                        continue
                    reason = self._misfit(layout, spec)
                    if reason is None:
                        yield layout
                    else:
                        self._refuse(layout, None, reason)

    def _choices(self, name: str, usual: Sequence[int]) -> Sequence[int]:
        allowed = self.allowed[name]
        return usual if allowed is None else allowed

    def _misfit(self, layout: Layout, spec: TransformerSpec) -> str | None:
        """Why a layout is none for the model; None if it is."""
        experts = spec.experts
        if spec.heads % layout.tp:
            return f"the {spec.heads} heads are not split evenly over tp"
        if spec.attention is None and spec.groups % layout.tp and layout.tp % spec.groups:
            return f"the {spec.groups} heads of keys and values are not split or copied evenly over tp"
        linear = spec.linear_attention
        if linear is not None and not linear.is_dealt(layout.tp):
            return f"the {linear.heads} heads of linear attention are not split evenly over tp"
        if layout.ep > 1 and experts is None:
            return "the model has no experts to split over ep"
        if experts is not None and experts.count % layout.ep:
            return f"the {experts.count} experts are not split evenly over ep"
        if layout.pp > spec.layers:
            return f"there are fewer layers, {spec.layers}, than stages"
        least = self._least_weights(layout)
        if least > self._usable(layout):
            return WEIGHTS
        return None

    def _least_weights(self, layout: Layout) -> float:
        """No device of the layout has fewer bytes of weights."""
        return self.task.weights_bytes / (layout.tp * layout.pp * layout.ep)

    def _usable(self, layout: Layout) -> float:
        return self.task.usable_bytes(sum(size > 1 for size in (layout.tp, layout.pp, layout.ep)))

    def _refuse(self, layout: Layout, batch: int | None, reason: str) -> None:
        self.refused[reason] += 1
        self.reasons[(*layout, batch)] = reason

    # -- rows ----------------------------------------------------------------------------------------------------------

    def candidates(self, layout: Layout) -> Iterator[Candidate]:
        """The numbers of requests at a time that fit a layout."""
        fit = self.fit(layout)
        for batch in self._batches(layout):
            each = -(-batch // layout.ep)
            room = fit.room(each)
            if room is None:
                self._refuse(layout, batch, CACHE)
                continue
            bound = fit.bound(each) * layout.ep * layout.replicas
            yield Candidate(layout, batch, bound, fit.token_seconds(each), fit, room)

    def _batches(self, layout: Layout) -> list[int]:
        if self.allowed["batch"] is not None:
            return sorted(self.allowed["batch"])
        clients = self.task.workload.concurrency
        if self.task.is_loaded or clients is None:
            return [each * layout.ep for each in BATCHES]
        most = -(-clients // layout.replicas)
        return sorted({each for each in BATCHES if each < most} | {most})

    def fit(self, layout: Layout) -> Fit:
        """The memory that a layout leaves for the cache."""
        return self._fit(layout._replace(replicas=1))

    @memoized
    def _fit(self, layout: Layout) -> Fit:
        task = self.task
        shape = {"pp": layout.pp, "ep": layout.ep, "tp": layout.tp}
        axes = {axis: size for axis, size in shape.items() if size > 1}
        mesh = Mesh(**axes) if axes else ALONE
        placement = Placement(task.spec, mesh, usual_strategy(mesh))
        pages = dict.fromkeys(kinds_of(placement.spec), 1)
        settings = EngineSettings(1, task.chunk, PAGE_TOKENS, pages, placement.replicas, frees_pages=True)
        prices = StepPrices(placement, settings, task.hardware, precision=task.dtypes)
        return Fit(task, layout, prices, self._usable(layout))

    def _is_hopeless(self, each: Candidate) -> bool:
        """Whether a row cannot meet the limits: by Little's law so many requests at a time take so long, each."""
        task = self.task
        first, token = task.first_token_seconds, task.token_seconds
        _, new = task.workload.mean_lengths
        if token is not None and each.token_seconds > SLACK * token:
            return True
        if first is None or token is None or not task.is_loaded or task.percentile is not None:
            return False
        return each.batch * each.layout.replicas * new / each.bound > SLACK * (first + (new - 1) * token)

    def _is_beaten(self, each: Candidate) -> bool:
        """Whether a row that is found, and meets the limits, has more tokens a second and a shorter time of a token than this
        one can have; or whether more arrive than this one answers in the long run, and a row that is found answers them."""
        rate = self.task.workload.rate
        if rate is not None and each.requests_per_second() < rate:
            return any(row.requests_per_second == rate and self.task.meets(row) for row in self.rows)
        return any(
            self.task.meets(row)
            and row.tokens_per_second > SLACK * each.bound
            and row.token_seconds * SLACK < each.token_seconds
            for row in self.rows
        ) or self._is_between(each)

    def _is_between(self, each: Candidate) -> bool:
        """Whether a row has many requests at a time, and cannot have as many tokens a second as one that is found: then it is
        neither the first nor one of those that answer a user fastest."""
        best = max((row.tokens_per_second for row in self.rows if self.task.meets(row)), default=0.0)
        return best > SLACK * each.bound and each.batch > FEW * each.layout.ep

    def priced(self, figures: Callable[[int], ServingPlan]) -> ServingPlan:
        """A row, given what gives its figures with the arrivals of a seed: seed 0, and others for `_spread`."""
        row = figures(0)
        self._again[row] = figures
        return row

    def _spread(self, plan: ServingPlan) -> Spread:
        """What other series of random arrivals give for a plan."""
        more = [self._again[plan](seed) for seed in range(1, SERIES)]
        return Spread.of([plan, *more])

    def _priced(self, each: Candidate, seed: int = 0) -> ServingPlan:
        """The figures of a row with the arrivals of this seed."""
        task, layout = self.task, each.layout
        own = each.own_batch
        settings = replace(
            each.fit.prices.settings,
            batch=own,
            chunk=max(task.chunk, own),
            pages=each.room.pages,
            microbatches=min(layout.pp, own),
            replicas=1,
        )
        workload = replace(task.workload.shared(layout.replicas * layout.ep), seed=seed)
        if task.is_loaded:
            workload = replace(workload, concurrency=own)
        prices = each.fit.prices.with_settings(settings)
        count = each.enough(workload)
        served = self._served(
            each, PricedRun(Engine(task.spec, settings), prices, workload, count), count, seed
        )
        parts, capacity = each.fit.parts(own), each.requests_per_second()
        return ServingPlan.of(
            task, layout, each.batch, each.room, served, parts, times=layout.attentions, capacity=capacity
        )

    def _served(self, each: Candidate, run: PricedRun, count: int, seed: int) -> Served:
        """What became of the requests of a run.  Those that arrive by themselves, and always find a place free, are answered
        alike whatever a larger batch has room for."""
        settings = run.engine.settings
        key = each.layout, count, settings.chunk, settings.microbatches, seed
        most, known = self._unfilled.get(key, (settings.batch, None))
        if known is not None and most < settings.batch:
            return known
        served = run.served()
        if run.engine.most_running < settings.batch:
            self._unfilled[key] = run.engine.most_running, served
        return served


SERIES = 8
"""So many series of random arrivals tell how much the figures of the first plan are a matter of chance."""
FEW = 4
"""Rows with so few requests of each replica of attention are priced always: they begin the front."""


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, min(number, MOST_TENSOR_DEVICES) + 1) if number % each == 0]
