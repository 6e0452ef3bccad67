"""The generate demo: a small Transformer learns on one process, and then completes lines split over devices."""

import argparse
from typing import Any, NamedTuple

import numpy as np

from parallelism import ir
from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec, generate
from parallelism.serving.placement import Placement, usual_strategy
from parallelism.transforms import Adam, train_step
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.demo.data import VOCABULARY, DataError, docstrings, in_one_line, pieces, tokens_of
from vcluster.demo.screen import Screen
from vcluster.mpi import device_of
from vcluster.runs import VirtualCluster

SEQUENCE, CONTEXT = 32, 192
"""The tokens of a row in training, and the most of a prompt with its answer."""
ROWS, RATE = 16, 5e-3
PAGE_TOKENS = 8


def model_of(arguments: argparse.Namespace) -> TransformerSpec:
    """The model: grouped queries, rotary positions, as Llama."""
    return TransformerSpec(
        layers=arguments.blocks,
        width=48,
        heads=4,
        key_value_heads=2,
        vocabulary=VOCABULARY,
        sequence=SEQUENCE,
        positions="rotary",
        norm="rms",
        activation="swiglu",
        feed_forward=96,
        biases=False,
        tied=False,
        dtype=np.float64,
    )


class Job(NamedTuple):
    """The checked arguments of the demo, and what is made of them."""

    arguments: argparse.Namespace
    mesh: Mesh
    spec: TransformerSpec
    text: Array
    prompts: list[bytes]


def prepare(arguments: argparse.Namespace) -> Job:
    """The arguments as a `Job`.  Raises `WrongWords` if they cannot be run.  Starts nothing."""
    mesh = mesh_of(arguments, Mesh(pp=2, tp=2))
    spec = model_of(arguments)
    given = arguments.prompt or ("A device ", "The ", "Each rank of a ")
    prompts = [text.encode("utf-8", "surrogateescape") for text in given]
    try:
        Placement(spec, mesh, usual_strategy(mesh))
        text = tokens_of(docstrings())
    except (ValueError, DataError) as error:
        raise WrongWords(str(error)) from None
    if not all(prompts) or max(map(len, prompts)) + arguments.tokens > CONTEXT:
        raise WrongWords(f"--prompt: a prompt has at least one byte, and with its answer at most {CONTEXT}")
    return Job(arguments, mesh, spec, text, prompts)


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo.  The verdict is bad if a token differs from those of one process."""
    _, mesh, spec, text, prompts = prepare(arguments)
    screen.line(f"A small Transformer on {mesh!r}, each device a {device_of(arguments.backend)}", "bold")
    screen.line(
        f"  {spec.layers} blocks of {spec.heads} heads, {spec.groups} of keys and values; {spec.parameters:,} parameters"
    )
    screen.line(
        f"  cache: {spec.cache_bytes(1, spec.dtype):,} bytes a token, in pages of {PAGE_TOKENS} tokens"
    )
    screen.line("  a token is a byte")
    parameters = trained(spec, text, arguments, screen)
    given: Any = {"page_tokens": PAGE_TOKENS, "temperature": arguments.temperature, "seed": arguments.seed}
    hardware = hardware_of(arguments.hardware, mesh.size)
    more: Any = {} if hardware is None else {"hardware": hardware, "compute": "modelled"}
    runs: list[Any] = []
    with VirtualCluster(mesh, backend=arguments.backend, **more) as cluster:
        answers = generate(
            spec,
            parameters,
            [[*each] for each in prompts],
            arguments.tokens,
            cluster,
            chunk=32,
            runs=runs,
            **given,
        )
    screen.heading("What the devices wrote")
    for prompt, answer in zip(prompts, answers, strict=True):
        screen.line(f"  {in_one_line([*prompt])}|{in_one_line(answer.tolist())}")
    alone = generate(spec, parameters, [[*each] for each in prompts], arguments.tokens, **given)
    same = bool((answers == alone).all())
    screen.verdict(
        same, f"the tokens {'are' if same else 'are NOT'} those of one process, which has the whole model"
    )
    _show_steps(screen, mesh, runs)


def trained(
    spec: TransformerSpec, text: Array, arguments: argparse.Namespace, screen: Screen
) -> dict[str, Array]:
    """The parameters behind some steps of Adam."""
    program = train_step(spec.function(ROWS), Adam(RATE))
    rng = np.random.default_rng(arguments.seed)
    arrays = {}
    for value in program.inputs:
        shape = tuple(map(int, value.type.shape))
        is_weight = value.name.startswith("p.") and len(shape) > 1
        filled = rng.normal(size=shape) * shape[0] ** -0.5 if is_weight else np.zeros(shape)
        arrays[value.name] = (filled + (value.name.startswith("p.") and len(shape) == 1)).astype(
            value.type.dtype
        )
    first = last = 0.0
    with screen.progress("training", arguments.steps) as told:
        for step in range(arguments.steps):
            drawn = pieces(text, ROWS, SEQUENCE + 1, (arguments.seed, step))
            arrays |= {
                "tokens": np.ascontiguousarray(drawn[:, :-1]),
                "targets": np.ascontiguousarray(drawn[:, 1:]),
            }
            outputs = ir.interpret(program, [arrays[value.name] for value in program.inputs]).outputs
            last = float(outputs[0])
            first = first or last
            named = zip((value.name for value in program.outputs), outputs, strict=True)
            arrays |= {name.removeprefix("next."): array for name, array in named if name.startswith("next.")}
            told(step + 1, f"loss {last:.3f}")
    screen.line(f"  {arguments.steps} steps of Adam on docstrings: loss {first:.3f} to {last:.3f}")
    return {name: arrays[f"p.{name}"] for name in spec.weights}


def _show_steps(screen: Screen, mesh: Mesh, runs: list[Any]) -> None:
    """What a prompt and a token move, and who did what when in the last step."""
    screen.heading("Steps of the engine")
    rows = []
    traces = [run.trace for run in runs]
    for name, trace in (("first: prompts", traces[0]), ("last: a token each", traces[-1])):
        rows.append(
            (
                name,
                f"{len(trace.filter(kind='send')):,}",
                f"{trace.count('all_reduce'):,}",
                f"{trace.bytes_received():,}",
            )
        )
    screen.table((f"of {len(traces)}", "messages pp", "all_reduces tp", "bytes"), rows)
    screen.timeline(traces[-1])
    screen.record = traces[-1], None
