"""Two traces on one page, side by side: for example a simulated and an executed run."""

from collections.abc import Mapping
from html import escape
from os import PathLike

from parallelism.hardware import Hardware
from parallelism.trace import Trace
from parallelism.whole_files import written_whole
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
</style></head><body><pre>{comparison}</pre><main>{sections}</main></body></html>
"""


def beside(
    traces: Mapping[str, Trace], path: str | PathLike[str], *, hardware: Hardware | None = None
) -> None:
    """Write a page with the pages of two traces side by side, and their comparison above. ``traces`` is by title.

    The rooflines use the roof of ``hardware``, or with None that of the hardware each trace names, as in
    `vcluster.report.html`. ``ValueError`` if there are not two traces; ``OSError`` if the file cannot be written.
    """
    if len(traces) != 2:
        raise ValueError(f"beside() needs two traces, got {len(traces)}")
    sections = ""
    for title, trace in traces.items():
        text = escape(page(payload(trace, hardware=hardware or hardware_named(trace))))
        name = escape(title)
        sections += f'<section><h2>{name}</h2><iframe title="{name}" srcdoc="{text}"></iframe></section>'
    text = _PAGE.format(
        title=escape(" and ".join(traces)),
        comparison=escape(str(compare(*traces.values()))),
        sections=sections,
    )
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(text)
