"""Schedules whose stages lie in a V: rank ``r`` of ``P`` has stages ``r`` and ``2 P - 1 - r``.

A microbatch goes down the ranks and up again.  So the loss is on rank 0, and the last rank passes activations to
itself.  A rank that keeps the activations of one stage for a long time keeps those of its other stage for a short time.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, product

from parallelism.pipelining.generators.step import Slot, Work, only_first


class _Rank:
    """The progress of a rank's two stages: ``a`` on the way down, ``b`` on the way up."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage = {"a": rank, "b": 2 * ranks - 1 - rank}
        self.next: Counter[tuple[str, str]] = Counter()
        self.waiting: list[Work] = []
        """The W works whose I is done, in that order."""

    def work(self, side: str, kind: str) -> Work:
        """The next work of this kind on this side; I and B share a count."""
        key = side, "F" if kind == "F" else "I"
        done = self.stage[side], kind, self.next[key]
        self.next[key] += 1
        if kind == "I":
            self.waiting.append((done[0], "W", done[2]))
        return done

    def run(self, program: str) -> Iterator[Work]:
        """The works of a text such as ``"Fb Ib W Fa"``.  ``Wa`` is the oldest waiting W of side a, ``W`` of any."""
        for word in program.split():
            if word[0] != "W":
                yield self.work(word[1], word[0])
                continue
            oldest = next(w for w in self.waiting if word == "W" or w[0] == self.stage[word[1]])
            self.waiting.remove(oldest)
            yield oldest


def zero_bubble_v(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Slot]:
    """ZB-V: every rank works without a gap from its first action on, with the memory of 1F1B's first rank.

    >>> print(Pipeline(4, 4, "zero_bubble_v", chunks=2))
    zero_bubble_v: 4 stages on 2 ranks, 4 microbatches; 25 cycles, 4% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2
    cycle   18  19  20  21  22  23  24
    rank 0  3I3 3W3 0I2 0W2 0I3 0W3 .
    rank 1  2W2 1I2 2I3 1I3 1W2 2W3 1W3

    If F, I and W of a stage take 1 each, it takes ``6 microbatches + ranks - 1`` for at least ``2 ranks`` microbatches.
    A rank keeps at most ``2 ranks`` microbatches of its stages, which are half as large as those of 1F1B.
    Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, section 6, arXiv:2401.10241.
    """
    yield from only_first(microbatches, _zero_bubble_v(rank, ranks, max(2 * ranks - 1, microbatches)))


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
    here = _Rank(rank, ranks)
    yield from here.run("Fa " * (2 * (ranks - rank) - 1) + "Fb Fa " * rank + "Fb Ib W " * (ranks - rank))
    while here.next["b", "F"] < microbatches:
        if here.next["a", "F"] < microbatches:
            yield here.work("a", "F")
        yield from here.run("Ia W Fb Ib W")
    yield from here.run("Ia Ib " * rank + "Ia Wa " * (ranks - rank) + "Wb " * rank + "Wa " * rank)


def dual_pipe_v(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Slot]:
    """DualPipe folded into a V: in the steady state a forward of one side overlaps a backward of the other.

    >>> print(Pipeline(4, 4, "dual_pipe_v", chunks=2))
    dual_pipe_v: 4 stages on 2 ranks, 4 microbatches; 19 cycles, 3% idle
    cycle   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3
    rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3
    cycle   18
    rank 0  0W3
    rank 1  1W3

    If F takes 1 and B takes 2, it takes ``6 microbatches + ranks - 1`` for at least ``2 ranks`` microbatches.
    DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 3.2.1, arXiv:2412.19437.  The V and the order follow
    https://github.com/deepseek-ai/DualPipe, as in torch.
    """
    yield from only_first(
        microbatches, _dual_pipe_v(_Rank(rank, ranks), rank, ranks, max(2 * ranks, microbatches))
    )


def _dual_pipe_v(here: _Rank, rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    after = ranks - 1 - rank
    yield from here.run("Fa " * (2 * after) + "Fa Fb " * (rank + 1) + "Ib W Fb " * after)
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and after == 0:  # There is no message yet that the overlap could hide.
            yield from here.run("Fa Bb")
        else:
            yield here.work("a", "F"), here.work("b", "B")
        yield here.work("b", "F"), here.work("a", "B")
    for _ in range(after):
        yield here.work("b", "B")
        yield here.work("b", "F"), here.work("a", "B")
    for place, side in enumerate("ba" * (rank + 1)):  # The second half is split, so that its W fill the end.
        yield here.work(side, "B" if place <= rank else "I")
    yield from here.run("W Ia " * after + "W " * (rank + 1))


# -- the pattern of one microbatch, repeated every six slots -----------------------------------------------------------
#
# For each microbatch a rank runs F, I and W of two stages: six slots of work.  A pattern says in which slots a rank
# works on a microbatch.  If these slots differ modulo 6 on every rank, the pattern can be repeated every six slots.
# The shorter the pattern, the fewer microbatches are in flight and kept.
# Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024, arXiv:2405.15362, section 3.

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
    order = sorted(
        (time + _PERIOD * k, word, k)
        for word, time in _pattern(ranks)[rank].items()
        for k in range(microbatches)
    )
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
        if all(map(_is_free_of_clashes, rows)):
            return tuple(map(_with_weights, rows))
    raise AssertionError(f"every number of ranks has a pattern, but there is none for {ranks}")


def _is_free_of_clashes(times: dict[str, int]) -> bool:
    """Whether the four actions of a rank take different slots when the pattern is repeated."""
    return len({time % _PERIOD for time in times.values()}) == 4


def _with_weights(times: dict[str, int]) -> dict[str, int]:
    """Put W of each stage into the first free slot after its I."""
    taken = {time % _PERIOD for time in times.values()}
    for side in "ba":
        time = next(t for t in count(times["I" + side] + 1) if t % _PERIOD not in taken)
        times = {**times, "W" + side: time}
        taken.add(time % _PERIOD)
    return times
