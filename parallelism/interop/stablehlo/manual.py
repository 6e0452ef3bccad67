"""What Shardy's ops mean: layouts of values, and the bodies of ``shard_map``, which are programs of one device."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from parallelism.interop.folding import recorded_op, traced
from parallelism.interop.stablehlo.module import Block, Module, Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.shardings import gspmd_tiles, sdy_layouts, tiled_layout
from parallelism.ir.operators import layout_text
from parallelism.ir.tracing import emit
from parallelism.sharding import TensorSharding


def laid(reader: Reader, x: Any, layout: TensorSharding | None) -> Any:
    """The array in a layout.  In the program of one device there is none to choose."""
    if layout is None or reader.in_cut:
        return x
    return emit(reader.builder, "reshard", traced(x), layout=layout_text(layout.over(len(x.shape))))


@meaning("sdy.sharding_constraint", "sdy.reshard")
def _constraint(reader: Reader, node: Node, x: list[Any]) -> Any:
    reader.devices(node)
    (layout,) = sdy_layouts(str(node.attributes["sharding"]))
    return laid(reader, x[0], layout)


@meaning(
    "sdy.all_gather",
    "sdy.all_slice",
    "sdy.all_to_all",
    "sdy.all_reduce",
    "sdy.collective_permute",
    "sdy.reduce_scatter",
)
def _sdy_collective(reader: Reader, node: Node, x: list[Any]) -> Any:
    """Collectives of Shardy are changes of layout of whole tensors."""
    (layout,) = sdy_layouts(str(node.attributes["out_sharding"]))
    return laid(reader, x[0], layout)


@meaning("sdy.propagation_barrier", "sdy.sharding_group")
def _passed_on(reader: Reader, node: Node, x: list[Any]) -> Any:
    return x[: len(node.results)]


@meaning("sdy.named_computation")
def _named_computation(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reader.applied(node.body, x)


def _along(layout: TensorSharding, axes: Collection[str]) -> TensorSharding:
    """The layout without other axes."""
    kept = []
    for dim in layout.dims:
        kept.append([axis for axis in dim.axes if axis in axes])
    return TensorSharding(*kept)


@meaning("sdy.manual_computation")
def _manual_computation(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The program of one device begins here and ends with the node; `Cut` keeps it for `partitioned`.

    Along axes that are left to the compiler, all devices compute the same.
    """
    named = re.findall(r'"([^"]*)"', str(node.attributes.get("manual_axes", "")))

    def layouts(name: str, ndims: Sequence[int]) -> list[TensorSharding]:
        found = sdy_layouts(str(node.attributes[name]))
        return [
            _along(layout, named) if layout else TensorSharding(*[()] * ndim)
            for layout, ndim in zip(found, ndims, strict=True)
        ]

    sources = layouts("in_shardings", [len(array.shape) for array in x])
    targets = layouts("out_shardings", [node.type(i).ndim for i in range(len(node.results))])
    if reader.in_cut:
        parts = [_own_part(reader, node, array, layout) for array, layout in zip(x, sources, strict=True)]
        return [
            _gathered_parts(reader, node, array, layout)
            for array, layout in zip(reader.applied(node.body, parts), targets, strict=True)
        ]
    return reader.cut(node, [laid(reader, *pair) for pair in zip(x, sources, strict=True)], targets)


def _own_part(reader: Reader, node: Node, x: Any, layout: TensorSharding) -> Any:
    """The part of a device, of an array that is whole along the axes of a shard_map inside another."""
    mesh = reader.devices(node)[0]
    for dim, each in enumerate(layout.dims):
        for axis in each.axes:
            size, array = mesh.shape[axis], traced(x)
            x = recorded_op(
                "all_slice", array, axes=(axis,), group=size, dim=dim, extent=array.shape[dim] // size
            )
    return x


def _gathered_parts(reader: Reader, node: Node, x: Any, layout: TensorSharding) -> Any:
    """The array of which each device has its part: the opposite of `_own_part`."""
    mesh = reader.devices(node)[0]
    for dim, each in enumerate(layout.dims):
        for axis in reversed(each.axes):
            size, array = mesh.shape[axis], traced(x)
            x = recorded_op(
                "all_gather", array, axes=(axis,), group=size, dim=dim, extent=array.shape[dim] * size
            )
    return x


def gspmd_sharded(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The custom call ``@Sharding``."""
    text = str(node.attributes.get("mhlo.sharding", ""))
    mesh = reader.devices(node)[0]
    tiles = gspmd_tiles(text, node.type().ndim, mesh.size)
    if tiles is None:
        return x
    return laid(reader, x[0], tiled_layout(tiles, mesh))


# -- shard_map in the words of GSPMD -----------------------------------------------------------------------------------


ENTER, LEAVE = MANUAL = ("SPMDFullToShardShape", "SPMDShardToFullShape")
"""The custom calls between which a program is that of one device."""


def with_manual_regions(module: Module) -> Module:
    """The module with one node for what lies between the custom calls that begin and end a program of one device."""
    if not any(_target(node) in MANUAL for node in module.nodes()):
        return module
    functions = {
        name: replace(node, regions=((_gathered(node.body),),))
        for name, node in module.functions.items()
        if node.regions and node.regions[0]
    }
    return replace(module, functions={**module.functions, **functions})


def _target(node: Node) -> str:
    return str(node.attributes.get("call_target_name", ""))


def _gathered(block: Block) -> Block:
    """A block in which each program of one device is a node of its own."""
    made_by = {number: node for node in block.nodes for number in node.results}
    nodes: list[Node] = []
    open_one: _Manual | None = None
    for node in block.nodes:
        target = _target(node)
        if open_one is not None and (open_one.left & {*node.operands} or (target == ENTER and open_one.left)):
            nodes.append(open_one.node())
            open_one = None
        if target == ENTER and open_one is None:
            open_one = _Manual(node, made_by)
        if open_one is None or not open_one.takes(node):
            nodes.append(node)
    return replace(block, nodes=tuple(nodes))


class _Manual:
    """A program of one device, as its nodes are found."""

    def __init__(self, first: Node, made_by: dict[int, Node]) -> None:
        self.first, self.made_by = first, made_by
        self.entered: list[Node] = []
        self.nodes: list[Node] = []
        self.ended: list[Node] = []
        self.inside: set[int] = set()
        self.left: set[int] = set()
        """The whole tensors that it returned so far."""

    def takes(self, node: Node) -> bool:
        """Whether a node belongs to it; then it is kept."""
        target = _target(node)
        if target == ENTER:
            if str(node.attributes.get("mhlo.sharding")) != "{manual}":
                raise node.unsupported(
                    "a shard_map that leaves axes to the compiler is only supported in the words of Shardy"
                )
            self.entered.append(node)
            self.inside.update(node.results)
            return True
        if target != LEAVE and not self.inside & {*node.operands}:
            return False
        for number in node.operands:
            self._fetch(number, node)
        if target == LEAVE:
            self.ended.append(node)
            self.left.update(node.results)
        else:
            self.nodes.append(node)
            self.inside.update(node.results)
        return True

    def _fetch(self, number: int, user: Node) -> None:
        """A constant from around it is made inside, too."""
        if number in self.inside:
            return
        node = self.made_by.get(number)
        if node is None or _target(node) in MANUAL:
            raise user.unsupported("a program of one device uses a whole tensor")
        for each in node.operands:
            self._fetch(each, node)
        self.nodes.append(node)
        self.inside.update(node.results)

    def node(self) -> Node:
        """The whole as one node."""
        end = Node(
            "stablehlo.return",
            tuple(each.operands[0] for each in self.ended),
            (),
            (),
            {},
            (),
            self.first.place,
        )
        body = Block(
            tuple(each.results[0] for each in self.entered),
            tuple(each.types[0] for each in self.entered),
            (*self.nodes, end),
        )

        def sharding(node: Node | None) -> str:
            return "" if node is None else str(node.attributes.get("mhlo.sharding", ""))

        given = (self.made_by.get(each.operands[0]) for each in self.entered)
        layouts = {"in": tuple(map(sharding, given)), "out": tuple(map(sharding, self.ended))}
        return Node(
            "gspmd.manual_computation",
            tuple(each.operands[0] for each in self.entered),
            tuple(each.results[0] for each in self.ended),
            tuple(each.types[0] for each in self.ended),
            layouts,
            ((body,),),
            self.first.place,
        )


@meaning("gspmd.manual_computation")
def _gspmd_manual(reader: Reader, node: Node, x: list[Any]) -> Any:
    mesh = reader.devices(node)[0]

    def layout(text: str, ndim: int) -> TensorSharding:
        tiles = gspmd_tiles(text, ndim, mesh.size)
        return TensorSharding(*[()] * ndim) if tiles is None else tiled_layout(tiles, mesh)

    given = [
        laid(reader, array, layout(text, len(array.shape)))
        for array, text in zip(x, node.attributes["in"], strict=True)
    ]
    return reader.cut(
        node, given, [layout(text, node.type(i).ndim) for i, text in enumerate(node.attributes["out"])]
    )
