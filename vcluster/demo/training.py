"""Common parts of the demos that train: the steps on a cluster, their results, and the files that are written."""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.pipelining.generators import SCHEDULES
from parallelism.trace import Trace
from pipeline_parallelism import Training
from vcluster.cli.command_line import WrongWords, accessing, writable
from vcluster.demo.screen import Screen
from vcluster.runs import VirtualCluster


@dataclass(frozen=True)
class Trained:
    """The results of a training."""

    losses: list[float]
    """The loss before each step."""
    last: Training
    """The last step, with the parameters after it."""
    step: Trace
    """The trace of the last step."""
    step_seconds: float
    """Wall time of the last step."""
    seconds: float
    """Wall time of all steps."""


def train(
    model: Any,
    optimizer: Any,
    steps: int,
    batch: Callable[[int], tuple[Any, Any]],
    cluster: VirtualCluster,
    screen: Screen,
) -> Trained:
    """Run all steps on the cluster, each on ``batch(step)``, counted from 1. The last returns the parameters."""
    step = model.train_step(optimizer, returns="loss")
    losses, started = list[float](), time.perf_counter()
    with screen.progress("step", steps) as update:
        for number in range(1, steps + 1):
            if number == steps:
                step = model.train_step(optimizer, returns=("loss", "parameters"))
            inputs, before = batch(number), time.perf_counter()
            run = cluster.run(step, *inputs)
            seconds = time.perf_counter() - before
            losses.append(run.result.loss)
            update(number, f"loss {short(losses[-1])}")
    return Trained(losses, run.result, run.trace, seconds, time.perf_counter() - started)


def check_rows(arguments: argparse.Namespace, replicas: int, rows: int, there: str) -> None:
    """Raise `WrongWords` if there are fewer rows than microbatches or replicas. ``there`` describes the rows."""
    for flag, number in (("--microbatches", arguments.microbatches), ("--dp", replicas)):
        if number > rows:
            raise WrongWords(f"{flag} {number}: {there}")


def check_writable(**files: Path | None) -> None:
    """Raise `WrongWords` if a file of these options cannot be written, or if two options name the same file."""
    given = {option: file for option, file in files.items() if file is not None}
    for file in given.values():
        writable(file)
    if len({*given.values()}) < len(given):
        raise WrongWords(f"{' and '.join(f'--{option}' for option in sorted(given))} are both {file}")


def write(screen: Screen, option: str, content: str, path: Path | None, save: Callable[[Path], None]) -> None:
    """Save the file of an option, if there is one, and report it. Raises `WrongWords` if it cannot be written."""
    if path is not None:
        with accessing(path, option=option):
            save(path)
        screen.line(f"\nThe {content} of that step is in {path}")


def stages_of(ranks: int, schedule: str, chunks: int | None) -> tuple[int, int]:
    """The number of stages, and the number of stages on each device."""
    kind = SCHEDULES.find(schedule)
    has_several = kind is not None and (kind.is_interleaved or kind.is_v_shaped)
    usual = 2 if has_several else 1
    if kind is not None and not kind.is_interleaved and chunks not in (None, usual):
        stages = "2 stages" if has_several else "one stage"
        raise WrongWords(f"--chunks {chunks}: {kind.name} puts {stages} on each device")
    return ranks * (chunks or usual), chunks or usual


def pipeline_of(stages: int, microbatches: int, schedule: str, chunks: int) -> Pipeline:
    """A pipeline that trains. `WrongWords` if the schedule does not train or does not exist."""
    try:
        pipeline = Pipeline(stages, microbatches, schedule, chunks)
    except ValueError as error:
        raise WrongWords(f"--schedule: {error}") from None
    if not pipeline.schedule.training:
        raise WrongWords(f"--schedule: {pipeline.schedule.name} has only forwards and cannot train")
    return pipeline


def layers_on(pipeline: Pipeline, model: Any, position: int) -> list[int]:
    """The layers of a model at a position of the pipeline."""
    return [
        layer
        for stage, holder in enumerate(pipeline.schedule.placement)
        if holder == position
        for layer in model.layers_of(stage)
    ]


def listed(layers: Sequence[int]) -> str:
    """A list of layers as text: ``layer 3``, ``layers 0-2``, or a shortened list."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers[-1] - layers[0] == len(layers) - 1:
        return f"layers {layers[0]}-{layers[-1]}"
    return "layers " + ", ".join(map(str, layers if len(layers) <= 3 else (*layers[:2], f"... {layers[-1]}")))


def show_holders(
    screen: Screen,
    mesh: Mesh,
    cluster: VirtualCluster,
    header: Sequence[str],
    cells: Sequence[Sequence[object]],
) -> None:
    """Write one row for each device: its index on the mesh, the given cells, and its process id."""
    holders = zip(mesh, cells, cluster.run(lambda device: os.getpid()), strict=True)
    rows = []
    for rank, (index, own, pid) in enumerate(holders):
        place = " ".join(f"{axis}={i}" for axis, i in index.items())
        rows.append((f"r{rank}", place, *own, pid))
    screen.table(("device", "place", *header, "pid"), rows)


def taking_turns(devices: int, backend: str) -> str:
    """Why devices cannot all compute at the same time on this machine; empty if they can."""
    if backend == "thread":
        return "threads share one interpreter"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{devices} devices take turns on {cores} core{'s' * (cores > 1)}" if devices > cores else ""


def largest_difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The largest absolute difference between the parameters of two models. NaN counts as infinite."""
    differences = [
        np.max(np.abs(x - y), initial=0.0)
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    ]
    return float(np.nan_to_num(np.max(differences), nan=math.inf))


def short(number: float) -> str:
    """A loss with four decimals, or in scientific notation if it is large."""
    return f"{number:.4f}" if abs(number) < 1e4 else f"{number:.3e}"
