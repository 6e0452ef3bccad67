"""Programs of other formats in files, told apart by content: StableHLO as text or artifact, ONNX, and our own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallelism.interop import Partitioned, from_onnx, from_stablehlo, mesh_of, to_onnx, to_stablehlo
from parallelism.ir import Function
from vcluster.cli.command_line import Parser, WrongWords, accessing, writable
from vcluster.cli.program_files import ONNX, Found, found_in, right, sizes_of


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
    """Write a program in another format, which the ending of the second file names."""
    arguments = Parser(
        {
            "a": {
                "type": Path,
                "metavar": "A",
                "help": "a program: our text, StableHLO or ONNX, told apart by content",
            },
            "b": {
                "type": Path,
                "metavar": "B",
                "help": "the file to write: .onnx, .stablehlo, or .mlir for our own text",
            },
            "--size": {
                "action": "append",
                "default": [],
                "metavar": "B=64",
                "help": "the value of a symbol in the shapes; may be repeated; .onnx and .stablehlo need all",
            },
        },
        prog=f"{program} convert",
        description="Writes a program in another format.",
    ).parse(words)
    sizes = sizes_of(arguments.size)
    given = found_in(arguments.a, sizes)
    found = given.program
    if not isinstance(found, Function):
        what = "the program of one device already" if isinstance(found, Partitioned) else "a step in stages"
        raise WrongWords(f"{arguments.a} is {what}, which has no other format")
    target: Path = writable(arguments.b)
    found = right(found.specialize, **{name: n for name, n in sizes.items() if name not in given.sizes})
    if found.symbols and target.suffix in (".onnx", ".stablehlo"):
        missing = sorted(found.symbols)
        raise WrongWords(f"--size must give a value for {', '.join(missing)}, as {missing[0]}=64")
    made: Any
    if target.suffix == ".onnx":
        made = _made(to_onnx, found, given.weights).SerializeToString()
    elif target.suffix == ".stablehlo":
        made = _made(to_stablehlo, found).encode()
    elif target.suffix == ".mlir":
        made = str(found).encode()
    else:
        raise WrongWords(f"{target} must end in .onnx, .stablehlo or .mlir")
    with accessing(target):
        target.write_bytes(made)
    print(f"{target}: {len(found.ops)} ops")
    return 0


def _made(make: Any, *found: Any) -> Any:
    try:
        return right(make, *found)
    except ImportError as error:
        raise WrongWords(str(error)) from None
