"""An `Explanation` as a film: one SVG file whose frames follow each other by a style, without a script.

The frames are those of the player in a notebook.  Each is seen for a while, the last for twice as long.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from parallelism.collectives.explanation_picture import (
    columns,
    drawn,
    frame_size,
    moment,
    moments,
    shown_sentences,
)
from parallelism.collectives.explanation_text import heading
from parallelism.display.markup import VARIABLES

if TYPE_CHECKING:
    from parallelism.collectives.explanation import ExplainedStep, Explanation

_SECONDS = 1.8
"""How long a frame is seen."""
_LETTER, _BOLD, _LINE, _EDGE = 7.0, 8.0, 18, 10


def svg(explanation: Explanation) -> str:
    """The text of the file."""
    ranks, chunks, room = columns(explanation)
    frame_width, frame_height = frame_size(explanation, ranks, chunks, room)
    told, frames = [], []
    for step, held, before in moments(explanation):
        told.append([*shown_sentences(explanation, step), received(explanation, step)])
        frames.append("".join(drawn(explanation, step, held, before, ranks, chunks, room)))
    title = heading(explanation).partition(". ")[0]
    texts = [line for lines in told for line in lines]
    width = 2 * _EDGE + max(frame_width, len(title) * _BOLD, *(len(line) * _LETTER for line in texts))
    below = 2 * _LINE + 8 + frame_height
    height = below + _LINE * max(map(len, told)) + _EDGE
    parts = []
    for number, (step, _, _) in enumerate(moments(explanation)):
        lines = [
            f'<text x="6" y="{below + _LINE * (place + 1)}" fill="var(--quiet)">{escape(line)}</text>'
            for place, line in enumerate(told[number])
        ]
        last = " last" if number == len(frames) - 1 else ""
        parts.append(
            f'<g class="frame{last}" style="animation-delay:{number * _SECONDS:g}s" transform="translate({_EDGE - 6})">'
            f'<text x="6" y="{2 * _LINE}" fill="var(--accent)">{moment(explanation, step)}</text>'
            f'<g transform="translate(0 {2 * _LINE + 8})">{frames[number]}</g>{"".join(lines)}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="vcluster" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="var(--ink)">\n<style>{VARIABLES}{_motion(len(frames))}</style><title>{escape(title)}</title>'
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="var(--paper)"/>'
        f'<text x="{_EDGE}" y="{_LINE}" font-weight="600">{escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def received(explanation: Explanation, step: ExplainedStep | None) -> str:
    """What has arrived until after a step."""
    if step is None:
        return ""
    alike = len(set(step.bytes_received)) == 1
    whole = (
        f"{step.bytes_received[0]} bytes by each rank"
        if alike
        else f"{sum(step.bytes_received)} bytes by all ranks"
    )
    return f"received {'in all' if step.number == len(explanation) else 'so far'}: {whole}"


def _motion(frames: int) -> str:
    """The style that shows one frame after the other; without motion, the last."""
    if frames == 1:
        return ""
    share = 100 / (frames + 1)
    seconds = (frames + 1) * _SECONDS
    return (
        ".frame{visibility:hidden}.last{visibility:visible}"
        "@media(prefers-reduced-motion:no-preference){"
        f".frame{{visibility:hidden;animation:seen {seconds:g}s step-end infinite}}"
        f".last{{animation-name:seen-longer}}"
        f"@keyframes seen{{0%{{visibility:visible}}{share:.3f}%,100%{{visibility:hidden}}}}"
        f"@keyframes seen-longer{{0%{{visibility:visible}}{2 * share:.3f}%,100%{{visibility:hidden}}}}}}"
    )
