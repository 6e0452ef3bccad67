"""Two traces compared: what got slower, and why.

The parts of a device's time add up to the makespan. The same holds for their mean over the devices, so the changes of
the mean parts add up exactly to the change of the makespan. They are the "why" by part. Further tables list the largest
changes by name and by device.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite
from os import PathLike

import numpy as np

from parallelism.display import in_columns
from parallelism.display.markup import figure, note, table
from parallelism.display.quantities import fit, seconds
from parallelism.trace import HOLDING, PARTS, Split, Trace, part_of
from parallelism.trace.breakdown import split
from parallelism.trace.timeline_picture import timelines
from parallelism.trace.transfers import moving, rounded
from parallelism.whole_files import written_whole
from vcluster.report.naming import groups, part_name, without_numbers

SHOWN = 8
"""Maximal number of rows of a table."""

NEGLIGIBLE = 1e-3
"""Changes smaller than this fraction of the makespan are left out."""
_ROUNDING = 1e-9
"""Upper bound of the relative error that summation leaves in a time."""


Rows = tuple[list[str], list[list[str]], str]
"""A table: its heads, its rows, and how many more rows there are."""


@dataclass(frozen=True)
class Change:
    """The seconds of one thing in both traces."""

    name: str
    before: float
    after: float

    @property
    def seconds(self) -> float:
        """The increase in seconds. Negative if it became shorter."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """The differences between two traces. It prints as text of at most 80 columns."""

    makespan: Change
    parts: tuple[Change, ...]
    """The parts of the split, as means over the devices. Their changes add up to the change of the makespan."""
    names: tuple[Change, ...]
    """Seconds of compute or transfer by name, summed over all devices, the largest change first. Numbers in names are
    replaced by ``#``, so that all microbatches of a stage's forward share a name."""
    devices: tuple[Change, ...]
    """Seconds of compute by rank, for the ranks that are in both traces, the largest change first."""
    sizes: tuple[int, int]
    """The number of devices in each trace."""

    traces: tuple[Trace, Trace] | None = field(default=None, repr=False, compare=False)
    """Both traces, for the picture."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return html(self)

    __repr__ = __str__


def compare(a: Trace, b: Trace) -> Comparison:
    """Compare trace ``b`` with trace ``a``: what became slower or faster, and why.

    Both may also be runs. Their numbers of devices may differ, because parts are means over the devices.
    """
    a, b = (getattr(trace, "trace", trace) for trace in (a, b))
    moved = moving(a), moving(b)
    splits = split(a, moved[0]), split(b, moved[1])
    computes = list(map(_computes, splits))
    return Comparison(
        Change("makespan", a.makespan_seconds, b.makespan_seconds),
        tuple(map(Change, PARTS, *map(_mean, splits))),
        _largest(_by_name(a, moved[0].since), _by_name(b, moved[1].since)),
        tuple(
            change
            for change in _largest(*computes)
            if change.name in computes[0] and change.name in computes[1]
        ),
        (len(a.ranks), len(b.ranks)),
        (a, b),
    )


def _computes(by_rank: Mapping[int, Split]) -> dict[str, float]:
    return {f"rank {rank}": sum(parts[:4]) for rank, parts in by_rank.items()}


def html(comparison: Comparison, titles: Sequence[str] = ("before", "after")) -> str:
    """The sentences, both timelines on one axis, and the tables, for a notebook or a page."""
    told = _sentences(comparison)
    drawn = timelines(list(zip(titles, comparison.traces, strict=True))) if comparison.traces else ""
    tables = []
    for heads, rows, more in _tables(comparison):
        tables += [table(rows, heads), note(more) if more else ""]
    return figure(*map(note, told[1:]), drawn, *tables, title=told[0])


def comparison_html(
    comparison: Comparison, path: str | PathLike[str], *, titles: Sequence[str] = ("before", "after")
) -> None:
    """Write a comparison as a page: why, both timelines on one axis under their titles, and the tables.

    ``OSError`` if the file cannot be written.
    """
    title = escape(" and ".join(titles))
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(
            f'<!doctype html>\n<html lang="en"><head><meta charset="ascii"><meta name="color-scheme" '
            f'content="light dark"><meta name="viewport" content="width=device-width"><title>{title}</title>'
            f"</head><body>{html(comparison, titles)}</body></html>\n"
        )


def _mean(by_rank: Mapping[int, Split]) -> list[float]:
    return [sum(column) / len(by_rank) for column in zip(*by_rank.values(), strict=True)] or [0.0] * len(
        PARTS
    )


def _largest(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    changes = (Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in {**before, **after})
    return tuple(sorted(changes, key=lambda change: (-abs(change.seconds), change.name)))


def _by_name(trace: Trace, since: np.ndarray) -> dict[str, float]:
    """Seconds of compute or transfer by kind, name without numbers, stage and axes, summed over all ranks."""
    columns = trace.columns
    taken = ~columns.present("parent") & columns.isin("kind", set(HOLDING) - {"wait"})
    start = columns.numbers("start_seconds").astype(np.float64)
    end = start + columns.numbers("duration_seconds").astype(np.float64)
    spent = np.where(
        columns.isin("kind", {"compute"}),
        end - start,
        np.maximum(end - np.maximum(start, rounded(since, end)), 0),
    )
    fields = ("kind", "name", "stage", "phase", "axes")
    descriptions, firsts, place = groups(columns.only(*fields).take(taken), *fields)
    sums = np.bincount(place, spent[taken], len(firsts)).tolist()
    parts = part_of(columns)[taken][firsts]
    by_name: defaultdict[str, float] = defaultdict(float)
    for (kind, name, stage, phase, axes), part, amount in zip(descriptions, parts, sums, strict=True):
        if phase is not None and stage is not None:
            name = f"{PARTS[part]} of stage {stage} ({phase})"
        else:
            name = without_numbers(name) + (f" over {', '.join(axes)}" if axes else "")
            name = name if kind in ("collective", name) else f"{kind} {name}"
        by_name[name] += amount
    return by_name


def _lines(comparison: Comparison) -> list[str]:
    lines = list(map(fit, _sentences(comparison)))
    for heads, rows, more in _tables(comparison):
        lines += ["", *in_columns([heads, *rows], 1), *([more] if more else [])]
    return lines


def _sentences(comparison: Comparison) -> list[str]:
    """What became slower or faster, and why."""
    makespan = comparison.makespan
    times = f"{seconds(makespan.before)} -> {seconds(makespan.after)}"
    if not isfinite(makespan.seconds):
        return [f"cannot be compared: makespan {times}"]
    if abs(makespan.seconds) <= _least(comparison):
        lines = [f"unchanged: makespan {times}"]
    else:
        word = "slower" if makespan.seconds > 0 else "faster"
        by = f", {abs(makespan.seconds) / makespan.before:.1%} {word}" if makespan.before else ""
        lines = [f"{word}: makespan {times} ({_signed(makespan.seconds)}{by})"]
        if parts := [part for part in comparison.parts if part.seconds * makespan.seconds > 0]:
            main = max(parts, key=lambda part: abs(part.seconds))
            lines.append(
                f"main cause: {part_name(main.name)}, {_signed(main.seconds)} on the mean device, "
                f"{main.seconds / makespan.seconds:.0%} of the difference"
            )
        if names := [change for change in comparison.names if change.seconds * makespan.seconds > 0]:
            lines.append(
                f"largest {'increase' if makespan.seconds > 0 else 'decrease'}: {names[0].name}, "
                f"{_signed(names[0].seconds)} on all devices together"
            )
    if comparison.sizes[0] != comparison.sizes[1]:
        lines.append(f"{comparison.sizes[0]} devices before, {comparison.sizes[1]} after")
    return lines


def _least(comparison: Comparison) -> float:
    return NEGLIGIBLE * max(comparison.makespan.before, comparison.makespan.after)


def _tables(comparison: Comparison) -> list[Rows]:
    if not isfinite(comparison.makespan.seconds):
        return []
    least = _least(comparison)
    parts = [part for part in comparison.parts if part.before or part.after]
    found = [
        _rows("the mean device", parts, [comparison.makespan]),
        _rows("all devices together", comparison.names, least=least),
        _rows("compute of a device", comparison.devices, least=least),
    ]
    return [each for each in found if each]


def _rows(
    title: str, changes: Sequence[Change], total: Sequence[Change] = (), least: float = -1.0
) -> Rows | None:
    changes = [change for change in changes if abs(change.seconds) > least]
    if not changes:
        return None
    rows = []
    for change in (*changes[:SHOWN], *total):
        rounding = _ROUNDING * max(change.before, change.after)
        rows.append(
            [
                fit(part_name(change.name), 40),
                seconds(change.before),
                seconds(change.after),
                _signed(change.seconds if abs(change.seconds) > rounding else 0),
            ]
        )
    more = len(changes) - SHOWN
    return [title, "before", "after", "change"], rows, f"... and {more} more" if more > 0 else ""


def _signed(value: float) -> str:
    sign = ""
    if value > 0:
        sign = "+"
    elif value < 0:
        sign = "-"
    return sign + seconds(abs(value))
