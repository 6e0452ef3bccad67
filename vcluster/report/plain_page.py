"""A page of a title and a body, which needs no other file: of a sweep, of plans to serve, or of layouts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from parallelism.display.markup import text_of
from parallelism.display.quantities import WIDTH
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
    """The HTML of a text that a command prints: its sentences flow, its tables and its lines of code keep their columns."""
    return "".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    """Only what is aligned, or set in, has two spaces in a row."""
    if "  " in text:
        return f'<pre tabindex="0">{escape(text)}</pre>'
    return "".join(f"<p>{text_of(each)}</p>" for each in _sentences(text.splitlines()))


def _sentences(lines: Sequence[str]) -> list[str]:
    """The lines, joined where they were folded: a line that had room for the next word was ended on purpose."""
    joined: list[str] = []
    room = WIDTH
    for line in lines:
        word = line.split(" ", 1)[0]
        if joined and len(word) > room:
            joined[-1] += f" {line}"
        else:
            joined.append(line)
        room = WIDTH - len(line) - 1
    return joined
