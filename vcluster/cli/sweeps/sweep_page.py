"""The page of a sweep: its picture, days against cost, and its table."""

from html import escape
from pathlib import Path

from parallelism.budgets import Sweep
from parallelism.budgets.picture import picture
from parallelism.display.markup import figure, wide
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


def write_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Write the page.  It needs no other file."""
    drawn = picture(sweep)
    with written_whole(path, errors="xmlcharrefreplace") as file:
        file.write(
            _PAGE.format(
                title=escape(title),
                picture=figure(wide(drawn), title="days against cost") if drawn else "",
                text=escape(str(sweep)),
            )
        )
