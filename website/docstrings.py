"""Docstrings as Markdown.

An example becomes a block of code, a term with its explanation below it an item of a list, a bracket no link.
"""

from __future__ import annotations

import re

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)
_TERM = re.compile(r"^(``.*)\n(?= {4}\S)((?: {4}.*\n?)+)", re.MULTILINE)
_CODE = re.compile(r"(^ *```.*?^ *```$|``.+?``|`[^`]+`)", re.MULTILINE | re.DOTALL)
_BRACKET = re.compile(r"\[(?![^\[\]]*\]\()")


def as_markdown(text: str) -> str:
    """Fence the examples, which end at an empty line, and escape brackets that begin no link."""
    listed = _TERM.sub(lambda found: f"\n{found[1]}\n:   {found[2][4:]}", text)
    fenced = _EXAMPLE.sub(lambda found: f"\n{found[1]}```pycon\n{found[0]}\n{found[1]}```\n", listed)
    parts = _CODE.split(fenced)
    parts[::2] = [_BRACKET.sub(r"\\[", part) for part in parts[::2]]
    return "".join(parts)
