"""The mlp demo: a perceptron is trained as a pipeline and compared with the same training in one process."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.kernels import SGD
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import KINDS, Pipeline
from parallelism.trace import Trace
from pipeline_parallelism import MLP
from vcluster.demo.command_line import WrongWords, mesh_of
from vcluster.demo.data import DataError, Dataset, digits, load_npz
from vcluster.demo.elsewhere import hardware_of, show_elsewhere
from vcluster.demo.screen import Screen
from vcluster.demo.training import (
    Trained,
    check_rows,
    check_writable,
    largest_difference,
    layers_on,
    listed,
    pipeline_of,
    short,
    show_holders,
    stages_of,
    train,
    write,
)
from vcluster.report import html

if TYPE_CHECKING:
    from parallelism.hardware import Hardware
    from vcluster.runs import VirtualCluster

TOLERANCE = 1e-12
"""Largest difference of the parameters from those of one process, relative to the largest of them (at least 1)."""

_USUAL_HIDDEN = (128, 64, 128)

SHOWN = 12
"""Maximal number of rows of a table. The remaining rows are added up."""


@dataclass(frozen=True)
class Job:
    """The checked arguments of the demo."""

    mesh: Mesh
    mlp: MLP
    optimizer: SGD
    data: Dataset
    steps: int
    backend: str
    trace: Path | None
    html: Path | None
    hardware: Hardware | None

    @property
    def replicas(self) -> int:
        """The number of replicas of the pipeline."""
        return self.mesh.shape.get("dp", 1)


def prepare(arguments: argparse.Namespace) -> Job:
    """The arguments as a `Job`. Raises `WrongWords` if they cannot be run. Starts nothing."""
    mesh = mesh_of(arguments, Mesh(pp=1))
    stages, chunks = stages_of(mesh.shape.get("pp", 1), arguments.schedule, arguments.chunks)
    hidden = arguments.hidden or (_USUAL_HIDDEN if chunks == 1 else (*_USUAL_HIDDEN, *[64] * (stages - 4)))
    layers = len(hidden) + 1
    if stages > layers and chunks > 1:
        raise WrongWords(f"--pp {stages // chunks} with {chunks} stages on each: the perceptron has {layers} layers")
    if stages > layers:
        more = ",".join(["96"] * (stages - 1))
        hint = f"; for more stages: --hidden {more}" if stages <= 16 else ""
        raise WrongWords(f"--pp {stages}: the perceptron has {layers} layers, so at most {layers} stages{hint}")
    if max(hidden) > 4096:
        raise WrongWords(f"--hidden: a demo has layers up to 4096 wide, got {max(hidden)}")
    pipeline_of(stages, 1, arguments.schedule, chunks)
    try:
        data = digits(arguments.seed) if arguments.data is None else load_npz(arguments.data, arguments.seed)
    except DataError as error:
        raise WrongWords(f"--data: {error}") from None
    check_rows(arguments, mesh.shape.get("dp", 1), len(data.x), f"there are {len(data.x)} rows to train on")
    check_writable(trace=arguments.trace, html=arguments.html)
    hardware = hardware_of(arguments.hardware, mesh.size)
    pipeline = Pipeline(stages, arguments.microbatches, arguments.schedule, chunks)
    mlp = MLP(
        layer_sizes=(data.features, *hidden, data.outputs), pipeline=pipeline, seed=arguments.seed,
        loss="softmax_cross_entropy" if data.classes else "mean_squared_error",
    )
    # The gradient of the first layer grows with the number of features. A rate of 0.1 suits 64 features. Real values,
    # whose loss is not bounded, need a tenth of it.
    usual = (0.1 if data.classes else 0.01) * min(1, 64 / data.features)
    rate = usual if arguments.learning_rate is None else arguments.learning_rate
    return Job(mesh, mlp, SGD(rate, momentum=0.9), data, arguments.steps, arguments.backend, arguments.trace,
               arguments.html, hardware)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0, or 1 if the pipeline's numbers differ from those of one process."""
    job = prepare(arguments)
    screen = Screen()
    sizes = "-".join(map(str, job.mlp.layer_sizes))
    sizes = sizes if len(sizes) <= 28 else f"of {len(job.mlp.layer_sizes) - 1} layers"
    screen.line(f"A perceptron {sizes} on {job.mesh!r}, each device a {job.backend}", "bold")
    rows = f"{len(job.data.x):,} rows to train on, {len(job.data.x_test):,} to test"
    name = job.data.name if len(job.data.name) <= 32 else job.data.name[:29] + "..."
    screen.line(f"  {name}: {rows}")
    schedule, microbatches = job.mlp.pipeline.schedule.name, job.mlp.pipeline.microbatches
    optimizer = f"SGD at {job.optimizer.lr:.3g} with momentum"
    words = [f"  schedule {schedule}, {microbatches} microbatches", f"{optimizer}, {job.steps} steps"]
    screen.line("; ".join(words) if sum(map(len, words)) < 79 else ";\n  ".join(words))
    from vcluster import VirtualCluster

    with VirtualCluster(job.mesh, backend=job.backend) as cluster:
        screen.heading("Layers by device")
        _show_holders(screen, job, cluster)
        screen.heading("Training")
        trained = train(job.mlp, job.optimizer, job.steps, lambda step: (job.data.x, job.data.targets), cluster, screen)
        outputs = cluster.run(job.mlp.predict_step(), job.data.x_test).result
    with VirtualCluster(2, backend=job.backend) as cluster:
        whole, same_order = cluster.run(_train_here, job)
    screen.heading("Verdict")
    good = _show_verdict(screen, job, trained, outputs, whole, same_order)
    screen.heading("One step of the pipeline, in virtual time: CPU seconds of each device")
    _show_timeline(screen, job, trained)
    screen.heading("Bytes in that step")
    good = _show_bytes(screen, job, trained.step) and good
    record = show_elsewhere(screen, trained.step, job.mesh, job.hardware)
    write(screen, "trace", "trace", job.trace, record.save)
    write(screen, "html", "page", job.html, lambda path: html(record, path, hardware=job.hardware))
    return 0 if good else 1


def _train_here(device: Device, job: Job) -> tuple[list[float], Any]:
    """The same training in one device. Rank 0 uses whole batches; rank 1 adds up in the order of the pipeline.

    If the weights change after every microbatch, there is only one order.
    """
    whole = device.rank == 0 and job.mlp.pipeline.schedule.weights != "stashed"
    order = {} if whole else {"microbatches": job.mlp.pipeline.microbatches, "replicas": job.replicas}
    previous, losses = None, []
    for _ in range(job.steps):
        previous = job.mlp.reference_step(job.data.x, job.data.targets, job.optimizer, previous=previous, **order)
        losses.append(previous.loss)
    assert previous is not None
    return losses, previous.parameters


def _show_holders(screen: Screen, job: Job, cluster: VirtualCluster) -> None:
    sizes, cells = job.mlp.layer_sizes, []
    for index in job.mesh:
        layers = layers_on(job.mlp.pipeline, job.mlp, index["pp"] if "pp" in job.mesh.axes else 0)
        count = sum((sizes[i] + 1) * sizes[i + 1] for i in layers)
        shapes = ", ".join(f"{sizes[i]} x {sizes[i + 1]}" for i in layers)
        cells.append((listed(layers), shapes if len(shapes) <= 30 else f"{len(layers)} layers", f"{count:,}"))
    show_holders(screen, job.mesh, cluster, ("layers", "weights", "parameters"), cells)


def _show_verdict(
    screen: Screen, job: Job, trained: Trained, outputs: np.ndarray, whole: Any, same_order: Any
) -> bool:
    first, last = trained.losses[0], trained.losses[-1]
    screen.line(f"  loss {short(first)} before the first step, {short(last)} before the last")
    if job.data.classes:
        right = outputs.argmax(axis=1) == job.data.targets_test.argmax(axis=1)
        screen.line(f"  test accuracy {right.mean():.1%}: {right.sum()} of {len(right)} rows not used for training")
    else:
        error = float(np.mean((outputs - job.data.targets_test) ** 2))
        screen.line(f"  test error {short(error)}, as a fraction of the variance of y")
    if not last < 10 * first + 1:
        rate = job.optimizer.lr / 10
        screen.verdict(False, f"the training diverged; try a smaller step: --learning-rate {rate:g}")
        return False
    parameters = trained.last.parameters
    assert parameters is not None
    difference = largest_difference(parameters, whole[1])
    scale = max(1.0, *(float(np.max(np.abs(x), initial=0.0)) for layer in whole[1] for x in layer))
    good = difference <= TOLERANCE * scale
    screen.verdict(good, f"largest difference from the same training in one process: {difference:.1e}")
    if largest_difference(parameters, same_order[1]) == 0 and trained.losses == same_order[0]:
        screen.line("       bitwise equal to one process that adds in the order of the pipeline")
    return good


def _show_timeline(screen: Screen, job: Job, trained: Trained) -> None:
    actions = trained.step.filter(phase=KINDS)
    screen.timeline(actions)
    schedule = job.mlp.pipeline.schedule
    formula = schedule.timeline().bubble_fraction
    words = "(P-1)/(M+P-1)" if schedule.name in ("gpipe", "1f1b") else "the schedule's own"
    screen.line()
    bubble = actions.bubble_fraction
    screen.line(f"  bubble  {bubble:.1%} of this timeline; {words} = {formula:.1%} for equal stages")
    busy = [actions.totals[rank].compute_seconds * 1e3 for rank in actions.ranks]
    shares = " ".join(f"{ms:.1f}" for ms in busy) if len(busy) <= 8 else f"{min(busy):.1f} to {max(busy):.1f}"
    screen.line(f"  busy    {shares} ms by device")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    milliseconds = trained.step_seconds * 1e3
    screen.line(f"  wall    {milliseconds:.1f} ms for this step, {trained.seconds:.2f} s for all {job.steps}")
    if job.mesh.size > cores or job.backend == "thread":
        reason = f"{job.mesh.size} devices take turns on {cores} core{'s' * (cores > 1)}"
        reason = reason if job.backend == "process" else "threads share one interpreter"
        screen.line(f"          ({reason}, so wall time shows no bubble)")


def _show_bytes(screen: Screen, job: Job, step: Trace) -> bool:
    matrix = step.communication_matrix()
    channels = [(int(source), int(target)) for source, target in np.argwhere(matrix)]
    expected, weights = _expected_bytes(job), (0, "weights' gradients, all_reduce")
    rows = [
        (f"r{source} -> r{target}", f"{matrix[source, target]:,}", expected.get((source, target), weights)[1])
        for source, target in channels
    ]
    if len(rows) > SHOWN:
        rest = int(sum(matrix[channel] for channel in channels[SHOWN:]))
        rows = [*rows[:SHOWN], (f"{len(channels) - SHOWN} more", f"{rest:,}", "")]
    if rows:
        screen.table(("channel", "bytes", "content"), rows)
        screen.line()
    kinds = {"messages": step.filter(kind="send").bytes_sent()}
    for name in sorted({event.name for event in step.filter(kind="collective")}):
        kinds[name] = step.filter(kind="collective", name=name).bytes_received()
    kinds["host to devices"] = step.filter(kind="h2d").bytes_received()
    kinds["devices to host"] = step.filter(kind="d2h").bytes_sent()
    screen.table(("kind", "bytes"), [(name, f"{nbytes:,}") for name, nbytes in kinds.items()])
    good = all(matrix[channel] == nbytes for channel, (nbytes, _) in expected.items())
    if expected:
        screen.line()
        word = "carries" if good else "does NOT carry"
        screen.verdict(good, f"every channel of the pipeline {word} rows x width x 8 bytes")
    return good


def _expected_bytes(job: Job) -> dict[tuple[int, int], tuple[int, str]]:
    """The bytes that the pipeline's channels carry in a step, by the closed form, and a description of them."""
    expected = {}
    share = [len(part) for part in np.array_split(np.arange(len(job.data.x)), job.replicas)]
    for replica, rows in enumerate(share):
        along = {"dp": replica} if "dp" in job.mesh.axes else {}
        cuts: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for stage, ends in enumerate(pairwise(job.mlp.pipeline.schedule.placement)):
            if ends[0] == ends[1]:
                continue
            width = job.mlp.layer_sizes[job.mlp.layers_of(stage)[-1] + 1]
            here, there = (job.mesh.rank(pp=place, **along) for place in ends)
            cuts.setdefault((here, there), []).append((width, "activations"))
            if not job.mlp.pipeline.schedule.local:
                cuts.setdefault((there, here), []).append((width, "gradients"))
        for channel, carried in cuts.items():
            words = [f"{word}, {rows} x {width}" for width, word in carried]
            nbytes = sum(rows * width * 8 for width, _ in carried)
            expected[channel] = nbytes, words[0] if len(words) == 1 else f"{words[0]}; {len(words) - 1} more"
    return expected
