"""A V-shaped schedule that keeps few activations: the pattern of one microbatch, repeated every six slots.

For each microbatch a rank runs F, I and W of two stages: six slots of work.  A pattern says in which slots a rank works
on a microbatch.  If these slots differ modulo 6 on every rank, the pattern can be repeated every six slots.  The
shorter the pattern, the fewer microbatches are in flight and kept.
Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024, arXiv:2405.15362, section 3.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count, product

from parallelism.pipelining.generators.step import Work

_PERIOD = 6


def v_min(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Work]:
    """V-Min keeps a third of the activations of 1F1B: a microbatch goes down, up, down and up as fast as possible.

    >>> print(Pipeline(6, 3, "v_min", chunks=2))
    v_min: 6 stages on 3 ranks, 3 microbatches; 27 cycles, 33% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 .   .   .   .   5F0 0F1 5I0 5W0 .   .   5F1 0F2 0I0 5I1 5W1 0W0 5F2
    rank 1  .   1F0 .   .   4F0 .   .   1F1 4I0 .   4F1 4W0 1I0 1F2 1W0 4I1 4F2 4W1
    rank 2  .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1
    cycle   18  19  20  21  22  23  24  25  26
    rank 0  .   0I1 5I2 5W2 0W1 .   .   0I2 0W2
    rank 1  1I1 1W1 .   4I2 4W2 .   1I2 1W2 .
    rank 2  3W1 2W1 .   .   3I2 2I2 3W2 2W2 .

    A rank keeps at most ``2 ((ranks + 1) // 3 + 1)`` microbatches of its stages, which are half as large as those of
    1F1B.  Its bubble is not larger than that of 1F1B.
    """
    stages = {"a": rank, "b": 2 * ranks - 1 - rank}
    times = _pattern(ranks)[rank].items()
    order = sorted((time + _PERIOD * k, word, k) for word, time in times for k in range(microbatches))
    yield from ((stages[word[1]], word[0], k) for _, word, k in order)


@lru_cache(maxsize=64)
def _pattern(ranks: int) -> tuple[dict[str, int], ...]:
    """For each rank, the slots of F, I and W of the first microbatch.

    ``a`` is the stage on the way down, ``b`` the one on the way up.  The microbatch waits at a turn only as long as is
    needed to keep the slots of a rank different modulo 6; it must wait if three divides the number of ranks.
    """
    for waits in sorted(product(range(_PERIOD), repeat=3), key=sum):
        fa, fb, ib, ia = (sum(waits[:turn]) + turn * ranks for turn in range(4))
        rows = [
            {"Fa": fa + down, "Fb": fb + up, "Ib": ib + down, "Ia": ia + up}
            for down, up in zip(range(ranks), reversed(range(ranks)), strict=True)
        ]
        if all(len({time % _PERIOD for time in row.values()}) == 4 for row in rows):
            return tuple(map(_with_weights, rows))
    raise AssertionError(f"every number of ranks has a pattern, but there is none for {ranks}")


def _with_weights(times: dict[str, int]) -> dict[str, int]:
    """Put W of each stage into the first free slot after its I."""
    taken = {time % _PERIOD for time in times.values()}
    for side in "ba":
        time = next(t for t in count(times["I" + side] + 1) if t % _PERIOD not in taken)
        times = {**times, "W" + side: time}
        taken.add(time % _PERIOD)
    return times
