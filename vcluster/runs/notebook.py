"""A cluster in a notebook: its picture, and how showing it does not keep its devices.

IPython keeps what the last line of a cell gives, in ``Out`` and in ``_``.  A cluster that is kept there would live
until the notebook ends, and each run of a cell would add devices.  So a cluster that was shown is taken out.
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import TYPE_CHECKING, Any

from parallelism.display.markup import beside, figure, inside, note, table

if TYPE_CHECKING:
    from vcluster.runs.cluster import VirtualCluster

MOST_ROWS = 16
"""The largest number of devices of which each has a row."""
_KEPT_BY_IPYTHON = re.compile(r"_{1,3}|_\d+")


def html_of(cluster: VirtualCluster, pids: list[int], hardware: str) -> str:
    """The picture of a cluster: its mesh, and a row for each device with its place and its process."""
    mesh = cluster.mesh
    rows = [(rank, *mesh.index(rank).values(), *pids[rank:rank + 1]) for rank in range(min(mesh.size, MOST_ROWS))]
    devices = table(rows, ("rank", *mesh.axes, *(["pid"] if pids else [])), left=0, caption="devices")
    more = note(f"… and {mesh.size - MOST_ROWS} more") if mesh.size > MOST_ROWS else ""
    return figure(
        note(f"time of {hardware}"), beside(inside(mesh.draw().html), devices + more), title=repr(cluster).strip("<>"))


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


class _Shown(str):
    """The text of a cluster that was shown, which stays in its place."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
