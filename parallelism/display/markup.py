"""HTML for notebooks: one frame with its colours, tables, and grids of cells.

A picture is one ``<div>`` that needs no script from elsewhere and no other file.  Its colours are those of the reader's
scheme, light or dark; a notebook that has a scheme of its own (JupyterLab, VS Code) says so, and is followed.  What is
wider than the page scrolls inside the picture.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from parallelism.display.quantities import unbroken

Cell = object
"""What a table shows: text that is escaped, or `Markup`."""

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#12161c"),
    "panel": ("#f3f5f7", "#1c232b"),
    "ink": ("#1c2128", "#e6e9ee"),
    "quiet": ("#57606a", "#a5b0bc"),
    "line": ("#d0d7de", "#3a444f"),
    "accent": ("#0550ae", "#79b8ff"),
    "forward": ("#cfe3f7", "#1d4468"),
    "backward": ("#f7d9c4", "#6d3c18"),
    "input": ("#f5e6bf", "#5c4a12"),
    "weights": ("#d3ecce", "#27512a"),
    "recompute": ("#e3d4f3", "#4c3168"),
    "other": ("#d9e2e6", "#37474f"),
    "communication": ("#bfe6d0", "#1b5236"),
    "wait": ("#aab4be", "#56616d"),
    "hatch": ("rgba(28,33,40,.2)", "rgba(230,233,238,.2)"),
}
"""By name, the colour on a light and on a dark ground.  ``ink`` is read on all of them but ``wait``."""

_FRAME = ".vcluster" * 3
"""The frame in a selector, three times: so its rules outweigh those of JupyterLab, in which all tables are flush right."""
_NAMES = {name: f"--{name}:light-dark({light},{dark});" for name, (light, dark) in COLOURS.items()}
VARIABLES = (
    f".vcluster{{color-scheme:light dark;{''.join(_NAMES.values())}}}"
    'body[data-jp-theme-light="false"] .vcluster,body.vscode-dark .vcluster,html[theme="dark"] .vcluster'
    "{color-scheme:dark}"
    'body[data-jp-theme-light="true"] .vcluster,body.vscode-light .vcluster{color-scheme:light}'
)
"""The style that gives the colours their names."""

_RULES = (
    "{background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif;padding:8px 10px;max-width:100%;"
    "box-sizing:border-box;text-align:left}",
    " .row{display:flex;flex-wrap:wrap;gap:10px 28px;align-items:flex-start}",
    " .row>div{min-width:0;max-width:100%}",
    " .wide{overflow-x:auto;max-width:100%}",
    " .narrow{display:none}",
    " .title{font-weight:600;margin:0 0 6px;overflow-wrap:anywhere}",
    " .quiet{color:var(--quiet);font-size:13px;overflow-wrap:anywhere;margin:2px 0}",
    " table{border-collapse:collapse;table-layout:auto;font-size:13px;font-variant-numeric:tabular-nums;margin:6px 0;"
    "background:none;color:inherit;border:0}",
    " caption{text-align:left;color:var(--quiet);padding:2px 0;caption-side:top}",
    " tr{background:none!important}",
    " :is(th,td){padding:2px 14px 2px 0;text-align:right;white-space:nowrap;border:0;vertical-align:top;color:inherit;"
    "line-height:1.45;background:none;max-width:none}",
    " th{font-weight:600;color:var(--quiet)}",
    " .left{text-align:left}",
    " .facts td{white-space:normal}",
    " .facts th{min-width:max-content}",
    " thead th{border-bottom:1px solid var(--line);white-space:normal}",
    " :is(code,pre){font:12.5px/1.45 ui-monospace,monospace;background:none;color:inherit;padding:0;margin:0;"
    "border:0}",
    " pre{white-space:pre}",
    " td code{white-space:pre-wrap;overflow-wrap:anywhere}",
    " svg{display:block}",
    " .grid{display:grid;gap:1px;background:var(--line);border:1px solid var(--line);width:max-content;min-width:120px;"
    "font-size:13px}",
    " .grid>*{background:var(--paper);padding:3px 8px;text-align:center;display:flex;align-items:center;"
    "justify-content:center;white-space:nowrap}",
    " .grid>.head{color:var(--quiet);background:var(--panel)}",
    " details{margin:1px 0}",
    " summary{cursor:pointer;overflow-wrap:anywhere}",
    " details>div{margin-left:14px;border-left:1px solid var(--line);padding-left:8px}",
    " input[type=range]{width:min(420px,60%);vertical-align:middle;accent-color:var(--accent)}",
    " [hidden]{display:none!important}",
)
STYLE = (
    VARIABLES
    + "".join(f"{_FRAME}{rule}" for rule in _RULES)
    + (
        f"@media(max-width:680px){{{_FRAME} .broad{{display:none}}{_FRAME} .narrow{{display:block}}}}"
        f"@media(max-width:500px){{{_FRAME} th,{_FRAME} td{{padding-right:7px}}{_FRAME} table{{font-size:12px}}}}"
        f"{_FRAME} tr>:last-child{{padding-right:0}}"
    )
)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def figure(*parts: str, title: str = "") -> Markup:
    """A picture: its parts, which are HTML, below a title, which is text."""
    head = f'<div class="title">{text_of(title)}</div>' if title else ""
    return Markup(f'<div class="vcluster"><style>{STYLE}</style>{head}{"".join(parts)}</div>')


def inside(picture: str) -> Markup:
    """A picture as part of another one."""
    return Markup(
        picture.replace(f"<style>{STYLE}</style>", "", 1).replace('class="vcluster"', 'class="part"', 1)
    )


def beside(*parts: str) -> Markup:
    """The parts beside each other where there is room, else below each other."""
    return Markup(f'<div class="row">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>')


def wide(part: str) -> Markup:
    """A part that scrolls where it is wider than the page.  It can be reached by keys."""
    return Markup(f'<div class="wide" tabindex="0">{part}</div>')


def broad_or_narrow(broad: str, narrow: str) -> Markup:
    """One picture drawn twice: ``broad``, and ``narrow`` for the screen of a phone, which shows only this one."""
    return Markup(f'<div class="broad">{wide(broad)}</div><div class="narrow">{wide(narrow)}</div>')


def note(text: str) -> Markup:
    """A line of quiet text."""
    return Markup(f'<div class="quiet">{text_of(text)}</div>')


def preformatted(text: str) -> Markup:
    """Text as a terminal shows it."""
    return wide(f"<pre>{escape(text)}</pre>")


def folded_away(summary: str, part: str, *, is_open: bool = False) -> Markup:
    """A part that is shown on a click on ``summary``, which is text."""
    return Markup(
        f"<details{' open' * is_open}><summary>{text_of(summary)}</summary><div>{part}</div></details>"
    )


def table(
    rows: Iterable[Sequence[Cell]],
    heads: Sequence[str] = (),
    *,
    left: int = 1,
    caption: str = "",
) -> Markup:
    """A table that scrolls where it is wide.  The first ``left`` columns are flush left, others flush right."""

    def cells(tag: str, row: Sequence[Cell]) -> str:
        flush_left = [f'<{tag} class="left">{text_of(cell)}</{tag}>' for cell in row[:left]]
        flush_right = [f"<{tag}>{text_of(cell)}</{tag}>" for cell in row[left:]]
        return "".join(flush_left + flush_right)

    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return wide(f"<table>{above}{head}<tbody>{body}</tbody></table>")


def facts(rows: Iterable[tuple[str, Cell]]) -> Markup:
    """A table of names and what they are."""
    body = "".join(
        f'<tr><th class="left">{escape(name)}</th><td class="left">{text_of(value)}</td></tr>'
        for name, value in rows
    )
    return wide(f'<table class="facts"><tbody>{body}</tbody></table>')


def grid(
    columns: Sequence[tuple[str, float]],
    rows: Sequence[tuple[str, float]],
    cells: Sequence[Sequence[tuple[str, int]]],
    *,
    width: float = 240.0,
    height: float = 130.0,
) -> Markup:
    """A grid of cells in proportion: labels and extents of its columns and rows, and by row the cells.

    A cell is its text, and the number of its colour, -1 for none; it is never smaller than its text.
    """
    across = sum(extent for _, extent in columns) or 1.0
    down = sum(extent for _, extent in rows) or 1.0
    widths = " ".join(f"minmax(max-content,{width * extent / across:.0f}px)" for _, extent in columns)
    heights = " ".join(f"minmax(max-content,{height * extent / down:.0f}px)" for _, extent in rows)
    parts = [
        '<div class="head"></div>',
        *(f'<div class="head">{escape(label)}</div>' for label, _ in columns),
    ]
    for (label, _), row in zip(rows, cells, strict=True):
        parts.append(f'<div class="head">{escape(label)}</div>')
        parts += [f'<div style="background:{tint(number)}">{escape(text)}</div>' for text, number in row]
    return wide(
        f'<div class="grid" style="grid-template-columns:max-content {widths};'
        f'grid-template-rows:max-content {heights}">{"".join(parts)}</div>'
    )


def tint(number: int) -> str:
    """A colour on which text is read, light or dark.  Numbers that follow each other get very different hues.

    That of a negative number is the ground.
    """
    hue = number * 137 % 360
    if number < 0:
        return "var(--paper)"
    return f"light-dark(hsl({hue},60%,88%),hsl({hue},45%,24%))"


def text_of(value: Cell) -> str:
    """The HTML of a cell: of text, it never breaks between a number and its unit."""
    return value if isinstance(value, Markup) else unbroken(escape(str(value)))
