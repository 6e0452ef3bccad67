"""A timeline of a schedule as an SVG picture: one row for each rank, with boxes to the scale of the costs.

Forwards and the kinds of backward differ in colour, in hatching, and in the letter in each box that has room for one.
Each box has a tooltip with its action.
"""

from collections.abc import Iterator
from html import escape

from parallelism.pipelining.actions import OVERLAPPED
from parallelism.pipelining.text_picture import COLOURS, sizes
from parallelism.pipelining.timing import ScheduleTimeline, Span

_WIDTH, _MARGIN, _TOP, _ROW, _BOX, _LETTER = 900, 64, 34, 30, 24, 6.6
_MEANING = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
_HATCH = {"B": "M0 6L6 0", "I": "M0 3H6", "W": "M3 0V6"}
_INK = "#1f2933"


def svg(timeline: ScheduleTimeline) -> str:
    """The SVG text, which is a complete file and can also be part of a page."""
    schedule, total = timeline.schedule, timeline.makespan or 1
    left = min((row[0].start for row in timeline.spans if row), default=0)
    scale = _WIDTH / total
    height = _TOP + _ROW * schedule.ranks + 58
    title = f"{sizes(schedule)}; makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%} of it"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_MARGIN + _WIDTH + 12} {height}" '
        f'width="{_MARGIN + _WIDTH + 12}" height="{height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        "<defs>",
        *(
            f'<pattern id="pipeline-{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{path}" stroke="{_INK}" stroke-opacity=".22"/></pattern>'
            for kind, path in _HATCH.items()
        ),
        "</defs>",
        f'<rect width="{_MARGIN + _WIDTH + 12}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="20" font-weight="600">{escape(title)}</text>',
    ]
    for rank, row in enumerate(timeline.spans):
        y = _TOP + _ROW * rank
        lines += [f'<text x="8" y="{y + 16}">rank {rank}</text>',
                  f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH}" height="{_BOX}" fill="#f1f3f5"/>']
        for span in row:
            lines += _box(span, _MARGIN + (span.start - left) * scale, y, (span.end - span.start) * scale, timeline)
        lines += _pairs(timeline, rank, left, scale, y)
    lines += _legend(timeline, total, _TOP + _ROW * schedule.ranks)
    return "\n".join([*lines, "</svg>", ""])


def _box(span: Span, x: float, y: float, width: float, timeline: ScheduleTimeline) -> Iterator[str]:
    stage, kind, k = span.action
    yield (
        f'<g><title>{span.action}: {span.start:g} to {span.end:g}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}" fill="{COLOURS[kind]}" stroke="#fff"/>'
    )
    if kind in _HATCH:
        yield f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}" fill="url(#pipeline-{kind})"/>'
    words = (f"{stage}{kind}{k}", f"{kind}{k}", kind) if timeline.schedule.chunks > 1 else (f"{kind}{k}", kind)
    fitting = next((word for word in words if len(word) * _LETTER + 4 <= width), None)
    if fitting:
        yield f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11">{fitting}</text>'
    yield "</g>"


def _pairs(timeline: ScheduleTimeline, rank: int, left: float, scale: float, y: int) -> Iterator[str]:
    """Frames around the two actions of each overlapped pair."""
    spans = {span.action: span for span in timeline.spans[rank]}
    for step in timeline.schedule.actions[rank]:
        if step.kind == OVERLAPPED:
            first, last = (spans[work] for work in step.works)
            x, width = _MARGIN + (first.start - left) * scale, (last.end - first.start) * scale
            yield (
                f'<rect x="{x + 1:.2f}" y="{y + 1}" width="{max(width - 2, 0):.2f}" height="{_BOX - 2}" fill="none" '
                f'stroke="{_INK}" stroke-width="1.5"/>'
            )


def _legend(timeline: ScheduleTimeline, total: float, y: int) -> Iterator[str]:
    yield (f'<text x="{_MARGIN}" y="{y + 14}">0</text>\n'
           f'<text x="{_MARGIN + _WIDTH}" y="{y + 14}" text-anchor="end">{total:g}</text>')
    x = _MARGIN
    kinds = {span.action.kind for row in timeline.spans for span in row}
    for kind in (kind for kind in _MEANING if kind in kinds):
        fills = [COLOURS[kind], *([f"url(#pipeline-{kind})"] if kind in _HATCH else [])]
        yield from (f'<rect x="{x}" y="{y + 26}" width="20" height="16" fill="{fill}"/>' for fill in fills)
        yield (f'<text x="{x + 10}" y="{y + 38}" text-anchor="middle" font-size="11">{kind}</text>\n'
               f'<text x="{x + 26}" y="{y + 38}">{_MEANING[kind]}</text>')
        x += 50 + round(len(_MEANING[kind]) * _LETTER)
    if any(step.kind == OVERLAPPED for row in timeline.schedule.actions for step in row):
        yield (f'<rect x="{x}" y="{y + 26}" width="20" height="16" fill="none" stroke="{_INK}" stroke-width="1.5"/>\n'
               f'<text x="{x + 26}" y="{y + 38}">run together</text>')
