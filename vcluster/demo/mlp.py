"""The mlp demo: a perceptron is trained as a pipeline and compared with the same training in one process."""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.hardware import Hardware
from parallelism.kernels import SGD
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import KINDS, Pipeline
from parallelism.trace import Trace
from pipeline_parallelism import MLP
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.demo.data import DataError, Dataset, digits, load_npz
from vcluster.demo.screen import Screen
from vcluster.demo.traffic import show_elsewhere
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
    taking_turns,
    train,
    write,
)
from vcluster.mpi import device_of
from vcluster.runs import VirtualCluster

TOLERANCE = 1e-12
"""Largest difference of the parameters from those of one process, relative to the largest of them (at least 1)."""

_USUAL_HIDDEN = (128, 64, 128)

SHOWN = 12
"""Maximal number of rows of a table. The remaining rows are added up."""


@dataclass(frozen=True)
class Job:
    """The checked arguments of the demo, and what is made of them."""

    arguments: argparse.Namespace
    mesh: Mesh
    replicas: int
    """The number of replicas of the pipeline."""
    mlp: MLP
    optimizer: SGD
    data: Dataset
    hardware: Hardware | None


def prepare(arguments: argparse.Namespace) -> Job:
    """The arguments as a `Job`. Raises `WrongWords` if they cannot be run. Starts nothing."""
    mesh = mesh_of(arguments, Mesh(pp=4))
    stages, chunks = stages_of(mesh.shape.get("pp", 1), arguments.schedule, arguments.chunks)
    hidden = arguments.hidden or (_USUAL_HIDDEN if chunks == 1 else (*_USUAL_HIDDEN, *[64] * (stages - 4)))
    layers = len(hidden) + 1
    if stages > layers and chunks > 1:
        raise WrongWords(
            f"--pp {stages // chunks} with {chunks} stages on each: the perceptron has {layers} layers"
        )
    if stages > layers:
        hint = f"; for more stages: --hidden {','.join(['96'] * (stages - 1))}" if stages <= 16 else ""
        raise WrongWords(
            f"--pp {stages}: the perceptron has {layers} layers, so at most {layers} stages{hint}"
        )
    if max(hidden) > 4096:
        raise WrongWords(f"--hidden: a demo has layers up to 4096 wide, got {max(hidden)}")
    pipeline_of(stages, 1, arguments.schedule, chunks)
    try:
        data = digits(arguments.seed) if arguments.data is None else load_npz(arguments.data, arguments.seed)
    except DataError as error:
        raise WrongWords(f"--data: {error}") from None
    replicas = mesh.shape.get("dp", 1)
    check_rows(arguments, replicas, len(data.x), f"there are {len(data.x)} rows to train on")
    check_writable(trace=arguments.trace, html=arguments.html)
    hardware = hardware_of(arguments.hardware, mesh.size)
    mlp = MLP(
        layer_sizes=(data.features, *hidden, data.outputs),
        seed=arguments.seed,
        pipeline=Pipeline(stages, arguments.microbatches, arguments.schedule, chunks),
        loss="softmax_cross_entropy" if data.classes else "mean_squared_error",
    )
    # The gradient of the first layer grows with the number of features. A rate of 0.1 suits 64 features. Real values,
    # whose loss is not bounded, need a tenth of it.
    usual = (0.1 if data.classes else 0.01) * min(1, 64 / data.features)
    return Job(
        arguments, mesh, replicas, mlp, SGD(arguments.learning_rate or usual, momentum=0.9), data, hardware
    )


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if the pipeline's numbers differ from those of one process."""
    job = prepare(arguments)
    mlp, pipeline, data, backend = job.mlp, job.mlp.pipeline, job.data, arguments.backend
    sizes = "-".join(map(str, mlp.layer_sizes))
    sizes = sizes if len(sizes) <= 28 else f"of {len(mlp.layer_sizes) - 1} layers"
    screen.line(f"A perceptron {sizes} on {job.mesh!r}, each device a {device_of(backend)}", "bold")
    name = data.name if len(data.name) <= 32 else data.name[:29] + "..."
    screen.line(f"  {name}: {len(data.x):,} rows to train on, {len(data.x_test):,} to test")
    words = [
        f"  schedule {pipeline.schedule.name}, {pipeline.microbatches} microbatches",
        f"SGD at {job.optimizer.lr:.3g} with momentum, {arguments.steps} steps",
    ]
    screen.line("; ".join(words) if sum(map(len, words)) < 79 else ";\n  ".join(words))
    with VirtualCluster(job.mesh, backend=backend) as cluster:
        screen.heading("Layers by device")
        _show_holders(screen, job, cluster)
        screen.heading("Training")
        trained = train(
            mlp, job.optimizer, arguments.steps, lambda step: (data.x, data.targets), cluster, screen
        )
        outputs = cluster.run(mlp.predict_step(), data.x_test).result
    with VirtualCluster(2, backend=backend) as cluster:
        whole, same_order = cluster.run(_train_here, job)
    screen.heading("Verdict")
    _show_verdict(screen, job, trained, outputs, whole, same_order)
    screen.heading("One step of the pipeline, in virtual time: CPU seconds of each device")
    _show_timeline(screen, job, trained)
    screen.heading("Bytes in that step")
    _show_bytes(screen, job, trained.step)
    record = show_elsewhere(screen, trained.step, job.mesh, job.hardware)
    write(screen, "trace", "trace", arguments.trace, record.save)


def _train_here(device: Device, job: Job) -> tuple[list[float], Any]:
    """The same training in one device. Rank 0 uses whole batches; rank 1 adds up in the order of the pipeline.

    If the weights change after every microbatch, there is only one order.
    """
    whole = device.rank == 0 and job.mlp.pipeline.schedule.weights != "stashed"
    order = {} if whole else {"microbatches": job.mlp.pipeline.microbatches, "replicas": job.replicas}
    previous, losses = None, []
    for _ in range(job.arguments.steps):
        previous = job.mlp.reference_step(
            job.data.x, job.data.targets, job.optimizer, previous=previous, **order
        )
        losses.append(previous.loss)
    assert previous is not None
    return losses, previous.parameters


def _show_holders(screen: Screen, job: Job, cluster: VirtualCluster) -> None:
    sizes, cells = job.mlp.layer_sizes, []
    for index in job.mesh:
        layers = layers_on(job.mlp.pipeline, job.mlp, dict(index).get("pp", 0))
        shapes = ", ".join(f"{sizes[i]} x {sizes[i + 1]}" for i in layers)
        cells.append(
            (
                listed(layers),
                shapes if len(shapes) <= 30 else f"{len(layers)} layers",
                f"{sum((sizes[i] + 1) * sizes[i + 1] for i in layers):,}",
            )
        )
    show_holders(screen, job.mesh, cluster, ("layers", "weights", "parameters"), cells)


def _show_verdict(
    screen: Screen, job: Job, trained: Trained, outputs: np.ndarray, whole: Any, same_order: Any
) -> None:
    first, last = trained.losses[0], trained.losses[-1]
    screen.line(f"  loss {short(first)} before the first step, {short(last)} before the last")
    if job.data.classes:
        right = outputs.argmax(axis=1) == job.data.targets_test.argmax(axis=1)
        screen.line(
            f"  test accuracy {right.mean():.1%}: {right.sum()} of {len(right)} rows not used for training"
        )
    else:
        error = float(np.mean((outputs - job.data.targets_test) ** 2))
        screen.line(f"  test error {short(error)}, as a fraction of the variance of y")
    if not last < 10 * first + 1:
        screen.verdict(
            False, f"the training diverged; try a smaller step: --learning-rate {job.optimizer.lr / 10:g}"
        )
        return
    parameters = trained.last.parameters
    assert parameters is not None
    difference = largest_difference(parameters, whole[1])
    scale = max(1.0, *(float(np.max(np.abs(x), initial=0.0)) for layer in whole[1] for x in layer))
    screen.verdict(
        difference <= TOLERANCE * scale,
        f"largest difference from the same training in one process: {difference:.1e}",
    )
    if largest_difference(parameters, same_order[1]) == 0 and trained.losses == same_order[0]:
        screen.line("       bitwise equal to one process that adds in the order of the pipeline")


def _show_timeline(screen: Screen, job: Job, trained: Trained) -> None:
    actions, schedule = trained.step.filter(phase=KINDS), job.mlp.pipeline.schedule
    screen.timeline(actions)
    words = "(P-1)/(M+P-1)" if schedule.name in ("gpipe", "1f1b") else "the schedule's own"
    screen.line(
        f"\n  bubble  {actions.bubble_fraction:.1%} of this timeline; "
        f"{words} = {schedule.timeline().bubble_fraction:.1%} for equal stages"
    )
    busy = [actions.totals[rank].compute_seconds * 1e3 for rank in actions.ranks]
    shares = " ".join(f"{ms:.1f}" for ms in busy) if len(busy) <= 8 else f"{min(busy):.1f} to {max(busy):.1f}"
    screen.line(f"  busy    {shares} ms by device")
    if schedule.ranks > 1 and max(busy) > 1.1 * min(busy):
        screen.line("          (the stages are unequal: the others wait for the busiest)")
    screen.line(
        f"  wall    {trained.step_seconds * 1e3:.1f} ms for this step, {trained.seconds:.2f} s for all "
        f"{len(trained.losses)}"
    )
    if reason := taking_turns(job.mesh.size, job.arguments.backend):
        screen.line(f"          ({reason}, so wall time shows no bubble)")


def _show_bytes(screen: Screen, job: Job, step: Trace) -> None:
    matrix = step.communication_matrix()
    channels = [(int(source), int(target)) for source, target in np.argwhere(matrix)]
    expected = _expected_bytes(job)
    weights = (0, "weights' gradients, all_reduce")
    rows = [
        (f"r{source} -> r{target}", f"{matrix[source, target]:,}", expected.get((source, target), weights)[1])
        for source, target in channels
    ]
    if len(rows) > SHOWN:
        rest = sum(int(matrix[channel]) for channel in channels[SHOWN:])
        rows[SHOWN:] = [(f"{len(channels) - SHOWN} more", f"{rest:,}", "")]
    if rows:
        screen.table(("channel", "bytes", "content"), rows)
        screen.line()
    collectives = step.filter(kind="collective")
    names = sorted({event.name for event in collectives})
    kinds = {
        "messages": step.filter(kind="send").bytes_sent(),
        **{name: collectives.filter(name=name).bytes_received() for name in names},
        "host to devices": step.filter(kind="h2d").bytes_received(),
        "devices to host": step.filter(kind="d2h").bytes_sent(),
    }
    screen.table(("kind", "bytes"), [(name, f"{nbytes:,}") for name, nbytes in kinds.items()])
    if expected:
        good = all(matrix[channel] == nbytes for channel, (nbytes, _) in expected.items())
        screen.line()
        screen.verdict(
            good,
            f"every channel of the pipeline {'carries' if good else 'does NOT carry'} rows x width x 8 bytes",
        )


def _expected_bytes(job: Job) -> dict[tuple[int, int], tuple[int, str]]:
    """The bytes that the pipeline's channels carry in a step, by the closed form, and a description of them."""
    expected, schedule = {}, job.mlp.pipeline.schedule
    for replica, part in enumerate(np.array_split(np.arange(len(job.data.x)), job.replicas)):
        along = {"dp": replica} if "dp" in job.mesh.axes else {}
        cuts: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for stage, ends in enumerate(pairwise(schedule.placement)):
            if ends[0] != ends[1]:
                width = job.mlp.layer_sizes[job.mlp.layers_of(stage)[-1] + 1]
                here, there = (job.mesh.rank(pp=place, **along) for place in ends)
                cuts.setdefault((here, there), []).append((width, "activations"))
                if not schedule.local:
                    cuts.setdefault((there, here), []).append((width, "gradients"))
        for channel, carried in cuts.items():
            more = f"; {len(carried) - 1} more" if len(carried) > 1 else ""
            width, word = carried[0]
            expected[channel] = (
                sum(len(part) * n * 8 for n, _ in carried),
                f"{word}, {len(part)} x {width}{more}",
            )
    return expected
