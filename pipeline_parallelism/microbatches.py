"""What the stages of a device work on in one step, by microbatch, and what they have found at the end of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from parallelism.arrays import Array


@dataclass
class Microbatches:
    """A replica's share of a batch.

    ``rows`` has those of each microbatch.  ``inputs`` are there where the first stage lies, ``targets`` where a loss
    does.  ``divisors`` has, by microbatch, the rows that its loss is the mean of, ``batch_rows`` those of all replicas.
    Without ``training`` there are forwards only, and the last stage puts its outputs into ``outputs``.
    """

    rows: Sequence[int]
    inputs: Sequence[Array] | None = None
    targets: Sequence[Array] | None = None
    divisors: Sequence[int] = ()
    batch_rows: int = 0
    training: bool = True
    recompute: Collection[int] = ()
    """Layers of the model whose activations are computed again."""
    accumulate: bool = True
    losses: dict[int, float] = field(default_factory=dict)
    """This replica's part of the loss of the batch, by microbatch; filled by the last stage."""
    outputs: dict[int, Array] = field(default_factory=dict)

    def divisor(self, microbatch: int) -> int:
        """The rows that the loss of a microbatch is the mean of, at least 1."""
        return max(self.divisors[microbatch], 1)

    def found(self, microbatch: int, loss: float) -> None:
        """Takes the last stage's loss of a microbatch, the sum over its rows by `divisor`."""
        divisor = self.divisor(microbatch)
        self.losses[microbatch] = loss if divisor == self.batch_rows else loss * divisor / self.batch_rows

    @property
    def loss(self) -> float | None:
        """Of all microbatches, added up in their order; None where the last stage is not."""
        return sum(self.losses[k] for k in sorted(self.losses)) if self.losses else None


def split_rows(x: Array, parts: int) -> list[Array]:
    """The rows in ``parts`` parts as even as can be, the longer ones first; views, some of them perhaps empty."""
    return np.array_split(x, parts)
