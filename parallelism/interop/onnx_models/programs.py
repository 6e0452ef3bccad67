"""Programs from models of ONNX."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.errors import InteropError, UnsupportedError
from parallelism.interop.expert_rows.chosen_rows import check
from parallelism.interop.expert_rows.sorted_rows import with_sorted_rows_dealt
from parallelism.interop.folding import MOST_CONSTANT, traced

# These imports fill the table of meanings.
from parallelism.interop.onnx_models import (  # noqa: F401
    control,
    elementwise,
    experts,
    indexing,
    microsoft,
    microsoft_layers,
    normalizations,
    old_forms,
    products,
    quantized,
    recurrent,
    resizing,
    sampling,
    shapes,
    windows,
)
from parallelism.interop.onnx_models.files import Model
from parallelism.interop.onnx_models.graph import Graph
from parallelism.interop.onnx_models.reading import Reader
from parallelism.ir.core import Builder, Function, TensorType, UnequalExtents, symbol
from parallelism.ir.passes.frozen import frozen
from parallelism.ir.tracing import Traced, recording
from parallelism.spelling import did_you_mean

WEIGHT = "p."
"""The beginning of the names of weights: the transforms take them for the parameters of the model."""
KNOWN = 64
"""Tensors of integers with at most so many elements, and single numbers, are constants; others are weights."""
FIXING = {"Resize": (1, 2), "Upsample": (1,), "NonMaxSuppression": (3, 4)}
"""Inputs of operators that fix a shape though they are no integers: tensors that are given there are constants, too."""


class Imported(NamedTuple):
    """What `from_onnx` returns."""

    program: Function
    """Its inputs are the weights, named ``p.`` and their name, and then the inputs of the model."""
    weights: dict[str, np.ndarray[Any, Any]]
    """By the names of inputs of the program.  Those in files beside the model are mapped into memory."""


def from_onnx(
    path_or_model: str | Path | bytes | Any,
    *,
    known: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Imported:
    """The program of an ONNX model, and its weights.

    ``path_or_model`` is the path of a file, its content, or an ``onnx.ModelProto``.  It is checked by ``onnx``; opsets
    from 7 on are supported.  Operators that ONNX composes of others are read as these.  Dims without a number, and of
    -1, are symbols; those that have to be equal, as of two summands, are one, whose name is the first.  Weights,
    initializers and tensors in Constant nodes, are inputs of the program; small tensors of integers, and single numbers,
    are constants.

    ``known`` gives inputs whose numbers are fixed, by name, as one that is a shape; they are no inputs of the program.
    ``sizes`` gives symbols their numbers, for what needs them.  By the name of the output of a NonZero it
    says how many elements are not zero: no more are told, and if there are fewer, zeros follow them.  By that of a
    NonMaxSuppression it says how many boxes stay: rows of -1 follow them.

    `InteropError` for a broken model; `UnsupportedError`, one of its kinds, for a valid one that programs cannot
    express.  Both name the node.  Nothing outside of the model's folder is opened, and nothing in it is executed.

        program, weights = from_onnx("gpt2.onnx")
        ir.interpret(program, {"input_ids": ids, **weights})
    """
    try:
        return _with_equal_extents(Model(path_or_model, _sizes(sizes or {})), known or {})
    except UnicodeDecodeError as error:
        raise InteropError(f"a string of the model is not UTF-8: {error}") from None


def _with_equal_extents(model: Model, known: Mapping[str, Any]) -> Imported:
    """The program of a model, in which names of dims that an operator wants to be equal are one symbol."""
    while True:
        try:
            return _imported(model, known)
        except UnsupportedError as error:
            unequal = error.__cause__
            if not isinstance(unequal, UnequalExtents) or not _made_equal(model, unequal.extents):
                raise


def _made_equal(model: Model, extents: Sequence[Any]) -> bool:
    """Whether two extents may be equal; they are then in the model, the later name of a dim by the earlier, or a number.

    They may not where they are anything else than two names of dims, or a name and a number.
    """
    order = {symbol(name): number for number, name in enumerate(model.symbols)}
    first, second = sorted(extents, key=lambda extent: order.get(extent, -1))
    if second not in order or not (first in order or (isinstance(first, int) and first > 1)):
        return False
    model.equal = {name: first if extent == second else extent for name, extent in model.equal.items()}
    model.equal[str(second)] = first
    del model.main  # its inputs are made anew
    return True


def _sizes(sizes: Mapping[str, int]) -> Mapping[str, int]:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
            raise ValueError(f"sizes[{name!r}] must be a number from 0 on, got {size!r}")
    return {name: int(size) for name, size in sizes.items()}


def _check_sizes(model: Model, graph: Graph) -> None:
    """``ValueError`` for a size of what is no dim without a number, and no output of a node."""
    outputs = {name for node in graph.nodes for name in node.outputs}
    dims = {re.sub(r"\W", "_", name, flags=re.ASCII) for name in model.sizes.keys() - outputs}
    if unknown := sorted(dims - model.symbols.keys()):
        has = f"its dims without a number are {', '.join(sorted(model.symbols)) or 'none'}"
        near = did_you_mean(unknown[0], model.symbols)
        raise ValueError(f"sizes: the model has no dim {unknown[0]}, {has}{near}")


def imported(
    model: Model,
    weights: Collection[str],
    prefix: str,
    name: str,
    still: Collection[str] = (),
    unknown: Collection[str] = (),
) -> Imported:
    """The program of a model, where the caller says which tensors are ``weights``.

    ``prefix`` is removed from their names.
    Other tensors are constants, or inputs by their own names if they are too large.  Of the weights those that are
    ``still`` are frozen.  Those that are ``unknown`` have a shape and no numbers: they are inputs that nothing is given for.
    """
    tensors = model.main.tensors
    kept = {each: f"{WEIGHT}{each.removeprefix(prefix)}" for each in weights if each in tensors}
    large = {
        each: each.removeprefix(prefix)
        for each, array in tensors.items()
        if each not in kept and (array.size > MOST_CONSTANT or each in unknown)
    }
    program, arrays = _read(model, {}, kept | large, prefix, name, still)
    without = {id(tensors[each]) for each in unknown if each in tensors}
    return Imported(program, {own: array for own, array in arrays.items() if id(array) not in without})


def _imported(model: Model, known: Mapping[str, Any]) -> Imported:
    graph = model.main
    _check_sizes(model, graph)
    fixed = {
        name
        for name, array in graph.tensors.items()
        if array.size <= 1 or (array.dtype.kind in "iub" and array.size <= KNOWN)
    }
    fixing = {
        name for node in graph.nodes for i, name in enumerate(node.inputs) if i in FIXING.get(node.kind, ())
    }
    for node in reversed(graph.nodes):  # scales that were brought into another dtype
        if node.kind == "Cast" and not fixing.isdisjoint(node.outputs):
            fixing.update(node.inputs)
    fixed |= {name for name in fixing & graph.tensors.keys() if graph.tensors[name].size <= KNOWN}
    weights = {name: f"{WEIGHT}{name}" for name in graph.tensors if name not in fixed}
    return _read(model, {name: np.asarray(value) for name, value in known.items()}, weights, "", graph.name)


def _read(
    model: Model,
    known: Mapping[str, Any],
    weights: Mapping[str, str],
    prefix: str,
    called: str,
    still: Collection[str] = (),
) -> Imported:
    """The program.  ``weights`` has the names that tensors have as inputs; the other tensors are constants."""
    graph, builder = model.main, Builder()
    names = _plain_names([*(value.name for value in graph.inputs), *weights.values()])
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    values: dict[str, Any] = {
        name: np.asarray(array) for name, array in graph.tensors.items() if name not in weights
    }
    with recording(builder):
        for name, own in weights.items():
            array = arrays[names[own]] = graph.tensors[name]
            values[name] = Traced(builder, builder.input(names[own], TensorType(array.dtype, array.shape)))
        for value in graph.inputs:
            if value.name in known:
                values[value.name] = known[value.name]
            elif isinstance(value.type, TensorType):
                values[value.name] = Traced(builder, builder.input(names[value.name], value.type))
            else:
                raise UnsupportedError(f"an input that is {value.type} is not supported", "input", value.name)
        reader = Reader(model, builder, prefix)
        results = []
        for name, x in zip(graph.outputs, reader.graph(graph, values, {}), strict=True):
            if x is None or isinstance(x, list) or x.dtype == object:
                raise UnsupportedError(
                    "an output that is an extent with symbols, or a sequence, is not supported",
                    "output",
                    name,
                )
            results.append(traced(x).value)
    plain = re.sub(r"[^A-Za-z0-9_.]+", "_", called).strip("_") or "model"
    program = builder.function(plain, results, prune=True)
    check(program, reader.chosen_rows)
    program = with_sorted_rows_dealt(program)
    input_names = {value.name for value in program.inputs}
    held = [name for each in still if each in weights and (name := names[weights[each]]) in input_names]
    return Imported(frozen(program, held), arrays)


def _plain_names(names: list[str]) -> dict[str, str]:
    """Different names of letters, digits, _ and . for the names of a model.  What is called ``p`` would be a weight."""
    found: dict[str, str] = {}
    taken = {WEIGHT.rstrip(".")}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_") or "x"
        while plain in taken:
            plain += "_"
        if name in found:
            raise InteropError("two tensors have this name", "tensor", name)
        taken.add(plain)
        found[name] = plain
    return found
