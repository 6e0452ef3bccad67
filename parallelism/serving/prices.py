"""`StepPrices`: the seconds of steps of an engine, from pieces with symbols, and the bytes that a device holds.

A stage is priced from a model with a few blocks, of each kind that it has (`kinds_in`): all others do what one of them
does.  Its programs are those that run (`parallelism.serving.served_model`), laid out once, with symbols for the tokens of
a step, for the places of the cache that it reads, and for its scores.  The price of a step is that of its events, one
after the other.  So thousands of steps are priced at once: only attention depends on what the cache holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Floats, Ints
from parallelism.execution.overlapping import arranged
from parallelism.hardware import Hardware
from parallelism.ir.core.extents import divided, names_in
from parallelism.ir.operators.contractions import PRODUCTS
from parallelism.layouts import Devices
from parallelism.memoized import memoized
from parallelism.models import TransformerSpec
from parallelism.models.figures import kind_of_layer, with_layers
from parallelism.models.inference import Part
from parallelism.models.inference.caches import FULL, STATES, WINDOW, cache_arrays, kinds_of
from parallelism.serving.engine import EngineSettings
from parallelism.serving.expert_rows import ExpertRows
from parallelism.serving.placement import PICKED, READ, SCORED, TABLE, TOKENS, Placement
from parallelism.serving.precision import Precision
from parallelism.symbolic.event_prices import EventPrices, MeshOnHardware
from parallelism.symbolic.events import (
    COLLECTIVE,
    COMPUTE,
    MEMORY,
    Event,
    EventKind,
    Formulas,
    SymbolicProgram,
    nbytes_of_one,
)
from parallelism.symbolic.stages import events_of_blocks, nbytes_of
from parallelism.timeline import Pricing

Kind = tuple[Any, ...]
"""What tells the blocks of a model apart (`kind_of_layer`)."""


def with_blocks(spec: TransformerSpec, kinds: Sequence[Kind]) -> TransformerSpec:
    """A model that has blocks of these kinds, each of which it has."""
    first = {kind_of_layer(spec, layer): layer for layer in reversed(range(spec.layers))}
    return replace(with_layers(spec, [first[kind] for kind in kinds]), next_tokens=0)


class _Kinds(NamedTuple):
    """The blocks from which a stage is priced."""

    blocks: tuple[Kind, ...]
    """Every pair of kinds that follow each other in the stage is here, and the last one is that of the stage."""
    times: tuple[int, ...]
    """How often the stage has each of them."""
    begins: bool
    ends: bool


def kinds_in(spec: TransformerSpec, part: Part) -> _Kinds:
    """The blocks from which a part is priced.

    What a block does depends on its kind, and on that of the block before it, whose last sums may be in one kernel with its
    first norm.
    """
    kinds = [kind_of_layer(spec, layer) for layer in range(part.first, part.last)]
    pairs = list(zip([None, *kinds[:-1]], kinds, strict=True))
    counts = Counter(pairs)
    needed = 1 + max(pairs.index(pair) for pair in counts)
    times = [counts.pop(pair, 0) for pair in pairs[:needed]]
    blocks = kinds[:needed]
    if blocks[-1] != kinds[-1]:
        blocks.append(kinds[-1])
        times.append(0)
    return _Kinds(tuple(blocks), tuple(times), part.begins, part.ends)


@dataclass(frozen=True)
class _Stage:
    """The events of a stage, with how often each comes."""

    events: tuple[Event, ...]
    times: Floats
    weights: Any
    """The bytes of its weights."""
    cache: Mapping[str, Any]
    """By kind of layers, the bytes of a page of a replica's cache, in all layers of the stage."""
    sent: Any
    """The bytes of its message to the next stage, 0 of the last."""

    @cached_property
    def formulas(self) -> Formulas:
        """All extents of the events."""
        return Formulas([extent for event in self.events for extent in event.extents])

    @cached_property
    def moving(self) -> list[int]:
        """The numbers of the computes that depend on what the cache holds."""
        return [
            number
            for number, event in enumerate(self.events)
            if event.kind.what == COMPUTE and self.times[number] and any(map(_moves, event.extents))
        ]

    @cached_property
    def moving_formulas(self) -> Formulas:
        """Their extents."""
        return Formulas([extent for number in self.moving for extent in self.events[number].extents])

    @cached_property
    def bounds(self) -> list[int]:
        """Where the extents of each event begin."""
        found = [0]
        for event in self.events:
            found.append(found[-1] + len(event.extents))
        return found


class StepParts(NamedTuple):
    """The seconds of a step by what they are spent on."""

    products: float
    """Products with weights, and elementwise work: what depends on the number of tokens alone."""
    attention: float
    """Attention over what the cache holds."""
    messages: float
    """Collectives inside stages, and messages between them."""
    host: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return float(sum(self))


class _Moving(NamedTuple):
    """Equal events of a stage that depend on the cache."""

    kind: EventKind
    times: float
    """How often they come."""
    base: Floats
    """Their numbers with an empty cache."""
    slopes: dict[str, Floats]
    """By the name of a number of the work that differs, by how much theirs grow with it."""


class _Steady(NamedTuple):
    """The seconds of a stage for a number of tokens."""

    products: float
    messages: float
    moving: list[_Moving]
    """The events that depend on the cache, with their numbers as functions of what differs."""


class StepPrices:
    """Seconds and bytes of steps of an engine, of a model placed on a mesh, on a hardware.

    ``precision`` says of which dtypes weights and cache are.  With ``as_run`` the prices are those of programs that run here:
    every expert has as many rows, at least one, and a step of a pipeline begins when the one before is through all stages.
    Else they are those of software that serves: experts have the rows of their tokens (`ExpertRows`), and a microbatch has
    its next token as soon as it is through, while others are under way.
    """

    def __init__(
        self,
        placement: Placement,
        settings: EngineSettings,
        hardware: Hardware,
        *,
        precision: Precision | None = None,
        fused: bool | str | None = None,
        as_run: bool = False,
    ) -> None:
        self.placement, self.settings, self.hardware = placement, settings, hardware
        self.as_run = as_run
        self.precision = precision or Precision()
        self.fused = hardware.fused if fused is None else fused
        self.prices = EventPrices(Pricing.of(hardware, "modelled", None, link_sharing=False))
        self.layout = MeshOnHardware(placement.mesh)
        self._known: dict[Any, _Steady] = {}
        self.stretches: dict[Any, Floats] = {}
        """Seconds that a `PricedEngine` knows, by what they are of."""

    def with_settings(self, settings: EngineSettings) -> StepPrices:
        """The same prices for an engine with other settings; what is known of steps stays known."""
        if settings.ring_pages(self.placement.spec) != self.settings.ring_pages(self.placement.spec):
            return StepPrices(
                self.placement,
                settings,
                self.hardware,
                precision=self.precision,
                fused=self.fused,
                as_run=self.as_run,
            )
        _ = self.stages
        other = copy(self)
        other.settings = settings
        return other

    # -- the events ----------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[_Stage]:
        """The events of each stage."""
        spec = self.placement.spec
        return [self._stage(kinds_in(spec, part)) for part in self.placement.parts]

    @memoized
    def _stage(self, kinds: _Kinds) -> _Stage:
        own = kinds.blocks
        before = () if kinds.begins else own[:1]
        after = () if kinds.ends else own[:1]
        spec = with_blocks(self.placement.spec, [*before, *own, *after])
        strategy = self.placement.inner_strategy
        placement = Placement(spec, self.placement.inside, strategy)
        part = Part(len(before), len(before) + len(own), spec.layers)
        settings = replace(self.settings, pages=dict.fromkeys(self.settings.pages, 1))
        localized = placement.localized(part, settings, self.precision.cache, self.precision.weights)
        function, calls, chains = arranged(localized.program(0), None, fused=self.fused)
        categories = {}
        for value in function.inputs:
            if value.name.startswith("p."):
                categories[value.name] = "weights"
            elif value.name.startswith("cache."):
                categories[value.name] = "cache"
        program = SymbolicProgram(
            function, categories, calls=calls, chains=chains, given_up=frozenset({"hidden"})
        )
        events = [
            self._in_precision(event)
            for event in events_of_blocks(program.steps, Devices.of(placement.inside))
        ]
        times = {part.first + place: float(count) for place, count in enumerate(kinds.times)}
        return _Stage(
            tuple(events),
            np.array([1.0 if event.block is None else times[event.block] for event in events]),
            self._weights(function.inputs, times),
            self._pages(spec, function.inputs, times),
            0 if kinds.ends else nbytes_of_one(function.outputs[0].type),
        )

    def _in_precision(self, event: Event) -> Event:
        """An event as it is priced: a product of weights in another dtype reads them as they are, in one kernel."""
        kind, extents = event.kind, event.extents
        weights = self.precision.weights
        if weights is None or kind.what != COMPUTE or weights not in kind.others:
            return event
        if not (kind.name or "").startswith(tuple(PRODUCTS)):
            return event
        kept = [number for number, other in enumerate(kind.others) if other != weights]
        more = extents[2 : 2 + len(kind.others)]
        shape = extents[2 + len(kind.others) :]
        changed = kind._replace(
            others=tuple(kind.others[number] for number in kept), dtype=self.precision.products or kind.dtype
        )
        own = sum((more[number] for number in range(len(more)) if number not in kept), 0)
        nbytes = extents[0] - divided(own * (8 - self.precision.bits), 8)
        return Event(changed, [nbytes, extents[1], *(more[number] for number in kept), *shape], event.block)

    def _weights(self, inputs: Iterable[Any], times: Mapping[int, float]) -> Any:
        total: Any = 0
        for value in inputs:
            words = value.name.split(".")
            if words[0] != "p":
                continue
            nbytes = nbytes_of_one(value.type)
            if value.type.dtype.name == self.precision.weights:
                nbytes = nbytes * self.precision.bits // 8
            total += nbytes * int(times[int(words[1])] if words[1].isdecimal() else 1)
        return total

    @staticmethod
    def _pages(spec: TransformerSpec, inputs: Iterable[Any], times: Mapping[int, float]) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(kinds_of(spec), 0)
        for value in inputs:
            words = value.name.split(".")
            if words[0] == "cache":
                layer = int(words[1])
                kind = next(array.kind for array in cache_arrays(spec, layer) if array.name == words[2])
                found[kind] += nbytes_of([value.type]) * int(times[layer])
        return found

    # -- seconds -------------------------------------------------------------------------------------------------------

    def seconds(self, works: Sequence[Mapping[str, int]]) -> float:
        """The seconds of a step with these numbers for each work, on the devices alone."""
        each = [self.stage_seconds(dict(_fixed(work)), [work]) for work in works]
        if len(self.stages) == 1:
            return float(sum(seconds[0, 0] for seconds in each))
        return float(self._through_stages(each, [self._messages(work)[:, None] for work in works])[0])

    def seconds_of_stretch(
        self,
        fixed: Sequence[Mapping[str, int]],
        moving: Sequence[Mapping[str, Ints]],
        count: int,
    ) -> Floats:
        """The seconds of ``count`` steps that have the same tokens in each work: ``moving`` says by step what differs."""
        nothing = np.zeros(count, np.int64)

        def numbers_in(changing: Mapping[str, Ints]) -> Callable[[str], npt.NDArray[Any]]:
            return lambda name: changing.get(name, nothing)

        each = [
            self._of_works(given, count, numbers_in(changing))
            for given, changing in zip(fixed, moving, strict=True)
        ]
        if len(self.stages) == 1:
            alone: Floats = np.sum([seconds[0] for seconds in each], axis=0)
            return alone
        messages = [np.repeat(self._messages(given)[:, None], count, axis=1) for given in fixed]
        return self._through_stages(each, messages)

    def step_seconds(self, works: Sequence[Mapping[str, int]]) -> float:
        """`seconds`, and what the host takes for the step."""
        return self.seconds(works) + self.host_seconds(works)

    def host_seconds(self, works: Sequence[Mapping[str, int]]) -> float:
        """What the host takes for a step: for itself, and for each token that is chosen in it."""
        hardware = self.hardware
        return hardware.step_seconds + hardware.row_seconds * sum(work[PICKED] for work in works)

    def parts(self, work: Mapping[str, int]) -> StepParts:
        """`step_seconds` of a step with one work, which goes through all stages, by what they are spent on."""
        fixed = tuple(sorted(_fixed(work)))
        found = [self._steady(stage, fixed) for stage in self.stages]
        products = float(sum(each.products for each in found))
        inside = float(sum(each.messages for each in found))
        of_stages = float(self.stage_seconds(dict(fixed), [work]).sum())
        return StepParts(
            products,
            of_stages - products - inside,
            inside + float(self._messages(work).sum()),
            self.host_seconds([work]),
        )

    def _through_stages(self, works: Sequence[Floats], messages: Sequence[Floats]) -> Floats:
        """The seconds of each step in a pipeline: until the slowest stage is through with all works, or one of them with all
        stages; `as_run`, until the last stage is through with the last work, as each takes the works in their order."""
        if not self.as_run:
            busy = np.sum(works, axis=0).max(axis=0)
            through = [
                seconds.sum(axis=0) + sent.sum(axis=0) for seconds, sent in zip(works, messages, strict=True)
            ]
            period: Floats = np.maximum(busy, np.max(through, axis=0))
            return period
        free = np.zeros_like(works[0])
        for seconds, sent in zip(works, messages, strict=True):
            now = np.zeros(seconds.shape[1])
            for stage in range(len(self.stages)):
                free[stage] = now = np.maximum(now, free[stage]) + seconds[stage]
                now = now + sent[stage]
        found: Floats = free.max(axis=0)
        return found

    def _messages(self, work: Mapping[str, int]) -> Floats:
        """The seconds of the message behind each stage."""
        axis = self.placement.pipeline
        found = np.zeros(len(self.stages))
        for stage, each in enumerate(self.stages[:-1]):
            nbytes = int(Formulas([each.sent]).at(_all(work))[0])
            assert axis is not None
            found[stage] = self.prices.message(nbytes, stage, stage + 1, self.layout, axis)
        return found

    def stage_seconds(self, fixed: Mapping[str, int], works: Sequence[Mapping[str, int]]) -> Floats:
        """The seconds of each stage, ``(stages, works)``, for works with the same number of tokens."""
        return self._of_works(fixed, len(works), lambda name: np.array([work.get(name, 0) for work in works]))

    def _of_works(
        self, fixed: Mapping[str, int], count: int, numbers: Callable[[str], npt.NDArray[Any]]
    ) -> Floats:
        """`stage_seconds`, where ``numbers`` of a name are those of all works."""
        different = list(dict.fromkeys(map(id, self.stages)))
        found = []
        for stage in {id(each): each for each in self.stages}.values():
            steady = self._steady(stage, tuple(sorted(fixed.items())))
            seconds = np.full(count, steady.messages + steady.products)
            for kind, times, base, slopes in steady.moving:
                rows = np.repeat(base[None], count, axis=0)
                for name, slope in slopes.items():
                    rows += numbers(name)[:, None] * slope
                seconds += times * self._computes(kind, rows)
            found.append(seconds)
        return np.stack([found[different.index(id(stage))] for stage in self.stages])

    def _computes(self, kind: EventKind, rows: Floats) -> Floats:
        """The seconds of computes of a kind with these numbers: bytes, flops, bytes of other dtypes, and a shape."""
        costs, end = self.prices.pricing.costs, 2 + len(kind.others)
        return np.array(
            [
                costs.compute_seconds(
                    flops,
                    nbytes,
                    dtype=kind.dtype,
                    shape=tuple(map(int, more[end - 2 : end - 2 + kind.extents])) or None,
                    kernel=kind.name,
                    other_bytes=sum(more[: end - 2]),
                )
                for nbytes, flops, *more in rows.tolist()
            ]
        )

    def _steady(self, stage: _Stage, fixed: tuple[tuple[str, int], ...]) -> _Steady:
        """The seconds of a stage that depend on the number of tokens alone, and the events that depend on the cache."""
        key = id(stage), fixed
        if key not in self._known:
            self._known[key] = self._of_stage(stage, dict(fixed))
        return self._known[key]

    def _of_stage(self, stage: _Stage, fixed: dict[str, int]) -> _Steady:
        base = self._numbers(stage, fixed)
        products = messages = 0.0
        plain: list[tuple[EventKind, Sequence[float]]] = []
        often: list[float] = []
        for number, event in enumerate(stage.events):
            own = base[stage.bounds[number] : stage.bounds[number + 1]]
            if event.kind.what == COLLECTIVE:
                messages += stage.times[number] * self.prices.collective(
                    event.kind, float(own[0]), self.layout
                )
            elif event.kind.what == COMPUTE and number not in stage.moving and stage.times[number]:
                plain.append((event.kind, own.tolist()))
                often.append(stage.times[number])
        if plain:
            products = float(self.prices._priced(plain) @ np.array(often))
        return _Steady(products, messages, self._moving(stage, fixed))

    def _numbers(self, stage: _Stage, fixed: dict[str, int]) -> Floats:
        """The extents of all events of a stage."""
        experts = self.placement.spec.experts
        if experts is None or self.as_run:
            return stage.formulas.at(_all(fixed)).astype(np.float64)
        rows = ExpertRows(experts, self.placement.sharing_experts, TOKENS)
        return rows.numbers(stage.events, stage.formulas, _all(fixed))

    def _moving(self, stage: _Stage, fixed: dict[str, int]) -> list[_Moving]:
        """The events of a stage that depend on the cache."""
        events = [stage.events[number] for number in stage.moving]
        bounds = [0, *accumulate(len(event.extents) for event in events)]
        formulas = stage.moving_formulas
        base = formulas.at(_all(fixed)).astype(np.float64)
        slopes = {}
        for name in self._moving_names:
            slopes[name] = formulas.at(_all({**fixed, name: 1})).astype(np.float64) - base
        found: dict[Any, _Moving] = {}
        for place, (number, event) in enumerate(zip(stage.moving, events, strict=True)):
            own = slice(bounds[place], bounds[place + 1])
            growing = {name: slope[own] for name, slope in slopes.items() if slope[own].any()}
            key = event.kind, tuple(base[own]), tuple((name, tuple(each)) for name, each in growing.items())
            times = stage.times[number] + (found[key].times if key in found else 0.0)
            found[key] = _Moving(event.kind, times, base[own], growing)
        return [*found.values()]

    @cached_property
    def _moving_names(self) -> list[str]:
        kinds = kinds_of(self.placement.spec)
        return [TABLE, *(f"{what}_{kind}" for what in (READ, SCORED) for kind in kinds)]

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def weights_bytes(self) -> int:
        """The bytes of weights on a device of the fullest stage."""
        return max(int(stage.weights) for stage in self.stages)

    def page_bytes(self) -> list[dict[str, int]]:
        """By stage and kind of layers, the bytes of a page on a device."""
        return [{kind: int(nbytes) for kind, nbytes in stage.cache.items()} for stage in self.stages]

    def activations_bytes(self, work: Mapping[str, int]) -> list[int]:
        """By stage, the most bytes that a step has on a device besides weights and cache."""
        found = []
        for stage in self.stages:
            numbers = stage.formulas.at(_all(work))
            changes = [
                float(numbers[stage.bounds[number]])
                for number, event in enumerate(stage.events)
                if event.kind.what == MEMORY
            ]
            found.append(int(max(np.cumsum(changes), default=0.0)))
        return found


def _moves(extent: Any) -> bool:
    """Whether an extent depends on what the cache holds."""
    return any(name not in (TOKENS, PICKED) for name in names_in(extent))


def _fixed(work: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    return ((name, work[name]) for name in (TOKENS, PICKED))


def _all(numbers: Mapping[str, int]) -> dict[str, int]:
    """The numbers, with 0 for those that are not given."""
    found = dict.fromkeys((TOKENS, PICKED, TABLE), 0)
    found |= {f"{what}_{kind}": 0 for what in (READ, SCORED) for kind in (FULL, WINDOW, STATES)}
    return found | dict(numbers)
