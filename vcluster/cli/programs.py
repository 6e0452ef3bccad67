"""Commands on programs in files: `show` prints them, `simulate` predicts their time, `run` executes them here."""

import argparse
import json
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.display import WIDTH, progress
from parallelism.display.quantities import plural
from parallelism.dtypes import is_floating
from parallelism.execution import Executable, TrainedPipeline, operation_on
from parallelism.hardware import Hardware
from parallelism.interop import Partitioned
from parallelism.layouts import Conflict, borders, localize, propagate
from parallelism.mesh import Mesh
from parallelism.pipelining import MESSAGES
from parallelism.simulation import equal_devices, simulate
from parallelism.trace import Trace, UndeclaredComputeWarning
from parallelism.training import figures
from parallelism.transforms import Step, TensorParallel
from parallelism.transforms.parts import NEXT
from vcluster.cli.command_line import (
    MOST_DEVICES,
    Arguments,
    Parser,
    WrongWords,
    hardware_of,
    whole,
    writable,
)
from vcluster.cli.megatron_words import is_model
from vcluster.cli.partitioned import (
    USUAL_HARDWARE,
    collectives_told,
    inputs_of,
    results_told,
    told as program_told,
)
from vcluster.cli.program_files import ONE_DEVICE, PLACED, Given, arrays_in, given, right, trained_run
from vcluster.cli.training import simulated_training
from vcluster.cli.written_files import CHAKRA, keep
from vcluster.mpi import BACKENDS, usual_backend
from vcluster.report import compare
from vcluster.runs import VirtualCluster
from vcluster.runs.judged import Judgement, judged

FOLDED_FROM = 65
"""Number of devices from which equal devices are folded by default."""

LAYOUTS = """
a file is written in Python, where layouts name axes of the mesh; docs/ir.md and
docs/layouts.md describe the rest:

    program = annotate(ir.record(function, *types), {"x": "[dp, None]"})
    Path("model.mlir").write_text(str(program))

in the file, a layout follows the type of its value:

    func @f(%x: tensor<8x16xf32> [dp, None], %w: tensor<16x4xf32> [None, tp])
        -> (tensor<8x4xf32>) {
      %0 = "matmul"(%x, %w)
        : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
      return %0
    }

the layouts of all other values follow from these; `show --mesh` prints the
program of one device, with its collectives

a strategy lays out a whole program, and gives the mesh its axes; see
docs/strategies.md. Its words may stand in any order:

    dp=4 tp=8 cp=2 ep=2     rows, weights, sequences, experts over devices
    dp:outer=2              over an axis that has another name
    tp@block.*,head=8       only in regions that match
    sp                      activations between products, over the axis tp
    zero=1                  the optimizer's state over dp; 2: gradients, too;
                            3: parameters, too
    precision=bf16          narrow weights, whose main copies stay as they are
    recompute=block.*       these regions run again in the backward
    local=block.*           these regions learn from losses of their own
    overlap                 devices compute while collectives go on
    fused                   chains of elementwise ops run as one kernel
    pp=2 1f1b:8             two stages, eight microbatches by a schedule; the
                            rows are a symbol, and --size B=64 their number
"""


def show(program: str, words: Sequence[str]) -> int:
    """Print a program, or the program of one device of a mesh."""
    arguments = _parsed(
        words,
        program,
        "show",
        "Checks and prints a program; with --mesh, lays it out and prints one device's.",
        (
            "model.mlir",
            "model.mlir --mesh dp=2,tp=2 --rank 3",
            "step.mlir --strategy 'dp=2 tp=2 sp'",
            "Qwen/Qwen2.5-7B",
            "config.json",
        ),
        {
            "--rank": {"type": whole(0), "default": 0, "metavar": "N", "help": "the device (default: 0)"},
            "--hardware": {
                "metavar": "NAME",
                "help": "what its collectives are priced on: a preset, a file, or host "
                f"(default of a partitioned module: {USUAL_HARDWARE})",
            },
        },
    )
    found = given(arguments, symbols=True, models=True)
    if found.mesh is None and not isinstance(found.program, Partitioned):
        _refuse_idle(
            arguments, ("rank", "hardware"), "is about one device of a mesh; --mesh or --strategy gives one"
        )
        print(found.program, end="")
        function = found.program.function if isinstance(found.program, Step) else found.program
        print(f"\n{len(function.ops)} ops, {function.flops} flops, {ir.peak_bytes(function)} bytes at most")
        return 0
    assert found.mesh is not None
    if arguments.rank >= found.mesh.size:
        raise WrongWords(f"--rank: {found.mesh!r} has ranks 0 to {found.mesh.size - 1}, got {arguments.rank}")
    if found.strategy is not None:
        say(f"{found.strategy.text_on(found.mesh)} on {found.mesh!r}")
        print()
    scoped = (
        [each for each in found.strategy.transforms if isinstance(each, TensorParallel)]
        if found.strategy
        else []
    )
    patterns = [pattern for each in scoped for pattern in each.regions or ()]
    if isinstance(found.program, Step):
        _show_stages(found, found.program, found.mesh, arguments.rank, patterns)
    elif isinstance(found.program, Partitioned):
        print(program_told(found.program, arguments.rank, arguments.hardware))
    else:
        _show_device(found.program, found.mesh, arguments.rank, patterns, arguments.hardware)
    return 0


def _show_device(
    function: ir.Function, mesh: Mesh, rank: int, patterns: Sequence[str], hardware: Hardware | None
) -> None:
    """Print a program laid out on a mesh, that of a rank, the conflicts of layouts, and what is moved at borders."""
    conflicts: list[Conflict] = []
    localized = right(lambda: localize(propagate(function, mesh, conflicts), mesh))
    local = right(localized.program, rank)
    priced = "" if hardware is None else collectives_told(right(Executable, localized), rank, hardware)
    print(localized.function, f"the program of rank {rank} of {mesh!r}:\n", local, sep="\n")
    kinds = len(localized.classes)
    say(
        f"{len(local.ops)} ops, {local.flops} flops, {ir.peak_bytes(local)} bytes at most, "
        f"{sum(localized.received(rank))} bytes received; {kinds} kind{'s' * (kinds > 1)} of device"
    )
    for conflict in conflicts:
        print(f"\n{conflict}")
    if function.regions:
        print(f"\n{borders(localized, patterns)}")
    if priced:
        print(f"\n{priced}")


def _show_stages(found: Given, step: Step, mesh: Mesh, rank: int, patterns: Sequence[str]) -> None:
    """Print what a rank of a pipeline does: its actions, and the programs of its stages for the first microbatch."""
    pipelined: TrainedPipeline = right(operation_on, step, mesh)
    position, replica = right(pipelined.places, mesh)[rank]
    rows = found.rows
    assert rows is not None
    part = right(pipelined.parts, rows, 1 + max(number for _, number in pipelined.places(mesh)))[replica][0]
    stages = pipelined.stages_on(position)
    say(
        f"rank {rank} of {mesh!r}: stage {' and '.join(map(str, stages))} of {len(pipelined.stages)}, replica "
        f"{replica}, microbatches of {part[1]} rows"
    )
    say(f"actions: {' '.join(map(str, pipelined.pipeline.schedule.actions[position]))}")
    kinds = dict.fromkeys(work.kind for work in pipelined.pipeline.schedule.works[position])
    for number in stages:
        programs = pipelined.programs(number, {}, rows, mesh, rank)
        for kind in kinds:
            if kind not in MESSAGES:
                function = right(programs.program, kind, part).function
                print(f"\n{kind} of stage {number}:\n\n{function}")
                if programs.inside is not None:
                    whole = localize(programs.function(kind, part), programs.inside)
                    print(borders(whole, patterns))
    print(f"\nthe update:\n\n{right(pipelined.updates.function, rank, position)}")


def _simulate_words(program: str, words: Sequence[str]) -> argparse.Namespace:
    return _parsed(
        words,
        program,
        "simulate",
        "Predicts the time of a program on described hardware, op by op; runs nothing.\n"
        "For a step of training of a model by its name: simulate llama3-8b --help",
        (
            "model.mlir --mesh dp=2,tp=2 --hardware dgx-h100",
            "model.mlir --mesh dp=16 --hardware dgx-h100:2",
            "loss.mlir --optimizer adam --size B=64 \\\n      --strategy 'pp=2 1f1b:8 dp=2 zero=1' --hardware dgx-h100",
        ),
        {
            **_priced(required=True),
            **CHAKRA,
            "--fold": {
                "action": argparse.BooleanOptionalAction,
                "help": "simulate one representative of each class of equal devices "
                f"(default: from {FOLDED_FROM} devices on, where it is possible)",
            },
            "--json": {
                "action": "store_true",
                "help": "print the figures of a step of training as JSON; with --optimizer and --strategy",
            },
        },
    )


def simulated(program: str, words: Sequence[str]) -> int:
    """Predict the time of a program on described hardware, or of a step of training."""
    if words and is_model(words[0]):
        return simulated_training(program, words)
    arguments = _simulate_words(program, words)
    if arguments.json:
        _refuse_idle(
            arguments,
            ("report", "save", "chakra", "profile", "donate", "fold", "priced_dtype", "gradient"),
            "has no effect on the figures of a training step; leave it out with --json",
        )
        print(json.dumps(right(figures, trained_run(arguments), arguments.hardware).json(), indent=1))
        return 0
    found = given(arguments)
    operation = found.operation(arguments)
    mesh = found.mesh or ONE_DEVICE
    if arguments.fold and arguments.chakra:
        raise WrongWords("--chakra writes a file for each device; leave out --fold")
    fold = mesh.size >= FOLDED_FROM and not arguments.chakra if arguments.fold is None else arguments.fold
    on = {"hardware": arguments.hardware, "priced_dtype": arguments.priced_dtype, **found.on}
    predict = partial(simulate, operation, **on)
    with progress("simulating", alone=True):
        try:
            trace = right(predict, fold=fold)
        except WrongWords:
            if arguments.fold or not fold:
                raise
            fold = False  # folding was not requested, and is refused where links are shared
            trace = right(predict)
    print(trace.summary())
    if fold:
        sizes = equal_devices(operation, **on).sizes.tolist()
        counts = [f"{rank} ({count})" for rank, count in zip(trace.ranks, sizes, strict=True)]
        print()
        say(
            f"representatives, with the number of equal devices of each: {', '.join(counts[:8])}"
            f"{', ...' if len(sizes) > 8 else ''}; totals count the representatives only"
        )
    _memory(trace, arguments.hardware)
    keep(arguments, {"simulated": trace})
    return 0


def run(program: str, words: Sequence[str]) -> int:
    """Run a program on devices of this machine and compare it with one process. Returns 1 if the results differ."""
    if words and is_model(words[0]) and not Path(words[0]).exists():
        raise WrongWords(
            f"run takes a program in a file, and {words[0]} is the name of a model; `plan` and `simulate` take it, "
            "and `plan --verify` runs its best plan scaled down"
        )
    arguments = _parsed(
        words,
        program,
        "run",
        "Runs a program on devices here; compares it with one process and the simulation.",
        (
            "model.mlir --mesh dp=2,tp=2",
            "model.mlir --mesh tp=4 --hardware host --report p.html",
            "loss.mlir --optimizer adam --strategy 'dp=2 zero=3'",
        ),
        {
            **_priced(required=False),
            "--inputs": {"type": Path, "metavar": "FILE.npz", "help": "arrays by the names of the inputs"},
            "--seed": {
                "type": whole(0),
                "default": 0,
                "metavar": "N",
                "help": "seed of the random arrays if no inputs are given (default: 0)",
            },
            "--backend": {
                "choices": BACKENDS,
                "default": usual_backend(),
                "help": "backend of the cluster (default: process)",
            },
        },
    )
    if arguments.hardware is None:
        _refuse_idle(arguments, ("priced_dtype",), "is about prices, which are those of a --hardware")
    if arguments.inputs is not None:
        _refuse_idle(arguments, ("seed",), "is of random arrays; leave it out with --inputs")
    found = given(arguments, most=MOST_DEVICES)
    operation = found.operation(arguments)
    mesh = found.mesh or ONE_DEVICE
    price = {"hardware": arguments.hardware, "priced_dtype": arguments.priced_dtype}
    on = {} if arguments.hardware is None else {**price, "compute": "modelled"}
    if isinstance(operation, Partitioned):
        return _run_partitioned(operation, arguments, price, on)
    function, inputs = found.function, right(found.inputs, arguments)
    with np.errstate(all="ignore"):
        expected = right(ir.interpret, function, inputs).outputs
    with right(VirtualCluster, mesh, backend=arguments.backend, **on) as cluster:
        done = right(cluster.run, operation, inputs)
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            trace = done.trace
    found_apart = judged(function, inputs, done.result, expected)
    results = [value for value in function.outputs if not found.trains or not value.name.startswith(NEXT)]
    for value, array in zip(results, done.result, strict=False):
        print(f"{value} = {np.array2string(array, threshold=8, edgeitems=2, precision=6)}")
    if found.trains:
        print(f"and {len(function.outputs) - len(results)} arrays for the next step")
    print()
    _tell(found_apart, mesh, given=arguments.inputs is not None)
    _told_and_kept(arguments, trace, lambda: simulate(operation, **price, **found.on))
    return int(not found_apart.right)


def _tell(found: Judgement, mesh: Mesh, *, given: bool) -> None:
    """Print how far the results are apart, and which are no numbers."""
    left_out = (
        f", {plural(found.rounding, 'array')} aside that rounding alone decides" if found.rounding else ""
    )
    say(
        f"the results on {mesh!r} and in one process differ by {found.apart:.2g} of the largest number{left_out}"
    )
    _tell_nan(found.nan, given=given)


def _tell_nan(names: Sequence[str], *, given: bool) -> None:
    if names:
        where = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        hint = "" if given else "; the inputs are random, --inputs gives others"
        say(f"NaN in {where}: nothing is compared there, so this counts as a failure{hint}")


def _run_partitioned(
    operation: Partitioned, arguments: argparse.Namespace, price: dict[str, Any], on: dict[str, Any]
) -> int:
    """Run the program of each device, for which there is no program of one process."""
    arrays = None if arguments.inputs is None else arrays_in(arguments.inputs, operation.programs.function)
    inputs = right(inputs_of, operation, arrays, arguments.seed)
    with right(VirtualCluster, operation.mesh, backend=arguments.backend, **on) as cluster:
        done = right(cluster.run, operation, inputs)
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            trace = done.trace
    print(*results_told(operation, done.result), sep="\n")
    flat = done.result if operation.takes_whole else [array for outputs in done.result for array in outputs]
    nan = [
        f"result {place}"
        for place, array in enumerate(flat)
        if is_floating(array.dtype) and np.isnan(array).any()
    ]
    _tell_nan(nan, given=arguments.inputs is not None)
    _told_and_kept(arguments, trace, lambda: simulate(operation, **price))
    return int(bool(nan))


def _told_and_kept(arguments: argparse.Namespace, trace: Trace, simulated: Callable[[], Trace]) -> None:
    """Print the summary of a run, compare it with the simulation if a hardware is given, and write the files."""
    print()
    print(trace.summary())
    traces = {"run": trace}
    if arguments.hardware is not None:
        traces = {"simulated": simulated(), **traces}
        print(f"\nthe run compared with the simulation: {compare(*traces.values())}")
    keep(arguments, traces)


def _refuse_idle(arguments: argparse.Namespace, options: Sequence[str], why: str) -> None:
    """`WrongWords` for options that were given and would be ignored."""
    for option in options:
        if getattr(arguments, option) not in (None, False, "", 0):
            raise WrongWords(f"--{option.replace('_', '-')} {why}")


def say(sentence: str) -> None:
    """Print a sentence in lines of 80 columns."""
    print(textwrap.fill(sentence, WIDTH, break_long_words=False, break_on_hyphens=False))


# -- the arguments -----------------------------------------------------------------------------------------------------


def _parsed(
    words: Sequence[str],
    program: str,
    command: str,
    description: str,
    examples: Sequence[str],
    own: Arguments,
) -> argparse.Namespace:
    """The arguments of all three commands, and those of this one's ``own``. The files can be written."""
    calls = [f"  {program} {command} {example}" for example in examples]
    arguments = Parser(
        {
            "file": {
                "type": Path,
                "metavar": "MODEL.mlir",
                "help": "a program: text as `print(function)` writes it, StableHLO or ONNX, told apart by content; show "
                "takes the name of a model and its config.json, too",
            },
            **PLACED,
            **own,
        },
        prog=f"{program} {command}",
        description="\n".join([description, "", "examples:", *calls]),
        epilog=LAYOUTS,
    ).parse(words)
    for option in ("report", "save", "profile"):
        if (path := getattr(arguments, option, None)) is not None:
            writable(path, option)
    if "hardware" in arguments:
        arguments.hardware = hardware_of(arguments.hardware)
    return arguments


def _priced(*, required: bool) -> Arguments:
    return {
        "--hardware": {
            "required": required,
            "metavar": "NAME",
            "help": "a preset (see `hardware`), a file, or host",
        },
        "--priced-dtype": {"metavar": "DTYPE", "help": "price all floats as this dtype, as bfloat16"},
        "--profile": {
            "type": Path,
            "metavar": "FILE.json",
            "help": "use the times of ops on this machine, measured once and stored in this file",
        },
        "--donate": {
            "default": "",
            "metavar": "NAMES",
            "help": "inputs whose memory results take, as p,mean: names, or beginnings of names before a dot",
        },
        "--report": {"type": Path, "metavar": "FILE.html", "help": "write a page"},
        "--save": {
            "type": Path,
            "metavar": "FILE.json",
            "help": "write the trace, for `report` and `compare`",
        },
    }


def _memory(trace: Trace, hardware: Hardware) -> None:
    peaks = trace.peaks()
    rank = max(peaks, key=peaks.__getitem__, default=0)
    names = sorted({event.name for event in trace.filter(kind="memory", rank=rank)})
    parts = ", ".join(f"{name} {trace.peak_bytes(rank, name)}" for name in names)
    print()
    say(
        f"peak memory: {peaks.get(rank, 0)} bytes on rank {rank} (peaks of its parts: {parts or 'none'}); "
        f"{hardware.name} has {hardware.memory_bytes:.0f}"
    )
