"""A page of a title and a body, which needs no other file: of a sweep, of plans to serve, or of layouts."""

from html import escape
from pathlib import Path

from parallelism.whole_files import written_whole

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="ascii"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1em auto; padding: 0 1em; max-width: 75em; font: 14px sans-serif; }}
body {{ background: Canvas; color: CanvasText; }}
pre {{ overflow-x: auto; }}
h1 {{ font-size: 1.2em; }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def write_plain_page(title: str, body: str, path: Path) -> None:
    """Write the page; the ``body`` is HTML."""
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(_PAGE.format(title=escape(title), body=body))


def as_shown(text: str) -> str:
    """The HTML of a text as a terminal shows it."""
    return f"<pre>{escape(text)}</pre>"
