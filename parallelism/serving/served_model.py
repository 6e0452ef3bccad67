"""`ServedModel`: a step of an engine as an operation of the cluster.  Weights and cache stay on the devices between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.execution.device_program import DeviceProgram, array_maker
from parallelism.execution.overlapping import arranged
from parallelism.execution.typed_arrays import TypedArray
from parallelism.ir.core import Function, Value
from parallelism.ir.passes import with_room
from parallelism.layouts import Localized
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.models.inference.caches import STATES, kinds_of
from parallelism.operation import Device, Operation
from parallelism.serving.engine import EngineSettings, Step, Work, padded, read_and_scored
from parallelism.serving.placement import PICKED, READ, SCORED, TABLE, TOKENS, Placement
from parallelism.serving.quantized import QuantizedWeights
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.typed_device import TypedDevice

Numbers = tuple[tuple[str, int], ...]
"""The numbers of the symbols of a work, by name."""
STATE = "serving"
MOST_PROGRAMS = 256
"""The most programs with numbers that are kept."""
WEIGHTS, CACHE = "weights", "cache"


def numbers_of(placement: Placement, settings: EngineSettings, work: Work) -> dict[str, int]:
    """The numbers of the symbols for a work.  Tokens are padded so that devices that share them have equal parts, and their
    scores count as if they were dealt evenly."""
    spec = placement.spec
    longest = max(row.stop for rows in work.rows for row in rows)
    numbers = {
        TOKENS: -(-padded(work.tokens) // placement.context) * placement.context,
        PICKED: max(padded(work.sampled), 1),
        TABLE: -(-longest // settings.page_tokens),
    }
    for kind in kinds_of(spec):
        read, scored = read_and_scored(spec, settings, work, kind)
        shares = 1 if kind == STATES else placement.context  # each device has whole sequences
        numbers |= {f"{READ}_{kind}": read, f"{SCORED}_{kind}": -(-scored // shares)}
    return numbers


@dataclass(frozen=True)
class Share:
    """A device's share of the inputs of a step."""

    numbers: tuple[Numbers, ...]
    """For each work."""
    data: tuple[tuple[Array, ...], ...]
    """For each work, this device's part of the inputs of its stage that are neither weights, nor cache, nor hidden values."""
    weights: tuple[Array, ...] | None = None
    """Only in the first step."""


class ServedModel(Operation):
    """Steps of an engine on the devices of a mesh.

    ``cluster.run(served, arrays, weights)``: ``arrays`` have the inputs of each work of a step (`step_arrays`), and
    ``weights`` are the parameters by name, in the first step alone: the devices keep them, and the cache, under
    ``device.state["serving"]``.  ``run.result``: for each work the logits, ``(replicas, rows, vocabulary)``.

    **Communication**: the collectives inside each stage's program, and from stage to stage, for each work, one message
    with the hidden values of its tokens from every device to the one at its place in the next stage.
    """

    declares_all = True
    kept_by_devices = True

    def __init__(
        self,
        placement: Placement,
        settings: EngineSettings,
        *,
        cache_dtype: npt.DTypeLike | None = None,
        quantized: QuantizedWeights | None = None,
        room: bool = True,
        fused: bool | str = False,
    ) -> None:
        """``room``: experts have room for all tokens, as a run must; else that of a mean load, as a simulation counts.

        ``quantized``: weights lie on devices in few bits, and are dequantized where products read them.
        """
        if settings.frees_pages:
            raise ValueError("programs that run keep windows in rings: frees_pages is for prices alone")
        self.placement = placement
        self.settings = settings
        self.mesh = placement.mesh
        self.room = room
        self.fused = fused
        self.quantized = quantized
        self.stages: tuple[Localized, ...] = tuple(
            placement.localized(part, settings, cache_dtype, quantized=quantized) for part in placement.parts
        )
        self._programs: dict[Any, DeviceProgram] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is derived."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_arranged"}
        return kept | {"_programs": {}}

    @property
    def name(self) -> str:
        """The name with which its events begin."""
        return "@engine_step"

    # -- programs ------------------------------------------------------------------------------------------------------

    def program(self, stage: int, place: int, numbers: Numbers) -> DeviceProgram:
        """The program of a rank inside a stage for the numbers of a work."""
        key = stage, place, numbers
        if key not in self._programs:
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = self._made(stage, place, dict(numbers))
        return self._programs[key]

    def _made(self, stage: int, place: int, numbers: Mapping[str, int]) -> DeviceProgram:
        function, calls, chains = self._arranged(stage, place)
        function = function.specialize(**{name: numbers[name] for name in function.symbols})
        if self.room:
            function = with_room(function)
        categories = {value.name: _category(value) for value in function.inputs}
        kept = {name: category for name, category in categories.items() if category is not None}
        return DeviceProgram(function, kept, calls=calls, chains=chains, given_up=frozenset({"hidden"}))

    @memoized
    def _arranged(
        self, stage: int, place: int
    ) -> tuple[Function, tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """The program of a rank inside a stage with symbols, and its chains: software has the same kernels for any number of
        tokens, also for one."""
        return arranged(self.stages[stage].program(place), None, fused=self.fused)

    @cached_property
    def inputs_of(self) -> list[tuple[list[str], list[str], list[str]]]:
        """By stage the names of its inputs: weights, cache, and others but hidden values."""
        found = []
        for stage in self.stages:
            names = [value.name for value in stage.function.inputs]
            weights = [name for name in names if name.startswith("p.")]
            cache = [name for name in names if name.startswith("cache.")]
            found.append(
                (weights, cache, [name for name in names if name not in (*weights, *cache, "hidden")])
            )
        return found

    # -- the host ------------------------------------------------------------------------------------------------------

    def inputs(
        self,
        mesh: Mesh,
        arrays: Sequence[tuple[Mapping[str, int], Mapping[str, Array]]],
        weights: Mapping[str, Array] | None = None,
        **_: Any,
    ) -> list[tuple[Any, ...]]:
        """The share of each rank."""
        if mesh != self.mesh:
            raise ValueError(f"{self.name} is placed on {self.mesh!r} and cannot run on {mesh!r}")
        numbers = tuple(tuple(sorted(each.items())) for each, _ in arrays)
        own = None if weights is None else self.parameters(weights)
        shares: list[tuple[Any, ...]] = []
        for rank in range(mesh.size):
            stage, place = self.placement.place(rank)
            own_weights, others = self.inputs_of[stage][0], self.inputs_of[stage][2]
            data = tuple(self._shards(stage, place, others, given) for _, given in arrays)
            held = None if own is None else self._shards(stage, place, own_weights, own)
            shares.append((Share(numbers, data, held),))
        return shares

    def parameters(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of the weights of the stages, whole, by name."""
        own = self.placement.parameters(given)
        return own if self.quantized is None else self.quantized.arrays(own)

    def _shards(
        self, stage: int, place: int, names: Sequence[str], given: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        """The parts of a device, of the inputs with these names."""
        return tuple(self._shard(stage, place, name, given[name.removeprefix("p.")]) for name in names)

    def _shard(self, stage: int, place: int, name: str, array: Array) -> Array:
        value = self._named[stage][name]
        layout = value.layout
        if layout is None:
            return array
        part: Array = array[layout.slices(array.shape, self.placement.inside, place)]
        return part

    @cached_property
    def _named(self) -> list[dict[str, Value]]:
        return [{value.name: value for value in stage.function.inputs} for stage in self.stages]

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> list[Array]:
        """The logits of each work, whole."""
        last = [
            rank for rank in range(mesh.size) if self.placement.place(rank)[0] == self.placement.stages - 1
        ]
        last.sort(key=lambda rank: self.placement.place(rank)[1])
        layout = self.stages[-1].outputs[0]
        works = zip(*(outputs[rank] for rank in last), strict=True)
        return [layout.unshard(list(shards), self.placement.inside) for shards in works]

    # -- the devices ---------------------------------------------------------------------------------------------------

    def __call__(self, device: Device, share: Share) -> list[Array]:
        """The logits of this device for each work, if it is in the last stage."""
        stage, place = self.placement.place(device.rank)
        state = device.state.setdefault(STATE, {})
        if share.weights is not None:
            state[WEIGHTS], state[CACHE] = (
                list(share.weights),
                self._empty(device, stage, place, share.numbers[0]),
            )
        if WEIGHTS not in state:
            raise ValueError(f"{self.name}: the devices have no weights; the first step brings them")
        return self.run(device, share, state)

    def run(self, device: Device, share: Share, state: dict[str, list[Any]]) -> list[Any]:
        """Compute a step, as `__call__` does, with the weights and the cache in ``state``."""
        stage, place = self.placement.place(device.rank)
        axis: Any = self.placement.pipeline
        logits, sent = [], []
        with device.compute(self.name, seconds=0.0):  # the library's Python between the ops has no price
            for category, nbytes in self.held(stage, place, share):
                device.hold(category, nbytes)
            for number, (numbers, data) in enumerate(zip(share.numbers, share.data, strict=True)):
                program = self.program(stage, place, numbers)
                given = list(data)
                if stage:
                    hidden = device.recv(stage - 1, tag=number, axes=axis)
                    device.hold("activations", hidden.nbytes, stage=stage, microbatch=number)
                    given.insert(0, hidden)
                arrays = program.own([*state[WEIGHTS], *state[CACHE], *given])
                out, *state[CACHE] = program.run(device, arrays, stage=stage, microbatch=number, phase="F")
                del arrays
                if stage + 1 < self.placement.stages:
                    sent.append(device.isend(out, stage + 1, tag=number, axes=axis))
                    device.hold("outputs", -out.nbytes, stage=stage, microbatch=number)
                else:
                    logits.append(out)
            for work in sent:
                work.wait()
        return logits

    def held(self, stage: int, place: int, share: Share) -> list[tuple[str, int]]:
        """The bytes of weights, cache and inputs of a step on a device, by category."""
        function = self.program(stage, place, share.numbers[0]).function
        found = {WEIGHTS: 0, CACHE: 0}
        for value in function.inputs:
            category = _category(value)
            if category is not None:
                found[category] += int(value.type.nbytes)
        inputs = sum(array.nbytes for arrays in share.data for array in arrays)
        return [*found.items(), ("inputs", inputs)]

    def _empty(self, device: Device, stage: int, place: int, numbers: Numbers) -> list[Any]:
        """The cache of a device, in which nothing is written yet."""
        arrays = array_maker(device)
        empty = []
        for value in self.program(stage, place, numbers).function.inputs:
            if _category(value) == CACHE:
                empty.append(arrays.full(list(map(int, value.type.shape)), 0, value.type.dtype))
        return empty

    # -- simulation ----------------------------------------------------------------------------------------------------

    def simulated(self, step: Sequence[Mapping[str, int]]) -> SimulatedStep:
        """A step with these numbers for each work, to be simulated: ``simulate(served.simulated(numbers), hardware)``."""
        return SimulatedStep(self, tuple(tuple(sorted(each.items())) for each in step))


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a `ServedModel`, whose devices are run without numbers."""

    served: ServedModel
    numbers: tuple[Numbers, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the model."""
        return self.served.mesh

    def templates(self, price: Any = None) -> Templates:
        """The events of each device; no work is repeated, so ``price`` is not used."""
        first: dict[Any, int] = {}
        classes: list[DeviceEvents] = []
        class_of = []
        for rank in range(self.mesh.size):
            stage, place = self.served.placement.place(rank)
            key = stage, self.served.stages[stage].class_of(place)
            if key not in first:
                first[key] = len(classes)
                classes.append(self._events(rank, stage, place))
            class_of.append(first[key])
        return Templates(self.mesh, classes, np.array(class_of, np.int64))

    def _events(self, rank: int, stage: int, place: int) -> DeviceEvents:
        programs = [self.served.program(stage, place, numbers) for numbers in self.numbers]
        weights, cache, others = self.served.inputs_of[stage]

        def typed(program: DeviceProgram, names: Sequence[str]) -> list[Any]:
            types = {value.name: value.type for value in program.function.inputs}
            return [TypedArray.of(types[name]) for name in names]

        def incoming(tag: int) -> Any:
            return typed(programs[tag], ["hidden"])[0]

        device = TypedDevice(self.mesh, rank, incoming if stage else None)
        data = tuple(tuple(typed(program, others)) for program in programs)
        state = {WEIGHTS: typed(programs[0], weights), CACHE: typed(programs[0], cache)}
        self.served.run(device.device, Share(self.numbers, data), state)
        return device.events


def _category(value: Value) -> str | None:
    """Weights, cache, or neither."""
    name = value.name
    if name.startswith("p."):
        return WEIGHTS
    return CACHE if name.startswith("cache.") else None


def step_arrays(
    placement: Placement, settings: EngineSettings, engine: Any, step: Step
) -> list[tuple[dict[str, int], dict[str, Array]]]:
    """For each work of a step the numbers of its symbols, and its input arrays by name."""
    found = []
    for work in step:
        numbers = numbers_of(placement, settings, work)
        found.append((numbers, _arrays(placement, settings, engine, work, numbers)))
    return found


def _arrays(
    placement: Placement, settings: EngineSettings, engine: Any, work: Work, numbers: Mapping[str, int]
) -> dict[str, Array]:
    spec, replicas, tokens = placement.spec, placement.replicas, numbers[TOKENS]
    kinds = kinds_of(spec)
    arrays: dict[str, Array] = {
        "tokens": np.zeros((replicas, tokens), np.int64),
        "at.positions": np.full((replicas, tokens), -1, np.int64),
        "at.ends": np.zeros((replicas, tokens), np.int64),
        "at.picked": np.zeros((replicas, numbers[PICKED]), np.int64),
    }
    widths = {"full": numbers[TABLE], "window": settings.ring_pages(spec), STATES: 1}
    for kind in kinds:
        arrays[f"at.{kind}_table"] = np.zeros((replicas, tokens, widths[kind]), np.int64)
    for replica, rows in enumerate(work.rows):
        place = picked = 0
        for row in rows:
            own_tokens = slice(place, place + row.stop - row.start)
            arrays["tokens"][replica, own_tokens] = engine.context(row.request)[row.start : row.stop]
            arrays["at.positions"][replica, own_tokens] = range(row.start, row.stop)
            arrays["at.ends"][replica, own_tokens] = row.stop
            for kind in kinds:
                pages = engine.table(row.request, kind)[: widths[kind]]
                arrays[f"at.{kind}_table"][replica, own_tokens, : len(pages)] = pages
            place = own_tokens.stop
            if row.samples:
                arrays["at.picked"][replica, picked] = place - 1
                picked += 1
    return arrays


def sampled_rows(work: Work) -> list[tuple[int, int, int]]:
    """For each row of a work that samples: the replica, the place among those picked, and the request."""
    found = []
    for replica, rows in enumerate(work.rows):
        picked = [row for row in rows if row.samples]
        found += [(replica, place, row.request) for place, row in enumerate(picked)]
    return found
