"""Timelines of schedules as an SVG picture: one row for each rank, with boxes to the scale of the costs.

Forwards and the kinds of backward differ in colour, in hatching, and in the letter in each box that has room for one.
The stages of one rank differ in the hue of a strip along the box.  Below the boxes of a rank is the number of forwards
that it keeps.  Each box has a tooltip with its action.  Several timelines are drawn on one time axis.
"""

from collections.abc import Iterator, Sequence

from parallelism.display.chart import LETTER, Chart, room_for
from parallelism.display.drawing import kept
from parallelism.display.markup import figure, note, wide
from parallelism.display.quantities import fit, plural
from parallelism.pipelining.actions import OVERLAPPED
from parallelism.pipelining.text_picture import sizes
from parallelism.pipelining.timing import ScheduleTimeline, Span

_BOX, _STRIP, _GAP = 24, 12, 5
_MARK = 5
"""The height of the strip that tells stages of one rank apart."""
_NARROWEST, _WIDEST = 420, 16_000
_MOST_BOXES = 1500
"""The largest number of boxes in a notebook: of more, the first ranks and the last are shown."""
_FILL = {"F": "forward", "B": "backward", "I": "input", "W": "weights"}
_MEANING = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
_HATCH = {"B": "M0 6L6 0", "I": "M0 3H6", "W": "M3 0V6"}


def svg(
    timelines: Sequence[ScheduleTimeline], *, alone: bool = True, most_boxes: float = float("inf")
) -> str:
    """The SVG text; ``alone`` as a complete file, else as a part of a page."""
    titles = [title(timeline) for timeline in timelines]
    begin = min((row[0].start for each in timelines for row in each.spans if row), default=0)
    last = max(each.schedule.ranks for each in timelines) - 1
    chart = Chart(
        "; ".join(titles),
        begin=begin,
        span=max(each.makespan for each in timelines) or 1,
        width=max(map(_width, timelines)),
        margin=14 + 7 * len(f"rank {last}"),
    )
    chart.add(
        "<defs>",
        *(
            f'<pattern id="{chart.mark}-{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{path}" stroke="var(--hatch)"/></pattern>'
            for kind, path in _HATCH.items()
        ),
        "</defs>",
    )
    for words, timeline in zip(titles, timelines, strict=True):
        if alone or len(timelines) > 1:
            _heading(chart, words)
        longest = max(map(len, timeline.spans), default=1)
        for rank in kept(timeline.schedule.ranks, max(2, int(min(most_boxes, 1e9) // max(longest, 1)))):
            if rank is None:
                chart.text(8, chart.y + 12, f"… {timeline.schedule.ranks} ranks", quiet=True)
                chart.y += 20
            else:
                _row(chart, timeline, rank)
        chart.y += 6
    chart.axis(lambda time: f"{time:.6g}")
    _legend(chart, timelines)
    return chart.svg(alone=alone)


def html(timelines: Sequence[ScheduleTimeline]) -> str:
    """The picture for a notebook."""
    several = len(timelines) > 1
    return figure(
        wide(svg(timelines, alone=False, most_boxes=_MOST_BOXES)),
        *([] if several else [_below(timelines[0])]),
        title="Schedules on one time axis" if several else title(timelines[0]),
    )


def title(timeline: ScheduleTimeline) -> str:
    """The name, the sizes, the makespan and the bubble."""
    return f"{sizes(timeline.schedule)}; makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%} of it"


def _below(timeline: ScheduleTimeline) -> str:
    peaks = timeline.peak_live()
    return (
        note(f"at most {plural(max(peaks), 'forward')} kept on a rank") if timeline.schedule.training else ""
    )


def _width(timeline: ScheduleTimeline) -> float:
    """Such that the letters of the shortest action have room in its box."""
    spans = [span for row in timeline.spans for span in row if span.end > span.start]
    if not spans:
        return _NARROWEST
    shortest = min(span.end - span.start for span in spans)
    letters = max(len(_words(span, timeline)[0]) for span in spans)
    return min(max(timeline.makespan / shortest * (letters * LETTER + 5), _NARROWEST), _WIDEST)


def _heading(chart: Chart, words: str) -> None:
    """The words in as many lines as they need."""
    line = ""
    for word in words.split(" "):
        if line and (len(line) + 1 + len(word)) * 7.4 > chart.margin + chart.width:
            chart.text(8, chart.y + 13, line)
            chart.y += 17
            line = ""
        line = f"{line} {word}" if line else word
    chart.text(8, chart.y + 13, fit(line, int((chart.margin + chart.width) / 7.4)))
    chart.y += 22


def _row(chart: Chart, timeline: ScheduleTimeline, rank: int) -> None:
    chart.text(8, chart.y + 16, f"rank {rank}")
    chart.rect(chart.margin, chart.y, chart.width, _BOX, "var(--panel)")
    chart.add(*(line for span in timeline.spans[rank] for line in _box(chart, span, timeline)))
    chart.add(*_pairs(chart, timeline, rank))
    chart.y += _BOX
    if timeline.schedule.training and (peak := max(timeline.peak_live(), default=0)):
        points, high = [f"M{chart.margin:.1f} {chart.y + _STRIP}"], 0
        for time, count in timeline.live(rank):
            points.append(f"H{chart.at(time):.1f}V{chart.y + _STRIP - (_STRIP - 2) * count / peak:.1f}")
            high = max(high, count)
        end = chart.at(chart.begin + chart.span)
        chart.add(
            f'<path d="{"".join(points)}H{end:.1f}" fill="var(--wait)" fill-opacity=".45" stroke="var(--quiet)" '
            f'stroke-width=".8"><title>rank {rank} keeps at most {plural(high, "forward")}</title></path>'
        )
        chart.text(8, chart.y + _STRIP - 1, f"{high} kept", size=11, quiet=True)
        chart.y += _STRIP
    chart.y += _GAP


def _words(span: Span, timeline: ScheduleTimeline) -> tuple[str, ...]:
    stage, kind, k = span.action
    return (f"{stage}{kind}{k}", f"{kind}{k}", kind) if timeline.schedule.chunks > 1 else (f"{kind}{k}", kind)


def _box(chart: Chart, span: Span, timeline: ScheduleTimeline) -> Iterator[str]:
    stage, kind, _ = span.action
    x, width = chart.at(span.start), (span.end - span.start) * chart.width / chart.span
    place = f'x="{x:.2f}" y="{chart.y:.1f}" width="{width:.2f}" height="{_BOX}"'
    yield (
        f"<g><title>{span.action}: {span.start:g} to {span.end:g}</title>"
        f'<rect {place} fill="var(--{_FILL[kind]})" stroke="var(--paper)"/>'
    )
    if kind in _HATCH:
        yield f'<rect {place} fill="url(#{chart.mark}-{kind})"/>'
    if timeline.schedule.chunks > 1:
        low = chart.y + _BOX - _MARK
        hue = _hue(_chunk(stage, timeline))
        yield f'<rect x="{x:.2f}" y="{low:.1f}" width="{width:.2f}" height="{_MARK}" fill="{hue}"/>'
    if fitting := room_for(_words(span, timeline), width, 6.6):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{chart.y + 16:.1f}" text-anchor="middle" font-size="11">'
            f"{fitting}</text>"
        )
    yield "</g>"


def _chunk(stage: int, timeline: ScheduleTimeline) -> int:
    """How many stages before this one are on its rank."""
    placement = timeline.schedule.placement
    return placement[:stage].count(placement[stage])


def _hue(chunk: int) -> str:
    """A colour for the stages that are so far down on their ranks; those that follow each other differ most."""
    return f"light-dark(hsl({(210 + 137 * chunk) % 360},70%,45%),hsl({(210 + 137 * chunk) % 360},70%,62%))"


def _pairs(chart: Chart, timeline: ScheduleTimeline, rank: int) -> Iterator[str]:
    """Frames around the two actions of each overlapped pair."""
    spans = {span.action: span for span in timeline.spans[rank]}
    for step in timeline.schedule.actions[rank]:
        if step.kind == OVERLAPPED:
            first, last = (spans[work] for work in step.works)
            x, width = chart.at(first.start), (last.end - first.start) * chart.width / chart.span
            yield (
                f'<rect x="{x + 1:.2f}" y="{chart.y + 1:.1f}" width="{max(width - 2, 0):.2f}" height="{_BOX - 2}" '
                f'fill="none" stroke="var(--ink)" stroke-width="1.5"/>'
            )


def _legend(chart: Chart, timelines: Sequence[ScheduleTimeline]) -> None:
    kinds = {span.action.kind for each in timelines for row in each.spans for span in row}
    entries = []
    for kind, words in _MEANING.items():
        if kind in kinds:
            hatch = f"|url(#{chart.mark}-{kind})" if kind in _HATCH else ""
            entries.append((f"var(--{_FILL[kind]}){hatch}", kind, words))
    chunks = max(each.schedule.chunks for each in timelines)
    if chunks > 1:
        entries += [(_hue(chunk), "", f"chunk {chunk + 1} of a rank") for chunk in range(chunks)]
    if any(each.schedule.training for each in timelines):
        entries.append(("var(--wait)", "", "forwards kept"))
    chart.legend(entries)
    if any(step.kind == OVERLAPPED for each in timelines for row in each.schedule.actions for step in row):
        chart.add(
            f'<rect x="8" y="{chart.y + 3}" width="22" height="15" fill="none" stroke="var(--ink)" '
            'stroke-width="1.5"/>'
        )
        chart.text(36, chart.y + 15, "run together")
        chart.y += 26
