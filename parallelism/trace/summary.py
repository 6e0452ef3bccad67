"""A trace at a glance: where the time went, traffic and work by rank, the collectives; 80 columns of text, or HTML.

Virtual time and wall time stand on lines of their own and are never added or divided by each other.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from math import inf
from typing import NamedTuple

from parallelism.display import WIDTH, in_columns
from parallelism.display.markup import figure, folded_away, note, table
from parallelism.display.quantities import count, fit, nbytes, plural, rate, seconds
from parallelism.trace.breakdown import MOST_RANKS, PARTS, Split, extremes, split
from parallelism.trace.collectives import collectives
from parallelism.trace.timeline_picture import timelines
from parallelism.trace.trace import Trace
from parallelism.trace.transfers import Moving, moving

_MOST_ROWS, _MOST_SHOWN, _MOST_FOLDED = 64, 18, 1024
"""The largest number of rows of a table as text, in a notebook, and in a folded table of a notebook."""

_ZEROS = frozenset({seconds(0), nbytes(0), count(0), f"{0:.1%}"})


class _Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    """How many columns, from the first, hold words and are aligned to the left."""
    ranks: int = 0
    """How many of the rows, the last ones, are of one rank each."""


def as_text(trace: Trace) -> str:
    """The summary in lines of at most 80 columns."""
    lines = [fit(line, WIDTH) for line in _headline(trace)]
    moved = moving(trace)
    for each in _tables(trace, moved, _split(trace, moved)):
        lines += ["", *(fit(line, WIDTH) for line in _lines(each))]
        if len(each.rows) > _MOST_ROWS:
            lines.append(f"... and {len(each.rows) - _MOST_ROWS} more")
    return "\n".join(lines)


def as_html(trace: Trace) -> str:
    """The timeline and the tables, for a notebook."""
    moved = moving(trace)
    by_rank = _split(trace, moved)
    outside = extremes(by_rank, trace.peaks())
    head, *lines = _headline(trace)
    lines[0] = lines[0].partition("; bubble")[0]  # that of the table is enough for a picture
    return figure(
        *map(note, lines),
        timelines([("", trace)], [moved]),
        *(_html_table(_without_zeros(each), outside) for each in _tables(trace, moved, by_rank)),
        title=head,
    )


def _without_zeros(one: _Table) -> _Table:
    """The table without the columns in which every figure is 0; what remains is easier to read."""
    kept = []
    for place, column in enumerate(zip(*one.rows, strict=True)):
        kept.append(place < max(one.left, 1) or not _ZEROS.issuperset(column))
    columns = [*compress(one.columns, kept)]
    if "other" in columns and not {"forward", "backward", "recompute"} & {*columns}:
        columns[columns.index("other")] = "compute"  # other than nothing
    return one._replace(columns=columns, rows=[[*compress(row, kept)] for row in one.rows])


def _html_table(one: _Table, outside: Mapping[str, int]) -> str:
    """A table for a notebook.  That of many ranks is folded, and the ranks of ``outside`` stay outside."""
    if len(one.columns) == 1:  # ranks without any figure
        return ""
    if one.ranks > MOST_RANKS:
        first = len(one.rows) - one.ranks
        by_rank = {row[0]: row for row in one.rows[first:]}
        shown = [[f"{word}: {rank}", *by_rank[str(rank)][1:]] for word, rank in outside.items()]
        folded = _rows(one, one.rows[first:], _MOST_FOLDED)
        return table([*one.rows[:first], *shown], one.columns, left=max(one.left, 1)) + folded_away(
            plural(one.ranks, "rank"), folded
        )
    return _rows(one, one.rows, _MOST_SHOWN)


def _rows(one: _Table, rows: Sequence[Sequence[str]], most: int) -> str:
    more = note(f"... and {len(rows) - most} more") if len(rows) > most else ""
    return table(rows[:most], one.columns, left=max(one.left, 1)) + more


def _headline(trace: Trace) -> list[str]:
    mesh = (
        ""
        if trace.mesh_shape is None
        else " (" + ", ".join(f"{axis}={n}" for axis, n in trace.mesh_shape) + ")"
    )
    devices = trace.devices_in_words + mesh
    starts = trace.columns.numbers("wall_start_seconds")
    ends = starts + trace.columns.numbers("wall_duration_seconds")
    wall = float(ends.max() - starts.min()) if len(trace) else 0.0
    lines = [
        f"{devices}, {plural(len(trace), 'event')}; "
        f"traffic {'with the host' if trace.host_traffic else 'between devices'}",
        f"virtual time  makespan {seconds(trace.makespan_seconds)}; bubble {trace.bubble_fraction:.1%} "
        f"(all but compute), {trace.span_bubble_fraction:.1%} by span",
    ]
    if wall > 0:  # a simulated trace was never run
        lines.append(f"wall time     {seconds(wall)} on this machine, whose cores the devices share")
    return [*lines, *([f"hardware      {trace.hardware}"] if trace.hardware else [])]


def _tables(trace: Trace, moved: Moving, by_rank: Mapping[int, Split]) -> list[_Table]:
    tables = [_split_table(trace, by_rank)] if by_rank else []
    held = trace.peaks()
    columns = ["rank", "received", "sent", "messages", "flops", "peak memory"]
    ranks = []
    for rank, totals in sorted(trace.totals.items()):
        ranks.append(
            [
                str(rank),
                nbytes(totals.bytes_received),
                nbytes(totals.bytes_sent),
                count(totals.messages),
                count(totals.flops),
                nbytes(held.get(rank, 0)),
            ]
        )
    if not held:  # no memory was recorded
        columns, ranks = columns[:-1], [row[:-1] for row in ranks]
    tables.append(_Table(columns, ranks, 0, len(ranks)))

    rows = collectives(trace, moved)
    for longest in (18, 10):  # of a word, so that a line has room for it
        groups = []
        for row in rows:
            words = row.name, row.algorithm, "-" if row.axes is None else ", ".join(row.axes)
            groups.append(
                [
                    *(fit(word, longest) for word in words),
                    count(row.operations),
                    nbytes(row.bytes_received),
                    seconds(row.seconds),
                    rate(row.bus_bytes_per_second),
                ]
            )
        last = _Table(["collective", "algorithm", "axes", "count", "bytes", "time", "bus"], groups, 3)
        if not groups or max(map(len, _lines(last))) <= WIDTH:
            break
    return [*tables, last] if rows else tables


def _split(trace: Trace, moved: Moving) -> dict[int, Split]:
    """The split of each rank, of a trace that takes time."""
    return split(trace, moved) if 0 < trace.makespan_seconds < inf else {}


def _split_table(trace: Trace, by_rank: Mapping[int, Split]) -> _Table:
    """Where the time went, by rank, in all, and as shares of makespan x devices."""
    shown = [[str(rank), *map(seconds, parts)] for rank, parts in by_rank.items()]
    total = [sum(column) for column in zip(*by_rank.values(), strict=True)]
    shares = ["", *(f"{part / (trace.makespan_seconds * len(by_rank)):.1%}" for part in total)]
    columns = ["rank", *PARTS]
    columns[columns.index("communication")] = "exposed"
    return _Table(columns, [["all", *map(seconds, total)], shares, *shown], 0, len(shown))


def _lines(one: _Table) -> list[str]:
    return in_columns([one.columns, *one.rows[:_MOST_ROWS]], one.left)
