"""What Shardy's ops mean: layouts of values, and the bodies of ``shard_map``, which are programs of one device."""

from __future__ import annotations

from typing import Any

from parallelism.interop.folding import recorded, whole
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.shardings import gspmd_tiles, sdy_layouts, tiled_layout
from parallelism.ir.operators import layout_text
from parallelism.ir.tracing import emit
from parallelism.sharding import TensorSharding


def laid(reader: Reader, x: Any, layout: TensorSharding | None) -> Any:
    """The array in a layout."""
    if layout is None:
        return x
    return emit(reader.builder, "reshard", recorded(whole(x)), layout=layout_text(layout.over(len(x.shape))))


@meaning("sdy.sharding_constraint", "sdy.reshard")
def _constraint(reader: Reader, node: Node, x: list[Any]) -> Any:
    reader.devices(node)
    layout, = sdy_layouts(str(node.attributes["sharding"]))
    return laid(reader, x[0], layout)


@meaning("sdy.all_gather", "sdy.all_slice", "sdy.all_to_all", "sdy.all_reduce", "sdy.collective_permute",
         "sdy.reduce_scatter")
def _sdy_collective(reader: Reader, node: Node, x: list[Any]) -> Any:
    """Collectives of Shardy are changes of layout of whole tensors."""
    layout, = sdy_layouts(str(node.attributes["out_sharding"]))
    return laid(reader, x[0], layout)


@meaning("sdy.propagation_barrier", "sdy.sharding_group")
def _passed_on(reader: Reader, node: Node, x: list[Any]) -> Any:
    return x[:len(node.results)]


@meaning("sdy.named_computation")
def _named_computation(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reader.branch(node.body, x)


@meaning("sdy.manual_computation")
def _manual_computation(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The program of one device begins here and ends with the node; `Cut` keeps it for `partitioned`."""
    mesh = reader.devices(node)[0]
    axes = str(node.attributes.get("manual_axes", ""))
    free = [axis for axis in mesh.axes if f'"{axis}"' not in axes and mesh.shape[axis] > 1]
    if free:
        raise node.unsupported(f"a shard_map that leaves the axis {free[0]!r} to the compiler is not supported: name "
                               "all axes of the mesh")
    sources, targets = (sdy_layouts(str(node.attributes[name])) for name in ("in_shardings", "out_shardings"))
    given = []
    for array, layout in zip(x, sources, strict=True):
        given.append(laid(reader, array, layout or TensorSharding(*[()] * len(array.shape))))
    layouts = [layout or TensorSharding(*[()] * node.type(i).ndim) for i, layout in enumerate(targets)]
    return reader.cut(node, given, layouts)


def gspmd_sharded(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The custom call ``@Sharding``."""
    text = str(node.attributes.get("mhlo.sharding", ""))
    mesh = reader.devices(node)[0]
    tiles = gspmd_tiles(text, node.type().ndim, mesh.size)
    if tiles is None:
        return x
    return laid(reader, x[0], tiled_layout(tiles, mesh))


