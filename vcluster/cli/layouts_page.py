"""What `plan --auto` writes: a document of figures, and the page of the program coloured by layout."""

from html import escape
from pathlib import Path
from typing import Any

from parallelism.auto_sharding import AutoPlans
from parallelism.display.quantities import decimal_bytes, seconds
from parallelism.mesh import Mesh
from vcluster.report.plain_page import as_shown, write_plain_page


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
    body = f"<p>{escape(verdict)}</p>{as_shown(str(plans))}{program}"
    write_plain_page(title, body, path)


def _extents(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.shape)
