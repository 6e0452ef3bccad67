"""A program in a notebook: folded by region, each with its flops and bytes, layouts coloured by their axes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from parallelism.display.markup import Markup, facts, figure, folded_away, note, tint, wide
from parallelism.display.quantities import count, nbytes, plural
from parallelism.ir.core.extents import Extent
from parallelism.ir.core.printing import names, print_attributes, print_layout

if TYPE_CHECKING:
    from parallelism.ir.core.function import Function, Op, Value

_MOST_OPS = 200
"""The largest number of ops of one region that are listed."""
_MOST_REGIONS = 400
_MOST_LETTERS = 60


def html(function: Function) -> str:
    """The inputs, the ops by region, and the outputs."""
    axes = sorted({axis for value in function.values if value.layout for axis in _axes_of(value)})
    colours = {axis: tint(number + 1) for number, axis in enumerate(axes)}
    left = [_MOST_REGIONS]
    body = _regions(function.ops, "", colours, left)
    inputs = wide("".join(f"<div>{_value(value, colours)}</div>" for value in function.inputs))
    about = [
        ("computes", _work(function.ops)),
        (
            "returns",
            Markup(", ".join(_value(value, colours) for value in function.outputs[:8]))
            + (" …" * (len(function.outputs) > 8)),
        ),
    ]
    legend = Markup(" ".join(_chip(axis, colour) for axis, colour in colours.items()))
    return figure(
        facts([(name, Markup(words)) for name, words in about]),
        note("layouts over the axes") + legend if axes else "",
        folded_away(plural(len(function.inputs), "input"), inputs, is_open=len(function.inputs) <= 6),
        body,
        title=f"@{function.name}: {plural(len(function.ops), 'op')}",
    )


def _regions(ops: tuple[Op, ...] | list[Op], path: str, colours: dict[str, str], left: list[int]) -> str:
    """The ops of a region in order; runs of ops of one region inside it are folded away."""
    depth = path.count(".") + 1 if path else 0
    runs: list[tuple[str, list[Op]]] = []
    for op in ops:
        words = (op.region or "").split(".") if op.region else []
        inner = ".".join(words[: depth + 1]) if len(words) > depth else ""
        if not runs or runs[-1][0] != inner:
            runs.append((inner, []))
        runs[-1][1].append(op)
    parts = []
    for inner, some in runs:
        if not inner:
            lines = "".join(f"<div>{_line(op, colours)}</div>" for op in some[:_MOST_OPS])
            more = note(f"… and {len(some) - _MOST_OPS} more ops") if len(some) > _MOST_OPS else ""
            parts.append(
                wide(lines) + more
                if path or len(runs) == 1 or len(some) <= 6
                else folded_away(f"{plural(len(some), 'op')} of no region: {_work(some)}", wide(lines) + more)
            )
            continue
        left[0] -= 1
        if left[0] < 0:
            parts.append(note("… and more regions: print(function) shows them"))
            break
        parts.append(
            folded_away(
                f"{inner}: {plural(len(some), 'op')}, {_work(some)}", _regions(some, inner, colours, left)
            )
        )
    return "".join(parts)


def _work(ops: tuple[Op, ...] | list[Op]) -> str:
    flops, moved = sum((op.flops for op in ops), 0), sum((op.nbytes for op in ops), 0)
    return f"{_number(flops, 'flop')}, {_number(moved, 'bytes')} read and written"


def _number(amount: Extent, unit: str) -> str:
    """The amount with its unit; of symbols the expression, if it is short."""
    if isinstance(amount, int | float):
        return nbytes(amount) if unit == "bytes" else f"{count(amount)}{' ' * (abs(amount) < 10_000)}{unit}"
    text = str(amount)
    return f"{text if len(text) <= _MOST_LETTERS else 'symbolic'} {unit}"


def _line(op: Op, colours: dict[str, str]) -> str:
    attributes = f" {print_attributes(op.attributes)}" if op.attributes else ""
    results = ", ".join(_value(value, colours) for value in op.outputs)
    equals = " = " if op.outputs else ""
    return f"<code>{results}{equals}<b>{escape(op.kind)}</b>({escape(names(op.inputs))}){escape(attributes)}</code>"


def _value(value: Value, colours: dict[str, str]) -> str:
    layout = ""
    if value.layout is not None:
        axes = _axes_of(value)
        layout = " " + _chip(print_layout(value.layout), colours[axes[0]] if axes else "var(--panel)")
    return f"<code>%{escape(value.name)}: {escape(str(value.type))}{layout}</code>"


def _axes_of(value: Value) -> list[str]:
    layout = value.layout
    return [] if layout is None else [*(axis for dim in layout.dims for axis in dim.axes), *layout.partial]


def _chip(text: str, colour: str) -> str:
    return f'<code style="background:{colour};padding:0 3px;border-radius:3px">{escape(text)}</code>'
