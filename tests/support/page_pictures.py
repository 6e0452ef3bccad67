"""Writes the pictures at the head of pages: `python tests/support/page_pictures.py`.

A picture is what a notebook shows of an object, inside of an SVG file, light or dark as its reader. Its size is written here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from pictures import program, trace

from parallelism import Mesh, Pipeline, TensorSharding, ir, models, plan_resharding
from parallelism.hardware import Hardware
from parallelism.planning import find_plan
from parallelism.transforms import Adam, DataParallel, Strategy, TensorParallel, Zero, train_step
from vcluster import report

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Picture(NamedTuple):
    make: Callable[[], Any]
    """The object."""
    width: int
    height: int
    """Pixels that its HTML takes."""


def _plans() -> Any:
    spec = models.TransformerSpec(layers=4, width=512, heads=8, vocabulary=4096, sequence=512)
    return find_plan(spec, hardware="dgx-h100", devices=8, batch=32, tp=[1, 2, 4], zero=[0, 1], recompute="none")


def _step() -> Any:
    spec = models.TransformerSpec(layers=8, width=4096, heads=32, vocabulary=4096, sequence=2048)
    return find_plan(spec, hardware="dgx-h100", devices=4, batch=8, tp=2, pp=2, microbatch=2, recompute="none",
                     schedule="1f1b").best.simulate()


def _schedules() -> Any:
    costs = {"F": 1, "B": 2, "message": 0.5}
    gpipe, one = (Pipeline(4, 6, name).schedule.timeline(costs) for name in ("gpipe", "1f1b"))
    return gpipe.beside(one)


PICTURES = {
    "sharding": Picture(lambda: TensorSharding("dp", "tp").draw((7, 30), Mesh(dp=2, tp=4)), 560, 204),
    "layouts": Picture(program, 560, 332),
    "strategies": Picture(lambda: Strategy(DataParallel("dp"), TensorParallel("tp"), Zero(1, "dp")), 860, 150),
    "attention": Picture(lambda: plan_resharding(
        TensorSharding("cp", None), TensorSharding(None, "cp"), (16, 8), "float32", Mesh(cp=4)), 800, 484),
    "ir": Picture(lambda: train_step(models.mlp((64, 128, 270), ir.symbol("B")), Adam(1e-3)), 800, 330),
    "simulation": Picture(_step, 900, 540),
    "traces": Picture(lambda: report.compare(trace(), trace(1.5)), 800, 640),
    "hardware": Picture(lambda: Hardware.preset("dgx-h100:4"), 900, 380),
    "planning": Picture(_plans, 800, 512),
    "1f1b-or-gpipe": Picture(_schedules, 860, 490),
}
"""By page."""


def svg(picture: Picture) -> str:
    """The file."""
    html = picture.make()._repr_html_().replace("<details open>", '<details open="">')
    html = re.sub(r" in [\d.]+\ss(?=;)", "", html)     # of the machine that made it
    html = re.sub("<svg (?!xmlns)", '<svg xmlns="http://www.w3.org/2000/svg" ', html)
    html = html.replace('<div class="vcluster">', '<div class="vcluster" xmlns="http://www.w3.org/1999/xhtml">', 1)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" width="{picture.width}" '
            f'height="{picture.height}"><foreignObject width="100%" height="100%">{html}</foreignObject></svg>\n')


if __name__ == "__main__":
    for name, each in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(svg(each), encoding="utf-8")
