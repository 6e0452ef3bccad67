"""Search on meshes of three or more axes: solve two-axis versions first, and try only the choices that they use.

Over three axes an op of a Transformer has up to 216 shardings, and to price all changes of layout between them takes
minutes.  A two-axis version merges adjacent axes, and has few.  Each such version is solved.  For each op and value the
choices of these solutions are the candidates among which the integer program then chooses on the whole mesh, so the
result is at least as fast as each of them.  The candidates leave out other choices, which a bound accounts for: each
op takes its least time, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod

from parallelism.auto_sharding.integer_program import Choice
from parallelism.auto_sharding.problem import Candidates, Problem, even_shardings
from parallelism.auto_sharding.repeated_blocks import layout_classes
from parallelism.ir import Function, Value
from parallelism.layouts.propagation import finite_constants
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

Groups = Mapping[str, tuple[str, ...]]
"""For each merged axis the axes of the mesh that it stands for."""
MOST_SHARDINGS = 2000
"""The most shardings of all ops together; of more, over three axes or more, only candidates are priced."""


def is_large(function: Function, mesh: Mesh, blocks: str | None) -> bool:
    """Whether a program has too many choices on a mesh to price them all."""
    if len(split_axes(mesh)) <= 2:
        return False
    constants = finite_constants(function)
    one_of_each = dict(zip(layout_classes(function, blocks).ops, function.ops, strict=True))
    count = 0
    for op in one_of_each.values():
        count += len(even_shardings(op, mesh, constants))
        if count > MOST_SHARDINGS:
            return True
    return False


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device."""
    return tuple(axis for axis, n in mesh.shape.items() if n > 1)


def groupings(mesh: Mesh) -> list[Groups]:
    """All groupings of the axes of a mesh into two; the axes of a group are adjacent, so ranks keep their order."""
    axes = split_axes(mesh)
    found: list[Groups] = []
    for cut in range(1, len(axes)):
        outer, inner = axes[:cut], axes[cut:]
        found.append({"_".join(outer): outer, "_".join(inner): inner})
    return found


def merged(mesh: Mesh, groups: Groups) -> Mesh:
    """The mesh of the merged axes."""
    sizes = {}
    for name, axes in groups.items():
        sizes[name] = prod(mesh.shape[axis] for axis in axes)
    return Mesh(**sizes)


def over_merged(function: Function, groups: Groups) -> Function | None:
    """The program with its layouts over the merged axes; None if a layout splits over a part of a merged axis."""
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

    return replace(
        function,
        inputs=again(function.inputs),
        outputs=again(function.outputs),
        ops=tuple(op.with_values(again(op.inputs), again(op.outputs)) for op in function.ops),
    )


def candidates_near(mesh: Mesh, solved: Sequence[tuple[Groups, Problem, Choice]]) -> Candidates:
    """The choices of solutions over merged axes, as choices on the whole mesh."""
    ops: list[dict[tuple[str | None, ...], None]] = []
    layouts: dict[str, dict[TensorSharding, None]] = {}
    for groups, problem, choice in solved:
        ops = ops or [{} for _ in problem.class_of_op]
        for chosen, number in zip(ops, problem.class_of_op, strict=True):
            sharding = problem.ops[number].shardings[choice.sharding_of[number]]
            # An axis of one device is in no group: it splits no letter.
            letters: dict[str, str | None] = dict.fromkeys(mesh.axes)
            for name, letter in zip(problem.mesh.axes, sharding.letters, strict=True):
                letters.update(dict.fromkeys(groups[name], letter))
            chosen[tuple(letters.values())] = None
        for value, layout in zip(problem.values, choice.layout_of, strict=True):
            for name in value.names:
                layouts.setdefault(name, {})[_apart(value.layouts[layout], groups)] = None
    return Candidates(tuple(map(tuple, ops)), {name: tuple(each) for name, each in layouts.items()})


def _apart(layout: TensorSharding, groups: Groups) -> TensorSharding:
    """A layout over merged axes, as one over the axes of the mesh."""

    def axes(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for name in names for axis in groups[name])

    return TensorSharding(
        *(axes(dim.axes) for dim in layout.dims), partial=axes(layout.partial), op=layout.op
    )


def _together(layout: TensorSharding, groups: Groups) -> TensorSharding | None:
    """The layout over the merged axes; None if it splits over a part of one, or over its axes in different dims."""
    name_of = {axis: name for name, axes in groups.items() for axis in axes}

    def split(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in name_of)

    def over_names(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name_of[axis] for axis in axes))

    dims = [split(dim.axes) for dim in layout.dims]
    partial = split(layout.partial)
    merged_dims = [over_names(axes) for axes in dims]
    merged_partial = over_names(partial)
    used = [*chain(*merged_dims), *merged_partial]
    if len(used) > len(set(used)):
        return None
    together = TensorSharding(*merged_dims, partial=merged_partial, op=layout.op)
    fits = _apart(together, groups) == TensorSharding(*dims, partial=partial, op=layout.op)
    return together if fits else None
