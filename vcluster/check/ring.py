"""Rings: to whom messages go, and the first step of a ring all-reduce that goes wrong."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from parallelism.display.quantities import plural
from parallelism.operation import ranks_in_words
from vcluster.check.cases import Case
from vcluster.check.contributions import digits_of, made_of
from vcluster.check.failures import Finding
from vcluster.check.observed_run import Watch


def off_the_ring(watch: Watch, hop: int) -> Finding | None:
    """What is wrong if messages go to other ranks than the one that is ``hop`` further on; None if all go there."""
    size, ranks = watch.size, range(watch.size)

    def sends_elsewhere(rank: int) -> bool:
        return any((peer - rank - hop) % size for peer in watch.peers(rank))

    rank = next(filter(sends_elsewhere, ranks), None)
    if rank is None:
        return None
    sentence = (
        f"rank {rank} sends to {ranks_in_words(sorted(watch.peers(rank)))}, and its messages should all go to "
        f"rank {(rank + hop) % size}"
    )
    if all((peer - each + hop) % size == 0 for each in ranks for peer in watch.peers(each)):
        return Finding(sentence, likely="the wrong direction: messages go round the ring the other way")
    hops = {(peer - each) % size for each in ranks for peer in watch.peers(each)}
    if len(hops) == 1:
        return Finding(
            sentence,
            likely=f"each rank sends {plural(hops.pop(), 'place')} on, and its neighbour is rank "
            f"{'+' if hop > 0 else '-'} {abs(hop)}, modulo the number of ranks",
        )
    if hops == {hop % size, -hop % size}:
        return Finding(
            sentence, likely="one half goes round the other way: in both, messages go to the same neighbour"
        )
    return Finding(
        sentence,
        likely="arrays are sent directly to the ranks that need them, in place of being passed on "
        "from neighbour to neighbour",
    )


class _Piece(NamedTuple):
    """An array that was sent: the number of the piece, and the ranks whose elements are in it."""

    number: int
    ranks: frozenset[int]


def wrong_step(case: Case, watch: Watch) -> str:
    """The first step of a ring all-reduce by pieces that goes wrong; empty if none is found.

    In the first half a rank sends in each step the piece that arrived in the step before, with its own one added; in
    the second half, as it arrived.
    """
    size = case.size
    before = {peer: rank for rank in range(size) for peer in watch.peers(rank)}
    counts = set(map(len, watch.sent))
    if (
        size < 3
        or len(counts) > 1
        or len(before) != size
        or any(len(watch.peers(rank)) != 1 for rank in range(size))
    ):
        return ""
    count = counts.pop()
    pieces = [[_piece(case, array) for array in row] for row in watch.sent]
    for step in range(min(count, 2 * size - 2)):
        for rank in range(size):
            last = pieces[before[rank]][step - 1] if step else None
            if told := _of_step(case, watch.sent[rank][step], pieces[rank][step], last, rank, step):
                return told
    if count < size - 1:
        return f"the first half ends too early: it has {count} of {size - 1} steps (off by one?)"
    if size <= count < 2 * size - 2:
        return f"the second half stops too early: it has {count - size + 1} of {size - 1} steps (off by one?)"
    return ""


def _of_step(case: Case, array: Any, mine: _Piece | None, last: _Piece | None, rank: int, step: int) -> str:
    first_half = step < case.size - 1
    where = f"in step {step if first_half else step - case.size + 1} of the {'first' if first_half else 'second'} half"
    if mine is None and step >= case.size:
        return ""  # sums that are added once more: what the result shows
    if mine is None:
        whole = isinstance(array, np.ndarray) and array.shape == case.expected[rank].shape
        return f"{where}, counted from 0, rank {rank} sends " + (
            "a whole array, where a piece is meant"
            if whole
            else f"what is no piece of the arrays: {_first(case, array)}"
        )
    if last is None:
        return ""
    if step >= case.size and mine.number == last.number and len(mine.ranks) < len(last.ranks) == case.size:
        return (
            f"in step {step - case.size} of the second half, counted from 0, piece {last.number} arrives on rank "
            f"{rank}, complete, and is not put at place {last.number} of that rank, but at another one"
        )
    if not first_half and len(mine.ranks) < case.size:
        return (
            f"the second half {'goes on' if step >= case.size else 'begins'} with the wrong piece: {where} rank "
            f"{rank} sends piece {mine.number}, which is not complete: {_first(case, array, mine.number)}"
        )
    if mine.number != last.number:
        return (
            f"{where}, counted from 0, rank {rank} sends piece {mine.number}. In the step before, piece "
            f"{last.number} has arrived, and this is the one that goes on"
            + (" (or the first half ends a step too early)" if step == case.size - 2 else "")
        )
    if first_half and mine.ranks == {rank}:
        return (
            f"in step {step - 1} of the first half piece {last.number} arrives on rank {rank}, and is not added to "
            f"piece {last.number} of that rank, but to another one"
        )
    if first_half and mine.ranks == last.ranks:
        return (
            f"in step {step - 1} of the first half a copy stands for a sum: what arrives on rank {rank} takes the "
            "place of its own piece, and should be added to it"
        )
    return ""


def _first(case: Case, array: Any, number: int = 0) -> str:
    if not isinstance(array, np.ndarray) or not array.size:
        return "it has no elements"
    whole = np.array_split(case.expected[0].reshape(-1), case.size)[number]
    return f"its first element is {made_of(array.flat[0], whole[0], case.size)}"


def _piece(case: Case, array: Any) -> _Piece | None:
    """Which piece of which ranks' arrays was sent; None if it is no such sum."""
    digits = (
        digits_of(array, case.size)
        if isinstance(array, np.ndarray) and array.ndim == 1 and array.size
        else None
    )
    if digits is None:
        return None
    ranks = np.flatnonzero(digits.any(axis=0))
    for number, part in enumerate(np.array_split(np.arange(len(case.expected[0])), case.size)):
        if len(part) == len(digits) and np.all(digits[:, ranks] == part[:, None] + 1):
            return _Piece(number, frozenset(ranks.tolist()))
    return None
