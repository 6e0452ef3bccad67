"""Schedules with one stage on each rank: GPipe, 1F1B, PipeDream, inference and local losses."""

from collections.abc import Iterator
from itertools import chain

from parallelism.pipelining.generators.step import Work


def gpipe(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """All forwards, then all backwards, both in the order of the microbatches.

    >>> print(Pipeline(4, 4, "gpipe"))
    gpipe: 4 stages on 4 ranks, 4 microbatches; 14 cycles, 43% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
    rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
    rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    Stage ``i`` runs the forward of microbatch ``k`` in slot ``i + k`` and its backward in slot
    ``microbatches + 2 * stages - 2 - i + k``; it keeps the activations of every microbatch.
    Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2019,
    arXiv:1811.06965 (there the backwards come in the opposite order, which takes as long).
    """
    yield from ((rank, kind, k) for kind in "FB" for k in range(microbatches))


def one_forward_one_backward(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """1F1B: warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    >>> print(Pipeline(4, 4, "1f1b"))
    1f1b: 4 stages on 4 ranks, 4 microbatches; 14 cycles, 43% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    It takes as long as GPipe, but rank ``r`` never keeps more than ``min(stages - r, microbatches)`` microbatches.
    Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021, arXiv:2006.09503
    (PipeDream-Flush); Fan et al., *DAPPLE*, 2021, arXiv:2007.01045.
    """
    ahead = min(stages - rank, microbatches)
    forwards, backwards = ([(rank, kind, k) for k in range(microbatches)] for kind in "FB")
    in_turn = chain.from_iterable(zip(backwards, forwards[ahead:], strict=False))
    return chain(forwards[:ahead], in_turn, backwards[microbatches - ahead :])


def pipedream(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """PipeDream: the order of 1F1B without flushes.  Weights change after every backward; a microbatch keeps its own.

    >>> print(Pipeline(4, 4, "pipedream"))
    pipedream: 4 stages on 4 ranks, 4 microbatches; 14 cycles, 43% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    A backward uses the weights that its forward used (weight stashing).  So a stage keeps a version for each microbatch
    in flight, ``min(stages - r, microbatches)`` on rank ``r``.  In the steady state the gradient that produces version
    ``t + 1`` on rank ``r`` was computed with version ``t - (stages - 1 - r)``.  Here the pipeline fills and drains
    once in each training step; its bubble vanishes with the number of microbatches.
    Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, 2019, section 3.3,
    arXiv:1806.03377.
    """
    yield from one_forward_one_backward(rank, stages, microbatches)


def pipedream_2bw(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """PipeDream-2BW: the order of 1F1B with two versions of the weights; a step uses those before the last update.

    >>> print(Pipeline(4, 4, "pipedream_2bw"))
    pipedream_2bw: 4 stages on 4 ranks, 4 microbatches; 14 cycles, 43% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    ``W(t + 1) = W(t) - lr * gradient(W(t - 1))``, where gradient descent has ``gradient(W(t))``; the first step uses
    ``W(0)``.  The delay is one step for every stage.  So a step need not wait for the flush of the previous one, and
    two versions suffice for a pipeline of any length.  Here every step still fills and drains the pipeline.
    Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021, section 3.1, arXiv:2006.09503.
    """
    yield from one_forward_one_backward(rank, stages, microbatches)


def inference(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """Forwards only; no activations are kept.

    >>> print(Pipeline(4, 4, "inference"))
    inference: 4 stages on 4 ranks, 4 microbatches; 7 cycles, 43% idle
    cycle   0  1  2  3  4  5  6
    rank 0  F0 F1 F2 F3 .  .  .
    rank 1  .  F0 F1 F2 F3 .  .
    rank 2  .  .  F0 F1 F2 F3 .
    rank 3  .  .  .  F0 F1 F2 F3
    """
    yield from ((rank, "F", k) for k in range(microbatches))


def local(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    """Every stage has its own loss: no gradient passes between stages, so each backward follows its forward at once.

    >>> print(Pipeline(4, 4, "local"))
    local: 4 stages on 4 ranks, 4 microbatches; 11 cycles, 27% idle
    cycle   0  1  2  3  4  5  6  7  8  9  10
    rank 0  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
    rank 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    If a forward takes 1 and a backward 2, it takes ``3 microbatches + stages - 1``.  Every rank works without a gap
    and keeps one microbatch.  The result is not the gradient of the whole model.
    Laskin et al., *Parallel Training of Deep Networks with Local Updates*, 2020, arXiv:2012.03837.
    """
    yield from ((rank, kind, k) for k in range(microbatches) for kind in "FB")
