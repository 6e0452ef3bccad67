"""An `Explanation` in a notebook: a player with a slider over the steps.

Each step shows its messages as arrows between the ranks, and what every rank then holds: a column for each chunk, each
in its colour.  What the step has changed has a frame.  The slider needs a line of script that stands in the picture;
where a notebook does not run it, all steps are in the text below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from parallelism.collectives.explanation_text import (
    account,
    changed,
    heading,
    label,
    sentences,
    text,
    values,
    with_before,
)
from parallelism.display.drawing import kept
from parallelism.display.markup import facts, figure, folded_away, note, preformatted, tint, wide

if TYPE_CHECKING:
    from parallelism.collectives.explanation import ExplainedStep, Explanation
    from parallelism.collectives.explanation_text import Rows

_ROW, _ARROWS, _LETTER = 28, 120, 6.8
_MOST_RANKS, _MOST_CHUNKS, _MOST_STEPS, _MOST_SENTENCES = 16, 64, 48, 6
_SLIDE = (
    "const p=this.closest('.player');for(const f of p.querySelectorAll('[data-step]'))"
    "f.hidden=f.dataset.step!==this.value"
)


def html(explanation: Explanation) -> str:
    """The player, the account of bytes and messages, and the text of all steps."""
    ranks, chunks, room = columns(explanation)
    frames = [
        _frame(explanation, step, held, before, ranks, chunks, room)
        for step, held, before in moments(explanation)
    ]
    first = min(1, len(frames) - 1)
    player = "".join(
        f'<div data-step="{i}"{" hidden" * (i != first)}>{frame}</div>' for i, frame in enumerate(frames)
    )
    slider = (
        ""
        if len(frames) == 1
        else (
            f'<label>step <input type="range" min="0" max="{len(frames) - 1}" value="{first}" step="1" oninput="{_SLIDE}" '
            f'aria-label="step of the collective"></label>'
        )
    )
    left_out = [
        f"{len(some)} of {count} {what} are drawn"
        for some, count, what in (
            (ranks, len(explanation.inputs), "ranks"),
            (chunks, explanation.algorithm.chunks, "chunks"),
            (frames[1:], len(explanation), "steps"),
        )
        if len(some) < count
    ]
    results = facts((f"rank {rank}", values(explanation.results[rank], 16)) for rank in ranks)
    return figure(
        f'<div class="player">{slider}{player}</div>',
        *map(note, left_out),
        folded_away("result", results) if chunks else "",
        *map(note, account(explanation)),
        folded_away("all steps as text", preformatted(text(explanation))),
        title=heading(explanation),
    )


def columns(explanation: Explanation) -> tuple[list[int], list[int], float]:
    """The ranks and the chunks that are drawn, and the width of a cell in pixels."""
    chunks = [c for c in kept(explanation.algorithm.chunks, _MOST_CHUNKS) if c is not None]
    ranks = [r for r in kept(len(explanation.inputs), _MOST_RANKS) if r is not None]
    return ranks, chunks, _cell_width(explanation, chunks, ranks)


def moments(explanation: Explanation) -> Iterator[tuple[ExplainedStep | None, Rows, Rows | None]]:
    """What the frames show, the start first: a step, what is held after it, and what was held before."""
    yield None, explanation.start, None
    shown = kept(len(explanation), _MOST_STEPS)
    for number, (step, before) in enumerate(with_before(explanation)):
        if number in shown:
            yield step, step.held, before


def _cell_width(explanation: Explanation, chunks: Sequence[int], ranks: Sequence[int]) -> float:
    """As wide as the longest value, such that all chunks fit beside the arrows, but never too thin to be seen."""
    held = [explanation.start, *(step.held for step in explanation.steps[:_MOST_STEPS])]
    longest = max(
        (len(values(rows[rank][c], 4)) for rows in held for rank in ranks for c in chunks if c in rows[rank]),
        default=4,
    )
    heads = max((len(label(explanation, c)) for c in chunks), default=0)
    return max(16.0, min(max(longest, heads) * _LETTER + 10, 380 / max(len(chunks), 1)))


def _frame(
    explanation: Explanation,
    step: ExplainedStep | None,
    held: Rows,
    before: Rows | None,
    ranks: Sequence[int],
    chunks: Sequence[int],
    room: float,
) -> str:
    width, height = frame_size(explanation, ranks, chunks, room)
    lines = drawn(explanation, step, held, before, ranks, chunks, room)
    picture = (
        f'<svg width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" role="img" font-size="12" '
        f'fill="var(--ink)"><title>{moment(explanation, step)}</title>{"".join(lines)}</svg>'
    )
    below = "".join(map(note, shown_sentences(explanation, step)))
    return f"{note(moment(explanation, step))}{wide(picture)}{below}"


def moment(explanation: Explanation, step: ExplainedStep | None) -> str:
    """Which step a frame shows."""
    return "before the first step" if step is None else f"after step {step.number} of {len(explanation)}"


def shown_sentences(explanation: Explanation, step: ExplainedStep | None) -> list[str]:
    """The messages of a step, a line each, and how many more there are."""
    told = [] if step is None else sentences(explanation, step)
    more = [f"… and {len(told) - _MOST_SENTENCES} more messages"] if len(told) > _MOST_SENTENCES else []
    return [*told[:_MOST_SENTENCES], *more]


def frame_size(
    explanation: Explanation, ranks: Sequence[int], chunks: Sequence[int], room: float
) -> tuple[float, int]:
    """The width and the height of a frame, in pixels."""
    return _left(explanation, ranks) + room * len(chunks) + 8, 24 + _ROW * len(ranks)


def _margin(ranks: Sequence[int]) -> int:
    """Where the words ``rank 3`` end."""
    return 16 + 7 * len(f"rank {ranks[-1]}")


def _left(explanation: Explanation, ranks: Sequence[int]) -> int:
    """Where the cells begin: behind the arrows, if there are some."""
    return _margin(ranks) + (_ARROWS if len(explanation) else 0)


def drawn(
    explanation: Explanation,
    step: ExplainedStep | None,
    held: Rows,
    before: Rows | None,
    ranks: Sequence[int],
    chunks: Sequence[int],
    room: float,
) -> list[str]:
    """The elements of a frame: the names of chunks, a row of cells for each rank, and the messages of the step."""
    left, lines = _left(explanation, ranks), []
    for place, chunk in enumerate(chunks):
        name = label(explanation, chunk)
        fitting = next((word for word in (name, name.split()[-1]) if len(word) * _LETTER + 2 <= room), "")
        lines.append(
            f'<text x="{left + room * (place + 0.5):.1f}" y="15" text-anchor="middle" fill="var(--quiet)">'
            f"{escape(fitting)}</text>"
            if fitting
            else ""
        )
    for place, rank in enumerate(ranks):
        y = 22 + _ROW * place
        lines.append(f'<text x="6" y="{y + 17}">rank {rank}</text>')
        lines += _cells(explanation, held, before, rank, chunks, left, y, room)
    lines += _arrows(step, ranks, chunks, _margin(ranks)) if step else []
    return lines


def _cells(
    explanation: Explanation,
    held: Rows,
    before: Rows | None,
    rank: int,
    chunks: Sequence[int],
    left: float,
    y: int,
    room: float,
) -> Iterator[str]:
    for place, chunk in enumerate(chunks):
        x, here = left + room * place, chunk in held[rank]
        new = changed(held, before, rank, chunk)
        frame = 'stroke="var(--ink)" stroke-width="2"' if new else 'stroke="var(--line)"'
        words = [values(held[rank][chunk], limit) for limit in (8, 4, 2)] if here else []
        fitting = next((word for word in words if len(word) * _LETTER + 6 <= room), "")
        tip = "" if fitting or not here else f"<title>{escape(values(held[rank][chunk], 24))}</title>"
        yield (
            f'<rect x="{x + 1.5:.1f}" y="{y + 1.5}" width="{room - 3:.1f}" height="{_ROW - 5}" '
            f'fill="{tint(chunk + 1) if here else "none"}" {frame}>{tip}</rect>'
        )
        if fitting:
            yield (f'<text x="{x + room / 2:.1f}" y="{y + 17}" text-anchor="middle">{escape(fitting)}</text>')


def _arrows(step: ExplainedStep, ranks: Sequence[int], chunks: Sequence[int], margin: float) -> Iterator[str]:
    """A bow from the row of each source to that of its target, in the colour of the first chunk that it carries."""
    places = {rank: place for place, rank in enumerate(ranks)}
    for message in step.messages:
        if message.source in places and message.target in places and message.source != message.target:
            start, end = (
                22 + _ROW * places[rank] + _ROW / 2 + shift
                for rank, shift in ((message.source, -4), (message.target, 4))
            )
            bow = 18 + (_ARROWS - 30) * abs(places[message.target] - places[message.source]) / max(
                len(ranks) - 1, 1
            )
            colour = _stroke(message.chunks[0] + 1 if message.chunks else 0)
            yield (
                f'<path d="M{margin} {start:.1f}C{margin + bow * 1.2:.1f} {start:.1f} {margin + bow * 1.2:.1f} '
                f'{end:.1f} {margin + 6} {end:.1f}" fill="none" stroke="{colour}" stroke-width="2">'
                f"<title>rank {message.source} to rank {message.target}</title></path>"
                f'<path d="M{margin} {end:.1f}l8 -4v8z" fill="{colour}"/>'
            )


def _stroke(number: int) -> str:
    hue = number * 137 % 360
    return f"light-dark(hsl({hue},70%,38%),hsl({hue},65%,66%))"
