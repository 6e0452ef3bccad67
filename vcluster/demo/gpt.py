"""The gpt demo: a small GPT is trained on stages, shards and replicas, and compared with one process."""

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Ints
from parallelism.display import WIDTH
from parallelism.hardware import Hardware
from parallelism.kernels import Adam
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.trace import Trace
from pipeline_parallelism import Transformer
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.demo.data import VOCABULARY, DataError, docstrings, in_one_line, pieces, tokens_of
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

TOLERANCE = 1e-9
"""Largest difference from one process, of the losses of all steps and of the final parameters."""
SEQUENCE = 32
"""Number of tokens in a row of a batch."""
TEMPERATURE = 0.5
MOST_WIDTH = 512
MOST_PROMPT = 60
"""Maximal number of characters of the prompt that are shown."""


@dataclass(frozen=True)
class Job:
    """The checked arguments of the demo, and what is made of them."""

    arguments: argparse.Namespace
    mesh: Mesh
    model: Transformer
    optimizer: Adam
    tokens: Ints
    prompt: bytes
    hardware: Hardware | None

    def batch(self, step: int) -> tuple[Ints, Ints]:
        """Tokens and targets of a step. The target of a token is the one after it."""
        drawn = pieces(self.tokens, self.arguments.rows, SEQUENCE + 1, (self.arguments.seed, step))
        return drawn[:, :-1], drawn[:, 1:]


def prepare(arguments: argparse.Namespace) -> Job:
    """The arguments as a `Job`. Raises `WrongWords` if they cannot be run. Starts nothing."""
    mesh = mesh_of(arguments, Mesh(pp=2, dp=2, tp=2))
    if arguments.width > MOST_WIDTH:
        raise WrongWords(f"--width: a demo takes widths up to {MOST_WIDTH}, got {arguments.width}")
    if arguments.width % (2 * arguments.heads):
        raise WrongWords(
            f"--width {arguments.width} must be a multiple of {2 * arguments.heads}: "
            f"each of the {arguments.heads} heads has an even size"
        )
    stages, chunks = stages_of(mesh.shape.get("pp", 1), arguments.schedule, arguments.chunks)
    pipeline = pipeline_of(stages, arguments.microbatches, arguments.schedule, chunks)
    if stages > (layers := arguments.blocks + 2):
        raise WrongWords(
            f"{stages} stages: with --blocks {arguments.blocks} there are {layers} layers, embedding and "
            f"head included; for more stages: --blocks {stages - 2}"
        )
    if pipeline.schedule.weights != "one" or pipeline.schedule.local:
        raise WrongWords(
            f"--schedule: {pipeline.schedule.name} does not compute the same as one process, which this "
            f"demo compares with"
        )
    check_rows(
        arguments,
        mesh.shape.get("dp", 1),
        arguments.rows,
        f"a batch has {arguments.rows} rows; --rows changes that",
    )
    try:
        model = Transformer(
            vocabulary=VOCABULARY,
            width=arguments.width,
            heads=arguments.heads,
            blocks=arguments.blocks,
            pipeline=pipeline,
            seed=arguments.seed,
        )
        model.check_mesh(mesh, np.zeros((arguments.rows, SEQUENCE), np.int64))
        tokens = tokens_of(docstrings())
    except DataError as error:
        raise WrongWords(str(error)) from None
    except ValueError as error:
        raise WrongWords(f"--heads {arguments.heads}: {error}") from None
    if not arguments.prompt:
        raise WrongWords("--prompt: needs at least one character")
    check_writable(trace=arguments.trace, html=arguments.html)
    return Job(
        arguments,
        mesh,
        model,
        Adam(arguments.learning_rate),
        tokens,
        arguments.prompt.encode("utf-8", "surrogateescape"),
        hardware_of(arguments.hardware, mesh.size),
    )


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if numbers differ from one process or bytes from the closed form."""
    job = prepare(arguments)
    model, steps, backend = job.model, arguments.steps, arguments.backend
    shapes = (shape for layer in range(model.layer_count) for shape in model.parameter_shapes(layer).values())
    screen.line(f"A small GPT on {job.mesh!r}, each device a {device_of(backend)}", "bold")
    screen.line(
        f"  embedding, {model.blocks} block{'s' * (model.blocks > 1)} of {model.heads} heads, head; "
        f"{model.width} wide; {sum(map(prod, shapes)):,} parameters"
    )
    screen.line(f"  text: the docstrings of parallelism, {len(job.tokens):,} bytes; a token is a byte")
    screen.line(
        f"  a batch: {arguments.rows} pieces of {SEQUENCE} tokens; schedule {model.pipeline.schedule.name}, "
        f"{model.pipeline.microbatches} microbatches"
    )
    screen.line(f"  Adam at {job.optimizer.lr:.3g}, {steps} steps")
    shown = in_one_line([*job.prompt])[-MOST_PROMPT:]
    with VirtualCluster(job.mesh, backend=backend) as cluster:
        screen.heading("Layers by device")
        _show_holders(screen, job, cluster)
        screen.heading("Training")
        trained = train(model, job.optimizer, steps, job.batch, cluster, screen)
        written = generate(job, cluster, WIDTH - 3 - len(shown))
    screen.heading("The same training in one process")
    with VirtualCluster(1, backend=backend) as cluster:
        alone = train(
            replace(model, pipeline=Pipeline(1, 1)), job.optimizer, steps, job.batch, cluster, screen
        )
    screen.heading("Verdict")
    _show_verdict(screen, job, trained, alone)
    screen.heading("Bytes in the last step")
    _show_bytes(screen, job, trained.step)
    record = show_elsewhere(screen, trained.step, job.mesh, job.hardware)
    write(screen, "trace", "trace", arguments.trace, record.save)
    screen.heading("Generated text, one byte after the other, by all devices together")
    screen.line(f"  {shown}|{in_one_line(written)}")


def generate(job: Job, cluster: VirtualCluster, count: int) -> list[int]:
    """Continue the prompt: draw each byte from its sharpened probabilities and append it to the context."""
    step = job.model.predict_step()
    rng = np.random.default_rng(job.arguments.seed)
    context, written = [*job.prompt][-SEQUENCE:], list[int]()
    for _ in range(count):
        logits: npt.NDArray[Any] = cluster.run(step, np.array([context])).result[0, -1] / TEMPERATURE
        chances = np.exp(logits - logits.max())
        written.append(int(rng.choice(VOCABULARY, p=chances / chances.sum())))
        context = [*context, written[-1]][-SEQUENCE:]
    return written


def _parameters(job: Job, rank: int) -> int:
    """The number of elements in the shards of all parameters that a rank holds."""
    return sum(
        prod(layout.local_shape(shape, job.mesh, rank))
        for layer in layers_on(job.model.pipeline, job.model, dict(job.mesh.index(rank)).get("pp", 0))
        for shape, layout in zip(
            job.model.parameter_shapes(layer).values(),
            job.model.layouts(layer, job.mesh).values(),
            strict=True,
        )
    )


def _show_holders(screen: Screen, job: Job, cluster: VirtualCluster) -> None:
    model, cells = job.model, []
    shares = np.array_split(np.arange(model.heads), job.mesh.shape.get("tp", 1))
    for rank, index in enumerate(map(dict, job.mesh)):
        layers = layers_on(model.pipeline, model, index.get("pp", 0))
        inner = [f"block {layer}" for layer in layers if 0 < layer < model.layer_count - 1]
        blocks = inner if len(inner) <= 2 else [f"{len(inner)} blocks"]
        names = ", ".join(
            [*["embedding"] * (0 in layers), *blocks, *["head"] * (model.layer_count - 1 in layers)]
        )
        cells.append(
            (
                names if len(names) <= 28 else listed(layers),
                f"{len(shares[index.get('tp', 0)])} of {model.heads}",
                f"{_parameters(job, rank):,}",
            )
        )
    show_holders(screen, job.mesh, cluster, ("layers", "heads", "parameters"), cells)


def _show_verdict(screen: Screen, job: Job, trained: Trained, alone: Trained) -> None:
    first, last = trained.losses[0], trained.losses[-1]
    screen.line(
        f"  loss {short(first)} before the first step (a random guess among 256 has "
        f"{np.log(VOCABULARY):.4f}),\n  {short(last)} before the last"
    )
    if not last < first + 1:
        screen.verdict(False, "the training diverged; try a smaller step: --learning-rate 0.001")
        return
    apart = float(np.max(np.abs(np.subtract(trained.losses, alone.losses))))
    screen.verdict(apart <= TOLERANCE, f"largest difference from the losses of one process: {apart:.1e}")
    assert trained.last.parameters is not None and alone.last.parameters is not None
    difference = largest_difference(trained.last.parameters, alone.last.parameters)
    screen.verdict(difference <= TOLERANCE, f"largest difference from its final parameters: {difference:.1e}")
    steps = len(trained.losses)
    screen.line(
        f"       wall time: {trained.seconds / steps * 1e3:.0f} ms per step, "
        f"{alone.seconds / steps * 1e3:.0f} ms in one process"
    )
    if reason := taking_turns(job.mesh.size, job.arguments.backend):
        screen.line(f"       ({reason}, and each message is a wait:")
        screen.line("       this shows that the numbers are the same, not speed)")


def _show_bytes(screen: Screen, job: Job, step: Trace) -> None:
    expected = expected_bytes(job)
    moved = {axis: step.filter(axes=axis).bytes_received() for axis in ("tp", "dp")}
    moved["pp"] = step.filter(kind="send").bytes_sent()
    rows: list[tuple[str, ...]] = []
    for kind, axis, what in (
        ("messages", "pp", "activations, gradients back"),
        ("all_reduce", "tp", "inside blocks, embedding, loss"),
        ("all_reduce", "dp", "replicas' gradients, the loss"),
    ):
        if job.mesh.shape.get(axis, 1) > 1:
            count = len(step.filter(kind="send")) if axis == "pp" else step.filter(axes=axis).count(kind)
            rows.append((kind, axis, f"{count:,}", f"{moved[axis]:,}", what))
    rows += [
        ("host to devices", "", "", f"{step.filter(kind='h2d').bytes_received():,}", "tokens"),
        (
            "devices to host",
            "",
            "",
            f"{step.filter(kind='d2h').bytes_sent():,}",
            "loss; in this step parameters",
        ),
    ]
    screen.table(("kind", "axis", "count", "bytes", "content"), rows)
    good = moved == expected and step.bytes_received() == sum(expected.values())
    listing = ", ".join(f"{axis} {nbytes:,}" for axis, nbytes in expected.items() if nbytes)
    screen.verdict(
        good, f"each axis {'equals' if good else 'does NOT equal'} its closed form: {listing or 'none'}"
    )


def expected_bytes(job: Job) -> dict[str, int]:
    """The bytes that a step moves between devices over each axis, summed over the devices."""
    model, shape = job.model, job.mesh.shape
    dp, tp = shape.get("dp", 1), shape.get("tp", 1)
    tokens = job.arguments.rows * SEQUENCE
    x = tokens * model.width * 8
    cuts = sum(a != b for a, b in pairwise(model.pipeline.schedule.placement))
    gradients = sum(
        8 * _parameters(job, rank) for rank, index in enumerate(job.mesh) if dict(index).get("dp", 0) == 0
    )
    return {
        "pp": 2 * cuts * tp * x,
        "tp": (tp - 1) * (8 * model.blocks * x + 4 * x + 6 * tokens * 8),
        "dp": 2 * (dp - 1) * (gradients + 8 * tp),
    }
