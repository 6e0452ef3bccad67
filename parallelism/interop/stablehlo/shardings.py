"""Meshes and layouts: those of Shardy (``sdy.mesh``, ``sdy.sharding``), and GSPMD's lists of devices.

GSPMD and partitioned modules name no axes.  Then the ranks are put on a mesh whose axes are found: the fewest axes
along which all groups and all lists of devices lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations, pairwise, permutations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.errors import UnsupportedError
from parallelism.interop.stablehlo.module import Module, Node
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

RankGroups = tuple[tuple[int, ...], ...]


# -- Shardy ------------------------------------------------------------------------------------------------------------


def sdy_mesh(module: Module) -> Mesh | None:
    """The mesh in which the shardings of a module lie, or its first one; None if it names none.

    `UnsupportedError` if they lie in several.
    """
    meshes = {}
    for node in module.others:
        if node.kind == "sdy.mesh" and '"' in str(node.attributes["mesh"]):  # without axes it is one device
            meshes[str(node.attributes["sym_name"])] = node
    used: list[tuple[str, Mesh]] = []
    for name, inside in dict.fromkeys(_mesh_names(module)):
        if name in meshes:
            used.append((f"@{name}", _mesh_of(meshes[name])))
        elif '"' in inside:
            used.append((f"mesh<{inside}>", _mesh_in(inside)))
    for name, mesh in used:
        if mesh.shape != used[0][1].shape or mesh.axes != used[0][1].axes:
            raise UnsupportedError(
                f"its shardings lie in two meshes, {used[0][0]} and {name}; programs have one"
            )
    if used:
        return used[0][1]
    return _mesh_of(next(iter(meshes.values()))) if meshes else None


def _mesh_names(module: Module) -> Iterable[tuple[str, str]]:
    """The names of the meshes in the shardings of a module, and what is inside of those without a name."""
    for node in module.nodes():
        for text in _texts_in(node.attributes):
            if "sdy." in text:
                yield from re.findall(r"<\s*(?:@([\w.$-]+)|mesh<(.*?)>)\s*,", text)


def _texts_in(attribute: Any) -> Iterable[str]:
    """The texts in an attribute, or in a list or dict of them."""
    if isinstance(attribute, str):
        yield attribute
    elif isinstance(attribute, dict | tuple):
        for each in attribute.values() if isinstance(attribute, dict) else attribute:
            yield from _texts_in(each)


def _mesh_of(node: Node) -> Mesh:
    text = str(node.attributes["mesh"])
    mesh = _mesh_in(text)
    if mesh.axes and "device_ids" in text:
        raise node.unsupported("a mesh with device_ids is not supported: ranks are row-major")
    return mesh


def _mesh_in(text: str) -> Mesh:
    """The mesh of ``<["a"=2, "b"=4]>``."""
    axes = re.findall(r'"((?:[^"\\]|\\.)*)"\s*=\s*(\d+)', text.split(", device_ids")[0])
    return Mesh(**{name: int(size) for name, size in axes})


def sdy_layouts(text: str) -> list[TensorSharding | None]:
    """The layouts of ``#sdy.sharding<@mesh, [{"a"}, {}]>``, or of a list of such.  None for one that is left open."""
    return [_sdy_layout(part) for part in re.split(r"<\s*(?:@|mesh<[^>]*>)", text)[1:]]


def _sdy_layout(text: str) -> TensorSharding | None:
    found = re.search(r"\[(.*?)\]", text, re.S)
    if found is None:
        raise UnsupportedError(f"the sharding {text[:80]!r} is not understood")
    dims = re.findall(r"\{([^}]*)\}", found[1])
    names = [tuple(re.findall(r'"((?:[^"\\]|\\.)*)"', dim)) for dim in dims]
    partial = re.search(r"unreduced=\{([^}]*)\}", text)
    pending = tuple(re.findall(r'"([^"]*)"', partial[1])) if partial else ()
    if not dims and not pending:  # of a tensor on one device, which may lie anywhere, or without dims
        return None
    if dims and all("?" in dim for dim in dims) and not any(names) and not pending:
        return None
    return TensorSharding(*names, partial=pending) if pending else TensorSharding(*names)


_SUB_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)":\((\d+)\)(\d+)')
"""``"x":(2)4`` is the part of 4 devices of the axis x behind parts of 2 in all."""


def with_axes_split(module: Module) -> Module:
    """The module with an axis for each part of a mesh axis that shardings name: x of 8 devices becomes x_0 and x_1.

    `UnsupportedError` for parts of an axis that overlap without one being inside of the other.
    """
    nodes = [*module.others, *module.nodes()]
    texts = [text for node in nodes for text in _texts_in(node.attributes) if "#sdy" in text]
    ends: dict[str, set[int]] = {}
    for text in texts:
        for name, before, size in _SUB_AXIS.findall(text):
            ends.setdefault(name, set()).update({int(before), int(before) * int(size)})
    if not ends:
        return module
    sizes = {name: int(size) for text in texts for name, size in re.findall(r'"([^"]*)"\s*=\s*(\d+)', text)}
    parts = {name: _axis_parts(name, sizes.get(name, 0), found, set(sizes)) for name, found in ends.items()}
    for node in nodes:
        for key, value in node.attributes.items():
            node.attributes[key] = _with_texts(value, lambda text: _in_parts(text, parts))
    return module


def _axis_parts(name: str, size: int, ends: Iterable[int], taken: set[str]) -> list[tuple[str, int, int]]:
    """The parts of an axis, the outermost first: a name, the devices of the parts before it, and with its own."""
    cuts = sorted({1, size, *ends})
    steps = [*pairwise(cuts)]
    if cuts[-1] != size or any(before < 1 or after % before for before, after in steps):
        raise UnsupportedError(
            f"the sub-axes of {name!r}, which has {size} devices, do not lie in each other"
        )
    names = [f"{name}_{i}" for i in range(len(steps))]
    while not taken.isdisjoint(names):
        names = [f"{each}_" for each in names]
    return [(each, before, after) for each, (before, after) in zip(names, steps, strict=True)]


def _in_parts(text: str, parts: Mapping[str, list[tuple[str, int, int]]]) -> str:
    """A text of Shardy with the parts of axes in the place of the axes: in meshes, in shardings and in lists of axes."""
    if "#sdy" not in text:
        return text

    def of(found: re.Match[str]) -> str:
        name = found[1]
        size = found[2]
        before = int(found[3] or 1)
        length = int(found[4] or 0)
        if name not in parts:
            return found[0]
        if size is not None:
            return ", ".join(f'"{each}"={after // first}' for each, first, after in parts[name])
        last = before * length if length else parts[name][-1][2]
        return ", ".join(
            f'"{each}"' for each, first, after in parts[name] if before <= first and after <= last
        )

    return re.sub(r'"((?:[^"\\]|\\.)*)"(?:(\s*=\s*\d+)|:\((\d+)\)(\d+))?', of, text)


def _with_texts(attribute: Any, change: Callable[[str], str]) -> Any:
    """An attribute with the texts in it changed."""
    match attribute:
        case str():
            return change(attribute)
        case dict():
            return {key: _with_texts(value, change) for key, value in attribute.items()}
        case tuple():
            return tuple(_with_texts(value, change) for value in attribute)
    return attribute


def list_groups(module: Module) -> Module:
    """The module with the groups of its collectives as lists: a text may name the axes of a mesh in their place."""
    meshes = {node.attributes["sym_name"]: node for node in module.others if node.kind == "sdy.mesh"}
    for node in module.nodes():
        text = node.attributes.get("replica_groups")
        if not isinstance(text, str):
            continue
        name = re.search(r"mesh = @([\w.$-]+)", text)
        if name is None or name[1] not in meshes or "sub_axis" in text:
            raise node.unsupported(f"the groups {text[:120]} are not supported")
        mesh = _mesh_of(meshes[name[1]])
        axes = tuple(re.findall(r'axis_ref<name = "([^"]*)"', text))
        node.attributes["replica_groups"] = np.array(
            mesh.groups(axes) if axes else [[r] for r in range(mesh.size)]
        )
    return module


# -- GSPMD -------------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """A list of devices: the tile that each rank has along each dim of a tensor."""

    counts: tuple[int, ...]
    places: Any
    """An array (ranks, dims)."""


def gspmd_tiles(text: str, ndim: int, size: int) -> Tiles | None:
    """The tiles of ``{devices=[2,1,4]<=[8] last_tile_dim_replicate}``; None for ``{replicated}`` and ``{manual}``.

    A tensor on one device alone, as ``{maximal device=0}``, is read as whole on each.
    """
    if "devices=" not in text:
        return None
    found = re.search(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))", text)
    if found is None:
        raise UnsupportedError(f"the sharding {text} is not understood")
    counts = [int(n) for n in found[1].split(",")]
    if found[4]:
        devices = np.array([int(n) for n in found[4].split(",")])
    else:
        grid = np.arange(prod(int(n) for n in found[2].split(","))).reshape(
            [int(n) for n in found[2].split(",")]
        )
        devices = grid.transpose([int(n) for n in found[3].split(",")]) if found[3] else grid
    if devices.size != size or prod(counts) != size:
        raise UnsupportedError(f"the sharding {text} is for {devices.size} devices, the module for {size}")
    places = np.zeros((size, ndim), int)
    for tile, device in zip(np.ndindex(*counts), devices.reshape(-1), strict=True):
        places[device] = tile[:ndim]
    return Tiles(tuple(counts[:ndim]), places)


def tiled_layout(tiles: Tiles, mesh: Mesh) -> TensorSharding:
    """The layout of a list of devices.  `UnsupportedError` if a dim is not split along axes of the mesh."""
    dims = []
    for dim, count in enumerate(tiles.counts):
        for axes in _ordered(mesh, count):
            index = [mesh.group(rank, axes).index(rank) if axes else 0 for rank in range(mesh.size)]
            if index == tiles.places[:, dim].tolist():
                dims.append(axes)
                break
        else:
            raise UnsupportedError(
                f"the tiles {tiles.places[:, dim].tolist()} of the ranks do not lie along axes"
            )
    return TensorSharding(*dims)


def _ordered(mesh: Mesh, count: int) -> Iterable[tuple[str, ...]]:
    """All orders of axes with so many ranks in all."""
    for number in range(len(mesh.axes) + 1):
        for axes in permutations(mesh.axes, number):
            if prod(mesh.shape[axis] for axis in axes) == count and (count > 1 or not axes):
                yield axes


# -- axes for groups ---------------------------------------------------------------------------------------------------


def found_mesh(groups: Iterable[RankGroups], tiles: Iterable[Tiles], replicas: int, partitions: int) -> Mesh:
    """The mesh of the fewest axes along which these groups and tiles lie, as far as they lie along axes."""
    size = replicas * partitions
    cuts = {size, partitions, *_cuts_of_groups(groups), *_cuts_of_tiles(tiles)}
    bounds = [1]
    for cut in sorted(cut for cut in cuts if 0 < cut <= size):
        if cut % bounds[-1] == 0 and cut != bounds[-1] and size % cut == 0:
            bounds.append(cut)
    extents = [after // before for before, after in pairwise(bounds)][::-1] or [1]
    sides = {"replica": replicas, "partition": partitions}
    names = [name for name, count in sides.items() if count > 1] or ["partition"]
    if len(names) != len(extents):
        names = [f"axis{i}" for i in range(len(extents))]
    return Mesh(**dict(zip(names, extents, strict=True)))


def _cuts_of_groups(groups: Iterable[RankGroups]) -> Iterable[int]:
    """Numbers of neighbouring ranks at which an axis may begin or end: the steps of groups, and where these change."""
    for group in chain.from_iterable(groups):
        steps = np.diff(group).tolist()
        yield from map(abs, steps)
        if len(set(steps)) == 1:
            yield abs(steps[0]) * len(group)
        elif steps:
            yield from _runs(group)


def _cuts_of_tiles(tiles: Iterable[Tiles]) -> Iterable[int]:
    """The same of tiles: how many neighbours have one tile, and all tiles of a dim."""
    for tile in tiles:
        for count, column in zip(tile.counts, tile.places.T, strict=True):
            changes = np.flatnonzero(np.diff(column)) + 1
            if len(changes):
                yield from (int(changes[0]), int(changes[0]) * count)


def _runs(group: Sequence[int]) -> Iterable[int]:
    """Where a group that lies along several axes changes its step: 0 1 4 5 has runs of 2, so a cut at 2."""
    first = group[1] - group[0]
    length = next((i for i in range(1, len(group)) if group[i] - group[i - 1] != first), len(group))
    yield abs(first) * length
    if length < len(group):
        yield abs(group[length] - group[0])
        yield abs(group[length] - group[0]) * (len(group) // length)


def axes_of_groups(groups: RankGroups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of the mesh along which exactly these groups lie, in their order; None if there are none."""
    for number in range(len(mesh.axes) + 1):
        for axes in combinations(mesh.axes, number):
            if sorted(mesh.groups(axes) if axes else tuple((r,) for r in range(mesh.size))) == sorted(groups):
                return axes
    return None
