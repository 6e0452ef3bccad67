"""`layered_step`: the step of a deep model as an operation, from steps of the same model with few layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

from parallelism import transforms
from parallelism.hardware import Software
from parallelism.models import TransformerSpec
from parallelism.simulation.equal_layers import UnequalLayers
from parallelism.simulation.layered_step import LayeredStep
from parallelism.simulation.operations import PipelinedStep, SimulatedOperation, simulated_operation
from parallelism.training.training_run import TrainingRun
from parallelism.transforms import MixedPrecision
from parallelism.transforms.strategy import Transform

FEW = (3, 4, 5)
"""Models of the first two numbers of layers are simulated, or, where these are too few, of the next two."""
WORTH = 16
"""A model with fewer layers is simulated whole."""
_NAME = r"(\*|[A-Za-z_][A-Za-z0-9_+]*)"
_PATTERN = re.compile(rf"{_NAME}(\.{_NAME})*")
"""Of regions in every layer alike: a part of a path is a name or anything."""


def layered_step(run: TrainingRun, software: Software) -> LayeredStep | None:
    """The step of a run as this software runs it; None where it does not follow from steps of few layers."""
    if not _has_equal_layers(run):
        return None
    model: Any = run.model
    steps = cache(partial(_step_with, run, software))
    for few, more in pairwise(FEW):
        with suppress(UnequalLayers):
            return LayeredStep(steps(few), steps(more), model.layers - few, software, partial(_step_of, run))
    return None


def _step_of(run: TrainingRun, software: Software) -> SimulatedOperation:
    return layered_step(run, software) or _whole(run, software)


def _whole(run: TrainingRun, software: Software) -> SimulatedOperation:
    placed: Any = run.placed
    return simulated_operation(run.step, placed["mesh"], placed["batch"], None, software=software)


def _step_with(run: TrainingRun, software: Software, layers: int) -> PipelinedStep:
    """The step of the model with so many layers."""
    assert isinstance(run.model, TransformerSpec)
    step = _whole(replace(run, model=replace(run.model, layers=layers)), software)
    assert isinstance(step, PipelinedStep)
    return step


def _has_equal_layers(run: TrainingRun) -> bool:
    """Whether the run is of one stage with many layers that compute the same."""
    spec, pipeline = run.model, run.pipeline
    if not isinstance(spec, TransformerSpec) or pipeline is None or spec.layers < WORTH:
        return False
    whole = not (pipeline.meshes or pipeline.shares or pipeline.begin)
    if not whole or run.mesh.shape[pipeline.axis] * pipeline.chunks > 1:
        return False
    layers = {
        (spec.window_of(layer), spec.is_rotated(layer), bool(spec.experts and spec.experts.at(layer)))
        for layer in range(spec.layers)
    }
    return len(layers) == 1 and all(
        _is_for_every_layer(each) for each in run.strategy.transforms if each is not pipeline
    )


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
