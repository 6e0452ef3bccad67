"""What `plan --auto` writes: a document of figures, and the page of the program coloured by layout."""

from html import escape
from pathlib import Path
from typing import Any

from parallelism.auto_sharding import AutoPlans
from parallelism.display.quantities import decimal_bytes, seconds
from parallelism.mesh import Mesh
from parallelism.whole_files import written_whole

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="ascii"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1em auto; padding: 0 1em; max-width: 75em; font: 14px sans-serif; }}
body {{ background: Canvas; color: CanvasText; }}
pre {{ overflow-x: auto; }}
h1 {{ font-size: 1.2em; }}
</style></head><body><h1>{title}</h1><p>{verdict}</p><pre>{text}</pre>{program}</body></html>
"""


def layouts_document(plans: AutoPlans) -> dict[str, Any]:
    """The figures of layouts that were found, for JSON: those of the best mesh, and one line for each mesh."""
    document: dict[str, Any] = {
        "program": plans.function.name,
        "hardware": plans.hardware.name,
        "devices": plans.devices,
        "memory_bytes": plans.limit_bytes,
        "meshes": [
            *(
                {
                    "mesh": _extents(each.mesh),
                    "seconds": each.seconds,
                    "peak_bytes": each.peak_bytes,
                    "gap": each.choice.gap,
                }
                for each in plans.solutions
            ),
            *(
                {"mesh": _extents(each.mesh), "least_bytes": each.least_bytes, "refused": each.reason}
                for each in plans.refused
            ),
        ],
    }
    if plans:
        best = plans.best
        document |= {
            "layouts": {
                name: best.layout(name).short() for each in best.problem.values for name in each.names
            },
            "collectives": [
                {"kind": each.kind, "axes": list(each.axes), "calls": each.calls, "bytes": each.nbytes}
                for each in best.collectives
            ],
        }
    return document


def write_layouts(plans: AutoPlans, path: Path) -> None:
    """Write the page: the verdict, the tables, and the program with its layouts and the collectives between."""
    title = f"@{plans.function.name} on {plans.devices} devices of {plans.hardware.name}"
    verdict, program = "Nothing fits.", ""
    if plans:
        best = plans.best
        verdict = (
            f"{seconds(best.seconds)} a step on {best.mesh!r}, {decimal_bytes(best.peak_bytes)} on each device. "
            "Below, values are coloured by the axes that split them; reshard is a change of layout."
        )
        program = best.function._repr_html_()
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(
            _PAGE.format(
                title=escape(title), verdict=escape(verdict), text=escape(str(plans)), program=program
            )
        )


def _extents(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.shape)
