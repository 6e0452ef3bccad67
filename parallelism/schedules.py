"""Orders of work: for one rank of a pipeline, which forward and which backward comes next.

Each schedule is a pure generator of steps ``(stage, kind, microbatch)``; `parallelism.pipelining` makes
actions of them, checks, draws and runs them.  In the pictures time goes to the right, a row is a rank,
``F`` is a forward, ``B`` a backward and the number is the microbatch; every action takes one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Step = tuple[int, str, int]
"""A stage, the kind of its work (F forward, B backward, I backward for the input, W for the weights), a microbatch."""

Generator = Callable[[int, int, int], Iterator[Step]]
"""``(rank, stages, microbatches)`` -> the steps of that rank, where one stage lies on each rank."""


def gpipe(rank: int, stages: int, microbatches: int) -> Iterator[Step]:
    """All forwards, then all backwards, both in the order of the microbatches.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
        rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
        rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    Stage ``i`` runs the forward of microbatch ``k`` in slot ``i + k`` and its backward in slot
    ``microbatches + 2 * stages - 2 - i + k``; it keeps the activations of every microbatch.
    Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2019,
    arXiv:1811.06965 (there the backwards come in the opposite order, which takes as long).
    """
    yield from ((rank, "F", k) for k in range(microbatches))
    yield from ((rank, "B", k) for k in range(microbatches))


def one_forward_one_backward(rank: int, stages: int, microbatches: int) -> Iterator[Step]:
    """A backward as soon as there is one to do: warm-up, then forward and backward by turns, then the rest.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
        rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
        rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
        rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    As long as GPipe, but rank ``r`` never keeps more than ``min(stages - r, microbatches)`` microbatches.
    Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021, arXiv:2006.09503
    (PipeDream-Flush); Fan et al., *DAPPLE*, 2021, arXiv:2007.01045.
    """
    ahead = min(stages - rank, microbatches)
    yield from ((rank, "F", k) for k in range(ahead))
    for k in range(microbatches):
        yield rank, "B", k
        if ahead + k < microbatches:
            yield rank, "F", ahead + k


SCHEDULES: dict[str, Generator] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""The schedules that have a name, by that name."""
