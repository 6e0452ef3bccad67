"""What a search for a way to serve finds: plans, the best first, the front, and why others are not the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import ceil, inf, log
from typing import Any, NamedTuple

from parallelism.display.quantities import count as shown, decimal_bytes, plural, seconds as shown_seconds
from parallelism.hardware import Hardware, Reserve
from parallelism.models import TransformerSpec
from parallelism.models.inference.caches import FULL, WINDOW
from parallelism.serving.engine import PAGE_TOKENS
from parallelism.serving.precision import Precision
from parallelism.serving.prices import StepParts
from parallelism.serving.serve import Answered, Served, at_share, percentiles
from parallelism.serving.workloads import Workload

SETTINGS = ("tp", "pp", "ep", "replicas", "batch")
WEIGHTS = "the weights do not fit the memory"
CACHE = "the cache of so many requests does not fit the memory"
ABOUT = 0.02
"""Times of a request that differ by less are about as long; then room for more requests is worth more."""
SLACK = 1.15
"""Bounds are of steps that all have as many requests; by so much a row may be better."""


class Layout(NamedTuple):
    """Devices along each axis of a replica, and the number of replicas."""

    tp: int
    pp: int
    ep: int
    replicas: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.ep * self.replicas

    @property
    def attentions(self) -> int:
        """The replicas of attention, each with requests of its own."""
        return self.ep * self.replicas


@dataclass(frozen=True)
class Task:
    """The question of a search: the model, its hardware, its requests and its limits."""

    spec: TransformerSpec
    hardware: Hardware
    devices: int
    workload: Workload
    is_loaded: bool
    """Whether there are always as many requests as a plan takes at a time."""
    precision: str
    chunk: int
    first_token_seconds: float | None
    token_seconds: float | None
    memory: float | None
    reserve: float | None
    price: float | None
    cache_dtype: str | None = None
    """One of `CACHE_DTYPES`; None: as the precision has it."""
    percentile: float | None = None
    """The limits are for so many requests of a hundred; None: for the means over all."""

    def __post_init__(self) -> None:
        _ = self.dtypes  # which are checked
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise ValueError(f"percentile must be above 0 and at most 100, got {self.percentile!r}")

    @property
    def dtypes(self) -> Precision:
        """The dtypes of weights, cache and products."""
        return Precision.parse(self.precision, self.cache_dtype)

    @property
    def dtype_of_cache(self) -> str:
        """That of keys and values."""
        return self.dtypes.cache or str(self.spec.dtype)

    @property
    def weights_bytes(self) -> float:
        """The bytes of all weights, at least."""
        return self.spec.parameters * {"int4": 4, "int8": 8, "fp8": 8}.get(self.precision, 16) / 8

    def usable_bytes(self, communicators: int) -> float:
        """The bytes that tensors may use of a device in so many groups."""
        memory = self.hardware.memory_bytes if self.memory is None else self.memory
        if self.reserve is not None:
            return memory - self.reserve
        reserve = Reserve() if self.memory is not None else self.hardware.reserve
        return float(reserve.usable_bytes(memory, communicators))

    def meets(self, plan: ServingPlan) -> bool:
        """Whether a plan is within the limits."""
        return not self.excess(plan) > 0

    def excess(self, plan: ServingPlan) -> float:
        """How far a plan is beyond the limit that it misses most: 0.1 for 10 % too slow; at most 0 if it meets all limits."""
        limits = self.first_token_seconds, self.token_seconds
        found = plan.first_token_seconds, plan.token_seconds
        if self.percentile is not None:
            found = plan.seconds_at(self.percentile)
        return max(
            (own / limit - 1 for own, limit in zip(found, limits, strict=True) if limit is not None),
            default=0.0,
        )

    def share_within(self, answered: Sequence[Answered]) -> float:
        """The part of the requests that are within both limits."""
        first, token = (
            inf if each is None else each for each in (self.first_token_seconds, self.token_seconds)
        )
        within = [each.waited_seconds <= first and each.token_seconds <= token for each in answered]
        return sum(within) / len(within)


@dataclass(frozen=True)
class PrefillPool:
    """Devices that compute prompts, and the first token of each answer, for other devices that compute all others."""

    tp: int
    pp: int
    ep: int
    replicas: int
    batch: int
    """Prompts of a replica at a time."""
    moved_bytes: int
    """The bytes of the cache of a mean prompt that a device for answers receives."""
    moved_seconds: float
    """How long this cache is on its way."""
    memory: Mapping[str, int] = field(hash=False)
    """Bytes of the fullest device, as of a plan."""

    @property
    def layout(self) -> Layout:
        """How the model is split over the devices: tp, pp, ep and replicas."""
        return Layout(self.tp, self.pp, self.ep, self.replicas)

    @property
    def devices(self) -> int:
        """The number of its devices."""
        return self.layout.devices

    @property
    def words(self) -> str:
        """The layout in words."""
        return " ".join(f"{name}={value}" for name, value in self.layout._asdict().items())

    def json(self) -> dict[str, Any]:
        """Its figures by name."""
        names = "devices", "batch", "moved_bytes", "moved_seconds"
        own = {name: getattr(self, name) for name in names}
        return self.layout._asdict() | own | {"memory": dict(self.memory)}


@dataclass(frozen=True)
class ServingPlan:
    """A way to serve: its layout, its figures in the mean over all requests, and its memory.

    With a ``prefill`` pool the layout, the batch, the cache and the memory are those of the other devices.
    """

    tp: int
    pp: int
    ep: int
    replicas: int
    batch: int
    """Requests of a replica at a time."""
    first_token_seconds: float
    token_seconds: float
    tokens_per_second: float
    """The tokens of answers per second, of all devices together."""
    requests_per_second: float
    cache_tokens: int
    """The tokens that fit the cache of a replica; layers with a window keep fewer.  0: all layers keep states alone."""
    memory: Mapping[str, int] = field(hash=False)
    """Bytes of the fullest device: ``weights``, ``cache``, ``activations``, ``reserve``."""
    devices: int
    steps: int
    price: float | None = None
    prefill: PrefillPool | None = None
    """The devices that compute prompts; None: the same that compute answers."""
    answered: tuple[Answered, ...] = field(default=(), repr=False, compare=False)
    """What became of the requests of one of its equal parts."""
    capacity: float = field(default=0.0, compare=False)
    """About the requests a second that it answers in the long run, if there are always as many as it takes at a time."""
    parts: StepParts | None = field(default=None, compare=False)
    """What the seconds of a step are spent on in which all requests at a time have their next token, with half of their
    answers in the cache; in a pipeline, of a microbatch of them through all stages."""

    @classmethod
    def of(
        cls,
        task: Task,
        layout: Layout,
        batch: int,
        room: Any,
        served: Served,
        parts: StepParts,
        *,
        times: int,
        capacity: float,
        prefill: PrefillPool | None = None,
    ) -> ServingPlan:
        """The plan of which one of ``times`` equal shares of the devices served so."""
        requests = served.requests
        later = sum(each.tokens - 1 for each in requests)
        gaps = sum(each.last_token_seconds - each.first_token_seconds for each in requests)
        pages = room.pages.get(FULL, room.pages.get(WINDOW, 0))
        answered = _answered_a_second(task, served, times, capacity)
        return cls(
            *layout,
            batch,
            sum(each.waited_seconds for each in requests) / len(requests),
            gaps / max(later, 1),
            answered * sum(each.tokens for each in requests) / len(requests),
            answered,
            pages * PAGE_TOKENS * layout.ep,
            memory_of(task, layout, room),
            task.devices,
            served.steps,
            task.price,
            prefill,
            requests,
            capacity,
            parts,
        )

    @property
    def layout(self) -> Layout:
        """How the model is split over the devices: tp, pp, ep and replicas."""
        return Layout(self.tp, self.pp, self.ep, self.replicas)

    @property
    def peak_bytes(self) -> int:
        """What the tensors of the fullest device take."""
        return sum(nbytes for name, nbytes in self.memory.items() if name != "reserve")

    @property
    def request_seconds(self) -> float:
        """From the arrival of a request to its last token, in the mean."""
        taken = [each.last_token_seconds - each.arrival_seconds for each in self.answered]
        return sum(taken) / len(taken)

    def seconds_at(self, percent: float) -> tuple[float, float]:
        """Times to the first token, and of a token, that so many requests of a hundred are within."""
        first = [each.waited_seconds for each in self.answered]
        return at_share(first, percent), at_share((each.token_seconds for each in self.answered), percent)

    @property
    def tokens_per_second_per_device(self) -> float:
        """The tokens of answers per second and device."""
        return self.tokens_per_second / self.devices

    @property
    def cost_per_million_tokens(self) -> float | None:
        """By the price of a device in an hour; None without a price."""
        if self.price is None:
            return None
        return self.price * self.devices / 3600 / self.tokens_per_second * 1e6

    @property
    def words(self) -> str:
        """Its settings in words."""
        return (
            self.own_words
            if self.prefill is None
            else f"{self.own_words} behind prefill {self.prefill.words}"
        )

    @property
    def own_words(self) -> str:
        """The settings in words, without those of devices that compute prompts."""
        return " ".join(f"{name}={getattr(self, name)}" for name in SETTINGS)

    def json(self) -> dict[str, Any]:
        """Its figures by name."""
        names = (
            *(
                "tp",
                "pp",
                "ep",
                "replicas",
                "batch",
                "first_token_seconds",
                "token_seconds",
                "tokens_per_second",
            ),
            *("tokens_per_second_per_device", "requests_per_second", "cache_tokens", "peak_bytes"),
            "cost_per_million_tokens",
        )
        pool = None if self.prefill is None else self.prefill.json()
        parts = None if self.parts is None else self.parts._asdict()
        return {name: getattr(self, name) for name in names} | {
            "memory": dict(self.memory),
            "prefill": pool,
            "parts_seconds": parts,
            "capacity_requests_per_second": self.capacity,
            **percentiles(self.answered),
        }


def memory_of(task: Task, layout: Layout, room: Any) -> dict[str, int]:
    """The bytes of the fullest device of a layout, by what they are of."""
    memory = task.hardware.memory_bytes if task.memory is None else task.memory
    return {
        "weights": room.weights_bytes,
        "cache": room.cache_bytes,
        "activations": room.activations_bytes,
        "reserve": int(memory - task.usable_bytes(sum(size > 1 for size in layout[:3]))),
    }


@dataclass(frozen=True)
class Spread:
    """What several series of random arrivals give for one plan."""

    first_token_seconds: tuple[float, float]
    """The least and the most of the mean times to the first token."""
    token_seconds: tuple[float, float]
    answered: tuple[Answered, ...] = field(repr=False)
    """The requests of all series."""
    series: int

    @classmethod
    def of(cls, plans: Sequence[ServingPlan]) -> Spread:
        """That of one plan, with the figures of each series."""
        first = [plan.first_token_seconds for plan in plans]
        token = [plan.token_seconds for plan in plans]
        answered = tuple(chain.from_iterable(plan.answered for plan in plans))
        return cls((min(first), max(first)), (min(token), max(token)), answered, len(plans))

    def json(self) -> dict[str, Any]:
        """Its figures by name."""
        return {
            "series": self.series,
            "first_token_seconds": list(self.first_token_seconds),
            "token_seconds": list(self.token_seconds),
            "requests": len(self.answered),
            **percentiles(self.answered),
        }


@dataclass(frozen=True)
class ServingPlans:
    """The plans of a search, the best first: those within the limits by tokens a second, then others, the nearest first."""

    task: Task
    rows: tuple[ServingPlan, ...]
    refused: Mapping[str, int]
    """By reason, how many rows have no figures."""
    reasons: Mapping[Any, str]
    left_out: int
    """The number of rows that cannot meet the limits, by a bound."""
    elapsed_seconds: float
    allowed: Mapping[str, tuple[int, ...] | None]
    spread: Spread | None = None
    """Of requests that arrive by themselves, what other series of arrivals give for the first plan."""

    @cached_property
    def plans(self) -> tuple[ServingPlan, ...]:
        """The plans within the limits, most tokens per second first; of equal ones that which answers a request sooner."""
        within = [plan for plan in self.rows if self.task.meets(plan)]
        return tuple(sorted(within, key=_by_speed))

    @cached_property
    def beyond(self) -> tuple[ServingPlan, ...]:
        """The plans beyond the limits, the nearest to them first."""
        others = [plan for plan in self.rows if not self.task.meets(plan)]
        return tuple(sorted(others, key=lambda plan: (self.task.excess(plan), *_by_speed(plan))))

    @property
    def best(self) -> ServingPlan:
        """The first.  ``ValueError`` if no plan is within the limits."""
        if not self.plans:
            raise ValueError(self.why_none)
        return self.plans[0]

    @property
    def first(self) -> ServingPlan | None:
        """The best, or that which is nearest to the limits; None if nothing can serve."""
        return next(iter((*self.plans, *self.beyond)), None)

    @property
    def suffices(self) -> bool:
        """Whether the best is within the limits, and answers all that arrive."""
        rate = self.task.workload.rate
        return bool(self.plans) and (rate is None or self.plans[0].requests_per_second == rate)

    @property
    def why_none(self) -> str:
        """Why no plan is within the limits, with the nearest."""
        if not self.rows:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in self.refused.items())
            if self.left_out:
                reasons = f"{self.left_out} rows are too slow by a bound" + (
                    f", {reasons}" if reasons else ""
                )
            return f"nothing can serve so: {reasons or self._no_layout}{self._least}"
        nearest = self.beyond[0]
        return (
            f"nothing meets the limits; the nearest is {nearest.words}, with a first token in "
            f"{shown_seconds(nearest.first_token_seconds)} and a token in {shown_seconds(nearest.token_seconds)}"
        )

    @property
    def _no_layout(self) -> str:
        """Of what was asked for no layout can be made of the devices."""
        asked = {name: value for name, value in self.allowed.items() if value and name != "batch"}
        settings = " ".join(f"{name}={','.join(map(str, value))}" for name, value in asked.items())
        return f"no layout of {plural(self.task.devices, 'device')} has {settings}"

    @property
    def _least(self) -> str:
        """What is too large for the memory, and how large it is; empty if nothing is."""
        task, usable = self.task, self.task.usable_bytes(0)
        if WEIGHTS in self.refused and task.weights_bytes > usable * task.devices > 0:
            return (
                f"; they take {decimal_bytes(task.weights_bytes)} in {task.precision}, and a device has room for "
                f"{decimal_bytes(usable)}: at least {ceil(task.weights_bytes / usable)} devices are needed, or fewer bits"
            )
        if CACHE in self.refused:
            longest = task.workload.longest
            nbytes = float(task.spec.cache_bytes(longest, task.dtype_of_cache))
            return f"; the {longest} tokens of one request take {decimal_bytes(nbytes)}"
        return ""

    @cached_property
    def front(self) -> tuple[ServingPlan, ...]:
        """The plans that no other beats both in tokens a second for a user and in tokens a second of a device, the fastest
        for a user first."""
        found: list[ServingPlan] = []
        for plan in sorted(self.rows, key=lambda each: (each.token_seconds, -each.tokens_per_second)):
            if not found or plan.tokens_per_second > found[-1].tokens_per_second:
                found.append(plan)
        return tuple(found)

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[ServingPlan]:
        return iter(self.plans)

    def why(self) -> str:
        """Why the first is the first."""
        best = self.best
        told = f"{best.words} has the most tokens a second, {shown(best.tokens_per_second)}"
        if best.requests_per_second == self.task.workload.rate:
            taken = shown_seconds(best.request_seconds)
            told = f"{best.words} answers all that arrive, and each about the soonest, in {taken}"
        if self.task.first_token_seconds or self.task.token_seconds:
            told += f", of the {plural(len(self.plans), 'row')} within the limits"
        others = [
            plan for plan in self.plans[1:] if (plan.layout, plan.prefill) != (best.layout, best.prefill)
        ]
        if others:
            loss = 1 - others[0].tokens_per_second / best.tokens_per_second
            less = f"has {loss:.0%} less" if loss else f"takes {shown_seconds(others[0].request_seconds)}"
            told += f"; the next layout, {others[0].words}, {less}"
        return told

    def why_not(self, **wanted: int) -> str:
        """Why the best plan with these settings is not the first.  ``ValueError`` for a setting that there is not."""
        if not wanted:
            raise TypeError("why_not takes the settings that are asked about, such as why_not(tp=8)")
        for name in wanted:
            if name not in SETTINGS:
                raise ValueError(f"the settings of a plan are {', '.join(SETTINGS)}, got {name!r}")
        words = " ".join(f"{name}={value}" for name, value in wanted.items())
        having = list(self.rows)
        for name, value in wanted.items():
            having = [plan for plan in having if getattr(plan, name) == value]
        if not having:
            return f"{words}: {self._refusal(wanted)}"
        within = sorted((plan for plan in having if self.task.meets(plan)), key=_by_speed)
        if not within:
            nearest = min(having, key=self.task.excess)
            return f"{words}: beyond the limits; {nearest.words} has {_speed(nearest)}"
        if within[0] == self.best:
            return f"{words}: it is the first"
        loss = 1 - within[0].tokens_per_second / self.best.tokens_per_second
        return f"{words}: {within[0].words} has {_speed(within[0])}, {loss:.0%} fewer tokens than {self.best.words}"

    def _refusal(self, wanted: Mapping[str, int]) -> str:
        """The reasons of rows with these settings that have no figures."""
        found: dict[str, None] = {}
        for key, reason in self.reasons.items():
            settings = dict(zip(SETTINGS, key, strict=True))
            if all(settings[name] in (value, None) for name, value in wanted.items()):
                found[reason] = None
        return ", ".join(found) or "no row has it, or it cannot meet the limits by a bound"

    def _repr_html_(self) -> str:
        from parallelism.serving.picture import pictures  # it draws plans

        return pictures(self)

    def __str__(self) -> str:
        lines = [f"{self.task.devices} devices of {self.task.hardware.name}"]
        lines += [f"  {plan.words}: {_speed(plan)}" for plan in self.plans[:5]]
        return "\n".join(lines if self.plans else [*lines, self.why_none])


def _speed(plan: ServingPlan) -> str:
    return (
        f"{shown(plan.tokens_per_second)} tokens/s, a first token in {shown_seconds(plan.first_token_seconds)}, "
        f"a token in {shown_seconds(plan.token_seconds)}"
    )


def _answered_a_second(task: Task, served: Served, times: int, capacity: float) -> float:
    """The requests that are answered in a second: of those that arrive by themselves all, where that is less than can be
    answered in the long run; else as many as were answered until the last was."""
    rate = task.workload.rate
    if rate is None:
        return len(served.requests) / served.seconds * times
    return min(rate, capacity)


def _by_speed(plan: ServingPlan) -> tuple[Any, ...]:
    soon = round(log(plan.request_seconds) / ABOUT) if plan.answered else 0
    return -plan.tokens_per_second, soon, -plan.capacity, plan.request_seconds, plan.layout, plan.words
