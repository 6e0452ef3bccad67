"""Extents that a module leaves open, the ``?`` of its types: they are symbols.

What a module computes with them, as ``get_dimension_size`` and sums of it, stays known: an array of extents, as objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.interop.folding import as_extents, known, spread
from parallelism.interop.moving_elements import broadcast_dims, iota, padded, reshaped, sliced
from parallelism.interop.stablehlo.equal_extents import EqualExtents, Place
from parallelism.interop.stablehlo.module import OPEN, Module, Node
from parallelism.interop.stablehlo.reading import MEANINGS, Reader, meaning
from parallelism.interop.stablehlo.shapes import numbers
from parallelism.ir.core import Extent, TensorType, symbol
from parallelism.ir.core.extents import SYMBOL

SIZE, CALL, ASSERTION = "stablehlo.get_dimension_size", "func.call", "shape_assertion"


def named(module: Module, types: list[TensorType], names: list[str]) -> list[TensorType]:
    """The types of the arguments of a module's main function, with symbols for the extents that are open.

    JAX names them (``jax.global_constant``), and asserts which are equal; others are named after the first argument and
    dim that is equal to them (`equal_extents`).
    """
    if not any(OPEN in type.shape for type in types):
        return types
    told, same = _told_by_jax(module), EqualExtents(module)
    arguments = {number: i for i, number in enumerate(module.main.body.arguments)}
    known: dict[Place, Extent] = {}
    for place in [(i, d) for i, type in enumerate(types) for d, n in enumerate(type.shape) if n == OPEN]:
        first = same.first((module.main.body.arguments[place[0]], place[1]))
        if isinstance(first, int):
            known[place] = first
            continue
        told_first = arguments[first[0]], first[1]
        name = told.get(place) or told.get(told_first) or f"{_plain(names[told_first[0]])}_{told_first[1]}"
        known[place] = symbol(name)
    named_types = []
    for i, type in enumerate(types):
        shape = [known.get((i, d), n) for d, n in enumerate(type.shape)]
        named_types.append(TensorType(type.dtype, shape))
    return named_types


def _plain(name: str) -> str:
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return plain if SYMBOL.fullmatch(plain) else f"n{plain}"


def _told_by_jax(module: Module) -> dict[tuple[int, int], str]:
    """The names of open dims, by argument and dim."""
    main = module.main
    place = {number: i for i, number in enumerate(main.body.arguments)}
    sizes = {
        node.results[0]: (place[node.operands[0]], int(node.attributes["dimension"]))
        for node in main.body.nodes
        if node.kind == SIZE and node.operands[0] in place
    }
    names: dict[int, str] = {}
    for node in main.body.nodes:
        called = module.functions.get(str(node.attributes.get("callee", ""))) if node.kind == CALL else None
        if called is not None:
            names |= _constants(called, node)
    same = _asserted_equal(main)
    found = {}
    for number, where in sizes.items():
        name = names.get(number) or next((names[b] for a, b in same if a == number and b in names), "")
        if SYMBOL.fullmatch(name):
            found[where] = name
    return found


def _constants(called: Node, caller: Node) -> dict[int, str]:
    """The operands of a call that are extents with a name."""
    told = called.attributes.get("arg_attrs") or ()
    return {
        operand: str(each["jax.global_constant"])
        for operand, each in zip(caller.operands, told, strict=False)
        if isinstance(each, dict) and "jax.global_constant" in each
    }


def _asserted_equal(main: Node) -> list[tuple[int, int]]:
    asserted = {
        node.operands[0]
        for node in main.body.nodes
        if node.kind == "stablehlo.custom_call" and node.attributes.get("call_target_name") == ASSERTION
    }
    pairs = [
        node.operands
        for node in main.body.nodes
        if node.kind == "stablehlo.compare"
        and node.results[0] in asserted
        and node.word("comparison_direction") == "EQ"
    ]
    return [(a, b) for pair in pairs for a, b in (pair, pair[::-1])]


# -- ops ---------------------------------------------------------------------------------------------------------------


def extents(node: Node, x: Any, what: str = "the shape") -> list[Extent]:
    """An operand that is a list of extents."""
    found = known(x)
    if found is None:
        raise node.unsupported(f"{what} must be known, or follow from extents of arguments")
    return list(as_extents(found.reshape(-1).tolist()))


@meaning(SIZE)
def _size(reader: Reader, node: Node, x: list[Any]) -> Any:
    extent = x[0].shape[node.attributes["dimension"]]
    if isinstance(extent, int):
        return np.asarray(extent, np.int32)
    found = np.empty((), object)
    found[()] = extent
    return found


@meaning("stablehlo.dynamic_broadcast_in_dim")
def _broadcast(reader: Reader, node: Node, x: list[Any]) -> Any:
    shape = extents(node, x[1])
    dims = numbers(node, "broadcast_dimensions")
    return broadcast_dims(x[0], shape, dims) if x[0].ndim else broadcast_dims(x[0], shape, ())


@meaning("stablehlo.dynamic_reshape")
def _reshape(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reshaped(x[0], extents(node, x[1]))


@meaning("stablehlo.dynamic_iota")
def _iota(reader: Reader, node: Node, x: list[Any]) -> Any:
    shape = extents(node, x[0])
    axis = node.attributes["iota_dimension"]
    return spread(iota(shape[axis], node.type().dtype, len(shape), axis), shape)


@meaning("stablehlo.real_dynamic_slice")
def _slice(reader: Reader, node: Node, x: list[Any]) -> Any:
    begins, ends, steps = (extents(node, each, "a place") for each in x[1:])
    return sliced(x[0], begins, ends, [int(n) for n in steps])


@meaning("stablehlo.dynamic_pad")
def _pad(reader: Reader, node: Node, x: list[Any]) -> Any:
    sides = [extents(node, each, "the padding") for each in x[2:]]
    return padded(x[0], x[1], *sides)  # type: ignore[arg-type]


@meaning("stablehlo.dynamic_gather")
def _gather(reader: Reader, node: Node, x: list[Any]) -> Any:
    sizes = tuple(extents(node, x[2], "the sizes"))
    fixed = Node(
        "stablehlo.gather",
        node.operands[:2],
        node.results,
        node.types,
        {**node.attributes, "slice_sizes": sizes},
        node.regions,
        node.place,
    )
    return MEANINGS["stablehlo.gather"](reader, fixed, x[:2])
