"""A picture of a sharded tensor: a grid of its blocks with the ranks that hold them.

      0:3    3:5
    ┌──────┬──────┐
0:4 │ 0, 2 │ 1, 3 │        commas separate replicas; the operation
    ├──────┼──────┤        separates the terms of a partial block: 0 + 4
4:7 │ 4, 6 │ 5, 7 │
    └──────┴──────┘
down: dim 0 over x; across: dim 1 over y
"""

from collections.abc import Mapping, Sequence

from parallelism.display import MOST_HTML, MOST_ROWS, WIDTH, Drawing
from parallelism.display.drawing import folded, kept, picked
from parallelism.display.markup import beside, facts, figure, grid, note
from parallelism.mesh import Mesh
from parallelism.sharding.tensor_sharding import TensorSharding

_MOST_COLUMNS = 16
_CELL = 22
"""The largest width of a cell, in characters."""
_SIGNS = {"sum": " + ", "prod": " * ", "max": " max ", "min": " min "}

Places = Sequence[tuple[slice, ...]]
Interval = tuple[int, int]
Cell = tuple[tuple[int, ...], ...]
"""The ranks that hold each term of a block; there is one term if nothing is pending."""


def drawing(
    sharding: TensorSharding,
    shape: tuple[int, ...],
    mesh: Mesh,
    places: Places,
    terms: Sequence[int],
    dims: Sequence[int] | None,
) -> Drawing:
    """The picture of a tensor of ``shape``.

    ``places`` holds the block of each rank, ``terms`` the number of the term that each rank holds.  ``dims`` are the
    one or two dims to draw, rows first; by default the first that are split.
    """
    drawn = _drawn_dims(sharding, dims)
    names = []
    for d in drawn:
        axes = sharding.dims[d].axes
        names.append(f"dim {d} over {', '.join(axes)}" if axes else f"dim {d}, whole")
    intervals = [_intervals(places, d) for d in drawn]
    rows, columns = ([[(0, 1)]] * 2 + intervals)[-2:]
    cells: dict[tuple[Interval, Interval], dict[int, list[int]]] = {}
    empty = []
    for rank, place in enumerate(places):
        if any(span.start == span.stop for span in place):
            empty.append(rank)
            continue
        spans = [(place[d].start, place[d].stop) for d in drawn]
        row, column = ([(0, 1)] * 2 + spans)[-2:]
        cells.setdefault((row, column), {}).setdefault(terms[rank], []).append(rank)
    cells_of = [[_cell_of(cells.get((row, column), {})) for column in columns] for row in rows]
    whole = "x".join(map(str, shape)) or "a scalar"
    row_labels = [f"{a}:{b}" for a, b in rows] if len(drawn) == 2 else [""]
    column_labels = [f"{a}:{b}" for a, b in columns] if drawn else [""]
    caption, notes = f"{sharding.short()} of {whole} on {mesh!r}", _notes(sharding, drawn, empty)
    return Drawing(
        _text(caption, names, row_labels, column_labels, cells_of, sharding.op, notes),
        _html(
            caption,
            names,
            _with_extents(row_labels, rows),
            _with_extents(column_labels, columns),
            cells_of,
            sharding.op,
            notes,
        ),
    )


def _intervals(places: Places, d: int) -> list[Interval]:
    """The different intervals of a dim, without empty ones."""
    return sorted({(place[d].start, place[d].stop) for place in places if place[d].stop > place[d].start})


def _cell_of(ranks_by_term: Mapping[int, list[int]]) -> Cell:
    return tuple(tuple(ranks) for _, ranks in sorted(ranks_by_term.items()))


def _with_extents(labels: Sequence[str], intervals: Sequence[Interval]) -> list[tuple[str, float]]:
    return [(label, float(stop - start)) for label, (start, stop) in zip(labels, intervals, strict=True)]


def table_of_dims(sharding: TensorSharding) -> str:
    """The layout of a tensor of any shape on any mesh, as HTML: a table of the axes over which each dim is split."""
    names = [f"dim {d}" for d in range(len(sharding.dims))]
    if sharding.ellipsis is not None:
        later = len(sharding.dims) - sharding.ellipsis
        names[sharding.ellipsis :] = [f"dim -{later - place}" for place in range(later)]
    rows = []
    for name, dim in zip(names, sharding.dims, strict=True):
        rows.append((name, f"split over {', '.join(dim.axes)}" if dim.axes else "whole"))
    if sharding.ellipsis is not None:
        rows.insert(sharding.ellipsis, ("...", "any further dims, whole"))
    if sharding.partial:
        rows.append(("pending", f"a {sharding.op} over {', '.join(sharding.partial)}"))
    return figure(
        facts(rows or [("a scalar", "whole")]),
        note("layout.draw(shape, mesh) draws its blocks"),
        title=sharding.short(),
    )


def _drawn_dims(sharding: TensorSharding, dims: Sequence[int] | None) -> list[int]:
    ndim = len(sharding.dims)
    if dims is None:
        split_first = sorted(range(ndim), key=lambda d: not sharding.dims[d].axes)
        return sorted(split_first[:2])
    drawn = [d.__index__() for d in dims]
    if not 1 <= len(drawn) <= 2 or len(set(drawn)) < len(drawn) or not all(0 <= d < ndim for d in drawn):
        raise ValueError(f"a drawing shows one or two dims of 0 to {ndim - 1}, got dims={list(dims)}")
    return drawn


def _notes(sharding: TensorSharding, drawn: Sequence[int], empty: Sequence[int]) -> list[str]:
    notes = [
        f"dim {d} is split over {', '.join(dim.axes)}, too: a cell lists all ranks that hold a part of it"
        for d, dim in enumerate(sharding.dims)
        if dim.axes and d not in drawn
    ]
    if sharding.partial:
        notes.append(f"a {sharding.op} over {', '.join(sharding.partial)} is pending")
    if empty:
        one = len(empty) == 1
        notes.append(f"{'rank' if one else 'ranks'} {_ranks(empty, 50)} {'holds' if one else 'hold'} nothing")
    return notes


# -- cells ---------------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[int], width: int) -> str:
    """The ranks as ``0, 2, 5-9``; if that is wider than ``width``, the first of them and their number."""
    words: list[str] = []
    first = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            run = ranks[first:i]
            words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            first = i
    text = ", ".join(words)
    if len(text) <= width:
        return text
    tail = f", … ({len(ranks)} ranks)"
    kept: list[str] = []
    while words and len(", ".join([*kept, words[0]])) + len(tail) <= width:
        kept.append(words.pop(0))
    return ", ".join(kept) + tail if kept else f"{len(ranks)} ranks"


def _cell(grid: Sequence[Sequence[Cell]], i: int | None, j: int | None, op: str, width: int) -> str:
    """The text of a cell; ``…`` in a row or column that stands for those that are left out."""
    if i is None or j is None:
        return "…"
    cell = grid[i][j]
    text = _SIGNS[op].join(_ranks(ranks, width) for ranks in cell)
    if len(text) <= width:
        return text
    return f"{len(cell)} terms" if len(cell) > 1 else "…"


# -- text ----------------------------------------------------------------------------------------------------------


def _text(
    caption: str,
    names: Sequence[str],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    grid: Sequence[Sequence[Cell]],
    op: str,
    notes: Sequence[str],
) -> str:
    lines = folded(caption)
    if any(map(any, grid)):
        margin = max(map(len, row_labels))
        rows, columns = kept(len(row_labels), MOST_ROWS), kept(len(column_labels), _MOST_COLUMNS)
        while True:
            widest = max(8, min(_CELL, (WIDTH - margin - 2) // len(columns) - 3))
            cells = [[_cell(grid, i, j, op, widest) for j in columns] for i in rows]
            heads = picked(column_labels, columns, "…")
            widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
            if margin + 2 + sum(widths) + 3 * len(widths) <= WIDTH or len(columns) <= 1:
                break
            columns = kept(len(column_labels), len(columns) - 1)
        if names:
            heading = " ".join(f" {head:^{n}} " for head, n in zip(heads, widths, strict=True))
            lines += ["", " " * (margin + 2) + heading]
        lines.append(_rule(margin, widths, "┌┬┐"))
        for label, cell_row in zip(picked(row_labels, rows, "…"), cells, strict=True):
            body = "│".join(f" {cell:<{n}} " for cell, n in zip(cell_row, widths, strict=True))
            lines += [f"{label:>{margin}} │{body}│", _rule(margin, widths, "├┼┤")]
        lines[-1] = _rule(margin, widths, "└┴┘")
        directions = ("down", "across")[-len(names) :]
        if names:
            lines.append("; ".join(map("{}: {}".format, directions, names)))
    for words in notes:
        lines += folded(words)
    return "\n".join(line.rstrip()[:WIDTH] for line in lines)


def _rule(margin: int, widths: Sequence[int], corners: str) -> str:
    return " " * (margin + 1) + corners[0] + corners[1].join("─" * (n + 2) for n in widths) + corners[2]


# -- HTML ----------------------------------------------------------------------------------------------------------


def _html(
    caption: str,
    names: Sequence[str],
    rows: Sequence[tuple[str, float]],
    columns: Sequence[tuple[str, float]],
    cells: Sequence[Sequence[Cell]],
    op: str,
    notes: Sequence[str],
) -> str:
    down, across = kept(len(rows), MOST_HTML), kept(len(columns), MOST_HTML)
    shown = []
    for i in down:
        row = []
        for j in across:
            number = -1 if i is None or j is None else i * len(columns) + j
            row.append((_cell(cells, i, j, op, 60), number))
        shown.append(row)
    labels = picked(columns, across, ("…", 1.0)), picked(rows, down, ("…", 1.0))
    return figure(beside(grid(*labels, shown), "".join(map(note, [*names, *notes]))), title=caption)
