"""Programs from modules of StableHLO, and from functions of JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from parallelism.interop.complex_numbers import Pair
from parallelism.interop.errors import InteropError
from parallelism.interop.expert_rows.sorted_rows import with_sorted_rows_dealt
from parallelism.interop.folding import traced
from parallelism.interop.partitioned import Partitioned, uses_rank

# These imports fill the table of meanings.
from parallelism.interop.stablehlo import (  # noqa: F401
    bindings,
    collectives,
    control,
    elementwise,
    indexing,
    linear_algebra,
    reductions,
    shapes,
    special,
    windows,
)
from parallelism.interop.stablehlo.manual import laid, with_manual_regions
from parallelism.interop.stablehlo.module import OPEN, Module, Node, OtherType
from parallelism.interop.stablehlo.open_extents import named
from parallelism.interop.stablehlo.placing import (
    CALLS,
    argument_layouts,
    devices_of,
    joined,
    of_one_device,
    partitioned,
    result_layouts,
    with_layouts_of_inputs,
)
from parallelism.interop.stablehlo.reading import MOST_OPS, Reader
from parallelism.ir.core import Builder, Function, TensorType
from parallelism.ir.passes import with_tables_once
from parallelism.ir.tracing import Traced, recording
from parallelism.mesh import Mesh

MOST_BYTES = 256 * 2**20
LONGEST_PATH = 4096
Program: TypeAlias = Function | Any
"""A `Function`, or for a module with the program of one device a `Partitioned`.  Only the content of a module says which,
so a type checker takes it for either: whoever plans a loss need not ask first."""


def from_stablehlo(
    text_or_path: str | bytes | Path,
    *,
    mesh: Mesh | None = None,
    names: Sequence[str] | None = None,
    most_ops: int = MOST_OPS,
) -> Program:
    """The program of a StableHLO module: its text, its portable artifact, or the path of a file with either.

    The module is parsed and verified by the MLIR bindings of ``jaxlib``.  Calls are inlined, and loops with a fixed
    number of turns unrolled, up to ``most_ops`` ops in all.  ``names`` are the names of the inputs; None: those in the
    locations of arguments, as `to_stablehlo` and JAX with ``debug_info=True`` write them, or else ``arg0`` and so on.

    ``sdy.sharding`` and ``mhlo.sharding`` become layouts on the ``mesh``, or on that of the module (`mesh_of`).  A
    module with collectives, or with the ``shard_map`` of JAX, has the program of one device: it becomes a
    `Partitioned`, which runs as it is.

    `InteropError` for a module that is broken, and `UnsupportedError`, one of its kinds, for a valid one that programs
    cannot express.  Both name the op and its place.
    """
    return program_of(
        bindings.read_module(content_of(text_or_path)), mesh=mesh, names=names, most_ops=most_ops
    )


def from_jax(
    function: Callable[..., Any], *types: Any, mesh: Mesh | None = None, most_ops: int = MOST_OPS
) -> Program:
    """The program of a function of JAX, for arguments like ``types``.

    Each of ``types`` is an array, a ``jax.ShapeDtypeStruct``, a `TensorType`, or a pytree of them.  Extents of a
    `TensorType` may be symbols, as of the batch: then JAX exports the function with symbolic shapes.  Inputs are named
    after parameters and the keys of their pytrees: ``params.w1``.  Every leaf is an input, used or not.  The outputs
    are the leaves of what the function returns.

    On a ``mesh``, the function may name its axes, in ``jax.lax.with_sharding_constraint`` for example.

    The errors are those of `from_stablehlo`, which reads what JAX lowers the function to.
    """
    low = bindings.lowered(function, types, mesh)
    module = bindings.read_module(low.text, trusted=True)
    return program_of(module, mesh=mesh, arguments=low.arguments, kept=low.kept, most_ops=most_ops)


def content_of(text_or_path: str | bytes | Path) -> str | bytes:
    """The content of a file; a text of several lines, with a brace, or too long for a path, is content."""
    if isinstance(text_or_path, bytes):
        return text_or_path
    if isinstance(text_or_path, str) and (
        "\n" in text_or_path or "{" in text_or_path or len(text_or_path) > LONGEST_PATH
    ):
        return text_or_path
    if isinstance(text_or_path, str) and not text_or_path.strip():
        raise InteropError("a module of StableHLO must be a text or the path of a file, got an empty text")
    path = Path(text_or_path)
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InteropError(f"{path} is larger than {MOST_BYTES} bytes")
    return content


def program_of(
    module: Module,
    *,
    mesh: Mesh | None = None,
    names: Sequence[str] | None = None,
    arguments: Sequence[tuple[str, TensorType]] | None = None,
    kept: Sequence[int] | None = None,
    most_ops: int = MOST_OPS,
) -> Function | Partitioned:
    """The program of a module.

    ``arguments`` are the names and types of all inputs, and ``kept`` the numbers of those that the module takes.
    """
    main, builder = module.main, Builder()
    types = [argument_type(main, number) for number in range(len(main.body.types))]
    if arguments is None or kept is None:
        given = (
            names
            if names is not None and len(names) == len(types)
            else [name or f"arg{i}" for i, name in enumerate(main.body.names)]
        )
        types = named(module, types, list(given))
        arguments, kept = [*zip(given, types, strict=True)], range(len(types))
    placed = devices_of(module, mesh)
    stated = None if partitioned(module) else placed  # layouts of arguments are those of whole tensors
    layouts = argument_layouts(main, stated)
    with recording(builder):
        names = plain_names([name for name, _ in arguments])
        layout_of = dict(zip(kept, layouts, strict=True))
        inputs = [
            builder.input(name, type, layout_of.get(i))
            for i, (name, (_, type)) in enumerate(zip(names, arguments, strict=True))
        ]
        reader = Reader(with_manual_regions(module), builder, most_ops, placed)
        results = reader.function(reader.module.main, [Traced(builder, inputs[number]) for number in kept])
        targets = result_layouts(main, stated)
        if len(targets) != len(results) or any(isinstance(x, Pair) for x in results):
            raise main.unsupported("a result is no tensor of numbers")
        results = [laid(reader, x, layout) for x, layout in zip(results, targets, strict=True)]
        outputs = [traced(x).value for x in results]
    name = title(module.name)
    if reader.cuts:
        return joined(name, builder, reader.cuts, outputs, placed)
    function = with_sorted_rows_dealt(with_tables_once(builder.function(name, outputs, prune=True)))
    if OPEN.symbols & function.symbols:
        raise main.unsupported(
            "the extent of a result is left open, and does not follow from those of arguments"
        )
    if partitioned(module) or any(op.kind in CALLS for op in function.ops) or uses_rank(function):
        assert placed is not None
        return of_one_device(function, placed)
    return with_layouts_of_inputs(function)


def argument_type(main: Node, number: int) -> TensorType:
    """The type of an argument of a function, which must be a tensor."""
    type = main.body.types[number]
    if isinstance(type, OtherType):
        raise main.unsupported(f"argument {number} has the type {type.text}, which programs do not have")
    return type


def title(name: str) -> str:
    """A name for a function, of letters, digits, _ and . only."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "_", re.sub(r"^jit_", "", name)).strip("_")
    return plain or "program"


def mesh_of(text_or_path: str | bytes | Path) -> Mesh | None:
    """The mesh that a module of StableHLO is for; None if it is for one device."""
    placed = devices_of(bindings.read_module(content_of(text_or_path)), None)
    return None if placed is None else placed.mesh


def plain_names(given: Sequence[str]) -> list[str]:
    """Names for values, of letters, digits, _ and . only, each one different from the others."""
    names: list[str] = []
    for name in given:
        plain = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_") or "x"
        while plain in names:
            plain += "_"
        names.append(plain)
    return names
