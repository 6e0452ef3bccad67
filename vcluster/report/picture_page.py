"""A page of one picture and a text, which needs no other file: of a sweep, or of plans to serve."""

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
</style></head><body><h1>{title}</h1>{picture}<pre>{text}</pre></body></html>
"""


def write_picture_page(title: str, picture: str, text: str, path: Path) -> None:
    """Write the page of a ``picture``, which is HTML, above a ``text``."""
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(_PAGE.format(title=escape(title), picture=picture, text=escape(text)))
