"""Where the tensors of a module lie, and its program of each device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.errors import InteropError
from parallelism.interop.partitioned import Partitioned, Parts
from parallelism.interop.stablehlo.collectives import COLLECTIVES, groups_of
from parallelism.interop.stablehlo.module import Module, Node
from parallelism.interop.stablehlo.reading import Cut, Devices
from parallelism.interop.stablehlo.shardings import (
    found_mesh,
    gspmd_tiles,
    sdy_layouts,
    sdy_mesh,
    tiled_layout,
)
from parallelism.ir import Op
from parallelism.ir.core import Builder, Function, Value
from parallelism.layouts import annotate, localize
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "group_collective")


def _count(module: Module, name: str) -> int:
    """A number of devices that a module names, or 1."""
    found = module.attributes.get(name, 1)
    if not isinstance(found, int) or found < 1:
        raise InteropError(f"{name} must be a number from 1 on, got {str(found)[:80]}")
    return found


def devices_of(module: Module, mesh: Mesh | None) -> Devices | None:
    """The devices that a module is for; None if it is for one and names no mesh."""
    replicas, partitions = (_count(module, f"mhlo.num_{name}") for name in ("replicas", "partitions"))
    own = mesh or sdy_mesh(module)
    if own is not None:
        return Devices(own, 1, own.size)
    nodes = list(module.nodes())
    calls = [node for node in nodes if node.kind in COLLECTIVES]
    if replicas * partitions == 1:
        if not calls and not partitioned(module):
            return None
        partitions = max(
            _named(calls),
            *(
                _listed(str(text))
                for text in (
                    *module.attributes.get(_SPLIT, ()),
                    module.attributes.get("mhlo.spmd_output_sharding", ""),
                )
            ),
        )
    groups = [
        groups_of(node, replicas, partitions) for node in calls if node.kind != "stablehlo.collective_permute"
    ]
    tiles = [
        tile
        for text, ndim in _texts(module, nodes)
        if (tile := gspmd_tiles(text, ndim, replicas * partitions)) is not None
    ]
    return Devices(found_mesh(groups, tiles, replicas, partitions), replicas, partitions)


_SPLIT = "mhlo.spmd_parameters_shardings"


def partitioned(module: Module) -> bool:
    """Whether XLA has split the module: it is the program of one device, though it may have no collectives."""
    return _SPLIT in module.attributes


def _listed(text: str) -> int:
    """The number of devices in the lists of a sharding; 1 if there are none."""
    lists = re.findall(r"<=\[([\d,]+)\]", text)
    return max((prod(map(int, each.split(","))) for each in lists), default=1)


def _named(calls: Sequence[Node]) -> int:
    """One more than the largest id in the groups of a module that does not say how many devices it is for."""
    largest = 0
    for node in calls:
        for name in ("replica_groups", "source_target_pairs"):
            ids = node.attributes.get(name)
            if isinstance(ids, np.ndarray) and ids.size:
                largest = max(largest, int(ids.max()))
    return largest + 1


def _texts(module: Module, nodes: Sequence[Node]) -> list[tuple[str, int]]:
    """The lists of devices of arguments, results and custom calls, each with the number of dims."""
    found = [
        (str(node.attributes["mhlo.sharding"]), node.type().ndim)
        for node in nodes
        if node.kind == "stablehlo.custom_call" and "mhlo.sharding" in node.attributes
    ]
    main = module.main
    for attributes, types in (
        (main.attributes.get("arg_attrs", ()), main.body.types),
        (main.attributes.get("res_attrs", ()), _result_types(main)),
    ):
        found += [
            (str(each["mhlo.sharding"]), type.ndim)
            for each, type in zip(attributes, types, strict=False)
            if "mhlo.sharding" in each and hasattr(type, "ndim")
        ]
    return found


def _result_types(main: Node) -> list[Any]:
    """Something with the number of dims of each result."""
    return [
        _Dims(text.count("x"))
        for text in re.findall(
            r"tensor<([^>]*)>", str(main.attributes.get("function_type", "")).split("->")[-1]
        )
    ]


class _Dims(int):
    @property
    def ndim(self) -> int:
        return int(self)


def argument_layouts(main: Node, placed: Devices | None) -> list[TensorSharding | None]:
    """The layout of each argument, as far as it is stated."""
    attributes = main.attributes.get("arg_attrs") or [{}] * len(main.body.types)
    return [
        _stated(each, getattr(type, "ndim", 0), placed)
        for each, type in zip(attributes, main.body.types, strict=True)
    ]


def result_layouts(main: Node, placed: Devices | None) -> list[TensorSharding | None]:
    """The layout of each result, as far as it is stated."""
    types = _result_types(main)
    attributes = main.attributes.get("res_attrs") or [{}] * len(types)
    return [_stated(each, type.ndim, placed) for each, type in zip(attributes, types, strict=True)]


def _stated(attributes: dict[str, Any], ndim: int, placed: Devices | None) -> TensorSharding | None:
    if placed is None:
        return None
    if "sdy.sharding" in attributes:
        return sdy_layouts(str(attributes["sdy.sharding"]))[0]
    if "mhlo.sharding" in attributes:
        tiles = gspmd_tiles(str(attributes["mhlo.sharding"]), ndim, placed.mesh.size)
        return TensorSharding(*[()] * ndim) if tiles is None else tiled_layout(tiles, placed.mesh)
    return None


def with_layouts_of_inputs(function: Function) -> Function:
    """The function, in which an input that is only laid out before its use has this layout itself."""
    count = Counter(value for op in function.ops for value in op.inputs) + Counter(function.outputs)
    new: dict[Value, Value] = {}
    for op in function.ops:
        value = op.inputs[0] if op.kind == "reshard" else None
        if value in function.inputs and value is not None and value.layout is None and count[value] == 1:
            laid = replace(value, layout=TensorSharding.parse(op["layout"]))
            new |= {value: laid, op.outputs[0]: laid}

    def renewed(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple([new.get(value, value) for value in values])

    ops = [
        replace(op, inputs=renewed(op.inputs))
        for op in function.ops
        if not op.outputs or op.outputs[0] not in new
    ]
    inputs, outputs = renewed(function.inputs), renewed(function.outputs)
    return replace(function, inputs=inputs, ops=tuple(ops), outputs=outputs)


# -- programs of each device -------------------------------------------------------------------------------------------


def of_one_device(function: Function, placed: Devices) -> Partitioned:
    """A module that is the program of one device: each device has its own arrays."""
    plain = annotate(function, {value.name: None for value in function.values if value.layout is not None})
    names = tuple(value.name for value in plain.inputs)
    returned = tuple(f"out.{i}" for i in range(len(plain.outputs)))
    parts = Parts(plain.name, placed.mesh, plain.inputs, ((plain, names, returned),), returned, None, None)
    return Partitioned(parts)


def joined(
    name: str, builder: Builder, cuts: Sequence[Cut], outputs: Sequence[Value], placed: Devices | None
) -> Partitioned:
    """The programs of whole tensors, each localized on its own, and between them the bodies of ``shard_map``.

    A value that one part makes has in the next ones the layout that it has there.
    """
    assert placed is not None
    whole_inputs = [value for value in builder.inputs if not value.name.startswith("cut.")]
    layouts: dict[str, TensorSharding | None] = {value.name: value.layout for value in builder.inputs}
    for cut in cuts:  # an argument that goes into a shard_map first lies as it is needed there
        for op in builder.ops[: cut.ops]:
            if op.kind == "reshard" and op.inputs[0].name in layouts and layouts[op.inputs[0].name] is None:
                layouts[op.inputs[0].name] = TensorSharding.parse(op["layout"])
    parts: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = []
    begin = 0
    for number, end in enumerate([*(cut.ops for cut in cuts), len(builder.ops)]):
        ops, later = builder.ops[begin:end], {*outputs}
        later.update(value for op in builder.ops[end:] for value in op.inputs)
        later.update(x.value for cut in cuts[number:] for x in cut.operands)
        function = _between(f"{name}.{number}", ops, later)
        if function.ops and function.outputs:
            local = localize(
                annotate(function, {v.name: layouts.get(v.name) for v in function.inputs}), placed.mesh
            )
            for value, layout in zip(function.inputs, local.inputs, strict=True):
                layouts[value.name] = layouts.get(value.name) or layout
            layouts.update(zip(_names(function.outputs), local.outputs, strict=True))
            parts.append((local, _names(function.inputs), _names(function.outputs)))
        if number < len(cuts):
            cut = cuts[number]
            parts.append(
                (cut.body, _names(x.value for x in cut.operands), _names(x.value for x in cut.results))
            )
        begin = end

    def layout_of(value: Value) -> TensorSharding:
        return layouts.get(value.name) or TensorSharding.replicated(value.type.ndim)

    return Partitioned(
        Parts(
            name,
            placed.mesh,
            tuple(whole_inputs),
            tuple(parts),
            _names(outputs),
            tuple(map(layout_of, whole_inputs)),
            tuple(map(layout_of, outputs)),
        )
    )


def _between(name: str, ops: Sequence[Op], later: Collection[Value]) -> Function:
    """Ops between two cuts as a function: it returns the values that are used ``later``."""
    made = {value for op in ops for value in op.outputs}
    used = dict.fromkeys(value for op in ops for value in op.inputs if value not in made)
    returned = [value for op in ops for value in op.outputs if value in later]
    return Function(name, tuple(used), tuple(ops), tuple(returned))


def _names(values: Iterable[Value]) -> tuple[str, ...]:
    return tuple(value.name for value in values)
