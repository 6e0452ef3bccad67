"""A mesh of many axes: what is found where neighbouring axes are joined into two says which choices to try.

Over three axes an op of a Transformer has up to 216 shardings, and to price all changes of layout between them takes
minutes.  With the axes joined into two, in each way in which neighbours can be, few are left.  From these solutions
come, for each op and value, the choices among which the integer program then chooses on the whole mesh.  So the result
is at least as fast as each of them.  What is left out is counted by a bound: each op takes its least time, and nothing
moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallelism.auto_sharding.alike import alike
from parallelism.auto_sharding.problem import Problem, Within, ways_of
from parallelism.ir import Function, Value
from parallelism.layouts.propagation import finite_constants
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

Groups = Mapping[str, tuple[str, ...]]
"""For each joined axis the axes of the mesh that it stands for."""
MOST_SHARDINGS = 2000
"""Of all ops together.  With more, over more than two axes, not all choices are priced."""


def is_large(function: Function, mesh: Mesh, blocks: str | None) -> bool:
    """Whether a program has too many choices on a mesh to price them all."""
    if len(split_axes(mesh)) <= 2:
        return False
    constants = finite_constants(function)
    one_of_each = dict(zip(alike(function, blocks).ops, function.ops, strict=True))
    count = 0
    for op in one_of_each.values():
        count += len(ways_of(op, mesh, constants))
        if count > MOST_SHARDINGS:
            return True
    return False


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device."""
    return tuple(axis for axis, n in mesh.shape.items() if n > 1)


def joinings(mesh: Mesh) -> list[Groups]:
    """The ways to join the axes of a mesh into two; each axis joins neighbours, so ranks keep their order."""
    axes = split_axes(mesh)
    return [{"_".join(part): part for part in (axes[:cut], axes[cut:])} for cut in range(1, len(axes))]


def joined(mesh: Mesh, groups: Groups) -> Mesh:
    """The mesh of the joined axes."""
    sizes = {}
    for name, axes in groups.items():
        sizes[name] = 1
        for axis in axes:
            sizes[name] *= mesh.shape[axis]
    return Mesh(**sizes)


def over_joined(function: Function, groups: Groups) -> Function | None:
    """The program with its layouts over the joined axes; None if a layout is over a part of one."""
    if any(op.kind == "reshard" for op in function.ops):
        return None
    values: dict[str, Value] = {}
    for value in function.values:
        layout = None
        if value.layout is not None:
            layout = _together(value.layout, groups)
            if layout is None:
                return None
        values[value.name] = Value(value.name, value.type, layout)

    def again(those: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(values[each.name] for each in those)

    return replace(function, inputs=again(function.inputs), outputs=again(function.outputs),
                   ops=tuple(op.with_values(again(op.inputs), again(op.outputs)) for op in function.ops))


def near(mesh: Mesh, found: Sequence[tuple[Groups, Problem, Sequence[int], Sequence[int]]]) -> Within:
    """The choices of solutions over joined axes: for each the problem, the shardings of its ops, the layouts."""
    ops: list[dict[tuple[str | None, ...], None]] = []
    layouts: dict[str, dict[TensorSharding, None]] = {}
    for groups, problem, ways, lies in found:
        joined_axis = {axis: name for name, axes in groups.items() for axis in axes}
        ops = ops or [{} for _ in problem.class_of_op]
        for chosen, number in zip(ops, problem.class_of_op, strict=True):
            letters = dict(zip(problem.mesh.axes, problem.ops[number].shardings[ways[number]].letters, strict=True))
            chosen[tuple(letters[joined_axis[axis]] if axis in joined_axis else None for axis in mesh.axes)] = None
        for value, at in zip(problem.values, lies, strict=True):
            for name in value.names:
                layouts.setdefault(name, {})[_apart(value.layouts[at], groups)] = None
    return Within(tuple(map(tuple, ops)), {name: tuple(each) for name, each in layouts.items()})


def _apart(layout: TensorSharding, groups: Groups) -> TensorSharding:
    def axes(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for name in names for axis in groups[name])

    return TensorSharding(*(axes(dim.axes) for dim in layout.dims), partial=axes(layout.partial), op=layout.op)


def _together(layout: TensorSharding, groups: Groups) -> TensorSharding | None:
    """The layout over the joined axes, or None."""
    names = {axis: name for name, axes in groups.items() for axis in axes}
    layout = TensorSharding(*(tuple(axis for axis in dim.axes if axis in names) for dim in layout.dims),
                            partial=tuple(axis for axis in layout.partial if axis in names), op=layout.op)
    together = TensorSharding(*(tuple(dict.fromkeys(names[axis] for axis in dim.axes)) for dim in layout.dims),
                              partial=tuple(dict.fromkeys(names[axis] for axis in layout.partial)),
                              op=layout.op) if _is_whole(layout, names) else None
    return together if together is not None and _apart(together, groups) == layout else None


def _is_whole(layout: TensorSharding, names: Mapping[str, str]) -> bool:
    """Whether no joined axis is in two dims, or split and pending."""
    places = [{names[axis] for axis in axes} for axes in (*(dim.axes for dim in layout.dims), layout.partial)]
    return sum(map(len, places)) == len(set().union(*places))
