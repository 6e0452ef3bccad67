"""A picture of a mesh: its ranks in a grid, the last axis across and the others down.

Mesh(dp=2, tp=4): 8 devices

      tp=0  tp=1  tp=2  tp=3
dp=0     0     1     2     3
dp=1     4     5     6     7
"""

from collections.abc import Iterator, Sequence
from itertools import product

from parallelism.display import MOST_HTML, MOST_ROWS, WIDTH, Drawing
from parallelism.display.drawing import folded, kept, picked
from parallelism.display.markup import figure, grid
from parallelism.display.quantities import plural
from parallelism.mesh.mesh import Mesh

_LABEL = 40
"""The largest width of a row's label that names axes; wider labels show only coordinates."""
_NAME = 12
"""The longest name of an axis that is written in full."""


def picture(mesh: Mesh) -> Drawing:
    """The picture of a mesh.  A large mesh is drawn by its first rows and columns and the last ones."""
    *outer, across = mesh.axes
    places = list(product(*(range(mesh.shape[axis]) for axis in outer)))
    names = [_short(axis) for axis in outer]
    rows = [" ".join(map("{}={}".format, names, place)) for place in places]
    if len(rows[-1]) > _LABEL:
        rows = [",".join(map(str, place)) for place in places]
    columns = [f"{_short(across)}={i}" for i in range(mesh.shape[across])]
    caption = f"{mesh!r}: {plural(mesh.size, 'device')}"
    return Drawing(_text(caption, rows, columns), _html(caption, rows, columns))


def _text(caption: str, rows: Sequence[str], columns: Sequence[str]) -> str:
    margin = max(map(len, rows))
    widest = max(len(columns[-1]), len(str(len(rows) * len(columns) - 1)))
    cells = _cells(["", *rows], columns, MOST_ROWS, (WIDTH - margin) // (widest + 2))
    lines = [*folded(caption), ""]
    for label, *ranks in cells:
        line = f"{label:<{margin}}" + "".join(f"  {rank:>{widest}}" for rank in ranks)
        lines.append(line.rstrip()[:WIDTH])
    return "\n".join(lines)


def _html(caption: str, rows: Sequence[str], columns: Sequence[str]) -> str:
    head, *body = _cells(["", *rows], columns, MOST_HTML, MOST_HTML)
    columns_told = [(label, 1.0) for label in head[1:]]
    rows_told, cells = [], []
    for label, *ranks in body:
        rows_told.append((label, 1.0))
        cells.append([(rank, -1) for rank in ranks])
    return figure(
        grid(columns_told, rows_told, cells, width=46.0 * len(head), height=26.0 * len(body)), title=caption
    )


def _cells(labels: Sequence[str], columns: Sequence[str], most_rows: int, most: int) -> Iterator[list[str]]:
    """The rows of the grid: the head, then one row for each further label.  The first cell is the label."""
    across = kept(len(columns), most)
    yield [labels[0], *picked(columns, across, "…")]
    for i in kept(len(labels) - 1, most_rows):
        if i is None:
            yield ["…"] * (len(across) + 1)
        else:
            ranks = range(i * len(columns), (i + 1) * len(columns))
            yield [labels[i + 1], *map(str, picked(ranks, across, "…"))]


def _short(axis: str) -> str:
    return axis if len(axis) <= _NAME else f"{axis[: _NAME - 1]}…"
