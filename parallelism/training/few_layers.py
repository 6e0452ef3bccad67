"""`layered_step`: the step of a deep model as an operation, from steps of the same model with few layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

from parallelism import transforms
from parallelism.dtypes import as_dtype
from parallelism.hardware import Software
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.models.figures import kind_of_layer
from parallelism.side_by_side import side_by_side
from parallelism.simulation.equal_layers import UnequalLayers
from parallelism.simulation.layered_step import LayeredStep, Whole
from parallelism.simulation.operations import PipelinedStep, SimulatedOperation, simulated_operation
from parallelism.simulation.ran_step import RanStep, ran
from parallelism.training.stage_layers import begins_of, counts_of
from parallelism.training.state_sharding import FULLY_SHARDED
from parallelism.training.training_run import TrainingRun
from parallelism.transforms import MixedPrecision, Overlap, Zero
from parallelism.transforms.strategy import Transform
from parallelism.transforms.words import REPLICA

FEW: tuple[int, ...] = (3, 4, 5)
"""Models of the first two numbers of layers are simulated, or, where these are too few, of the next two."""
FEW_STAGES: tuple[int, ...] = (2, 3)
"""So many stages at each position: beside the first stage, and the last, are one or two others."""
WORTH, FEWER = 16, 2
"""A model with fewer layers is simulated whole, and so is one that has not so many times the stages of both with few."""
FEW_MICROBATCHES = 2
"""So many for each position are run: there is more than one before the last backward of a stage."""
_FEWEST_STAGES = 3
"""With fewer, there is none between the first and the last."""
_BUCKETS = 3
"""So many buckets are sums of a layer where each layer may close them at the same places."""
_STORED = {"float8": "float8_e4m3fn"}
"""What weights are stored in, where they are gathered in a family of dtypes."""
_NAME = r"(\*|[A-Za-z_][A-Za-z0-9_+]*)"
_PATTERN = re.compile(rf"{_NAME}(\.{_NAME})*")
"""The pattern of regions that every layer has: a part of a path is a name, or anything."""


def layered_step(run: TrainingRun, software: Software) -> LayeredStep | None:
    """The step of a run as this software runs it; None where it does not follow from steps of few layers."""
    if not _is_deep(run):
        return None
    model, pipeline = run.model, run.pipeline
    assert isinstance(model, TransformerSpec) and pipeline is not None
    scheduled = pipeline.on(run.mesh)
    in_stages = scheduled.stages > 1
    whole = pipeline.chunks if in_stages else model.layers
    steps = dict[int, RanStep]()
    for few, more in _sizes_of_stages(run) if in_stages else _sizes_of_layers(run):
        with suppress(UnequalLayers):
            sizes = [size for size in dict.fromkeys((few, more)) if size not in steps]
            made = side_by_side([partial(_ran, run, size, software) for size in sizes])
            steps |= dict(zip(sizes, made, strict=True))
            made_for = partial(_step_of, run)
            what = Whole(run.mesh, scheduled, few, whole - few, software, made_for, _stand_for(run))
            return LayeredStep(steps[few], steps[more], what)
    return None


def _sizes_of_layers(run: TrainingRun) -> Iterator[tuple[int, int]]:
    """The numbers of layers of the two models that may tell a model of one stage."""
    assert isinstance(run.model, TransformerSpec)
    if len({*_kinds_of_layers(run.model)}) == 1 and _is_regular(run, in_stages=False):
        yield from pairwise(FEW)


def _sizes_of_stages(run: TrainingRun) -> Iterator[tuple[int, int]]:
    """The numbers of stages at each position of the two models that may tell a model of several stages.

    The last two are as many as the whole model has at each position, at those positions that stand for all, or of few
    microbatches.
    """
    pipeline, kinds = run.pipeline, _kinds_of_stages(run)
    assert pipeline is not None
    if kinds is None:
        return
    positions, different = run.mesh.shape[pipeline.axis], 1 + max(_stand_for(run))
    few = sum(FEW_STAGES) * different
    are_alike = len({*kinds[1:-1]}) == 1 and positions * pipeline.chunks >= FEWER * few
    if are_alike and _is_regular(run, in_stages=True):
        yield from pairwise(FEW_STAGES)
    if different < positions or pipeline.microbatches >= FEW_MICROBATCHES * positions:
        yield pipeline.chunks, pipeline.chunks


def _is_regular(run: TrainingRun, *, in_stages: bool) -> bool:
    """Whether layers may repeat the order of an update whose sums and gathers are in buckets.

    They do not where a layer fills few buckets; there few layers are not tried.  Where parameters are shared out, a layer
    is a call of its own.
    """
    given, model = run.strategy.transforms, run.model
    assert isinstance(model, TransformerSpec)
    overlap = next((each for each in given if isinstance(each, Overlap)), None)
    zero = next((each for each in given if isinstance(each, Zero)), None)
    precision = next((each for each in given if isinstance(each, MixedPrecision)), None)
    is_shared_out = zero is not None and zero.stage == FULLY_SHARDED
    if overlap is None or (is_shared_out and REPLICA not in run.mesh.axes):
        return True
    one, two = (replace(model, layers=layers).parameters for layers in (1, 2))
    parameters = (two - one) // run.mesh.shape.get("tp", 1)
    if precision is not None and precision.products is not None and not is_shared_out:
        gathered = parameters * as_dtype(_STORED.get(precision.gathers, precision.gathers)).itemsize
        # Stages with biases that filled 1.8 buckets did not close them at the same places; those that filled 2.8 did.
        if gathered < overlap.bucket_bytes * (2 if in_stages and model.biases else 1):
            return False
    width = as_dtype(model.dtype if precision is None else precision.gradients).itemsize
    return in_stages or _BUCKETS * overlap.bucket_bytes <= parameters * width


def _step_of(run: TrainingRun, software: Software) -> SimulatedOperation:
    return layered_step(run, software) or _whole(run, software)


def _ran(run: TrainingRun, size: int, software: Software) -> RanStep:
    """What the devices do in the step of a run with so many layers, or stages at each of few positions."""
    pipeline = run.pipeline
    in_stages = pipeline is not None and pipeline.on(run.mesh).stages > 1
    return ran(_whole((_with_chunks if in_stages else _with_layers)(run, size), software))


def _whole(run: TrainingRun, software: Software) -> PipelinedStep:
    placed: Any = run.placed
    step = simulated_operation(run.step, placed["mesh"], placed["batch"], None, software=software)
    assert isinstance(step, PipelinedStep)
    return step


def _with_layers(run: TrainingRun, layers: int) -> TrainingRun:
    """The run of the model with so many layers."""
    assert isinstance(run.model, TransformerSpec)
    return replace(run, model=replace(run.model, layers=layers))


def _with_chunks(run: TrainingRun, chunks: int) -> TrainingRun:
    """The run of a model with so many stages at each of the positions that stand for all, with as many layers in each.

    `UnequalLayers` where its stages do not compute what those of the run do.
    """
    kinds, pipeline, model, stand_for = _kinds_of_stages(run), run.pipeline, run.model, _stand_for(run)
    assert kinds is not None and pipeline is not None and isinstance(model, TransformerSpec)
    first = [stand_for.index(place) for place in range(1 + max(stand_for))]
    of_stages = [
        kinds[min(chunk * len(stand_for) + place, len(kinds) - 2)]
        for chunk in range(chunks)
        for place in first
    ]
    of_stages[-1] = kinds[-1]
    counts = [*map(len, of_stages)]
    microbatches = FEW_MICROBATCHES * len(first)
    cut = {"chunks": chunks, "microbatches": microbatches, "begin": begins_of(counts)}
    small = replace(
        run,
        model=replace(model, layers=sum(counts)),
        batch=run.batch // pipeline.microbatches * microbatches,
        strategy=run.strategy.with_pipeline(**cut),
        mesh=Mesh(**{**run.mesh.shape, pipeline.axis: len(first)}),
    )
    if _kinds_of_stages(small) != of_stages:
        raise UnequalLayers("the layers of fewer stages compute something else")
    return small


_Kinds = tuple[tuple[Any, ...], ...]
"""For each layer, a key that is equal where layers compute the same."""


def _kinds_of_stages(run: TrainingRun) -> list[_Kinds] | None:
    """The layers of each stage; None where few stages tell nothing."""
    pipeline, model = run.pipeline, run.model
    assert pipeline is not None and isinstance(model, TransformerSpec)
    counts = counts_of(pipeline.begin, model.layers)
    if counts is None or pipeline.microbatches == 1 or len(counts) < _FEWEST_STAGES or 0 in counts:
        return None
    layers = iter(_kinds_of_layers(model))
    return [tuple(islice(layers, count)) for count in counts]


def _stand_for(run: TrainingRun) -> tuple[int, ...]:
    """For each position of a pipeline the number, from 0 on, of those that do the same; the ends are alike no other."""
    kinds, pipeline = _kinds_of_stages(run), run.pipeline
    assert pipeline is not None
    if kinds is None:
        return (0,)
    positions = run.mesh.shape[pipeline.axis]
    numbers: dict[Any, int] = {}
    return tuple(
        numbers.setdefault(
            (position == 0, position == positions - 1, *kinds[position::positions]), len(numbers)
        )
        for position in range(positions)
    )


def _kinds_of_layers(spec: TransformerSpec) -> _Kinds:
    """The kinds of all layers."""
    return tuple(kind_of_layer(spec, layer) for layer in range(spec.layers))


def _is_deep(run: TrainingRun) -> bool:
    """Whether the run is of a model with many layers, with all of which the strategy does the same."""
    spec, pipeline = run.model, run.pipeline
    if not isinstance(spec, TransformerSpec) or pipeline is None or spec.layers < WORTH:
        return False
    if pipeline.meshes or pipeline.shares:
        return False
    return all(_is_for_every_layer(each) for each in run.strategy.transforms if each is not pipeline)


def _is_for_every_layer(transform: Transform) -> bool:
    """Whether a transform does the same with each layer, as far as its settings tell; one from outside may do anything."""
    if isinstance(transform, MixedPrecision) and (transform.first_blocks or transform.last_blocks):
        return False
    own = type(transform).__module__.startswith(transforms.__name__)
    return own and all(map(_PATTERN.fullmatch, _texts(transform)))


def _texts(value: Any) -> Iterator[str]:
    """The texts among the settings of a transform, such as patterns of regions."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            yield from _texts(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
