"""A trace as text for a terminal: one row for each device, virtual time from left to right.

    rank 0  000111222333...........aaaaaaabbbbbbbcccccccddddddd
    rank 1  ...000111222333....aaaaaaabbbbbbbcccccccddddddd....

A column is an interval of time and shows what took most of it. Forward and backward have different signs, digits and
letters: in a long pipeline a block is one column wide, so a bracket does not fit, and colour is lost in a file.
"""

from __future__ import annotations

from collections import defaultdict
from math import floor, isfinite, log10
from string import ascii_lowercase, ascii_uppercase, digits
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from parallelism.display.quantities import seconds
from parallelism.trace import Trace

if TYPE_CHECKING:
    from rich.text import Text

NARROWEST = 24
_MOST_ROWS = 64
_PHASES = {"F": digits, "B": ascii_lowercase, "I": ascii_lowercase, "W": ascii_uppercase}
_COMPUTE, _COLLECTIVE, _IDLE = "=", "#", "."
_STYLES = {_COMPUTE: "magenta", _COLLECTIVE: "green", _IDLE: "dim"} | {
    sign: style
    for signs, style in ((digits, "cyan"), (ascii_lowercase, "yellow"), (ascii_uppercase, "blue"))
    for sign in signs
}


class _Drawing(NamedTuple):
    title: list[str]
    rows: list[tuple[str, str]]
    """The margin and the columns of each device."""
    notes: list[str]


def timeline(trace: Trace, width: int = 80) -> str:
    """The timeline in plain ASCII, with lines of at most ``width`` columns. ``ValueError`` for a width below 24.

    >>> from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, ir, models, simulate
    >>> from parallelism.layouts import partition
    >>> from vcluster import report
    >>> stages = partition(models.mlp((4096,) * 5, ir.symbol("B")), 2, batch="B")
    >>> step = PipelinedStep(PipelinedProgram(stages, Pipeline(2, 4)), Mesh(pp=2), rows=8192)
    >>> print(report.timeline(simulate(step, "dgx-h100"), width=60))
    virtual time: 45.5 ms, 875 us per column
    rank 0  0001111.......aaaaaa222..bbbbbb333..ccccc.....dddddd
    rank 1  ....000aaaaaaa1111bbbbbbb222ccccccc3333ddddddd......
            |----------|----------|-----------|----------|------
            0 ms       10 ms      20 ms       30 ms      40 ms
    0-3 forward of a microbatch, a-d its backward, . idle

    A forward is drawn as the last digit of its microbatch, a backward as a letter (``a`` for microbatch 0), the
    backward of the weights as a capital. ``=`` is other compute, ``#`` is a collective, and ``.`` is idle time, which
    includes waiting for a message. A legend explains the signs that occur.
    """
    drawing = _draw(getattr(trace, "trace", trace), width)  # of a run, too
    return "\n".join(
        [*drawing.title, *(margin + columns for margin, columns in drawing.rows), *drawing.notes]
    )


def coloured_timeline(trace: Trace, width: int = 80) -> Text:
    """The signs of `timeline` with colours, for a console of rich."""
    from rich.text import Text  # imported here, so that a run without drawings does not pay for it

    drawing = _draw(trace, width)
    text = Text("\n".join(drawing.title), no_wrap=True)
    for margin, columns in drawing.rows:
        text.append("\n" + margin)
        text.append_tokens((sign, _STYLES[sign]) for sign in columns)
    return text.append("".join(f"\n{note}" for note in drawing.notes))


def _draw(trace: Trace, width: int) -> _Drawing:
    if width < NARROWEST:
        raise ValueError(f"a timeline needs a width of at least {NARROWEST} columns, got {width}")
    ranks = trace.ranks[:_MOST_ROWS]
    margin = len(f"rank {max(ranks, default=0)}  ")
    count, makespan = width - margin, trace.makespan_seconds
    if not (makespan > 0 and isfinite(makespan) and isfinite(count / makespan)):
        makespan = 0.0  # nothing to divide into columns
    cells = _columns(trace, count) if makespan else {}
    rows = [(f"rank {rank}".ljust(margin), "".join(cells.get(rank, _IDLE * count))) for rank in ranks]
    title = f"virtual time: {seconds(makespan)}" + (
        f", {seconds(makespan / count)} per column" if makespan else ""
    )
    more = [f"... and {len(trace.ranks) - len(ranks)} more ranks"] if len(trace.ranks) > len(ranks) else []
    last = max(trace.columns.distinct("microbatch") - {None}, default=0)
    legend = wrap(_legend({sign for _, row in rows for sign in row}, last), width)
    return _Drawing(wrap(title, width), rows, [*more, *_scale(makespan, count, margin), *legend])


def _sign(kind: str, phase: str | None, microbatch: int | None) -> str:
    """The sign of a compute or a collective."""
    if kind == "collective":
        return _COLLECTIVE
    return _PHASES[phase][microbatch % 10] if phase in _PHASES and microbatch is not None else _COMPUTE


def _columns(trace: Trace, count: int) -> dict[int, list[str]]:
    """By rank, the sign that takes most of each column's time.

    Messages, waits, memory, and events inside a collective are not drawn.
    """
    events, scale = trace.columns, count / trace.makespan_seconds
    begin = float(events.numbers("start_seconds").min())
    shares: defaultdict[int, list[defaultdict[str, float]]] = defaultdict(
        lambda: [defaultdict(float) for _ in range(count)]
    )
    drawn = events.isin("kind", {"compute", "collective"}) & ~events.present("parent")
    events = events.take(drawn & (events.numbers("duration_seconds") > 0))
    fields = ("rank", "start_seconds", "duration_seconds", "kind", "phase", "microbatch")
    for rank, start, duration, *description in zip(*map(events.values, fields), strict=True):
        row, sign = shares[rank], _sign(*description)
        left = min((start - begin) * scale, count)
        right = min(left + duration * scale, count)
        for column in range(int(left), min(int(right) + 1, count)):
            row[column][sign] += min(right, column + 1) - max(left, column)
    return {rank: list(map(_most, row)) for rank, row in shares.items()}


def _most(share: defaultdict[str, float]) -> str:
    """The sign with the largest share of a column. A collective counts only where no compute hides it."""
    left = 1 - sum(amount for sign, amount in share.items() if sign != _COLLECTIVE)
    share[_COLLECTIVE] = min(share[_COLLECTIVE], left)
    share[_IDLE] = left - share[_COLLECTIVE]
    return max(share, key=lambda sign: (round(share[sign], 9), -ord(sign)))


def _unit_of(makespan: float) -> tuple[float, str]:
    """The unit of the ruler, and how many of it are a second."""
    if makespan >= 1:
        return 1.0, "s"
    return (1e3, "ms") if makespan >= 1e-3 else (1e6, "us")


def _scale(makespan: float, count: int, margin: int) -> list[str]:
    """A ruler below the rows, with times at round steps of at least ten columns."""
    if not makespan:
        return []
    factor, unit = _unit_of(makespan)
    longest = makespan * factor
    least = longest * (10 / count)
    power = 10.0 ** floor(log10(least))
    step = next(power * round_number for round_number in (1, 2, 5, 10, 20) if power * round_number >= least)
    ruler, times = ["-"] * count, ""
    for tick in range(int(longest / step) + 1):
        column = int(tick * step / longest * count)
        label = f"{tick * step:.6g} {unit}"
        if column < count:
            ruler[column] = "|"
            if column + len(label) <= count and (not times or len(times) < column):
                times = times.ljust(column) + label
    return [" " * margin + "".join(ruler), " " * margin + times]


def _legend(signs: set[str], last: int) -> str:
    last_digit = " (last digit)" if last > 9 else ""
    parts = []
    for alphabet, text in (
        (digits, f"forward of a microbatch{last_digit}"),
        (ascii_lowercase, "its backward"),
        (ascii_uppercase, "its weights' backward"),
    ):
        if signs & set(alphabet):
            until = f"-{alphabet[min(last, 9)]}" if last else ""
            parts.append(f"{alphabet[0]}{until} {text}")
    compute = "other compute" if parts else "compute"
    others = (_COMPUTE, compute), (_COLLECTIVE, "collective"), (_IDLE, "idle")
    return ", ".join([*parts, *(f"{sign} {text}" for sign, text in others if sign in signs)])
