"""`layered_step`: the step of a deep model as an operation, from steps of the same model with few layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

from parallelism import transforms
from parallelism.dtypes import as_dtype
from parallelism.hardware import Software
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.models.figures import kind_of_layer
from parallelism.simulation.equal_layers import UnequalLayers
from parallelism.simulation.layered_step import POSITIONS, LayeredStep, Whole
from parallelism.simulation.operations import PipelinedStep, SimulatedOperation, simulated_operation
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
    steps = cache(lambda size: _whole((_with_chunks if in_stages else _with_layers)(run, size), software))
    for few, more in _sizes_of_stages(run) if in_stages else _sizes_of_layers(run):
        with suppress(UnequalLayers):
            what = Whole(run.mesh, scheduled, few, whole - few, software, partial(_step_of, run))
            return LayeredStep(steps(few), steps(more), what)
    return None


def _sizes_of_layers(run: TrainingRun) -> Iterator[tuple[int, int]]:
    """The numbers of layers of the two models that may tell a model of one stage."""
    assert isinstance(run.model, TransformerSpec)
    if len({*_kinds_of_layers(run.model)}) == 1 and _is_regular(run, in_stages=False):
        yield from pairwise(FEW)


def _sizes_of_stages(run: TrainingRun) -> Iterator[tuple[int, int]]:
    """The numbers of stages at each position of the two models that may tell a model of several stages.

    The last two are as many as the whole model has at each position, at fewer positions.
    """
    pipeline = run.pipeline
    assert pipeline is not None
    if _kinds_of_stages(run) is None:
        return
    positions = run.mesh.shape[pipeline.axis]
    if positions * pipeline.chunks >= FEWER * sum(FEW_STAGES) * POSITIONS and _is_regular(
        run, in_stages=True
    ):
        yield from pairwise(FEW_STAGES)
    if positions > POSITIONS:
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
    """The run of a model with so many stages at each of few positions, with as many layers in each stage.

    `UnequalLayers` where its stages do not compute what those of the run do.
    """
    of_stages, pipeline, model = _kinds_of_stages(run), run.pipeline, run.model
    assert of_stages is not None and pipeline is not None and isinstance(model, TransformerSpec)
    positions = min(POSITIONS, run.mesh.shape[pipeline.axis])
    counts = [len(of_stages.first), *[len(of_stages.between)] * (positions * chunks - 2), len(of_stages.last)]
    microbatches = 2 * positions
    cut = {"chunks": chunks, "microbatches": microbatches, "begin": begins_of(counts)}
    small = replace(
        run,
        model=replace(model, layers=sum(counts)),
        batch=run.batch // pipeline.microbatches * microbatches,
        strategy=run.strategy.with_pipeline(**cut),
        mesh=Mesh(**{**run.mesh.shape, pipeline.axis: positions}),
    )
    if _kinds_of_stages(small) != of_stages:
        raise UnequalLayers("the layers of fewer stages compute something else")
    return small


_Kinds = tuple[tuple[Any, ...], ...]
"""For each layer, a key that is equal where layers compute the same."""


class _Stages(NamedTuple):
    """The layers of the first stage, of each between, and of the last."""

    first: _Kinds
    between: _Kinds
    last: _Kinds


def _kinds_of_stages(run: TrainingRun) -> _Stages | None:
    """The layers of the stages; None where those between do not compute the same."""
    pipeline, model = run.pipeline, run.model
    assert pipeline is not None and isinstance(model, TransformerSpec)
    counts = counts_of(pipeline.begin, model.layers)
    if counts is None or pipeline.microbatches == 1 or len(counts) < _FEWEST_STAGES or 0 in counts:
        return None
    layers = iter(_kinds_of_layers(model))
    first, *between, last = [tuple(islice(layers, count)) for count in counts]
    return _Stages(first, between[0], last) if len({*between}) == 1 else None


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
