"""What a device records in a step of a pipelined program, action by action.

As `parallelism.pipelining.execution.run_actions` with the stages of `parallelism.execution.stage_runner`, and what adds
up the gradients in the end.  Where a price is given, what a stage does for a microbatch is one piece of compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.execution import ACTIVATIONS, GRADIENTS, PipelinedProgram, StagePrograms
from parallelism.ir import TensorType
from parallelism.layouts.stages import Part
from parallelism.mesh import Mesh
from parallelism.pipelining import MESSAGES, Action, pipeline_axes
from parallelism.simulation.device_events import Row, Rows, row


class Priced(NamedTuple):
    """What a stage does for a microbatch, as one piece."""

    seconds: float
    flops: float
    nbytes: float
    peak: Mapping[str, int]
    """Bytes by category when most is held, over what was held before."""
    after: Mapping[str, int]


class PipelinedEvents:
    """Writes the events of one device: ``rows``.

    ``parts`` are the rows of its microbatches, ``stages`` the programs of all stages at its place inside of them.
    """

    def __init__(
        self, program: PipelinedProgram, mesh: Mesh, rank: int, parts: Sequence[Part],
        stages: Sequence[StagePrograms], price: Callable[[Rows], float | None] | None,
    ) -> None:
        self.program, self.pipeline, self.price = program, program.pipeline, price
        self.rank, self.mesh, self.parts, self.stages = rank, mesh, parts, stages
        self.position, _ = program.places(mesh)[rank]
        self.axis, self.replicas = pipeline_axes(self.pipeline, mesh, program.inside)
        self.mine = self.program.stages_on(self.position)
        self.last = self.pipeline.stages - 1
        self.rows = Rows()
        self.works = 0
        self.sent: list[int] = []
        self.posted: dict[tuple[int, str, int], int] = {}
        self.done: dict[tuple[int, int], str] = {}
        """The last action that a microbatch has had on a stage."""
        self._priced: dict[Any, Priced | None] = {}
        self._messages: dict[tuple[int, str, int], tuple[int, str]] = {}
        self.write()

    def write(self) -> None:
        """All of a step."""
        add = self.rows.rows.append
        add(row("compute", self.program.name, seconds=0.0))
        functions = [self.stages[stage].functions for stage in self.mine]
        weights = {name: stage for stage, each in zip(self.mine, functions, strict=True) for name in each.weights}
        data = {name: stage for stage, each in zip(self.mine, functions, strict=True) for name in each.data}
        inputs = sum(self._bytes_of(stage, part, [name]) for name, stage in data.items() for part in self.parts)
        trained = sum(_total(self._trained(stage)) for stage in self.mine)
        for category, nbytes in (
            ("weights", sum(self._bytes_of(stage, self.parts[0], [name]) for name, stage in weights.items())),
            ("inputs", inputs), (GRADIENTS, trained),
        ):
            add(row("memory", category, nbytes=float(nbytes)))
        works = self.pipeline.schedule.works[self.position]
        for action, following in zip(works, [*works[1:], None], strict=True):
            self.act(action, following)
        for work in self.sent:
            add(row("wait", "send", work=work))
        self.add_up()

    # -- the actions ---------------------------------------------------------------------------------------------------

    def act(self, action: Action, following: Action | None) -> None:
        """An action with what it takes, and what it hands on: `run_actions`."""
        stage, kind, k = action
        if kind in MESSAGES:
            forward = kind[-1] == "F"
            if kind[0] == "S":
                self.send(stage + 1 if forward else stage - 1, kind[-1], k)
            else:
                self.post(stage, kind[-1], k)
            return
        self.take(stage, kind, k)
        if following is not None and not self.pipeline.schedule.lists_messages and following.kind not in MESSAGES:
            self.expect(following)
        programs = self.stages[stage]
        again = kind in ("B", "I") and programs.functions.recompute is not None
        if again:
            self.body(stage, "R", k, f"recompute {stage}F{k}")
        self.body(stage, kind, k, str(action))
        if kind in ("F", "B", "I") and self.pipeline.schedule.passes_on(kind):
            target = stage + 1 if kind == "F" else stage - 1
            if 0 <= target <= self.last and not self.here(target) and not self.pipeline.schedule.lists_messages:
                self.send(target, kind, k)

    def body(self, stage: int, kind: str, k: int, name: str) -> None:
        """What the stage computes, and holds meanwhile and afterwards."""
        marks: dict[str, Any] = {"stage": stage, "microbatch": k, "phase": None if kind == "R" else kind}
        places: dict[str, Any] = {"stage": stage, "microbatch": k}
        add = self.rows.rows.append
        if self.price is not None:
            priced = self.as_one(stage, kind, k)
            if priced is not None:
                for category, nbytes in priced.peak.items():
                    add(row("memory", category, nbytes=float(nbytes), **places))
                add(row("compute", name, flops=priced.flops, nbytes=priced.nbytes, seconds=priced.seconds, **marks))
                for category in {**priced.peak, **priced.after}:
                    nbytes = priced.after.get(category, 0) - priced.peak.get(category, 0)
                    if nbytes:
                        add(row("memory", category, nbytes=float(nbytes), **places))
                self.done[stage, k] = kind
                return
        add(row("compute", name, seconds=0.0, **marks))
        self.write_body(self.rows, stage, kind, k, marks)
        self.done[stage, k] = kind

    def write_body(self, rows: Rows, stage: int, kind: str, k: int, marks: Mapping[str, Any]) -> None:
        """The events of `ProgramStage`, and of what is kept."""
        programs, part = self.stages[stage], self.parts[k]
        places: dict[str, Any] = {"stage": stage, "microbatch": k}
        taken = _total(programs.message(kind, part, last=stage == self.last))
        comes = stage > 0 if kind == "F" else kind in ("B", "I") and stage < self.last

        def hold(category: str, nbytes: int) -> None:
            if nbytes:
                rows.rows.append(row("memory", category, nbytes=float(nbytes), **places))

        if comes:
            hold(ACTIVATIONS, taken)
        rows.add_program(programs.program(kind, part), self.mesh, self.rank, **marks)
        for category, nbytes in (*programs.left(kind, part), (ACTIVATIONS, taken)):
            hold(category, -nbytes)
        if kind in ("B", "W"):
            types = self._trained(stage)
            count = sum(map(_size, types))
            if count:
                rows.rows.append(row(
                    "compute", "add", flops=float(count), nbytes=3.0 * _total(types), dtype=types[0].dtype.name,
                    **places))
        before, after = (programs.held(done, part) for done in (self.done.get((stage, k)), kind))
        rows.rows.append(row("memory", ACTIVATIONS, nbytes=float(after - before), **places))

    def as_one(self, stage: int, kind: str, k: int) -> Priced | None:
        """An action as one piece, priced once."""
        key = stage, kind, id(self.stages[stage].program(kind, self.parts[k])), self.done.get((stage, k))
        if key not in self._priced:
            rows = Rows()
            self.write_body(rows, stage, kind, k, {})
            assert self.price is not None
            seconds = self.price(rows)
            self._priced[key] = None if seconds is None else _as_one(rows.rows, seconds)
        return self._priced[key]

    # -- messages ------------------------------------------------------------------------------------------------------

    def here(self, stage: int) -> bool:
        return self.pipeline.schedule.placement[stage] == self.position

    def take(self, stage: int, kind: str, k: int) -> None:
        """What an action waits for."""
        maker = stage - 1 if kind == "F" else stage + 1
        if not self.pipeline.schedule.passes_on(kind) or not 0 <= maker <= self.last or self.here(maker):
            return
        work = self.posted.pop((stage, _way(kind), k), None)
        if work is not None:
            self.rows.rows.append(row("wait", "recv", work=work))
        else:
            self.receive(stage, kind, k, None)

    def expect(self, action: Action) -> None:
        stage, kind, k = action
        maker = stage - 1 if kind == "F" else stage + 1
        if self.pipeline.schedule.passes_on(kind) and 0 <= maker <= self.last and not self.here(maker):
            self.post(stage, kind, k)

    def post(self, stage: int, kind: str, k: int) -> None:
        self.works += 1
        self.posted[stage, _way(kind), k] = self.works
        self.receive(stage, kind, k, self.works)

    def receive(self, stage: int, kind: str, k: int, work: int | None) -> None:
        maker = stage - 1 if kind == "F" else stage + 1
        nbytes, _ = self.message(stage, kind, k)
        self.rows.add_message("recv", self._position(maker), self.tag(stage, kind, k), nbytes, None, self.axis, work)

    def send(self, target: int, kind: str, k: int) -> None:
        """To the stage that takes it."""
        self.works += 1
        self.sent.append(self.works)
        nbytes, dtype = self.message(target, kind, k)
        self.rows.add_message(
            "send", self._position(target), self.tag(target, kind, k), nbytes, dtype, self.axis, self.works)

    def message(self, stage: int, kind: str, k: int) -> tuple[int, str]:
        """Bytes and dtype of what a stage takes for an action."""
        key = stage, _way(kind), self.parts[k][1]
        if key not in self._messages:
            types = self.stages[stage].message(_way(kind), self.parts[k], last=stage == self.last)
            self._messages[key] = _total(types), types[0].dtype.name if len(types) == 1 else "uint8"
        return self._messages[key]

    def tag(self, stage: int, kind: str, k: int) -> int:
        return 2 * (stage * self.pipeline.microbatches + k) + (kind != "F")

    def _position(self, stage: int) -> int:
        return self.pipeline.schedule.placement[stage]

    # -- in the end ----------------------------------------------------------------------------------------------------

    def add_up(self) -> None:
        """The gradients over replicas, and over stages that have the same weights."""
        for stage in self.mine:
            if self.replicas is not None:
                for dtype, size in _sizes(self._trained(stage)).items():
                    self.rows.add_all_reduce(self.mesh, self.replicas, (size,), dtype)
                if stage == self.last:
                    self.rows.add_all_reduce(self.mesh, self.replicas, (), self._loss_dtype(stage))
        tag = 2 * self.pipeline.stages * self.pipeline.microbatches
        for positions, names in self.program.shared:
            if self.position not in positions:
                continue
            types: dict[str, TensorType] = {}
            for stage in self.mine:
                trained = self.stages[stage].functions.trained
                types |= dict(zip(trained, self._trained(stage), strict=True))
            for dtype, size in _sizes([types[name] for name in names]).items():
                nbytes = size * dtype.itemsize
                for other in positions:
                    if other != self.position:
                        self.works += 1
                        self.rows.add_message("send", other, tag, nbytes, dtype.name, self.axis, self.works)
                        self.rows.add_message("recv", other, tag, nbytes, None, self.axis)
                        self.rows.rows.append(row("wait", "send", work=self.works))
                tag += 1

    def _trained(self, stage: int) -> tuple[TensorType, ...]:
        functions = self.stages[stage].of(self.parts[0])
        return self.stages[stage].types(functions.forward.inputs, functions.trained)

    def _loss_dtype(self, stage: int) -> np.dtype[Any]:
        return self.stages[stage].functions.forward.outputs[0].type.dtype

    def _bytes_of(self, stage: int, part: Part, names: Sequence[str]) -> int:
        return _total(self.stages[stage].types(self.stages[stage].of(part).forward.inputs, names))


def _as_one(rows: Sequence[Row], seconds: float) -> Priced:
    held: dict[str, int] = {}
    peak: dict[str, int] = {}
    flops = nbytes = 0.0
    for kind, name, size, each, *_ in rows:
        if kind == "memory":
            held[name] = held.get(name, 0) + int(size)
            if sum(held.values()) > sum(peak.values()):
                peak = dict(held)
        elif kind == "compute":
            flops, nbytes = flops + each, nbytes + size
    return Priced(seconds, flops, nbytes, peak, held)


def _way(kind: str) -> str:
    return "F" if kind == "F" else "B"


def _size(type: TensorType) -> int:
    return prod(int(extent) for extent in type.shape)


def _total(types: Sequence[TensorType]) -> int:
    return sum(_size(type) * type.dtype.itemsize for type in types)


def _sizes(types: Sequence[TensorType]) -> dict[np.dtype[Any], int]:
    """Elements by dtype."""
    found: dict[np.dtype[Any], int] = {}
    for type in types:
        found[type.dtype] = found.get(type.dtype, 0) + _size(type)
    return found
