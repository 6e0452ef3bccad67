"""`simulate gpt`: the time and the memory of a training step in the flags of Megatron-LM."""

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from parallelism.display import WIDTH, in_columns, progress
from parallelism.display.quantities import count, plural, seconds
from parallelism.hardware import Hardware, compared_in, mfu_remark, sized_hardware, validation_text
from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.planning.assembled_steps import figures_of_run
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.training import Figures, MegatronFlags, TrainingRun, figures
from parallelism.training.run_figures import CATEGORIES
from parallelism.training.stage_layers import remark_of
from parallelism.training.strategy_run import strategy_run
from parallelism.training.training_run import ADAM_W, precision_remark
from parallelism.transforms import Strategy
from vcluster.cli.command_line import Parser, WrongWords, accessing, mesh_of, writable
from vcluster.cli.megatron_words import (
    check_few_bits,
    check_rate,
    flags_of,
    hardware_and_devices,
    named_model,
    searched_hardware,
    tell_all_devices,
    tell_remarks,
    tell_unchanging,
    tokens_text,
    training_parser,
)
from vcluster.cli.plan_document import optimizer_text, tuning_texts
from vcluster.cli.serving.cache_words import CACHE, cache_of, cache_text
from vcluster.cli.sweeps.imperfect_words import SLOW, imperfections_of
from vcluster.cli.written_files import CHAKRA, keep_for_chakra

ONE_DEVICE = Mesh(devices=1)
HINTS = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--sp": "--sequence-parallel",
    "--zero": "--use-distributed-optimizer, or in --strategy zero=",
    "--fsdp": "--use-megatron-fsdp, or in --strategy fsdp=",
    "--hsdp": "--num-distributed-optimizer-instances, or in --strategy hsdp=",
}
"""What settings of plans that are written as flags may mean."""


@cache  # of some hundred words, and a process may serve many commands
def _parser(program: str) -> Parser:
    return training_parser(
        program,
        "simulate",
        "Predicts the time and the memory of a step of training, without running it.",
        (
            "gpt --num-layers 40 --hidden-size 5120 \\\n"
            "      --num-attention-heads 40 --seq-length 2048 --vocab-size 51200 \\\n"
            "      --tensor-model-parallel-size 4 --global-batch-size 512 --bf16 \\\n"
            "      --hardware dgx-a100 --devices 64",
            "llama3-8b --bf16 \\\n      --hardware dgx-h100 --devices 64 --json",
            "config.json --seq-length 4096 \\\n      --hardware dgx-h100 --devices 64",
            'llama3-8b \\\n      --strategy "precision=bf16 pp=2 1f1b:8 dp=32 zero=2" \\\n'
            "      --global-batch-size 512 --hardware dgx-h100",
        ),
        {
            "--strategy": {
                "metavar": "TEXT",
                "help": "the strategy with the sizes of its axes, in place of flags",
            },
            "--mesh": {"metavar": "AXES", "help": "the sizes, outermost axis first, if --strategy has none"},
            "--json": {"action": "store_true", "help": "print the figures as JSON"},
            "--report": {"type": Path, "metavar": "FILE.html", "help": "write a page of the timeline"},
            **CACHE,
            **SLOW,
            **CHAKRA,
        },
        hints=HINTS,
    )


def simulated_training(program: str, words: Sequence[str]) -> int:
    """Predict the time and the memory of a training step."""
    arguments = _parser(program).parse(words)
    if arguments.report is not None:
        writable(arguments.report, "report")
    flags = flags_of(arguments)
    hardware, devices = hardware_and_devices(arguments)
    try:
        run = training_run(arguments, flags, devices)
        hardware = imperfections_of(arguments).on(_with_stack(arguments, hardware, run), devices)
        if arguments.strategy is None:
            check_rate(hardware, run.dtype)
            check_few_bits(hardware, run.products)
        cache = cache_of(run.model, run.dtype) if arguments.cache else None
        # A page and a Chakra trace come from the program of the whole model.
        is_drawn = arguments.report is not None or arguments.chakra is not None
        with progress("simulating", alone=True):
            found = (figures if is_drawn else figures_of_run)(run, hardware)
    except (ValueError, TypeError) as error:
        raise WrongWords(str(error)) from None
    if arguments.strategy is None:
        tell_all_devices(arguments, devices)
    tell_unchanging(arguments, flags, flags.idle(run.mesh))
    tell_remarks(run.model)
    tokens = tokens_text(arguments.model, flags)
    more = {} if cache is None else {"cache": cache}
    print(
        json.dumps(found.json() | more, indent=1) if arguments.json else told(found, arguments.model, tokens)
    )
    if cache is not None and not arguments.json:
        print("", *wrap(cache_text(cache), WIDTH), sep="\n")
    if is_drawn:
        _write_files(arguments, run, found.trace, hardware)
    return 0


def _write_files(arguments: argparse.Namespace, run: TrainingRun, trace: Trace, hardware: Hardware) -> None:
    """The page of the timeline, and the files for Chakra, where they are asked for."""
    if arguments.report is not None:
        with accessing(arguments.report, option="report"):
            from vcluster.report import html

            html(trace, arguments.report, hardware=hardware)
        if not arguments.json:
            print(f"\nThe page is {arguments.report}")
    if arguments.chakra is not None:
        whole = trace if len(trace.ranks) == run.mesh.size else simulate(run.step, hardware, **run.placed)
        where = keep_for_chakra(whole, arguments.chakra)
        if not arguments.json:
            print(f"\n{where}")


def _with_stack(arguments: argparse.Namespace, hardware: Hardware, run: TrainingRun) -> Hardware:
    """The hardware with the stack that a search of this model has there."""
    name = searched_hardware(arguments.hardware, run.model)
    return hardware if name == arguments.hardware else sized_hardware(name, run.mesh.size)


def training_run(arguments: argparse.Namespace, flags: MegatronFlags, devices: int) -> TrainingRun:
    """The run that the words say: by flags, or by ``--strategy``.  ``ValueError`` where they do not fit together."""
    named = named_model(arguments.model, flags.seq_length)
    if arguments.strategy is None:
        if arguments.mesh is not None:
            raise ValueError("--mesh has a meaning with --strategy only; flags give the sizes of the axes")
        return flags.run(devices, named)
    if arguments.mesh is None:
        strategy, mesh = Strategy.parse_on_mesh(arguments.strategy)
    else:
        strategy = Strategy.parse(arguments.strategy)
        mesh = mesh_of(arguments, ONE_DEVICE, any_axes=True, most=None)
    if mesh.size != devices and arguments.devices is not None:
        raise ValueError(f"--strategy: {mesh!r} has {mesh.size} devices, not {devices}")
    return strategy_run(flags, strategy, mesh, named)


# -- as text -----------------------------------------------------------------------------------------------------------


def told(found: Figures, name: str, tokens: str) -> str:
    """The figures in 80 columns; of a Transformer with how large its vocabulary is, in words."""
    run = found.run
    lines = [*_model(run.model, name, tokens), *_run(run, found.hardware), ""]
    speeds = [
        f"step {seconds(found.seconds)}",
        f"{found.tflops_per_device:.1f} Tflop/s a device",
        f"MFU {found.mfu:.1%}",
        f"HFU {found.hfu:.1%}",
    ]
    if found.tokens_per_second is not None:
        speeds.insert(1, f"{count(found.tokens_per_second)} tokens/s")
    lines += [
        ", ".join(speeds),
        *wrap(mfu_remark(found.hardware.name, run.products, found.mfu), WIDTH),
        "",
        "the step by part, on the device that waits least for others",
        *_parts(found),
        "",
    ]
    lines += ["GB of memory by stage, at the peak of its fullest device", *_memory(found)]
    return "\n".join([*lines, *_misfit(found)])


def _misfit(found: Figures) -> list[str]:
    """That the fullest device has no room, or none for what `plan` reserves; nothing if it has."""
    hardware, needed = found.hardware, gigabytes(found.peak_bytes)
    if found.peak_bytes > hardware.memory_bytes:
        return [
            "",
            f"It does not fit: {needed} GB are needed, {hardware.name} has {gigabytes(hardware.memory_bytes)} GB.",
        ]
    groups = sum(size > 1 for size in found.run.mesh.shape.values())
    usable = hardware.reserve.usable_bytes(hardware.memory_bytes, groups)
    if found.peak_bytes <= usable:
        return []
    told = (
        f"It hardly fits: {needed} GB are needed. plan leaves {gigabytes(usable)} of {gigabytes(hardware.memory_bytes)} GB "
        f"to tensors and would refuse it, with a reserve of {hardware.reserve.text}."
    )
    return ["", *wrap(told, WIDTH)]


def gigabytes(nbytes: float) -> str:
    """Bytes as GB, 10^9 bytes."""
    size = nbytes / 1e9
    if size < 0.995:
        return f"{size:.2g}"
    return f"{size:.1f}" if size < 99.95 else f"{size:.0f}"


def _model(model: Any, name: str, tokens: str) -> list[str]:
    if not isinstance(model, TransformerSpec):
        return [name]
    more = "; ".join(["", *tuning_texts(model)])
    return wrap(
        f"{name}: {count(model.parameters)} parameters; {model.layers} layers, width {model.width}, "
        f"{model.heads} heads, {tokens}{more}",
        WIDTH,
    )


def _run(run: TrainingRun, hardware: Hardware) -> list[str]:
    axes = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    stacked = f"{hardware.name}+{hardware.stack}" if hardware.stack else hardware.name
    text = (
        f"{plural(run.mesh.size, 'device')} of {stacked}: {axes}; {run.batch} sequences, {run.microbatches} "
        f"microbatches of {run.microbatch}; {run.dtype}"
    )
    text += "" if run.products == run.dtype else f", products of blocks in {run.products}"
    text += "" if run.optimizer == ADAM_W else f"; {optimizer_text(run.optimizer)}"
    slow = precision_remark(run.dtype, hardware)
    compared = compared_in(run.products, hardware.validation, experts=run.has_experts)
    cut = ""
    if isinstance(run.model, TransformerSpec) and run.pipeline is not None:
        cut = remark_of(run.model, run.pipeline.begin)
    sent = ""
    if isinstance(run.model, TransformerSpec) and run.model.experts is not None:
        sent = run.model.experts.remark
    words = " ".join(f"strategy: {run.strategy}".split()).replace(",", ", ")  # lists of regions break, too
    return [
        *wrap(text, WIDTH),
        *wrap(slow, WIDTH),
        *wrap(f"compared with {validation_text(compared)}", WIDTH),
        *wrap(cut, WIDTH),
        *wrap(sent, WIDTH),
        *(
            line.replace(", ", ",")
            for line in wrap(
                words, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
            )
        ),
    ]


def _parts(found: Figures) -> list[str]:
    rows = in_columns(
        [
            (f"  {name}", seconds(value), f"{value / found.seconds:.1%}")
            for name, value in found.parts.items()
        ],
        1,
    )
    bars = ("#" * round(36 * value / found.seconds) for value in found.parts.values())
    return [f"{row}  {bar}".rstrip() for row, bar in zip(rows, bars, strict=True)]


def _memory(found: Figures) -> list[str]:
    """A line for each stage; equal ones as one line."""
    rows: list[tuple[str, ...]] = []
    stages: list[list[int]] = []
    for stage, held in enumerate(found.memory):
        cells = (*(gigabytes(held[name]) for name in CATEGORIES), gigabytes(sum(held.values())))
        if rows and rows[-1] == cells:
            stages[-1].append(stage)
        else:
            rows.append(cells)
            stages.append([stage])
    lines: list[tuple[str, ...]] = [("", *CATEGORIES, "all")]
    for alike, cells in zip(stages, rows, strict=True):
        last = f" to {alike[-1]}" if len(alike) > 1 else ""
        lines.append((f"  stage {alike[0]}{last}", *cells))
    return in_columns(lines, 1)
