"""`PlanCosts`: the seconds and the memory of plans, put together from pieces that are priced once.

The result is that of ``simulate(step, hardware, link_sharing=False)``: the same events, priced by the same functions,
and the same order; only sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.memoized import memoized
from parallelism.models import TransformerSpec
from parallelism.planning.dealing import EXPERTS_OVER, axes_beside_experts, split_of_sequences
from parallelism.planning.plan import Task
from parallelism.planning.settings import SETTINGS, always
from parallelism.planning.space import Choices
from parallelism.planning.two_block_steps import ExpertPattern, Pattern, Uneven, two_block_steps
from parallelism.symbolic.event_prices import EventPrices, MeshOnHardware
from parallelism.symbolic.events import Unpriceable
from parallelism.symbolic.orders import (
    FIRST,
    KINDS,
    LAST,
    LONGER,
    MIDDLE,
    ONLY,
    PLACES,
    Ends,
    Order,
    Shape,
    order_of,
    place_of,
)
from parallelism.symbolic.stage_costs import StageCosts, StageSeconds
from parallelism.timeline import Pricing
from parallelism.training.layer_blocks import MOST_OTHERS
from parallelism.training.sequence_split import SequenceSplit

_HELD_BY = itemgetter("dp", "instances", "cp", "ep", "tp", "sp", "zero", "experts_over")
_ACTIONS_BY = itemgetter("tp", "sp", "cp", "ep", "recompute", "microbatch")
_LAYOUT_BY = itemgetter("pp", "dp", "instances", "cp", "ep", "tp", "order", "experts_over")


class _Row(NamedTuple):
    """What pieces of a plan depend on, beside its settings."""

    settings: Mapping[str, Any]
    shape: Shape
    order: Order
    adds_up: bool
    zero: int
    """The stage of ZeRO that the actions depend on."""
    others: tuple[Any, ...]
    """How experts lie, how sequences are dealt, and the settings from outside."""


def laid_out_as(place: int) -> int:
    """Maps `LONGER` to `MIDDLE`: a stage with one block more has the pieces of a middle stage."""
    return MIDDLE if place == LONGER else place


def _why_simulated(task: Task) -> str:
    """Why no plan of a task is put together from pieces; empty if plans are."""
    hardware, model = task.hardware, task.model.model
    if isinstance(model, TransformerSpec) and model.next_tokens:
        return "modules that predict further tokens have blocks of their own"
    if task.model.first_alike > MOST_OTHERS:
        return f"the first {task.model.first_alike} blocks are like no others"
    if hardware.stragglers or hardware.faults:
        return f"devices of {hardware.name} differ"
    if hardware.message_overhead_seconds or hardware.message_overhead_seconds_per_byte:
        return "messages hold their ends"
    return ""


class PlanCosts:
    """Seconds and memory of the plans of a task."""

    def __init__(self, task: Task, possible: Choices) -> None:
        self.task, self.possible = task, possible
        if reason := _why_simulated(task):
            raise Unpriceable(reason)
        self.steps = two_block_steps(
            task.model, fused=task.hardware.fused, overlapping=task.hardware.overlapping
        )
        self.prices = EventPrices(Pricing.of(task.hardware, "modelled", None, link_sharing=False))
        self.limited = [setting for setting in SETTINGS.records.values() if setting.from_pieces is not always]
        """The settings of which some values are not put together from pieces."""
        self.registered = [setting.name for setting in SETTINGS.registered]
        """The settings from outside."""
        self._costs: dict[Any, StageCosts] = {}
        self._seconds: dict[Any, StageSeconds] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        self._layouts: dict[Any, MeshOnHardware] = {}
        self._columns: dict[Any, tuple[Floats, Floats]] = {}
        self._ends: dict[Any, Ends] = {}
        self._flows: dict[Any, int] = {}
        self._memories: dict[Any, tuple[Ints, Ints]] = {}
        self._of_devices: dict[Any, list[tuple[int, int, int | None]]] = {}

    # -- pieces --------------------------------------------------------------------------------------------------------

    def settings(self, row: int) -> dict[str, Any]:
        """The settings of a plan."""
        if row not in self._settings:
            self._settings[row] = self.possible.settings(row)
        return self._settings[row]

    def _registered(self, settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """The settings from outside, with their values in a plan."""
        return tuple([(name, settings[name]) for name in self.registered])

    def microbatches(self, row: int) -> int:
        """The microbatches of each replica of a plan."""
        return self.task.microbatches(self.settings(row))

    @memoized
    def shape(self, row: int) -> Shape:
        """The pipeline of a plan."""
        s = self.settings(row)
        return self._shape(s["schedule"], s["pp"], self.microbatches(row), s["chunks"], s["balanced"])

    @memoized
    def _shape(self, schedule: str, ranks: int, microbatches: int, chunks: int, balanced: Any) -> Shape:
        counts = self.task.model.layers_of(ranks * chunks, balanced=balanced)
        return Shape.of(schedule, ranks, microbatches, chunks, counts)

    @memoized
    def _of(self, row: int) -> _Row:
        s, shape = self.settings(row), self.shape(row)
        others = self._of_experts(s), self._of_sequences(s), self._registered(s)
        zero = self._zero_of_actions(s, shape)
        return _Row(s, shape, self._order(shape), self.adds_up(shape), zero, others)

    def alike(self, blocks: int, place: int) -> int:
        """So many blocks at a place without those at the beginning that are like no others; a whole program is one."""
        if self.task.model.is_whole:
            return 1
        return blocks - self.task.model.first_alike if place in (FIRST, ONLY) else blocks

    def actions(self, row: int, kind: str) -> StageCosts:
        """The costs of the actions of a kind of a plan."""
        return self._actions_of(row, kind in "IW")

    @memoized
    def _actions_of(self, row: int, split: bool) -> StageCosts:
        s, shape, _, adds_up, zero, (experts, sequences, registered) = self._of(row)
        pattern = Pattern(
            shape.stages > 1,
            split,
            s["tp"] > 1,
            s["sp"],
            s["cp"],
            s["recompute"],
            zero,
            adds_up,
            registered,
            experts,
            sequences,
        )
        key = "actions", pattern, s["microbatch"], s["tp"], s["ep"]
        if key not in self._costs:
            events = self.steps.actions(pattern, s["microbatch"], s["tp"], s["ep"])
            self._costs[key] = self._costs.setdefault(id(events), StageCosts(events))  # it keeps them alive
        return self._costs[key]

    def _zero_of_actions(self, settings: Mapping[str, Any], shape: Shape) -> int:
        """The stage of ZeRO that the actions of a plan depend on.

        Halves of backwards, and the backward of the only microbatch, make gradients in its order.
        """
        s = settings
        halves = any(kind == "W" for _, kind in self._order(shape).works)
        if halves or not self.adds_up(shape):
            return 1 if s["zero"] else 0
        return self.steps.zero(s["zero"], sp=s["sp"], cp=s["cp"], ep=s["ep"] > 1)

    def _of_experts(self, settings: Mapping[str, Any]) -> ExpertPattern:
        """How experts lie: the same where nothing is split."""
        over = settings["experts_over"] if axes_beside_experts(self.task.model, settings) else EXPERTS_OVER[0]
        if settings["ep"] == 1:
            return ExpertPattern("", over)
        return ExpertPattern("split" if settings["dp"] > 1 else "alone", over)

    def _of_sequences(self, settings: Mapping[str, Any]) -> SequenceSplit:
        """How sequences are dealt: the same where nothing is to deal."""
        return (settings["cp"] > 1 and split_of_sequences(self.task.model, settings)) or SequenceSplit()

    def ends(self, row: int, *, in_stages: bool, smaller: frozenset[Uneven] = frozenset()) -> StageCosts:
        """The costs of the end of a step of a plan, and of what is held during it; of ``smaller`` a device has no larger
        part."""
        s, pattern = self.settings(row), self._pattern_of_ends(row, in_stages=in_stages)
        key = "ends", pattern, s["tp"], s["dp"], s["ep"], smaller
        if key not in self._costs:
            events = self.steps.ends(pattern, s["tp"], s["dp"], s["ep"], smaller=smaller)
            self._costs[key] = StageCosts(events)
        return self._costs[key]

    def uneven(self, row: int) -> list[Uneven]:
        """What the devices at a position have parts of unequal sizes of, where ZeRO splits what they update."""
        s = self.settings(row)
        pattern = self._pattern_of_ends(row, in_stages=self.shape(row).stages > 1)
        return self.steps.uneven(pattern, s["tp"], s["dp"], s["ep"])

    def _pattern_of_ends(self, row: int, *, in_stages: bool) -> Pattern:
        s = self.settings(row)
        return Pattern(
            in_stages,
            False,
            s["tp"] > 1,
            s["sp"],
            s["cp"],
            self._recompute_of_ends(s),
            min(s["zero"], 1),  # the events at the end are the same in stages 1 and 2
            registered=self._registered(s),
            experts=self._of_experts(s),
            sequences=self._of_sequences(s),
            instances=s["instances"],
        )

    def _recompute_of_ends(self, settings: Mapping[str, Any]) -> str:
        """What runs again, where it says which gradients are summed at the end: in attention whose heads are dealt."""
        return settings["recompute"] if self._of_sequences(settings).deals_heads else "none"

    def devices(
        self, row: int, smaller: frozenset[Uneven] = frozenset()
    ) -> list[tuple[StageCosts, int, int]]:
        """Of the devices that differ: the costs of their end, their place, and their blocks.  See `number_of`; of
        ``smaller`` they have no larger parts."""
        shape = self.shape(row)
        several = self.ends(row, in_stages=shape.stages > 1, smaller=smaller)
        if shape.is_v_shaped:
            blocks = shape.blocks_of(FIRST) * shape.chunks
            alone = self.ends(row, in_stages=False, smaller=smaller)
            first = alone, ONLY, self.alike(blocks, ONLY)
            return [first, (several, MIDDLE, blocks)]
        return [(several, place, self.alike(blocks, place)) for place, blocks in self._places(shape)[0]]

    @memoized
    def _places(self, shape: Shape) -> tuple[tuple[tuple[int, int], ...], Ints]:
        """The places and blocks of devices that differ; and for each rank the number of its own among them."""
        of_ranks = shape.blocks_of_ranks
        places = [(place_of(rank, shape.ranks), blocks) for rank, blocks in enumerate(of_ranks)]
        different = tuple(dict.fromkeys(places))
        return different, np.array([different.index(place) for place in places])

    def number_of(self, shape: Shape) -> Ints:
        """For each rank, the number of its kind of devices among those of `devices`."""
        if shape.is_v_shaped:
            return np.minimum(np.arange(shape.ranks), 1)
        return self._places(shape)[1]

    def seconds_of(self, costs: StageCosts, layout: MeshOnHardware) -> StageSeconds:
        """The seconds of actions, or of ends, on a mesh."""
        key = id(costs), layout.inside
        if key not in self._seconds:
            self._seconds[key] = costs.seconds(self.prices, layout)
        return self._seconds[key]

    # -- preparing -----------------------------------------------------------------------------------------------------

    @memoized
    def held(self, row: int) -> int:
        """The most bytes that a device of a plan holds between the actions and the update at least, without activations: by
        the end of the step alone.  `Unpriceable` as from `prepare`."""
        if reason := self._why_simulated(row):
            raise Unpriceable(reason)
        return max(held + gradients for held, gradients, _ in self._held_by_devices(row))

    def _why_simulated(self, row: int) -> str:
        """Why a plan is not put together from pieces; empty if it is."""
        s, shape = self.settings(row), self.shape(row)
        if s["pp"] > 1 and self.task.model.is_whole:
            return "only blocks that are alike are pieces, and stages of this program are simulated"
        if (shape.is_v_shaped and not shape.is_even) or (s["pp"] == 1 and s["chunks"] > 1):
            return "several stages on a rank, which differ in their blocks or are the only ones"
        if s["pp"] > 1 and self.task.model.reads_blocks_outside:
            return "a weight of a block is read in another stage, too"
        if self.alike(shape.blocks_of(FIRST), FIRST) < 1:
            return "the first stage has no block that is like those of others"
        for setting in self.limited:
            if not setting.is_from_pieces(s[setting.name]):
                return f"{setting.name}={s[setting.name]} is not put together from pieces"
        if shape.chunks > 1 and not self.adds_up(shape):
            return "the gradients of one microbatch are kept from one stage of a device to the next"
        if shape.is_v_shaped and s["cp"] * s["ep"] > 1 and self.ends(row, in_stages=True).exchanged(FIRST):
            # As one stage the two would sum these gradients over the devices inside of it once, at the end.
            return "two stages of a device share weights whose gradients are summed inside of each"
        return ""

    @memoized
    def _held_by_devices(self, row: int, *, ends: bool = False) -> Sequence[tuple[int, int, Any]]:
        """For each of `devices` the bytes that it holds during the whole step; those of the sums of gradients, which of
        one microbatch are there after the actions alone; and if ``ends``, those that the end takes beside them at most."""
        s, shape = self.settings(row), self.shape(row)
        key = (
            ends,
            shape.is_v_shaped,
            *shape[1:2],
            *shape[3:],
            *_HELD_BY(s),
            self.microbatches(row) * s["microbatch"],
            self._of_sequences(s),
            self._registered(s),
            self._recompute_of_ends(s),
        )
        if key not in self._of_devices:
            of_devices: list[tuple[int, int, Any]] = []
            for end, place, blocks in self.devices(row):
                held = self._held(row, end, place, blocks)
                of_devices.append((*held, end.end_peak(place, blocks) if ends else None))
            self._of_devices[key] = of_devices
        return self._of_devices[key]

    def prepare(self, row: int) -> None:
        """Measures the pieces of a plan.  `Unpriceable` if it cannot be put together from pieces."""
        self.held(row)
        self.prepare_held(row)

    def prepare_held(self, row: int) -> None:
        """`prepare`, of a plan of which it is known that what it `held` is put together from pieces."""
        self._memory(row)
        self._held_by_devices(row, ends=True)

    @memoized
    def _memory(self, row: int) -> tuple[Ints, Ints]:
        """The changes of memory and the peaks of a plan's actions, as `Order.peaks` takes them."""
        s, shape, order, adds_up, zero, others = self._of(row)
        works = order.works
        key = works, shape.blocks, adds_up, _ACTIONS_BY(s), zero, others
        if key not in self._memories:
            changes, peaks = (np.zeros(each * PLACES, np.int64) for each in (2, 4))
            for place, kind in works:
                blocks = self.alike(shape.blocks_of(place), place)
                memory = self.actions(row, kind).memory(laid_out_as(place), kind, blocks)
                peaks[4 * place + KINDS.index(kind)] = memory.peak
                if kind in "FI":
                    changes[2 * place + (kind == "I")] = memory.change
            self._memories[key] = changes, peaks
        return self._memories[key]

    def price(self, rows: Iterable[int]) -> dict[int, str]:
        """Prices the pieces of plans on their meshes.  The plans that have no price, with the reasons."""
        odd = dict[int, str]()
        for row in rows:
            try:
                self._column(row), self._end(row)
            except Unpriceable as error:
                odd[row] = str(error)
        return odd

    @memoized
    def layout(self, row: int) -> MeshOnHardware:
        """The mesh of a plan."""
        s = self.settings(row)
        key = _LAYOUT_BY(s), self._of_sequences(s)
        if key not in self._layouts:
            self._layouts[key] = MeshOnHardware(self.task.mesh(s))
        return self._layouts[key]

    def layout_of_ends(self, row: int) -> MeshOnHardware:
        """The mesh on which the end of a plan's step runs: that of the plan."""
        return self.layout(row)

    # -- a plan --------------------------------------------------------------------------------------------------------

    def peaks(self, shape: Shape, rows: Sequence[int]) -> Ints:
        """The memory of the fullest device of each plan."""
        changes, peaks = (np.stack(each, axis=1) for each in zip(*map(self._memory, rows), strict=True))
        by_device = np.array([self._held_by_devices(row, ends=True) for row in rows], np.int64)
        held, gradients, ends = np.moveaxis(by_device[:, self.number_of(shape)], 0, 1).transpose(2, 0, 1)
        of_actions = self._order(shape).peaks(changes, peaks)
        if self.adds_up(shape):
            of_actions += gradients
        every: Ints = (held + np.maximum(of_actions, gradients + ends)).max(axis=0)
        return every

    def _held(self, row: int, end: StageCosts, place: int, blocks: int) -> tuple[int, int]:
        """The bytes that a device holds during the whole step, and those of the sums of gradients."""
        held = self.held_by_category(row, end, place, blocks)
        gradients = held.pop("gradients")
        return sum(held.values()), gradients

    def held_by_category(self, row: int, end: StageCosts, place: int, blocks: int) -> dict[str, int]:
        """The bytes of each category that a device holds, of gradients those of the sums."""
        s, shape = self.settings(row), self.shape(row)
        names = "weights", "inputs", "gradients", "optimizer"
        held: dict[str, int] = {name: end.held(place, blocks, name) for name in names}
        held["inputs"] *= self.microbatches(row) * s["microbatch"]
        if shape.is_v_shaped and place == ONLY:
            stages, each = self.ends(row, in_stages=True), shape.blocks_of(FIRST)
            held["gradients"] = sum(
                stages.held(own, self.alike(each, own), "gradients") for own in (FIRST, LAST)
            )
        return held

    def end_seconds(self, row: int) -> float:
        """The seconds of the end of a plan's step: of the sums of gradients, the update and the gathers."""
        return float((self._end(row).before + self._end(row).after).max())

    def is_exact(self, row: int) -> bool:
        """Whether the `seconds` of a plan are those of its simulation; else they are fewer."""
        return self.prices.is_exact(self.layout(row))

    def seconds(self, rows: Sequence[int]) -> Floats:
        """The seconds of a step of each plan, without shared links.

        Where equal devices communicate over different links, all of them count as the fastest.
        """
        of_order: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            of_order.setdefault(id(self._order(self.shape(row))), []).append(number)
        found = np.zeros(len(rows))
        for numbers in of_order.values():
            found[numbers] = self._seconds_in_order([rows[number] for number in numbers])
        return found

    def _seconds_in_order(self, rows: Sequence[int]) -> Floats:
        """The seconds of plans with one order, which may be repeated."""
        order = self._order(self.shape(rows[0]))
        columns = [self._column(row) for row in rows]
        repeats = [self.orders(self.shape(row))[1] for row in rows]
        return order.step_seconds(columns, repeats, [self._end(row) for row in rows])

    @memoized
    def _column(self, row: int) -> tuple[Floats, Floats]:
        """The durations of a plan's actions and messages, as `Order.ends` takes them."""
        s, shape, order, adds_up, zero, others = self._of(row)
        layout, by = self.layout(row), (s["sp"], s["recompute"], s["microbatch"])
        key = self._flow(shape), shape.blocks, adds_up, id(layout), by, zero, others
        if key not in self._columns:
            durations = np.zeros(4 * PLACES)
            for place, kind in order.works:
                seconds = self.seconds_of(self.actions(row, kind), layout)
                durations[4 * place + KINDS.index(kind)] = seconds.action(
                    laid_out_as(place), kind, self.alike(shape.blocks_of(place), place)
                )
            taken = []
            for kind in dict.fromkeys(kind for _, _, kind in order.messages):
                place = LAST if kind == "F" else FIRST
                taken.append((kind, self.actions(row, kind).received(place, kind)))
            self._columns[key] = durations, self._messages(order.messages, tuple(taken), layout)
        return self._columns[key]

    @memoized
    def _messages(
        self,
        messages: tuple[tuple[int, int, str], ...],
        taken: tuple[tuple[str, int], ...],
        layout: MeshOnHardware,
    ) -> Floats:
        """The seconds of the messages of an order, given the bytes that each kind of action takes; and a 0."""
        nbytes = dict(taken)
        return np.array(
            [
                *(
                    self.prices.message(nbytes[kind], source, target, layout)
                    for source, target, kind in messages
                ),
                0.0,
            ]
        )

    @memoized
    def _end(self, row: int) -> Ends:
        """The end of a plan's step."""
        s, shape, *_, others = self._of(row)
        layout, around = self.layout(row), self.layout_of_ends(row)
        by = s["sp"], s["zero"], self._recompute_of_ends(s)
        key = shape.is_v_shaped, shape[1], shape[3:], id(layout), others, by
        if key not in self._ends:
            devices, last = self.devices(row), shape.ranks - 1
            pairs = [self.seconds_of(end, around).end(place, blocks) for end, place, blocks in devices]
            before, after = np.array(pairs)[self.number_of(shape)].T
            there = back = -np.inf
            if last and (nbytes := devices[0][0].exchanged(devices[0][1])):
                there, back = (self.prices.message(nbytes, *ends, layout) for ends in ((0, last), (last, 0)))
            self._ends[key] = Ends(before, there, back, after)
        return self._ends[key]

    @memoized
    def adds_up(self, shape: Shape) -> bool:
        """As `parallelism.execution.TrainedPipeline.adds_up`."""
        if self.task.hardware.gradient_buffers or shape.microbatches > 1:
            return True
        return any(kind == "W" for _, kind in self._order(shape).works)

    def kinds_at(self, row: int, place: int) -> tuple[str, ...]:
        """The kinds of actions of the stages at a place."""
        return tuple(dict.fromkeys(kind for at, kind in self._order(self.shape(row)).works if at == place))

    def _order(self, shape: Shape) -> Order:
        return self.orders(shape)[0]

    @memoized
    def orders(self, shape: Shape) -> tuple[Order, int]:
        """The order of a pipeline, and how often its window comes once more."""
        return order_of(*shape[:5])

    @memoized
    def _flow(self, shape: Shape) -> int:
        """A number for the kinds of actions of a pipeline and its messages."""
        order = self._order(shape)
        return self._flows.setdefault((order.works, order.messages), len(self._flows))
