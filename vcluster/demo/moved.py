"""What the demos of layouts have in common: tensors as they lie on the mesh, plans, and who received how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from parallelism.trace import Trace
from vcluster.demo.screen import WIDTH, Screen

MOST_ROWS = 16


def show_layouts(
    screen: Screen, tensors: Iterable[tuple[str, tuple[int, ...], TensorSharding]], mesh: Mesh
) -> None:
    """Each tensor's layout, drawn: (what it is called, its shape, its layout)."""
    for number, (name, shape, layout) in enumerate(tensors):
        if number:
            screen.line()
        screen.line(f"{name}:")
        screen.line(str(layout.draw(shape, mesh)))


def show_plan(screen: Screen, plan: Any) -> None:
    """A plan as it prints, its long lines broken."""
    for line in str(plan).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 6)
        for part in wrap(line, WIDTH - 2, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            screen.line(f"  {part}")


def show_devices(screen: Screen, trace: Trace, names: Sequence[str], arrays: Sequence[Sequence[Any]]) -> None:
    """A row for each device: the shapes of its arrays, what it computed, what it received and from whom."""
    matrix = trace.communication_matrix()
    rows = []
    for rank, mine in enumerate(arrays):
        sources = [f"r{source}" for source in np.flatnonzero(matrix[:, rank])]
        told = " ".join(sources) if len(sources) <= 4 else f"{len(sources)} devices"
        shapes = ["x".join(map(str, np.shape(array))) for array in mine]
        rows.append((f"r{rank}", *shapes, f"{trace.flops(rank):,.0f}", f"{trace.bytes_received(rank):,}", told))
    gap = ("...", *[""] * (len(names) + 3))
    shown = rows if len(rows) <= MOST_ROWS else [*rows[: MOST_ROWS // 2], gap, *rows[-MOST_ROWS // 4 :]]
    screen.table(("device", *names, "flops", "bytes received", "from"), shown)


def verdict_of_bytes(screen: Screen, trace: Trace, predicted: int, formula: str | None) -> bool:
    """Whether what moved is what a formula says; None: what the plan says."""
    moved = trace.bytes_received()
    word, whose = "equal" if moved == predicted else "NOT equal", "plan" if formula is None else "closed form"
    screen.verdict(moved == predicted, f"{moved:,} bytes moved; {word} to the {whose}'s {predicted:,}")
    for line in wrap(f"closed form: {formula}", WIDTH - 7, subsequent_indent="    ") if formula else ():
        screen.line(f"       {line}")
    return moved == predicted
