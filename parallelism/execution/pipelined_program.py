"""A program cut into stages, run on a pipeline: the loss of a batch, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.around_stages import AroundStages
from parallelism.execution.device_program import ACTIVATIONS, GRADIENTS, DeviceProgram
from parallelism.execution.endings import Endings, StepEnd
from parallelism.execution.last_backward import LastBackward, LastSums, Place, Sums
from parallelism.execution.overlapping import arranged
from parallelism.execution.stage_code import StagePrograms
from parallelism.execution.stage_messages import OwnMeshes, StageDevice
from parallelism.execution.stage_runner import ProgramStage
from parallelism.execution.step_updates import StepUpdates
from parallelism.execution.whole_batch import Beginning, WholeBatch
from parallelism.ir import Op, Value
from parallelism.ir.passes.chunked_collectives import chunked_over
from parallelism.ir.passes.given_arrays import one_of
from parallelism.ir.passes.overlapping import overlapped
from parallelism.layouts.stages import Part, Stages, gradient_layout, rows_of
from parallelism.layouts.stages.batches import checked, dealt
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline, PipelinedOperation, free_tag
from parallelism.pipelining.execution import run_actions
from parallelism.sharding import TensorSharding
from parallelism.shared_results import MOST, shared
from parallelism.transforms import Overlap


class LossAndGradients(NamedTuple):
    """The loss of a whole batch and its gradients."""

    loss: Array
    gradients: dict[str, Array]
    """The gradients of the weights that a stage reads, by their names."""


@dataclass(frozen=True)
class Share:
    """The inputs of one device."""

    numbers: Mapping[str, int]
    """The numbers of the symbols, except those of the batch."""
    rows: int
    """Rows of the whole batch."""
    parts: tuple[Part, ...]
    """The first row and the number of rows of each microbatch of this replica."""
    data: Mapping[str, tuple[Array, ...]]
    """This device's part of each input of the batch: its name, then one array for each microbatch."""
    weights: Mapping[str, Array]
    """This device's part of each weight, by name."""
    state: Mapping[str, Array] = field(default_factory=dict)
    """This device's part of the state of an optimizer, by name."""
    first: Mapping[str, Array] = field(default_factory=dict)
    """This device's part of the inputs of the `Beginning` at its position, of the whole batch, by name."""

    @property
    def inputs(self) -> list[Array]:
        """The arrays of the batch."""
        return [*(array for parts in self.data.values() for array in parts), *self.first.values()]


MakeStage = Callable[..., ProgramStage]
"""Makes a stage: `ProgramStage`, or a class with the same arguments."""


class PipelinedProgram(PipelinedOperation):
    """The loss of a batch and its gradients, computed by stages that run a schedule; equal to `gradient` of the whole.

    >>> import numpy as np
    >>> from parallelism import Pipeline, PipelinedProgram, ir, models
    >>> from parallelism.layouts import partition
    >>> from vcluster import VirtualCluster
    >>> loss = models.mlp((6, 8, 4), ir.symbol("B"), "f8")
    >>> program = PipelinedProgram(partition(loss, 2, batch="B"), Pipeline(stages=2, microbatches=3))
    >>> with VirtualCluster(pp=2, backend="thread") as cluster:
    ...     run = cluster.run(program, [np.ones(value.type.shape) for value in loss.specialize(B=5).inputs])
    >>> float(run.result.loss), sorted(run.result.gradients)
    (3136.0, ['p.b0', 'p.b1', 'p.w0', 'p.w1'])

    The inputs are those of ``stages.function``, by name or in their order; the result is a `LossAndGradients`.  Stages
    lie on ``pipeline.axis``; the rows are dealt to the axes ``replicas``, then to microbatches, as even as can be, the
    longer parts first.  ``inside`` is the mesh of the axes inside a stage: over these its functions are localized, by
    the program's layouts.  ``sums`` has dtypes in which the gradients of weights are added up, by name.  ``fused``:
    elementwise ops run as one.  ``overlapping``: collectives run beside products (`parallelism.execution.overlapping`).

    **Communication**: each forward and backward at a boundary between devices sends a message, with the bytes of
    ``sent`` or ``returned``.  The functions of a stage communicate over the axes inside it.  After the last backward,
    stage by stage, an all_reduce over the replicas sums the gradients of each dtype, as one array, and the loss of the
    last stage.  If stages on several devices have the same weights, each device sends its gradients of them to all the
    others, as one array for each dtype and set of devices, and sums them in the order of the pipeline.

    If the function of ``stages`` is overlapped (`parallelism.transforms.Overlap`), the gradients that one stage has
    alone are summed over the replicas in its last backward, in buckets.

    ``ValueError`` if the number of stages is not that of the pipeline, for a schedule without a backward, or without
    the messages of gradients that the stages need (`parallelism.transforms.LocalLayers` makes stages that need none),
    for inputs that do not fit, and for a batch with fewer rows than microbatches.
    """

    declares_all = True
    kept_by_devices = True
    writes_inputs = False
    """Whether there is an update: then new parameters and state lie in the memory of the old ones."""
    gradient_buffers = False
    """Whether there are buffers of gradients also where nothing is added up."""
    chunked: str | None = None
    """The axis whose collectives are cut, beside products (`parallelism.ir.passes.chunked_collectives`)."""

    def __init__(
        self,
        stages: Stages,
        pipeline: Pipeline,
        inside: Mesh | None = None,
        replicas: Sequence[str] = ("dp",),
        sums: Mapping[str, np.dtype[Any]] | None = None,
        *,
        fused: bool | str = False,
        overlapping: bool = False,
    ) -> None:
        axes = inside.axes if inside else ()
        if taken := {pipeline.axis, *replicas} & {*axes}:
            names, own = (" and ".join(map(repr, each)) for each in (replicas, sorted(taken)))
            raise ValueError(
                f"stages lie on axis {pipeline.axis!r} and replicas on {names}; {inside!r} is to be "
                f"inside a stage and names {own}"
            )
        check_stages(stages, pipeline)
        if metrics := stages.results[1:]:
            raise ValueError(
                f"@{stages.function.name} returns %{', %'.join(metrics)} beside its loss, but a pipeline without an "
                "optimizer returns only the loss and the gradients; train_step(loss, optimizer) makes a step that "
                "returns metrics, too"
            )
        sums = dict(sums or {})
        laid = laid_out_stages(stages, inside, sums) if inside and inside.size > 1 else stages
        self.chunked = chunked_over(stages.function)
        self.set_up(laid, pipeline, inside, replicas, sums, Overlap.of(stages.function), fused, overlapping)

    def set_up(
        self,
        stages: Stages,
        pipeline: Pipeline,
        inside: Mesh | None,
        replicas: Sequence[str],
        sums: Mapping[str, np.dtype[Any]],
        overlap: Overlap | None,
        fused: bool | str,
        overlapping: bool,
        own: OwnMeshes | None = None,
    ) -> None:
        """Set the fields of this operation from stages that are laid out."""
        super().__init__(pipeline, inside.axes if inside else (), replicas)
        self.mesh_inside = inside if inside and inside.size > 1 else None
        """None: a stage is on one device, or has a mesh of its own."""
        self.own = own
        """The meshes of the stages, if each has its own.  Then collectives lie along no axes of the whole mesh."""
        self.stages, self.sums, self.fused, self.overlapping = stages, sums, fused, overlapping
        self.overlap = overlap
        """How collectives overlap with compute; None: they do not."""
        by = fused, overlap, overlapping, self.adds_up, self.chunked
        self._programs: dict[Any, StagePrograms] = shared("programs", dict, stages, by=by, most=2 * MOST)
        self._last: dict[Any, DeviceProgram] = {}

    @cached_property
    def updates(self) -> StepUpdates | None:
        """The end of a training step; None: the loss and the gradients are returned."""
        return None

    @property
    def adds_up(self) -> bool:
        """Whether gradients are added up in buffers; without an update they are, and are returned."""
        return not self.writes_inputs or self.gradient_buffers or self.pipeline.adds_up

    @cached_property
    def endings(self) -> Endings:
        """The work of the devices after their last actions."""
        return Endings(
            self.stages.functions,
            self.pipeline.schedule.placement,
            self.sums,
            updated=self.writes_inputs,
            later=self.overlap is not None,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything except what is derived, as the programs of stages: each device computes its own."""
        kept = {
            name: value
            for name, value in self.__dict__.items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }
        return kept | {"_programs": {}, "_last": {}}

    @property
    def name(self) -> str:
        """The name of the function, with which its events begin."""
        return f"@{self.stages.function.name}"

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Share]]:
        """For each rank, the data of its replica, the weights of its stages, and its part of the state."""
        state: dict[str, Array] = {}
        given = one_of(self.name, args)
        if self.updates is not None:
            given, state = self.updates.split_inputs(mesh, self.stages.given, given)
        arrays, numbers = checked(self.stages.given, given)
        batch, places = self.stages.batch, self.places(mesh)
        rows = numbers.pop(batch)
        parts = self.parts(rows, 1 + max(replica for _, replica in places))
        values = {value.name: value for value in self.stages.function.inputs}
        shares = []
        for rank, (position, replica) in enumerate(places):
            inside = self.mesh_at(position)
            place = self.place(mesh, rank)
            data = dict[str, tuple[Array, ...]]()
            weights = dict[str, Array]()
            for number in self.stages_on(position):
                stage = self.stages.functions[number]
                for name in stage.data:
                    type, layout = values[name].type.specialize(numbers), values[name].layout
                    data[name] = tuple(
                        _shard(rows_of(arrays[name], type, batch, *part), layout, inside, place)
                        for part in parts[replica]
                    )
                weights |= {
                    name: _shard(arrays[name], values[name].layout, inside, place)
                    for name in stage.weights
                    if name not in self.stages.known
                }
            beginning = self.beginning(mesh, position, rows, numbers)
            first = beginning.shards(arrays, self.around(mesh).place(rank)) if beginning else {}
            own = {} if self.updates is None else self.updates.shards(state, rank, position)
            shares.append((Share(numbers, rows, parts[replica], data, weights, own, first),))
        return shares

    def parts(self, rows: int, replicas: int) -> list[tuple[Part, ...]]:
        """The microbatches of each replica, for a batch of so many rows.  ``ValueError`` if one would have no rows."""
        parts = [
            dealt(first, count, self.pipeline.microbatches) for first, count in self.rows_of(rows, replicas)
        ]
        if not all(count for each in parts for _, count in each):
            raise ValueError(
                f"a batch of {rows} rows cannot be dealt to {replicas} x {self.pipeline.microbatches} "
                "microbatches: some would have none"
            )
        return parts

    def rows_of(self, rows: int, replicas: int) -> Sequence[Part]:
        """The rows of each replica."""
        return dealt(0, rows, replicas)

    def __call__(self, device: Device, share: Share) -> dict[str, Array]:
        """New parameters and state of the device's stages, or without an update the gradients of their weights; and
        under ``""`` the loss if it has the last stage."""
        return self.run(device, share, ProgramStage)

    def run(
        self,
        device: Device,
        share: Share,
        make_stage: MakeStage,
        run_stages: Callable[[Device, Mapping[int, Any]], None] | None = None,
    ) -> dict[str, Array]:
        """`__call__` with another class of stages, and another `run_stages`."""
        mesh, rank, position = device.mesh, device.rank, self.position(device)
        weights = dict(share.weights)
        beginning = self.beginning(mesh, position, share.rows, share.numbers)
        if self.own is not None:
            device = self.own.part(device, self.pipeline.axis)
        with device.compute(self.name, seconds=0.0):  # the library's Python between the ops costs nothing
            stages = {
                number: make_stage(
                    device,
                    number,
                    self.programs(number, share.numbers, share.rows, mesh, rank),
                    share.parts,
                    share.data,
                    weights,
                    last=number == len(self.stages) - 1,
                    closing=self._closing(mesh, rank, number, share),
                    apart=self.writes_inputs,
                )
                for number in self.stages_on(position)
            }
            for category, nbytes in (
                ("weights", sum(array.nbytes for array in share.weights.values())),
                ("inputs", sum(array.nbytes for array in share.inputs)),
                (GRADIENTS, sum(stage.gradients.nbytes for stage in stages.values())),
            ):
                device.hold(category, nbytes)
            if share.state:
                device.hold("optimizer", sum(array.nbytes for array in share.state.values()))
            if beginning is not None:
                weights |= beginning.run(device, self.around(mesh).place(rank), share.first)
            if run_stages is not None:
                run_stages(device, stages)
            elif self.own is None:
                self.run_stages(device, stages)
            else:
                sender: Any = StageDevice(device, position, self.own, self.pipeline, stages)
                run_actions(
                    sender, self.pipeline, self.pipeline.axis, stages, self.pipeline.schedule.works[position]
                )
            held = {**share.weights, **share.state}
            numbers = tuple(share.numbers.items())
            update = None if self.updates is None else self.updates.update_of(device, rank, position, held)
            exchanged = partial(self._exchanged, device, position)
            results = partial(self.whole_batch.results, device, share.rows, numbers, weights)
            end = StepEnd(device, position, stages, exchanged, update, results)
            for each in self.endings.at(position, self.axes(mesh)[1]):
                each.run(end)
            return end.sums

    @cached_property
    def whole_batch(self) -> WholeBatch:
        """What is computed of all rows, before the first action and after the last."""
        return WholeBatch(self.stages, self.fused)

    def beginning(self, mesh: Mesh, position: int, rows: int, numbers: Mapping[str, int]) -> Beginning | None:
        """What devices at a position compute of a batch of so many rows before the first action; cached."""
        names = self.whole_batch.known_at(self.stages_on(position))
        around = self.around(mesh).at(position)
        replicas = self.axes(mesh)[1]
        return (
            self.whole_batch.beginning(names, rows, tuple(numbers.items()), around, replicas)
            if names
            else None
        )

    def programs(
        self, number: int, numbers: Mapping[str, int], rows: int, mesh: Mesh, rank: int
    ) -> StagePrograms:
        """The programs of a stage on a rank, for a batch of so many rows; cached."""
        functions = self.stages.functions[number]
        place = self.place(mesh, rank)
        sums = self.sums
        own = {name: numbers[name] for name in sorted(numbers.keys() & functions.symbols)}
        inside = self.mesh_at(self.pipeline.schedule.placement[number])
        key = tuple(own.items()), rows, place, tuple(map(sums.get, functions.trained)), inside
        if (number, key) not in self._programs:
            first = self._programs.get((functions.form, key))
            programs = StagePrograms(
                functions.specialize(**own),
                self.stages.batch,
                rows,
                inside,
                place,
                first,
                sums,
                self.fused,
                self.overlap,
                self.overlapping,
                several=self.adds_up,
                chunked=self.chunked,
            )
            self._programs[number, key] = programs
            self._programs.setdefault((functions.form, key), programs)
        return self._programs[number, key]

    # -- the last backward of a stage ----------------------------------------------------------------------------------

    def sums_over_replicas(self, place: Place) -> Sums:
        """The ops that sum the gradients of a stage over replicas, of those that no other stage has: those with which
        the update begins, or an all_reduce of each."""
        replicas = self.axes(place.mesh)[1]
        programs = self._programs_at(place)
        if self.updates is not None:
            return self.updates.sums(place, programs.functions.trained)
        if not replicas:
            return {}
        group = prod(place.mesh.shape[axis] for axis in replicas)
        given = (("axes", replicas), ("group", group), ("op", "sum"))
        types, alone = zip(programs.functions.trained, programs.sum_types, strict=True), self.endings.alone
        return {
            name: (Op("all_reduce", (Value(name, type),), given, (Value(f"summed.{name}", type),)),)
            for name, type in types
            if name in alone
        }

    def _closing(self, mesh: Mesh, rank: int, number: int, share: Share) -> LastBackward | None:
        """The last backward of a stage on a device; None if it sums nothing over replicas."""
        place = Place(mesh, rank, number, tuple(share.numbers.items()), share.rows)
        sums = self.sums_over_replicas(place) if self.overlap else {}
        if not sums:
            return None
        last = next(
            each
            for each in reversed(self.pipeline.schedule.works[self.places(mesh)[rank][0]])
            if each.stage == number and each.kind in ("B", "W")
        )
        return LastBackward(last.microbatch, frozenset(sums), partial(self._last_program, place))

    def _last_program(self, place: Place, kind: str, part: Part) -> DeviceProgram:
        """It has the names of the first stage of those that differ in names alone."""
        # One order for all devices of the position: that of the first of them.
        positions = [position for position, _ in self.places(place.mesh)]
        first = place._replace(rank=positions.index(self.pipeline.schedule.placement[place.number]))
        closing = [
            LastSums(self._programs_at(each), self.sums_over_replicas(each)) for each in (place, first)
        ]
        key = kind, part, *(each.alike for each in closing)
        if key not in self._last:
            assert self.overlap is not None
            order = overlapped(closing[1].function(kind, part)[0], self.overlap)
            function, categories = closing[0].function(kind, part)
            left = {value.name for value in function.outputs if value.name not in categories}
            programs = closing[0].programs
            buffers = function.inputs[len(programs.function(kind, part).inputs) :]
            function, calls, chains = arranged(function, order, fused=self.fused)
            kept = programs.freed_inputs(kind, part, function)
            given_up = kept | {value.name for value in buffers if self.writes_inputs}
            self._last[key] = DeviceProgram(
                function,
                dict(categories) | dict.fromkeys(left, GRADIENTS) | dict.fromkeys(kept, ACTIVATIONS),
                calls=calls,
                chains=chains,
                left=frozenset(left),
                given_up=given_up,
            )
        return self._last[key]

    def _programs_at(self, place: Place) -> StagePrograms:
        return self.programs(place.number, dict(place.numbers), place.rows, place.mesh, place.rank)

    def _exchanged(
        self, device: Device, position: int, mine: Array, names: Sequence[str], other: int, tag: int
    ) -> Array:
        """See `StepEnd.exchanged`."""
        tag += free_tag(self.pipeline)
        if self.own is None:
            received: Array = device.sendrecv(mine, other, other, tag=tag, axes=self.axes(device.mesh)[0])
            return received
        values = {value.name: value for value in self.stages.function.inputs}
        return self.own.exchanged(device, [values[name] for name in names], mine, position, other, tag)

    # -- results -------------------------------------------------------------------------------------------------------

    def result(self, mesh: Mesh, outputs: Sequence[dict[str, Array]]) -> Any:
        """The outputs of the whole step, in order; without an update `LossAndGradients`, for each weight of the first
        replica of a stage that has it: all are equal."""
        if self.updates is not None:
            return self.updates.result(self.places(mesh), outputs)
        parts: dict[str, dict[int, Array]] = {}
        for rank in reversed(range(mesh.size)):
            place = self.place(mesh, rank)
            for name, array in outputs[rank].items():
                parts.setdefault(name, {})[place] = array
        (loss,) = parts.pop("")[0]
        return LossAndGradients(
            loss,
            {
                value.name: self._whole(parts[value.name], value.layout)
                for value in self.stages.function.inputs
                if value.name in parts
            },
        )

    # -- where a device is ---------------------------------------------------------------------------------------------

    @memoized
    def around(self, mesh: Mesh) -> AroundStages:
        """The devices around the stages at each position."""
        return AroundStages(mesh, self.pipeline.axis, self.own)

    def axes(self, mesh: Mesh) -> tuple[str | None, tuple[str, ...]]:
        """As `PipelinedOperation.axes`; stages with meshes of their own lie on no axis, and have no replicas."""
        return super().axes(mesh) if self.own is None else (None, ())

    @memoized
    def places(self, mesh: Mesh) -> list[tuple[int, int]]:
        """As `PipelinedOperation.places`."""
        return super().places(mesh) if self.own is None else self.own.places

    def position(self, device: Device) -> int:
        """The position of a device in the pipeline."""
        return super().position(device) if self.own is None else self.own.places[device.rank][0]

    def mesh_at(self, position: int) -> Mesh | None:
        """The mesh inside the stages at a position; None if each is on one device."""
        return self.mesh_inside if self.own is None else self.own.meshes[position]

    def place(self, mesh: Mesh, rank: int) -> int:
        """The rank on the mesh inside its stage."""
        if self.own is not None:
            return self.own.place(rank)
        if self.mesh_inside is None:
            return 0
        index = mesh.index(rank)
        return self.mesh_inside.rank(**{axis: index[axis] for axis in self.mesh_inside.axes})

    def _whole(self, parts: Mapping[int, Array], layout: TensorSharding | None) -> Array:
        if layout is None or self.mesh_inside is None:
            return parts[0]
        return np.asarray(
            gradient_layout(layout).unshard(
                [parts[place] for place in range(self.mesh_inside.size)], self.mesh_inside
            )
        )


def _shard(array: Array, layout: TensorSharding | None, inside: Mesh | None, place: int) -> Array:
    """What a device at a place inside a stage has of an array."""
    return array if layout is None or inside is None else layout.shard(array, inside)[place]


def check_stages(stages: Stages, pipeline: Pipeline) -> None:
    """``ValueError`` if the stages cannot run the schedule of a pipeline."""
    name, schedule = f"@{stages.function.name}", pipeline.schedule
    if len(stages) != pipeline.stages:
        raise ValueError(f"{name} is cut into {len(stages)} stages; {pipeline!r} has {pipeline.stages}")
    if not schedule.training:
        raise ValueError(
            f"the gradients of a whole program are wanted; schedule {schedule.name!r} has no backward"
        )
    waiting = [
        (number, stage.answered) for number, stage in enumerate(stages.functions[:-1]) if stage.answered
    ]
    if schedule.local and waiting:
        raise ValueError(
            f"schedule {schedule.name!r} sends no gradients, but stage {waiting[0][0]} of {name} needs those of "
            f"%{', %'.join(waiting[0][1])} from the next one; LocalLayers gives regions losses of their own, and "
            "stages must begin where these do"
        )
