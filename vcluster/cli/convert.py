"""Programs of other formats in files, told apart by content: StableHLO as text or artifact, ONNX, and our own text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallelism.execution import operation_on
from parallelism.interop import (
    Partitioned,
    from_onnx,
    from_stablehlo,
    mesh_of,
    stages_to_stablehlo,
    to_onnx,
    to_stablehlo,
)
from parallelism.ir import Function
from parallelism.transforms import Step
from vcluster.cli.command_line import Parser, WrongWords, accessing, writable
from vcluster.cli.program_files import ONNX, PLACED, Found, Given, found_in, given, right, sizes_of


def found_elsewhere(path: Path, kind: str, sizes: Mapping[str, int]) -> Found:
    """The program of a file in another format, with the mesh that it is for and its weights."""
    try:
        if kind == ONNX:
            program, weights = right(from_onnx, path, sizes=sizes)
            return Found(program, weights, sizes=sizes)
        program = right(from_stablehlo, path)
        return Found(program, mesh=program.mesh if isinstance(program, Partitioned) else right(mesh_of, path))
    except ImportError as error:
        raise WrongWords(str(error)) from None
    except WrongWords as error:
        raise WrongWords(f"{path}: {error}") from None


def convert(program: str, words: Sequence[str]) -> int:
    """Write a program in another format, which the ending of the second file names; a pipeline into a folder."""
    arguments = Parser(
        {
            "file": {
                "type": Path,
                "metavar": "A",
                "help": "a program: our text, StableHLO or ONNX, told apart by content",
            },
            "target": {
                "type": Path,
                "metavar": "B",
                "help": "the file to write: .onnx, .stablehlo, or .mlir for our own text; for a step that is cut into "
                "a pipeline a folder, for a module of each class of stages and pipeline.json",
            },
            **PLACED,
            "--size": {
                **PLACED["--size"],
                "help": "the value of a symbol in the shapes; may be repeated; .onnx and .stablehlo need all",
            },
        },
        prog=f"{program} convert",
        description="Writes a program in another format.",
    ).parse(words)
    placed = any(getattr(arguments, option) for option in ("mesh", "strategy", "optimizer", "gradient"))
    found = _placed(arguments) if placed else _as_it_is(arguments)
    if isinstance(found.program, Step):
        return _write_stages(arguments.target, found)
    _write(arguments.target, found)
    return 0


def _as_it_is(arguments: argparse.Namespace) -> Given:
    """The program in the file; our text may have symbols, and a step in stages is placed on its mesh."""
    sizes = sizes_of(arguments.size)
    found = found_in(arguments.file, sizes)
    if isinstance(found.program, Step):
        return _placed(arguments)
    if isinstance(found.program, Partitioned):
        raise WrongWords(f"{arguments.file} is the program of one device already, which has no other format")
    left = {name: n for name, n in sizes.items() if name not in found.sizes}
    return Given(right(found.program.specialize, **left), None, weights=found.weights)


def _placed(arguments: argparse.Namespace) -> Given:
    """The program under its strategy, on its mesh."""
    found = given(arguments)
    if isinstance(found.program, Partitioned):
        raise WrongWords(f"{arguments.file} is the program of one device already, which has no other format")
    return found


def _write(target: Path, source: Given) -> None:
    """Write a program that is no pipeline."""
    target, found = writable(target), source.program
    assert isinstance(found, Function)
    if found.symbols and target.suffix in (".onnx", ".stablehlo"):
        missing = sorted(found.symbols)
        raise WrongWords(f"--size must give a value for {', '.join(missing)}, as {missing[0]}=64")
    made: Any
    if target.suffix == ".onnx":
        made = _made(to_onnx, found, source.weights).SerializeToString()
    elif target.suffix == ".stablehlo":
        made = _made(to_stablehlo, found, source.mesh).encode()
    elif target.suffix == ".mlir":
        made = str(found).encode()
    else:
        raise WrongWords(f"{target} must end in .onnx, .stablehlo or .mlir")
    with accessing(target):
        target.write_bytes(made)
    print(f"{target}: {len(found.ops)} ops")


def _write_stages(target: Path, source: Given) -> int:
    """Write the modules of a pipeline into a folder."""
    if target.suffix:
        raise WrongWords(f"{target}: a pipeline is several modules; name a folder to write them into")
    if source.mesh is None or source.rows is None:
        raise WrongWords("a pipeline needs its devices and the rows of its batch, as --mesh pp=4 --size B=64")
    modules = _made(stages_to_stablehlo, right(operation_on, source.program, source.mesh), source.rows)
    with accessing(target):
        modules.save(target)
    stages = [stage["module"] for stage in modules.manifest["stages"]]
    others = [name for name in modules.texts if name not in stages]
    print(f"{target}: {len({*stages})} modules of {len(stages)} stages ({' '.join(stages)})")
    if others:
        print(f"and {', '.join(others)}; pipeline.json says what runs where")
    return 0


def _made(make: Any, *found: Any) -> Any:
    try:
        return right(make, *found)
    except ImportError as error:
        raise WrongWords(str(error)) from None
