"""An `Explanation` as text for a terminal, within 80 columns.

Each step shows its messages and then the chunks of every rank, one column for each chunk.  ``*`` marks a chunk that the
step has changed, ``.`` a chunk that a rank does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.algorithms import BLOCKS_OF_ALL, PIECES, kind_of
from parallelism.arrays import Array
from parallelism.display import WIDTH
from parallelism.display.quantities import plural

if TYPE_CHECKING:
    from parallelism.collectives.explanation import ExplainedStep, Explanation, Sent

_INDENT = " " * 9
_MANY = 24
"""Messages of one step, and ranks, that are printed; the explanation has them all."""

Rows = Sequence[Mapping[int, Array]]


def text(explanation: Explanation) -> str:
    """All steps as lines of at most 80 columns."""
    lines = [*_wrapped(heading(explanation).split(" "), " ", "")]
    start = _table(explanation, explanation.start, None, "start")
    lines += ["", *start] if start else []
    for step, before in with_before(explanation):
        lines += ["", *_messages(explanation, step), *_table(explanation, step.held, before)]
        if any(step.bytes_received):
            lines += _wrapped(["so far", *_by_rank(step.bytes_received, "bytes received")], " ", _INDENT)
    if explanation.algorithm.chunks:
        lines += ["", "result"]
        for rank, result in _some(list(enumerate(explanation.results)), "ranks"):
            lines.append(_row(explanation, rank) + (result if rank == "..." else values(result, 12)))
    lines.append("")
    for words in account(explanation):
        lines += _wrapped(words.split(" "), " ", "")
    return "\n".join(map(_clipped, lines))


def _clipped(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def with_before(explanation: Explanation) -> Iterator[tuple[ExplainedStep, Rows]]:
    """Each step, and what was held before it."""
    return zip(
        explanation.steps, (explanation.start, *(step.held for step in explanation.steps)), strict=False
    )


def values(value: Any, limit: int) -> str:
    """The numbers of an array, rows apart by ``;``; the ends only of one with more than ``limit``.

    >>> values(np.arange(6).reshape(2, 3), 8), values(np.arange(100.0), 8)
    ('0 1 2; 3 4 5', '0 1 2 ... 99 (100)')
    """
    if value is None:
        return "-"
    if isinstance(value, list):
        return " | ".join(values(each, limit) for each in value)
    array = np.asarray(value)
    if array.size == 0:
        return f"(empty {_extents(array)})"
    if array.size > limit:
        flat = array.reshape(-1)
        shown = max(1, min(3, limit - 1))
        return f"{' '.join(map(_number, flat[:shown]))} ... {_number(flat[-1])} ({_extents(array)})"
    if array.ndim == 0:
        return _number(array[()])
    if array.ndim == 1:
        return " ".join(map(_number, array))
    return (";" * (array.ndim - 1) + " ").join(values(row, limit) for row in array)


def _number(value: Any) -> str:
    if isinstance(value, np.bool_):
        return "T" if value else "F"
    return str(value) if isinstance(value, np.integer) else f"{value:.4g}"


def _extents(array: Array) -> str:
    return "x".join(map(str, array.shape))


def heading(explanation: Explanation) -> str:
    plan = explanation.algorithm
    order = f" Combined {plan.order}." if plan.order else ""
    return (
        f"{plan.collective}, {plan.name}, over {plural(plan.size, 'rank')}: {explanation.title}. "
        f"{plural(len(explanation), 'step')}.{order}"
    )


def label(explanation: Explanation, chunk: int) -> str:
    plan = explanation.algorithm
    kind = kind_of(plan.collective)
    if kind.unit == BLOCKS_OF_ALL:
        return "block {}>{}".format(*divmod(chunk, plan.size))
    if kind.unit == PIECES:
        return "buffer" if plan.chunks == 1 else f"piece {chunk}"
    if kind.cuts:
        return f"block {chunk}"
    return f"shard {chunk}" if kind.joins else f"array {chunk}"


def sentences(explanation: Explanation, step: ExplainedStep) -> list[str]:
    """``0 -> 1  [piece 2: 3 5] +`` for every message; equal messages to several targets are one sentence."""
    alike: dict[tuple[int, tuple[int, ...], bool], list[Sent]] = {}
    for message in step.messages:
        alike.setdefault((message.source, message.chunks, message.reduce), []).append(message)
    sentences = []
    for (source, chunks, reduce), messages in alike.items():
        held = zip(chunks, messages[0].arrays, strict=True)
        pieces = [
            f"[{label(explanation, chunk)}: {values(array, 8 // len(chunks) + 2)}]" for chunk, array in held
        ]
        targets = ", ".join(str(each.target) for each in messages)
        how = f"  {explanation.op}" if reduce else ""
        sentences.append(f"{source} -> {targets}  {' '.join(pieces) or '(no payload)'}{how}")
    return sentences


def _messages(explanation: Explanation, step: ExplainedStep) -> list[str]:
    told = _some([(0, words) for words in sentences(explanation, step)], "messages")
    wrapped = (_wrapped(words.replace("] [", "]\0[").split("\0"), " ", _INDENT) for _, words in told)
    lines = [*chain.from_iterable(wrapped)] or [f"{_INDENT}(no message)"]
    return [f"step {step.number}".ljust(len(_INDENT)) + lines[0].lstrip(), *lines[1:]]


def _table(explanation: Explanation, held: Rows, before: Rows | None, caption: str = "") -> list[str]:
    """A column for each chunk if that fits, else each rank's chunks in a running line."""
    if not explanation.algorithm.chunks:
        return []
    chunks = range(explanation.algorithm.chunks)
    rows = _some(list(enumerate(held)), "ranks")
    kind = kind_of(explanation.algorithm.collective)
    if kind.unit != BLOCKS_OF_ALL and not kind.paired and len(chunks) * 4 < WIDTH:
        heads = [label(explanation, c) for c in chunks]
        if len(chunks) * 11 > WIDTH - len(_INDENT):
            heads = [head.split()[-1] for head in heads]
        for limit in (8, 4, 2):
            cells = []
            for rank in range(len(held)):
                cells.append([_cell(held, before, rank, c, limit) for c in chunks])
            widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
            if len(_INDENT) + sum(widths) + 3 * (len(widths) - 1) <= WIDTH:
                lines = [caption.ljust(len(_INDENT)) + _in_columns(heads, widths, "   ")]
                for rank, row in rows:
                    shown = row if rank == "..." else _in_columns(cells[rank], widths, " | ")
                    lines.append(_row(explanation, rank) + shown)
                return lines
    lines = [caption] if caption else []
    for rank, row in rows:
        if rank == "...":
            lines.append(_row(explanation, rank) + row)
            continue
        pieces = [
            f"{label(explanation, c).removeprefix('block ')}: {_cell(held, before, rank, c, 8)}" for c in row
        ]
        wrapped = _wrapped(pieces or ["."], " | ", _INDENT)
        lines += [_row(explanation, rank) + wrapped[0].lstrip(), *wrapped[1:]]
    return lines


def _in_columns(cells: Sequence[str], widths: Sequence[int], separator: str) -> str:
    return separator.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))


def _cell(held: Rows, before: Rows | None, rank: int, chunk: int, limit: int) -> str:
    if chunk not in held[rank]:
        return "."
    return values(held[rank][chunk], limit) + ("*" if changed(held, before, rank, chunk) else "")


def changed(held: Rows, before: Rows | None, rank: int, chunk: int) -> bool:
    if before is None or chunk not in held[rank]:
        return False
    was, now = before[rank].get(chunk), held[rank][chunk]
    return was is None or not (was.shape == now.shape and was.tobytes() == now.tobytes())


def _row(explanation: Explanation, rank: int | str) -> str:
    """The beginning of a rank's line; of ``...``, a line of other words, the indentation alone."""
    if rank == "...":
        return _INDENT
    return (
        f"rank {rank}".ljust(len(_INDENT) - 2) + "| "
        if explanation.algorithm.size <= 100
        else f"rank {rank}| "
    )


def account(explanation: Explanation) -> list[str]:
    """Bytes and messages as they were, and the closed form beside them."""
    plan, form, nbytes = explanation.algorithm, explanation.closed_form, explanation.buffer_nbytes
    predicted = form.bytes_received(nbytes)
    exact = predicted == explanation.bytes_received
    each = (
        f"{predicted[0]:g} by each rank"
        if len(set(predicted)) == 1
        else " ".join(f"{n:g}" for n in predicted)
    )
    return [
        " ".join(_by_rank(explanation.bytes_received, "bytes received")) + ".",
        " ".join(_by_rank(plan.messages_sent(), "messages sent")) + ".",
        f"Closed form: {form.formula}, with g = {plan.size} and S = {nbytes} bytes, is {each}"
        + ("." if exact else "; it supposes pieces of one size."),
    ]


def _by_rank(numbers: Sequence[float], what: str) -> list[str]:
    """``24 bytes received, 6 by each rank``, or the numbers of all ranks where they differ."""
    total = f"{sum(numbers):g}" if any(isinstance(n, float) for n in numbers) else str(sum(numbers))
    each = list(map(_plain, numbers))
    if len(set(each)) == 1:
        return f"{total} {what}, {each[0]} by each rank".split(" ")
    return [*f"{total} {what}, by rank:".split(" "), *each[:_MANY], *(["..."] if len(each) > _MANY else [])]


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _some(items: list[tuple[int, Any]], what: str) -> list[tuple[Any, Any]]:
    """At most `_MANY` of them, and how many more there are."""
    more = [("...", f"... and {len(items) - _MANY} more {what}")] if len(items) > _MANY else []
    return [*items[:_MANY], *more]


def _wrapped(pieces: Sequence[str], separator: str, indent: str) -> list[str]:
    """Pieces in lines of at most `WIDTH`, broken between pieces only."""
    lines = [indent + pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(separator) + len(piece) > WIDTH:
            lines.append(indent + piece)
        else:
            lines[-1] += separator + piece
    return lines
