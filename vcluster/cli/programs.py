"""Commands on programs in files: `show` prints them, `simulate` predicts their time, `run` executes them here."""

import argparse
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism import ir
from parallelism.dtypes import is_floating, is_narrow, limits_of
from parallelism.execution import Executable, Profile
from parallelism.hardware import Hardware
from parallelism.layouts import Conflict, localize, propagate
from parallelism.mesh import Mesh
from parallelism.simulation import equal_devices, simulate
from parallelism.trace import Trace, UndeclaredComputeWarning
from vcluster.cli.megatron_words import is_model
from vcluster.cli.training import simulated_training
from vcluster.demo import MOST_DEVICES, Parser, WrongWords, hardware_of, mesh_of
from vcluster.demo.command_line import Arguments, accessing, whole, writable
from vcluster.report import beside, compare, html
from vcluster.runs import VirtualCluster

TOLERANCE = 1e-10
FOLDED_FROM = 65
"""Number of devices from which equal devices are folded by default."""
MOST_DESCRIBED = 1 << 20
"""Maximal number of devices for `show` and `simulate`."""
MOST_BYTES = 1 << 26
ONE_DEVICE = Mesh(devices=1)

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
"""


def show(program: str, words: Sequence[str]) -> int:
    """Print a program, or the program of one device of a mesh."""
    arguments = _parsed(
        words, program, "show", "Checks and prints a program; with --mesh, lays it out and prints one device's.",
        ("model.mlir", "model.mlir --mesh dp=2,tp=2 --rank 3"),
        {"--rank": {"type": whole(0), "default": 0, "metavar": "N", "help": "the device (default: 0)"}})
    function = _function(arguments, symbols=arguments.mesh is None)
    if arguments.mesh is None:
        print(function, end="")
        print(f"\n{len(function.ops)} ops, {function.flops} flops, {ir.peak_bytes(function)} bytes at most")
        return 0
    mesh = _described(arguments)
    if arguments.rank >= mesh.size:
        raise WrongWords(f"--rank: {mesh!r} has ranks 0 to {mesh.size - 1}, got {arguments.rank}")
    conflicts: list[Conflict] = []
    localized = _right(lambda: localize(propagate(function, mesh, conflicts), mesh))
    local = _right(localized.program, arguments.rank)
    print(localized.function, f"the program of rank {arguments.rank} of {mesh!r}:\n", local, sep="\n")
    kinds = len(localized.classes)
    print(f"{len(local.ops)} ops, {local.flops} flops, {ir.peak_bytes(local)} bytes at most, "
          f"{sum(localized.received(arguments.rank))} bytes received; {kinds} kind{'s' * (kinds > 1)} of device")
    for conflict in conflicts:
        print(f"\n{conflict}")
    return 0


def simulated(program: str, words: Sequence[str]) -> int:
    """Predict the time of a program on described hardware, or of a step of training."""
    if words and is_model(words[0]):
        return simulated_training(program, words)
    arguments = _parsed(
        words, program, "simulate",
        "Predicts the time of a program on described hardware, op by op, without running it.",
        ("model.mlir --mesh dp=2,tp=2 --hardware dgx-h100", "model.mlir --mesh dp=16 --hardware dgx-h100:2"),
        {**_priced(required=True),
         "--fold": {"action": argparse.BooleanOptionalAction,
                    "help": "simulate one representative of each class of equal devices "
                            f"(default: from {FOLDED_FROM} devices on, where it is possible)"}})
    executable = _executable(arguments, None)
    fold = executable.mesh.size >= FOLDED_FROM if arguments.fold is None else arguments.fold
    predict = partial(simulate, executable, arguments.hardware, priced_dtype=arguments.priced_dtype)
    try:
        trace = _right(predict, fold=fold)
    except WrongWords:
        if arguments.fold or not fold:
            raise
        fold = False    # folding was not requested, and is refused where links are shared
        trace = _right(predict)
    print(trace.summary())
    if fold:
        sizes = equal_devices(executable, arguments.hardware, priced_dtype=arguments.priced_dtype).sizes.tolist()
        counts = [f"{rank} ({count})" for rank, count in zip(trace.ranks, sizes, strict=True)]
        print(f"\nrepresentatives, with the number of equal devices of each: {', '.join(counts[:8])}"
              f"{', ...' if len(sizes) > 8 else ''}; totals count the representatives only")
    _memory(trace, executable, arguments.hardware)
    _keep(arguments, {"simulated": trace})
    return 0


def run(program: str, words: Sequence[str]) -> int:
    """Run a program on devices of this machine and compare it with one process. Returns 1 if the results differ."""
    arguments = _parsed(
        words, program, "run",
        "Runs a program on devices here and compares it with one process and with the simulation.",
        ("model.mlir --mesh dp=2,tp=2", "model.mlir --mesh tp=4 --hardware dgx-h100 --report page.html"),
        {**_priced(required=False),
         "--inputs": {"type": Path, "metavar": "FILE.npz", "help": "arrays by the names of the inputs"},
         "--seed": {"type": whole(0), "default": 0, "metavar": "N",
                    "help": "seed of random floats if no inputs are given; integers are 0 (default: 0)"},
         "--backend": {"choices": ("process", "thread"), "default": "process",
                       "help": "backend of the cluster (default: process)"}})
    executable = _executable(arguments, MOST_DEVICES)
    function = executable.programs.function
    inputs = _right(_inputs, arguments, function)
    price = {"hardware": arguments.hardware, "priced_dtype": arguments.priced_dtype}
    on = {} if arguments.hardware is None else {**price, "compute": "modelled"}
    with np.errstate(all="ignore"):
        expected = _right(ir.interpret, function, inputs).outputs
    with _right(VirtualCluster, executable.mesh, backend=arguments.backend, **on) as cluster:
        done = cluster.run(executable, inputs)
        with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
            trace = done.trace
    apart = max((_apart(a, b) for a, b in zip(done.result, expected, strict=True)), default=0.0)
    for value, array in zip(function.outputs, done.result, strict=True):
        print(f"{value} = {np.array2string(array, threshold=8, edgeitems=2, precision=6)}")
    print(f"\nthe results on {executable.mesh!r} and in one process differ by {apart:.2g} of the largest number\n")
    print(trace.summary())
    traces = {"run": trace}
    if arguments.hardware is not None:
        traces = {"simulated": simulate(executable, **price), **traces}
        print(f"\nthe run compared with the simulation: {compare(*traces.values())}")
    _keep(arguments, traces)
    return int(apart > _tolerance(function))


# -- the arguments -----------------------------------------------------------------------------------------------------


def _parsed(
    words: Sequence[str], program: str, command: str, description: str, examples: Sequence[str], own: Arguments
) -> argparse.Namespace:
    """The arguments of all three commands, and those of this one's ``own``. The files can be written."""
    epilog = "\n".join([f"{LAYOUTS}\nexamples:\n", *(f"  {program} {command} {example}" for example in examples), ""])
    arguments = Parser({
        "file": {"type": Path, "metavar": "MODEL.mlir", "help": "a program as text, as `print(function)` writes it"},
        "--mesh": {"metavar": "AXES",
                   "help": "the devices, outermost axis first, as dp=2,tp=2 (default: one device)"},
        "--size": {"action": "append", "default": [], "metavar": "B=64",
                   "help": "the value of a symbol in the shapes; may be repeated"},
        "--gradient": {"action": "store_true",
                       "help": "take the program with the gradients of its result by its floating-point inputs"},
        **own,
    }, prog=f"{program} {command}", description=description, epilog=epilog).parse(words)
    for option in ("report", "save", "profile"):
        if (path := getattr(arguments, option, None)) is not None:
            writable(path, option)
    if "hardware" in arguments:
        arguments.hardware = hardware_of(arguments.hardware)
    return arguments


def _priced(*, required: bool) -> Arguments:
    return {
        "--hardware": {"required": required, "metavar": "NAME", "help": "a preset (see `hardware`), a file, or host"},
        "--priced-dtype": {"metavar": "DTYPE", "help": "price all floats as this dtype, as bfloat16"},
        "--profile": {"type": Path, "metavar": "FILE.json",
                      "help": "use the times of ops on this machine, measured once and stored in this file"},
        "--donate": {"default": "", "metavar": "NAMES",
                     "help": "inputs whose memory results take, as p,mean: names, or beginnings of names before a dot"},
        "--report": {"type": Path, "metavar": "FILE.html", "help": "write a page"},
        "--save": {"type": Path, "metavar": "FILE.json", "help": "write the trace, for `report` and `compare`"},
    }


def _right(make: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """The result of ``make(*args, **options)``. Its errors become errors of the command line."""
    try:
        return make(*args, **options)
    except (ValueError, TypeError, IndexError, OSError) as error:
        raise WrongWords(str(error)) from None
    except MemoryError as error:
        raise WrongWords(f"this machine has too little memory for it: {error}") from None


def _function(arguments: argparse.Namespace, *, symbols: bool = False) -> ir.Function:
    path: Path = arguments.file
    with accessing(path, "read"), path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise WrongWords(f"{path} is larger than {MOST_BYTES} bytes")
    try:
        function: ir.Function = ir.parse(content.decode("utf-8-sig"))
    except ir.ParseError as error:
        raise WrongWords(f"{path}:{error.line}:{error.column}: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise WrongWords(f"{path}: {error}") from None
    if arguments.size:
        function = _right(function.specialize, **dict(map(_size, arguments.size)))
    layouts = [value.layout for value in function.values if value.layout is not None]
    axes = dict.fromkeys(axis for layout in layouts for axis in (*layout.axes, *layout.partial))
    if axes and arguments.mesh is None and not symbols:
        raise WrongWords(f"{path} is laid out over {', '.join(axes)}: --mesh must give the number of devices along "
                         f"each, as --mesh {','.join(f'{axis}=2' for axis in axes)}")
    if function.symbols and not symbols:
        names = sorted(function.symbols)
        raise WrongWords(f"--size must give a value for {', '.join(names)}, as {names[0]}=64")
    if arguments.gradient:
        by = [value.name for value in function.inputs if is_floating(value.type.dtype)]
        function = _right(ir.gradient, function, by, keep_outputs=True)
    return function


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not number.isascii() or not number.isdigit() or len(number) > 18:
        raise WrongWords(f"--size needs a symbol and a number, as B=64; got {text!r}")
    return name.strip(), int(number)


def _described(arguments: argparse.Namespace) -> Mesh:
    """The mesh of devices that are not run."""
    mesh = mesh_of(arguments, ONE_DEVICE, any_axes=True, most=None)
    if mesh.size > MOST_DESCRIBED:
        raise WrongWords(f"--mesh: {mesh!r} has {mesh.size} devices; at most {MOST_DESCRIBED} are supported")
    return mesh


def _executable(arguments: argparse.Namespace, most: int | None) -> Executable:
    mesh = _described(arguments) if most is None else mesh_of(arguments, ONE_DEVICE, any_axes=True, most=most)
    function = _function(arguments)
    seconds = None if arguments.profile is None else _right(Profile, arguments.profile)
    donate = [name.strip() for name in arguments.donate.split(",") if name.strip()]
    executable: Executable = _right(Executable, _right(localize, function, mesh), seconds=seconds, donate=donate)
    return executable


def _inputs(arguments: argparse.Namespace, function: ir.Function) -> dict[str, NDArray[Any]]:
    if arguments.inputs is None:
        rng = np.random.default_rng(arguments.seed)
        return {
            value.name: np.asarray(
                rng.normal(size=value.type.shape) if is_floating(value.type.dtype) else np.zeros(value.type.shape),
                value.type.dtype)
            for value in function.inputs
        }
    try:
        with accessing(arguments.inputs, "read", "inputs"):
            zipfile.ZipFile(arguments.inputs).close()   # NumPy would take another file for a pickle
            with np.load(arguments.inputs, allow_pickle=False) as arrays:
                found = dict(arrays)
    except WrongWords:
        raise
    except Exception as error:      # a broken archive raises many types, in zipfile and in its decompressors
        raise WrongWords(f"--inputs: {arguments.inputs} cannot be read: it is not an .npz file of numpy.savez "
                         f"({error})") from None
    types = {value.name: value.type.dtype for value in function.inputs}
    return {        # NumPy saves narrow floats as bytes
        name: array.view(types[name]) if array.dtype.kind == "V" and is_narrow(types.get(name, array.dtype)) else array
        for name, array in found.items()}


def _apart(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest difference divided by the largest number. Infinite if NaNs or infinities differ."""
    if a.size == 0 or np.array_equal(a, b, equal_nan=is_floating(a.dtype)):
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return inf
    x, y = x[finite], y[finite]
    return float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-300))


def _tolerance(function: ir.Function) -> float:
    """How far the results may be apart: more for smaller floats, whose sums depend on their order."""
    dtypes = {value.type.dtype for value in function.values if is_floating(value.type.dtype)}
    if all(dtype.itemsize >= 8 for dtype in dtypes):
        return TOLERANCE
    return max(1e-2, *(8 * float(limits_of(dtype).eps) for dtype in dtypes))


def _memory(trace: Trace, executable: Executable, hardware: Hardware) -> None:
    peaks = trace.peaks()
    rank = max(peaks, key=peaks.__getitem__, default=0)
    names = sorted({event.name for event in trace.filter(kind="memory", rank=rank)})
    parts = ", ".join(f"{name} {trace.peak_bytes(rank, name)}" for name in names)
    print(f"\npeak memory: {peaks.get(rank, 0)} bytes on rank {rank} (peaks of its parts: {parts or 'none'}); "
          f"{hardware.name} has {hardware.memory_bytes:.0f}")


def _keep(arguments: argparse.Namespace, traces: dict[str, Trace]) -> None:
    """Write the page of one trace or of two side by side, and save the last trace."""
    trace = list(traces.values())[-1]
    try:
        if arguments.report is not None:
            if len(traces) == 2:
                beside(traces, arguments.report, hardware=arguments.hardware)
            else:
                html(trace, arguments.report, hardware=arguments.hardware)
            print(f"\nThe page is {arguments.report}")
        if arguments.save is not None:
            trace.save(arguments.save)
            print(f"\nThe trace is {arguments.save}")
    except OSError as error:
        raise WrongWords(f"{error.filename} cannot be written: {error.strerror or error}") from None
