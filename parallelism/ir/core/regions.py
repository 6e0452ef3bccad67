"""Regions are named parts of a function.  They can be extracted as functions and replaced.

A region is a path of names, such as ``block.0.attention``.  Its ops also belong to ``block.0`` and to ``block``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING

from parallelism.spelling import did_you_mean

if TYPE_CHECKING:
    from parallelism.ir.core.function import Function, Op, Value

_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def check_path(path: str) -> str:
    """``path``; ``ValueError`` if it is not the path of a region."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ValueError(
            f"a region is a path of names separated by ., such as block.0, got {str(path)[:80]!r}"
        )
    return path


def joined(outer: str | None, inner: str | None) -> str | None:
    """The path of the region ``inner`` inside the region ``outer``; each may be None."""
    if inner is None:
        return outer
    return check_path(inner) if outer is None else f"{outer}.{check_path(inner)}"


def inside(op: Op, path: str) -> bool:
    """Whether an op belongs to a region, or to one nested in it."""
    return op.region is not None and (op.region == path or op.region.startswith(f"{path}."))


def paths(function: Function) -> tuple[str, ...]:
    """The paths of all regions.  An outer region comes before the regions nested in it."""
    regions = dict.fromkeys(op.region for op in function.ops if op.region is not None)
    return tuple(
        dict.fromkeys(path for region in regions for path in accumulate(region.split("."), "{}.{}".format))
    )


def part(function: Function, path: str) -> Function:
    """See `Function.region`."""
    ops = [op for op in function.ops if inside(op, check_path(path))]
    if not ops:
        raise ValueError(
            f"@{function.name} has no op in region {path!r}{did_you_mean(path, paths(function))}"
        )
    defined = {value for op in ops for value in op.outputs}
    inputs = dict.fromkeys(value for op in ops for value in op.inputs if value not in defined)
    needed = {*function.outputs, *(v for op in function.ops if not inside(op, path) for v in op.inputs)}
    outputs = (value for op in ops for value in op.outputs if value in needed)
    return replace(function, name=path, inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(outputs))


def _types(values: Iterable[Value]) -> str:
    return ", ".join(str(value.type) for value in values) or "nothing"


def replaced(function: Function, path: str, new: Function) -> Function:
    """See `Function.replaced`."""
    old = part(function, path)
    for what, given, wanted in (("takes", new.inputs, old.inputs), ("returns", new.outputs, old.outputs)):
        if [v.type for v in given] != [v.type for v in wanted]:
            raise ValueError(
                f"region {path!r} of @{function.name} {what} {_types(wanted)}, but @{new.name} {what} "
                f"{_types(given)}"
            )
    before, after = _around(function, path, old)
    values = _named(function, old, new)
    ops = []
    for op in new.ops:
        region = op.region if inside(op, path) else joined(path, op.region)
        ops.append(
            replace(op, inputs=each(op.inputs, values), outputs=each(op.outputs, values), region=region)
        )
    results = {was: values[now] for was, now in zip(old.outputs, new.outputs, strict=True)}
    ops += [replace(op, inputs=each(op.inputs, results)) for op in after]
    return replace(function, ops=(*before, *ops), outputs=each(function.outputs, results))


def each(values: Iterable[Value], new: Mapping[Value, Value]) -> tuple[Value, ...]:
    """The values, with the new one in place of each that has one."""
    return tuple(new.get(value, value) for value in values)


def _around(function: Function, path: str, old: Function) -> tuple[list[Op], list[Op]]:
    """The ops outside of a region: those that run before the region, and those that run after it."""
    last = max(number for number, op in enumerate(function.ops) if inside(op, path))
    late = set(old.outputs)
    before, after = [], []
    for number, op in enumerate(function.ops):
        if inside(op, path):
            continue
        if number > last or not late.isdisjoint(op.inputs):
            late.update(op.outputs)
            after.append(op)
        else:
            before.append(op)
    for value in old.inputs:
        if value in late:
            raise ValueError(
                f"region {path!r} of @{function.name} is not in one piece: its input %{value.name} is "
                "computed outside of it from one of its outputs"
            )
    return before, after


def _named(function: Function, old: Function, new: Function) -> dict[Value, Value]:
    """The value that replaces each value of ``new``.

    Inputs become the existing values, outputs get the names that they replace, and others a free name.
    """
    values = dict(zip(new.inputs, old.inputs, strict=True))
    inner = {*old.values}.difference(old.inputs, old.outputs)
    taken = {value.name for value in function.values if value not in inner}
    names = {now: was.name for was, now in reversed(list(zip(old.outputs, new.outputs, strict=True)))}
    for value in (value for op in new.ops for value in op.outputs):
        numbered = chain([value.name], (f"{value.name}.{number}" for number in count(1)))
        name = names.get(value) or next(name for name in numbered if name not in taken)
        taken.add(name)
        values[value] = replace(value, name=name)
    return values
