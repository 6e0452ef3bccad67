"""A picture as text and as HTML.  Long lines are folded, and large grids are cut to fit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parallelism.display.quantities import WIDTH

MOST_ROWS = 16
"""The largest number of rows of a picture in text."""
MOST_HTML = 64
"""The largest number of rows and of columns of a picture in HTML."""


@dataclass(frozen=True)
class Drawing:
    """A picture as text and as HTML: ``print`` it, or display it in a notebook."""

    text: str
    """The picture in at most 80 columns."""
    html: str
    """The picture as an HTML table."""

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def picked(items: Sequence[Any], places: Iterable[int | None], gap: Any) -> list[Any]:
    """The items at the places that `kept` gives; ``gap`` for None."""
    found = []
    for place in places:
        found.append(gap if place is None else items[place])
    return found


def kept(count: int, most: int) -> list[int | None]:
    """The numbers below ``count``; if there are more than ``most``, some of them, with None for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(max(1, most - 2)), None, count - 1] if most > 2 else [0, None][: max(most, 1)]


def folded(text: str) -> list[str]:
    """The text as lines of at most `WIDTH` characters."""
    lines = [""]
    for word in text.split(" "):
        while len(word) > WIDTH:
            lines.append(word[:WIDTH])
            word = word[WIDTH:]
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return [line for line in lines if line]
