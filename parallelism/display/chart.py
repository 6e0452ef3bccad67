"""Bars over a time axis as SVG: rows, ticks at round times, and a legend.

Text stands only where there is room for it.  Coordinates are pixels; a chart is as wide as its bars need and is never
shrunk, so that its text keeps its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10
from zlib import crc32

from parallelism.display.markup import VARIABLES

LETTER = 6.9
"""The width of a letter of 12 px, in pixels, at most."""


class Chart:
    """An SVG picture that grows downwards.  ``span`` is the time from the first to the last pixel of the bars."""

    def __init__(self, title: str, *, begin: float, span: float, width: float, margin: float) -> None:
        self.title, self.begin, self.span = title, begin, span or 1.0
        self.width, self.margin = width, margin
        self.y = 4.0
        self._lines: list[str] = []
        self.mark = f"p{crc32(repr((title, width, span)).encode()):x}"
        """A name for what the picture refers to inside itself; pictures on one page do not share it."""

    def at(self, time: float) -> float:
        """The place of a time."""
        return self.margin + (time - self.begin) * self.width / self.span

    def add(self, *lines: str) -> None:
        """Elements of SVG."""
        self._lines += lines

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        quiet: bool = False,
    ) -> None:
        """A line of text whose baseline is at ``y``."""
        ends = "" if anchor == "start" else f' text-anchor="{anchor}"'
        fill = ' fill="var(--quiet)"' if quiet else ""
        sized = "" if size == 12 else f' font-size="{size}"'
        self.add(f'<text x="{x:.1f}" y="{y:.1f}"{ends}{sized}{fill}>{escape(text)}</text>')

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        tip: str = "",
        more: str = "",
    ) -> None:
        """A bar; ``tip`` is shown when it is pointed at."""
        told = f"<title>{escape(tip)}</title>" if tip else ""
        end = f">{told}</rect>" if told else "/>"
        self.add(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" '
            f'fill="{fill}"{more}{end}'
        )

    def axis(self, label: Callable[[float], str]) -> None:
        """Ticks at round times below what was drawn."""
        y, last = self.y, -1e9
        self.add(f'<path d="M{self.margin:.1f} {y:.1f}h{self.width:.1f}" stroke="var(--line)"/>')
        for tick in ticks(self.span, max(2, int(self.width / 90))):
            last = self.tick(self.at(self.begin + tick), y, label(tick), last)
        self.y += 24

    def tick(self, x: float, y: float, words: str, last: float) -> float:
        """A tick of an axis at ``y``, with its words if those before, which end at ``last``, leave room.

        Returns where the last words end now.
        """
        room = len(words) * LETTER
        left = min(max(x - room / 2, 0), self.margin + self.width + 8 - room)
        self.add(f'<path d="M{x:.1f} {y:.1f}v4" stroke="var(--quiet)"/>')
        if left <= last + 8:
            return last
        self.text(left + room / 2, y + 17, words, anchor="middle", quiet=True)
        return left + room

    def legend(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """Swatches: fill, letter and meaning of each; they go on below where the line is full."""
        x, line = 8.0, min(self.margin + self.width, 540)
        for fill, letter, words in entries:
            needed = 30 + len(words) * LETTER
            if x + needed > line and x > 8:
                x, self.y = 8.0, self.y + 22
            for each in fill.split("|"):
                self.rect(x, self.y + 3, 22, 15, each)
            if letter:
                self.text(x + 11, self.y + 15, letter, anchor="middle", size=11)
            self.text(x + 28, self.y + 15, words)
            x += needed + 14
        self.y += 26 if entries else 0

    def svg(self, *, alone: bool) -> str:
        """The picture; ``alone`` as a whole file with its own ground, else as a part of a page."""
        width, height = self.margin + self.width + 12, self.y + 4
        style = f"<style>{VARIABLES}</style>" if alone else ""
        ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="var(--paper)"/>' if alone else ""
        kind = ' class="vcluster"' if alone else ""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg"{kind} viewBox="0 0 {width:.0f} {height:.0f}" '
                f'width="{width:.0f}" height="{height:.0f}" role="img" font-family="system-ui, sans-serif" '
                f'font-size="12" fill="var(--ink)">',
                style + f"<title>{escape(self.title)}</title>" + ground,
                *self._lines,
                "</svg>",
                "",
            ]
        )


def ticks(span: float, most: int) -> list[float]:
    """At most about ``most`` round times from 0 to ``span``.

    >>> ticks(33, 6)
    [0.0, 10.0, 20.0, 30.0]
    """
    least = span / most
    power = 10.0 ** floor(log10(least))
    step = next(power * size for size in (1, 2, 5, 10, 20) if power * size >= least * (1 - 1e-9))
    return [step * i for i in range(int(span / step * (1 + 1e-9)) + 1)]


def room_for(words: Sequence[str], width: float, letter: float = LETTER) -> str:
    """The first of the words that ``width`` pixels have room for; nothing if none fits."""
    return next((word for word in words if len(word) * letter + 4 <= width), "")
