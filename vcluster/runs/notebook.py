"""A cluster and a run in a notebook: their pictures, and how showing a cluster does not keep its devices.

IPython keeps what the last line of a cell gives, in ``Out`` and in ``_``.  A cluster that is kept there would live
until the notebook ends, and each run of a cell would add devices.  So a cluster that was shown is taken out.
"""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.arrays import Array
from parallelism.display.drawing import kept
from parallelism.display.markup import Markup, beside, figure, folded_away, inside, note, table
from parallelism.display.quantities import fit
from parallelism.operation import is_ours
from vcluster.code.exceptions import entries_of

if TYPE_CHECKING:
    from vcluster.runs.cluster import VirtualCluster
    from vcluster.runs.run import Run

_MOST_LETTERS, _MOST_NUMBERS = 100, 12
MOST_ROWS = 16
"""The largest number of devices, and of outputs, of which each has a row."""
_PLACE = re.compile(
    r'(?P<before>\bat |\bfrom )?(?P<quote>File ")?(?P<file>[^\s"]+)(?(quote)", line |:)(?P<line>\d+)'
)
"""A line of code in the text of an error: ``at file:3``, or ``File "file", line 3``."""
_KEPT_BY_IPYTHON = re.compile(r"_{1,3}|_\d+")


def html_of(cluster: VirtualCluster, pids: list[int], hardware: str) -> str:
    """The picture of a cluster: its mesh, and a row for each device with its place and its process."""
    mesh = cluster.mesh
    rows = [
        (rank, *mesh.index(rank).values(), *pids[rank : rank + 1])
        for rank in range(min(mesh.size, MOST_ROWS))
    ]
    devices = table(rows, ("rank", *mesh.axes, *(["pid"] if pids else [])), left=0, caption="devices")
    more = note(f"… and {mesh.size - MOST_ROWS} more") if mesh.size > MOST_ROWS else ""
    return figure(
        note(f"time of {hardware}"),
        beside(inside(mesh.draw().html), devices + more),
        title=repr(cluster).strip("<>"),
    )


def html_of_run(run: Run[Any]) -> str:
    """The picture of a run: a row for the output of each rank, and the trace."""
    ranks = [rank for rank in kept(len(run), MOST_ROWS) if rank is not None]
    outputs = table([(rank, shown_output(run.outputs[rank])) for rank in ranks], ("rank", "output"), left=2)
    more = note(f"{len(ranks)} of {len(run)} ranks are shown") if len(ranks) < len(run) else ""
    trace = folded_away("run.trace: what happened", inside(run.trace._repr_html_()), is_open=True)
    return figure(outputs, more, trace, title=repr(run).strip("<>"))


def shown_output(value: Any) -> Markup:
    """A value in one line; of an array with more than a few numbers the ends of its range."""
    if isinstance(value, np.ndarray):
        text = f"{value.dtype}{list(value.shape)}  {_numbers(value)}"
    else:
        text = " ".join(repr(value).split())
    return Markup(f"<code>{escape(fit(text, _MOST_LETTERS), quote=False)}</code>")


def _numbers(array: Array) -> str:
    """The numbers of a small array as NumPy shows them; of a large one the least and the greatest, ``1 .. 8``."""
    if array.size <= _MOST_NUMBERS or array.dtype.kind not in "biuf":
        return " ".join(np.array2string(array, separator=" ", threshold=_MOST_NUMBERS).split())
    return " .. ".join(f"{end:g}" for end in (array.min(), array.max()))


def let_go_after_the_cell(cluster: VirtualCluster) -> None:
    """After the cell that shows a cluster, IPython no longer keeps it.  Without IPython nothing happens."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return
    shown = weakref.ref(cluster)

    def let_go(*_: object) -> None:
        shell.events.unregister("post_run_cell", let_go)
        if (found := shown()) is not None:
            hidden = getattr(shell, "user_ns_hidden", {})
            for names in (shell.user_ns.get("_oh", {}), shell.user_ns, hidden, vars(shell.displayhook)):
                for name in [name for name, value in names.items() if value is found]:
                    if isinstance(name, int) or _KEPT_BY_IPYTHON.fullmatch(name):
                        names[name] = _Shown(repr(found))

    shell.events.register("post_run_cell", let_go)


def name_cells(error: BaseException) -> None:
    """In a notebook, the text of an error says ``Cell In[14], line 3`` with the source line, as IPython does."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not error.args or not isinstance(error.args[0], str):
        return

    def named(found: re.Match[str]) -> str:
        cell = shell.compile.format_code_name(found["file"])
        if cell is None:
            return found[0]
        place = f"{cell[0]} {cell[1]}, line {found['line']}"
        return f"{found['before']}{place}" if found["before"] else place

    lines = []
    for line in error.args[0].splitlines():
        lines.append(_PLACE.sub(named, line))
        if lines[-1] != line and (at := _PLACE.search(line)) is not None and at["before"]:
            source = linecache.getline(at["file"], int(at["line"])).strip()
            lines += [f"    {source}"] if source else []
    error.args = ("\n".join(lines), *error.args[1:])
    shown = weakref.ref(error)  # no cycle, which would keep what the traceback holds

    def traceback_of_user() -> list[str]:
        """What IPython shows, and asks for under this name: the traceback without the library's frames."""
        found = shown()
        assert found is not None
        entries, kept = found.__traceback__, None
        for entry in reversed(list(entries_of(entries))):
            if not is_ours(entry.tb_frame.f_code.co_filename):
                kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        told: list[str] = shell.InteractiveTB.structured_traceback(
            type(found), found, kept or entries, tb_offset=shell.InteractiveTB.tb_offset
        )
        return told

    error._render_traceback_ = traceback_of_user  # type: ignore[attr-defined]


class _Shown(str):
    """The text of a cluster that was shown, which stays in its place."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
