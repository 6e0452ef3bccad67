"""Docstrings as Markdown: an example becomes a block of code."""

from __future__ import annotations

import re

import griffe

_EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n(?![ ]*\n|[ ]*$).+)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Fence the examples, which end at an empty line."""
    return _EXAMPLE.sub(lambda found: f"\n{found[1]}```pycon\n{found[0]}\n{found[1]}```\n", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
