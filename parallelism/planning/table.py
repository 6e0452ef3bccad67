"""`PlanTable`: the seconds and the memory of plans, put together from pieces that are priced once.

The result is that of ``simulate(step, hardware, link_sharing=False)``: the same events, priced by the same functions,
and the same order; only sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.pipelining.generators import V_SHAPED
from parallelism.planning.orders import FIRST, KINDS, LAST, MIDDLE, ONLY, Order, order_of, place_of
from parallelism.planning.plan import Task
from parallelism.planning.row_prices import Layout, RowPrices
from parallelism.planning.sheets import Unpriceable
from parallelism.planning.small_steps import Pattern, SmallSteps
from parallelism.planning.space import Choices
from parallelism.planning.stage_costs import Forms, SheetCosts, SheetSeconds
from parallelism.timeline import Pricing

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """The pipeline of a plan."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


class PlanTable:
    """Seconds and memory of the plans of a task."""

    def __init__(self, task: Task, possible: Choices) -> None:
        self.task, self.possible = task, possible
        self.steps = SmallSteps(task.model, np.unique(possible["tp"]).tolist(),
                                np.unique(possible["dp"]).tolist(), fused=task.hardware.fused)
        self.prices = RowPrices(Pricing.of(task.hardware, "modelled", None, link_sharing=False))
        if task.hardware.message_overhead_seconds:
            raise Unpriceable("messages hold their ends")
        self.forms = Forms()
        self._sheets: dict[Any, SheetCosts] = {}
        self._seconds: dict[Any, SheetSeconds] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        self._layouts: dict[int, Layout] = {}

    # -- pieces --------------------------------------------------------------------------------------------------------

    def settings(self, row: int) -> dict[str, Any]:
        """The settings of a plan."""
        if row not in self._settings:
            self._settings[row] = self.possible.settings(row)
        return self._settings[row]

    def shape(self, row: int) -> Shape:
        """The pipeline of a plan."""
        s = self.settings(row)
        return Shape(s["schedule"], s["pp"], self.task.microbatches(s), s["chunks"])

    def blocks(self, shape: Shape) -> int:
        """The blocks of a stage."""
        return self.task.model.blocks // shape.stages

    def actions(self, row: int, kind: str) -> SheetCosts:
        """The costs of the actions of a kind of a plan."""
        s, shape = self.settings(row), self.shape(row)
        if s["zero"] == 3 or (s["pp"] == 1 and s["chunks"] > 1):
            raise Unpriceable("a plan of another form")
        pattern = Pattern(shape.stages > 1, kind in "IW", s["tp"] > 1, s["sp"], s["cp"], s["recompute"],
                          min(s["zero"], 1) if s["sp"] else 0)
        key = "actions", pattern, s["microbatch"], s["tp"]
        if key not in self._sheets:
            self._sheets[key] = SheetCosts(self.steps.actions(pattern, s["microbatch"], s["tp"]), self.forms)
        return self._sheets[key]

    def ends(self, row: int, *, in_stages: bool) -> SheetCosts:
        """The costs of the end of a step of a plan, and of what is held during it."""
        s = self.settings(row)
        pattern = Pattern(in_stages, False, s["tp"] > 1, s["sp"], s["cp"], "none", s["zero"])
        key = "ends", pattern, s["tp"], s["dp"]
        if key not in self._sheets:
            self._sheets[key] = SheetCosts(self.steps.ends(pattern, s["tp"], s["dp"]), self.forms)
        return self._sheets[key]

    def _devices(self, row: int) -> list[tuple[SheetCosts, int, int]]:
        """By rank: the costs of its end, its place, and its blocks."""
        shape = self.shape(row)
        blocks = self.blocks(shape) * shape.chunks
        several = self.ends(row, in_stages=shape.stages > 1)
        if shape.schedule in V_SHAPED:
            return [(self.ends(row, in_stages=False), ONLY, blocks), *[(several, MIDDLE, blocks)] * (shape.ranks - 1)]
        return [(several, place_of(rank, shape.ranks), blocks) for rank in range(shape.ranks)]

    def _seconds_of(self, costs: SheetCosts, layout: Layout) -> SheetSeconds:
        mesh = layout.mesh
        key = id(costs), tuple((axis, layout.along([axis])) for axis in mesh.axes if axis != "pp")
        if key not in self._seconds:
            self._seconds[key] = costs.seconds(self.prices, layout)
        return self._seconds[key]

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare(self, row: int) -> None:
        """Measures the pieces of a plan.  `Unpriceable` if it cannot be put together from pieces."""
        order = self._order(self.shape(row))
        for place, kind in order.works:
            self.actions(row, kind).memory(place, kind, self.blocks(self.shape(row)))
        for end, place, blocks in self._devices(row):
            end.end_peak(place, blocks)

    def price(self, groups: dict[Shape, list[int]]) -> list[int]:
        """Prices the pieces of plans on their meshes; the plans that have no price are taken out, and returned."""
        odd = []
        for shape, rows in groups.items():
            wrong = set()
            for row in rows:
                try:
                    self._price(shape, row)
                except Unpriceable:
                    wrong.add(row)
            odd += sorted(wrong)
            rows[:] = [row for row in rows if row not in wrong]
        return odd

    def _price(self, shape: Shape, row: int) -> None:
        order, layout = self._order(shape), self.layout(row)
        for kind in {kind for _, kind in order.works}:
            self._seconds_of(self.actions(row, kind), layout)
        for source, target, kind in order.messages:
            self.prices.message(self.actions(row, kind).received(LAST if kind == "F" else FIRST, kind), source, target,
                                layout)
        devices = self._devices(row)
        for end in {each[0] for each in devices}:
            self._seconds_of(end, layout)
        if len(devices) > 1 and (nbytes := devices[0][0].exchanged(devices[0][1])):
            self.prices.message(nbytes, 0, len(devices) - 1, layout)
            self.prices.message(nbytes, len(devices) - 1, 0, layout)

    def layout(self, row: int) -> Layout:
        """The mesh of a plan."""
        if row not in self._layouts:
            self._layouts[row] = Layout(self.task.mesh(self.settings(row)))
        return self._layouts[row]

    # -- a plan --------------------------------------------------------------------------------------------------------

    def peaks(self, shape: Shape, rows: Sequence[int]) -> Ints:
        """The memory of the fullest device of each plan."""
        order, blocks = self._order(shape), self.blocks(shape)
        changes, peaks = np.zeros((8, len(rows)), np.int64), np.zeros((16, len(rows)), np.int64)
        held, ends = np.zeros((shape.ranks, len(rows)), np.int64), np.zeros((shape.ranks, len(rows)), np.int64)
        for i, row in enumerate(rows):
            for place, kind in order.works:
                memory = self.actions(row, kind).memory(place, kind, blocks)
                peaks[4 * place + KINDS.index(kind), i] = memory.peak
                if kind in "FI":
                    changes[2 * place + (kind == "I"), i] = memory.change
            for rank, (end, place, own) in enumerate(self._devices(row)):
                held[rank, i] = self._held(row, end, place, own)
                ends[rank, i] = end.end_peak(place, own)
        every: Ints = (held + np.maximum(order.peaks(changes, peaks), ends)).max(axis=0)
        return every

    def _held(self, row: int, end: SheetCosts, place: int, blocks: int) -> int:
        s, shape = self.settings(row), self.shape(row)
        held: int = end.held(place, blocks, "weights") + end.held(place, blocks, "optimizer")
        held += end.held(place, blocks, "inputs") * (self.task.batch // s["dp"])
        if shape.schedule in V_SHAPED and place == ONLY:
            stages, each = self.ends(row, in_stages=True), self.blocks(shape)
            held += sum(stages.held(own, each, "gradients") for own in (FIRST, LAST))
        else:
            held += end.held(place, blocks, "gradients")
        return held

    def seconds(self, shape: Shape, rows: Sequence[int]) -> Floats:
        """The seconds of a step of each plan, without shared links."""
        order, blocks = self._order(shape), self.blocks(shape)
        durations, messages = np.zeros((16, len(rows))), np.zeros((len(order.messages) + 1, len(rows)))
        layouts = list(map(self.layout, rows))
        for i, row in enumerate(rows):
            for place, kind in order.works:
                seconds = self._seconds_of(self.actions(row, kind), layouts[i])
                durations[4 * place + KINDS.index(kind), i] = seconds.action(place, kind, blocks)
            for j, (source, target, kind) in enumerate(order.messages):
                nbytes = self.actions(row, kind).received(LAST if kind == "F" else FIRST, kind)
                messages[j, i] = self.prices.message(nbytes, source, target, layouts[i])
        times = order.ends(durations, messages)
        for i, row in enumerate(rows):
            self._add_ends(times[:, i], row, layouts[i])
        result: Floats = times.max(axis=0)
        return result

    def _add_ends(self, times: Floats, row: int, layout: Layout) -> None:
        devices, ranks = self._devices(row), len(times)
        after = np.zeros(ranks)
        known: dict[tuple[int, int], tuple[float, float]] = {}
        for rank, (end, place, blocks) in enumerate(devices):
            if (id(end), place) not in known:
                known[id(end), place] = self._seconds_of(end, layout).end(place, blocks)
            before, after[rank] = known[id(end), place]
            times[rank] += before
        (end, place, _), last = devices[0], ranks - 1
        if last and (nbytes := end.exchanged(place)):
            there = self.prices.message(nbytes, 0, last, layout)
            back = self.prices.message(nbytes, last, 0, layout)
            times[0], times[last] = max(times[0], times[last] + back), max(times[last], times[0] + there)
        times += after

    def _order(self, shape: Shape) -> Order:
        return order_of(*shape)

