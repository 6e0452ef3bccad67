"""Borders: values that leave one region and lie otherwise in the next one, and what that costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, islice

from parallelism.display.quantities import fit, nbytes
from parallelism.ir.core import Op, Value
from parallelism.ir.passes.gradients import MARK, UPDATE
from parallelism.layouts.localization.local_program import layout_of, moves_of
from parallelism.layouts.localization.localized import Localized
from parallelism.sharding import TensorSharding


@dataclass(frozen=True)
class Border:
    """A value that one region computes and another one uses in another layout."""

    source: str
    """The path of the region that computes it; empty outside of all."""
    target: str
    """The path of the region that uses it."""
    value: Value
    """The value as it was computed."""
    before: TensorSharding
    after: TensorSharding
    steps: tuple[str, ...]
    """The steps of the plan, each with its axes; none if every device has its shard already."""
    bytes_received: int
    """The most bytes that a device receives."""

    def __str__(self) -> str:
        return f"{self.source or OUTSIDE} -> {self.target or OUTSIDE}"


OUTSIDE, BACK, RECEIVED = "(outside)", f"{MARK}.", 8


@dataclass(frozen=True)
class Borders:
    """The borders of a program, in the order of its ops."""

    rows: tuple[Border, ...]
    bytes_received: int
    """The most bytes that a device receives at all of them."""

    def __str__(self) -> str:
        """A table in 80 columns.  Rows that differ in the numbers of regions alone are one, with their count."""
        if not self.rows:
            return "no value is resharded between regions"
        found: Counter[tuple[str, ...]] = Counter()
        first: dict[tuple[str, ...], Border] = {}
        for row in self.rows:
            key = (
                _without_numbers(row.source),
                _without_numbers(row.target),
                row.before.short(),
                row.after.short(),
                *row.steps,
                str(row.bytes_received),
            )
            found[key] += 1
            first.setdefault(key, row)
        cells = [("received", "count", "value", "from -> to")]
        for key, row in first.items():
            source, target = key[:2] if found[key] > 1 else (row.source or OUTSIDE, row.target or OUTSIDE)
            steps = ", then ".join(row.steps) or "nothing to move"
            cells += [
                (nbytes(row.bytes_received), str(found[key]), f"%{row.value.name}", f"{source} -> {target}"),
                ("", "", "", f"{row.before.short()} -> {row.after.short()}: {steps}"),
            ]
        width = max(len(value) for _, _, value, _ in cells)
        lines = [
            fit(f"{received:>{RECEIVED}}  {count:>5}  {value:<{width}}  {ends}".rstrip())
            for received, count, value, ends in cells
        ]
        return "\n".join([*lines, f"a device receives at most {nbytes(self.bytes_received)} at borders"])


def _without_numbers(region: str) -> str:
    return re.sub(r"\.\d+", ".*", region or OUTSIDE)


def borders(localized: Localized, regions: Sequence[str] = ()) -> Borders:
    """What is resharded between regions.

    ``regions`` are patterns, as of `parallelism.transforms.TensorParallel`: an op belongs to the outermost of its
    regions that matches one, and of several patterns to the innermost of these.  Without patterns it belongs to its
    outermost region, ``block.3`` if that is numbered.
    What crosses in the backward is in the regions ``gradient.block.3``.  No border is a value that is used in the new
    layout in its own region, too, or in the backward of that, and neither is a gradient on its way to the update.

    ``ValueError`` if symbols are left.
    """
    made = {value: op for op in localized.function.ops for value in op.outputs}
    users: dict[Value, list[Op]] = {}
    for op in localized.function.ops:
        for value in dict.fromkeys(op.inputs):
            users.setdefault(value, []).append(op)
    rows, by_class = [], [iter(localized.received(each.rank)) for each in localized.classes]
    total = [0] * len(by_class)
    for op in localized.function.ops:
        moves = moves_of(op, localized.devices)
        count = len(moves) if op.kind == "reshard" else 1
        moved = [sum(islice(received, count)) for received in by_class]
        if op.kind != "reshard":
            continue
        value = op.inputs[0]
        while value in made and made[value].kind == "reshard":
            value = made[value].inputs[0]
        used = [_region(user, regions) for user in _reached(op, users)]
        source = _region(made[value], regions) if value in made else None
        inner = (
            source is None
            or not used
            or source.removeprefix(BACK) in {each.removeprefix(BACK) for each in used}
        )
        if inner or UPDATE in (source, used[0]) or layout_of(op.inputs[0]) == layout_of(op.outputs[0]):
            continue
        assert source is not None
        rows.append(
            Border(
                source,
                used[0],
                value,
                layout_of(op.inputs[0]),
                layout_of(op.outputs[0]),
                tuple(f"{move.step.kind} {', '.join(move.axes)}" for move in moves),
                max(moved),
            )
        )
        total = [before + more for before, more in zip(total, moved, strict=True)]
    return Borders(tuple(rows), max(total))


def _reached(op: Op, users: dict[Value, list[Op]]) -> list[Op]:
    """The ops that use the result of a reshard, also through other reshards."""
    found = []
    for user in users.get(op.outputs[0], ()):
        found += _reached(user, users) if user.kind == "reshard" else [user]
    return found


def _region(op: Op, regions: Sequence[str]) -> str:
    path = op.region or ""
    back = BACK if path.startswith(BACK) or path == MARK else ""
    path = path.removeprefix(MARK).removeprefix(".") if back else path
    if path.split(".")[0] == UPDATE:
        return UPDATE
    if not regions:
        found = re.match(r"\w+(\.\d+)?", path)
        return back + found[0] if found else back
    outer = [*accumulate(path.split("."), "{}.{}".format)]
    innermost = ""
    for pattern in regions:
        first = next((each for each in outer if fnmatchcase(each, pattern)), "")
        innermost = max(innermost, first, key=len)
    return back + innermost
