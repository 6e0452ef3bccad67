"""Points over two linear axes that begin at 0, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallelism.display.chart import LETTER, Chart, ticks
from parallelism.display.quantities import given

HEIGHT = 290.0
ROOM = 1.08
"""The axes end so many times as far as the last point."""


class PointChart(Chart):
    """A chart whose axes reach to ``furthest`` and ``highest``, and a little further.

    ``across`` and ``up`` name the axes; the chart goes on below them.
    """

    def __init__(
        self,
        title: str,
        *,
        across: str,
        up: str,
        furthest: float,
        highest: float,
        width: float,
        margin: float,
    ) -> None:
        super().__init__(title, begin=0.0, span=ROOM * furthest, width=width, margin=margin)
        self.most = ROOM * highest or 1.0
        self.text(8, self.y + 12, up, quiet=True)
        self.floor = self.y + 24 + HEIGHT
        for tick in ticks(self.most, 5):
            y = self.height_of(tick)
            self.add(f'<path d="M{margin} {y:.1f}h{width}" stroke="var(--line)"/>')
            self.text(margin - 6, y + 4, given(tick).strip(), anchor="end", quiet=True)
        last = -1e9
        for tick in ticks(self.span, 7):
            last = self.tick(self.at(tick), self.floor, f"{tick:g}", last)
        self.text(margin + width, self.floor + 34, across, anchor="end", quiet=True)
        self.y = self.floor + 46
        self._labels: list[tuple[float, float, float]] = []

    def height_of(self, value: float) -> float:
        """The place of a value on the axis that goes up."""
        return self.floor - value / self.most * HEIGHT

    def line(self, points: Sequence[tuple[float, float]], ink: str) -> None:
        """A line through points, which are values across and up."""
        path = " ".join(f"{self.at(x):.1f},{self.height_of(y):.1f}" for x, y in points)
        self.add(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.5"/>')

    def point(self, across: float, up: float, ink: str, tip: str) -> None:
        """A point, which tells ``tip`` when it is pointed at."""
        self.add(
            f'<circle cx="{self.at(across):.1f}" cy="{self.height_of(up):.1f}" r="5" fill="{ink}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def limit(self, across: float, words: str) -> None:
        """A dashed line at a value across, with its words where there is room for them."""
        x = self.at(across)
        anchor, side = self._side(x, words, 4)
        dashes = 'stroke="var(--quiet)" stroke-dasharray="4 3"'
        self.add(f'<path d="M{x:.1f} {self.floor:.1f}v{-HEIGHT:.1f}" {dashes}/>')
        self.text(x + side, self.floor - HEIGHT + 10, words, anchor=anchor, quiet=True)

    def label(self, across: float, up: float, words: str) -> None:
        """The words of a point, on the side where there is room for them; none where those of another point stand."""
        x, y, room = self.at(across), self.height_of(up) - 6, len(words) * LETTER
        anchor, side = self._side(x, words, 8)
        left = x + side if anchor == "start" else x + side - room
        if all(
            left > end or left + room < begin or abs(y - other) > 11 for begin, end, other in self._labels
        ):
            self._labels.append((left, left + room, y))
            self.text(x + side, y, words, anchor=anchor, size=11)

    def _side(self, x: float, words: str, gap: float) -> tuple[str, float]:
        """The anchor of words beside a place, and how far from it they stand: at its right if they fit there."""
        is_right = x + gap + len(words) * LETTER < self.margin + self.width + 12
        return ("start", gap) if is_right else ("end", -gap)
