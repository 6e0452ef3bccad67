"""Two traces on one page, each as it is shown alone: what was predicted beside what was run."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from os import PathLike
from pathlib import Path

from parallelism.hardware import Hardware
from parallelism.trace import Trace
from vcluster.report.comparison import compare
from vcluster.report.page import page
from vcluster.report.payload import payload
from vcluster.report.roofline import hardware_named

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="ascii"><title>{title}</title><style>
body {{ margin: 0; font: 14px sans-serif; background: Canvas; color: CanvasText; color-scheme: light dark; }}
pre {{ margin: 1em; overflow-x: auto; }}
main {{ display: flex; flex-wrap: wrap; }}
section {{ flex: 1 1 40em; min-width: 0; }}
h2 {{ margin: 0 1em; font-size: 1em; }}
iframe {{ width: 100%; height: 90vh; border: 0; }}
</style></head><body><pre>{told}</pre><main>{sections}</main></body></html>
"""


def beside(traces: Mapping[str, Trace], path: str | PathLike[str], *, hardware: Hardware | None = None) -> None:
    """Writes a page with the pages of two traces side by side, and above them how they compare; by title.

    The rooflines have the roof of ``hardware``; None: of what each trace names, as in `vcluster.report.html`.
    ``ValueError`` for another number of traces; ``OSError`` if the file cannot be written.
    """
    if len(traces) != 2:
        raise ValueError(f"two traces stand beside each other, got {len(traces)}")
    pages = {title: page(payload(trace, hardware=hardware or hardware_named(trace))) for title, trace in traces.items()}
    sections = "".join(
        f'<section><h2>{escape(title)}</h2><iframe title="{escape(title)}" srcdoc="{escape(text)}"></iframe></section>'
        for title, text in pages.items())
    title, told = " and ".join(traces), str(compare(*traces.values()))
    text = _PAGE.format(title=escape(title), told=escape(told), sections=sections)
    Path(path).write_text(text, encoding="ascii", errors="xmlcharrefreplace")
