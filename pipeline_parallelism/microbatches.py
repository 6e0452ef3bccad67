"""The data of one step on a device, by microbatch, and the losses and outputs that its stages compute."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from parallelism.arrays import Array


@dataclass
class Microbatches:
    """A replica's share of a batch, cut into microbatches.

    ``rows`` has the number of rows of each microbatch.  ``inputs`` exist on the device with the first stage,
    ``targets`` on devices with a loss.  ``divisors`` has, for each microbatch, the number of rows over which its loss
    is a mean; ``batch_rows`` is the number of rows of all replicas.  Without ``training`` there are only forwards, and
    the last stage writes ``outputs``.
    """

    rows: Sequence[int]
    inputs: Sequence[Array] | None = None
    targets: Sequence[Array] | None = None
    divisors: Sequence[int] = ()
    batch_rows: int = 0
    training: bool = True
    recompute: Collection[int] = ()
    """The layers of the model whose activations are recomputed."""
    accumulate: bool = True
    losses: dict[int, float] = field(default_factory=dict)
    """This replica's part of the loss of the batch, by microbatch.  The last stage fills it."""
    outputs: dict[int, Array] = field(default_factory=dict)

    def divisor(self, microbatch: int) -> int:
        """The number of rows over which the loss of a microbatch is a mean, at least 1."""
        return max(self.divisors[microbatch], 1)

    def add_loss(self, microbatch: int, loss: float) -> None:
        """Note the last stage's loss of a microbatch: the sum over its rows, divided by `divisor`."""
        divisor = self.divisor(microbatch)
        self.losses[microbatch] = loss if divisor == self.batch_rows else loss * divisor / self.batch_rows

    @property
    def loss(self) -> float | None:
        """The loss of all microbatches, summed in their order; None on devices without the last stage."""
        return sum(self.losses[k] for k in sorted(self.losses)) if self.losses else None
