"""Programs as commands take them: a file, the sizes of symbols, an optimizer, a strategy, and the mesh."""

import argparse
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism import ir
from parallelism.dtypes import is_floating, is_narrow
from parallelism.execution import Executable, Profile, TrainedPipeline, operation_on
from parallelism.hardware.fields import shown
from parallelism.interop import Partitioned
from parallelism.ir.passes import rows_of_stacks, unstacked
from parallelism.ir.passes.given_arrays import numbers_in
from parallelism.layouts import localize
from parallelism.mesh import Mesh
from parallelism.planning.block_weights import BLOCK
from parallelism.planning.program_blocks import found_blocks
from parallelism.training import TrainingRun
from parallelism.training.training_run import ROWS
from parallelism.transforms import (
    SGD,
    Adam,
    AdamW,
    Step,
    Strategy,
    WholeWeights,
    carried,
    categories,
    first_state,
    frozen,
    train_step,
)
from parallelism.transforms.training import given_weights
from vcluster.cli.command_line import Arguments, WrongWords, accessing, mesh_of, nearest
from vcluster.cli.megatron_words import is_model, named_model
from vcluster.runs.drawn import drawn

MOST_DESCRIBED = 1 << 20
"""Maximal number of devices that are not run."""
MOST_BYTES = 1 << 26
ONE_DEVICE = Mesh(devices=1)
OPTIMIZERS = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
RATE = 1e-3
"""The learning rate of an optimizer that is named without one."""
PLACED: Arguments = {
    "--mesh": {
        "metavar": "AXES",
        "help": "the devices, outermost axis first, as dp=2,tp=2 (default: one device)",
    },
    "--size": {
        "action": "append",
        "default": [],
        "metavar": "B=64",
        "help": "the value of a symbol in the shapes; may be repeated",
    },
    "--strategy": {
        "metavar": "WORDS",
        "help": "split the program over the devices that it names, as 'dp=2 tp=2 sp zero=1'",
    },
    "--optimizer": {
        "metavar": "NAME",
        "help": "make a training step of a loss: sgd, adam or adamw, with a learning rate as "
        "adam:0.001; it trains the inputs named as the first one, p for p.w",
    },
    "--frozen": {
        "metavar": "NAMES",
        "help": "with --optimizer: inputs that are weights and are not trained, or what their names begin with, "
        "as p.table,p.encoder",
    },
    "--gradient": {
        "action": "store_true",
        "help": "take the program with the gradients of its result by its floating-point inputs",
    },
}
"""The words that place a program on devices, or change it before."""


def right(make: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """The result of ``make(*args, **options)``.  Its errors become errors of the command line."""
    try:
        return make(*args, **options)
    except (ValueError, TypeError, IndexError, OSError) as error:
        raise WrongWords(str(error)) from None
    except MemoryError as error:
        raise WrongWords(f"this machine has too little memory for it: {error}") from None


@dataclass(frozen=True)
class Given:
    """What the words of a command say about the program: no symbol is left but, in a pipeline, that of the rows."""

    program: ir.Function | Step | Partitioned
    mesh: Mesh | None
    """None: neither a mesh nor a strategy is given."""
    strategy: Strategy | None = None
    rows: int | None = None
    """The rows of the batch, of a pipeline."""
    weights: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The weights that are in the file, by the names of inputs."""

    @property
    def function(self) -> ir.Function:
        """The whole program, with all sizes."""
        if isinstance(self.program, ir.Function):
            return self.program
        assert isinstance(self.program, Step)
        function: ir.Function = right(
            self.program.function.specialize, **{self.program.pipeline.batch: self.rows}
        )
        return function

    @property
    def trains(self) -> bool:
        """Whether it is a training step."""
        return isinstance(self.program, Step) or (
            isinstance(self.program, ir.Function) and bool(carried(self.program))
        )

    @property
    def on(self) -> dict[str, Any]:
        """The arguments of `simulate` beside operation and hardware."""
        return {"mesh": self.mesh, "batch": self.rows} if isinstance(self.program, Step) else {}

    def operation(self, arguments: argparse.Namespace) -> Executable | TrainedPipeline:
        """What runs it.  A training step writes what is next into the memory of what was, unless --donate differs."""
        mesh = self.mesh or ONE_DEVICE
        if isinstance(self.program, Partitioned):
            for option in ("donate", "profile"):
                if getattr(arguments, option):
                    raise WrongWords(f"--{option} is for programs that are not divided yet; leave it out")
            return self.program
        donate = [name.strip() for name in arguments.donate.split(",") if name.strip()]
        if isinstance(self.program, Step):
            for option in ("donate", "profile"):
                if getattr(arguments, option):
                    raise WrongWords(
                        f"--{option} is for programs that are not cut into a pipeline; leave it out"
                    )
            pipelined: TrainedPipeline = right(operation_on, self.program, mesh)
            return pipelined
        of_step = (
            {"categories": right(categories, self.program), "donate": donate or carried(self.program)}
            if self.trains
            else {"donate": donate}
        )
        seconds = None if arguments.profile is None else right(Profile, arguments.profile)
        localized = right(localize, self.program, mesh)
        executable: Executable = right(Executable, localized, seconds=seconds, **of_step)
        return executable

    def inputs(self, arguments: argparse.Namespace) -> dict[str, NDArray[Any]]:
        """The arrays of a file; without one random ones (`drawn`), and of an optimizer its first state."""
        function = self.function
        if arguments.inputs is not None:
            return {**self.weights, **arrays_in(arguments.inputs, function)}
        names = [value.name for value in right(given_weights, function)] if self.trains else []
        arrays = drawn(function, arguments.seed, names)
        if self.trains:
            arrays |= right(first_state, function, {name: arrays[name] for name in names})
        return arrays | {name: array for name, array in self.weights.items() if name in arrays}


def given(
    arguments: argparse.Namespace,
    *,
    most: int | None = MOST_DESCRIBED,
    symbols: bool = False,
    models: bool = False,
) -> Given:
    """The program of the words of a command, on at most so many devices.  ``symbols`` may be left without a mesh.

    ``models``: it may be the loss of a model by its name, or by its config.json.
    """
    strategy, mesh = _mesh(arguments, most)
    word = f"{arguments.file}"
    numbers = sizes_of(arguments.size)
    dealt = {strategy.pipeline.batch} if strategy and strategy.pipeline else set()
    found = (
        Found(right(_loss_of, word))
        if models and is_model(word)
        else found_in(arguments.file, {name: n for name, n in numbers.items() if name not in dealt})
    )
    program = found.program
    if isinstance(program, Partitioned):
        refuse_words(arguments, program.mesh)
        _check_size(program.mesh, f"{arguments.file}", most)
        return Given(program, program.mesh)
    if mesh is None and strategy is None and found.mesh is not None:
        mesh = found.mesh
        _check_size(mesh, f"{arguments.file}", most)
    program = _trained(arguments, program)
    numbers = {name: n for name, n in numbers.items() if name not in found.sizes}
    if getattr(arguments, "inputs", None) is not None:
        numbers = (
            sizes_in(arguments.inputs, program.function if isinstance(program, Step) else program) | numbers
        )
    pipeline = program.pipeline if isinstance(program, Step) else strategy and strategy.pipeline
    rows = numbers.pop(pipeline.batch, None) if pipeline else None
    if numbers:
        function = program.function if isinstance(program, Step) else program
        function = right(function.specialize, **numbers)
        program = replace(program, function=function) if isinstance(program, Step) else function
    if arguments.gradient:
        function = _function(program, "--gradient")
        by = [value.name for value in function.inputs if is_floating(value.type.dtype)]
        program = right(ir.gradient, function, by, keep_outputs=True)
    if strategy is not None:
        with weights_told_once():
            program = right(strategy, _function(program, "--strategy"))
        tell_whole(strategy, program)
    if mesh is None and isinstance(program, Step) and (rows or not symbols):
        mesh = program.pipeline.of_all
        _check_size(mesh, "the meshes of the stages", most)
    whole = Given(program, mesh, strategy, rows, found.weights)
    _check_complete(whole, arguments.file, symbols=symbols and mesh is None)
    return whole


def _loss_of(word: str) -> ir.Function:
    """The loss of a model, with the symbol `ROWS`.  ``ValueError`` if it has no figures."""
    model = named_model(word)
    if model is None:
        raise ValueError(
            f"{word} has all its figures as flags, which only plan and simulate take; name a model"
        )
    return model.function(ir.symbol(ROWS))


def refuse_words(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """`WrongWords` for words that place or change a program, of one that is placed on ``mesh`` already."""
    for option in ("mesh", "strategy", "optimizer", "frozen", "gradient", "size"):
        if getattr(arguments, option):
            raise WrongWords(
                f"{arguments.file} is the program of one of {mesh.size} devices already, with its "
                f"collectives; leave out --{option}"
            )


def _trained(arguments: argparse.Namespace, program: ir.Function | Step) -> ir.Function | Step:
    """The training step of a loss, if an optimizer is given; else the program as it is."""
    if not arguments.optimizer:
        if arguments.frozen:
            raise WrongWords("--frozen says what a step does not train: it needs --optimizer")
        return program
    if arguments.gradient:
        raise WrongWords("--optimizer has the gradients computed, too; leave out --gradient")
    loss = held(arguments, _with_named_blocks(arguments, _function(program, "--optimizer")))
    step: ir.Function = right(train_step, loss, optimizer_of(arguments.optimizer))
    return step


def _with_named_blocks(arguments: argparse.Namespace, loss: ir.Function) -> ir.Function:
    """The loss as a search plans it: with the blocks that it finds by what repeats, if the strategy names them, as in
    ``pp@block.2=2``, or if they are rows of stacks, which are inputs of their own then."""
    names_blocks = re.search(rf"\b{BLOCK}\.", arguments.strategy or "") is not None
    has_stacks = bool(arguments.strategy) and unstacked(loss) is not loss
    return found_blocks(loss)[0] if (names_blocks and BLOCK not in loss.regions) or has_stacks else loss


def held(arguments: argparse.Namespace, program: ir.Function) -> ir.Function:
    """The loss ``program`` with the weights that ``--frozen`` names marked as not trained."""
    names = [name.strip() for name in (arguments.frozen or "").split(",") if name.strip()]
    frozen_loss: ir.Function = right(frozen, program, names)
    return frozen_loss


def loss_of_rows(program: ir.Function, name: str, sizes: Mapping[str, int]) -> ir.Function:
    """A loss whose one symbol is `ROWS`: its rows have the symbol ``name``, and ``sizes`` has all others.

    ``ValueError`` if it has no such symbol, and for a symbol without a size.
    """
    if name not in program.symbols:
        has = (
            f"its symbols are {', '.join(sorted(program.symbols))}"
            if program.symbols
            else ("it has none, and a fixed number of rows cannot be dealt to replicas and microbatches")
        )
        raise ValueError(f"@{program.name} has no symbol {name} for the rows of its batch: {has}")
    numbers: dict[str, Any] = dict(sizes)
    if name != ROWS:
        (numbers[name],) = ir.symbols(ROWS)
    found = program.specialize(**numbers)
    if missing := sorted(found.symbols - {ROWS}):
        raise ValueError(f"--size must give a value for {', '.join(missing)}, as {missing[0]}=64")
    return found


def trained_run(arguments: argparse.Namespace) -> TrainingRun:
    """The training run of a loss in a file.  `WrongWords` unless there are an optimizer and a strategy."""
    if not arguments.optimizer or arguments.strategy is None:
        raise WrongWords("--json is for a step of training: it needs --optimizer and --strategy")
    strategy, mesh = _mesh(arguments, MOST_DESCRIBED)
    assert strategy is not None and mesh is not None
    sizes = sizes_of(arguments.size)
    name = ROWS if ROWS in sizes else next(iter(sizes), ROWS)
    if strategy.pipeline:
        name = strategy.pipeline.batch
    if (rows := sizes.pop(name, None)) is None:
        raise WrongWords(f"--size must give a value for {name}, as {name}=64")
    program, sizes = program_in(arguments.file, sizes)
    of_rows = right(loss_of_rows, _function(program, "--optimizer"), name, sizes)
    loss = held(arguments, _with_named_blocks(arguments, of_rows))
    inside = strategy.with_pipeline(batch=ROWS)
    run: TrainingRun = right(TrainingRun, loss, rows, inside, mesh, optimizer_of(arguments.optimizer))
    with weights_told_once():
        step = right(lambda: run.step)
    tell_whole(run.strategy, step)
    return run


@contextmanager
def weights_told_once() -> Iterator[None]:
    """Hides the warning `WholeWeights` in this context; `tell_whole` tells of these weights instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholeWeights)
        yield


def tell_whole(strategy: Strategy, program: ir.Function | Step) -> None:
    """Says on stderr, in one line, which weights tensor parallelism leaves whole in the program that it made, and why."""
    if (told := strategy.report(program).told()) is not None:
        print(f"vcluster: {told}", file=sys.stderr)


def _check_complete(found: Given, path: Path, *, symbols: bool) -> None:
    """`WrongWords` if a mesh or the number of a symbol is missing."""
    step = found.program if isinstance(found.program, Step) else None
    function = step.function if step else found.program
    assert isinstance(function, ir.Function)
    layouts = [value.layout for value in function.values if value.layout is not None]
    axes = dict.fromkeys(axis for layout in layouts for axis in (*layout.axes, *layout.partial))
    axes |= {step.pipeline.axis: None} if step else {}
    if axes and found.mesh is None and not symbols:
        raise WrongWords(
            f"{path} is laid out over {', '.join(axes)}: --mesh must give the number of devices along "
            f"each, as --mesh {','.join(f'{axis}=2' for axis in axes)}"
        )
    missing = sorted(function.symbols - ({step.pipeline.batch} if step and found.rows else set()))
    if missing and not symbols:
        raise WrongWords(f"--size must give a value for {', '.join(missing)}, as {missing[0]}=64")


def _mesh(arguments: argparse.Namespace, most: int | None) -> tuple[Strategy | None, Mesh | None]:
    if arguments.strategy is None:
        if arguments.mesh is None:
            return None, None
        mesh = mesh_of(arguments, ONE_DEVICE, any_axes=True, most=None if most == MOST_DESCRIBED else most)
        strategy = None
    else:
        if arguments.mesh is not None:
            raise WrongWords("--strategy gives the sizes of all axes; leave out --mesh")
        try:
            strategy, mesh = Strategy.parse_on_mesh(arguments.strategy)
        except (ValueError, TypeError) as error:
            raise WrongWords(f"--strategy: {error}") from None
    _check_size(mesh, "--mesh" if strategy is None else "--strategy", most)
    return strategy, mesh


def _check_size(mesh: Mesh | None, subject: str, most: int | None) -> None:
    """`WrongWords` for a mesh of more than so many devices."""
    if most is not None and mesh is not None and mesh.size > most:
        raise WrongWords(
            f"{subject}: {mesh!r} has {mesh.size} devices; at most {most} are "
            f"{'supported' if most == MOST_DESCRIBED else 'run here'}"
        )


OURS, STABLEHLO, ONNX = "our text", "StableHLO", "ONNX"
_STABLEHLO = re.compile(rb"(\s|//[^\n]*\n)*(#loc|module\b|\"builtin\.module|func\.func\b)")


def format_of(content: bytes) -> str:
    """The format of a file, by its content."""
    if content[:4] == b"ML\xefR" or _STABLEHLO.match(content):
        return STABLEHLO
    return ONNX if content[:1] == b"\x08" else OURS  # the field of the version, with which a model begins


class Found(NamedTuple):
    """What is in a file."""

    program: ir.Function | Step | Partitioned
    weights: Mapping[str, NDArray[Any]] = {}
    """The weights of a model of ONNX, by the names of inputs."""
    mesh: Mesh | None = None
    """The mesh that a module of StableHLO is for."""
    sizes: Mapping[str, int] = {}
    """The sizes that the program has already: a model of ONNX may need them to be read."""


def program_in(path: Path, sizes: Mapping[str, int]) -> tuple[ir.Function | Step, dict[str, int]]:
    """The program in a file, and the sizes that it does not have yet.

    `WrongWords` if there is none, or if it is that of one of several devices.
    """
    found = found_in(path, sizes)
    if isinstance(found.program, Partitioned):
        raise WrongWords(
            f"{path} is the program of one of {found.program.mesh.size} devices already, with its collectives"
        )
    return found.program, {name: size for name, size in sizes.items() if name not in found.sizes}


def found_in(path: Path, sizes: Mapping[str, int]) -> Found:
    """The program in a file, with what comes with it.  A model of ONNX is read with these sizes of its symbols.

    `WrongWords` if there is none.
    """
    with accessing(path, "read"), path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if told := _no_program(path, content):
        raise WrongWords(f"{path} {told}")
    if (kind := format_of(content)) != OURS:
        from vcluster.cli.convert import found_elsewhere  # which needs what is above, and other libraries

        return found_elsewhere(path, kind, sizes)
    if len(content) > MOST_BYTES:
        raise WrongWords(f"{path} is larger than {MOST_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
        return Found(Step.parse(text) if text.startswith("pp") else ir.parse(text))
    except ir.ParseError as error:
        raise WrongWords(f"{path}:{error.line}:{error.column}: {error.message}") from None
    except UnicodeDecodeError as error:
        raise WrongWords(f"{path} is neither text in UTF-8, nor StableHLO, nor ONNX: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise WrongWords(f"{path}: {error}") from None


_OF_MODELS = "parallelism.interop.from_torch and from_jax make one of a model, docs/interop.md says how"
_WEIGHTS = {
    b"PK\x03\x04": "PyTorch or NumPy",
    b"\x80": "Python's pickle",
    b"GGUF": "llama.cpp",
    b"\x89HDF": "HDF5",
}
"""Formats of weights, by how their files begin."""


def _no_program(path: Path, content: bytes) -> str:
    """What a file is that people take for a program; empty for what may be one."""
    if not content.strip():
        return "is empty"
    if content.startswith(b"version https://git-lfs"):
        return "is what Git LFS leaves in place of a file: `git lfs pull` fetches it"
    if path.suffix == ".py" and not content.lstrip().startswith((b"func", b"pp")):
        return f"is a script of Python, which is not run here: a command reads a program that a script wrote; {_OF_MODELS}"
    if path.suffix == ".safetensors":
        return f"has weights and no program: {_OF_MODELS}"
    by = next((name for start, name in _WEIGHTS.items() if content.startswith(start)), "")
    return f"has the format of {by}, of weights and not of programs: {_OF_MODELS}" if by else ""


def _function(program: ir.Function | Step, option: str) -> ir.Function:
    if isinstance(program, Step):
        raise WrongWords(
            f"{option} is for programs that are not cut into a pipeline; this one begins with "
            f"{str(program.pipeline)!r}"
        )
    return program


def optimizer_of(text: str) -> SGD | Adam:
    """The optimizer in a text such as ``adam`` or ``sgd:0.1``."""
    name, colon, rate = text.partition(":")
    if name not in OPTIMIZERS:
        raise WrongWords(f"--optimizer: there is no {shown(name)}{nearest(name, [*OPTIMIZERS])}")
    try:
        found: SGD | Adam = OPTIMIZERS[name](float(rate) if colon else RATE)
    except ValueError as error:
        told = f"--optimizer needs a name and a rate, as adam:0.001; got {shown(text)}: {str(error)[:200]}"
        raise WrongWords(told) from None
    return found


def sizes_of(texts: Iterable[str]) -> dict[str, int]:
    """Symbols and their numbers, each from ``B=64``."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        name = name.strip()
        if not number.isascii() or not number.isdigit() or len(number) > 18:
            raise WrongWords(f"--size needs a symbol and a number, as B=64; got {shown(text)}")
        if name in sizes:
            raise WrongWords(f"--size gives {name} twice, {sizes[name]} and {int(number)}")
        sizes[name] = int(number)
    return sizes


def sizes_in(path: Path, function: ir.Function) -> dict[str, int]:
    """The numbers of symbols that the shapes of arrays in a file give."""
    sizes: dict[str, int] = right(numbers_in, function, arrays_in(path, function))
    return sizes


def arrays_in(path: Path, function: ir.Function) -> dict[str, NDArray[Any]]:
    """The arrays in a file, by their names: those of stacks as the rows that the function takes."""
    try:
        with accessing(path, "read", "inputs"):
            zipfile.ZipFile(path).close()  # NumPy would take another file for a pickle
            with np.load(path, allow_pickle=False) as arrays:
                found = dict(arrays)
    except WrongWords:
        raise
    except Exception as error:  # a broken archive raises many types, in zipfile and in its decompressors
        raise WrongWords(
            f"--inputs: {path} cannot be read: it is not an .npz file of numpy.savez ({error})"
        ) from None
    types = {value.name: value.type.dtype for value in function.inputs}
    found = rows_of_stacks(types, found)
    for name, array in found.items():
        dtype = types.get(name, array.dtype)
        if array.dtype.kind == "V" and is_narrow(dtype):  # NumPy saves narrow floats as bytes
            found[name] = array.view(dtype)
    return found
