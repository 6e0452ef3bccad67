"""A trace as one HTML page that needs no network and no other file.

The page contains the data as JSON in which no character can end or begin a tag. It runs only its own script, because
its content security policy lists the hash of that script. Names from a trace become text, never markup.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from os import PathLike
from typing import Any

from parallelism.display.quantities import unbroken
from parallelism.hardware import Hardware
from parallelism.trace import Trace
from parallelism.whole_files import written_whole
from vcluster.report.payload import MOST_BARS, payload
from vcluster.report.roofline import hardware_named

SCRIPTS = {
    "timeline": "timeline.js",
    "split": "tables.js",
    "measured": "tables.js",
    "roofline": "roofline.js",
    "collectives": "tables.js",
    "matrix": "tables.js",
    "memory": "memory.js",
}
"""The sections of the page in order, and the script of each, which has a function of the same name."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def html(
    trace: Trace,
    path: str | PathLike[str],
    *,
    most_bars: int = MOST_BARS,
    hardware: Hardware | str | PathLike[str] | None = None,
) -> None:
    """Write the page of ``trace`` (or of a run) to ``path``.

    It shows the verdict, the timeline (zoom, pan, hover, critical path), the split of each device's time, virtual next
    to wall time, the roofline, the collectives, the communication matrix by axis, and memory over time. The roof is
    that of ``hardware``: a `Hardware`, a preset or a file. With None it is that of the hardware the trace names, if
    this is a preset or the calibrated machine. Of a trace with more than ``most_bars`` events, the timeline leaves out
    the shortest, and the page says so. ``OSError`` if the file cannot be written; ``ValueError`` for less than 1 bar,
    and for an unknown hardware.
    """
    text = _text_of(getattr(trace, "trace", trace), most_bars, hardware)
    with written_whole(path) as file:
        file.write(text)


def _text_of(trace: Trace, most_bars: int, hardware: Hardware | str | PathLike[str] | None) -> str:
    if most_bars < 1:
        raise ValueError(f"most_bars must be at least 1, got {most_bars}")
    roof = hardware_named(trace) if hardware is None else Hardware.of(hardware)
    return page(payload(trace, most_bars=most_bars, hardware=roof))


class TracePage:
    """The page of a trace, for a notebook: a cell that ends in it shows the page.  Elsewhere it is the summary."""

    def __init__(self, trace: Trace, text: str, height: int) -> None:
        self.trace, self.text, self.height = trace, text, height

    def __repr__(self) -> str:
        return self.trace.summary()

    def _repr_html_(self) -> str:
        # The frame may run the script of the page, and reaches nothing of the notebook.
        return (
            f'<iframe title="{escape(self.trace.devices_in_words)}" sandbox="allow-scripts" srcdoc="'
            f'{escape(self.text)}" style="width:100%;height:{self.height}px;border:0"></iframe>'
        )


def show(
    trace: Trace,
    *,
    height: int = 900,
    most_bars: int = MOST_BARS,
    hardware: Hardware | str | PathLike[str] | None = None,
) -> TracePage:
    """The page of ``trace`` (or of a run), in a cell of a notebook, ``height`` pixels high; see `html`."""
    trace = getattr(trace, "trace", trace)
    return TracePage(trace, _text_of(trace, most_bars, hardware), height)


def page(
    data: dict[str, Any],
    template: str = "page.html",
    sections: Mapping[str, str] = SCRIPTS,
    styles: Sequence[str] = ("page.css",),
    shared: Sequence[str] = (),
) -> str:
    """The page of a payload, in ASCII: a template, ``shared`` scripts and those of its sections, which run as one."""
    style = "".join(map(_text, styles))
    scripts = ("drawing.js", *shared, *dict.fromkeys(sections.values()))
    listed = f"const SECTIONS = {{{', '.join(sections)}}};"
    script = (
        "\n".join(['"use strict";\n(() => {', *map(_text, scripts), listed, _text("page.js")]) + "})();\n"
    )
    parts = {
        "POLICY": "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_hash(script)}'; style-src '{_hash(style)}'",
        "TITLE": escape(data["title"]),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded(data | _unbroken(data)),
    }
    return _filled(template, parts) + "\n"


def _unbroken(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sentences of the page, in which no line ends between a number and its unit."""
    found = {}
    for name in ("verdict", "notes"):
        if data.get(name):
            found[name] = [unbroken(sentence) for sentence in data[name]]
    return found


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts: what stands between ``@@`` is the name of a part, or else of another template.

    Parts that were put in are not scanned again.
    """
    texts = _text(template).removesuffix("\n").split("@@")  # text, name, text, name, ..., text
    for i in range(1, len(texts), 2):
        name = texts[i]
        texts[i] = parts[name] if name in parts else _filled(name, parts)
    return "".join(texts)


def embedded(data: Any) -> str:
    """JSON that is safe inside a ``<script>``: ASCII without ``<``, ``>`` and ``&``."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode("ascii")).digest()).decode("ascii")


def _text(name: str) -> str:
    return (files("vcluster.report") / name).read_text(encoding="ascii")
