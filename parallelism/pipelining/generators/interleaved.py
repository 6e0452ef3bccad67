"""Schedules with several stages on each rank: rank ``r`` of ``P`` has stages ``r``, ``r + P``, ``r + 2 P``, ..."""

from __future__ import annotations

from collections.abc import Iterator

from parallelism.pipelining.generators.step import Step, Work, only_first


def interleaved_1f1b(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Step]:
    """1F1B on several stages a rank, by turns, a round of microbatches each: the bubble is divided by their number.

    >>> print(Pipeline(4, 4, "interleaved_1f1b", chunks=2))
    interleaved_1f1b: 4 stages on 2 ranks, 4 microbatches; 18 cycles, 11% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Where the microbatches make whole rounds of ``ranks``, and a forward takes 1 and a backward 2, it takes
    ``3 microbatches chunks + 3 (ranks - 1)``, and rank ``r`` keeps
    ``min(microbatches chunks, (chunks - 1) ranks + 2 (ranks - 1 - r) + 1)`` of its stages' microbatches.
    Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021,
    section 2.2, arXiv:2104.04473.  There the rounds have ``ranks`` microbatches; here, as in torch, there are
    ``microbatches // ranks`` rounds (at least one), of as many microbatches as it takes.
    """
    yield from only_first(microbatches, _by_turns(rank, ranks, microbatches, chunks))


def _by_turns(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Work]:
    each, total = rounds(ranks, microbatches, chunks)
    ahead = min((chunks - 1) * each + 2 * (ranks - 1 - rank), total)
    forwards, backwards = (by_rounds(rank, ranks, each, total, chunks, kind) for kind in "FB")
    yield from (next(forwards) for _ in range(ahead))
    for step in range(total):
        if ahead + step < total:
            yield next(forwards)
        yield next(backwards)


def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Step]:
    """All microbatches through a rank's first stage, then all through its next; backwards the other way round.

    >>> print(Pipeline(4, 3, "looped_bfs", chunks=2))
    looped_bfs: 4 stages on 2 ranks, 3 microbatches; 14 cycles, 14% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    rank 1  .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 .

    It keeps every microbatch of every stage, as GPipe does, but has a stage's gradients ready one stage after the
    other, and needs a stage's weights in one stretch.  From ``ranks`` microbatches on it takes as long as
    interleaved 1F1B, ``3 microbatches chunks + 3 (ranks - 1)``.
    Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2023, arXiv:2211.05953.
    """
    here = range(rank, ranks * chunks, ranks)
    yield from ((stage, "F", k) for stage in here for k in range(microbatches))
    yield from ((stage, "B", k) for stage in reversed(here) for k in reversed(range(microbatches)))


def rounds(ranks: int, microbatches: int, chunks: int) -> tuple[int, int]:
    """Microbatches in a round, and forwards of a rank in all rounds, of which the last may be longer than is needed."""
    count = max(1, microbatches // ranks)
    each = -(-microbatches // count)
    return each, count * each * chunks


def by_rounds(rank: int, ranks: int, each: int, total: int, chunks: int, kind: str) -> Iterator[Work]:
    """Every microbatch through every stage of the rank: a round through one stage, then through the next.

    Backwards take the rank's stages from the last to the first.
    """
    for step in range(total):
        turn, place = divmod(step, each)
        turns, chunk = divmod(turn, chunks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        yield rank + chunk * ranks, kind, turns * each + place
