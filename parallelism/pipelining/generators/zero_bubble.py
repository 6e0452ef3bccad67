"""Schedules that split the backward: the next rank waits only for I, and W fills the bubble.

Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, arXiv:2401.10241.
"""

from collections.abc import Iterator

from parallelism.pipelining.generators.interleaved import by_turns
from parallelism.pipelining.generators.step import Slot, Work, only_first


def zero_bubble_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    """ZB-H1: 1F1B with W delayed by ``rank`` microbatches; a third of the bubble, with the memory of the first rank.

    >>> print(Pipeline(3, 6, "zero_bubble_h1"))
    zero_bubble_h1: 3 stages on 3 ranks, 6 microbatches; 20 cycles, 10% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19
    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5

    If F, I and W take 1 each, it takes ``3 microbatches + ranks - 1`` for at least ``ranks`` microbatches.  A rank
    keeps up to ``min(ranks, microbatches)`` of them.  Qi et al., section 2.3, ZB-H1.
    """
    yield from interleaved_zero_bubble(rank, ranks, microbatches, 1)


def zero_bubble_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
    """ZB-H2: more warm-up forwards, ``2 (ranks - rank) - 1``, and W delayed further; a rank has no gap once it begins.

    >>> print(Pipeline(3, 6, "zero_bubble_h2"))
    zero_bubble_h2: 3 stages on 3 ranks, 6 microbatches; 20 cycles, 10% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19
    rank 0  F0 F1 F2 F3 F4 I0 F5 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 W0 I3 W1 I4 W2 I5 W3 W4 W5 .
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

    The makespan equals that of `zero_bubble_h1`.  But with at least ``2 ranks - 1`` microbatches no rank is idle
    between its first and its last action: ranks begin and end one after the other, and a next step can follow without
    a gap.  A rank keeps up to ``2 ranks`` microbatches.  Qi et al., section 2.3, ZB-H2.
    """
    ahead = min(2 * (ranks - rank) - 1, microbatches)
    # I of the last rank depends on no other rank.  If all microbatches fit its memory, it leaves all W to the end.
    behind = microbatches if rank == ranks - 1 and microbatches <= 2 * ranks else 2 * rank
    weights = iter(range(microbatches))
    yield from ((rank, "F", k) for k in range(ahead))
    for k in range(microbatches):
        yield rank, "I", k
        if ahead + k < microbatches:
            yield rank, "F", ahead + k
        if k >= behind:
            yield rank, "W", next(weights)
    yield from ((rank, "W", k) for k in weights)


def interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Slot]:
    """Interleaved 1F1B with the backward split, fewer warm-up forwards, and W delayed by ``rank`` steps.

    >>> print(Pipeline(4, 3, "interleaved_zero_bubble", chunks=2))
    interleaved_zero_bubble: 4 stages on 2 ranks, 3 microbatches; 19 cycles, 5% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2
    rank 1  .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1
    cycle   18
    rank 0  0W2
    rank 1  1W2

    If F, I and W take 1 each and ``ranks`` divides the microbatches, it takes ``3 microbatches chunks + ranks - 1``.
    It is to ZB-H1 what interleaved 1F1B is to 1F1B.  The order is that of torch.
    """
    yield from only_first(microbatches, by_turns(rank, ranks, microbatches, chunks, split=True))
