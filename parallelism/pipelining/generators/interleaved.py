"""Schedules with several stages on each rank: rank ``r`` of ``P`` has stages ``r``, ``r + P``, ``r + 2 P``, ..."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat, zip_longest

from parallelism.pipelining.generators.step import Slot, Work, only_first


def interleaved_1f1b(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Slot]:
    """1F1B with several stages on each rank, which take turns: the bubble is divided by the number of stages.

    >>> print(Pipeline(4, 4, "interleaved_1f1b", chunks=2))
    interleaved_1f1b: 4 stages on 2 ranks, 4 microbatches; 18 cycles, 11% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Let ``ranks`` divide the microbatches, a forward take 1 and a backward 2.  Then it takes
    ``3 microbatches chunks + 3 (ranks - 1)``, and rank ``r`` keeps
    ``min(microbatches chunks, (chunks - 1) ranks + 2 (ranks - 1 - r) + 1)`` of its stages' microbatches.
    Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021,
    section 2.2, arXiv:2104.04473.  There a round has ``ranks`` microbatches.  Here, as in torch, there are
    ``microbatches // ranks`` rounds (at least one), and a round has as many microbatches as needed.
    """
    every = by_turns(rank, ranks, microbatches, chunks)
    return only_first(microbatches, every) if microbatches % max(1, microbatches // ranks) else every


def by_turns(rank: int, ranks: int, microbatches: int, chunks: int, *, split: bool = False) -> Iterator[Work]:
    """Warm-up forwards, then a forward and a backward in turn, in rounds of microbatches padded to whole rounds.

    With ``split`` backwards there are fewer warm-up forwards, and W follows I ``rank`` steps later.
    """
    count = max(1, microbatches // ranks)
    each = -(-microbatches // count)
    ahead = (chunks - 1) * each + (1 if split else 2) * (ranks - 1 - rank)
    of = partial(_by_rounds, rank, ranks, each, count, chunks)
    forwards = of("F")
    in_turn = [of("I"), [*repeat(None, rank), *of("W")]] if split else [of("B")]
    return chain(forwards[:ahead], filter(None, chain.from_iterable(zip_longest(forwards[ahead:], *in_turn))))


def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Slot]:
    """All microbatches run through a rank's first stage, then through its next; backwards run in reverse order.

    >>> print(Pipeline(4, 3, "looped_bfs", chunks=2))
    looped_bfs: 4 stages on 2 ranks, 3 microbatches; 14 cycles, 14% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    rank 1  .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 .

    It keeps every microbatch of every stage, as GPipe does.  But the gradients of one stage after the other become
    ready, and the weights of a stage are needed in one stretch of time.  With at least ``ranks`` microbatches it takes
    as long as interleaved 1F1B, ``3 microbatches chunks + 3 (ranks - 1)``.
    Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2023, arXiv:2211.05953.
    """
    here = range(rank, ranks * chunks, ranks)
    yield from ((stage, "F", k) for stage in here for k in range(microbatches))
    yield from ((stage, "B", k) for stage in reversed(here) for k in reversed(range(microbatches)))


def _by_rounds(rank: int, ranks: int, each: int, rounds: int, chunks: int, kind: str) -> list[Work]:
    """The works of one kind on a rank: a round of microbatches runs through one stage, then through the next.

    Backwards visit the rank's stages from the last to the first.
    """
    here = range(rank, ranks * chunks, ranks)
    stages = here if kind == "F" else here[::-1]
    return [
        (stage, kind, microbatch)
        for first in range(0, rounds * each, each)
        for stage in stages
        for microbatch in range(first, first + each)
    ]
