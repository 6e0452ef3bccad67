"""Pipelines as StableHLO: a module for each class of equal stages, and a list of what runs where and what is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelism.execution import PipelinedProgram, TrainedPipeline
from parallelism.interop.errors import UnsupportedError
from parallelism.interop.written.module_text import alone, together
from parallelism.interop.written.stablehlo_modules import localized_to_stablehlo, to_stablehlo
from parallelism.ir.core import Function, Value, names_in
from parallelism.layouts.localization import Localized
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import GRADIENT, StageFunctions
from parallelism.layouts.stages.stages import with_numbers
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

MANIFEST = "pipeline.json"
_KINDS = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weights",
}
_SAME_FOR_ALL_ROWS = frozenset(["attention", "attention_gradient", "attention_weights"])
"""Operators that know the first row of their part only for dropout, which has no counterpart in StableHLO."""


@dataclass(frozen=True)
class StageModules:
    """A pipeline as modules: `stages_to_stablehlo`."""

    texts: Mapping[str, str]
    """The modules, by the names that the manifest has for them."""
    manifest: Mapping[str, Any]
    """What JSON can say: which stages run which module, and what is sent between them; docs/interop.md explains it."""

    def function(self, module: str, name: str) -> str:
        """The module with one function of a module as ``@main``, which XLA runs."""
        return alone(self.texts[module], name)

    def save(self, folder: str | Path) -> list[Path]:
        """Writes each module to ``NAME.stablehlo``, and the manifest to ``pipeline.json``, into a folder; the paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.stablehlo": text for name, text in self.texts.items()}
        files[MANIFEST] = json.dumps(self.manifest, indent=1) + "\n"
        paths = [folder / name for name in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text, "utf-8")
        return paths


def stages_to_stablehlo(
    pipeline: PipelinedProgram, rows: int, mesh: Mesh | None = None, **sizes: int
) -> StageModules:
    """The modules of a pipeline for a batch of so many ``rows``, and a manifest.

    ``mesh`` is that of all devices, which a `TrainedPipeline` knows.  ``sizes`` are the values of the other symbols.
    Stages that differ in names alone have one module, with a function for each kind of action that the schedule has:
    ``forward``, ``backward`` or its halves, and ``recompute``.  It lies on the mesh inside the stage.  What is computed
    of the whole batch before and after the actions is in the modules ``beginning`` and ``ending``, and an update in the
    modules ``update0`` and so on; those lie on the replicas, too.

    `UnsupportedError` as from `to_stablehlo`, if microbatches have unequal numbers of rows or differ in numbers, and for
    an update that needs a number of all stages, as the norm for clipping.
    """
    if isinstance(pipeline, TrainedPipeline):
        mesh = pipeline.mesh
    if mesh is None:
        raise ValueError("the mesh of all devices of the pipeline must be given")
    return _Writing(pipeline, mesh, rows, sizes).modules()


class _Writing:
    """The modules while they are written."""

    def __init__(self, operation: PipelinedProgram, mesh: Mesh, rows: int, sizes: Mapping[str, int]) -> None:
        self.operation, self.mesh, self.rows, self.sizes = operation, mesh, rows, dict(sizes)
        self.places = operation.places(mesh)
        replicas = 1 + max(replica for _, replica in self.places)
        parts = operation.parts(rows, replicas)
        counts = sorted({count for each in parts for _, count in each})
        if len(counts) > 1:
            raise UnsupportedError(
                f"{operation.name}: microbatches of {counts[0]} and of {counts[-1]} rows would need modules of their "
                f"own; {rows} rows must be a multiple of {replicas} x {operation.pipeline.microbatches}"
            )
        (self.count,) = counts
        self.placement = operation.pipeline.schedule.placement
        self.positions = sorted({*self.placement})
        works = operation.pipeline.schedule.works
        self.kinds = {action.kind for work in works for action in work}
        self.texts: dict[str, str] = {}
        self.described: dict[str, Any] = {}
        self.classes: dict[Any, str] = {}

    def modules(self) -> StageModules:
        """All modules and the manifest."""
        operation, pipeline = self.operation, self.operation.pipeline
        stages = [self.stage(number) for number in range(len(operation.stages))]
        axes, replicas = operation.axes(self.mesh)
        beginning, ending = self.beginning(), self.ending()
        positions = [self.position(position) for position in self.positions]
        manifest = {
            "program": operation.stages.function.name,
            "mesh": dict(self.mesh.shape),
            "pipeline": {
                "axis": axes,
                "schedule": pipeline.schedule.name,
                "microbatches": pipeline.microbatches,
            },
            "rows": {"batch": self.rows, "microbatch": self.count},
            "replicas": {axis: self.mesh.shape[axis] for axis in replicas},
            "modules": self.described,
            "beginning": beginning,
            "stages": stages,
            "messages": [self.message(number) for number in range(len(stages) - 1)],
            "shared_weights": {
                name: [*holders] for name, holders in operation.stages.holders.items() if len(holders) > 1
            },
            "ending": ending,
            "results": [*operation.stages.results],
            "positions": positions,
        }
        return StageModules(self.texts, manifest)

    # -- stages --------------------------------------------------------------------------------------------------------

    def stage(self, number: int) -> dict[str, Any]:
        """What a stage runs, after its module was written."""
        stage = self.specialized(number)
        inside = self.operation.mesh_at(self.placement[number])
        functions = {name: function for name, function in self.functions(stage).items() if function.outputs}
        key = self.operation.stages.functions[number].form, inside
        if key not in self.classes:
            name = self.classes[key] = f"stage{len(self.classes)}"
            self.write(name, functions, inside)
        runs = {name: _names(function, self.outputs(stage, name)) for name, function in functions.items()}
        return {
            "position": self.placement[number],
            "module": self.classes[key],
            "data": {name: self.rows_dim(name) for name in stage.data},
            "weights": [*stage.weights],
            "runs": runs,
            "keeps": {"saved": [*stage.saved], "between": [*stage.between] if "I" in self.kinds else []},
            "ones": [f"{GRADIENT}{name}" for name in stage.answered]
            if number == len(self.operation.stages) - 1
            else [],
            "gradients": {
                name: self.operation.sums.get(name, value.type.dtype).name
                for name, value in self.values(stage.forward.inputs, stage.trained).items()
            },
        }

    def specialized(self, number: int) -> StageFunctions:
        """The functions of a stage for a microbatch; it does not matter which one, because all are alike."""
        functions = self.operation.stages.functions[number]
        batch = self.operation.stages.batch
        known = {**self.sizes, batch: self.count, f"{batch}_whole": self.rows}
        first = functions.specialize(**known, **{f"{batch}_first": 0})
        later = functions.specialize(**known, **{f"{batch}_first": self.count})
        for a, b in zip(first.functions, later.functions, strict=True):
            for here, there in zip(a.ops if a else (), b.ops if b else (), strict=True):
                if here.attributes != there.attributes and here.kind not in _SAME_FOR_ALL_ROWS:
                    raise UnsupportedError(
                        "it computes other numbers for each microbatch, and would need a module for each",
                        here.kind,
                        here.region or "",
                    )
        return first

    def functions(self, stage: StageFunctions) -> dict[str, Function]:
        """The functions of a stage that the schedule runs, by their names in its module."""
        found = {
            "F": stage.forward,
            "R": stage.recompute,
            "B": stage.backward,
            "I": stage.backward_input,
            "W": stage.backward_weights,
        }
        kinds = self.kinds | ({"R"} if self.kinds & {"B", "I"} else set())
        return {_KINDS[kind]: each for kind, each in found.items() if each is not None and kind in kinds}

    def outputs(self, stage: StageFunctions, name: str) -> list[str]:
        """The names of the results of a function of a stage: gradients are named after their values."""
        function = {**self.functions(stage)}[name]
        own = [value.name for value in function.outputs]
        returned = [f"{GRADIENT}{value}" for value in stage.returned]
        trained = [f"{GRADIENT}{value}" for value in stage.trained]
        named = {
            "backward": returned + trained,
            "backward_input": returned,
            "backward_weights": trained,
        }.get(name, [])
        return [*named, *own[len(named) :]]

    def rows_dim(self, name: str) -> int | None:
        """The dim of an input in which the rows of the batch lie; None: every microbatch gets all of it."""
        (value,) = (each for each in self.operation.stages.function.inputs if each.name == name)
        batch = self.operation.stages.batch
        dims = [d for d, extent in enumerate(value.type.shape) if batch in names_in(extent)]
        return dims[0] if dims else None

    def values(self, among: Sequence[Value], names: Sequence[str]) -> dict[str, Value]:
        """The values of these names; those that are not among them are left out."""
        found = {value.name: value for value in among}
        return {name: found[name] for name in names if name in found}

    def message(self, number: int) -> dict[str, Any]:
        """What a stage sends to the next one, and what comes back."""
        stage = self.specialized(number)
        sent = self.values((*stage.forward.inputs, *stage.forward.outputs), stage.sent)
        return {
            "from": number,
            "to": number + 1,
            "sent": [_described(value, value.layout) for value in sent.values()],
            "returned": [f"{GRADIENT}{name}" for name in stage.answered],
        }

    # -- the whole batch and the update --------------------------------------------------------------------------------

    def beginning(self) -> dict[str, Any] | None:
        """What is computed of all rows before the first action; None: nothing."""
        stages = self.operation.stages
        if stages.beginning is None:
            return None
        if self.operation.own is not None:
            raise UnsupportedError(
                f"{self.operation.name}: stages with meshes of their own have no one module for what is computed of "
                "all rows before the first microbatch"
            )
        made = self.operation.whole_batch.beginning(
            stages.known,
            self.rows,
            tuple(self.sizes.items()),
            self.operation.around(self.mesh).at(0),
            self.operation.axes(self.mesh)[1],
        )
        self.write_localized("beginning", "beginning", made.localized)
        return {"module": "beginning", "runs": {"beginning": _names(made.localized.function)}}

    def ending(self) -> dict[str, Any] | None:
        """What is computed of the sums over all microbatches and replicas; None: nothing."""
        stages = self.operation.stages
        if stages.ending is None:
            return None
        function = with_numbers(stages.ending, {**self.sizes, stages.batch: self.rows})
        self.write("ending", {"ending": function}, None)
        return {"module": "ending", "runs": {"ending": _names(function)}}

    def position(self, position: int) -> dict[str, Any]:
        """The devices at a position, their actions, and their update."""
        works = self.operation.pipeline.schedule.works[position]
        found: dict[str, Any] = {
            "ranks": [rank for rank, (other, _) in enumerate(self.places) if other == position],
            "stages": self.operation.stages_on(position),
            "actions": " ".join(map(str, works)),
        }
        updates = self.operation.updates
        if updates is None:
            return found
        if updates.stages_summed > 1:
            raise UnsupportedError(
                f"{self.operation.name}: its update needs a number of all stages, as the norm for clipping, and has "
                "no module of one stage"
            )
        update = updates.at(position)
        key = "update", id(update.localized)
        if key not in self.classes:
            name = self.classes[key] = f"update{sum(each[0] == 'update' for each in self.classes)}"
            self.write_localized(name, "update", update.localized)
        found["update"] = {"module": self.classes[key], "runs": {"update": _names(update.function)}}
        return found

    # -- modules -------------------------------------------------------------------------------------------------------

    def write(self, name: str, functions: Mapping[str, Function], inside: Mesh | None) -> None:
        """Writes a module with these functions, on the mesh inside a stage."""
        written, described = {}, {}
        for public, function in functions.items():
            if inside is None:
                written[public] = to_stablehlo(function)
                described[public] = _sides(
                    function, [None] * len(function.inputs), [None] * len(function.outputs)
                )
            else:
                localized = localize(function, inside)
                written[public] = localized_to_stablehlo(localized)
                described[public] = _sides(function, localized.inputs, localized.outputs)
        self.texts[name] = together(name, written)
        self.described[name] = {"mesh": dict(inside.shape) if inside else {}, "functions": described}

    def write_localized(self, name: str, public: str, localized: Localized) -> None:
        """Writes a module with one function."""
        function = localized.function
        self.texts[name] = together(name, {public: localized_to_stablehlo(localized)})
        self.described[name] = {
            "mesh": dict(localized.mesh.shape),
            "functions": {public: _sides(function, localized.inputs, localized.outputs)},
        }


def _names(function: Function, outputs: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The names of the inputs and results of a function, in their order."""
    return {
        "inputs": [value.name for value in function.inputs],
        "outputs": list(outputs or [value.name for value in function.outputs]),
    }


def _sides(function: Function, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Any]:
    """The types and layouts of the inputs and results of a function."""
    return {
        "inputs": [_described(*each) for each in zip(function.inputs, inputs, strict=True)],
        "outputs": [_described(*each) for each in zip(function.outputs, outputs, strict=True)],
    }


def _described(value: Value, layout: TensorSharding | None) -> dict[str, Any]:
    """A value: the axes that split each of its dims, and those over which a sum is pending in it."""
    found: dict[str, Any] = {
        "name": value.name,
        "shape": [*map(int, value.type.shape)],
        "dtype": value.type.dtype.name,
    }
    if layout is not None:
        found |= {"split": [[*dim.axes] for dim in layout.dims], "terms": [*layout.partial]}
    return found
